//! Checks what the commands require from the machine, with instructions to install it.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

/// Fails if cargo's `subcommand` is missing. Rust installations can omit some components.
pub fn cargo_component(subcommand: &str, component: &str) -> Result<()> {
    let answer = Command::new(env!("CARGO")).args([subcommand, "--version"]).output();
    if !answer.is_ok_and(|output| output.status.success()) {
        bail!("`cargo {subcommand}` is missing: install it with `rustup component add {component}`");
    }
    Ok(())
}

/// Fails if the file system of `path` has less free space.
pub fn free_disk(path: &Path, gib: u64) -> Result<()> {
    let Ok(stat) = rustix::fs::statvfs(path) else {
        return Ok(());
    };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize) >> 30;
    if free < gib {
        bail!(
            "{gib} GiB of free disk space are required at {}, but only {free} GiB are available: free some space",
            path.display()
        );
    }
    Ok(())
}

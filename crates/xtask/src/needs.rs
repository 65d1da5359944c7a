//! What the commands need from the machine, each with a sentence on how to get it.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

/// Fails if cargo's `subcommand` is missing; these come with Rust but can be left out of an installation.
pub fn cargo_component(subcommand: &str, component: &str) -> Result<()> {
    let answer = Command::new(env!("CARGO")).args([subcommand, "--version"]).output();
    if !answer.is_ok_and(|output| output.status.success()) {
        bail!("`cargo {subcommand}` is missing: get it with `rustup component add {component}`");
    }
    Ok(())
}

/// Fails if the file system of `path` has less free space than this.
pub fn free_disk(path: &Path, gib: u64) -> Result<()> {
    let Ok(stat) = rustix::fs::statvfs(path) else {
        return Ok(());
    };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize) >> 30;
    if free < gib {
        bail!(
            "{gib} GiB of free disk are needed where {} is, and {free} are left: make room",
            path.display()
        );
    }
    Ok(())
}

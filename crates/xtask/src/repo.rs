//! Where things are in the repository, and how our services are built.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};
pub use haulout_e2e::repository as root;
use xtask_launcher::SharedBuild;

use crate::ui;

/// Cargo, in the build directory that clones share. `cargo run` tells us about our own package in variables on which build
/// scripts depend (ring's does): passed on, half of the dependencies would be compiled again each time.
pub fn cargo() -> Command {
    static SHARED: OnceLock<Option<SharedBuild>> = OnceLock::new();
    let mut command = Command::new(env!("CARGO"));
    let shared = SHARED.get_or_init(|| {
        SharedBuild::enter(&root()).unwrap_or_else(|error| {
            ui::warning(&format!("failed to use the shared build directory: {error}"));
            None
        })
    });
    if let Some(shared) = shared {
        shared.apply(&mut command);
    }
    for (key, _) in std::env::vars_os() {
        let ours = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
        if key.to_str().is_some_and(ours) {
            command.env_remove(&key);
        }
    }
    command
}

/// Builds the programs of all services beside this one, in its own profile, where
/// [`haulout_e2e::Service`] looks for them.
pub fn build_services() -> Result<()> {
    let mut command = cargo();
    // Not this one: it would replace itself while it runs.
    command.args([
        "build",
        "--workspace",
        "--exclude",
        "xtask",
        "--exclude",
        "xtask-launcher",
        "--bins",
        "--quiet",
    ]);
    if !cfg!(debug_assertions) {
        command.arg("--release");
    }
    let status = command.current_dir(root()).status().context("running cargo build")?;
    if !status.success() {
        bail!("the services do not compile: see above");
    }
    Ok(())
}

/// Where cargo keeps what it builds on the way.
pub fn build_dir() -> Result<PathBuf> {
    let output = cargo()
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .context("running cargo metadata")?;
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).context("reading what cargo metadata says")?;
    // Cargo before 1.91 keeps everything in its target folder.
    let folder =
        ["build_directory", "target_directory"].iter().find_map(|field| metadata.get(field)?.as_str());
    Ok(folder.context("cargo does not say where it builds")?.into())
}

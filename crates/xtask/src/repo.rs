//! Paths in the repository, and how services are built.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};
pub use haulout_e2e::repository as root;
use xtask_launcher::SharedBuild;

use crate::ui;

/// Cargo, in the build directory that clones share. `cargo run` sets variables about our own package on which build
/// scripts depend, such as ring's. Passing them on would recompile half of the dependencies each time.
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

/// Builds the binaries of all services next to this one, in the same profile, where [`haulout_e2e::Service`] expects
/// them.
pub fn build_services() -> Result<()> {
    let mut command = cargo();
    // This binary is excluded, because it would replace itself while it runs.
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
    let status = command.current_dir(root()).status().context("failed to run cargo build")?;
    if !status.success() {
        bail!("the services do not compile: see above");
    }
    Ok(())
}

/// Cargo's build directory.
pub fn build_dir() -> Result<PathBuf> {
    let output = cargo()
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .context("failed to run cargo metadata")?;
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).context("failed to parse the output of cargo metadata")?;
    // Cargo before 1.91 has only the target directory.
    let folder =
        ["build_directory", "target_directory"].iter().find_map(|field| metadata.get(field)?.as_str());
    Ok(folder.context("cargo metadata has no build directory")?.into())
}

//! Where things are in the repository, and how our services are built.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The root of the repository.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}

/// Cargo, as if it had been called from the command line. `cargo run` tells us about our own package in variables
/// on which build scripts depend (ring's does): passed on, they would have half of the dependencies compiled anew
/// each time somebody calls cargo with and without us.
pub fn cargo() -> Command {
    let mut command = Command::new(env!("CARGO"));
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

//! Tools from crates.io, built once into the same cache, so that everybody uses the same versions.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use super::more::once;

/// A program from crates.io.
pub struct CargoTool {
    package: &'static str,
    program: &'static str,
    version: &'static str,
}

/// Checks dependencies with `deny.toml`.
pub const CARGO_DENY: CargoTool =
    CargoTool { package: "cargo-deny", program: "cargo-deny", version: "0.20.2" };
/// Checks spelling with `typos.toml`.
pub const TYPOS: CargoTool = CargoTool { package: "typos-cli", program: "typos", version: "1.42.3" };

/// Finds a tool in the cache or builds it with this cargo. A build requires crates.io and takes some minutes on 2
/// cores.
pub fn ensure_cargo_tool(tool: &CargoTool, cargo: &mut Command, progress: impl Fn(&str)) -> Result<PathBuf> {
    let CargoTool { package, program, version } = tool;
    let dir = once(package, &format!("{version}-{}", std::env::consts::ARCH), |unfinished| {
        progress(&format!("building {package} {version}, once"));
        // Without optimizations, a check takes a second, and the build takes a third of the time.
        cargo
            .args(["install", "--locked", "--quiet", "--debug", "--version", version, "--root"])
            .arg(unfinished);
        cargo.arg(package).env("CARGO_PROFILE_DEV_DEBUG", "0").stdin(Stdio::null());
        // Its own build folder, because ours has other options.
        cargo.env("CARGO_TARGET_DIR", unfinished.join("build")).env_remove("CARGO_BUILD_BUILD_DIR");
        let status = cargo.status().context("failed to run cargo install")?;
        if !status.success() {
            bail!("`cargo install {package}` failed: see above");
        }
        std::fs::remove_dir_all(unfinished.join("build")).context("failed to remove the build's folder")
    })?;
    Ok(dir.join("bin").join(program))
}

//! Tools from Cargo's registry, built once into the same cache, so that everybody checks with the same versions.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use super::more::once;

/// A program from Cargo's registry.
pub struct CargoTool {
    package: &'static str,
    program: &'static str,
    version: &'static str,
}

/// Checks dependencies by `deny.toml`.
pub const CARGO_DENY: CargoTool =
    CargoTool { package: "cargo-deny", program: "cargo-deny", version: "0.20.2" };
/// Checks spelling by `typos.toml`.
pub const TYPOS: CargoTool = CargoTool { package: "typos-cli", program: "typos", version: "1.42.3" };

/// Finds a tool in the cache or builds it with this cargo. That takes crates.io and, on two processors, some minutes.
pub fn ensure_cargo_tool(tool: &CargoTool, cargo: &mut Command, progress: impl Fn(&str)) -> Result<PathBuf> {
    let CargoTool { package, program, version } = tool;
    let dir = once(package, &format!("{version}-{}", std::env::consts::ARCH), |unfinished| {
        progress(&format!("building {package} {version}, once"));
        // Without optimizations a check takes a second, and the build a third of the time.
        cargo
            .args(["install", "--locked", "--quiet", "--debug", "--version", version, "--root"])
            .arg(unfinished);
        cargo.arg(package).env("CARGO_PROFILE_DEV_DEBUG", "0").stdin(Stdio::null());
        // A build folder of its own: ours has other options.
        cargo.env("CARGO_TARGET_DIR", unfinished.join("build")).env_remove("CARGO_BUILD_BUILD_DIR");
        let status = cargo.status().context("running cargo install")?;
        if !status.success() {
            bail!("`cargo install {package}` failed: see above");
        }
        std::fs::remove_dir_all(unfinished.join("build")).context("removing the build's folder")
    })?;
    Ok(dir.join("bin").join(program))
}

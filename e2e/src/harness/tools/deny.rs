//! cargo-deny, built once into the same cache, so that everybody checks dependencies by the same version.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use super::more::once;

/// The version. Look at what it says of `deny.toml` when you change it.
const VERSION: &str = "0.20.2";

/// Finds it in the cache or builds it with this cargo. That takes crates.io and, on two processors, some minutes.
pub fn ensure_cargo_deny(cargo: &mut Command, progress: impl Fn(&str)) -> Result<PathBuf> {
    let key = format!("{VERSION}-{}", std::env::consts::ARCH);
    let dir = once("cargo-deny", &key, |unfinished| {
        progress(&format!("building cargo-deny {VERSION}, once"));
        // Checks take it a second without optimizations, too, and the build a third of the time.
        cargo
            .args(["install", "--locked", "--quiet", "--debug", "--version", VERSION, "--root"])
            .arg(unfinished);
        cargo.arg("cargo-deny").env("CARGO_PROFILE_DEV_DEBUG", "0").stdin(Stdio::null());
        // A build folder of its own: ours has other options.
        cargo.env("CARGO_TARGET_DIR", unfinished.join("build")).env_remove("CARGO_BUILD_BUILD_DIR");
        let status = cargo.status().context("running cargo install")?;
        if !status.success() {
            bail!("`cargo install cargo-deny` failed: see above");
        }
        std::fs::remove_dir_all(unfinished.join("build")).context("removing the build's folder")
    })?;
    Ok(dir.join("bin/cargo-deny"))
}

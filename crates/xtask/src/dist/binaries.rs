//! Builds the binaries: statically linked, so that their images need no other file, and without paths of this machine.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::for_platform;
use crate::repo;

/// Every binary with the feature `test-clock` contains this path, which shifts its clock.
const SHIFT_CLOCK: &[u8] = b"/shift-clock";

pub fn build(services: &[&str], output: &Path, build_dir: Option<&Path>) -> Result<()> {
    let mut cargo = repo::cargo();
    // Only release packages: cargo unifies the features of all selected packages, and `haulout-e2e` enables a clock
    // that anybody can shift.
    cargo.args(["build", "--locked", "--profile", "dist", "--bins", "--quiet"]);
    cargo.args(["--message-format", "json-render-diagnostics"]);
    // With a target, the flags below apply only to it, and not to build scripts and macros, which cannot be static.
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    cargo.args(["--target", &target]);
    for &service in services {
        cargo.args(["--package", &format!("haulout-{service}")]);
    }
    if let Some(folder) = build_dir {
        cargo.arg("--target-dir").arg(folder).env("CARGO_BUILD_BUILD_DIR", folder);
    }
    cargo.env("CARGO_ENCODED_RUSTFLAGS", flags(build_dir)?);
    cargo.current_dir(repo::root()).stderr(Stdio::inherit());
    let built = cargo.output().context("failed to run cargo build")?;
    if !built.status.success() {
        bail!("the programs do not compile: see above");
    }
    let text = String::from_utf8_lossy(&built.stdout);
    let programs: Vec<PathBuf> = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter_map(|message| Some(message.get("executable")?.as_str()?.into()))
        .collect();
    for &service in services {
        let program = programs.iter().find(|path| path.ends_with(service));
        let program = program.with_context(|| format!("cargo did not build {service}"))?;
        let bytes = fs::read(program).with_context(|| format!("failed to read {}", program.display()))?;
        check(&bytes).with_context(|| format!("{service} cannot be released"))?;
        let to = output.join(for_platform(service, ""));
        fs::copy(program, &to).with_context(|| format!("failed to copy {service} to {}", to.display()))?;
    }
    Ok(())
}

/// Flags for rustc, in cargo's encoding. Paths end up in panic messages, and so in the bytes of a binary.
fn flags(build_dir: Option<&Path>) -> Result<OsString> {
    let home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo")))
        .context("neither CARGO_HOME nor HOME is set")?;
    let build_dir = match build_dir {
        Some(folder) => folder.to_path_buf(),
        None => repo::build_dir()?,
    };
    let mut flags = OsString::from("-Ctarget-feature=+crt-static");
    // The last match applies, and one of these paths may contain another.
    let mut places = [(home, "/cargo"), (repo::root(), "/haulout"), (build_dir, "/build")];
    places.sort_by_key(|(path, _)| path.components().count());
    for (from, to) in places {
        flags.push("\u{1f}--remap-path-prefix=");
        flags.push(from);
        flags.push("=");
        flags.push(to);
    }
    Ok(flags)
}

/// Rejects a binary that needs other files, or whose clock can be shifted.
fn check(program: &[u8]) -> Result<()> {
    if is_dynamic(program).context("it is not a 64-bit ELF file")? {
        bail!("it is linked dynamically, but its image has no libraries");
    }
    if program.windows(SHIFT_CLOCK.len()).any(|window| window == SHIFT_CLOCK) {
        bail!("it has the feature `test-clock`, which lets anybody shift its clock");
    }
    Ok(())
}

/// Whether a binary requires a dynamic loader; `None` if it is not an ELF file.
fn is_dynamic(program: &[u8]) -> Option<bool> {
    const PT_INTERP: u64 = 3;
    let number = |at: usize, bytes: usize| -> Option<u64> {
        let field = program.get(at..at + bytes)?;
        Some(field.iter().rev().fold(0, |sum, byte| (sum << 8) | u64::from(*byte)))
    };
    if program.get(..5)? != b"\x7fELF\x02" {
        return None;
    }
    let (table, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for entry in 0..count {
        if number(usize::try_from(table + entry * size).ok()?, 4)? == PT_INTERP {
            return Some(true);
        }
    }
    Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dynamic_and_non_elf_files_are_rejected() {
        // This test binary is built like everything that is not released.
        let test = fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(check(&test).unwrap_err().to_string().contains("dynamically"));
        assert!(check(b"#!/bin/sh").is_err());
    }

    #[test]
    fn program_with_test_clock_is_rejected() {
        let mut program = vec![0; 64];
        program.splice(..5, *b"\x7fELF\x02");
        check(&program).unwrap();
        program.extend(SHIFT_CLOCK);
        assert!(check(&program).unwrap_err().to_string().contains("test-clock"));
    }
}

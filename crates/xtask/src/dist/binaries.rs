//! Builds the programs: static, so that their images need no other file, and free of paths of this machine.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::for_platform;
use crate::repo;

/// Found in every program with the feature `test-clock`: the path at which its clock is shifted.
const SHIFT_CLOCK: &[u8] = b"/shift-clock";

pub fn build(services: &[&str], output: &Path, build_dir: Option<&Path>) -> Result<()> {
    let mut cargo = repo::cargo();
    // Nothing but what is shipped: the features of these packages are joined, and `haulout-e2e` asks for a clock that
    // anybody can shift.
    cargo.args(["build", "--locked", "--profile", "dist", "--bins", "--quiet"]);
    cargo.args(["--message-format", "json-render-diagnostics"]);
    // With a target the flags below are only for it, and not for build scripts and macros, which cannot be static.
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
    let built = cargo.output().context("running cargo build")?;
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
        let program = program.with_context(|| format!("cargo has built no {service}"))?;
        let bytes = fs::read(program).with_context(|| format!("reading {}", program.display()))?;
        check(&bytes).with_context(|| format!("{service} cannot be shipped"))?;
        let to = output.join(for_platform(service, ""));
        fs::copy(program, &to).with_context(|| format!("copying {service} to {}", to.display()))?;
    }
    Ok(())
}

/// What rustc is told, joined as cargo wants it. Paths go into panic messages, and so into the bytes of a program.
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
    // The last one that fits is taken, and one of these may be inside another.
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

/// Refuses a program that needs files beside it, or whose clock can be shifted.
fn check(program: &[u8]) -> Result<()> {
    if wants_interpreter(program).context("it is no ELF file of 64 bits")? {
        bail!("it is linked dynamically, and its image has no libraries");
    }
    if program.windows(SHIFT_CLOCK.len()).any(|window| window == SHIFT_CLOCK) {
        bail!("it has the feature `test-clock`, with which anybody can shift its clock");
    }
    Ok(())
}

/// Whether a program names a loader of shared libraries; `None` if it is none.
fn wants_interpreter(program: &[u8]) -> Option<bool> {
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
    fn what_is_dynamic_or_no_program_is_refused() {
        // This very test, which is built like everything that is not shipped.
        let test = fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(check(&test).unwrap_err().to_string().contains("dynamically"));
        assert!(check(b"#!/bin/sh").is_err());
    }

    #[test]
    fn a_program_whose_clock_can_be_shifted_is_refused() {
        let mut program = vec![0; 64];
        program.splice(..5, *b"\x7fELF\x02");
        check(&program).unwrap();
        program.extend(SHIFT_CLOCK);
        assert!(check(&program).unwrap_err().to_string().contains("test-clock"));
    }
}

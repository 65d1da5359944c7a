//! The entry point of `cargo xtask`: builds the program `xtask`, which takes minutes on a fresh machine, shows cargo's
//! progress, and then executes it.

use std::env;
use std::error::Error;
use std::io::{BufRead as _, BufReader, IsTerminal as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use xtask_launcher::SharedBuild;

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: cargo xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode, Box<dyn Error>> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let package =
        env::var_os("CARGO_MANIFEST_DIR").ok_or("CARGO_MANIFEST_DIR is not set: run `cargo xtask`")?;
    let root = Path::new(&package).ancestors().nth(2).ok_or("the root of the repository was not found")?;
    let mut build = Command::new(cargo);
    build.args(["build", "--package", "xtask"]).stderr(Stdio::piped());
    let shared = SharedBuild::enter(root).unwrap_or_else(|error| {
        eprintln!("warning: failed to use the shared build directory, building in target: {error}");
        None
    });
    if let Some(shared) = &shared {
        shared.apply(&mut build);
    }
    if std::io::stderr().is_terminal() {
        build.env("CARGO_TERM_COLOR", "always");
    }
    // `cargo run` sets variables about our own package. Build scripts of dependencies that read them would run again.
    for (key, _) in env::vars_os() {
        let ours = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
        if key.to_str().is_some_and(ours) {
            build.env_remove(&key);
        }
    }
    let mut build = build.spawn()?;
    for line in build.stderr.take().into_iter().flat_map(|stderr| BufReader::new(stderr).lines()) {
        let line = line?;
        // If nothing was built, nothing is printed.
        if !line.contains("Finished") {
            eprintln!("{line}");
        }
    }
    let status = build.wait()?;
    if !status.success() {
        return Ok(ExitCode::from(u8::try_from(status.code().unwrap_or(1)).unwrap_or(1)));
    }
    let xtask = env::current_exe()?.with_file_name("xtask");
    let mut xtask = Command::new(&xtask);
    Err(xtask.args(env::args_os().skip(1)).env("HAULOUT_ROOT", root).exec().into())
}

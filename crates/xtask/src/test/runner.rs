//! Runs each test in its own process: every test has a duration, a test that aborts does not affect others, and tests
//! run in parallel.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use haulout_e2e::process;
use haulout_e2e::service::SKIPPED;
use serde_json::Value;

use super::times::Times;
use crate::{repo, ui};

/// A test that runs longer than this is killed, so that the others are still reported.
const TEST_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// Tests that pass are reported if they take at least this long.
const MIN_REPORTED_DURATION: Duration = Duration::from_secs(1);

/// A compiled test binary.
#[derive(Debug)]
pub struct Binary {
    package: String,
    target: String,
    folder: PathBuf,
    executable: PathBuf,
    integration: bool,
}

impl Binary {
    /// Whether these are integration tests of the given package.
    pub fn is_end_to_end(&self, package: &str) -> bool {
        self.integration && self.package == package
    }
}

/// One test in a binary.
#[derive(Debug)]
pub struct Test<'a> {
    binary: &'a Binary,
    name: String,
    /// Marked `#[ignore]`: runs only on demand.
    pub slow: bool,
}

impl Test<'_> {
    fn full_name(&self) -> String {
        format!("{}::{}", self.binary.target, self.name)
    }
}

/// The result of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Passed,
    Failed,
    Skipped,
}

/// The name, result and duration of a test.
#[derive(Debug)]
pub struct Outcome {
    pub name: String,
    pub verdict: Verdict,
    pub took: Duration,
}

impl Outcome {
    pub fn failed(&self) -> bool {
        self.verdict == Verdict::Failed
    }
}

/// Compiles the tests of the packages that `selection` selects.
pub fn build(selection: &[&str]) -> Result<Vec<Binary>> {
    let output = repo::cargo()
        .args(["test", "--no-run", "--quiet", "--message-format", "json-render-diagnostics"])
        .args(selection)
        .current_dir(repo::root())
        .stderr(Stdio::inherit())
        .output()
        .context("failed to run cargo test --no-run")?;
    if !output.status.success() {
        bail!("the tests do not compile: see above");
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let messages = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    Ok(messages.filter_map(|message| binary(&message)).collect())
}

fn binary(message: &Value) -> Option<Binary> {
    let text = |pointer: &str| message.pointer(pointer).and_then(Value::as_str);
    let manifest = PathBuf::from(text("/manifest_path")?);
    if message.pointer("/profile/test") != Some(&Value::Bool(true)) {
        return None;
    }
    // A package ID ends with the package name, as in `path+file:///x#name@0.1.0`. The name is omitted if it equals the
    // folder name.
    let id = text("/package_id")?;
    let after = id.rsplit_once('#').map_or(id, |(_, after)| after);
    let folder = manifest.parent()?.to_path_buf();
    let package = match after.split_once('@') {
        Some((name, _)) => name.to_string(),
        None => folder.file_name()?.to_string_lossy().into_owned(),
    };
    Some(Binary {
        package,
        target: text("/target/name")?.into(),
        executable: text("/executable")?.into(),
        integration: text("/target/kind/0") == Some("test"),
        folder,
    })
}

/// Lists the tests in these binaries whose names contain the filter.
pub fn list<'a>(binaries: &'a [Binary], filter: Option<&str>) -> Result<Vec<Test<'a>>> {
    let mut tests = Vec::new();
    for binary in binaries {
        let names = |extra: &[&str]| -> Result<Vec<String>> {
            let output = Command::new(&binary.executable)
                .args(["--list", "--format", "terse"])
                .args(extra)
                .current_dir(&binary.folder)
                .output()
                .with_context(|| format!("failed to list the tests of {}", binary.target))?;
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(Into::into).collect())
        };
        let slow = names(&["--ignored"])?;
        let wanted = |name: &String| filter.is_none_or(|filter| name.contains(filter));
        tests.extend(names(&[])?.into_iter().filter(wanted).map(|name| {
            let slow = slow.contains(&name);
            Test { binary, name, slow }
        }));
    }
    Ok(tests)
}

/// Runs tests in parallel. The slowest ones start first, because a slow test that starts last would run alone.
pub fn run(
    tests: &[Test],
    at_once: usize,
    times: &Times,
    full: bool,
    env: &[(&str, OsString)],
) -> Vec<Outcome> {
    let mut tests: Vec<_> = tests.iter().collect();
    tests.sort_by_key(|test| std::cmp::Reverse(times.of(&test.full_name())));
    let next = AtomicUsize::new(0);
    let outcomes = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some(test) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let outcome = run_one(test, full, env);
                    outcomes.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(outcome);
                }
            });
        }
    });
    outcomes.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn run_one(test: &Test, full: bool, env: &[(&str, OsString)]) -> Outcome {
    let name = test.full_name();
    let started = Instant::now();
    if test.slow && !full {
        return Outcome { name, verdict: Verdict::Skipped, took: Duration::ZERO };
    }
    let result = execute(test, &name, env);
    let took = started.elapsed();
    match result {
        Ok(TestResult::Skipped(reason)) => {
            ui::warning(&format!("test {name} was skipped: {reason}"));
            Outcome { name, verdict: Verdict::Skipped, took }
        }
        Ok(TestResult::Passed) => {
            if took >= MIN_REPORTED_DURATION {
                ui::note(&format!("    ok {name} ({})", ui::duration(took)));
            }
            Outcome { name, verdict: Verdict::Passed, took }
        }
        Ok(TestResult::Failed(output)) => {
            ui::error(&format!("test {name} failed after {}:\n{output}", ui::duration(took)));
            Outcome { name, verdict: Verdict::Failed, took }
        }
        Err(error) => {
            ui::error(&format!("failed to run test {name}: {error:#}"));
            Outcome { name, verdict: Verdict::Failed, took }
        }
    }
}

/// The result of a test process.
enum TestResult {
    Passed,
    /// Skipped on this machine, with the reason.
    Skipped(String),
    /// Failed, with its output.
    Failed(String),
}

fn execute(test: &Test, name: &str, env: &[(&str, OsString)]) -> Result<TestResult> {
    let folder = tempfile::tempdir().context("failed to create a folder for the output")?;
    let log = folder.path().join("output");
    let mut command = process::Command::new(&test.binary.executable)
        .args([&test.name, "--exact", "--include-ignored", "--nocapture"])
        .current_dir(&test.binary.folder)
        // Cargo sets both. Our own values would not match the folder.
        .env("CARGO_MANIFEST_DIR", &test.binary.folder)
        .env("CARGO_PKG_NAME", &test.binary.package)
        .env("INSTA_WORKSPACE_ROOT", repo::root())
        .env("INSTA_UPDATE", "no")
        .log(&log);
    for (key, value) in env {
        command = command.env(key, value);
    }
    let process = command.spawn(name)?;
    let status = process.wait_timeout(TEST_TIMEOUT);
    let read =
        || fs::read_to_string(&log).unwrap_or_else(|error| format!("(failed to read its output: {error})"));
    match status {
        Some(status) if status.success() => {
            let output = read();
            let reason = output.lines().find_map(|line| Some(line.split_once(SKIPPED)?.1));
            Ok(reason.map_or(TestResult::Passed, |reason| TestResult::Skipped(reason.to_owned())))
        }
        Some(status) => Ok(TestResult::Failed(format!("{}\n{status}", read().trim_end()))),
        None => {
            process.kill()?;
            Ok(TestResult::Failed(format!("{}\ntimed out and was killed", read().trim_end())))
        }
    }
}

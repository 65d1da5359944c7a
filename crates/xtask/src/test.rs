//! `cargo xtask test` and `e2e`: run all checks and tests, with the duration of each test and a summary.

mod runner;
mod times;
#[cfg(test)]
mod words;

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use haulout_e2e::service::XTASK_ENV;
use haulout_e2e::{Cluster, Handle, Kubernetes, Tools, real_node, tools};
use tokio::runtime::Runtime;

use self::runner::{Binary, Outcome, Verdict};
use self::times::Times;
use crate::ui::{self, Step};
use crate::{dist, generate, needs, repo};

/// The package with the end-to-end tests.
const E2E_PACKAGE: &str = "haulout-e2e";

#[derive(clap::Args)]
pub struct Args {
    /// Also runs slow tests that rarely fail: the tests marked `#[ignore]`, and the end-to-end tests on the oldest
    /// supported version of Kubernetes
    #[arg(long)]
    full: bool,
}

#[derive(clap::Args)]
pub struct E2eArgs {
    /// Only tests whose names contain this
    filter: Option<String>,
    /// Also runs the slow tests, those marked `#[ignore]`
    #[arg(long)]
    full: bool,
    /// Kubernetes version to run the tests on, such as 1.33. It is built once
    #[arg(long, value_name = "VERSION", value_parser = Kubernetes::find)]
    kubernetes: Option<Kubernetes>,
}

/// How tests marked `#[ignore]` are handled.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Slow {
    Run,
    Skip,
    /// Not reported as skipped, because they ran in another step.
    Omit,
}

impl Slow {
    fn new(full: bool) -> Self {
        if full { Self::Run } else { Self::Skip }
    }
}

/// The tests of one step.
struct Tests<'a> {
    /// The name of the step.
    name: &'a str,
    binaries: &'a [Binary],
    /// If set, only tests whose names contain this text run.
    filter: Option<&'a str>,
    slow: Slow,
    /// Suffix of the names of the step and its tests, such as the version of Kubernetes.
    suffix: String,
}

impl<'a> Tests<'a> {
    fn new(name: &'a str, binaries: &'a [Binary], slow: Slow) -> Self {
        Self { name, binaries, filter: None, slow, suffix: String::new() }
    }

    /// The end-to-end tests on the control plane of these tools. The name has the version if it is not the main one.
    fn end_to_end(binaries: &'a [Binary], slow: Slow, tools: &Tools) -> Self {
        let mut tests = Self::new("end-to-end tests", binaries, slow);
        if !tools.is_main_version() {
            tests.suffix = format!(" on Kubernetes {}", tools.kubernetes_version);
        }
        tests
    }
}

/// Results of all steps and tests, for the summary.
#[derive(Default)]
struct Report {
    steps: Vec<(String, bool, Duration)>,
    outcomes: Vec<Outcome>,
    /// Checks that did not run, although the steps passed.
    not_checked: Vec<String>,
}

pub fn run(args: &Args) -> Result<()> {
    needs::cargo_component("fmt", "rustfmt")?;
    needs::cargo_component("clippy", "clippy")?;
    needs::free_disk(&repo::root(), 10)?;
    let mut report = Report::default();
    report.step("format", || cargo(&["fmt", "--all", "--check"], &[]));
    report.step("generated files", generate::check);
    report.step("lints", || {
        let settings = clippy_settings()?;
        let arguments = ["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"];
        cargo(&arguments, &[("CLIPPY_CONF_DIR", &settings)])
    });
    report.step("docs", || {
        // In the build directory, so that a fresh clone does not build them again.
        let output = repo::build_dir()?.join("documentation").display().to_string();
        let arguments = ["doc", "--workspace", "--no-deps", "--quiet", "--target-dir", &output];
        cargo(&arguments, &[("RUSTDOCFLAGS", "-D warnings")])
    });
    for (name, check) in [("dependencies", deny as fn() -> _), ("spelling", spelling)] {
        let not_checked = report.step(name, check);
        report.not_checked.extend(not_checked.into_iter().flatten());
    }
    let services = report.step("build the services", repo::build_services);
    let built = report.step("build the tests", || runner::build(&["--workspace"]));
    let control_plane = report
        .step("build the control plane", || Ok((tools::ensure(ui::note)?, tools::ensure_more(ui::note)?)));
    if let Some((_, more)) = &control_plane {
        report.step("workflows", || workflows(more));
    }
    let mut oldest = None;
    if args.full {
        oldest = report.step("build the oldest control plane", || {
            tools::ensure_version(&Kubernetes::oldest()?, ui::note)
        });
    }
    if args.full && real_node::missing().is_none() {
        // Otherwise the tests would build them and seem to hang.
        report.step("build the programs of real nodes", || tools::ensure_node(ui::note));
        report.step("build the release binaries", dist::prepare);
    }
    if let (Some(binaries), Some(()), Some((tools, _))) = (built, services, control_plane) {
        let (e2e, unit): (Vec<_>, Vec<_>) = binaries.into_iter().partition(|b| b.is_end_to_end(E2E_PACKAGE));
        let slow = Slow::new(args.full);
        report.tests(&Tests::new("unit tests", &unit, slow), |_| Ok(None));
        report.step("documentation tests", || cargo(&["test", "--workspace", "--doc", "--quiet"], &[]));
        let tests = Tests::end_to_end(&e2e, slow, &tools);
        report.tests(&tests, |runtime| shared_cluster(runtime, tools));
        if let Some(tools) = oldest {
            let tests = Tests::end_to_end(&e2e, Slow::Omit, &tools);
            report.tests(&tests, |runtime| shared_cluster(runtime, tools));
        }
    }
    report.finish()
}

pub fn run_e2e(args: &E2eArgs) -> Result<()> {
    let mut report = Report::default();
    let tools = match &args.kubernetes {
        Some(version) => tools::ensure_version(version, ui::note)?,
        None => tools::ensure(ui::note)?,
    };
    tools::ensure_more(ui::note)?;
    repo::build_services()?;
    // Selects all packages, so that dependencies have the same features as in `test`.
    let binaries = runner::build(&["--workspace", "--test", "e2e"])?;
    let e2e: Vec<_> = binaries.into_iter().filter(|b| b.is_end_to_end(E2E_PACKAGE)).collect();
    let tests = Tests::end_to_end(&e2e, Slow::new(args.full), &tools);
    let tests = Tests { filter: args.filter.as_deref(), ..tests };
    report.tests(&tests, |runtime| shared_cluster(runtime, tools));
    report.finish()
}

/// Boots the cluster that the tests share, with these tools, and installs the chart.
fn shared_cluster(runtime: &Runtime, tools: Tools) -> Result<Option<Cluster>> {
    let step = Step::begin("boot the shared cluster");
    let cluster = runtime.block_on(async {
        let cluster = Cluster::builder().name("shared").tools(tools).audit(true).boot().await?;
        cluster.install_chart(&[]).await?;
        anyhow::Ok(cluster)
    });
    step.end(cluster.is_ok(), "");
    cluster.map(Some)
}

impl Report {
    /// Runs one step. If it fails, the failure is recorded and the next step runs.
    fn step<T>(&mut self, name: &str, work: impl FnOnce() -> Result<T>) -> Option<T> {
        let step = Step::begin(name);
        let result = work();
        if let Err(error) = &result {
            ui::error(&format!("{error:#}"));
        }
        let took = step.end(result.is_ok(), "");
        self.steps.push((name.into(), result.is_ok(), took));
        result.ok()
    }

    /// Runs these tests as one step. The step fails if a test fails.
    fn tests(&mut self, tests: &Tests, cluster: impl FnOnce(&Runtime) -> Result<Option<Cluster>>) {
        let mut outcomes = Vec::new();
        self.step(&format!("{}{}", tests.name, tests.suffix), || {
            outcomes = run_tests(tests, cluster)?;
            match outcomes.iter().filter(|outcome| outcome.failed()).count() {
                0 => Ok(()),
                failed => bail!("{failed} of {} tests failed", outcomes.len()),
            }
        });
        for outcome in &mut outcomes {
            outcome.name.push_str(&tests.suffix);
        }
        self.outcomes.append(&mut outcomes);
    }

    fn finish(mut self) -> Result<()> {
        self.outcomes.sort_by_key(|outcome| std::cmp::Reverse(outcome.took));
        ui::result(&self.summary());
        let bad: Vec<_> =
            self.steps.iter().filter(|(_, good, _)| !good).map(|(name, ..)| name.as_str()).collect();
        if !bad.is_empty() {
            bail!("failed steps: {}", bad.join(", "));
        }
        Ok(())
    }

    /// The summary at the end of the output.
    fn summary(&self) -> String {
        let mut lines = vec!["\nslowest tests".to_owned()];
        let line = |took: Duration, name: &str| format!("  {:>12}  {name}", ui::duration(took));
        lines.extend(self.outcomes.iter().take(20).map(|outcome| line(outcome.took, &outcome.name)));
        lines.push("\nsteps".into());
        let verdict = |good| if good { "" } else { "  FAILED" };
        lines.extend(self.steps.iter().map(|(name, good, took)| line(*took, name) + verdict(*good)));
        let failed = self.outcomes.iter().filter(|outcome| outcome.failed());
        lines.extend(failed.map(|outcome| format!("failed: {}", outcome.name)));
        lines.extend(self.not_checked.iter().map(|what| format!("NOT CHECKED: {what}")));
        let count = |verdict| self.outcomes.iter().filter(|outcome| outcome.verdict == verdict).count();
        let (passed, failed, skipped) =
            (count(Verdict::Passed), count(Verdict::Failed), count(Verdict::Skipped));
        let unchecked = match self.not_checked.len() {
            0 => String::new(),
            some => format!(", {some} not checked"),
        };
        lines.push(format!("\n{passed} passed, {failed} failed, {skipped} skipped{unchecked}"));
        lines.join("\n")
    }
}

/// Runs tests, each in its own process, with the cluster that they share.
fn run_tests(
    tests: &Tests,
    cluster: impl FnOnce(&Runtime) -> Result<Option<Cluster>>,
) -> Result<Vec<Outcome>> {
    let (filter, slow) = (tests.filter, tests.slow);
    let mut tests = runner::list(tests.binaries, filter)?;
    if let ([], Some(filter)) = (tests.as_slice(), filter) {
        bail!("no test name contains {filter:?}");
    }
    tests.retain(|test| slow != Slow::Omit || !test.slow);
    let full = slow == Slow::Run;
    let mut times = Times::read();
    let processors = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    if tests.iter().all(|test| test.slow && !full) {
        return Ok(runner::run(&tests, processors, &times, full, &[]));
    }
    let runtime = Runtime::new().context("failed to start the async runtime")?;
    let cluster = cluster(&runtime)?;
    let mut env = vec![(XTASK_ENV, std::env::current_exe()?.into_os_string())];
    if let Some(cluster) = &cluster {
        env.push((Handle::ENV, cluster.description().into_os_string()));
        // For the clusters that tests boot themselves.
        env.push((Kubernetes::ENV, cluster.tools.kubernetes_version.clone().into()));
    }
    // With a cluster, a test spends a quarter of its time waiting.
    let at_once = if cluster.is_some() { processors + 1 } else { processors };
    let outcomes = runner::run(&tests, at_once, &times, full, &env);
    times.record(&outcomes);
    if let Err(error) = times.write() {
        ui::warning(&format!("{error:#}"));
    }
    if let Some(cluster) = cluster {
        if outcomes.iter().any(Outcome::failed) {
            cluster.keep_logs();
        }
        runtime.block_on(cluster.shutdown());
    }
    Ok(outcomes)
}

fn cargo(args: &[&str], env: &[(&str, &str)]) -> Result<()> {
    let mut command = repo::cargo();
    let status = command.args(args).envs(env.iter().copied()).current_dir(repo::root()).status();
    let status = status.with_context(|| format!("failed to run cargo {}", args.join(" ")))?;
    if !status.success() {
        bail!("cargo {} failed: see above", args.join(" "));
    }
    Ok(())
}

/// A folder with a copy of `clippy.toml`, named by its content. Cargo lints again if the folder changes, but not if the file of
/// the clone that was linted last differs from ours.
fn clippy_settings() -> Result<String> {
    let settings = std::fs::read(repo::root().join("clippy.toml")).context("failed to read clippy.toml")?;
    let mut hasher = DefaultHasher::new();
    settings.hash(&mut hasher);
    let folder = repo::build_dir()?.join(format!("clippy-{:016x}", hasher.finish()));
    std::fs::create_dir_all(&folder)?;
    let copy = folder.join("clippy.toml");
    // Cargo lints again if the file is newer.
    if !copy.exists() {
        std::fs::write(copy, settings)?;
    }
    Ok(folder.display().to_string())
}

/// Checks the GitHub workflows with actionlint, which finds them itself.
fn workflows(tools: &tools::MoreTools) -> Result<()> {
    let mut command = std::process::Command::new(tools.path("actionlint"));
    // These programs are not on every machine, so results would differ.
    let status = command.args(["-shellcheck=", "-pyflakes="]).current_dir(repo::root()).status();
    if !status.context("failed to run actionlint")?.success() {
        bail!("the workflows in .github have errors: see above");
    }
    Ok(())
}

const ADVISORIES: &str = "security advisories for dependencies: the advisory database is only downloaded in the \
                          GitHub workflow";

/// Checks licences, bans and sources of all dependencies with cargo-deny. Returns what could not be checked.
fn deny() -> Result<Vec<String>> {
    let mut not_checked = Vec::new();
    let mut args = vec!["--log-level", "error", "check", "bans", "licenses", "sources"];
    if in_workflow() {
        args.push("advisories");
    } else {
        not_checked.push(ADVISORIES.into());
    }
    let missing = check_with(&tools::CARGO_DENY, &args, "licences, bans and sources of dependencies")?;
    not_checked.extend(missing);
    Ok(warned(not_checked))
}

/// Checks the spelling of names, comments and documentation with typos. Returns what could not be checked.
fn spelling() -> Result<Vec<String>> {
    let missing = check_with(&tools::TYPOS, &["--config", "typos.toml"], "spelling")?;
    Ok(warned(missing.into_iter().collect()))
}

fn in_workflow() -> bool {
    std::env::var_os("GITHUB_ACTIONS").is_some()
}

/// Runs a tool in the repository. If the tool cannot be built, returns what it would have checked: without network, all
/// other checks still run. In the workflow, this is an error.
fn check_with(tool: &tools::CargoTool, args: &[&str], what: &str) -> Result<Option<String>> {
    let program = match tools::ensure_cargo_tool(tool, &mut repo::cargo(), ui::note) {
        Ok(program) => program,
        Err(error) if !in_workflow() => return Ok(Some(format!("{what}: {error:#}"))),
        Err(error) => return Err(error),
    };
    let status = std::process::Command::new(&program).args(args).current_dir(repo::root()).status();
    if !status.with_context(|| format!("failed to run {}", program.display()))?.success() {
        bail!("{what}: see above");
    }
    Ok(None)
}

fn warned(not_checked: Vec<String>) -> Vec<String> {
    for what in &not_checked {
        ui::warning(&format!("not checked: {what}"));
    }
    not_checked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_ends_with_unchecked_items() {
        let mut report = Report::default();
        report.steps.push(("dependencies".into(), true, Duration::ZERO));
        assert!(report.summary().ends_with("\n0 passed, 0 failed, 0 skipped"), "{}", report.summary());
        report.not_checked = vec!["licences".into(), "advisories".into()];
        let summary = report.summary();
        assert!(summary.contains("\nNOT CHECKED: licences\nNOT CHECKED: advisories\n"), "{summary}");
        assert!(summary.ends_with("\n0 passed, 0 failed, 0 skipped, 2 not checked"), "{summary}");
    }
}

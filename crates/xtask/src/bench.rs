//! `cargo xtask bench`: measures Haulout and the upstream equivalent, as a table or JSON.

use anyhow::{Context, Result, bail};
use haulout_e2e::bench::BENCHMARKS;
use haulout_e2e::tools;
use serde_json::json;

use crate::{repo, ui};

#[derive(clap::Args)]
pub struct Args {
    /// Benchmark to run; without it, they are listed
    name: Option<String>,
    /// Prints one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let Some(name) = &args.name else {
        for benchmark in BENCHMARKS {
            ui::result(&format!("{:<12} {}", benchmark.name, benchmark.about));
        }
        return Ok(());
    };
    let Some(benchmark) = BENCHMARKS.iter().find(|benchmark| benchmark.name == name) else {
        bail!("unknown benchmark {name}; `cargo xtask bench` lists all benchmarks");
    };
    if cfg!(debug_assertions) {
        return in_release(args.json, name);
    }
    tools::ensure(ui::note)?;
    repo::build_services()?;
    let runtime = tokio::runtime::Runtime::new().context("failed to start the async runtime")?;
    let results = runtime.block_on((benchmark.run)(ui::note))?;
    if args.json {
        let results: serde_json::Map<_, _> =
            results.iter().map(|(name, value)| ((*name).into(), json!(value))).collect();
        ui::result(&json!({"bench": name, "results": results}).to_string());
    } else {
        let width = results.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
        for (name, value) in &results {
            ui::result(&format!("{name:<width$}  {value:>12.3}"));
        }
    }
    Ok(())
}

/// Runs the benchmark in an optimised build.
fn in_release(json: bool, name: &str) -> Result<()> {
    ui::note("building with optimisations");
    let status = repo::cargo()
        .args(["run", "--quiet", "--release", "--package", "xtask", "--", "bench", name])
        .args(json.then_some("--json"))
        .current_dir(repo::root())
        .status()
        .context("failed to run cargo")?;
    if !status.success() {
        bail!("the benchmark failed: see above");
    }
    Ok(())
}

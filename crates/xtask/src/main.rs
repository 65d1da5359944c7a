//! Haulout's development commands. Each command checks its requirements and says how to install them. Code that boots a
//! cluster is in the `haulout-e2e` library.

mod bench;
mod chart_readme;
mod demo;
mod dist;
mod generate;
mod needs;
mod repo;
mod soak;
mod test;
mod ui;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Haulout's development commands.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "Examples:
  cargo xtask demo                   watch Haulout drain a node in a real control plane
  cargo xtask test                   what CI runs for each change
  cargo xtask e2e rejected           the end-to-end tests whose names contain \"rejected\"
  cargo xtask e2e --kubernetes 1.33  the end-to-end tests on another version of Kubernetes
  cargo xtask bench baseline --json  one benchmark, as JSON
  cargo xtask dist                   binaries, images and chart of a release, in target/distribution";

#[derive(Subcommand)]
enum Command {
    /// Boots a cluster with Haulout, drains a node, and keeps the cluster running for you to explore
    Demo(demo::Args),
    /// Runs every check: format, lints, docs, generated files, unit and end-to-end tests
    Test(test::Args),
    /// Runs the end-to-end tests whose names contain FILTER
    E2e(test::E2eArgs),
    /// Measures Haulout and the upstream equivalent; without NAME, lists the benchmarks
    Bench(bench::Args),
    /// Runs long fault-injection campaigns; without NAME, all of them
    Soak(soak::Args),
    /// Generates the CRDs, webhook configurations and the chart's README
    Generate(generate::Args),
    /// Builds a release: binaries, images, chart, bills of materials (SBOMs), checksums
    Dist(dist::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Demo(args) => return exit_code(demo::run(&args)),
        Command::Test(args) => test::run(&args),
        Command::E2e(args) => test::run_e2e(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Soak(args) => soak::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Dist(args) => dist::run(&args),
    };
    exit_code(result.map(|()| ExitCode::SUCCESS))
}

fn exit_code(result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        ui::error(&format!("{error:#}"));
        ExitCode::FAILURE
    })
}

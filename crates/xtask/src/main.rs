//! Haulout's development commands. Each checks for what it needs and says how to get it; everything
//! that boots a cluster is in the `haulout-e2e` library.

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
  cargo xtask demo                   a node is emptied before your eyes, in a real control plane
  cargo xtask test                   everything that CI checks
  cargo xtask e2e refused            the end-to-end tests whose names contain \"refused\"
  cargo xtask e2e --kubernetes 1.33  the end-to-end tests on another version of Kubernetes
  cargo xtask bench baseline --json  one benchmark, for machines
  cargo xtask dist                   programs, images and chart of a release, in target/distribution";

#[derive(Subcommand)]
enum Command {
    /// Boots a cluster with Haulout, empties a node before your eyes, and stays for you to explore
    Demo(demo::Args),
    /// Runs every check: format, lints, docs, generated files, unit and end-to-end tests
    Test(test::Args),
    /// Runs the end-to-end tests whose names contain FILTER
    E2e(test::E2eArgs),
    /// Measures ours and its peer side by side; without NAME, lists the benchmarks
    Bench(bench::Args),
    /// Runs the long fault campaigns; without NAME, all of them
    Soak(soak::Args),
    /// Writes the files that are generated from the Rust types
    Generate(generate::Args),
    /// Builds what a release is made of: programs, images, chart, bills of materials, checksums
    Dist(dist::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Demo(args) => return ended(demo::run(&args)),
        Command::Test(args) => test::run(&args),
        Command::E2e(args) => test::run_e2e(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Soak(args) => soak::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Dist(args) => dist::run(&args),
    };
    ended(result.map(|()| ExitCode::SUCCESS))
}

fn ended(result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        ui::error(&format!("{error:#}"));
        ExitCode::FAILURE
    })
}

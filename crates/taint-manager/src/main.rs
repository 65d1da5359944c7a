//! The taint manager's program.

use std::process::ExitCode;

use clap::Parser as _;
use haulout_taint_manager::service::{Args, run};

fn main() -> ExitCode {
    run(Args::parse())
}

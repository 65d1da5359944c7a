//! The evacuation controller's program.

use std::process::ExitCode;

use clap::Parser as _;
use haulout_evacuation_controller::Args;

fn main() -> ExitCode {
    haulout_evacuation_controller::run(Args::parse())
}

//! The maintenance controller's program.

use std::process::ExitCode;

use clap::Parser as _;
use haulout_maintenance_controller::Args;

fn main() -> ExitCode {
    haulout_maintenance_controller::run(Args::parse())
}

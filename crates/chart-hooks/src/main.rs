//! Commands that the chart runs as Helm hooks: `check` verifies an installation, `cleanup` cleans up on uninstall, and
//! `withdraw` withdraws what services that are switched off would have undone.

mod check;
mod cleanup;
mod evacuations;
mod moved_pods;
mod withdraw;

use std::process::ExitCode;

use clap::Parser as _;
use haulout_api_types::{DrainRule, Evacuation, NodeMaintenance};
use haulout_service_runtime::access::{Kind, Permission};
use haulout_service_runtime::service::{self, CommonArgs, Service};

/// Hooks of Haulout's Helm chart: verify, clean up, withdraw
#[derive(Debug, clap::Parser)]
#[command(version)]
struct Args {
    /// The arguments of every service.
    #[command(flatten)]
    common: CommonArgs,

    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, clap::Subcommand)]
enum Task {
    /// Verify an installation; the chart runs this on `helm test`
    Check(check::Args),
    /// Restore nodes and remove finalizers and Evacuations; the chart runs this on uninstall
    Cleanup(cleanup::Args),
    /// Undo what services requested or changed; the chart runs this when they are switched off
    Withdraw(withdraw::Args),
}

fn main() -> ExitCode {
    let Args { common, task } = Args::parse();
    match task {
        Task::Check(args) => {
            let kinds =
                vec![Kind::of::<NodeMaintenance>(), Kind::of::<DrainRule>(), Kind::of::<Evacuation>()];
            let service = Service { kinds, ..hook("check", args.permissions()) };
            service::run(service, common, |context| check::run(args, context))
        }
        Task::Cleanup(args) => {
            let service = hook("cleanup", args.permissions());
            service::run(service, common, |context| cleanup::run(args, context))
        }
        Task::Withdraw(args) => {
            let service = hook("withdraw", args.permissions());
            service::run(service, common, |context| withdraw::run(args, context))
        }
    }
}

fn hook(name: &'static str, permissions: Vec<Permission>) -> Service {
    Service { name, version: env!("CARGO_PKG_VERSION"), kinds: Vec::new(), permissions }
}

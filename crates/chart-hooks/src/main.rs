//! What the chart runs once, as hooks of Helm: `check` says whether an installation works, `cleanup` ends an
//! installation, and `withdraw` ends one of its services.

mod check;
mod cleanup;
mod evacuations;
mod withdraw;

use std::process::ExitCode;

use clap::Parser as _;
use haulout_api_types::{DrainRule, Evacuation, NodeMaintenance};
use haulout_service_runtime::access::{Kind, Permission};
use haulout_service_runtime::service::{self, CommonArgs, Service};

/// Does once what an installation of Haulout as a whole needs; the chart runs it as hooks
#[derive(Debug, clap::Parser)]
#[command(version)]
struct Args {
    /// What every service has.
    #[command(flatten)]
    common: CommonArgs,

    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, clap::Subcommand)]
enum Task {
    /// To see whether it works.
    Check(check::Args),
    /// At its end.
    Cleanup(cleanup::Args),
    /// At the end of one of its services.
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
            let service = hook("withdraw", withdraw::Args::permissions());
            service::run(service, common, |context| withdraw::run(args, context))
        }
    }
}

fn hook(name: &'static str, permissions: Vec<Permission>) -> Service {
    Service { name, version: env!("CARGO_PKG_VERSION"), kinds: Vec::new(), permissions }
}

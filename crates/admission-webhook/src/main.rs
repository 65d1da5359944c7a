//! The admission webhook's program.

use std::process::ExitCode;

use clap::Parser as _;
use haulout_admission_webhook::admit::PERMISSIONS;
use haulout_admission_webhook::service::{Args, run};
use haulout_api_types::{DrainRule, Evacuation, NodeMaintenance};
use haulout_service_runtime::access::Kind;
use haulout_service_runtime::service::{self, Service};

fn main() -> ExitCode {
    let args = Args::parse();
    let service = Service {
        name: "admission-webhook",
        version: env!("CARGO_PKG_VERSION"),
        kinds: vec![Kind::of::<Evacuation>(), Kind::of::<NodeMaintenance>(), Kind::of::<DrainRule>()],
        permissions: [PERMISSIONS, &args.certificates.permissions()].concat(),
    };
    let common = args.common.clone();
    service::run(service, common, |context| run(args, context))
}

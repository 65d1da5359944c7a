//! The certificate manager: issues and renews the certificate of the admission webhook, and writes its CA into the
//! webhook configurations. It is a separate service, so that the program that parses requests of others can neither
//! write Secrets nor change which requests the API server sends to it.
//!
//! | question | module |
//! |---|---|
//! | what is the next step? | `decide` |
//! | who executes it? | `reconcile` |
//! | what is in the Secret? | `secret` |
//! | how is a certificate issued? | `issue` |
//! | which configurations trust it? | `configurations` |

mod args;
mod configurations;
mod decide;
#[cfg(test)]
mod fuzz;
mod issue;
mod metrics;
mod reconcile;
mod secret;

use std::process::ExitCode;

use clap::Parser as _;
use haulout_service_runtime::access::{self, Permission};
use haulout_service_runtime::lease::InvalidTiming;
use haulout_service_runtime::service::{self, Context, LeaderContext, Service};
use haulout_service_runtime::term::Term;

use crate::args::Args;
use crate::metrics::Metrics;
use crate::reconcile::Manager;

fn permissions(args: &Args) -> Vec<Permission> {
    let mut needed = access::election("certificate-manager");
    let verbs: &[_] = if args.ca_bundle_only { &["list", "watch"] } else { &["list", "watch", "update"] };
    let secret = |verb: &&'static str| Permission::own(verb, "", "secrets").on(&args.certificate_secret);
    needed.extend(verbs.iter().map(secret));
    for (resource, names) in args.configurations() {
        for name in names {
            let on = |verb| Permission::cluster(verb, "admissionregistration.k8s.io", resource).on(name);
            needed.extend(["list", "watch", "patch"].map(on));
        }
    }
    needed
}

fn main() -> ExitCode {
    let args = Args::parse();
    let service = Service {
        name: "certificate-manager",
        version: env!("CARGO_PKG_VERSION"),
        kinds: Vec::new(),
        permissions: permissions(&args),
    };
    let common = args.common.clone();
    service::run(service, common, |context| run(args, context))
}

async fn run(args: Args, context: Context) -> Result<(), InvalidTiming> {
    let metrics = Metrics::new(&context.metrics);
    context
        .run_elected(args.election.timing(), |leading| lead(&args, &context, metrics.clone(), leading))
        .await
}

/// Runs one term as leader. Each term starts with empty caches.
async fn lead(args: &Args, context: &Context, metrics: Metrics, leading: LeaderContext) {
    let mut term = Term::new(context);
    let mut manager = Manager::start(args, context, &leading.clients, metrics, &mut term);
    if !term.synced().await {
        return;
    }
    term.run(manager.run()).await;
}

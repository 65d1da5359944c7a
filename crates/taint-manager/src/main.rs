//! The taint manager (KEP-3902): makes pods leave nodes with `NoExecute` taints. Who must leave, when and how is
//! decided by plain code over plain data, with `now` as an argument; the rest is thin.
//!
//! | question | module |
//! |---|---|
//! | which kinds are watched? | `watch` |
//! | what is known of nodes, namespaces and Evacuations, and which pods does an event concern? | `state` |
//! | were watches interrupted, and how many pods may leave in a second? | `state::watch_gap`, `state::rate_limit` |
//! | which taints does a node have, and since when? | `taint` |
//! | how does a pod leave because of one? | `policy` |
//! | what happens to a pod, and why? | `decide` |
//! | does another controller do the same? | `decide::conflict` |
//! | how is it done? | `reconcile`, `api` |
//! | what do people see? | `events`, `metrics` |

mod api;
mod args;
mod decide;
mod events;
mod metrics;
mod policy;
mod reconcile;
mod state;
mod taint;
#[cfg(test)]
mod testing;
mod watch;

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser as _;
use haulout_api_types::{Evacuation, names};
use haulout_service_runtime::access::{self, Kind, Permission};
use haulout_service_runtime::service::{self, Context, Leading, Service};
use haulout_service_runtime::term::Term;
use haulout_service_runtime::watch::{self as watches, Source};
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::{Event, Namespace};
use kube::core::PartialObjectMeta;
use parking_lot::Mutex;
use tracing::{info, warn};

use crate::args::Args;
use crate::decide::conflict::field_selector;
use crate::metrics::Metrics;
use crate::policy::{Policy, file};
use crate::reconcile::Controller;
use crate::state::State;

fn permissions() -> Vec<Permission> {
    let watched = [
        watches::permissions("", "nodes"),
        watches::permissions("", "namespaces"),
        watches::permissions("", "pods"),
        watches::permissions("", "events"),
        watches::permissions(names::EVACUATION_GROUP, "evacuations"),
    ];
    let written = [
        Permission::cluster("patch", "", "nodes"),
        Permission::cluster("get", "", "pods"),
        Permission::cluster("delete", "", "pods"),
        Permission::cluster("patch", "", "pods/status"),
        Permission::cluster("create", "", "pods/eviction"),
        Permission::cluster("get", names::EVACUATION_GROUP, "evacuations"),
        Permission::cluster("create", names::EVACUATION_GROUP, "evacuations"),
        Permission::cluster("patch", names::EVACUATION_GROUP, "evacuations"),
    ];
    [watched.as_flattened(), &written, access::EVENTS, &access::election("taint-manager")].concat()
}

fn main() -> ExitCode {
    let args = Args::parse();
    let service = Service {
        name: "taint-manager",
        version: env!("CARGO_PKG_VERSION"),
        kinds: vec![Kind::of::<Evacuation>()],
        permissions: permissions(),
    };
    let common = args.common.clone();
    service::run(service, common, |context| run(args, context))
}

async fn run(args: Args, context: Context) -> Result<(), String> {
    // What is wrong at the start is refused; what goes wrong later leaves the last good one in force.
    let last = Mutex::new(file::read(args.policy.as_deref())?);
    let metrics = Metrics::new(&context.metrics);
    let lead = |leading| {
        let read = file::read(args.policy.as_deref());
        metrics.policy_refused(read.is_err());
        let mut last = last.lock();
        match read {
            Ok(read) => *last = read,
            Err(problem) => warn!(problem, "an earlier policy stays in force"),
        }
        lead(&args, &context, metrics.clone(), last.clone(), leading)
    };
    context.lead(args.election.timing(), lead).await.map_err(|error| error.to_string())
}

/// One term of leadership. It begins with empty caches.
async fn lead(
    args: &Args,
    context: &Context,
    metrics: Metrics,
    (policy, text): (Policy, String),
    leading: Leading,
) {
    let settle = SignedDuration::from_secs(args.settle_seconds.into());
    let state = State::new(policy, settle, args.max_per_second);
    let controller = Arc::new(Controller::new(context, leading.clients, metrics, state, args.dry_run));
    controller.metrics.show(&controller.state);
    let mut term = Term::new(context);
    term.watch(Source::<watch::Node>::all("nodes"), &controller);
    term.watch(Source::<PartialObjectMeta<Namespace>>::all("namespaces").metadata_only(), &controller);
    term.watch(Source::<PartialObjectMeta<Evacuation>>::all("evacuations").metadata_only(), &controller);
    term.watch(Source::<Event>::all("events").fields(&field_selector()), &controller);
    term.subscribe(&controller.pods, &controller);
    if let Some(path) = &args.policy {
        term.spawn(file::follow(Arc::clone(&controller), path.clone(), text));
    }
    info!(dry_run = args.dry_run, "watching nodes and pods");
    let workers = args.common.max_requests;
    let pods = controller.queue.run(workers, context.stop.clone(), |key| Arc::clone(&controller).handle(key));
    let nodes = controller.nodes.run(4, context.stop.clone(), |node| Arc::clone(&controller).annotate(node));
    // No pod has to leave before all watches have synced: until then there is a gap.
    term.run(async { ((), ()) = tokio::join!(pods, nodes) }).await;
}

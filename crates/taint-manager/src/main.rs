//! The taint manager (KEP-3902). It removes pods from nodes with `NoExecute` taints. Pure functions decide which pods
//! have to leave, when and how; `now` is a parameter.
//!
//! | question | module |
//! |---|---|
//! | which kinds are watched? | `watch` |
//! | where are nodes, namespaces and Evacuations stored, and which pods does an event affect? | `state` |
//! | were watches interrupted, and how many pods may leave per second? | `state::watch_gap`, `state::rate_limit` |
//! | which taints does a node have, and since when? | `taint` |
//! | which action applies to a pod because of a taint? | `policy` |
//! | what happens to a pod, and why? | `decide` |
//! | does another controller act on the same taints? | `decide::conflict` |
//! | who executes the decision? | `reconcile`, `api` |
//! | what is reported to users? | `events`, `metrics` |

mod api;
mod args;
mod decide;
mod events;
#[cfg(test)]
mod fuzz;
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
use haulout_service_runtime::service::{self, Context, LeaderContext, Service};
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
use crate::policy::file;
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
    // An invalid policy is fatal at the start. Later, the last valid policy stays in effect.
    let last = Mutex::new(file::read(args.policy.as_deref())?);
    let metrics = Metrics::new(&context.metrics);
    let lead = |leading| {
        let mut last = last.lock();
        match file::read(args.policy.as_deref()) {
            Ok(read) => *last = read,
            Err(problem) => {
                warn!(problem, "policy rejected, keeping the previous policy");
                last.rejected = true;
            }
        }
        lead(&args, &context, metrics.clone(), last.clone(), leading)
    };
    context.run_elected(args.election.timing(), lead).await.map_err(|error| error.to_string())
}

/// Runs one term as leader. Each term starts with empty caches.
async fn lead(
    args: &Args,
    context: &Context,
    metrics: Metrics,
    file::Loaded { policy, text, rejected }: file::Loaded,
    leading: LeaderContext,
) {
    let grace = SignedDuration::from_secs(args.watch_gap_grace_seconds.into());
    let mut state = State::new(policy, grace, args.max_per_second);
    state.policy_rejected = rejected;
    let controller = Arc::new(Controller::new(
        context,
        leading.clients,
        metrics,
        state,
        args.evacuators.served(),
        args.dry_run,
    ));
    controller.metrics.export_gauges(&controller.state);
    let mut term = Term::new(context);
    term.watch(Source::<watch::Node>::all("nodes"), &controller);
    term.watch(Source::<PartialObjectMeta<Namespace>>::all("namespaces").metadata_only(), &controller);
    term.watch(Source::<PartialObjectMeta<Evacuation>>::all("evacuations").metadata_only(), &controller);
    term.watch(Source::<Event>::all("events").fields(&field_selector()), &controller);
    term.subscribe(&controller.pods, &controller);
    if let Some(path) = &args.policy {
        term.spawn(file::reload_on_change(Arc::clone(&controller), path.clone(), text));
    }
    info!(dry_run = args.dry_run, "starting watches");
    let workers = args.common.max_requests;
    let pods = controller.queue.run(workers, context.stop.clone(), |key| Arc::clone(&controller).handle(key));
    let nodes = controller.nodes.run(4, context.stop.clone(), |node| Arc::clone(&controller).annotate(node));
    // No pod is removed before all watches have synced: until then there is a watch gap.
    term.run(async { ((), ()) = tokio::join!(pods, nodes) }).await;
}

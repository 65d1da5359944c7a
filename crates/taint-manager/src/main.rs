//! The taint manager (KEP-3902): makes pods leave nodes with `NoExecute` taints. Who must leave, when and how is
//! decided by plain code over plain data, with `now` as an argument; the rest is thin.
//!
//! | question | module |
//! |---|---|
//! | which taints does a node have, and since when? | `taint` |
//! | for how long does a pod tolerate one? | `toleration` |
//! | how does a pod leave because of it? | `policy` |
//! | has what we see been the present for long enough to act on it? | `sight` |
//! | so what happens to this pod? | `decide` |
//! | whom does an event concern? | `index` |
//! | may it be done now? | `state::rate_limit` |
//! | all of that together: what is the next step for this pod? | `state` |
//! | does another controller do the same? | `decide::conflict` |
//! | what are people told? | `events`, `metrics` |
//! | how is it done? | `watch`, `policy_file`, `reconcile`, `api` |

mod api;
mod args;
mod decide;
mod events;
mod index;
mod metrics;
mod policy;
mod policy_file;
mod reconcile;
mod sight;
mod state;
mod taint;
#[cfg(test)]
mod testing;
mod toleration;
mod watch;

use std::collections::{BTreeSet, HashMap};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use clap::Parser as _;
use haulout_api_types::{Evacuation, names};
use haulout_service_runtime::access::{self, Kind, Permission};
use haulout_service_runtime::metrics::QueueMetrics;
use haulout_service_runtime::service::{self, Context, Leading, Service};
use haulout_service_runtime::term::Term;
use haulout_service_runtime::watch::{self as watches, Source};
use haulout_service_runtime::workers::WorkQueue;
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::{Event, Namespace, ObjectReference};
use kube::core::PartialObjectMeta;
use tracing::{info, warn};

use crate::args::Args;
use crate::decide::conflict::field_selector;
use crate::index::Key;
use crate::metrics::Metrics;
use crate::policy::Policy;
use crate::reconcile::{BACKOFF, Controller, lock};
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
    let policy = Mutex::new(read_policy(&args)?);
    let metrics = Metrics::new(&context.metrics);
    let (pods, nodes) = (context.metrics.queue("pods"), context.metrics.queue("nodes"));
    let timing = args.election.timing();
    let lead = |leading| {
        let read =
            read_policy(&args).inspect_err(|problem| warn!(problem, "an earlier policy stays in force"));
        metrics.policy_refused(read.is_err());
        let policy = {
            let mut last = lock(&policy);
            *last = read.unwrap_or_else(|_| last.clone());
            last.clone()
        };
        lead(&args, &context, &metrics, policy, (pods.clone(), nodes.clone()), leading)
    };
    context.lead(timing, lead).await.map_err(|error| error.to_string())
}

/// The policy in force, and the text that it was read from.
fn read_policy(args: &Args) -> Result<(Policy, String), String> {
    let Some(path) = &args.policy else { return Ok((Policy::default(), String::new())) };
    let at = |problem: String| format!("the policy {}: {problem}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| at(error.to_string()))?;
    let policy = Policy::from_yaml(&text).map_err(|error| at(error.to_string()))?;
    Ok((policy, text))
}

/// One term of leadership. It begins with empty caches.
async fn lead(
    args: &Args,
    context: &Context,
    metrics: &Metrics,
    (policy, text): (Policy, String),
    (pods, nodes): (QueueMetrics, QueueMetrics),
    leading: Leading,
) {
    let settle = SignedDuration::from_secs(args.settle_seconds.into());
    let state = Arc::new(Mutex::new(State::new(policy, settle, args.max_per_second)));
    metrics.show(&state);
    let controller = Arc::new(Controller {
        clients: leading.clients,
        clock: context.clock.clone(),
        events: context.events.clone(),
        metrics: metrics.clone(),
        state,
        pods: context.pod_cache(),
        queue: WorkQueue::fair(context.clock.clone(), BACKOFF, pods, Key::lane, |key| Some(key.namespace)),
        nodes: WorkQueue::new(context.clock.clone(), BACKOFF, nodes),
        wanted: Mutex::new(HashMap::new()),
        synced: Mutex::new(BTreeSet::new()),
        started: context.clock.now(),
        rivals: Mutex::new(BTreeSet::new()),
        dry_run: args.dry_run,
        own: ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            namespace: Some(context.namespace.clone()),
            name: Some(context.instance.clone()),
            ..ObjectReference::default()
        },
    });
    let mut term = Term::new(context);
    term.watch(Source::<watch::Node>::all("nodes"), &controller);
    term.watch(Source::<PartialObjectMeta<Namespace>>::all("namespaces").metadata_only(), &controller);
    term.watch(Source::<PartialObjectMeta<Evacuation>>::all("evacuations").metadata_only(), &controller);
    term.watch(Source::<Event>::all("events").fields(&field_selector()), &controller);
    term.subscribe(&controller.pods, &controller);
    if let Some(path) = &args.policy {
        term.spawn(policy_file::follow(Arc::clone(&controller), path.clone(), text));
    }
    info!(dry_run = args.dry_run, "watching nodes and pods");
    let workers = args.common.max_requests;
    let pods = controller.queue.run(workers, context.stop.clone(), |key| Arc::clone(&controller).handle(key));
    let nodes = controller.nodes.run(4, context.stop.clone(), |node| Arc::clone(&controller).annotate(node));
    // Nobody has to leave before all watches have synced: the state sees a gap until then.
    term.run(async { ((), ()) = tokio::join!(pods, nodes) }).await;
}

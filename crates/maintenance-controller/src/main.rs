//! The maintenance controller (KEP-4212): takes nodes out of service and back, as far as each NodeMaintenance says.
//!
//! The decisions are plain code over plain data, with no client, no clock and no async:
//!
//! | question | module |
//! |---|---|
//! | which pods leave now, who waits for whom, how far is it? | the crate `drain-planner` |
//! | what is changed on a node, and put back afterwards? | the same, `cordon` |
//! | when does a stage begin, and when is a maintenance done? | `stage` |
//! | what does the status say? | `status`, `bounded` |
//! | when may an object be written again that was refused, undone or written just before? | `writes` |
//! | does an evacuation controller lead? | `leader` |
//!
//! Around them is what watches and writes:
//!
//! | question | module |
//! |---|---|
//! | which kinds are watched? | `watch` |
//! | what is read and kept of the objects? | `seen`, `state` |
//! | how is it done? | `reconcile`, `api` |
//! | what do people see? | `status`, `events`, `metrics` |

mod api;
mod args;
mod bounded;
mod events;
mod leader;
mod metrics;
mod reconcile;
mod seen;
mod stage;
mod state;
mod status;
#[cfg(test)]
mod testing;
mod watch;
mod writes;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser as _;
use haulout_api_types::{DrainRule, Evacuation, NodeMaintenance, names};
use haulout_drain_planner::plan::Served;
use haulout_service_runtime::access::{self, Kind, Permission};
use haulout_service_runtime::api::Writer;
use haulout_service_runtime::lease::InvalidTiming;
use haulout_service_runtime::queue::Backoff;
use haulout_service_runtime::service::{self, Context, Leading, Service};
use haulout_service_runtime::term::Term;
use haulout_service_runtime::watch::{self as watches, Source};
use haulout_service_runtime::workers::WorkQueue;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::core::PartialObjectMeta;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::args::Args;
use crate::metrics::Metrics;
use crate::reconcile::Controller;
use crate::seen::{SlimEvacuation, SlimNode};
use crate::state::{State, Work};
use crate::watch::EvacuationController;

fn permissions() -> Vec<Permission> {
    let watched = [
        watches::permissions(names::NODE_MAINTENANCE_GROUP, "nodemaintenances"),
        watches::permissions(names::NODE_MAINTENANCE_GROUP, "drainrules"),
        watches::permissions(names::EVACUATION_GROUP, "evacuations"),
        watches::permissions("", "nodes"),
        watches::permissions("", "namespaces"),
        watches::permissions("", "pods"),
        watches::permissions("storage.k8s.io", "volumeattachments"),
    ];
    let written = [
        Permission::cluster("patch", names::NODE_MAINTENANCE_GROUP, "nodemaintenances"),
        Permission::cluster("delete", names::NODE_MAINTENANCE_GROUP, "nodemaintenances"),
        Permission::cluster("patch", names::NODE_MAINTENANCE_GROUP, "nodemaintenances/status"),
        Permission::cluster("create", names::EVACUATION_GROUP, "evacuations"),
        Permission::cluster("patch", names::EVACUATION_GROUP, "evacuations"),
        Permission::cluster("patch", "", "nodes"),
        Permission::cluster("patch", "", "nodes/status"),
        Permission::cluster("get", "", "persistentvolumeclaims"),
        Permission::cluster("get", "", "persistentvolumes"),
    ];
    [watched.as_flattened(), &written, access::EVENTS, &access::election("maintenance-controller")].concat()
}

/// A write that failed is tried again at least this often: nobody tells when a webhook of others lets it through.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), most: Duration::from_secs(60) };

fn main() -> ExitCode {
    let args = Args::parse();
    let mut permissions = permissions();
    if args.follow_evacuation_controller {
        let lease = access::lease_name("evacuation-controller");
        let on = |verb| Permission::own(verb, "coordination.k8s.io", "leases").on(&lease);
        permissions.extend(["list", "watch"].map(on));
    }
    let service = Service {
        name: "maintenance-controller",
        version: env!("CARGO_PKG_VERSION"),
        kinds: vec![Kind::of::<NodeMaintenance>(), Kind::of::<DrainRule>(), Kind::of::<Evacuation>()],
        permissions,
    };
    let common = args.common.clone();
    service::run(service, common, |context| run(args, context))
}

async fn run(args: Args, context: Context) -> Result<(), InvalidTiming> {
    let metrics = Metrics::new(&context.metrics);
    context.lead(args.election.timing(), |leading| lead(&args, &context, metrics.clone(), leading)).await
}

/// One term of leadership. It begins with empty caches.
async fn lead(args: &Args, context: &Context, metrics: Metrics, leading: Leading) {
    let queue_metrics = context.metrics.queue("maintenance");
    let queue = WorkQueue::fair(context.clock.clone(), BACKOFF, queue_metrics, Work::lane, Work::group);
    let served = Served::new(args.pod_types.iter().copied());
    let state = Arc::new(Mutex::new(State::new(served, context.clock.now())));
    metrics.show(&state);
    let controller = Arc::new(Controller {
        writer: Writer::new(leading.clients.direct.clone(), api::MANAGER),
        clients: leading.clients,
        clock: context.clock.clone(),
        events: context.events.clone(),
        state,
        metrics,
        pods: context.pod_cache(),
        protect: args.hold_autoscalers,
        queue: queue.clone(),
        behind: Notify::new(),
    });
    let mut term = Term::new(context);
    term.watch(Source::<SlimNode>::all("nodes"), &controller);
    term.watch(Source::<NodeMaintenance>::all("nodemaintenances"), &controller);
    term.watch(Source::<DrainRule>::all("drainrules"), &controller);
    term.watch(Source::<SlimEvacuation>::all("evacuations"), &controller);
    term.watch(Source::<VolumeAttachment>::all("volumeattachments"), &controller);
    term.watch(Source::<PartialObjectMeta<Namespace>>::all("namespaces").metadata_only(), &controller);
    term.watch(watch::own_pods(&context.namespace), &controller);
    if args.follow_evacuation_controller {
        let leader = EvacuationController::new(Arc::clone(&controller), &context.namespace);
        term.watch(leader.source(&context.namespace), &leader);
        term.spawn(leader.follow());
    }
    if !term.synced().await {
        return;
    }
    // All pods before the first plan is made: what is not in the cache counts as gone.
    term.subscribe(&controller.pods, &controller);
    if !term.synced().await {
        return;
    }
    term.spawn(Arc::clone(&controller).settle());
    let workers = args.common.max_requests;
    term.run(queue.run(workers, context.stop.clone(), |work| Arc::clone(&controller).handle(work))).await;
}

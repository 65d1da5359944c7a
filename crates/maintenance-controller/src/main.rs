//! The maintenance controller (KEP-4212) cordons nodes, drains them and returns them to service, as requested by
//! NodeMaintenances.
//!
//! Decisions are synchronous code without a client or a clock:
//!
//! | question | module |
//! |---|---|
//! | which pods leave now, which maintenance waits for which? | the crate `drain-planner` |
//! | what is changed on a node, and restored afterwards? | the same crate, module `cordon` |
//! | when does a stage start, and when is a maintenance done? | `stage` |
//! | what is in the status? | `status` |
//! | when may an object be written again after a rejected, reverted or recent write? | `writes` |
//! | is there a leader of the evacuation controller? | [`haulout_service_runtime::lease::absence`] |
//!
//! The other modules watch and write:
//!
//! | question | module |
//! |---|---|
//! | which kinds are watched? | `watch` |
//! | what is stored about the objects? | `observed`, `state` |
//! | how are decisions carried out? | `reconcile`, `api` |
//! | what is reported to users? | `status`, `events`, `metrics` |

mod api;
mod args;
mod events;
mod metrics;
mod observed;
mod reconcile;
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
use haulout_drain_planner::plan::ServedPodTypes;
use haulout_service_runtime::access::{self, Kind, Permission};
use haulout_service_runtime::api::Writer;
use haulout_service_runtime::lease::{InvalidTiming, absence};
use haulout_service_runtime::queue::Backoff;
use haulout_service_runtime::service::{self, Context, LeaderContext, Service};
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
use crate::observed::{SlimEvacuation, SlimNode};
use crate::reconcile::Controller;
use crate::state::{State, Work};

/// The service whose leader is observed.
const EVACUATION_CONTROLLER: &str = "evacuation-controller";

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

/// A failed write is retried at least once per minute, because the controller is not notified when a webhook or policy that
/// rejected it changes.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), max: Duration::from_secs(60) };

fn main() -> ExitCode {
    let args = Args::parse();
    let mut permissions = permissions();
    if args.evacuation_controller_enabled {
        permissions.extend(absence::permissions(EVACUATION_CONTROLLER));
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
    context
        .run_elected(args.election.timing(), |leading| lead(&args, &context, metrics.clone(), leading))
        .await
}

/// One term of leadership. It starts with empty caches.
async fn lead(args: &Args, context: &Context, metrics: Metrics, leading: LeaderContext) {
    let queue_metrics = context.metrics.queue("maintenance");
    let queue = WorkQueue::fair(context.clock.clone(), BACKOFF, queue_metrics, Work::lane, Work::group);
    let served = ServedPodTypes::new(args.pod_types.iter().copied());
    let state = Arc::new(Mutex::new(State::new(served, context.clock.now())));
    metrics.set_state(&state);
    let controller = Arc::new(Controller {
        writer: Writer::new(leading.clients.direct.clone(), api::MANAGER),
        clients: leading.clients,
        clock: context.clock.clone(),
        events: context.events.clone(),
        state,
        metrics,
        pods: context.pod_cache(),
        hold_autoscalers: args.hold_autoscalers,
        served: args.evacuators.served(),
        queue: queue.clone(),
        plan_changed: Notify::new(),
    });
    let mut term = Term::new(context);
    term.watch(Source::<SlimNode>::all("nodes"), &controller);
    term.watch(Source::<NodeMaintenance>::all("nodemaintenances"), &controller);
    term.watch(Source::<DrainRule>::all("drainrules"), &controller);
    term.watch(Source::<SlimEvacuation>::all("evacuations"), &controller);
    term.watch(Source::<VolumeAttachment>::all("volumeattachments"), &controller);
    term.watch(Source::<PartialObjectMeta<Namespace>>::all("namespaces").metadata_only(), &controller);
    term.watch(watch::own_pods(&context.namespace), &controller);
    if args.evacuation_controller_enabled {
        let controller = Arc::clone(&controller);
        absence::observe(&mut term, context, EVACUATION_CONTROLLER, move |since| {
            controller.update(|state| state.apply_evacuation_controller(since));
        });
    }
    if !term.synced().await {
        return;
    }
    // The pod cache has to be complete before the first plan: a pod that is not in the cache counts as gone.
    term.subscribe(&controller.pods, &controller);
    if !term.synced().await {
        return;
    }
    term.spawn(Arc::clone(&controller).converge());
    let workers = args.common.max_requests;
    term.run(queue.run(workers, context.stop.clone(), |work| Arc::clone(&controller).handle(work))).await;
}

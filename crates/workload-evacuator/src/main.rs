//! The workload evacuator: replaces pods of Deployments before they are evicted (KEP-4563, "Follow-up Design Details for
//! Kubernetes Workloads"). It neither deletes nor evicts pods: it reports when a pod can go, and the evacuation
//! controller evicts it.
//!
//! | question | module |
//! |---|---|
//! | which kinds are watched? | `watch` |
//! | which of their fields are kept? | `objects` |
//! | where are they stored, and what has to be reconciled? | `state` |
//! | what is done for the pods of a Deployment? | `decide` |
//! | in which order are pods replaced, and which are not? | `decide/queue` |
//! | what keeps a replacement from starting? | `decide/obstacle` |
//! | how is a pod moved to its Deployment, and back? | [`haulout_api_types::former_owner`] |
//! | who executes it? | `reconcile`, `api` |
//! | what is reported to users? | `status`, `events`, `metrics` |

mod api;
mod args;
mod decide;
mod events;
mod metrics;
mod objects;
mod reconcile;
mod state;
mod status;
#[cfg(test)]
mod testing;
mod watch;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser as _;
use haulout_api_types::{Evacuation, names};
use haulout_service_runtime::access::{self, Kind, Permission};
use haulout_service_runtime::lease::InvalidTiming;
use haulout_service_runtime::queue::Backoff;
use haulout_service_runtime::service::{self, Context, LeaderContext, Service};
use haulout_service_runtime::term::Term;
use haulout_service_runtime::watch::{self as watches, Source};
use haulout_service_runtime::workers::WorkQueue;
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::Namespace;
use kube::core::PartialObjectMeta;
use parking_lot::Mutex;

use crate::api::Api;
use crate::args::Args;
use crate::metrics::Metrics;
use crate::objects::{SlimDeployment, SlimPod, SlimReplicaSet};
use crate::reconcile::Controller;
use crate::state::State;

fn permissions() -> Vec<Permission> {
    let watched = [
        watches::permissions(names::EVACUATION_GROUP, "evacuations"),
        watches::permissions("", "pods"),
        watches::permissions("", "namespaces"),
        watches::permissions("apps", "deployments"),
        watches::permissions("apps", "replicasets"),
    ];
    let other = [
        Permission::cluster("create", names::EVACUATION_GROUP, "evacuations"),
        Permission::cluster("patch", names::EVACUATION_GROUP, "evacuations"),
        Permission::cluster("patch", names::EVACUATION_GROUP, "evacuations/status"),
        Permission::cluster("get", "", "pods"),
        Permission::cluster("patch", "", "pods"),
        Permission::cluster("get", "", "persistentvolumeclaims"),
        // Not used by requests: OwnerReferencesPermissionEnforcement requires them for changes of owner references.
        Permission::cluster("delete", "", "pods"),
        Permission::cluster("update", "apps", "replicasets/finalizers"),
    ];
    let report =
        Permission::cluster("report", names::EVACUATION_GROUP, "evacuators").on(names::class::DEPLOYMENT);
    let election = access::election("workload-evacuator");
    [watched.as_flattened(), &other, &[report], access::EVENTS, &election].concat()
}

/// The retry delays of a Deployment after a failed request.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(100), max: Duration::from_secs(60) };

fn main() -> ExitCode {
    let args = Args::parse();
    let service = Service {
        name: "workload-evacuator",
        version: env!("CARGO_PKG_VERSION"),
        kinds: vec![Kind::of::<Evacuation>()],
        permissions: permissions(),
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
    let queue = WorkQueue::new(context.clock.clone(), BACKOFF, context.metrics.queue("deployments"));
    let state: Arc<Mutex<State>> = Arc::default();
    metrics.export_gauges(&state);
    let controller = Arc::new(Controller {
        api: Api::new(leading.clients.direct),
        clock: context.clock.clone(),
        events: context.events.clone(),
        state,
        metrics,
        queue: queue.clone(),
        wait_for_room: SignedDuration::from_secs(args.wait_for_room_seconds.into()),
    });
    let mut term = Term::new(context);
    term.watch(Source::<Evacuation>::all("evacuations"), &controller);
    term.watch(Source::<SlimPod>::all("pods"), &controller);
    term.watch(Source::<SlimReplicaSet>::all("replicasets"), &controller);
    term.watch(Source::<SlimDeployment>::all("deployments"), &controller);
    term.watch(Source::<PartialObjectMeta<Namespace>>::all("namespaces").metadata_only(), &controller);
    if !term.synced().await {
        return;
    }
    let workers = args.common.max_requests;
    term.run(queue.run(workers, context.stop.clone(), |work| Arc::clone(&controller).handle(work))).await;
}

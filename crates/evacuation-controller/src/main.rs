//! The evacuation controller (KEP-4563). It activates the evacuators of each pod one after the other, evicts the pod
//! after the last one through the Eviction API, which enforces PodDisruptionBudgets, and deletes finished Evacuations.
//!
//! | question | module |
//! |---|---|
//! | which kinds are watched? | `watch` |
//! | where are Evacuations, pods and budgets stored? | `state`, `record`, `budget` |
//! | what is the next action for an Evacuation, and when? | `decide`, `backoff` |
//! | what does a response of the Eviction API mean? | [`haulout_service_runtime::eviction`] |
//! | who executes the action? | `reconcile` |
//! | what is reported to users? | `status`, `events`, `metrics` |

mod args;
mod backoff;
mod budget;
mod decide;
mod events;
#[cfg(test)]
mod fuzz;
mod metrics;
mod reconcile;
mod record;
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
use haulout_service_runtime::api::Writer;
use haulout_service_runtime::lease::{InvalidTiming, absence};
use haulout_service_runtime::queue::Backoff;
use haulout_service_runtime::service::{self, Context, LeaderContext, Service};
use haulout_service_runtime::term::Term;
use haulout_service_runtime::watch::{self as watches, Source};
use haulout_service_runtime::workers::WorkQueue;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use parking_lot::Mutex;

use crate::args::Args;
use crate::metrics::Metrics;
use crate::reconcile::{Controller, MANAGER};
use crate::state::{Queued, State};

fn permissions() -> Vec<Permission> {
    let watched = [
        watches::permissions(names::EVACUATION_GROUP, "evacuations"),
        watches::permissions("", "pods"),
        watches::permissions("policy", "poddisruptionbudgets"),
    ];
    let written = [
        Permission::cluster("patch", names::EVACUATION_GROUP, "evacuations"),
        Permission::cluster("delete", names::EVACUATION_GROUP, "evacuations"),
        Permission::cluster("patch", names::EVACUATION_GROUP, "evacuations/status"),
        Permission::cluster("get", "", "pods"),
        Permission::cluster("create", "", "pods/eviction"),
    ];
    [watched.as_flattened(), &written, access::EVENTS, &access::election("evacuation-controller")].concat()
}

/// The retry delays of an Evacuation after a failed step. One minute is short enough if a policy rejects our writes for
/// a while, and long enough if it rejects thousands of them permanently.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), max: Duration::from_secs(60) };

fn main() -> ExitCode {
    let args = Args::parse();
    let leases = args.evacuators.services().flat_map(|(_, service)| absence::permissions(service));
    let service = Service {
        name: "evacuation-controller",
        version: env!("CARGO_PKG_VERSION"),
        kinds: vec![Kind::of::<Evacuation>()],
        permissions: permissions().into_iter().chain(leases).collect(),
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
    let queue = WorkQueue::fair(
        context.clock.clone(),
        BACKOFF,
        context.metrics.queue("evacuations"),
        |_| 0,
        |queued: &Queued| Some(queued.namespace),
    );
    let pods = context.pod_cache();
    let state: Arc<Mutex<State>> = Arc::default();
    let _gauges = metrics.export_gauges(&state, context.clock.clone());
    let controller = Arc::new(Controller {
        writer: Writer::new(leading.clients.direct.clone(), MANAGER),
        clients: leading.clients,
        clock: context.clock.clone(),
        events: context.events.clone(),
        state,
        metrics,
        pods,
        queue: queue.clone(),
        resumed: Mutex::new(context.clock.now()),
    });
    let mut term = Term::new(context);
    term.watch(Source::<Evacuation>::all("evacuations"), &controller);
    term.watch(Source::<PodDisruptionBudget>::all("poddisruptionbudgets"), &controller);
    term.subscribe(&controller.pods, &controller);
    for (class, service) in args.evacuators.services() {
        let controller = Arc::clone(&controller);
        absence::observe(&mut term, context, service, move |since| controller.service_observed(class, since));
    }
    if !term.synced().await {
        return;
    }
    controller.resumed();
    let workers = args.common.max_requests;
    term.run(queue.run(workers, context.stop.clone(), |key| Arc::clone(&controller).handle(key))).await;
}

//! The maintenance controller (KEP-4212): takes nodes out of service and back, as far as each NodeMaintenance says.
//!
//! The decisions are plain code over plain data, with no client, no clock and no async:
//!
//! | question | module |
//! |---|---|
//! | what has to be known about pods, nodes and maintenances? | [`facts`] |
//! | in which steps does a maintenance drain? | [`plan`] |
//! | which pods leave now, who waits for whom, how far is it? | [`planner`] |
//! | what does a node announce of its drain targets? | [`announce`] |
//! | what is changed on a node, and put back afterwards? | [`cordon`] |
//! | can a pod of Haulout itself run elsewhere? | [`placement`] |
//! | how long to wait before something is done again that is undone each time? | [`pause`] |
//! | when does a stage begin, and when is a maintenance done? | [`stage`] |
//! | what does the status say, and when is it written? | [`status`], [`throttle`], [`bounded`] |
//! | what cannot be written, and when is that tried again? | [`refusals`] |
//! | does an evacuation controller lead? | [`leader`] |
//!
//! Around them is what watches and writes:
//!
//! | question | module |
//! |---|---|
//! | what is read and kept of the objects? | [`seen`], [`index`] |
//! | how is it done? | [`controller`], `act`, `watch` |
//! | what do people see? | [`news`], [`metrics`] |
//! | does the installation work, and how does it end? | [`check`], [`cleanup`] |

mod act;
pub mod announce;
pub mod bounded;
pub mod check;
pub mod cleanup;
pub mod controller;
pub mod cordon;
pub mod facts;
pub mod index;
pub mod leader;
pub mod metrics;
pub mod news;
pub mod pause;
pub mod placement;
pub mod plan;
pub mod planner;
pub mod refusals;
pub mod seen;
pub mod stage;
pub mod status;
#[cfg(test)]
mod testing;
pub mod throttle;
mod watch;

use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use haulout_api_types::node_maintenance::PodType;
use haulout_api_types::{DrainRule, Evacuation, NodeMaintenance, names};
use haulout_service_runtime::access::{self, Kind, Permission};
use haulout_service_runtime::lease::InvalidTiming;
use haulout_service_runtime::queue::Backoff;
use haulout_service_runtime::service::{self, CommonArgs, Context, ElectionArgs, Leading, Service};
use haulout_service_runtime::term::Term;
use haulout_service_runtime::watch::{self as watches, Source};
use haulout_service_runtime::workers::WorkQueue;
use k8s_openapi::api::core::v1::Namespace;
use kube::core::PartialObjectMeta;
use tokio::sync::Notify;

use crate::controller::Controller;
use crate::index::{Index, Work};
use crate::metrics::Metrics;
use crate::plan::Served;
use crate::seen::{SlimAttachment, SlimEvacuation, SlimNode};
use crate::watch::EvacuationController;

/// Cordons and drains nodes and puts them back into service, as NodeMaintenances say.
#[derive(Clone, Debug, clap::Parser)]
#[command(version)]
pub struct Args {
    /// What every service has.
    #[command(flatten)]
    pub common: CommonArgs,

    /// How its leader is elected.
    #[command(flatten)]
    pub election: ElectionArgs,

    /// The pod types that somebody evacuates here: Default, DaemonSet, Static. Pods of others are left alone
    #[arg(long, env = "HAULOUT_POD_TYPES", value_delimiter = ',', default_value = "Default", value_parser = parse_pod_type)]
    pub pod_types: Vec<PodType>,

    /// Whether cluster-autoscaler and Karpenter are kept from removing nodes under maintenance
    #[arg(long, env = "HAULOUT_HOLD_AUTOSCALERS", default_value_t = true, action = clap::ArgAction::Set)]
    pub hold_autoscalers: bool,

    /// Whether the evacuation controller belongs to this installation, so that its absence is reported
    #[arg(long, env = "HAULOUT_FOLLOW_EVACUATION_CONTROLLER", default_value_t = true, action = clap::ArgAction::Set)]
    pub follow_evacuation_controller: bool,

    /// Something else to do, once, for the whole installation.
    #[command(subcommand)]
    pub task: Option<Task>,
}

/// What is done once, with the same image, for an installation as a whole.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum Task {
    /// At its end.
    Cleanup(cleanup::Args),
    /// At the end of one of its services.
    Withdraw(cleanup::withdraw::Args),
    /// To see whether it works.
    Check(check::Args),
}

fn parse_pod_type(text: &str) -> Result<PodType, String> {
    let found = PodType::ALL.into_iter().find(|pod_type| format!("{pod_type:?}") == text);
    found.ok_or_else(|| "one of Default, DaemonSet and Static is needed".into())
}

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

/// Runs the service until it is told to end, or does its task.
pub fn run(args: Args) -> ExitCode {
    let task = |name, permissions| Service {
        name,
        version: env!("CARGO_PKG_VERSION"),
        kinds: Vec::new(),
        permissions,
    };
    match args.task.clone() {
        Some(Task::Cleanup(cleanup)) => {
            let service = task("cleanup", cleanup.permissions());
            service::run(service, args.common, |context| cleanup::run(cleanup, context))
        }
        Some(Task::Withdraw(withdraw)) => {
            let service = task("withdraw", withdraw.permissions());
            service::run(service, args.common, |context| cleanup::withdraw::run(withdraw, context))
        }
        Some(Task::Check(check)) => {
            let mut service = task("check", check.permissions());
            service.kinds = kinds();
            service::run(service, args.common, |context| check::run(check, context))
        }
        None => control(args),
    }
}

fn kinds() -> Vec<Kind> {
    vec![Kind::of::<NodeMaintenance>(), Kind::of::<DrainRule>(), Kind::of::<Evacuation>()]
}

fn control(args: Args) -> ExitCode {
    let mut permissions = permissions();
    if args.follow_evacuation_controller {
        let lease = access::lease_name("evacuation-controller");
        let on = |verb| Permission::own(verb, "coordination.k8s.io", "leases").on(&lease);
        permissions.extend(["list", "watch"].map(on));
    }
    let service = Service {
        name: "maintenance-controller",
        version: env!("CARGO_PKG_VERSION"),
        kinds: kinds(),
        permissions,
    };
    let common = args.common.clone();
    service::run(service, common, |context| stand(args, context))
}

async fn stand(args: Args, context: Context) -> Result<(), InvalidTiming> {
    let metrics = Metrics::new(&context.metrics);
    // Once for all terms of office: the metrics of a queue are those of its name.
    let queue_metrics = context.metrics.queue("maintenance");
    let timing = args.election.timing();
    let lead = |leading| {
        let queue =
            WorkQueue::fair(context.clock.clone(), BACKOFF, queue_metrics.clone(), Work::lane, Work::group);
        lead(&args, &context, metrics.clone(), queue, leading)
    };
    context.lead(timing, lead).await
}

/// One term of office. Everything that is known is learnt anew, and forgotten at its end.
async fn lead(args: &Args, context: &Context, metrics: Metrics, queue: WorkQueue<Work>, leading: Leading) {
    let served = Served::new(args.pod_types.iter().copied());
    let index = Arc::new(Mutex::new(Index::new(served, context.clock.now())));
    metrics.show(&index);
    let controller = Arc::new(Controller {
        clients: leading.clients,
        clock: context.clock.clone(),
        events: context.events.clone(),
        index,
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
    term.watch(Source::<SlimAttachment>::all("volumeattachments"), &controller);
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
    // All pods before the first plan is made: what the planner has not been told of counts as gone.
    term.subscribe(&controller.pods, &controller);
    if !term.synced().await {
        return;
    }
    term.spawn(Arc::clone(&controller).settle());
    let workers = args.common.max_requests;
    term.run(queue.run(workers, context.stop.clone(), |work| Arc::clone(&controller).handle(work))).await;
}

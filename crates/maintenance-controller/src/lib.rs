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
//! | how is it done? | [`controller`], `act`, `feed` |
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
mod feed;
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

use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use haulout_api_types::node_maintenance::PodType;
use haulout_api_types::{DrainRule, Evacuation, NodeMaintenance, names};
use haulout_service_runtime::access::{self, Kind, Permission};
use haulout_service_runtime::lease::InvalidTiming;
use haulout_service_runtime::queue::Backoff;
use haulout_service_runtime::service::{self, CommonArgs, Context, ElectionArgs, Leading, Service};
use haulout_service_runtime::workers::WorkQueue;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::info;

use crate::controller::Controller;
use crate::feed::Feed;
use crate::index::{Index, Work};
use crate::metrics::Metrics;
use crate::plan::Served;

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

const PERMISSIONS: &[Permission] = &[
    Permission::cluster("list", names::NODE_MAINTENANCE_GROUP, "nodemaintenances"),
    Permission::cluster("watch", names::NODE_MAINTENANCE_GROUP, "nodemaintenances"),
    Permission::cluster("patch", names::NODE_MAINTENANCE_GROUP, "nodemaintenances"),
    Permission::cluster("delete", names::NODE_MAINTENANCE_GROUP, "nodemaintenances"),
    Permission::cluster("patch", names::NODE_MAINTENANCE_GROUP, "nodemaintenances/status"),
    Permission::cluster("list", names::NODE_MAINTENANCE_GROUP, "drainrules"),
    Permission::cluster("watch", names::NODE_MAINTENANCE_GROUP, "drainrules"),
    Permission::cluster("list", names::EVACUATION_GROUP, "evacuations"),
    Permission::cluster("watch", names::EVACUATION_GROUP, "evacuations"),
    Permission::cluster("create", names::EVACUATION_GROUP, "evacuations"),
    Permission::cluster("patch", names::EVACUATION_GROUP, "evacuations"),
    Permission::cluster("list", "", "nodes"),
    Permission::cluster("watch", "", "nodes"),
    Permission::cluster("patch", "", "nodes"),
    Permission::cluster("patch", "", "nodes/status"),
    Permission::cluster("list", "", "namespaces"),
    Permission::cluster("watch", "", "namespaces"),
    Permission::cluster("list", "", "pods"),
    Permission::cluster("watch", "", "pods"),
    Permission::cluster("get", "", "persistentvolumeclaims"),
    Permission::cluster("get", "", "persistentvolumes"),
    Permission::cluster("list", "storage.k8s.io", "volumeattachments"),
    Permission::cluster("watch", "storage.k8s.io", "volumeattachments"),
];

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
    let mut permissions = [PERMISSIONS, access::EVENTS, &access::election("maintenance-controller")].concat();
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
    // Nodes, maintenances and pods take turns, so that very many pods hold up no cordon.
    let lane = |work: &Work| match work {
        Work::Node(_) => 0,
        Work::Maintenance(_) => 1,
        Work::Pod(_) => 2,
    };
    let lead = |leading| {
        let queue = WorkQueue::fair(context.clock.clone(), BACKOFF, queue_metrics.clone(), lane);
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
    let feed = || Feed {
        controller: Arc::clone(&controller),
        metrics: context.metrics.clone(),
        listed: CancellationToken::new(),
    };
    let feeds = [(); 7].map(|()| feed());
    let listed: Vec<_> = feeds.iter().map(|feed| feed.listed.clone()).collect();
    let [nodes, maintenances, rules, evacuations, attachments, namespaces, own_pods] = feeds;
    let _feeds = [
        tokio::spawn(feed::nodes(nodes)),
        tokio::spawn(feed::maintenances(maintenances)),
        tokio::spawn(feed::rules(rules)),
        tokio::spawn(feed::evacuations(evacuations)),
        tokio::spawn(feed::attachments(attachments)),
        tokio::spawn(feed::namespaces(namespaces)),
        tokio::spawn(feed::own_pods(own_pods, context.namespace.clone())),
    ]
    .map(AbortOnDropHandle::new);
    let leader = args
        .follow_evacuation_controller
        .then(|| feed::evacuation_controller(feed(), context.namespace.clone()));
    let _leader = leader.map(|leader| AbortOnDropHandle::new(tokio::spawn(leader)));
    let known = async {
        controller.pods.ready().await;
        for listed in &listed {
            listed.cancelled().await;
        }
    };
    tokio::select! {
        () = known => {}
        () = context.stop.cancelled() => return,
    }
    // All of them before the first plan is made: what the planner has not been told of counts as gone.
    let pods = feed::learn_pods(&controller);
    let _planning = [
        tokio::spawn(feed::pods(Arc::clone(&controller), pods)),
        tokio::spawn(Arc::clone(&controller).settle()),
    ]
    .map(AbortOnDropHandle::new);
    info!("everything is known, and work begins");
    let workers = args.common.max_requests;
    queue.run(workers, context.stop.clone(), |work| Arc::clone(&controller).handle(work)).await;
}

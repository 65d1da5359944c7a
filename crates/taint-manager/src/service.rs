//! The service: its arguments, what it may do, and one term of office after the other.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use haulout_api_types::{Evacuation, names};
use haulout_service_runtime::access::{self, Kind, Permission};
use haulout_service_runtime::metrics::QueueMetrics;
use haulout_service_runtime::service::{self, CommonArgs, Context, ElectionArgs, Leading, Service};
use haulout_service_runtime::workers::WorkQueue;
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::ObjectReference;
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

use crate::controller::{Controller, lock};
use crate::feed;
use crate::index::Key;
use crate::manager::Manager;
use crate::metrics::Metrics;
use crate::pace::BACKOFF;
use crate::policy::Policy;

/// Makes pods leave nodes with NoExecute taints, instead of kube-controller-manager's taint-eviction-controller
#[derive(Clone, Debug, clap::Parser)]
#[command(version)]
pub struct Args {
    /// What every service has.
    #[command(flatten)]
    pub common: CommonArgs,

    /// The policy: a YAML file with rules; without one, every pod that has to leave is deleted
    #[arg(long, env = "HAULOUT_POLICY")]
    pub policy: Option<PathBuf>,

    /// For how many seconds nodes may report after a start or an outage, before old taints count
    #[arg(long, default_value_t = 60)]
    pub settle_seconds: u32,

    /// How many pods are made to leave in a second at most; without it, as many as the API server takes
    #[arg(long, value_parser = parse_rate)]
    pub max_per_second: Option<f64>,

    /// Decides and reports, and touches nothing
    #[arg(long)]
    pub dry_run: bool,

    /// How its leader is elected.
    #[command(flatten)]
    pub election: ElectionArgs,
}

fn parse_rate(text: &str) -> Result<f64, String> {
    let rate = text.parse::<f64>().ok().filter(|rate| rate.is_finite() && *rate > 0.0);
    rate.ok_or_else(|| "a number above 0 is needed".into())
}

const PERMISSIONS: &[Permission] = &[
    Permission::cluster("list", "", "nodes"),
    Permission::cluster("watch", "", "nodes"),
    Permission::cluster("patch", "", "nodes"),
    Permission::cluster("list", "", "namespaces"),
    Permission::cluster("watch", "", "namespaces"),
    Permission::cluster("get", "", "pods"),
    Permission::cluster("list", "", "pods"),
    Permission::cluster("watch", "", "pods"),
    Permission::cluster("delete", "", "pods"),
    Permission::cluster("patch", "", "pods/status"),
    Permission::cluster("create", "", "pods/eviction"),
    Permission::cluster("list", "", "events"),
    Permission::cluster("watch", "", "events"),
    Permission::cluster("get", names::EVACUATION_GROUP, "evacuations"),
    Permission::cluster("list", names::EVACUATION_GROUP, "evacuations"),
    Permission::cluster("watch", names::EVACUATION_GROUP, "evacuations"),
    Permission::cluster("create", names::EVACUATION_GROUP, "evacuations"),
    Permission::cluster("patch", names::EVACUATION_GROUP, "evacuations"),
];

/// Runs the service until it is told to end.
pub fn run(args: Args) -> ExitCode {
    let service = Service {
        name: "taint-manager",
        version: env!("CARGO_PKG_VERSION"),
        kinds: vec![Kind::of::<Evacuation>()],
        permissions: [PERMISSIONS, access::EVENTS, &access::election("taint-manager")].concat(),
    };
    let common = args.common.clone();
    service::run(service, common, |context| stand(args, context))
}

async fn stand(args: Args, context: Context) -> Result<(), String> {
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

/// One term of office. Everything that is known is learnt anew, and forgotten at its end.
async fn lead(
    args: &Args,
    context: &Context,
    metrics: &Metrics,
    (policy, text): (Policy, String),
    (pods, nodes): (QueueMetrics, QueueMetrics),
    leading: Leading,
) {
    let settle = SignedDuration::from_secs(args.settle_seconds.into());
    let manager = Arc::new(Mutex::new(Manager::new(policy, settle, args.max_per_second)));
    metrics.show(&manager);
    let controller = Arc::new(Controller {
        clients: leading.clients,
        clock: context.clock.clone(),
        events: context.events.clone(),
        metrics: metrics.clone(),
        manager,
        pods: context.pod_cache(),
        queue: WorkQueue::fair(context.clock.clone(), BACKOFF, pods, Key::lane),
        nodes: WorkQueue::new(context.clock.clone(), BACKOFF, nodes),
        wanted: Mutex::new(HashMap::new()),
        in_sight: Mutex::new(BTreeSet::new()),
        dry_run: args.dry_run,
        own: ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            namespace: Some(context.namespace.clone()),
            name: Some(context.instance.clone()),
            ..ObjectReference::default()
        },
    });
    let all = &context.metrics;
    let mut feeds = vec![
        tokio::spawn(feed::pods(Arc::clone(&controller))),
        tokio::spawn(feed::nodes(Arc::clone(&controller), all.clone())),
        tokio::spawn(feed::namespaces(Arc::clone(&controller), all.clone())),
        tokio::spawn(feed::evacuations(Arc::clone(&controller), all.clone())),
        tokio::spawn(feed::rivals(Arc::clone(&controller), all.clone())),
    ];
    if let Some(path) = &args.policy {
        feeds.push(tokio::spawn(feed::policy(Arc::clone(&controller), path.clone(), text)));
    }
    let _feeds: Vec<_> = feeds.into_iter().map(AbortOnDropHandle::new).collect();
    info!(dry_run = args.dry_run, "watching nodes and pods");
    let workers = args.common.max_requests;
    tokio::join!(
        controller.queue.run(workers, context.stop.clone(), |key| Arc::clone(&controller).handle(key)),
        controller.nodes.run(4, context.stop.clone(), |node| Arc::clone(&controller).annotate(node)),
    );
}

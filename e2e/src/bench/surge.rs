//! How long Deployments with one replica and a strict budget are unavailable when their node is drained, and at what cost,
//! compared with the minimal loop that reaches the same result and with `kubectl drain`.

mod apps;
mod observer;
mod plain_loop;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use haulout_api_types::NodeMaintenance;
use haulout_api_types::node_maintenance::Stage;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, Client};
use serde_json::json;

use self::apps::{Apps, DEPLOYMENTS};
use self::observer::{Observer, Outages};
use super::{Progress, Results, count, median, stop, until_no_evacuation, writes_per_pod};
use crate::cluster::Cluster;
use crate::harness::fleet::Fleet;
use crate::service::{NAMESPACE, Service};
use crate::wait;
use crate::webhook::Webhook;

const ROUNDS: usize = 3;
const SERVICES: [&str; 3] = ["evacuation-controller", "maintenance-controller", "workload-evacuator"];
/// The same number as in the chart.
const REPLICAS: usize = 2;
const NAME: &str = "bench";
const LIMIT: Duration = Duration::from_secs(600);
/// After this time, the last events are written.
const EVENT_FLUSH: Duration = Duration::from_secs(3);
/// For how long `kubectl drain` tries to evict pods that it cannot evict.
const PATIENCE: &str = "60s";

/// 100 Deployments with one replica each, a Service and a budget with minAvailable 1 run on one node. They move to another
/// node and, in the next turn, back. kube-controller-manager has its default limit of 20 requests per second and
/// controller. All pods have a grace period of 0, so that the Eviction API removes them at once. Times and writes are medians
/// of three rounds, outages are those of the worst round. Our services run with two replicas each, with the arguments of
/// the chart, and only in their own turns.
///
/// - `drain_s`: from the creation of a NodeMaintenance in stage Drain until its status reports that it is drained and
///   no Evacuation is left.
/// - `loop_s`: a loop that cordons the node and then, for all pods at once, moves the pod to its Deployment, waits until
///   the replacement is ready, waits until the budget allows a disruption, and evicts, until the node is empty. It
///   creates no Evacuations. `time_vs_loop`: our time ÷ its time.
/// - `unavailable_seconds`: for how long a Deployment had no ready pod, or its EndpointSlices listed none, added up over all
///   Deployments. Measured by an observer that watches pods and EndpointSlices.
/// - `stale_endpoint_seconds`: for how long EndpointSlices only listed pods that had gone. kube-controller-manager is that much
///   behind. Pods that serve for some seconds after their eviction bridge this time. `loop_stale_endpoint_seconds`: the
///   same for the loop.
/// - `writes_per_pod`: write requests of all our services, from the audit log, including Lease renewals.
///   `event_writes_per_pod`: events, which `writes_per_pod` does not include.
/// - `kubectl_with_budgets_evicted`: the number of pods that one `kubectl drain` of the node evicts within a minute.
/// - `kubectl_s`: the same without the budgets, until it ends. Measured once. `kubectl_unavailable_seconds`: as above, until
///   all Deployments are available again.
pub(super) async fn run(progress: Progress) -> Result<Results> {
    let env = BenchEnv::new(progress).await?;
    let (mut ours, mut loops) = (Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        progress(&format!("round {round} of {ROUNDS}: ours"));
        ours.push(env.ours().await?);
        progress(&format!("round {round} of {ROUNDS}: the plain loop"));
        loops.push(env.plain_loop().await?);
    }
    progress("kubectl drain with budgets");
    let evicted = env.kubectl_with_budgets().await?;
    progress("kubectl drain without budgets");
    let kubectl = env.kubectl_without_budgets().await?;
    env.cluster.shutdown().await;
    let middle = |drains: &[Drain], figure: fn(&Drain) -> f64| median(drains.iter().map(figure).collect());
    let worst = |drains: &[Drain], figure: fn(&Drain) -> f64| drains.iter().map(figure).fold(0.0, f64::max);
    let (seconds, plain) = (middle(&ours, |drain| drain.seconds), middle(&loops, |drain| drain.seconds));
    Ok(vec![
        ("drain_s", seconds),
        ("loop_s", plain),
        ("kubectl_s", kubectl.seconds),
        ("time_vs_loop", seconds / plain),
        ("writes_per_pod", middle(&ours, |drain| drain.writes)),
        ("event_writes_per_pod", middle(&ours, |drain| drain.events)),
        ("unavailable_seconds", worst(&ours, |drain| drain.outages.unavailable)),
        ("stale_endpoint_seconds", worst(&ours, |drain| drain.outages.stale)),
        ("loop_stale_endpoint_seconds", worst(&loops, |drain| drain.outages.stale)),
        ("kubectl_unavailable_seconds", kubectl.outages.unavailable),
        ("kubectl_with_budgets_evicted", evicted),
    ])
}

/// Figures of one drain. Only our services have writes and events.
#[derive(Default)]
struct Drain {
    seconds: f64,
    outages: Outages,
    writes: f64,
    events: f64,
}

struct BenchEnv {
    apps: Apps,
    client: Client,
    /// Clients with the accounts of the workload evacuator and of the evacuation controller.
    acting: [Client; 2],
    _webhook: (Webhook, Service),
    cluster: Cluster,
}

impl BenchEnv {
    async fn new(progress: Progress) -> Result<Self> {
        let booting = Cluster::builder().name("bench-surge").controller_manager_qps(None).audit(true);
        let cluster = booting.progress(progress).boot().await?;
        let webhook = Webhook::with_replica(&cluster).await?;
        let client = cluster.client().await?;
        let account = async |service: &str| {
            let account = format!("haulout-{service}");
            let kubeconfig = cluster.service_account_kubeconfig(NAMESPACE, &account).await?;
            cluster.client_from(&kubeconfig, "bench-loop").await
        };
        let acting = [account("workload-evacuator").await?, account("evacuation-controller").await?];
        progress(&format!("creating {DEPLOYMENTS} Deployments"));
        let apps = Apps::create(&client).await?;
        Ok(Self { apps, client, acting, _webhook: webhook, cluster })
    }

    async fn ours(&self) -> Result<Drain> {
        let services = self.start_services().await?;
        let node = self.apps.node().await?;
        let maintenances: Api<NodeMaintenance> = Api::all(self.client.clone());
        let observer = Observer::start(self.apps.endpoint_slices(), self.apps.pods()).await?;
        let mark = self.cluster.requests_mark()?;
        let begun = Instant::now();
        let maintenance = maintenance(&node)?;
        maintenances.create(&PostParams::default(), &maintenance).await.context("creating a maintenance")?;
        wait::present(maintenances.clone(), NAME, "is drained", LIMIT, Fleet::is_drained).await?;
        until_no_evacuation(&self.client, LIMIT).await?;
        let seconds = begun.elapsed().as_secs_f64();
        self.apps.ensure_left(&node).await?;
        tokio::time::sleep(EVENT_FLUSH).await;
        let requests = self.cluster.requests_since(mark)?;
        self.apps.until_at_rest().await?;
        let outages = observer.finish().await?;
        maintenances.delete(NAME, &DeleteParams::default()).await.context("deleting the maintenance")?;
        wait::gone(maintenances, NAME, LIMIT).await?;
        for service in services {
            stop(service).await?;
        }
        let (writes, events) = writes_per_pod(&requests, &SERVICES, DEPLOYMENTS);
        Ok(Drain { seconds, outages, writes, events })
    }

    async fn start_services(&self) -> Result<Vec<Service>> {
        let mut services = Vec::new();
        for name in SERVICES.iter().cycle().take(SERVICES.len() * REPLICAS) {
            let service = Service::start_installed(&self.cluster, name).await?;
            service.ready().await?;
            services.push(service);
        }
        for leader in services.iter().take(SERVICES.len()) {
            leader.leads().await?;
        }
        Ok(services)
    }

    /// The minimal loop that reaches the same result.
    async fn plain_loop(&self) -> Result<Drain> {
        let node = self.apps.node().await?;
        let (pods, deployments) = self.apps.list().await?;
        let observer = Observer::start(self.apps.endpoint_slices(), self.apps.pods()).await?;
        let begun = Instant::now();
        self.apps.set_cordon(&node, true).await?;
        let [moving, evicting] = &self.acting;
        plain_loop::run(moving, evicting, &pods, &deployments).await?;
        let seconds = begun.elapsed().as_secs_f64();
        self.apps.ensure_left(&node).await?;
        self.apps.until_at_rest().await?;
        let outages = observer.finish().await?;
        self.apps.set_cordon(&node, false).await?;
        Ok(Drain { seconds, outages, ..Drain::default() })
    }

    /// The number of pods that `kubectl drain` evicts in a minute.
    async fn kubectl_with_budgets(&self) -> Result<f64> {
        let node = self.apps.node().await?;
        let (before, _) = self.apps.list().await?;
        let drain = self.cluster.kubectl(&["drain", &node, "--timeout", PATIENCE]).await?;
        ensure!(!drain.status.success(), "kubectl drained a node whose budgets allow no disruption");
        let (after, _) = self.apps.list().await?;
        let stays =
            after.iter().filter(|pod| before.iter().any(|other| other.metadata.uid == pod.metadata.uid));
        let evicted = before.len().saturating_sub(stays.count());
        self.apps.set_cordon(&node, false).await?;
        Ok(count(evicted))
    }

    async fn kubectl_without_budgets(&self) -> Result<Drain> {
        let budgets: Api<PodDisruptionBudget> = self.apps.budgets();
        let (params, all) = (DeleteParams::default(), ListParams::default());
        budgets.delete_collection(&params, &all).await.context("deleting the budgets")?;
        wait::all(budgets, watcher::Config::default(), "are gone", LIMIT, <[_]>::is_empty).await?;
        let node = self.apps.node().await?;
        let observer = Observer::start(self.apps.endpoint_slices(), self.apps.pods()).await?;
        let begun = Instant::now();
        self.cluster.kubectl(&["drain", &node]).await?.success().context("kubectl drain")?;
        let seconds = begun.elapsed().as_secs_f64();
        self.apps.ensure_left(&node).await?;
        self.apps.until_available().await?;
        let outages = observer.finish().await?;
        Ok(Drain { seconds, outages, ..Drain::default() })
    }
}

fn maintenance(node: &str) -> Result<NodeMaintenance> {
    let this = json!({"key": "metadata.name", "operator": "In", "values": [node]});
    let maintenance = json!({
        "metadata": {"name": NAME},
        "spec": {"nodeSelector": {"nodeSelectorTerms": [{"matchFields": [this]}]}, "stage": Stage::Drain},
    });
    serde_json::from_value(maintenance).context("creating a maintenance")
}

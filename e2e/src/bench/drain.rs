//! How fast and at what cost one NodeMaintenance drains ten nodes, compared with `kubectl drain` and with the minimal
//! loop that reaches the same result.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures::future::try_join_all;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use haulout_api_types::evacuators::evacuation_for;
use haulout_api_types::names::instigator;
use haulout_api_types::node_maintenance::Stage;
use haulout_api_types::{Evacuation, NodeMaintenance};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;

use super::{Progress, Results, evict, median, stop, until_no_evacuation, writes_per_pod};
use crate::cluster::Cluster;
use crate::harness::fleet::Fleet;
use crate::service::{NAMESPACE, Service};
use crate::wait;
use crate::webhook::Webhook;

const ROUNDS: usize = 3;
const NODES: usize = 10;
const PODS_PER_NODE: usize = 50;
const IN_FLIGHT: usize = 32;
const SERVICES: [&str; 2] = ["evacuation-controller", "maintenance-controller"];
/// The same number as in the chart.
const REPLICAS: usize = 2;
const NAME: &str = "bench";
const LIMIT: Duration = Duration::from_secs(600);
/// After this time, the last events are written.
const EVENT_FLUSH: Duration = Duration::from_secs(3);

/// Ten nodes have 50 pods each, owned by ReplicaSets. Replacement pods find room on other nodes, so the controller
/// manager, the scheduler and the simulated kubelets work during every drain. All pods have a grace period of 0, so
/// that the Eviction API removes them at once. Figures are medians of three rounds, in which all candidates take
/// turns in one cluster with the chart's webhook. Our controllers run with two replicas each, and only in their own
/// turns.
///
/// - `drain_s`: from the creation of a NodeMaintenance in stage Drain until its status reports that it is drained and
///   no Evacuation is left.
/// - `kubectl_serial_s`: one `kubectl drain` of all ten nodes, one after the other. Measured once, because it takes
///   long. `speedup_vs_kubectl_serial`: its time ÷ ours.
/// - `kubectl_parallel_s`: ten processes of `kubectl drain` at once, one per node. `speedup_vs_kubectl_parallel`:
///   their time ÷ ours.
/// - `loop_s`: a loop that cordons the nodes and then, for 32 pods at once, creates an Evacuation, evicts, removes
///   the finalizer and deletes, with the controllers' own accounts. It watches and reads nothing. `time_vs_loop`: our
///   time ÷ its time.
/// - `writes_per_pod`: write requests of all our services, from the audit log, including Lease renewals.
///   `event_writes_per_pod`: events, which `writes_per_pod` does not include.
pub(super) async fn run(progress: Progress) -> Result<Results> {
    let env = BenchEnv::new(progress).await?;
    let (mut ours, mut parallel, mut loops) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        progress(&format!("round {round} of {ROUNDS}: ours"));
        ours.push(env.ours().await?);
        progress(&format!("round {round} of {ROUNDS}: kubectl drain, ten in parallel"));
        parallel.push(env.kubectl(Kubectl::Parallel).await?);
        progress(&format!("round {round} of {ROUNDS}: the plain loop"));
        loops.push(env.plain_loop().await?);
    }
    progress("kubectl drain, one node after the other");
    let serial = env.kubectl(Kubectl::Serial).await?;
    env.cluster.shutdown().await;
    let middle = |figure: fn(&Drain) -> f64| median(ours.iter().map(figure).collect());
    let (drain, parallel, plain) = (middle(|drain| drain.seconds), median(parallel), median(loops));
    Ok(vec![
        ("drain_s", drain),
        ("kubectl_serial_s", serial),
        ("kubectl_parallel_s", parallel),
        ("loop_s", plain),
        ("speedup_vs_kubectl_serial", serial / drain),
        ("speedup_vs_kubectl_parallel", parallel / drain),
        ("time_vs_loop", drain / plain),
        ("writes_per_pod", middle(|drain| drain.writes)),
        ("event_writes_per_pod", middle(|drain| drain.events)),
    ])
}

/// Figures of one drain by Haulout.
struct Drain {
    seconds: f64,
    writes: f64,
    events: f64,
}

#[derive(Clone, Copy)]
enum Kubectl {
    Serial,
    Parallel,
}

struct BenchEnv {
    fleet: Fleet,
    client: Client,
    /// Clients with the service accounts of [`SERVICES`].
    acting: [Client; 2],
    _webhook: (Webhook, Service),
    cluster: Cluster,
}

impl BenchEnv {
    async fn new(progress: Progress) -> Result<Self> {
        let cluster = Cluster::builder().name("bench-drain").audit(true).progress(progress).boot().await?;
        let webhook = Webhook::with_replica(&cluster).await?;
        let client = cluster.client().await?;
        let account = async |service: &str| {
            let account = format!("haulout-{service}");
            let kubeconfig = cluster.service_account_kubeconfig(NAMESPACE, &account).await?;
            cluster.client_from(&kubeconfig, "bench-loop").await
        };
        let [evacuation, maintenance] = SERVICES;
        let acting = [account(evacuation).await?, account(maintenance).await?];
        let fleet = Fleet::create(&client, NODES, PODS_PER_NODE, |pod| pod.grace(0)).await?;
        Ok(Self { fleet, client, acting, _webhook: webhook, cluster })
    }

    async fn ours(&self) -> Result<Drain> {
        self.fleet.fill().await?;
        let mut services = Vec::new();
        for name in SERVICES.iter().cycle().take(SERVICES.len() * REPLICAS) {
            let service = Service::start(&self.cluster, name, &[]).await?;
            service.ready().await?;
            services.push(service);
        }
        for leader in services.iter().take(SERVICES.len()) {
            leader.leads().await?;
        }
        let maintenances: Api<NodeMaintenance> = Api::all(self.client.clone());
        let maintenance = Fleet::maintenance(NAME, Stage::Drain)?;
        let mark = self.cluster.requests_mark()?;
        let begun = Instant::now();
        maintenances.create(&PostParams::default(), &maintenance).await.context("creating a maintenance")?;
        wait::present(maintenances.clone(), NAME, "is drained", LIMIT, Fleet::is_drained).await?;
        until_no_evacuation(&self.client, LIMIT).await?;
        let seconds = begun.elapsed().as_secs_f64();
        self.ensure_empty().await?;
        tokio::time::sleep(EVENT_FLUSH).await;
        let requests = self.cluster.requests_since(mark)?;
        maintenances.delete(NAME, &DeleteParams::default()).await.context("deleting the maintenance")?;
        wait::gone(maintenances, NAME, LIMIT).await?;
        for service in services {
            stop(service).await?;
        }
        self.fleet.clear().await?;
        let (writes, events) = writes_per_pod(&requests, &SERVICES, NODES * PODS_PER_NODE);
        Ok(Drain { seconds, writes, events })
    }

    async fn kubectl(&self, how: Kubectl) -> Result<f64> {
        self.fleet.fill().await?;
        let nodes = self.fleet.names();
        let all: Vec<&str> = nodes.iter().map(String::as_str).collect();
        let drain = async |nodes: &[&str]| {
            let args = [&["drain", "--ignore-daemonsets"], nodes].concat();
            self.cluster.kubectl(&args).await?.success().context("kubectl drain")?;
            anyhow::Ok(())
        };
        let begun = Instant::now();
        match how {
            Kubectl::Serial => drain(&all).await?,
            Kubectl::Parallel => {
                try_join_all(all.chunks(1).map(drain)).await?;
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        self.ensure_empty().await?;
        self.fleet.clear().await?;
        Ok(seconds)
    }

    /// The minimal loop that reaches the same result.
    async fn plain_loop(&self) -> Result<f64> {
        let pods = self.fleet.fill().await?;
        let begun = Instant::now();
        self.fleet.cordon().await?;
        let leaving = stream::iter(&pods).map(|pod| self.evacuate_and_evict(pod)).buffer_unordered(IN_FLIGHT);
        leaving.try_collect::<()>().await?;
        until_no_evacuation(&self.client, LIMIT).await?;
        let seconds = begun.elapsed().as_secs_f64();
        self.ensure_empty().await?;
        self.fleet.clear().await?;
        Ok(seconds)
    }

    async fn evacuate_and_evict(&self, pod: &Pod) -> Result<()> {
        let [evacuation, maintenance] = &self.acting;
        let namespace = pod.namespace().unwrap_or_default();
        let pods: Api<Pod> = Api::namespaced(evacuation.clone(), &namespace);
        let creates: Api<Evacuation> = Api::namespaced(maintenance.clone(), &namespace);
        let ends: Api<Evacuation> = Api::namespaced(evacuation.clone(), &namespace);
        let (wanted, _) = evacuation_for(&pod.metadata, instigator::NODE_MAINTENANCE, &BTreeSet::new())?;
        let made = creates.create(&PostParams::default(), &wanted).await.context("creating an Evacuation")?;
        evict(&pods, &pod.name_any()).await?;
        let released = Patch::Merge(json!({"metadata": {"finalizers": []}}));
        let name = made.name_any();
        ends.patch(&name, &PatchParams::default(), &released).await.context("dropping the finalizer")?;
        ends.delete(&name, &DeleteParams::default()).await.context("deleting an Evacuation")?;
        Ok(())
    }

    /// Fails if a pod is left on the drained nodes.
    async fn ensure_empty(&self) -> Result<()> {
        let nodes = self.fleet.names();
        let pods = self.fleet.pods().list(&ListParams::default()).await?;
        let on = |pod: &&Pod| {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
            node.is_some_and(|node| nodes.contains(node))
        };
        let left = pods.items.iter().filter(on).count();
        ensure!(left == 0, "{left} pods are left on nodes that are reported as drained");
        Ok(())
    }
}

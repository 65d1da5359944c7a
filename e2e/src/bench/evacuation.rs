//! How fast and at what cost pods are evacuated, compared with the minimal loop that reaches the same result.

mod burst;
mod waiting;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use haulout_api_types::Evacuation;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;

use super::{Progress, Results, evict, median, stored};
use crate::cluster::{Cluster, Component};
use crate::service::{NAMESPACE, Service};
use crate::webhook::Webhook;
use crate::{objects, wait};

const ROUNDS: usize = 3;
const NODES: usize = 50;
const CONTROLLER: &str = "evacuation-controller";
const INSTIGATOR_AGENT: &str = "bench-instigator";
const LIMIT: Duration = Duration::from_secs(600);
/// Maximum delay of watch events.
const WATCH_DELAY: Duration = Duration::from_secs(3);

/// All pods have a grace period of 0, so that the Eviction API removes them at once and no kubelet, real or
/// simulated, is measured. Pods are written directly into etcd beforehand. Figures are medians of three rounds, in
/// which Haulout and its peers take turns in one cluster. One replica of the webhook validates what the instigator
/// creates. Writes of the controller's ServiceAccount bypass the webhook, and the loops use that account.
///
/// - `pods_per_s`: 2,000 pods on 50 nodes, without budgets, from the first Evacuation request, with 32 requests in
///   flight, until neither pods nor Evacuations are left.
/// - `loop_pods_per_s`: the same pods and the same result with a loop that, for 32 pods at once, creates an
///   Evacuation, evicts, removes the finalizer and deletes. It watches and reads nothing. `throughput_vs_loop`: ours
///   ÷ its.
/// - `raw_evictions_per_s`: the same number of pods with plain eviction requests, 32 in flight.
/// - `kubectl_drain_pods_per_s`: `kubectl drain` of 5 of these nodes with 40 pods each, once.
/// - `writes_per_pod`: write requests of the instigator, the controller and the webhook in our bursts, from the audit
///   log. `event_writes_per_pod`: events, which `writes_per_pod` does not include. `reads_per_pod`: gets, lists and
///   the webhook's SubjectAccessReviews, which are reads although they are POST requests.
/// - `idle_p50_ms`: without other work, from the answer to the creation of an Evacuation until the eviction arrives
///   at the API server, by the times in the audit log. `loop_idle_p50_ms`: the same for a loop that watches
///   Evacuations and evicts. `idle_vs_loop`: ours ÷ its.
/// - `budget_freed_p50_ms`: from the answer to the disruption controller's write that allows one more disruption
///   until the successful eviction arrives. `loop_budget_freed_p50_ms`: the same for a loop that watches the budget
///   and evicts the next pod. `budget_freed_vs_loop`: ours ÷ its. As with a ReplicaSet, pod names are never reused.
///   For reusable names, our controller would first compare the UID on the API server.
pub(super) async fn run(progress: Progress) -> Result<Results> {
    let env = BenchEnv::new(progress).await?;
    let (mut ours, mut loops, mut raw) = (Vec::new(), Vec::new(), Vec::new());
    let (mut idle, mut freed) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for round in 1..=ROUNDS {
        progress(&format!("round {round} of {ROUNDS}: ours"));
        ours.push(env.burst().await?);
        progress(&format!("round {round} of {ROUNDS}: the plain loop"));
        loops.push(env.plain_loop().await?);
        progress(&format!("round {round} of {ROUNDS}: evictions alone"));
        raw.push(env.evictions_alone().await?);
        progress(&format!("round {round} of {ROUNDS}: one by one"));
        let [idle_ours, idle_loop] = &mut idle;
        idle_ours.extend(env.idle().await?);
        idle_loop.extend(env.idle_loop().await?);
        progress(&format!("round {round} of {ROUNDS}: budgets that allow disruptions again"));
        let [freed_ours, freed_loop] = &mut freed;
        freed_ours.extend(env.freed().await?);
        freed_loop.extend(env.freed_loop().await?);
    }
    progress("kubectl drain");
    let kubectl = env.kubectl_drain().await?;
    env.cluster.shutdown().await;
    let middle = |figure: fn(&burst::Burst) -> f64| median(ours.iter().map(figure).collect());
    let (pods_per_s, loop_pods_per_s) = (middle(|burst| burst.pods_per_s), median(loops));
    let ([idle, idle_loop], [freed, freed_loop]) = (idle.map(median), freed.map(median));
    Ok(vec![
        ("pods_per_s", pods_per_s),
        ("raw_evictions_per_s", median(raw)),
        ("kubectl_drain_pods_per_s", kubectl),
        ("loop_pods_per_s", loop_pods_per_s),
        ("throughput_vs_loop", pods_per_s / loop_pods_per_s),
        ("writes_per_pod", middle(|burst| burst.writes)),
        ("event_writes_per_pod", middle(|burst| burst.events)),
        ("reads_per_pod", middle(|burst| burst.reads)),
        ("idle_p50_ms", idle),
        ("loop_idle_p50_ms", idle_loop),
        ("idle_vs_loop", idle / idle_loop),
        ("budget_freed_p50_ms", freed),
        ("loop_budget_freed_p50_ms", freed_loop),
        ("budget_freed_vs_loop", freed / freed_loop),
    ])
}

struct BenchEnv {
    /// A running pod that is copied.
    template: Pod,
    /// Number of copies, so that no two have the same name.
    copies: AtomicUsize,
    /// Creates Evacuations, through the webhook.
    instigator: Client,
    /// Acts with the controller's account, which bypasses the webhook.
    acting: Client,
    _webhook: (Webhook, Service),
    cluster: Cluster,
}

impl BenchEnv {
    async fn new(progress: Progress) -> Result<Self> {
        // These would replace the pods, or delete them because their owner does not exist.
        let without = ["--controllers=*,-replicaset-controller,-garbage-collector-controller"];
        let booting = Cluster::builder().name("bench-evacuation").scheduler(false).audit(true);
        let booting = booting.extra_args(Component::ControllerManager, without);
        let cluster = booting.progress(progress).boot().await?;
        let webhook = Webhook::with_replica(&cluster).await?;
        let instigator = cluster.client_as(INSTIGATOR_AGENT).await?;
        let account = cluster.service_account_kubeconfig(NAMESPACE, &format!("haulout-{CONTROLLER}")).await?;
        let acting = cluster.client_from(&account, "bench-loop").await?;
        let nodes: Api<Node> = Api::all(instigator.clone());
        for number in 0..NODES {
            let node = objects::node(&node(number)).build();
            nodes.create(&PostParams::default(), &node).await.context("creating a node")?;
        }
        let pod = objects::pod("template")
            .node(&node(0))
            .label("app", "bench")
            .grace(0)
            .owner(replica_set())
            .build();
        let template = stored::pod(&instigator, &pod).await?;
        Ok(Self { template, copies: AtomicUsize::default(), instigator, acting, _webhook: webhook, cluster })
    }

    /// Puts pods onto nodes. All watchers have received them when this returns.
    async fn pods(&self, count: usize, nodes: usize) -> Result<Vec<Pod>> {
        let copy = |number: usize| {
            let name = format!("pod-{}", self.copies.fetch_add(1, Ordering::Relaxed));
            stored::copy(&self.template, name, node(number % nodes))
        };
        let pods: Vec<_> = (0..count).map(copy).collect();
        stored::store_while_watched(&self.cluster.etcd()?, stored::PODS, &pods).await?;
        tokio::time::sleep(WATCH_DELAY).await;
        Ok(pods)
    }

    /// Starts the controller and waits until it has evacuated a pod.
    async fn controller(&self) -> Result<Service> {
        let controller = Service::start(&self.cluster, CONTROLLER, &[]).await?;
        controller.leads().await?;
        for pod in self.pods(1, 1).await? {
            let name = self.ask_for(&pod).await?;
            wait::gone(self.evacuations(), &name, LIMIT).await?;
        }
        Ok(controller)
    }

    /// Requests the evacuation of a pod. Returns the name of the Evacuation.
    async fn ask_for(&self, pod: &Pod) -> Result<String> {
        let api: Api<Evacuation> = Api::default_namespaced(self.instigator.clone());
        let made = api.create(&PostParams::default(), &stored::evacuation(pod)?).await;
        Ok(made.context("creating an Evacuation")?.name_any())
    }

    /// Does what the controller does when the pod of this Evacuation is gone.
    async fn end(&self, name: &str) -> Result<()> {
        let released = Patch::Merge(json!({"metadata": {"finalizers": []}}));
        let api = self.evacuations();
        api.patch(name, &PatchParams::default(), &released).await.context("dropping the finalizer")?;
        api.delete(name, &DeleteParams::default()).await.context("deleting an Evacuation")?;
        Ok(())
    }

    async fn ensure_empty(&self) -> Result<()> {
        let left = self.acting_pods().list(&ListParams::default()).await?.items.len();
        ensure!(left == 0, "{left} pods are left");
        Ok(())
    }

    fn evacuations(&self) -> Api<Evacuation> {
        Api::namespaced(self.acting.clone(), "default")
    }

    fn acting_pods(&self) -> Api<Pod> {
        Api::namespaced(self.acting.clone(), "default")
    }

    fn budgets(&self) -> Api<PodDisruptionBudget> {
        Api::default_namespaced(self.instigator.clone())
    }
}

/// The owner of all pods. It does not exist.
fn replica_set() -> OwnerReference {
    OwnerReference {
        api_version: "apps/v1".into(),
        kind: "ReplicaSet".into(),
        name: "bench".into(),
        uid: "6c84fb90-12c4-11e1-840d-7b25c5ee775a".into(),
        controller: Some(true),
        ..OwnerReference::default()
    }
}

fn node(number: usize) -> String {
    format!("node-{number}")
}

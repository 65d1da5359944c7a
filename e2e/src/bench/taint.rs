//! How fast and at what cost pods leave tainted nodes, compared with kube-controller-manager and with plain requests.

mod burst;
mod memory;
mod single;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::future::try_join_all;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

use super::{Progress, Results, median, stop, stored};
use crate::cluster::Cluster;
use crate::process::Process;
use crate::service::Service;
use crate::{objects, wait};

const ROUNDS: usize = 3;
const NODES: usize = 50;
const PODS: usize = 2_000;
/// For kube-controller-manager with its defaults, which is slow.
const FEW_PODS: usize = 200;
const UNTHROTTLED: u32 = 5_000;
const MANAGER: &str = "taint-manager";
const LIMIT: Duration = Duration::from_secs(600);
/// Maximum delay of watch events.
const WATCH_DELAY: Duration = Duration::from_secs(3);

/// All pods have a grace period of 0, so that a deletion removes them at once and no kubelet, real or simulated, is
/// measured. Pods are written directly into etcd beforehand. Taints have a `timeAdded`, as those of the node
/// lifecycle controller do. Figures are medians of three rounds, in which the taint manager and its peers take turns
/// in one cluster.
///
/// - `pods_per_s`: 2,000 pods on 50 nodes, from the first of 50 taints, which are all set at once, until no pod is
///   left.
/// - `kcm_unthrottled_pods_per_s`: the same with a kube-controller-manager that runs no other controller, at 5,000
///   requests per second. `kcm_default_pods_per_s`: with its defaults, for 200 pods. `raw_pods_per_s`: with only a
///   PATCH of the status and a DELETE, for 32 pods at once, without taints. Each `ratio_to_…`: ours ÷ its.
/// - `calls_per_pod`: our requests in the burst, from the audit log, without events, watches and Lease renewals.
///   `event_calls_per_pod`: requests that write events.
/// - `single_ms`: without other work, from the answer to the request that taints a node to the answer to the DELETE
///   of its only pod, by the times in the audit log. `kcm_single_ms`: the same for kube-controller-manager with its
///   defaults. `single_vs_kcm`: ours ÷ its.
/// - `rss_mib_50k`: resident memory ten seconds after it has received 50,000 pods on 1,000 nodes.
pub(super) async fn run(progress: Progress) -> Result<Results> {
    let env = BenchEnv::new(progress).await?;
    let (mut ours, mut unthrottled, mut default, mut raw) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut single, mut kcm_single) = (Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        progress(&format!("round {round} of {ROUNDS}: ours"));
        let manager = env.manager().await?;
        ours.push(env.our_burst().await?);
        single.extend(env.one_by_one().await?);
        stop(manager).await?;
        progress(&format!("round {round} of {ROUNDS}: kube-controller-manager without limits"));
        let peer = env.peer(Some(UNTHROTTLED)).await?;
        unthrottled.push(env.burst(PODS).await?);
        drop(peer);
        progress(&format!("round {round} of {ROUNDS}: kube-controller-manager with its defaults"));
        let peer = env.peer(None).await?;
        kcm_single.extend(env.one_by_one().await?);
        default.push(env.burst(FEW_PODS).await?);
        drop(peer);
        progress(&format!("round {round} of {ROUNDS}: requests alone"));
        raw.push(env.requests_alone().await?);
    }
    let bytes = env.memory(progress).await?;
    env.cluster.shutdown().await;
    let middle = |figure: fn(&burst::Burst) -> f64| median(ours.iter().map(figure).collect());
    let pods_per_s = middle(|burst| burst.pods_per_s);
    let (unthrottled, default, raw) = (median(unthrottled), median(default), median(raw));
    let (single, kcm_single) = (median(single), median(kcm_single));
    Ok(vec![
        ("pods_per_s", pods_per_s),
        ("kcm_default_pods_per_s", default),
        ("kcm_unthrottled_pods_per_s", unthrottled),
        ("raw_pods_per_s", raw),
        ("ratio_to_kcm_default", pods_per_s / default),
        ("ratio_to_kcm_unthrottled", pods_per_s / unthrottled),
        ("ratio_to_raw", pods_per_s / raw),
        ("calls_per_pod", middle(|burst| burst.calls)),
        ("event_calls_per_pod", middle(|burst| burst.events)),
        ("single_ms", single),
        ("kcm_single_ms", kcm_single),
        ("single_vs_kcm", single / kcm_single),
        ("rss_mib_50k", bytes / 1024.0 / 1024.0),
    ])
}

struct BenchEnv {
    /// A running pod that is copied.
    template: Pod,
    /// Number of copies, so that no two have the same name.
    copies: AtomicUsize,
    client: Client,
    cluster: Cluster,
}

impl BenchEnv {
    async fn new(progress: Progress) -> Result<Self> {
        let booting = Cluster::builder().name("bench-taint").taint_eviction(false).scheduler(false);
        let cluster = booting.audit(true).progress(progress).boot().await?;
        cluster.install_chart(&[("taintManager.enabled", "true")]).await?;
        let client = cluster.client().await?;
        let nodes: Api<Node> = Api::all(client.clone());
        for number in 0..NODES {
            let node = objects::node(&node(number)).build();
            nodes.create(&PostParams::default(), &node).await.context("creating a node")?;
        }
        let pod = objects::pod("template").node(&node(0)).label("app", "bench").grace(0).build();
        let template = stored::pod(&client, &pod).await?;
        Ok(Self { template, copies: AtomicUsize::default(), client, cluster })
    }

    /// Puts pods onto nodes. All watchers have received them when this returns.
    async fn pods(&self, count: usize) -> Result<Vec<Pod>> {
        let copy = |number: usize| {
            let name = format!("pod-{}", self.copies.fetch_add(1, Ordering::Relaxed));
            stored::copy(&self.template, name, node(number % NODES))
        };
        let pods: Vec<_> = (0..count).map(copy).collect();
        stored::store_while_watched(&self.cluster.etcd()?, stored::PODS, &pods).await?;
        tokio::time::sleep(WATCH_DELAY).await;
        Ok(pods)
    }

    /// Starts the taint manager and waits until it has deleted a pod.
    async fn manager(&self) -> Result<Service> {
        let manager = Service::start(&self.cluster, MANAGER, &[]).await?;
        manager.leads().await?;
        self.warm_up().await?;
        Ok(manager)
    }

    /// Starts a kube-controller-manager that runs no other controller, and waits until it has deleted a pod.
    async fn peer(&self, qps: Option<u32>) -> Result<Process> {
        let peer = self.cluster.taint_eviction(qps)?;
        self.warm_up().await?;
        Ok(peer)
    }

    async fn warm_up(&self) -> Result<()> {
        self.pods(1).await?;
        self.taint(0..NODES).await?;
        self.until_empty().await?;
        self.untaint().await
    }

    /// Taints these nodes, all at once.
    async fn taint(&self, nodes: std::ops::Range<usize>) -> Result<()> {
        // Kubernetes timestamps have no fractions of a second.
        let added = Timestamp::from_second(Timestamp::now().as_second())?;
        let taint = json!([{"key": "bench", "effect": "NoExecute", "timeAdded": added.to_string()}]);
        self.set_taints(nodes, &taint).await
    }

    /// Removes all taints. All watchers have received that when this returns.
    async fn untaint(&self) -> Result<()> {
        self.set_taints(0..NODES, &json!([])).await?;
        tokio::time::sleep(WATCH_DELAY).await;
        Ok(())
    }

    async fn set_taints(&self, nodes: std::ops::Range<usize>, taints: &Value) -> Result<()> {
        let api: Api<Node> = Api::all(self.client.clone());
        let patch = Patch::Merge(json!({"spec": {"taints": taints}}));
        try_join_all(
            nodes
                .map(node)
                .map(async |name| api.patch_metadata(&name, &PatchParams::default(), &patch).await),
        )
        .await
        .context("tainting nodes")?;
        Ok(())
    }

    /// Waits until no pod is left.
    async fn until_empty(&self) -> Result<()> {
        let all = watcher::Config::default();
        wait::all(self.api(), all, "are gone", LIMIT, <[_]>::is_empty).await?;
        Ok(())
    }

    fn api(&self) -> Api<Pod> {
        Api::default_namespaced(self.client.clone())
    }
}

fn node(number: usize) -> String {
    format!("node-{number}")
}

/// The node that a pod is on.
fn node_of(pod: &Pod) -> String {
    pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_else(|| pod.name_any())
}

//! The baseline for every other benchmark: how fast the control plane boots, how many evictions it processes when
//! nothing else runs, and how fast `kubectl drain` is.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::PostParams;
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt as _};

use super::{Progress, Results, median};
use crate::cluster::Cluster;
use crate::{objects, wait};

const ROUNDS: usize = 3;
const PODS_PER_NODE: usize = 50;
const IN_FLIGHT: usize = 32;

pub(super) async fn run(progress: Progress) -> Result<Results> {
    let begun = Instant::now();
    let cluster = Cluster::builder().name("baseline").audit(false).boot().await?;
    let boot = begun.elapsed().as_secs_f64();
    let client = cluster.client().await?;
    let nodes: Api<Node> = Api::all(client.clone());
    for name in ["raw", "kubectl"] {
        nodes
            .create(&PostParams::default(), &objects::node(name).build())
            .await
            .context("creating a node")?;
    }
    let (mut raw, mut kubectl) = (Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        progress(&format!("round {round} of {ROUNDS}"));
        let pods = fill(&client, "raw").await?;
        raw.push(rate(evict(&client, &pods).await?));
        fill(&client, "kubectl").await?;
        let begun = Instant::now();
        cluster.kubectl(&["drain", "kubectl", "--force"]).await?.success().context("kubectl drain")?;
        kubectl.push(rate(begun.elapsed()));
        cluster.kubectl(&["uncordon", "kubectl"]).await?.success()?;
    }
    cluster.shutdown().await;
    Ok(vec![
        ("boot_s", boot),
        ("raw_evictions_per_s", median(raw)),
        ("kubectl_drain_pods_per_s", median(kubectl)),
    ])
}

#[expect(clippy::cast_precision_loss, reason = "there are fifty pods")]
fn rate(took: Duration) -> f64 {
    PODS_PER_NODE as f64 / took.as_secs_f64()
}

/// Puts pods onto a node and waits until all run and none of an earlier round is left.
async fn fill(client: &Client, node: &str) -> Result<Vec<Pod>> {
    let api: Api<Pod> = Api::default_namespaced(client.clone());
    let of_node = || watcher::Config::default().labels(&format!("bench={node}"));
    wait::all(
        api.clone(),
        of_node(),
        "of the last round are gone",
        Duration::from_secs(120),
        <[Pod]>::is_empty,
    )
    .await?;
    stream::iter(0..PODS_PER_NODE)
        .map(|number| {
            let pod =
                objects::pod(&format!("{node}-{number}")).node(node).label("bench", node).grace(0).build();
            let api = api.clone();
            async move { api.create(&PostParams::default(), &pod).await }
        })
        .buffer_unordered(IN_FLIGHT)
        .try_collect::<Vec<_>>()
        .await
        .context("creating pods")?;
    wait::all(api, of_node(), "all run", Duration::from_secs(120), |pods: &[Pod]| {
        let runs =
            |pod: &Pod| pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running");
        pods.len() == PODS_PER_NODE && pods.iter().all(runs)
    })
    .await
}

/// Evicts pods with plain eviction requests.
async fn evict(client: &Client, pods: &[Pod]) -> Result<Duration> {
    let api: Api<Pod> = Api::default_namespaced(client.clone());
    let begun = Instant::now();
    stream::iter(pods)
        .map(async |pod| super::evict(&api, &pod.name_any()).await)
        .buffer_unordered(IN_FLIGHT)
        .try_collect::<()>()
        .await?;
    Ok(begun.elapsed())
}

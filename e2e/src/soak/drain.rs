//! The campaign `drain`: the maintenance controller and the evacuation controller are killed repeatedly while ten
//! nodes with 30 pods each are drained and returned to service.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use haulout_api_types::node_maintenance::Stage;
use haulout_api_types::{Evacuation, NodeMaintenance};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Client, ResourceExt};
use serde_json::json;

use super::each_evicted_once;
use super::replicas::Replicas;
use crate::harness::fleet::Fleet;
use crate::nodes::NodeState;
use crate::{Cluster, wait};

const NODES: usize = 10;
const PODS_PER_NODE: usize = 30;
const NAME: &str = "soak";
const LIMIT: Duration = Duration::from_secs(300);

/// Runs one round. Returns a summary.
pub(super) async fn round(mut random: fastrand::Rng) -> Result<String> {
    let cluster = Cluster::builder().name("soak-drain").audit(true).boot().await?;
    cluster.install_chart(&[]).await?;
    let client = cluster.client().await?;
    let fleet = Fleet::create(&client, NODES, PODS_PER_NODE, |pod| pod.grace(1)).await?;
    let pods = fleet.fill().await?;
    let before = node_states(&fleet).await?;
    let mut controllers = [
        Replicas::start(&cluster, "maintenance-controller").await?,
        Replicas::start(&cluster, "evacuation-controller").await?,
    ];
    let mark = cluster.requests_mark()?;
    let mut ending = random.fork();
    let killing = async {
        for _ in 0..random.u32(4..10) {
            let victim = random.usize(..controllers.len());
            let Some(victim) = controllers.get_mut(victim) else { continue };
            victim.kill_leader(Duration::from_millis(random.u64(0..1500))).await?;
        }
        // From here on, nothing is killed.
        std::future::pending::<Result<()>>().await
    };
    tokio::select! {
        done = maintain(&client, &mut ending) => done?,
        failed = killing => failed?,
    }
    each_evicted_once(&cluster.requests_since(mark)?, &pods)?;
    check(&client, &fleet, &pods, &before).await?;
    let kills: Vec<_> = controllers.iter().map(|replicas| replicas.kills.to_string()).collect();
    Ok(format!("{} pods left during {} kills", pods.len(), kills.join(" + ")))
}

async fn node_states(fleet: &Fleet) -> Result<BTreeMap<String, NodeState>> {
    let nodes = fleet.nodes().list(&ListParams::default()).await?;
    let names = fleet.names();
    let node_states = nodes.items.iter().map(|node| (node.name_any(), NodeState::of(node)));
    Ok(node_states.filter(|(name, _)| names.contains(name)).collect())
}

/// Drains the nodes and returns them to service, by completing or deleting the maintenance.
async fn maintain(client: &Client, random: &mut fastrand::Rng) -> Result<()> {
    let api: Api<NodeMaintenance> = Api::all(client.clone());
    let maintenance = Fleet::maintenance(NAME, Stage::Drain)?;
    api.create(&PostParams::default(), &maintenance).await.context("creating a NodeMaintenance")?;
    let found = wait::present(api.clone(), NAME, "is drained", LIMIT, Fleet::is_drained).await?;
    let drain = found.status.and_then(|status| status.drain_status).unwrap_or_default();
    ensure!(
        (drain.nodes_drained, drain.nodes_selected, drain.pods_left) == (10, 10, 0),
        "the maintenance is drained, but its drain status is {drain:?}"
    );
    if random.bool() {
        let complete = Patch::Merge(json!({"spec": {"stage": Stage::Complete}}));
        api.patch(NAME, &PatchParams::default(), &complete).await.context("completing")?;
        let done = |m: &NodeMaintenance| m.finalizers().is_empty();
        wait::present(api.clone(), NAME, "is completed", LIMIT, done).await?;
    }
    api.delete(NAME, &DeleteParams::default()).await.context("deleting the NodeMaintenance")?;
    wait::gone(api, NAME, LIMIT).await
}

/// What must hold at the end.
async fn check(
    client: &Client,
    fleet: &Fleet,
    pods: &[Pod],
    before: &BTreeMap<String, NodeState>,
) -> Result<()> {
    let evacuations: Api<Evacuation> = Api::all(client.clone());
    wait::all(evacuations, watcher::Config::default(), "are gone", LIMIT, <[_]>::is_empty).await?;
    for (name, look) in before {
        let node = wait::present(fleet.nodes(), name, "is there", LIMIT, |_: &Node| true).await?;
        let after = NodeState::of(&node);
        ensure!(after == *look, "node {name} was {look:?} and is {after:?}");
    }
    let left = fleet.pods().list(&ListParams::default()).await?;
    let gone = |pod: &&Pod| !left.items.iter().any(|other| other.uid() == pod.uid());
    let stayed: Vec<_> = pods.iter().filter(|pod| !gone(pod)).map(ResourceExt::name_any).collect();
    ensure!(stayed.is_empty(), "these pods never left: {stayed:?}");
    Ok(())
}

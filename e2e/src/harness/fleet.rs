//! Full nodes with pods of ReplicaSets, and spare nodes for their successors: the setup for a drain.

use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::future::try_join_all;
use haulout_api_types::node_maintenance::Stage;
use haulout_api_types::{NodeMaintenance, names};
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, Client};
use serde_json::json;

use crate::nodes::is_initialized;
use crate::objects::PodBuilder;
use crate::{objects, wait};

const NAMESPACE: &str = "fleet";
const POOL: &str = "pool";
const LIMIT: Duration = Duration::from_secs(300);

/// Nodes with a fixed number of pods each, and one ReplicaSet per node. Requires a scheduler.
pub(crate) struct Fleet {
    nodes: usize,
    pods_per_node: usize,
    pod: fn(PodBuilder) -> PodBuilder,
    client: Client,
}

impl Fleet {
    /// Creates the nodes. Their pod capacity equals the number of pods, so that the scheduler fills all of them.
    pub(crate) async fn create(
        client: &Client,
        nodes: usize,
        pods_per_node: usize,
        pod: fn(PodBuilder) -> PodBuilder,
    ) -> Result<Self> {
        let fleet = Self { nodes, pods_per_node, pod, client: client.clone() };
        let params = PostParams::default();
        let namespaces: Api<Namespace> = Api::all(client.clone());
        namespaces
            .create(&params, &objects::namespace(NAMESPACE))
            .await
            .context("failed to create a namespace")?;
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), NAMESPACE);
        wait::present(accounts, "default", "exists", LIMIT, |_| true).await?;
        let api = fleet.nodes();
        for name in fleet.names() {
            let node = objects::node(&name).label(POOL, "old").capacity("cpu", "96");
            let node = node.capacity("memory", "384Gi").capacity("pods", &pods_per_node.to_string());
            api.create(&params, &node.build()).await.context("failed to create a node")?;
        }
        for name in fleet.spare() {
            let node = objects::node(&name).label(POOL, "new").unschedulable();
            api.create(&params, &node.build()).await.context("failed to create a node")?;
        }
        let initialized = |nodes: &[Node]| nodes.iter().all(is_initialized);
        wait::all(api, watcher::Config::default(), "are ready", LIMIT, initialized).await?;
        Ok(fleet)
    }

    /// The names of the full nodes.
    pub(crate) fn names(&self) -> Vec<String> {
        (0..self.nodes).map(|number| format!("old-{number}")).collect()
    }

    fn spare(&self) -> Vec<String> {
        (0..self.nodes).map(|number| format!("new-{number}")).collect()
    }

    /// Fills the nodes and returns their pods when all are running. From then on, new pods go to the spare nodes.
    pub(crate) async fn fill(&self) -> Result<Vec<Pod>> {
        self.open_spare(false).await?;
        let sets: Api<ReplicaSet> = Api::namespaced(self.client.clone(), NAMESPACE);
        for number in 0..self.nodes {
            let app = objects::deployment(&format!("app-{number}")).namespace(NAMESPACE);
            let app = app.replicas(i32::try_from(self.pods_per_node)?).pods(self.pod);
            sets.create(&PostParams::default(), &app.build_replica_set())
                .await
                .context("failed to create pods")?;
        }
        let wanted = self.nodes * self.pods_per_node;
        let run = |pods: &[Pod]| pods.len() == wanted && pods.iter().all(runs);
        let pods = wait::all(self.pods(), watcher::Config::default(), "all run", LIMIT, run).await?;
        self.open_spare(true).await?;
        Ok(pods)
    }

    /// Deletes all pods and uncordons the nodes.
    pub(crate) async fn clear(&self) -> Result<()> {
        let sets: Api<ReplicaSet> = Api::namespaced(self.client.clone(), NAMESPACE);
        let params = ListParams::default();
        sets.delete_collection(&DeleteParams::foreground(), &params)
            .await
            .context("failed to delete pods")?;
        wait::all(self.pods(), watcher::Config::default(), "are gone", LIMIT, <[_]>::is_empty).await?;
        wait::all(sets, watcher::Config::default(), "are gone", LIMIT, <[_]>::is_empty).await?;
        self.open(&self.names(), true).await
    }

    /// Cordons all full nodes.
    pub(crate) async fn cordon(&self) -> Result<()> {
        self.open(&self.names(), false).await
    }

    async fn open_spare(&self, open: bool) -> Result<()> {
        self.open(&self.spare(), open).await
    }

    async fn open(&self, nodes: &[String], open: bool) -> Result<()> {
        let (api, patch) = (self.nodes(), Patch::Merge(json!({"spec": {"unschedulable": !open}})));
        let params = PatchParams::default();
        try_join_all(nodes.iter().map(|name| api.patch(name, &params, &patch)))
            .await
            .context("failed to cordon")?;
        Ok(())
    }

    /// A maintenance of all full nodes.
    pub(crate) fn maintenance(name: &str, stage: Stage) -> Result<NodeMaintenance> {
        let old = json!({"key": POOL, "operator": "In", "values": ["old"]});
        let maintenance = json!({
            "metadata": {"name": name},
            "spec": {"nodeSelector": {"nodeSelectorTerms": [{"matchExpressions": [old]}]}, "stage": stage},
        });
        serde_json::from_value(maintenance).context("failed to create a NodeMaintenance")
    }

    /// Whether a maintenance has nodes and has drained them.
    pub(crate) fn is_drained(maintenance: &NodeMaintenance) -> bool {
        let conditions = maintenance.status.iter().flat_map(|status| &status.conditions);
        let mut conditions = conditions.filter(|condition| condition.type_ == names::condition::DRAINED);
        conditions.any(|condition| condition.status == "True" && condition.reason == names::reason::COMPLETE)
    }

    pub(crate) fn nodes(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }
}

fn runs(pod: &Pod) -> bool {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
}

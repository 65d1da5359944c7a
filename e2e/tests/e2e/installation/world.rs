//! A cluster with the chart and one replica of each controller, and what the story of an installation does there.

use std::collections::BTreeSet;
use std::time::Duration;

use haulout_api_types::evacuators::evacuation_name;
use haulout_api_types::node_maintenance::Stage;
use haulout_api_types::{Evacuation, NodeMaintenance, names};
use haulout_e2e::nodes::Look;
use haulout_e2e::objects::PodBuilder;
use haulout_e2e::{Cluster, Service, objects, wait};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

/// Long enough for a busy machine.
pub(super) const SOON: Duration = Duration::from_secs(60);
/// Where the pods are.
pub(super) const NAMESPACE: &str = "shop";

pub(super) struct World {
    pub(super) controller: Service,
    pub(super) evacuation_controller: Service,
    pub(super) client: Client,
    pub(super) cluster: Cluster,
}

impl World {
    /// Without a scheduler: pods say themselves where they are.
    pub(super) async fn new(name: &str) -> Self {
        let cluster = Cluster::builder().name(name).scheduler(false).boot().await.unwrap();
        cluster.install_chart(&[]).await.unwrap();
        Self::on(cluster).await
    }

    /// On a cluster with the chart.
    pub(super) async fn on(cluster: Cluster) -> Self {
        let client = cluster.client().await.unwrap();
        let namespaces: Api<Namespace> = Api::all(client.clone());
        namespaces.create(&PostParams::default(), &objects::namespace(NAMESPACE)).await.unwrap();
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), NAMESPACE);
        wait::present(accounts, "default", "exists", SOON, |_| true).await.unwrap();
        let start = async |name| Service::start(&cluster, name, &["--lease-seconds", "3"]).await.unwrap();
        let controller = start("maintenance-controller").await;
        let evacuations = start("evacuation-controller").await;
        controller.leads().await.unwrap();
        evacuations.leads().await.unwrap();
        Self { controller, evacuation_controller: evacuations, client, cluster }
    }

    pub(super) fn nodes(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    pub(super) fn maintenances(&self) -> Api<NodeMaintenance> {
        Api::all(self.client.clone())
    }

    pub(super) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    pub(super) fn evacuations(&self) -> Api<Evacuation> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    pub(super) fn explained<T>(&self, result: anyhow::Result<T>) -> T {
        result.unwrap_or_else(|error| {
            let text = self.controller.text();
            let lines: Vec<_> = text.lines().collect();
            panic!("{error:#}\n{}", lines[lines.len().saturating_sub(15)..].join("\n"))
        })
    }

    /// A node with the label `pool`, which is ready.
    pub(super) async fn node(&self, name: &str, pool: &str) -> Node {
        self.node_from(objects::node(name).label("pool", pool)).await
    }

    pub(super) async fn node_from(&self, node: haulout_e2e::objects::NodeBuilder) -> Node {
        let node = self.nodes().create(&PostParams::default(), &node.build()).await.unwrap();
        // The controller manager adds an annotation and labels of its own: what comes later would look like ours.
        let is_complete = |node: &Node| {
            condition(node, "Ready").is_some_and(|(status, _)| status == "True")
                && node.annotations().contains_key("node.alpha.kubernetes.io/ttl")
                && node.labels().contains_key("beta.kubernetes.io/os")
        };
        wait::present(self.nodes(), &node.name_any(), "is ready", SOON, is_complete).await.unwrap()
    }

    /// A running pod on a node.
    pub(super) async fn pod(&self, name: &str, node: &str) -> Pod {
        self.pod_from(objects::pod(name), node).await
    }

    pub(super) async fn pod_from(&self, pod: PodBuilder, node: &str) -> Pod {
        let pod = pod.namespace(NAMESPACE).node(node).build();
        let pod = self.pods().create(&PostParams::default(), &pod).await.unwrap();
        let runs =
            |pod: &Pod| pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running");
        wait::present(self.pods(), &pod.name_any(), "runs", SOON, runs).await.unwrap()
    }

    /// A pod whose evacuator takes its time, so that its Evacuation stays.
    pub(super) async fn slow_pod(&self, name: &str, node: &str) -> Pod {
        self.pod_from(objects::pod(name).annotation(&slow(), "100"), node).await
    }

    /// The Evacuation of a pod, once its evacuator is in charge.
    pub(super) async fn in_charge(&self, pod: &Pod) -> String {
        let name = evacuation_name(&pod.uid().unwrap(), &pod.name_any());
        let active = |e: &Evacuation| e.status.as_ref().is_some_and(|s| s.active_evacuator_class.is_some());
        self.explained(
            wait::present(self.evacuations(), &name, "is in an evacuator's hands", SOON, active).await,
        );
        name
    }

    pub(super) async fn until_pod_gone(&self, name: &str) {
        self.explained(wait::gone(self.pods(), name, SOON).await);
    }

    /// A maintenance of the nodes in a pool.
    pub(super) async fn maintain(&self, name: &str, pool: &str, stage: Stage) -> NodeMaintenance {
        self.maintain_with(name, pool, stage, json!([])).await
    }

    pub(super) async fn maintain_with(
        &self,
        name: &str,
        pool: &str,
        stage: Stage,
        plan: Value,
    ) -> NodeMaintenance {
        let maintenance = serde_json::from_value(json!({
            "apiVersion": "nodemaintenance.k8s.io/v1alpha1",
            "kind": "NodeMaintenance",
            "metadata": {"name": name},
            "spec": {
                "nodeSelector": {"nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "pool", "operator": "In", "values": pool.split(',').collect::<Vec<_>>()}]},
                ]},
                "stage": stage,
                "drainPlan": plan,
            },
        }));
        self.maintenances().create(&PostParams::default(), &maintenance.unwrap()).await.unwrap()
    }

    pub(super) async fn set_stage(&self, name: &str, stage: Stage) {
        let patch = Patch::Merge(json!({"spec": {"stage": stage}}));
        self.maintenances().patch(name, &PatchParams::default(), &patch).await.unwrap();
    }

    /// Waits until a maintenance is like this.
    pub(super) async fn until(
        &self,
        name: &str,
        what: &str,
        condition: impl FnMut(&NodeMaintenance) -> bool,
    ) -> NodeMaintenance {
        self.explained(wait::present(self.maintenances(), name, what, SOON, condition).await)
    }

    pub(super) async fn until_drained(&self, name: &str) -> NodeMaintenance {
        self.until(name, "is drained", |m| is(m, names::condition::DRAINED)).await
    }

    /// Waits until a maintenance is completed and has let go of everything.
    pub(super) async fn until_completed(&self, name: &str) -> NodeMaintenance {
        let done = |m: &NodeMaintenance| {
            let begun = m.status.iter().flat_map(|status| &status.stage_statuses);
            m.finalizers().is_empty() && begun.into_iter().any(|begun| begun.name == Stage::Complete)
        };
        self.until(name, "is completed", done).await
    }

    pub(super) async fn until_node(
        &self,
        name: &str,
        what: &str,
        condition: impl FnMut(&Node) -> bool,
    ) -> Node {
        self.explained(wait::present(self.nodes(), name, what, SOON, condition).await)
    }

    /// Waits until a node is cordoned, with our marks on it.
    pub(super) async fn until_cordoned(&self, name: &str) -> Node {
        self.until_node(name, "is cordoned", |node| is_cordoned(node) && is_marked(node)).await
    }

    /// Waits until a node is as it was before its maintenance.
    pub(super) async fn until_as_before(&self, before: &Node) {
        let same = |node: &Node| Look::of(node) == Look::of(before);
        let name = before.name_any();
        let found = wait::present(self.nodes(), &name, "is as it was", SOON, same).await;
        if found.is_err() {
            let node = self.nodes().get(&name).await.unwrap();
            assert_eq!(Look::of(&node), Look::of(before), "node {name} is not as it was");
        }
        self.explained(found);
    }

    /// The pods that have an Evacuation.
    pub(super) async fn evacuated(&self) -> BTreeSet<String> {
        let all = self.evacuations().list(&kube::api::ListParams::default()).await.unwrap();
        all.items.into_iter().map(|evacuation| evacuation.spec.pod_ref.name).collect()
    }
}

/// The annotation of an evacuator that takes its time.
pub(super) fn slow() -> String {
    format!("{}slow.example.com", names::EVACUATOR_ANNOTATION_PREFIX)
}

fn is_cordoned(node: &Node) -> bool {
    node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or_default()
}

fn is_marked(node: &Node) -> bool {
    node.annotations().contains_key(names::BEFORE_MAINTENANCE_ANNOTATION)
        && condition(node, names::condition::MAINTENANCE_IN_PROGRESS).is_some()
}

/// Status and reason of a node's condition.
fn condition(node: &Node, type_: &str) -> Option<(String, String)> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    let found = conditions.iter().find(|condition| condition.type_ == type_)?;
    Some((found.status.clone(), found.reason.clone().unwrap_or_default()))
}

/// Whether a condition of a maintenance is true.
fn is(maintenance: &NodeMaintenance, type_: &str) -> bool {
    let conditions = maintenance.status.iter().flat_map(|status| &status.conditions);
    conditions.into_iter().any(|condition| condition.type_ == type_ && condition.status == "True")
}

//! A cluster with many nodes and pods, overlapping maintenances, and the events that happen in it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use haulout_api_types::{Evacuation, NodeMaintenance};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

use super::super::{Progress, stored};
use super::{CONTROLLER, MAINTENANCES, PODS_PER_NODE};
use crate::cluster::{Cluster, Component};
use crate::service::Service;
use crate::{objects, wait};

const NAMESPACES: usize = 20;
/// Number of different values of the node label that maintenances select by.
const SLOTS: usize = 100;
const SLOT: &str = "slot";
const MAX_PRIORITY: i32 = 5_000;
const LIMIT: Duration = Duration::from_secs(60);

pub(super) struct BenchEnv {
    random: fastrand::Rng,
    node: Node,
    pod: Pod,
    nodes: Vec<Node>,
    /// The pods that exist.
    pods: Vec<Pod>,
    made: usize,
    client: Client,
    pub(super) cluster: Cluster,
}

impl BenchEnv {
    pub(super) async fn new(progress: Progress) -> Result<Self> {
        let booting = Cluster::builder().name("bench-maintenance-scale").scheduler(false).audit(false);
        let cluster = booting.progress(progress).boot().await?;
        cluster.install_chart(&[("admissionWebhook.enabled", "false")]).await?;
        let client = cluster.client().await?;
        let nodes: Api<Node> = Api::all(client.clone());
        nodes.create(&PostParams::default(), &objects::node("template").build()).await?;
        let pod = objects::pod("template").node("template").grace(0).label("pod-template-hash", "5d9c7b8f6");
        let pod = stored::pod(&client, &pod.build()).await?;
        let ready = |node: &Node| {
            let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
            conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
        };
        let mut node = wait::present(nodes.clone(), "template", "is ready", LIMIT, ready).await?;
        node.metadata.resource_version = None;
        let namespaces: Api<Namespace> = Api::all(client.clone());
        for namespace in (0..NAMESPACES).map(namespace) {
            namespaces.create(&PostParams::default(), &objects::namespace(&namespace)).await?;
        }
        // They would delete objects that nothing runs.
        for component in [Component::ControllerManager, Component::Kwok, Component::KwokNodes] {
            cluster.stop(component).await?;
        }
        nodes.delete("template", &DeleteParams::default()).await?;
        let random = fastrand::Rng::with_seed(7);
        let mut env = Self { random, node, pod, nodes: vec![], pods: vec![], made: 0, client, cluster };
        env.create_maintenances().await?;
        Ok(env)
    }

    async fn create_maintenances(&mut self) -> Result<()> {
        let api: Api<NodeMaintenance> = Api::all(self.client.clone());
        let random = &mut self.random;
        for number in 0..MAINTENANCES {
            let slots: Vec<_> = (0..SLOTS).filter(|_| random.bool()).map(|slot| slot.to_string()).collect();
            let entry = |pod_priority: i32, app: Option<&str>| {
                let selector = app.map(|app| json!({"matchLabels": {"app": app}}));
                json!({"podType": "Default", "podPriority": pod_priority, "podSelector": selector})
            };
            let plan = [
                entry(random.i32(500..600), None),
                entry(random.i32(1000..2000), random.bool().then_some("db")),
                entry(random.i32(2000..4000), None),
                entry(MAX_PRIORITY, None),
            ];
            let maintenance = json!({
                "metadata": {"name": format!("m-{number}")},
                "spec": {
                    "stage": "Drain",
                    "drainPlan": plan,
                    "nodeSelector": {"nodeSelectorTerms": [
                        {"matchExpressions": [{"key": SLOT, "operator": "In", "values": slots}]},
                    ]},
                },
            });
            let maintenance = serde_json::from_value(maintenance).context("making a NodeMaintenance")?;
            api.create(&PostParams::default(), &maintenance).await.context("creating a NodeMaintenance")?;
        }
        Ok(())
    }

    /// Adds nodes and their pods until this number of nodes is reached.
    pub(super) async fn grow(&mut self, size: usize) -> Result<()> {
        let (mut nodes, mut pods) = (Vec::new(), Vec::new());
        for number in self.nodes.len()..size {
            let mut node = self.node.clone();
            node.metadata.name = Some(format!("node-{number}"));
            node.metadata.uid = Some(stored::uid());
            let slot = self.random.usize(..SLOTS).to_string();
            node.metadata.labels.get_or_insert_default().insert(SLOT.into(), slot);
            for _ in 0..PODS_PER_NODE {
                pods.push(self.pod_on(&node));
            }
            nodes.push(node);
        }
        let etcd = self.cluster.etcd()?;
        stored::store(&etcd, stored::NODES, &nodes).await?;
        stored::store(&etcd, stored::PODS, &pods).await?;
        self.nodes.append(&mut nodes);
        self.pods.append(&mut pods);
        Ok(())
    }

    fn pod_on(&mut self, node: &Node) -> Pod {
        let number = self.made;
        self.made += 1;
        let mut pod = stored::copy(&self.pod, format!("pod-{number}"), node.name_any());
        pod.metadata.namespace = Some(namespace(number % NAMESPACES));
        let app = ["web", "db", "cache"].get(number % 3).copied().unwrap_or_default();
        let labels: &mut BTreeMap<_, _> = pod.metadata.labels.get_or_insert_default();
        labels.insert("app".into(), app.into());
        if let Some(spec) = &mut pod.spec {
            spec.priority = Some(self.random.i32(0..MAX_PRIORITY));
        }
        pod
    }

    /// Fails if the controller does not do the work that is measured.
    pub(super) async fn ensure_drains(&self, controller: &Service, size: usize) -> Result<()> {
        let nodes = controller.metric("haulout_maintenance_nodes").await?;
        ensure!((nodes - super::count(size)).abs() < 0.5, "{nodes} of {size} nodes are under maintenance");
        let evacuating = controller.metric_where("haulout_maintenance_pods", "evacuating").await?;
        let least = super::count(size * PODS_PER_NODE) / 20.0;
        ensure!(evacuating > least, "only {evacuating} pods are evacuating by {CONTROLLER}");
        let evacuations: Api<Evacuation> = Api::all(self.client.clone());
        let first = evacuations.list(&ListParams::default().limit(1)).await?;
        ensure!(!first.items.is_empty(), "there are no Evacuations");
        Ok(())
    }

    /// Triggers one event.
    pub(super) async fn event(&mut self, number: usize) -> Result<()> {
        let node = self.random.choice(&self.nodes).context("there are nodes")?.clone();
        let name = node.name_any();
        let nodes: Api<Node> = Api::all(self.client.clone());
        let patch = |patch: Value| Patch::Merge(patch);
        let params = PatchParams::default();
        match number % 6 {
            0 => {
                let pod = self.random.choice(&self.pods).context("there are pods")?;
                let change = patch(json!({"metadata": {"labels": {"touched": number.to_string()}}}));
                self.pods_of(pod).patch(&pod.name_any(), &params, &change).await.context("changing a pod")?;
            }
            1 => {
                let pod = self.pods.swap_remove(self.random.usize(..self.pods.len()));
                let (api, now) = (self.pods_of(&pod), DeleteParams::default());
                api.delete(&pod.name_any(), &now).await.context("deleting a pod")?;
            }
            2 => {
                let pod = self.pod_on(&node);
                let etcd = self.cluster.etcd()?;
                stored::store_while_watched(&etcd, stored::PODS, std::slice::from_ref(&pod)).await?;
                self.pods.push(pod);
            }
            3 => {
                let now = jiff::Timestamp::now().to_string();
                let heartbeat = json!([{"type": "Ready", "status": "True", "lastHeartbeatTime": now}]);
                let heartbeat = Patch::Strategic(json!({"status": {"conditions": heartbeat}}));
                nodes.patch_status(&name, &params, &heartbeat).await.context("reporting for a node")?;
            }
            4 => {
                let uncordon = patch(json!({"spec": {"unschedulable": false}}));
                nodes.patch(&name, &params, &uncordon).await.context("uncordoning a node")?;
            }
            _ => {
                let slot = self.random.usize(..SLOTS).to_string();
                let relabel = patch(json!({"metadata": {"labels": {SLOT: slot}}}));
                nodes.patch(&name, &params, &relabel).await.context("labelling a node")?;
            }
        }
        Ok(())
    }

    fn pods_of(&self, pod: &Pod) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &pod.namespace().unwrap_or_default())
    }
}

fn namespace(number: usize) -> String {
    format!("team-{number}")
}

//! The cluster of a round: two pools of nodes with all kinds of workloads, spare nodes for their pods, and the
//! evacuators of the pods.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::future::try_join_all;
use haulout_api_types::evacuation::Evacuator;
use haulout_api_types::{Evacuation, NodeMaintenance};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::observer::{Expected, Intents};
use crate::nodes::is_initialized;
use crate::objects::{self, PodBuilder};
use crate::wait;

/// The namespace of all workloads.
pub(super) const NAMESPACE: &str = "shop";
/// The label by which maintenances select nodes.
pub(super) const POOL: &str = "pool";
/// The nodes that are drained, with their pools.
pub(super) const NODES: [(&str, &str); 5] = [("n0", "a"), ("n1", "a"), ("n2", "a"), ("n3", "b"), ("n4", "b")];
/// The nodes to which their pods move. The first one is drained later.
pub(super) const SPARE: [&str; 2] = ["spare-0", "spare-1"];
/// A node that was cordoned by somebody else, and a node that already had an autoscaler annotation.
const CORDONED: &str = "n4";
const PROTECTED: (&str, &str, &str) = ("n1", "karpenter.sh/do-not-disrupt", "false");
/// A priority class between those of ordinary and critical pods, and its value.
const HIGH: (&str, i32) = ("soak-high", 1000);
const LIMIT: Duration = Duration::from_secs(120);

/// Evacuator classes, named after their behaviour.
pub(super) const REPORTS: &str = "reports.example.com";
pub(super) const SILENT: &str = "silent.example.com";
pub(super) const COMPLETES: &str = "completes.example.com";
pub(super) const FORBIDS: &str = "forbids.example.com";

/// The workloads that are recreated on other nodes: kind, name and replicas.
const WORKLOADS: [(&str, &str, i32); 6] = [
    ("Deployment", "web", 6),
    ("Deployment", "api", 4),
    ("Deployment", "cache", 2),
    ("StatefulSet", "db", 3),
    ("StatefulSet", "queue", 3),
    ("Job", "batch", 3),
];
/// A Deployment without other evacuators, whose pods start slowly.
struct Slow {
    name: &'static str,
    replicas: i32,
    max_surge: i32,
    budget: Option<(&'static str, i32)>,
    /// The deletion cost of its pods.
    cost: Option<&'static str>,
}

const SLOW: [Slow; 4] = [
    Slow { name: "alone", replicas: 1, max_surge: 1, budget: None, cost: None },
    Slow { name: "single", replicas: 1, max_surge: 1, budget: Some(("minAvailable", 1)), cost: Some("5") },
    Slow { name: "solo", replicas: 1, max_surge: 1, budget: Some(("minAvailable", 1)), cost: None },
    Slow { name: "surge", replicas: 5, max_surge: 2, budget: Some(("maxUnavailable", 0)), cost: Some("7") },
];
/// Their pods become ready after this time.
const STARTS_IN: &str = "3s";
/// Those with which nobody interferes.
pub(super) const UNDISTURBED: [&str; 2] = ["alone", "single"];

/// The names of the workloads with which people interfere.
pub(super) fn apps() -> impl Iterator<Item = &'static str> {
    WORKLOADS.into_iter().map(|(_, name, _)| name).chain(disturbed_slow())
}

fn disturbed_slow() -> impl Iterator<Item = &'static str> {
    SLOW.iter().map(|slow| slow.name).filter(|name| !UNDISTURBED.contains(name))
}

/// The names of the Deployments with which people interfere. All of them allow a surge.
pub(super) fn deployments() -> impl Iterator<Item = &'static str> {
    let quick = WORKLOADS.into_iter().filter(|(kind, ..)| *kind == "Deployment").map(|(_, name, _)| name);
    quick.chain(disturbed_slow())
}

/// The workload whose pods return to the node that they left. Only some rounds have it.
pub(super) const PINNED: &str = "pinned";
/// The annotation with the deletion cost of a pod.
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// The pod that the drain has to wait for until it finishes.
pub(super) const WAITS: &str = "waits";

/// The cluster, and the expected state of its nodes at the end.
pub(super) struct SoakEnv {
    pub(super) client: Client,
    /// The expected state of each node when no maintenance holds it.
    pub(super) nodes: BTreeMap<String, Expected>,
    /// The Deployments and budgets as people have written them.
    pub(super) intents: Intents,
    /// The initial number of pods.
    pub(super) pods: usize,
}

impl SoakEnv {
    pub(super) async fn prepare(client: Client, mut random: fastrand::Rng) -> Result<Self> {
        let params = PostParams::default();
        let namespaces: Api<Namespace> = Api::all(client.clone());
        namespaces.create(&params, &objects::namespace(NAMESPACE)).await.context("creating a namespace")?;
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), NAMESPACE);
        let env = Self { client, nodes: BTreeMap::new(), intents: Intents::default(), pods: 0 };
        let class = json!({"metadata": {"name": HIGH.0}, "value": HIGH.1});
        Api::<PriorityClass>::all(env.client.clone()).create(&params, &object(class)?).await?;
        let nodes = NODES.map(|(name, pool)| node(name, pool));
        let spare = SPARE.map(|name| objects::node(name).label(POOL, "spare").unschedulable().build());
        let api = env.node_api();
        try_join_all(nodes.iter().chain(&spare).map(|node| api.create(&params, node))).await?;
        wait::present(accounts, "default", "exists", LIMIT, |_| true).await?;
        wait::all(api, watcher::Config::default(), "are ready", LIMIT, |nodes| {
            nodes.iter().all(is_initialized)
        })
        .await?;
        env.fill(&mut random).await
    }

    /// Fills the nodes, and uncordons the spare ones when all pods run.
    async fn fill(mut self, random: &mut fastrand::Rng) -> Result<Self> {
        // Each round distributes the pods differently.
        let mut evacuators: [&[&str]; 6] =
            [&[], &[], &[COMPLETES, REPORTS], &[REPORTS], &[FORBIDS], &[SILENT]];
        let mut classes = ["", "", "", HIGH.0, HIGH.0, "system-cluster-critical"];
        let mut budgets = [
            None,
            None,
            Some(("maxUnavailable", 0)),
            Some(("maxUnavailable", 0)),
            Some(("maxUnavailable", 1)),
            Some(("minAvailable", 1)),
        ];
        random.shuffle(&mut evacuators);
        random.shuffle(&mut classes);
        random.shuffle(&mut budgets);
        let dealt = evacuators.into_iter().zip(classes).zip(budgets);
        for ((kind, name, replicas), ((evacuators, class), budget)) in WORKLOADS.into_iter().zip(dealt) {
            if let Some((field, number)) = budget {
                self.budget(name, name, field, number).await?;
            }
            let template = pod(name, evacuators, class);
            self.workload(kind, name, replicas, template).await?;
            self.pods += usize::try_from(replicas)?;
        }
        for slow in &SLOW {
            self.slow(slow).await?;
        }
        let mut alone = vec![
            pod("bare-0", &[REPORTS], "").node("n0"),
            pod("bare-1", &[], HIGH.0).node("n3"),
            pod("stays", &[], "").label("cluster.x-k8s.io/drain", "skip").node("n1"),
        ];
        if random.bool() {
            let waits = pod(WAITS, &[], "").label("cluster.x-k8s.io/drain", "wait-completed").runs_for("45s");
            alone.push(waits.node("n2"));
        }
        for pod in alone {
            self.pod_api().create(&PostParams::default(), &pod.build()).await.context("creating a pod")?;
            self.pods += 1;
        }
        let wanted = self.pods;
        let run = |pods: &[Pod]| pods.len() == wanted && pods.iter().all(runs);
        wait::all(self.pod_api(), watcher::Config::default(), "all run", LIMIT, run).await?;
        for name in SPARE {
            self.cordon(name, false).await?;
        }
        if random.u8(..3) == 0 {
            let template =
                pod(PINNED, &[], "").tolerates("node.kubernetes.io/unschedulable", "NoSchedule", None);
            let template = template.with(|spec| {
                let node = BTreeMap::from([("kubernetes.io/hostname".to_owned(), "n0".to_owned())]);
                spec.node_selector = Some(node);
            });
            self.workload("Deployment", PINNED, 1, template).await?;
        }
        self.cordon(CORDONED, true).await?;
        for name in NODES.map(|(name, _)| name).into_iter().chain([SPARE[0]]) {
            let annotations = (name == PROTECTED.0).then(|| (PROTECTED.1.to_owned(), PROTECTED.2.to_owned()));
            let expected =
                Expected { cordoned: name == CORDONED, annotations: annotations.into_iter().collect() };
            self.nodes.insert(name.to_owned(), expected);
        }
        Ok(self)
    }

    async fn slow(&mut self, slow: &Slow) -> Result<()> {
        let Slow { name, replicas, max_surge, budget, cost } = slow;
        if let Some((field, number)) = budget {
            self.budget(name, name, field, *number).await?;
        }
        let template = pod(name, &[], "").annotation("haulout.test/ready-after", STARTS_IN);
        let template = match cost {
            Some(cost) => template.annotation(DELETION_COST, cost),
            None => template,
        };
        let mut deployment = objects::deployment(name).namespace(NAMESPACE).replicas(*replicas);
        deployment = deployment.pods(|_| template);
        let mut deployment = serde_json::to_value(deployment.build())?;
        if let Some(spec) = deployment.pointer_mut("/spec").and_then(Value::as_object_mut) {
            spec.insert(
                "strategy".into(),
                json!({"rollingUpdate": {"maxSurge": max_surge, "maxUnavailable": 0}}),
            );
        }
        let created = self.deployment_api().create(&PostParams::default(), &object(deployment)?).await;
        self.intents.wrote("Deployment", &created.with_context(|| format!("creating {name}"))?.metadata);
        self.pods += usize::try_from(*replicas)?;
        Ok(())
    }

    async fn workload(&mut self, kind: &str, name: &str, replicas: i32, template: PodBuilder) -> Result<()> {
        let labels = json!({"matchLabels": {"app": name}});
        let mut template = serde_json::to_value(template.template())?;
        let (group, plural) = match kind {
            "Job" => ("batch", "jobs"),
            "StatefulSet" => ("apps", "statefulsets"),
            _ => ("apps", "deployments"),
        };
        let spec = if kind == "Job" {
            if let Some(spec) = template.get_mut("spec").and_then(Value::as_object_mut) {
                spec.insert("restartPolicy".into(), "Never".into());
            }
            // Each pod that is evicted counts as a failure.
            json!({"parallelism": replicas, "completions": 100, "backoffLimit": 1000, "template": template})
        } else {
            let parallel = (kind == "StatefulSet").then_some("Parallel");
            json!({
                "replicas": replicas, "selector": labels, "template": template,
                "serviceName": parallel.map(|_| name), "podManagementPolicy": parallel,
            })
        };
        let kind = kube::api::GroupVersionKind::gvk(group, "v1", kind);
        let resource = kube::api::ApiResource::from_gvk_with_plural(&kind, plural);
        let api: Api<kube::api::DynamicObject> =
            Api::namespaced_with(self.client.clone(), NAMESPACE, &resource);
        let object = object(json!({
            "apiVersion": resource.api_version, "kind": resource.kind,
            "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec,
        }))?;
        let created = api.create(&PostParams::default(), &object).await;
        let created = created.with_context(|| format!("creating {name}"))?;
        if kind.kind == "Deployment" {
            self.intents.wrote("Deployment", &created.metadata);
        }
        Ok(())
    }

    /// Creates a budget for the pods of this workload.
    pub(super) async fn budget(&mut self, name: &str, app: &str, field: &str, number: i32) -> Result<()> {
        let budget = json!({
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"selector": {"matchLabels": {"app": app}}, field: number},
        });
        let created = self.budget_api().create(&PostParams::default(), &object(budget)?).await;
        self.intents.wrote("PodDisruptionBudget", &created.context("creating a budget")?.metadata);
        Ok(())
    }

    pub(super) async fn cordon(&self, node: &str, cordoned: bool) -> Result<()> {
        let patch = Patch::Merge(json!({"spec": {"unschedulable": cordoned}}));
        self.node_api().patch(node, &PatchParams::default(), &patch).await.context("changing a cordon")?;
        Ok(())
    }

    pub(super) fn node_api(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    pub(super) fn pod_api(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    pub(super) fn budget_api(&self) -> Api<PodDisruptionBudget> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    pub(super) fn deployment_api(&self) -> Api<Deployment> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    pub(super) fn evacuation_api(&self) -> Api<Evacuation> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    pub(super) fn maintenance_api(&self) -> Api<NodeMaintenance> {
        Api::all(self.client.clone())
    }
}

/// A node without maintenance.
pub(super) fn node(name: &str, pool: &str) -> Node {
    let node = objects::node(name).label(POOL, pool);
    let (protected, key, value) = PROTECTED;
    if name == protected { node.annotation(key, value) } else { node }.build()
}

/// A pod that takes a second to terminate, so that its successor with the same name is distinguishable.
fn pod(app: &str, evacuators: &[&str], class: &str) -> PodBuilder {
    let pod = objects::pod(app).namespace(NAMESPACE).label("app", app).delete_delay(1).grace(2);
    let pod = if class.is_empty() { pod } else { pod.priority_class(class) };
    // Pods of a Job would finish at once.
    let pod = if app == "batch" { pod.runs_for("600s") } else { pod };
    (1..).zip(evacuators.iter().rev()).fold(pod, |pod, (priority, class)| {
        let (key, value) =
            Evacuator { evacuator_class: (*class).to_owned(), priority, role: None }.annotation();
        pod.annotation(&key, &value)
    })
}

fn runs(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// An object from its JSON.
pub(super) fn object<K: DeserializeOwned>(json: Value) -> Result<K> {
    serde_json::from_value(json).context("building an object")
}

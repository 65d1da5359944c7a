//! Builders for tests: pods, nodes and maintenances.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use haulout_api_types::drain_plan::normalise;
use haulout_api_types::drain_rule::DrainRule;
use haulout_api_types::drain_rules::DrainRules;
use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::{DrainPlanEntry, PodType, Stage};
use haulout_api_types::selector::NodeMatcher;
use haulout_api_types::uid::Uid;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::assess::Desired;
use crate::facts::{EvacuationOwnership, MaintenanceFacts, NodeFacts, PodFacts, PodKey};
use crate::plan::{Plan, ServedPodTypes};
use crate::planner::{Planner, PodScope};

pub(crate) type Map = BTreeMap<String, String>;

pub(crate) fn labels(of: &[(&str, &str)]) -> Map {
    of.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
}

pub(crate) fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + second).unwrap()
}

/// The UID of a pod of this name.
pub(crate) fn uid(name: &str) -> Uid {
    let hash = |seed: u8| {
        let mut hasher = DefaultHasher::new();
        (seed, name).hash(&mut hasher);
        hasher.finish()
    };
    let (high, low) = (hash(0), hash(1));
    let text = format!(
        "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        high >> 32,
        high >> 16 & 0xffff,
        high & 0xffff,
        low >> 48,
        low & 0xffff_ffff_ffff
    );
    text.parse().unwrap()
}

/// A pod `name` on `node`, of type Default unless changed.
pub(crate) fn pod(node: &str, name: &str, priority: i32) -> PodFacts<Map> {
    PodFacts {
        key: PodKey { namespace: "ns".into(), name: name.into(), uid: uid(name) },
        node: node.into(),
        labels: Map::new(),
        pod_type: PodType::Default,
        priority,
        finished: false,
        terminating: false,
        deadline: None,
        evacuation: EvacuationOwnership::NoEvacuation,
        volumes: Arc::from([]),
        returned: None,
        placement: None,
        blocked: None,
        failed_write: false,
        turn: None,
    }
}

/// A cordoned node without markers.
pub(crate) fn node(name: &str) -> NodeFacts<Map> {
    NodeFacts {
        name: name.into(),
        labels: Map::new(),
        cordoned: true,
        cordon_due: None,
        held_since: None,
        has_markers: false,
        taints: Arc::from([]),
        volumes: Arc::default(),
        ignores_volumes: false,
        volume_wait: None,
        failed_write: None,
        reached: DrainTargets::default(),
        maintenances: None,
    }
}

pub(crate) fn entry(pod_type: PodType, pod_priority: i32, app: Option<&str>) -> DrainPlanEntry {
    let pod_selector = app.map(|app| serde_json::from_value(json!({"matchLabels": {"app": app}})).unwrap());
    DrainPlanEntry { pod_selector, pod_priority, pod_type }
}

pub(crate) fn named(nodes: &[&str]) -> NodeMatcher {
    let field = json!({"key": "metadata.name", "operator": "In", "values": nodes});
    let terms = if nodes.is_empty() { json!([]) } else { json!([{"matchFields": [field]}]) };
    NodeMatcher::new(&serde_json::from_value(json!({"nodeSelectorTerms": terms})).unwrap()).unwrap()
}

/// A maintenance of `nodes` in stage Drain, created at second `age`, with the entries that every plan has.
pub(crate) fn maintenance(
    name: &str,
    age: i64,
    nodes: &[&str],
    plan: &[DrainPlanEntry],
    served: ServedPodTypes,
) -> MaintenanceFacts {
    MaintenanceFacts {
        name: name.into(),
        uid: format!("uid of {name}").into(),
        created: at(age),
        stage: Stage::Drain,
        uncordons: false,
        reason: "".into(),
        holds_autoscalers: true,
        nodes: named(nodes),
        volume_timeout: None,
        plan: Arc::new(Plan::parse_entries(&normalise(plan), served).unwrap()),
        evacuated: 0,
        remaining_in_status: 0,
        staying_in_status: 0,
        drained_nodes: Arc::from([]),
        drained_and_deleted: 0,
        drain_started: Some(at(age)),
    }
}

/// Drain rules from names and specs.
pub(crate) fn rules(of: &[(&str, Value)]) -> DrainRules {
    let all: Vec<DrainRule> = of
        .iter()
        .map(|(name, spec)| {
            serde_json::from_value(json!({
                "apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "DrainRule",
                "metadata": {"name": name}, "spec": spec
            }))
            .unwrap()
        })
        .collect();
    let (rules, invalid) = DrainRules::new(&all);
    assert_eq!(invalid, []);
    rules
}

/// `Default<=1000 app=x` and the like.
pub(crate) fn show(entries: &[DrainPlanEntry]) -> Vec<String> {
    let app = |entry: &DrainPlanEntry| {
        let labels = entry.pod_selector.as_ref()?.match_labels.as_ref()?;
        Some(format!(" app={}", labels.get("app")?))
    };
    let one =
        |e: &DrainPlanEntry| format!("{:?}<={}{}", e.pod_type, e.pod_priority, app(e).unwrap_or_default());
    entries.iter().map(one).collect()
}

/// A change in the cluster.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Pod(PodFacts<Map>),
    PodGone(PodKey),
    Node(NodeFacts<Map>),
    NodeGone(Arc<str>),
    Maintenance(MaintenanceFacts),
    MaintenanceGone(Arc<str>),
    Rules(DrainRules),
    Namespace(Arc<str>, Option<Map>),
}

/// A pod that has to be evacuated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Evacuate {
    pub pod: PodKey,
    /// The maintenances that have reached it, oldest first.
    pub on_behalf_of: Vec<Arc<str>>,
    pub announced: bool,
}

/// A planner together with the pods that it reads, at second 0.
pub(crate) struct Cluster {
    planner: Planner<Map>,
    pods: BTreeMap<PodKey, PodFacts<Map>>,
}

impl Deref for Cluster {
    type Target = Planner<Map>;

    fn deref(&self) -> &Planner<Map> {
        &self.planner
    }
}

impl DerefMut for Cluster {
    fn deref_mut(&mut self) -> &mut Planner<Map> {
        &mut self.planner
    }
}

impl Cluster {
    pub fn new(served: ServedPodTypes) -> Self {
        Self { planner: Planner::new(served), pods: BTreeMap::new() }
    }

    pub fn apply(&mut self, change: Change) {
        match change {
            Change::Pod(pod) => {
                let (node, key, has_evacuation) =
                    (pod.node.clone(), pod.key.clone(), pod.evacuation != EvacuationOwnership::NoEvacuation);
                let earlier = self.pods.insert(key, pod);
                for node in earlier.map(|pod| pod.node).into_iter().chain([node]) {
                    self.planner.pod_changed(&node, has_evacuation);
                }
            }
            Change::PodGone(key) => {
                if let Some(pod) = self.pods.remove(&key) {
                    self.planner.pod_changed(&pod.node, false);
                }
            }
            Change::Node(facts) => self.planner.apply_node(facts),
            Change::NodeGone(name) => {
                let pods = &self.pods;
                self.planner.delete_node(&name, at(0), &mut |node, scope| on_node(pods, node, scope));
            }
            Change::Maintenance(facts) => self.planner.apply_maintenance(facts),
            Change::MaintenanceGone(name) => self.planner.delete_maintenance(&name),
            Change::Rules(rules) => self.planner.apply_rules(rules),
            Change::Namespace(name, labels) => self.planner.apply_namespace(name, labels),
        }
    }

    /// Processes all changes.
    pub fn converge(&mut self) {
        let Self { planner, pods } = self;
        while planner.converge_one(at(0), &mut |node, scope| on_node(pods, node, scope)) {}
    }

    /// The pods of a node that have to be evacuated, in order.
    pub fn evacuate(&self, node: &str) -> Vec<Evacuate> {
        let Some(record) = self.planner.nodes.get(node) else { return Vec::new() };
        let wanted = |key: &PodKey| match record.assessment.pods.get(&key.uid)?.desired.as_ref()? {
            Desired::Evacuate { reached_by, announced } => Some(Evacuate {
                pod: key.clone(),
                on_behalf_of: self.planner.names(reached_by.iter()),
                announced: *announced,
            }),
            Desired::Withdraw => None,
        };
        self.pods.keys().filter_map(wanted).collect()
    }

    /// The pods of a node whose Evacuations have to be withdrawn, in order.
    pub fn withdraw(&self, node: &str) -> Vec<PodKey> {
        let Some(record) = self.planner.nodes.get(node) else { return Vec::new() };
        let desired =
            |key: &&PodKey| record.assessment.pods.get(&key.uid).and_then(|pod| pod.desired.as_ref());
        self.pods.keys().filter(|key| desired(key) == Some(&Desired::Withdraw)).cloned().collect()
    }
}

fn on_node(pods: &BTreeMap<PodKey, PodFacts<Map>>, node: &str, scope: PodScope) -> Vec<PodFacts<Map>> {
    let read = |pod: &&PodFacts<Map>| {
        pod.node.as_ref() == node
            && (scope != PodScope::WithEvacuation || pod.evacuation != EvacuationOwnership::NoEvacuation)
    };
    pods.values().filter(read).cloned().collect()
}

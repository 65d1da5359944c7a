//! Builders for tests: pods, nodes and maintenances in a few words.

use std::collections::BTreeMap;
use std::sync::Arc;

use haulout_api_types::drain_plan::normalise;
use haulout_api_types::drain_rule::DrainRule;
use haulout_api_types::drain_rules::DrainRules;
use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::{DrainPlanEntry, PodType, Stage};
use haulout_api_types::selector::NodeMatcher;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::facts::{EvacuationOf, MaintenanceFacts, NodeFacts, PodFacts, PodKey};
use crate::plan::{Plan, Served};

pub(crate) type Map = BTreeMap<String, String>;

pub(crate) fn labels(of: &[(&str, &str)]) -> Map {
    of.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
}

pub(crate) fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + second).unwrap()
}

/// A pod `name` on `node`, of type Default unless changed.
pub(crate) fn pod(node: &str, name: &str, priority: i32) -> PodFacts<Map> {
    PodFacts {
        key: PodKey { namespace: "ns".into(), name: name.into(), uid: format!("uid-{name}").into() },
        node: node.into(),
        labels: Map::new(),
        pod_type: PodType::Default,
        priority,
        finished: false,
        terminating: false,
        evacuation: EvacuationOf::Nobody,
        volumes: Arc::from([]),
        returned: None,
        placement: None,
        blocked: None,
        wait: None,
    }
}

/// A node that is cordoned, with nothing of ours on it.
pub(crate) fn node(name: &str) -> NodeFacts<Map> {
    NodeFacts {
        name: name.into(),
        labels: Map::new(),
        cordoned: true,
        cordon_due: None,
        marked: false,
        taints: Arc::from([]),
        volumes: Arc::default(),
        ignores_volumes: false,
        volume_wait: None,
        refused: None,
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

/// A maintenance in stage Drain, created at second `age`, over `nodes`, with the entries that every plan has.
pub(crate) fn maintenance(
    name: &str,
    age: i64,
    nodes: &[&str],
    plan: &[DrainPlanEntry],
    served: Served,
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
        plan: Arc::new(Plan::as_given(&normalise(plan), served).unwrap()),
        evacuated: 0,
        left_before: 0,
        stayed_before: 0,
        drained_nodes: Arc::from([]),
        drained_and_deleted: 0,
        drain_began: Some(at(age)),
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

//! What must not exist when all maintenances are over.

use std::collections::BTreeMap;

use serde_json::Value;

use super::view::{ClusterView, Kind, Read as _};

/// The annotations that hold autoscalers.
const AUTOSCALERS: [&str; 2] =
    ["cluster-autoscaler.kubernetes.io/scale-down-disabled", "karpenter.sh/do-not-disrupt"];
/// The conditions that a maintenance sets on its nodes.
const CONDITIONS: [&str; 3] = ["MaintenanceInProgress", "DrainInProgress", "Drained"];

/// The expected state of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// Whether somebody else cordoned it.
    pub cordoned: bool,
    /// The annotations of others.
    pub annotations: BTreeMap<String, String>,
}

/// Descriptions of everything that is left over; empty if the cluster is restored.
pub fn leftovers(view: &ClusterView, nodes: &BTreeMap<String, Expected>) -> Vec<String> {
    let mut found = Vec::new();
    for (kind, what) in [(Kind::Evacuation, "Evacuation"), (Kind::Maintenance, "NodeMaintenance")] {
        let left = view.all(kind).map(|object| {
            format!("{what} {} is left, with the finalizers {:?}", object.key(), object.finalizers())
        });
        found.extend(left);
    }
    for (name, expected) in nodes {
        match view.get(Kind::Node, name) {
            Some(node) => found.extend(node_leftovers(node, expected)),
            None => found.push(format!("node {name} is gone")),
        }
    }
    found
}

fn node_leftovers(node: &Value, expected: &Expected) -> Vec<String> {
    let (name, mut found) = (node.name(), Vec::new());
    let cordoned = node.flag("/spec/unschedulable");
    if cordoned != expected.cordoned {
        found.push(format!(
            "node {name} is {}",
            if cordoned { "still cordoned" } else { "no longer cordoned" }
        ));
    }
    for (key, value) in node.map("/metadata/annotations").into_iter().flatten() {
        let ours = key.starts_with("nodemaintenance.k8s.io/") || AUTOSCALERS.contains(&key.as_str());
        if ours && expected.annotations.get(key).map(String::as_str) != value.as_str() {
            found.push(format!("node {name} has the annotation {key}: {value}"));
        }
    }
    for (key, value) in &expected.annotations {
        if node.annotation(key) != Some(value) {
            found.push(format!("node {name} has lost the annotation {key}: {value:?}"));
        }
    }
    let conditions = CONDITIONS.into_iter().filter(|kind| node.condition(kind).is_some());
    found.extend(conditions.map(|kind| format!("node {name} has the condition {kind}")));
    found
}

//! What must not be there any more when all maintenances are over.

use std::collections::BTreeMap;

use serde_json::Value;

use super::world::{Kind, Read as _, World};

/// The annotations that keep autoscalers away.
const AUTOSCALERS: [&str; 2] =
    ["cluster-autoscaler.kubernetes.io/scale-down-disabled", "karpenter.sh/do-not-disrupt"];
/// The conditions that a maintenance sets on its nodes.
const CONDITIONS: [&str; 3] = ["MaintenanceInProgress", "DrainInProgress", "Drained"];

/// How a node should be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// Whether somebody else has cordoned it.
    pub cordoned: bool,
    /// The annotations of others.
    pub annotations: BTreeMap<String, String>,
}

/// What is left over, in words; empty if everything is as it was.
pub fn leftovers(world: &World, nodes: &BTreeMap<String, Expected>) -> Vec<String> {
    let mut found = Vec::new();
    for (kind, what) in [(Kind::Evacuation, "Evacuation"), (Kind::Maintenance, "NodeMaintenance")] {
        let left = world.all(kind).map(|object| {
            format!("{what} {} is left, with the finalizers {:?}", object.key(), object.finalizers())
        });
        found.extend(left);
    }
    for (name, expected) in nodes {
        match world.get(Kind::Node, name) {
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
            if cordoned { "still cordoned" } else { "not cordoned any more" }
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

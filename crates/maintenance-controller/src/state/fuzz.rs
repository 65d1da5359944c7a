//! NodeMaintenances, DrainRules, Evacuations, nodes with their annotations, and pods as watches deliver them, in one state.

use haulout_api_types::node_maintenance::{NodeMaintenanceStatus, Stage};
use haulout_drain_planner::cordon;
use haulout_service_runtime::testing::fuzz;
use kube::core::DeserializeGuard;
use serde_json::{Value, json};

use super::*;
use crate::observed::{SlimEvacuation, SlimNode};
use crate::status;
use crate::testing::at;

const POD: &str = "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11";

fn node() -> Value {
    let status = json!({
        "drainTargets": [{"podPriority": 5, "podSelector": {"matchLabels": {"app": "web"}}}, {"podPriority": 1_000_000_000}],
        "maintenances": [{"uid": "uid-m", "name": "m", "stage": "Drain"}], "drainMessage": "Evacuating",
        "volumeWait": {"since": "2026-01-01T00:00:00Z", "over": false}
    });
    let before = json!({"unschedulable": true, "annotations": {"karpenter.sh/do-not-disrupt": null},
        "reverts": {"times": 3, "last": "2026-01-01T00:00:00Z"}});
    json!({
        "kind": "Node",
        "metadata": {"name": "n1", "uid": "n", "resourceVersion": "1", "labels": {"pool": "blue", "size": "7"},
            "annotations": {"nodemaintenance.k8s.io/maintenance-status": status.to_string(),
                "nodemaintenance.k8s.io/before-maintenance": before.to_string(),
                "nodemaintenance.k8s.io/exclude-wait-for-volume-detach": "false"}},
        "spec": {"unschedulable": true, "taints": [{"key": "a", "effect": "NoSchedule"}]},
        "status": {"volumesAttached": [{"name": "v", "devicePath": "x"}],
            "conditions": [{"type": "MaintenanceInProgress", "status": "True", "reason": "Drain",
                "lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    })
}

fn maintenance() -> Value {
    json!({
        "kind": "NodeMaintenance",
        "metadata": {"name": "m", "uid": "uid-m", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z",
            "finalizers": ["nodemaintenance.k8s.io/maintenance-completion"]},
        "spec": {"stage": "Drain", "reason": "new kernel", "volumeDetachTimeoutSeconds": 60,
            "nodeSelector": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "size", "operator": "Gt", "values": ["5"]}]},
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]},
            "drainPlan": [{"podPriority": 5, "podSelector": {"matchLabels": {"app": "web"}}},
                {"podPriority": 2_147_483_647, "podType": "DaemonSet"}]},
        "status": {"stageStatuses": [{"name": "Drain", "startTimestamp": "2026-01-01T00:00:00Z"}],
            "drainStatus": {"podsEvacuated": 3, "drainedNodes": ["n0"], "nodesDrainedAndDeleted": 1}}
    })
}

fn corpus() -> Vec<Vec<u8>> {
    let evacuation = json!({
        "kind": "Evacuation",
        "metadata": {"name": "e", "namespace": "shop", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z",
            "finalizers": ["evacuation.coordination.k8s.io/instigator_nodemaintenance.k8s.io"]},
        "spec": {"progressDeadlineSeconds": 600},
        "status": {"activeEvacuatorClass": "a.example.com", "message": "m", "evacuationCancellationPolicy": "Forbid",
            "evacuationProgressTimestamp": "2026-01-01T00:00:00Z", "expectedEvacuationFinishTime": "2026-01-01T00:00:00Z",
            "conditions": [{"type": "Blocked", "status": "True", "reason": "ServerBusy", "message": "m",
                "lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    });
    let rule = json!({
        "kind": "DrainRule", "metadata": {"name": "r"},
        "spec": {"drain": {"behavior": "Drain", "order": 100}, "nodes": [{"selector": {"matchLabels": {"pool": "blue"}}}],
            "pods": [{"selector": {}, "namespaceSelector": {}, "podTypes": ["Default"]}]}
    });
    [node(), maintenance(), evacuation, rule].map(|object| object.to_string().into_bytes()).into()
}

fn object<T: serde::de::DeserializeOwned + kube::Resource>(input: &[u8]) -> Option<T> {
    serde_json::from_slice::<DeserializeGuard<T>>(input).ok()?.0.ok()
}

fn apply(input: &[u8]) {
    let (mut state, mut pods) = (State::new(ServedPodTypes::DEFAULT, at(0)), PodIndex::default());
    let pod = json!({"metadata": {"name": "web-1", "namespace": "shop", "uid": POD, "labels": {"app": "web"}},
        "spec": {"nodeName": "n1"}, "status": {"phase": "Running"}});
    let pod = Pod::from_json(pod.to_string().as_bytes()).unwrap();
    for change in pods.apply(pod.clone()) {
        state.apply_pod(&change, at(0));
    }
    let observed = object::<SlimNode>(input).or_else(|| serde_json::from_value(node()).ok());
    state.apply_node("n1".into(), ObservedNode::new(observed.unwrap()));
    let is_maintenance = |object: &NodeMaintenance| object.metadata.name.as_deref() == Some("m");
    let known = object::<NodeMaintenance>(input).filter(is_maintenance);
    let known =
        known.filter(|object| object.metadata.uid.is_some() && object.metadata.resource_version.is_some());
    let applied = known.map(|object| state.apply_maintenance(object));
    if !matches!(applied, Some(Ok(()))) {
        state.apply_maintenance(serde_json::from_value(maintenance()).unwrap()).unwrap();
    }
    if let Some(evacuation) = object::<SlimEvacuation>(input) {
        state.apply_evacuation(pod.uid, ObservedEvacuation::new(evacuation), &pods);
    }
    if let Some(rule) = object(input) {
        let _ = state.apply_rule("r".into(), Some(rule));
    }
    while !state.converge(&pods, at(0)) {}
    for now in [at(9), Timestamp::MAX] {
        let Ok(Some((observed, plan))) = state.maintenance(&"m".into(), &pods, now) else { return };
        let old = NodeMaintenanceStatus::default();
        let old = observed.object.status.as_ref().unwrap_or(&old);
        for stage in Stage::ALL {
            let context = status::Context { old, generation: None, stage, now };
            status::status(context, &plan);
        }
        let Ok(Some((node, plan))) = state.node(&"n1".into(), &pods, now) else { return };
        let changes = cordon::decide(&node.markers, &plan, true, now);
        changes.node_patch();
        cordon::restore(&node.markers);
    }
    state.summary();
}

#[test]
fn mutated_objects_are_planned_quickly() {
    fuzz::fuzz("objects of drains", fuzz::QUICK, &corpus(), apply);
}

#[test]
#[ignore = "slow"]
fn mutated_objects_are_planned() {
    fuzz::fuzz("objects of drains", fuzz::SLOW, &corpus(), apply);
}

//! Pods as the watch delivers them, with the Evacuation that is built from them. Anybody who may create a pod chooses most of it.

use std::collections::BTreeSet;

use haulout_api_types::evacuators::evacuation_for;
use serde_json::json;

use super::Pod;
use crate::testing::fuzz;

fn corpus() -> Vec<Vec<u8>> {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "web-1", "namespace": "shop", "uid": "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11",
            "resourceVersion": "17", "creationTimestamp": "2026-01-01T00:00:00Z",
            "deletionTimestamp": "2026-01-01T00:01:00Z", "deletionGracePeriodSeconds": 30,
            "labels": {"app": "web", "pod-template-hash": "5c9", "cluster.x-k8s.io/drain": "skip"},
            "annotations": {
                "evacuation.coordination.k8s.io/priority_a.example.com": "20000/x",
                "evacuation.coordination.k8s.io/priority_b.example.com": "10000/controller",
                "evacuation.coordination.k8s.io/priority_": "5", "kubernetes.io/config.mirror": "x"
            },
            "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-5c9", "uid": "r", "controller": true}],
            "finalizers": ["example.com/x"]
        },
        "spec": {
            "nodeName": "n1", "priority": 1000, "terminationGracePeriodSeconds": 30,
            "tolerations": [
                {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
                {"key": "size", "operator": "Gt", "value": "5", "effect": "NoExecute", "tolerationSeconds": -9_223_372_036_854_775_808_i64},
                {"operator": "Exists"}],
            "volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "data"}},
                {"name": "e", "ephemeral": {"volumeClaimTemplate": {}}}]
        },
        "status": {
            "phase": "Running",
            "conditions": [
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
                {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
                {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}]
        }
    });
    vec![pod.to_string().into_bytes()]
}

fn read(input: &[u8]) {
    let Ok(pod) = Pod::from_json(input) else { return };
    for toleration in pod.tolerations.iter() {
        toleration.matches("size", "7", "NoExecute");
    }
    let Ok((evacuation, _)) = evacuation_for(&pod.metadata(), "test.example.com", &BTreeSet::new()) else {
        return;
    };
    assert!(evacuation.spec.evacuators.len() <= 100);
    for evacuator in &evacuation.spec.evacuators {
        assert!((1..=54).contains(&evacuator.evacuator_class.len()), "{evacuator:?}");
        assert!((0..=100_000).contains(&evacuator.priority), "{evacuator:?}");
    }
}

#[test]
fn mutated_pods_are_read_quickly() {
    fuzz::fuzz("pods", fuzz::QUICK, &corpus(), read);
}

#[test]
#[ignore = "slow"]
fn mutated_pods_are_read() {
    fuzz::fuzz("pods", fuzz::SLOW, &corpus(), read);
}

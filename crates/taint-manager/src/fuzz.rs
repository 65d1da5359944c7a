//! Policy files, annotations and taints of nodes, and tolerations of pods.

use haulout_service_runtime::pods::Pod;
use haulout_service_runtime::testing::fuzz;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use serde_json::json;

use crate::policy::Policy;
use crate::taint::{FirstSeen, taints_changed};
use crate::testing::{at, taint};

fn corpus() -> Vec<Vec<u8>> {
    let policy = "# my policy\nrules:\n- key: node.kubernetes.io/*\n  podSelector: {matchLabels: {app: db}}\n  \
                  namespaceSelector:\n    matchExpressions:\n    - {key: tier, operator: In, values: [prod]}\n  \
                  action: Evacuate\n- key: &k '*'\n  value: later\n  action: Ignore\n- key: *k\n  action: Delete\n  \
                  forceDeleteAfter: 10m\n";
    let rules = json!({"rules": [{"key": "a/*", "value": "v", "action": "Evict", "forceDeleteAfter": "90s",
        "podSelector": {"matchExpressions": [{"key": "x", "operator": "Exists"}]}}]});
    let first_seen = json!({"example.com/a=b": "2026-01-01T00:00:00Z", "c": "2026-01-01T00:00:00Z"});
    let node = json!({
        "metadata": {"name": "n1", "annotations": {"nodemaintenance.k8s.io/taints-first-seen": first_seen.to_string()},
            "managedFields": [{"manager": "kubectl", "operation": "Update", "time": "2026-01-01T00:00:00Z",
                "fieldsType": "FieldsV1", "fieldsV1": {"f:spec": {"f:taints": {}}}}]},
        "spec": {"taints": [{"key": "a", "value": "b", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"},
            {"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]}
    });
    let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "00000000-0000-4000-8000-000000000001",
        "labels": {"app": "db", "nodemaintenance.k8s.io/taint-action": "Evict"}},
        "spec": {"nodeName": "n1", "tolerations": [
            {"key": "a", "operator": "Equal", "value": "b", "effect": "NoExecute", "tolerationSeconds": 5}]}});
    let json = [rules, first_seen, node, pod].map(|object| object.to_string().into_bytes());
    json.into_iter().chain([policy.as_bytes().to_vec()]).collect()
}

fn read(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let pod = Pod::from_json(input).ok();
    match Policy::from_yaml(&text) {
        Ok(policy) => {
            policy.needs_namespaces();
            if let Some(pod) = &pod {
                policy.removal(&taint("a=b", 0), &pod.labels, &pod.labels);
            }
        }
        Err(error) => assert!(error.to_string().len() <= 64 * 1024 + 4 * input.len()),
    }
    for toleration in pod.iter().flat_map(|pod| pod.tolerations.iter()) {
        toleration.matches("a", "b", "NoExecute");
    }
    FirstSeen::read(Some(&text)).unless_changed(Some(at(0))).annotation();
    let Ok(node) = serde_json::from_slice::<Node>(input) else { return };
    let changed = taints_changed(&node.metadata);
    let annotations = node.metadata.annotations.unwrap_or_default();
    for annotation in annotations.values().map(Some).chain([None]) {
        let seen = FirstSeen::read(annotation.map(String::as_str));
        let taints =
            node.spec.iter().flat_map(|spec| spec.taints.iter().flatten()).cloned().collect::<Vec<_>>();
        for now in [Timestamp::MIN, at(1_800_000_000), Timestamp::MAX] {
            seen.observe(&taints, changed, now);
        }
    }
}

#[test]
fn mutated_policies_and_taints_are_read_quickly() {
    fuzz::fuzz("policies and taints", fuzz::QUICK, &corpus(), read);
}

#[test]
#[ignore = "slow"]
fn mutated_policies_and_taints_are_read() {
    fuzz::fuzz("policies and taints", fuzz::SLOW, &corpus(), read);
}

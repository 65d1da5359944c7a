//! Bodies of admission reviews, for all webhooks. Everybody who reaches the port can send anything.

use haulout_api_types::bounded::{MAX_MESSAGE, MAX_TEXT};
use haulout_service_runtime::testing::fuzz;

use super::*;
use crate::review;

fn corpus() -> Vec<Vec<u8>> {
    let mut running = evacuation("web-1");
    running["metadata"]["finalizers"] =
        json!(["evacuation.coordination.k8s.io/instigator_nodemaintenance.k8s.io"]);
    running["metadata"]["labels"] = json!({"app": "web"});
    running["metadata"]["annotations"] = json!({"argocd.argoproj.io/sync-options": "Prune=false"});
    running["spec"]["evacuators"] = json!([{"evacuatorClass": "a.example.com", "priority": 5, "role": "x"}]);
    running["status"] = json!({
        "activeEvacuatorClass": "a.example.com", "activeEvacuatorCompleted": false, "message": "m",
        "evacuationProgressTimestamp": "2026-01-01T00:00:00Z", "evacuationCancellationPolicy": "Forbid",
        "failedEvictionCounter": 1, "conditions": [{"type": "Blocked", "status": "True", "reason": "ServerBusy",
            "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
    });
    let mut planned = maintenance(&["n1", "n2"]);
    planned["spec"]["stage"] = json!("Drain");
    planned["spec"]["drainPlan"] = json!([{"podPriority": 5, "podType": "DaemonSet", "podSelector":
        {"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}]}}]);
    planned["spec"]["nodeSelector"]["nodeSelectorTerms"][0]["matchExpressions"] =
        json!([{"key": "size", "operator": "Gt", "values": ["5"]}]);
    let rule = json!({"apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "DrainRule", "metadata": {"name": "r"},
        "spec": {"drain": {"behavior": "Drain", "order": -5}, "nodes": [{"selector": {}}],
            "pods": [{"selector": {"matchLabels": {"a": "b"}}, "namespaceSelector": {}, "podTypes": ["Static"]}]}});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web-1", "namespace": "shop",
        "annotations": {"evacuation.coordination.k8s.io/priority_a.example.com": "20000/x"}}});
    let node = |unschedulable: bool| {
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "labels": {"a": "b"}},
            "spec": {"unschedulable": unschedulable}})
    };
    let review = |resource: &str, subresource: &str, operation: &str, object: &Value, old: &Value| {
        json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "resource": {"group": "", "version": "v1", "resource": resource},
            "subResource": subresource, "namespace": "shop", "name": "x", "operation": operation, "dryRun": false,
            "userInfo": {"username": "ann", "groups": ["red"], "extra": {"scopes": ["a"]}},
            "object": object, "oldObject": old}})
    };
    let absent = Value::Null;
    let all = [
        review("evacuations", "", "CREATE", &evacuation("web-1"), &absent),
        review("evacuations", "", "CREATE", &running, &absent),
        review("evacuations", "", "UPDATE", &evacuation("web-1"), &running),
        review("evacuations", "status", "UPDATE", &running, &evacuation("web-1")),
        review("evacuations", "", "DELETE", &absent, &running),
        review("nodemaintenances", "", "CREATE", &planned, &absent),
        review("nodemaintenances", "", "UPDATE", &planned, &maintenance(&["n1"])),
        review("nodemaintenances", "", "DELETE", &absent, &planned),
        review("drainrules", "", "CREATE", &rule, &absent),
        review("pods", "", "CREATE", &pod, &absent),
        review("pods", "", "UPDATE", &pod, &pod),
        review("nodes", "", "UPDATE", &node(true), &node(false)),
    ];
    all.iter().map(|review| review.to_string().into_bytes()).collect()
}

/// Reads a body, decides, and answers. The API server must be able to apply the patch.
fn admit_all(time: Duration) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _entered = runtime.enter();
    let (rules, calls) = rules(|spec| spec["user"].as_str().map(|user| user == "ann"));
    fuzz::fuzz("admission reviews", time, &corpus(), |body| {
        let request = match review::read(body) {
            Ok(request) => request,
            Err(error) => return assert!(error.problem.len() <= MAX_TEXT, "{}", error.problem.len()),
        };
        let object = request.object.as_ref().map(|object| serde_json::from_str::<Value>(object.get()));
        for hook in Hook::ALL {
            let verdict = runtime.block_on(rules.admit(hook, request.clone(), BUDGET));
            assert!(verdict.status().message.len() <= MAX_MESSAGE);
            let answer = review::answer(&request.uid, &verdict).unwrap();
            let answer: Value = serde_json::from_slice(&answer).unwrap();
            assert!(answer["response"]["allowed"].is_boolean());
            if let (Some(Ok(object)), false) = (&object, verdict.patch.is_empty()) {
                json_patch::patch(&mut object.clone(), &verdict.patch).unwrap();
            }
        }
        calls.take();
    });
}

#[test]
fn mutated_admission_reviews_are_answered_quickly() {
    admit_all(fuzz::QUICK);
}

#[test]
#[ignore = "slow"]
fn mutated_admission_reviews_are_answered() {
    admit_all(fuzz::SLOW);
}

//! DrainRule: invalid objects and their valid counterparts.

use kube::Api;
use kube::core::ApiResource;
use serde_json::{Value, json};

use haulout_api_types::DrainRule;

use super::{Case, check_cases};
use crate::support::shared;

fn rule(drain: Value) -> Value {
    json!({"metadata": {}, "spec": {"drain": drain}})
}

fn for_pods(pods: Value) -> Value {
    json!({"metadata": {}, "spec": {"drain": {"behavior": "Skip"}, "pods": pods}})
}

#[tokio::test]
async fn invalid_drain_rules_are_rejected() {
    let with_an_order = |case: Case| {
        case.rejected_at(
            "spec.drain.order",
            "order can only be set with behavior Drain: remove it or change the behavior",
        )
    };
    let cases = vec![
        Case::create("Drain", rule(json!({"behavior": "Drain"}))),
        Case::create("Drain with an order", rule(json!({"behavior": "Drain", "order": -100}))),
        Case::create("too high an order", rule(json!({"behavior": "Drain", "order": 2_147_483_648_i64}))).rejected("spec.drain.order"),
        Case::create("too low an order", rule(json!({"behavior": "Drain", "order": -2_147_483_649_i64}))).rejected("spec.drain.order"),
        Case::create("Skip", rule(json!({"behavior": "Skip"}))),
        with_an_order(Case::create("Skip with an order", rule(json!({"behavior": "Skip", "order": 1})))),
        Case::create("WaitCompleted", rule(json!({"behavior": "WaitCompleted"}))),
        with_an_order(Case::create("WaitCompleted with an order", rule(json!({"behavior": "WaitCompleted", "order": 0})))),
        Case::create("an unknown behavior", rule(json!({"behavior": "Evict"})))
            .rejected("supported values: \"Drain\", \"Skip\", \"WaitCompleted\""),
        Case::create("no behavior", rule(json!({}))).rejected("spec.drain.behavior: Required value"),
        Case::create("nothing", json!({"metadata": {}, "spec": {}})).rejected("spec.drain: Required value"),
        with_an_order(Case::update("Drain to Skip, the order left", rule(json!({"behavior": "Drain", "order": 1})), json!({"spec": {"drain": {"behavior": "Skip"}}}))),
        Case::update("Drain to Skip, the order removed", rule(json!({"behavior": "Drain", "order": 1})), json!({"spec": {"drain": {"behavior": "Skip", "order": null}}})),
        Case::create("empty selectors", for_pods(json!([{"selector": {}, "namespaceSelector": {}, "podTypes": []}]))),
        Case::create("pod types", for_pods(json!([{"podTypes": ["DaemonSet", "Static"]}]))),
        Case::create("an unknown pod type", for_pods(json!([{"podTypes": ["Mirror"]}]))).rejected("Unsupported value: \"Mirror\""),
        Case::create("a pod type twice", for_pods(json!([{"podTypes": ["Static", "Static"]}]))).rejected("Duplicate value: \"Static\""),
        Case::create("a selector that cannot match", for_pods(json!([{"selector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}])))
            .rejected_at("spec.pods[0].selector.matchExpressions[0]", "operators In and NotIn need at least one value"),
        Case::create("a bad key", for_pods(json!([{"namespaceSelector": {"matchLabels": {"/x": "y"}}}])))
            .rejected("every key of matchLabels must be a label key"),
        Case::create("nodes with a bad value", json!({"metadata": {}, "spec": {"drain": {"behavior": "Skip"}, "nodes": [{"selector": {"matchLabels": {"a": "-"}}}]}}))
            .rejected("spec.nodes[0].selector.matchLabels.a: Invalid value"),
        Case::create("pods that say nothing", for_pods(json!([{"selector": null}])))
            .rejected("set selector, namespaceSelector or podTypes; to select all pods, set selector: {}"),
        Case::create("nodes that say nothing", json!({"metadata": {}, "spec": {"drain": {"behavior": "Skip"}, "nodes": [{}]}}))
            .rejected("spec.nodes[0].selector: Required value"),
        Case::create("a label without a value", for_pods(json!([{"selector": {"matchLabels": {"app": null}}}])))
            .rejected("every label in matchLabels needs a value"),
        Case::create("too many entries", for_pods(json!(vec![json!({"selector": {}}); 33]))).rejected("spec.pods: Too many: 33"),
    ];
    let cluster = shared().await;
    let resource = ApiResource::erase::<DrainRule>(&());
    let api = Api::all_with(cluster.client().await.unwrap(), &resource);
    check_cases(&api, &resource, "rule", cases).await;
}

//! NodeMaintenance: invalid objects and their valid counterparts.

use kube::Api;
use kube::core::ApiResource;
use serde_json::{Value, json};

use haulout_api_types::NodeMaintenance;
use haulout_api_types::drain_plan::normalise;
use haulout_api_types::node_maintenance::DrainPlanEntry;

use super::{Case, check_cases};
use crate::support::shared;

fn with(spec: Value) -> Value {
    let mut object = json!({"metadata": {}, "spec": {"nodeSelector": selector(json!({"key": "none", "operator": "Exists"}))}});
    object["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    object
}

fn selector(requirement: Value) -> Value {
    json!({"nodeSelectorTerms": [{"matchExpressions": [requirement]}]})
}

fn by_label(requirement: Value) -> Value {
    with(json!({"nodeSelector": selector(requirement)}))
}

fn by_field(requirement: Value) -> Value {
    with(json!({"nodeSelector": {"nodeSelectorTerms": [{"matchFields": [requirement]}]}}))
}

fn plan(entries: Value) -> Value {
    with(json!({"drainPlan": entries}))
}

fn labelled(selector: Value) -> Value {
    plan(json!([{"podPriority": 1, "podSelector": selector}]))
}

async fn check(prefix: &str, cases: Vec<Case>) {
    let cluster = shared().await;
    let resource = ApiResource::erase::<NodeMaintenance>(&());
    check_cases(&Api::all_with(cluster.client().await.unwrap(), &resource), &resource, prefix, cases).await;
}

#[tokio::test]
async fn invalid_node_selectors_are_rejected() {
    check(
        "selector",
        vec![
            Case::create("nothing but a selector", with(json!({}))),
            Case::create("no selector", json!({"metadata": {}, "spec": {}}))
                .rejected("spec.nodeSelector: Required value"),
            Case::create("no spec", json!({"metadata": {}})).rejected("spec: Required value"),
            Case::create("no terms", with(json!({"nodeSelector": {"nodeSelectorTerms": []}})))
                .rejected("should have at least 1 items"),
            Case::create("an empty term", with(json!({"nodeSelector": {"nodeSelectorTerms": [{}]}}))),
            Case::create(
                "several names",
                by_field(json!({"key": "metadata.name", "operator": "In", "values": ["a", "b"]})),
            ),
            Case::create(
                "another field",
                by_field(json!({"key": "metadata.uid", "operator": "In", "values": ["a"]})),
            )
            .rejected("supported values: \"metadata.name\""),
            Case::create(
                "a field that exists",
                by_field(json!({"key": "metadata.name", "operator": "Exists"})),
            )
            .rejected("supported values: \"In\", \"NotIn\""),
            Case::create(
                "an operator in lower case",
                by_label(json!({"key": "a", "operator": "in", "values": ["x"]})),
            )
            .rejected("Unsupported value: \"in\""),
            Case::create("In without values", by_label(json!({"key": "a", "operator": "In"})))
                .rejected("operators In and NotIn need at least one value"),
            Case::create(
                "NotIn with no values",
                by_label(json!({"key": "a", "operator": "NotIn", "values": []})),
            )
            .rejected("operators In and NotIn need at least one value"),
            Case::create(
                "Exists with values",
                by_label(json!({"key": "a", "operator": "Exists", "values": ["x"]})),
            )
            .rejected("operators Exists and DoesNotExist take no values"),
            Case::create(
                "Gt with a number",
                by_label(json!({"key": "a", "operator": "Gt", "values": ["-7"]})),
            ),
            Case::create("Gt with a word", by_label(json!({"key": "a", "operator": "Gt", "values": ["x"]})))
                .rejected("operators Gt and Lt need exactly one value, a whole number"),
            Case::create(
                "Lt with two",
                by_label(json!({"key": "a", "operator": "Lt", "values": ["1", "2"]})),
            )
            .rejected("operators Gt and Lt need exactly one value, a whole number"),
            Case::create(
                "a key with a prefix",
                by_label(json!({"key": "example.com/a_B.c", "operator": "Exists"})),
            ),
            Case::create("a key with a space", by_label(json!({"key": "a b", "operator": "Exists"})))
                .rejected("matchExpressions[0].key: Invalid value: \"a b\""),
        ],
    )
    .await;
}

#[tokio::test]
async fn invalid_drain_plans_are_rejected() {
    let many = |count: i32| plan((0..count).map(|i| json!({"podPriority": i})).collect());
    // The largest plan that the schema allows, to show that the rules fit the API server's cost budget.
    let values: Vec<_> = (0..100).map(|i| format!("{i:x>60}")).collect();
    let large = json!({"matchExpressions": vec![json!({"key": "example.com/key", "operator": "In", "values": values}); 1]});
    let largest: Value =
        (0..100).map(|i| json!({"podPriority": i, "podType": "Static", "podSelector": large})).collect();
    check("plan", vec![
        Case::create("an empty plan", plan(json!([]))),
        Case::create("any order, negative priorities", plan(json!([
            {"podPriority": 2_147_483_647, "podType": "Static"}, {"podPriority": -5}, {"podPriority": 7, "podType": "DaemonSet"}
        ]))),
        Case::create("the same priority with and without selector", plan(json!([
            {"podPriority": 5}, {"podPriority": 5, "podSelector": {"matchLabels": {"app": "x"}}},
            {"podPriority": 5, "podSelector": {"matchLabels": {"app": "y"}}}
        ]))),
        Case::create("the same entry twice", plan(json!([{"podPriority": 5}, {"podPriority": 6}, {"podPriority": 5}])))
            .rejected_at("spec.drainPlan", "drainPlan must not have the same entry twice"),
        Case::create("the same entry, once by default", plan(json!([{"podPriority": 5}, {"podPriority": 5, "podType": "Default"}])))
            .rejected("drainPlan must not have the same entry twice"),
        Case::create("the same selector twice", plan(json!([
            {"podPriority": 5, "podSelector": {"matchLabels": {"app": "x"}}},
            {"podPriority": 5, "podSelector": {"matchLabels": {"app": "x"}}}
        ]))).rejected("drainPlan must not have the same entry twice"),
        Case::create("no priority", plan(json!([{"podType": "Default"}]))).rejected("spec.drainPlan[0].podPriority: Required value"),
        Case::create("too high a priority", plan(json!([{"podPriority": 2_147_483_648_i64}]))).rejected("spec.drainPlan[0].podPriority"),
        Case::create("too low a priority", plan(json!([{"podPriority": -2_147_483_649_i64}]))).rejected("spec.drainPlan[0].podPriority"),
        Case::create("an unknown type", plan(json!([{"podPriority": 5, "podType": "Job"}])))
            .rejected("supported values: \"Default\", \"DaemonSet\", \"Static\""),
        Case::create("a good selector", labelled(json!({"matchLabels": {"example.com/app": ""}}))),
        Case::create("a label key with a space", labelled(json!({"matchLabels": {"a b": "x"}})))
            .rejected("every key of matchLabels must be a label key, such as app or example.com/app"),
        Case::create("a label value with a space", labelled(json!({"matchLabels": {"app": "a b"}})))
            .rejected("podSelector.matchLabels.app: Invalid value: \"a b\""),
        Case::create("Gt for labels of pods", labelled(json!({"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}]})))
            .rejected("Unsupported value: \"Gt\""),
        Case::create("a hundred entries", many(100)),
        Case::create("a hundred and one", many(101)).rejected("drainPlan can have at most 100 entries besides the default ones"),
        Case::create("very many", many(113)).rejected("spec.drainPlan: Too many: 113: must have at most 112 items"),
        Case::create("a label without a value", labelled(json!({"matchLabels": {"app": null}})))
            .rejected("every label in matchLabels needs a value; use \"\" for an empty one"),
        Case::create("a label without a value and one with", labelled(json!({"matchLabels": {"app": null, "b": "c"}})))
            .rejected("every label in matchLabels needs a value"),
        Case::create("a very large plan", plan(largest.clone())),
        Case::update("a change to a very large plan", plan(largest), json!({"spec": {"stage": "Drain"}})),
    ])
    .await;
}

#[tokio::test]
async fn invalid_stage_transitions_are_rejected() {
    let at = |stage: &str| with(json!({"stage": stage}));
    let to = |stage: &str| json!({"spec": {"stage": stage}});
    let mut cases = vec![
        Case::create("an unknown stage", at("Uncordon"))
            .rejected("supported values: \"Idle\", \"Cordon\", \"Drain\", \"Complete\""),
        Case::update("back to the default", at("Drain"), json!({"spec": {"stage": null}})).rejected_at(
            "spec.stage",
            "stage cannot change from Drain to Idle: only Complete can follow Drain",
        ),
        Case::update("from the default", with(json!({})), to("Cordon")),
        Case::create("a limit for volumes", with(json!({"volumeDetachTimeoutSeconds": 1}))),
        Case::create("no time for volumes", with(json!({"volumeDetachTimeoutSeconds": 0})))
            .rejected("spec.volumeDetachTimeoutSeconds"),
        Case::create(
            "too much time for volumes",
            with(json!({"volumeDetachTimeoutSeconds": 2_147_483_648_i64})),
        )
        .rejected("spec.volumeDetachTimeoutSeconds"),
        Case::create("a time to live", with(json!({"ttlSecondsAfterComplete": 0}))),
        Case::create("a negative time to live", with(json!({"ttlSecondsAfterComplete": -1})))
            .rejected("spec.ttlSecondsAfterComplete"),
        Case::create("too long a time to live", with(json!({"ttlSecondsAfterComplete": 2_147_483_648_i64})))
            .rejected("spec.ttlSecondsAfterComplete"),
        Case::update(
            "another time to live",
            with(json!({"ttlSecondsAfterComplete": 5})),
            json!({"spec": {"ttlSecondsAfterComplete": null}}),
        ),
        Case::create("autoscalers", with(json!({"holdAutoscalers": true}))),
        Case::create("autoscalers in words", with(json!({"holdAutoscalers": "yes"})))
            .rejected("spec.holdAutoscalers"),
        Case::update(
            "autoscalers after all",
            with(json!({"holdAutoscalers": false})),
            json!({"spec": {"holdAutoscalers": null}}),
        ),
        Case::create("a reason", with(json!({"reason": "x".repeat(1024)}))),
        Case::create("a very long reason", with(json!({"reason": "x".repeat(1025)})))
            .rejected("spec.reason: Too long"),
        Case::update("another reason", with(json!({"reason": "x"})), json!({"spec": {"reason": "y"}})),
    ];
    let stages = ["Idle", "Cordon", "Drain", "Complete"];
    for (i, from) in stages.into_iter().enumerate() {
        cases.push(Case::create("created in any stage", at(from)));
        for (j, next) in stages.into_iter().enumerate() {
            let case = Case::update("a step", at(from), to(next));
            cases.push(match (i <= j, from) {
                (true, _) => case,
                (false, "Cordon") => case.rejected(
                    "stage cannot change from Cordon to Idle: only Drain or Complete can follow Cordon",
                ),
                (false, "Drain") => case.rejected(": only Complete can follow Drain"),
                (false, _) => case.rejected(": Complete is the last stage, create another NodeMaintenance"),
            });
        }
    }
    check("stage", cases).await;
}

#[tokio::test]
async fn nodes_and_plan_are_immutable() {
    let planned = || plan(json!([{"podPriority": 5}]));
    let fixed = "drainPlan is immutable: complete this NodeMaintenance and create one with the new plan";
    let spec = |spec: Value| json!({"spec": spec});
    let full = |priorities: &[i32]| {
        let own = priorities
            .iter()
            .map(|pod_priority| DrainPlanEntry { pod_priority: *pod_priority, ..DrainPlanEntry::default() });
        json!(normalise(&own.collect::<Vec<_>>()))
    };
    check("fixed", vec![
        Case::update("other nodes", with(json!({})), spec(json!({"nodeSelector": selector(json!({"key": "b", "operator": "Exists"}))})))
            .rejected_at("spec.nodeSelector", "nodeSelector is immutable: create another NodeMaintenance for other nodes"),
        Case::update("no nodes", with(json!({})), spec(json!({"nodeSelector": null}))).rejected("spec.nodeSelector: Required value"),
        Case::update("another plan", planned(), spec(json!({"drainPlan": [{"podPriority": 6}]}))).rejected(fixed),
        Case::update("no plan", planned(), spec(json!({"drainPlan": null}))).rejected(fixed),
        Case::update("an emptied plan", planned(), spec(json!({"drainPlan": []}))).rejected(fixed),
        Case::update("a plan at last", with(json!({})), spec(json!({"drainPlan": [{"podPriority": 6}]}))).rejected(fixed),
        Case::update("a longer plan", planned(), spec(json!({"drainPlan": [{"podPriority": 5}, {"podPriority": 6}]}))).rejected(fixed),
        Case::update("the same plan and the next stage", planned(), spec(json!({"drainPlan": [{"podPriority": 5}], "stage": "Drain"}))),
        Case::update("the default entries added, as admission may", planned(), spec(json!({"drainPlan": full(&[5])}))),
        Case::update("the manifest applied again after that", plan(full(&[5])), spec(json!({"drainPlan": [{"podPriority": 5}]}))),
        Case::update("a default entry added twice", planned(), spec(json!({"drainPlan": [{"podPriority": 5}, {"podPriority": 1_000_000_000}, {"podPriority": 1_000_000_000}]})))
            .rejected("drainPlan must not have the same entry twice"),
        Case::update("the default entries added, and another", planned(), spec(json!({"drainPlan": full(&[5, 6])}))).rejected(fixed),
        Case::update("an empty plan for none", with(json!({})), spec(json!({"drainPlan": []}))),
    ])
    .await;
}

#[tokio::test]
async fn status_is_validated() {
    let condition = |kind: &str| json!({"type": kind, "status": "True", "reason": "X", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let blocker = json!({"node": "n", "reason": "X", "message": "m", "since": "2026-01-01T00:00:00Z"});
    let status = |status: Value| json!({"status": status});
    check(
        "status",
        vec![
            Case::status(
                "two conditions",
                with(json!({})),
                [status(json!({"conditions": [condition("Drained"), condition("Blocked")]}))],
            ),
            Case::status(
                "the same condition twice",
                with(json!({})),
                [status(json!({"conditions": [condition("Drained"), condition("Drained")]}))],
            )
            .rejected("status.conditions[1]: Duplicate value"),
            Case::status(
                "twenty blockers",
                with(json!({})),
                [status(json!({"drainStatus": {"blockers": vec![blocker.clone(); 20]}}))],
            ),
            Case::status(
                "one more",
                with(json!({})),
                [status(json!({"drainStatus": {"blockers": vec![blocker; 21]}}))],
            )
            .rejected("status.drainStatus.blockers: Too many"),
            Case::status(
                "a long message",
                with(json!({})),
                [status(json!({"drainStatus": {"drainMessage": "x".repeat(32769)}}))],
            )
            .rejected("status.drainStatus.drainMessage: Too long"),
        ],
    )
    .await;
}

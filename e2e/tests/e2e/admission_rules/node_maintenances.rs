//! NodeMaintenances: plans, permissions on nodes, and warnings about selectors.

use haulout_api_types::drain_plan;
use serde_json::{Value, json};

use super::{CaseRunner, Expected};

pub fn maintenance(name: &str, stage: &str, selector: Value) -> Value {
    json!({"apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "NodeMaintenance", "metadata": {"name": name},
        "spec": {"stage": stage, "nodeSelector": {"nodeSelectorTerms": [selector]}}})
}

pub fn named(nodes: &[&str]) -> Value {
    json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": nodes}]})
}

fn labelled(key: &str) -> Value {
    json!({"matchExpressions": [{"key": key, "operator": "Exists"}]})
}

pub async fn table(runner: &mut CaseRunner<'_>) {
    permissions(runner).await;
    warnings(runner).await;
    plan_and_stages(runner).await;
}

async fn permissions(runner: &mut CaseRunner<'_>) {
    let three = maintenance("three", "Idle", named(&["n1", "n2", "n3"]));
    runner
        .create(
            "three nodes of which one may not delete the third",
            "nora",
            &three,
            Expected::Rejected(&[
                "spec.nodeSelector: user \"nora\" needs permission to delete node n3: ask for",
            ]),
        )
        .await;
    let two = maintenance("two", "Idle", named(&["n1", "n2"]));
    runner.create("two nodes that one may delete", "nora", &two, Expected::Accepted).await;
    runner.create("three nodes by somebody who may delete all", "amy", &three, Expected::Accepted).await;

    let all_needed =
        &["spec.nodeSelector: user \"nora\" needs permission to delete all nodes, because it can also match"];
    for (what, selector) in [
        ("a label selector that matches nothing today", labelled("nobody-has-this")),
        ("a label selector of nodes that one may delete", labelled("worker")),
        (
            "all nodes but one",
            json!({"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n3"]}]}),
        ),
    ] {
        runner
            .create(what, "nora", &maintenance("any", "Idle", selector), Expected::Rejected(all_needed))
            .await;
    }
    let names: Vec<_> = (0..101).map(|i| format!("m{i}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let many = maintenance("many", "Idle", named(&names));
    let too_many = &["needs permission to delete all nodes, because it names more than 100 nodes"];
    runner.create("more names than the webhook checks", "nora", &many, Expected::Rejected(too_many)).await;

    let stage = |name: &'static str| {
        ["patch", "nodemaintenance", name, "--type=merge", "-p", r#"{"spec":{"reason":"because"}}"#]
    };
    let third = &["user \"nora\" needs permission to delete node n3"];
    runner
        .check("a change without permission", "nora", &stage("three"), None, Expected::Rejected(third))
        .await;
    runner.check("a change with permission", "nora", &stage("two"), None, Expected::Accepted).await;
    let delete = |name: &'static str| ["delete", "nodemaintenance", name];
    runner
        .check("a deletion without permission", "nora", &delete("three"), None, Expected::Rejected(third))
        .await;
    runner.check("a deletion with permission", "nora", &delete("two"), None, Expected::Accepted).await;
    runner
        .check("a deletion by somebody who may delete all", "amy", &delete("three"), None, Expected::Accepted)
        .await;
    runner
        .create(
            "a maintenance by somebody without any permission on nodes",
            "nils",
            &maintenance("none", "Idle", named(&["n1", "n2"])),
            Expected::Rejected(&["user \"nils\" needs permission to delete nodes n1, n2: ask"]),
        )
        .await;
}

async fn warnings(runner: &mut CaseRunner<'_>) {
    for (name, selector, warning) in [
        (
            "everything",
            labelled("kubernetes.io/hostname"),
            "spec.nodeSelector matches all nodes of the cluster (4)",
        ),
        (
            "control-plane",
            labelled("node-role.kubernetes.io/control-plane"),
            "spec.nodeSelector matches all control plane nodes (1)",
        ),
        ("nothing", named(&["nowhere"]), "spec.nodeSelector matches no node now"),
        ("partly", named(&["n1", "n11"]), "spec.nodeSelector names nodes that do not exist: n11"),
    ] {
        runner.create(name, "amy", &maintenance(name, "Idle", selector), Expected::Warned(warning)).await;
    }
    runner
        .create("some nodes", "amy", &maintenance("some", "Idle", labelled("worker")), Expected::Accepted)
        .await;
    let cordon =
        ["patch", "nodemaintenance", "everything", "--type=merge", "-p", r#"{"spec":{"stage":"Cordon"}}"#];
    let all = Expected::Warned("spec.nodeSelector matches all nodes of the cluster (4)");
    runner.check("the next stage warns again", "amy", &cordon, None, all).await;
    let complete =
        ["patch", "nodemaintenance", "everything", "--type=merge", "-p", r#"{"spec":{"stage":"Complete"}}"#];
    runner.check("the end needs no warning", "amy", &complete, None, Expected::Accepted).await;
}

async fn plan_and_stages(runner: &mut CaseRunner<'_>) {
    let mut planned = maintenance("planned", "Cordon", named(&["n1"]));
    let own = json!([
        {"podPriority": 5000, "podType": "Default", "podSelector": {"matchLabels": {"app": "web"}}},
        {"podPriority": 1000, "podType": "Default"}
    ]);
    planned["spec"]["drainPlan"] = own.clone();
    let order = Expected::Warned("spec.drainPlan is processed in a different order than written");
    for (what, expected) in [("a plan of one's own", order), ("the same manifest again", Expected::Accepted)]
    {
        runner.check(what, "amy", &["apply", "-f", "-"], Some(&planned), expected).await;
        let made = runner.json(&["nodemaintenance", "planned"]).await;
        let plan = made["spec"]["drainPlan"].as_array().unwrap();
        assert_eq!(plan[..2], own.as_array().unwrap()[..], "the user's entries come first, in their order");
        let defaults: Vec<_> = drain_plan::default_entries().map(|entry| json!(entry)).collect();
        assert_eq!(plan[2..], defaults, "and then what was missing");
    }
    planned["spec"]["drainPlan"][1]["podPriority"] = json!(1001);
    let immutable = Expected::Rejected(&["drainPlan is immutable"]);
    runner.check("another plan", "amy", &["apply", "-f", "-"], Some(&planned), immutable).await;
    let idle = ["patch", "nodemaintenance", "planned", "--type=merge", "-p", r#"{"spec":{"stage":"Idle"}}"#];
    let back = Expected::Rejected(&[
        "stage cannot change from Cordon to Idle: only Drain or Complete can follow Cordon",
    ]);
    runner.check("a stage that is over", "amy", &idle, None, back).await;
    let drain =
        ["patch", "nodemaintenance", "planned", "--type=merge", "-p", r#"{"spec":{"stage":"Drain"}}"#];
    runner.check("the next stage", "amy", &drain, None, Expected::Accepted).await;
}

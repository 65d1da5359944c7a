//! NodeMaintenances: plans, rights on nodes, and selectors that deserve a second look.

use haulout_api_types::drain_plan;
use serde_json::{Value, json};

use super::{Bench, Expected};

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

pub async fn table(bench: &mut Bench<'_>) {
    rights(bench).await;
    warnings(bench).await;
    plan_and_stages(bench).await;
}

async fn rights(bench: &mut Bench<'_>) {
    let three = maintenance("three", "Idle", named(&["n1", "n2", "n3"]));
    bench
        .create(
            "three nodes of which one may not delete the third",
            "nora",
            &three,
            Expected::Refused(&["user \"nora\" may not delete node n3, and may therefore not maintain"]),
        )
        .await;
    let two = maintenance("two", "Idle", named(&["n1", "n2"]));
    bench.create("two nodes that one may delete", "nora", &two, Expected::Fine).await;
    bench.create("three nodes by somebody who may delete all", "amy", &three, Expected::Fine).await;

    let all_needed =
        &["user \"nora\" may not delete all nodes, which spec.nodeSelector needs because it can also match"];
    for (what, selector) in [
        ("a label selector that matches nothing today", labelled("nobody-has-this")),
        ("a label selector of nodes that one may delete", labelled("worker")),
        (
            "all nodes but one",
            json!({"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n3"]}]}),
        ),
    ] {
        bench
            .create(what, "nora", &maintenance("any", "Idle", selector), Expected::Refused(all_needed))
            .await;
    }
    let names: Vec<_> = (0..101).map(|i| format!("m{i}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let many = maintenance("many", "Idle", named(&names));
    let too_many =
        &["may not delete all nodes, which spec.nodeSelector needs because it names more than 100 nodes"];
    bench.create("more names than can be asked about", "nora", &many, Expected::Refused(too_many)).await;

    let stage = |name: &'static str| {
        ["patch", "nodemaintenance", name, "--type=merge", "-p", r#"{"spec":{"reason":"because"}}"#]
    };
    let third = &["user \"nora\" may not delete node n3"];
    bench.check("a change without rights", "nora", &stage("three"), None, Expected::Refused(third)).await;
    bench.check("a change with rights", "nora", &stage("two"), None, Expected::Fine).await;
    let delete = |name: &'static str| ["delete", "nodemaintenance", name];
    bench.check("a removal without rights", "nora", &delete("three"), None, Expected::Refused(third)).await;
    bench.check("a removal with rights", "nora", &delete("two"), None, Expected::Fine).await;
    bench
        .check("a removal by somebody who may delete all", "amy", &delete("three"), None, Expected::Fine)
        .await;
    bench
        .create(
            "a maintenance by somebody without any right on nodes",
            "nils",
            &maintenance("none", "Idle", named(&["n1", "n2"])),
            Expected::Refused(&["user \"nils\" may not delete nodes n1, n2, and"]),
        )
        .await;
}

async fn warnings(bench: &mut Bench<'_>) {
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
        ("partly", named(&["n1", "n11"]), "spec.nodeSelector names nodes that are not there now: n11"),
    ] {
        bench.create(name, "amy", &maintenance(name, "Idle", selector), Expected::Warned(warning)).await;
    }
    bench.create("some nodes", "amy", &maintenance("some", "Idle", labelled("worker")), Expected::Fine).await;
    let cordon =
        ["patch", "nodemaintenance", "everything", "--type=merge", "-p", r#"{"spec":{"stage":"Cordon"}}"#];
    let all = Expected::Warned("spec.nodeSelector matches all nodes of the cluster (4)");
    bench.check("the next stage is another chance to look", "amy", &cordon, None, all).await;
    let complete =
        ["patch", "nodemaintenance", "everything", "--type=merge", "-p", r#"{"spec":{"stage":"Complete"}}"#];
    bench.check("the end needs no warning", "amy", &complete, None, Expected::Fine).await;
}

async fn plan_and_stages(bench: &mut Bench<'_>) {
    let mut planned = maintenance("planned", "Cordon", named(&["n1"]));
    let own = json!([
        {"podPriority": 5000, "podType": "Default", "podSelector": {"matchLabels": {"app": "web"}}},
        {"podPriority": 1000, "podType": "Default"}
    ]);
    planned["spec"]["drainPlan"] = own.clone();
    let order = Expected::Warned("spec.drainPlan is carried out in another order than it is written");
    for (what, expected) in [("a plan of one's own", order), ("the same manifest again", Expected::Fine)] {
        bench.check(what, "amy", &["apply", "-f", "-"], Some(&planned), expected).await;
        let made = bench.json(&["nodemaintenance", "planned"]).await;
        let plan = made["spec"]["drainPlan"].as_array().unwrap();
        assert_eq!(plan[..2], own.as_array().unwrap()[..], "the user's entries come first, in their order");
        let defaults: Vec<_> = drain_plan::default_entries().map(|entry| json!(entry)).collect();
        assert_eq!(plan[2..], defaults, "and then what was missing");
    }
    planned["spec"]["drainPlan"][1]["podPriority"] = json!(1001);
    let immutable = Expected::Refused(&["drainPlan is immutable"]);
    bench.check("another plan", "amy", &["apply", "-f", "-"], Some(&planned), immutable).await;
    let idle = ["patch", "nodemaintenance", "planned", "--type=merge", "-p", r#"{"spec":{"stage":"Idle"}}"#];
    let back =
        Expected::Refused(&["stage cannot go from Cordon to Idle: after Cordon come Drain and Complete"]);
    bench.check("a stage that is over", "amy", &idle, None, back).await;
    let drain =
        ["patch", "nodemaintenance", "planned", "--type=merge", "-p", r#"{"spec":{"stage":"Drain"}}"#];
    bench.check("the next stage", "amy", &drain, None, Expected::Fine).await;
}

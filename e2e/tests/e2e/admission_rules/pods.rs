//! Evacuator annotations of pods.

use haulout_e2e::objects;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::{CaseRunner, Expected, NAMESPACE};

const PREFIX: &str = "evacuation.coordination.k8s.io/priority_";
/// Arguments of kubectl, without the patch.
const STATUS_PATCH: [&str; 8] =
    ["patch", "pod", "good", "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p"];

/// Pods that exist before the webhook is installed.
pub fn early() -> Vec<Pod> {
    let pod = |name: &str| objects::pod(name).namespace(NAMESPACE).label("app", "web");
    let annotated =
        |name: &str, class: &str, value: &str| pod(name).annotation(&format!("{PREFIX}{class}"), value);
    vec![
        annotated("web-1", "a.example.com", "5").build(),
        pod("web-2").build(),
        annotated("old", "a.example.com", "high").build(),
    ]
}

fn pod(name: &str, annotations: &[(&str, &str)]) -> Value {
    let annotations: serde_json::Map<_, _> =
        annotations.iter().map(|(class, value)| (format!("{PREFIX}{class}"), json!(value))).collect();
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "annotations": annotations},
        "spec": {"containers": [{"name": "main", "image": "example.invalid/main"}]}})
}

pub async fn table(runner: &mut CaseRunner<'_>) {
    let fine = [("a.example.com", "100000/x"), ("b.example.com", "0"), ("c.example.com", "10000/controller")];
    runner.create("a pod with good annotations", "", &pod("good", &fine), Expected::Accepted).await;
    let long = format!("{}.example.com", "l".repeat(43));
    let bad = [
        ("a.example.com", "high"),
        ("b.example.com", "100001"),
        ("c.example.com", "10000"),
        ("d.example.com", "9/controller"),
        ("e.example.com", "10000/controller"),
        ("f.example.com", "10000/controller"),
        ("G.example.com", "1"),
    ];
    runner
        .create(
            "a pod with all kinds of bad annotations",
            "",
            &pod("bad", &bad),
            Expected::Rejected(&[
                "priority_a.example.com: the priority must be a whole number from 0 to 100000, not \"high\"",
                "priority_b.example.com: the priority must be a whole number from 0 to 100000, not \"100001\"",
                "priority_c.example.com: the priority 10000 is reserved for the role controller",
                "priority_d.example.com: the role controller must have the priority 10000, not 9",
                "priority_f.example.com: only one annotation can have the role controller, and the annotation of e.example.com already has it",
                "priority_G.example.com: the evacuator class must be a DNS subdomain of at most 54 characters",
            ]),
        )
        .await;
    // The API server itself limits annotation names to 63 characters, which leaves 54 for the class.
    let name = format!("{PREFIX}{long}");
    assert_eq!(long.len(), 55);
    let too_long = json!({"metadata": {"annotations": {name: "1"}}}).to_string();
    let patch = ["patch", "pod", "good", "-n", NAMESPACE, "--type=merge", "-p", &too_long];
    runner
        .check("a class of 55 characters", "", &patch, None, Expected::Rejected(&["must be no more than 63"]))
        .await;

    let many = |count: usize| {
        let names: Vec<_> = (0..count).map(|i| format!("e{i:02}.example.com")).collect();
        let mut all: Vec<_> = names.iter().map(|name| (name.as_str(), "5")).collect();
        all.push(("z.example.com", "10000/controller"));
        pod("many", &all)
    };
    let message = "priority_e99.example.com: at most 99 evacuators besides the controller are allowed";
    runner.create("100 evacuators and a controller", "", &many(100), Expected::Rejected(&[message])).await;
    runner.create("99 evacuators and a controller", "", &many(99), Expected::Accepted).await;

    for (what, change, expected) in [
        ("an unrelated annotation of an old pod", "x=y".to_owned(), Expected::Accepted),
        (
            "a valid annotation next to an old invalid one",
            format!("{PREFIX}b.example.com=7"),
            Expected::Accepted,
        ),
        (
            "an invalid annotation next to an old invalid one",
            format!("{PREFIX}c.example.com=low"),
            Expected::Rejected(&["priority_c.example.com: the priority must be a whole number"]),
        ),
        (
            "the old bad annotation, changed and no better",
            format!("{PREFIX}a.example.com=higher"),
            Expected::Rejected(&["priority_a.example.com: the priority must be a whole number"]),
        ),
    ] {
        let args = ["annotate", "--overwrite", "-n", NAMESPACE, "pod", "old", &change];
        runner.check(what, "", &args, None, expected).await;
    }
    let low = json!({"metadata": {"annotations": {format!("{PREFIX}c.example.com"): "low"}}}).to_string();
    let rejected = Expected::Rejected(&["priority_c.example.com: the priority must be a whole number"]);
    let through_status = [&STATUS_PATCH, [low.as_str()].as_slice()].concat();
    runner.check("an annotation through the status", "", &through_status, None, rejected).await;
    let evacuate_and_evict = format!("{PREFIX}c.example.com-");
    let args = ["annotate", "-n", NAMESPACE, "pod", "good", &evacuate_and_evict];
    runner.check("taking an annotation away", "", &args, None, Expected::Accepted).await;
}

/// Changes that the webhook does not check.
pub async fn harmless(runner: &mut CaseRunner<'_>) {
    runner.create("an ordinary pod", "", &pod("plain", &[]), Expected::Accepted).await;
    let reported = json!({"status": {"phase": "Running", "message": "as a kubelet does"}}).to_string();
    let status = [&STATUS_PATCH, [reported.as_str()].as_slice()].concat();
    runner.check("the status of an annotated pod", "", &status, None, Expected::Accepted).await;
    for (what, args) in [
        ("a label of an annotated pod", ["label", "-n", NAMESPACE, "pod", "good", "x=y"]),
        ("another annotation of an annotated pod", ["annotate", "-n", NAMESPACE, "pod", "good", "x=y"]),
        ("the deletion of an annotated pod", ["delete", "-n", NAMESPACE, "--wait=false", "pod", "good"]),
    ] {
        runner.check(what, "", &args, None, Expected::Accepted).await;
    }
}

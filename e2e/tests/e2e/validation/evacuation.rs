//! Evacuation: invalid objects and their valid counterparts.

use std::collections::BTreeSet;

use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::core::ApiResource;
use serde_json::{Value, json};

use haulout_api_types::evacuation::CancellationPolicy;
use haulout_api_types::{Evacuation, EvacuationStatus, evacuators};
use haulout_e2e::service::NAMESPACE;
use haulout_e2e::{Handle, objects};
use k8s_openapi::api::core::v1::Namespace;

use super::{Case, check_cases_as};
use crate::support::shared;

const UID: &str = "f5823a89-e03f-4752-b013-445643b8c7a0";

fn of(pod: &str, spec: Value) -> Value {
    let mut object = json!({
        "metadata": {"name": evacuators::evacuation_name(UID, pod)},
        "spec": {"podRef": {"name": pod, "uid": UID}}
    });
    object["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    object
}

fn with(spec: Value) -> Value {
    of("web-1", spec)
}

fn named(name: &str, pod: &str) -> Value {
    let mut object = of(pod, json!({}));
    object["metadata"]["name"] = json!(name);
    object
}

fn by(evacuators: Value) -> Value {
    with(json!({"evacuators": evacuators}))
}

fn one(class: &str, priority: i64, role: Option<&str>) -> Value {
    match role {
        Some(role) => json!({"evacuatorClass": class, "priority": priority, "role": role}),
        None => json!({"evacuatorClass": class, "priority": priority}),
    }
}

/// The tests in this file create the same names, so each has its own namespace.
async fn namespace(name: &str) -> (crate::support::Shared, String) {
    let cluster = shared().await;
    let api: Api<Namespace> = Api::all(cluster.client().await.unwrap());
    api.create(&PostParams::default(), &objects::namespace(name)).await.unwrap();
    (cluster, name.into())
}

/// A client as the evacuation controller. A policy rejects most status updates of others.
async fn controller(cluster: &Handle) -> Client {
    let account = cluster.service_account_kubeconfig(NAMESPACE, "haulout-evacuation-controller");
    cluster.client_from(&account.await.unwrap(), "controller").await.unwrap()
}

async fn check(namespace_name: &str, cases: Vec<Case>) {
    let (cluster, namespace) = namespace(namespace_name).await;
    let resource = ApiResource::erase::<Evacuation>(&());
    let api = Api::namespaced_with(cluster.client().await.unwrap(), &namespace, &resource);
    let status = Api::namespaced_with(controller(&cluster).await, &namespace, &resource);
    check_cases_as([&api, &status], &resource, "evacuation", cases).await;
    cluster.kubectl(&["delete", "namespace", &namespace, "--wait=false"]).await.unwrap().success().unwrap();
}

#[tokio::test]
async fn invalid_names_and_references_are_rejected() {
    let long = "a".repeat(253);
    let dashed = format!("{}---{}", "a".repeat(148), "b".repeat(20));
    let rule = "metadata.name must be <spec.podRef.uid>-<spec.podRef.name>; if the pod name is longer than 150 characters, use its first 150 without a trailing - or .";
    let full = |name: &str| format!("{UID}-{name}");
    check("evacuation-names", vec![
        Case::create("the pod's UID and name", with(json!({}))),
        Case::create("a long name, cut", of(&long, json!({}))),
        Case::create("a cut that ends in dashes", of(&dashed, json!({}))),
        Case::create("a long name, not cut", named(&full(&"a".repeat(151)), &long)).rejected(rule),
        Case::create("a long name, cut too short", named(&full(&"a".repeat(149)), &long)).rejected(rule),
        Case::create("a short name, cut", named(&full("web"), "web-1")).rejected(rule),
        Case::create("another pod's name", named(&full("web-2"), "web-1")).rejected(rule),
        Case::create("another UID", named("00000000-e03f-4752-b013-445643b8c7a0-web-1", "web-1")).rejected(rule),
        Case::create("a name of one's own", named("my-evacuation", "web-1")).rejected(rule),
        Case::create("a generated name", json!({
            "metadata": {"generateName": format!("{UID}-")}, "spec": {"podRef": {"name": "web-1", "uid": UID}}
        })).rejected("metadata.generateName is not supported: name the Evacuation <pod UID>-<pod name>"),
        Case::create("no pod", json!({"metadata": {"name": full("x")}, "spec": {}})).rejected("spec.podRef: Required value"),
        Case::create("no UID", json!({"metadata": {"name": full("x")}, "spec": {"podRef": {"name": "x"}}}))
            .rejected("spec.podRef.uid: Required value"),
        Case::create("a UID in capitals", json!({"metadata": {"name": full("x")}, "spec": {"podRef": {"name": "x", "uid": UID.to_uppercase()}}}))
            .rejected("spec.podRef.uid: Invalid value"),
        Case::create("a pod that cannot exist", json!({"metadata": {"name": full("x")}, "spec": {"podRef": {"name": "X_y", "uid": UID}}}))
            .rejected("spec.podRef.name: Invalid value"),
    ])
    .await;
}

#[tokio::test]
async fn invalid_deadlines_and_evacuators_are_rejected() {
    let deadline = |seconds: i64| with(json!({"progressDeadlineSeconds": seconds}));
    let many = |others: i64, controller: bool| {
        let mut all: Vec<_> = (0..others).map(|i| one(&format!("e{i}.example.com"), i, None)).collect();
        all.extend(controller.then(|| one("c.example.com", 10_000, Some("controller"))));
        by(json!(all))
    };
    let belongs = "priority 10000 is reserved for the role controller: set both or neither";
    check("evacuation-evacuators", vec![
        Case::create("the shortest deadline", deadline(600)),
        Case::create("the longest deadline", deadline(21600)),
        Case::create("a shorter deadline", deadline(599)).rejected("spec.progressDeadlineSeconds: Invalid value: 599: spec.progressDeadlineSeconds in body should be greater than or equal to 600"),
        Case::create("a longer deadline", deadline(21601)).rejected("should be less than or equal to 21600"),
        Case::create("the example of the KEP", by(json!([
            one("sensitive-workload-operator.fruit-company.com", 11000, Some("knowledgeable-app-specific")),
            one("deployment.apps.k8s.io", 10000, Some("controller")),
            one("fallback-evacuator.rescue-company.com", 2000, None),
        ]))),
        Case::create("the lowest and the highest priority", by(json!([one("a", 0, None), one("b", 100_000, None)]))),
        Case::create("a lower priority", by(json!([one("a", -1, None)]))).rejected("should be greater than or equal to 0"),
        Case::create("a higher priority", by(json!([one("a", 100_001, None)]))).rejected("should be less than or equal to 100000"),
        Case::create("a controller of another priority", by(json!([one("a", 9999, Some("controller"))]))).rejected(belongs),
        Case::create("the controller's priority", by(json!([one("a", 10_000, None)]))).rejected(belongs),
        Case::create("the controller's priority, another role", by(json!([one("a", 10_000, Some("x"))]))).rejected(belongs),
        Case::create("two controllers", by(json!([one("a", 10_000, Some("controller")), one("b", 10_000, Some("controller"))])))
            .rejected("only one evacuator can have the role controller"),
        Case::create("a class that is ours", by(json!([one("nodemaintenance.k8s.io", 1, None)])))
            .rejected("evacuator classes in nodemaintenance.k8s.io are reserved for Haulout's own instigators"),
        Case::create("the same class twice", by(json!([one("a", 1, None), one("a", 2, None)])))
            .rejected("spec.evacuators[1]: Duplicate value"),
        Case::create("an empty role", by(json!([one("a", 1, Some(""))]))).rejected("role in body should be at least 1 chars long"),
        Case::create("a class in capitals", by(json!([one("Foo", 1, None)]))).rejected("evacuatorClass: Invalid value: \"Foo\""),
        Case::create("a class of 54 characters", by(json!([one(&"a".repeat(54), 1, None)]))),
        Case::create("a class of 55 characters", by(json!([one(&"a".repeat(55), 1, None)]))).rejected("evacuatorClass: Too long"),
        Case::create("a hundred with the controller", many(99, true)),
        Case::create("a hundred without", many(100, false))
            .rejected("at most 99 evacuators besides the one with the role controller are allowed"),
        Case::create("a hundred and one", many(100, true)).rejected("spec.evacuators: Too many: 101"),
    ])
    .await;
}

#[tokio::test]
async fn spec_is_immutable() {
    let two = || by(json!([one("a", 1, None), one("b", 2, None)]));
    let fixed = "evacuators is immutable: they are resolved once, when the Evacuation is created";
    let to = |evacuators: Value| json!({"spec": {"evacuators": evacuators}});
    check("evacuation-immutable", vec![
        Case::update("another pod", with(json!({})), json!({"spec": {"podRef": {"name": "web-2"}}}))
            .rejected_at("spec.podRef", "podRef is immutable"),
        Case::update("another UID", with(json!({})), json!({"spec": {"podRef": {"uid": UID.replace('f', "0")}}}))
            .rejected_at("spec.podRef", "podRef is immutable"),
        Case::update("another deadline", with(json!({})), json!({"spec": {"progressDeadlineSeconds": 600}}))
            .rejected_at("spec.progressDeadlineSeconds", "progressDeadlineSeconds is immutable: evacuators rely on it"),
        Case::update("the default deadline in its place", with(json!({"progressDeadlineSeconds": 600})), json!({"spec": {"progressDeadlineSeconds": null}}))
            .rejected("progressDeadlineSeconds is immutable"),
        Case::update("one more evacuator", two(), to(json!([one("a", 1, None), one("b", 2, None), one("c", 3, None)]))).rejected(fixed),
        Case::update("one less", two(), to(json!([one("a", 1, None)]))).rejected(fixed),
        Case::update("none", two(), to(Value::Null)).rejected(fixed),
        Case::update("some after all", with(json!({})), to(json!([one("a", 1, None)]))).rejected(fixed),
        Case::update("another priority", two(), to(json!([one("a", 5, None), one("b", 2, None)]))).rejected(fixed),
        Case::update("the same, and a label", two(), json!({"metadata": {"labels": {"a": "b"}}, "spec": {"evacuators": [one("a", 1, None), one("b", 2, None)]}})),
    ])
    .await;
}

#[tokio::test]
async fn status_is_validated() {
    let status = |status: Value| json!({"status": status});
    let failed = |times: i64| status(json!({"failedEvictionCounter": times}));
    let only_grows = "status.failedEvictionCounter can only grow";
    check(
        "evacuation-status",
        vec![
            Case::status("the counter grows", with(json!({})), [failed(1), failed(5)]),
            Case::status(
                "the counter stays",
                with(json!({})),
                [failed(5), status(json!({"failedEvictionCounter": 5, "message": "x"}))],
            ),
            Case::status("the counter shrinks", with(json!({})), [failed(5), failed(4)]).rejected(only_grows),
            Case::status(
                "the counter is removed",
                with(json!({})),
                [failed(5), status(json!({"failedEvictionCounter": null}))],
            )
            .rejected(only_grows),
            Case::status("the status is removed", with(json!({})), [failed(5), status(Value::Null)])
                .rejected(only_grows),
            Case::status("a negative counter", with(json!({})), [failed(-1)])
                .rejected("should be greater than or equal to 0"),
            Case::status("a counter without end", with(json!({})), [failed(2_147_483_648)])
                .rejected("status.failedEvictionCounter"),
            Case::status("a long message", with(json!({})), [status(json!({"message": "x".repeat(32768)}))]),
            Case::status("a longer one", with(json!({})), [status(json!({"message": "x".repeat(32769)}))])
                .rejected("status.message: Too long"),
            Case::status(
                "a policy",
                with(json!({})),
                [status(json!({"evacuationCancellationPolicy": "Forbid"}))],
            ),
            Case::status(
                "an unknown policy",
                with(json!({})),
                [status(json!({"evacuationCancellationPolicy": "Deny"}))],
            )
            .rejected("supported values: \"Allow\", \"Forbid\""),
            Case::status(
                "no time at all",
                with(json!({})),
                [status(json!({"evacuationProgressTimestamp": "yesterday"}))],
            )
            .rejected("evacuationProgressTimestamp"),
        ],
    )
    .await;
}

#[tokio::test]
async fn status_is_dropped_on_create_and_defaulted() {
    let (cluster, namespace) = namespace("evacuation-defaults").await;
    let api: Api<Evacuation> = Api::namespaced(cluster.client().await.unwrap(), &namespace);
    let pod = objects::pod("web-1").namespace(&namespace).build();
    let pods = Api::namespaced(cluster.client().await.unwrap(), &namespace);
    let pod = pods.create(&PostParams::default(), &pod).await.unwrap();
    let (mut evacuation, _) =
        evacuators::evacuation_for(&pod.metadata, "test.example.com", &BTreeSet::new()).unwrap();
    evacuation.status = Some(EvacuationStatus::default());
    let created = api.create(&PostParams::default(), &evacuation).await.unwrap();
    assert_eq!(created.status, None);
    assert_eq!(created.spec.progress_deadline_seconds, 1800);
    let name = created.metadata.name.unwrap();
    let word = json!({"status": {"evacuationProgressTimestamp": "2026-01-01T00:00:00Z"}});
    let status_api: Api<Evacuation> = Api::namespaced(controller(&cluster).await, &namespace);
    let reported =
        status_api.patch_status(&name, &PatchParams::default(), &Patch::Merge(word)).await.unwrap();
    let status = reported.status.unwrap();
    assert_eq!(status.evacuation_cancellation_policy, CancellationPolicy::Allow);
    assert_eq!((status.failed_eviction_counter, status.message.as_str()), (0, ""));
    let free = json!({"metadata": {"finalizers": null}});
    api.patch(&name, &PatchParams::default(), &Patch::Merge(free)).await.unwrap();
    cluster.kubectl(&["delete", "namespace", &namespace, "--wait=false"]).await.unwrap().success().unwrap();
}

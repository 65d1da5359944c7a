//! Tests of the requests that the rules send to the API server, of their failures, and that no object makes the rules
//! panic. The API server is a fake.

mod fuzz;

use std::convert::Infallible;
use std::sync::Mutex;

use super::*;
use haulout_service_runtime::clients::Clients;
use haulout_service_runtime::service::Context;
use haulout_service_runtime::term::Term;
use haulout_service_runtime::testing;
use kube::Client;
use kube::client::Body;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::metrics::Metrics;

const UID: &str = "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11";
const BUDGET: Duration = Duration::from_secs(5);

/// Requests that the fake API server received: paths of reads, and attributes of access reviews.
#[derive(Clone, Default)]
struct Calls(Arc<Mutex<Vec<String>>>);

impl Calls {
    fn push(&self, call: String) {
        self.0.lock().unwrap().push(call);
    }

    fn take(&self) -> Vec<String> {
        let mut calls = std::mem::take(&mut *self.0.lock().unwrap());
        calls.sort();
        calls
    }
}

/// Rules with an API server that has one pod, no nodes, and answers access reviews with `review`.
fn rules(review: impl Fn(&Value) -> Option<bool> + Clone + Send + Sync + 'static) -> (AdmissionRules, Calls) {
    let calls = Calls::default();
    let shared = calls.clone();
    let (context, _) = testing::recorded(move |call| match call.path.as_str() {
        "/apis/authorization.k8s.io/v1/subjectaccessreviews" => {
            let mut object = call.body.clone();
            shared.push(describe(&object["spec"]));
            let Some(allowed) = review(&object["spec"]) else { return testing::rejection(503, "overloaded") };
            object["status"] = json!({"allowed": allowed});
            Some((201, object))
        }
        "/api/v1/namespaces/shop/pods/web-1" => {
            shared.push(call.path.clone());
            let pod = json!({"metadata": {"name": "web-1", "namespace": "shop", "uid": UID}, "spec": {"nodeName": "n1"}});
            Some((200, pod))
        }
        path if path.contains("/pods/") => {
            shared.push(call.path.clone());
            testing::rejection(404, "not found")
        }
        _ => None,
    });
    (rules_with(&context, &["deployment.apps.k8s.io"]), calls)
}

/// Rules with the API server of this context.
fn rules_with(context: &Context, served: &[&str]) -> AdmissionRules {
    let (mut term, metrics) = (Term::new(context), Metrics::new(&context.metrics));
    let served = served.iter().map(ToString::to_string).collect();
    let caches = Caches::start(context, &mut term, metrics.clone());
    // The watches end with the test.
    std::mem::forget(term);
    AdmissionRules::new(caches, ApiServer::new(context.clients.direct.clone(), metrics), served)
}

/// Such as `ann: delete pods shop web-1`.
fn describe(spec: &Value) -> String {
    let about = &spec["resourceAttributes"];
    let text = |field: &str, before: &str| {
        about[field].as_str().map(|text| format!("{before}{text}")).unwrap_or_default()
    };
    format!(
        "{}: {} {}{}{}{}",
        spec["user"].as_str().unwrap_or_default(),
        about["verb"].as_str().unwrap(),
        about["resource"].as_str().unwrap(),
        text("subresource", "/"),
        text("namespace", " "),
        text("name", " ")
    )
}

fn request(operation: &str, object: &Value, old: &Value) -> Request {
    serde_json::from_value(json!({
        "uid": "r", "kind": {"group": "", "version": "v1", "kind": "X"},
        "resource": {"group": "", "version": "v1", "resource": "x"},
        "operation": operation, "name": "x", "namespace": "shop",
        "userInfo": {"username": "ann", "uid": "u-1", "groups": ["red", "blue"], "extra": {"scopes": ["a"]}},
        "object": object, "oldObject": old
    }))
    .unwrap()
}

fn evacuation(pod: &str) -> Value {
    json!({
        "apiVersion": "evacuation.coordination.k8s.io/v1alpha1", "kind": "Evacuation",
        "metadata": {"name": format!("{UID}-{pod}"), "namespace": "shop"},
        "spec": {"podRef": {"name": pod, "uid": UID}}
    })
}

fn maintenance(nodes: &[&str]) -> Value {
    json!({
        "apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "NodeMaintenance", "metadata": {"name": "m"},
        "spec": {"nodeSelector": {"nodeSelectorTerms": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": nodes}]}]}}
    })
}

async fn create(rules: &AdmissionRules, hook: Hook, object: &Value) -> Verdict {
    rules.admit(hook, request("CREATE", object, &Value::Null), BUDGET).await
}

fn denial(verdict: Verdict) -> (u16, String) {
    assert!(!verdict.violations.is_empty(), "allowed");
    let status = verdict.status();
    (status.code, status.message)
}

#[tokio::test]
async fn one_cluster_wide_review_covers_every_pod() {
    let (rules, calls) = rules(|spec| Some(spec["resourceAttributes"]["verb"] == "delete"));
    for _ in 0..3 {
        let answer = create(&rules, Hook::ValidateEvacuations, &evacuation("web-1")).await;
        assert_eq!(answer, Verdict::default());
    }
    let pod = "/api/v1/namespaces/shop/pods/web-1";
    assert_eq!(calls.take(), [pod, pod, pod, "ann: create pods/eviction", "ann: delete pods"]);
}

#[tokio::test]
async fn access_reviews_narrow_and_denial_names_pod_and_verbs() {
    let (rules, calls) = rules(|_| Some(false));
    let answer = create(&rules, Hook::ValidateEvacuations, &evacuation("web-1")).await;
    assert_eq!(
        calls.take(),
        [
            "ann: create pods/eviction",
            "ann: create pods/eviction shop",
            "ann: create pods/eviction shop web-1",
            "ann: delete pods",
            "ann: delete pods shop",
            "ann: delete pods shop web-1",
        ]
    );
    let (code, message) = denial(answer);
    assert_eq!(code, 403);
    assert_eq!(
        message,
        "user \"ann\" may not create the Evacuation of pod web-1 in namespace shop: this requires permission to \
         delete the pod (verb delete on pods) or to evict it (verb create on pods/eviction)"
    );
}

#[tokio::test]
async fn permission_on_one_pod_is_enough_for_that_pod() {
    let only = |spec: &Value| Some(spec["resourceAttributes"]["name"] == "web-1");
    let (rules, _) = rules(only);
    assert_eq!(create(&rules, Hook::ValidateEvacuations, &evacuation("web-1")).await, Verdict::default());
    assert_eq!(denial(create(&rules, Hook::ValidateEvacuations, &evacuation("web-2")).await).0, 403);
}

#[tokio::test]
async fn access_review_has_groups_uid_and_extra_of_the_user() {
    let full = |spec: &Value| {
        Some(
            spec["groups"] == json!(["red", "blue"])
                && spec["uid"] == "u-1"
                && spec["extra"] == json!({"scopes": ["a"]}),
        )
    };
    let (rules, _) = rules(full);
    assert_eq!(create(&rules, Hook::ValidateEvacuations, &evacuation("web-1")).await, Verdict::default());
}

#[tokio::test]
async fn denial_names_nodes_that_may_not_be_deleted() {
    let (rules, calls) = rules(|spec| Some(spec["resourceAttributes"]["name"] == "n1"));
    let hook = Hook::ValidateNodeMaintenances;
    let (code, message) = denial(create(&rules, hook, &maintenance(&["n1", "n2", "n3"])).await);
    assert_eq!(code, 403);
    assert!(
        message.starts_with("spec.nodeSelector: user \"ann\" needs permission to delete nodes n2, n3: ask"),
        "{message}"
    );
    assert_eq!(
        calls.take(),
        ["ann: delete nodes", "ann: delete nodes n1", "ann: delete nodes n2", "ann: delete nodes n3"]
    );
    assert_eq!(create(&rules, hook, &maintenance(&["n1"])).await.violations, []);
    assert_eq!(calls.take(), [""; 0], "the answers are cached");

    let mut by_label = maintenance(&[]);
    by_label["spec"]["nodeSelector"] =
        json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": "x", "operator": "Exists"}]}]});
    let (code, message) = denial(create(&rules, hook, &by_label).await);
    assert_eq!(code, 403);
    assert!(
        message.starts_with("spec.nodeSelector: user \"ann\" needs permission to delete all nodes, because"),
        "{message}"
    );
    assert_eq!(calls.take(), [""; 0]);
}

#[tokio::test]
async fn update_and_delete_need_permission_on_the_old_object() {
    let (rules, _) = rules(|_| Some(false));
    for (hook, object) in [
        (Hook::ValidateEvacuations, evacuation("web-1")),
        (Hook::ValidateNodeMaintenances, maintenance(&["n1"])),
    ] {
        for request in [request("UPDATE", &object, &object), request("DELETE", &Value::Null, &object)] {
            assert_eq!(denial(rules.admit(hook, request, BUDGET).await).0, 403);
        }
    }
}

#[tokio::test]
async fn failed_access_review_denies_and_is_not_cached() {
    let (rules, calls) = rules(|_| None);
    for (hook, object) in [
        (Hook::ValidateEvacuations, evacuation("web-1")),
        (Hook::ValidateNodeMaintenances, maintenance(&["n1"])),
    ] {
        for _ in 0..2 {
            let (code, message) = denial(create(&rules, hook, &object).await);
            assert_eq!(code, 500);
            assert!(message.contains("failed to check whether user \"ann\" may delete"), "{message}");
            assert!(!calls.take().is_empty(), "failures are not cached");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn unresponsive_api_server_times_out_within_the_budget() {
    let client = Client::new(
        tower::service_fn(async |_: http::Request<Body>| {
            std::future::pending::<Result<http::Response<Body>, Infallible>>().await
        }),
        "default",
    );
    let context = Context {
        clients: Clients { retrying: client.clone(), direct: client.clone(), lease: client },
        ..testing::context(|_| None)
    };
    let rules = rules_with(&context, &[]);
    for hook in [Hook::MutateEvacuations, Hook::ValidateEvacuations] {
        let (code, message) = denial(create(&rules, hook, &evacuation("web-1")).await);
        assert_eq!((code, message.contains("within 4500 ms: try again")), (504, true), "{message}");
    }
    let node = json!({"metadata": {"name": "n"}});
    let cordon =
        request("UPDATE", &json!({"metadata": {"name": "n"}, "spec": {"unschedulable": true}}), &node);
    assert_eq!(
        rules.admit(Hook::ValidateNodes, cordon, BUDGET).await,
        Verdict::default(),
        "changes to nodes are not delayed"
    );
}

#[tokio::test]
async fn invalid_pod_name_never_becomes_part_of_a_url() {
    let (rules, calls) = rules(|_| Some(true));
    for name in ["../../nodes/n1", "a/b", "a?watch=true", "", ".", "a b", "ä", "%2e%2e"] {
        for hook in [Hook::MutateEvacuations, Hook::ValidateEvacuations] {
            create(&rules, hook, &evacuation(name)).await;
        }
        let reads: Vec<_> = calls.take().into_iter().filter(|path| path.starts_with('/')).collect();
        assert_eq!(reads, [""; 0], "{name:?}");
    }
}

#[tokio::test]
async fn status_update_needs_no_permission_on_the_pod() {
    let (rules, calls) = rules(|_| Some(false));
    let object = evacuation("web-1");
    let mut request = request("UPDATE", &object, &object);
    request.subresource = Some("status".into());
    assert_eq!(rules.admit(Hook::ValidateEvacuations, request, BUDGET).await, Verdict::default());
    assert_eq!(calls.take(), [""; 0]);
}

#[tokio::test]
async fn kubelet_evacuates_only_pods_of_its_own_node() {
    // The Node authorizer lets every kubelet remove every pod.
    let (rules, _) = rules(|_| Some(true));
    let (web_1, gone) = (evacuation("web-1"), evacuation("web-2"));
    let kubelet = async |node: &str, groups: &[&str], mut request: Request| {
        request.user.username = Some(format!("system:node:{node}"));
        request.user.groups = Some(groups.iter().map(ToString::to_string).collect());
        rules.admit(Hook::ValidateEvacuations, request, BUDGET).await
    };
    let group = ["system:nodes", "system:authenticated"];
    for (what, object) in [("create", &web_1), ("update", &web_1), ("delete", &web_1), ("delete", &gone)] {
        let operation = what.to_uppercase();
        let old = if what == "create" { &Value::Null } else { object };
        let new = if what == "delete" { &Value::Null } else { object };
        let request = || request(&operation, new, old);
        let (code, message) = denial(kubelet("n2", &group, request()).await);
        let pod = object["spec"]["podRef"]["name"].as_str().unwrap();
        assert_eq!(
            (code, message),
            (
                403,
                format!(
                    "user \"system:node:n2\" may not {what} the Evacuation of pod {pod} in namespace shop: a kubelet \
                     may do so only for existing pods of its own node, n2"
                )
            )
        );
        let of_own_node = kubelet("n1", &group, request()).await;
        assert_eq!(of_own_node.violations.is_empty(), pod == "web-1", "{of_own_node:?}");
        let no_kubelet = kubelet("n2", &["system:authenticated"], request()).await;
        assert_eq!(no_kubelet.violations, [], "without the group, the name means nothing");
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,12}".prop_map(Value::from),
        Just(json!("evacuation.coordination.k8s.io/v1alpha1")),
        Just(json!("Forbid")),
        Just(json!("9999-12-31T23:59:59Z")),
    ];
    leaf.prop_recursive(6, 64, 8, |inner| {
        let keys = prop_oneof![
            5 => proptest::sample::select(vec![
                "metadata", "spec", "status", "name", "labels", "annotations", "podRef", "uid", "evacuators",
                "nodeSelector", "nodeSelectorTerms", "matchFields", "matchExpressions", "key", "operator", "values",
                "drainPlan", "podPriority", "podSelector", "stage", "drain", "behavior", "order", "nodes", "pods",
                "selector", "unschedulable", "activeEvacuatorClass", "evacuationProgressTimestamp",
            ])
            .prop_map(str::to_owned),
            1 => "\\PC{0,12}",
            1 => "evacuation.coordination.k8s.io/priority_\\PC{0,12}",
        ];
        prop_oneof![
            1 => proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            4 => proptest::collection::hash_map(keys, inner, 0..8)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// A valid object of the kind with one part replaced by arbitrary JSON.
fn corrupted(good: &Value) -> impl Strategy<Value = Value> + use<> {
    fn places(value: &Value, at: &str, all: &mut Vec<String>) {
        all.push(at.to_owned());
        match value {
            Value::Object(map) => map
                .iter()
                .for_each(|(key, value)| places(value, &format!("{at}/{}", key.replace('/', "~1")), all)),
            Value::Array(list) => {
                list.iter().enumerate().for_each(|(i, value)| places(value, &format!("{at}/{i}"), all));
            }
            _ => {}
        }
    }
    let mut all = Vec::new();
    places(good, "", &mut all);
    let good = good.clone();
    (proptest::sample::select(all), any_json()).prop_map(move |(place, nonsense)| {
        let mut object = good.clone();
        *object.pointer_mut(&place).unwrap() = nonsense;
        object
    })
}

fn any_object() -> impl Strategy<Value = Value> {
    let pod =
        json!({"metadata": {"annotations": {"evacuation.coordination.k8s.io/priority_a.example.com": "5"}}});
    let node = json!({"metadata": {"name": "n", "labels": {"a": "b"}}, "spec": {"unschedulable": true}});
    let rule = json!({
        "apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "DrainRule", "metadata": {"name": "r"},
        "spec": {"drain": {"behavior": "Drain", "order": 1}, "nodes": [{"selector": {"matchLabels": {"a": "b"}}}],
                 "pods": [{"selector": {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}}]}
    });
    let mut evacuation = evacuation("web-1");
    evacuation["status"] = json!({"evacuationCancellationPolicy": "Forbid", "evacuationProgressTimestamp": "2026-11-16T10:00:00Z"});
    let mut maintenance = maintenance(&["n1"]);
    maintenance["spec"]["drainPlan"] =
        json!([{"podPriority": 1, "podSelector": {"matchLabels": {"a": "b"}}}]);
    prop_oneof![
        any_json(),
        corrupted(&evacuation),
        corrupted(&maintenance),
        corrupted(&rule),
        corrupted(&pod),
        corrupted(&node),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Every hook answers every object, and gives the same answer again.
    #[test]
    fn every_object_gets_the_same_answer_twice(object in any_object(), old in any_object(), status: bool, may: bool) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (rules, _) = rules(move |_| Some(may));
            for hook in Hook::ALL {
                for operation in ["CREATE", "UPDATE", "DELETE", "CONNECT"] {
                    let mut request = request(operation, &object, &old);
                    request.subresource = status.then(|| "status".to_owned());
                    let first = rules.admit(hook, request.clone(), BUDGET).await;
                    prop_assert_eq!(first, rules.admit(hook, request, BUDGET).await);
                }
            }
            Ok(())
        })?;
    }
}

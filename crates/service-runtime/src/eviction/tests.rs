//! Tests of the classification of answers. The bodies are from an API server v1.36.3.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use http::{Request, Response};
use kube::client::Body;
use serde_json::Value;

use super::*;

const UID: &str = "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11";

fn failure(body: &str) -> Result<(), kube::Error> {
    Err(kube::Error::Api(serde_json::from_str(body).unwrap()))
}

/// The meaning as text.
fn word(meaning: &Meaning) -> String {
    match meaning {
        Meaning::Failed(failure) => failure.reason.to_owned(),
        Meaning::LookUp(failure) => format!("LookUp, or else {}", failure.reason),
        other => format!("{other:?}"),
    }
}

/// Answer, meaning, and prefix of the message.
const ANSWERS: &[(&str, &str, &str)] = &[
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"pods \"web-1\" not found","reason":"NotFound","details":{"name":"web-1","kind":"pods"},"code":404}"#,
        "Gone",
        "",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"poddisruptionbudgets.policy \"web\" not found","reason":"NotFound","details":{"name":"web","group":"policy","kind":"poddisruptionbudgets"},"code":404}"#,
        reason::BUDGET_STALE,
        "The PodDisruptionBudget was deleted during the eviction: poddisruptionbudgets.policy \"web\" not found",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"namespaces \"shop\" not found","reason":"NotFound","details":{"name":"shop","kind":"namespaces"},"code":404}"#,
        "LookUp, or else ServerBusy",
        "The API server did not find an object that the eviction needs: namespaces \"shop\" not found",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"the server could not find the requested resource","reason":"NotFound","details":{},"code":404}"#,
        "LookUp, or else ServerBusy",
        "The API server did not find",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"admission webhook \"x.example.com\" denied the request: pods \"web-1\" not found","reason":"NotFound","details":{"name":"web-1","kind":"pods"},"code":404}"#,
        reason::EVICTION_FORBIDDEN,
        "The eviction was rejected by an admission webhook or policy: admission webhook \"x.example.com\"",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"Operation cannot be fulfilled on Pod \"web-1\": the UID in the precondition (1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11) does not match the UID in record (2f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11). The object might have been deleted and then recreated","reason":"Conflict","details":{"name":"web-1","kind":"Pod"},"code":409}"#,
        "Gone",
        "",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"Operation cannot be fulfilled on pods \"web-1\": StorageError: invalid object, Code: 4, Key: /registry/pods/shop/web-1, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: UID in precondition: 1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11, UID in object meta: 2f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11","reason":"Conflict","details":{"name":"web-1","kind":"pods"},"code":409}"#,
        "Gone",
        "",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"Operation cannot be fulfilled on Pod \"web-1\": the ResourceVersion in the precondition (7) does not match the ResourceVersion in record (8). The object might have been modified","reason":"Conflict","details":{"name":"web-1","kind":"Pod"},"code":409}"#,
        "LookUp, or else ServerBusy",
        "The pod changed while it was being evicted: Operation cannot be fulfilled",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"admission webhook \"x.example.com\" denied the request: the UID in the precondition (a) does not match","reason":"Conflict","code":409}"#,
        reason::EVICTION_FORBIDDEN,
        "The eviction was rejected by an admission webhook or policy: ",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"Cannot evict pod as it would violate the pod's disruption budget.","reason":"TooManyRequests","details":{"causes":[{"reason":"DisruptionBudget","message":"The disruption budget web needs 2 healthy pods and has 2 currently"}]},"code":429}"#,
        reason::BUDGET_EXHAUSTED,
        "The PodDisruptionBudget allows no disruption: The disruption budget web needs 2 healthy pods and has 2 currently",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"Cannot evict pod as it would violate the pod's disruption budget.","reason":"TooManyRequests","details":{"causes":[{"reason":"DisruptionBudget","message":"The disruption budget web is still being processed by the server."}],"retryAfterSeconds":10},"code":429}"#,
        reason::BUDGET_STALE,
        "The status of the PodDisruptionBudget is not up to date: The disruption budget web is still being processed",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"poddisruptionbudget.policy \"web\" is forbidden: DisruptedPods map too big - too many evictions not confirmed by PDB controller","reason":"Forbidden","details":{"name":"web","group":"policy","kind":"poddisruptionbudget"},"code":403}"#,
        reason::BUDGET_STALE,
        "The status of the PodDisruptionBudget is not up to date: poddisruptionbudget.policy \"web\" is forbidden",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.","code":500}"#,
        reason::SEVERAL_BUDGETS,
        "The Eviction API rejects pods with several PodDisruptionBudgets",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"pods \"web-1\" is forbidden: unable to create new content in namespace shop because it is being terminated","reason":"Forbidden","details":{"name":"web-1","kind":"pods","causes":[{"reason":"NamespaceTerminating","message":"namespace shop is being terminated","field":"metadata.namespace"}]},"code":403}"#,
        reason::NAMESPACE_TERMINATING,
        "The namespace is being deleted",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"admission webhook \"virt-launcher-eviction-interceptor.kubevirt.io\" denied the request: Eviction triggered evacuation of VMI \"shop/vm\"","code":429}"#,
        reason::HANDLED_ELSEWHERE,
        "Another program is moving the pod: admission webhook \"virt-launcher-eviction-interceptor.kubevirt.io\"",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"admission webhook \"x.example.com\" denied the request: later","reason":"TooManyRequests","code":429}"#,
        reason::EVICTION_FORBIDDEN,
        "The eviction was rejected by an admission webhook or policy: ",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"admission webhook \"x.example.com\" denied the request without explanation","code":500}"#,
        reason::EVICTION_FORBIDDEN,
        "The eviction was rejected by an admission webhook or policy: ",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"pods \"web-1\" is forbidden: ValidatingAdmissionPolicy 'stay' with binding 'stay' denied request: not now","reason":"Invalid","details":{"name":"web-1","kind":"pods","causes":[{"message":"ValidatingAdmissionPolicy 'stay' with binding 'stay' denied request: not now"}]},"code":422}"#,
        reason::EVICTION_FORBIDDEN,
        "The eviction was rejected by an admission webhook or policy: pods \"web-1\" is forbidden: Validating",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"pods \"web-1\" is forbidden: User \"x\" cannot create resource \"pods/eviction\" in API group \"\" in the namespace \"shop\"","reason":"Forbidden","details":{"name":"web-1","kind":"pods"},"code":403}"#,
        reason::EVICTION_FORBIDDEN,
        "The eviction is forbidden: pods \"web-1\" is forbidden: User \"x\"",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"Unauthorized","reason":"Unauthorized","code":401}"#,
        reason::EVICTION_FORBIDDEN,
        "The eviction is forbidden: Unauthorized",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"name in URL does not match name in Eviction object","reason":"BadRequest","code":400}"#,
        reason::EVICTION_FORBIDDEN,
        "The eviction was rejected with 400: name in URL",
    ),
    // kube creates this from a body that is not JSON.
    (
        r#"{"status":"Failure","message":"Too many requests, please try again later.\n","reason":"Failed to parse error data","code":429}"#,
        reason::SERVER_BUSY,
        "The API server rejected the request because of its rate limits: Too many requests, please try again later.",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"Timeout: couldn't update PodDisruptionBudget \"web\" due to conflicts","reason":"Timeout","details":{"retryAfterSeconds":10},"code":504}"#,
        reason::SERVER_BUSY,
        "The API server failed to evict the pod: Timeout: couldn't update PodDisruptionBudget",
    ),
    (
        r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"Internal error occurred: failed calling webhook \"x.example.com\": connection refused","reason":"InternalError","details":{"causes":[{"message":"failed calling webhook \"x.example.com\": connection refused"}]},"code":500}"#,
        reason::SERVER_BUSY,
        "The API server failed to evict the pod: Internal error occurred: failed calling webhook",
    ),
    (
        r#"{"status":"Failure","code":503}"#,
        reason::SERVER_BUSY,
        "The API server failed to evict the pod: 503",
    ),
];

#[test]
fn every_answer_is_classified() {
    assert_eq!(Meaning::of("web-1", Ok(())), Meaning::Evicted);
    for (body, expected, message) in ANSWERS {
        let meaning = Meaning::of("web-1", failure(body));
        assert_eq!(word(&meaning), *expected, "{body}");
        if let Meaning::Failed(failure) | Meaning::LookUp(failure) = meaning {
            assert!(is_failure(failure.reason), "{}", failure.reason);
            assert!(failure.message.starts_with(message), "{}", failure.message);
        }
    }
}

#[test]
fn missing_answer_is_a_transient_failure() {
    let error = kube::Error::Service("connection reset by peer".into());
    let Meaning::Failed(failure) = Meaning::of("web-1", Err(error)) else { panic!("it is not known") };
    assert!(is_transient(failure.reason));
    assert!(failure.message.ends_with("connection reset by peer"), "{}", failure.message);
}

#[test]
fn long_answers_are_truncated() {
    let long = "ä\n\u{1b}".repeat(50_000);
    for code in [400, 401, 403, 404, 409, 422, 429, 500, 504] {
        for text in [long.clone(), format!("admission webhook \"x\" denied the request: {long}")] {
            let cause = serde_json::json!({"reason": "DisruptionBudget", "message": long});
            for details in [serde_json::json!({}), serde_json::json!({"causes": [cause]})] {
                let body = serde_json::json!({"status": "Failure", "code": code, "message": text, "details": details});
                let answer = Meaning::of("web-1", failure(&body.to_string()));
                let (Meaning::Failed(failed) | Meaning::LookUp(failed)) = answer else {
                    panic!("{answer:?}")
                };
                let message = failed.message;
                assert!(message.chars().count() < 1100 && message.ends_with('…'), "{code}: {message}");
                assert!(!message.contains(char::is_control), "{code}: {message}");
            }
        }
    }
}

#[test]
fn is_gone_agrees_with_the_answers_to_evictions() {
    let gone: Vec<_> = ANSWERS
        .iter()
        .filter(|(body, ..)| is_gone(&serde_json::from_str(body).unwrap()))
        .map(|(_, meaning, _)| *meaning)
        .collect();
    let expected = ["Gone", reason::BUDGET_STALE, "LookUp, or else ServerBusy", "LookUp, or else ServerBusy"];
    assert_eq!(gone, [&expected[..], &["Gone", "Gone"]].concat(), "all but those of webhooks");
}

fn pod(owner: Option<&str>) -> Pod {
    let owners: Vec<_> = owner
        .map(|kind| serde_json::json!({"apiVersion": "x/v1", "kind": kind, "name": "x", "uid": "u", "controller": true}))
        .into_iter()
        .collect();
    let json = serde_json::json!({
        "metadata": {"name": "web-1", "namespace": "shop", "uid": UID, "resourceVersion": "1", "ownerReferences": owners},
    });
    Pod::from_json(&serde_json::to_vec(&json).unwrap()).unwrap()
}

#[test]
fn only_generated_names_are_unique() {
    let kinds = [
        None,
        Some("StatefulSet"),
        Some("ReplicaSet"),
        Some("ReplicationController"),
        Some("Job"),
        Some("Foo"),
    ];
    let unique: Vec<_> = kinds.into_iter().filter(|kind| has_unique_name(&pod(*kind))).flatten().collect();
    assert_eq!(unique, ["ReplicaSet", "ReplicationController", "Job"]);
}

/// An API server that answers evictions with this, and has a pod with this UID.
fn server(
    answer: (u16, &'static str),
    uid: Option<&'static str>,
) -> (Client, Arc<AtomicUsize>, Arc<Mutex<Value>>) {
    let (reads, sent) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Value::Null)));
    let (read_count, recorded) = (Arc::clone(&reads), Arc::clone(&sent));
    let service = tower::service_fn(move |request: Request<Body>| {
        let (reads, sent) = (Arc::clone(&read_count), Arc::clone(&recorded));
        async move {
            let (code, text) = if request.method() == http::Method::POST {
                assert_eq!(request.uri().path(), "/api/v1/namespaces/shop/pods/web-1/eviction");
                let body = request.into_body().collect_bytes().await.unwrap();
                *sent.lock().unwrap() = serde_json::from_slice(&body).unwrap();
                (answer.0, answer.1.to_owned())
            } else {
                reads.fetch_add(1, Ordering::SeqCst);
                match uid {
                    Some(uid) => {
                        let meta = serde_json::json!({"name": "web-1", "namespace": "shop", "uid": uid});
                        (200, serde_json::json!({"metadata": meta}).to_string())
                    }
                    None => (404, ANSWERS[0].0.to_owned()),
                }
            };
            let response = Response::builder().status(code).body(Body::from(text.into_bytes()));
            Ok::<_, kube::Error>(response.unwrap())
        }
    });
    (Client::new(service, "default"), reads, sent)
}

#[tokio::test]
async fn evictions_carry_the_uid_and_unclear_answers_are_checked() {
    let other = "2f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11";
    let conflict = (409, ANSWERS[7].0);
    let namespace = (404, ANSWERS[2].0);
    let cases = [
        ("evicted", (201, r#"{"status": "Success"}"#), Some(UID), "Evicted", 0),
        ("not found", (404, ANSWERS[0].0), None, "Gone", 0),
        ("conflict, it is there", conflict, Some(UID), "ServerBusy", 1),
        ("conflict, another is there", conflict, Some(other), "Gone", 1),
        ("no such namespace", namespace, None, "Gone", 1),
        ("exhausted", (429, ANSWERS[9].0), Some(UID), "DisruptionBudgetExhausted", 0),
    ];
    for (name, answer, found, expected, looked_up) in cases {
        let (client, reads, sent) = server(answer, found);
        let word = match evict(&client, &pod(None)).await {
            Answer::Failed(failure) => failure.reason.to_owned(),
            other => format!("{other:?}"),
        };
        assert_eq!((word.as_str(), reads.load(Ordering::SeqCst)), (expected, looked_up), "{name}");
        assert_eq!(sent.lock().unwrap()["deleteOptions"]["preconditions"]["uid"], UID, "{name}");
    }
}

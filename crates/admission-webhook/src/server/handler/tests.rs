use std::convert::Infallible;

use axum::body::Bytes;
use futures::{StreamExt as _, stream};
use haulout_service_runtime::metrics::Metrics as ServiceMetrics;
use proptest::prelude::*;
use serde_json::Value;
use tower::ServiceExt as _;

use super::*;
use crate::decide::{Cause, Verdict};

/// Behaves as the namespace of the object says.
struct FakeRules;

impl Admit for FakeRules {
    async fn admit(&self, _: Hook, request: Request, budget: Duration) -> Verdict {
        match request.namespace.as_deref().unwrap_or_default() {
            "panics" => panic!("requested by the test"),
            "sleeps" => {
                tokio::time::sleep(budget * 2).await;
                Verdict::default()
            }
            "denied" => Verdict::denied(Cause::Annotation, "annotation a: not that one"),
            _ => Verdict::default(),
        }
    }
}

struct Setup {
    router: Router,
    memory: usize,
    metrics: ServiceMetrics,
}

impl Setup {
    fn new(limits: Limits) -> Self {
        let metrics = ServiceMetrics::new("test", "1");
        let router = super::router(FakeRules, &limits, Metrics::new(&metrics));
        Self { router, memory: limits.memory, metrics }
    }

    async fn post(&self, path: &str, body: impl Into<Body>) -> (u16, Value) {
        self.post_on(&Connection::fake(self.memory).await, path, body).await
    }

    async fn post_on(&self, connection: &Connection, path: &str, body: impl Into<Body>) -> (u16, Value) {
        let request = http::Request::post(path).extension(connection.clone()).body(body.into()).unwrap();
        let response = self.router.clone().oneshot(request).await.unwrap();
        let code = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (code, serde_json::from_slice(&body).unwrap())
    }
}

fn review(resource: &str, namespace: &str) -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "u-1",
            "kind": {"version": "v1", "kind": "Pod"},
            "resource": {"version": "v1", "resource": resource},
            "namespace": namespace,
            "operation": "CREATE"
        }
    })
}

#[tokio::test(start_paused = true)]
async fn every_outcome_has_a_response_and_a_metric() {
    let setup = Setup::new(Limits::default());
    for (path, body, code, reason, allowed) in [
        ("/validate/pods", review("pods", "fine"), 200, Value::Null, true),
        ("/validate/pods", review("pods", "denied"), 200, json!("Invalid"), false),
        ("/validate/pods", review("pods", "panics"), 500, json!("InternalError"), false),
        ("/validate/pods?timeout=2s", review("pods", "sleeps"), 504, json!("Timeout"), false),
        ("/validate/pods", review("nodes", "fine"), 400, json!("BadRequest"), false),
    ] {
        let (found, answer) = setup.post(path, body.to_string()).await;
        let response = &answer["response"];
        assert_eq!((found, &response["status"]["reason"]), (code, &reason), "{body}: {answer}");
        assert_eq!(response["uid"], "u-1");
        assert_eq!(response["allowed"], allowed);
    }
    let text = setup.metrics.encode().unwrap();
    for line in [
        r#"haulout_admission_requests_total{type="validating",resource="pods",operation="create",verdict="allowed"} 1"#,
        r#"haulout_admission_requests_total{type="validating",resource="pods",operation="create",verdict="denied"} 1"#,
        r#"haulout_admission_requests_total{type="validating",resource="pods",operation="create",verdict="failed"} 3"#,
        r#"haulout_admission_denials_total{resource="pods",cause="annotation"} 1"#,
        r#"haulout_admission_duration_seconds_count{type="validating",resource="pods"} 2"#,
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

#[tokio::test]
async fn invalid_review_gets_a_status() {
    let setup = Setup::new(Limits::default());
    for (path, body, code, word) in [
        ("/validate/pods", "", 400, "not an AdmissionReview"),
        ("/validate/pods", "[", 400, "not an AdmissionReview"),
        ("/validate/secrets", "{}", 404, "/validate/secrets is not a webhook"),
    ] {
        let (found, answer) = setup.post(path, body).await;
        assert_eq!((found, &answer["kind"], &answer["code"]), (code, &json!("Status"), &json!(code)));
        assert!(answer["message"].as_str().unwrap().contains(word), "{answer}");
    }
    let (code, _) = setup.post("/validate/pods", vec![b'"', 0xff, b'"']).await;
    assert_eq!(code, 400, "invalid UTF-8");
    let deep = "[".repeat(1 << 20);
    assert_eq!(setup.post("/validate/pods", deep).await.0, 400);
}

#[tokio::test]
async fn deep_and_wide_objects_are_accepted() {
    let setup = Setup::new(Limits::default());
    let whole = |object: &str| {
        let text = review("pods", "fine").to_string();
        text.replacen("\"namespace\"", &format!("\"object\":{object},\"namespace\""), 1)
    };
    let deep = format!("{}{}", "[".repeat(1 << 20), "]".repeat(1 << 20));
    assert_eq!(setup.post("/validate/pods", whole(&deep)).await.0, 200);
    let labels: Vec<_> = (0..200_000).map(|number| format!("\"l{number}\":\"\"")).collect();
    let broad = format!("{{\"metadata\":{{\"labels\":{{{}}}}}}}", labels.join(","));
    assert_eq!(setup.post("/validate/pods", whole(&broad)).await.0, 200);
}

#[tokio::test(start_paused = true)]
async fn too_large_or_too_slow_bodies_are_rejected() {
    let limits = Limits { body: 1 << 20, memory: 2 << 20, ..Limits::default() };
    let setup = Setup::new(limits);
    assert_eq!(setup.post("/validate/pods", vec![b' '; (1 << 20) + 1]).await.0, 413);
    // A body without a content length is checked while it is read.
    let endless = stream::repeat_with(|| Ok::<_, Infallible>(Bytes::from_static(&[b' '; 4096])));
    assert_eq!(setup.post("/validate/pods", Body::from_stream(endless)).await.0, 413);

    let silent = || Body::from_stream(stream::pending::<Result<Bytes, Infallible>>());
    assert_eq!(setup.post("/validate/pods?timeout=1s", silent()).await.0, 408);

    // A client that holds all the memory and stops sending times out, and its memory is released. On the same
    // connection, others wait for it.
    let connection = Connection::fake(2 << 20).await;
    let hog = stream::iter([Ok::<_, Infallible>(Bytes::from(vec![b' '; 1 << 20]))]).chain(stream::pending());
    let hog = setup.post_on(&connection, "/validate/pods?timeout=2s", Body::from_stream(hog));
    let fine = || review("pods", "fine").to_string();
    let patient = setup.post_on(&connection, "/validate/pods?timeout=5s", fine());
    let hasty = setup.post_on(&connection, "/validate/pods?timeout=1s", fine());
    let ((hog, _), (patient, _), (hasty, _)) = tokio::join!(hog, patient, hasty);
    assert_eq!((hog, patient, hasty), (408, 200, 408));
}

#[test]
fn budget_follows_the_api_servers_timeout() {
    for (uri, milliseconds) in [
        ("/validate/pods", 9_000),
        ("/validate/pods?timeout=5s", 4_500),
        ("/validate/pods?a=b&timeout=1s", 900),
        ("/validate/pods?timeout=0s", 9_000),
        ("/validate/pods?timeout=99999999999999999999s", 9_000),
        ("/validate/pods?timeout=3600s", 27_000),
        ("/validate/pods?timeout=soon", 9_000),
    ] {
        assert_eq!(budget(&uri.parse().unwrap()), Duration::from_millis(milliseconds), "{uri}");
    }
}

/// Arbitrary JSON, with frequent use of the words of a review.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        prop::sample::select(vec![
            "CREATE",
            "DELETE",
            "pods",
            "v1",
            "AdmissionReview",
            "admission.k8s.io/v1"
        ])
        .prop_map(Value::from),
    ];
    let words = vec![
        "apiVersion",
        "kind",
        "request",
        "uid",
        "resource",
        "operation",
        "object",
        "oldObject",
        "userInfo",
        "metadata",
        "namespace",
        "dryRun",
        "version",
        "group",
        "subResource",
        "extra",
        "groups",
    ];
    leaf.prop_recursive(5, 64, 8, move |inner| {
        let key = prop_oneof![prop::sample::select(words.clone()).prop_map(str::to_owned), ".{0,8}"];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..8)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

/// A review with one part replaced.
fn corrupted_review() -> impl Strategy<Value = Value> {
    let places = vec![
        "/apiVersion",
        "/kind",
        "/request",
        "/request/uid",
        "/request/kind",
        "/request/kind/version",
        "/request/resource",
        "/request/resource/resource",
        "/request/namespace",
        "/request/operation",
    ];
    (prop::sample::select(places), any_json()).prop_map(|(place, value)| {
        let mut review = review("pods", "fine");
        *review.pointer_mut(place).unwrap() = value;
        review
    })
}

proptest! {
    #[test]
    fn any_json_gets_a_response_with_the_request_uid(
        body in prop_oneof![any_json(), corrupted_review()],
        hook in prop::sample::select(Hook::ALL.to_vec()),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let setup = Setup::new(Limits::default());
        let (code, answer) = runtime.block_on(setup.post(&hook.path(), body.to_string()));
        match answer["kind"].as_str() {
            Some("AdmissionReview") => {
                let response = &answer["response"];
                prop_assert_eq!(&response["uid"], &body["request"]["uid"]);
                prop_assert_eq!(response["allowed"] == true, code == 200);
            }
            Some("Status") => prop_assert_eq!(code, 400),
            _ => prop_assert!(false, "{answer}"),
        }
    }

    #[test]
    fn any_bytes_are_answered(body in prop::collection::vec(any::<u8>(), 0..512)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let setup = Setup::new(Limits::default());
        let (code, _) = runtime.block_on(setup.post("/validate/pods", body));
        prop_assert_eq!(code, 400);
    }
}

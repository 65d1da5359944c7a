//! The writes to the API server: their order, preconditions and reaction to responses.

use haulout_api_types::{instigators, names};
use haulout_service_runtime::testing::{Call, Writes, recorded, rejection};
use haulout_service_runtime::watch::Handler;

use super::*;
use crate::testing::{key, uid};

const POD: &str = "/api/v1/namespaces/test/pods/pod-1";

fn evacuation_path() -> String {
    format!("/apis/evacuation.coordination.k8s.io/v1alpha1/namespaces/test/evacuations/{}-pod-1", uid(1))
}

fn pod() -> Value {
    json!({
        "metadata": {
            "name": "pod-1", "namespace": "test", "uid": uid(1).to_string(), "resourceVersion": "5",
            "labels": {"app": "web"},
        },
        "spec": {"nodeName": "node"},
        "status": {"phase": "Running"},
    })
}

fn evacuation(spec: Value) -> Value {
    let mut evacuation = json!({
        "apiVersion": "evacuation.coordination.k8s.io/v1alpha1", "kind": "Evacuation",
        "metadata": {
            "name": format!("{}-pod-1", uid(1)), "namespace": "test", "uid": key(1).to_string(),
            "resourceVersion": "10", "creationTimestamp": "2026-01-01T00:00:00Z",
            "finalizers": [instigators::finalizer(names::instigator::NODE_MAINTENANCE)],
        },
        "spec": {"podRef": {"name": "pod-1", "uid": uid(1).to_string()}},
    });
    for (field, value) in spec.as_object().into_iter().flatten() {
        evacuation["spec"][field] = value.clone();
    }
    evacuation
}

/// A leader with one Evacuation, whose pod exists or is gone.
struct Scenario {
    controller: Arc<Controller>,
    writes: Writes,
    metrics: haulout_service_runtime::metrics::Metrics,
}

impl Scenario {
    /// The API server answers writes with the response of `reject`, if any, and otherwise with the patched Evacuation.
    async fn new(
        pod_exists: bool,
        spec: Value,
        reject: impl Fn(&Call) -> Option<(u16, Value)> + Clone + Send + Sync + 'static,
    ) -> Self {
        Self::with(pod_exists, evacuation(spec), reject).await
    }

    /// The same, with any Evacuation.
    async fn with(
        pod_exists: bool,
        object: Value,
        reject: impl Fn(&Call) -> Option<(u16, Value)> + Clone + Send + Sync + 'static,
    ) -> Self {
        let known = object.clone();
        let answer = move |call: &Call| match call.path.as_str() {
            "/api/v1/pods" if !call.query.contains("watch=true") => {
                let items = if pod_exists { json!([pod()]) } else { json!([]) };
                Some((200, json!({"metadata": {"resourceVersion": "7"}, "items": items})))
            }
            POD if call.method == http::Method::GET && !pod_exists => rejection(404, "not found"),
            _ if call.method == http::Method::GET => None,
            _ => reject(call).or_else(|| Some((200, patched(&known, call)))),
        };
        let (context, writes) = recorded(answer);
        let controller = Arc::new(Controller {
            writer: Writer::new(context.clients.direct.clone(), MANAGER),
            clients: context.clients.clone(),
            clock: context.clock.clone(),
            events: context.events.clone(),
            state: Arc::default(),
            metrics: Metrics::new(&context.metrics),
            pods: context.pod_cache(),
            queue: WorkQueue::new(context.clock.clone(), crate::BACKOFF, context.metrics.queue("test")),
            resumed: Mutex::new(Timestamp::MIN),
        });
        controller.pods.ready().await;
        Handler::<Evacuation>::apply(&*controller, key(1), serde_json::from_value(object).unwrap());
        Self { controller, writes, metrics: context.metrics }
    }

    async fn handle(&self) -> Outcome {
        let queued = self.controller.state().queued(key(1)).unwrap();
        Arc::clone(&self.controller).handle(queued).await.unwrap()
    }
}

/// The Evacuation after a write, with a later version.
fn patched(known: &Value, call: &Call) -> Value {
    let mut object = known.clone();
    for part in ["status", "metadata"] {
        for (field, value) in call.body[part].as_object().into_iter().flatten() {
            object[part][field] = value.clone();
        }
    }
    object["metadata"]["resourceVersion"] = json!("11");
    object
}

fn names(calls: &[Call]) -> Vec<String> {
    calls.iter().map(ToString::to_string).collect()
}

#[tokio::test]
async fn pod_without_evacuators_is_evicted_by_its_uid() {
    let scenario = Scenario::new(true, json!({}), |_| None).await;
    scenario.handle().await;
    let writes = scenario.writes.take();
    assert_eq!(names(&writes), [format!("POST {POD}/eviction")]);
    assert_eq!(writes[0].body["deleteOptions"]["preconditions"]["uid"], uid(1).to_string());
    scenario.handle().await;
    assert_eq!(scenario.writes.take_names(), [""; 0], "evicted once");
}

#[tokio::test]
async fn evacuator_is_activated_instead_of_an_eviction() {
    let evacuators = json!({"evacuators": [{"evacuatorClass": "a.example.com", "priority": 5}]});
    let scenario = Scenario::new(true, evacuators, |_| None).await;
    assert!(matches!(scenario.handle().await, Outcome::Until(_)), "its deadline");
    let writes = scenario.writes.take();
    assert_eq!(names(&writes), [format!("PATCH {}/status", evacuation_path())]);
    assert_eq!(writes[0].body["status"]["activeEvacuatorClass"], "a.example.com");
    let metadata = &writes[0].body["metadata"];
    assert_eq!((&metadata["uid"], &metadata["resourceVersion"]), (&json!(key(1).to_string()), &json!("10")));
}

#[tokio::test]
async fn evacuation_of_a_gone_pod_is_released_and_deleted() {
    let scenario = Scenario::new(false, json!({}), |_| None).await;
    scenario.handle().await;
    let writes = scenario.writes.take();
    assert_eq!(
        names(&writes),
        [format!("PATCH {}", evacuation_path()), format!("DELETE {}", evacuation_path())]
    );
    assert_eq!(writes[0].body["metadata"]["finalizers"], json!([]));
    assert_eq!(writes[0].body["metadata"]["resourceVersion"], "10");
    // If an instigator joins between the two writes, the deletion fails.
    let preconditions = &writes[1].body["preconditions"];
    assert_eq!(preconditions, &json!({"uid": key(1).to_string(), "resourceVersion": "11"}));
}

#[tokio::test]
async fn rejected_eviction_is_counted_and_retried_later() {
    let reject = |call: &Call| {
        let causes = json!([{"reason": "DisruptionBudget", "message": "The disruption budget web needs 2"}]);
        let status = json!({
            "kind": "Status", "code": 429, "reason": "TooManyRequests", "message": "Cannot evict pod",
            "details": {"causes": causes},
        });
        call.path.ends_with("/eviction").then_some((429, status))
    };
    let scenario = Scenario::new(true, json!({}), reject).await;
    assert!(matches!(scenario.handle().await, Outcome::Until(_)));
    let writes = scenario.writes.take();
    assert_eq!(
        names(&writes),
        [format!("POST {POD}/eviction"), format!("PATCH {}/status", evacuation_path())]
    );
    let status = &writes[1].body["status"];
    assert_eq!(status["failedEvictionCounter"], 1);
    assert_eq!(
        (&status["conditions"][0]["type"], &status["conditions"][0]["status"]),
        (&json!("Blocked"), &json!("True"))
    );
    assert!(matches!(scenario.handle().await, Outcome::Until(_)));
    assert_eq!(scenario.writes.take_names(), [""; 0], "not before its backoff is over");
}

/// Evacuator `a` forbids cancellation and has long missed its deadline.
fn silent_and_forbidding(classes: &[&str]) -> Value {
    let evacuators: Vec<_> = classes
        .iter()
        .zip(5..)
        .map(|(class, n)| json!({"evacuatorClass": class, "priority": 10 - n}))
        .collect();
    let mut object = evacuation(json!({"evacuators": evacuators}));
    object["status"] = json!({
        "activeEvacuatorClass": "a", "evacuationProgressTimestamp": "2026-01-01T00:00:00Z",
        "evacuationCancellationPolicy": "Forbid",
    });
    object
}

#[tokio::test]
async fn missed_deadline_allows_cancellation_in_the_same_write() {
    let scenario = Scenario::with(true, silent_and_forbidding(&["a", "b"]), |_| None).await;
    scenario.handle().await;
    let writes = scenario.writes.take();
    assert_eq!(names(&writes), [format!("PATCH {}/status", evacuation_path())]);
    let status = &writes[0].body["status"];
    assert_eq!(
        (&status["activeEvacuatorClass"], &status["evacuationCancellationPolicy"]),
        (&json!("b"), &json!("Allow"))
    );

    // A completed evacuator may leave the pod in a state from which there is no way back.
    let mut completed = silent_and_forbidding(&["a", "b"]);
    completed["status"]["activeEvacuatorCompleted"] = json!(true);
    let scenario = Scenario::with(true, completed, |_| None).await;
    scenario.handle().await;
    let writes = scenario.writes.take();
    assert_eq!(writes[0].body["status"]["activeEvacuatorClass"], "b");
    assert_eq!(writes[0].body["status"]["evacuationCancellationPolicy"], Value::Null);
}

#[tokio::test]
async fn cancellation_is_allowed_before_the_last_eviction() {
    let scenario = Scenario::with(true, silent_and_forbidding(&["a"]), |_| None).await;
    scenario.handle().await;
    let writes = scenario.writes.take();
    let status = format!("PATCH {}/status", evacuation_path());
    assert_eq!(names(&writes), [status.clone(), status, format!("POST {POD}/eviction")]);
    assert_eq!(writes[0].body["status"], json!({"evacuationCancellationPolicy": "Allow"}));
    assert_eq!(writes[0].body["metadata"]["resourceVersion"], "10", "a report would be a conflict");

    // All instigators have withdrawn, so it is cancelled instead.
    let mut withdrawn = silent_and_forbidding(&["a"]);
    withdrawn["metadata"]["finalizers"] = json!([]);
    let scenario = Scenario::with(true, withdrawn, |_| None).await;
    scenario.handle().await;
    let path = evacuation_path();
    assert_eq!(scenario.writes.take_names(), [format!("PATCH {path}/status"), format!("DELETE {path}")]);
}

#[tokio::test]
async fn resets_of_the_cancellation_policy_are_paced() {
    // Another program sets it to Forbid in each of our writes.
    let forbidding = silent_and_forbidding(&["a"]);
    let versions = Arc::new(std::sync::atomic::AtomicU32::new(11));
    let stored = forbidding.clone();
    let scenario = Scenario::with(true, forbidding, move |call: &Call| {
        let mut object = patched(&stored, call);
        object["status"]["evacuationCancellationPolicy"] = json!("Forbid");
        let version = versions.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        call.path.ends_with("/status").then_some((200, object))
    });
    let scenario = scenario.await;
    assert!(matches!(scenario.handle().await, Outcome::Until(_)));
    let writes = scenario.writes.take();
    let resets = writes.iter().filter(|call| call.body["status"]["evacuationCancellationPolicy"] == "Allow");
    assert_eq!(resets.count(), 1, "{:?}", names(&writes));
    assert!(names(&writes).contains(&format!("POST {POD}/eviction")), "the pod is evicted meanwhile");
}

#[tokio::test]
async fn undelivered_report_stops_the_eviction() {
    // According to the watch, the evacuator has missed its deadline. The API server has a newer version.
    let evacuators = json!({"evacuators": [{"evacuatorClass": "a.example.com", "priority": 5}]});
    let conflict = |call: &Call| call.path.ends_with("/status").then(|| rejection(409, "conflict")).flatten();
    let scenario = Scenario::new(true, evacuators, conflict).await;
    let mut timed_out =
        evacuation(json!({"evacuators": [{"evacuatorClass": "a.example.com", "priority": 5}]}));
    timed_out["metadata"]["resourceVersion"] = json!("12");
    timed_out["status"] = json!({
        "activeEvacuatorClass": "a.example.com", "evacuationProgressTimestamp": "2026-01-01T00:00:00Z",
    });
    Handler::<Evacuation>::apply(&*scenario.controller, key(1), serde_json::from_value(timed_out).unwrap());
    assert_eq!(scenario.handle().await, Outcome::Failed);
    assert_eq!(scenario.writes.take_names(), [format!("PATCH {}/status", evacuation_path())], "no eviction");
}

#[tokio::test]
async fn deleted_evacuation_is_counted_by_its_pod() {
    for (pod_exists, outcome) in [(true, "cancelled"), (false, "evacuated")] {
        let scenario = Scenario::new(pod_exists, json!({}), |_| None).await;
        Handler::<Evacuation>::delete(&*scenario.controller, key(1));
        let metrics = scenario.metrics.encode().unwrap();
        let outcomes = ["cancelled", "evacuated", "evicted"].into_iter();
        let counted = outcomes.filter(|outcome| metrics.contains(&format!("outcome=\"{outcome}\"")));
        assert_eq!(counted.collect::<Vec<_>>(), [outcome]);
    }
}

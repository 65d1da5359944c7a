//! What the state stores, and which Evacuations it admits.

use serde_json::json;

use super::*;
use crate::testing::{at, blocked, budget, key, pod, pod_with, record};

fn pods(all: impl IntoIterator<Item = Pod>) -> PodIndex {
    let mut index = PodIndex::default();
    for pod in all {
        index.apply(pod);
    }
    index
}

/// The Evacuation of pod `n`, created at that second, which waits for a budget.
fn waiting(n: u32) -> Record {
    let mut record = record(n);
    record.created = at(n.into());
    record.blocked = Some(blocked(reason::BUDGET_EXHAUSTED));
    record
}

fn failure(reason: &'static str) -> Failure {
    Failure { reason, message: String::new() }
}

/// A state whose watch of budgets has synced, without budgets.
fn state() -> State {
    let mut state = State::default();
    state.budgets_synced(&pods([]));
    state
}

fn gone(pod: Pod) -> Change {
    Change { old: Some(Arc::new(pod)), new: None }
}

/// There may be tens of thousands of Evacuations.
#[test]
fn stored_evacuations_are_small() {
    assert!(size_of::<Entry>() <= 96, "{}", size_of::<Entry>());
    assert!(size_of::<Record>() <= 368, "{}", size_of::<Record>());
}

#[test]
fn older_version_never_replaces_a_newer_one() {
    let mut state = State::default();
    let version = |version: &str| Record { version: version.into(), ..record(1) };
    assert!(state.apply(version("9")));
    assert!(!state.apply(version("9")), "our own write comes back");
    assert!(!state.apply(version("8")));
    assert!(state.apply(version("10")), "by number, not by text");
    let pods = pods([pod(1)]);
    assert_eq!(state.view(key(1), &pods).unwrap().record.version.as_ref(), "10");
}

#[test]
fn response_to_a_write_does_not_restore_a_deleted_object() {
    let mut state = State::default();
    state.apply(record(1));
    state.delete(key(1), &pods([]));
    state.apply_written(record(1));
    assert!(state.view(key(1), &pods([])).is_none());
}

#[test]
fn pod_matches_by_uid_namespace_and_name() {
    let cases = [
        ("itself", pod(1), true),
        ("another namespace", pod_with(1, &[("/metadata/namespace", json!("other"))]), false),
        ("another name", pod_with(1, &[("/metadata/name", json!("other"))]), false),
        ("another UID", pod_with(1, &[("/metadata/uid", json!(crate::testing::uid(2).to_string()))]), false),
    ];
    for (name, pod, expected) in cases {
        let mut state = State::default();
        state.apply(record(1));
        let view = state.view(key(1), &pods([pod])).unwrap();
        assert_eq!((view.pod.is_some(), view.pod_gone), (expected, false), "{name}");
    }
}

#[test]
fn deleted_pod_stays_gone() {
    let mut state = State::default();
    state.apply(record(1));
    assert_eq!(state.apply_pod(&gone(pod(1)), &pods([])), [key(1)]);
    assert!(state.view(key(1), &pods([])).unwrap().pod_gone);
    assert_eq!(state.apply_pod(&gone(pod(2)), &pods([])), [], "it has no Evacuation");
}

/// The cache changes some microseconds before the change is applied here. No request to the API server is needed then.
#[test]
fn pod_that_left_the_cache_is_gone() {
    let mut state = State::default();
    state.apply(record(1));
    assert!(!state.view(key(1), &pods([])).unwrap().pod_gone, "its watch event may be delayed");
    assert!(!state.view(key(1), &pods([pod(1)])).unwrap().pod_gone);
    assert!(state.view(key(1), &pods([])).unwrap().pod_gone);
}

#[test]
fn deleted_evacuation_is_removed() {
    let mut state = State::default();
    state.apply(record(1));
    state.apply(waiting(2));
    let (deleted, _) = state.delete(key(2), &pods([pod(2)]));
    assert!(deleted.is_some_and(|deleted| deleted.pod.is_some()));
    assert_eq!(state.keys(), [key(1)]);
    assert!(state.waiting.is_empty() && state.by_pod.len() == 1);
    assert!(state.delete(key(2), &pods([])).0.is_none(), "only once");
}

#[test]
fn pod_that_the_api_server_does_not_have_stays_gone() {
    let mut state = State::default();
    state.apply(record(1));
    state.set_pod_gone(key(1));
    assert!(state.view(key(1), &pods([pod(1)])).unwrap().pod_gone, "the cache is stale");
    let late = Change { old: None, new: Some(Arc::new(pod(1))) };
    state.apply_pod(&late, &pods([pod(1)]));
    assert!(state.view(key(1), &pods([pod(1)])).unwrap().pod_gone, "and so is its watch");
}

#[test]
fn cache_misses_are_counted_until_the_pod_arrives() {
    let mut state = State::default();
    state.apply(record(1));
    assert_eq!([(); 3].map(|()| state.count_cache_miss(key(1))), [1, 2, 3]);
    state.apply_pod(&Change { old: None, new: Some(Arc::new(pod(1))) }, &pods([pod(1)]));
    assert_eq!(state.count_cache_miss(key(1)), 1);
}

#[test]
fn oldest_waiting_are_admitted_when_a_budget_allows() {
    let mut state = state();
    for n in [3, 1, 2] {
        state.apply(waiting(n));
    }
    state.apply(record(0));
    let pods = pods((0..4).map(pod));
    assert_eq!(state.apply_budget(budget("web", 0, &[]), &pods), []);
    assert_eq!(state.apply_budget(budget("web", 2, &[]), &pods), [key(1), key(2)]);
    assert!(state.view(key(1), &pods).unwrap().local.admitted);
    assert_eq!(state.delete_budget("test", "web", &pods), [key(3)], "no budget limits it");
}

#[test]
fn none_is_admitted_before_budgets_are_synced() {
    let mut state = State::default();
    state.apply(waiting(1));
    state.apply(waiting(2));
    let pods = pods((0..4).map(pod));
    // A new leader receives pods, Evacuations and budgets in any order.
    let new = Change { old: None, new: Some(Arc::new(pod(1))) };
    assert_eq!(state.apply_pod(&new, &pods), [key(1)]);
    assert!(!state.view(key(1), &pods).unwrap().local.admitted, "its budget may arrive later");
    assert_eq!(state.apply_budget(budget("web", 1, &[]), &pods), []);
    assert_eq!(state.budgets_synced(&pods), [key(1)]);
}

#[test]
fn unused_admission_goes_to_the_next() {
    let mut state = state();
    state.apply(waiting(1));
    state.apply(waiting(2));
    let pods = pods((0..4).map(pod));
    assert_eq!(state.apply_budget(budget("web", 1, &[]), &pods), [key(1)]);
    assert_eq!(state.return_admission(key(1), false, &pods), [key(2)]);
    assert_eq!(state.return_admission(key(1), false, &pods), [], "it has no admission to return");
    assert_eq!(state.view(key(1), &pods).unwrap().local.retry, None, "nothing failed");
    // It keeps its place in the order.
    state.eviction_started(key(2), &pod(2));
    assert_eq!(state.eviction_failed(key(2), failure(reason::EVICTION_FORBIDDEN), at(9), &pods), [key(1)]);
}

#[test]
fn failed_eviction_admits_the_next() {
    let cases = [
        ("the API server is busy", reason::SERVER_BUSY, true),
        ("a policy forbids it", reason::EVICTION_FORBIDDEN, false),
        ("another program moves it", reason::HANDLED_ELSEWHERE, false),
    ];
    let pods = pods((0..4).map(pod));
    for (name, reason, is_retried) in cases {
        let mut state = state();
        state.apply(waiting(1));
        state.apply(waiting(2));
        assert_eq!(state.apply_budget(budget("web", 1, &[]), &pods), [key(1)]);
        state.eviction_started(key(1), &pod(1));
        assert_eq!(state.eviction_failed(key(1), failure(reason), at(9), &pods), [key(2)], "{name}");
        let retry = state.view(key(1), &pods).unwrap().local.retry;
        assert_eq!(retry.is_some_and(|retry| retry.due <= at(10)), is_retried, "{name}");
    }
    // Something failed before the eviction was sent.
    let mut state = state();
    state.apply(waiting(1));
    state.apply(waiting(2));
    assert_eq!(state.apply_budget(budget("web", 1, &[]), &pods), [key(1)]);
    assert_eq!(state.return_admission(key(1), true, &pods), [key(2)]);
    assert!(state.view(key(1), &pods).unwrap().local.retry.is_some(), "it retries without the backoff");
    // Its Evacuation is gone.
    let (_, admitted) = state.delete(key(2), &pods);
    assert_eq!(admitted, [key(1)]);
    // The budget rejects the eviction: it allows no others either, until it changes.
    state.apply(waiting(3));
    state.eviction_started(key(1), &pod(1));
    for reason in [reason::BUDGET_EXHAUSTED, reason::BUDGET_STALE] {
        assert_eq!(state.eviction_failed(key(1), failure(reason), at(9), &pods), [], "{reason}");
    }
}

#[test]
fn transient_failures_back_off() {
    let mut state = state();
    state.apply(waiting(1));
    let pods = pods([pod(1)]);
    let mut last = Timestamp::MIN;
    let mut pauses = Vec::new();
    for _ in 0..10 {
        state.eviction_started(key(1), &pod(1));
        state.eviction_failed(key(1), failure(reason::SERVER_BUSY), at(0), &pods);
        let due = state.view(key(1), &pods).unwrap().local.retry.unwrap().due;
        pauses.push(due.duration_since(at(0)).as_secs_f64());
        assert!(due > last || due > at(40));
        last = due;
    }
    assert!(pauses[0] <= 1.0 && pauses.iter().all(|pause| *pause <= 60.0), "{pauses:?}");
    state.eviction_started(key(1), &pod(1));
    state.eviction_failed(key(1), failure(reason::BUDGET_EXHAUSTED), at(0), &pods);
    assert_eq!(state.view(key(1), &pods).unwrap().local.retry, None, "a rejection has its own backoff");
}

#[test]
fn deleted_evacuations_wait_for_budgets_cancelled_ones_do_not() {
    let mut state = state();
    state.apply(Record { deleted: Some(at(0)), ..waiting(1) });
    state.apply(Record { finalizers: Box::new([]), ..waiting(2) });
    let pods = pods((0..4).map(pod));
    assert_eq!(state.apply_budget(budget("web", 3, &[]), &pods), [key(1)]);
}

#[test]
fn changed_set_of_budgets_triggers_an_attempt() {
    let mut state = state();
    state.apply(record(1));
    let pods = pods([pod(1)]);
    state.apply_budget(budget("old", 0, &[]), &pods);
    state.eviction_started(key(1), &pod(1));
    state.eviction_failed(key(1), failure(reason::BUDGET_EXHAUSTED), at(9), &pods);
    state.apply(Record { version: "2".into(), ..waiting(1) });
    assert_eq!(state.failure_written(key(1), &pods), []);
    assert_eq!(state.apply_budget(budget("old", 0, &[]), &pods), [], "the same budget");
    assert_eq!(state.apply_budget(budget("new", 0, &[]), &pods), [key(1)], "there are two now");
    assert_eq!(state.apply_budget(budget("new", 0, &[]), &pods), [], "once");
    assert_eq!(state.delete_budget("test", "old", &pods), [key(1)], "only the new one is left");
    assert!(!state.view(key(1), &pods).unwrap().local.admitted, "the budget does not allow it");
}

#[test]
fn eviction_in_flight_counts_until_its_pod_leaves() {
    let mut state = state();
    state.apply(record(0));
    state.apply(waiting(1));
    let pods = pods((0..2).map(pod));
    state.apply_budget(budget("web", 0, &[]), &pods);
    state.eviction_started(key(0), &pod(0));
    assert_eq!(state.apply_budget(budget("web", 1, &[]), &pods), [], "that allowance is for the other");
    state.evicted(key(0), at(1));
    assert_eq!(state.admit("test", &pods), []);
    state.apply_pod(&gone(pod(0)), &pods);
    assert_eq!(state.admit("test", &pods), [key(1)]);
}

#[test]
fn budget_change_during_an_eviction_is_not_missed() {
    let mut state = state();
    state.apply(record(1));
    let pods = pods([pod(1)]);
    state.apply_budget(budget("web", 0, &[]), &pods);
    state.eviction_started(key(1), &pod(1));
    assert_eq!(state.apply_budget(budget("web", 1, &[]), &pods), [], "none waits yet");
    state.eviction_failed(key(1), failure(reason::BUDGET_EXHAUSTED), at(9), &pods);
    state.apply(Record { version: "2".into(), ..waiting(1) });
    assert_eq!(state.failure_written(key(1), &pods), [key(1)]);
    // Rejected although the budget seems to allow it: only another change admits it again.
    state.eviction_started(key(1), &pod(1));
    state.eviction_failed(key(1), failure(reason::BUDGET_EXHAUSTED), at(9), &pods);
    assert_eq!(state.failure_written(key(1), &pods), []);
    assert_eq!(state.apply_budget(budget("web", 1, &[]), &pods), [key(1)]);
}

#[test]
fn pod_that_becomes_unready_is_admitted() {
    let mut state = state();
    state.apply(waiting(1));
    let unready = pod_with(1, &[("/status/conditions", json!([{"type": "Ready", "status": "False"}]))]);
    let pods = pods([unready.clone()]);
    state.apply_budget(budget("web", 0, &[]), &self::pods([pod(1)]));
    let change = Change { old: Some(Arc::new(pod(1))), new: Some(Arc::new(unready)) };
    state.apply_pod(&change, &pods);
    assert!(state.view(key(1), &pods).unwrap().local.admitted);
}

#[test]
fn texts_are_shared_and_unused_ones_are_dropped() {
    let mut state = State::default();
    let kept = state.share("kept");
    assert!(Arc::ptr_eq(&kept, &state.share("kept")));
    let mut namespaces = Vec::new();
    for n in 0..10_000 {
        let namespace = state.share(&format!("namespace-{n}"));
        namespaces.push(Arc::downgrade(&namespace));
        state.apply(Record { namespace, ..record(n) });
        state.delete(key(n), &PodIndex::default());
        namespaces.retain(|namespace| namespace.strong_count() > 0);
        assert!(namespaces.len() <= 2 + 1024, "{n}");
    }
    assert!(Arc::ptr_eq(&kept, &state.share("kept")));

    // Somebody changes the finalizers of one Evacuation again and again.
    let mut finalizers = Vec::new();
    for n in 1..10_000 {
        let finalizer = state.share(&format!("example.com/{n}"));
        finalizers.push(Arc::downgrade(&finalizer));
        let finalizer = Box::new([finalizer]);
        state.apply(Record { version: n.to_string().into(), finalizers: finalizer, ..record(1) });
        finalizers.retain(|finalizer| finalizer.strong_count() > 0);
        assert!(finalizers.len() <= 2 + 1024, "{n}");
    }
}

#[test]
fn evacuator_classes_are_counted_by_pod() {
    let annotated = |n: u32, classes: &[&str]| {
        let class = |class: &&str| (format!("evacuation.coordination.k8s.io/priority_{class}"), json!("5"));
        let annotations: serde_json::Map<_, _> = classes.iter().map(class).collect();
        Arc::new(pod_with(n, &[("/metadata/annotations", json!(annotations))]))
    };
    let mut state = State::default();
    let (a, b) = (annotated(1, &["a.example.com", "b.example.com"]), annotated(2, &["b.example.com"]));
    let mut apply = |old, new, expected: &[(&str, u32)]| {
        state.apply_pod(&Change { old, new }, &PodIndex::default());
        let counted: Vec<_> = state.pod_classes.iter().map(|(class, pods)| (class.as_str(), *pods)).collect();
        assert_eq!(counted, expected);
    };
    apply(None, Some(Arc::clone(&a)), &[("a.example.com", 1), ("b.example.com", 1)]);
    apply(None, Some(Arc::clone(&b)), &[("a.example.com", 1), ("b.example.com", 2)]);
    apply(Some(Arc::clone(&a)), Some(annotated(1, &[])), &[("b.example.com", 1)]);
    apply(Some(b), None, &[]);
}

#[test]
fn unhealthy_pods_are_named_until_healthy_finished_or_gone() {
    let ready = |status: &str| ("/status/conditions", json!([{"type": "Ready", "status": status}]));
    let cases = [
        ("healthy", Some(pod_with(1, &[ready("True")])), false),
        ("not ready", Some(pod_with(1, &[ready("False")])), true),
        (
            "terminating",
            Some(pod_with(1, &[("/metadata/deletionTimestamp", json!("2023-01-01T00:00:30Z"))])),
            true,
        ),
        ("finished", Some(pod_with(1, &[ready("False"), ("/status/phase", json!("Failed"))])), false),
        ("gone", None, false),
    ];
    for (name, new, named) in cases {
        let mut state = State::default();
        let mut pods = pods([pod(0)]);
        state.apply_budget(budget("web", 0, &[]), &pods);
        for pod in [Some(pod_with(1, &[ready("False")])), new] {
            let change = match pod {
                Some(pod) => pods.apply(pod).pop(),
                None => pods.delete(crate::testing::uid(1)),
            };
            // An unchanged pod gives no change.
            if let Some(change) = change {
                state.apply_pod(&change, &pods);
            }
        }
        let message = state.describe_budgets(&pod(0), &pods);
        assert_eq!(message.contains("pod pod-1 is "), named, "{name}: {message}");
        assert_eq!(state.unhealthy.is_empty(), !named, "{name}");
    }
}

//! What the index knows, and whom it wakes.

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

/// An index that knows all budgets, of which there are none.
fn index() -> State {
    let mut index = State::default();
    index.budgets_synced(&pods([]));
    index
}

fn gone(pod: Pod) -> Change {
    Change { old: Some(Arc::new(pod)), new: None }
}

/// There may be tens of thousands of them.
#[test]
fn little_is_kept_of_each() {
    assert!(size_of::<Entry>() <= 96, "{}", size_of::<Entry>());
    assert!(size_of::<Record>() <= 368, "{}", size_of::<Record>());
}

#[test]
fn an_older_state_never_replaces_a_newer_one() {
    let mut index = State::default();
    let version = |version: &str| Record { version: version.into(), ..record(1) };
    assert!(index.apply(version("9")));
    assert!(!index.apply(version("9")), "our own write comes back");
    assert!(!index.apply(version("8")));
    assert!(index.apply(version("10")), "by number, not by text");
    let pods = pods([pod(1)]);
    assert_eq!(index.view(key(1), &pods).unwrap().record.version.as_ref(), "10");
}

#[test]
fn an_answer_to_a_write_does_not_bring_back_what_is_gone() {
    let mut index = State::default();
    index.apply(record(1));
    index.remove(key(1), &pods([]));
    index.refresh(record(1));
    assert!(index.view(key(1), &pods([])).is_none());
}

#[test]
fn a_pod_is_known_only_by_its_uid_namespace_and_name() {
    let cases = [
        ("itself", pod(1), true),
        ("another namespace", pod_with(1, &[("/metadata/namespace", json!("other"))]), false),
        ("another name", pod_with(1, &[("/metadata/name", json!("other"))]), false),
        ("another UID", pod_with(1, &[("/metadata/uid", json!(crate::testing::uid(2).to_string()))]), false),
    ];
    for (name, pod, expected) in cases {
        let mut index = State::default();
        index.apply(record(1));
        let view = index.view(key(1), &pods([pod])).unwrap();
        assert_eq!((view.pod.is_some(), view.pod_gone), (expected, false), "{name}");
    }
}

#[test]
fn a_pod_that_was_seen_to_go_stays_gone() {
    let mut index = State::default();
    index.apply(record(1));
    assert_eq!(index.pod_changed(&gone(pod(1)), &pods([])), [key(1)]);
    assert!(index.view(key(1), &pods([])).unwrap().pod_gone);
    assert_eq!(index.pod_changed(&gone(pod(2)), &pods([])), [], "nobody asked for that one");
}

/// Between the cache and what is applied here there are some microseconds, in which nobody has to ask the API server.
#[test]
fn pod_that_left_the_cache_is_gone() {
    let mut state = State::default();
    state.apply(record(1));
    assert!(!state.view(key(1), &pods([])).unwrap().pod_gone, "its watch event may be yet to come");
    assert!(!state.view(key(1), &pods([pod(1)])).unwrap().pod_gone);
    assert!(state.view(key(1), &pods([])).unwrap().pod_gone);
}

#[test]
fn removed_evacuation_is_forgotten() {
    let mut index = State::default();
    index.apply(record(1));
    index.apply(waiting(2));
    let (removed, _) = index.remove(key(2), &pods([pod(2)]));
    assert!(removed.is_some_and(|removed| removed.pod.is_some()));
    assert_eq!(index.keys(), [key(1)]);
    assert!(index.waiting.is_empty() && index.by_pod.len() == 1);
    assert!(index.remove(key(2), &pods([])).0.is_none(), "it goes once");
}

#[test]
fn a_pod_that_the_api_server_says_is_gone_stays_gone() {
    let mut index = State::default();
    index.apply(record(1));
    index.pod_is_gone(key(1));
    assert!(index.view(key(1), &pods([pod(1)])).unwrap().pod_gone, "the cache is behind");
    let late = Change { old: None, new: Some(Arc::new(pod(1))) };
    index.pod_changed(&late, &pods([pod(1)]));
    assert!(index.view(key(1), &pods([pod(1)])).unwrap().pod_gone, "and so is its watch");
}

#[test]
fn look_ups_of_an_unwatched_pod_are_counted_until_it_is_seen() {
    let mut index = State::default();
    index.apply(record(1));
    assert_eq!([(); 3].map(|()| index.pod_is_unwatched(key(1))), [1, 2, 3]);
    index.pod_changed(&Change { old: None, new: Some(Arc::new(pod(1))) }, &pods([pod(1)]));
    assert_eq!(index.pod_is_unwatched(key(1)), 1);
}

#[test]
fn when_a_budget_frees_up_the_oldest_that_wait_for_it_are_woken() {
    let mut index = index();
    for n in [3, 1, 2] {
        index.apply(waiting(n));
    }
    index.apply(record(0));
    let pods = pods((0..4).map(pod));
    assert_eq!(index.budget_applied(budget("web", 0, &[]), &pods), []);
    assert_eq!(index.budget_applied(budget("web", 2, &[]), &pods), [key(1), key(2)]);
    assert!(index.view(key(1), &pods).unwrap().live.admitted);
    assert_eq!(index.budget_deleted("test", "web", &pods), [key(3)], "nothing limits it any more");
}

#[test]
fn nobody_is_woken_before_all_budgets_are_known() {
    let mut index = State::default();
    index.apply(waiting(1));
    index.apply(waiting(2));
    let pods = pods((0..4).map(pod));
    // A new leader learns of pods, Evacuations and budgets in any order.
    let new = Change { old: None, new: Some(Arc::new(pod(1))) };
    assert_eq!(index.pod_changed(&new, &pods), [key(1)]);
    assert!(!index.view(key(1), &pods).unwrap().live.admitted, "its budget may be yet to come");
    assert_eq!(index.budget_applied(budget("web", 1, &[]), &pods), []);
    assert_eq!(index.budgets_synced(&pods), [key(1)]);
}

#[test]
fn who_does_not_use_its_turn_gives_it_to_the_next() {
    let mut index = index();
    index.apply(waiting(1));
    index.apply(waiting(2));
    let pods = pods((0..4).map(pod));
    assert_eq!(index.budget_applied(budget("web", 1, &[]), &pods), [key(1)]);
    assert_eq!(index.give_back(key(1), false, &pods), [key(2)]);
    assert_eq!(index.give_back(key(1), false, &pods), [], "it has nothing to give any more");
    assert_eq!(index.view(key(1), &pods).unwrap().live.soon, None, "it did not want it");
    // It has not lost its place for the next time.
    index.eviction_begins(key(2), &pod(2));
    assert_eq!(index.eviction_failed(key(2), failure(reason::EVICTION_FORBIDDEN), at(9), &pods), [key(1)]);
}

#[test]
fn room_goes_to_the_next_if_an_admitted_pod_does_not_leave() {
    let cases = [
        ("the API server is busy", reason::SERVER_BUSY, true),
        ("a policy forbids it", reason::EVICTION_FORBIDDEN, false),
        ("somebody moves it", reason::HANDLED_ELSEWHERE, false),
    ];
    let pods = pods((0..4).map(pod));
    for (name, reason, soon) in cases {
        let mut index = index();
        index.apply(waiting(1));
        index.apply(waiting(2));
        assert_eq!(index.budget_applied(budget("web", 1, &[]), &pods), [key(1)]);
        index.eviction_begins(key(1), &pod(1));
        assert_eq!(index.eviction_failed(key(1), failure(reason), at(9), &pods), [key(2)], "{name}");
        let again = index.view(key(1), &pods).unwrap().live.soon;
        assert_eq!(again.is_some_and(|again| again.due <= at(10)), soon, "{name}");
    }
    // Something failed before the eviction was sent.
    let mut index = index();
    index.apply(waiting(1));
    index.apply(waiting(2));
    assert_eq!(index.budget_applied(budget("web", 1, &[]), &pods), [key(1)]);
    assert_eq!(index.give_back(key(1), true, &pods), [key(2)]);
    assert!(index.view(key(1), &pods).unwrap().live.soon.is_some(), "it tries again without the backoff");
    // Its Evacuation is gone.
    let (_, woken) = index.remove(key(2), &pods);
    assert_eq!(woken, [key(1)]);
    // The budget itself: it has no room for others either, until it changes.
    index.apply(waiting(3));
    index.eviction_begins(key(1), &pod(1));
    for reason in [reason::BUDGET_EXHAUSTED, reason::BUDGET_STALE] {
        assert_eq!(index.eviction_failed(key(1), failure(reason), at(9), &pods), [], "{reason}");
    }
}

#[test]
fn failures_that_pass_pause_longer_each_time() {
    let mut index = index();
    index.apply(waiting(1));
    let pods = pods([pod(1)]);
    let mut last = Timestamp::MIN;
    let mut pauses = Vec::new();
    for _ in 0..10 {
        index.eviction_begins(key(1), &pod(1));
        index.eviction_failed(key(1), failure(reason::SERVER_BUSY), at(0), &pods);
        let due = index.view(key(1), &pods).unwrap().live.soon.unwrap().due;
        pauses.push(due.duration_since(at(0)).as_secs_f64());
        assert!(due > last || due > at(40));
        last = due;
    }
    assert!(pauses[0] <= 1.0 && pauses.iter().all(|pause| *pause <= 60.0), "{pauses:?}");
    index.eviction_begins(key(1), &pod(1));
    index.eviction_failed(key(1), failure(reason::BUDGET_EXHAUSTED), at(0), &pods);
    assert_eq!(index.view(key(1), &pods).unwrap().live.soon, None, "a refusal has its own backoff");
}

#[test]
fn deleted_evacuations_wait_for_budgets_cancelled_ones_do_not() {
    let mut index = index();
    index.apply(Record { deleted: Some(at(0)), ..waiting(1) });
    index.apply(Record { finalizers: Box::new([]), ..waiting(2) });
    let pods = pods((0..4).map(pod));
    assert_eq!(index.budget_applied(budget("web", 3, &[]), &pods), [key(1)]);
}

#[test]
fn other_budgets_than_those_told_of_are_found_out() {
    let mut index = index();
    index.apply(record(1));
    let pods = pods([pod(1)]);
    index.budget_applied(budget("old", 0, &[]), &pods);
    index.eviction_begins(key(1), &pod(1));
    index.eviction_failed(key(1), failure(reason::BUDGET_EXHAUSTED), at(9), &pods);
    index.apply(Record { version: "2".into(), ..waiting(1) });
    assert_eq!(index.failure_written(key(1), &pods), []);
    assert_eq!(index.budget_applied(budget("old", 0, &[]), &pods), [], "the same budget");
    assert_eq!(index.budget_applied(budget("new", 0, &[]), &pods), [key(1)], "there are two now");
    assert_eq!(index.budget_applied(budget("new", 0, &[]), &pods), [], "it is woken once");
    assert_eq!(index.budget_deleted("test", "old", &pods), [key(1)], "only the new one is left");
    assert!(!index.view(key(1), &pods).unwrap().live.admitted, "it has no room");
}

#[test]
fn an_eviction_under_way_takes_room_until_its_pod_is_seen_to_leave() {
    let mut index = index();
    index.apply(record(0));
    index.apply(waiting(1));
    let pods = pods((0..2).map(pod));
    index.budget_applied(budget("web", 0, &[]), &pods);
    index.eviction_begins(key(0), &pod(0));
    assert_eq!(index.budget_applied(budget("web", 1, &[]), &pods), [], "that room is for the other");
    index.evicted(key(0), at(1));
    assert_eq!(index.admit("test", &pods), []);
    index.pod_changed(&gone(pod(0)), &pods);
    assert_eq!(index.admit("test", &pods), [key(1)]);
}

#[test]
fn room_that_a_budget_makes_while_the_refusal_is_on_its_way_is_not_missed() {
    let mut index = index();
    index.apply(record(1));
    let pods = pods([pod(1)]);
    index.budget_applied(budget("web", 0, &[]), &pods);
    index.eviction_begins(key(1), &pod(1));
    assert_eq!(index.budget_applied(budget("web", 1, &[]), &pods), [], "nobody waits yet");
    index.eviction_failed(key(1), failure(reason::BUDGET_EXHAUSTED), at(9), &pods);
    index.apply(Record { version: "2".into(), ..waiting(1) });
    assert_eq!(index.failure_written(key(1), &pods), [key(1)]);
    // Refused although it seems to have room: only another change lets it try again.
    index.eviction_begins(key(1), &pod(1));
    index.eviction_failed(key(1), failure(reason::BUDGET_EXHAUSTED), at(9), &pods);
    assert_eq!(index.failure_written(key(1), &pods), []);
    assert_eq!(index.budget_applied(budget("web", 1, &[]), &pods), [key(1)]);
}

#[test]
fn a_pod_that_is_not_ready_any_more_is_tried_again() {
    let mut index = index();
    index.apply(waiting(1));
    let unready = pod_with(1, &[("/status/conditions", json!([{"type": "Ready", "status": "False"}]))]);
    let pods = pods([unready.clone()]);
    index.budget_applied(budget("web", 0, &[]), &self::pods([pod(1)]));
    let change = Change { old: Some(Arc::new(pod(1))), new: Some(Arc::new(unready)) };
    index.pod_changed(&change, &pods);
    assert!(index.view(key(1), &pods).unwrap().live.admitted);
}

#[test]
fn texts_are_shared_and_those_that_nobody_uses_are_forgotten() {
    let mut index = State::default();
    let kept = index.share("kept");
    assert!(Arc::ptr_eq(&kept, &index.share("kept")));
    let mut namespaces = Vec::new();
    for n in 0..10_000 {
        let namespace = index.share(&format!("namespace-{n}"));
        namespaces.push(Arc::downgrade(&namespace));
        index.apply(Record { namespace, ..record(n) });
        index.remove(key(n), &PodIndex::default());
        namespaces.retain(|namespace| namespace.strong_count() > 0);
        assert!(namespaces.len() <= 2 + 1024, "{n}");
    }
    assert!(Arc::ptr_eq(&kept, &index.share("kept")));
}

#[test]
fn what_a_budget_lacks_is_named_until_it_is_healthy_finished_or_gone() {
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
        let mut index = State::default();
        let mut pods = pods([pod(0)]);
        index.budget_applied(budget("web", 0, &[]), &pods);
        for pod in [Some(pod_with(1, &[ready("False")])), new] {
            let change = match pod {
                Some(pod) => pods.apply(pod).pop(),
                None => pods.delete(crate::testing::uid(1)),
            };
            // A state that was there before is no change.
            if let Some(change) = change {
                index.pod_changed(&change, &pods);
            }
        }
        let said = index.describe_budgets(&pod(0), &pods);
        assert_eq!(said.contains("pod pod-1 is "), named, "{name}: {said}");
        assert_eq!(index.unhealthy.is_empty(), !named, "{name}");
    }
}

//! Plans for single situations, in tables.

mod model;

use haulout_api_types::instigators::finalizer;
use serde_json::json;

use super::*;
use crate::record::Blocked;
use crate::testing::{at, evacuators, pod, pod_with, record};

const FOREIGN: &str = "example.com/report";

/// Long after we began to see.
fn at_second(now: i64) -> Moment {
    Moment { now: at(now), resumed: at(-1000), gap: false }
}

fn plan(record: &Record, pod: &Pod, now: i64) -> Plan {
    decide(record, Known::Present(pod), &Live::default(), at_second(now))
}

fn blocked(reason: &str) -> Blocked {
    Blocked { reason: reason.into(), since: at(0) }
}

/// With a.example.com in charge, before b.example.com.
fn with_a() -> Record {
    Record { evacuators: evacuators(&["a", "b"]), active: Some("a".into()), ..record(1) }
}

fn switch(why: Why) -> Action {
    Action::Switch { from: "a".into(), to: "b".into(), why }
}

fn evict(why: Why, announce: bool) -> Action {
    Action::Evict { why, announce }
}

#[test]
fn classes_take_turns_on_completion_and_at_the_deadline() {
    let a = with_a();
    let b = Record { active: Some("b".into()), ..a.clone() };
    let cases = [
        ("nobody is registered", record(1), 0, evict(Why::None, false), None),
        (
            "nobody is in charge yet",
            Record { active: None, ..a.clone() },
            0,
            Action::Activate { class: "a".into(), stamp: false },
            None,
        ),
        (
            "nobody has been in charge for long",
            Record { active: None, ..a.clone() },
            31,
            Action::Activate { class: "a".into(), stamp: true },
            None,
        ),
        ("silent since the creation", a.clone(), 599, Action::Wait, Some(600)),
        ("silent for too long", a.clone(), 600, switch(Why::Silent), None),
        (
            "reported in between",
            Record { progress: Some(at(500)), ..a.clone() },
            600,
            Action::Wait,
            Some(1100),
        ),
        ("completed", Record { completed: true, ..a.clone() }, 1, switch(Why::Completed), None),
        ("completed late", Record { completed: true, ..a.clone() }, 9999, switch(Why::Completed), None),
        ("the last one works", b.clone(), 10, Action::Wait, Some(600)),
        ("the last one is silent", b.clone(), 600, evict(Why::Silent, true), None),
        (
            "the last one completed",
            Record { completed: true, ..b.clone() },
            1,
            evict(Why::Completed, false),
            None,
        ),
        (
            "the last one is silent, and the eviction was refused",
            Record {
                failed: 1,
                last_failed: Some(at(600)),
                blocked: Some(blocked(reason::BUDGET_EXHAUSTED)),
                ..b.clone()
            },
            606,
            evict(Why::Silent, false),
            None,
        ),
        (
            "the last one reports late",
            Record {
                failed: 1,
                last_failed: Some(at(600)),
                blocked: Some(blocked(reason::BUDGET_EXHAUSTED)),
                progress: Some(at(605)),
                ..b
            },
            606,
            Action::Unblock,
            None,
        ),
        (
            "in charge is somebody unknown",
            Record { active: Some("x".into()), ..a },
            0,
            Action::Activate { class: "a".into(), stamp: false },
            None,
        ),
    ];
    for (name, record, now, action, wake) in cases {
        assert_eq!(plan(&record, &pod(1), now), Plan { action, wake: wake.map(at) }, "{name}");
    }
}

#[test]
fn a_deadline_that_passed_in_a_gap_is_missed_only_after_the_settle_time() {
    let after_gap = |now: i64, resumed: i64, gap| {
        let moment = Moment { now: at(now), resumed: at(resumed), gap };
        decide(&with_a(), Known::Present(&pod(1)), &Live::default(), moment)
    };
    assert_eq!(after_gap(5000, 4990, false), wait(Some(at(5020))));
    assert_eq!(after_gap(5020, 4990, false).action, switch(Why::Silent));
    assert_eq!(after_gap(5020, 4000, true), wait(None), "we do not see whether it reports");
}

#[test]
fn a_gap_does_not_make_a_refused_eviction_look_as_if_an_evacuator_were_at_work() {
    let refused = Record {
        failed: 1,
        last_failed: Some(at(605)),
        blocked: Some(blocked(reason::BUDGET_EXHAUSTED)),
        ..with_a()
    };
    let after_restart = |record: &Record| {
        let moment = Moment { now: at(611), resumed: at(610), gap: false };
        decide(record, Known::Present(&pod(1)), &Live::default(), moment)
    };
    assert_eq!(after_restart(&refused), wait(Some(at(640))), "it was silent before, and may still be");
    let reported = Record { progress: Some(at(610)), ..refused };
    assert_eq!(after_restart(&reported).action, Action::Unblock, "now it is at work");
}

#[test]
fn only_pods_that_may_be_evicted_are() {
    let owner = |kind: &str| json!([{"apiVersion": "apps/v1", "kind": kind, "name": "x", "uid": "u", "controller": true}]);
    let daemon = pod_with(1, &[("/metadata/ownerReferences", owner("DaemonSet"))]);
    let mirror = pod_with(1, &[("/metadata/annotations", json!({"kubernetes.io/config.mirror": "x"}))]);
    for pod in [&daemon, &mirror] {
        let Action::Block { reason, message } = plan(&record(1), pod, 0).action else { panic!("{pod:?}") };
        assert_eq!(reason, reason::UNSUPPORTED);
        assert!(message.contains("never evicted"));
        let told = Record { blocked: Some(blocked(reason::UNSUPPORTED)), ..record(1) };
        assert_eq!(plan(&told, pod, 0), wait(None), "it is told once");
    }
    let replica = pod_with(1, &[("/metadata/ownerReferences", owner("ReplicaSet"))]);
    assert_eq!(plan(&record(1), &replica, 0).action, evict(Why::None, false));
}

#[test]
fn a_terminating_pod_is_left_to_finish_and_told_of_when_it_does_not() {
    let ends = at(30).to_string();
    let ending = pod_with(
        1,
        &[("/metadata/deletionTimestamp", json!(ends)), ("/metadata/deletionGracePeriodSeconds", json!(30))],
    );
    assert_eq!(plan(&record(1), &ending, 0), wait(Some(at(90))));
    assert_eq!(
        plan(&with_a(), &ending, 9999).action,
        plan(&record(1), &ending, 9999).action,
        "nobody's turn"
    );
    let was_blocked = Record { blocked: Some(blocked(reason::BUDGET_EXHAUSTED)), ..record(1) };
    assert_eq!(plan(&was_blocked, &ending, 0).action, Action::Unblock);
    let Action::Block { reason, message } = plan(&was_blocked, &ending, 90).action else { panic!() };
    assert_eq!(reason, reason::TERMINATING);
    assert!(message.contains("its node may be unreachable"), "{message}");
    let told = Record { blocked: Some(blocked(reason::TERMINATING)), ..record(1) };
    assert_eq!(plan(&told, &ending, 91), wait(None));
}

#[test]
fn an_evacuation_ends_with_its_pod_or_when_nobody_wants_it() {
    let evacuator = finalizer("a");
    let mine = finalizer("test.example.com");
    let with = |finalizers: &[&str], deleting| Record {
        finalizers: finalizers.iter().map(|f| (*f).into()).collect(),
        deleting,
        ..with_a()
    };
    let release = |keep: &[&str]| Action::Release { keep: keep.iter().map(ToString::to_string).collect() };
    let delete = |end| Action::Delete { end };
    let pod = pod(1);
    let (here, gone) = (Known::Present(&pod), Known::Gone);
    let cases = [
        ("gone, with instigators", with(&[&mine, &evacuator], false), gone, release(&[])),
        ("gone, with others", with(&[&mine, FOREIGN], false), gone, release(&[FOREIGN])),
        ("gone, only others left", with(&[FOREIGN], false), gone, delete(End::Evacuated)),
        ("gone, nobody left", with(&[], false), gone, delete(End::Evacuated)),
        ("gone, deleted, with instigators", with(&[&mine], true), gone, release(&[])),
        ("gone, deleted, only others left", with(&[FOREIGN], true), gone, Action::Wait),
        ("unwanted", with(&[], false), here, delete(End::Cancelled)),
        ("unwanted, with an evacuator's finalizer", with(&[&evacuator], false), here, delete(End::Cancelled)),
        ("unwanted, with others", with(&[FOREIGN], false), here, delete(End::Cancelled)),
        ("unwanted and deleted, the evacuator cleans up", with(&[&evacuator], true), here, Action::Wait),
        ("wanted and deleted", with(&[&mine], true), here, Action::Wait),
        ("wanted", with(&[&mine], false), here, Action::Wait),
        ("unknown pod", with(&[&mine], false), Known::Nothing, Action::LookUp),
    ];
    for (name, record, pod, expected) in cases {
        let plan = decide(&record, pod, &Live::default(), at_second(10));
        assert_eq!(plan.action, expected, "{name}");
    }
    let forbid = |record| Record { policy: CancellationPolicy::Forbid, ..record };
    let unwanted = Record { completed: true, ..forbid(with(&[], false)) };
    assert_eq!(plan(&unwanted, &pod, 10).action, switch(Why::Completed), "it cannot be called off");
    let deleted = Record { completed: true, ..forbid(with(&[&mine], true)) };
    assert_eq!(plan(&deleted, &pod, 10).action, switch(Why::Completed), "it cannot be called off");
    let ours = Live { deleted: true, ..Live::default() };
    assert_eq!(decide(&with(&[], false), Known::Gone, &ours, at_second(10)), wait(None), "not twice");
    let cleans_up = decide(&with(&[&evacuator], false), Known::Gone, &ours, at_second(10));
    assert_eq!(cleans_up.action, release(&[]), "its evacuator may have been slower than its pod");
}

#[test]
fn an_eviction_is_not_repeated_before_its_effect_can_be_seen() {
    let live = Live { evicted: Some(at(10)), ..Live::default() };
    let plan = |record: &Record, now| decide(record, Known::Present(&pod(1)), &live, at_second(now));
    assert_eq!(plan(&record(1), 11), wait(Some(at(70))));
    assert_eq!(plan(&record(1), 70).action, evict(Why::None, false), "it must have got lost");
    let was_blocked = Record { blocked: Some(blocked(reason::BUDGET_EXHAUSTED)), ..record(1) };
    assert_eq!(plan(&was_blocked, 11).action, Action::Unblock);
}

#[test]
fn a_refused_eviction_waits_for_its_backoff_or_for_its_budget() {
    let refused = Record {
        failed: 3,
        last_failed: Some(at(100)),
        blocked: Some(blocked(reason::BUDGET_EXHAUSTED)),
        ..record(1)
    };
    let Plan { action: Action::Wait, wake: Some(wake) } = plan(&refused, &pod(1), 101) else { panic!() };
    assert!((at(115)..=at(120)).contains(&wake));
    let admitted = Live { admitted: true, ..Live::default() };
    let plan = decide(&refused, Known::Present(&pod(1)), &admitted, at_second(101));
    assert_eq!(plan.action, evict(Why::None, false));
}

//! Plans for single situations, in tables.

mod model;

use haulout_api_types::evacuation::CancellationPolicy;
use haulout_api_types::instigators::finalizer;
use serde_json::json;

use super::*;
use crate::record::{Blocked, fingerprint};
use crate::testing::{at, blocked, evacuators, pod, pod_with, record};

const FOREIGN: &str = "example.com/report";

/// Long after we began to see.
fn at_second(now: i64) -> Moment {
    Moment { now: at(now), resumed: at(-1000), gap: false }
}

fn plan(record: &Record, pod: &Pod, now: i64) -> Action {
    decide(record, Known::Present(pod), &Live::default(), at_second(now))
}

/// With a.example.com in charge, before b.example.com.
fn with_a() -> Record {
    Record { evacuators: evacuators(&["a", "b"]), active: Some("a".into()), ..record(1) }
}

fn wait(until: Option<Timestamp>) -> Action {
    Action::Wait { until }
}

fn switch(why: Why) -> Action {
    Action::Switch { from: "a".into(), to: "b".into(), why }
}

fn evict(why: Why, before: Before) -> Action {
    Action::Evict { why, before }
}

/// The reason for which nothing is in the way any more.
fn unblocked(action: &Action) -> Option<&str> {
    match action {
        Action::Unblock { reason, .. } => Some(reason),
        _ => None,
    }
}

#[test]
fn classes_take_turns_on_completion_and_at_the_deadline() {
    let a = with_a();
    let b = Record { active: Some("b".into()), ..a.clone() };
    let cases = [
        ("nobody is registered", record(1), 0, evict(Why::None, Before::Nothing)),
        (
            "nobody is in charge yet",
            Record { active: None, ..a.clone() },
            0,
            Action::Activate { class: "a".into(), stamp: false },
        ),
        (
            "nobody has been in charge for long",
            Record { active: None, ..a.clone() },
            31,
            Action::Activate { class: "a".into(), stamp: true },
        ),
        ("silent since the creation", a.clone(), 599, wait(Some(at(600)))),
        ("silent for too long", a.clone(), 600, switch(Why::Silent)),
        ("reported in between", Record { progress: Some(at(500)), ..a.clone() }, 600, wait(Some(at(1100)))),
        ("completed", Record { completed: true, ..a.clone() }, 1, switch(Why::Completed)),
        ("completed late", Record { completed: true, ..a.clone() }, 9999, switch(Why::Completed)),
        ("the last one works", b.clone(), 10, wait(Some(at(600)))),
        ("the last one is silent", b.clone(), 600, evict(Why::Silent, Before::Announce)),
        (
            "the last one completed",
            Record { completed: true, ..b.clone() },
            1,
            evict(Why::Completed, Before::Nothing),
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
            evict(Why::Silent, Before::Confirm),
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
            Action::Unblock {
                reason: reason::NOT_BLOCKED,
                message: "Evacuator b reports progress again: the pod is not evicted.".into(),
            },
        ),
        (
            "in charge is somebody unknown",
            Record { active: Some("x".into()), ..a },
            0,
            Action::Activate { class: "a".into(), stamp: false },
        ),
    ];
    for (name, record, now, action) in cases {
        assert_eq!(plan(&record, &pod(1), now), action, "{name}");
    }
}

#[test]
fn a_deadline_that_passed_in_a_gap_is_missed_only_after_the_settle_time() {
    let after_gap = |now: i64, resumed: i64, gap| {
        let moment = Moment { now: at(now), resumed: at(resumed), gap };
        decide(&with_a(), Known::Present(&pod(1)), &Live::default(), moment)
    };
    assert_eq!(after_gap(5000, 4990, false), wait(Some(at(5020))));
    assert_eq!(after_gap(5020, 4990, false), switch(Why::Silent));
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
    assert_eq!(unblocked(&after_restart(&reported)), Some(reason::NOT_BLOCKED), "now it is at work");
}

#[test]
fn only_pods_that_may_be_evicted_are() {
    let owner = |kind: &str| json!([{"apiVersion": "apps/v1", "kind": kind, "name": "x", "uid": "u", "controller": true}]);
    let daemon = pod_with(1, &[("/metadata/ownerReferences", owner("DaemonSet"))]);
    let mirror = pod_with(1, &[("/metadata/annotations", json!({"kubernetes.io/config.mirror": "x"}))]);
    for pod in [&daemon, &mirror] {
        let Action::Block { reason, message } = plan(&record(1), pod, 0) else { panic!("{pod:?}") };
        assert_eq!(reason, reason::UNSUPPORTED);
        assert!(message.contains("never evicted"));
        let told = Record { blocked: Some(blocked(reason::UNSUPPORTED)), ..record(1) };
        assert_eq!(plan(&told, pod, 0), wait(None), "it is told once");
    }
    let replica = pod_with(1, &[("/metadata/ownerReferences", owner("ReplicaSet"))]);
    assert_eq!(plan(&record(1), &replica, 0), evict(Why::None, Before::Nothing));
}

#[test]
fn a_terminating_pod_is_left_to_finish_and_told_of_when_it_does_not() {
    let ends = at(30).to_string();
    let ending = pod_with(
        1,
        &[("/metadata/deletionTimestamp", json!(ends)), ("/metadata/deletionGracePeriodSeconds", json!(30))],
    );
    assert_eq!(plan(&record(1), &ending, 0), wait(Some(at(90))));
    assert_eq!(plan(&with_a(), &ending, 9999), plan(&record(1), &ending, 9999), "nobody's turn");
    let was_blocked = Record { blocked: Some(blocked(reason::BUDGET_EXHAUSTED)), ..record(1) };
    let Action::Unblock { reason, message } = plan(&was_blocked, &ending, 0) else { panic!() };
    assert_eq!(reason, reason::EVACUATING);
    assert_eq!(message, format!("Pod pod-1 is terminating. Its grace period ends at {ends}."));
    let not_any_more = Blocked { is_true: false, ..blocked(reason::EVACUATING) };
    let was_blocked_before = Record { blocked: Some(not_any_more), ..record(1) };
    assert_eq!(plan(&was_blocked_before, &ending, 0), wait(Some(at(90))), "that is told once");
    let Action::Block { reason, message } = plan(&was_blocked, &ending, 90) else { panic!() };
    assert_eq!(reason, reason::TERMINATING);
    assert!(message.contains("its node may be unreachable"), "{message}");
    let told = Record { blocked: Some(blocked(reason::TERMINATING)), ..record(1) };
    assert_eq!(plan(&told, &ending, 91), wait(None));
}

#[test]
fn an_evacuation_ends_with_its_pod_or_when_nobody_wants_it() {
    let evacuator = finalizer("a");
    let mine = finalizer("test.example.com");
    let with = |finalizers: &[&str], deleted: Option<i64>| Record {
        finalizers: finalizers.iter().map(|f| (*f).into()).collect(),
        deleted: deleted.map(at),
        ..with_a()
    };
    let release = |keep: &[&str]| Action::Release { keep: keep.iter().map(ToString::to_string).collect() };
    let delete = |end| Action::Delete { end };
    let pod = pod(1);
    let (here, gone) = (Known::Present(&pod), Known::Gone);
    let cases = [
        ("gone, with instigators", with(&[&mine, &evacuator], None), gone, release(&[])),
        ("gone, with others", with(&[&mine, FOREIGN], None), gone, release(&[FOREIGN])),
        ("gone, only others left", with(&[FOREIGN], None), gone, delete(End::Evacuated)),
        ("gone, nobody left", with(&[], None), gone, delete(End::Evacuated)),
        ("gone, deleted, with instigators", with(&[&mine], Some(9)), gone, release(&[])),
        ("gone, deleted, only others left", with(&[FOREIGN], Some(9)), gone, wait(Some(at(14)))),
        ("unwanted", with(&[], None), here, delete(End::Cancelled)),
        ("unwanted, with an evacuator's finalizer", with(&[&evacuator], None), here, delete(End::Cancelled)),
        ("unwanted, with others", with(&[FOREIGN], None), here, delete(End::Cancelled)),
        (
            "unwanted and deleted, the evacuator cleans up",
            with(&[&evacuator], Some(9)),
            here,
            wait(Some(at(14))),
        ),
        ("wanted and deleted", with(&[&mine], Some(9)), here, wait(Some(at(600)))),
        ("wanted", with(&[&mine], None), here, wait(Some(at(600)))),
        ("unknown pod", with(&[&mine], None), Known::Nothing, Action::LookUp),
    ];
    for (name, record, pod, expected) in cases {
        let plan = decide(&record, pod, &Live::default(), at_second(10));
        assert_eq!(plan, expected, "{name}");
    }
    let forbid = |record| Record { policy: CancellationPolicy::Forbid, ..record };
    let unwanted = Record { completed: true, ..forbid(with(&[], None)) };
    assert_eq!(plan(&unwanted, &pod, 10), switch(Why::Completed), "it cannot be called off");
    let ours = Live { deleted: Some(End::Evacuated), ..Live::default() };
    assert_eq!(decide(&with(&[], None), Known::Gone, &ours, at_second(10)), wait(None), "not twice");
    let cleans_up = decide(&with(&[&evacuator], None), Known::Gone, &ours, at_second(10));
    assert_eq!(cleans_up, release(&[]), "its evacuator may have been slower than its pod");
}

#[test]
fn a_deleted_evacuation_goes_on_while_an_instigator_remains() {
    let busy = Record {
        failed: 1,
        last_failed: Some(at(0)),
        blocked: Some(blocked(reason::BUDGET_EXHAUSTED)),
        ..record(1)
    };
    let ending = pod_with(1, &[("/metadata/deletionTimestamp", json!(at(2000).to_string()))]);
    let cases = [
        ("nobody is in charge yet", Record { active: None, ..with_a() }, pod(1)),
        ("it is at work", with_a(), pod(1)),
        ("it has completed", Record { completed: true, ..with_a() }, pod(1)),
        ("it is silent", Record { created: at(-1000), ..with_a() }, pod(1)),
        ("nobody is registered", record(1), pod(1)),
        ("its eviction was refused", busy.clone(), pod(1)),
        ("it is terminating", busy, ending),
    ];
    for (name, record, pod) in cases {
        let deleted = Record { deleted: Some(at(5)), ..record.clone() };
        assert_eq!(plan(&deleted, &pod, 10), plan(&record, &pod, 10), "{name}");
    }
}

#[test]
fn who_holds_an_evacuation_that_should_be_gone_is_named() {
    let pod = pod(1);
    let evacuator = finalizer("a");
    let held = |finalizers: &[&str]| Record {
        finalizers: finalizers.iter().map(|f| (*f).into()).collect(),
        deleted: Some(at(100)),
        ..with_a()
    };
    let cancelled = held(&[FOREIGN, &evacuator]);
    assert_eq!(plan(&cancelled, &pod, 104), wait(Some(at(105))), "it may take a moment");
    let Action::Hold { end, message } = plan(&cancelled, &pod, 105) else { panic!() };
    assert_eq!(end, End::Cancelled);
    assert_eq!(
        message,
        "The evacuation is cancelled, but finalizers keep the Evacuation from being removed: example.com/report, \
         evacuation.coordination.k8s.io/instigator_a (evacuator a has to clean up). Their owners have to remove them."
    );
    let told = Blocked { message: fingerprint(&message), ..blocked(reason::EVACUATION_HELD) };
    let told = |finalizers: &[&str]| Record { blocked: Some(told.clone()), ..held(finalizers) };
    assert_eq!(plan(&told(&[FOREIGN, &evacuator]), &pod, 106), wait(None), "it is told once");
    assert!(matches!(plan(&told(&[FOREIGN]), &pod, 106), Action::Hold { .. }), "one has let go");

    let after_pod = |record: &Record| decide(record, Known::Gone, &Live::default(), at_second(105));
    let Action::Hold { end, message } = after_pod(&held(&[FOREIGN])) else { panic!() };
    assert_eq!(end, End::Evacuated);
    assert!(message.starts_with("The pod is gone, but finalizers keep"), "{message}");
    let many: Vec<_> = (0..20).map(|n| format!("example.com/{n}")).collect();
    let many: Vec<_> = many.iter().map(String::as_str).collect();
    let Action::Hold { message, .. } = after_pod(&held(&many)) else { panic!() };
    assert!(message.contains("example.com/4, and 15 more."), "{message}");
    assert_eq!(after_pod(&held(&[])), WAIT, "its watch event is on its way");
    let forbid = Record { policy: CancellationPolicy::Forbid, ..told(&[FOREIGN]) };
    assert_eq!(unblocked(&plan(&forbid, &pod, 110)), Some(reason::NOT_BLOCKED), "it goes on after all");
}

#[test]
fn outcomes_are_evicted_evacuated_or_cancelled() {
    let evicted = Live { evicted: Some(at(5)), ..Live::default() };
    let silent = Record { created: at(-700), ..with_a() };
    let last = |record: Record| Record { active: Some("b".into()), ..record };
    let refused = Record { blocked: Some(blocked(reason::BUDGET_EXHAUSTED)), ..record(1) };
    let cases = [
        ("evicted", record(1), evicted.clone(), -1000, End::Evicted),
        ("somebody else removed it", record(1), Live::default(), -1000, End::Evacuated),
        ("evicted by an earlier leader", record(1), Live::default(), 5, End::Evicted),
        ("refused to an earlier leader", refused, Live::default(), 5, End::Evacuated),
        ("an evacuator was at work", with_a(), Live::default(), 5, End::Evacuated),
        ("evicted after the last evacuator", last(silent), evicted, -1000, End::Evicted),
    ];
    for (name, record, live, resumed, expected) in cases {
        let moment = Moment { now: at(10), resumed: at(resumed), gap: false };
        let record = Record { finalizers: Box::new([]), ..record };
        let plan = decide(&record, Known::Gone, &live, moment);
        assert_eq!(plan, Action::Delete { end: expected }, "{name}");
    }
}

#[test]
fn a_progress_time_in_the_future_is_clamped() {
    let reported = |progress: i64| Record { progress: Some(at(progress)), ..with_a() };
    assert_eq!(plan(&reported(130), &pod(1), 100), wait(Some(at(730))), "clocks may differ a little");
    assert_eq!(plan(&reported(131), &pod(1), 100), Action::Clamp);
    assert_eq!(plan(&reported(1_000_000), &pod(1), 100), Action::Clamp);
    // What is written is the present, and from then on the deadline runs.
    assert_eq!(plan(&reported(100), &pod(1), 700), switch(Why::Silent));
    let done = Record { completed: true, ..reported(1_000_000) };
    assert_eq!(plan(&done, &pod(1), 100), switch(Why::Completed));
}

#[test]
fn an_eviction_is_not_repeated_before_its_effect_can_be_seen() {
    let live = Live { evicted: Some(at(10)), ..Live::default() };
    let plan = |record: &Record, now| decide(record, Known::Present(&pod(1)), &live, at_second(now));
    assert_eq!(plan(&record(1), 11), wait(Some(at(70))));
    assert_eq!(plan(&record(1), 70), evict(Why::None, Before::Nothing), "it must have got lost");
    let was_blocked = Record { blocked: Some(blocked(reason::BUDGET_EXHAUSTED)), ..record(1) };
    let Action::Unblock { reason, message } = plan(&was_blocked, 11) else { panic!() };
    assert_eq!(reason, reason::EVACUATING);
    assert_eq!(message, "The pod is being evicted: it has no evacuator.");
}

#[test]
fn a_refused_eviction_waits_for_its_backoff_or_for_its_budget() {
    let refused = Record {
        failed: 3,
        last_failed: Some(at(100)),
        blocked: Some(blocked(reason::BUDGET_EXHAUSTED)),
        ..record(1)
    };
    let Action::Wait { until: Some(wake) } = plan(&refused, &pod(1), 101) else { panic!() };
    assert!((at(115)..=at(120)).contains(&wake));
    let admitted = Live { admitted: true, ..Live::default() };
    let plan = decide(&refused, Known::Present(&pod(1)), &admitted, at_second(101));
    assert_eq!(plan, evict(Why::None, Before::Nothing));
}

#[test]
fn transient_failures_retry_soon_after_earlier_refusals() {
    let refused = Record {
        failed: 9,
        last_failed: Some(at(100)),
        blocked: Some(blocked(reason::BUDGET_EXHAUSTED)),
        ..record(1)
    };
    let soon =
        |due: i64| Live { soon: Some(Box::new(Soon { failures: 1, due: at(due) })), ..Live::default() };
    let plan =
        |record: &Record, live: &Live, now| decide(record, Known::Present(&pod(1)), live, at_second(now));
    let Action::Wait { until } = plan(&refused, &Live::default(), 101) else { panic!() };
    assert!(until > Some(at(700)), "it has been refused often");
    assert_eq!(plan(&refused, &soon(102), 101), wait(Some(at(102))));
    assert_eq!(plan(&refused, &soon(102), 102), evict(Why::None, Before::Nothing));
    let busy = Record { blocked: Some(blocked(reason::SERVER_BUSY)), ..refused.clone() };
    assert_eq!(plan(&busy, &Live::default(), 101), evict(Why::None, Before::Nothing), "after a restart");
    // An evacuator was at work since: what was refused before is over.
    let worked = Record {
        completed: true,
        blocked: Some(Blocked { is_true: false, ..blocked(reason::NOT_BLOCKED) }),
        ..refused
    };
    assert_eq!(plan(&worked, &Live::default(), 101), evict(Why::None, Before::Nothing));
}

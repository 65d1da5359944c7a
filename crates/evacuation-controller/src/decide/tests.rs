//! Decisions for single situations, as tables.

mod model;

use haulout_api_types::evacuation::CancellationPolicy;
use haulout_api_types::instigators::finalizer;
use serde_json::json;

use super::*;
use crate::record::{Blocked, fingerprint};
use crate::testing::{at, blocked, evacuators, pod, pod_with, record};

const FOREIGN: &str = "example.com/report";

/// This second, long after the watches have synced.
fn at_second(now: i64) -> Moment {
    Moment { now: at(now), resumed: at(-1000), gap: false, unserved: None }
}

fn plan(record: &Record, pod: &Pod, now: i64) -> Action {
    decide(record, PodState::Present(pod), &LocalState::default(), at_second(now))
}

/// An Evacuation with the active evacuator `a`, followed by `b`.
fn with_a() -> Record {
    Record { evacuators: evacuators(&["a", "b"]), active: Some("a".into()), ..record(1) }
}

fn wait(until: Option<Timestamp>) -> Action {
    Action::Wait { until }
}

fn switch(eviction_cause: EvictionCause) -> Action {
    Action::Switch { from: "a".into(), to: "b".into(), eviction_cause }
}

fn evict(eviction_cause: EvictionCause, before: BeforeEviction) -> Action {
    Action::Evict { eviction_cause, before }
}

/// The reason of an action that unblocks the pod.
fn unblocked(action: &Action) -> Option<&str> {
    match action {
        Action::Unblock { reason, .. } => Some(reason),
        _ => None,
    }
}

#[test]
fn turns_end_on_completion_and_at_the_deadline() {
    let a = with_a();
    let b = Record { active: Some("b".into()), ..a.clone() };
    let cases = [
        ("no evacuator", record(1), 0, evict(EvictionCause::NoEvacuator, BeforeEviction::Nothing)),
        (
            "no evacuator is active yet",
            Record { active: None, ..a.clone() },
            0,
            Action::Activate { class: "a".into(), stamp: false },
        ),
        (
            "no evacuator has been active for long",
            Record { active: None, ..a.clone() },
            31,
            Action::Activate { class: "a".into(), stamp: true },
        ),
        ("no report before the deadline", a.clone(), 599, wait(Some(at(600)))),
        ("deadline missed", a.clone(), 600, switch(EvictionCause::TimedOut)),
        ("reported in between", Record { progress: Some(at(500)), ..a.clone() }, 600, wait(Some(at(1100)))),
        ("completed", Record { completed: true, ..a.clone() }, 1, switch(EvictionCause::Completed)),
        ("completed late", Record { completed: true, ..a.clone() }, 9999, switch(EvictionCause::Completed)),
        ("the last one is active", b.clone(), 10, wait(Some(at(600)))),
        (
            "the last one misses its deadline",
            b.clone(),
            600,
            evict(EvictionCause::TimedOut, BeforeEviction::WriteMessage),
        ),
        (
            "the last one completed",
            Record { completed: true, ..b.clone() },
            1,
            evict(EvictionCause::Completed, BeforeEviction::Nothing),
        ),
        (
            "the last one misses its deadline, and the eviction was rejected",
            Record {
                failed: 1,
                last_failed: Some(at(600)),
                blocked: Some(blocked(reason::BUDGET_EXHAUSTED)),
                ..b.clone()
            },
            606,
            evict(EvictionCause::TimedOut, BeforeEviction::CheckVersion),
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
                message: "Evacuator b is active again: the pod is not evicted.".into(),
            },
        ),
        (
            "the active class is unknown",
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
fn class_without_a_live_service_is_passed_over() {
    let since = at(100);
    let cause = EvictionCause::Unserved(since);
    let a = with_a();
    let b = Record { active: Some("b".into()), ..a.clone() };
    let failed = Record {
        failed: 1,
        last_failed: Some(at(160)),
        blocked: Some(blocked(reason::BUDGET_EXHAUSTED)),
        ..b.clone()
    };
    let moment = |resumed, gap| Moment { now: at(170), resumed: at(resumed), gap, unserved: None };
    let synced = moment(-1000, false);
    // Name, Evacuation, whether the service has no leader, moment, action.
    let cases = [
        ("the next one follows", a.clone(), true, synced, switch(cause)),
        ("the pod is evicted", b.clone(), true, synced, evict(cause, BeforeEviction::WriteMessage)),
        ("it is evicted again", failed.clone(), true, synced, evict(cause, BeforeEviction::CheckVersion)),
        ("the service has a leader", a.clone(), false, synced, wait(Some(at(600)))),
        (
            "it has completed",
            Record { completed: true, ..a.clone() },
            true,
            synced,
            switch(EvictionCause::Completed),
        ),
        ("the gap has just ended", a.clone(), true, moment(120, false), wait(Some(at(180)))),
        ("there is a gap", a, true, moment(-1000, true), wait(None)),
        (
            "the service has a leader again",
            failed,
            false,
            synced,
            Action::Unblock {
                reason: reason::NOT_BLOCKED,
                message: "Evacuator b is active again: the pod is not evicted.".into(),
            },
        ),
    ];
    for (name, record, absent, moment, action) in cases {
        let moment = Moment { unserved: absent.then_some(since), ..moment };
        let local = LocalState::default();
        assert_eq!(decide(&record, PodState::Present(&pod(1)), &local, moment), action, "{name}");
    }
    let forbids = Record { policy: CancellationPolicy::Forbid, ..b };
    let moment = Moment { unserved: Some(since), ..synced };
    let action = decide(&forbids, PodState::Present(&pod(1)), &LocalState::default(), moment);
    assert_eq!(action, Action::AllowCancellation);
}

#[test]
fn silent_evacuator_does_not_forbid_cancellation() {
    let forbid = |record: &Record| Record { policy: CancellationPolicy::Forbid, ..record.clone() };
    let b = Record { active: Some("b".into()), ..with_a() };
    let waiting = Record {
        failed: 1,
        last_failed: Some(at(600)),
        blocked: Some(blocked(reason::BUDGET_EXHAUSTED)),
        ..b.clone()
    };
    let daemon = pod_with(
        1,
        &[(
            "/metadata/ownerReferences",
            json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "x", "uid": "u", "controller": true}]),
        )],
    );
    let pod = pod(1);
    let cases = [
        ("it has time left", forbid(&b), &pod, 599, wait(Some(at(600)))),
        ("it missed its deadline", forbid(&b), &pod, 600, Action::AllowCancellation),
        ("its eviction waits for a budget", forbid(&waiting), &pod, 601, Action::AllowCancellation),
        ("its pod cannot be evicted", forbid(&b), &daemon, 600, Action::AllowCancellation),
        (
            "it has completed",
            Record { completed: true, ..forbid(&b) },
            &pod,
            600,
            evict(EvictionCause::Completed, BeforeEviction::Nothing),
        ),
        (
            "it reports again",
            Record { progress: Some(at(600)), ..forbid(&b) },
            &pod,
            601,
            wait(Some(at(1200))),
        ),
        ("the switch does it", forbid(&with_a()), &pod, 600, switch(EvictionCause::TimedOut)),
    ];
    for (name, record, pod, now, action) in cases {
        assert_eq!(plan(&record, pod, now), action, "{name}");
    }
    let withdrawn = Record { finalizers: Box::new([]), ..forbid(&b) };
    assert_eq!(plan(&withdrawn, &pod, 600), Action::AllowCancellation);
    let allowed = Record { policy: CancellationPolicy::Allow, ..withdrawn };
    assert_eq!(plan(&allowed, &pod, 600), Action::Delete { end: End::Cancelled });

    // It forbids cancellation again: the pod is evicted meanwhile.
    let local = |evicted| LocalState {
        evicted,
        policy_resets: Some(Box::new(PolicyResets { count: 3, due: at(604) })),
        ..LocalState::default()
    };
    let plan = |local: &LocalState, now| decide(&forbid(&b), PodState::Present(&pod), local, at_second(now));
    let before = BeforeEviction::WriteMessage;
    assert_eq!(plan(&local(None), 603), evict(EvictionCause::TimedOut, before));
    assert_eq!(plan(&local(Some(at(602))), 603), wait(Some(at(604))));
    assert_eq!(plan(&local(Some(at(602))), 604), Action::AllowCancellation);
}

#[test]
fn deadline_that_passed_in_a_gap_gets_a_grace_period() {
    let after_gap = |now: i64, resumed: i64, gap| {
        let moment = Moment { now: at(now), resumed: at(resumed), gap, unserved: None };
        decide(&with_a(), PodState::Present(&pod(1)), &LocalState::default(), moment)
    };
    assert_eq!(after_gap(5000, 4990, false), wait(Some(at(5020))));
    assert_eq!(after_gap(5020, 4990, false), switch(EvictionCause::TimedOut));
    assert_eq!(after_gap(5020, 4000, true), wait(None), "a report may not have arrived");
}

#[test]
fn rejected_eviction_stays_blocked_after_a_gap() {
    let rejected = Record {
        failed: 1,
        last_failed: Some(at(605)),
        blocked: Some(blocked(reason::BUDGET_EXHAUSTED)),
        ..with_a()
    };
    let after_restart = |record: &Record| {
        let moment = Moment { now: at(611), resumed: at(610), gap: false, unserved: None };
        decide(record, PodState::Present(&pod(1)), &LocalState::default(), moment)
    };
    assert_eq!(after_restart(&rejected), wait(Some(at(640))), "its deadline had passed before");
    let reported = Record { progress: Some(at(610)), ..rejected };
    assert_eq!(unblocked(&after_restart(&reported)), Some(reason::NOT_BLOCKED), "it is active again");
}

#[test]
fn daemon_set_and_static_pods_are_not_evicted() {
    let owner = |kind: &str| json!([{"apiVersion": "apps/v1", "kind": kind, "name": "x", "uid": "u", "controller": true}]);
    let daemon = pod_with(1, &[("/metadata/ownerReferences", owner("DaemonSet"))]);
    let mirror = pod_with(1, &[("/metadata/annotations", json!({"kubernetes.io/config.mirror": "x"}))]);
    for pod in [&daemon, &mirror] {
        let Action::Block { reason, message } = plan(&record(1), pod, 0) else { panic!("{pod:?}") };
        assert_eq!(reason, reason::UNSUPPORTED);
        assert!(message.contains("never evicted"));
        let reported = Record { blocked: Some(blocked(reason::UNSUPPORTED)), ..record(1) };
        assert_eq!(plan(&reported, pod, 0), wait(None), "reported once");
    }
    let replica = pod_with(1, &[("/metadata/ownerReferences", owner("ReplicaSet"))]);
    assert_eq!(plan(&record(1), &replica, 0), evict(EvictionCause::NoEvacuator, BeforeEviction::Nothing));
}

#[test]
fn terminating_pod_is_blocked_when_it_takes_too_long() {
    let ends = at(30).to_string();
    let terminating = pod_with(
        1,
        &[("/metadata/deletionTimestamp", json!(ends)), ("/metadata/deletionGracePeriodSeconds", json!(30))],
    );
    assert_eq!(plan(&record(1), &terminating, 0), wait(Some(at(90))));
    assert_eq!(
        plan(&with_a(), &terminating, 9999),
        plan(&record(1), &terminating, 9999),
        "evacuators have no turn"
    );
    let was_blocked = Record { blocked: Some(blocked(reason::BUDGET_EXHAUSTED)), ..record(1) };
    let Action::Unblock { reason, message } = plan(&was_blocked, &terminating, 0) else { panic!() };
    assert_eq!(reason, reason::EVACUATING);
    assert_eq!(message, format!("Pod pod-1 is terminating. Its grace period ends at {ends}."));
    let no_longer = Blocked { is_true: false, ..blocked(reason::EVACUATING) };
    let was_blocked_before = Record { blocked: Some(no_longer), ..record(1) };
    assert_eq!(plan(&was_blocked_before, &terminating, 0), wait(Some(at(90))), "reported once");
    let Action::Block { reason, message } = plan(&was_blocked, &terminating, 90) else { panic!() };
    assert_eq!(reason, reason::TERMINATING);
    assert!(message.contains("its node may be unreachable"), "{message}");
    let reported = Record { blocked: Some(blocked(reason::TERMINATING)), ..record(1) };
    assert_eq!(plan(&reported, &terminating, 91), wait(None));
}

#[test]
fn evacuation_ends_when_its_pod_is_gone_or_it_is_cancelled() {
    let evacuator = finalizer("a");
    let instigator = finalizer("test.example.com");
    let with = |finalizers: &[&str], deleted: Option<i64>| Record {
        finalizers: finalizers.iter().map(|f| (*f).into()).collect(),
        deleted: deleted.map(at),
        ..with_a()
    };
    let release = |keep: &[&str]| Action::Release { keep: keep.iter().map(ToString::to_string).collect() };
    let delete = |end| Action::Delete { end };
    let pod = pod(1);
    let (here, gone) = (PodState::Present(&pod), PodState::Gone);
    let cases = [
        ("gone, with instigators", with(&[&instigator, &evacuator], None), gone, release(&[])),
        ("gone, with others", with(&[&instigator, FOREIGN], None), gone, release(&[FOREIGN])),
        ("gone, only others left", with(&[FOREIGN], None), gone, delete(End::Evacuated)),
        ("gone, no finalizer left", with(&[], None), gone, delete(End::Evacuated)),
        ("gone, deleted, with instigators", with(&[&instigator], Some(9)), gone, release(&[])),
        ("gone, deleted, only others left", with(&[FOREIGN], Some(9)), gone, wait(Some(at(14)))),
        ("cancelled", with(&[], None), here, delete(End::Cancelled)),
        ("cancelled, with an evacuator's finalizer", with(&[&evacuator], None), here, delete(End::Cancelled)),
        ("cancelled, with others", with(&[FOREIGN], None), here, delete(End::Cancelled)),
        (
            "cancelled and deleted, the evacuator cleans up",
            with(&[&evacuator], Some(9)),
            here,
            wait(Some(at(14))),
        ),
        ("requested and deleted", with(&[&instigator], Some(9)), here, wait(Some(at(600)))),
        ("requested", with(&[&instigator], None), here, wait(Some(at(600)))),
        ("unknown pod", with(&[&instigator], None), PodState::Unknown, Action::LookUp),
    ];
    for (name, record, pod, expected) in cases {
        let plan = decide(&record, pod, &LocalState::default(), at_second(10));
        assert_eq!(plan, expected, "{name}");
    }
    let forbid = |record| Record { policy: CancellationPolicy::Forbid, ..record };
    let withdrawn = Record { completed: true, ..forbid(with(&[], None)) };
    assert_eq!(plan(&withdrawn, &pod, 10), switch(EvictionCause::Completed), "it cannot be cancelled");
    let ours = LocalState { deleted: Some(End::Evacuated), ..LocalState::default() };
    assert_eq!(decide(&with(&[], None), PodState::Gone, &ours, at_second(10)), wait(None), "not twice");
    let cleans_up = decide(&with(&[&evacuator], None), PodState::Gone, &ours, at_second(10));
    assert_eq!(cleans_up, release(&[]), "its evacuator may have been slower than its pod");
}

#[test]
fn deleted_evacuation_continues_while_an_instigator_remains() {
    let busy = Record {
        failed: 1,
        last_failed: Some(at(0)),
        blocked: Some(blocked(reason::BUDGET_EXHAUSTED)),
        ..record(1)
    };
    let terminating = pod_with(1, &[("/metadata/deletionTimestamp", json!(at(2000).to_string()))]);
    let cases = [
        ("no evacuator is active yet", Record { active: None, ..with_a() }, pod(1)),
        ("an evacuator is active", with_a(), pod(1)),
        ("it has completed", Record { completed: true, ..with_a() }, pod(1)),
        ("it has timed out", Record { created: at(-1000), ..with_a() }, pod(1)),
        ("no evacuator", record(1), pod(1)),
        ("its eviction was rejected", busy.clone(), pod(1)),
        ("it is terminating", busy, terminating),
    ];
    for (name, record, pod) in cases {
        let deleted = Record { deleted: Some(at(5)), ..record.clone() };
        assert_eq!(plan(&deleted, &pod, 10), plan(&record, &pod, 10), "{name}");
    }
}

#[test]
fn finalizers_that_hold_an_ended_evacuation_are_named() {
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
    let reported = Blocked { message: fingerprint(&message), ..blocked(reason::EVACUATION_HELD) };
    let reported = |finalizers: &[&str]| Record { blocked: Some(reported.clone()), ..held(finalizers) };
    assert_eq!(plan(&reported(&[FOREIGN, &evacuator]), &pod, 106), wait(None), "reported once");
    assert!(
        matches!(plan(&reported(&[FOREIGN]), &pod, 106), Action::Hold { .. }),
        "one finalizer was removed"
    );

    let end_after_pod =
        |record: &Record| decide(record, PodState::Gone, &LocalState::default(), at_second(105));
    let Action::Hold { end, message } = end_after_pod(&held(&[FOREIGN])) else { panic!() };
    assert_eq!(end, End::Evacuated);
    assert!(message.starts_with("The pod is gone, but finalizers keep"), "{message}");
    let many: Vec<_> = (0..20).map(|n| format!("example.com/{n}")).collect();
    let many: Vec<_> = many.iter().map(String::as_str).collect();
    let Action::Hold { message, .. } = end_after_pod(&held(&many)) else { panic!() };
    assert!(message.contains("example.com/4 and 15 more."), "{message}");
    assert_eq!(end_after_pod(&held(&[])), WAIT, "the watch delivers its deletion");
    let forbid = Record { policy: CancellationPolicy::Forbid, ..reported(&[FOREIGN]) };
    assert_eq!(unblocked(&plan(&forbid, &pod, 110)), Some(reason::NOT_BLOCKED), "it continues");
}

#[test]
fn outcomes_are_evicted_evacuated_or_cancelled() {
    let evicted = LocalState { evicted: Some(at(5)), ..LocalState::default() };
    let timed_out = Record { created: at(-700), ..with_a() };
    let last = |record: Record| Record { active: Some("b".into()), ..record };
    let rejected = Record { blocked: Some(blocked(reason::BUDGET_EXHAUSTED)), ..record(1) };
    let cases = [
        ("evicted", record(1), evicted.clone(), -1000, End::Evicted),
        ("removed by another program", record(1), LocalState::default(), -1000, End::Evacuated),
        ("evicted by an earlier leader", record(1), LocalState::default(), 5, End::Evicted),
        ("rejected for an earlier leader", rejected, LocalState::default(), 5, End::Evacuated),
        ("an evacuator was active", with_a(), LocalState::default(), 5, End::Evacuated),
        ("evicted after the last evacuator", last(timed_out), evicted, -1000, End::Evicted),
    ];
    for (name, record, local, resumed, expected) in cases {
        let moment = Moment { now: at(10), resumed: at(resumed), gap: false, unserved: None };
        let record = Record { finalizers: Box::new([]), ..record };
        let plan = decide(&record, PodState::Gone, &local, moment);
        assert_eq!(plan, Action::Delete { end: expected }, "{name}");
    }
}

#[test]
fn progress_time_in_the_future_is_clamped() {
    let reported = |progress: i64| Record { progress: Some(at(progress)), ..with_a() };
    assert_eq!(plan(&reported(130), &pod(1), 100), wait(Some(at(730))), "clocks may differ a little");
    assert_eq!(plan(&reported(131), &pod(1), 100), Action::Clamp);
    assert_eq!(plan(&reported(1_000_000), &pod(1), 100), Action::Clamp);
    // The current time is written, and the deadline starts there.
    assert_eq!(plan(&reported(100), &pod(1), 700), switch(EvictionCause::TimedOut));
    let done = Record { completed: true, ..reported(1_000_000) };
    assert_eq!(plan(&done, &pod(1), 100), switch(EvictionCause::Completed));
}

#[test]
fn eviction_is_repeated_only_after_a_timeout() {
    let local = LocalState { evicted: Some(at(10)), ..LocalState::default() };
    let plan = |record: &Record, now| decide(record, PodState::Present(&pod(1)), &local, at_second(now));
    assert_eq!(plan(&record(1), 11), wait(Some(at(70))));
    assert_eq!(
        plan(&record(1), 70),
        evict(EvictionCause::NoEvacuator, BeforeEviction::Nothing),
        "the eviction had no effect"
    );
    let was_blocked = Record { blocked: Some(blocked(reason::BUDGET_EXHAUSTED)), ..record(1) };
    let Action::Unblock { reason, message } = plan(&was_blocked, 11) else { panic!() };
    assert_eq!(reason, reason::EVACUATING);
    assert_eq!(message, "The pod is being evicted: it has no evacuator.");
}

#[test]
fn rejected_eviction_waits_for_its_backoff_or_budget() {
    let rejected = Record {
        failed: 3,
        last_failed: Some(at(100)),
        blocked: Some(blocked(reason::BUDGET_EXHAUSTED)),
        ..record(1)
    };
    let Action::Wait { until: Some(wake) } = plan(&rejected, &pod(1), 101) else { panic!() };
    assert!((at(115)..=at(120)).contains(&wake));
    let admitted = LocalState { admitted: true, ..LocalState::default() };
    let plan = decide(&rejected, PodState::Present(&pod(1)), &admitted, at_second(101));
    assert_eq!(plan, evict(EvictionCause::NoEvacuator, BeforeEviction::Nothing));
}

#[test]
fn transient_failure_ignores_the_backoff_of_rejections() {
    let rejected = Record {
        failed: 9,
        last_failed: Some(at(100)),
        blocked: Some(blocked(reason::BUDGET_EXHAUSTED)),
        ..record(1)
    };
    let retry = |due: i64| LocalState {
        retry: Some(Box::new(Retry { failures: 1, due: at(due) })),
        ..LocalState::default()
    };
    let plan = |record: &Record, local: &LocalState, now| {
        decide(record, PodState::Present(&pod(1)), local, at_second(now))
    };
    let Action::Wait { until } = plan(&rejected, &LocalState::default(), 101) else { panic!() };
    assert!(until > Some(at(700)), "it has been rejected often");
    assert_eq!(plan(&rejected, &retry(102), 101), wait(Some(at(102))));
    assert_eq!(plan(&rejected, &retry(102), 102), evict(EvictionCause::NoEvacuator, BeforeEviction::Nothing));
    let busy = Record { blocked: Some(blocked(reason::SERVER_BUSY)), ..rejected.clone() };
    assert_eq!(
        plan(&busy, &LocalState::default(), 101),
        evict(EvictionCause::NoEvacuator, BeforeEviction::Nothing),
        "after a restart"
    );
    // An evacuator has been active since, so earlier rejections do not count.
    let was_active = Record {
        completed: true,
        blocked: Some(Blocked { is_true: false, ..blocked(reason::NOT_BLOCKED) }),
        ..rejected
    };
    assert_eq!(
        plan(&was_active, &LocalState::default(), 101),
        evict(EvictionCause::NoEvacuator, BeforeEviction::Nothing)
    );
}

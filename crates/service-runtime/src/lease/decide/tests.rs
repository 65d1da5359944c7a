//! Tests of single situations. Properties of all situations are in `model`.

use jiff::Timestamp;

use super::super::record::{held, released};
use super::*;

/// Seconds since boot, in the tests' clock.
fn at(seconds: f64) -> Moment {
    Moment::PAST + Duration::from_secs(1000) + Duration::from_secs_f64(seconds)
}

fn version(mut lease: Lease, version: u64) -> Lease {
    lease.metadata.resource_version = Some(version.to_string());
    lease
}

fn wall(version: u64) -> Timestamp {
    Timestamp::from_second(version.try_into().unwrap()).unwrap()
}

/// Version `number` of the Lease, written by its holder.
fn held_by(who: &str, number: u64) -> Lease {
    version(held(None, who, &Timing::default(), wall(number)), number)
}

fn free(number: u64) -> Lease {
    version(released(&held_by("b", number), wall(number)), number)
}

fn candidate() -> Candidate {
    Candidate::new("a", Timing::default(), fastrand::Rng::with_seed(7))
}

/// Candidate `a`, which leads from 0 s to 10 s, with version 1 of the Lease.
fn leader() -> Candidate {
    let mut candidate = candidate();
    candidate.decide(Observation::Watched(None), at(0.0));
    candidate.decide(answer(Answer::Written(held_by("a", 1))), at(0.1));
    assert_eq!(candidate.leads_until(), Some(at(10.0)));
    candidate
}

fn answer(answer: Answer) -> Observation {
    Observation::Answered(answer)
}

fn hold(lease: Lease) -> Action {
    Action::Send(Request::Hold(Some(lease)))
}

const READ: Action = Action::Send(Request::Read);

/// The moment, in seconds, that a wait ends.
#[track_caller]
fn waits(action: Action) -> f64 {
    let Action::Wait(Some(until)) = action else { panic!("{action:?} does not wait for a moment") };
    until.left(at(0.0)).as_secs_f64()
}

#[test]
fn candidate_waits_for_the_first_watch_event() {
    assert_eq!(candidate().decide(Observation::Tick, at(0.0)), Action::Wait(None));
}

#[test]
fn standby_claims_a_free_lease_at_once() {
    let ours = held_by("a", 3);
    for (shown, expected) in [
        (None, Action::Send(Request::Hold(None))),
        (Some(free(3)), hold(free(3))),
        (Some(Lease::default()), hold(Lease::default())),
        (Some(ours.clone()), hold(ours)),
    ] {
        let action = candidate().decide(Observation::Watched(shown.clone()), at(0.0));
        assert_eq!(action, expected, "{shown:?}");
    }
}

#[test]
fn expired_lease_is_taken_over_with_jitter() {
    let mut candidate = candidate();
    let due = waits(candidate.decide(Observation::Watched(Some(held_by("b", 1))), at(0.0)));
    assert!((15.0..=16.5).contains(&due), "{due}");
    let due = waits(candidate.decide(Observation::Watched(Some(held_by("b", 2))), at(10.0)));
    assert!((25.0..=26.5).contains(&due), "{due}");
    assert_eq!(candidate.decide(Observation::Tick, at(due + 0.001)), hold(held_by("b", 2)));
}

#[test]
fn label_change_does_not_renew_the_lease() {
    let mut candidate = candidate();
    let due = waits(candidate.decide(Observation::Watched(Some(held_by("b", 1))), at(0.0)));
    let labelled = version(held_by("b", 1), 2);
    let action = candidate.decide(Observation::Watched(Some(labelled.clone())), at(14.0));
    assert!((waits(action) - due).abs() < 1e-6);
    assert_eq!(candidate.decide(Observation::Tick, at(due + 0.001)), hold(labelled));
}

#[test]
fn standby_waits_for_the_longer_lease_duration() {
    for (seconds, expected) in [(60, 60.0..=66.0), (1, 15.0..=16.5)] {
        let mut lease = held_by("b", 1);
        lease.spec.as_mut().unwrap().lease_duration_seconds = Some(seconds);
        let due = waits(candidate().decide(Observation::Watched(Some(lease)), at(0.0)));
        assert!(expected.contains(&due), "{due} for {seconds}");
    }
}

#[test]
fn standby_waits_before_it_recreates_a_deleted_lease() {
    let mut candidate = candidate();
    candidate.decide(Observation::Watched(Some(held_by("b", 1))), at(0.0));
    let due = waits(candidate.decide(Observation::Watched(None), at(9.0)));
    assert!((24.0..=25.5).contains(&due), "{due}");
    assert_eq!(candidate.decide(Observation::Tick, at(due + 0.001)), Action::Send(Request::Hold(None)));
}

#[test]
fn leadership_starts_when_the_request_is_sent() {
    let mut candidate = candidate();
    candidate.decide(Observation::Watched(None), at(0.0));
    candidate.decide(answer(Answer::Written(held_by("a", 1))), at(2.9));
    assert_eq!(candidate.leads_until(), Some(at(10.0)));
}

#[test]
fn late_answer_grants_no_leadership_and_claims_again() {
    let mut candidate = candidate();
    candidate.decide(Observation::Watched(None), at(0.0));
    let action = candidate.decide(answer(Answer::Written(held_by("a", 1))), at(10.0));
    assert_eq!((candidate.leads_until(), action), (None, hold(held_by("a", 1))));
}

#[test]
fn leader_renews_every_two_seconds() {
    let mut leader = leader();
    let due = waits(leader.decide(Observation::Tick, at(0.1)));
    assert!((1.8..=2.2).contains(&due), "{due}");
    assert_eq!(leader.decide(Observation::Tick, at(2.2)), hold(held_by("a", 1)));
    let due = waits(leader.decide(answer(Answer::Written(held_by("a", 2))), at(2.3)));
    assert_eq!(leader.leads_until(), Some(at(12.2)));
    assert!((4.0..=4.4).contains(&due), "{due}");
}

#[test]
fn leader_retries_renewal_until_its_deadline() {
    let mut leader = leader();
    let mut now = 2.2;
    let mut tries = Vec::new();
    let mut action = leader.decide(Observation::Tick, at(now));
    while leader.leads_until().is_some() {
        if matches!(action, Action::Send(_)) {
            tries.push(now);
            action = leader.decide(answer(Answer::Failed), at(now));
        } else {
            now = waits(action);
            action = leader.decide(Observation::Tick, at(now));
        }
    }
    assert!((now - 10.0).abs() < 1e-6, "{now}");
    assert!(tries.len() > 5, "{tries:?}");
    assert!(tries[1] - tries[0] <= 0.5 && tries[1] - tries[0] >= 0.25, "{tries:?}");
}

#[test]
fn deadline_during_a_request_ends_leadership() {
    let mut leader = leader();
    leader.decide(Observation::Tick, at(9.0));
    assert!((waits(leader.decide(Observation::Tick, at(9.5))) - 10.0).abs() < 1e-6);
    assert_eq!(leader.decide(Observation::Tick, at(10.0)), Action::Wait(None));
    assert_eq!(leader.leads_until(), None);
    leader.decide(answer(Answer::Written(held_by("a", 2))), at(10.5));
    assert_eq!(leader.leads_until(), Some(at(19.0)));
}

#[test]
fn conflict_ends_leadership_only_if_another_holds_the_lease() {
    let relabelled = version(held_by("a", 1), 2);
    for (found, action, leads) in [
        (Some(relabelled.clone()), Some(hold(relabelled)), true),
        (None, Some(Action::Send(Request::Hold(None))), true),
        (Some(held_by("b", 2)), None, false),
        (Some(free(2)), Some(hold(free(2))), false),
    ] {
        let mut leader = leader();
        leader.decide(Observation::Tick, at(3.0));
        assert_eq!(leader.decide(answer(Answer::Conflict), at(3.1)), READ);
        assert!(leader.leads_until().is_some());
        let next = leader.decide(answer(Answer::Read(found.clone())), at(3.2));
        assert_eq!(leader.leads_until().is_some(), leads, "{found:?}");
        match action {
            Some(action) => assert_eq!(next, action, "{found:?}"),
            None => assert!(waits(next) >= 18.2, "{found:?}"),
        }
    }
}

#[test]
fn leader_recreates_its_deleted_lease() {
    let mut leader = leader();
    leader.decide(Observation::Tick, at(3.0));
    assert_eq!(leader.decide(answer(Answer::Missing), at(3.1)), Action::Send(Request::Hold(None)));
    leader.decide(answer(Answer::Written(held_by("a", 5))), at(3.2));
    assert_eq!(leader.leads_until(), Some(at(13.1)));
}

#[test]
fn leader_verifies_what_the_watch_reports() {
    for shown in [None, Some(free(2)), Some(held_by("b", 2))] {
        let mut leader = leader();
        let action = leader.decide(Observation::Watched(shown.clone()), at(0.5));
        assert_eq!(action, hold(held_by("a", 1)), "{shown:?}");
        assert_eq!(leader.leads_until(), Some(at(10.0)), "{shown:?}");
    }
    let mut leader = leader();
    let echo = leader.decide(Observation::Watched(Some(held_by("a", 1))), at(0.5));
    assert!(waits(echo) >= 1.8);
}

#[test]
fn loser_of_a_race_reads_and_waits_again() {
    let mut candidate = candidate();
    candidate.decide(Observation::Watched(Some(free(1))), at(0.0));
    assert_eq!(candidate.decide(answer(Answer::Conflict), at(0.1)), READ);
    let due = waits(candidate.decide(answer(Answer::Read(Some(held_by("b", 2)))), at(0.2)));
    assert!((15.2..=16.7).contains(&due), "{due}");
}

#[test]
fn repeated_conflicts_back_off() {
    let mut leader = leader();
    leader.decide(Observation::Tick, at(3.0));
    assert_eq!(leader.decide(answer(Answer::Conflict), at(3.0)), READ);
    assert!(matches!(leader.decide(answer(Answer::Read(Some(held_by("a", 2)))), at(3.0)), Action::Send(_)));
    let pause = waits(leader.decide(answer(Answer::Conflict), at(3.0)));
    assert!(pause >= 3.25, "{pause}");
}

#[test]
fn resigning_releases_only_an_own_lease() {
    let mut standby = candidate();
    standby.decide(Observation::Watched(Some(held_by("b", 1))), at(0.0));
    assert_eq!(standby.decide(Observation::Resign, at(1.0)), Action::Done);
    assert_eq!(candidate().decide(Observation::Resign, at(0.0)), Action::Done);

    let mut leader = leader();
    let release = Action::Send(Request::Release(held_by("a", 1)));
    assert_eq!(leader.decide(Observation::Resign, at(1.0)), release);
    assert_eq!(leader.leads_until(), None);
    assert_eq!(leader.decide(answer(Answer::Conflict), at(1.1)), READ);
    let relabelled = version(held_by("a", 1), 2);
    let again = leader.decide(answer(Answer::Read(Some(relabelled.clone()))), at(1.2));
    assert_eq!(again, Action::Send(Request::Release(relabelled)));
    assert_eq!(leader.decide(answer(Answer::Written(free(3))), at(1.3)), Action::Done);
}

#[test]
fn resigning_waits_for_a_pending_claim_and_releases_it() {
    let mut candidate = candidate();
    candidate.decide(Observation::Watched(None), at(0.0));
    assert_eq!(candidate.decide(Observation::Resign, at(0.1)), Action::Wait(None));
    let mut unknown = candidate.clone();
    let action = candidate.decide(answer(Answer::Written(held_by("a", 1))), at(0.2));
    assert_eq!(action, Action::Send(Request::Release(held_by("a", 1))));
    assert_eq!(candidate.leads_until(), None);

    let due = waits(unknown.decide(answer(Answer::Failed), at(3.1)));
    assert_eq!(unknown.decide(Observation::Tick, at(due)), READ);
}

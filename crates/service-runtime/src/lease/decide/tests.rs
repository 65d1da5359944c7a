//! One situation after another, by hand. What holds in all of them is in `model`.

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

/// Candidate `a`, which leads since version 1 was written at 0 s, and until 10 s.
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
fn nothing_is_done_before_the_watch_has_shown_something() {
    assert_eq!(candidate().decide(Observation::Tick, at(0.0)), Action::Wait(None));
}

#[test]
fn what_a_standby_does_at_once() {
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
fn a_lease_is_taken_when_it_was_not_renewed_for_its_duration_and_some_jitter() {
    let mut candidate = candidate();
    let due = waits(candidate.decide(Observation::Watched(Some(held_by("b", 1))), at(0.0)));
    assert!((15.0..=16.5).contains(&due), "{due}");
    let due = waits(candidate.decide(Observation::Watched(Some(held_by("b", 2))), at(10.0)));
    assert!((25.0..=26.5).contains(&due), "{due}");
    assert_eq!(candidate.decide(Observation::Tick, at(due + 0.001)), hold(held_by("b", 2)));
}

#[test]
fn a_new_label_does_not_keep_a_dead_leader_in_office_but_is_written_over() {
    let mut candidate = candidate();
    let due = waits(candidate.decide(Observation::Watched(Some(held_by("b", 1))), at(0.0)));
    let labelled = version(held_by("b", 1), 2);
    let action = candidate.decide(Observation::Watched(Some(labelled.clone())), at(14.0));
    assert!((waits(action) - due).abs() < 1e-6);
    assert_eq!(candidate.decide(Observation::Tick, at(due + 0.001)), hold(labelled));
}

#[test]
fn the_longer_of_two_lease_durations_is_waited_for() {
    for (seconds, expected) in [(60, 60.0..=66.0), (1, 15.0..=16.5)] {
        let mut lease = held_by("b", 1);
        lease.spec.as_mut().unwrap().lease_duration_seconds = Some(seconds);
        let due = waits(candidate().decide(Observation::Watched(Some(lease)), at(0.0)));
        assert!(expected.contains(&due), "{due} for {seconds}");
    }
}

#[test]
fn a_standby_waits_before_it_makes_a_deleted_lease_because_its_leader_may_still_act() {
    let mut candidate = candidate();
    candidate.decide(Observation::Watched(Some(held_by("b", 1))), at(0.0));
    let due = waits(candidate.decide(Observation::Watched(None), at(9.0)));
    assert!((24.0..=25.5).contains(&due), "{due}");
    assert_eq!(candidate.decide(Observation::Tick, at(due + 0.001)), Action::Send(Request::Hold(None)));
}

#[test]
fn leadership_counts_from_before_the_request_was_sent() {
    let mut candidate = candidate();
    candidate.decide(Observation::Watched(None), at(0.0));
    candidate.decide(answer(Answer::Written(held_by("a", 1))), at(2.9));
    assert_eq!(candidate.leads_until(), Some(at(10.0)));
}

#[test]
fn an_answer_that_comes_after_the_deadline_makes_no_leader_but_another_claim() {
    let mut candidate = candidate();
    candidate.decide(Observation::Watched(None), at(0.0));
    let action = candidate.decide(answer(Answer::Written(held_by("a", 1))), at(10.0));
    assert_eq!((candidate.leads_until(), action), (None, hold(held_by("a", 1))));
}

#[test]
fn a_leader_renews_about_every_two_seconds() {
    let mut leader = leader();
    let due = waits(leader.decide(Observation::Tick, at(0.1)));
    assert!((1.8..=2.2).contains(&due), "{due}");
    assert_eq!(leader.decide(Observation::Tick, at(2.2)), hold(held_by("a", 1)));
    let due = waits(leader.decide(answer(Answer::Written(held_by("a", 2))), at(2.3)));
    assert_eq!(leader.leads_until(), Some(at(12.2)));
    assert!((4.0..=4.4).contains(&due), "{due}");
}

#[test]
fn a_leader_that_cannot_renew_tries_faster_and_gives_up_at_its_deadline() {
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
fn a_deadline_is_noticed_while_a_request_is_on_its_way_and_the_answer_begins_a_new_leadership() {
    let mut leader = leader();
    leader.decide(Observation::Tick, at(9.0));
    assert!((waits(leader.decide(Observation::Tick, at(9.5))) - 10.0).abs() < 1e-6);
    assert_eq!(leader.decide(Observation::Tick, at(10.0)), Action::Wait(None));
    assert_eq!(leader.leads_until(), None);
    leader.decide(answer(Answer::Written(held_by("a", 2))), at(10.5));
    assert_eq!(leader.leads_until(), Some(at(19.0)));
}

#[test]
fn a_conflict_is_looked_into_and_costs_leadership_only_when_another_holds_the_lease() {
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
fn a_leader_whose_lease_was_deleted_makes_it_anew() {
    let mut leader = leader();
    leader.decide(Observation::Tick, at(3.0));
    assert_eq!(leader.decide(answer(Answer::Missing), at(3.1)), Action::Send(Request::Hold(None)));
    leader.decide(answer(Answer::Written(held_by("a", 5))), at(3.2));
    assert_eq!(leader.leads_until(), Some(at(13.1)));
}

#[test]
fn a_leader_checks_what_the_watch_claims_and_does_not_believe_it() {
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
fn the_loser_of_a_race_reads_and_waits_again() {
    let mut candidate = candidate();
    candidate.decide(Observation::Watched(Some(free(1))), at(0.0));
    assert_eq!(candidate.decide(answer(Answer::Conflict), at(0.1)), READ);
    let due = waits(candidate.decide(answer(Answer::Read(Some(held_by("b", 2)))), at(0.2)));
    assert!((15.2..=16.7).contains(&due), "{due}");
}

#[test]
fn conflicts_in_a_row_are_paced() {
    let mut leader = leader();
    leader.decide(Observation::Tick, at(3.0));
    assert_eq!(leader.decide(answer(Answer::Conflict), at(3.0)), READ);
    assert!(matches!(leader.decide(answer(Answer::Read(Some(held_by("a", 2)))), at(3.0)), Action::Send(_)));
    let pause = waits(leader.decide(answer(Answer::Conflict), at(3.0)));
    assert!(pause >= 3.25, "{pause}");
}

#[test]
fn whoever_resigns_gives_up_only_what_it_holds() {
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
fn a_claim_on_its_way_at_the_resignation_is_waited_for_and_given_up() {
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

//! Tests of the queue: no key is lost or runs twice at once, order by due time, coalescing, fairness.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn queue() -> Queue<&'static str> {
    Queue::new(Backoff { first: Duration::from_secs(1), max: Duration::from_secs(60) })
}

fn drain(queue: &mut Queue<&'static str>, now: Timestamp) -> Vec<&'static str> {
    std::iter::from_fn(|| queue.next(now).map(|(key, _)| key)).collect()
}

#[test]
fn key_added_several_times_runs_once() {
    let mut queue = queue();
    assert_eq!([queue.add("a", at(0)), queue.add("a", at(0)), queue.add("b", at(0))], [true, false, true]);
    assert_eq!(drain(&mut queue, at(0)), ["a", "b"]);
}

#[test]
fn key_added_while_running_is_requeued_once() {
    let mut queue = queue();
    queue.add("a", at(0));
    assert_eq!(queue.next(at(0)).unwrap().0, "a");
    queue.add("b", at(0));
    assert_eq!([queue.add("a", at(0)), queue.add("a", at(0))], [true, false]);
    assert_eq!(queue.next(at(0)).unwrap().0, "b");
    assert_eq!(queue.next(at(0)), None, "a still runs");
    queue.finish(&"a", Outcome::Done, at(0), 0.0);
    assert_eq!(drain(&mut queue, at(0)), ["a"]);
}

#[test]
fn sleeping_keys_wake_in_order_of_due_time() {
    let mut queue = queue();
    queue.add_at("late", at(30));
    queue.add_at("early", at(10));
    queue.add_at("middle", at(20));
    queue.add_at("middle", at(25));
    assert_eq!(queue.next_due(), Some(at(10)));
    assert_eq!(drain(&mut queue, at(9)), Vec::<&str>::new());
    assert_eq!(queue.next(at(15)), Some(("early", Duration::from_secs(5))));
    assert_eq!(drain(&mut queue, at(100)), ["middle", "late"]);
    assert_eq!(queue.next_due(), None);
}

#[test]
fn finished_key_can_schedule_itself() {
    let mut queue = queue();
    queue.add_at("a", at(50));
    queue.add("a", at(0));
    queue.next(at(0)).unwrap();
    queue.finish(&"a", Outcome::Until(at(80)), at(0), 0.0);
    assert_eq!(queue.next_due(), Some(at(80)), "the earlier plan is replaced");
    queue.add("a", at(1));
    queue.next(at(1)).unwrap();
    queue.add_at("a", at(5));
    queue.finish(&"a", Outcome::Until(at(90)), at(1), 0.0);
    assert_eq!(queue.next_due(), Some(at(5)), "what was asked for while it ran counts");
    queue.next(at(5)).unwrap();
    queue.finish(&"a", Outcome::Done, at(5), 0.0);
    assert_eq!((queue.next_due(), queue.entries.len()), (None, 0), "nothing is kept of an idle key");
}

#[test]
fn failures_back_off_and_success_resets() {
    let mut queue = queue();
    let mut now = at(0);
    let mut delays = Vec::new();
    queue.add("a", now);
    for _ in 0..8 {
        queue.next(now).unwrap();
        let pause = queue.finish(&"a", Outcome::Failed, now, 1.0);
        let due = queue.next_due().unwrap();
        assert_eq!(pause, Some(due.duration_since(now).try_into().unwrap()));
        delays.push(due.duration_since(now).as_secs());
        now = due;
    }
    assert_eq!(delays, [1, 2, 4, 8, 16, 32, 60, 60]);
    queue.next(now).unwrap();
    assert_eq!(queue.finish(&"a", Outcome::Done, now, 1.0), None);
    queue.add("a", now);
    queue.next(now).unwrap();
    queue.finish(&"a", Outcome::Failed, now, 0.0);
    let delay = queue.next_due().unwrap().duration_since(now);
    assert_eq!(delay.as_millis(), 500, "half of the first delay is left to chance");
}

#[test]
fn new_event_skips_the_backoff() {
    let mut queue = queue();
    queue.add("a", at(0));
    queue.next(at(0)).unwrap();
    queue.finish(&"a", Outcome::Failed, at(0), 1.0);
    queue.add("a", at(0));
    assert_eq!(drain(&mut queue, at(0)), ["a"]);
    assert_eq!(queue.sleeping(), 0, "the planned retry is gone");
}

#[test]
fn slow_group_leaves_room_for_others() {
    // The group of a key is its first letter. Keys with a dash have no group.
    let group = |key: &&'static str| key.bytes().next().filter(|first| *first != b'-').map(u64::from);
    let mut queue = queue().with_groups(group);
    queue.limit_groups(2);
    for key in ["a1", "a2", "a3", "a4", "b1", "-1", "-2", "-3"] {
        queue.add(key, at(0));
    }
    assert_eq!(drain(&mut queue, at(0)), ["a1", "a2", "b1", "-1", "-2", "-3"]);
    assert_eq!(queue.depth(), 2, "a3 and a4 are ready");
    queue.add("a3", at(1));
    queue.finish(&"b1", Outcome::Done, at(1), 0.0);
    assert_eq!(drain(&mut queue, at(1)), [""; 0]);
    queue.finish(&"a2", Outcome::Failed, at(2), 0.0);
    assert_eq!(queue.next(at(2)), Some(("a3", Duration::from_secs(2))));
    assert_eq!(queue.next(at(2)), None);
    queue.requeue(&"a1", at(2));
    assert_eq!(drain(&mut queue, at(2)), ["a4"], "who was cut short is behind");
    for key in ["a3", "a4"] {
        queue.finish(&key, Outcome::Done, at(3), 0.0);
    }
    assert_eq!(drain(&mut queue, at(100)), ["a1", "a2"]);
    for key in ["a1", "a2"] {
        queue.finish(&key, Outcome::Done, at(100), 0.0);
    }
    assert!(queue.groups.is_empty(), "nothing is kept of an idle group");
}

#[test]
fn lanes_take_turns_within_a_group_too() {
    let lane = |key: &&'static str| key.bytes().next().map_or(0, u64::from);
    let backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(60) };
    let mut queue = Queue::fair(backoff, lane).with_groups(|_| Some(1));
    queue.limit_groups(1);
    for key in ["a1", "a2", "a3", "a4"] {
        queue.add(key, at(0));
    }
    assert_eq!(drain(&mut queue, at(0)), ["a1"]);
    queue.add("b1", at(0));
    let mut order = Vec::new();
    let mut running = "a1";
    for _ in 0..4 {
        queue.finish(&running, Outcome::Done, at(1), 0.0);
        running = queue.next(at(1)).unwrap().0;
        order.push(running);
    }
    assert_eq!(order, ["a2", "b1", "a3", "a4"], "b does not wait for all of a");
}

/// An operation on the queue.
#[derive(Clone, Debug)]
enum Step {
    Add(u8),
    AddAt(u8, u16),
    Next,
    Finish(usize, Option<bool>),
    Requeue(usize),
    Wait(u16),
}

fn any_step() -> impl Strategy<Value = Step> {
    let key = 0..6_u8;
    prop_oneof![
        key.clone().prop_map(Step::Add),
        (key, 0..50_u16).prop_map(|(key, after)| Step::AddAt(key, after)),
        Just(Step::Next),
        (any::<usize>(), proptest::option::of(any::<bool>()))
            .prop_map(|(which, how)| Step::Finish(which, how)),
        any::<usize>().prop_map(Step::Requeue),
        (0..20_u16).prop_map(Step::Wait),
    ]
}

proptest! {
    /// For any sequence of steps: no key runs twice at once, none is lost, and none overtakes earlier ready keys by
    /// more than one round.
    #[test]
    fn no_key_is_lost_or_runs_twice_at_once(steps in proptest::collection::vec(any_step(), 0..200)) {
        let backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(30) };
        // Two groups, with two running keys each at most.
        let group = |key: u8| key % 2;
        let mut queue: Queue<u8> = Queue::new(backoff).with_groups(|key| Some(u64::from(key % 2)));
        queue.limit_groups(2);
        let mut now = at(0);
        let mut running = BTreeSet::new();
        // Keys that were added and have not run since.
        let mut wanted: BTreeMap<u8, Timestamp> = BTreeMap::new();
        let want = |wanted: &mut BTreeMap<u8, Timestamp>, key, due| {
            let planned = wanted.entry(key).or_insert(due);
            *planned = due.min(*planned);
        };
        for step in steps {
            match step {
                Step::Add(key) => { queue.add(key, now); want(&mut wanted, key, now); }
                Step::AddAt(key, after) => {
                    let due = at(now.as_second() + i64::from(after));
                    queue.add_at(key, due);
                    want(&mut wanted, key, due);
                }
                Step::Next => {
                    let has_room = |key: u8| running.iter().filter(|other| group(**other) == group(key)).count() < 2;
                    let may_run = |key: u8| !running.contains(&key) && has_room(key);
                    let overdue: Vec<_> = wanted.iter().filter(|(key, due)| **due <= now && may_run(**key)).map(|(key, _)| *key).collect();
                    match queue.next(now) {
                        Some((key, _)) => {
                            prop_assert!(has_room(key), "{key} has no room in its group");
                            prop_assert!(running.insert(key), "{key} runs twice at once");
                            let due = wanted.remove(&key);
                            prop_assert!(due.is_some_and(|due| due <= now), "{key} ran though nobody asked: {due:?}");
                        }
                        None => prop_assert!(overdue.is_empty(), "{overdue:?} are lost"),
                    }
                }
                Step::Finish(which, how) => {
                    let Some(key) = running.iter().nth(which % running.len().max(1)).copied() else { continue };
                    running.remove(&key);
                    let outcome = match how {
                        None => Outcome::Done,
                        Some(false) => Outcome::Failed,
                        Some(true) => Outcome::Until(at(now.as_second() + 7)),
                    };
                    let again = wanted.get(&key).is_some_and(|due| *due <= now);
                    queue.finish(&key, outcome, now, 1.0);
                    if let (false, Some(due)) = (again, queue.entries.get(&key).and_then(|entry| entry.due)) {
                        want(&mut wanted, key, due.0);
                    }
                }
                Step::Requeue(which) => {
                    let Some(key) = running.iter().nth(which % running.len().max(1)).copied() else { continue };
                    running.remove(&key);
                    queue.requeue(&key, now);
                    want(&mut wanted, key, now);
                }
                Step::Wait(seconds) => now = at(now.as_second() + i64::from(seconds)),
            }
        }
        // In the end, every added key has run.
        for key in std::mem::take(&mut running) {
            queue.finish(&key, Outcome::Done, now, 0.0);
        }
        now = at(now.as_second() + 10_000);
        while let Some((key, _)) = queue.next(now) {
            wanted.remove(&key);
            queue.finish(&key, Outcome::Done, now, 0.0);
        }
        prop_assert!(wanted.is_empty(), "{wanted:?} are lost");
        prop_assert!(queue.entries.is_empty() && queue.asleep.is_empty() && queue.ready.is_empty());
    }

    /// A key that is added repeatedly does not starve others.
    #[test]
    fn busy_key_does_not_starve_others(others in 1..20_u8, adds in proptest::collection::vec(0..3_u8, 1..60)) {
        let mut queue: Queue<u8> = Queue::new(Backoff::default());
        for key in 0..=others {
            queue.add(key, at(0));
        }
        let mut since_last = 0;
        let mut left: BTreeSet<u8> = (1..=others).collect();
        for burst in adds {
            let Some((key, _)) = queue.next(at(0)) else { break };
            left.remove(&key);
            for _ in 0..burst { queue.add(0, at(0)); }
            queue.finish(&key, Outcome::Done, at(0), 0.0);
            since_last = if key == 0 { 0 } else { since_last + 1 };
            prop_assert!(since_last <= usize::from(others));
            if key == 0 && burst > 0 {
                prop_assert_eq!(queue.ready.back(), Some(&0), "it goes to the end of the line");
            }
        }
    }
}

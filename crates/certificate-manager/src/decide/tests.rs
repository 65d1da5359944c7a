use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::issue::issue;

const NAME: &str = "webhook.haulout-system.svc";

fn policy() -> Policy {
    Policy::new(vec![NAME.into()], "720h".parse().unwrap())
}

fn time(text: &str) -> Timestamp {
    format!("2026-{text}:00Z").parse().unwrap()
}

fn generation(names: &[&str], now: Timestamp) -> Generation {
    let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
    Generation::new(issue(&names, policy().lifetime, now).unwrap()).unwrap()
}

fn trusting(bundle: &str) -> Configuration {
    Configuration::with_bundles(vec![bundle.into(), bundle.into()])
}

#[test]
fn renewal_takes_all_steps_in_order() {
    let begin = time("01-01T00:00");
    let first = generation(&[NAME], begin);
    let (old, policy) = (first.issued.authority.clone(), policy());
    let decide = |store: &Contents, configurations: &[Configuration], now| {
        decide(Some(store), None, configurations, &policy, now)
    };
    let mut store = Contents::initial(first, begin);
    assert_eq!(decide(&store, &[], begin), Decision::At(time("01-21T00:00")), "20 of 30 days");

    let due = time("01-21T00:00");
    assert_eq!(decide(&store, &[trusting(&old)], due), Decision::Now(Step::Stage(vec![NAME.into()])));
    store = store.staged(generation(&[NAME], due));
    let both = store.bundle();
    assert!(both.starts_with(&old) && both.len() > old.len());
    // One of two configurations is not patched yet. The decision waits for that, not for a time.
    let waiting = decide(&store, &[trusting(&both), trusting(&old)], due);
    assert_eq!(waiting, Decision::At(time("01-31T00:00")));
    let all = [trusting(&both), trusting(&both)];
    assert_eq!(decide(&store, &all, due), Decision::Now(Step::MarkTrusted));

    store = store.trusted(due);
    assert_eq!(
        decide(&store, &all, due),
        Decision::At(time("01-21T00:01")),
        "time for API servers to receive it"
    );
    let propagated = time("01-21T00:01");
    let reset = decide(&store, &[trusting(&old)], propagated);
    assert_eq!(reset, Decision::At(time("01-31T00:00")), "somebody restored the old bundle");
    assert_eq!(decide(&store, &all, propagated), Decision::Now(Step::Promote));

    store = store.promoted(propagated);
    assert_eq!(store.bundle(), both, "a promotion needs no patch");
    assert_eq!(
        decide(&store, &all, propagated),
        Decision::At(time("01-21T00:11")),
        "time for replicas to follow"
    );
    assert_eq!(decide(&store, &all, time("01-21T00:11")), Decision::Now(Step::DropPrevious));

    store = store.without_previous();
    assert!(!store.bundle().contains(&old));
    assert_eq!(decide(&store, &all, time("01-21T00:12")), Decision::At(time("02-10T00:00")));
}

#[test]
fn missing_or_expired_certificate_is_replaced_at_once() {
    let begin = time("01-01T00:00");
    let store = Contents::initial(generation(&[NAME], begin), begin);
    let staged = store.clone().staged(generation(&[NAME], time("01-21T00:00")));
    let (later, much_later) = (time("02-01T00:00"), time("03-01T00:00"));
    for (what, found, last_good, now, step) in [
        ("a first start", None, None, begin, Step::Create),
        ("somebody deleted or damaged it", None, Some(&store), begin, Step::Restore),
        ("the same during a renewal", None, Some(&staged), begin, Step::Restore),
        ("deleted, and ours is no longer valid", None, Some(&store), later, Step::Create),
        ("expired while the service was down", Some(&store), None, later, Step::Create),
        ("expired with a next one", Some(&staged), None, later, Step::Promote),
        ("both expired", Some(&staged), None, much_later, Step::Create),
    ] {
        let decision = decide(found, last_good, [&trusting("")], &policy(), now);
        assert_eq!(decision, Decision::Now(step), "{what}");
    }
}

#[test]
fn new_name_is_added_and_old_name_removed_on_renewal() {
    let begin = time("01-01T00:00");
    let store = Contents::initial(generation(&["old.svc", "127.0.0.1"], begin), begin);
    let names = |decision: Decision| match decision {
        Decision::Now(Step::Stage(names)) => names,
        other => panic!("{other:?}"),
    };
    let staged = names(decide(Some(&store), None, [], &policy(), begin));
    assert_eq!(staged, [NAME, "old.svc", "127.0.0.1"], "replicas of the old version require the old ones");
    let store = Contents::initial(generation(&[NAME, "old.svc"], begin), begin);
    assert!(matches!(decide(Some(&store), None, [], &policy(), begin), Decision::At(_)));
    let renewed = names(decide(Some(&store), None, [], &policy(), time("01-25T00:00")));
    assert_eq!(renewed, [NAME]);
}

#[test]
fn short_lifetimes_leave_time_for_all_steps() {
    let short = Policy::new(vec![NAME.into()], SignedDuration::from_secs(30));
    assert!(short.propagation + short.overlap < short.lifetime / 3);
    let now = time("01-01T00:00");
    let generation = Generation::new(issue(&short.names, short.lifetime, now).unwrap()).unwrap();
    assert_eq!(renewal(&generation, &short), later(now, SignedDuration::from_secs(20)));
}

/// Behaviour of the cluster in the model, in seconds.
#[derive(Clone, Debug)]
struct Behaviour {
    /// Delay of each replica's view of the Secret.
    replicas: Vec<i64>,
    /// Delay of each API server's view of the configurations.
    api_servers: Vec<i64>,
    /// Times at which patches of configurations fail.
    outages: Vec<(i64, i64)>,
    /// Interval between two reconciliations.
    pace: i64,
}

fn behaviour() -> impl Strategy<Value = Behaviour> {
    let policy = model_policy();
    let (propagation, overlap) = (policy.propagation.as_secs(), policy.overlap.as_secs());
    (
        prop::collection::vec(0..overlap, 2..4),
        prop::collection::vec(0..propagation, 1..4),
        prop::collection::vec((0..4_000_i64, 1..100_i64), 0..4),
        1..20_i64,
    )
        .prop_map(|(replicas, api_servers, outages, pace)| Behaviour {
            replicas,
            api_servers,
            outages,
            pace,
        })
}

/// Renewal every 800 s, propagation 60 s, overlap 120 s.
fn model_policy() -> Policy {
    Policy::new(vec![NAME.into()], SignedDuration::from_secs(1200))
}

/// A value with its history.
struct History<T>(VecDeque<(i64, T)>);

impl<T: PartialEq> History<T> {
    fn set(&mut self, at: i64, value: T) {
        if self.0.back().is_none_or(|(_, last)| *last != value) {
            self.0.push_back((at, value));
        }
    }

    fn at(&self, at: i64) -> Option<&T> {
        self.0.iter().rev().find(|(since, _)| *since <= at).map(|(_, value)| value)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn every_api_server_always_trusts_what_every_replica_serves(behaviour in behaviour()) {
        let policy = model_policy();
        let start = time("01-01T00:00");
        let clock = |second: i64| later(start, SignedDuration::from_secs(second));
        let make = |names: &[String], now| Generation::new(issue(names, policy.lifetime, now).unwrap()).unwrap();
        let first = Contents::initial(make(&policy.names, start), start);
        let mut bundles = History(VecDeque::from([(i64::MIN, [first.bundle(), first.bundle()])]));
        let mut stores = History(VecDeque::from([(i64::MIN, first)]));
        let mut renewals = 0;
        let mut second = 0;
        while second < 4_000 {
            // The leader may change at any time. It uses the current Secret, because the API server rejects writes to an
            // old version.
            let store = stores.at(second).unwrap().clone();
            let down = behaviour.outages.iter().any(|(from, long)| (*from..from + long).contains(&second));
            let mut patched = bundles.at(second).unwrap().clone();
            // The second configuration is patched a round after the first.
            let late = usize::from(patched[0] == store.bundle());
            if !down {
                patched[late] = store.bundle();
            }
            let configurations = [trusting(&patched[0]), trusting(&patched[1])];
            bundles.set(second, patched);
            let decision = decide(Some(&store), None, &configurations, &policy, clock(second));
            match decision {
                Decision::Now(Step::Stage(names)) => stores.set(second, store.staged(make(&names, clock(second)))),
                Decision::Now(Step::MarkTrusted) => stores.set(second, store.trusted(clock(second))),
                Decision::Now(Step::Promote) => {
                    renewals += 1;
                    stores.set(second, store.promoted(clock(second)));
                }
                Decision::Now(Step::DropPrevious) => stores.set(second, store.without_previous()),
                Decision::Now(other) => prop_assert!(false, "{other:?} although nothing failed"),
                Decision::At(wake) => prop_assert!(wake > clock(second)),
            }
            for (replica, api_server) in
                behaviour.replicas.iter().flat_map(|r| behaviour.api_servers.iter().map(move |a| (r, a)))
            {
                let shown = stores.at(second - replica).unwrap();
                let trusted = bundles.at(second - api_server).unwrap();
                for bundle in trusted {
                    prop_assert!(bundle.contains(&shown.current.issued.authority), "at {second} s");
                }
                prop_assert!(clock(second) < shown.current.pair.expires, "expired at {second} s");
            }
            second += behaviour.pace;
        }
        prop_assert!(renewals >= 4, "only {renewals} renewals");
    }
}

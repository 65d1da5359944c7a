//! When each object may be written again: after a write that the API server did not carry out, after one that somebody
//! has undone, and after one that was made just before.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use haulout_api_types::names::reason;
use haulout_drain_planner::facts::Blocked;
use haulout_drain_planner::pause::{QUIET, after};
use haulout_service_runtime::queue::Backoff;
use jiff::{SignedDuration, Timestamp};

use crate::bounded;

/// A write that failed is tried again at least this often: nobody tells when a policy of others lets it through.
const PAUSE: Backoff = Backoff { first: Duration::from_millis(500), most: Duration::from_secs(60) };
/// How far writes of progress to one object are apart.
const APART: SignedDuration = SignedDuration::from_secs(1);
/// What may pass by itself is only reported when it has failed so often in a row.
const PATIENCE: u32 = 3;

/// Why a write failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The API server's words.
    said: String,
    /// Whether it is a decision, as opposed to trouble that may pass by itself.
    refused: bool,
    /// Whether the namespace is being deleted, so that nothing new can be made in it.
    terminating: bool,
}

impl Failure {
    /// Something that we cannot even ask for.
    pub fn impossible(why: &dyn std::fmt::Display) -> Self {
        Self { said: bounded::text(&why.to_string()), refused: true, terminating: false }
    }
}

impl From<&kube::Error> for Failure {
    fn from(error: &kube::Error) -> Self {
        let kube::Error::Api(status) = error else {
            return Self { said: bounded::text(&error.to_string()), refused: false, terminating: false };
        };
        let causes = status.details.iter().flat_map(|details| &details.causes);
        // A webhook that cannot be reached is reported as an internal error. The other codes are those of a conflict
        // or an absence, which the watch will explain, and of an API server that has no time.
        // https://github.com/kubernetes/kubernetes/blob/v1.36.0/staging/src/k8s.io/apiserver/pkg/admission/plugin/webhook/errors/statuserror.go
        let refused = match status.code {
            404 | 408 | 409 | 429 => false,
            400..500 => true,
            _ => status.message.contains("webhook"),
        };
        Self {
            said: bounded::text(&status.message),
            refused,
            terminating: causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating"),
        }
    }
}

/// A write that was not carried out.
#[derive(Clone, Debug)]
struct Refusal {
    failure: Failure,
    since: Timestamp,
    failures: u32,
    retry: Timestamp,
}

/// A write that was carried out. The same again means that somebody has undone it.
#[derive(Clone, Copy, Debug)]
struct Written {
    /// Stands for what was written.
    fingerprint: u64,
    /// How often it was written again.
    again: u32,
    at: Timestamp,
}

impl Written {
    fn is_repeated_by(self, fingerprint: u64, now: Timestamp) -> bool {
        // A clock that was put back must not hold writes up for as long as it was wrong.
        let lately = (SignedDuration::ZERO..QUIET).contains(&now.duration_since(self.at));
        lately && self.fingerprint == fingerprint
    }
}

/// What is known of the writes to one object.
#[derive(Clone, Debug, Default)]
struct Writes {
    refusal: Option<Refusal>,
    written: Option<Written>,
    /// When somebody was last allowed to write it.
    allowed: Option<Timestamp>,
}

/// The objects of a kind that were written or cannot be written now.
#[derive(Clone, Debug)]
pub struct WriteLog<K> {
    all: HashMap<K, Writes>,
    reason: &'static str,
    /// What is written, to complete a sentence.
    what: &'static str,
}

impl<K: Hash + Eq> WriteLog<K> {
    /// Nothing was written yet; refusals are reported with this reason, as writes of `what`.
    pub fn new(reason: &'static str, what: &'static str) -> Self {
        Self { all: HashMap::new(), reason, what }
    }

    /// Takes note of a write that failed; when to try again. `chance`, from 0 to 1, spreads retries.
    pub fn failed(&mut self, key: K, failure: Failure, now: Timestamp, chance: f64) -> Timestamp {
        let refusal = &mut self.all.entry(key).or_default().refusal;
        let (failures, since) = refusal.as_ref().map_or((0, now), |known| (known.failures, known.since));
        let failures = failures.saturating_add(1);
        let retry = now.saturating_add(PAUSE.delay(failures, chance)).unwrap_or(Timestamp::MAX);
        *refusal = Some(Refusal { failure, since, failures, retry });
        retry
    }

    /// Takes note of a write that waits until then, because it would not last.
    pub fn wait(&mut self, key: K, failure: Failure, now: Timestamp, until: Timestamp) {
        let refusal = &mut self.all.entry(key).or_default().refusal;
        let (failures, since) = refusal.as_ref().map_or((0, now), |known| (known.failures, known.since));
        *refusal = Some(Refusal { failure, since, failures, retry: until });
    }

    /// Takes note that an object was written or does not have to be; whether it could not be before.
    pub fn succeeded(&mut self, key: &K) -> bool {
        self.all.get_mut(key).and_then(|writes| writes.refusal.take()).is_some()
    }

    /// When to try again to write an object, if it is too early.
    pub fn pause(&self, key: &K, now: Timestamp) -> Option<Timestamp> {
        let refusal = self.all.get(key)?.refusal.as_ref()?;
        Some(refusal.retry).filter(|retry| now < *retry)
    }

    /// What to report about an object.
    pub fn blocked(&self, key: &K) -> Option<Blocked> {
        let refusal = self.all.get(key)?.refusal.as_ref()?;
        let Failure { said, refused, terminating } = &refusal.failure;
        if !refused && refusal.failures < PATIENCE {
            return None;
        }
        let (reason, message) = if *terminating {
            (reason::NAMESPACE_TERMINATING, said.clone())
        } else {
            let verb = if *refused { "refuses" } else { "fails" };
            (self.reason, format!("the API server {verb} to write {}: {said}", self.what))
        };
        Some(Blocked { reason: reason.into(), message: message.into(), since: Some(refusal.since) })
    }
    /// When this may be written to the object, if it was undone each time so far and it is too early.
    pub fn undone(&self, key: &K, fingerprint: u64, now: Timestamp) -> Option<Timestamp> {
        let last = self.all.get(key)?.written.filter(|last| last.is_repeated_by(fingerprint, now))?;
        let due = last.at.saturating_add(after(last.again)).unwrap_or(Timestamp::MAX);
        (now < due).then_some(due)
    }

    /// This has been written to the object.
    pub fn written(&mut self, key: K, fingerprint: u64, now: Timestamp) {
        let written = &mut self.all.entry(key).or_default().written;
        let last = written.filter(|last| last.is_repeated_by(fingerprint, now));
        let again = last.map_or(0, |last| last.again.saturating_add(1));
        *written = Some(Written { fingerprint, again, at: now });
    }

    /// Whether the object may be written now, which is then taken as done; else when it may. Who is turned away comes
    /// again at that time, with what is true then, so that the last state always gets through. A write that matters less
    /// is allowed so many `times` less often.
    pub fn ask(&mut self, key: K, times: i32, now: Timestamp) -> Result<(), Timestamp> {
        let allowed = &mut self.all.entry(key).or_default().allowed;
        if let Some(last) = *allowed {
            let next = last.saturating_add(APART * times).unwrap_or(Timestamp::MAX);
            // A clock that was put back must not hold writes up for as long as it was wrong.
            if last <= now && now < next {
                return Err(next);
            }
        }
        *allowed = Some(now);
        Ok(())
    }

    /// Forgets an object that is gone.
    pub fn forget(&mut self, key: &K) {
        self.all.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::at;
    use kube::core::Status;
    use proptest::prelude::*;
    use serde_json::json;

    fn log<K: Hash + Eq>() -> WriteLog<K> {
        WriteLog::new(reason::NODE_UPDATE_REFUSED, "the node")
    }

    fn answer(code: u16, message: &str, cause: &str) -> kube::Error {
        let status = json!({"code": code, "message": message, "details": {"causes": [{"reason": cause}]}});
        kube::Error::Api(Box::new(serde_json::from_value::<Status>(status).unwrap()))
    }

    #[test]
    fn decisions_are_reported_at_once_and_trouble_when_it_lasts() {
        let denied = "admission webhook \"x\" denied the request: no";
        let unreachable = "Internal error occurred: failed calling webhook \"x\": connection refused";
        let refused = "the API server refuses to write its Evacuation: ";
        let fails = "the API server fails to write its Evacuation: ";
        let cases = [
            (answer(403, denied, ""), 1, "EvacuationRefused", format!("{refused}{denied}")),
            (answer(422, "bad", ""), 1, "EvacuationRefused", format!("{refused}bad")),
            (answer(400, "bad", ""), 1, "EvacuationRefused", format!("{refused}bad")),
            (answer(500, unreachable, ""), 1, "EvacuationRefused", format!("{refused}{unreachable}")),
            (
                answer(500, "etcdserver: no leader", ""),
                3,
                "EvacuationRefused",
                format!("{fails}etcdserver: no leader"),
            ),
            (
                answer(429, "too many requests", ""),
                3,
                "EvacuationRefused",
                format!("{fails}too many requests"),
            ),
            (answer(409, "there is one", ""), 3, "EvacuationRefused", format!("{fails}there is one")),
            (
                answer(403, "it is being terminated", "NamespaceTerminating"),
                1,
                "NamespaceTerminating",
                "it is being terminated".into(),
            ),
        ];
        for (error, reported, reason, message) in cases {
            let mut refusals = WriteLog::new(reason::EVACUATION_REFUSED, "its Evacuation");
            for time in 1..=3 {
                refusals.failed("a", Failure::from(&error), at(time), 1.0);
                let found =
                    refusals.blocked(&"a").map(|b| (b.reason.to_string(), b.message.to_string(), b.since));
                let expected = (reason.to_string(), message.clone(), Some(at(1)));
                assert_eq!(found, (time >= reported).then_some(expected), "{error} after {time}");
            }
        }
    }

    #[test]
    fn pauses_grow_and_end_with_a_success() {
        let mut refusals = WriteLog::new(reason::NODE_UPDATE_REFUSED, "the node");
        let failure = Failure::impossible(&"x");
        let pauses: Vec<_> = (0..10)
            .map(|_| refusals.failed("a", failure.clone(), at(0), 1.0).duration_since(at(0)).as_secs())
            .collect();
        assert_eq!(pauses, [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!((refusals.pause(&"a", at(59)), refusals.pause(&"a", at(60))), (Some(at(60)), None));
        assert_eq!(refusals.pause(&"b", at(0)), None);
        assert!(refusals.succeeded(&"a") && !refusals.succeeded(&"a"));
        assert_eq!((refusals.blocked(&"a"), refusals.pause(&"a", at(0))), (None, None));
    }
    #[test]
    fn what_is_undone_each_time_is_written_after_growing_pauses() {
        let mut rewrites = log();
        let (mut now, mut written) = (0, Vec::new());
        while now < 100 {
            if let Some(due) = rewrites.undone(&"n", 7, at(now)) {
                now = due.as_second() - at(0).as_second();
            } else {
                rewrites.written("n", 7, at(now));
                written.push(now);
            }
        }
        assert_eq!(written, [0, 0, 10, 30, 70]);
        assert_eq!(rewrites.undone(&"n", 8, at(71)), None, "something else");
        assert_eq!(rewrites.undone(&"m", 7, at(71)), None, "another object");
        assert_eq!(rewrites.undone(&"n", 7, at(60)), None, "the clock was put back");
        assert_eq!(rewrites.undone(&"n", 7, at(70 + 1800)), None, "it was quiet for long");
        rewrites.written("n", 8, at(71));
        rewrites.written("n", 7, at(72));
        assert_eq!(rewrites.undone(&"n", 7, at(73)), None, "it begins with the second time in a row");
        rewrites.written("n", 7, at(73));
        assert_eq!(rewrites.undone(&"n", 7, at(74)), Some(at(83)));
        rewrites.forget(&"n");
        assert_eq!(rewrites.undone(&"n", 7, at(74)), None);
    }

    fn at_ms(milliseconds: i64) -> Timestamp {
        Timestamp::from_millisecond(1_700_000_000_000 + milliseconds).unwrap()
    }

    #[test]
    fn an_object_is_written_once_a_second_and_others_do_not_matter() {
        let mut throttle = log();
        let cases = [
            ("a", 0, Ok(())),
            ("a", 10, Err(at_ms(1000))),
            ("b", 20, Ok(())),
            ("a", 999, Err(at_ms(1000))),
            ("a", 1000, Ok(())),
            ("a", 1500, Err(at_ms(2000))),
            ("a", -5000, Ok(())),
        ];
        for (key, now, expected) in cases {
            assert_eq!(throttle.ask(key, 1, at_ms(now)), expected, "{key} at {now}");
        }
        assert_eq!(throttle.ask("b", 5, at_ms(5000)), Err(at_ms(5020)));
        throttle.forget(&"b");
        assert_eq!(throttle.ask("b", 1, at_ms(21)), Ok(()));
    }

    proptest! {
        /// However changes come, the last one is written, and no two writes are closer than a second.
        #[test]
        fn the_last_state_gets_through(mut changes in proptest::collection::vec(0i64..5000, 1..40)) {
            changes.sort_unstable();
            let mut throttle = log();
            let (mut written, mut retry): (Vec<(i64, i64)>, Option<i64>) = (Vec::new(), None);
            let mut state = -1;
            let mut offer = |now: i64, state: i64, written: &mut Vec<(i64, i64)>| match throttle.ask((), 1, at_ms(now)) {
                Ok(()) => { written.push((now, state)); None }
                Err(next) => Some((next.as_millisecond() - 1_700_000_000_000).max(now)),
            };
            for now in changes {
                if let Some(due) = retry.filter(|due| *due <= now) {
                    retry = offer(due, state, &mut written);
                }
                state = now;
                retry = offer(now, state, &mut written).or(retry.filter(|due| *due > now));
            }
            if let Some(due) = retry {
                offer(due, state, &mut written);
            }
            prop_assert_eq!(written.last().map(|(_, state)| *state), Some(state));
            prop_assert!(written.windows(2).all(|pair| pair[1].0 - pair[0].0 >= 1000));
        }
    }
}

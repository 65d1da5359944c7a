//! Decides when each object may be written again: after a failed write, after a write that another program has reverted, and
//! after a recent write.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use haulout_api_types::bounded;
use haulout_api_types::names::reason;
use haulout_drain_planner::backoff::{self, RESET_AFTER};
use haulout_drain_planner::facts::Blocked;
use haulout_service_runtime::eviction;
use haulout_service_runtime::queue::Backoff;
use jiff::{SignedDuration, Timestamp};

/// A failed write is retried at least once per minute, because the controller is not notified when a policy that rejected it
/// changes.
const RETRY_BACKOFF: Backoff = Backoff { first: Duration::from_millis(500), max: Duration::from_secs(60) };
/// Minimum interval between writes of progress to one object.
const MIN_WRITE_INTERVAL: SignedDuration = SignedDuration::from_secs(1);
/// A temporary failure is reported after this many consecutive failures.
const REPORT_AFTER_FAILURES: u32 = 3;

/// Why a write failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The API server's message, or ours.
    message: String,
    cause: FailureCause,
}

/// The cause determines the message and how soon the failure is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FailureCause {
    /// The API server is unreachable, overloaded or limits the rate of requests, or the object changed at the same time.
    Temporary,
    /// The object, its namespace or its kind does not exist. The next watch event usually resolves this.
    Missing,
    /// The API server, a policy or a webhook rejected the write.
    Rejected,
    /// The namespace is being deleted, so that nothing can be created in it.
    NamespaceTerminating,
    /// Anything else that retries do not fix. The message is complete.
    Permanent,
}

impl Failure {
    /// A failure that retries alone do not fix.
    pub fn permanent(message: &dyn std::fmt::Display) -> Self {
        Self { message: bounded::text(&message.to_string()), cause: FailureCause::Permanent }
    }
}

impl From<&kube::Error> for Failure {
    fn from(error: &kube::Error) -> Self {
        let kube::Error::Api(status) = error else {
            return Self { message: bounded::text(&error.to_string()), cause: FailureCause::Temporary };
        };
        let mut causes = status.details.iter().flat_map(|details| &details.causes);
        // An unreachable webhook is reported as an internal error. Conflicts and missing objects are resolved by the next
        // watch event. The remaining codes mean that the API server is overloaded.
        // https://github.com/kubernetes/kubernetes/blob/v1.36.0/staging/src/k8s.io/apiserver/pkg/admission/plugin/webhook/errors/statuserror.go
        let cause = match status.code {
            // A webhook chooses the code of its rejection.
            _ if eviction::is_denied_by_webhook(status) => FailureCause::Rejected,
            _ if causes.any(|cause| cause.reason == "NamespaceTerminating") => {
                FailureCause::NamespaceTerminating
            }
            404 => FailureCause::Missing,
            408 | 409 | 429 => FailureCause::Temporary,
            400..500 => FailureCause::Rejected,
            _ if status.message.contains("webhook") => FailureCause::Rejected,
            _ => FailureCause::Temporary,
        };
        Self { message: bounded::text(status.message.trim_end()), cause }
    }
}

/// Consecutive failed writes.
#[derive(Clone, Debug)]
struct FailedWrites {
    failure: Failure,
    since: Timestamp,
    failures: u32,
    retry: Timestamp,
}

/// The last successful write. If the same write is needed again, another program has reverted it.
#[derive(Clone, Copy, Debug)]
struct LastWrite {
    /// The fingerprint of the content.
    fingerprint: u64,
    /// How often the same content was written again.
    rewrites: u32,
    at: Timestamp,
}

impl LastWrite {
    fn is_repeated_by(self, fingerprint: u64, now: Timestamp) -> bool {
        // A time in the future, after a clock was set back, does not count.
        let recent = (SignedDuration::ZERO..RESET_AFTER).contains(&now.duration_since(self.at));
        recent && self.fingerprint == fingerprint
    }
}

/// The writes to one object.
#[derive(Clone, Debug, Default)]
struct Writes {
    failed: Option<FailedWrites>,
    last: Option<LastWrite>,
    /// The last write for the rate limit.
    acquired: Option<Timestamp>,
}

/// The writes to all objects of a kind.
#[derive(Clone, Debug)]
pub struct WriteLog<K> {
    all: HashMap<K, Writes>,
    reason: &'static str,
    /// The object, for messages.
    what: &'static str,
}

impl<K: Hash + Eq> WriteLog<K> {
    /// An empty log. Failed writes of `what` are reported with this reason.
    pub fn new(reason: &'static str, what: &'static str) -> Self {
        Self { all: HashMap::new(), reason, what }
    }

    /// Records a failed write. Returns when to retry. `jitter`, from 0 to 1, spreads retries.
    pub fn failed(&mut self, key: K, failure: Failure, now: Timestamp, jitter: f64) -> Timestamp {
        let failed = &mut self.all.entry(key).or_default().failed;
        let (failures, since) = failed.as_ref().map_or((0, now), |known| (known.failures, known.since));
        let failures = failures.saturating_add(1);
        let retry = now.saturating_add(RETRY_BACKOFF.delay(failures, jitter)).unwrap_or(Timestamp::MAX);
        *failed = Some(FailedWrites { failure, since, failures, retry });
        retry
    }

    /// Delays the writes of an object until this time, because another program reverts them.
    pub fn delay(&mut self, key: K, failure: Failure, now: Timestamp, until: Timestamp) {
        let failed = &mut self.all.entry(key).or_default().failed;
        let (failures, since) = failed.as_ref().map_or((0, now), |known| (known.failures, known.since));
        *failed = Some(FailedWrites { failure, since, failures, retry: until });
    }

    /// Records that an object was written or does not have to be. Returns whether earlier writes had failed.
    pub fn succeeded(&mut self, key: &K) -> bool {
        self.all.get_mut(key).and_then(|writes| writes.failed.take()).is_some()
    }

    /// When an object may be written again, if it is in backoff.
    pub fn backoff_until(&self, key: &K, now: Timestamp) -> Option<Timestamp> {
        let failed = self.all.get(key)?.failed.as_ref()?;
        Some(failed.retry).filter(|retry| now < *retry)
    }

    /// The blocker to report about an object.
    pub fn blocked(&self, key: &K) -> Option<Blocked> {
        let failed = self.all.get(key)?.failed.as_ref()?;
        let Failure { message, cause } = &failed.failure;
        let (reason, message) = match cause {
            FailureCause::Temporary | FailureCause::Missing if failed.failures < REPORT_AFTER_FAILURES => {
                return None;
            }
            FailureCause::Temporary | FailureCause::Missing => {
                let missing = *cause == FailureCause::Missing;
                let reason = if missing { self.reason } else { reason::SERVER_BUSY };
                (reason, format!("failed to write {}, retrying: {message}", self.what))
            }
            FailureCause::Rejected => {
                (self.reason, format!("the API server rejected the write of {}: {message}", self.what))
            }
            FailureCause::NamespaceTerminating => (reason::NAMESPACE_TERMINATING, message.clone()),
            FailureCause::Permanent => (self.reason, message.clone()),
        };
        Some(Blocked { reason: reason.into(), message: message.into(), since: Some(failed.since) })
    }

    /// When this content may be written again, if another program has reverted it and it is in backoff.
    pub fn rewrite_at(&self, key: &K, fingerprint: u64, now: Timestamp) -> Option<Timestamp> {
        let last = self.all.get(key)?.last.filter(|last| last.is_repeated_by(fingerprint, now))?;
        let due = last.at.saturating_add(backoff::delay(last.rewrites)).unwrap_or(Timestamp::MAX);
        (now < due).then_some(due)
    }

    /// Records that this content was written to the object.
    pub fn written(&mut self, key: K, fingerprint: u64, now: Timestamp) {
        let slot = &mut self.all.entry(key).or_default().last;
        let last = slot.filter(|last| last.is_repeated_by(fingerprint, now));
        let rewrites = last.map_or(0, |last| last.rewrites.saturating_add(1));
        *slot = Some(LastWrite { fingerprint, rewrites, at: now });
    }

    /// Rate limit: returns Ok and counts the write if the object may be written now, or else the time when it may. The caller
    /// retries at that time with the then current state, so the last state is always written. `factor` multiplies the minimum
    /// interval for less important writes.
    pub fn try_acquire(&mut self, key: K, factor: i32, now: Timestamp) -> Result<(), Timestamp> {
        let acquired = &mut self.all.entry(key).or_default().acquired;
        if let Some(last) = *acquired {
            let next = last.saturating_add(MIN_WRITE_INTERVAL * factor).unwrap_or(Timestamp::MAX);
            // A time in the future, after a clock was set back, does not count.
            if last <= now && now < next {
                return Err(next);
            }
        }
        *acquired = Some(now);
        Ok(())
    }

    /// Forgets a deleted object.
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
        WriteLog::new(reason::NODE_UPDATE_REJECTED, "the node")
    }

    fn answer(code: u16, message: &str, cause: &str) -> kube::Error {
        let status = json!({"code": code, "message": message, "details": {"causes": [{"reason": cause}]}});
        kube::Error::Api(Box::new(serde_json::from_value::<Status>(status).unwrap()))
    }

    /// What kube makes of the answer of API Priority and Fairness, whose body is plain text.
    fn fairness() -> kube::Error {
        let status = json!({"status": "Failure", "message": "Too many requests, please try again later.\n",
            "reason": "Failed to parse error data", "code": 429});
        kube::Error::Api(Box::new(serde_json::from_value::<Status>(status).unwrap()))
    }

    #[test]
    fn rejections_are_reported_at_once_failures_when_repeated() {
        let denied = "admission webhook \"x\" denied the request: no";
        let unreachable = "Internal error occurred: failed calling webhook \"x\": connection refused";
        let rejected = |text| format!("the API server rejected the write of the pod's Evacuation: {text}");
        let failed = |text| format!("failed to write the pod's Evacuation, retrying: {text}");
        let cases = [
            (answer(403, denied, ""), 1, "EvacuationRejected", rejected(denied)),
            (answer(422, "bad", ""), 1, "EvacuationRejected", rejected("bad")),
            (answer(400, "bad", ""), 1, "EvacuationRejected", rejected("bad")),
            (answer(500, unreachable, ""), 1, "EvacuationRejected", rejected(unreachable)),
            (answer(429, denied, ""), 1, "EvacuationRejected", rejected(denied)),
            (answer(500, "no leader", ""), 3, "ServerBusy", failed("no leader")),
            (fairness(), 3, "ServerBusy", failed("Too many requests, please try again later.")),
            (answer(409, "there is one", ""), 3, "ServerBusy", failed("there is one")),
            (
                answer(403, "it is being terminated", "NamespaceTerminating"),
                1,
                "NamespaceTerminating",
                "it is being terminated".into(),
            ),
        ];
        for (error, reported, reason, message) in cases {
            let mut log = WriteLog::new(reason::EVACUATION_REJECTED, "the pod's Evacuation");
            for time in 1..=3 {
                log.failed("a", Failure::from(&error), at(time), 1.0);
                let found = log.blocked(&"a").map(|b| (b.reason.to_string(), b.message.to_string(), b.since));
                let expected = (reason.to_string(), message.clone(), Some(at(1)));
                assert_eq!(found, (time >= reported).then_some(expected), "{error} after {time}");
            }
        }
    }

    #[test]
    fn backoff_grows_and_ends_with_a_success() {
        let mut log = WriteLog::new(reason::NODE_UPDATE_REJECTED, "the node");
        let failure = Failure::permanent(&"x");
        let delays: Vec<_> = (0..10)
            .map(|_| log.failed("a", failure.clone(), at(0), 1.0).duration_since(at(0)).as_secs())
            .collect();
        assert_eq!(delays, [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!((log.backoff_until(&"a", at(59)), log.backoff_until(&"a", at(60))), (Some(at(60)), None));
        assert_eq!(log.backoff_until(&"b", at(0)), None);
        assert!(log.succeeded(&"a") && !log.succeeded(&"a"));
        assert_eq!((log.blocked(&"a"), log.backoff_until(&"a", at(0))), (None, None));
    }

    #[test]
    fn reverted_write_is_repeated_with_growing_delays() {
        let mut log = log();
        let (mut now, mut written) = (0, Vec::new());
        while now < 100 {
            if let Some(due) = log.rewrite_at(&"n", 7, at(now)) {
                now = due.as_second() - at(0).as_second();
            } else {
                log.written("n", 7, at(now));
                written.push(now);
            }
        }
        assert_eq!(written, [0, 0, 10, 30, 70]);
        assert_eq!(log.rewrite_at(&"n", 8, at(71)), None, "other content");
        assert_eq!(log.rewrite_at(&"m", 7, at(71)), None, "another object");
        assert_eq!(log.rewrite_at(&"n", 7, at(60)), None, "the clock was set back");
        assert_eq!(log.rewrite_at(&"n", 7, at(70 + 1800)), None, "after the reset time");
        log.written("n", 8, at(71));
        log.written("n", 7, at(72));
        assert_eq!(log.rewrite_at(&"n", 7, at(73)), None, "the delay starts with the second rewrite");
        log.written("n", 7, at(73));
        assert_eq!(log.rewrite_at(&"n", 7, at(74)), Some(at(83)));
        log.forget(&"n");
        assert_eq!(log.rewrite_at(&"n", 7, at(74)), None);
    }

    fn at_ms(milliseconds: i64) -> Timestamp {
        Timestamp::from_millisecond(1_700_000_000_000 + milliseconds).unwrap()
    }

    #[test]
    fn each_object_is_written_once_per_second() {
        let mut log = log();
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
            assert_eq!(log.try_acquire(key, 1, at_ms(now)), expected, "{key} at {now}");
        }
        assert_eq!(log.try_acquire("b", 5, at_ms(5000)), Err(at_ms(5020)));
        log.forget(&"b");
        assert_eq!(log.try_acquire("b", 1, at_ms(21)), Ok(()));
    }

    proptest! {
        /// The last change is always written, and writes are at least one second apart.
        #[test]
        fn last_state_is_written(mut changes in proptest::collection::vec(0i64..5000, 1..40)) {
            changes.sort_unstable();
            let mut log = log();
            let (mut written, mut retry): (Vec<(i64, i64)>, Option<i64>) = (Vec::new(), None);
            let mut state = -1;
            let mut offer = |now: i64, state: i64, written: &mut Vec<(i64, i64)>| match log.try_acquire((), 1, at_ms(now)) {
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

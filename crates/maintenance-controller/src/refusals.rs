//! Writes that the API server did not carry out: what it said, since when, and when to try again.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use haulout_api_types::names::reason;
use haulout_drain_planner::facts::Blocked;
use haulout_service_runtime::api::RequestError;
use haulout_service_runtime::queue::Backoff;
use jiff::Timestamp;

use crate::bounded;

/// A write that failed is tried again at least this often: nobody tells when a policy of others lets it through.
const PAUSE: Backoff = Backoff { first: Duration::from_millis(500), most: Duration::from_secs(60) };
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

impl From<&RequestError> for Failure {
    fn from(error: &RequestError) -> Self {
        Self::from(error.source.as_ref())
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

#[derive(Clone, Debug)]
struct Refusal {
    failure: Failure,
    since: Timestamp,
    failures: u32,
    retry: Timestamp,
}

/// The objects that cannot be written now.
#[derive(Clone, Debug)]
pub struct Refusals<K> {
    all: HashMap<K, Refusal>,
    reason: &'static str,
    /// What cannot be written, to complete a sentence.
    what: &'static str,
}

impl<K: Hash + Eq> Refusals<K> {
    /// None yet; they are reported with this reason, as writes of `what`.
    pub fn new(reason: &'static str, what: &'static str) -> Self {
        Self { all: HashMap::new(), reason, what }
    }

    /// Takes note of a write that failed; when to try again. `chance`, from 0 to 1, spreads retries.
    pub fn failed(&mut self, key: K, failure: Failure, now: Timestamp, chance: f64) -> Timestamp {
        let known = self.all.remove(&key);
        let failures = known.as_ref().map_or(0, |known| known.failures).saturating_add(1);
        let retry = now.saturating_add(PAUSE.delay(failures, chance)).unwrap_or(Timestamp::MAX);
        let since = known.map_or(now, |known| known.since);
        self.all.insert(key, Refusal { failure, since, failures, retry });
        retry
    }

    /// Takes note of a write that waits until then, because it would not last.
    pub fn wait(&mut self, key: K, failure: Failure, now: Timestamp, until: Timestamp) {
        let known = self.all.remove(&key);
        let (failures, since) = known.map_or((0, now), |known| (known.failures, known.since));
        self.all.insert(key, Refusal { failure, since, failures, retry: until });
    }

    /// Forgets about an object that was written or does not have to be; whether there was something to forget.
    pub fn forget(&mut self, key: &K) -> bool {
        self.all.remove(key).is_some()
    }

    /// When to try again to write an object, if it is too early.
    pub fn pause(&self, key: &K, now: Timestamp) -> Option<Timestamp> {
        self.all.get(key).map(|refusal| refusal.retry).filter(|retry| now < *retry)
    }

    /// What to report about an object.
    pub fn blocked(&self, key: &K) -> Option<Blocked> {
        let refusal = self.all.get(key)?;
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::at;
    use kube::core::Status;
    use serde_json::json;

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
            let mut refusals = Refusals::new(reason::EVACUATION_REFUSED, "its Evacuation");
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
        let mut refusals = Refusals::new(reason::NODE_UPDATE_REFUSED, "the node");
        let failure = Failure::impossible(&"x");
        let pauses: Vec<_> = (0..10)
            .map(|_| refusals.failed("a", failure.clone(), at(0), 1.0).duration_since(at(0)).as_secs())
            .collect();
        assert_eq!(pauses, [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!((refusals.pause(&"a", at(59)), refusals.pause(&"a", at(60))), (Some(at(60)), None));
        assert_eq!(refusals.pause(&"b", at(0)), None);
        assert!(refusals.forget(&"a") && !refusals.forget(&"a"));
        assert_eq!((refusals.blocked(&"a"), refusals.pause(&"a", at(0))), (None, None));
    }
}

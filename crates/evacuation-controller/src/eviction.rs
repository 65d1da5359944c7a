//! What the Eviction API's answers mean: the one place that maps each of them to an outcome, with a reason for
//! machines, a sentence for people, and a rule for trying again.

use haulout_api_types::names::reason;
use haulout_service_runtime::pods::{Phase, Pod};
use kube::core::Status;

/// What an attempt to evict came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// 201: the pod has been asked to end.
    Evicted,
    /// 404, or 409 with another UID: the pod with this UID does not exist any more.
    Gone,
    /// The pod may not leave now. Counted, shown in the status, and tried again after the backoff.
    Refused(Refusal),
    /// 409: the pod was changed at the same moment. Tried again at once, and of no interest to anybody.
    Conflict,
    /// No answer: nobody knows whether the pod was evicted. Tried again soon; the status could not be written
    /// either.
    Unanswered(String),
}

/// Why a pod may not leave now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// One of [`haulout_api_types::names::reason`].
    pub reason: &'static str,
    /// What people should know.
    pub message: String,
}

/// In the causes of a 429 and of a 403, respectively.
const BUDGET_CAUSE: &str = "DisruptionBudget";
const NAMESPACE_CAUSE: &str = "NamespaceTerminating";

/// Judges an answer. `budgets` tells what is known of the pod's PodDisruptionBudgets, for people.
pub fn judge<T>(answer: Result<T, kube::Error>, budgets: impl FnOnce() -> String) -> Verdict {
    let status = match answer {
        Ok(_) => return Verdict::Evicted,
        Err(kube::Error::Api(status)) => status,
        Err(error) => return Verdict::Unanswered(error.to_string()),
    };
    let refused = |reason, message| Verdict::Refused(Refusal { reason, message });
    let said = said(&status);
    match status.code {
        404 => Verdict::Gone,
        409 if said.contains("UID in precondition") => Verdict::Gone,
        409 => Verdict::Conflict,
        // The status of a budget follows its spec within moments; until then the API server says "wait".
        429 if has_cause(&status, BUDGET_CAUSE) && retry_after(&status) > 0 => refused(
            reason::BUDGET_STALE,
            format!("The PodDisruptionBudget has changed and is being looked at anew. {}", budgets()),
        ),
        429 if has_cause(&status, BUDGET_CAUSE) => refused(reason::BUDGET_EXHAUSTED, budgets()),
        500 if said.contains("more than one PodDisruptionBudget") => refused(
            reason::SEVERAL_BUDGETS,
            format!(
                "The Eviction API refuses pods with several PodDisruptionBudgets: leave only one. {}",
                budgets()
            ),
        ),
        403 if has_cause(&status, NAMESPACE_CAUSE) => refused(
            reason::NAMESPACE_TERMINATING,
            "The namespace is being deleted, which forbids evictions: its pods go with it.".to_owned(),
        ),
        // A webhook and a policy choose the code of their refusal freely.
        _ if said.contains("denied the request") || said.contains("denied request: ") => refused(
            reason::EVICTION_FORBIDDEN,
            format!("The eviction was refused by an admission webhook or policy: {said}"),
        ),
        401 | 403 => refused(reason::EVICTION_FORBIDDEN, format!("The eviction is forbidden: {said}")),
        429 => refused(reason::SERVER_BUSY, format!("The API server asks us to slow down: {said}")),
        500.. => refused(reason::SERVER_BUSY, format!("The API server failed to evict the pod: {said}")),
        code => refused(reason::EVICTION_FORBIDDEN, format!("The eviction was refused with {code}: {said}")),
    }
}

/// Whether a change of a budget may lift this refusal.
pub fn waits_for_budget(reason: &str) -> bool {
    matches!(reason, reason::BUDGET_EXHAUSTED | reason::BUDGET_STALE | reason::SEVERAL_BUDGETS)
}

/// Whether an attempt to evict was refused for this reason.
pub fn is_refusal(reason: &str) -> bool {
    waits_for_budget(reason)
        || matches!(reason, reason::NAMESPACE_TERMINATING | reason::EVICTION_FORBIDDEN | reason::SERVER_BUSY)
}

/// Whether the pod's UID has to be compared on the API server first.
///
/// The eviction itself carries the UID, but where a budget covers the pod, the API server spends it before it
/// looks at the UID, and a pod that has just been replaced under its name would cost the others a disruption
/// for two minutes. (For a Pending pod it tries for ten seconds.) The cache is compared always, and its watch
/// is some milliseconds behind, which is enough for names that are never used again.
pub fn compare_first(pod: &Pod, covered: bool, gap: bool) -> bool {
    let kind = pod.controller.as_ref().map(|owner| owner.kind.as_ref());
    let unique_name = matches!(kind, Some("ReplicaSet" | "ReplicationController" | "Job"));
    (covered || pod.phase == Phase::Pending) && (gap || !unique_name)
}

fn has_cause(status: &Status, cause: &str) -> bool {
    status.details.iter().flat_map(|details| &details.causes).any(|c| c.reason == cause)
}

fn retry_after(status: &Status) -> u32 {
    status.details.as_ref().map_or(0, |details| details.retry_after_seconds)
}

/// One line of bounded length: a webhook may say anything.
fn said(status: &Status) -> String {
    const MOST: usize = 1000;
    let line = status.message.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.is_empty() {
        return status.code.to_string();
    }
    match line.char_indices().nth(MOST) {
        Some((cut, _)) => format!("{}…", line.get(..cut).unwrap_or_default()),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answer(code: u16, message: &str, details: serde_json::Value) -> Result<(), kube::Error> {
        let status =
            json!({"status": "Failure", "code": code, "message": message, "reason": "x", "details": details});
        Err(kube::Error::Api(serde_json::from_value(status).unwrap()))
    }

    fn reason_of(verdict: Verdict) -> String {
        match verdict {
            Verdict::Refused(refusal) => refusal.reason.to_owned(),
            other => format!("{other:?}"),
        }
    }

    /// The texts are those of the API server, v1.36.
    #[test]
    fn every_answer_has_its_meaning() {
        let budget = |after: u32| json!({"causes": [{"reason": "DisruptionBudget", "message": "needs 2 healthy pods"}], "retryAfterSeconds": after});
        let violate = "Cannot evict pod as it would violate the pod's disruption budget.";
        let cases = [
            (answer(404, "pods \"web-1\" not found", json!({})), "Gone"),
            (
                answer(
                    409,
                    "Operation cannot be fulfilled on Pod \"web-1\": Precondition failed: UID in precondition: a, UID in object meta: b",
                    json!({}),
                ),
                "Gone",
            ),
            (answer(409, "the object has been modified", json!({})), "Conflict"),
            (answer(429, violate, budget(0)), reason::BUDGET_EXHAUSTED),
            (answer(429, violate, budget(10)), reason::BUDGET_STALE),
            (
                answer(
                    500,
                    "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
                    json!({}),
                ),
                reason::SEVERAL_BUDGETS,
            ),
            (
                answer(
                    403,
                    "pods \"x\" is forbidden: namespace going away",
                    json!({"causes": [{"reason": "NamespaceTerminating"}]}),
                ),
                reason::NAMESPACE_TERMINATING,
            ),
            (
                answer(403, "admission webhook \"x.example.com\" denied the request: no", json!({})),
                reason::EVICTION_FORBIDDEN,
            ),
            (
                answer(429, "admission webhook \"x.example.com\" denied the request: later", json!({})),
                reason::EVICTION_FORBIDDEN,
            ),
            (
                answer(400, "admission webhook \"x.example.com\" denied the request: no", json!({})),
                reason::EVICTION_FORBIDDEN,
            ),
            (
                answer(
                    422,
                    "pods \"web-1\" is forbidden: ValidatingAdmissionPolicy 'x' with binding 'x' denied request: no",
                    json!({}),
                ),
                reason::EVICTION_FORBIDDEN,
            ),
            (
                answer(403, "User \"x\" cannot create resource \"pods/eviction\"", json!({})),
                reason::EVICTION_FORBIDDEN,
            ),
            (answer(422, "invalid", json!({})), reason::EVICTION_FORBIDDEN),
            (
                answer(429, "Too many requests, please try again later.", json!({"retryAfterSeconds": 1})),
                reason::SERVER_BUSY,
            ),
            (answer(500, "etcdserver: request timed out", json!({})), reason::SERVER_BUSY),
            (answer(503, "", json!(null)), reason::SERVER_BUSY),
            (
                answer(504, "Timeout: couldn't update PodDisruptionBudget \"web\"", json!({})),
                reason::SERVER_BUSY,
            ),
            (Ok(()), "Evicted"),
        ];
        for (answer, expected) in cases {
            let text = format!("{answer:?}");
            let verdict = judge(answer, || "PodDisruptionBudget web allows nothing.".to_owned());
            if let Verdict::Refused(refusal) = &verdict {
                assert!(is_refusal(refusal.reason), "{}", refusal.reason);
                assert!(refusal.message.ends_with('.') || refusal.message.contains(": "), "{refusal:?}");
            }
            assert_eq!(reason_of(verdict), expected, "{text}");
        }
    }

    #[test]
    fn a_very_long_answer_is_cut() {
        let long = answer(403, &"ä".repeat(5000), json!({}));
        let Verdict::Refused(refusal) = judge(long, String::new) else { panic!("it is refused") };
        assert!(refusal.message.chars().count() < 1100);
    }
}

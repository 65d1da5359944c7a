//! Evicts pods and classifies the API server's answers. All services use this module, so that an answer has the same meaning
//! everywhere.
//!
//! The links go to the API server's source, v1.36.3. A machine-readable `reason`, `details` or cause decides. The text
//! of an answer decides only if there is nothing else.
//!
//! | answer | meaning | source |
//! |---|---|---|
//! | 201 | evicted | [`Create`][create] |
//! | 404, `details.kind` is `pods` | gone | [`getPod`][get-pod] |
//! | 404, `details.kind` is `poddisruptionbudgets` | the budget was deleted meanwhile | [`Create`][refresh] |
//! | 404, `details.kind` is `namespaces` | the namespace is gone: check whether the pod exists | [NamespaceLifecycle][lifecycle] |
//! | 409, "the UID in the precondition (…) does not match" | gone: the name belongs to another pod | [`addConditionAndDeletePod`][uid], [`BeforeDelete`][before-delete] |
//! | 409, "UID in precondition: …" | the same | [`Preconditions.Check`][preconditions] |
//! | 409, anything else | the pod changed at the same time: check whether it exists | [`addConditionAndDeletePod`][version] |
//! | 429, cause `DisruptionBudget`, without `retryAfterSeconds` | the budget is exhausted | [`checkAndDecrement`][exhausted] |
//! | 429, cause `DisruptionBudget`, with `retryAfterSeconds` | the budget's status is older than its spec | [`createTooManyRequestsError`][stale] |
//! | 403, `details.kind` is `poddisruptionbudget` | the budget's status cannot be used now | [`checkAndDecrement`][unusable] |
//! | 500, "more than one PodDisruptionBudget" | several budgets cover the pod | [`Create`][several] |
//! | 504 | the budget's status was changed too often meanwhile | [`Create`][timeout] |
//! | 403, cause `NamespaceTerminating` | the namespace is being deleted | [NamespaceLifecycle][lifecycle] |
//! | any code, "admission webhook … denied the request" | a webhook rejected the eviction. It chooses code, reason and details | [`ToStatusErr`][webhook] |
//! | the same with 429, "Eviction triggered evacuation" | another program moves the pod | [KubeVirt][kubevirt] |
//! | 403, 422, "denied request: " | a ValidatingAdmissionPolicy rejected the eviction | [`Dispatch`][policy] |
//! | 429, no cause | API priority and fairness rejected the request | [`tooManyRequests`][fairness] |
//!
//! [create]: https://github.com/kubernetes/kubernetes/blob/v1.36.3/pkg/registry/core/pod/storage/eviction.go#L129
//! [get-pod]: https://github.com/kubernetes/kubernetes/blob/v1.36.3/pkg/registry/core/pod/storage/eviction.go#L374
//! [refresh]: https://github.com/kubernetes/kubernetes/blob/v1.36.3/pkg/registry/core/pod/storage/eviction.go#L258
//! [several]: https://github.com/kubernetes/kubernetes/blob/v1.36.3/pkg/registry/core/pod/storage/eviction.go#L223
//! [timeout]: https://github.com/kubernetes/kubernetes/blob/v1.36.3/pkg/registry/core/pod/storage/eviction.go#L277
//! [uid]: https://github.com/kubernetes/kubernetes/blob/v1.36.3/pkg/registry/core/pod/storage/eviction.go#L325
//! [version]: https://github.com/kubernetes/kubernetes/blob/v1.36.3/pkg/registry/core/pod/storage/eviction.go#L332
//! [stale]: https://github.com/kubernetes/kubernetes/blob/v1.36.3/pkg/registry/core/pod/storage/eviction.go#L413
//! [unusable]: https://github.com/kubernetes/kubernetes/blob/v1.36.3/pkg/registry/core/pod/storage/eviction.go#L430
//! [exhausted]: https://github.com/kubernetes/kubernetes/blob/v1.36.3/pkg/registry/core/pod/storage/eviction.go#L436
//! [before-delete]: https://github.com/kubernetes/kubernetes/blob/v1.36.3/staging/src/k8s.io/apiserver/pkg/registry/rest/delete.go#L86
//! [preconditions]: https://github.com/kubernetes/kubernetes/blob/v1.36.3/staging/src/k8s.io/apiserver/pkg/storage/interfaces.go#L152
//! [lifecycle]: https://github.com/kubernetes/kubernetes/blob/v1.36.3/staging/src/k8s.io/apiserver/pkg/admission/plugin/namespace/lifecycle/admission.go#L170
//! [webhook]: https://github.com/kubernetes/kubernetes/blob/v1.36.3/staging/src/k8s.io/apiserver/pkg/admission/plugin/webhook/errors/statuserror.go#L28
//! [policy]: https://github.com/kubernetes/kubernetes/blob/v1.36.3/staging/src/k8s.io/apiserver/pkg/admission/plugin/policy/validating/dispatcher.go#L294
//! [fairness]: https://github.com/kubernetes/kubernetes/blob/v1.36.3/staging/src/k8s.io/apiserver/pkg/server/filters/priority-and-fairness.go#L380
//! [kubevirt]: https://kubevirt.io/user-guide/cluster_admin/node_maintenance/

use haulout_api_types::bounded;
use haulout_api_types::names::reason;
use k8s_openapi::api::core::v1;
use kube::api::PostParams;
use kube::core::Status;
use kube::{Api, Client};
use serde::de::IgnoredAny;
use serde_json::json;
use thiserror::Error;

use crate::error_chain::error_chain;
use crate::pods::{self, Pod};

/// Maximum length of the API server's answer in a message, because the message of a webhook can be long.
const MAX_ANSWER_CHARS: usize = 1000;

/// The result of an eviction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The pod is being terminated.
    Evicted,
    /// The pod with this UID no longer exists.
    Gone,
    /// The pod was not evicted, or it is unknown whether it was.
    Failed(Failure),
}

/// Why a pod was not evicted.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{message}")]
pub struct Failure {
    /// One of [`haulout_api_types::names::reason`].
    pub reason: &'static str,
    /// The text for people, of bounded length.
    pub message: String,
}

/// Whether a change of a PodDisruptionBudget can resolve a failure with this reason.
pub fn waits_for_budget(reason: &str) -> bool {
    matches!(reason, reason::BUDGET_EXHAUSTED | reason::BUDGET_STALE | reason::SEVERAL_BUDGETS)
}

/// Whether a failure with this reason is temporary, so that the next attempt follows soon. All other failures are rejections:
/// somebody has to change something first.
pub fn is_transient(reason: &str) -> bool {
    matches!(reason, reason::SERVER_BUSY | reason::BUDGET_STALE)
}

/// Whether an eviction can fail with this reason.
pub fn is_failure(reason: &str) -> bool {
    waits_for_budget(reason)
        || is_transient(reason)
        || matches!(
            reason,
            reason::NAMESPACE_TERMINATING | reason::EVICTION_FORBIDDEN | reason::HANDLED_ELSEWHERE
        )
}

/// Whether the name of the pod is unique, because its controller generates a new name for each pod.
///
/// For other pods, compare the UID on the API server first ([`exists`]). The API server decrements the budget before it
/// checks the UID precondition of the eviction. An eviction of a pod that was just replaced therefore uses up a
/// disruption for two minutes. For a Pending pod, the API server retries for ten seconds.
pub fn has_unique_name(pod: &Pod) -> bool {
    let kind = pod.controller.as_ref().map(|owner| owner.kind.as_ref());
    // A pod belongs to the Deployment itself while its replacement starts; its ReplicaSet has created it.
    matches!(kind, Some("ReplicaSet" | "Deployment" | "ReplicationController" | "Job"))
}

/// Whether the pod with this UID exists on the API server.
pub async fn exists(client: &Client, pod: &Pod) -> Result<bool, pods::FetchError> {
    let found = pods::fetch(client, &pod.namespace, &pod.name).await?;
    Ok(found.is_some_and(|found| found.uid == pod.uid))
}

/// Evicts the pod with this UID. The client must not retry by itself.
pub async fn evict(client: &Client, pod: &Pod) -> Answer {
    match Meaning::of(&pod.name, send(client, pod).await) {
        Meaning::Evicted => Answer::Evicted,
        Meaning::Gone => Answer::Gone,
        Meaning::Failed(failure) => Answer::Failed(failure),
        Meaning::LookUp(failure) => match exists(client, pod).await {
            Ok(false) => Answer::Gone,
            Ok(true) | Err(_) => Answer::Failed(failure),
        },
    }
}

/// Does not use kube's `evict`, which sends preconditions in a field that the API server does not know.
async fn send(client: &Client, pod: &Pod) -> kube::Result<()> {
    let eviction = json!({
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": &*pod.name, "namespace": &*pod.namespace},
        "deleteOptions": {"preconditions": {"uid": pod.uid.to_string()}},
    });
    let pods: Api<v1::Pod> = Api::namespaced(client.clone(), &pod.namespace);
    let answer = pods.create_subresource("eviction", &pod.name, &PostParams::default(), &eviction).await;
    answer.map(|IgnoredAny| ())
}

/// Whether this answer to a request with a UID precondition means that the object no longer exists.
pub fn is_gone(status: &Status) -> bool {
    !is_denied_by_webhook(status) && (status.code == 404 || is_uid_conflict(status))
}

/// The meaning of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Meaning {
    Evicted,
    Gone,
    Failed(Failure),
    /// The answer does not show whether the pod still exists.
    LookUp(Failure),
}

impl Meaning {
    fn of(pod: &str, answer: kube::Result<()>) -> Self {
        let status = match answer {
            Ok(()) => return Self::Evicted,
            Err(kube::Error::Api(status)) => status,
            Err(error) => {
                let error = one_line(&error_chain(&error));
                return Self::failed(reason::SERVER_BUSY, format!("The API server did not answer: {error}"));
            }
        };
        // First, because a webhook can choose any code, reason and details.
        if is_denied_by_webhook(&status) {
            return Self::denied(&status);
        }
        let answer_text = answer_text(&status);
        match status.code {
            404 if is_about(&status, "pods")
                && status.details.as_ref().is_some_and(|details| details.name == pod) =>
            {
                Self::Gone
            }
            404 if is_about(&status, "poddisruptionbudgets") => Self::failed(
                reason::BUDGET_STALE,
                format!("The PodDisruptionBudget was deleted during the eviction: {answer_text}"),
            ),
            404 => Self::LookUp(Failure {
                reason: reason::SERVER_BUSY,
                message: format!(
                    "The API server did not find an object that the eviction needs: {answer_text}"
                ),
            }),
            409 if is_uid_conflict(&status) => Self::Gone,
            409 => Self::LookUp(Failure {
                reason: reason::SERVER_BUSY,
                message: format!("The pod changed while it was being evicted: {answer_text}"),
            }),
            403 | 429
                if has_cause(&status, DISRUPTION_BUDGET) || is_about(&status, "poddisruptionbudget") =>
            {
                Self::by_budget(&status)
            }
            403 if has_cause(&status, NAMESPACE_TERMINATING) => Self::failed(
                reason::NAMESPACE_TERMINATING,
                "The namespace is being deleted, so evictions are forbidden; its pods are deleted with it."
                    .to_owned(),
            ),
            429 => Self::failed(
                reason::SERVER_BUSY,
                format!("The API server rejected the request because of its rate limits: {answer_text}"),
            ),
            // The answer has neither a reason nor details.
            500 if status.message.contains("more than one PodDisruptionBudget") => Self::failed(
                reason::SEVERAL_BUDGETS,
                "The Eviction API rejects pods with several PodDisruptionBudgets: keep only one.".to_owned(),
            ),
            500.. => Self::failed(
                reason::SERVER_BUSY,
                format!("The API server failed to evict the pod: {answer_text}"),
            ),
            _ if status.message.contains("denied request: ") => Self::denied(&status),
            401 | 403 => {
                Self::failed(reason::EVICTION_FORBIDDEN, format!("The eviction is forbidden: {answer_text}"))
            }
            code => Self::failed(
                reason::EVICTION_FORBIDDEN,
                format!("The eviction was rejected with {code}: {answer_text}"),
            ),
        }
    }

    fn failed(reason: &'static str, message: String) -> Self {
        Self::Failed(Failure { reason, message })
    }

    fn denied(status: &Status) -> Self {
        if status.code == 429 && status.message.contains("Eviction triggered evacuation") {
            let message = format!("Another program is moving the pod: {}", answer_text(status));
            return Self::failed(reason::HANDLED_ELSEWHERE, message);
        }
        let message =
            format!("The eviction was rejected by an admission webhook or policy: {}", answer_text(status));
        Self::failed(reason::EVICTION_FORBIDDEN, message)
    }

    /// `retryAfterSeconds` is set while the status of the budget is outdated. The code is 403 if the status cannot be used at
    /// all.
    fn by_budget(status: &Status) -> Self {
        let details = status.details.as_ref();
        let cause = details.and_then(|d| d.causes.iter().find(|cause| cause.reason == DISRUPTION_BUDGET));
        let answer_text = cause.map_or_else(|| answer_text(status), |cause| one_line(&cause.message));
        if status.code == 403 || details.is_some_and(|details| details.retry_after_seconds > 0) {
            let message = format!("The status of the PodDisruptionBudget is not up to date: {answer_text}");
            return Self::failed(reason::BUDGET_STALE, message);
        }
        let message = format!("The PodDisruptionBudget allows no disruption: {answer_text}");
        Self::failed(reason::BUDGET_EXHAUSTED, message)
    }
}

/// In the causes of a 429 and of a 403, respectively.
const DISRUPTION_BUDGET: &str = "DisruptionBudget";
const NAMESPACE_TERMINATING: &str = "NamespaceTerminating";

/// Whether a webhook rejected the request. No field shows this, but the API server adds this prefix to the message of the
/// webhook.
pub fn is_denied_by_webhook(status: &Status) -> bool {
    status.message.starts_with("admission webhook \"") && status.message.contains("\" denied the request")
}

/// No field distinguishes a wrong UID from a wrong resourceVersion.
fn is_uid_conflict(status: &Status) -> bool {
    status.code == 409
        && (status.message.contains("the UID in the precondition (")
            || status.message.contains("UID in precondition: "))
}

fn is_about(status: &Status, kind: &str) -> bool {
    status.details.as_ref().is_some_and(|details| details.kind == kind)
}

fn has_cause(status: &Status, cause: &str) -> bool {
    status.details.iter().flat_map(|details| &details.causes).any(|c| c.reason == cause)
}

/// The message of the API server, or its code if there is none.
fn answer_text(status: &Status) -> String {
    let line = one_line(&status.message);
    if line.is_empty() { status.code.to_string() } else { line }
}

/// One line of bounded length.
fn one_line(text: &str) -> String {
    bounded::line(text, MAX_ANSWER_CHARS)
}

#[cfg(test)]
mod tests;

//! What people are told: kube-controller-manager's own words where it has some, so that dashboards and
//! habits keep working.

use haulout_api_types::names::event;
use haulout_service_runtime::events::{News, Severity};
use haulout_service_runtime::pods::Pod;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::decide::{How, Reason};

/// The reason of upstream's events.
pub const EVICTION: &str = event::TAINT_MANAGER_EVICTION;
/// The source of our events.
pub const SOURCE: &str = "haulout-taint-manager";
/// The reason of the condition `DisruptionTarget` that a pod gets right before it is deleted.
pub const CONDITION_REASON: &str = "DeletionByTaintManager";
/// The message of that condition.
pub const CONDITION_MESSAGE: &str = "Taint manager: deleting due to NoExecute taint";

/// A pod has to leave now.
pub fn leaving(pod: &Pod, how: How, reason: Reason<'_>) -> News {
    let name = name(pod);
    match how {
        How::Delete => news(pod, Severity::Normal, "Delete", format!("Marking for deletion Pod {name}")),
        How::Evict => news(pod, Severity::Normal, "Evict", format!("Marking for eviction Pod {name}")),
        How::Evacuate => {
            news(pod, Severity::Normal, "Evacuate", format!("Asking for evacuation of Pod {name}"))
        }
        How::ForceDelete => News {
            reason: event::FORCED_DELETION,
            ..news(pod, Severity::Warning, "ForceDelete", format!("Deleting Pod {name} by force: {reason}"))
        },
    }
}

/// A pod that would have had to leave stays.
pub fn cancelled(pod: &Pod) -> News {
    news(pod, Severity::Normal, "Cancel", format!("Cancelling deletion of Pod {}", name(pod)))
}

/// A pod could not be made to leave, and will be tried again.
pub fn failed(pod: &Pod, how: How, problem: &str) -> News {
    let (done, action) = match how {
        How::Delete => ("deleted", "Delete"),
        How::Evict => ("evicted", "Evict"),
        How::Evacuate => ("evacuated", "Evacuate"),
        How::ForceDelete => ("deleted by force", "ForceDelete"),
    };
    let note = format!("Pod {} could not be {done} and will be tried again: {problem}", name(pod));
    News { reason: event::TAINT_EVICTION_FAILED, ..news(pod, Severity::Warning, action, note) }
}

/// What to do about a rival.
pub const RIVAL_ADVICE: &str = "run kube-controller-manager with --controllers=*,-taint-eviction-controller, or uninstall the taint manager";

/// Somebody else makes pods leave tainted nodes too.
pub fn rival(own: &ObjectReference, source: &str) -> News {
    News {
        regarding: own.clone(),
        severity: Severity::Warning,
        reason: event::RIVAL_TAINT_EVICTION,
        action: "Watch",
        note: format!(
            "{source} makes pods leave tainted nodes too, whatever our policy says: {RIVAL_ADVICE}"
        ),
    }
}

/// A Node cannot be read.
pub fn unreadable(node: &ObjectMeta, problem: &str) -> News {
    News {
        regarding: ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Node".into()),
            name: node.name.clone(),
            uid: node.uid.clone(),
            ..ObjectReference::default()
        },
        severity: Severity::Warning,
        reason: event::NOT_FOLLOWED,
        action: "Read",
        note: format!(
            "The taint manager cannot read this Node and leaves its pods alone until it can: {problem}"
        ),
    }
}

/// A new policy cannot be used.
pub fn policy_refused(own: &ObjectReference, file: &str, problem: &str) -> News {
    News {
        regarding: own.clone(),
        severity: Severity::Warning,
        reason: event::POLICY_REFUSED,
        action: "Reload",
        note: format!("The policy {file} is refused, and the one of before stays in force: {problem}"),
    }
}

fn name(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace, pod.name)
}

fn news(pod: &Pod, severity: Severity, action: &'static str, note: String) -> News {
    let regarding = ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        namespace: Some(pod.namespace.to_string()),
        name: Some(pod.name.to_string()),
        uid: Some(pod.uid.to_string()),
        ..ObjectReference::default()
    };
    News { regarding, severity, reason: EVICTION, action, note }
}

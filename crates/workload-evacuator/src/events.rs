//! The Kubernetes events of Deployments.

use haulout_api_types::names::event;
use haulout_service_runtime::events::{NewEvent, Severity};
use k8s_openapi::api::core::v1::ObjectReference;

use crate::decide::Outcome;
use crate::objects::{Deployment, Pod};

/// Our turn has ended.
pub fn completed(deployment: &Deployment, pod: &Pod, outcome: Outcome, message: &str) -> NewEvent {
    let (severity, reason) = match outcome {
        Outcome::Replaced => (Severity::Normal, event::POD_REPLACED),
        Outcome::NotReady | Outcome::Unsupported => (Severity::Normal, event::POD_NOT_REPLACED),
        Outcome::Obstructed | Outcome::NoRoom | Outcome::TimedOut => {
            (Severity::Warning, event::POD_NOT_REPLACED)
        }
    };
    new_event(deployment, severity, reason, "Replace", format!("Pod {}: {message}", pod.name))
}

/// A pod belongs to its ReplicaSet again.
pub fn cancelled(deployment: &Deployment, pod: &Pod) -> NewEvent {
    let note = format!(
        "Pod {} was given back to its ReplicaSet, because its evacuation was cancelled or its Deployment was scaled to 0. \
         The ReplicaSet deletes surplus pods.",
        pod.name
    );
    new_event(deployment, Severity::Normal, event::REPLACEMENT_CANCELLED, "GiveBack", note)
}

fn new_event(
    deployment: &Deployment,
    severity: Severity,
    reason: &'static str,
    action: &'static str,
    note: String,
) -> NewEvent {
    let regarding = ObjectReference {
        api_version: Some("apps/v1".into()),
        kind: Some("Deployment".into()),
        namespace: Some(deployment.namespace.as_ref().into()),
        name: Some(deployment.name.as_ref().into()),
        uid: Some(deployment.uid.to_string()),
        ..ObjectReference::default()
    };
    NewEvent { regarding, severity, reason, action, note }
}

//! Sets defaults for Evacuations and validates who may create, change and delete them. CEL rules in the CRD check the
//! name, immutability and the counter before the webhook is called.

use std::collections::BTreeSet;

use haulout_api_types::evacuation::{CancellationPolicy, Evacuation};
use haulout_api_types::names::{DRAIN_LABEL, instigator};
use haulout_api_types::{evacuators, instigators};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use super::{Cause, Verdict, listed};

/// How many maintenances a warning names at most.
const MAX_LISTED_MAINTENANCES: usize = 3;

/// Sets the defaults of a new Evacuation from its pod, if the pod was found. A status is rejected here, because the API
/// server drops it before the validating webhook.
pub fn set_defaults(new: &Evacuation, pod: Option<&ObjectMeta>, served: &BTreeSet<String>) -> Verdict {
    let mut verdict = Verdict::default();
    if let Some(status) = &new.status {
        if status.active_evacuator_class.as_deref().is_some_and(|class| !class.is_empty()) {
            verdict.deny(
                Cause::Status,
                "status.activeEvacuatorClass: must be empty in a new Evacuation, because the evacuation controller \
                 selects the first evacuator: remove it",
            );
        }
        if status.evacuation_cancellation_policy != CancellationPolicy::Allow {
            verdict.deny(
                Cause::Status,
                "status.evacuationCancellationPolicy: must be Allow or absent in a new Evacuation, because only an \
                 active evacuator may set it: remove it",
            );
        }
    }
    let Some(pod) = pod.filter(|pod| pod.uid.as_ref() == Some(&new.spec.pod_ref.uid)) else {
        return verdict;
    };
    let labels = evacuators::merge_labels(new.metadata.labels.clone(), pod.labels.as_ref());
    if let Some(labels) = labels.filter(|labels| new.metadata.labels.as_ref() != Some(labels)) {
        verdict.set(["metadata", "labels"], json!(labels));
    }
    let annotations = evacuators::merge_annotations(new.metadata.annotations.clone());
    if new.metadata.annotations.as_ref() != Some(&annotations) {
        verdict.set(["metadata", "annotations"], json!(annotations));
    }
    let (resolved, _) = evacuators::resolve(pod, served);
    if new.spec.evacuators.is_empty() && !resolved.is_empty() {
        verdict.set(["spec", "evacuators"], serde_json::to_value(resolved).unwrap_or(Value::Null));
    }
    verdict
}

/// Validates a new Evacuation against the pod that currently has the name of its pod.
pub fn validate_new(
    new: &Evacuation,
    namespace: &str,
    pod: Option<&ObjectMeta>,
    served: &BTreeSet<String>,
) -> Verdict {
    let wanted = &new.spec.pod_ref;
    let Some(pod) = pod else {
        let message = format!("spec.podRef.name: there is no pod {} in namespace {namespace}", wanted.name);
        return Verdict::denied(Cause::Pod, message);
    };
    if pod.uid.as_ref() != Some(&wanted.uid) {
        let message = format!(
            "spec.podRef.uid: pod {} in namespace {namespace} has another UID: the pod with UID {} is gone; to \
             evacuate the new pod, use its UID",
            wanted.name, wanted.uid
        );
        return Verdict::denied(Cause::Pod, message);
    }
    let mut verdict = Verdict::default();
    let (resolved, ignored) = evacuators::resolve(pod, served);
    for violation in ignored {
        verdict.warn(format!("pod {}: {violation}; the annotation is ignored", wanted.name));
    }
    let mut given = new.spec.evacuators.clone();
    evacuators::sort(&mut given);
    if given != resolved {
        let described = |all: &[_]| match all {
            [] => "none".to_owned(),
            all => all.iter().map(describe).collect::<Vec<_>>().join(", "),
        };
        let message = format!(
            "spec.evacuators: must match the evacuators of pod {}: expected {}, got {}; omit the field to use the \
             pod's",
            wanted.name,
            described(&resolved),
            described(&given)
        );
        verdict.deny(Cause::Evacuators, message);
    }
    verdict
}

fn describe(evacuator: &haulout_api_types::evacuation::Evacuator) -> String {
    format!("{} ({})", evacuator.evacuator_class, evacuator.annotation().1)
}

/// Whether the evacuation cannot be cancelled while its pod exists.
pub fn forbids_cancellation(old: &Evacuation) -> bool {
    old.cancellation_policy() == CancellationPolicy::Forbid
}

/// Whether this update removes the last instigator from an evacuation that cannot be cancelled while its pod exists.
pub fn removes_last_instigator(old: &Evacuation, new: &Evacuation) -> bool {
    forbids_cancellation(old) && old.instigators().next().is_some() && new.instigators().next().is_none()
}

/// Validates the deletion of an Evacuation or the removal of its last instigator finalizer. `pod` currently has the
/// name of its pod.
pub fn validate_cancellation(old: &Evacuation, pod: Option<&ObjectMeta>, action: &str) -> Verdict {
    let wanted = &old.spec.pod_ref;
    if !is_referenced_pod(pod, old) || !forbids_cancellation(old) {
        return Verdict::default();
    }
    let evacuator = old.status.as_ref().and_then(|status| status.active_evacuator_class.as_deref());
    let message = format!(
        "status.evacuationCancellationPolicy is Forbid, so {action} while pod {} exists; the Evacuation is deleted \
         when the pod is gone{}",
        wanted.name,
        evacuator
            .map(|class| format!("; to cancel it earlier, ask the owner of evacuator {class}"))
            .unwrap_or_default()
    );
    Verdict::denied(Cause::CancellationForbidden, message)
}

/// Whether this pod is the one that the Evacuation refers to, and not a later pod with the same name.
pub fn is_referenced_pod(pod: Option<&ObjectMeta>, evacuation: &Evacuation) -> bool {
    pod.is_some_and(|pod| pod.uid.as_ref() == Some(&evacuation.spec.pod_ref.uid))
}

/// Warnings for a user who deletes an Evacuation that continues: its instigators, and how to cancel each. There is one
/// warning per instigator, because long warnings are truncated. `maintenances` are the ones that drain the pod's node.
pub fn deletion_warnings(old: &Evacuation, maintenances: &[String]) -> Verdict {
    let mut verdict = Verdict::default();
    let pod = &old.spec.pod_ref.name;
    for name in old.instigators() {
        let how = match name {
            instigator::NODE_MAINTENANCE => {
                let them = match maintenances {
                    [] => "its NodeMaintenance".to_owned(),
                    [one] => format!("NodeMaintenance {one}"),
                    all => format!("NodeMaintenances {}", listed(all, MAX_LISTED_MAINTENANCES)),
                };
                format!("complete or delete {them}, or label the pod {DRAIN_LABEL}=skip")
            }
            instigator::TAINT_MANAGER => "remove the NoExecute taint from its node".to_owned(),
            other => format!("remove the finalizer {}", instigators::finalizer(other)),
        };
        verdict.warn(format!(
            "instigator {name} still requests the evacuation of pod {pod}, so it continues; to cancel it, {how}"
        ));
    }
    verdict
}

#[cfg(test)]
mod tests;

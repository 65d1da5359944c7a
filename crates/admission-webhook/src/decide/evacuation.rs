//! Evacuations: what a new one is given from its pod, and who may write, change and remove one. What CEL can say
//! (the name, immutability, the counter) stands in the definition and has been judged before us.

use std::collections::BTreeSet;

use haulout_api_types::evacuation::{CancellationPolicy, Evacuation, EvacuationStatus};
use haulout_api_types::names::{DRAIN_LABEL, instigator};
use haulout_api_types::reports::MAX_AHEAD;
use haulout_api_types::{evacuators, instigators};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use super::{Cause, Verdict, listed};

/// How many maintenances a warning names.
const NAMED: usize = 3;

/// Fills in what a new Evacuation leaves open, from its pod if that was found. A status is refused here, because
/// the API server drops it before anybody else can see it.
pub fn prepare(new: &Evacuation, pod: Option<&ObjectMeta>, served: &BTreeSet<String>) -> Verdict {
    let mut verdict = Verdict::default();
    if let Some(status) = &new.status {
        if status.active_evacuator_class.as_deref().is_some_and(|class| !class.is_empty()) {
            verdict.refuse(
                Cause::Status,
                "status.activeEvacuatorClass: must be empty in a new Evacuation, the evacuation controller \
                 chooses the first evacuator: remove it",
            );
        }
        if status.evacuation_cancellation_policy != CancellationPolicy::Allow {
            verdict.refuse(
                Cause::Status,
                "status.evacuationCancellationPolicy: must be Allow or absent in a new Evacuation, an evacuator \
                 sets it once it is in charge: remove it",
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
    let (resolved, _) = evacuators::resolve(pod, served);
    if new.spec.evacuators.is_empty() && !resolved.is_empty() {
        verdict.set(["spec", "evacuators"], serde_json::to_value(resolved).unwrap_or(Value::Null));
    }
    verdict
}

/// Judges a new Evacuation by the pod that has its pod's name now.
pub fn judge_new(
    new: &Evacuation,
    namespace: &str,
    pod: Option<&ObjectMeta>,
    served: &BTreeSet<String>,
) -> Verdict {
    let wanted = &new.spec.pod_ref;
    let Some(pod) = pod else {
        let message = format!("spec.podRef.name: there is no pod {} in namespace {namespace}", wanted.name);
        return Verdict::refused(Cause::Pod, message);
    };
    if pod.uid.as_ref() != Some(&wanted.uid) {
        let message = format!(
            "spec.podRef.uid: pod {} in namespace {namespace} has another UID: the pod with UID {} is gone, and \
             this one has to be evacuated under its own",
            wanted.name, wanted.uid
        );
        return Verdict::refused(Cause::Pod, message);
    }
    let mut verdict = Verdict::default();
    let (resolved, ignored) = evacuators::resolve(pod, served);
    for violation in ignored {
        verdict.warn(format!("pod {}: {violation}; it is ignored", wanted.name));
    }
    let mut given = new.spec.evacuators.clone();
    evacuators::sort(&mut given);
    if given != resolved {
        let described = |all: &[_]| match all {
            [] => "none".to_owned(),
            all => all.iter().map(describe).collect::<Vec<_>>().join(", "),
        };
        let message = format!(
            "spec.evacuators: must be those of pod {}, which are {}, and not {}: leave it out and it is filled in",
            wanted.name,
            described(&resolved),
            described(&given)
        );
        verdict.refuse(Cause::Evacuators, message);
    }
    verdict
}

fn describe(evacuator: &haulout_api_types::evacuation::Evacuator) -> String {
    format!("{} ({})", evacuator.evacuator_class, evacuator.annotation().1)
}

/// Judges a change of the status. Whoever may write it at all is an evacuator or the evacuation controller, and
/// only the latter hands over control and counts evictions.
pub fn judge_status(old: &Evacuation, new: &Evacuation, by_controller: bool, now: Timestamp) -> Verdict {
    let nothing = EvacuationStatus::default();
    let (old, new) = (old.status.as_ref().unwrap_or(&nothing), new.status.as_ref().unwrap_or(&nothing));
    let mut verdict = Verdict::default();
    if !by_controller {
        let own = "patch only the fields that are your own";
        let done = "an evacuator that is done sets status.activeEvacuatorCompleted";
        for (changed, field, instead) in [
            (old.active_evacuator_class != new.active_evacuator_class, "activeEvacuatorClass", done),
            (old.failed_eviction_counter != new.failed_eviction_counter, "failedEvictionCounter", own),
            (old.last_failed_eviction_time != new.last_failed_eviction_time, "lastFailedEvictionTime", own),
        ] {
            if changed {
                let message =
                    format!("status.{field}: only the evacuation controller may change it; {instead}");
                verdict.refuse(Cause::Status, message);
            }
        }
    }
    if let Some(progress) = &new.evacuation_progress_timestamp
        && new.evacuation_progress_timestamp != old.evacuation_progress_timestamp
        && progress.0.duration_since(now) > MAX_AHEAD
    {
        let ahead = progress.0.duration_since(now).as_secs();
        let message = format!(
            "status.evacuationProgressTimestamp: {} is {ahead} s in the future, and at most {} s are allowed: set \
             it to the present time, and check the clock",
            progress.0,
            MAX_AHEAD.as_secs()
        );
        verdict.refuse(Cause::FutureTime, message);
    }
    verdict
}

/// Whether removing it depends on its pod.
pub fn forbids_cancellation(old: &Evacuation) -> bool {
    old.cancellation_policy() == CancellationPolicy::Forbid
}

/// Whether this change takes the last instigator away from an evacuation that cannot be cancelled while its pod exists.
pub fn takes_last_instigator(old: &Evacuation, new: &Evacuation) -> bool {
    forbids_cancellation(old) && old.instigators().next().is_some() && new.instigators().next().is_none()
}

/// Judges the removal of an Evacuation, or of its last instigator's finalizer, which lets it go once somebody has deleted
/// it. `pod` has its pod's name now.
pub fn judge_cancellation(old: &Evacuation, pod: Option<&ObjectMeta>, what: &str) -> Verdict {
    let wanted = &old.spec.pod_ref;
    if !is_meant(pod, old) || !forbids_cancellation(old) {
        return Verdict::default();
    }
    let evacuator = old.status.as_ref().and_then(|status| status.active_evacuator_class.as_deref());
    let message = format!(
        "status.evacuationCancellationPolicy: Forbid, so {what} while pod {} exists; it goes by itself once the pod is \
         gone{}",
        wanted.name,
        evacuator.map(|class| format!(", ask {class} otherwise")).unwrap_or_default()
    );
    Verdict::refused(Cause::CancellationForbidden, message)
}

/// Whether this is the pod that the Evacuation is about, and not one that has got its name since.
pub fn is_meant(pod: Option<&ObjectMeta>, evacuation: &Evacuation) -> bool {
    pod.is_some_and(|pod| pod.uid.as_ref() == Some(&evacuation.spec.pod_ref.uid))
}

/// What a user should know who deletes an Evacuation that goes on: who wants it, and how each of them lets go. One warning
/// for each, because long ones are cut. `maintenances` drain the pod's node.
pub fn still_wanted(old: &Evacuation, maintenances: &[String]) -> Verdict {
    let mut verdict = Verdict::default();
    let pod = &old.spec.pod_ref.name;
    for name in old.instigators() {
        let how = match name {
            instigator::NODE_MAINTENANCE => {
                let them = match maintenances {
                    [] => "its NodeMaintenance".to_owned(),
                    [one] => format!("NodeMaintenance {one}"),
                    all => format!("NodeMaintenances {}", listed(all, NAMED)),
                };
                format!("complete or delete {them}, or label the pod {DRAIN_LABEL}=skip")
            }
            instigator::TAINT_MANAGER => "remove the NoExecute taint from its node".to_owned(),
            other => format!("remove the finalizer {}", instigators::finalizer(other)),
        };
        verdict.warn(format!(
            "{name} still wants pod {pod} to leave, so the evacuation goes on; to cancel it, {how}"
        ));
    }
    verdict
}

#[cfg(test)]
mod tests;

//! The messages of Evacuations and events.

use std::sync::Arc;

use haulout_api_types::bounded;
use jiff::{SignedDuration, Timestamp};

use crate::decide::Obstacle;
use crate::decide::View;
use crate::objects::{Deployment, Pod, Problem, Strategy};

/// The number of pods that a message names.
const MAX_NAMED: usize = 3;
/// The beginning of the message of a pod that waits for others.
pub const IN_QUEUE: &str = "In the queue";

/// As many pods are available as before.
pub fn replaced(deployment: &Deployment, target: i32) -> String {
    let Deployment { name, replicas, .. } = deployment;
    format!(
        "Deployment {name} has {target} of {replicas} pods available without this one: it can be evicted."
    )
}

/// The Deployment cannot replace pods.
pub fn unsupported(deployment: &Deployment) -> String {
    let Deployment { name, .. } = deployment;
    if deployment.replicas == 0 {
        format!("Deployment {name} is scaled to 0: the pod is evicted without a replacement.")
    } else if deployment.strategy == Strategy::Recreate {
        format!("Deployment {name} has the strategy Recreate: the pod is evicted without a replacement.")
    } else {
        format!("Deployment {name} has maxSurge 0: the pod is evicted without a replacement.")
    }
}

/// The Deployment is being deleted.
pub fn deleted(deployment: &Deployment) -> String {
    format!("Deployment {} is being deleted: the pod is evicted without a replacement.", deployment.name)
}

/// An annotation asks for evictions.
pub fn opted_out(deployment: &Deployment, by_namespace: bool) -> String {
    let what = if by_namespace {
        format!("Namespace {}", deployment.namespace)
    } else {
        format!("Deployment {}", deployment.name)
    };
    let annotation = haulout_api_types::names::REPLACE_ANNOTATION;
    format!("{what} has the annotation {annotation}=false: the pod is evicted without a replacement.")
}

/// The pod belongs to no Deployment.
pub fn no_deployment(owner: Option<&str>) -> String {
    let owner = owner.map(|owner| format!("Its ReplicaSet belongs to {owner}, not to a Deployment"));
    let owner = owner.unwrap_or_else(|| "It does not belong to a Deployment".to_owned());
    format!("{owner}: the pod is evicted without a replacement.")
}

/// The pod is not ready.
pub fn not_ready(pod: &Pod) -> String {
    format!("Pod {} is not ready, so no replacement is needed: it can be evicted.", pod.name)
}

/// The pod has finished.
pub fn finished(pod: &Pod) -> String {
    format!("Pod {} has finished, so no replacement is needed: it can be evicted.", pod.name)
}

/// The API server rejects the patch that moves the pod.
pub fn rejected(pod: &Pod, problem: &str) -> String {
    format!("the API server rejects the change of the owner or annotations of pod {}: {problem}", pod.name)
}

/// The API server fails to change the owner of a pod. The request is retried.
pub fn failing(pod: &Pod, problem: &str) -> String {
    bounded::text(&format!("Failed to change the owner of pod {}, retrying: {problem}", pod.name))
}

/// Something keeps replacements from starting.
pub fn obstructed(deployment: &Deployment, text: &str) -> String {
    bounded::text(&format!(
        "Deployment {} cannot replace the pod: {text}. The pod is evicted without a replacement.",
        deployment.name
    ))
}

/// The replacement is not available in time.
pub fn gave_up(
    deployment: &Deployment,
    starting: &[&Arc<Pod>],
    failure: Option<&str>,
    obstacle: Option<&Obstacle>,
    waited: SignedDuration,
) -> String {
    let what = match (obstacle, failure) {
        (Some(Obstacle::Room { text, .. } | Obstacle::Structural(text)), _) => text.clone(),
        (None, Some(failure)) if starting.is_empty() => format!("no pod can be created: {failure}"),
        (None, _) => names(deployment, starting),
    };
    bounded::text(&format!(
        "Deployment {} has no available replacement after {} s: {what}. The pod is evicted without one.",
        deployment.name,
        waited.as_secs()
    ))
}

/// Waits for pods to become available. `failure` is why the ReplicaSet creates none.
pub fn starting(deployment: &Deployment, starting: &[&Arc<Pod>], failure: Option<&str>) -> String {
    if starting.is_empty() {
        let failure =
            failure.map(|failure| format!(" The ReplicaSet reports: {failure}")).unwrap_or_default();
        let name = &deployment.name;
        return bounded::text(&format!(
            "Waiting until Deployment {name} has a replacement for the pod.{failure}"
        ));
    }
    format!("Waiting until the replacement is available: {}.", names(deployment, starting))
}

/// Enough pods are available, but the Deployment has just changed.
pub fn not_observed(deployment: &Deployment) -> String {
    format!(
        "Waiting until the Deployment controller has observed the change of Deployment {}.",
        deployment.name
    )
}

/// Waits for the ReplicaSet controller.
pub fn not_up_to_date() -> String {
    "Waiting until the ReplicaSet of the pod is up to date: until then, it may be about to delete the pod."
        .into()
}

/// Waits for a node with room.
pub fn no_room(starting: &[&Arc<Pod>], text: &str, until: Timestamp) -> String {
    let name = starting.first().map(|pod| pod.name.as_ref()).unwrap_or_default();
    bounded::text(&format!(
        "Replacement {name} is pending: {text}. Add nodes that can run it, or make some schedulable; the pod is evicted without a replacement at {until}."
    ))
}

fn names(deployment: &Deployment, starting: &[&Arc<Pod>]) -> String {
    if starting.is_empty() {
        return format!("the ReplicaSet of Deployment {} creates no pod", deployment.name);
    }
    let name = |pod: &&Arc<Pod>| match pod.problem.as_deref() {
        Some(Problem::Unschedulable(..)) => format!("pod {} is pending", pod.name),
        Some(Problem::Waiting(reason)) => format!("pod {} waits ({reason})", pod.name),
        None if pod.ready.is_some() => format!("pod {} is ready, but not for minReadySeconds yet", pod.name),
        None => format!("pod {} is starting", pod.name),
    };
    bounded::list(&starting.iter().map(name).collect::<Vec<_>>(), MAX_NAMED)
}

/// Waits until others have left.
pub fn queued(view: &View, place: usize) -> String {
    let Deployment { name, max_surge, .. } = &view.deployment;
    let moved = view.pods.iter().filter(|pod| pod.pod.is_moved() && !pod.pod.leaving);
    let names: Vec<_> = moved.map(|pod| pod.pod.name.as_ref()).collect();
    format!(
        "{IN_QUEUE} of Deployment {name}, place {place}: at most {max_surge} (maxSurge) can be replaced at the same time, now {}.",
        bounded::list(&names, MAX_NAMED)
    )
}

//! What keeps a node from being drained, in words that say what to do about it.

use std::sync::Arc;

use haulout_api_types::names::{EXCLUDE_VOLUME_DETACH_ANNOTATION, event, reason};
use jiff::Timestamp;

use crate::announce;
use crate::facts::{Blocked, PodKey, Return, Returned};

/// Something that keeps a node from being drained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocker {
    /// The pod, unless it is a volume or the node itself.
    pub pod: Option<PodKey>,
    /// In one word, one of `names::reason`.
    pub reason: Arc<str>,
    /// For people.
    pub message: Arc<str>,
    /// Since when, where that is known.
    pub since: Option<Timestamp>,
}

impl Blocker {
    /// Of a pod, or of the node itself.
    pub fn new(pod: Option<&PodKey>, blocked: &Blocked) -> Self {
        let Blocked { reason, message, since } = blocked.clone();
        Self { pod: pod.cloned(), reason, message, since }
    }
}

/// A pod that is terminating for longer than its grace period, which ended at `deadline`.
pub(crate) fn terminating(deadline: Timestamp) -> Blocked {
    let message = "it is terminating and its grace period is over: look at its finalizers and at the kubelet of its node";
    Blocked { reason: reason::TERMINATING.into(), message: message.into(), since: Some(deadline) }
}

pub(crate) fn rule_unreadable(rule: &str) -> Blocked {
    let message = format!(
        "the DrainRule {rule} cannot be read and may say that this pod stays: fix or delete it, its event {} says what is wrong",
        event::NOT_FOLLOWED
    );
    Blocked { reason: reason::DRAIN_RULE_UNREADABLE.into(), message: message.into(), since: None }
}

pub(crate) fn namespace_unknown(rule: &str) -> Blocked {
    let message = format!(
        "the DrainRule {rule} may say that this pod stays, and the labels of its namespace are not known yet: if this lasts, look whether the maintenance controller can watch namespaces"
    );
    Blocked { reason: reason::NAMESPACE_UNKNOWN.into(), message: message.into(), since: None }
}

pub(crate) fn waits_for_completion() -> Blocked {
    let message = "a drain rule or its label cluster.x-k8s.io/drain says to wait until it has finished";
    Blocked { reason: reason::WAITING_FOR_COMPLETION.into(), message: message.into(), since: None }
}

pub(crate) fn returns(returned: &Returned, now: Timestamp) -> Blocked {
    let (how, remedy) = match returned.how {
        Return::ToleratesCordon => {
            ("it tolerates the cordon and was", "remove its toleration of node.kubernetes.io/unschedulable")
        }
        Return::Uncordoned => {
            ("the node was uncordoned during the drain and the pod", "find out who uncordons the node")
        }
        Return::BypassesScheduler => ("it was", "stop what puts it there past the scheduler"),
    };
    let until = (now < returned.until).then(|| {
        format!(
            "; so that it is not killed in a loop, it is asked to leave again at {until:.0}",
            until = returned.until
        )
    });
    let message = format!(
        "{how} put onto the node after the drain had begun{}: {remedy}, or let a DrainRule skip it",
        until.unwrap_or_default()
    );
    Blocked { reason: reason::RETURNS_TO_NODE.into(), message: message.into(), since: Some(returned.since) }
}

pub(crate) fn targets_too_large() -> Blocked {
    let message = format!(
        "the drain targets of its node need more than the {} bytes that an annotation of the node may take, and the pod is not among those that fit: complete the maintenances of the node, and use plans with fewer or shorter selectors",
        announce::MAX_BYTES
    );
    Blocked { reason: reason::DRAIN_TARGETS_TOO_LARGE.into(), message: message.into(), since: None }
}

pub(crate) fn no_node() -> Blocked {
    let message = "this pod of Haulout stays, because no node would take it that is schedulable and under no maintenance, and the drain needs it: add or uncordon a node with the labels and taints that suit it, or complete a maintenance; to drain the node around it, let a DrainRule skip it";
    Blocked { reason: reason::NO_NODE_FOR_CONTROLLER.into(), message: message.into(), since: None }
}

pub(crate) fn cordon_race(due: Timestamp) -> Blocked {
    let message = format!(
        "somebody makes the node schedulable again and again; it is cordoned again at {due:.0}, and no pod is asked to leave before: stop what uncordons the node, or complete the maintenance"
    );
    Blocked { reason: reason::CORDON_RACE.into(), message: message.into(), since: None }
}

pub(crate) fn node_missing() -> Blocked {
    let message = "the selector names this node and it does not exist: create it, or complete the maintenance and create one without it";
    Blocked { reason: reason::NODE_MISSING.into(), message: message.into(), since: None }
}

/// Volumes that are still attached. `until` is when the drain goes on without them.
pub(crate) fn volumes_attached<'a>(
    volumes: impl ExactSizeIterator<Item = &'a Arc<str>>,
    since: Option<Timestamp>,
    until: Option<Timestamp>,
) -> Blocked {
    let number = volumes.len();
    let mut names: Vec<&str> = volumes.take(10).map(AsRef::as_ref).collect();
    let more = format!("{} more", number - names.len());
    if number > names.len() {
        names.push(&more);
    }
    let what = if number == 1 { "volume is" } else { "volumes are" };
    let until = until.map(|until| format!("; the drain goes on without at {until:.0}"));
    let message = format!(
        "{number} {what} still attached though the pods have left: {}; look at the VolumeAttachments and the CSI driver, or annotate the node with {EXCLUDE_VOLUME_DETACH_ANNOTATION} to go on without{}",
        names.join(", "),
        until.unwrap_or_default()
    );
    Blocked { reason: reason::VOLUMES_ATTACHED.into(), message: message.into(), since }
}

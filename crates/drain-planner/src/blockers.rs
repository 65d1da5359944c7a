//! Messages of blockers: what blocks the drain of a node, and what to do.

use std::sync::Arc;

use haulout_api_types::names::{EXCLUDE_VOLUME_DETACH_ANNOTATION, event, reason};
use jiff::Timestamp;

use crate::announce;
use crate::facts::{Blocked, PodKey, ReturnCause, Returned};

/// Something that blocks the drain of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocker {
    /// The blocked pod; `None` if volumes or the node itself block the drain.
    pub pod: Option<PodKey>,
    /// The machine-readable reason, one of `names::reason`.
    pub reason: Arc<str>,
    /// The message for users.
    pub message: Arc<str>,
    /// Since when, if that is known.
    pub since: Option<Timestamp>,
}

impl Blocker {
    /// A blocker of a pod, or of the node itself.
    pub fn new(pod: Option<&PodKey>, blocked: &Blocked) -> Self {
        let Blocked { reason, message, since } = blocked.clone();
        Self { pod: pod.cloned(), reason, message, since }
    }
}

/// A pod that is still terminating after its grace period, which ended at `deadline`.
pub(crate) fn terminating(deadline: Timestamp) -> Blocked {
    let message = "the pod is terminating and its grace period is over; check its finalizers and the kubelet of its node";
    Blocked { reason: reason::TERMINATING.into(), message: message.into(), since: Some(deadline) }
}

pub(crate) fn rule_unreadable(rule: &str) -> Blocked {
    let message = format!(
        "DrainRule {rule} is unreadable and may exclude this pod; correct or delete the rule, its event {} has the error",
        event::UNREADABLE
    );
    Blocked { reason: reason::DRAIN_RULE_UNREADABLE.into(), message: message.into(), since: None }
}

pub(crate) fn namespace_unknown(rule: &str) -> Blocked {
    let message = format!(
        "DrainRule {rule} may exclude this pod, and the labels of its namespace are not known yet; if this persists, check whether the maintenance controller can watch namespaces"
    );
    Blocked { reason: reason::NAMESPACE_UNKNOWN.into(), message: message.into(), since: None }
}

pub(crate) fn waiting_for_completion() -> Blocked {
    let message = "a DrainRule or the pod's label cluster.x-k8s.io/drain requires waiting until the pod has finished; wait, or remove the label or the rule to evacuate the pod";
    Blocked { reason: reason::WAITING_FOR_COMPLETION.into(), message: message.into(), since: None }
}

pub(crate) fn returns(returned: &Returned, now: Timestamp) -> Blocked {
    let (cause, remedy) = match returned.cause {
        ReturnCause::ToleratesCordon => (
            "the pod tolerates the cordon and was",
            "remove its toleration of node.kubernetes.io/unschedulable",
        ),
        ReturnCause::Uncordoned => {
            ("the node was uncordoned during the drain and the pod was", "stop whatever uncordons the node")
        }
        ReturnCause::BypassesScheduler => {
            ("the pod was", "stop whatever creates it on this node without the scheduler")
        }
    };
    let until = (now < returned.until)
        .then(|| format!("; to avoid a loop, it is evacuated again at {until:.0}", until = returned.until));
    let message = format!(
        "{cause} created on the node after the drain started{}; {remedy}, or skip it with a DrainRule",
        until.unwrap_or_default()
    );
    Blocked { reason: reason::RETURNS_TO_NODE.into(), message: message.into(), since: Some(returned.since) }
}

pub(crate) fn targets_too_large() -> Blocked {
    let message = format!(
        "the drain targets of the node need more than the {} bytes available in its annotation, and the target of this pod does not fit; complete the maintenances of the node, and use plans with fewer or shorter selectors",
        announce::MAX_BYTES
    );
    Blocked { reason: reason::DRAIN_TARGETS_TOO_LARGE.into(), message: message.into(), since: None }
}

pub(crate) fn no_node_for_own_pod() -> Blocked {
    let message = "this pod of Haulout stays, because no other schedulable node without maintenance accepts it, and the drain needs it; add or uncordon a node with matching labels and taints, or complete a maintenance; to drain the node without this pod, skip it with a DrainRule";
    Blocked { reason: reason::NO_NODE_FOR_CONTROLLER.into(), message: message.into(), since: None }
}

pub(crate) fn cordon_race(due: Timestamp) -> Blocked {
    let message = format!(
        "the node is uncordoned repeatedly; it is cordoned again at {due:.0}, and no pod is evacuated before; stop whatever uncordons the node, or complete the maintenance"
    );
    Blocked { reason: reason::CORDON_RACE.into(), message: message.into(), since: None }
}

pub(crate) fn node_missing() -> Blocked {
    let message = "the selector names this node, but the node does not exist; create it, or complete the maintenance and create one without it";
    Blocked { reason: reason::NODE_MISSING.into(), message: message.into(), since: None }
}

/// Volumes that are still attached. At `until`, the drain continues without waiting for them.
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
    let until = until.map(|until| format!("; the drain continues without waiting at {until:.0}"));
    let message = format!(
        "{number} {what} still attached after the pods have left: {}; check the VolumeAttachments and the CSI driver, or annotate the node with {EXCLUDE_VOLUME_DETACH_ANNOTATION} to continue without waiting{}",
        names.join(", "),
        until.unwrap_or_default()
    );
    Blocked { reason: reason::VOLUMES_ATTACHED.into(), message: message.into(), since }
}

//! Decides whether one pod stays, waits or leaves, and why. The decision depends only on API objects and `now`, so that
//! every leader makes the same decision.

pub mod conflict;
mod reason;
mod stuck;

use std::collections::BTreeMap;

use haulout_api_types::node_maintenance::PodType;
use haulout_service_runtime::pods::{Pod, Toleration};
use jiff::{SignedDuration, Timestamp};

pub use self::reason::Reason;
use crate::policy::{Action, Policy};
use crate::state::watch_gap::Synced;
use crate::taint::{NO_EXECUTE, Taint};

/// The facts about a node that decisions need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// Its taints with the effect `NoExecute`.
    pub taints: Vec<Taint>,
    /// Its taint `node.kubernetes.io/out-of-service`, with any effect.
    pub out_of_service: Option<Taint>,
    /// Whether its condition `Ready` is true.
    pub ready: bool,
    /// Whether the Node cannot be parsed, so that these facts are unknown.
    pub unreadable: bool,
}

/// The input of a decision.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// Its node, if the node is known and has taints.
    pub node: Option<&'a NodeFacts>,
    /// The labels of its namespace; `None` if they are not known.
    pub namespace: Option<&'a BTreeMap<String, String>>,
    /// Whether the pod has an Evacuation with our instigator finalizer.
    pub evacuation: bool,
    /// The policy.
    pub policy: &'a Policy,
    /// Since when all watches are synced; `None` if one is interrupted, so that the view may be outdated.
    pub synced: Option<Synced>,
}

impl View<'_> {
    /// When a deadline of this taint takes effect, with the grace period after a watch gap.
    fn effective_deadline(&self, taint: &Taint, due: Timestamp) -> Timestamp {
        self.synced.map_or(due, |synced| synced.effective_deadline(taint, due))
    }
}

/// How a pod is removed, from harsh to gentle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RemovalAction {
    /// The pod is deleted without waiting for its node.
    ForceDelete,
    /// The pod is deleted.
    Delete,
    /// The pod is evicted.
    Evict,
    /// An Evacuation is requested.
    Evacuate,
}

impl RemovalAction {
    /// Its name, for logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ForceDelete => "ForceDelete",
            Self::Delete => "Delete",
            Self::Evict => "Evict",
            Self::Evacuate => "Evacuate",
        }
    }
}

/// The decision about a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The pod stays.
    Keep,
    /// The pod stays until missing information arrives.
    Hold,
    /// The pod stays until this time.
    Wait {
        /// When to decide again.
        until: Timestamp,
    },
    /// The pod has to leave now.
    Act {
        /// How it is removed.
        how: RemovalAction,
        /// Since when it has to leave.
        due: Timestamp,
        /// When a harsher action may become due.
        requeue_at: Option<Timestamp>,
    },
    /// The Evacuation that we requested continues.
    Leaving {
        /// When a harsher action may become due.
        requeue_at: Option<Timestamp>,
    },
}

impl Verdict {
    /// When to decide again if no event arrives before.
    pub fn requeue_at(&self) -> Option<Timestamp> {
        match *self {
            Self::Wait { until } => Some(until),
            Self::Act { requeue_at, .. } | Self::Leaving { requeue_at } => requeue_at,
            Self::Keep | Self::Hold => None,
        }
    }
}

/// A decision and its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The decision.
    pub verdict: Verdict,
    /// The reason.
    pub reason: Reason,
    /// Whether the Evacuation that we requested is no longer needed.
    pub release: bool,
}

/// Decides whether a pod stays or leaves.
pub fn decide(view: &View<'_>, now: Timestamp) -> Decision {
    let (verdict, reason) = evaluate(view, now);
    let may_stay = match verdict {
        Verdict::Keep => true,
        // During the grace period after a watch gap, an evacuation that has started continues.
        Verdict::Wait { .. } => !matches!(reason, Reason::WatchGapGrace(_)),
        Verdict::Hold | Verdict::Act { .. } | Verdict::Leaving { .. } => false,
    };
    // In a watch gap it is unknown whether the pod may stay. The Evacuation of a terminating pod ends with the pod.
    let release = view.evacuation && may_stay && view.synced.is_some() && !view.pod.terminating;
    Decision { verdict, reason, release }
}

fn evaluate(view: &View<'_>, now: Timestamp) -> (Verdict, Reason) {
    let View { pod, node: Some(node), policy, .. } = *view else {
        return (Verdict::Keep, Reason::NotTainted);
    };
    if node.unreadable {
        return (Verdict::Hold, Reason::NodeUnreadable);
    }
    if view.namespace.is_none() && policy.needs_namespaces() {
        return (Verdict::Hold, Reason::NamespaceUnknown);
    }
    if pod.terminating {
        return stuck::evaluate(view, node, now);
    }
    if pod.is_finished() {
        return (Verdict::Keep, Reason::Finished);
    }
    let mut keep_reason = Reason::NotTainted;
    let mut deadlines = Vec::new();
    for taint in &node.taints {
        match deadline(view, taint) {
            Ok(deadline) => deadlines.push(deadline),
            Err(reason) => keep_reason = reason,
        }
    }
    let (due, later): (Vec<_>, Vec<_>) =
        deadlines.into_iter().partition(|deadline| deadline.effective <= now);
    // The harshest action that is due applies: a deletion does not wait for an evacuation.
    if let Some(deadline) = due.into_iter().min_by_key(|deadline| (deadline.how, deadline.due)) {
        if view.synced.is_none() {
            return (Verdict::Hold, Reason::WatchGap);
        }
        let Deadline { how, due, .. } = deadline;
        let requeue_at = later.iter().filter(|other| other.how < how).map(|other| other.effective).min();
        let continues = how == RemovalAction::Evacuate && view.evacuation;
        let verdict =
            if continues { Verdict::Leaving { requeue_at } } else { Verdict::Act { how, due, requeue_at } };
        return (verdict, deadline.reason());
    }
    let until = later.iter().map(|deadline| deadline.effective).min();
    match until.zip(later.into_iter().min_by_key(|deadline| deadline.due)) {
        Some((until, deadline)) => (Verdict::Wait { until }, deadline.waiting(now)),
        None => (Verdict::Keep, keep_reason),
    }
}

/// The deadline that one taint sets for a pod.
struct Deadline<'a> {
    taint: &'a Taint,
    how: RemovalAction,
    tolerated: bool,
    /// When the pod has to leave.
    due: Timestamp,
    /// When the deadline takes effect, with the grace period after a watch gap.
    effective: Timestamp,
}

/// The deadline that a taint sets for the pod, or why there is none.
fn deadline<'a>(view: &View<'_>, taint: &'a Taint) -> Result<Deadline<'a>, Reason> {
    let pod = view.pod;
    let Some(tolerated) = toleration_duration(&pod.tolerations, taint) else { return Err(Reason::Tolerated) };
    let how = match view.policy.removal(taint, &pod.labels, &view.namespace).action {
        Action::Ignore => return Err(Reason::Ignored(taint.clone())),
        Action::Evict => RemovalAction::Evict,
        // DaemonSet and static pods are not evacuated, because they would be recreated on the node at once.
        Action::Evacuate if pod.pod_type == PodType::Default => RemovalAction::Evacuate,
        Action::Delete | Action::Evacuate => RemovalAction::Delete,
    };
    // A pod that was bound without the scheduler may have been on its node since its creation.
    let arrival = pod.scheduled_at().or(pod.created_at());
    let start = arrival.map_or(taint.since, |arrival| arrival.max(taint.since));
    let due = after(start, tolerated);
    Ok(Deadline {
        taint,
        how,
        tolerated: !tolerated.is_zero(),
        due,
        effective: view.effective_deadline(taint, due),
    })
}

impl Deadline<'_> {
    fn reason(&self) -> Reason {
        let (taint, due) = (self.taint.clone(), self.due);
        if self.tolerated { Reason::ToleratedUntil { taint, due } } else { Reason::NotTolerated(taint) }
    }

    fn waiting(&self, now: Timestamp) -> Reason {
        if self.due <= now { Reason::WatchGapGrace(self.taint.clone()) } else { self.reason() }
    }
}

/// How long these tolerations tolerate the taint; `None` is forever. If several match, the first one applies, as in
/// kube-controller-manager. A pod can thus tolerate one taint forever and all others for a minute.
fn toleration_duration(tolerations: &[Toleration], taint: &Taint) -> Option<SignedDuration> {
    let matches = |toleration: &&Toleration| toleration.matches(&taint.key, &taint.value, NO_EXECUTE);
    let seconds = tolerations.iter().find(matches).map_or(Some(0), |used| used.seconds);
    seconds.map(|seconds| SignedDuration::from_secs(seconds.max(0)))
}

fn after(start: Timestamp, time: SignedDuration) -> Timestamp {
    start.saturating_add(time).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

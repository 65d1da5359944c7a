//! What happens to one pod: it stays, waits, or leaves, and why. Everything that this depends on is either
//! stored in API objects or given as `now`, so that any process at any time comes to the same answer.

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

/// What matters of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// Its taints with the effect `NoExecute`.
    pub taints: Vec<Taint>,
    /// Its taint `node.kubernetes.io/out-of-service`, whatever the effect.
    pub out_of_service: Option<Taint>,
    /// Whether its condition `Ready` is true.
    pub ready: bool,
    /// Whether nothing of this is known, because the Node cannot be read.
    pub unreadable: bool,
}

/// All that a decision depends on.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// Its node, if that has been seen and has taints.
    pub node: Option<&'a NodeFacts>,
    /// The labels of its namespace; `None` if they are not known.
    pub namespace: Option<&'a BTreeMap<String, String>>,
    /// Whether there is an Evacuation for it that we asked for.
    pub evacuation: bool,
    /// How pods leave.
    pub policy: &'a Policy,
    /// Since when all watches are synced; `None` if one is interrupted, so that this may be out of date.
    pub synced: Option<Synced>,
}

impl View<'_> {
    /// When the pod may have to leave because of a deadline by this taint.
    fn settle(&self, taint: &Taint, due: Timestamp) -> Timestamp {
        self.synced.map_or(due, |synced| synced.settle(taint, due))
    }
}

/// How a pod is made to leave; later ones are gentler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum How {
    /// Deleted without waiting for its node.
    ForceDelete,
    /// Deleted.
    Delete,
    /// Evicted.
    Evict,
    /// Evacuated.
    Evacuate,
}

impl How {
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

/// What happens to a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It stays.
    Keep,
    /// It stays until something that is not known becomes known.
    Hold,
    /// It stays until this time.
    Wait {
        /// When to decide again.
        until: Timestamp,
    },
    /// It has to leave now.
    Act {
        /// In this way.
        how: How,
        /// Since this time.
        due: Timestamp,
        /// When it may have to leave in a harsher way.
        again: Option<Timestamp>,
    },
    /// Its evacuation, which we asked for, goes on.
    Leaving {
        /// When it may have to leave in a harsher way.
        again: Option<Timestamp>,
    },
}

impl Verdict {
    /// When to decide again if nothing changes.
    pub fn again(&self) -> Option<Timestamp> {
        match *self {
            Self::Wait { until } => Some(until),
            Self::Act { again, .. } | Self::Leaving { again } => again,
            Self::Keep | Self::Hold => None,
        }
    }
}

/// What happens to a pod, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What happens.
    pub verdict: Verdict,
    /// Why.
    pub reason: Reason,
    /// Whether the Evacuation that we asked for is not wanted any longer.
    pub release: bool,
}

/// Decides.
pub fn decide(view: &View<'_>, now: Timestamp) -> Decision {
    let (verdict, reason) = judge(view, now);
    let may_stay = match verdict {
        Verdict::Keep => true,
        // Until nodes have reported, an evacuation that has begun goes on.
        Verdict::Wait { .. } => !matches!(reason, Reason::Settling(_)),
        Verdict::Hold | Verdict::Act { .. } | Verdict::Leaving { .. } => false,
    };
    // In a gap nobody knows whether the pod may stay, and a pod that terminates takes its Evacuation with it.
    let release = view.evacuation && may_stay && view.synced.is_some() && !view.pod.terminating;
    Decision { verdict, reason, release }
}

fn judge(view: &View<'_>, now: Timestamp) -> (Verdict, Reason) {
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
        return stuck::judge(view, node, now);
    }
    if pod.is_finished() {
        return (Verdict::Keep, Reason::Finished);
    }
    let mut spared = Reason::NotTainted;
    let mut demands = Vec::new();
    for taint in &node.taints {
        match demand(view, taint) {
            Ok(demand) => demands.push(demand),
            Err(reason) => spared = reason,
        }
    }
    let (due, later): (Vec<_>, Vec<_>) = demands.into_iter().partition(|demand| demand.settled <= now);
    // The harshest of what is due: a taint that wants a pod gone does not wait for one that asks it to go.
    if let Some(demand) = due.into_iter().min_by_key(|demand| (demand.how, demand.due)) {
        if view.synced.is_none() {
            return (Verdict::Hold, Reason::WatchGap);
        }
        let Demand { how, due, .. } = demand;
        let again = later.iter().filter(|other| other.how < how).map(|other| other.settled).min();
        let goes_on = how == How::Evacuate && view.evacuation;
        let verdict = if goes_on { Verdict::Leaving { again } } else { Verdict::Act { how, due, again } };
        return (verdict, demand.reason());
    }
    let until = later.iter().map(|demand| demand.settled).min();
    match until.zip(later.into_iter().min_by_key(|demand| demand.due)) {
        Some((until, demand)) => (Verdict::Wait { until }, demand.waiting(now)),
        None => (Verdict::Keep, spared),
    }
}

/// What one taint wants of a pod.
struct Demand<'a> {
    taint: &'a Taint,
    how: How,
    tolerated: bool,
    /// From when on the pod has to leave.
    due: Timestamp,
    /// When that can be held against it.
    settled: Timestamp,
}

/// What a taint wants of the pod, or why it wants nothing.
fn demand<'a>(view: &View<'_>, taint: &'a Taint) -> Result<Demand<'a>, Reason> {
    let pod = view.pod;
    let Some(tolerated) = tolerance(&pod.tolerations, taint) else { return Err(Reason::Tolerated) };
    let how = match view.policy.removal(taint, &pod.labels, &view.namespace).action {
        Action::Ignore => return Err(Reason::Ignored(taint.clone())),
        Action::Evict => How::Evict,
        // Nobody evacuates the others: their controllers put them back at once.
        Action::Evacuate if pod.pod_type == PodType::Default => How::Evacuate,
        Action::Delete | Action::Evacuate => How::Delete,
    };
    // One that was bound without the scheduler may have been on its node since it was created.
    let arrival = pod.scheduled_at().or(pod.created_at());
    let start = arrival.map_or(taint.since, |arrival| arrival.max(taint.since));
    let due = after(start, tolerated);
    Ok(Demand { taint, how, tolerated: !tolerated.is_zero(), due, settled: view.settle(taint, due) })
}

impl Demand<'_> {
    fn reason(&self) -> Reason {
        let (taint, due) = (self.taint.clone(), self.due);
        if self.tolerated { Reason::ToleratedUntil { taint, due } } else { Reason::NotTolerated(taint) }
    }

    fn waiting(&self, now: Timestamp) -> Reason {
        if self.due <= now { Reason::Settling(self.taint.clone()) } else { self.reason() }
    }
}

/// How long these tolerations tolerate the taint; `None` is for ever. Where several match, the first one counts, as it
/// does in kube-controller-manager: that is how a pod says both "this taint for ever" and "any other for a minute".
fn tolerance(tolerations: &[Toleration], taint: &Taint) -> Option<SignedDuration> {
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

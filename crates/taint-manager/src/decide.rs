//! What happens to one pod: it stays, waits, or leaves, and why. Everything that this depends on is either
//! stored in API objects or given as `now`, so that any process at any time comes to the same answer.

pub mod conflict;
mod reason;
mod stuck;

use std::collections::BTreeMap;

use haulout_api_types::node_maintenance::PodType;
use haulout_service_runtime::pods::Pod;
use jiff::{SignedDuration, Timestamp};

use crate::policy::{Action, Policy};
use crate::sight::Sight;
use crate::taint::Taint;
use crate::toleration::{Tolerance, tolerance};

pub use self::reason::Reason;

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
    /// Whether this is the present.
    pub sight: Sight,
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
        /// When to decide anew.
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
    /// When to decide anew if nothing changes.
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
pub struct Decision<'a> {
    /// What happens.
    pub verdict: Verdict,
    /// Why.
    pub reason: Reason<'a>,
    /// Whether the Evacuation that we asked for is not wanted any longer.
    pub release: bool,
}

/// Decides.
pub fn decide<'a>(view: &View<'a>, now: Timestamp) -> Decision<'a> {
    let (verdict, reason) = judge(view, now);
    let may_stay = match verdict {
        Verdict::Keep => true,
        // Until nodes have reported, an evacuation that has begun goes on.
        Verdict::Wait { .. } => !matches!(reason, Reason::Settling { .. }),
        Verdict::Hold | Verdict::Act { .. } | Verdict::Leaving { .. } => false,
    };
    // Who does not see the present does not know that the pod may stay, and what is on its way out takes its
    // Evacuation with it.
    let release = view.evacuation && may_stay && view.sight != Sight::Blind && !view.pod.terminating;
    Decision { verdict, reason, release }
}

fn judge<'a>(view: &View<'a>, now: Timestamp) -> (Verdict, Reason<'a>) {
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
        let harsher = later.iter().filter(|other| other.how < demand.how).map(|other| other.settled);
        let again = harsher.min();
        let verdict = match view.sight {
            Sight::Blind => return (Verdict::Hold, Reason::Blind),
            Sight::Clear { .. } if demand.how == How::Evacuate && view.evacuation => {
                Verdict::Leaving { again }
            }
            Sight::Clear { .. } => Verdict::Act { how: demand.how, due: demand.due, again },
        };
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
fn demand<'a>(view: &View<'a>, taint: &'a Taint) -> Result<Demand<'a>, Reason<'a>> {
    let pod = view.pod;
    let seconds = match tolerance(&pod.tolerations, taint) {
        Tolerance::Forever => return Err(Reason::Tolerated),
        Tolerance::Seconds(seconds) => seconds,
        Tolerance::None => 0,
    };
    let how = match view.policy.removal(taint, &pod.labels, &view.namespace).action {
        Action::Ignore => return Err(Reason::Ignored { taint }),
        Action::Evict => How::Evict,
        // Nobody evacuates the others: their controllers put them back at once.
        Action::Evacuate if pod.pod_type == PodType::Default => How::Evacuate,
        Action::Delete | Action::Evacuate => How::Delete,
    };
    let start = arrival(pod).map_or(taint.since, |arrival| arrival.max(taint.since));
    let due = after(start, SignedDuration::from_secs(seconds));
    Ok(Demand { taint, how, tolerated: seconds > 0, due, settled: view.sight.settle(taint, due) })
}

impl<'a> Demand<'a> {
    fn reason(&self) -> Reason<'a> {
        let (taint, due) = (self.taint, self.due);
        if self.tolerated { Reason::ToleratedUntil { taint, due } } else { Reason::NotTolerated { taint } }
    }

    fn waiting(&self, now: Timestamp) -> Reason<'a> {
        let taint = self.taint;
        if self.due <= now { Reason::Settling { taint } } else { self.reason() }
    }
}

/// Since when the pod is on its node. One that was bound without the scheduler may have been since it was
/// created.
fn arrival(pod: &Pod) -> Option<Timestamp> {
    pod.scheduled_at().or(pod.created_at())
}

fn after(start: Timestamp, time: SignedDuration) -> Timestamp {
    start.saturating_add(time).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;

//! What the planner keeps of a node: who maintains it, how far each drain has come there, and what the last look at it
//! found.

use std::collections::BTreeSet;
use std::sync::Arc;

use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::{MaintenanceOnNode, Stage};
use jiff::SignedDuration;

use crate::assess::Assessment;
use crate::facts::NodeFacts;
use crate::plan::StepNumber;
use crate::planner::Id;

/// Whether a node is to be cordoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cordon {
    /// No maintenance minds: it is as somebody else wants it.
    Unmanaged,
    /// A maintenance in stage Cordon or Drain wants it so.
    Wanted,
    /// It is to be made schedulable, whoever cordoned it.
    Unwanted,
}

/// How far one maintenance has come with the drain of a node.
#[derive(Clone, Debug)]
pub(crate) struct Drain {
    pub id: Id,
    /// The step that it has reached here; `None` until the node was brought up to it.
    pub at: Option<StepNumber>,
    /// The maintenances that are ahead of it here.
    pub forwarded_by: Vec<Id>,
    /// Whether one that has let go of the node is.
    pub forwarded_by_past: bool,
}

/// A node.
#[derive(Debug)]
pub(crate) struct NodeRecord<L> {
    pub facts: NodeFacts<L>,
    /// All maintenances that select it, oldest first.
    pub members: Vec<Id>,
    pub cordon: Cordon,
    /// Those of them that drain it, oldest first.
    pub drains: Vec<Drain>,
    pub targets: DrainTargets,
    /// The maintenances that helped to reach the targets and drain the node no longer.
    pub past: Vec<MaintenanceOnNode>,
    /// Whether its targets do not fit into its annotation.
    pub too_large: bool,
    /// How long its volumes are waited for; `None` if as long as it takes.
    pub volume_timeout: Option<SignedDuration>,
    /// Whether others drain it than when its targets were last raised.
    pub reassigned: bool,
    /// Targets that won a tie and are to be added.
    pub extra: Option<Arc<DrainTargets>>,
    pub assessment: Assessment,
}

impl<L> NodeRecord<L> {
    pub fn new(facts: NodeFacts<L>) -> Self {
        Self {
            facts,
            members: Vec::new(),
            cordon: Cordon::Unmanaged,
            drains: Vec::new(),
            targets: DrainTargets::default(),
            past: Vec::new(),
            too_large: false,
            volume_timeout: None,
            reassigned: false,
            extra: None,
            assessment: Assessment::default(),
        }
    }

    /// Whether it is cordoned and nothing is left on it that has to leave.
    pub fn is_drained(&self) -> bool {
        !self.drains.is_empty() && self.assessment.marks.cordoned && self.assessment.counts.left == 0
    }

    /// Whether new pods can come here: it is schedulable, and no maintenance wants it not to be.
    pub fn is_open(&self) -> bool {
        self.cordon != Cordon::Wanted && !self.facts.cordoned
    }

    /// The maintenances among these that hold it according to its annotation.
    pub fn held_by<'a>(
        &'a self,
        uids: &'a BTreeSet<Arc<str>>,
    ) -> impl Iterator<Item = &'a MaintenanceOnNode> {
        let all = self.facts.maintenances.as_deref().into_iter().flatten();
        all.filter(|known| known.stage != Stage::Complete && uids.contains(known.uid.as_str()))
    }

    /// Whether one of these maintenances may drain it.
    pub fn may_be_drained_by(&self, uids: &BTreeSet<Arc<str>>) -> bool {
        self.held_by(uids).any(|known| known.stage == Stage::Drain)
            || (self.facts.maintenances.is_none() && self.is_held_back(uids))
    }

    /// Whether it keeps what it has, because one of these maintenances may hold it.
    pub fn is_held_back(&self, uids: &BTreeSet<Arc<str>>) -> bool {
        let unknown = self.facts.marked && self.facts.maintenances.is_none();
        self.held_by(uids).next().is_some() || (!uids.is_empty() && unknown)
    }
}

//! The planner's record of a node: which maintenances select it, how far each drain has progressed there, and the last
//! assessment.

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
    /// No maintenance needs it cordoned or schedulable.
    Unmanaged,
    /// A maintenance in stage Cordon or Drain needs it cordoned.
    Wanted,
    /// It has to be made schedulable, no matter who cordoned it.
    Unwanted,
}

/// The progress of one maintenance with the drain of a node.
#[derive(Clone, Debug)]
pub(crate) struct Drain {
    pub id: Id,
    /// The step that it has reached on this node; `None` until the node has been advanced.
    pub at: Option<StepNumber>,
    /// The maintenances that are ahead of it here.
    pub forwarded_by: Vec<Id>,
    /// Whether a maintenance that no longer drains the node is ahead of it.
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
    /// The maintenances that reached some of the targets and no longer drain the node.
    pub past: Vec<MaintenanceOnNode>,
    /// Whether its targets are too large for its annotation.
    pub too_large: bool,
    /// How long the drain waits for its volumes; `None` means no limit.
    pub volume_timeout: Option<SignedDuration>,
    /// Whether the set of draining maintenances has changed since its targets were last raised.
    pub reassigned: bool,
    /// Targets to be added, because their maintenance has won a tie.
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

    /// Whether it is cordoned and nothing that has to leave remains on it.
    pub fn is_drained(&self) -> bool {
        !self.drains.is_empty()
            && self.assessment.hold_state.cordoned
            && self.assessment.counts.remaining == 0
    }

    /// Whether it accepts new pods: it is schedulable, and no maintenance needs it cordoned.
    pub fn is_open(&self) -> bool {
        self.cordon != Cordon::Wanted && !self.facts.cordoned
    }

    /// The maintenances among these that hold the node according to its annotation.
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

    /// Whether it is not released, because one of these maintenances may hold it.
    pub fn is_held_back(&self, uids: &BTreeSet<Arc<str>>) -> bool {
        let unknown = self.facts.has_markers && self.facts.maintenances.is_none();
        self.held_by(uids).next().is_some() || (!uids.is_empty() && unknown)
    }
}

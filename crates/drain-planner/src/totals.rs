//! Sums over the nodes of a maintenance, updated whenever one of its nodes is assessed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use haulout_api_types::drain_plan::EntryMatcher;
use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::DrainPlanEntry;
use jiff::Timestamp;

use crate::assess::{Assessment, Counts, DrainAssessment};
use crate::plan::{Plan, StepNumber};
use crate::planner::Id;

#[derive(Default)]
pub(crate) struct Totals {
    /// Number of pods and volumes that each step selects first.
    steps: Vec<u32>,
    pub counts: Counts,
    /// Number of targeted pods and volumes that this maintenance itself has reached.
    pub own: u32,
    pub drained_nodes: BTreeSet<Arc<str>>,
    pub cordoned_nodes: u32,
    /// Number of nodes that still have markers or Evacuations although no maintenance holds or drains them.
    pub unreleased_nodes: u32,
    /// Nodes that somebody uncordons repeatedly, with the time when they are cordoned again.
    pub cordons_due: BTreeMap<Arc<str>, Timestamp>,
    /// The maintenances that limit it, with the number of nodes.
    pub limiters: BTreeMap<Id, u32>,
    /// Number of unreleased nodes that must stay so.
    pub held_back_nodes: u32,
    /// The maintenances that are ahead of it, with the number of nodes.
    pub forwarded_by: BTreeMap<Id, u32>,
    /// The same for maintenances that no longer drain the node, by name.
    pub forwarded_by_past: BTreeMap<Arc<str>, u32>,
    /// For each slot of the plan, the number of nodes by the priority that they have reached.
    reach: Vec<BTreeMap<Option<i32>, u32>>,
    /// Nodes with skipped pods.
    pub skipped_nodes: BTreeSet<Arc<str>>,
    pub blocked_nodes: BTreeSet<Arc<str>>,
    /// Nodes with rejected writes.
    pub nodes_with_failed_writes: BTreeSet<Arc<str>>,
    /// Nodes with pods that are leaving.
    pub leaving_nodes: BTreeSet<Arc<str>>,
    pub reasons: BTreeMap<Arc<str>, u32>,
    /// Nodes that wait, and on which it is the oldest draining maintenance.
    pub waiting_nodes: BTreeSet<Arc<str>>,
    pub evacuated: u32,
}

/// Whether a node's numbers are added or subtracted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sign {
    Plus,
    Minus,
}

impl Sign {
    fn apply(self, total: &mut u32, by: u32) {
        *total = match self {
            Self::Plus => total.saturating_add(by),
            Self::Minus => total.saturating_sub(by),
        };
    }

    /// Adds a node to a set if it belongs there, or removes it.
    fn apply_to_set(self, set: &mut BTreeSet<Arc<str>>, node: &Arc<str>, belongs: bool) {
        match self {
            Self::Plus if belongs => set.insert(node.clone()),
            _ => set.remove(node),
        };
    }

    /// Adds or subtracts one in a map that contains no zeros.
    pub fn apply_to<K: Ord>(self, map: &mut BTreeMap<K, u32>, key: K) {
        match (self, map.get_mut(&key)) {
            (Self::Plus, Some(total)) => *total = total.saturating_add(1),
            (Self::Plus, None) => drop(map.insert(key, 1)),
            (Self::Minus, Some(total)) if *total > 1 => *total -= 1,
            (Self::Minus, _) => drop(map.remove(&key)),
        }
    }
}

impl Totals {
    pub fn new(plan: &Plan, evacuated: u32) -> Self {
        Self {
            steps: vec![0; plan.steps()],
            reach: vec![BTreeMap::new(); plan.slots().count()],
            evacuated,
            ..Self::default()
        }
    }

    /// The current step: the first that still has pods or volumes, or the last.
    pub fn current(&self) -> StepNumber {
        let found = self.steps.iter().position(|remaining| *remaining > 0);
        StepNumber::try_from(found.unwrap_or(self.steps.len().saturating_sub(1))).unwrap_or(StepNumber::MAX)
    }

    /// Whether any step still has pods or volumes.
    pub fn has_work(&self) -> bool {
        self.steps.iter().any(|remaining| *remaining > 0)
    }

    pub fn count_reach(&mut self, sign: Sign, plan: &Plan, targets: &DrainTargets) {
        for (reach, (pod_type, selector)) in self.reach.iter_mut().zip(plan.slots()) {
            sign.apply_to(reach, targets.reach(pod_type, selector));
        }
    }

    /// Adds or subtracts the assessment of a node that the maintenance selects.
    pub fn add_to_member(&mut self, sign: Sign, node: &Arc<str>, found: &Assessment) {
        let hold_state = found.hold_state;
        sign.apply(&mut self.cordoned_nodes, u32::from(hold_state.cordoned));
        sign.apply(&mut self.unreleased_nodes, u32::from(hold_state.unreleased));
        sign.apply(&mut self.held_back_nodes, u32::from(hold_state.held_back));
        match (sign, hold_state.cordon_due) {
            (Sign::Plus, Some(due)) => drop(self.cordons_due.insert(node.clone(), due)),
            _ => drop(self.cordons_due.remove(node)),
        }
        for blocker in &found.failed_writes {
            sign.apply_to(&mut self.reasons, blocker.reason.clone());
        }
        sign.apply_to_set(&mut self.nodes_with_failed_writes, node, !found.failed_writes.is_empty());
    }

    /// Adds or subtracts the assessment of a node that the maintenance drains. `oldest` says whether it is the oldest
    /// maintenance that drains the node.
    pub fn add_to_drainer(
        &mut self,
        sign: Sign,
        node: &Arc<str>,
        found: &Assessment,
        drain: &DrainAssessment,
        oldest: bool,
    ) {
        for (step, by) in &drain.steps {
            if let Some(total) = self.steps.get_mut(usize::from(*step)) {
                sign.apply(total, *by);
            }
        }
        let (totals, counts) = (&mut self.counts, &found.counts);
        sign.apply(&mut totals.pending, counts.pending);
        sign.apply(&mut totals.evacuating, counts.evacuating);
        sign.apply(&mut totals.unsupported, counts.unsupported);
        sign.apply(&mut totals.skipped, counts.skipped);
        sign.apply(&mut totals.targeted, counts.targeted);
        sign.apply(&mut totals.completing, counts.completing);
        sign.apply(&mut totals.has_no_alternative, counts.has_no_alternative);
        sign.apply(&mut totals.volumes, counts.volumes);
        sign.apply(&mut totals.volumes_ignored, counts.volumes_ignored);
        sign.apply(&mut totals.remaining, counts.remaining);
        sign.apply(&mut totals.to_evacuate, counts.to_evacuate);
        for (total, by) in totals.waiting.each(&counts.waiting) {
            sign.apply(total, by);
        }
        sign.apply(&mut self.own, drain.own);
        for other in found.limiters(drain) {
            sign.apply_to(&mut self.limiters, *other);
        }
        for blocker in &found.blockers {
            sign.apply_to(&mut self.reasons, blocker.reason.clone());
        }
        let waits = oldest && counts.remaining > 0 && counts.moving() == 0;
        for (nodes, belongs) in [
            (&mut self.drained_nodes, found.hold_state.cordoned && counts.remaining == 0),
            (&mut self.blocked_nodes, !found.blockers.is_empty()),
            (&mut self.leaving_nodes, counts.waiting.total() > 0),
            (&mut self.skipped_nodes, counts.skipped > 0),
            (&mut self.waiting_nodes, waits),
        ] {
            sign.apply_to_set(nodes, node, belongs);
        }
    }

    /// The lowest targets among all nodes, as entries with the plan's own types and selectors.
    pub fn reached(&self, plan: &Plan) -> Vec<DrainPlanEntry> {
        let lowest = self.reach.iter().zip(plan.slots()).filter_map(|(reach, (pod_type, selector))| {
            let pod_priority = (*reach.keys().next()?)?;
            Some(EntryMatcher { pod_type, pod_priority, selector: selector.clone() })
        });
        lowest.collect::<DrainTargets>().describe(plan.slots())
    }
}

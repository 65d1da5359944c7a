//! What a maintenance has on all its nodes together, kept up to date node by node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use haulout_api_types::drain_plan::EntryMatcher;
use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::DrainPlanEntry;
use jiff::Timestamp;

use super::Id;
use super::node::{Blocker, Counts, Histogram, Marks};
use crate::plan::{Plan, StepNumber};

#[derive(Default)]
pub(super) struct Tally {
    /// What each step first selects.
    steps: Vec<u32>,
    pub counts: Counts,
    /// Of what is targeted, how much this maintenance has reached itself.
    pub own: u32,
    pub drained_nodes: BTreeSet<Arc<str>>,
    pub cordoned_nodes: u32,
    /// Nodes that still carry marks or Evacuations though nobody maintains or drains them.
    pub unreleased_nodes: u32,
    /// Nodes that somebody uncordons again and again, and when they are cordoned again.
    pub cordons_due: BTreeMap<Arc<str>, Timestamp>,
    /// On how many nodes others hold it back.
    pub limiters: BTreeMap<Id, u32>,
    /// Nodes of those that have to stay so.
    pub held_back_nodes: u32,
    /// On how many nodes others are ahead of it.
    pub forwarded_by: BTreeMap<Id, u32>,
    /// The same for those that have let go of the node since, by name.
    pub forwarded_by_past: BTreeMap<Arc<str>, u32>,
    /// For each slot of the plan, how many nodes have come how far.
    reach: Vec<BTreeMap<Option<i32>, u32>>,
    /// Nodes with pods that are skipped.
    pub skipped_nodes: BTreeSet<Arc<str>>,
    pub blocked_nodes: BTreeSet<Arc<str>>,
    /// Nodes on which something cannot be written.
    pub refused_nodes: BTreeSet<Arc<str>>,
    /// Nodes with pods that leave.
    pub leaving_nodes: BTreeSet<Arc<str>>,
    pub reasons: BTreeMap<Arc<str>, u32>,
    /// Nodes on which it is the oldest and which wait.
    pub waiting_nodes: BTreeSet<Arc<str>>,
    pub evacuated: u32,
}

/// Whether something is added or taken away again.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sign {
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

    fn apply_to_set(self, set: &mut BTreeSet<Arc<str>>, node: &Arc<str>) {
        match self {
            Self::Plus => set.insert(node.clone()),
            Self::Minus => set.remove(node),
        };
    }

    /// Changes a count in a map that holds no zeros.
    pub fn apply_to<K: Ord>(self, map: &mut BTreeMap<K, u32>, key: K, by: u32) {
        let total = map.entry(key);
        match total {
            std::collections::btree_map::Entry::Vacant(vacant) if self == Self::Plus && by > 0 => {
                vacant.insert(by);
            }
            std::collections::btree_map::Entry::Vacant(_) => {}
            std::collections::btree_map::Entry::Occupied(mut occupied) => {
                self.apply(occupied.get_mut(), by);
                if *occupied.get() == 0 {
                    occupied.remove();
                }
            }
        }
    }
}

impl Tally {
    pub fn new(plan: &Plan, evacuated: u32) -> Self {
        Self {
            steps: vec![0; plan.len()],
            reach: vec![BTreeMap::new(); plan.slots().count()],
            evacuated,
            ..Self::default()
        }
    }

    /// The step that the maintenance is at: the first that still has something, or the last.
    pub fn current(&self) -> StepNumber {
        let found = self.steps.iter().position(|left| *left > 0);
        StepNumber::try_from(found.unwrap_or(self.steps.len().saturating_sub(1))).unwrap_or(StepNumber::MAX)
    }

    /// Whether some step still has something.
    pub fn has_work(&self) -> bool {
        self.steps.iter().any(|left| *left > 0)
    }

    pub fn count_steps(&mut self, sign: Sign, histogram: &Histogram) {
        for (step, by) in histogram {
            if let Some(total) = self.steps.get_mut(usize::from(*step)) {
                sign.apply(total, *by);
            }
        }
    }

    pub fn count_reach(&mut self, sign: Sign, plan: &Plan, targets: &DrainTargets) {
        for (reach, (pod_type, selector)) in self.reach.iter_mut().zip(plan.slots()) {
            sign.apply_to(reach, targets.reach(pod_type, selector), 1);
        }
    }

    pub fn count_pods(&mut self, sign: Sign, counts: &Counts, own: u32) {
        let totals = &mut self.counts;
        sign.apply(&mut totals.pending, counts.pending);
        sign.apply(&mut totals.evacuating, counts.evacuating);
        sign.apply(&mut totals.unsupported, counts.unsupported);
        sign.apply(&mut totals.skipped, counts.skipped);
        sign.apply(&mut totals.targeted, counts.targeted);
        sign.apply(&mut totals.completing, counts.completing);
        sign.apply(&mut totals.stranded, counts.stranded);
        sign.apply(&mut totals.volumes, counts.volumes);
        sign.apply(&mut totals.volumes_ignored, counts.volumes_ignored);
        sign.apply(&mut totals.left, counts.left);
        sign.apply(&mut totals.unwanted, counts.unwanted);
        sign.apply(&mut totals.to_evacuate, counts.to_evacuate);
        for (total, by) in totals.waiting.each(&counts.waiting) {
            sign.apply(total, by);
        }
        sign.apply(&mut self.own, own);
    }

    pub fn count_drained(&mut self, sign: Sign, node: &Arc<str>, drained: bool) {
        match sign {
            Sign::Plus if drained => {
                self.drained_nodes.insert(node.clone());
            }
            _ => {
                self.drained_nodes.remove(node);
            }
        }
    }

    pub fn count_blockers(&mut self, sign: Sign, node: &Arc<str>, blockers: &[Blocker]) {
        for blocker in blockers {
            sign.apply_to(&mut self.reasons, blocker.reason.clone(), 1);
        }
        match sign {
            Sign::Plus if !blockers.is_empty() => {
                self.blocked_nodes.insert(node.clone());
            }
            _ => {
                self.blocked_nodes.remove(node);
            }
        }
    }

    pub fn count_refused(&mut self, sign: Sign, node: &Arc<str>, refused: &[Blocker]) {
        for blocker in refused {
            sign.apply_to(&mut self.reasons, blocker.reason.clone(), 1);
        }
        if !refused.is_empty() {
            sign.apply_to_set(&mut self.refused_nodes, node);
        }
    }

    pub fn count_skipped(&mut self, sign: Sign, node: &Arc<str>, counts: &Counts) {
        if counts.skipped > 0 {
            sign.apply_to_set(&mut self.skipped_nodes, node);
        }
    }

    pub fn count_leaving(&mut self, sign: Sign, node: &Arc<str>, counts: &Counts) {
        if counts.waiting.total() > 0 {
            sign.apply_to_set(&mut self.leaving_nodes, node);
        }
    }

    pub fn count_marks(&mut self, sign: Sign, node: &Arc<str>, marks: Marks) {
        sign.apply(&mut self.cordoned_nodes, u32::from(marks.cordoned));
        sign.apply(&mut self.unreleased_nodes, u32::from(marks.unreleased));
        sign.apply(&mut self.held_back_nodes, u32::from(marks.held_back));
        match (sign, marks.cordon_due) {
            (Sign::Plus, Some(due)) => drop(self.cordons_due.insert(node.clone(), due)),
            _ => drop(self.cordons_due.remove(node)),
        }
    }

    /// The lowest targets among all nodes, in the words of the plan's own types and selectors.
    pub fn reached(&self, plan: &Plan) -> Vec<DrainPlanEntry> {
        let lowest = self.reach.iter().zip(plan.slots()).filter_map(|(reach, (pod_type, selector))| {
            let pod_priority = (*reach.keys().next()?)?;
            Some(EntryMatcher { pod_type, pod_priority, selector: selector.clone() })
        });
        let lowest: Vec<_> = lowest.collect();
        let targets: DrainTargets = lowest.iter().cloned().collect();
        targets.describe(plan.slots())
    }
}

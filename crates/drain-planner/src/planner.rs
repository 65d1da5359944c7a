//! The planner keeps track of which pods leave, how far each node and each maintenance has progressed, and which maintenance
//! waits for which.
//!
//! A maintenance moves to its next step when none of its nodes has a pod left that its steps so far select. A pod is targeted
//! when every maintenance that drains its node has reached it, or when it was among the node's targets before: a node's
//! targets never shrink. If the selectors of several plans make maintenances wait for each other, the oldest maintenance wins.
//!
//! The planner stores what each node contributes to its maintenances, so the cost of a change does not depend on the number of
//! nodes. To use it, apply changes, call [`Planner::converge_one`] until it returns false, and then handle the objects that
//! [`Planner::take_changed_nodes`] and [`Planner::take_changed_maintenances`] return. The planner has no copy of the pods: the
//! caller passes a function that reads them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem;
use std::sync::Arc;

use haulout_api_types::drain_rules::DrainRules;
use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::{MAX_DRAINED_NODES, Stage};
use haulout_api_types::selector::{Labels, NodeMatcher};
use jiff::Timestamp;

use crate::facts::{MaintenanceFacts, NodeFacts, PodFacts};
use crate::node::{Drain, NodeRecord};
use crate::own_pods::OwnPods;
use crate::plan::{ServedPodTypes, StepNumber};
use crate::totals::Totals;

/// Usually, the nodes of a maintenance are at only a few different steps.
const MAX_CACHED_STEPS: usize = 16;

/// The pods of a node that the planner needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodScope {
    /// All pods: the node is being drained, since this time if that is known.
    All(Option<Timestamp>),
    /// The pods that have an Evacuation.
    WithEvacuation,
}

/// The planner's ID of a maintenance.
pub(crate) type Id = u32;

pub(crate) struct Maintenance {
    pub facts: MaintenanceFacts,
    pub nodes: BTreeSet<Arc<str>>,
    pub totals: Totals,
    /// The step up to which its nodes have been advanced.
    pub step: StepNumber,
    /// The targets of its plan up to a step, for the steps that its nodes have reached.
    targets: BTreeMap<StepNumber, Arc<DrainTargets>>,
    /// The maintenances that have to progress before it can.
    pub waits_for: Vec<Id>,
    /// Nodes that were deleted after they had been drained, and have not been created again.
    pub deleted: BTreeSet<Arc<str>>,
    /// Number of such nodes that its status did not have room to list.
    pub deleted_unnamed: u32,
    /// Nodes that its selector names but that do not exist.
    pub missing: BTreeSet<Arc<str>>,
}

impl Maintenance {
    pub fn age(&self) -> (Timestamp, &str) {
        (self.facts.created, &self.facts.name)
    }

    /// Nodes that its selector names but that do not exist, except those that were deleted after they had been drained.
    pub fn missing(&self) -> impl Iterator<Item = &Arc<str>> {
        let unnamed = usize::try_from(self.deleted_unnamed).unwrap_or(usize::MAX);
        self.missing.difference(&self.deleted).skip(unnamed)
    }

    /// The step that it has reached on a node. If a Default pod defers later pod types there, that is at most the last step
    /// for Default pods.
    pub fn step_on(&self, defers_later_types: bool) -> StepNumber {
        let current = self.totals.current();
        if defers_later_types { current.min(self.facts.plan.last_default_step()) } else { current }
    }

    pub fn targets(&mut self, up_to: StepNumber) -> Arc<DrainTargets> {
        if self.targets.len() > MAX_CACHED_STEPS {
            self.targets.clear();
        }
        self.targets.entry(up_to).or_insert_with(|| Arc::new(self.facts.plan.targets(up_to))).clone()
    }
}

/// See the [module](self).
pub struct Planner<L> {
    pub(crate) served: ServedPodTypes,
    pub(crate) unreadable: BTreeSet<Arc<str>>,
    pub(crate) rules: DrainRules,
    pub(crate) namespaces: HashMap<Arc<str>, L>,
    pub(crate) nodes: HashMap<Arc<str>, NodeRecord<L>>,
    pub(crate) own_pods: OwnPods,
    pub(crate) maintenances: BTreeMap<Id, Maintenance>,
    pub(crate) ids: HashMap<Arc<str>, Id>,
    next_id: Id,
    /// Pairs of draining maintenances that are neighbours by age on a node, with the number of such nodes. They determine
    /// which maintenances intersect.
    pub(crate) neighbours: BTreeMap<(Id, Id), u32>,
    /// Groups of maintenances that intersect, directly or through others; `None` when they have to be computed again.
    pub(crate) groups: Option<Vec<Vec<Id>>>,
    /// Nodes to be assessed again.
    pub(crate) stale: BTreeSet<Arc<str>>,
    /// Nodes to be advanced to the steps of their maintenances, once no node is stale.
    pub(crate) to_advance: BTreeSet<Arc<str>>,
    /// Maintenances whose nodes may have to be advanced.
    pub(crate) recounted: BTreeSet<Id>,
    /// New maintenances, for which pods that left while there was no leader are not counted yet.
    new_maintenances: Vec<Id>,
    pub(crate) waits_are_stale: bool,
    pub(crate) changed_nodes: BTreeSet<Arc<str>>,
    pub(crate) changed_maintenances: BTreeSet<Id>,
}

impl<L: Labels + Clone + PartialEq> Planner<L> {
    /// An empty planner for an installation that serves these pod types.
    pub fn new(served: ServedPodTypes) -> Self {
        Self {
            served,
            unreadable: BTreeSet::new(),
            rules: DrainRules::default(),
            namespaces: HashMap::new(),
            nodes: HashMap::new(),
            own_pods: OwnPods::default(),
            maintenances: BTreeMap::new(),
            ids: HashMap::new(),
            next_id: 0,
            neighbours: BTreeMap::new(),
            groups: None,
            stale: BTreeSet::new(),
            to_advance: BTreeSet::new(),
            recounted: BTreeSet::new(),
            new_maintenances: Vec::new(),
            waits_are_stale: false,
            changed_nodes: BTreeSet::new(),
            changed_maintenances: BTreeSet::new(),
        }
    }

    /// Processes one node, or, if there is none, computes which maintenance waits for which. Returns false when there is
    /// nothing to do. `pods` reads the pods of a node; it must return all of them.
    pub fn converge_one(
        &mut self,
        now: Timestamp,
        pods: &mut impl FnMut(&Arc<str>, PodScope) -> Vec<PodFacts<L>>,
    ) -> bool {
        if let Some(name) = self.stale.pop_first() {
            self.reassess(&name, now, pods);
            return true;
        }
        self.enqueue_advanced();
        if let Some(name) = self.to_advance.pop_first() {
            self.advance(&name, now, pods);
            return true;
        }
        self.count_missed_evacuations();
        if self.break_ties() {
            return true;
        }
        self.refresh_waits();
        false
    }

    /// A pod on a node was created, changed or deleted. This matters if the node is being drained or if the pod may have an
    /// Evacuation that is no longer needed.
    pub fn pod_changed(&mut self, node: &str, has_evacuation: bool) {
        let Some((name, record)) = self.nodes.get_key_value(node) else { return };
        if has_evacuation || !record.drains.is_empty() || !record.assessment.pods.is_empty() {
            self.stale.insert(name.clone());
        }
    }

    /// Applies the labels of a namespace; `None` if it was deleted.
    pub fn apply_namespace(&mut self, name: Arc<str>, labels: Option<L>) {
        if self.namespaces.get(&name) == labels.as_ref() {
            return;
        }
        let _earlier = match labels {
            Some(labels) => self.namespaces.insert(name, labels),
            None => self.namespaces.remove(&name),
        };
        if self.rules.use_namespaces() {
            self.reassess_draining();
        }
    }

    /// Applies the DrainRules.
    pub fn apply_rules(&mut self, rules: DrainRules) {
        if self.rules != rules {
            self.rules = rules;
            self.reassess_draining();
        }
    }

    /// Sets the UIDs of unreadable maintenances. Nodes that they hold are not released.
    pub fn set_unreadable(&mut self, uids: BTreeSet<Arc<str>>) {
        if self.unreadable == uids {
            return;
        }
        self.unreadable = uids;
        let with_markers = self.nodes.iter().filter(|(_, record)| record.facts.has_markers);
        for (name, _) in with_markers {
            self.changed_nodes.insert(name.clone());
            self.stale.insert(name.clone());
        }
    }

    /// Applies a node that was created or changed.
    pub fn apply_node(&mut self, facts: NodeFacts<L>) {
        let name = facts.name.clone();
        let known = self.nodes.get_mut(&name);
        let is_new = known.is_none();
        let record = match known {
            Some(record) if record.facts == facts => return,
            Some(record) => record,
            None => self.nodes.entry(name.clone()).or_insert_with(|| NodeRecord::new(facts.clone())),
        };
        let relabelled = is_new || record.facts.labels != facts.labels;
        let retainted = is_new || record.facts.taints != facts.taints;
        record.facts = facts;
        self.changed_nodes.insert(name.clone());
        if relabelled || retainted {
            self.reassess_own_pods(&name);
        }
        if relabelled {
            self.assign(&name);
        } else {
            self.update_open_node(&name);
            self.stale.insert(name);
        }
    }

    /// Deletes a node.
    pub fn delete_node(
        &mut self,
        name: &Arc<str>,
        now: Timestamp,
        pods: &mut impl FnMut(&Arc<str>, PodScope) -> Vec<PodFacts<L>>,
    ) {
        if self.stale.remove(name) {
            self.reassess(name, now, pods);
        }
        let Some(record) = self.nodes.get(name) else { return };
        if record.is_drained() {
            for drain in &record.drains {
                if let Some(maintenance) = self.maintenances.get_mut(&drain.id) {
                    maintenance.deleted.insert(name.clone());
                }
            }
        }
        self.unassign(name);
    }

    /// Applies a maintenance that was created or changed.
    pub fn apply_maintenance(&mut self, facts: MaintenanceFacts) {
        let known = self.ids.get(&facts.name).copied();
        if let Some(maintenance) = known.and_then(|id| self.maintenances.get_mut(&id)) {
            let (new, old) = (&facts, &maintenance.facts);
            // These fields are immutable: if one differs, it is another maintenance with the same name.
            let same = (&new.uid, new.created, &new.nodes, &new.plan)
                == (&old.uid, old.created, &old.nodes, &old.plan);
            if !same {
                self.delete_maintenance(&facts.name);
                return self.add_maintenance(facts);
            }
            if (&new.reason, new.holds_autoscalers) != (&old.reason, old.holds_autoscalers) {
                // This changes the nodes' conditions and annotations, but no number.
                self.changed_nodes.extend(maintenance.nodes.iter().cloned());
            }
            if new.drain_started != old.drain_started {
                // Other pods count as returned.
                self.stale.extend(maintenance.nodes.iter().cloned());
            }
            let restaged = (new.stage, new.uncordons, new.volume_timeout)
                != (old.stage, old.uncordons, old.volume_timeout);
            // The pods that left while there was no leader are counted from the first status that was observed.
            let (remaining_in_status, staying_in_status) = (old.remaining_in_status, old.staying_in_status);
            maintenance.facts = MaintenanceFacts { remaining_in_status, staying_in_status, ..facts };
            if restaged {
                let nodes = maintenance.nodes.clone();
                self.assign_all(&nodes);
                self.changed_maintenances.extend(known);
            }
        } else {
            self.add_maintenance(facts);
        }
    }

    fn add_maintenance(&mut self, facts: MaintenanceFacts) {
        let id = self.next_id;
        self.next_id += 1;
        let selected = |(name, record): (&Arc<str>, &NodeRecord<L>)| {
            facts.nodes.matches(name, &record.facts.labels).then(|| name.clone())
        };
        let nodes: BTreeSet<_> = self.nodes.iter().filter_map(selected).collect();
        let exists = |name: &str| self.nodes.contains_key(name);
        let deleted = facts.drained_nodes.iter().filter(|name| !exists(name)).cloned().collect();
        // The status lists all of them as long as there is room.
        let named = u32::try_from(MAX_DRAINED_NODES).unwrap_or(u32::MAX);
        let deleted_unnamed = facts.drained_and_deleted.saturating_sub(named);
        let missing = facts.nodes.names().into_iter().filter(|name| !exists(name)).map(Into::into).collect();
        let totals = Totals::new(&facts.plan, facts.evacuated);
        self.ids.insert(facts.name.clone(), id);
        let maintenance = Maintenance {
            facts,
            nodes: BTreeSet::new(),
            totals,
            step: 0,
            targets: BTreeMap::new(),
            waits_for: Vec::new(),
            deleted,
            deleted_unnamed,
            missing,
        };
        self.maintenances.insert(id, maintenance);
        self.new_maintenances.push(id);
        self.changed_maintenances.insert(id);
        self.assign_all(&nodes);
    }

    /// Deletes a maintenance.
    pub fn delete_maintenance(&mut self, name: &Arc<str>) {
        let Some(id) = self.ids.remove(name) else { return };
        let Some(maintenance) = self.maintenances.get_mut(&id) else { return };
        let nodes = mem::take(&mut maintenance.nodes);
        // Unassign its nodes first: their numbers are subtracted from the maintenance.
        maintenance.facts.stage = Stage::Idle;
        maintenance.facts.nodes = NodeMatcher::default();
        self.assign_all(&nodes);
        self.maintenances.remove(&id);
        self.changed_maintenances.remove(&id);
    }

    /// When the first drain of a node that is still in progress started, or when the node came under maintenance, whichever
    /// was later.
    pub fn drain_started(&self, node: &str) -> Option<Timestamp> {
        let record = self.nodes.get(node)?;
        let drain_started = |drain: &Drain| self.maintenances.get(&drain.id)?.facts.drain_started;
        let drain_started = record.drains.iter().filter_map(drain_started).min()?;
        Some(record.facts.held_since.map_or(drain_started, |joined| joined.max(drain_started)))
    }

    /// Marks a node for reassessment if its `requeue_at` time has passed.
    pub fn reassess_if_due(&mut self, node: &Arc<str>, now: Timestamp) {
        if self.nodes.get(node).and_then(|record| record.assessment.requeue_at).is_some_and(|due| due <= now)
        {
            self.stale.insert(node.clone());
        }
    }

    /// The nodes whose plan may have changed since the last call.
    pub fn take_changed_nodes(&mut self) -> BTreeSet<Arc<str>> {
        mem::take(&mut self.changed_nodes)
    }

    /// The maintenances whose plan may have changed since the last call.
    pub fn take_changed_maintenances(&mut self) -> Vec<Arc<str>> {
        let changed = mem::take(&mut self.changed_maintenances);
        changed.iter().filter_map(|id| Some(self.maintenances.get(id)?.facts.name.clone())).collect()
    }

    /// Marks every node that is being drained for reassessment.
    fn reassess_draining(&mut self) {
        let draining = self.nodes.iter().filter(|(_, record)| !record.drains.is_empty());
        self.stale.extend(draining.map(|(name, _)| name.clone()));
    }

    /// Enqueues the nodes of maintenances that have reached a later step.
    fn enqueue_advanced(&mut self) {
        for id in mem::take(&mut self.recounted) {
            let Some(maintenance) = self.maintenances.get_mut(&id) else { continue };
            let current = maintenance.totals.current();
            if mem::replace(&mut maintenance.step, current) < current {
                self.to_advance.extend(maintenance.nodes.iter().cloned());
            }
        }
    }

    /// Counts the pods that left while there was no leader: those that the status counted and that are gone.
    fn count_missed_evacuations(&mut self) {
        for id in mem::take(&mut self.new_maintenances) {
            let Some(Maintenance { facts, totals, .. }) = self.maintenances.get_mut(&id) else { continue };
            let left = totals.counts.pending.saturating_add(totals.counts.evacuating);
            let stay = totals.counts.unsupported.saturating_add(totals.counts.skipped);
            let fewer = facts.remaining_in_status.saturating_sub(left);
            let gone = facts
                .remaining_in_status
                .saturating_add(facts.staying_in_status)
                .saturating_sub(left.saturating_add(stay));
            if facts.stage == Stage::Drain {
                totals.evacuated = totals.evacuated.saturating_add(fewer.min(gone));
            }
        }
    }
}

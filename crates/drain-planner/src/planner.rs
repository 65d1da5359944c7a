//! The planner: knows at any moment which pods leave, how far each node and each maintenance has come, and who waits for
//! whom.
//!
//! A maintenance moves to its next step when nothing that its steps so far select is left on any of its nodes.
//! A pod is targeted when every maintenance that drains its node has reached it, or when the node had
//! reached it before: targets never go back. Where selectors make maintenances wait for each other, the
//! oldest one's step wins.
//!
//! Each node keeps what it adds to its maintenances, so that a change costs what its node costs, however many
//! nodes there are. Say what has changed, call [`Planner::settle_one`] until it returns false, and look at what
//! [`Planner::take_changed_nodes`] and [`Planner::take_changed_maintenances`] name. Pods are read where they are, by a
//! function that the caller passes: the planner has no copy of them.

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
use crate::places::Places;
use crate::plan::{Served, StepNumber};
use crate::totals::Totals;

/// The nodes of a maintenance are at few different steps; more than this would be odd.
const MAX_CACHED_STEPS: usize = 16;

/// Which pods of a node the planner has to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// All of them: the node is being drained, since this time if that is known.
    All(Option<Timestamp>),
    /// Those that have an Evacuation.
    WithEvacuation,
}

/// A maintenance, as the planner calls it.
pub(crate) type Id = u32;

pub(crate) struct Maintenance {
    pub facts: MaintenanceFacts,
    pub nodes: BTreeSet<Arc<str>>,
    pub totals: Totals,
    /// The step up to which its nodes have been brought.
    pub step: StepNumber,
    /// What its plan selects up to a step, for the steps that its nodes are at.
    targets: BTreeMap<StepNumber, Arc<DrainTargets>>,
    /// Who has to get further before it can.
    pub waits_for: Vec<Id>,
    /// Nodes that were deleted after they had been drained, and have not been created again.
    pub deleted: BTreeSet<Arc<str>>,
    /// As many more, whose names its status had no room for.
    pub deleted_unnamed: u32,
    /// Nodes that its selector names and that do not exist.
    pub missing: BTreeSet<Arc<str>>,
}

impl Maintenance {
    pub fn age(&self) -> (Timestamp, &str) {
        (self.facts.created, &self.facts.name)
    }

    /// Nodes that its selector names and that do not exist, but for those that were drained before they were deleted.
    pub fn missing(&self) -> impl Iterator<Item = &Arc<str>> {
        let unnamed = usize::try_from(self.deleted_unnamed).unwrap_or(usize::MAX);
        self.missing.difference(&self.deleted).skip(unnamed)
    }

    /// The step that it has reached on a node, on which a Default pod may stay for now: later pod types wait too, then.
    pub fn step_on(&self, lingers: bool) -> StepNumber {
        let current = self.totals.current();
        if lingers { current.min(self.facts.plan.last_default_step()) } else { current }
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
    pub(crate) served: Served,
    pub(crate) unreadable: BTreeSet<Arc<str>>,
    pub(crate) rules: DrainRules,
    pub(crate) namespaces: HashMap<Arc<str>, L>,
    pub(crate) nodes: HashMap<Arc<str>, NodeRecord<L>>,
    pub(crate) places: Places,
    pub(crate) maintenances: BTreeMap<Id, Maintenance>,
    pub(crate) ids: HashMap<Arc<str>, Id>,
    next_id: Id,
    /// On how many nodes two draining maintenances are neighbours by age. That is enough to tell who is
    /// connected with whom.
    pub(crate) neighbours: BTreeMap<(Id, Id), u32>,
    /// Maintenances that intersect, directly or through others; `None` when that has to be found out again.
    pub(crate) groups: Option<Vec<Vec<Id>>>,
    /// Nodes to be looked at again.
    pub(crate) stale: BTreeSet<Arc<str>>,
    /// Nodes to be brought up to their maintenances, once none is stale: a maintenance is as far as its last node.
    pub(crate) behind: BTreeSet<Arc<str>>,
    /// Maintenances whose nodes may have to be brought further.
    pub(crate) recounted: BTreeSet<Id>,
    /// Maintenances that have just become known: what has left while nobody followed them is yet to be counted.
    first_seen: Vec<Id>,
    pub(crate) waits_are_stale: bool,
    pub(crate) changed_nodes: BTreeSet<Arc<str>>,
    pub(crate) changed_maintenances: BTreeSet<Id>,
}

impl<L: Labels + Clone + PartialEq> Planner<L> {
    /// A planner that knows nothing yet, for an installation that serves these pod types.
    pub fn new(served: Served) -> Self {
        Self {
            served,
            unreadable: BTreeSet::new(),
            rules: DrainRules::default(),
            namespaces: HashMap::new(),
            nodes: HashMap::new(),
            places: Places::default(),
            maintenances: BTreeMap::new(),
            ids: HashMap::new(),
            next_id: 0,
            neighbours: BTreeMap::new(),
            groups: None,
            stale: BTreeSet::new(),
            behind: BTreeSet::new(),
            recounted: BTreeSet::new(),
            first_seen: Vec::new(),
            waits_are_stale: false,
            changed_nodes: BTreeSet::new(),
            changed_maintenances: BTreeSet::new(),
        }
    }

    /// Looks at one node, or else finds out who waits for whom. Returns false when there is nothing to do. `pods` reads
    /// the pods of a node, which have to be complete.
    pub fn settle_one(
        &mut self,
        now: Timestamp,
        pods: &mut impl FnMut(&Arc<str>, Which) -> Vec<PodFacts<L>>,
    ) -> bool {
        if let Some(name) = self.stale.pop_first() {
            self.reassess(&name, now, pods);
            return true;
        }
        self.enqueue_risen();
        if let Some(name) = self.behind.pop_first() {
            self.advance(&name, now, pods);
            return true;
        }
        self.catch_up();
        if self.break_ties() {
            return true;
        }
        self.refresh_waits();
        false
    }

    /// A pod on a node has appeared, changed or gone. That matters where somebody drains, or where an Evacuation may be
    /// left over.
    pub fn pod_changed(&mut self, node: &str, has_evacuation: bool) {
        let Some((name, record)) = self.nodes.get_key_value(node) else { return };
        if has_evacuation || !record.drains.is_empty() || !record.assessment.pods.is_empty() {
            self.stale.insert(name.clone());
        }
    }

    /// The labels of a namespace are these now; `None` when it is gone.
    pub fn put_namespace(&mut self, name: Arc<str>, labels: Option<L>) {
        if self.namespaces.get(&name) == labels.as_ref() {
            return;
        }
        let _earlier = match labels {
            Some(labels) => self.namespaces.insert(name, labels),
            None => self.namespaces.remove(&name),
        };
        if self.rules.read_namespaces() {
            self.reassess_drained();
        }
    }

    /// The drain rules are these now.
    pub fn put_rules(&mut self, rules: DrainRules) {
        if self.rules != rules {
            self.rules = rules;
            self.reassess_drained();
        }
    }

    /// The UIDs of maintenances that cannot be followed: nodes that they hold are not released.
    pub fn put_unreadable(&mut self, uids: BTreeSet<Arc<str>>) {
        if self.unreadable == uids {
            return;
        }
        self.unreadable = uids;
        let marked = self.nodes.iter().filter(|(_, record)| record.facts.marked);
        for (name, _) in marked {
            self.changed_nodes.insert(name.clone());
            self.stale.insert(name.clone());
        }
    }

    /// A node has appeared or is not as it was.
    pub fn put_node(&mut self, facts: NodeFacts<L>) {
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
            self.place_changed(&name);
        }
        if relabelled {
            self.assign(&name);
        } else {
            self.note_openness(&name);
            self.stale.insert(name);
        }
    }

    /// A node is gone.
    pub fn remove_node(
        &mut self,
        name: &Arc<str>,
        now: Timestamp,
        pods: &mut impl FnMut(&Arc<str>, Which) -> Vec<PodFacts<L>>,
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

    /// A maintenance has appeared or is not as it was.
    pub fn put_maintenance(&mut self, facts: MaintenanceFacts) {
        let known = self.ids.get(&facts.name).copied();
        if let Some(maintenance) = known.and_then(|id| self.maintenances.get_mut(&id)) {
            let (new, old) = (&facts, &maintenance.facts);
            // Nothing else can change without it being another maintenance of the same name.
            let same = (&new.uid, new.created, &new.nodes, &new.plan)
                == (&old.uid, old.created, &old.nodes, &old.plan);
            if !same {
                self.remove_maintenance(&facts.name);
                return self.add_maintenance(facts);
            }
            if (&new.reason, new.holds_autoscalers) != (&old.reason, old.holds_autoscalers) {
                // It changes no number, but what its nodes show.
                self.changed_nodes.extend(maintenance.nodes.iter().cloned());
            }
            if new.drain_began != old.drain_began {
                // Other pods have come after the drain began.
                self.stale.extend(maintenance.nodes.iter().cloned());
            }
            let restaged = (new.stage, new.uncordons, new.volume_timeout)
                != (old.stage, old.uncordons, old.volume_timeout);
            maintenance.facts = facts;
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
        // As long as there is room, all of them are named.
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
        self.first_seen.push(id);
        self.changed_maintenances.insert(id);
        self.assign_all(&nodes);
    }

    /// A maintenance is gone.
    pub fn remove_maintenance(&mut self, name: &Arc<str>) {
        let Some(id) = self.ids.remove(name) else { return };
        let Some(maintenance) = self.maintenances.get_mut(&id) else { return };
        let nodes = mem::take(&mut maintenance.nodes);
        // Out of every list first, while what its nodes have added can still be taken back.
        maintenance.facts.stage = Stage::Idle;
        maintenance.facts.nodes = NodeMatcher::default();
        self.assign_all(&nodes);
        self.maintenances.remove(&id);
        self.changed_maintenances.remove(&id);
    }

    /// When the first drain of a node began that is still going on, or the node came under maintenance, whichever was
    /// later.
    pub fn drain_began(&self, node: &str) -> Option<Timestamp> {
        let record = self.nodes.get(node)?;
        let began = |drain: &Drain| self.maintenances.get(&drain.id)?.facts.drain_began;
        let began = record.drains.iter().filter_map(began).min()?;
        Some(record.facts.held_since.map_or(began, |joined| joined.max(began)))
    }

    /// Has a node looked at again if time alone has changed something since the last look.
    pub fn wake(&mut self, node: &Arc<str>, now: Timestamp) {
        if self.nodes.get(node).and_then(|record| record.assessment.wake).is_some_and(|wake| wake <= now) {
            self.stale.insert(node.clone());
        }
    }

    /// The nodes that may look different from when this was last called.
    pub fn take_changed_nodes(&mut self) -> BTreeSet<Arc<str>> {
        mem::take(&mut self.changed_nodes)
    }

    /// The maintenances that may look different from when this was last called.
    pub fn take_changed_maintenances(&mut self) -> Vec<Arc<str>> {
        let changed = mem::take(&mut self.changed_maintenances);
        changed.iter().filter_map(|id| Some(self.maintenances.get(id)?.facts.name.clone())).collect()
    }

    /// Has every node looked at again that is drained.
    fn reassess_drained(&mut self) {
        let drained = self.nodes.iter().filter(|(_, record)| !record.drains.is_empty());
        self.stale.extend(drained.map(|(name, _)| name.clone()));
    }

    /// Has the nodes of maintenances brought further that have got to a later step.
    fn enqueue_risen(&mut self) {
        for id in mem::take(&mut self.recounted) {
            let Some(maintenance) = self.maintenances.get_mut(&id) else { continue };
            let current = maintenance.totals.current();
            if mem::replace(&mut maintenance.step, current) < current {
                self.behind.extend(maintenance.nodes.iter().cloned());
            }
        }
    }

    /// Counts the pods that have left while nobody followed a maintenance: all that its status had and that are gone.
    fn catch_up(&mut self) {
        for id in mem::take(&mut self.first_seen) {
            let Some(Maintenance { facts, totals, .. }) = self.maintenances.get_mut(&id) else { continue };
            let left = totals.counts.pending.saturating_add(totals.counts.evacuating);
            let stay = totals.counts.unsupported.saturating_add(totals.counts.skipped);
            let fewer = facts.left_before.saturating_sub(left);
            let gone = facts
                .left_before
                .saturating_add(facts.stayed_before)
                .saturating_sub(left.saturating_add(stay));
            if facts.stage == Stage::Drain {
                totals.evacuated = totals.evacuated.saturating_add(fewer.min(gone));
            }
        }
    }
}

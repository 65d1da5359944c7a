//! The planner: takes in what changes in the cluster, and knows at any moment which pods leave, how far each
//! node and each maintenance has come, and who waits for whom.
//!
//! A maintenance moves to its next step when nothing that its steps so far select is left on any of its nodes.
//! A pod is targeted when every maintenance that drains its node has reached it, or when the node had
//! reached it before: targets never go back. Where selectors make maintenances wait for each other, the
//! oldest one's step wins.
//!
//! Each node keeps what it adds to its maintenances, so that a change costs what its node costs, however many
//! nodes there are. Feed it with [`Planner::apply`], call [`Planner::settle_one`] until it returns false, and
//! look at what [`Planner::take_changed_nodes`] and [`Planner::take_changed_maintenances`] name. At the start,
//! apply everything that exists before settling: what has not been told yet counts as gone.

mod leaving;
mod node;
mod places;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod reference;
mod report;
mod settle;
mod tally;
#[cfg(test)]
mod tests;
mod waits;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::mem;
use std::sync::Arc;

use haulout_api_types::drain_rules::{DrainRules, Source};
use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::{MAX_DRAINED_NODES, Stage};
use haulout_api_types::selector::Labels;

#[cfg(test)]
pub use self::leaving::Waits;
pub use self::leaving::{Awaited, Waiting};
#[cfg(test)]
pub use self::node::{Blocker, Counts};
use self::node::{Fate, NodeRecord, PodRecord, Unclear};
use self::places::Places;
#[cfg(test)]
use self::report::Evacuate;
pub use self::report::{MaintenancePlan, NodePlan, NodeState, Summary, list};
use self::tally::Tally;
use crate::facts::{MaintenanceFacts, NodeFacts, PodFacts, PodKey};
use crate::plan::{Served, StepNumber};

/// Something in the cluster has changed.
#[derive(Clone, Debug)]
pub enum Change<L> {
    /// A pod that is bound to a node has appeared or is not as it was.
    Pod(PodFacts<L>),
    /// A pod is gone.
    PodGone(PodKey),
    /// A node has appeared or is not as it was.
    Node(NodeFacts<L>),
    /// A node is gone.
    NodeGone(Arc<str>),
    /// A maintenance has appeared or is not as it was.
    Maintenance(MaintenanceFacts),
    /// A maintenance is gone.
    MaintenanceGone(Arc<str>),
    /// The UIDs of maintenances that cannot be followed: nodes that they hold are not released.
    Unreadable(BTreeSet<Arc<str>>),
    /// The drain rules are these now.
    Rules(DrainRules),
    /// The labels of a namespace are these now; `None` when it is gone.
    Namespace(Arc<str>, Option<L>),
}

/// What is to be done and said about every node and every maintenance, worked out at once from all that there is.
/// Namespaces and rules come among the changes too. This is what `kubectl maintenance plan` will ask for.
#[cfg(test)]
pub fn plan<L: Labels + Clone + PartialEq>(
    served: Served,
    everything: impl IntoIterator<Item = Change<L>>,
) -> (BTreeMap<Arc<str>, NodePlan>, BTreeMap<Arc<str>, MaintenancePlan>) {
    let mut planner = Planner::new(served);
    for thing in everything {
        planner.apply(thing);
    }
    planner.settle();
    let nodes = planner.nodes.keys().filter_map(|name| Some((name.clone(), planner.node(name)?)));
    let maintenances = planner.ids.keys().filter_map(|name| Some((name.clone(), planner.maintenance(name)?)));
    (nodes.collect(), maintenances.collect())
}

/// The nodes of a maintenance are at few different steps; more than this would be odd.
const MAX_CACHED_STEPS: usize = 16;

/// A maintenance, as the planner calls it.
type Id = u32;

struct Maintenance {
    facts: MaintenanceFacts,
    nodes: BTreeSet<Arc<str>>,
    tally: Tally,
    /// What its plan selects up to a step, for the steps that its nodes are at.
    targets: BTreeMap<StepNumber, Arc<DrainTargets>>,
    /// Who has to get further before it can.
    waits_for: Vec<Id>,
    /// Nodes that were deleted after they had been drained, and have not been created again.
    deleted: BTreeSet<Arc<str>>,
    /// As many more, whose names its status had no room for.
    deleted_unnamed: u32,
    /// Nodes that its selector names and that do not exist.
    missing: BTreeSet<Arc<str>>,
}

impl Maintenance {
    fn age(&self) -> (jiff::Timestamp, &str) {
        (self.facts.created, &self.facts.name)
    }

    /// Nodes that its selector names and that do not exist, but for those that were drained before they were deleted.
    fn missing(&self) -> impl Iterator<Item = &Arc<str>> {
        let unnamed = usize::try_from(self.deleted_unnamed).unwrap_or(usize::MAX);
        self.missing.difference(&self.deleted).skip(unnamed)
    }

    /// The step that it has reached on a node, on which a Default pod may stay for now: later pod types wait too, then.
    fn step_on(&self, lingers: bool) -> StepNumber {
        let current = self.tally.current();
        if lingers { current.min(self.facts.plan.last_default_step()) } else { current }
    }

    fn targets(&mut self, up_to: StepNumber) -> Arc<DrainTargets> {
        if self.targets.len() > MAX_CACHED_STEPS {
            self.targets.clear();
        }
        self.targets.entry(up_to).or_insert_with(|| Arc::new(self.facts.plan.targets(up_to))).clone()
    }
}

/// See the [module](self).
pub struct Planner<L> {
    served: Served,
    unreadable: BTreeSet<Arc<str>>,
    rules: DrainRules,
    namespaces: HashMap<Arc<str>, L>,
    nodes: HashMap<Arc<str>, NodeRecord<L>>,
    node_of_pod: HashMap<PodKey, Arc<str>>,
    places: Places,
    maintenances: BTreeMap<Id, Maintenance>,
    ids: HashMap<Arc<str>, Id>,
    next_id: Id,
    /// On how many nodes two draining maintenances are neighbours by age. That is enough to tell who is
    /// connected with whom.
    neighbours: BTreeMap<(Id, Id), u32>,
    /// Maintenances that intersect, directly or through others; `None` when that has to be found out anew.
    groups: Option<Vec<Vec<Id>>>,
    queue: VecDeque<Arc<str>>,
    /// Maintenances that have just become known: what has left while nobody followed them is yet to be counted.
    first_seen: Vec<Id>,
    waits_are_stale: bool,
    changed_nodes: BTreeSet<Arc<str>>,
    changed_maintenances: BTreeSet<Id>,
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
            node_of_pod: HashMap::new(),
            places: Places::default(),
            maintenances: BTreeMap::new(),
            ids: HashMap::new(),
            next_id: 0,
            neighbours: BTreeMap::new(),
            groups: None,
            queue: VecDeque::new(),
            first_seen: Vec::new(),
            waits_are_stale: false,
            changed_nodes: BTreeSet::new(),
            changed_maintenances: BTreeSet::new(),
        }
    }

    /// Takes in a change. What follows from it is worked out by [`settle_one`](Self::settle_one).
    pub fn apply(&mut self, change: Change<L>) {
        match change {
            Change::Pod(facts) => self.put_pod(facts),
            Change::PodGone(key) => self.remove_pod(&key),
            Change::Node(facts) => self.put_node(facts),
            Change::NodeGone(name) => self.remove_node(&name),
            Change::Maintenance(facts) => self.put_maintenance(facts),
            Change::MaintenanceGone(name) => self.remove_maintenance(&name),
            Change::Unreadable(uids) => {
                if self.unreadable != uids {
                    self.unreadable = uids;
                    let marked = |record: &NodeRecord<L>| record.facts.as_ref().is_some_and(|f| f.marked);
                    let nodes = self.nodes.iter().filter(|(_, record)| marked(record));
                    let nodes: Vec<_> = nodes.map(|(name, _)| name.clone()).collect();
                    for name in nodes {
                        self.count(&name);
                    }
                }
            }
            Change::Rules(rules) => {
                if self.rules != rules {
                    self.rules = rules;
                    self.treat_again(|_| true);
                }
            }
            Change::Namespace(name, labels) => {
                if self.namespaces.get(&name) != labels.as_ref() {
                    let _earlier = match labels {
                        Some(labels) => self.namespaces.insert(name.clone(), labels),
                        None => self.namespaces.remove(&name),
                    };
                    self.treat_again(|pod| pod.namespace == name);
                }
            }
        }
    }

    /// Works off one node, or else settles what waits for whom. Returns false when there is nothing to do.
    pub fn settle_one(&mut self) -> bool {
        if let Some(node) = self.queue.pop_front() {
            self.advance(&node);
            return true;
        }
        self.catch_up();
        if self.break_ties() {
            return true;
        }
        self.refresh_waits();
        false
    }

    /// Works off everything.
    #[cfg(test)]
    pub fn settle(&mut self) {
        while self.settle_one() {}
    }

    /// The namespaces whose labels it knows.
    pub fn namespaces(&self) -> impl Iterator<Item = &Arc<str>> {
        self.namespaces.keys()
    }

    /// Whether it has been told of this pod.
    pub fn knows_pod(&self, pod: &PodKey) -> bool {
        self.node_of_pod.contains_key(pod)
    }

    /// When the first drain of a node began that is still going on.
    pub fn drain_began(&self, node: &str) -> Option<jiff::Timestamp> {
        let draining = self.nodes.get(node).into_iter().flat_map(|record| &record.draining);
        draining.filter_map(|id| self.maintenances.get(id)?.facts.drain_began).min()
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

    fn put_pod(&mut self, facts: PodFacts<L>) {
        let key = facts.key.clone();
        match self.node_of_pod.get(&key) {
            Some(node) if *node != facts.node => self.remove_pod(&key),
            _ => {}
        }
        let name = facts.node.clone();
        let record = self.nodes.entry(name.clone()).or_default();
        let known = record.pods.get(&key);
        if known.is_some_and(|pod| pod.facts == facts) {
            return;
        }
        if known.is_some_and(|pod| pod.facts.wait != facts.wait) {
            // It changes no number, but what is said of the wait.
            self.changed_maintenances.extend(&record.draining);
        }
        let left = facts.finished && known.is_some_and(|pod| pod.fate(self.served) == Fate::Leaving);
        self.node_of_pod.insert(key.clone(), name.clone());
        self.find_place(&facts);
        let pod = self.treat(&name, facts);
        if let Some(record) = self.nodes.get_mut(&name) {
            record.pods.insert(key, pod);
        }
        if left {
            self.count_evacuated(&name);
        }
        self.count(&name);
    }

    fn remove_pod(&mut self, key: &PodKey) {
        let Some(name) = self.node_of_pod.remove(key) else { return };
        self.places.forget(key);
        let Some(record) = self.nodes.get_mut(&name) else { return };
        let left = record.pods.remove(key).is_some_and(|pod| pod.fate(self.served) == Fate::Leaving);
        if left {
            self.count_evacuated(&name);
        }
        self.count(&name);
        self.forget_empty(&name);
    }

    fn count_evacuated(&mut self, node: &Arc<str>) {
        for id in self.nodes.get(node).into_iter().flat_map(|record| &record.draining) {
            if let Some(maintenance) = self.maintenances.get_mut(id) {
                maintenance.tally.evacuated = maintenance.tally.evacuated.saturating_add(1);
                self.changed_maintenances.insert(*id);
            }
        }
    }

    /// Counts the pods that have left while nobody followed a maintenance: all that its status had and that are gone.
    fn catch_up(&mut self) {
        for id in mem::take(&mut self.first_seen) {
            let Some(Maintenance { facts, tally, .. }) = self.maintenances.get_mut(&id) else { continue };
            let left = tally.counts.pending.saturating_add(tally.counts.evacuating);
            let stay = tally.counts.unsupported.saturating_add(tally.counts.skipped);
            let fewer = facts.left_before.saturating_sub(left);
            let gone = facts
                .left_before
                .saturating_add(facts.stayed_before)
                .saturating_sub(left.saturating_add(stay));
            if facts.stage == Stage::Drain {
                tally.evacuated = tally.evacuated.saturating_add(fewer.min(gone));
            }
        }
    }

    fn put_node(&mut self, facts: NodeFacts<L>) {
        let name = facts.name.clone();
        let record = self.nodes.entry(name.clone()).or_default();
        let relabelled = record.facts.as_ref().is_none_or(|known| known.labels != facts.labels);
        let retainted = record.facts.as_ref().is_none_or(|known| known.taints != facts.taints);
        if !relabelled && record.facts.as_ref() == Some(&facts) {
            return;
        }
        record.facts = Some(facts);
        if relabelled || retainted {
            self.place_changed(&name);
        }
        if relabelled {
            self.treat_node(&name, |_| true);
            self.assign(&name);
        } else {
            self.count(&name);
        }
    }

    fn remove_node(&mut self, name: &Arc<str>) {
        if let Some(record) = self.nodes.get_mut(name) {
            if record.is_drained(self.served) {
                for id in &record.draining {
                    if let Some(maintenance) = self.maintenances.get_mut(id) {
                        maintenance.deleted.insert(name.clone());
                    }
                }
            }
            record.facts = None;
            self.assign(name);
            self.forget_empty(name);
        }
    }

    /// Pods may be known before and after their node is.
    fn forget_empty(&mut self, name: &Arc<str>) {
        if self.nodes.get(name).is_some_and(|record| record.facts.is_none() && record.pods.is_empty()) {
            self.nodes.remove(name);
            self.changed_nodes.insert(name.clone());
        }
    }

    fn put_maintenance(&mut self, facts: MaintenanceFacts) {
        let known = self.ids.get(&facts.name).copied();
        if let Some(maintenance) = known.and_then(|id| self.maintenances.get_mut(&id)) {
            let same = |a: &MaintenanceFacts, b: &MaintenanceFacts| {
                (a.stage, a.uncordons, a.created, &a.uid) == (b.stage, b.uncordons, b.created, &b.uid)
                    && a.volume_timeout == b.volume_timeout
                    && a.nodes == b.nodes
                    && a.plan == b.plan
            };
            if maintenance.facts.shown() != facts.shown() {
                // It changes no number, but what its nodes show.
                self.changed_nodes.extend(maintenance.nodes.iter().cloned());
            }
            if same(&maintenance.facts, &facts) {
                let MaintenanceFacts { reason, holds_autoscalers, drain_began, .. } = facts;
                maintenance.facts =
                    MaintenanceFacts { reason, holds_autoscalers, drain_began, ..maintenance.facts.clone() };
                return;
            }
            // Nothing else can change without it being another maintenance of the same name.
            let MaintenanceFacts { stage, uncordons, volume_timeout, .. } = facts;
            let restaged = MaintenanceFacts { stage, uncordons, volume_timeout, ..maintenance.facts.clone() };
            if same(&restaged, &facts) {
                maintenance.facts = facts;
                let nodes = maintenance.nodes.clone();
                self.waits_are_stale = true;
                self.groups = None;
                self.assign_all(&nodes);
                self.changed_maintenances.extend(known);
                return;
            }
            self.remove_maintenance(&facts.name);
        }
        let id = self.next_id;
        self.next_id += 1;
        let selected = |(name, record): (&Arc<str>, &NodeRecord<L>)| {
            let labels = &record.facts.as_ref()?.labels;
            facts.nodes.matches(name, labels).then(|| name.clone())
        };
        let nodes: BTreeSet<_> = self.nodes.iter().filter_map(selected).collect();
        let exists = |name: &str| self.nodes.get(name).is_some_and(|record| record.facts.is_some());
        let deleted = facts.drained_nodes.iter().filter(|name| !exists(name)).cloned().collect();
        // As long as there is room, all of them are named.
        let named = u32::try_from(MAX_DRAINED_NODES).unwrap_or(u32::MAX);
        let deleted_unnamed = facts.drained_and_deleted.saturating_sub(named);
        let missing = facts.nodes.names().into_iter().filter(|name| !exists(name)).map(Into::into).collect();
        let tally = Tally::new(&facts.plan, facts.evacuated);
        self.ids.insert(facts.name.clone(), id);
        let maintenance = Maintenance {
            facts,
            nodes: BTreeSet::new(),
            tally,
            targets: BTreeMap::new(),
            waits_for: Vec::new(),
            deleted,
            deleted_unnamed,
            missing,
        };
        self.maintenances.insert(id, maintenance);
        self.first_seen.push(id);
        self.changed_maintenances.insert(id);
        self.waits_are_stale = true;
        self.groups = None;
        self.assign_all(&nodes);
    }

    fn remove_maintenance(&mut self, name: &Arc<str>) {
        let Some(id) = self.ids.remove(name) else { return };
        let Some(maintenance) = self.maintenances.get_mut(&id) else { return };
        let nodes = mem::take(&mut maintenance.nodes);
        // Out of every list first, while what its nodes have added can still be taken back.
        maintenance.facts.stage = Stage::Idle;
        maintenance.facts.nodes = haulout_api_types::selector::NodeMatcher::default();
        self.assign_all(&nodes);
        self.maintenances.remove(&id);
        self.changed_maintenances.remove(&id);
        self.waits_are_stale = true;
        self.groups = None;
    }

    fn treat(&self, node: &Arc<str>, facts: PodFacts<L>) -> PodRecord<L> {
        let record = self.nodes.get(node);
        let node_labels = record.and_then(|record| record.facts.as_ref()).map(|node| &node.labels);
        let namespace = self.namespaces.get(&facts.key.namespace);
        let treatment = self.rules.treat(&node_labels, namespace, &facts.labels, facts.pod_type);
        let (behavior, order) = (treatment.behavior, treatment.order);
        let unclear = match treatment.source {
            Source::Unreadable(rule) => Some(Unclear::Rule(rule.into())),
            Source::NamespaceUnknown(rule) => Some(Unclear::Namespace(rule.into())),
            _ => None,
        };
        let draining = record.into_iter().flat_map(|record| &record.draining);
        let first = draining
            .filter_map(|id| self.maintenances.get(id))
            .map(|m| m.facts.plan.first_step(facts.pod_type, facts.priority, order, &facts.labels))
            .collect();
        let placeless = self.places.is_placeless(&facts.key);
        PodRecord { facts, behavior, order, unclear, first, placeless }
    }

    /// Applies the rules anew to pods of a node.
    fn treat_node(&mut self, node: &Arc<str>, concerned: impl Fn(&PodKey) -> bool) -> bool {
        let Some(record) = self.nodes.get_mut(node) else { return false };
        let keys: Vec<PodKey> = record.pods.keys().filter(|key| concerned(key)).cloned().collect();
        for key in &keys {
            let Some(pod) = self.nodes.get_mut(node).and_then(|record| record.pods.remove(key)) else {
                continue;
            };
            let pod = self.treat(node, pod.facts);
            if let Some(record) = self.nodes.get_mut(node) {
                record.pods.insert(key.clone(), pod);
            }
        }
        !keys.is_empty()
    }

    fn treat_again(&mut self, concerned: impl Fn(&PodKey) -> bool) {
        let names: Vec<Arc<str>> = self.nodes.keys().cloned().collect();
        for name in names {
            if self.treat_node(&name, &concerned) {
                self.count(&name);
            }
        }
    }
}

//! Processes changes: assigns maintenances to nodes, updates the sums of each maintenance, raises the targets of nodes, and
//! breaks ties.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;

use haulout_api_types::drain_plan::EntryMatcher;
use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::{MaintenanceOnNode, Stage};
use haulout_api_types::selector::Labels;
use jiff::Timestamp;

use crate::announce;
use crate::assess::{Assessment, View, assess};
use crate::facts::PodFacts;
use crate::intersections;
use crate::node::{Cordon, Drain, NodeRecord};
use crate::planner::{Id, Maintenance, Planner, PodScope};
use crate::totals::Sign;

impl<L: Labels + Clone + PartialEq> Planner<L> {
    pub(crate) fn assign_all(&mut self, nodes: &BTreeSet<Arc<str>>) {
        for name in nodes {
            self.assign(name);
        }
        self.waits_are_stale = true;
        self.groups = None;
    }

    /// Removes a deleted node from its maintenances.
    pub(crate) fn unassign(&mut self, name: &Arc<str>) {
        let Some(mut record) = self.nodes.remove(name) else { return };
        self.recounted.extend(record.drains.iter().map(|drain| drain.id));
        retract(&mut record, name, &mut self.maintenances, &mut self.neighbours);
        for (id, maintenance) in &mut self.maintenances {
            let selected = maintenance.nodes.remove(name);
            let missing =
                maintenance.facts.nodes.names_node(name) && maintenance.missing.insert(name.clone());
            if selected || missing {
                self.changed_maintenances.insert(*id);
            }
        }
        self.changed_nodes.insert(name.clone());
        self.waits_are_stale = true;
        self.groups = None;
        self.own_pods.forget_node(name);
        self.update_open_node(name);
    }

    /// Finds the maintenances of a node, after its labels or the stage of a maintenance have changed.
    pub(crate) fn assign(&mut self, name: &Arc<str>) {
        let Some(record) = self.nodes.get_mut(name) else { return };
        self.recounted.extend(record.drains.iter().map(|drain| drain.id));
        retract(record, name, &mut self.maintenances, &mut self.neighbours);
        let mut members: Vec<Id> = Vec::new();
        for (id, maintenance) in &mut self.maintenances {
            if maintenance.facts.nodes.matches(name, &record.facts.labels) {
                maintenance.nodes.insert(name.clone());
                members.push(*id);
            } else {
                maintenance.nodes.remove(name);
            }
            if maintenance.deleted.remove(name) | maintenance.missing.remove(name) {
                self.changed_maintenances.insert(*id);
            }
        }
        self.changed_maintenances.extend(record.members.iter().chain(&members));
        let age = |id: &Id| self.maintenances.get(id).map(Maintenance::age);
        members.sort_by(|a, b| age(a).cmp(&age(b)));
        let of = |id: &Id| self.maintenances.get(id).map(|maintenance| &maintenance.facts);
        let is_draining = |id: &Id| of(id).is_some_and(|facts| facts.stage == Stage::Drain);
        let on_node = |id: &Id| of(id).map(|facts| facts.on_node(Stage::Complete));
        let draining: Vec<Id> = members.iter().copied().filter(is_draining).collect();
        let drainers: Vec<MaintenanceOnNode> = draining.iter().filter_map(on_node).collect();
        if record.drains.is_empty() && !draining.is_empty() {
            start_drain(record, &drainers);
        } else {
            record.past.extend(record.drains.iter().filter_map(|drain| on_node(&drain.id)));
        }
        record.past.retain(|past| !drainers.iter().any(|drainer| drainer.uid == past.uid));
        if draining.is_empty() {
            record.past.clear();
            record.targets = DrainTargets::default();
            record.extra = None;
        }
        let drain = |id: Id| {
            let at = record.drains.iter().find(|known| known.id == id).and_then(|known| known.at);
            Drain { id, at, forwarded_by: Vec::new(), forwarded_by_past: false }
        };
        let drains: Vec<Drain> = draining.iter().copied().map(drain).collect();
        let mut stages = members.iter().filter_map(of);
        record.cordon = match () {
            () if stages.clone().any(|facts| matches!(facts.stage, Stage::Cordon | Stage::Drain)) => {
                Cordon::Wanted
            }
            () if stages.any(|facts| facts.uncordons) => Cordon::Unwanted,
            () => Cordon::Unmanaged,
        };
        let timeouts = draining.iter().filter_map(of).map(|facts| facts.volume_timeout);
        record.volume_timeout = timeouts.collect::<Option<Vec<_>>>().and_then(|all| all.into_iter().max());
        record.reassigned = true;
        record.members = members;
        record.drains = drains;
        self.recounted.extend(draining);
        count_reach(Sign::Plus, &record.drains, &record.targets, &mut self.maintenances);
        count_neighbours(Sign::Plus, record, &mut self.neighbours);
        self.waits_are_stale = true;
        self.groups = None;
        self.changed_nodes.insert(name.clone());
        self.update_open_node(name);
        self.stale.insert(name.clone());
    }

    /// Assesses a node again and updates the sums of its maintenances.
    pub(crate) fn reassess(
        &mut self,
        name: &Arc<str>,
        now: Timestamp,
        pods: &mut impl FnMut(&Arc<str>, PodScope) -> Vec<PodFacts<L>>,
    ) {
        let Some(record) = self.nodes.get(name) else { return };
        if !record.drains.is_empty() {
            self.to_advance.insert(name.clone());
        }
        let pods = self.read(name, pods);
        self.find_alternatives(name, &pods);
        self.assess_node(name, &pods, now);
    }

    /// Advances a node to the steps of its maintenances.
    pub(crate) fn advance(
        &mut self,
        name: &Arc<str>,
        now: Timestamp,
        pods: &mut impl FnMut(&Arc<str>, PodScope) -> Vec<PodFacts<L>>,
    ) {
        let Some(record) = self.nodes.get_mut(name) else { return };
        let mut moved = mem::take(&mut record.reassigned) || record.extra.is_some();
        for drain in &mut record.drains {
            let step =
                self.maintenances.get(&drain.id).map(|m| m.step_on(record.assessment.defers_later_types));
            if drain.at < step {
                drain.at = step;
                moved = true;
            }
        }
        if !moved && record.assessment.truncated.is_empty() {
            return;
        }
        self.changed_maintenances.extend(&record.members);
        self.changed_nodes.insert(name.clone());
        let pods = self.read(name, pods);
        // Targets that turn out to be truncated are added at once.
        for _ in 0..2 {
            let Some(record) = self.nodes.get_mut(name) else { return };
            add_truncated(record);
            raise_targets(record, &mut self.maintenances);
            self.assess_node(name, &pods, now);
            if self.nodes.get(name).is_none_or(|record| record.assessment.truncated.is_empty()) {
                return;
            }
        }
    }

    fn read(
        &self,
        name: &Arc<str>,
        pods: &mut impl FnMut(&Arc<str>, PodScope) -> Vec<PodFacts<L>>,
    ) -> Vec<PodFacts<L>> {
        let drained = self.nodes.get(name).is_some_and(|record| !record.drains.is_empty());
        pods(name, if drained { PodScope::All(self.drain_started(name)) } else { PodScope::WithEvacuation })
    }

    /// Assesses a node and stores the result.
    fn assess_node(&mut self, name: &Arc<str>, pods: &[PodFacts<L>], now: Timestamp) {
        let Some(node) = self.nodes.get(name) else { return };
        let plan = |drain: &'_ Drain| self.maintenances.get(&drain.id).map(|m| &*m.facts.plan);
        let view = View {
            served: self.served,
            rules: &self.rules,
            namespaces: &self.namespaces,
            node,
            drains: node.drains.iter().filter_map(|drain| Some((drain, plan(drain)?))).collect(),
            unreadable: &self.unreadable,
            own_pods: &self.own_pods,
        };
        let found = assess(&view, pods, now);
        self.store_assessment(name, found);
    }

    /// Stores the assessment of a node and replaces the previous one in the sums of its maintenances.
    fn store_assessment(&mut self, name: &Arc<str>, found: Assessment) {
        let Some(record) = self.nodes.get_mut(name) else { return };
        if found == record.assessment {
            return;
        }
        let gone =
            record.assessment.pods.iter().filter(|(uid, pod)| pod.leaving && !found.pods.contains_key(uid));
        let gone = u32::try_from(gone.count()).unwrap_or(u32::MAX);
        for drain in record.drains.iter().filter(|_| gone > 0) {
            if let Some(maintenance) = self.maintenances.get_mut(&drain.id) {
                maintenance.totals.evacuated = maintenance.totals.evacuated.saturating_add(gone);
            }
        }
        self.waits_are_stale |= changes_waits(&record.assessment, &found);
        add(Sign::Minus, record, name, &mut self.maintenances);
        record.assessment = found;
        add(Sign::Plus, record, name, &mut self.maintenances);
        self.recounted.extend(record.drains.iter().map(|drain| drain.id));
        self.changed_maintenances.extend(&record.members);
        self.changed_nodes.insert(name.clone());
    }

    /// In each group of maintenances that makes no progress although pods remain, lets the oldest maintenance win.
    pub(crate) fn break_ties(&mut self) -> bool {
        let groups = self.groups.get_or_insert_with(|| {
            let drains = |(_, maintenance): &(&Id, &Maintenance)| maintenance.facts.stage == Stage::Drain;
            let ids = self.maintenances.iter().filter(drains).map(|(id, _)| *id);
            intersections::groups(ids, self.neighbours.keys().copied())
        });
        let mut winners: Vec<Id> = Vec::new();
        for group in groups {
            let all = || group.iter().filter_map(|id| Some((*id, self.maintenances.get(id)?)));
            if all().all(|(_, m)| m.totals.counts.targeted == 0 && m.totals.counts.volumes == 0) {
                let waiting = all().filter(|(_, m)| m.totals.has_work());
                winners.extend(waiting.min_by(|(_, a), (_, b)| a.age().cmp(&b.age())).map(|(id, _)| id));
            }
        }
        let mut raised = false;
        for id in winners {
            let Some(maintenance) = self.maintenances.get_mut(&id) else { continue };
            for name in maintenance.nodes.clone() {
                let Some(record) = self.nodes.get_mut(&name) else { continue };
                let targets = maintenance.targets(maintenance.step_on(record.assessment.defers_later_types));
                if !record.targets.includes(&targets) {
                    record.extra = Some(targets);
                    self.to_advance.insert(name);
                    raised = true;
                }
            }
        }
        raised
    }

    /// Computes again which maintenance waits for which, if that may have changed.
    pub(crate) fn refresh_waits(&mut self) {
        if !mem::take(&mut self.waits_are_stale) {
            return;
        }
        let draining = self.maintenances.iter().filter(|(_, m)| m.facts.stage == Stage::Drain);
        let waiters = draining.map(|(id, m)| intersections::Waiter {
            id: *id,
            moves: m.totals.own > 0,
            limiters: m.totals.limiters.keys().copied().collect(),
        });
        for (id, mut roots) in intersections::roots(&waiters.collect::<Vec<_>>()) {
            let age = |id: &Id| self.maintenances.get(id).map(Maintenance::age);
            roots.sort_by(|a, b| age(a).cmp(&age(b)));
            let Some(maintenance) = self.maintenances.get_mut(&id).filter(|m| m.waits_for != roots) else {
                continue;
            };
            maintenance.waits_for = roots;
            self.changed_maintenances.insert(id);
            self.changed_nodes.extend(maintenance.totals.waiting_nodes.iter().cloned());
        }
    }
}

type Maintenances = BTreeMap<Id, Maintenance>;
type Neighbours = BTreeMap<(Id, Id), u32>;

/// Whether a new assessment may change which maintenance waits for which.
fn changes_waits(old: &Assessment, new: &Assessment) -> bool {
    let links = |found: &Assessment| {
        let one = found.drains.iter().map(|drain| (drain.id, drain.own == 0, drain.limited_by.clone()));
        (one.collect::<Vec<_>>(), found.counts.moving() == 0)
    };
    links(old) != links(new)
}

/// Starts with the targets in the node's annotation, if one of the maintenances that drain the node now has reached some of
/// them. Targets of earlier maintenances are ignored.
fn start_drain<L>(record: &mut NodeRecord<L>, drainers: &[MaintenanceOnNode]) {
    record.targets = DrainTargets::default();
    record.past.clear();
    let known = record.facts.maintenances.as_deref();
    let drained = known.unwrap_or_default().iter().filter(|known| known.stage != Stage::Cordon);
    let is_drainer = |known: &MaintenanceOnNode| drainers.iter().any(|drainer| drainer.uid == known.uid);
    if known.is_none() || drained.clone().any(is_drainer) {
        record.targets = record.facts.reached.clone();
        record.past =
            drained.map(|known| MaintenanceOnNode { stage: Stage::Complete, ..known.clone() }).collect();
    }
}

/// Adds truncated targets for pods that all maintenances have reached.
fn add_truncated<L>(record: &mut NodeRecord<L>) {
    if !record.assessment.truncated.is_empty() {
        let mut extra = record.extra.take().map(|extra| DrainTargets::clone(&extra)).unwrap_or_default();
        for entry in mem::take(&mut record.assessment.truncated) {
            extra.insert(entry);
        }
        record.extra = Some(Arc::new(extra));
    }
}

fn raise_targets<L>(record: &mut NodeRecord<L>, maintenances: &mut Maintenances) {
    let mut reached: Vec<(Id, Arc<DrainTargets>)> = Vec::with_capacity(record.drains.len());
    for drain in &record.drains {
        if let (Some(maintenance), Some(at)) = (maintenances.get_mut(&drain.id), drain.at) {
            reached.push((drain.id, maintenance.targets(at)));
        }
    }
    let old = record.targets.clone();
    let mut distinct: Vec<&Arc<DrainTargets>> = Vec::new();
    for (_, targets) in &reached {
        if !distinct.contains(&targets) {
            distinct.push(targets);
        }
    }
    if let [first, others @ ..] = distinct.as_slice() {
        let all = others.iter().fold(DrainTargets::clone(first), |all, next| all.intersection(next));
        record.targets.extend(&all);
    }
    if let Some(extra) = record.extra.take() {
        record.targets.extend(&extra);
    }
    if old != record.targets {
        record.too_large = !announce::fit(&record.targets);
        count_reach(Sign::Minus, &record.drains, &old, maintenances);
        count_reach(Sign::Plus, &record.drains, &record.targets, maintenances);
    }
    let reached_by_none = |entry: &EntryMatcher| !reached.iter().any(|(_, own)| own.includes_entry(entry));
    let by_past = record.targets.iter().any(reached_by_none);
    count_forwarded(Sign::Minus, record, maintenances);
    if !by_past {
        record.past.clear();
    }
    for drain in &mut record.drains {
        let own = reached.iter().find(|(id, _)| *id == drain.id).map(|(_, own)| own);
        drain.forwarded_by = own.map(|own| ahead_of(own, &record.targets, &reached)).unwrap_or_default();
        drain.forwarded_by_past = by_past;
    }
    count_forwarded(Sign::Plus, record, maintenances);
}

/// The maintenances that have reached targets that this one has not.
fn ahead_of(own: &DrainTargets, targets: &DrainTargets, reached: &[(Id, Arc<DrainTargets>)]) -> Vec<Id> {
    let beyond: Vec<_> = targets.iter().filter(|entry| !own.includes_entry(entry)).collect();
    let is_ahead = |other: &DrainTargets| beyond.iter().any(|entry| other.includes_entry(entry));
    reached.iter().filter(|(_, other)| is_ahead(other)).map(|(id, _)| *id).collect()
}

fn count_forwarded<L>(sign: Sign, record: &NodeRecord<L>, maintenances: &mut Maintenances) {
    for drain in &record.drains {
        let Some(Maintenance { totals, .. }) = maintenances.get_mut(&drain.id) else { continue };
        for past in record.past.iter().filter(|_| drain.forwarded_by_past) {
            sign.apply_to(&mut totals.forwarded_by_past, past.name.as_str().into());
        }
        for other in &drain.forwarded_by {
            sign.apply_to(&mut totals.forwarded_by, *other);
        }
    }
}

/// Adds or subtracts the assessment of a node.
fn add<L>(sign: Sign, record: &NodeRecord<L>, name: &Arc<str>, maintenances: &mut Maintenances) {
    for id in &record.members {
        if let Some(maintenance) = maintenances.get_mut(id) {
            maintenance.totals.add_to_member(sign, name, &record.assessment);
        }
    }
    for (place, drain) in record.assessment.drains.iter().enumerate() {
        if let Some(maintenance) = maintenances.get_mut(&drain.id) {
            maintenance.totals.add_to_drainer(sign, name, &record.assessment, drain, place == 0);
        }
    }
}

/// Subtracts everything that a node has added to its maintenances, before these change.
fn retract<L>(
    record: &mut NodeRecord<L>,
    name: &Arc<str>,
    maintenances: &mut Maintenances,
    neighbours: &mut Neighbours,
) {
    add(Sign::Minus, record, name, maintenances);
    count_forwarded(Sign::Minus, record, maintenances);
    count_reach(Sign::Minus, &record.drains, &record.targets, maintenances);
    count_neighbours(Sign::Minus, record, neighbours);
    // The pods that had to leave are needed to count those that have left.
    record.assessment = Assessment { pods: mem::take(&mut record.assessment.pods), ..Assessment::default() };
}

fn count_reach(sign: Sign, drains: &[Drain], targets: &DrainTargets, maintenances: &mut Maintenances) {
    for drain in drains {
        if let Some(Maintenance { totals, facts, .. }) = maintenances.get_mut(&drain.id) {
            totals.count_reach(sign, &facts.plan, targets);
        }
    }
}

fn count_neighbours<L>(sign: Sign, record: &NodeRecord<L>, neighbours: &mut Neighbours) {
    for (a, b) in record.drains.iter().zip(record.drains.iter().skip(1)) {
        sign.apply_to(neighbours, (a.id, b.id));
    }
}

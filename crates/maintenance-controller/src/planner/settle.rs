//! Working off changes: who maintains a node, what each maintenance counts on it, how far its targets go, and
//! the tie-break.

use std::collections::BTreeSet;
use std::sync::Arc;

use fixedbitset::FixedBitSet;
use haulout_api_types::drain_plan::EntryMatcher;
use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::{MaintenanceOnNode, Stage};
use haulout_api_types::selector::Labels;

use super::node::{Cordon, Marks, NodeRecord, View};
use super::tally::Sign;
use super::{Id, Maintenance, Planner, waits};
use crate::announce;
use crate::plan::StepNumber;

impl<L: Labels + Clone + PartialEq> Planner<L> {
    /// Puts a node into the queue.
    fn enqueue(&mut self, name: &Arc<str>) {
        if let Some(record) = self.nodes.get_mut(name)
            && !record.queued
        {
            record.queued = true;
            self.queue.push_back(name.clone());
        }
    }

    pub(super) fn assign_all(&mut self, nodes: &BTreeSet<Arc<str>>) {
        // All of them are counted before any is looked at, because a maintenance is as far as its last node.
        for name in nodes {
            self.assign(name);
        }
    }

    /// Finds out who maintains a node, after its labels or somebody's stage have changed.
    pub(super) fn assign(&mut self, name: &Arc<str>) {
        let Some(record) = self.nodes.get_mut(name) else { return };
        let before = currents(&self.maintenances, &record.draining);
        retract(record, name, &mut self.maintenances, &mut self.neighbours);
        let mut members: Vec<Id> = Vec::new();
        for (id, maintenance) in &mut self.maintenances {
            let labels = record.facts.as_ref().map(|facts| &facts.labels);
            if labels.is_some_and(|labels| maintenance.facts.nodes.matches(name, labels)) {
                maintenance.nodes.insert(name.clone());
                members.push(*id);
            } else {
                maintenance.nodes.remove(name);
            }
            let changed = if labels.is_some() {
                maintenance.deleted.remove(name) | maintenance.missing.remove(name)
            } else {
                maintenance.facts.nodes.names_node(name) && maintenance.missing.insert(name.clone())
            };
            if changed {
                self.changed_maintenances.insert(*id);
            }
        }
        self.changed_maintenances.extend(record.members.iter().chain(&members));
        members.sort_by(|a, b| {
            let age = |id| self.maintenances.get(id).map(Maintenance::age);
            age(a).cmp(&age(b))
        });
        let drains = |id: &&Id| self.maintenances.get(id).is_some_and(|m| m.facts.stage == Stage::Drain);
        let draining: Vec<Id> = members.iter().filter(drains).copied().collect();
        let on_node = |id: &Id| {
            let facts = &self.maintenances.get(id)?.facts;
            let (uid, name) = (facts.uid.to_string(), facts.name.to_string());
            Some(MaintenanceOnNode { uid, name, stage: Stage::Complete })
        };
        let drainers: Vec<MaintenanceOnNode> = draining.iter().filter_map(on_node).collect();
        if record.draining.is_empty() && !draining.is_empty() {
            begin_drain(record, &drainers);
        } else {
            record.past.extend(record.draining.iter().filter_map(on_node));
        }
        record.past.retain(|past| !drainers.iter().any(|drainer| drainer.uid == past.uid));
        let at = |id: &Id| {
            let place = record.draining.iter().position(|known| known == id)?;
            record.at.get(place).copied().flatten()
        };
        record.at = draining.iter().map(at).collect();
        if draining.is_empty() {
            record.past.clear();
            record.targets = DrainTargets::default();
            record.extra = None;
        }
        let plans: Vec<_> = draining
            .iter()
            .filter_map(|id| self.maintenances.get(id))
            .map(|m| m.facts.plan.clone())
            .collect();
        for pod in record.pods.values_mut() {
            let facts = &pod.facts;
            let first = |plan: &Arc<crate::plan::Plan>| {
                plan.first_step(facts.pod_type, facts.priority, pod.order, &facts.labels)
            };
            pod.first = plans.iter().map(first).collect();
        }
        let mut stages = members.iter().filter_map(|id| self.maintenances.get(id)).map(|m| &m.facts);
        record.cordon = match () {
            () if stages.clone().any(|facts| matches!(facts.stage, Stage::Cordon | Stage::Drain)) => {
                Cordon::Wanted
            }
            () if stages.any(|facts| facts.uncordons) => Cordon::Unwanted,
            () => Cordon::Nobodys,
        };
        let timeouts =
            draining.iter().filter_map(|id| self.maintenances.get(id)).map(|m| m.facts.volume_timeout);
        record.volume_timeout = timeouts.collect::<Option<Vec<_>>>().and_then(|all| all.into_iter().max());
        record.reassigned = true;
        record.members = members;
        record.draining = draining;
        extend(record, &mut self.maintenances, &mut self.neighbours);
        self.waits_are_stale = true;
        self.groups = None;
        self.count(name);
        // A maintenance may have had nothing left but what was on this node.
        let risen = |(id, step): (Id, StepNumber)| {
            self.maintenances.get(&id).filter(|m| m.tally.current() > step).map(|_| id)
        };
        let risen: Vec<Id> = before.into_iter().filter_map(risen).collect();
        self.enqueue_nodes_of(&risen);
    }

    /// Counts what is left on a node, so that its maintenances know which step they are at.
    pub(super) fn count(&mut self, name: &Arc<str>) {
        self.note_openness(name);
        let Some(record) = self.nodes.get_mut(name) else { return };
        record.completing = record.has_completing(self.served);
        record.stranded = record.has_stranded(self.served);
        let counted = record.count(self.served, &volume_steps(&self.maintenances, &record.draining));
        let mut risen: Vec<Id> = Vec::new();
        for ((id, old), new) in record.draining.iter().zip(&record.counted).zip(&counted) {
            let Some(maintenance) = self.maintenances.get_mut(id).filter(|_| old != new) else { continue };
            let before = maintenance.tally.current();
            maintenance.tally.count_steps(Sign::Minus, old);
            maintenance.tally.count_steps(Sign::Plus, new);
            if maintenance.tally.current() > before {
                risen.push(*id);
            }
        }
        record.counted = counted;
        self.enqueue(name);
        self.enqueue_nodes_of(&risen);
    }

    fn enqueue_nodes_of(&mut self, ids: &[Id]) {
        for id in ids {
            let Some(maintenance) = self.maintenances.get(id) else { continue };
            for name in &maintenance.nodes {
                if let Some(record) = self.nodes.get_mut(name)
                    && !record.queued
                {
                    record.queued = true;
                    self.queue.push_back(name.clone());
                }
            }
        }
    }

    /// Brings a node up to where its maintenances are.
    pub(super) fn advance(&mut self, name: &Arc<str>) {
        let Some(record) = self.nodes.get_mut(name) else { return };
        record.queued = false;
        let mut moved = std::mem::take(&mut record.reassigned) || record.extra.is_some();
        let lingers = record.lingers();
        for (at, id) in record.at.iter_mut().zip(&record.draining) {
            let Some(current) = self.maintenances.get(id).map(|m| m.step_on(lingers)) else {
                continue;
            };
            if at.is_none_or(|at| at < current) {
                *at = Some(current);
                moved = true;
            }
        }
        if moved {
            raise_targets(record, &mut self.maintenances);
        }
        let plans =
            record.draining.iter().filter_map(|id| Some(self.maintenances.get(id)?.facts.plan.clone()));
        let cut = record.cut(self.served, &plans.collect::<Vec<_>>());
        if !cut.is_empty() {
            record.extra = Some(Arc::new(cut.into_iter().collect()));
            raise_targets(record, &mut self.maintenances);
            moved = true;
        }
        let steps = volume_steps(&self.maintenances, &record.draining);
        let view = record.look(self.served, &steps);
        let marks = record.marks(&view, &self.unreadable);
        if moved || view != record.view || marks != record.counted_marks {
            self.waits_are_stale |= changes_waits(&record.view, &view);
            tally(Sign::Minus, record, name, &mut self.maintenances);
            record.view = view;
            record.counted_marks = marks;
            tally(Sign::Plus, record, name, &mut self.maintenances);
            self.changed_maintenances.extend(&record.members);
        }
        // Pods to evacuate may be others even where all numbers are the same.
        self.changed_nodes.insert(name.clone());
    }

    /// Lets the oldest maintenance of each group win in which nothing moves though something is left.
    pub(super) fn break_ties(&mut self) -> bool {
        let groups = self.groups.get_or_insert_with(|| {
            let drains = |(_, maintenance): &(&Id, &Maintenance)| maintenance.facts.stage == Stage::Drain;
            let ids = self.maintenances.iter().filter(drains).map(|(id, _)| *id);
            waits::groups(ids, self.neighbours.keys().copied())
        });
        let mut winners: Vec<Id> = Vec::new();
        for group in groups {
            let all = || group.iter().filter_map(|id| Some((*id, self.maintenances.get(id)?)));
            if all().all(|(_, m)| m.tally.counts.targeted == 0 && m.tally.counts.volumes == 0) {
                let waiting = all().filter(|(_, m)| m.tally.has_work());
                winners.extend(waiting.min_by(|(_, a), (_, b)| a.age().cmp(&b.age())).map(|(id, _)| id));
            }
        }
        let mut won = false;
        for id in winners {
            let Some(maintenance) = self.maintenances.get_mut(&id) else { continue };
            for name in maintenance.nodes.clone() {
                let Some(maintenance) = self.maintenances.get_mut(&id) else { continue };
                let Some(record) = self.nodes.get_mut(&name) else { continue };
                let targets = maintenance.targets(maintenance.step_on(record.lingers()));
                if !record.targets.includes(&targets) {
                    record.extra = Some(targets);
                    self.enqueue(&name);
                    won = true;
                }
            }
        }
        won
    }

    /// Works out anew who waits for whom, if that may have changed.
    pub(super) fn refresh_waits(&mut self) {
        if !std::mem::take(&mut self.waits_are_stale) {
            return;
        }
        let edges = self.maintenances.iter().filter(|(_, m)| m.facts.stage == Stage::Drain).map(|(id, m)| {
            waits::Waiter {
                id: *id,
                moves: m.tally.own > 0,
                limiters: m.tally.limiters.keys().copied().collect(),
            }
        });
        for (id, mut roots) in waits::roots(&edges.collect::<Vec<_>>()) {
            let age = |id: &Id| self.maintenances.get(id).map(Maintenance::age);
            roots.sort_by(|a, b| age(a).cmp(&age(b)));
            let Some(maintenance) = self.maintenances.get_mut(&id).filter(|m| m.waits_for != roots) else {
                continue;
            };
            maintenance.waits_for = roots;
            self.changed_maintenances.insert(id);
            self.changed_nodes.extend(maintenance.tally.waiting_nodes.iter().cloned());
        }
    }
}

type Maintenances = std::collections::BTreeMap<Id, Maintenance>;
type Neighbours = std::collections::BTreeMap<(Id, Id), u32>;

fn currents(maintenances: &Maintenances, ids: &[Id]) -> Vec<(Id, StepNumber)> {
    ids.iter().filter_map(|id| Some((*id, maintenances.get(id)?.tally.current()))).collect()
}

fn volume_steps(maintenances: &Maintenances, draining: &[Id]) -> Vec<StepNumber> {
    draining.iter().filter_map(|id| Some(maintenances.get(id)?.facts.plan.volume_step())).collect()
}

/// Whether the answer to "who waits for whom" may be another one.
fn changes_waits(old: &View, new: &View) -> bool {
    old.limiters != new.limiters
        || old.own.len() != new.own.len()
        || old.own.iter().zip(&new.own).any(|(a, b)| (*a == 0) != (*b == 0))
        || (old.counts.moving() == 0) != (new.counts.moving() == 0)
}

/// Takes over the targets that the node announces, if one of those that drain it now has helped to reach them. What others
/// have reached before, and let go of the node, counts for nothing.
fn begin_drain<L>(record: &mut NodeRecord<L>, drainers: &[MaintenanceOnNode]) {
    record.targets = DrainTargets::default();
    record.past.clear();
    let Some(facts) = &record.facts else { return };
    let known = facts.maintenances.as_deref();
    let drained = known.unwrap_or_default().iter().filter(|known| known.stage != Stage::Cordon);
    let is_drainer = |known: &MaintenanceOnNode| drainers.iter().any(|drainer| drainer.uid == known.uid);
    if known.is_none() || drained.clone().any(is_drainer) {
        record.targets = facts.reached.clone();
        record.past =
            drained.map(|known| MaintenanceOnNode { stage: Stage::Complete, ..known.clone() }).collect();
    }
}

fn raise_targets<L>(record: &mut NodeRecord<L>, maintenances: &mut Maintenances) {
    let mut reached: Vec<Arc<DrainTargets>> = Vec::with_capacity(record.draining.len());
    for (id, at) in record.draining.iter().zip(&record.at) {
        if let (Some(maintenance), Some(at)) = (maintenances.get_mut(id), at) {
            reached.push(maintenance.targets(*at));
        }
    }
    let old = record.targets.clone();
    let mut distinct: Vec<&Arc<DrainTargets>> = Vec::new();
    for targets in &reached {
        if !distinct.contains(&targets) {
            distinct.push(targets);
        }
    }
    let all = distinct
        .iter()
        .skip(1)
        .fold(distinct.first().map(|first| DrainTargets::clone(first)), |all, next| {
            all.map(|all| all.intersection(next))
        });
    record.targets.extend(&all.unwrap_or_default());
    if let Some(extra) = record.extra.take() {
        record.targets.extend(&extra);
    }
    if old != record.targets {
        record.too_large = !announce::fit(&record.targets);
    }
    for id in record.draining.iter().filter(|_| old != record.targets) {
        if let Some(Maintenance { tally, facts, .. }) = maintenances.get_mut(id) {
            tally.count_reach(Sign::Minus, &facts.plan, &old);
            tally.count_reach(Sign::Plus, &facts.plan, &record.targets);
        }
    }
    let forwarded = forwarded(&record.targets, &reached);
    let nobody_here = |entry: &&EntryMatcher| !reached.iter().any(|own| own.includes_entry(entry));
    let by_past = record.targets.iter().any(|entry| nobody_here(&entry));
    count_forwarded(Sign::Minus, record, maintenances);
    if !by_past {
        record.past.clear();
    }
    record.forwarded = forwarded;
    record.forwarded_by_past = vec![by_past; reached.len()];
    count_forwarded(Sign::Plus, record, maintenances);
}

/// By whom each maintenance is fast-forwarded: those who have reached targets that it has not.
fn forwarded(targets: &DrainTargets, reached: &[Arc<DrainTargets>]) -> Vec<FixedBitSet> {
    let ahead = |own: &Arc<DrainTargets>| {
        let mut ahead = FixedBitSet::with_capacity(reached.len());
        for entry in targets.iter().filter(|entry| !own.includes_entry(entry)) {
            let others = reached.iter().enumerate().filter(|(_, other)| other.includes_entry(entry));
            ahead.extend(others.map(|(place, _)| place));
        }
        ahead
    };
    reached.iter().map(ahead).collect()
}

fn count_forwarded<L>(sign: Sign, record: &NodeRecord<L>, maintenances: &mut Maintenances) {
    for (id, by_past) in record.draining.iter().zip(&record.forwarded_by_past) {
        if let Some(maintenance) = maintenances.get_mut(id).filter(|_| *by_past) {
            for past in &record.past {
                sign.apply_to(&mut maintenance.tally.forwarded_by_past, past.name.as_str().into(), 1);
            }
        }
    }
    for (id, ahead) in record.draining.iter().zip(&record.forwarded) {
        if let Some(maintenance) = maintenances.get_mut(id) {
            for other in ahead.ones().filter_map(|place| record.draining.get(place)) {
                sign.apply_to(&mut maintenance.tally.forwarded_by, *other, 1);
            }
        }
    }
}

/// Adds or takes back the numbers of the last look.
fn tally<L>(sign: Sign, record: &NodeRecord<L>, name: &Arc<str>, maintenances: &mut Maintenances) {
    for id in &record.members {
        if let Some(maintenance) = maintenances.get_mut(id) {
            maintenance.tally.count_marks(sign, name, record.counted_marks);
            maintenance.tally.count_refused(sign, name, &record.view.refused);
        }
    }
    let View { counts, own, limiters, blockers, .. } = &record.view;
    for (place, id) in record.draining.iter().enumerate() {
        let Some(Maintenance { tally, .. }) = maintenances.get_mut(id) else { continue };
        // A node that nobody has looked at yet has added nothing.
        let (Some(own), Some(limiters)) = (own.get(place), limiters.get(place)) else { continue };
        tally.count_pods(sign, counts, *own);
        tally.count_drained(sign, name, record.counted_marks.cordoned && counts.left == 0);
        tally.count_blockers(sign, name, blockers);
        tally.count_leaving(sign, name, counts);
        tally.count_skipped(sign, name, counts);
        for other in limiters.ones().filter_map(|place| record.draining.get(place)) {
            sign.apply_to(&mut tally.limiters, *other, 1);
        }
        let waits = place == 0 && counts.left > 0 && counts.moving() == 0;
        if waits && sign == Sign::Plus {
            tally.waiting_nodes.insert(name.clone());
        } else {
            tally.waiting_nodes.remove(name);
        }
    }
}

/// Takes back all that a node has added to its maintenances, before these change.
fn retract<L>(
    record: &mut NodeRecord<L>,
    name: &Arc<str>,
    maintenances: &mut Maintenances,
    neighbours: &mut Neighbours,
) {
    tally(Sign::Minus, record, name, maintenances);
    count_forwarded(Sign::Minus, record, maintenances);
    for (id, counted) in record.draining.iter().zip(&record.counted) {
        if let Some(Maintenance { tally, facts, .. }) = maintenances.get_mut(id) {
            tally.count_steps(Sign::Minus, counted);
            tally.count_reach(Sign::Minus, &facts.plan, &record.targets);
        }
    }
    count_neighbours(Sign::Minus, record, neighbours);
    record.view = View::default();
    record.counted_marks = Marks::default();
    record.forwarded.clear();
    record.forwarded_by_past.clear();
    record.counted.clear();
}

/// Adds what a node adds before it has been looked at.
fn extend<L>(record: &mut NodeRecord<L>, maintenances: &mut Maintenances, neighbours: &mut Neighbours) {
    record.counted = vec![Vec::new(); record.draining.len()];
    for id in &record.draining {
        if let Some(Maintenance { tally, facts, .. }) = maintenances.get_mut(id) {
            tally.count_reach(Sign::Plus, &facts.plan, &record.targets);
        }
    }
    count_neighbours(Sign::Plus, record, neighbours);
}

fn count_neighbours<L>(sign: Sign, record: &NodeRecord<L>, neighbours: &mut Neighbours) {
    for (a, b) in record.draining.iter().zip(record.draining.iter().skip(1)) {
        sign.apply_to(neighbours, (*a, *b), 1);
    }
}

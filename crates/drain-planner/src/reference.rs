//! A simple and slow reference implementation of the planner: it computes everything from the complete state each time. The
//! planner must produce the same results.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use haulout_api_types::drain_rule::DrainBehavior;
use haulout_api_types::drain_rules::DrainRules;
use haulout_api_types::node_maintenance::{PodType, Stage};

use crate::facts::{EvacuationOwnership, MaintenanceFacts, NodeFacts, PodFacts, PodKey};
use crate::plan::{Plan, ServedPodTypes, StepNumber, is_targeted};
use crate::testing::{Change, Evacuate, Map, at};

type Name = Arc<str>;

/// The pods that all these plans have reached with these steps.
type Region = Vec<(Arc<Plan>, StepNumber)>;

pub(crate) struct Reference {
    served: ServedPodTypes,
    rules: DrainRules,
    pub nodes: BTreeMap<Name, NodeFacts<Map>>,
    pub pods: BTreeMap<PodKey, PodFacts<Map>>,
    pub maintenances: BTreeMap<Name, MaintenanceFacts>,
    /// The pods that each node has reached.
    regions: BTreeMap<Name, Vec<Region>>,
    /// The step that each maintenance has reached on each node.
    at: BTreeMap<(Name, Name), StepNumber>,
    /// Number of ties broken so far.
    pub ties: usize,
    /// Nodes that were deleted after they had been drained, by maintenance.
    deleted: BTreeMap<Name, BTreeSet<Name>>,
}

/// Something on a node that has to leave.
#[derive(Clone)]
#[allow(clippy::large_enum_variant, reason = "there are few of them")]
pub(crate) enum Item {
    Pod(PodFacts<Map>),
    Volume,
}

impl Reference {
    pub fn new(served: ServedPodTypes) -> Self {
        Self {
            served,
            rules: DrainRules::default(),
            nodes: BTreeMap::new(),
            pods: BTreeMap::new(),
            maintenances: BTreeMap::new(),
            regions: BTreeMap::new(),
            at: BTreeMap::new(),
            ties: 0,
            deleted: BTreeMap::new(),
        }
    }

    pub fn apply(&mut self, change: Change) {
        match change {
            Change::Pod(pod) => drop(self.pods.insert(pod.key.clone(), pod)),
            Change::PodGone(key) => drop(self.pods.remove(&key)),
            Change::Node(node) => {
                for deleted in self.deleted.values_mut() {
                    deleted.remove(&node.name);
                }
                self.nodes.insert(node.name.clone(), node);
            }
            Change::NodeGone(name) => {
                if self.is_drained(&name) {
                    let by: Vec<Name> = self.draining(&name).iter().map(|m| m.name.clone()).collect();
                    for maintenance in by {
                        self.deleted.entry(maintenance).or_default().insert(name.clone());
                    }
                }
                self.nodes.remove(&name);
            }
            Change::Maintenance(facts) => drop(self.maintenances.insert(facts.name.clone(), facts)),
            Change::MaintenanceGone(name) => {
                self.maintenances.remove(&name);
                self.deleted.remove(&name);
            }
            Change::Rules(rules) => self.rules = rules,
            Change::Namespace(..) => unreachable!("namespaces have their own tests"),
        }
    }

    /// Draining maintenances of a node, oldest first.
    pub fn draining(&self, node: &str) -> Vec<&MaintenanceFacts> {
        let Some(facts) = self.nodes.get(node) else { return Vec::new() };
        let drains = |m: &&MaintenanceFacts| m.stage == Stage::Drain && m.nodes.matches(node, &facts.labels);
        let mut found: Vec<_> = self.maintenances.values().filter(drains).collect();
        found.sort_by_key(|m| (m.created, m.name.clone()));
        found
    }

    fn drained_by(&self, maintenance: &MaintenanceFacts) -> Vec<Name> {
        let of = |node: &&Name| self.draining(node).iter().any(|m| m.name == maintenance.name);
        self.nodes.keys().filter(of).cloned().collect()
    }

    fn evaluation(&self, pod: &PodFacts<Map>) -> (DrainBehavior, i32) {
        let node = self.nodes.get(&pod.node).map(|node| &node.labels);
        let evaluation = self.rules.evaluate(&node, Some(&Map::new()), &pod.labels, pod.pod_type);
        (evaluation.behavior, evaluation.order)
    }

    fn must_leave(&self, pod: &PodFacts<Map>) -> bool {
        !pod.finished && self.served.serves(pod.pod_type) && self.evaluation(pod).0 != DrainBehavior::Skip
    }

    fn pods_on(&self, node: &str) -> impl Iterator<Item = &PodFacts<Map>> {
        self.pods.values().filter(move |pod| pod.node.as_ref() == node)
    }

    /// Everything on a node that has to leave.
    pub fn remaining(&self, node: &str) -> Vec<Item> {
        let pods: Vec<_> = self.pods_on(node).filter(|pod| self.must_leave(pod)).cloned().collect();
        let kept: BTreeSet<&Name> = self
            .pods_on(node)
            .filter(|pod| !pod.finished && (!self.must_leave(pod) || pod.pod_type != PodType::Default))
            .flat_map(|pod| pod.volumes.iter())
            .collect();
        let attached = self.nodes.get(node).into_iter().flat_map(|node| node.volumes.iter());
        let volumes = attached.filter(|volume| !kept.contains(volume)).map(|_| Item::Volume);
        let mut items: Vec<Item> = volumes.collect();
        items.extend(pods.into_iter().map(Item::Pod));
        items
    }

    /// Whether a node is cordoned and nothing remains on it.
    pub fn is_drained(&self, node: &str) -> bool {
        self.nodes.get(node).is_some_and(|facts| facts.cordoned) && self.remaining(node).is_empty()
    }

    pub fn deleted(&self, maintenance: &MaintenanceFacts) -> usize {
        self.deleted.get(&maintenance.name).map_or(0, BTreeSet::len)
    }

    /// Whether all nodes of a maintenance are drained, or were drained before they were deleted.
    pub fn all_drained(&self, maintenance: &MaintenanceFacts, named: &[&str]) -> bool {
        let was = |node: &str| self.deleted.get(&maintenance.name).is_some_and(|all| all.contains(node));
        maintenance.stage == Stage::Drain
            && !named.is_empty()
            && named.iter().all(|node| self.is_drained(node) || was(node))
    }

    /// Whether a node accepts new pods.
    fn is_open(&self, node: &NodeFacts<Map>) -> bool {
        let wants = |m: &MaintenanceFacts| {
            matches!(m.stage, Stage::Cordon | Stage::Drain) && m.nodes.matches(&node.name, &node.labels)
        };
        !node.cordoned && !self.maintenances.values().any(wants)
    }

    /// Whether a pod is one of Haulout's own pods and no other node accepts it.
    fn is_stranded(&self, pod: &PodFacts<Map>) -> bool {
        let Some(placement) = &pod.placement else { return false };
        let takes = |node: &NodeFacts<Map>| {
            self.is_open(node) && placement.fits(&node.name, &node.labels, &node.taints)
        };
        self.must_leave(pod)
            && pod.pod_type == PodType::Default
            && self.evaluation(pod).0 == DrainBehavior::Drain
            && !pod.terminating
            && !self.nodes.values().any(takes)
    }

    fn has_stranded(&self, node: &str) -> bool {
        self.pods_on(node).any(|pod| self.is_stranded(pod))
    }

    fn waits(&self, pod: &PodFacts<Map>) -> bool {
        self.must_leave(pod) && self.evaluation(pod).0 == DrainBehavior::WaitCompleted
    }

    /// Whether the drain waits until a pod of the node has finished.
    fn has_waiting(&self, node: &str) -> bool {
        self.pods_on(node).any(|pod| self.waits(pod))
    }

    /// Whether the plan waits for a pod or volume of a node: not if the pod finishes by itself, nor if it leaves after such a
    /// pod.
    fn counts(&self, node: &str, item: &Item) -> bool {
        match item {
            Item::Volume => !self.defers_later_types(node),
            Item::Pod(pod) if self.waits(pod) || self.is_stranded(pod) => false,
            Item::Pod(pod) => {
                let later = pod.pod_type != PodType::Default && self.defers_later_types(node);
                !later && (self.evaluation(pod).1 <= 0 || !self.has_waiting(node))
            }
        }
    }

    /// Whether later pod types on a node wait for a Default pod that stays for now.
    fn defers_later_types(&self, node: &str) -> bool {
        self.has_waiting(node) || self.has_stranded(node)
    }

    /// The pods and volumes of a node that the plan waits for.
    fn counted(&self, node: &str) -> Vec<Item> {
        self.remaining(node).into_iter().filter(|item| self.counts(node, item)).collect()
    }

    /// The remaining pods of a node that the plan does not wait for.
    pub fn uncounted(&self, node: &str) -> Vec<PodKey> {
        let uncounted = |item: Item| match &item {
            Item::Pod(pod) if !self.counts(node, &item) => Some(pod.key.clone()),
            _ => None,
        };
        self.remaining(node).into_iter().filter_map(uncounted).collect()
    }

    /// The pods of a node that should leave now, have to finish or are has_no_alternative; and the pods that leave after these but are
    /// already evacuating and are blocked.
    pub fn cases(&self, node: &str) -> (Vec<PodKey>, Vec<PodKey>) {
        let (mut concerned, mut to_advance) = (Vec::new(), Vec::new());
        for item in self.remaining(node).into_iter().filter(|_| !self.draining(node).is_empty()) {
            let Item::Pod(pod) = &item else { continue };
            let is_evacuating = pod.terminating || pod.evacuation != EvacuationOwnership::NoEvacuation;
            let stays = self.waits(pod) || self.is_stranded(pod);
            if stays || (self.counts(node, &item) && self.is_targeted(node, &item)) {
                concerned.push(pod.key.clone());
            } else if !self.counts(node, &item)
                && is_evacuating
                && (pod.blocked.is_some() || pod.returned.is_some())
            {
                to_advance.push(pod.key.clone());
            }
        }
        (concerned, to_advance)
    }

    /// The pods of a node that a rule skips.
    pub fn skipped(&self, node: &str) -> Vec<PodKey> {
        let skipped = |pod: &&PodFacts<Map>| !pod.finished && self.evaluation(pod).0 == DrainBehavior::Skip;
        self.pods_on(node).filter(skipped).map(|pod| pod.key.clone()).collect()
    }

    /// The step of a maintenance on a node: not beyond Default pods while one of them stays for now.
    fn step_on(&self, maintenance: &MaintenanceFacts, node: &str) -> StepNumber {
        let current = self.current(maintenance);
        let before_volumes = maintenance.plan.volume_step().saturating_sub(1);
        if self.defers_later_types(node) { current.min(before_volumes) } else { current }
    }

    pub fn first(&self, plan: &Plan, item: &Item) -> StepNumber {
        match item {
            Item::Pod(pod) => {
                plan.first_step(pod.pod_type, pod.priority, self.evaluation(pod).1, &pod.labels)
            }
            Item::Volume => plan.volume_step(),
        }
    }

    /// The current step of a maintenance: the lowest with anything remaining on any node.
    pub fn current(&self, maintenance: &MaintenanceFacts) -> StepNumber {
        let plan = &maintenance.plan;
        let nodes = self.drained_by(maintenance);
        let all = nodes.iter().flat_map(|node| self.counted(node));
        all.map(|item| self.first(plan, &item)).min().unwrap_or(plan.last())
    }

    pub fn has_reached(&self, maintenance: &MaintenanceFacts, node: &str, item: &Item) -> bool {
        let at = self.at.get(&(node.into(), maintenance.name.clone()));
        at.is_some_and(|at| self.first(&maintenance.plan, item) <= *at)
    }

    /// Whether something on a node is being removed.
    pub fn is_targeted(&self, node: &str, item: &Item) -> bool {
        match item {
            Item::Volume => !self
                .remaining(node)
                .iter()
                .any(|item| matches!(item, Item::Pod(pod) if pod.pod_type == PodType::Default)),
            Item::Pod(_) => {
                let regions = self.regions.get(node).into_iter().flatten();
                let inside =
                    |region: &Region| region.iter().all(|(plan, step)| self.first(plan, item) <= *step);
                regions.into_iter().any(inside)
            }
        }
    }

    /// Computes everything after a change.
    pub fn converge(&mut self) {
        let nodes: Vec<Name> = self.nodes.keys().cloned().collect();
        let mut at = BTreeMap::new();
        for node in &nodes {
            for maintenance in self.draining(node) {
                let key = (node.clone(), maintenance.name.clone());
                let known = self.at.get(&key).copied();
                at.insert(key, known.unwrap_or_default().max(self.step_on(maintenance, node)));
            }
        }
        self.at = at;
        for node in &nodes {
            let region: Region = self
                .draining(node)
                .iter()
                .map(|m| (m.plan.clone(), self.at[&(node.clone(), m.name.clone())]))
                .collect();
            let regions = self.regions.entry(node.clone()).or_default();
            if region.is_empty() {
                regions.clear();
            } else if !regions.contains(&region) {
                regions.push(region);
            }
        }
        self.regions.retain(|node, _| nodes.contains(node));
        self.break_ties();
    }

    fn group_of(&self, start: &MaintenanceFacts) -> BTreeSet<Name> {
        let mut group = BTreeSet::from([start.name.clone()]);
        loop {
            let before = group.len();
            for node in self.nodes.keys() {
                let here: Vec<Name> = self.draining(node).iter().map(|m| m.name.clone()).collect();
                if here.iter().any(|name| group.contains(name)) {
                    group.extend(here);
                }
            }
            if group.len() == before {
                return group;
            }
        }
    }

    fn break_ties(&mut self) {
        let mut winners: BTreeSet<Name> = BTreeSet::new();
        for maintenance in self.maintenances.values().filter(|m| m.stage == Stage::Drain) {
            let group: Vec<_> =
                self.group_of(maintenance).iter().map(|name| &self.maintenances[name]).collect();
            let nodes: BTreeSet<Name> = group.iter().flat_map(|m| self.drained_by(m)).collect();
            let moves = |node: &Name| self.counted(node).iter().any(|item| self.is_targeted(node, item));
            if nodes.iter().any(moves) {
                continue;
            }
            let waits =
                |m: &&&MaintenanceFacts| self.drained_by(m).iter().any(|node| !self.counted(node).is_empty());
            let oldest = group.iter().filter(waits).min_by_key(|m| (m.created, m.name.clone()));
            winners.extend(oldest.map(|m| m.name.clone()));
        }
        for name in winners {
            self.ties += 1;
            let maintenance = self.maintenances[&name].clone();
            for node in self.drained_by(&maintenance) {
                let region = vec![(maintenance.plan.clone(), self.step_on(&maintenance, &node))];
                self.regions.entry(node).or_default().push(region);
            }
        }
    }

    pub fn evacuate(&self, node: &str) -> Vec<Evacuate> {
        let remaining = self.remaining(node);
        let pods = || {
            remaining
                .iter()
                .filter_map(|item| if let Item::Pod(pod) = item { Some((item, pod)) } else { None })
        };
        let may_go = |item: &Item, pod: &PodFacts<Map>| {
            let (behavior, order) = self.evaluation(pod);
            let before = |other: &PodFacts<Map>| {
                other.pod_type == pod.pod_type && self.evaluation(other).1 < order && !self.is_stranded(other)
            };
            let first = !pods().any(|(_, other)| before(other));
            let held = pod.returned.as_ref().is_some_and(|returned| at(0) < returned.until);
            let ready = behavior == DrainBehavior::Drain && !pod.terminating && !held;
            ready && first && self.counts(node, item) && self.is_targeted(node, item)
        };
        let wanted_by = |item: &Item| -> Vec<Name> {
            self.draining(node)
                .iter()
                .filter(|m| self.has_reached(m, node, item))
                .map(|m| m.name.clone())
                .collect()
        };
        pods()
            .filter(|(item, pod)| may_go(item, pod))
            .map(|(item, pod)| Evacuate {
                pod: pod.key.clone(),
                on_behalf_of: wanted_by(item),
                announced: is_targeted(
                    &self.nodes[node].reached,
                    pod.pod_type,
                    pod.priority,
                    self.evaluation(pod).1,
                    &pod.labels,
                ),
            })
            .collect()
    }

    pub fn withdraw(&self, node: &str) -> Vec<PodKey> {
        let wanted = |pod: &&PodFacts<Map>| {
            self.must_leave(pod)
                && self.evaluation(pod).0 == DrainBehavior::Drain
                && !self.is_stranded(pod)
                && !self.draining(node).is_empty()
        };
        let ours =
            self.pods_on(node).filter(|pod| pod.evacuation == EvacuationOwnership::Ours && !pod.finished);
        ours.filter(|pod| !wanted(pod)).map(|pod| pod.key.clone()).collect()
    }

    /// The maintenances that limit a maintenance on a node.
    fn limiters_on(&self, maintenance: &MaintenanceFacts, node: &str) -> BTreeSet<Name> {
        let mut limiters = BTreeSet::new();
        for item in self.counted(node) {
            let held = matches!(item, Item::Pod(_))
                && !self.is_targeted(node, &item)
                && self.has_reached(maintenance, node, &item);
            if held {
                let others = self.draining(node).into_iter().filter(|m| !self.has_reached(m, node, &item));
                limiters.extend(others.map(|m| m.name.clone()));
            }
        }
        limiters
    }

    fn limiters(&self, maintenance: &MaintenanceFacts) -> BTreeSet<Name> {
        self.drained_by(maintenance).iter().flat_map(|node| self.limiters_on(maintenance, node)).collect()
    }

    fn roots(&self, maintenance: &MaintenanceFacts) -> BTreeSet<Name> {
        let mut reachable = BTreeSet::from([maintenance.name.clone()]);
        loop {
            let more: Vec<Name> =
                reachable.iter().flat_map(|name| self.limiters(&self.maintenances[name])).collect();
            let before = reachable.len();
            reachable.extend(more);
            if reachable.len() == before {
                break;
            }
        }
        let of = |wanted: &dyn Fn(&MaintenanceFacts) -> bool| -> BTreeSet<Name> {
            reachable.iter().filter(|name| wanted(&self.maintenances[*name])).cloned().collect()
        };
        let moves = |m: &MaintenanceFacts| {
            self.drained_by(m).iter().any(|node| {
                self.counted(node).iter().any(|i| self.is_targeted(node, i) && self.has_reached(m, node, i))
            })
        };
        let ends = of(&|m| self.limiters(m).is_empty());
        let ends = if ends.is_empty() { of(&moves) } else { ends };
        if ends.is_empty() { self.limiters(maintenance) } else { ends }
    }

    fn list(&self, names: BTreeSet<Name>) -> String {
        let mut names: Vec<_> = names.into_iter().collect();
        names.sort_by_key(|name| (self.maintenances[name].created, name.clone()));
        names.join(", ")
    }

    fn say(&self, nodes: &[Name], limiters: BTreeSet<Name>, roots: impl Fn() -> BTreeSet<Name>) -> String {
        let items: Vec<(Name, Item)> = nodes
            .iter()
            .flat_map(|node| self.counted(node).into_iter().map(|item| (node.clone(), item)))
            .collect();
        let finishing =
            nodes.iter().flat_map(|node| self.pods_on(node)).filter(|pod| self.waits(pod)).count();
        let s = |number: usize| if number == 1 { "" } else { "s" };
        let moving: Vec<_> = items.iter().filter(|(node, item)| self.is_targeted(node, item)).collect();
        let volumes = moving.iter().filter(|(_, item)| matches!(item, Item::Volume)).count();
        let has_no_alternative =
            nodes.iter().flat_map(|node| self.pods_on(node)).filter(|pod| self.is_stranded(pod)).count();
        if moving.is_empty() && finishing == 0 && has_no_alternative > 0 {
            format!("Waiting for a node for {has_no_alternative} pod{} of Haulout.", s(has_no_alternative))
        } else if moving.is_empty() && finishing == 0 {
            format!("Waiting for {}.", self.list(roots()))
        } else if moving.is_empty() {
            format!("Waiting for {finishing} pod{} to complete.", s(finishing))
        } else if volumes == moving.len() && finishing > 0 {
            format!(
                "Waiting for {volumes} volume{} to be detached and {finishing} pod{} to complete.",
                s(volumes),
                s(finishing)
            )
        } else if volumes == moving.len() {
            format!("Waiting for {volumes} volume{} to be detached.", s(volumes))
        } else if limiters.is_empty() {
            "Evacuating".into()
        } else {
            format!("Evacuating (limited by {})", self.list(limiters))
        }
    }

    pub fn node_message(&self, node: &Name) -> String {
        match self.draining(node).first() {
            Some(_) if self.is_drained(node) => "Drained".into(),
            Some(_) if self.remaining(node).is_empty() => "Waiting to be cordoned.".into(),
            Some(oldest) => {
                self.say(std::slice::from_ref(node), self.limiters_on(oldest, node), || self.roots(oldest))
            }
            None => String::new(),
        }
    }

    pub fn maintenance_message(&self, maintenance: &MaintenanceFacts, named: &[&str]) -> String {
        let nodes = self.drained_by(maintenance);
        let open = nodes.iter().filter(|node| !self.nodes[*node].cordoned).count();
        let was = |node: &str| self.deleted.get(&maintenance.name).is_some_and(|all| all.contains(node));
        let missing: BTreeSet<&str> =
            named.iter().copied().filter(|node| !self.nodes.contains_key(*node) && !was(node)).collect();
        let empty = nodes.iter().all(|node| self.remaining(node).is_empty());
        match () {
            () if maintenance.stage != Stage::Drain => return String::new(),
            () if !empty => {}
            () if self.all_drained(maintenance, named) => return "Drained".into(),
            () if open > 0 => {
                return format!("Waiting for {open} of {} nodes to be cordoned.", nodes.len());
            }
            () if !missing.is_empty() => {
                let missing: Vec<_> = missing.into_iter().collect();
                return format!("Waiting for nodes that do not exist: {}.", missing.join(", "));
            }
            () => return "No node is selected.".into(),
        }
        let age = |m: &MaintenanceFacts| (m.created, m.name.clone());
        let mut limiters = self.limiters(maintenance);
        limiters.retain(|name| age(&self.maintenances[name]) < age(maintenance));
        self.say(&nodes, limiters, || self.roots(maintenance))
    }

    /// Number of pending and of evacuating pods on these nodes.
    pub fn numbers(&self, nodes: &[Name]) -> (usize, usize) {
        let items = nodes.iter().flat_map(|node| self.remaining(node));
        let is_evacuating = |item: Item| match item {
            Item::Pod(pod) => Some(pod.terminating || pod.evacuation != EvacuationOwnership::NoEvacuation),
            Item::Volume => None,
        };
        let (yes, no): (Vec<_>, Vec<_>) = items.filter_map(is_evacuating).partition(|yes| *yes);
        (no.len(), yes.len())
    }

    pub fn nodes_of(&self, maintenance: &MaintenanceFacts) -> Vec<Name> {
        self.drained_by(maintenance)
    }
}

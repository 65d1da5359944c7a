//! Random clusters, maintenances and changes: the planner agrees with the reference, targets never shrink, no pod leaves out
//! of order, and in the end everything is drained.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use haulout_api_types::drain_rules::DrainRules;
use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::{DrainPlanEntry, MAX_WAITING_FOR, PodType, Stage};
use haulout_api_types::tolerations::Toleration;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::json;

use crate::NodePlan;
use crate::assess::MAX_SKIPPED;
use crate::facts::{
    Blocked, EvacuationOwnership, MaintenanceFacts, NodeFacts, PodFacts, PodKey, ReturnCause, Returned,
};
use crate::placement::{NodeSelection, Placement, Taint};
use crate::plan::{ServedPodTypes, is_targeted};
use crate::reference::{Item, Reference};
use crate::testing::*;

const NODES: [&str; 5] = ["n0", "n1", "n2", "n3", "n4"];
const APPS: [&str; 7] = ["x", "y", "z", "early", "late", "skip", "wait"];

#[derive(Clone, Debug)]
struct Random {
    served: ServedPodTypes,
    pods: Vec<(usize, i32, &'static str, PodType, bool)>,
    maintenances: Vec<(Vec<usize>, Vec<DrainPlanEntry>)>,
    attached: Vec<(usize, usize)>,
    with_rules: bool,
}

fn any_plan() -> impl Strategy<Value = Vec<DrainPlanEntry>> {
    let app = proptest::option::of(select(vec!["x", "y", "z"]));
    let one = (select(PodType::ALL.to_vec()), 0..4, app).prop_map(|(t, p, app)| entry(t, p, app));
    proptest::collection::vec(one, 0..5)
}

fn any_cluster() -> impl Strategy<Value = Random> {
    let served = select(vec![
        ServedPodTypes::DEFAULT,
        ServedPodTypes::ALL,
        ServedPodTypes::new([PodType::Default, PodType::DaemonSet]),
    ]);
    let pod_type =
        prop_oneof![4 => Just(PodType::Default), 1 => Just(PodType::DaemonSet), 1 => Just(PodType::Static)];
    let pod = (0..NODES.len(), 0..5, select(APPS.to_vec()), pod_type, any::<bool>());
    let nodes = proptest::collection::vec(0..NODES.len(), 0..4);
    (
        served,
        proptest::collection::vec(pod, 0..14),
        proptest::collection::vec((nodes, any_plan()), 1..5),
        proptest::collection::vec((0..NODES.len(), 0..4usize), 0..4),
        any::<bool>(),
    )
        .prop_map(|(served, pods, maintenances, attached, with_rules)| Random {
            served,
            pods,
            maintenances,
            attached,
            with_rules,
        })
}

fn some_rules() -> DrainRules {
    let of =
        |app: &str, drain| json!({"drain": drain, "pods": [{"selector": {"matchLabels": {"app": app}}}]});
    rules(&[
        ("early", of("early", json!({"behavior": "Drain", "order": -2}))),
        ("late", of("late", json!({"behavior": "Drain", "order": 3}))),
        ("skip", of("skip", json!({"behavior": "Skip"}))),
        ("wait", of("wait", json!({"behavior": "WaitCompleted"}))),
    ])
}

/// The planner and the reference, with the same input.
struct Comparison {
    random: Random,
    planner: Cluster,
    reference: Reference,
    targets: BTreeMap<Arc<str>, DrainTargets>,
    /// Pods that their plans did not wait for at some time, because a Default pod deferred later pods on their node.
    uncounted: BTreeSet<PodKey>,
    pods_created: usize,
}

impl Comparison {
    fn new(random: Random) -> Self {
        let mut comparison = Self {
            planner: Cluster::new(random.served),
            reference: Reference::new(random.served),
            random: random.clone(),
            targets: BTreeMap::new(),
            uncounted: BTreeSet::new(),
            pods_created: 0,
        };
        for name in NODES {
            comparison.apply(Change::Node(comparison.node(name)));
        }
        if random.with_rules {
            comparison.apply(Change::Rules(some_rules()));
        }
        for (node, priority, app, pod_type, volume) in random.pods {
            comparison.create_pod(node, priority, app, pod_type, volume);
        }
        for (i, _) in random.maintenances.iter().enumerate() {
            comparison.apply(Change::Maintenance(comparison.maintenance(i)));
        }
        comparison
    }

    fn node(&self, name: &str) -> NodeFacts<Map> {
        let here = self.random.attached.iter().filter(|(node, _)| NODES[*node] == name);
        NodeFacts { volumes: Arc::new(here.map(|(_, volume)| volume_name(*volume)).collect()), ..node(name) }
    }

    /// The nodes that a maintenance names.
    fn named(&self, name: &str) -> Vec<&'static str> {
        let number: usize = name.trim_start_matches('m').parse().unwrap();
        self.random.maintenances[number].0.iter().map(|node| NODES[*node]).collect()
    }

    fn maintenance(&self, i: usize) -> MaintenanceFacts {
        let (nodes, plan) = &self.random.maintenances[i];
        let nodes: Vec<&str> = nodes.iter().map(|node| NODES[*node]).collect();
        // Two maintenances have the same age: they are ordered by name.
        maintenance(&format!("m{i}"), i64::try_from(i / 2).unwrap(), &nodes, plan, self.random.served)
    }

    fn create_pod(&mut self, node: usize, priority: i32, app: &str, pod_type: PodType, volume: bool) {
        self.pods_created += 1;
        let name = format!("p{}", self.pods_created);
        let volumes: Arc<[Arc<str>]> =
            if volume { Arc::from([volume_name(self.pods_created % 4)]) } else { Arc::from([]) };
        let labels = labels(&[("app", app)]);
        let blocked = self.pods_created.is_multiple_of(3).then(blocked);
        let pod = pod(NODES[node], &name, priority);
        self.apply(Change::Pod(PodFacts { labels, pod_type, volumes, blocked, ..pod }));
    }

    fn apply(&mut self, change: Change) {
        self.planner.apply(change.clone());
        self.reference.apply(change);
    }

    /// Announces targets on nodes and creates the desired Evacuations, as the controller does.
    fn act(&mut self) {
        for name in NODES {
            let Some(plan) = self.planner.node(name).filter(|plan| plan.draining) else { continue };
            let mut facts = self.reference.nodes[name].clone();
            facts.reached = DrainTargets::read(&plan.targets).unwrap();
            self.apply(Change::Node(facts));
        }
        self.planner.converge();
        let wanted: Vec<PodKey> = NODES
            .iter()
            .flat_map(|name| self.planner.evacuate(name).into_iter().filter(|evacuate| evacuate.announced))
            .map(|evacuate| evacuate.pod)
            .collect();
        for key in wanted {
            let mut pod = self.reference.pods[&key].clone();
            pod.evacuation = EvacuationOwnership::Ours;
            self.apply(Change::Pod(pod));
        }
    }

    fn converge(&mut self) {
        self.planner.converge();
        self.reference.converge();
    }

    /// Compares the output of the planner and the reference.
    fn check(&mut self) -> Result<(), TestCaseError> {
        self.targets.retain(|node, _| self.reference.nodes.contains_key(node));
        for name in self.reference.nodes.keys().cloned().collect::<Vec<_>>() {
            self.uncounted.extend(self.reference.uncounted(&name));
            let plan = self.planner.node(&name).unwrap();
            prop_assert_eq!(&plan.message, &self.reference.node_message(&name), "message of {}", name);
            prop_assert_eq!(
                self.planner.evacuate(&name),
                self.reference.evacuate(&name),
                "evacuate on {}",
                name
            );
            prop_assert_eq!(
                self.planner.withdraw(&name),
                self.reference.withdraw(&name),
                "withdraw on {}",
                name
            );
            if plan.draining {
                let numbers = (plan.counts.pending as usize, plan.counts.evacuating as usize);
                prop_assert_eq!(
                    numbers,
                    self.reference.numbers(std::slice::from_ref(&name)),
                    "numbers of {}",
                    name
                );
            }
            self.check_cases(&name, &plan)?;
            self.check_targets(&name, &plan)?;
        }
        for facts in self.reference.maintenances.values() {
            let plan = self.planner.maintenance(&facts.name).unwrap();
            let named = self.named(&facts.name);
            prop_assert_eq!(
                &plan.message,
                &self.reference.maintenance_message(facts, &named),
                "message of {}",
                facts.name
            );
            let drained = (plan.drained, plan.nodes_drained_and_deleted);
            let expected = (self.reference.all_drained(facts, &named), self.reference.deleted(facts));
            prop_assert_eq!(drained, expected, "{} is drained", facts.name);
            let listed = (plan.counts.waiting.total() as usize).min(MAX_WAITING_FOR);
            prop_assert_eq!(plan.waiting_for.len(), listed, "what {} waits for", facts.name);
            let nodes = self.reference.nodes_of(facts);
            let numbers = (plan.counts.pending as usize, plan.counts.evacuating as usize);
            prop_assert_eq!(numbers, self.reference.numbers(&nodes), "numbers of {}", facts.name);
            let skipped: Vec<_> = nodes.iter().flat_map(|node| self.reference.skipped(node)).collect();
            prop_assert_eq!(plan.counts.skipped as usize, skipped.len(), "skipped by {}", facts.name);
            prop_assert_eq!(&plan.skipped[..], &skipped[..skipped.len().min(MAX_SKIPPED)]);
            let drained = nodes.iter().filter(|node| self.reference.is_drained(node)).count();
            prop_assert_eq!(plan.nodes_drained, drained, "drained nodes of {}", facts.name);
            let reached = DrainTargets::read(&plan.reached).unwrap();
            for node in &nodes {
                prop_assert!(
                    self.targets[node].includes(&reached),
                    "{} has not reached that on {}",
                    facts.name,
                    node
                );
            }
        }
        Ok(())
    }

    /// Each pod that should leave now, has to finish or is has_no_alternative is either blocked or listed with a wait reason. Of pods that
    /// leave after these, only blockers are reported, and only if they are already evacuating.
    fn check_cases(&self, name: &Arc<str>, plan: &NodePlan) -> Result<(), TestCaseError> {
        let (mut expected, to_advance) = self.reference.cases(name);
        let staying = plan.counts.completing + plan.counts.has_no_alternative;
        let concerned = (plan.counts.targeted + staying) as usize;
        prop_assert_eq!(concerned, expected.len(), "pods of {} that should leave or are waited for", name);
        expected.extend(to_advance);
        expected.sort();
        let record = &self.planner.nodes[name];
        let awaited: Vec<_> =
            record.assessment.waiting_for.iter().map(|awaited| awaited.pod.clone()).collect();
        prop_assert_eq!(awaited.len(), plan.counts.waiting.total() as usize, "waits of {}", name);
        let blocked = plan.blockers.iter().filter_map(|blocker| blocker.pod.clone());
        let mut cases: Vec<PodKey> = blocked.chain(awaited).collect();
        cases.sort();
        prop_assert_eq!(cases, expected, "cases of {}", name);
        Ok(())
    }

    /// Targets never shrink, agree with the reference, and no pod leaves that is not in them.
    fn check_targets(&mut self, name: &Arc<str>, plan: &NodePlan) -> Result<(), TestCaseError> {
        let targets = DrainTargets::read(&plan.targets).unwrap();
        if let Some(before) = self.targets.get(name).filter(|_| plan.draining) {
            prop_assert!(targets.includes(before), "targets of {} shrank", name);
        }
        let rules = if self.random.with_rules { some_rules() } else { DrainRules::default() };
        for item in self.reference.remaining(name) {
            let Item::Pod(pod) = &item else { continue };
            let order = rules.evaluate(&Map::new(), Some(&Map::new()), &pod.labels, pod.pod_type).order;
            let targeted = is_targeted(&targets, pod.pod_type, pod.priority, order, &pod.labels);
            prop_assert_eq!(
                targeted,
                self.reference.is_targeted(name, &item),
                "{} on {}",
                pod.key.name,
                name
            );
            prop_assert!(
                targeted || !self.planner.evacuate(name).iter().any(|e| e.pod == pod.key),
                "{} is touched",
                pod.key.name
            );
        }
        self.targets.insert(name.clone(), targets);
        if !plan.draining {
            self.targets.remove(name);
        }
        Ok(())
    }

    /// If nothing is added, a pod leaves only when some maintenance on its node has no earlier pod left, and without ties only
    /// when none has. Pods that finish by themselves, and pods that leave after them, do not delay other nodes: when they count
    /// again, other nodes may be ahead, and targets never shrink.
    fn check_order(&self) -> Result<(), TestCaseError> {
        for name in self.reference.nodes.keys() {
            for evacuate in self.planner.evacuate(name) {
                let item = Item::Pod(self.reference.pods[&evacuate.pod].clone());
                let in_turn = |m: &&MaintenanceFacts| {
                    let nodes = self.reference.nodes_of(m);
                    let remaining = nodes.iter().flat_map(|node| self.reference.remaining(node));
                    let holds_up =
                        |item: &Item| matches!(item, Item::Pod(pod) if !self.uncounted.contains(&pod.key));
                    let mut steps = remaining.filter(holds_up);
                    let own = self.reference.first(&m.plan, &item);
                    steps.all(|other| self.reference.first(&m.plan, &other) >= own)
                };
                let all = self.reference.draining(name);
                let ready = all.iter().filter(|m| in_turn(m)).count();
                let needed = if self.reference.ties == 0 { all.len() } else { 1 };
                prop_assert!(ready >= needed, "{} leaves out of turn", evacuate.pod.name);
            }
        }
        Ok(())
    }

    /// Removes an evacuating pod, a finished pod or a volume. False if there is none.
    fn remove_something(&mut self, choice: usize) -> bool {
        let pods = self.reference.pods.values();
        let leaving = |pod: &&PodFacts<Map>| {
            pod.evacuation != EvacuationOwnership::NoEvacuation
                || pod.terminating
                || pod.labels["app"] == "wait"
        };
        let keys: Vec<_> =
            pods.filter(|pod| leaving(pod) && !pod.finished).map(|pod| pod.key.clone()).collect();
        let volumes: Vec<_> = self.detachable();
        let (pods, all) = (keys.len(), keys.len() + volumes.len());
        if all == 0 {
            return false;
        }
        match choice % all {
            i if i < pods && choice.is_multiple_of(3) => {
                let pod = PodFacts { finished: true, ..self.reference.pods[&keys[i]].clone() };
                self.apply(Change::Pod(pod));
            }
            i if i < pods => self.apply(Change::PodGone(keys[i].clone())),
            i => {
                let (node, volume) = volumes[i - pods].clone();
                let mut facts = self.reference.nodes[&node].clone();
                Arc::make_mut(&mut facts.volumes).remove(&volume);
                self.apply(Change::Node(facts));
            }
        }
        true
    }

    /// Volumes that no pod on their node uses.
    fn detachable(&self) -> Vec<(Arc<str>, Arc<str>)> {
        let used = |node: &str, volume: &Arc<str>| {
            let mut here =
                self.reference.pods.values().filter(|pod| pod.node.as_ref() == node && !pod.finished);
            here.any(|pod| pod.volumes.contains(volume))
        };
        let all =
            self.reference.nodes.values().flat_map(|n| n.volumes.iter().map(|v| (n.name.clone(), v.clone())));
        all.filter(|(node, volume)| !used(node, volume)).collect()
    }

    /// Applies a random change.
    fn random_change(&mut self, choice: usize) {
        let (kind, detail) = (choice % 12, choice / 12);
        let (node, number) = (detail % NODES.len(), detail % self.random.maintenances.len());
        let facts = self.maintenance(number);
        let app = APPS[detail % APPS.len()];
        if matches!(kind, 6..=9) {
            // Clears the announced targets, because the next drain would start with them.
            for facts in self.reference.nodes.values().cloned().collect::<Vec<_>>() {
                self.apply(Change::Node(NodeFacts { reached: DrainTargets::default(), ..facts }));
            }
        }
        match kind {
            0 | 1 => self.create_pod(node, i32::try_from(detail % 5).unwrap(), app, PodType::Default, false),
            2 => self.create_pod(node, 1, app, PodType::DaemonSet, detail.is_multiple_of(2)),
            3 => self.apply(Change::NodeGone(NODES[node].into())),
            4 => self.apply(Change::Node(self.node(NODES[node]))),
            5 => {
                let (cordoned, taints) = (detail.is_multiple_of(3), some_taints(detail));
                self.apply(Change::Node(NodeFacts { cordoned, taints, ..self.node(NODES[node]) }));
            }
            6 => self.apply(Change::Maintenance(MaintenanceFacts { stage: Stage::Complete, ..facts })),
            7 => self.apply(Change::Maintenance(MaintenanceFacts { stage: Stage::Cordon, ..facts })),
            8 => self.apply(Change::MaintenanceGone(facts.name)),
            9 => self.apply(Change::Maintenance(facts)),
            10 => {
                self.random.with_rules = !self.random.with_rules;
                let rules = if self.random.with_rules { some_rules() } else { DrainRules::default() };
                self.apply(Change::Rules(rules));
            }
            _ => {
                let nth =
                    self.reference.pods.values().nth(detail % self.reference.pods.len().max(1)).cloned();
                if let Some(pod) = nth {
                    let pod = match detail % 5 {
                        0 => PodFacts { returned: held(), ..pod },
                        1 => PodFacts { returned: None, ..pod },
                        2 | 3 => PodFacts { placement: some_placement(detail), ..pod },
                        _ => PodFacts { terminating: true, ..pod },
                    };
                    self.apply(Change::Pod(pod));
                }
            }
        }
    }

    /// Makes all nodes exist and be cordoned, removes all delays, and drains, with a check at every step and at the end.
    fn drain(
        &mut self,
        choices: &[usize],
        mut check: impl FnMut(&mut Self) -> Result<(), TestCaseError>,
    ) -> Result<(), TestCaseError> {
        self.converge();
        self.targets.retain(|node, _| self.reference.nodes.contains_key(node));
        for name in NODES {
            let node = self.reference.nodes.get(name).cloned().unwrap_or_else(|| node(name));
            self.apply(Change::Node(NodeFacts { cordoned: true, ..node }));
        }
        for pod in self.reference.pods.values().cloned().collect::<Vec<_>>() {
            self.apply(Change::Pod(PodFacts { returned: None, placement: None, ..pod }));
        }
        let mut choices = choices.iter().copied().cycle();
        loop {
            self.converge();
            check(self)?;
            self.act();
            self.converge();
            check(self)?;
            if !self.remove_something(choices.next().unwrap_or_default()) {
                break;
            }
        }
        for facts in self.reference.maintenances.values().filter(|m| m.stage == Stage::Drain) {
            let plan = self.planner.maintenance(&facts.name).unwrap();
            let has_nodes = !self.named(&facts.name).is_empty();
            prop_assert_eq!(plan.drained, has_nodes, "{}: {}", facts.name, plan.message);
        }
        Ok(())
    }
}

/// Number of cases. Set `PROPTEST_CASES` for longer runs.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(100)
}

/// The facts about a pod that returns repeatedly.
#[allow(clippy::unnecessary_wraps, reason = "it is a field")]
fn held() -> Option<Box<Returned>> {
    Some(Box::new(Returned { cause: ReturnCause::ToleratesCordon, since: at(1), until: at(2) }))
}

/// The placement of one of Haulout's own pods, which can run everywhere, only on some nodes, or also on tainted ones.
#[allow(clippy::unnecessary_wraps, reason = "it is a field")]
fn some_placement(choice: usize) -> Option<Arc<Placement>> {
    let required = choice.is_multiple_of(2).then(|| named(&NODES[..2]));
    let everything = Toleration { operator: Some("Exists".into()), ..Toleration::default() };
    Some(Arc::new(Placement {
        selection: Arc::new(NodeSelection { required, ..NodeSelection::default() }),
        tolerations: choice.is_multiple_of(3).then_some(everything).into_iter().collect(),
    }))
}

fn some_taints(choice: usize) -> Arc<[Taint]> {
    let taint = Taint { key: "gpu".into(), value: "".into(), effect: "NoSchedule".into() };
    choice.is_multiple_of(4).then_some(taint).into_iter().collect()
}

fn blocked() -> Blocked {
    Blocked { reason: "DisruptionBudgetExhausted".into(), message: "because".into(), since: None }
}

fn volume_name(i: usize) -> Arc<str> {
    format!("pv-{i}").into()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    /// Pods leave in any order, and nothing else changes.
    #[test]
    fn everything_drains_in_order(random in any_cluster(), choices in proptest::collection::vec(0usize..1000, 1..20)) {
        Comparison::new(random).drain(&choices, |comparison| {
            comparison.check()?;
            comparison.check_order()
        })?;
    }

    /// Pods, nodes, maintenances and rules change during the drain.
    #[test]
    fn planner_agrees_with_reference(
        random in any_cluster(),
        choices in proptest::collection::vec((0usize..10_000, any::<bool>()), 1..25),
    ) {
        let mut comparison = Comparison::new(random);
        for (choice, leave) in &choices {
            comparison.converge();
            comparison.check()?;
            comparison.act();
            comparison.converge();
            comparison.check()?;
            if !*leave || !comparison.remove_something(*choice) {
                comparison.random_change(*choice);
            }
        }
        let choices: Vec<usize> = choices.iter().map(|(choice, _)| *choice).collect();
        comparison.drain(&choices, Comparison::check)?;
    }

    /// Batches of changes, with convergence only after each batch, also end drained. The intermediate states differ from the
    /// reference, because the planner receives every change.
    #[test]
    fn batched_changes_converge(
        random in any_cluster(),
        batches in proptest::collection::vec(proptest::collection::vec(0usize..10_000, 0..8), 1..6),
    ) {
        let mut comparison = Comparison::new(random);
        for batch in &batches {
            for choice in batch {
                comparison.random_change(*choice);
            }
            comparison.converge();
            comparison.act();
        }
        comparison.drain(&batches.concat().into_iter().chain([1]).collect::<Vec<_>>(), |_| Ok(()))?;
    }
}

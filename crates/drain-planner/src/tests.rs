//! Simulations of small clusters, step by step.

mod kep;
mod nodes;
mod progress;
mod rules;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use haulout_api_types::drain_rules::DrainRules;
use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::Stage;

use crate::facts::{EvacuationOwnership, MaintenanceFacts, NodeFacts, PodFacts, PodKey};
use crate::plan::ServedPodTypes;
use crate::testing::*;
use crate::{Blocker, MaintenancePlan, NodeState, WaitReason};

/// A planner with its pods, and a simulated controller that creates the Evacuations.
struct Simulation {
    planner: Cluster,
    pods: BTreeMap<PodKey, PodFacts<Map>>,
}

impl Simulation {
    fn new(served: ServedPodTypes, nodes: &[&str]) -> Self {
        let mut planner = Cluster::new(served);
        for name in nodes {
            planner.apply(Change::Node(node(name)));
        }
        Self { planner, pods: BTreeMap::new() }
    }

    fn apply(&mut self, change: Change) {
        self.planner.apply(change);
        self.act();
    }

    fn pod(&mut self, pod: PodFacts<Map>) {
        self.pods.insert(pod.key.clone(), pod.clone());
        self.planner.apply(Change::Pod(pod));
    }

    /// Adds this number of Default pods with this priority.
    fn pods(&mut self, node: &str, number: usize, priority: i32) {
        for i in 0..number {
            self.pod(pod(node, &format!("{node}-{priority}-{i}"), priority));
        }
    }

    /// Creates the Evacuations that the planner asks for, until there are no more.
    fn act(&mut self) {
        loop {
            self.planner.converge();
            let mut acted = false;
            for name in self.planner.take_changed_nodes() {
                for evacuate in self.planner.evacuate(&name) {
                    let pod = self.pods.get_mut(&evacuate.pod).unwrap();
                    if pod.evacuation != EvacuationOwnership::Ours {
                        pod.evacuation = EvacuationOwnership::Ours;
                        self.planner.apply(Change::Pod(pod.clone()));
                        acted = true;
                    }
                }
            }
            if !acted {
                return;
            }
        }
    }

    /// The pods that have an Evacuation of ours.
    fn leaving(&self) -> Vec<&str> {
        let leaving = self.pods.values().filter(|pod| pod.evacuation == EvacuationOwnership::Ours);
        leaving.map(|pod| pod.key.name.as_ref()).collect()
    }

    fn gone(&mut self, name: &str) {
        let key = self.pods.keys().find(|key| key.name.as_ref() == name).unwrap().clone();
        self.pods.remove(&key);
        self.apply(Change::PodGone(key));
    }

    /// Removes this number of evacuating pods from a node.
    fn leave(&mut self, node: &str, number: usize) {
        let of_node =
            |pod: &&PodFacts<Map>| pod.node.as_ref() == node && pod.evacuation == EvacuationOwnership::Ours;
        let keys: Vec<_> =
            self.pods.values().filter(of_node).take(number).map(|pod| pod.key.clone()).collect();
        assert_eq!(keys.len(), number, "number of evacuating pods on {node}");
        for key in keys {
            self.pods.remove(&key);
            self.apply(Change::PodGone(key));
        }
    }

    /// Pending, evacuating, message, targets.
    fn node(&self, name: &str) -> (u32, u32, String, Vec<String>) {
        let plan = self.planner.node(name).unwrap();
        (plan.counts.pending, plan.counts.evacuating, plan.message, show(&plan.targets))
    }

    /// Pending, evacuating, message, reached targets.
    fn maintenance(&self, name: &str) -> (u32, u32, String, Vec<String>) {
        let plan = self.planner.maintenance(name).unwrap();
        (plan.counts.pending, plan.counts.evacuating, plan.message, show(&plan.reached))
    }
}

/// One node under one maintenance with the default plan.
fn one_node(rules: DrainRules, served: ServedPodTypes, pods: Vec<PodFacts<Map>>) -> Simulation {
    let mut sim = Simulation::new(served, &["n"]);
    sim.planner.apply(Change::Rules(rules));
    for pod in pods {
        sim.pod(pod);
    }
    sim.apply(Change::Maintenance(maintenance("m", 1, &["n"], &[], served)));
    sim
}

fn app(app: &str, name: &str, priority: i32) -> PodFacts<Map> {
    PodFacts { labels: labels(&[("app", app)]), ..pod("n", name, priority) }
}

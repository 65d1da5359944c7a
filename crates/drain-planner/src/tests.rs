//! Small worlds in which drains are followed step by step.

mod course;
mod kep;
mod nodes;
mod rules;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use haulout_api_types::drain_rules::DrainRules;
use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::Stage;

use crate::facts::{EvacuationOf, MaintenanceFacts, NodeFacts, PodFacts, PodKey};
use crate::plan::Served;
use crate::testing::*;
use crate::{Blocker, MaintenancePlan, NodeState, Waiting};

/// A planner together with the pods that it has been told of, and somebody who makes the Evacuations.
struct World {
    planner: Cluster,
    pods: BTreeMap<PodKey, PodFacts<Map>>,
}

impl World {
    fn new(served: Served, nodes: &[&str]) -> Self {
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

    /// That many pods of this priority, all of one type.
    fn pods(&mut self, node: &str, number: usize, priority: i32) {
        for i in 0..number {
            self.pod(pod(node, &format!("{node}-{priority}-{i}"), priority));
        }
    }

    /// Makes Evacuations where the planner wants them, until it wants no more.
    fn act(&mut self) {
        loop {
            self.planner.settle();
            let mut acted = false;
            for name in self.planner.take_changed_nodes() {
                for evacuate in self.planner.evacuate(&name) {
                    let pod = self.pods.get_mut(&evacuate.pod).unwrap();
                    if pod.evacuation != EvacuationOf::Us {
                        pod.evacuation = EvacuationOf::Us;
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

    /// The pods that are on their way.
    fn leaving(&self) -> Vec<&str> {
        let leaving = self.pods.values().filter(|pod| pod.evacuation == EvacuationOf::Us);
        leaving.map(|pod| pod.key.name.as_ref()).collect()
    }

    fn gone(&mut self, name: &str) {
        let key = self.pods.keys().find(|key| key.name.as_ref() == name).unwrap().clone();
        self.pods.remove(&key);
        self.apply(Change::PodGone(key));
    }

    /// Lets this many pods of a node leave that are on their way.
    fn leave(&mut self, node: &str, number: usize) {
        let of_node = |pod: &&PodFacts<Map>| pod.node.as_ref() == node && pod.evacuation == EvacuationOf::Us;
        let keys: Vec<_> =
            self.pods.values().filter(of_node).take(number).map(|pod| pod.key.clone()).collect();
        assert_eq!(keys.len(), number, "so many are on their way on {node}");
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

/// A world with one node under one maintenance with the default plan.
fn one_node(rules: DrainRules, served: Served, pods: Vec<PodFacts<Map>>) -> World {
    let mut world = World::new(served, &["n"]);
    world.planner.apply(Change::Rules(rules));
    for pod in pods {
        world.pod(pod);
    }
    world.apply(Change::Maintenance(maintenance("m", 1, &["n"], &[], served)));
    world
}

fn app(app: &str, name: &str, priority: i32) -> PodFacts<Map> {
    PodFacts { labels: labels(&[("app", app)]), ..pod("n", name, priority) }
}

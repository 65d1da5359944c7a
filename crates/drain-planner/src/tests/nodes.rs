//! Nodes that are missing, not cordoned, or deleted during the drain; and Haulout's own pods.

use super::*;
use haulout_api_types::names::reason;
use haulout_api_types::node_maintenance::PodType;
use haulout_api_types::selector::NodeMatcher;
use serde_json::json;

use crate::Desired;
use crate::placement::{Placement, Taint};

fn plan(sim: &Simulation) -> MaintenancePlan {
    sim.planner.maintenance("m").unwrap()
}

/// Drained, message, nodes drained and deleted, nodes missing.
fn summary(sim: &Simulation) -> (bool, String, usize, usize) {
    let plan = plan(sim);
    (plan.drained, plan.message, plan.nodes_drained_and_deleted, plan.nodes_missing)
}

fn labelled(key: &str) -> NodeMatcher {
    let term = json!({"matchExpressions": [{"key": key, "operator": "Exists"}]});
    NodeMatcher::new(&serde_json::from_value(json!({"nodeSelectorTerms": [term]})).unwrap()).unwrap()
}

fn blue(name: &str) -> NodeFacts<Map> {
    NodeFacts { labels: labels(&[("blue", "")]), ..node(name) }
}

/// A maintenance of all blue nodes with this status.
fn of_blue_nodes(drained_nodes: &[&str], drained_and_deleted: u32) -> MaintenanceFacts {
    MaintenanceFacts {
        nodes: labelled("blue"),
        drained_nodes: drained_nodes.iter().map(|name| Arc::from(*name)).collect(),
        drained_and_deleted,
        ..maintenance("m", 1, &[], &[], ServedPodTypes::DEFAULT)
    }
}

#[test]
fn maintenance_without_nodes_is_not_drained() {
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &["other"]);
    sim.apply(Change::Maintenance(of_blue_nodes(&[], 0)));
    assert_eq!(summary(&sim), (false, "No node is selected.".into(), 0, 0));
    sim.apply(Change::Node(blue("n1")));
    assert_eq!(summary(&sim), (true, "Drained".into(), 0, 0));
}

#[test]
fn empty_node_is_drained_once_cordoned() {
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &["n1"]);
    sim.planner.apply(Change::Node(NodeFacts { cordoned: false, ..node("n2") }));
    sim.apply(Change::Maintenance(maintenance("m", 1, &["n1", "n2"], &[], ServedPodTypes::DEFAULT)));
    assert_eq!(summary(&sim), (false, "Waiting for 1 of 2 nodes to be cordoned.".into(), 0, 0));
    assert_eq!(plan(&sim).nodes_drained, 1);
    let of_node = sim.planner.node("n2").unwrap();
    assert_eq!((of_node.state, of_node.message.as_str()), (NodeState::Cordoning, "Waiting to be cordoned."));
    sim.apply(Change::Node(node("n2")));
    assert_eq!(summary(&sim), (true, "Drained".into(), 0, 0));
    sim.apply(Change::Node(NodeFacts { cordoned: false, ..node("n2") }));
    assert!(!plan(&sim).drained, "somebody has uncordoned it");
}

#[test]
fn missing_node_is_a_blocker() {
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &["n1"]);
    sim.apply(Change::Maintenance(maintenance("m", 1, &["n1", "n2"], &[], ServedPodTypes::DEFAULT)));
    assert_eq!(summary(&sim), (false, "Waiting for nodes that do not exist: n2.".into(), 0, 1));
    let found = plan(&sim);
    let blockers: Vec<_> = found
        .blockers
        .iter()
        .map(|(node, blocker)| (node.as_deref().unwrap_or_default(), &*blocker.reason))
        .collect();
    assert_eq!(blockers, [("n2", reason::NODE_MISSING)]);
    assert_eq!(found.blockers_by_reason, BTreeMap::from([(reason::NODE_MISSING.into(), 1)]));
    sim.apply(Change::Node(node("n2")));
    assert_eq!(summary(&sim), (true, "Drained".into(), 0, 0));
}

#[test]
fn node_deleted_after_its_drain_stays_drained() {
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &["n1", "n2"]);
    sim.pod(pod("n2", "web", 0));
    sim.apply(Change::Maintenance(maintenance("m", 1, &["n1", "n2"], &[], ServedPodTypes::DEFAULT)));
    sim.apply(Change::NodeGone("n1".into()));
    assert_eq!(summary(&sim), (false, "Evacuating".into(), 1, 0));
    assert_eq!(plan(&sim).drained_nodes, ["n1".into()]);
    sim.gone("web");
    assert_eq!(summary(&sim), (true, "Drained".into(), 1, 0));
    sim.apply(Change::NodeGone("n2".into()));
    assert_eq!(summary(&sim), (true, "Drained".into(), 2, 0), "even the last one");
    sim.pod(pod("n1", "back", 0));
    sim.apply(Change::Node(node("n1")));
    assert_eq!(summary(&sim), (false, "Evacuating".into(), 1, 0), "a new node with this name is drained too");
}

#[test]
fn node_deleted_before_its_drain_is_missing() {
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &["n1"]);
    sim.pod(pod("n1", "web", 0));
    sim.apply(Change::Maintenance(maintenance("m", 1, &["n1"], &[], ServedPodTypes::DEFAULT)));
    sim.apply(Change::NodeGone("n1".into()));
    sim.gone("web");
    assert_eq!(summary(&sim), (false, "Waiting for nodes that do not exist: n1.".into(), 0, 1));
}

/// Whether or not the deletion was counted before the controller stopped.
#[test]
fn drained_and_deleted_nodes_survive_a_restart() {
    for order in [[0, 1], [1, 0]] {
        for counted in [0, 1] {
            let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &[]);
            let things =
                [Change::Node(blue("n2")), Change::Maintenance(of_blue_nodes(&["n1", "n2"], counted))];
            for thing in order {
                sim.planner.apply(things[thing].clone());
            }
            sim.act();
            assert_eq!(summary(&sim), (true, "Drained".into(), 1, 0), "{order:?} {counted}");
            assert_eq!(plan(&sim).drained_nodes, ["n1".into(), "n2".into()]);
        }
    }
}

#[test]
fn deleted_nodes_beyond_the_status_limit_are_counted() {
    let names: Vec<String> = (100..350).map(|i| format!("n{i}")).collect();
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &[]);
    sim.apply(Change::Maintenance(of_blue_nodes(&[], 0)));
    for name in &names {
        sim.planner.apply(Change::Node(blue(name)));
        sim.planner.apply(Change::NodeGone(name.as_str().into()));
    }
    sim.act();
    let before = plan(&sim);
    assert_eq!((before.drained, before.nodes_drained_and_deleted), (true, 250));
    let written: Vec<&str> = before.drained_nodes.iter().map(AsRef::as_ref).collect();
    assert_eq!(written.len(), 100);
    let mut again = Simulation::new(ServedPodTypes::DEFAULT, &[]);
    again.apply(Change::Maintenance(of_blue_nodes(&written, 250)));
    let after = plan(&again);
    assert_eq!((after.drained, after.nodes_drained_and_deleted), (true, 250));
    assert_eq!(after.drained_nodes, before.drained_nodes);
}

/// One of Haulout's own pods, which can run on any node without taints.
fn own(node: &str, name: &str) -> PodFacts<Map> {
    let tolerations = Arc::from([]);
    let placement = Placement { selection: Arc::default(), tolerations };
    PodFacts { placement: Some(Arc::new(placement)), ..pod(node, name, 2_000_000_000) }
}

/// Leaving pods, blockers, message.
fn progress(sim: &Simulation) -> (Vec<&str>, Vec<(String, String)>, String) {
    let plan = plan(sim);
    let blocker = |(_, b): &(_, Blocker)| (b.pod.as_ref().unwrap().name.to_string(), b.reason.to_string());
    (sim.leaving(), plan.blockers.iter().map(blocker).collect(), plan.message)
}

#[test]
fn own_pods_without_another_node_stay() {
    let mut sim = Simulation::new(ServedPodTypes::ALL, &["n1", "n2"]);
    let stays = |name: &str| (name.to_owned(), reason::NO_NODE_FOR_CONTROLLER.to_owned());
    let daemon =
        |node: &str| PodFacts { pod_type: PodType::DaemonSet, ..pod(node, &format!("cni-{node}"), 0) };
    for pod in [own("n1", "own-1"), own("n2", "own-2"), pod("n1", "web", 0), pod("n2", "top", i32::MAX)] {
        sim.pod(pod);
    }
    sim.pod(daemon("n1"));
    sim.pod(daemon("n2"));
    sim.apply(Change::Maintenance(maintenance("m", 1, &["n1", "n2"], &[], ServedPodTypes::ALL)));
    sim.gone("web");
    // Pods with a higher priority do not wait for it. DaemonSet pods do, because it needs them.
    let held = vec![stays("own-1"), stays("own-2")];
    assert_eq!(progress(&sim), (vec!["top"], held.clone(), "Evacuating".into()));
    sim.gone("top");
    assert_eq!(progress(&sim), (vec![], held.clone(), "Waiting for a node for 2 pods of Haulout.".into()));

    // A cordoned node or a node with a taint is no alternative.
    let open = NodeFacts { cordoned: false, ..node("n3") };
    let taint = Taint { key: "gpu".into(), value: "".into(), effect: "NoSchedule".into() };
    sim.apply(Change::Node(node("n3")));
    sim.apply(Change::Node(NodeFacts { taints: Arc::from([taint]), ..open.clone() }));
    assert_eq!(progress(&sim).1, held);
    sim.apply(Change::Node(open));
    assert_eq!(progress(&sim), (vec!["own-1", "own-2"], vec![], "Evacuating".into()));

    // A node under another maintenance is no alternative either, and the Evacuations are withdrawn.
    sim.apply(Change::Maintenance(maintenance("other", 2, &["n3"], &[], ServedPodTypes::ALL)));
    assert_eq!(progress(&sim).1, held);
    let withdrawn = sim.planner.withdraw("n1");
    assert_eq!(withdrawn.iter().map(|key| key.name.as_ref()).collect::<Vec<_>>(), ["own-1"]);
    sim.apply(Change::MaintenanceGone("other".into()));
    sim.gone("own-1");
    sim.gone("own-2");
    assert_eq!(sim.leaving(), ["cni-n1", "cni-n2"]);
}

#[test]
fn one_maintenance_is_enough_to_hold_autoscalers() {
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &["n"]);
    let m = |name: &str, holds_autoscalers| MaintenanceFacts {
        holds_autoscalers,
        ..maintenance(name, 1, &["n"], &[], ServedPodTypes::DEFAULT)
    };
    let holds = |sim: &mut Simulation, change: Change| {
        sim.planner.take_changed_nodes();
        sim.planner.apply(change);
        sim.planner.converge();
        assert_eq!(sim.planner.take_changed_nodes(), BTreeSet::from(["n".into()]), "the node is reconciled");
        sim.planner.node("n").unwrap().hold_autoscalers
    };
    assert!(!holds(&mut sim, Change::Maintenance(m("a", false))));
    assert!(holds(&mut sim, Change::Maintenance(m("b", true))));
    assert!(!holds(&mut sim, Change::Maintenance(m("b", false))), "it may change");
    assert!(holds(&mut sim, Change::Maintenance(m("a", true))));
    let complete = MaintenanceFacts { stage: Stage::Complete, ..m("a", true) };
    assert!(!holds(&mut sim, Change::Maintenance(complete)));
}

#[test]
fn evacuation_names_maintenances_that_reached_the_pod() {
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &["n"]);
    let m = |name: &str, age, reason: &str| MaintenanceFacts {
        reason: reason.into(),
        ..maintenance(name, age, &["n"], &[], ServedPodTypes::DEFAULT)
    };
    sim.pod(pod("n", "web", 0));
    sim.apply(Change::Maintenance(m("a", 1, "new kernel")));
    sim.apply(Change::Maintenance(m("b", 2, "")));
    assert_eq!(sim.planner.node("n").unwrap().held_by(), "a (new kernel), b");
    let targets = sim.planner.node("n").unwrap().targets;
    let reached = DrainTargets::read(&targets).unwrap();
    sim.apply(Change::Node(NodeFacts { reached, ..node("n") }));
    let evacuate = |on_behalf_of: &str| Some(Desired::Evacuate { on_behalf_of: on_behalf_of.into() });
    assert_eq!(sim.planner.desired("n", uid("web")), evacuate("a (new kernel), b"));
    // The maintenances that have reached the pod end, and a new one has not reached it yet.
    let later = [entry(PodType::Default, 0, Some("other"))];
    let c = maintenance("c", 3, &["n"], &later, ServedPodTypes::DEFAULT);
    sim.pod(PodFacts { labels: labels(&[("app", "other")]), ..pod("n", "other", 0) });
    sim.apply(Change::Maintenance(c.clone()));
    assert_eq!(sim.planner.desired("n", uid("web")), evacuate("a (new kernel), b"));
    for name in ["a", "b"] {
        sim.apply(Change::MaintenanceGone(name.into()));
    }
    assert_eq!(sim.planner.desired("n", uid("web")), evacuate("c"), "the targets of a node never shrink");
    sim.apply(Change::MaintenanceGone("c".into()));
    sim.apply(Change::Maintenance(m("b", 2, "")));
    sim.apply(Change::Maintenance(m("a", 1, "another")));
    assert_eq!(sim.planner.node("n").unwrap().held_by(), "a (another), b");
}

#[test]
fn pods_wait_for_cordon_and_announced_target() {
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &[]);
    sim.pod(pod("n", "web", 0));
    sim.planner.apply(Change::Maintenance(maintenance("m", 1, &["n"], &[], ServedPodTypes::DEFAULT)));
    let mut waits = |facts: NodeFacts<Map>| {
        sim.planner.apply(Change::Node(facts));
        sim.planner.converge();
        plan(&sim).waiting_for.iter().map(|(_, pod)| pod.reason).collect::<Vec<_>>()
    };
    let open = NodeFacts { cordoned: false, ..node("n") };
    assert_eq!(waits(open.clone()), [WaitReason::Node]);
    assert_eq!(waits(node("n")), [WaitReason::Node]);
    let reached = DrainTargets::read(&[entry(PodType::Default, 1_000_000_000, None)]).unwrap();
    assert_eq!(waits(NodeFacts { reached: reached.clone(), ..open }), [WaitReason::Node]);
    assert_eq!(waits(NodeFacts { reached, ..node("n") }), [WaitReason::Pending]);
}

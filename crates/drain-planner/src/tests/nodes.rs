//! Nodes that are not there, not cordoned, or deleted halfway: none of them makes a maintenance drained.

use super::*;
use haulout_api_types::names::reason;
use haulout_api_types::node_maintenance::PodType;
use haulout_api_types::selector::NodeMatcher;
use serde_json::json;

use crate::Desired;
use crate::placement::{Placement, Taint};

fn plan(world: &World) -> MaintenancePlan {
    world.planner.maintenance("m").unwrap()
}

/// Drained, message, nodes drained and deleted, nodes missing.
fn says(world: &World) -> (bool, String, usize, usize) {
    let plan = plan(world);
    (plan.drained, plan.message, plan.nodes_drained_and_deleted, plan.nodes_missing)
}

fn labelled(key: &str) -> NodeMatcher {
    let term = json!({"matchExpressions": [{"key": key, "operator": "Exists"}]});
    NodeMatcher::new(&serde_json::from_value(json!({"nodeSelectorTerms": [term]})).unwrap()).unwrap()
}

fn blue(name: &str) -> NodeFacts<Map> {
    NodeFacts { labels: labels(&[("blue", "")]), ..node(name) }
}

/// A maintenance of all blue nodes, as it is when first seen with this status.
fn of_blue_nodes(drained_nodes: &[&str], drained_and_deleted: u32) -> MaintenanceFacts {
    MaintenanceFacts {
        nodes: labelled("blue"),
        drained_nodes: drained_nodes.iter().map(|name| Arc::from(*name)).collect(),
        drained_and_deleted,
        ..maintenance("m", 1, &[], &[], Served::DEFAULT)
    }
}

#[test]
fn a_selector_that_matches_no_node_is_not_drained() {
    let mut world = World::new(Served::DEFAULT, &["other"]);
    world.apply(Change::Maintenance(of_blue_nodes(&[], 0)));
    assert_eq!(says(&world), (false, "No node is selected.".into(), 0, 0));
    world.apply(Change::Node(blue("n1")));
    assert_eq!(says(&world), (true, "Drained".into(), 0, 0));
}

#[test]
fn an_empty_node_is_drained_once_it_is_cordoned() {
    let mut world = World::new(Served::DEFAULT, &["n1"]);
    world.planner.apply(Change::Node(NodeFacts { cordoned: false, ..node("n2") }));
    world.apply(Change::Maintenance(maintenance("m", 1, &["n1", "n2"], &[], Served::DEFAULT)));
    assert_eq!(says(&world), (false, "Waiting for 1 of 2 nodes to be cordoned.".into(), 0, 0));
    assert_eq!(plan(&world).nodes_drained, 1);
    let of_node = world.planner.node("n2").unwrap();
    assert_eq!((of_node.state, of_node.message.as_str()), (NodeState::Cordoning, "Waiting to be cordoned."));
    world.apply(Change::Node(node("n2")));
    assert_eq!(says(&world), (true, "Drained".into(), 0, 0));
    world.apply(Change::Node(NodeFacts { cordoned: false, ..node("n2") }));
    assert!(!plan(&world).drained, "somebody has uncordoned it");
}

#[test]
fn a_named_node_that_does_not_exist_is_a_blocker() {
    let mut world = World::new(Served::DEFAULT, &["n1"]);
    world.apply(Change::Maintenance(maintenance("m", 1, &["n1", "n2"], &[], Served::DEFAULT)));
    assert_eq!(says(&world), (false, "Waiting for nodes that do not exist: n2.".into(), 0, 1));
    let found = plan(&world);
    let blockers: Vec<_> = found
        .blockers
        .iter()
        .map(|(node, blocker)| (node.as_deref().unwrap_or_default(), &*blocker.reason))
        .collect();
    assert_eq!(blockers, [("n2", reason::NODE_MISSING)]);
    assert_eq!(found.blockers_by_reason, BTreeMap::from([(reason::NODE_MISSING.into(), 1)]));
    world.apply(Change::Node(node("n2")));
    assert_eq!(says(&world), (true, "Drained".into(), 0, 0));
}

#[test]
fn a_node_deleted_after_it_was_drained_does_not_turn_it_back() {
    let mut world = World::new(Served::DEFAULT, &["n1", "n2"]);
    world.pod(pod("n2", "web", 0));
    world.apply(Change::Maintenance(maintenance("m", 1, &["n1", "n2"], &[], Served::DEFAULT)));
    world.apply(Change::NodeGone("n1".into()));
    assert_eq!(says(&world), (false, "Evacuating".into(), 1, 0));
    assert_eq!(plan(&world).drained_nodes, ["n1".into()]);
    world.gone("web");
    assert_eq!(says(&world), (true, "Drained".into(), 1, 0));
    world.apply(Change::NodeGone("n2".into()));
    assert_eq!(says(&world), (true, "Drained".into(), 2, 0), "even the last one");
    world.pod(pod("n1", "back", 0));
    world.apply(Change::Node(node("n1")));
    assert_eq!(says(&world), (false, "Evacuating".into(), 1, 0), "made again, it is drained again");
}

#[test]
fn a_node_deleted_before_it_was_drained_is_missing() {
    let mut world = World::new(Served::DEFAULT, &["n1"]);
    world.pod(pod("n1", "web", 0));
    world.apply(Change::Maintenance(maintenance("m", 1, &["n1"], &[], Served::DEFAULT)));
    world.apply(Change::NodeGone("n1".into()));
    world.gone("web");
    assert_eq!(says(&world), (false, "Waiting for nodes that do not exist: n1.".into(), 0, 1));
}

/// Whatever was written before the controller died: the deletion, the nodes that were drained, or neither's number.
#[test]
fn drained_and_deleted_nodes_survive_a_restart() {
    for order in [[0, 1], [1, 0]] {
        for counted in [0, 1] {
            let mut world = World::new(Served::DEFAULT, &[]);
            let things =
                [Change::Node(blue("n2")), Change::Maintenance(of_blue_nodes(&["n1", "n2"], counted))];
            for thing in order {
                world.planner.apply(things[thing].clone());
            }
            world.act();
            assert_eq!(says(&world), (true, "Drained".into(), 1, 0), "{order:?} {counted}");
            assert_eq!(plan(&world).drained_nodes, ["n1".into(), "n2".into()]);
        }
    }
}

#[test]
fn more_deleted_nodes_than_a_status_can_name_are_still_counted() {
    let names: Vec<String> = (100..350).map(|i| format!("n{i}")).collect();
    let mut world = World::new(Served::DEFAULT, &[]);
    world.apply(Change::Maintenance(of_blue_nodes(&[], 0)));
    for name in &names {
        world.planner.apply(Change::Node(blue(name)));
        world.planner.apply(Change::NodeGone(name.as_str().into()));
    }
    world.act();
    let before = plan(&world);
    assert_eq!((before.drained, before.nodes_drained_and_deleted), (true, 250));
    let written: Vec<&str> = before.drained_nodes.iter().map(AsRef::as_ref).collect();
    assert_eq!(written.len(), 100);
    let mut again = World::new(Served::DEFAULT, &[]);
    again.apply(Change::Maintenance(of_blue_nodes(&written, 250)));
    let after = plan(&again);
    assert_eq!((after.drained, after.nodes_drained_and_deleted), (true, 250));
    assert_eq!(after.drained_nodes, before.drained_nodes);
}

/// A pod of Haulout itself that can run on any node without taints.
fn own(node: &str, name: &str) -> PodFacts<Map> {
    let tolerations = Arc::from([]);
    let placement = Placement { choice: Arc::default(), tolerations };
    PodFacts { placement: Some(Arc::new(placement)), ..pod(node, name, 2_000_000_000) }
}

/// Who leaves, what is in the way, message.
fn stands(world: &World) -> (Vec<&str>, Vec<(String, String)>, String) {
    let plan = plan(world);
    let blocker = |(_, b): &(_, Blocker)| (b.pod.as_ref().unwrap().name.to_string(), b.reason.to_string());
    (world.leaving(), plan.blockers.iter().map(blocker).collect(), plan.message)
}

#[test]
fn the_last_controllers_stay_and_everything_else_leaves() {
    let mut world = World::new(Served::ALL, &["n1", "n2"]);
    let stays = |name: &str| (name.to_owned(), reason::NO_NODE_FOR_CONTROLLER.to_owned());
    let daemon =
        |node: &str| PodFacts { pod_type: PodType::DaemonSet, ..pod(node, &format!("cni-{node}"), 0) };
    for pod in [own("n1", "own-1"), own("n2", "own-2"), pod("n1", "web", 0), pod("n2", "top", i32::MAX)] {
        world.pod(pod);
    }
    world.pod(daemon("n1"));
    world.pod(daemon("n2"));
    world.apply(Change::Maintenance(maintenance("m", 1, &["n1", "n2"], &[], Served::ALL)));
    world.gone("web");
    // Priorities above it do not wait for it; what it needs itself does.
    let held = vec![stays("own-1"), stays("own-2")];
    assert_eq!(stands(&world), (vec!["top"], held.clone(), "Evacuating".into()));
    world.gone("top");
    assert_eq!(stands(&world), (vec![], held.clone(), "Waiting for a node for 2 pods of Haulout.".into()));

    // Neither a cordoned node nor one with a taint will do.
    let open = NodeFacts { cordoned: false, ..node("n3") };
    let taint = Taint { key: "gpu".into(), value: "".into(), effect: "NoSchedule".into() };
    world.apply(Change::Node(node("n3")));
    world.apply(Change::Node(NodeFacts { taints: Arc::from([taint]), ..open.clone() }));
    assert_eq!(stands(&world).1, held);
    world.apply(Change::Node(open));
    assert_eq!(stands(&world), (vec!["own-1", "own-2"], vec![], "Evacuating".into()));

    // One that another maintenance takes away again will not do either, and they are not asked to leave any longer.
    world.apply(Change::Maintenance(maintenance("other", 2, &["n3"], &[], Served::ALL)));
    assert_eq!(stands(&world).1, held);
    let withdrawn = world.planner.withdraw("n1");
    assert_eq!(withdrawn.iter().map(|key| key.name.as_ref()).collect::<Vec<_>>(), ["own-1"]);
    world.apply(Change::MaintenanceGone("other".into()));
    world.gone("own-1");
    world.gone("own-2");
    assert_eq!(world.leaving(), ["cni-n1", "cni-n2"]);
}

#[test]
fn autoscalers_are_held_if_one_maintenance_wants_that() {
    let mut world = World::new(Served::DEFAULT, &["n"]);
    let m = |name: &str, holds_autoscalers| MaintenanceFacts {
        holds_autoscalers,
        ..maintenance(name, 1, &["n"], &[], Served::DEFAULT)
    };
    let holds = |world: &mut World, change: Change| {
        world.planner.take_changed_nodes();
        world.planner.apply(change);
        world.planner.settle();
        assert_eq!(world.planner.take_changed_nodes(), BTreeSet::from(["n".into()]), "somebody has to look");
        world.planner.node("n").unwrap().hold_autoscalers
    };
    assert!(!holds(&mut world, Change::Maintenance(m("a", false))));
    assert!(holds(&mut world, Change::Maintenance(m("b", true))));
    assert!(!holds(&mut world, Change::Maintenance(m("b", false))), "it may change");
    assert!(holds(&mut world, Change::Maintenance(m("a", true))));
    let complete = MaintenanceFacts { stage: Stage::Complete, ..m("a", true) };
    assert!(!holds(&mut world, Change::Maintenance(complete)));
}

#[test]
fn a_pod_leaves_for_those_who_have_reached_it() {
    let mut world = World::new(Served::DEFAULT, &["n"]);
    let m = |name: &str, age, reason: &str| MaintenanceFacts {
        reason: reason.into(),
        ..maintenance(name, age, &["n"], &[], Served::DEFAULT)
    };
    world.pod(pod("n", "web", 0));
    world.apply(Change::Maintenance(m("a", 1, "new kernel")));
    world.apply(Change::Maintenance(m("b", 2, "")));
    assert_eq!(world.planner.node("n").unwrap().held_by(), "a (new kernel), b");
    let targets = world.planner.node("n").unwrap().targets;
    let reached = DrainTargets::read(&targets).unwrap();
    world.apply(Change::Node(NodeFacts { reached, ..node("n") }));
    let why = |why: &str| Some(Desired::Evacuate { why: why.into() });
    assert_eq!(world.planner.desired("n", uid("web")), why("a (new kernel), b"));
    // One that has reached it lets go of the node, and another that has not comes.
    let later = [entry(PodType::Default, 0, Some("other"))];
    let c = maintenance("c", 3, &["n"], &later, Served::DEFAULT);
    world.pod(PodFacts { labels: labels(&[("app", "other")]), ..pod("n", "other", 0) });
    world.apply(Change::Maintenance(c.clone()));
    assert_eq!(world.planner.desired("n", uid("web")), why("a (new kernel), b"));
    for name in ["a", "b"] {
        world.apply(Change::MaintenanceGone(name.into()));
    }
    assert_eq!(
        world.planner.desired("n", uid("web")),
        why("c"),
        "of what the node had reached nothing is taken back"
    );
    world.apply(Change::MaintenanceGone("c".into()));
    world.apply(Change::Maintenance(m("b", 2, "")));
    world.apply(Change::Maintenance(m("a", 1, "another")));
    assert_eq!(world.planner.node("n").unwrap().held_by(), "a (another), b");
}

#[test]
fn pods_wait_until_their_node_is_cordoned_and_announces_them() {
    let mut world = World::new(Served::DEFAULT, &[]);
    world.pod(pod("n", "web", 0));
    world.planner.apply(Change::Maintenance(maintenance("m", 1, &["n"], &[], Served::DEFAULT)));
    let mut waits = |facts: NodeFacts<Map>| {
        world.planner.apply(Change::Node(facts));
        world.planner.settle();
        plan(&world).waiting_for.iter().map(|(_, awaited)| awaited.waiting).collect::<Vec<_>>()
    };
    let open = NodeFacts { cordoned: false, ..node("n") };
    assert_eq!(waits(open.clone()), [Waiting::Node]);
    assert_eq!(waits(node("n")), [Waiting::Node]);
    let reached = DrainTargets::read(&[entry(PodType::Default, 1_000_000_000, None)]).unwrap();
    assert_eq!(waits(NodeFacts { reached: reached.clone(), ..open }), [Waiting::Node]);
    assert_eq!(waits(NodeFacts { reached, ..node("n") }), [Waiting::Pending]);
}

//! What happens in the course of a drain: types that nobody serves, volumes, ties, nodes that join, an end halfway.

use super::*;
use haulout_api_types::names::reason;
use haulout_api_types::node_maintenance::PodType::{DaemonSet, Default, Static};
use haulout_api_types::node_maintenance::{DrainPlanEntry, VolumeWait};
use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

#[test]
fn types_that_nobody_serves_are_left_alone_and_counted() {
    let daemon = PodFacts { pod_type: DaemonSet, ..pod("n", "cni", 0) };
    let mirror = PodFacts { pod_type: Static, ..pod("n", "etcd", 0) };
    let mut world =
        one_node(DrainRules::default(), Served::DEFAULT, vec![daemon, mirror, pod("n", "web", 0)]);
    assert_eq!(world.leaving(), ["web"]);
    world.gone("web");
    let plan = world.planner.maintenance("m").unwrap();
    assert_eq!((plan.drained, plan.counts.unsupported, plan.counts.pending), (true, 2, 0));
    assert_eq!(show(&plan.reached), ["Default<=2147483647"], "their entries are not reached either");
}

#[test]
fn a_node_is_rid_of_its_volumes_before_any_daemon_set_leaves() {
    let volumes = |of: &[&str]| -> Arc<[Arc<str>]> { of.iter().map(|name| Arc::from(*name)).collect() };
    let attached = |of: &[&str]| NodeFacts {
        volumes: Arc::new(of.iter().map(|name| Arc::from(*name)).collect()),
        ..node("n")
    };
    let skip = rules(&[(
        "a",
        json!({"drain": {"behavior": "Skip"}, "pods": [{"selector": {"matchLabels": {"app": "stays"}}}]}),
    )]);
    let daemon = PodFacts { pod_type: DaemonSet, volumes: volumes(&["pv-daemon"]), ..pod("n", "csi", 0) };
    let database = PodFacts { volumes: volumes(&["pv-1"]), ..pod("n", "db", 0) };
    let stays = PodFacts { volumes: volumes(&["pv-stays"]), ..app("stays", "stays", 0) };
    let mut world = one_node(skip, Served::ALL, vec![daemon, database, stays]);
    world.apply(Change::Node(attached(&["pv-1", "pv-daemon", "pv-stays"])));
    assert_eq!(world.leaving(), ["db"]);
    assert_eq!(world.node("n").2, "Evacuating");
    world.gone("db");
    assert_eq!(world.leaving(), [""; 0]);
    assert_eq!(world.node("n").2, "Waiting for 1 volume to be detached.");
    let plan = world.planner.maintenance("m").unwrap();
    assert_eq!((plan.message.as_str(), plan.drained), ("Waiting for 1 volume to be detached.", false));
    let (_, blocker) = &plan.blockers[0];
    assert!(blocker.pod.is_none() && blocker.message.contains("pv-1;"), "{blocker:?}");
    world.apply(Change::Node(attached(&["pv-daemon", "pv-stays"])));
    assert_eq!(world.leaving(), ["csi"], "the volumes of those who leave later or stay are not waited for");
}

#[test]
fn two_that_wait_for_each_other_are_parted_in_favour_of_the_older() {
    let mut world = World::new(Served::DEFAULT, &["n"]);
    world.pod(app("x", "x", 0));
    world.pod(app("y", "y", 0));
    let first = |app: &str| [entry(Default, 1000, Some(app))];
    world.planner.apply(Change::Maintenance(maintenance("a", 1, &["n"], &first("x"), Served::DEFAULT)));
    world.apply(Change::Maintenance(maintenance("b", 2, &["n"], &first("y"), Served::DEFAULT)));
    assert_eq!(world.leaving(), ["x"]);
    assert_eq!(world.planner.maintenance("b").unwrap().forwarded_by, ["a".into()]);
    assert_eq!(world.planner.maintenance("b").unwrap().message, "Evacuating (limited by a)");
    world.gone("x");
    assert_eq!(world.leaving(), ["y"]);
}

#[test]
fn a_node_that_joins_later_begins_at_the_beginning_and_holds_the_others_where_they_are() {
    let plan = [entry(Default, 10, None), entry(Default, 20, None)];
    let mut world = World::new(Served::DEFAULT, &["old"]);
    world.pod(pod("old", "old-20", 20));
    world.pod(pod("old", "old-30", 30));
    world.apply(Change::Maintenance(maintenance("m", 1, &["old", "new"], &plan, Served::DEFAULT)));
    assert_eq!(world.leaving(), ["old-20"]);
    world.pod(pod("new", "new-10", 10));
    world.pod(pod("new", "new-20", 20));
    world.apply(Change::Node(node("new")));
    assert_eq!(world.leaving(), ["new-10", "old-20"]);
    assert_eq!(world.maintenance("m").3, ["Default<=10"], "the lowest among the nodes");
    world.gone("old-20");
    assert_eq!(world.leaving(), ["new-10"]);
    world.pod(pod("old", "late", 20));
    world.act();
    assert_eq!(world.leaving(), ["late", "new-10"], "what the node has reached stays reached");
    assert_eq!(world.node("old").2, "Evacuating");
}

#[test]
fn targets_outlive_the_process_in_the_node() {
    let plan = [entry(Default, 10, None)];
    let reached = DrainTargets::read(&[entry(Default, 30, None)]).unwrap();
    let mut world = World::new(Served::DEFAULT, &[]);
    world.planner.apply(Change::Node(NodeFacts { reached, ..node("n") }));
    world.pod(pod("n", "a", 10));
    world.pod(pod("n", "b", 30));
    world.pod(pod("n", "c", 40));
    world.apply(Change::Maintenance(maintenance("m", 1, &["n"], &plan, Served::DEFAULT)));
    assert_eq!(world.leaving(), ["a", "b"]);
}

#[test]
fn a_maintenance_that_ends_takes_its_wishes_back_and_its_limits_away() {
    let mut world = World::new(Served::DEFAULT, &["n", "other"]);
    world.pod(pod("n", "n-0", 0));
    world.pod(pod("n", "n-20", 20));
    world.pod(pod("other", "other-0", 0));
    let a = maintenance("a", 1, &["n", "other"], &[entry(Default, 0, None)], Served::DEFAULT);
    world.planner.apply(Change::Maintenance(a.clone()));
    world.apply(Change::Maintenance(maintenance(
        "b",
        2,
        &["n"],
        &[entry(Default, 20, None)],
        Served::DEFAULT,
    )));
    assert_eq!(world.leaving(), ["n-0", "other-0"]);
    world.apply(Change::Maintenance(MaintenanceFacts { stage: Stage::Complete, ..a }));
    assert_eq!(world.leaving(), ["n-0", "n-20", "other-0"]);
    let withdraw = |name: &str| world.planner.withdraw(name).len();
    assert_eq!((withdraw("n"), withdraw("other")), (0, 1), "b still wants its node drained");
    assert_eq!(world.planner.maintenance("a").unwrap().nodes_unreleased, 1);
}

/// Who is ahead is named even when it has let go of the node, and across a restart.
#[test]
fn a_maintenance_that_was_fast_forwarded_says_by_whom() {
    let plan = [entry(Default, 10, None), entry(Default, 20, None)];
    let a = maintenance("a", 1, &["n"], &[], Served::DEFAULT);
    let b = maintenance("b", 2, &["n"], &plan, Served::DEFAULT);
    let mut world = World::new(Served::DEFAULT, &["n"]);
    world.pod(pod("n", "low", 10));
    world.pod(pod("n", "high", 20));
    world.apply(Change::Maintenance(a.clone()));
    assert_eq!(world.leaving(), ["high", "low"]);
    world.apply(Change::Maintenance(b.clone()));
    world.apply(Change::Maintenance(MaintenanceFacts { stage: Stage::Complete, ..a }));
    let forwarded = |world: &World| world.planner.maintenance("b").unwrap().forwarded_by;
    assert_eq!(forwarded(&world), ["a".into()]);
    let of_node = world.planner.node("n").unwrap();
    let names: Vec<_> = of_node.maintenances.iter().map(|known| (known.name.as_str(), known.stage)).collect();
    assert_eq!(names, [("b", Stage::Drain), ("a", Stage::Complete)]);

    let mut again = World::new(Served::DEFAULT, &[]);
    let reached = DrainTargets::read(&of_node.targets).unwrap();
    let maintenances = Some(of_node.maintenances.into());
    again.planner.apply(Change::Node(NodeFacts { reached, maintenances, ..node("n") }));
    again.pod(pod("n", "low", 10));
    again.pod(pod("n", "high", 20));
    again.apply(Change::Maintenance(b));
    assert_eq!((forwarded(&again), again.leaving()), (vec!["a".into()], vec!["high", "low"]));
}

/// The next maintenance of a node starts from its own plan, whatever the node still announces.
#[test]
fn a_maintenance_that_follows_another_starts_from_its_own_plan() {
    let a = maintenance("a", 1, &["n"], &[], Served::DEFAULT);
    let b = maintenance("b", 2, &["n"], &[entry(Default, 10, None)], Served::DEFAULT);
    let mut world = World::new(Served::DEFAULT, &["n"]);
    world.pod(pod("n", "low", 10));
    world.pod(pod("n", "high", 20));
    world.apply(Change::Maintenance(a.clone()));
    let before = world.planner.node("n").unwrap();
    // The annotation is observed, and not yet removed when the next one begins.
    let reached = DrainTargets::read(&before.targets).unwrap();
    world.apply(Change::Node(NodeFacts {
        reached,
        maintenances: Some(before.maintenances.into()),
        ..node("n")
    }));
    world.planner.apply(Change::Maintenance(MaintenanceFacts { stage: Stage::Complete, ..a }));
    world.planner.apply(Change::Maintenance(b));
    world.planner.settle();
    let evacuate = world.planner.evacuate("n");
    let leaving: Vec<_> = evacuate.iter().map(|wanted| wanted.pod.name.as_ref()).collect();
    assert_eq!(leaving, ["low"]);
}

#[test]
fn volumes_are_not_waited_for_where_the_node_says_so() {
    let attached = NodeFacts { volumes: Arc::new(BTreeSet::from(["pv-1".into()])), ..node("n") };
    let mut world = one_node(DrainRules::default(), Served::DEFAULT, vec![pod("n", "web", 0)]);
    let says = |world: &World| {
        let plan = world.planner.node("n").unwrap();
        (plan.state, plan.counts.volumes, plan.counts.volumes_ignored)
    };
    world.apply(Change::Node(NodeFacts { ignores_volumes: true, ..attached.clone() }));
    assert_eq!(says(&world), (NodeState::Evacuating, 0, 0), "its pods are still there");
    world.gone("web");
    assert_eq!(says(&world), (NodeState::Drained, 0, 1));
    world.apply(Change::Node(attached));
    assert_eq!(says(&world), (NodeState::Evacuating, 1, 0));
    assert!(!world.planner.maintenance("m").unwrap().drained);
}

/// The longest wait counts, and one that has no limit goes on however long others have waited.
#[test]
fn volumes_are_waited_for_as_long_as_one_maintenance_wants() {
    let seconds = |seconds: Option<i64>| seconds.map(SignedDuration::from_secs);
    let of = |name: &str, timeout| MaintenanceFacts {
        volume_timeout: seconds(timeout),
        ..maintenance(name, 1, &["n"], &[], Served::DEFAULT)
    };
    let attached = NodeFacts { volumes: Arc::new(BTreeSet::from(["pv-1".into()])), ..node("n") };
    let mut world = World::new(Served::DEFAULT, &[]);
    world.apply(Change::Node(attached.clone()));
    let says = |world: &World| {
        let plan = world.planner.node("n").unwrap();
        (plan.volume_timeout, plan.counts.volumes, plan.counts.volumes_ignored)
    };
    world.apply(Change::Maintenance(of("a", Some(60))));
    world.apply(Change::Maintenance(of("b", Some(90))));
    assert_eq!(says(&world), (seconds(Some(90)), 1, 0));
    let since = |over| Some(VolumeWait { since: Time(at(0)), over });
    world.apply(Change::Node(NodeFacts { volume_wait: since(false), ..attached.clone() }));
    let blocker = &world.planner.node("n").unwrap().blockers[0];
    let until = format!("goes on without at {:.0}", at(90));
    assert!(blocker.message.contains(&until) && blocker.since == Some(at(0)), "{blocker:?}");
    world.apply(Change::Node(NodeFacts { volume_wait: since(true), ..attached }));
    assert_eq!(says(&world), (seconds(Some(90)), 0, 1));
    world.apply(Change::Maintenance(of("a", None)));
    assert_eq!(says(&world), (None, 1, 0), "an admin may change it");
}

#[test]
fn a_pod_that_cannot_be_announced_is_blocked_and_not_awaited() {
    let values: Vec<String> = (0..1500).map(|i| format!("{i:063}")).collect();
    let entries: Vec<_> = values.iter().map(|app| entry(Default, 5, Some(app))).collect();
    let last = |name: &str, priority| PodFacts {
        labels: labels(&[("app", &values[1499])]),
        ..pod("n", name, priority)
    };
    let mut world = World::new(Served::DEFAULT, &[]);
    // The annotation of the node has one of two pods that leave in the same step.
    let reached = DrainTargets::read(&[entry(Default, 3, Some(&values[1499]))]).unwrap();
    world.planner.apply(Change::Node(NodeFacts { reached, ..node("n") }));
    world.pod(last("announced", 3));
    world.pod(last("unannounced", 5));
    world.planner.apply(Change::Maintenance(maintenance("m", 1, &["n"], &entries, Served::DEFAULT)));
    world.planner.settle();
    let plan = world.planner.maintenance("m").unwrap();
    let blocked = plan.blockers.iter().filter_map(|(_, b)| Some((b.pod.as_ref()?.name.as_ref(), &*b.reason)));
    assert_eq!(blocked.collect::<Vec<_>>(), [("unannounced", reason::DRAIN_TARGETS_TOO_LARGE)]);
    let awaited: Vec<_> = plan.waiting_for.iter().map(|(_, awaited)| awaited.pod.name.as_ref()).collect();
    assert_eq!(awaited, ["announced"]);
}

/// What leaves between two leaders is counted by the second one.
#[test]
fn pods_that_left_while_nobody_led_are_counted() {
    let evacuated = |stage, left_before, pods: usize| {
        let mut world = World::new(Served::DEFAULT, &["n"]);
        let facts = maintenance("m", 1, &["n"], &[], Served::DEFAULT);
        // A new leader may learn of it before it learns of the pods.
        world.planner.apply(Change::Maintenance(MaintenanceFacts {
            stage,
            evacuated: 5,
            left_before,
            ..facts
        }));
        world.pods("n", pods, 0);
        world.act();
        if pods > 1 && stage == Stage::Drain {
            world.leave("n", 1);
        }
        world.planner.maintenance("m").unwrap().evacuated
    };
    assert_eq!(evacuated(Stage::Drain, 10, 2), 14, "eight before, one after");
    assert_eq!(evacuated(Stage::Drain, 10, 0), 15);
    assert_eq!(evacuated(Stage::Drain, 1, 3), 6, "others have come");
    assert_eq!(evacuated(Stage::Complete, 10, 1), 5, "they stay where they are");
}

/// Two maintenances with so many selectors each, by different labels, and a pod that both have reached.
fn overlap(number: usize) -> (bool, Vec<DrainPlanEntry>) {
    let plan = |key: &str| -> Vec<DrainPlanEntry> {
        let selector = |i: usize| json!({"matchLabels": {key: format!("v{i:03}")}});
        let entry = |i| DrainPlanEntry {
            pod_selector: serde_json::from_value(selector(i)).unwrap(),
            pod_priority: 5,
            pod_type: Default,
        };
        (0..number).map(entry).collect()
    };
    let last = format!("v{:03}", number - 1);
    let mut world = World::new(Served::DEFAULT, &["n"]);
    world.pod(PodFacts { labels: labels(&[("app", &last), ("tier", &last)]), ..pod("n", "web", 5) });
    for (name, age, key) in [("a", 1, "app"), ("b", 2, "tier")] {
        let facts = maintenance(name, age, &["n"], &plan(key), Served::DEFAULT);
        world.planner.apply(Change::Maintenance(facts));
    }
    world.planner.settle();
    // As the controller writes it.
    let targets = world.planner.node("n").unwrap().targets;
    let reached = DrainTargets::read(&targets).unwrap();
    world.planner.apply(Change::Node(NodeFacts { reached, ..node("n") }));
    world.planner.settle();
    (world.planner.evacuate("n")[0].announced, targets)
}

/// However many combinations of selectors there are, a pod that all have reached is announced.
#[test]
fn a_pod_is_announced_where_targets_are_too_many_to_intersect() {
    for number in [2, 8, 9, 30] {
        let (announced, targets) = overlap(number);
        assert!(announced && targets.len() <= 112, "{number}: {targets:?}");
    }
}

/// One that is not evacuated any more has not left.
#[test]
fn pods_that_stay_since_a_restart_are_not_counted_as_evacuated() {
    let mut world = World::new(Served::DEFAULT, &["n"]);
    world.pod(pod("n", "web", 0));
    for i in 0..7 {
        world.pod(PodFacts { pod_type: DaemonSet, ..pod("n", &format!("daemon-{i}"), 0) });
    }
    // DaemonSets were served before: ten pods had to leave.
    let facts = maintenance("m", 1, &["n"], &[], Served::DEFAULT);
    world.planner.apply(Change::Maintenance(MaintenanceFacts { left_before: 10, ..facts }));
    world.planner.settle();
    assert_eq!(world.planner.maintenance("m").unwrap().evacuated, 2);
}

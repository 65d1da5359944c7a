//! Events during a drain: unsupported pod types, volumes, ties, nodes that join, early completion.

use super::*;
use haulout_api_types::names::reason;
use haulout_api_types::node_maintenance::PodType::{DaemonSet, Default, Static};
use haulout_api_types::node_maintenance::{DrainPlanEntry, VolumeWait};
use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

#[test]
fn unserved_pod_types_stay_and_are_counted() {
    let daemon = PodFacts { pod_type: DaemonSet, ..pod("n", "cni", 0) };
    let mirror = PodFacts { pod_type: Static, ..pod("n", "etcd", 0) };
    let mut sim =
        one_node(DrainRules::default(), ServedPodTypes::DEFAULT, vec![daemon, mirror, pod("n", "web", 0)]);
    assert_eq!(sim.leaving(), ["web"]);
    sim.gone("web");
    let plan = sim.planner.maintenance("m").unwrap();
    assert_eq!((plan.drained, plan.counts.unsupported, plan.counts.pending), (true, 2, 0));
    assert_eq!(show(&plan.reached), ["Default<=2147483647"], "their entries are not reached either");
}

#[test]
fn volumes_are_detached_before_daemon_sets_leave() {
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
    let mut sim = one_node(skip, ServedPodTypes::ALL, vec![daemon, database, stays]);
    sim.apply(Change::Node(attached(&["pv-1", "pv-daemon", "pv-stays"])));
    assert_eq!(sim.leaving(), ["db"]);
    assert_eq!(sim.node("n").2, "Evacuating");
    sim.gone("db");
    assert_eq!(sim.leaving(), [""; 0]);
    assert_eq!(sim.node("n").2, "Waiting for 1 volume to be detached.");
    let plan = sim.planner.maintenance("m").unwrap();
    assert_eq!((plan.message.as_str(), plan.drained), ("Waiting for 1 volume to be detached.", false));
    let (_, blocker) = &plan.blockers[0];
    assert!(blocker.pod.is_none() && blocker.message.contains("pv-1;"), "{blocker:?}");
    sim.apply(Change::Node(attached(&["pv-daemon", "pv-stays"])));
    assert_eq!(sim.leaving(), ["csi"], "volumes of pods that leave later or stay are ignored");
}

#[test]
fn oldest_maintenance_wins_a_tie() {
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &["n"]);
    sim.pod(app("x", "x", 0));
    sim.pod(app("y", "y", 0));
    let first = |app: &str| [entry(Default, 1000, Some(app))];
    sim.planner.apply(Change::Maintenance(maintenance("a", 1, &["n"], &first("x"), ServedPodTypes::DEFAULT)));
    sim.apply(Change::Maintenance(maintenance("b", 2, &["n"], &first("y"), ServedPodTypes::DEFAULT)));
    assert_eq!(sim.leaving(), ["x"]);
    assert_eq!(sim.planner.maintenance("b").unwrap().forwarded_by, ["a".into()]);
    assert_eq!(sim.planner.maintenance("b").unwrap().message, "Evacuating (limited by a)");
    sim.gone("x");
    assert_eq!(sim.leaving(), ["y"]);
}

#[test]
fn joining_node_starts_at_first_step_and_delays_the_others() {
    let plan = [entry(Default, 10, None), entry(Default, 20, None)];
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &["old"]);
    sim.pod(pod("old", "old-20", 20));
    sim.pod(pod("old", "old-30", 30));
    sim.apply(Change::Maintenance(maintenance("m", 1, &["old", "new"], &plan, ServedPodTypes::DEFAULT)));
    assert_eq!(sim.leaving(), ["old-20"]);
    sim.pod(pod("new", "new-10", 10));
    sim.pod(pod("new", "new-20", 20));
    sim.apply(Change::Node(node("new")));
    assert_eq!(sim.leaving(), ["new-10", "old-20"]);
    assert_eq!(sim.maintenance("m").3, ["Default<=10"], "the lowest among the nodes");
    sim.gone("old-20");
    assert_eq!(sim.leaving(), ["new-10"]);
    sim.pod(pod("old", "late", 20));
    sim.act();
    assert_eq!(sim.leaving(), ["late", "new-10"], "the targets of a node never shrink");
    assert_eq!(sim.node("old").2, "Evacuating");
}

#[test]
fn targets_are_restored_from_the_node() {
    let plan = [entry(Default, 10, None)];
    let reached = DrainTargets::read(&[entry(Default, 30, None)]).unwrap();
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &[]);
    sim.planner.apply(Change::Node(NodeFacts { reached, ..node("n") }));
    sim.pod(pod("n", "a", 10));
    sim.pod(pod("n", "b", 30));
    sim.pod(pod("n", "c", 40));
    sim.apply(Change::Maintenance(maintenance("m", 1, &["n"], &plan, ServedPodTypes::DEFAULT)));
    assert_eq!(sim.leaving(), ["a", "b"]);
}

#[test]
fn completed_maintenance_withdraws_and_stops_limiting() {
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &["n", "other"]);
    sim.pod(pod("n", "n-0", 0));
    sim.pod(pod("n", "n-20", 20));
    sim.pod(pod("other", "other-0", 0));
    let a = maintenance("a", 1, &["n", "other"], &[entry(Default, 0, None)], ServedPodTypes::DEFAULT);
    sim.planner.apply(Change::Maintenance(a.clone()));
    sim.apply(Change::Maintenance(maintenance(
        "b",
        2,
        &["n"],
        &[entry(Default, 20, None)],
        ServedPodTypes::DEFAULT,
    )));
    assert_eq!(sim.leaving(), ["n-0", "other-0"]);
    sim.apply(Change::Maintenance(MaintenanceFacts { stage: Stage::Complete, ..a }));
    assert_eq!(sim.leaving(), ["n-0", "n-20", "other-0"]);
    let withdraw = |name: &str| sim.planner.withdraw(name).len();
    assert_eq!((withdraw("n"), withdraw("other")), (0, 1), "b still drains its node");
    assert_eq!(sim.planner.maintenance("a").unwrap().nodes_unreleased, 1);
}

/// The maintenance that is ahead is reported even after it has released the node, and after a restart.
#[test]
fn fast_forwarding_maintenance_is_reported() {
    let plan = [entry(Default, 10, None), entry(Default, 20, None)];
    let a = maintenance("a", 1, &["n"], &[], ServedPodTypes::DEFAULT);
    let b = maintenance("b", 2, &["n"], &plan, ServedPodTypes::DEFAULT);
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &["n"]);
    sim.pod(pod("n", "low", 10));
    sim.pod(pod("n", "high", 20));
    sim.apply(Change::Maintenance(a.clone()));
    assert_eq!(sim.leaving(), ["high", "low"]);
    sim.apply(Change::Maintenance(b.clone()));
    sim.apply(Change::Maintenance(MaintenanceFacts { stage: Stage::Complete, ..a }));
    let forwarded = |sim: &Simulation| sim.planner.maintenance("b").unwrap().forwarded_by;
    assert_eq!(forwarded(&sim), ["a".into()]);
    let of_node = sim.planner.node("n").unwrap();
    let names: Vec<_> = of_node.maintenances.iter().map(|known| (known.name.as_str(), known.stage)).collect();
    assert_eq!(names, [("b", Stage::Drain), ("a", Stage::Complete)]);

    let mut again = Simulation::new(ServedPodTypes::DEFAULT, &[]);
    let reached = DrainTargets::read(&of_node.targets).unwrap();
    let maintenances = Some(of_node.maintenances.into());
    again.planner.apply(Change::Node(NodeFacts { reached, maintenances, ..node("n") }));
    again.pod(pod("n", "low", 10));
    again.pod(pod("n", "high", 20));
    again.apply(Change::Maintenance(b));
    assert_eq!((forwarded(&again), again.leaving()), (vec!["a".into()], vec!["high", "low"]));
}

/// The next maintenance of a node starts with its own plan, whatever the node's annotation still lists.
#[test]
fn next_maintenance_starts_with_its_own_plan() {
    let a = maintenance("a", 1, &["n"], &[], ServedPodTypes::DEFAULT);
    let b = maintenance("b", 2, &["n"], &[entry(Default, 10, None)], ServedPodTypes::DEFAULT);
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &["n"]);
    sim.pod(pod("n", "low", 10));
    sim.pod(pod("n", "high", 20));
    sim.apply(Change::Maintenance(a.clone()));
    let before = sim.planner.node("n").unwrap();
    // The annotation is observed and not removed yet when the next maintenance starts.
    let reached = DrainTargets::read(&before.targets).unwrap();
    sim.apply(Change::Node(NodeFacts {
        reached,
        maintenances: Some(before.maintenances.into()),
        ..node("n")
    }));
    sim.planner.apply(Change::Maintenance(MaintenanceFacts { stage: Stage::Complete, ..a }));
    sim.planner.apply(Change::Maintenance(b));
    sim.planner.converge();
    let evacuate = sim.planner.evacuate("n");
    let leaving: Vec<_> = evacuate.iter().map(|wanted| wanted.pod.name.as_ref()).collect();
    assert_eq!(leaving, ["low"]);
}

#[test]
fn annotated_node_does_not_wait_for_volumes() {
    let attached = NodeFacts { volumes: Arc::new(BTreeSet::from(["pv-1".into()])), ..node("n") };
    let mut sim = one_node(DrainRules::default(), ServedPodTypes::DEFAULT, vec![pod("n", "web", 0)]);
    let summary = |sim: &Simulation| {
        let plan = sim.planner.node("n").unwrap();
        (plan.state, plan.counts.volumes, plan.counts.volumes_ignored)
    };
    sim.apply(Change::Node(NodeFacts { ignores_volumes: true, ..attached.clone() }));
    assert_eq!(summary(&sim), (NodeState::Evacuating, 0, 0), "its pods are still there");
    sim.gone("web");
    assert_eq!(summary(&sim), (NodeState::Drained, 0, 1));
    sim.apply(Change::Node(attached));
    assert_eq!(summary(&sim), (NodeState::Evacuating, 1, 0));
    assert!(!sim.planner.maintenance("m").unwrap().drained);
}

/// The longest timeout applies, and a maintenance without a timeout waits without limit.
#[test]
fn longest_volume_timeout_applies() {
    let seconds = |seconds: Option<i64>| seconds.map(SignedDuration::from_secs);
    let of = |name: &str, timeout| MaintenanceFacts {
        volume_timeout: seconds(timeout),
        ..maintenance(name, 1, &["n"], &[], ServedPodTypes::DEFAULT)
    };
    let attached = NodeFacts { volumes: Arc::new(BTreeSet::from(["pv-1".into()])), ..node("n") };
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &[]);
    sim.apply(Change::Node(attached.clone()));
    let summary = |sim: &Simulation| {
        let plan = sim.planner.node("n").unwrap();
        (plan.volume_timeout, plan.counts.volumes, plan.counts.volumes_ignored)
    };
    sim.apply(Change::Maintenance(of("a", Some(60))));
    sim.apply(Change::Maintenance(of("b", Some(90))));
    assert_eq!(summary(&sim), (seconds(Some(90)), 1, 0));
    let since = |over| Some(VolumeWait { since: Time(at(0)), over });
    sim.apply(Change::Node(NodeFacts { volume_wait: since(false), ..attached.clone() }));
    let blocker = &sim.planner.node("n").unwrap().blockers[0];
    let until = format!("continues without waiting at {:.0}", at(90));
    assert!(blocker.message.contains(&until) && blocker.since == Some(at(0)), "{blocker:?}");
    sim.apply(Change::Node(NodeFacts { volume_wait: since(true), ..attached }));
    assert_eq!(summary(&sim), (seconds(Some(90)), 0, 1));
    sim.apply(Change::Maintenance(of("a", None)));
    assert_eq!(summary(&sim), (None, 1, 0), "an admin may change it");
}

#[test]
fn pod_whose_target_does_not_fit_is_blocked() {
    let values: Vec<String> = (0..1500).map(|i| format!("{i:063}")).collect();
    let entries: Vec<_> = values.iter().map(|app| entry(Default, 5, Some(app))).collect();
    let last = |name: &str, priority| PodFacts {
        labels: labels(&[("app", &values[1499])]),
        ..pod("n", name, priority)
    };
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &[]);
    // The annotation of the node has one of two pods that leave in the same step.
    let reached = DrainTargets::read(&[entry(Default, 3, Some(&values[1499]))]).unwrap();
    sim.planner.apply(Change::Node(NodeFacts { reached, ..node("n") }));
    sim.pod(last("announced", 3));
    sim.pod(last("unannounced", 5));
    sim.planner.apply(Change::Maintenance(maintenance("m", 1, &["n"], &entries, ServedPodTypes::DEFAULT)));
    sim.planner.converge();
    let plan = sim.planner.maintenance("m").unwrap();
    let blocked = plan.blockers.iter().filter_map(|(_, b)| Some((b.pod.as_ref()?.name.as_ref(), &*b.reason)));
    assert_eq!(blocked.collect::<Vec<_>>(), [("unannounced", reason::DRAIN_TARGETS_TOO_LARGE)]);
    let awaited: Vec<_> = plan.waiting_for.iter().map(|(_, awaited)| awaited.pod.name.as_ref()).collect();
    assert_eq!(awaited, ["announced"]);
}

/// The next leader counts pods that left while there was no leader.
#[test]
fn pods_that_left_without_a_leader_are_counted() {
    let evacuated = |stage, remaining_in_status, pods: usize| {
        let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &["n"]);
        let facts = maintenance("m", 1, &["n"], &[], ServedPodTypes::DEFAULT);
        // A new leader may receive the maintenance before the pods, and then a late write of the previous leader.
        for late in [0, u32::from(remaining_in_status > 1)] {
            sim.planner.apply(Change::Maintenance(MaintenanceFacts {
                stage,
                evacuated: 5,
                remaining_in_status: remaining_in_status - late,
                ..facts.clone()
            }));
        }
        sim.pods("n", pods, 0);
        sim.act();
        if pods > 1 && stage == Stage::Drain {
            sim.leave("n", 1);
        }
        sim.planner.maintenance("m").unwrap().evacuated
    };
    assert_eq!(evacuated(Stage::Drain, 10, 2), 14, "eight before, one after");
    assert_eq!(evacuated(Stage::Drain, 10, 0), 15);
    assert_eq!(evacuated(Stage::Drain, 1, 3), 6, "new pods have been created");
    assert_eq!(evacuated(Stage::Complete, 10, 1), 5, "pods stay after completion");
}

/// Two maintenances with this number of selectors each, for different labels, and a pod that both have reached.
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
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &["n"]);
    sim.pod(PodFacts { labels: labels(&[("app", &last), ("tier", &last)]), ..pod("n", "web", 5) });
    for (name, age, key) in [("a", 1, "app"), ("b", 2, "tier")] {
        let facts = maintenance(name, age, &["n"], &plan(key), ServedPodTypes::DEFAULT);
        sim.planner.apply(Change::Maintenance(facts));
    }
    sim.planner.converge();
    // As the controller writes it.
    let targets = sim.planner.node("n").unwrap().targets;
    let reached = DrainTargets::read(&targets).unwrap();
    sim.planner.apply(Change::Node(NodeFacts { reached, ..node("n") }));
    sim.planner.converge();
    (sim.planner.evacuate("n")[0].announced, targets)
}

/// A pod that all maintenances have reached is announced, however many combinations of selectors there are.
#[test]
fn pod_is_announced_despite_truncated_targets() {
    for number in [2, 8, 9, 30] {
        let (announced, targets) = overlap(number);
        assert!(announced && targets.len() <= 112, "{number}: {targets:?}");
    }
}

/// A pod that is no longer evacuated has not left.
#[test]
fn newly_unsupported_pods_do_not_count_as_evacuated() {
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &["n"]);
    sim.pod(pod("n", "web", 0));
    for i in 0..7 {
        sim.pod(PodFacts { pod_type: DaemonSet, ..pod("n", &format!("daemon-{i}"), 0) });
    }
    // DaemonSets were served before: ten pods had to leave.
    let facts = maintenance("m", 1, &["n"], &[], ServedPodTypes::DEFAULT);
    sim.planner.apply(Change::Maintenance(MaintenanceFacts { remaining_in_status: 10, ..facts }));
    sim.planner.converge();
    assert_eq!(sim.planner.maintenance("m").unwrap().evacuated, 2);
}

//! The examples of KEP-4212.

use super::*;
use crate::plan::Plan;
use haulout_api_types::node_maintenance::PodType::{DaemonSet, Default, Static};

fn at_default(priority: i32) -> Vec<String> {
    vec![format!("Default<={priority}")]
}

fn summary(pending: u32, evacuating: u32, message: &str, priority: i32) -> (u32, u32, String, Vec<String>) {
    (pending, evacuating, message.into(), at_default(priority))
}

/// "Pod Selection and DrainTargets Example" of KEP-4212, state by state. (The KEP leaves 35 pods evacuating
/// for maintenance-b in its first state and 5 in its second: 10 and then 5 of them are on node one.)
#[test]
fn kep_example_of_intersecting_maintenances() {
    let mut sim = Simulation::new(ServedPodTypes::ALL, &["one", "two", "three", "four"]);
    // Node one: 10 pods up to 5000, 30 up to 10000, 70 beyond. Two: 7, 9 and 21. Three: 25 and 45.
    sim.pods("one", 10, 5000);
    sim.pods("one", 30, 10_000);
    sim.pods("one", 70, 15_000);
    sim.pods("two", 7, 5000);
    sim.pods("two", 9, 15_000);
    sim.pods("two", 21, 20_000);
    sim.pods("three", 25, 10_000);
    sim.pods("three", 45, 15_000);
    let a = [entry(Default, 5000, None), entry(Default, 15_000, None), entry(DaemonSet, 3000, None)];
    let b = [entry(Default, 10_000, None), entry(Default, 15_000, None), entry(DaemonSet, 4000, None)];
    sim.planner.apply(Change::Maintenance(maintenance(
        "maintenance-a",
        1,
        &["one", "two"],
        &a,
        ServedPodTypes::ALL,
    )));
    sim.planner.apply(Change::Maintenance(maintenance(
        "maintenance-b",
        2,
        &["one", "three"],
        &b,
        ServedPodTypes::ALL,
    )));
    sim.act();

    assert_eq!(sim.maintenance("maintenance-a"), summary(130, 17, "Evacuating", 5000));
    assert_eq!(
        sim.maintenance("maintenance-b"),
        summary(145, 35, "Evacuating (limited by maintenance-a)", 5000)
    );
    assert_eq!(sim.node("one"), summary(100, 10, "Evacuating", 5000));
    assert_eq!(sim.node("two"), summary(30, 7, "Evacuating", 5000));
    assert_eq!(sim.node("three"), summary(45, 25, "Evacuating", 10_000));

    // "If the node three is drained, then it has to wait for the node one."
    sim.leave("three", 25);
    sim.leave("one", 5);
    assert_eq!(
        sim.maintenance("maintenance-b"),
        summary(145, 5, "Evacuating (limited by maintenance-a)", 5000)
    );
    assert_eq!(sim.node("three"), summary(45, 0, "Waiting for maintenance-a.", 10_000));

    // "If the node one is drained, we still have to wait for the maintenance-a to drain node two."
    sim.leave("one", 5);
    sim.leave("two", 5);
    assert_eq!(sim.maintenance("maintenance-a"), summary(130, 2, "Evacuating", 5000));
    assert_eq!(sim.maintenance("maintenance-b"), summary(145, 0, "Waiting for maintenance-a.", 5000));
    assert_eq!(sim.node("one"), summary(100, 0, "Waiting for maintenance-a.", 5000));
    assert_eq!(sim.node("two"), summary(30, 2, "Evacuating", 5000));
    assert_eq!(sim.node("three"), summary(45, 0, "Waiting for maintenance-a.", 10_000));

    // "Once the node two drains, we can increment the drainTargets."
    sim.leave("two", 2);
    assert_eq!(sim.maintenance("maintenance-a"), summary(91, 39, "Evacuating", 10_000));
    assert_eq!(sim.maintenance("maintenance-b"), summary(115, 30, "Evacuating", 10_000));
    assert_eq!(sim.node("one"), summary(70, 30, "Evacuating (limited by maintenance-b)", 10_000));
    assert_eq!(sim.node("two"), summary(21, 9, "Evacuating", 15_000));
    assert_eq!(sim.node("three"), summary(45, 0, "Waiting for maintenance-b.", 10_000));

    // "The progress of the drain should not be backtracked."
    sim.pods("four", 5, 2000);
    sim.pods("four", 20, 15_000);
    let c = [entry(Default, 2000, None), entry(Default, 15_000, None)];
    sim.apply(Change::Maintenance(maintenance(
        "maintenance-c",
        3,
        &["one", "four"],
        &c,
        ServedPodTypes::ALL,
    )));
    assert_eq!(sim.maintenance("maintenance-c"), summary(90, 35, "Evacuating", 2000));
    assert_eq!(
        sim.node("one"),
        summary(70, 30, "Evacuating (limited by maintenance-b, maintenance-c)", 10_000)
    );
    assert_eq!(sim.node("four"), summary(20, 5, "Evacuating", 2000));
    let forwarded = |name: &str| sim.planner.maintenance(name).unwrap().forwarded_by;
    assert_eq!(forwarded("maintenance-c"), ["maintenance-a".into(), "maintenance-b".into()]);
    assert_eq!(forwarded("maintenance-a"), []);
    assert_eq!(forwarded("maintenance-b"), []);

    // Until the end, which the KEP omits.
    while !sim.pods.is_empty() {
        let name = sim.leaving().first().expect("a pod leaves while pods remain").to_string();
        sim.gone(&name);
    }
    for (name, evacuated) in [("maintenance-a", 147), ("maintenance-b", 180), ("maintenance-c", 125)] {
        let plan = sim.planner.maintenance(name).unwrap();
        assert!(plan.drained, "{name}");
        assert_eq!(
            (plan.message.as_str(), plan.nodes_drained, plan.evacuated),
            ("Drained", 2, evacuated),
            "{name}"
        );
    }
}

/// "PodTypes and Label Selectors Progression" of KEP-4212, without the entries that every plan has.
#[test]
fn kep_example_of_pod_types_and_selectors() {
    let mut sim = Simulation::new(ServedPodTypes::ALL, &["five"]);
    let plan = [
        entry(Default, 1000, None),
        entry(Default, 2000, Some("postgres")),
        entry(Default, i32::MAX, None),
        entry(DaemonSet, 1000, None),
        entry(DaemonSet, i32::MAX, None),
        entry(Static, i32::MAX, None),
    ];
    let postgres = PodFacts { labels: labels(&[("app", "postgres")]), ..pod("five", "b", 2000) };
    sim.pod(pod("five", "a", 500));
    sim.pod(postgres);
    sim.pod(pod("five", "c", 2000));
    sim.pod(PodFacts { pod_type: DaemonSet, ..pod("five", "d", 1000) });
    sim.pod(PodFacts { pod_type: DaemonSet, ..pod("five", "e", 2000) });
    sim.pod(PodFacts { pod_type: Static, ..pod("five", "f", 0) });
    let mut m = maintenance("m", 1, &["five"], &[], ServedPodTypes::ALL);
    m.plan = Arc::new(Plan::parse_entries(&plan, ServedPodTypes::ALL).unwrap());
    sim.apply(Change::Maintenance(m));

    let max = "2147483647";
    let all = format!("Default<={max}");
    let all_postgres = format!("Default<={max} app=postgres");
    let daemons = format!("DaemonSet<={max}");
    let statics = format!("Static<={max}");
    let steps: [(&str, &[&str]); 6] = [
        ("a", &["Default<=1000", "Default<=1000 app=postgres"]),
        ("b", &["Default<=1000", "Default<=2000 app=postgres"]),
        ("c", &[&all, &all_postgres]),
        ("d", &[&all, &all_postgres, "DaemonSet<=1000"]),
        ("e", &[&all, &all_postgres, &daemons]),
        ("f", &[&all, &all_postgres, &daemons, &statics]),
    ];
    for (leaving, targets) in steps {
        assert_eq!(sim.node("five").3, targets, "while {leaving} leaves");
        assert_eq!(sim.maintenance("m").3, targets, "a maintenance of one node has the targets of its node");
        assert_eq!(sim.leaving(), [leaving]);
        sim.gone(leaving);
    }
    assert_eq!(sim.node("five").2, "Drained");
}

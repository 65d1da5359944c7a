//! The stories and sample rules of the MachineDrainRules proposal.

use super::*;
use crate::facts::{ReturnCause, Returned};
use haulout_api_types::names::reason;
use haulout_api_types::node_maintenance::PodType;
use serde_json::json;

/// Story 1 and the sample rule `portworx`: the pod leaves after all other pods, whatever their priority.
#[test]
fn pods_leave_by_order_before_priority() {
    let order = |order: i32, app: &str| {
        json!({"drain": {"behavior": "Drain", "order": order}, "nodes": [{"selector": {}}],
               "pods": [{"selector": {"matchLabels": {"app": app}}}]})
    };
    let rules = rules(&[
        ("portworx", order(100, "portworx")),
        ("later", order(10, "later")),
        ("early", order(-1, "early")),
        ("earliest", order(-7, "earliest")),
    ]);
    let mut sim = one_node(
        rules,
        ServedPodTypes::DEFAULT,
        vec![
            app("portworx", "portworx", -10),
            app("web", "web", 0),
            app("web", "critical", 2_000_001_000),
            app("later", "later", 5),
            app("early", "early", 2_000_001_000),
            app("earliest", "earliest", 7),
        ],
    );
    for leaving in ["earliest", "early", "web", "critical", "later", "portworx"] {
        assert_eq!(sim.leaving(), [leaving]);
        sim.gone(leaving);
    }
    assert!(sim.planner.maintenance("m").unwrap().drained);
}

/// Story 2: a pod that tolerates the cordon returns to the node. This is detected and reported.
#[test]
fn returning_pod_is_a_blocker() {
    let returned = |until: Option<i64>| {
        Some(Box::new(Returned {
            cause: ReturnCause::ToleratesCordon,
            since: at(30),
            until: at(until.unwrap_or_default()),
        }))
    };
    let second = |until| PodFacts { returned: returned(until), ..pod("n", "second", 0) };
    let mut sim = one_node(DrainRules::default(), ServedPodTypes::DEFAULT, vec![pod("n", "first", 0)]);
    let reasons = |sim: &Simulation| sim.planner.maintenance("m").unwrap().blockers_by_reason;
    assert_eq!(reasons(&sim), BTreeMap::new(), "it was there before");
    sim.gone("first");
    sim.pod(second(Some(40)));
    sim.act();
    assert_eq!(reasons(&sim), BTreeMap::from([(reason::RETURNS_TO_NODE.into(), 1)]));
    assert_eq!(sim.leaving(), [""; 0], "not before its backoff has ended");
    let message = sim.planner.node("n").unwrap().blockers[0].message.clone();
    assert!(message.contains("it is evacuated again at 2023-11-14T22:14:00Z;"), "{message}");
    sim.pod(second(None));
    sim.act();
    assert_eq!(reasons(&sim), BTreeMap::from([(reason::RETURNS_TO_NODE.into(), 1)]));
    assert_eq!(sim.leaving(), ["second"], "it is evacuated all the same");
    sim.apply(Change::Rules(rules(&[("tolerant", json!({"drain": {"behavior": "Skip"}}))])));
    assert_eq!(reasons(&sim), BTreeMap::new());
    let plan = sim.planner.node("n").unwrap();
    assert_eq!(
        (sim.planner.withdraw("n").len(), plan.state),
        (1, NodeState::Drained),
        "a new rule applies at once"
    );
}

#[test]
fn skipped_pods_are_listed_while_they_exist() {
    let skip =
        json!({"drain": {"behavior": "Skip"}, "pods": [{"selector": {"matchLabels": {"app": "agent"}}}]});
    let agents = (0..7).map(|i| app("agent", &format!("agent-{i}"), 0)).collect();
    let mut sim = one_node(rules(&[("skip", skip)]), ServedPodTypes::DEFAULT, agents);
    let summary = |sim: &Simulation| {
        let plan = sim.planner.maintenance("m").unwrap();
        let names: Vec<_> = plan.skipped.iter().map(|pod| pod.name.to_string()).collect();
        (plan.drained, plan.counts.skipped, names.join(" "))
    };
    assert_eq!(summary(&sim), (true, 7, "agent-0 agent-1 agent-2 agent-3 agent-4".into()));
    sim.gone("agent-0");
    sim.pod(PodFacts { finished: true, ..app("agent", "agent-1", 0) });
    sim.act();
    assert_eq!(summary(&sim), (true, 5, "agent-2 agent-3 agent-4 agent-5 agent-6".into()));
    // One pod replaces another before the planner runs: the number stays the same, the names change.
    sim.planner.take_changed_maintenances();
    let old = sim.pods.keys().find(|key| &*key.name == "agent-2").unwrap().clone();
    sim.planner.apply(Change::PodGone(old));
    sim.pod(app("agent", "agent-9", 0));
    sim.act();
    assert_eq!(sim.planner.take_changed_maintenances(), ["m".into()]);
    assert_eq!(summary(&sim), (true, 5, "agent-3 agent-4 agent-5 agent-6 agent-9".into()));
}

/// Stories 3 and 4, and the sample rule `skip-pods`.
#[test]
fn pods_are_skipped_by_rule_or_by_label() {
    let rules = rules(&[(
        "skip-pods",
        json!({"drain": {"behavior": "Skip"}, "nodes": [{"selector": {}}], "pods": [
            {"selector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["example-app1", "example-app2"]}]},
             "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "example-namespace"}}},
            {"selector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["monitoring"]}]},
             "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
        ]}),
    )]);
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &["n"]);
    for name in ["example-namespace", "monitoring", "default"] {
        let of = labels(&[("kubernetes.io/metadata.name", name)]);
        sim.planner.apply(Change::Namespace(name.into(), Some(of)));
    }
    sim.planner.apply(Change::Rules(rules));
    let cases = [
        ("example-namespace", "example-app1", None, false),
        ("example-namespace", "example-app2", None, false),
        ("example-namespace", "example-app3", None, true),
        ("default", "example-app1", None, true),
        ("monitoring", "monitoring", None, false),
        ("default", "monitoring", None, true),
        ("default", "web", Some("skip"), false),
        ("default", "web", Some("unknown"), true),
    ];
    let name = |i: usize| format!("pod-{i}");
    for (i, (namespace, app, label, _)) in cases.iter().enumerate() {
        let mut pod = pod("n", &name(i), 0);
        pod.key.namespace = (*namespace).into();
        pod.labels = labels(&[("app", app)]);
        pod.labels.extend(label.map(|value| ("cluster.x-k8s.io/drain".to_string(), value.to_string())));
        sim.pod(pod);
    }
    sim.apply(Change::Maintenance(maintenance("m", 1, &["n"], &[], ServedPodTypes::DEFAULT)));
    let mut leaving = sim.leaving();
    leaving.sort_unstable();
    let expected: Vec<String> = (0..cases.len()).filter(|i| cases[*i].3).map(name).collect();
    assert_eq!(leaving, expected);
    for name in expected {
        sim.gone(&name);
    }
    assert!(sim.planner.maintenance("m").unwrap().drained, "the drain does not wait for skipped pods");
}

/// Story 5: a rule selects some nodes, and changing it changes no other object.
#[test]
fn rule_applies_to_selected_nodes_only() {
    let skip = |zone: &str| {
        rules(&[(
            "by-zone",
            json!({"drain": {"behavior": "Skip"}, "nodes": [{"selector": {"matchLabels": {"zone": zone}}}]}),
        )])
    };
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &[]);
    for name in ["a", "b"] {
        sim.planner.apply(Change::Node(NodeFacts { labels: labels(&[("zone", name)]), ..node(name) }));
        sim.pod(pod(name, &format!("on-{name}"), 0));
    }
    sim.planner.apply(Change::Rules(skip("a")));
    sim.apply(Change::Maintenance(maintenance("m", 1, &["a", "b"], &[], ServedPodTypes::DEFAULT)));
    assert_eq!(sim.leaving(), ["on-b"]);
    sim.apply(Change::Rules(rules(&[])));
    assert_eq!(sim.leaving(), ["on-a", "on-b"]);
}

#[test]
fn drain_waits_until_pod_has_finished() {
    let wait = rules(&[(
        "jobs",
        json!({"drain": {"behavior": "WaitCompleted"}, "pods": [{"selector": {"matchLabels": {"app": "job"}}}]}),
    )]);
    let mut sim =
        one_node(wait, ServedPodTypes::DEFAULT, vec![app("job", "job", 0), app("web", "web", 2_000_000_000)]);
    assert_eq!(sim.leaving(), ["web"], "the job is not evacuated, and no pod of its type waits for it");
    let plan = sim.planner.maintenance("m").unwrap();
    assert_eq!(plan.blockers_by_reason, BTreeMap::from([(reason::WAITING_FOR_COMPLETION.into(), 1)]));
    assert_eq!(plan.message, "Evacuating");
    sim.gone("web");
    let plan = sim.planner.maintenance("m").unwrap();
    assert_eq!((plan.message.as_str(), plan.drained), ("Waiting for 1 pod to complete.", false));
    sim.pod(PodFacts { finished: true, ..app("job", "job", 0) });
    sim.act();
    let plan = sim.planner.maintenance("m").unwrap();
    assert_eq!((plan.evacuated, plan.drained), (2, true));
}

/// On its own node, it delays later pod types, pods with a higher order, and volumes. Other nodes continue.
#[test]
fn unfinished_pod_delays_its_own_node_only() {
    let of =
        |app: &str, drain| json!({"drain": drain, "pods": [{"selector": {"matchLabels": {"app": app}}}]});
    let mut sim = Simulation::new(ServedPodTypes::ALL, &["busy", "free"]);
    sim.planner.apply(Change::Rules(rules(&[
        ("jobs", of("job", json!({"behavior": "WaitCompleted"}))),
        ("late", of("late", json!({"behavior": "Drain", "order": 1}))),
    ])));
    let on = |node: &str, what: &str, name: &str, pod_type| PodFacts {
        pod_type,
        ..PodFacts { node: node.into(), ..app(what, name, 0) }
    };
    sim.pod(on("busy", "job", "job", PodType::Default));
    for node in ["busy", "free"] {
        sim.pod(on(node, "web", &format!("{node}-web"), PodType::Default));
        sim.pod(on(node, "late", &format!("{node}-late"), PodType::Default));
        sim.pod(on(node, "web", &format!("{node}-daemon"), PodType::DaemonSet));
        sim.pod(on(node, "job", &format!("{node}-static"), PodType::Static));
    }
    sim.apply(Change::Maintenance(maintenance("m", 1, &["busy", "free"], &[], ServedPodTypes::ALL)));
    for leaving in [&["busy-web", "free-web"][..], &["free-late"], &["free-daemon"], &["free-static"]] {
        assert_eq!(sim.leaving(), leaving);
        for name in leaving {
            sim.gone(name);
        }
    }
    let summary = |sim: &Simulation, node| sim.planner.node(node).unwrap().message;
    assert_eq!(
        (summary(&sim, "busy").as_str(), summary(&sim, "free").as_str()),
        ("Waiting for 1 pod to complete.", "Drained")
    );
    assert_eq!(sim.maintenance("m").2, "Waiting for 1 pod to complete.");
    sim.gone("job");
    for leaving in ["busy-late", "busy-daemon", "busy-static"] {
        assert_eq!(sim.leaving(), [leaving]);
        sim.gone(leaving);
    }
    assert!(sim.planner.maintenance("m").unwrap().drained);
}

/// A tie on another node of the group is broken although a pod has not finished.
#[test]
fn tie_is_broken_despite_unfinished_pod() {
    let wait = json!({"drain": {"behavior": "WaitCompleted"}, "pods": [{"selector": {"matchLabels": {"app": "job"}}}]});
    let mut sim = Simulation::new(ServedPodTypes::DEFAULT, &["n", "other"]);
    sim.planner.apply(Change::Rules(rules(&[("jobs", wait)])));
    sim.pod(app("x", "x", 0));
    sim.pod(app("y", "y", 0));
    sim.pod(PodFacts { node: "other".into(), ..app("job", "job", 0) });
    let first = |app: &str| [entry(PodType::Default, 1000, Some(app))];
    sim.planner.apply(Change::Maintenance(maintenance(
        "a",
        1,
        &["n", "other"],
        &first("x"),
        ServedPodTypes::DEFAULT,
    )));
    sim.apply(Change::Maintenance(maintenance("b", 2, &["n"], &first("y"), ServedPodTypes::DEFAULT)));
    assert_eq!(sim.leaving(), ["x"]);
}

#[test]
fn pods_in_unknown_namespaces_wait_if_rules_need_namespaces() {
    let skip = json!({"drain": {"behavior": "Skip"}, "pods": [
        {"selector": {"matchLabels": {"app": "db"}}, "namespaceSelector": {"matchLabels": {"keep": "db"}}},
    ]});
    let mut sim = one_node(
        rules(&[("keep", skip)]),
        ServedPodTypes::DEFAULT,
        vec![app("db", "db", 0), app("web", "web", 0)],
    );
    let reasons = |sim: &Simulation| sim.planner.maintenance("m").unwrap().blockers_by_reason;
    assert_eq!(sim.leaving(), ["web"], "no rule can apply to it");
    assert_eq!(reasons(&sim), BTreeMap::from([(reason::NAMESPACE_UNKNOWN.into(), 1)]));
    sim.apply(Change::Namespace("ns".into(), Some(labels(&[]))));
    assert_eq!((sim.leaving(), reasons(&sim)), (vec!["db", "web"], BTreeMap::new()));
}

#[test]
fn pods_of_an_unreadable_rule_stay() {
    let skip = json!({"drain": {"behavior": "Skip"}, "pods": [{"selector": {"matchLabels": {"app": "db"}}}]});
    let early = || rules(&[("a-early", skip.clone())]);
    let mut sim =
        one_node(early(), ServedPodTypes::DEFAULT, vec![app("db", "db", 0), app("web", "web-1", 0)]);
    sim.act();
    assert_eq!(sim.leaving(), ["web-1"]);
    sim.apply(Change::Rules(early().with_unreadable(["later"])));
    sim.pod(app("web", "web-2", 0));
    sim.act();
    assert_eq!(sim.leaving(), ["web-1"], "the rule may exclude the other pod");
    let plan = sim.planner.maintenance("m").unwrap();
    assert_eq!(plan.blockers_by_reason, BTreeMap::from([(reason::DRAIN_RULE_UNREADABLE.into(), 2)]));
    assert_eq!(sim.planner.withdraw("n"), [], "an evacuation in progress continues");
    sim.apply(Change::Rules(early()));
    sim.act();
    assert_eq!(sim.leaving(), ["web-1", "web-2"]);
}

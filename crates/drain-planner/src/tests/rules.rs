//! The stories and sample rules of the MachineDrainRules proposal.

use super::*;
use crate::facts::{Return, Returned};
use haulout_api_types::names::reason;
use haulout_api_types::node_maintenance::PodType;
use serde_json::json;

/// Story 1 and the sample rule `portworx`: after all other pods, whatever their priority.
#[test]
fn pods_with_a_positive_order_leave_last_and_those_with_a_negative_one_first() {
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
    let mut world = one_node(
        rules,
        Served::DEFAULT,
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
        assert_eq!(world.leaving(), [leaving]);
        world.gone(leaving);
    }
    assert!(world.planner.maintenance("m").unwrap().drained);
}

/// Story 2: a pod that tolerates the cordon is put back onto the node, which is found out and reported.
#[test]
fn a_pod_that_comes_back_is_named() {
    let returned = |until: Option<i64>| {
        Some(Box::new(Returned {
            how: Return::ToleratesCordon,
            since: at(30),
            until: at(until.unwrap_or_default()),
        }))
    };
    let second = |until| PodFacts { returned: returned(until), ..pod("n", "second", 0) };
    let mut world = one_node(DrainRules::default(), Served::DEFAULT, vec![pod("n", "first", 0)]);
    let reasons = |world: &World| world.planner.maintenance("m").unwrap().blockers_by_reason;
    assert_eq!(reasons(&world), BTreeMap::new(), "it was there before");
    world.gone("first");
    world.pod(second(Some(40)));
    world.act();
    assert_eq!(reasons(&world), BTreeMap::from([(reason::RETURNS_TO_NODE.into(), 1)]));
    assert_eq!(world.leaving(), [""; 0], "not before its time");
    let message = world.planner.node("n").unwrap().blockers[0].message.clone();
    assert!(message.contains("it is asked to leave again at 2023-11-14T22:14:00Z:"), "{message}");
    world.pod(second(None));
    world.act();
    assert_eq!(reasons(&world), BTreeMap::from([(reason::RETURNS_TO_NODE.into(), 1)]));
    assert_eq!(world.leaving(), ["second"], "it is evacuated all the same");
    world.apply(Change::Rules(rules(&[("tolerant", json!({"drain": {"behavior": "Skip"}}))])));
    assert_eq!(reasons(&world), BTreeMap::new());
    let plan = world.planner.node("n").unwrap();
    assert_eq!(
        (world.planner.withdraw("n").len(), plan.state),
        (1, NodeState::Drained),
        "a rule applies from when it is there"
    );
}

#[test]
fn pods_that_are_skipped_are_named_as_long_as_they_are_there() {
    let skip =
        json!({"drain": {"behavior": "Skip"}, "pods": [{"selector": {"matchLabels": {"app": "agent"}}}]});
    let agents = (0..7).map(|i| app("agent", &format!("agent-{i}"), 0)).collect();
    let mut world = one_node(rules(&[("skip", skip)]), Served::DEFAULT, agents);
    let says = |world: &World| {
        let plan = world.planner.maintenance("m").unwrap();
        let names: Vec<_> = plan.skipped.iter().map(|pod| pod.name.to_string()).collect();
        (plan.drained, plan.counts.skipped, names.join(" "))
    };
    assert_eq!(says(&world), (true, 7, "agent-0 agent-1 agent-2 agent-3 agent-4".into()));
    world.gone("agent-0");
    world.pod(PodFacts { finished: true, ..app("agent", "agent-1", 0) });
    world.act();
    assert_eq!(says(&world), (true, 5, "agent-2 agent-3 agent-4 agent-5 agent-6".into()));
    // One takes the place of another before anybody looks: the number is the same, the names are not.
    world.planner.take_changed_maintenances();
    let old = world.pods.keys().find(|key| &*key.name == "agent-2").unwrap().clone();
    world.planner.apply(Change::PodGone(old));
    world.pod(app("agent", "agent-9", 0));
    world.act();
    assert_eq!(world.planner.take_changed_maintenances(), ["m".into()]);
    assert_eq!(says(&world), (true, 5, "agent-3 agent-4 agent-5 agent-6 agent-9".into()));
}

/// Stories 3 and 4, and the sample rule `skip-pods`.
#[test]
fn pods_are_left_alone_by_rule_or_by_label() {
    let rules = rules(&[(
        "skip-pods",
        json!({"drain": {"behavior": "Skip"}, "nodes": [{"selector": {}}], "pods": [
            {"selector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["example-app1", "example-app2"]}]},
             "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "example-namespace"}}},
            {"selector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["monitoring"]}]},
             "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
        ]}),
    )]);
    let mut world = World::new(Served::DEFAULT, &["n"]);
    for name in ["example-namespace", "monitoring", "default"] {
        let of = labels(&[("kubernetes.io/metadata.name", name)]);
        world.planner.apply(Change::Namespace(name.into(), Some(of)));
    }
    world.planner.apply(Change::Rules(rules));
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
        world.pod(pod);
    }
    world.apply(Change::Maintenance(maintenance("m", 1, &["n"], &[], Served::DEFAULT)));
    let mut leaving = world.leaving();
    leaving.sort_unstable();
    let expected: Vec<String> = (0..cases.len()).filter(|i| cases[*i].3).map(name).collect();
    assert_eq!(leaving, expected);
    for name in expected {
        world.gone(&name);
    }
    assert!(world.planner.maintenance("m").unwrap().drained, "what is skipped is not waited for");
}

/// Story 5: a rule is about some nodes, and changing it changes no other object.
#[test]
fn a_rule_can_be_for_some_nodes_only() {
    let skip = |zone: &str| {
        rules(&[(
            "by-zone",
            json!({"drain": {"behavior": "Skip"}, "nodes": [{"selector": {"matchLabels": {"zone": zone}}}]}),
        )])
    };
    let mut world = World::new(Served::DEFAULT, &[]);
    for name in ["a", "b"] {
        world.planner.apply(Change::Node(NodeFacts { labels: labels(&[("zone", name)]), ..node(name) }));
        world.pod(pod(name, &format!("on-{name}"), 0));
    }
    world.planner.apply(Change::Rules(skip("a")));
    world.apply(Change::Maintenance(maintenance("m", 1, &["a", "b"], &[], Served::DEFAULT)));
    assert_eq!(world.leaving(), ["on-b"]);
    world.apply(Change::Rules(rules(&[])));
    assert_eq!(world.leaving(), ["on-a", "on-b"]);
}

#[test]
fn what_is_to_complete_is_waited_for_until_it_has_finished() {
    let wait = rules(&[(
        "jobs",
        json!({"drain": {"behavior": "WaitCompleted"}, "pods": [{"selector": {"matchLabels": {"app": "job"}}}]}),
    )]);
    let mut world =
        one_node(wait, Served::DEFAULT, vec![app("job", "job", 0), app("web", "web", 2_000_000_000)]);
    assert_eq!(world.leaving(), ["web"], "the job is not evacuated, and nothing of its type waits for it");
    let plan = world.planner.maintenance("m").unwrap();
    assert_eq!(plan.blockers_by_reason, BTreeMap::from([(reason::WAITING_FOR_COMPLETION.into(), 1)]));
    assert_eq!(plan.message, "Evacuating");
    world.gone("web");
    let plan = world.planner.maintenance("m").unwrap();
    assert_eq!((plan.message.as_str(), plan.drained), ("Waiting for 1 pod to complete.", false));
    world.pod(PodFacts { finished: true, ..app("job", "job", 0) });
    world.act();
    let plan = world.planner.maintenance("m").unwrap();
    assert_eq!((plan.evacuated, plan.drained), (2, true));
}

/// On its own node it holds up later pod types, those of a higher order and the volumes; on other nodes nothing.
#[test]
fn a_pod_that_is_waited_for_holds_up_its_own_node_only() {
    let of =
        |app: &str, drain| json!({"drain": drain, "pods": [{"selector": {"matchLabels": {"app": app}}}]});
    let mut world = World::new(Served::ALL, &["busy", "free"]);
    world.planner.apply(Change::Rules(rules(&[
        ("jobs", of("job", json!({"behavior": "WaitCompleted"}))),
        ("late", of("late", json!({"behavior": "Drain", "order": 1}))),
    ])));
    let on = |node: &str, what: &str, name: &str, pod_type| PodFacts {
        pod_type,
        ..PodFacts { node: node.into(), ..app(what, name, 0) }
    };
    world.pod(on("busy", "job", "job", PodType::Default));
    for node in ["busy", "free"] {
        world.pod(on(node, "web", &format!("{node}-web"), PodType::Default));
        world.pod(on(node, "late", &format!("{node}-late"), PodType::Default));
        world.pod(on(node, "web", &format!("{node}-daemon"), PodType::DaemonSet));
        world.pod(on(node, "job", &format!("{node}-static"), PodType::Static));
    }
    world.apply(Change::Maintenance(maintenance("m", 1, &["busy", "free"], &[], Served::ALL)));
    for leaving in [&["busy-web", "free-web"][..], &["free-late"], &["free-daemon"], &["free-static"]] {
        assert_eq!(world.leaving(), leaving);
        for name in leaving {
            world.gone(name);
        }
    }
    let says = |world: &World, node| world.planner.node(node).unwrap().message;
    assert_eq!(
        (says(&world, "busy").as_str(), says(&world, "free").as_str()),
        ("Waiting for 1 pod to complete.", "Drained")
    );
    assert_eq!(world.maintenance("m").2, "Waiting for 1 pod to complete.");
    world.gone("job");
    for leaving in ["busy-late", "busy-daemon", "busy-static"] {
        assert_eq!(world.leaving(), [leaving]);
        world.gone(leaving);
    }
    assert!(world.planner.maintenance("m").unwrap().drained);
}

/// A tie elsewhere in the group is broken although a pod is waited for.
#[test]
fn a_pod_that_is_waited_for_does_not_keep_a_tie_unbroken() {
    let wait = json!({"drain": {"behavior": "WaitCompleted"}, "pods": [{"selector": {"matchLabels": {"app": "job"}}}]});
    let mut world = World::new(Served::DEFAULT, &["n", "other"]);
    world.planner.apply(Change::Rules(rules(&[("jobs", wait)])));
    world.pod(app("x", "x", 0));
    world.pod(app("y", "y", 0));
    world.pod(PodFacts { node: "other".into(), ..app("job", "job", 0) });
    let first = |app: &str| [entry(PodType::Default, 1000, Some(app))];
    world.planner.apply(Change::Maintenance(maintenance(
        "a",
        1,
        &["n", "other"],
        &first("x"),
        Served::DEFAULT,
    )));
    world.apply(Change::Maintenance(maintenance("b", 2, &["n"], &first("y"), Served::DEFAULT)));
    assert_eq!(world.leaving(), ["x"]);
}

#[test]
fn pods_in_unknown_namespaces_wait_if_rules_need_namespaces() {
    let skip = json!({"drain": {"behavior": "Skip"}, "pods": [
        {"selector": {"matchLabels": {"app": "db"}}, "namespaceSelector": {"matchLabels": {"keep": "db"}}},
    ]});
    let mut world =
        one_node(rules(&[("keep", skip)]), Served::DEFAULT, vec![app("db", "db", 0), app("web", "web", 0)]);
    let reasons = |world: &World| world.planner.maintenance("m").unwrap().blockers_by_reason;
    assert_eq!(world.leaving(), ["web"], "no rule may mean it");
    assert_eq!(reasons(&world), BTreeMap::from([(reason::NAMESPACE_UNKNOWN.into(), 1)]));
    world.apply(Change::Namespace("ns".into(), Some(labels(&[]))));
    assert_eq!((world.leaving(), reasons(&world)), (vec!["db", "web"], BTreeMap::new()));
}

#[test]
fn what_a_rule_that_cannot_be_read_may_mean_stays_as_it_is() {
    let skip = json!({"drain": {"behavior": "Skip"}, "pods": [{"selector": {"matchLabels": {"app": "db"}}}]});
    let early = || rules(&[("a-early", skip.clone())]);
    let mut world = one_node(early(), Served::DEFAULT, vec![app("db", "db", 0), app("web", "web-1", 0)]);
    world.act();
    assert_eq!(world.leaving(), ["web-1"]);
    world.apply(Change::Rules(early().with_unreadable(["later"])));
    world.pod(app("web", "web-2", 0));
    world.act();
    assert_eq!(world.leaving(), ["web-1"], "nobody knows whether the other one is to leave");
    let plan = world.planner.maintenance("m").unwrap();
    assert_eq!(plan.blockers_by_reason, BTreeMap::from([(reason::DRAIN_RULE_UNREADABLE.into(), 2)]));
    assert_eq!(world.planner.withdraw("n"), [], "and what is on its way goes on");
    world.apply(Change::Rules(early()));
    world.act();
    assert_eq!(world.leaving(), ["web-1", "web-2"]);
}

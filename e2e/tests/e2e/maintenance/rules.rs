//! DrainRules: the user stories and samples of Cluster API's MachineDrainRules, for nodes.

use haulout_api_types::DrainRule;
use haulout_e2e::service::NAMESPACE;
use k8s_openapi::api::apps::v1::Deployment;

use super::*;

impl Scenario<'_> {
    pub fn rules(&self) -> Api<DrainRule> {
        Api::all(self.env.client.clone())
    }

    /// Creates a rule for all pods of these kinds, on all nodes.
    pub async fn rule(&self, name: &str, spec: Value) {
        let rule = json!({"metadata": {"name": self.of(name)}, "spec": spec});
        self.rules().create(&PostParams::default(), &serde_json::from_value(rule).unwrap()).await.unwrap();
    }

    /// Waits until exactly these pods, with these reasons, are listed as blockers.
    pub async fn until_blocked(
        &self,
        maintenance: &str,
        blockers: &[(Option<&str>, &str)],
    ) -> NodeMaintenance {
        let what = format!("is blocked by {blockers:?}");
        let same = |m: &NodeMaintenance| {
            let status = drain(m);
            let found = status.blockers.iter().map(|b| (b.pod.as_deref(), b.reason.as_str()));
            found.collect::<Vec<_>>() == blockers
        };
        self.until(maintenance, &what, same).await
    }

    async fn finish(&self, pod: &str) {
        let patch = Patch::Merge(json!({"status": {"phase": "Succeeded"}}));
        self.pods().patch_status(pod, &PatchParams::default(), &patch).await.unwrap();
    }
}

#[tokio::test]
async fn plans_and_rules_decide_the_order() {
    let env = TestEnv::new("maintenance-rules", &["--pod-types", "Default,DaemonSet"]).await;
    let scenarios = scenarios![&env;
        drain_rules_order_skip_and_wait,
        machine_drain_rule_samples_work,
        pod_that_returns_to_the_node_is_reported,
        controllers_stay_on_their_last_node,
        super::volumes::volumes_detach_before_daemon_sets_leave,
        super::overlaps::kep_4212_example_works_step_by_step,
    ];
    all_at_once(scenarios).await;
}

async fn controllers_stay_on_their_last_node(env: &TestEnv) {
    let scenario = env.scenario("controllers").await;
    scenario.node("n1", "blue").await;
    scenario.pod("web", "n1").await;
    // As in the chart, on nodes of two pools.
    let (name, component) = ("controller", "evacuation-controller");
    let pools: Vec<_> = ["blue", "red"].iter().map(|pool| scenario.of(pool)).collect();
    let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "pool", "operator": "In", "values": pools}]},
    ]}}});
    let controller = objects::deployment(name).namespace(NAMESPACE).pods(|pod| {
        let labelled =
            pod.label("app.kubernetes.io/name", "haulout").label("app.kubernetes.io/component", component);
        labelled.with(|spec| spec.affinity = serde_json::from_value(affinity).unwrap())
    });
    let deployments: Api<Deployment> = Api::namespaced(env.client.clone(), NAMESPACE);
    deployments.create(&PostParams::default(), &controller.build()).await.unwrap();
    let until_runs_on = async |node: &str| {
        let (node, pods) = (scenario.of(node), Api::<Pod>::namespaced(env.client.clone(), NAMESPACE));
        let config = watcher::Config::default().labels("app.kubernetes.io/component=evacuation-controller");
        let there = |pod: &Pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()) == Some(&node);
        let runs = |pods: &[Pod]| pods.len() == 1 && pods.iter().all(there);
        let found = wait::all(pods, config, &format!("run on {node}"), SOON, runs).await;
        scenario.explained(found)[0].name_any()
    };
    let no_node = names::reason::NO_NODE_FOR_CONTROLLER;

    // All nodes that accept it are being drained: it stays, and everything else leaves.
    let pod = until_runs_on("n1").await;
    scenario.maintain("all", "blue,green", Stage::Drain).await;
    scenario.until_pod_gone("web").await;
    let held = scenario.until_blocked("all", &[(Some(&pod), no_node)]).await;
    let message = &drain(&held).blockers[0].message;
    assert!(message.contains("add or uncordon a node"), "{message}");
    let alone = |m: &NodeMaintenance| drain(m).drain_message == "Waiting for a node for 1 pod of Haulout.";
    scenario.until("all", "waits only for that", alone).await;

    // A new node accepts it.
    scenario.node("n2", "red").await;
    scenario.until_drained("all").await;
    let pod = until_runs_on("n2").await;

    // Now that node is the last one.
    scenario.maintain("red", "red", Stage::Drain).await;
    scenario.until_blocked("red", &[(Some(&pod), no_node)]).await;
    scenario.set_stage("all", Stage::Complete).await;
    scenario.until_drained("red").await;
    until_runs_on("n1").await;
}

async fn drain_rules_order_skip_and_wait(env: &TestEnv) {
    let scenario = env.scenario("rules").await;
    scenario.node("n1", "blue").await;
    scenario.node("n2", "green").await;
    let blue = json!([{"selector": {"matchLabels": {"pool": scenario.of("blue")}}}]);
    let here = json!({"matchLabels": {"kubernetes.io/metadata.name": "rules"}});
    let app = |app: &str| json!([{"selector": {"matchLabels": {"app": app}}, "namespaceSelector": here}]);
    scenario
        .rule("last", json!({"drain": {"behavior": "Drain", "order": 100}, "pods": app("storage")}))
        .await;
    scenario
        .rule("monitoring", json!({"drain": {"behavior": "Skip"}, "nodes": blue, "pods": app("agent")}))
        .await;
    let pod = |name: &str| objects::pod(name).annotation(&slow(), "100");
    let critical = pod("critical").priority_class("system-cluster-critical");
    scenario.pod_from(pod("storage").label("app", "storage"), "n1").await;
    scenario.pod_from(critical, "n1").await;
    scenario.pod_from(pod("elsewhere").priority_class("system-cluster-critical"), "n2").await;
    scenario.pod_from(pod("agent-1").label("app", "agent"), "n1").await;
    scenario.pod_from(pod("agent-2").label("app", "agent"), "n2").await;
    scenario.pod_from(pod("own-skip").label(names::DRAIN_LABEL, "skip"), "n1").await;
    scenario.pod_from(pod("own-wait").label(names::DRAIN_LABEL, "wait-completed"), "n1").await;

    // The rule for agents applies to blue nodes only; storage leaves after all other pods, regardless of priority.
    scenario.maintain("m", "blue,green", Stage::Drain).await;
    scenario.until_evacuating(&["agent-2"]).await;
    scenario.until_blocked("m", &[(Some("own-wait"), "WaitingForCompletion")]).await;
    let delete = async |pod: &str| {
        scenario.pods().delete(pod, &DeleteParams::default().grace_period(0)).await.unwrap();
    };
    // The plan continues during the wait; only pods with a higher order on the same node wait, too.
    delete("agent-2").await;
    scenario.until_evacuating(&["critical", "elsewhere"]).await;
    // A node lists its drain targets before its pods are evacuated.
    for node in ["n1", "n2"] {
        let node = scenario.nodes().get(&scenario.of(node)).await.unwrap();
        let announced = &node.annotations()[names::MAINTENANCE_STATUS_ANNOTATION];
        assert!(announced.contains(r#""podPriority":2000000000"#), "{announced}");
    }
    delete("critical").await;
    delete("elsewhere").await;
    let waits = |m: &NodeMaintenance| drain(m).drain_message == "Waiting for 1 pod to complete.";
    let waiting = scenario.until("m", "waits for one pod", waits).await;
    assert_eq!((drain(&waiting).nodes_drained, is(&waiting, names::condition::DRAINED)), (1, false));
    assert_eq!(scenario.pods_with_evacuation().await, BTreeSet::new());
    scenario.finish("own-wait").await;
    scenario.until_evacuating(&["storage"]).await;

    // A rule that changes applies at once. Pods that are already leaving continue.
    let patch = Patch::Merge(json!({"spec": {"pods": [{"selector": {"matchLabels": {"app": "nothing"}}}]}}));
    scenario.rules().patch(&scenario.of("monitoring"), &PatchParams::default(), &patch).await.unwrap();
    scenario.until_evacuating(&["agent-1", "storage"]).await;
    for pod in ["agent-1", "storage"] {
        delete(pod).await;
    }
    let drained = scenario.until_drained("m").await;
    assert_eq!((drain(&drained).nodes_drained, drain(&drained).pods_skipped), (2, 1));
    let message = condition_of(&drained, names::condition::DRAINED).2;
    assert_eq!(
        message,
        "Every pod that has to leave has left; 1 pod stays, because a DrainRule or its label says skip: rules/own-skip"
    );
    assert_eq!(scenario.until_event("m", names::event::DRAINED).await, message);
    assert!(scenario.pods().get("own-skip").await.unwrap().metadata.deletion_timestamp.is_none());
}

/// The rules of the proposal, with nodes instead of machines.
async fn machine_drain_rule_samples_work(env: &TestEnv) {
    let scenario = env.scenario("samples").await;
    let everywhere = json!([{"selector": {}}]);
    let skipped = json!([
        {
            "selector": {"matchExpressions": [
                {"key": "app", "operator": "In", "values": ["example-app1", "example-app2"]},
            ]},
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "example-namespace"}},
        },
        {
            "selector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["monitoring"]}]},
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
        },
    ]);
    scenario
        .rule("skip-pods", json!({"drain": {"behavior": "Skip"}, "nodes": everywhere, "pods": skipped}))
        .await;
    let portworx = json!([{"selector": {"matchLabels": {"app": "portworx"}}}]);
    let last = json!({"drain": {"behavior": "Drain", "order": 100}, "nodes": everywhere, "pods": portworx});
    scenario.rule("portworx", last).await;
    scenario.node("n1", "blue").await;
    let pod = |name: &str, app: &str| objects::pod(name).label("app", app).annotation(&slow(), "100");
    for (namespace, app) in [("example-namespace", "example-app2"), ("monitoring", "monitoring")] {
        let elsewhere = env.scenario(namespace).await;
        let pod = pod("stays", app).namespace(namespace).node(&scenario.of("n1")).build();
        elsewhere.pods().create(&PostParams::default(), &pod).await.unwrap();
    }
    scenario.pod_from(pod("app", "example-app2"), "n1").await;
    scenario.pod_from(pod("portworx", "portworx"), "n1").await;
    scenario.pod_from(pod("critical", "web").priority_class("system-cluster-critical"), "n1").await;

    scenario.maintain("m", "blue", Stage::Drain).await;
    for next in ["app", "critical", "portworx"] {
        scenario.until_evacuating(&[next]).await;
        scenario.pods().delete(next, &DeleteParams::default().grace_period(0)).await.unwrap();
    }
    let drained = scenario.until_drained("m").await;
    let message = condition_of(&drained, names::condition::DRAINED).2;
    let stay = "2 pods stay, because a DrainRule or their label says skip: example-namespace/stays, monitoring/stays";
    assert!(message.ends_with(stay), "{message}");
    for namespace in ["example-namespace", "monitoring"] {
        let elsewhere = Scenario { name: namespace, ..scenario };
        assert_eq!(elsewhere.pods_with_evacuation().await, BTreeSet::new());
        assert!(elsewhere.pods().get("stays").await.unwrap().metadata.deletion_timestamp.is_none());
    }
    // A pod that leaves on its own is no longer listed.
    let monitoring = Scenario { name: "monitoring", ..scenario };
    monitoring.pods().delete("stays", &DeleteParams::default().grace_period(0)).await.unwrap();
    let one_stays = |m: &NodeMaintenance| {
        let message = condition_of(m, names::condition::DRAINED).2;
        drain(m).pods_skipped == 1 && message.ends_with("says skip: example-namespace/stays")
    };
    scenario.until("m", "lists only the remaining pod", one_stays).await;
}

async fn pod_that_returns_to_the_node_is_reported(env: &TestEnv) {
    let scenario = env.scenario("returns").await;
    scenario.node("n1", "blue").await;
    let stubborn = objects::deployment("stubborn").pods(PodBuilder::tolerates_everything);
    scenario.deploy(stubborn, &["blue"]).await;
    scenario.until_run_on("n1", 1).await;
    let begun = env.cluster.requests_mark().unwrap();
    scenario.maintain("m", "blue", Stage::Drain).await;
    let returns =
        |m: &NodeMaintenance| drain(m).blockers.iter().any(|b| b.reason == names::reason::RETURNS_TO_NODE);
    let found = scenario.until("m", "reports the pod", returns).await;
    let blocker = drain(&found).blockers.swap_remove(0);
    assert_eq!(
        (blocker.node.as_deref(), blocker.namespace.as_deref()),
        (Some("returns-n1"), Some("returns"))
    );
    assert!(blocker.message.contains("skip it with a DrainRule"), "{}", blocker.message);
    scenario.until_event("m", names::event::BLOCKED).await;
    // There is no eviction loop: when it returns the second time, it stays for a while.
    let held = |m: &NodeMaintenance| {
        drain(m).blockers.iter().any(|b| b.message.contains("it is evacuated again at"))
    };
    scenario.until("m", "reports until when it stays", held).await;
    let made = env.cluster.requests_since(begun).unwrap().writes();
    let made = made.resource("pods", "").only(|r| r.namespace == scenario.name && r.verb == "create").count();
    assert!(made <= 3, "{made} pods have come back");
    let stubborn = json!([{"selector": {"matchLabels": {"app": "stubborn"}}}]);
    scenario.rule("stubborn", json!({"drain": {"behavior": "Skip"}, "pods": stubborn})).await;
    scenario.until_drained("m").await;
}

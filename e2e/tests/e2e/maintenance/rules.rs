//! Drain rules: the stories and samples of Cluster API's MachineDrainRules, for nodes.

use haulout_api_types::DrainRule;
use haulout_e2e::service::NAMESPACE;
use k8s_openapi::api::apps::v1::Deployment;

use super::*;

impl Scene<'_> {
    pub fn rules(&self) -> Api<DrainRule> {
        Api::all(self.world.client.clone())
    }

    /// A rule for all pods of these kinds, wherever they are.
    pub async fn rule(&self, name: &str, spec: Value) {
        let rule = json!({"metadata": {"name": self.of(name)}, "spec": spec});
        self.rules().create(&PostParams::default(), &serde_json::from_value(rule).unwrap()).await.unwrap();
    }

    /// Waits until exactly these pods, with these reasons, are said to be in the way.
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
    let world = World::new("maintenance-rules", &["--pod-types", "Default,DaemonSet"]).await;
    let scenarios = scenarios![&world;
        rules_say_who_leaves_last_who_stays_and_who_is_waited_for,
        the_samples_of_the_proposal_work,
        pod_that_returns_to_the_node_is_reported,
        our_own_controllers_stay_on_their_last_node,
        super::volumes::volumes_detach_before_daemon_sets_leave,
        super::overlaps::the_worked_example_of_the_kep_comes_out_step_by_step,
    ];
    all_at_once(scenarios).await;
}

async fn our_own_controllers_stay_on_their_last_node(world: &World) {
    let scene = world.scene("controllers").await;
    scene.node("n1", "blue").await;
    scene.pod("web", "n1").await;
    // As the chart has them, on nodes of two pools.
    let (name, component) = ("controller", "evacuation-controller");
    let pools: Vec<_> = ["blue", "red"].iter().map(|pool| scene.of(pool)).collect();
    let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "pool", "operator": "In", "values": pools}]},
    ]}}});
    let controller = objects::deployment(name).namespace(NAMESPACE).pods(|pod| {
        let labelled =
            pod.label("app.kubernetes.io/name", "haulout").label("app.kubernetes.io/component", component);
        labelled.with(|spec| spec.affinity = serde_json::from_value(affinity).unwrap())
    });
    let deployments: Api<Deployment> = Api::namespaced(world.client.clone(), NAMESPACE);
    deployments.create(&PostParams::default(), &controller.build()).await.unwrap();
    let until_runs_on = async |node: &str| {
        let (node, pods) = (scene.of(node), Api::<Pod>::namespaced(world.client.clone(), NAMESPACE));
        let config = watcher::Config::default().labels("app.kubernetes.io/component=evacuation-controller");
        let there = |pod: &Pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()) == Some(&node);
        let runs = |pods: &[Pod]| pods.len() == 1 && pods.iter().all(there);
        let found = wait::all(pods, config, &format!("run on {node}"), SOON, runs).await;
        scene.explained(found)[0].name_any()
    };
    let no_node = names::reason::NO_NODE_FOR_CONTROLLER;

    // All nodes that would take it are drained: it stays, and all else leaves.
    let pod = until_runs_on("n1").await;
    scene.maintain("all", "blue,green", Stage::Drain).await;
    scene.until_pod_gone("web").await;
    let held = scene.until_blocked("all", &[(Some(&pod), no_node)]).await;
    let message = &drain(&held).blockers[0].message;
    assert!(message.contains("add or uncordon a node"), "{message}");
    let alone = |m: &NodeMaintenance| drain(m).drain_message == "Waiting for a node for 1 pod of Haulout.";
    scene.until("all", "waits for nothing else", alone).await;

    // A new node takes it.
    scene.node("n2", "red").await;
    scene.until_drained("all").await;
    let pod = until_runs_on("n2").await;

    // And now that one is the last.
    scene.maintain("red", "red", Stage::Drain).await;
    scene.until_blocked("red", &[(Some(&pod), no_node)]).await;
    scene.set_stage("all", Stage::Complete).await;
    scene.until_drained("red").await;
    until_runs_on("n1").await;
}

async fn rules_say_who_leaves_last_who_stays_and_who_is_waited_for(world: &World) {
    let scene = world.scene("rules").await;
    scene.node("n1", "blue").await;
    scene.node("n2", "green").await;
    let blue = json!([{"selector": {"matchLabels": {"pool": scene.of("blue")}}}]);
    let here = json!({"matchLabels": {"kubernetes.io/metadata.name": "rules"}});
    let app = |app: &str| json!([{"selector": {"matchLabels": {"app": app}}, "namespaceSelector": here}]);
    scene.rule("last", json!({"drain": {"behavior": "Drain", "order": 100}, "pods": app("storage")})).await;
    scene
        .rule("monitoring", json!({"drain": {"behavior": "Skip"}, "nodes": blue, "pods": app("agent")}))
        .await;
    let pod = |name: &str| objects::pod(name).annotation(&slow(), "100");
    let critical = pod("critical").priority_class("system-cluster-critical");
    scene.pod_from(pod("storage").label("app", "storage"), "n1").await;
    scene.pod_from(critical, "n1").await;
    scene.pod_from(pod("elsewhere").priority_class("system-cluster-critical"), "n2").await;
    scene.pod_from(pod("agent-1").label("app", "agent"), "n1").await;
    scene.pod_from(pod("agent-2").label("app", "agent"), "n2").await;
    scene.pod_from(pod("own-skip").label(names::DRAIN_LABEL, "skip"), "n1").await;
    scene.pod_from(pod("own-wait").label(names::DRAIN_LABEL, "wait-completed"), "n1").await;

    // The rule for agents applies to blue nodes alone; storage comes after whatever priority there is.
    scene.maintain("m", "blue,green", Stage::Drain).await;
    scene.until_evacuating(&["agent-2"]).await;
    scene.until_blocked("m", &[(Some("own-wait"), "WaitingForCompletion")]).await;
    let delete = async |pod: &str| {
        scene.pods().delete(pod, &DeleteParams::default().grace_period(0)).await.unwrap();
    };
    // The plan goes on while one is waited for; only what has a higher order, on the same node, waits too.
    delete("agent-2").await;
    scene.until_evacuating(&["critical", "elsewhere"]).await;
    // What a node announces comes before what is asked of its pods.
    for node in ["n1", "n2"] {
        let node = scene.nodes().get(&scene.of(node)).await.unwrap();
        let announced = &node.annotations()[names::MAINTENANCE_STATUS_ANNOTATION];
        assert!(announced.contains(r#""podPriority":2000000000"#), "{announced}");
    }
    delete("critical").await;
    delete("elsewhere").await;
    let waits = |m: &NodeMaintenance| drain(m).drain_message == "Waiting for 1 pod to complete.";
    let waiting = scene.until("m", "waits for one pod", waits).await;
    assert_eq!((drain(&waiting).nodes_drained, is(&waiting, names::condition::DRAINED)), (1, false));
    assert_eq!(scene.evacuated().await, BTreeSet::new());
    scene.finish("own-wait").await;
    scene.until_evacuating(&["storage"]).await;

    // A rule that changes halfway applies from then on. Who is on the way out already goes on.
    let patch = Patch::Merge(json!({"spec": {"pods": [{"selector": {"matchLabels": {"app": "nothing"}}}]}}));
    scene.rules().patch(&scene.of("monitoring"), &PatchParams::default(), &patch).await.unwrap();
    scene.until_evacuating(&["agent-1", "storage"]).await;
    for pod in ["agent-1", "storage"] {
        delete(pod).await;
    }
    let drained = scene.until_drained("m").await;
    assert_eq!((drain(&drained).nodes_drained, drain(&drained).pods_skipped), (2, 1));
    let message = condition_of(&drained, names::condition::DRAINED).2;
    assert_eq!(
        message,
        "Every pod that has to leave has left; 1 pod stays, because a DrainRule or its label says skip: rules/own-skip"
    );
    assert_eq!(scene.until_event("m", names::event::DRAINED).await, message);
    assert!(scene.pods().get("own-skip").await.unwrap().metadata.deletion_timestamp.is_none());
}

/// The rules as they stand in the proposal, with nodes instead of machines.
async fn the_samples_of_the_proposal_work(world: &World) {
    let scene = world.scene("samples").await;
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
    scene
        .rule("skip-pods", json!({"drain": {"behavior": "Skip"}, "nodes": everywhere, "pods": skipped}))
        .await;
    let portworx = json!([{"selector": {"matchLabels": {"app": "portworx"}}}]);
    let last = json!({"drain": {"behavior": "Drain", "order": 100}, "nodes": everywhere, "pods": portworx});
    scene.rule("portworx", last).await;
    scene.node("n1", "blue").await;
    let pod = |name: &str, app: &str| objects::pod(name).label("app", app).annotation(&slow(), "100");
    for (namespace, app) in [("example-namespace", "example-app2"), ("monitoring", "monitoring")] {
        let elsewhere = world.scene(namespace).await;
        let pod = pod("stays", app).namespace(namespace).node(&scene.of("n1")).build();
        elsewhere.pods().create(&PostParams::default(), &pod).await.unwrap();
    }
    scene.pod_from(pod("app", "example-app2"), "n1").await;
    scene.pod_from(pod("portworx", "portworx"), "n1").await;
    scene.pod_from(pod("critical", "web").priority_class("system-cluster-critical"), "n1").await;

    scene.maintain("m", "blue", Stage::Drain).await;
    for next in ["app", "critical", "portworx"] {
        scene.until_evacuating(&[next]).await;
        scene.pods().delete(next, &DeleteParams::default().grace_period(0)).await.unwrap();
    }
    let drained = scene.until_drained("m").await;
    let message = condition_of(&drained, names::condition::DRAINED).2;
    let stay = "2 pods stay, because a DrainRule or their label says skip: example-namespace/stays, monitoring/stays";
    assert!(message.ends_with(stay), "{message}");
    for namespace in ["example-namespace", "monitoring"] {
        let elsewhere = Scene { name: namespace, ..scene };
        assert_eq!(elsewhere.evacuated().await, BTreeSet::new());
        assert!(elsewhere.pods().get("stays").await.unwrap().metadata.deletion_timestamp.is_none());
    }
    // One that goes by itself is named no longer.
    let monitoring = Scene { name: "monitoring", ..scene };
    monitoring.pods().delete("stays", &DeleteParams::default().grace_period(0)).await.unwrap();
    let one_stays = |m: &NodeMaintenance| {
        let message = condition_of(m, names::condition::DRAINED).2;
        drain(m).pods_skipped == 1 && message.ends_with("says skip: example-namespace/stays")
    };
    scene.until("m", "names who is still there", one_stays).await;
}

async fn pod_that_returns_to_the_node_is_reported(world: &World) {
    let scene = world.scene("returns").await;
    scene.node("n1", "blue").await;
    let stubborn = objects::deployment("stubborn").pods(PodBuilder::tolerates_everything);
    scene.deploy(stubborn, &["blue"]).await;
    scene.until_run_on("n1", 1).await;
    let begun = world.cluster.requests_mark().unwrap();
    scene.maintain("m", "blue", Stage::Drain).await;
    let returns =
        |m: &NodeMaintenance| drain(m).blockers.iter().any(|b| b.reason == names::reason::RETURNS_TO_NODE);
    let found = scene.until("m", "has found out", returns).await;
    let blocker = drain(&found).blockers.swap_remove(0);
    assert_eq!(
        (blocker.node.as_deref(), blocker.namespace.as_deref()),
        (Some("returns-n1"), Some("returns"))
    );
    assert!(blocker.message.contains("let a DrainRule skip it"), "{}", blocker.message);
    scene.until_event("m", names::event::BLOCKED).await;
    // It is not killed in a loop: the second time that it comes back, it may stay for a while.
    let held = |m: &NodeMaintenance| {
        drain(m).blockers.iter().any(|b| b.message.contains("it is asked to leave again at"))
    };
    scene.until("m", "says until when it stays", held).await;
    let made = world.cluster.requests_since(begun).unwrap().writes();
    let made = made.resource("pods", "").only(|r| r.namespace == scene.name && r.verb == "create").count();
    assert!(made <= 3, "{made} pods have come back");
    let stubborn = json!([{"selector": {"matchLabels": {"app": "stubborn"}}}]);
    scene.rule("stubborn", json!({"drain": {"behavior": "Skip"}, "pods": stubborn})).await;
    scene.until_drained("m").await;
}

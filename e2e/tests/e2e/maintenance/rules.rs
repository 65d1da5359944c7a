//! Drain rules and volumes: the stories of Cluster API's MachineDrainRules, for nodes.

use haulout_api_types::DrainRule;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::VolumeAttachment;

use super::*;

impl World {
    fn rules(&self) -> Api<DrainRule> {
        Api::all(self.client.clone())
    }

    async fn rule(&self, name: &str, spec: Value) {
        let rule = json!({"metadata": {"name": name}, "spec": spec});
        self.rules().create(&PostParams::default(), &serde_json::from_value(rule).unwrap()).await.unwrap();
    }

    /// Waits until exactly these pods, with these reasons, are said to be in the way.
    async fn until_blocked(&self, maintenance: &str, blockers: &[(Option<&str>, &str)]) -> NodeMaintenance {
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
async fn rules_say_who_leaves_last_who_stays_and_who_is_waited_for() {
    let world = World::new("maintenance-rules").await;
    world.node("n1", "blue").await;
    world.node("n2", "green").await;
    let blue = json!([{"selector": {"matchLabels": {"pool": "blue"}}}]);
    let app = |app: &str| json!([{"selector": {"matchLabels": {"app": app}}}]);
    world.rule("last", json!({"drain": {"behavior": "Drain", "order": 100}, "pods": app("storage")})).await;
    world
        .rule("monitoring", json!({"drain": {"behavior": "Skip"}, "nodes": blue, "pods": app("agent")}))
        .await;
    let pod = |name: &str| objects::pod(name).annotation(&slow(), "100");
    let critical = pod("critical").priority_class("system-cluster-critical");
    world.pod_from(pod("storage").label("app", "storage"), "n1").await;
    world.pod_from(critical, "n1").await;
    world.pod_from(pod("agent-1").label("app", "agent"), "n1").await;
    world.pod_from(pod("agent-2").label("app", "agent"), "n2").await;
    world.pod_from(pod("own-skip").label(names::DRAIN_LABEL, "skip"), "n1").await;
    world.pod_from(pod("own-wait").label(names::DRAIN_LABEL, "wait-completed"), "n1").await;

    // The rule for agents applies to blue nodes alone; storage comes after whatever priority there is.
    world.maintain("m", "blue,green", Stage::Drain).await;
    world.until_evacuating(&["agent-2"]).await;
    world.until_blocked("m", &[(Some("own-wait"), "WaitingForCompletion")]).await;
    world.finish("own-wait").await;
    // The agent on the green node is of the same plan entry as these.
    world.pods().delete("agent-2", &DeleteParams::default().grace_period(0)).await.unwrap();
    world.until_evacuating(&["critical"]).await;
    world.pods().delete("critical", &DeleteParams::default().grace_period(0)).await.unwrap();
    world.until_evacuating(&["storage"]).await;

    // A rule that changes halfway applies from then on. Who is on the way out already goes on.
    let patch = Patch::Merge(json!({"spec": {"pods": [{"selector": {"matchLabels": {"app": "nothing"}}}]}}));
    world.rules().patch("monitoring", &PatchParams::default(), &patch).await.unwrap();
    world.until_evacuating(&["agent-1", "storage"]).await;
    for pod in ["agent-1", "storage"] {
        world.pods().delete(pod, &DeleteParams::default().grace_period(0)).await.unwrap();
    }
    let drained = world.until_drained("m").await;
    assert_eq!(drain(&drained).nodes_drained, 2);
    assert!(world.pods().get("own-skip").await.unwrap().metadata.deletion_timestamp.is_none());
}

#[tokio::test]
async fn a_pod_that_tolerates_the_cordon_and_comes_back_is_found_out() {
    let world = World::with("maintenance-returns", true, &[]).await;
    world.node("n1", "blue").await;
    let deployment = objects::deployment("stubborn").namespace(NAMESPACE);
    let deployment = deployment.pods(haulout_e2e::objects::PodBuilder::tolerates_everything).build();
    let deployments: Api<k8s_openapi::api::apps::v1::Deployment> =
        Api::namespaced(world.client.clone(), NAMESPACE);
    deployments.create(&PostParams::default(), &deployment).await.unwrap();
    let runs = |pods: &[Pod]| {
        let running = |pod: &Pod| pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running");
        pods.iter().any(running)
    };
    world.explained(wait::all(world.pods(), watcher::Config::default(), "run", SOON, runs).await);
    world.maintain("m", "blue", Stage::Drain).await;
    let returns =
        |m: &NodeMaintenance| drain(m).blockers.iter().any(|b| b.reason == names::reason::RETURNS_TO_NODE);
    let found = world.until("m", "has found out", returns).await;
    let blocker = drain(&found).blockers.swap_remove(0);
    assert_eq!((blocker.node.as_str(), blocker.namespace.as_deref()), ("n1", Some(NAMESPACE)));
    assert!(blocker.message.contains("let a DrainRule skip it"), "{}", blocker.message);
    world.until_event("m", names::event::BLOCKED).await;
    let stubborn = json!([{"selector": {"matchLabels": {"app": "stubborn"}}}]);
    world.rule("stubborn", json!({"drain": {"behavior": "Skip"}, "pods": stubborn})).await;
    world.until_drained("m").await;
}

#[tokio::test]
async fn volumes_are_detached_before_daemons_leave_but_for_those_of_pods_that_stay() {
    let world = World::with("maintenance-volumes", true, &["--pod-types", "Default,DaemonSet"]).await;
    world.node("n1", "blue").await;
    let daemon_set = json!({
        "metadata": {"name": "csi"},
        "spec": {
            "selector": {"matchLabels": {"app": "csi"}},
            "template": {
                "metadata": {"labels": {"app": "csi"}},
                "spec": {"containers": [{"name": "csi", "image": "csi"}], "tolerations": [{"operator": "Exists"}]},
            },
        },
    });
    let daemon_sets: Api<k8s_openapi::api::apps::v1::DaemonSet> =
        Api::namespaced(world.client.clone(), NAMESPACE);
    daemon_sets.create(&PostParams::default(), &serde_json::from_value(daemon_set).unwrap()).await.unwrap();
    let runs = |pods: &[Pod]| pods.iter().any(|pod| pod.spec.as_ref().is_some_and(|s| s.node_name.is_some()));
    let pods = wait::all(world.pods(), watcher::Config::default(), "are bound", SOON, runs).await;
    let daemon = world.explained(pods)[0].name_any();
    let claim = json!({
        "metadata": {"name": "kept"},
        "spec": {"volumeName": "pv-kept", "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    });
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(world.client.clone(), NAMESPACE);
    claims.create(&PostParams::default(), &serde_json::from_value(claim).unwrap()).await.unwrap();
    let stays = objects::pod("stays").label(names::DRAIN_LABEL, "skip").claim("kept");
    world.pod_from(stays, "n1").await;
    world.pod("web-1", "n1").await;
    let attachments: Api<VolumeAttachment> = Api::all(world.client.clone());
    for volume in ["pv-kept", "pv-left"] {
        let attachment = json!({
            "metadata": {"name": format!("attachment-of-{volume}")},
            "spec": {"attacher": "csi.example.com", "nodeName": "n1", "source": {"persistentVolumeName": volume}},
        });
        attachments
            .create(&PostParams::default(), &serde_json::from_value(attachment).unwrap())
            .await
            .unwrap();
    }

    world.maintain("m", "blue", Stage::Drain).await;
    world.until_pod_gone("web-1").await;
    let waiting = world.until_blocked("m", &[(None, "VolumesAttached")]).await;
    assert_eq!(drain(&waiting).drain_message, "Waiting for 1 volume to be detached.");
    assert!(drain(&waiting).blockers[0].message.contains("pv-left"), "{:?}", drain(&waiting).blockers);
    assert_eq!(world.evacuated().await, BTreeSet::new(), "the CSI plugin has to detach it first");
    attachments.delete("attachment-of-pv-left", &DeleteParams::default()).await.unwrap();
    world.until_evacuating(&[&daemon]).await;
}

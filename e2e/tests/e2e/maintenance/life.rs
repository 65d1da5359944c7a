//! The life of a maintenance: its stages, its end, and what it leaves behind.

use super::*;

#[tokio::test]
async fn a_node_is_cordoned_drained_and_put_back_as_it_was() {
    let world = World::with("maintenance-life", true, &[]).await;
    let before = world.node("n1", "blue").await;
    let deployment = objects::deployment("web").namespace(NAMESPACE).replicas(4).build();
    let deployments: Api<k8s_openapi::api::apps::v1::Deployment> =
        Api::namespaced(world.client.clone(), NAMESPACE);
    deployments.create(&PostParams::default(), &deployment).await.unwrap();
    let runs_on = |node: &'static str| {
        move |pods: &[Pod]| {
            let there = |pod: &&Pod| {
                pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(node)
                    && pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
            };
            pods.len() == 4 && pods.iter().filter(there).count() == 4
        }
    };
    let all = watcher::Config::default;
    world.explained(wait::all(world.pods(), all(), "run on n1", SOON, runs_on("n1")).await);
    world.node("n2", "green").await;

    world.maintain("blue", "blue", Stage::Idle).await;
    let began = |stage: Stage| {
        move |m: &NodeMaintenance| {
            m.status.iter().flat_map(|status| &status.stage_statuses).any(|begun| begun.name == stage)
        }
    };
    let idle = world.until("blue", "is idle", began(Stage::Idle)).await;
    assert_eq!(idle.finalizers(), [] as [&str; 0]);
    world.until_as_before(&before).await;

    world.set_stage("blue", Stage::Cordon).await;
    let cordoned = world.until("blue", "is cordoned", |m| is(m, names::condition::CORDONED)).await;
    assert_eq!(cordoned.finalizers(), [names::COMPLETION_FINALIZER]);
    let node = world.until_cordoned("n1").await;
    assert_eq!(node.annotations()[names::SCALE_DOWN_DISABLED_ANNOTATION], "true");
    assert_eq!(world.evacuated().await, BTreeSet::new(), "nobody leaves a node that is only cordoned");

    world.set_stage("blue", Stage::Drain).await;
    let drained = world.until_drained("blue").await;
    let status = drain(&drained);
    let counts = (status.pods_left, status.pods_evacuated, status.nodes_drained, status.nodes_selected);
    assert_eq!(counts, (0, 4, 1, 1));
    assert_eq!(status.drain_message, "Drained");
    world.explained(wait::all(world.pods(), all(), "run on n2", SOON, runs_on("n2")).await);
    let is_drained = |node: &Node| {
        condition(node, names::condition::DRAINED) == Some(("True".into(), "Complete".into()))
            && condition(node, names::condition::DRAIN_IN_PROGRESS)
                .is_some_and(|(status, _)| status == "False")
    };
    let node = world.until_node("n1", "is drained", is_drained).await;
    assert!(node.annotations()[names::MAINTENANCE_STATUS_ANNOTATION].contains(r#""drainMessage":"Drained""#));
    assert_eq!(
        world.until_event("blue", names::event::DRAINED).await,
        "Every pod that has to leave has left"
    );

    world.set_stage("blue", Stage::Complete).await;
    let completed = world.until_completed("blue").await;
    world.until_as_before(&before).await;
    let began: Vec<_> = completed.status.unwrap().stage_statuses.iter().map(|begun| begun.name).collect();
    assert_eq!(began, Stage::ALL);
    world.until_evacuating(&[]).await;
    assert!(
        world.controller.metric("maintenance_controller_drain_duration_seconds_count").await.unwrap() > 0.5
    );
    let complete =
        world.controller.metric_where("maintenance_controller_maintenances", r#"stage="Complete""#);
    assert!(complete.await.unwrap() > 0.5);
    world.maintenances().delete("blue", &DeleteParams::default()).await.unwrap();
    world.explained(wait::gone(world.maintenances(), "blue", SOON).await);
}

/// Two entries: pods of app=first leave before all others.
fn first_then_others() -> Value {
    json!([{"podSelector": {"matchLabels": {"app": "first"}}, "podPriority": 1000, "podType": "Default"}])
}

#[tokio::test]
async fn a_maintenance_that_is_completed_halfway_lets_pods_stay_unless_their_evacuation_is_past_recall() {
    let world = World::new("maintenance-cancel").await;
    let before = world.node("n1", "blue").await;
    let first = |name: &str| objects::pod(name).label("app", "first").annotation(&slow(), "100");
    let recalled = world.pod_from(first("recalled"), "n1").await;
    let past_recall = world.pod_from(first("past-recall"), "n1").await;
    let later = world.pod("later", "n1").await;
    world.maintain_with("blue", "blue", Stage::Drain, first_then_others()).await;
    world.in_charge(&recalled).await;
    let forbidden = world.in_charge(&past_recall).await;
    let status = json!({"status": {"evacuationCancellationPolicy": "Forbid"}});
    world
        .evacuations()
        .patch_status(&forbidden, &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    let halfway = world.until("blue", "is halfway", |m| drain(m).pods_evacuating == 2).await;
    assert_eq!((drain(&halfway).pods_pending_evacuation, drain(&halfway).pods_left), (1, 3));

    world.set_stage("blue", Stage::Complete).await;
    world.until_completed("blue").await;
    world.until_as_before(&before).await;
    world.until_evacuating(&["past-recall"]).await;
    let kept = world.evacuations().get(&forbidden).await.unwrap();
    assert_eq!(kept.finalizers(), [] as [&str; 0], "our wish is withdrawn");
    // It goes on without us.
    let status = json!({"status": {"activeEvacuatorCompleted": true}});
    world
        .evacuations()
        .patch_status(&forbidden, &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    world.until_pod_gone("past-recall").await;
    for pod in [recalled, later] {
        let found = world.pods().get(&pod.name_any()).await.unwrap();
        assert_eq!((found.uid(), found.metadata.deletion_timestamp), (pod.uid(), None));
    }
}

#[tokio::test]
async fn a_maintenance_that_is_deleted_halfway_completes_first() {
    let world = World::new("maintenance-delete").await;
    let before = world.node("n1", "blue").await;
    let pod = world.slow_pod("web-1", "n1").await;
    world.maintain("blue", "blue", Stage::Drain).await;
    world.in_charge(&pod).await;
    world.maintenances().delete("blue", &DeleteParams::default()).await.unwrap();
    world.explained(wait::gone(world.maintenances(), "blue", SOON).await);
    world.until_as_before(&before).await;
    world.until_evacuating(&[]).await;
    assert_eq!(world.pods().get("web-1").await.unwrap().uid(), pod.uid());
}

#[tokio::test]
async fn a_node_that_somebody_had_cordoned_stays_cordoned_and_an_uncordon_halfway_is_reverted() {
    let world = World::new("maintenance-cordon").await;
    let by_hand = world.node_from(objects::node("n1").label("pool", "blue").unschedulable()).await;
    let open = world.node("n2", "blue").await;
    world.maintain("blue", "blue", Stage::Cordon).await;
    world.until_cordoned("n1").await;
    world.until_cordoned("n2").await;
    let uncordon = Patch::Merge(json!({"spec": {"unschedulable": false}}));
    for _ in 0..3 {
        world.nodes().patch("n2", &PatchParams::default(), &uncordon).await.unwrap();
        world.until_cordoned("n2").await;
    }
    let note = world.until_event("blue", names::event::CORDON_RACE).await;
    assert!(note.starts_with("Node n2 was made schedulable 3 times"), "{note}");

    world.set_stage("blue", Stage::Complete).await;
    world.until_completed("blue").await;
    world.until_as_before(&by_hand).await;
    world.until_as_before(&open).await;
    let note = world.until_event("blue", names::event::LEFT_CORDONED).await;
    assert_eq!(note, "Node n1 stays cordoned, as it was before the maintenance");

    // Straight from Idle to Complete is the wish to have nodes back, whoever cordoned them.
    world.maintain("again", "blue", Stage::Idle).await;
    world.set_stage("again", Stage::Complete).await;
    world.until_completed("again").await;
    world.until_node("n1", "is schedulable", |node| !is_cordoned(node)).await;
}

#[tokio::test]
async fn nodes_that_come_and_go_halfway_are_picked_up_and_released() {
    let world = World::new("maintenance-nodes").await;
    world.node("n1", "blue").await;
    let kept = world.slow_pod("web-1", "n1").await;
    world.maintain("blue", "blue", Stage::Drain).await;
    world.in_charge(&kept).await;
    // A new one, and one that comes to belong to it.
    world.node("n3", "blue").await;
    world.until_cordoned("n3").await;
    let second = world.node("n2", "green").await;
    let relabel = |pool: &str| Patch::Merge(json!({"metadata": {"labels": {"pool": pool}}}));
    world.nodes().patch("n2", &PatchParams::default(), &relabel("blue")).await.unwrap();
    world.until_cordoned("n2").await;
    let on_second = world.slow_pod("web-2", "n2").await;
    world.in_charge(&on_second).await;
    world
        .until("blue", "has three nodes", |m| drain(m).nodes_selected == 3 && drain(m).pods_evacuating == 2)
        .await;
    // One that no longer belongs to it is as before.
    world.nodes().patch("n2", &PatchParams::default(), &relabel("green")).await.unwrap();
    world.until("blue", "has two nodes", |m| drain(m).nodes_selected == 2).await;
    world.until_evacuating(&["web-1"]).await;
    world.until_as_before(&second).await;
    // Those that are gone are waited for no longer.
    for name in ["n1", "n3"] {
        world.nodes().delete(name, &DeleteParams::default()).await.unwrap();
    }
    world
        .until("blue", "has no node", |m| drain(m).nodes_selected == 0 && is(m, names::condition::DRAINED))
        .await;
    world.set_stage("blue", Stage::Complete).await;
    world.until_completed("blue").await;
}

#[tokio::test]
async fn what_others_take_away_is_put_back_and_an_evacuation_of_others_is_shared() {
    let world = World::new("maintenance-intent").await;
    world.node("n1", "blue").await;
    let pod = world.slow_pod("web-1", "n1").await;
    let (theirs, _) = haulout_api_types::evacuators::evacuation_for(
        &pod.metadata,
        "descheduler.example.com",
        &BTreeSet::new(),
    )
    .unwrap();
    world.evacuations().create(&PostParams::default(), &theirs).await.unwrap();
    world.maintain("blue", "blue", Stage::Drain).await;
    let name = world.in_charge(&pod).await;
    let both =
        |e: &Evacuation| e.instigators().count() == 2 && e.is_wanted_by(names::instigator::NODE_MAINTENANCE);
    world.explained(wait::present(world.evacuations(), &name, "is wanted by both", SOON, both).await);
    // Somebody takes our finalizer away.
    let patch = Patch::Merge(json!({"metadata": {"finalizers": theirs.finalizers()}}));
    world.evacuations().patch(&name, &PatchParams::default(), &patch).await.unwrap();
    let found = wait::present(world.evacuations(), &name, "is wanted by both again", SOON, both).await;
    let uid = world.explained(found).uid();
    // Somebody deletes it and takes all finalizers away: a new one is made.
    world.evacuations().delete(&name, &DeleteParams::default()).await.unwrap();
    let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    world.evacuations().patch(&name, &PatchParams::default(), &patch).await.unwrap();
    let anew = |e: &Evacuation| e.uid() != uid && e.is_wanted_by(names::instigator::NODE_MAINTENANCE);
    world.explained(wait::present(world.evacuations(), &name, "is made anew", SOON, anew).await);
}

#[tokio::test]
async fn a_new_leader_carries_on_where_the_old_one_died() {
    let mut world = World::new("maintenance-replicas").await;
    let before = world.node("n1", "blue").await;
    world.pod("web-1", "n1").await;
    let pod = world.slow_pod("web-2", "n1").await;
    world.maintain("blue", "blue", Stage::Drain).await;
    let evacuation = world.in_charge(&pod).await;
    world.until("blue", "is halfway", |m| (drain(m).pods_evacuated, drain(m).pods_left) == (1, 1)).await;
    let second = world.replica().await;
    second.ready().await.unwrap();
    let first = std::mem::replace(&mut world.controller, second);
    first.signal(rustix::process::Signal::KILL).unwrap();
    // While nobody leads, the node is uncordoned and the pod leaves.
    let uncordon = Patch::Merge(json!({"spec": {"unschedulable": false}}));
    world.nodes().patch("n1", &PatchParams::default(), &uncordon).await.unwrap();
    let status = Patch::Merge(json!({"status": {"activeEvacuatorCompleted": true}}));
    world.evacuations().patch_status(&evacuation, &PatchParams::default(), &status).await.unwrap();
    world.until_pod_gone("web-2").await;
    world.controller.leads().await.unwrap();
    world.until_cordoned("n1").await;
    world.until_drained("blue").await;
    world.maintenances().delete("blue", &DeleteParams::default()).await.unwrap();
    world.explained(wait::gone(world.maintenances(), "blue", SOON).await);
    world.until_as_before(&before).await;
}

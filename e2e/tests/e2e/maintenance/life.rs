//! The life of a maintenance: its stages, its end, and what it leaves behind.

use super::*;

#[tokio::test]
async fn maintenances_do_what_their_stages_say_and_leave_nothing_behind() {
    let world = World::new("maintenance-life", &[]).await;
    tokio::join!(
        a_node_is_cordoned_drained_and_put_back_as_it_was(&world),
        a_maintenance_that_is_completed_halfway_lets_pods_stay_unless_their_evacuation_is_past_recall(&world),
        a_maintenance_that_is_deleted_halfway_completes_first(&world),
        a_node_that_somebody_had_cordoned_stays_cordoned_and_an_uncordon_halfway_is_reverted(&world),
        nodes_that_come_and_go_halfway_are_picked_up_and_released(&world),
        what_others_take_away_is_put_back_and_an_evacuation_of_others_is_shared(&world),
        super::overlaps::maintenances_that_share_a_node_finish_in_either_order(&world),
        super::status::what_autoscalers_were_told_before_is_put_back(&world),
        super::status::a_budget_in_the_way_is_told_and_so_is_that_it_is_gone(&world),
    );
}

async fn a_node_is_cordoned_drained_and_put_back_as_it_was(world: &World) {
    let scene = world.scene("life").await;
    let before = scene.node("n1", "blue").await;
    scene.deploy(objects::deployment("web").replicas(4), &["blue", "green"]).await;
    scene.until_run_on("n1", 4).await;
    scene.node("n2", "green").await;

    scene.maintain("blue", "blue", Stage::Idle).await;
    let began = |stage: Stage| {
        move |m: &NodeMaintenance| {
            m.status.iter().flat_map(|status| &status.stage_statuses).any(|begun| begun.name == stage)
        }
    };
    let idle = scene.until("blue", "is idle", began(Stage::Idle)).await;
    assert_eq!(idle.finalizers(), [] as [&str; 0]);
    scene.until_as_before(&before).await;

    scene.set_stage("blue", Stage::Cordon).await;
    let cordoned = scene.until("blue", "is cordoned", |m| is(m, names::condition::CORDONED)).await;
    assert_eq!(cordoned.finalizers(), [names::COMPLETION_FINALIZER]);
    let node = scene.until_cordoned("n1").await;
    assert_eq!(node.annotations()[names::SCALE_DOWN_DISABLED_ANNOTATION], "true");
    assert_eq!(scene.evacuated().await, BTreeSet::new(), "nobody leaves a node that is only cordoned");

    scene.set_stage("blue", Stage::Drain).await;
    let drained = scene.until_drained("blue").await;
    let status = drain(&drained);
    let counts = (status.pods_left, status.pods_evacuated, status.nodes_drained, status.nodes_selected);
    assert_eq!(counts, (0, 4, 1, 1));
    assert_eq!(status.drain_message, "Drained");
    scene.until_run_on("n2", 4).await;
    let is_drained = |node: &Node| {
        condition(node, names::condition::DRAINED) == Some(("True".into(), "Complete".into()))
            && condition(node, names::condition::DRAIN_IN_PROGRESS)
                .is_some_and(|(status, _)| status == "False")
    };
    let node = scene.until_node("n1", "is drained", is_drained).await;
    assert!(node.annotations()[names::MAINTENANCE_STATUS_ANNOTATION].contains(r#""drainMessage":"Drained""#));
    assert_eq!(
        scene.until_event("blue", names::event::DRAINED).await,
        "Every pod that has to leave has left"
    );

    scene.set_stage("blue", Stage::Complete).await;
    let completed = scene.until_completed("blue").await;
    scene.until_as_before(&before).await;
    let began: Vec<_> = completed.status.unwrap().stage_statuses.iter().map(|begun| begun.name).collect();
    assert_eq!(began, Stage::ALL);
    scene.until_evacuating(&[]).await;
    assert!(
        world.controller().metric("maintenance_controller_drain_duration_seconds_count").await.unwrap() > 0.5
    );
    let controller = world.controller();
    let complete = controller.metric_where("maintenance_controller_maintenances", r#"stage="Complete""#);
    assert!(complete.await.unwrap() > 0.5);
    scene.delete("blue").await;
}

/// Two entries: pods of app=first leave before all others.
fn first_then_others() -> Value {
    json!([{"podSelector": {"matchLabels": {"app": "first"}}, "podPriority": 1000, "podType": "Default"}])
}

async fn a_maintenance_that_is_completed_halfway_lets_pods_stay_unless_their_evacuation_is_past_recall(
    world: &World,
) {
    let scene = world.scene("cancel").await;
    let before = scene.node("n1", "blue").await;
    let first = |name: &str| objects::pod(name).label("app", "first").annotation(&slow(), "100");
    let recalled = scene.pod_from(first("recalled"), "n1").await;
    let past_recall = scene.pod_from(first("past-recall"), "n1").await;
    let later = scene.pod("later", "n1").await;
    scene.maintain_with("blue", "blue", Stage::Drain, first_then_others()).await;
    scene.in_charge(&recalled).await;
    let forbidden = scene.in_charge(&past_recall).await;
    let status = json!({"status": {"evacuationCancellationPolicy": "Forbid"}});
    scene
        .evacuations()
        .patch_status(&forbidden, &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    let halfway = scene.until("blue", "is halfway", |m| drain(m).pods_evacuating == 2).await;
    assert_eq!((drain(&halfway).pods_pending_evacuation, drain(&halfway).pods_left), (1, 3));

    scene.set_stage("blue", Stage::Complete).await;
    scene.until_completed("blue").await;
    scene.until_as_before(&before).await;
    scene.until_evacuating(&["past-recall"]).await;
    let kept = scene.evacuations().get(&forbidden).await.unwrap();
    assert_eq!(kept.finalizers(), [] as [&str; 0], "our wish is withdrawn");
    // It goes on without us.
    let status = json!({"status": {"activeEvacuatorCompleted": true}});
    scene
        .evacuations()
        .patch_status(&forbidden, &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    scene.until_pod_gone("past-recall").await;
    for pod in [recalled, later] {
        let found = scene.pods().get(&pod.name_any()).await.unwrap();
        assert_eq!((found.uid(), found.metadata.deletion_timestamp), (pod.uid(), None));
    }
}

async fn a_maintenance_that_is_deleted_halfway_completes_first(world: &World) {
    let scene = world.scene("delete").await;
    let before = scene.node("n1", "blue").await;
    let pod = scene.slow_pod("web-1", "n1").await;
    scene.maintain("blue", "blue", Stage::Drain).await;
    scene.in_charge(&pod).await;
    scene.delete("blue").await;
    scene.until_as_before(&before).await;
    scene.until_evacuating(&[]).await;
    assert_eq!(scene.pods().get("web-1").await.unwrap().uid(), pod.uid());
}

async fn a_node_that_somebody_had_cordoned_stays_cordoned_and_an_uncordon_halfway_is_reverted(world: &World) {
    let scene = world.scene("cordon").await;
    let by_hand = scene
        .node_from(objects::node(&scene.of("n1")).label("pool", &scene.of("blue")).unschedulable())
        .await;
    let open = scene.node("n2", "blue").await;
    scene.maintain("blue", "blue", Stage::Cordon).await;
    scene.until_cordoned("n1").await;
    scene.until_cordoned("n2").await;
    for _ in 0..3 {
        scene.patch_node("n2", json!({"spec": {"unschedulable": false}})).await;
        scene.until_cordoned("n2").await;
    }
    let note = scene.until_event("blue", names::event::CORDON_RACE).await;
    assert!(note.starts_with("Node cordon-n2 was made schedulable 3 times"), "{note}");

    scene.set_stage("blue", Stage::Complete).await;
    scene.until_completed("blue").await;
    scene.until_as_before(&by_hand).await;
    scene.until_as_before(&open).await;
    let note = scene.until_event("blue", names::event::LEFT_CORDONED).await;
    assert_eq!(note, "Node cordon-n1 stays cordoned, as it was before the maintenance");

    // Straight from Idle to Complete is the wish to have nodes back, whoever cordoned them.
    scene.maintain("again", "blue", Stage::Idle).await;
    scene.set_stage("again", Stage::Complete).await;
    scene.until_completed("again").await;
    scene.until_node("n1", "is schedulable", |node| !is_cordoned(node)).await;
}

async fn nodes_that_come_and_go_halfway_are_picked_up_and_released(world: &World) {
    let scene = world.scene("nodes").await;
    scene.node("n1", "blue").await;
    let kept = scene.slow_pod("web-1", "n1").await;
    scene.maintain("blue", "blue", Stage::Drain).await;
    scene.in_charge(&kept).await;
    // A new one, and one that comes to belong to it.
    scene.node("n3", "blue").await;
    scene.until_cordoned("n3").await;
    let second = scene.node("n2", "green").await;
    let relabel = |pool: &str| json!({"metadata": {"labels": {"pool": scene.of(pool)}}});
    scene.patch_node("n2", relabel("blue")).await;
    scene.until_cordoned("n2").await;
    let on_second = scene.slow_pod("web-2", "n2").await;
    scene.in_charge(&on_second).await;
    scene
        .until("blue", "has three nodes", |m| drain(m).nodes_selected == 3 && drain(m).pods_evacuating == 2)
        .await;
    // One that no longer belongs to it is as before.
    scene.patch_node("n2", relabel("green")).await;
    scene.until("blue", "has two nodes", |m| drain(m).nodes_selected == 2).await;
    scene.until_evacuating(&["web-1"]).await;
    scene.until_as_before(&second).await;
    // Those that are gone are waited for no longer.
    for name in ["n1", "n3"] {
        scene.nodes().delete(&scene.of(name), &DeleteParams::default()).await.unwrap();
    }
    scene
        .until("blue", "has no node", |m| drain(m).nodes_selected == 0 && is(m, names::condition::DRAINED))
        .await;
    scene.set_stage("blue", Stage::Complete).await;
    scene.until_completed("blue").await;
}

async fn what_others_take_away_is_put_back_and_an_evacuation_of_others_is_shared(world: &World) {
    let scene = world.scene("intent").await;
    scene.node("n1", "blue").await;
    let pod = scene.slow_pod("web-1", "n1").await;
    let theirs = scene.evacuation_by_others(&pod).await;
    scene.maintain("blue", "blue", Stage::Drain).await;
    let name = scene.in_charge(&pod).await;
    let both =
        |e: &Evacuation| e.instigators().count() == 2 && e.is_wanted_by(names::instigator::NODE_MAINTENANCE);
    scene.explained(wait::present(scene.evacuations(), &name, "is wanted by both", SOON, both).await);
    // Somebody takes our finalizer away.
    let patch = Patch::Merge(json!({"metadata": {"finalizers": theirs.finalizers()}}));
    scene.evacuations().patch(&name, &PatchParams::default(), &patch).await.unwrap();
    let found = wait::present(scene.evacuations(), &name, "is wanted by both again", SOON, both).await;
    let uid = scene.explained(found).uid();
    // Somebody deletes it and takes all finalizers away: a new one is made.
    scene.evacuations().delete(&name, &DeleteParams::default()).await.unwrap();
    let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    scene.evacuations().patch(&name, &PatchParams::default(), &patch).await.unwrap();
    let anew = |e: &Evacuation| e.uid() != uid && e.is_wanted_by(names::instigator::NODE_MAINTENANCE);
    scene.explained(wait::present(scene.evacuations(), &name, "is made anew", SOON, anew).await);
}

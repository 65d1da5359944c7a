//! The life of a maintenance: its stages, its end, and what it leaves behind.

use haulout_api_types::node_maintenance::{BeforeMaintenance, CordonReverts};

use super::*;

#[tokio::test]
async fn stages_act_on_nodes_and_restore_them() {
    let world = World::new("maintenance-life", &[]).await;
    let scenarios = scenarios![&world;
        a_node_is_cordoned_drained_and_put_back_as_it_was,
        completion_cancels_unless_forbidden,
        a_maintenance_that_is_deleted_halfway_completes_first,
        foreign_cordon_stays_and_uncordon_is_reverted,
        nodes_that_come_and_go_halfway_are_picked_up_and_released,
        a_selector_without_nodes_is_never_drained,
        removed_finalizers_return_and_evacuations_are_shared,
        super::overlaps::maintenances_that_share_a_node_finish_in_either_order,
        super::status::autoscalers_are_held_while_a_maintenance_wants_that,
        super::status::blocking_budget_is_reported_until_it_is_gone,
        super::waiting::refused_writes_are_blockers_with_the_api_servers_words,
        super::waiting::an_evacuator_at_work_and_a_pod_that_ends_are_waited_for,
        super::waiting::an_evacuation_that_others_hold_is_a_blocker,
    ];
    all_at_once(scenarios).await;
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
    scene.until("blue", "is idle", began(Stage::Idle)).await;
    let selects = |m: &NodeMaintenance| m.status.as_ref().is_some_and(|status| status.nodes_selected == 1);
    let idle = scene.until("blue", "says how many nodes it selects", selects).await;
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
    scene.until_completed("blue").await;
    scene.until_as_before(&before).await;
    // That a stage has begun is written before what has come of it.
    let is_observed = |m: &NodeMaintenance| {
        m.status.as_ref().is_some_and(|status| status.observed_generation == m.metadata.generation)
    };
    let completed = scene.until("blue", "has its last status", is_observed).await;
    let status = drain(&completed);
    assert_eq!((status.pods_evacuated, status.nodes_drained), (4, 1), "what was drained stays readable");
    assert!(is(&completed, names::condition::DRAINED));
    let began: Vec<_> = completed.status.unwrap().stage_statuses.iter().map(|begun| begun.name).collect();
    assert_eq!(began, Stage::ALL);
    scene.until_evacuating(&[]).await;
    assert!(
        world.controller().metric("maintenance_controller_drain_duration_seconds_count").await.unwrap() > 0.5
    );
    let controller = world.controller();
    let complete = controller.metric_where("maintenance_controller_maintenances", r#"stage="Complete""#);
    assert!(complete.await.unwrap() > 0.5);
    // It goes by itself once it has a time to live.
    let ttl = Patch::Merge(json!({"spec": {"ttlSecondsAfterComplete": 1}}));
    scene.maintenances().patch(&scene.of("blue"), &PatchParams::default(), &ttl).await.unwrap();
    scene.explained(wait::gone(scene.maintenances(), &scene.of("blue"), SOON).await);
}

/// Two entries: pods of app=first leave before all others.
fn first_then_others() -> Value {
    json!([{"podSelector": {"matchLabels": {"app": "first"}}, "podPriority": 1000, "podType": "Default"}])
}

async fn completion_cancels_unless_forbidden(world: &World) {
    let scene = world.scene("cancel").await;
    let before = scene.node("n1", "blue").await;
    let first = |name: &str| objects::pod(name).label("app", "first").annotation(&slow(), "100");
    let recalled = scene.pod_from(first("recalled"), "n1").await;
    let past_recall = scene.pod_from(first("past-recall"), "n1").await;
    let reconsidered = scene.pod_from(first("reconsidered"), "n1").await;
    let later = scene.pod("later", "n1").await;
    scene.maintain_with("blue", "blue", Stage::Drain, first_then_others()).await;
    scene.in_charge(&recalled).await;
    let report = async |evacuation: &str, status: Value| {
        let patch = Patch::Merge(json!({"status": status}));
        scene.evacuations().patch_status(evacuation, &PatchParams::default(), &patch).await.unwrap();
    };
    let forbidden = scene.in_charge(&past_recall).await;
    let allowed_later = scene.in_charge(&reconsidered).await;
    for evacuation in [&forbidden, &allowed_later] {
        report(evacuation, json!({"evacuationCancellationPolicy": "Forbid"})).await;
    }
    let halfway = scene.until("blue", "is halfway", |m| drain(m).pods_evacuating == 3).await;
    assert_eq!((drain(&halfway).pods_pending_evacuation, drain(&halfway).pods_left), (1, 4));

    scene.set_stage("blue", Stage::Complete).await;
    scene.until_completed("blue").await;
    scene.until_as_before(&before).await;
    scene.until_evacuating(&["past-recall", "reconsidered"]).await;
    // Somebody deletes it: with our finalizer on it, it goes on.
    scene.evacuations().delete(&forbidden, &DeleteParams::default()).await.unwrap();
    let kept = scene.evacuations().get(&forbidden).await.unwrap();
    assert!(kept.is_wanted_by(names::instigator::NODE_MAINTENANCE), "it cannot be cancelled");
    report(&forbidden, json!({"activeEvacuatorCompleted": true})).await;
    scene.until_pod_gone("past-recall").await;
    // The evacuator allows it after all, and our wish is withdrawn.
    report(&allowed_later, json!({"evacuationCancellationPolicy": "Allow"})).await;
    scene.until_evacuating(&[]).await;
    for pod in [recalled, later, reconsidered] {
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

async fn foreign_cordon_stays_and_uncordon_is_reverted(world: &World) {
    let scene = world.scene("cordon").await;
    let by_hand = scene
        .node_from(objects::node(&scene.of("n1")).label("pool", &scene.of("blue")).unschedulable())
        .await;
    let open = scene.node("n2", "blue").await;
    scene.maintain("blue", "blue", Stage::Cordon).await;
    scene.until_cordoned("n1").await;
    scene.until_cordoned("n2").await;
    // The first time the cordon is put back at once, from then on after a growing pause.
    let uncordon = async || scene.patch_node("n2", json!({"spec": {"unschedulable": false}})).await;
    uncordon().await;
    let first = reverts(&scene.until_cordoned("n2").await);
    uncordon().await;
    let is_told =
        |m: &NodeMaintenance| condition_of(m, names::condition::CORDONED).1 == names::reason::CORDON_RACE;
    let paused = scene.until("blue", "tells of the race", is_told).await;
    let (_, _, message) = condition_of(&paused, names::condition::CORDONED);
    assert!(message.contains("somebody makes cordon-n2 schedulable again and again"), "{message}");
    let second = reverts(&scene.until_cordoned("n2").await);
    assert_eq!((first.times, second.times), (1, 2));
    let pause = second.last.0.duration_since(first.last.0);
    assert!(pause.as_secs() >= 10, "it was put back after {pause:?}");
    let note = scene.until_event("blue", names::event::CORDON_RACE).await;
    assert!(note.starts_with("Node cordon-n2 was made schedulable by somebody else"), "{note}");

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

/// What a node remembers of cordons that were put back.
fn reverts(node: &Node) -> CordonReverts {
    let before = &node.annotations()[names::BEFORE_MAINTENANCE_ANNOTATION];
    serde_json::from_str::<BeforeMaintenance>(before).unwrap().reverts.unwrap()
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
    // Of those that are deleted, the drained one counts as drained; the other one had a pod.
    let delete = async |name: &str| {
        scene.nodes().delete(&scene.of(name), &DeleteParams::default()).await.unwrap();
    };
    delete("n1").await;
    let one = |m: &NodeMaintenance| drain(m).nodes_selected == 1 && is(m, names::condition::DRAINED);
    scene.until("blue", "has one node, which is drained", one).await;
    delete("n3").await;
    let none = |m: &NodeMaintenance| drain(m).nodes_selected == 0;
    let deleted = scene.until("blue", "has no node", none).await;
    assert_eq!(
        condition_of(&deleted, names::condition::DRAINED),
        (
            "True".into(),
            "Complete".into(),
            "Every pod that has to leave has left; 1 node was deleted after it had been drained".into()
        )
    );
    scene.set_stage("blue", Stage::Complete).await;
    scene.until_completed("blue").await;
}

async fn a_selector_without_nodes_is_never_drained(world: &World) {
    let scene = world.scene("nowhere").await;
    let without_nodes =
        |m: &NodeMaintenance| condition_of(m, names::condition::DRAINED).1 == names::reason::NO_NODES;
    scene.maintain("none", "none", Stage::Drain).await;
    let none = scene.until("none", "has no nodes", without_nodes).await;
    for type_ in [names::condition::CORDONED, names::condition::DRAINED] {
        let expected = ("False", names::reason::NO_NODES, "The selector has not matched any node so far");
        let (status, reason, message) = condition_of(&none, type_);
        assert_eq!((status.as_str(), reason.as_str(), message.as_str()), expected, "{type_}");
    }
    // One that is named and does not exist, beside one that does.
    scene.node("n1", "blue").await;
    let names = [scene.of("n1"), scene.of("n2")];
    let by_name = json!({"nodeSelectorTerms": [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": names}]},
    ]});
    let maintenance = json!({
        "apiVersion": "nodemaintenance.k8s.io/v1alpha1",
        "kind": "NodeMaintenance",
        "metadata": {"name": scene.of("named")},
        "spec": {"nodeSelector": by_name, "stage": "Drain"},
    });
    let maintenance = serde_json::from_value(maintenance).unwrap();
    scene.maintenances().create(&PostParams::default(), &maintenance).await.unwrap();
    let missing = scene.until_blocked("named", &[(None, names::reason::NODE_MISSING)]).await;
    assert_eq!(drain(&missing).blockers[0].node.as_ref(), Some(&names[1]));
    let is_told = |m: &NodeMaintenance| condition_of(m, names::condition::DRAINED).2.contains(&names[1]);
    scene.until("named", "says which node is missing", is_told).await;
    scene.node("n2", "green").await;
    scene.until_drained("named").await;
}

async fn removed_finalizers_return_and_evacuations_are_shared(world: &World) {
    let scene = world.scene("intent").await;
    scene.node("n1", "blue").await;
    let pod = scene.slow_pod("web-1", "n1").await;
    let other = scene.slow_pod("web-2", "n1").await;
    let left = scene.slow_pod("web-3", "n1").await;
    let theirs = scene.evacuation_by_others(&pod).await;
    let theirs_to_keep = scene.evacuation_by_others(&left).await;
    scene.maintain("blue", "blue", Stage::Idle).await;
    let reason = Patch::Merge(json!({"spec": {"reason": "new\nkernel"}}));
    scene.maintenances().patch(&scene.of("blue"), &PatchParams::default(), &reason).await.unwrap();
    scene.set_stage("blue", Stage::Drain).await;
    let node = scene.until_cordoned("n1").await;
    let conditions = node.status.unwrap().conditions.unwrap();
    let held = conditions.iter().find(|c| c.type_ == names::condition::MAINTENANCE_IN_PROGRESS).unwrap();
    assert_eq!(held.message.as_deref(), Some("Under maintenance by intent-blue (new kernel)"));
    let name = scene.in_charge(&pod).await;
    let why = |e: &Evacuation| e.annotations().get(names::MAINTENANCES_ANNOTATION).cloned();
    // Who shares it says so, and why, in the same write.
    let both = |e: &Evacuation| {
        let shared = e.instigators().count() == 2 && e.is_wanted_by(names::instigator::NODE_MAINTENANCE);
        assert!(!shared || why(e).as_deref() == Some("intent-blue (new kernel)"), "{:?}", why(e));
        shared
    };
    scene.explained(wait::present(scene.evacuations(), &name, "is wanted by both", SOON, both).await);
    // Somebody takes our finalizer away.
    let patch = Patch::Merge(json!({"metadata": {"finalizers": theirs.finalizers()}}));
    scene.evacuations().patch(&name, &PatchParams::default(), &patch).await.unwrap();
    let found = wait::present(scene.evacuations(), &name, "is wanted by both again", SOON, both).await;
    let uid = scene.explained(found).uid();
    // Somebody deletes one: it goes on, because we want it.
    let deleted = scene.in_charge(&other).await;
    scene.evacuations().delete(&deleted, &DeleteParams::default()).await.unwrap();
    let done = Patch::Merge(json!({"status": {"activeEvacuatorCompleted": true}}));
    scene.evacuations().patch_status(&deleted, &PatchParams::default(), &done).await.unwrap();
    scene.until_pod_gone("web-2").await;
    // Somebody deletes one and takes all finalizers away: a new one is made.
    scene.evacuations().delete(&name, &DeleteParams::default()).await.unwrap();
    let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    scene.evacuations().patch(&name, &PatchParams::default(), &patch).await.unwrap();
    let anew = |e: &Evacuation| e.uid() != uid && e.is_wanted_by(names::instigator::NODE_MAINTENANCE);
    let made = scene.explained(wait::present(scene.evacuations(), &name, "is made anew", SOON, anew).await);
    assert_eq!(why(&made).as_deref(), Some("intent-blue (new kernel)"));
    // What is withdrawn says nothing of it any more.
    let shared = theirs_to_keep.name_any();
    scene.explained(wait::present(scene.evacuations(), &shared, "is wanted by both", SOON, both).await);
    scene.set_stage("blue", Stage::Complete).await;
    scene.until_completed("blue").await;
    let kept = scene.evacuations().get(&shared).await.unwrap();
    assert_eq!((kept.instigators().count(), why(&kept)), (1, None));
}

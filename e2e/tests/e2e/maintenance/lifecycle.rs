//! The lifecycle of a maintenance: stages, completion, and what it restores.

use haulout_api_types::node_maintenance::{BeforeMaintenance, CordonReverts};

use super::*;

#[tokio::test]
async fn stages_act_on_nodes_and_restore_them() {
    let env = TestEnv::new("maintenance-lifecycle", &[]).await;
    let scenarios = scenarios![&env;
        node_is_cordoned_drained_and_restored,
        completion_cancels_unless_forbidden,
        deleted_maintenance_completes_first,
        foreign_cordon_stays_and_uncordon_is_reverted,
        joining_and_leaving_nodes_are_picked_up_and_released,
        maintenance_without_nodes_is_never_drained,
        removed_finalizers_return_and_evacuations_are_shared,
        super::overlaps::maintenances_sharing_a_node_finish_in_any_order,
        super::status::autoscalers_are_held_while_a_maintenance_requests_it,
        super::status::blocking_budget_is_reported_until_it_is_gone,
        super::status::long_text_of_tenants_does_not_stop_the_status,
        super::waiting::rejected_writes_are_blockers_with_the_api_answer,
        super::waiting::active_evacuators_and_terminating_pods_are_waited_for,
        super::waiting::held_evacuation_is_a_blocker,
    ];
    all_at_once(scenarios).await;
}

async fn node_is_cordoned_drained_and_restored(env: &TestEnv) {
    let scenario = env.scenario("lifecycle").await;
    let before = scenario.node("n1", "blue").await;
    scenario.deploy(objects::deployment("web").replicas(4), &["blue", "green"]).await;
    scenario.until_run_on("n1", 4).await;
    scenario.node("n2", "green").await;

    scenario.maintain("blue", "blue", Stage::Idle).await;
    let began = |stage: Stage| {
        move |m: &NodeMaintenance| {
            m.status.iter().flat_map(|status| &status.stage_statuses).any(|begun| begun.name == stage)
        }
    };
    scenario.until("blue", "is idle", began(Stage::Idle)).await;
    let selects = |m: &NodeMaintenance| m.status.as_ref().is_some_and(|status| status.nodes_selected == 1);
    let idle = scenario.until("blue", "reports the number of selected nodes", selects).await;
    assert_eq!(idle.finalizers(), [] as [&str; 0]);
    scenario.until_restored(&before).await;

    scenario.set_stage("blue", Stage::Cordon).await;
    let cordoned = scenario.until("blue", "is cordoned", |m| is(m, names::condition::CORDONED)).await;
    assert_eq!(cordoned.finalizers(), [names::COMPLETION_FINALIZER]);
    let node = scenario.until_cordoned("n1").await;
    assert_eq!(node.annotations()[names::SCALE_DOWN_DISABLED_ANNOTATION], "true");
    assert_eq!(scenario.pods_with_evacuation().await, BTreeSet::new(), "stage Cordon evacuates no pod");

    scenario.set_stage("blue", Stage::Drain).await;
    let drained = scenario.until_drained("blue").await;
    let status = drain(&drained);
    let counts = (status.pods_left, status.pods_evacuated, status.nodes_drained, status.nodes_selected);
    assert_eq!(counts, (0, 4, 1, 1));
    assert_eq!(status.drain_message, "Drained");
    scenario.until_run_on("n2", 4).await;
    let is_drained = |node: &Node| {
        condition(node, names::condition::DRAINED) == Some(("True".into(), "Complete".into()))
            && condition(node, names::condition::DRAIN_IN_PROGRESS)
                .is_some_and(|(status, _)| status == "False")
    };
    let node = scenario.until_node("n1", "is drained", is_drained).await;
    assert!(node.annotations()[names::MAINTENANCE_STATUS_ANNOTATION].contains(r#""drainMessage":"Drained""#));
    assert_eq!(
        scenario.until_event("blue", names::event::DRAINED).await,
        "Every pod that has to leave has left"
    );

    scenario.set_stage("blue", Stage::Complete).await;
    scenario.until_completed("blue").await;
    scenario.until_restored(&before).await;
    // The start of a stage is written before its results.
    let is_observed = |m: &NodeMaintenance| {
        m.status.as_ref().is_some_and(|status| status.observed_generation == m.metadata.generation)
    };
    let completed = scenario.until("blue", "has its last status", is_observed).await;
    let status = drain(&completed);
    assert_eq!((status.pods_evacuated, status.nodes_drained), (4, 1), "the drain status is kept");
    assert!(is(&completed, names::condition::DRAINED));
    let began: Vec<_> = completed.status.unwrap().stage_statuses.iter().map(|begun| begun.name).collect();
    assert_eq!(began, Stage::ALL);
    scenario.until_evacuating(&[]).await;
    assert!(env.controller().metric("haulout_maintenance_drain_duration_seconds_count").await.unwrap() > 0.5);
    let controller = env.controller();
    let complete = controller.metric_where("haulout_maintenances", r#"stage="Complete""#);
    assert!(complete.await.unwrap() > 0.5);
    // It is deleted automatically once it has a TTL.
    let ttl = Patch::Merge(json!({"spec": {"ttlSecondsAfterComplete": 1}}));
    scenario.maintenances().patch(&scenario.of("blue"), &PatchParams::default(), &ttl).await.unwrap();
    scenario.explained(wait::gone(scenario.maintenances(), &scenario.of("blue"), SOON).await);
}

/// Two entries: pods with app=first leave before all others.
fn first_then_others() -> Value {
    json!([{"podSelector": {"matchLabels": {"app": "first"}}, "podPriority": 1000, "podType": "Default"}])
}

async fn completion_cancels_unless_forbidden(env: &TestEnv) {
    let scenario = env.scenario("cancel").await;
    let before = scenario.node("n1", "blue").await;
    let first = |name: &str| objects::pod(name).label("app", "first").annotation(&slow(), "100");
    let recalled = scenario.pod_from(first("recalled"), "n1").await;
    let past_recall = scenario.pod_from(first("past-recall"), "n1").await;
    let reconsidered = scenario.pod_from(first("reconsidered"), "n1").await;
    let later = scenario.pod("later", "n1").await;
    scenario.maintain_with("blue", "blue", Stage::Drain, first_then_others()).await;
    scenario.until_evacuator_active(&recalled).await;
    let report = async |evacuation: &str, status: Value| {
        let patch = Patch::Merge(json!({"status": status}));
        scenario.evacuations().patch_status(evacuation, &PatchParams::default(), &patch).await.unwrap();
    };
    let forbidden = scenario.until_evacuator_active(&past_recall).await;
    let allowed_later = scenario.until_evacuator_active(&reconsidered).await;
    for evacuation in [&forbidden, &allowed_later] {
        report(evacuation, json!({"evacuationCancellationPolicy": "Forbid"})).await;
    }
    let halfway = scenario.until("blue", "is halfway", |m| drain(m).pods_evacuating == 3).await;
    assert_eq!((drain(&halfway).pods_pending_evacuation, drain(&halfway).pods_left), (1, 4));

    scenario.set_stage("blue", Stage::Complete).await;
    scenario.until_completed("blue").await;
    scenario.until_restored(&before).await;
    scenario.until_evacuating(&["past-recall", "reconsidered"]).await;
    // Somebody deletes it: with our finalizer, the evacuation continues.
    scenario.evacuations().delete(&forbidden, &DeleteParams::default()).await.unwrap();
    let kept = scenario.evacuations().get(&forbidden).await.unwrap();
    assert!(kept.has_instigator(names::instigator::NODE_MAINTENANCE), "it cannot be cancelled");
    report(&forbidden, json!({"activeEvacuatorCompleted": true})).await;
    scenario.until_pod_gone("past-recall").await;
    // The evacuator allows cancellation, and our instigator finalizer is removed.
    report(&allowed_later, json!({"evacuationCancellationPolicy": "Allow"})).await;
    scenario.until_evacuating(&[]).await;
    for pod in [recalled, later, reconsidered] {
        let found = scenario.pods().get(&pod.name_any()).await.unwrap();
        assert_eq!((found.uid(), found.metadata.deletion_timestamp), (pod.uid(), None));
    }
}

async fn deleted_maintenance_completes_first(env: &TestEnv) {
    let scenario = env.scenario("delete").await;
    let before = scenario.node("n1", "blue").await;
    let pod = scenario.slow_pod("web-1", "n1").await;
    scenario.maintain("blue", "blue", Stage::Drain).await;
    scenario.until_evacuator_active(&pod).await;
    scenario.delete("blue").await;
    scenario.until_restored(&before).await;
    scenario.until_evacuating(&[]).await;
    assert_eq!(scenario.pods().get("web-1").await.unwrap().uid(), pod.uid());
}

async fn foreign_cordon_stays_and_uncordon_is_reverted(env: &TestEnv) {
    let scenario = env.scenario("cordon").await;
    let by_hand = scenario
        .node_from(objects::node(&scenario.of("n1")).label("pool", &scenario.of("blue")).unschedulable())
        .await;
    let open = scenario.node("n2", "blue").await;
    scenario.maintain("blue", "blue", Stage::Cordon).await;
    scenario.until_cordoned("n1").await;
    scenario.until_cordoned("n2").await;
    // The first time, the node is cordoned again at once, later after a growing delay.
    let uncordon = async || scenario.patch_node("n2", json!({"spec": {"unschedulable": false}})).await;
    uncordon().await;
    let first = reverts(&scenario.until_cordoned("n2").await);
    uncordon().await;
    let is_reported =
        |m: &NodeMaintenance| condition_of(m, names::condition::CORDONED).1 == names::reason::CORDON_RACE;
    let paused = scenario.until("blue", "reports the cordon race", is_reported).await;
    let (_, _, message) = condition_of(&paused, names::condition::CORDONED);
    assert!(message.contains("cordon-n2 is uncordoned repeatedly"), "{message}");
    let second = reverts(&scenario.until_cordoned("n2").await);
    assert_eq!((first.times, second.times), (1, 2));
    let pause = second.last.0.duration_since(first.last.0);
    assert!(pause.as_secs() >= 10, "the node was cordoned again after {pause:?}");
    let note = scenario.until_event("blue", names::event::CORDON_RACE).await;
    assert!(note.starts_with("Node cordon-n2 was uncordoned during the maintenance"), "{note}");

    scenario.set_stage("blue", Stage::Complete).await;
    scenario.until_completed("blue").await;
    scenario.until_restored(&by_hand).await;
    scenario.until_restored(&open).await;
    let note = scenario.until_event("blue", names::event::LEFT_CORDONED).await;
    assert_eq!(note, "Node cordon-n1 stays cordoned, because it was cordoned before the maintenance");

    // The transition from Idle to Complete uncordons nodes, no matter who cordoned them.
    scenario.maintain("again", "blue", Stage::Idle).await;
    scenario.set_stage("again", Stage::Complete).await;
    scenario.until_completed("again").await;
    scenario.until_node("n1", "is schedulable", |node| !is_cordoned(node)).await;
}

/// The record of cordons on a node that were restored.
fn reverts(node: &Node) -> CordonReverts {
    let before = &node.annotations()[names::BEFORE_MAINTENANCE_ANNOTATION];
    serde_json::from_str::<BeforeMaintenance>(before).unwrap().reverts.unwrap()
}

async fn joining_and_leaving_nodes_are_picked_up_and_released(env: &TestEnv) {
    let scenario = env.scenario("nodes").await;
    scenario.node("n1", "blue").await;
    let kept = scenario.slow_pod("web-1", "n1").await;
    scenario.maintain("blue", "blue", Stage::Drain).await;
    scenario.until_evacuator_active(&kept).await;
    // A new node, and one whose labels change to match.
    scenario.node("n3", "blue").await;
    scenario.until_cordoned("n3").await;
    let second = scenario.node("n2", "green").await;
    let relabel = |pool: &str| json!({"metadata": {"labels": {"pool": scenario.of(pool)}}});
    scenario.patch_node("n2", relabel("blue")).await;
    scenario.until_cordoned("n2").await;
    let on_second = scenario.slow_pod("web-2", "n2").await;
    scenario.until_evacuator_active(&on_second).await;
    scenario
        .until("blue", "has three nodes", |m| drain(m).nodes_selected == 3 && drain(m).pods_evacuating == 2)
        .await;
    // A node that no longer matches is restored.
    scenario.patch_node("n2", relabel("green")).await;
    scenario.until("blue", "has two nodes", |m| drain(m).nodes_selected == 2).await;
    scenario.until_evacuating(&["web-1"]).await;
    scenario.until_restored(&second).await;
    // Of the deleted nodes, the drained one counts as drained; the other one still had a pod.
    let delete = async |name: &str| {
        scenario.nodes().delete(&scenario.of(name), &DeleteParams::default()).await.unwrap();
    };
    delete("n1").await;
    let one = |m: &NodeMaintenance| drain(m).nodes_selected == 1 && is(m, names::condition::DRAINED);
    scenario.until("blue", "has one node, which is drained", one).await;
    delete("n3").await;
    let none = |m: &NodeMaintenance| drain(m).nodes_selected == 0;
    let deleted = scenario.until("blue", "has no node", none).await;
    assert_eq!(
        condition_of(&deleted, names::condition::DRAINED),
        (
            "True".into(),
            "Complete".into(),
            "Every pod that has to leave has left; 1 node was deleted after it had been drained".into()
        )
    );
    scenario.set_stage("blue", Stage::Complete).await;
    scenario.until_completed("blue").await;
}

async fn maintenance_without_nodes_is_never_drained(env: &TestEnv) {
    let scenario = env.scenario("nowhere").await;
    let without_nodes =
        |m: &NodeMaintenance| condition_of(m, names::condition::DRAINED).1 == names::reason::NO_NODES;
    scenario.maintain("none", "none", Stage::Drain).await;
    let none = scenario.until("none", "has no nodes", without_nodes).await;
    for type_ in [names::condition::CORDONED, names::condition::DRAINED] {
        let expected = ("False", names::reason::NO_NODES, "The selector has not matched any node so far");
        let (status, reason, message) = condition_of(&none, type_);
        assert_eq!((status.as_str(), reason.as_str(), message.as_str()), expected, "{type_}");
    }
    // One named node that does not exist, and one that does.
    scenario.node("n1", "blue").await;
    let names = [scenario.of("n1"), scenario.of("n2")];
    let by_name = json!({"nodeSelectorTerms": [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": names}]},
    ]});
    let maintenance = json!({
        "apiVersion": "nodemaintenance.k8s.io/v1alpha1",
        "kind": "NodeMaintenance",
        "metadata": {"name": scenario.of("named")},
        "spec": {"nodeSelector": by_name, "stage": "Drain"},
    });
    let maintenance = serde_json::from_value(maintenance).unwrap();
    scenario.maintenances().create(&PostParams::default(), &maintenance).await.unwrap();
    let missing = scenario.until_blocked("named", &[(None, names::reason::NODE_MISSING)]).await;
    assert_eq!(drain(&missing).blockers[0].node.as_ref(), Some(&names[1]));
    let is_reported = |m: &NodeMaintenance| condition_of(m, names::condition::DRAINED).2.contains(&names[1]);
    scenario.until("named", "names the missing node", is_reported).await;
    scenario.node("n2", "green").await;
    scenario.until_drained("named").await;
}

async fn removed_finalizers_return_and_evacuations_are_shared(env: &TestEnv) {
    let scenario = env.scenario("intent").await;
    scenario.node("n1", "blue").await;
    let pod = scenario.slow_pod("web-1", "n1").await;
    let other = scenario.slow_pod("web-2", "n1").await;
    let left = scenario.slow_pod("web-3", "n1").await;
    let theirs = scenario.evacuation_by_others(&pod).await;
    let theirs_to_keep = scenario.evacuation_by_others(&left).await;
    scenario.maintain("blue", "blue", Stage::Idle).await;
    let reason = Patch::Merge(json!({"spec": {"reason": "new\nkernel"}}));
    scenario.maintenances().patch(&scenario.of("blue"), &PatchParams::default(), &reason).await.unwrap();
    scenario.set_stage("blue", Stage::Drain).await;
    let node = scenario.until_cordoned("n1").await;
    let conditions = node.status.unwrap().conditions.unwrap();
    let held = conditions.iter().find(|c| c.type_ == names::condition::MAINTENANCE_IN_PROGRESS).unwrap();
    assert_eq!(held.message.as_deref(), Some("Under maintenance by intent-blue (new kernel)"));
    let name = scenario.until_evacuator_active(&pod).await;
    let why = |e: &Evacuation| e.annotations().get(names::MAINTENANCES_ANNOTATION).cloned();
    // A maintenance that joins adds its name and reason in the same write.
    let both = |e: &Evacuation| {
        let shared = e.instigators().count() == 2 && e.has_instigator(names::instigator::NODE_MAINTENANCE);
        assert!(!shared || why(e).as_deref() == Some("intent-blue (new kernel)"), "{:?}", why(e));
        shared
    };
    scenario
        .explained(wait::present(scenario.evacuations(), &name, "has both instigators", SOON, both).await);
    // Somebody removes our finalizer.
    let patch = Patch::Merge(json!({"metadata": {"finalizers": theirs.finalizers()}}));
    scenario.evacuations().patch(&name, &PatchParams::default(), &patch).await.unwrap();
    let found = wait::present(scenario.evacuations(), &name, "has both instigators again", SOON, both).await;
    let uid = scenario.explained(found).uid();
    // Somebody deletes one: the evacuation continues, because our finalizer remains.
    let deleted = scenario.until_evacuator_active(&other).await;
    scenario.evacuations().delete(&deleted, &DeleteParams::default()).await.unwrap();
    let done = Patch::Merge(json!({"status": {"activeEvacuatorCompleted": true}}));
    scenario.evacuations().patch_status(&deleted, &PatchParams::default(), &done).await.unwrap();
    scenario.until_pod_gone("web-2").await;
    // Somebody deletes one and removes all finalizers: a new one is created.
    scenario.evacuations().delete(&name, &DeleteParams::default()).await.unwrap();
    let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    scenario.evacuations().patch(&name, &PatchParams::default(), &patch).await.unwrap();
    let recreated = |e: &Evacuation| e.uid() != uid && e.has_instigator(names::instigator::NODE_MAINTENANCE);
    let made = scenario
        .explained(wait::present(scenario.evacuations(), &name, "is recreated", SOON, recreated).await);
    assert_eq!(why(&made).as_deref(), Some("intent-blue (new kernel)"));
    // A withdrawn Evacuation loses the annotation.
    let shared = theirs_to_keep.name_any();
    scenario
        .explained(wait::present(scenario.evacuations(), &shared, "has both instigators", SOON, both).await);
    scenario.set_stage("blue", Stage::Complete).await;
    scenario.until_completed("blue").await;
    let kept = scenario.evacuations().get(&shared).await.unwrap();
    assert_eq!((kept.instigators().count(), why(&kept)), (1, None));
}

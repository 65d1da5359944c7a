//! What people and other programs see of a maintenance, and what is put back afterwards.

use k8s_openapi::api::policy::v1::PodDisruptionBudget;

use super::*;

pub async fn autoscalers_are_held_while_a_maintenance_wants_that(world: &World) {
    let scene = world.scene("autoscalers").await;
    let node = objects::node(&scene.of("n1")).label("pool", &scene.of("blue"));
    let before = scene.node_from(node.annotation(names::SCALE_DOWN_DISABLED_ANNOTATION, "false")).await;
    scene.maintain("blue", "blue", Stage::Cordon).await;
    let node = scene.until_cordoned("n1").await;
    let held = [names::SCALE_DOWN_DISABLED_ANNOTATION, names::DO_NOT_DISRUPT_ANNOTATION];
    let shown = |node: &Node| held.map(|annotation| node.annotations().get(annotation).cloned());
    let as_held = held.map(|_| Some("true".to_owned()));
    assert_eq!(shown(&node), as_held);
    // Another one does not want it: as long as the first is there, it is held.
    scene.maintain("other", "blue", Stage::Idle).await;
    let want = async |hold: bool| {
        let patch = Patch::Merge(json!({"spec": {"holdAutoscalers": hold}}));
        scene.maintenances().patch(&scene.of("other"), &PatchParams::default(), &patch).await.unwrap();
    };
    want(false).await;
    scene.set_stage("other", Stage::Cordon).await;
    let by_both = |node: &Node| {
        let named = [scene.of("blue"), scene.of("other")];
        let status = node.annotations().get(names::MAINTENANCE_STATUS_ANNOTATION);
        status.is_some_and(|status| named.iter().all(|name| status.contains(name)))
    };
    assert_eq!(shown(&scene.until_node("n1", "is held by both", by_both).await), as_held);
    scene.set_stage("blue", Stage::Complete).await;
    scene.until_completed("blue").await;
    let let_go = |node: &Node| shown(node) == shown(&before) && is_cordoned(node);
    scene.until_node("n1", "is cordoned and left to autoscalers", let_go).await;
    want(true).await;
    scene.until_node("n1", "is held again", |node| shown(node) == as_held).await;
    scene.set_stage("other", Stage::Complete).await;
    scene.until_completed("other").await;
    scene.until_as_before(&before).await;
}

pub async fn blocking_budget_is_reported_until_it_is_gone(world: &World) {
    let scene = world.scene("budget").await;
    scene.node("n1", "blue").await;
    pod_and_budget(&scene, "web", "n1").await;
    scene.maintain("blue", "blue", Stage::Drain).await;
    let blocked = scene.until_blocked("blue", &[(Some("web"), names::reason::BUDGET_EXHAUSTED)]).await;
    let message = drain(&blocked).blockers.swap_remove(0).message;
    assert!(message.contains("PodDisruptionBudget web"), "{message}");
    let is_blocked = |m: &NodeMaintenance| is(m, names::condition::BLOCKED);
    assert!(is_blocked(&blocked));
    let told = scene.until_event("blue", names::event::BLOCKED).await;
    assert_eq!(told, "Not leaving: 1 DisruptionBudgetExhausted");

    loosen(&scene, "web").await;
    let told = scene.until_event("blue", names::event::UNBLOCKED).await;
    assert_eq!(told, "No pod is blocked any longer");
    let drained = scene.until_drained("blue").await;
    assert!(!is_blocked(&drained));

    // Once more, on a node that is added with a running pod: the same event, with a count.
    scene.node("n2", "green").await;
    pod_and_budget(&scene, "late", "n2").await;
    scene.patch_node("n2", json!({"metadata": {"labels": {"pool": scene.of("blue")}}})).await;
    scene.until_blocked("blue", &[(Some("late"), names::reason::BUDGET_EXHAUSTED)]).await;
    scene.until_event_repeated("blue", names::event::BLOCKED).await;
    loosen(&scene, "late").await;
    scene.until_drained("blue").await;
}

/// A running pod, and a budget that does not let it go.
async fn pod_and_budget(scene: &Scene<'_>, app: &str, node: &str) {
    scene.pod_from(objects::pod(app).label("app", app), node).await;
    let budget = objects::pdb(app).namespace(scene.name).min_available("1").build();
    budgets(scene).create(&PostParams::default(), &budget).await.unwrap();
    let covers = |budget: &PodDisruptionBudget| budget.status.as_ref().is_some_and(|s| s.expected_pods == 1);
    wait::present(budgets(scene), app, "covers the pod", SOON, covers).await.unwrap();
}

async fn loosen(scene: &Scene<'_>, app: &str) {
    let patch = Patch::Merge(json!({"spec": {"minAvailable": 0}}));
    budgets(scene).patch(app, &PatchParams::default(), &patch).await.unwrap();
}

fn budgets(scene: &Scene<'_>) -> Api<PodDisruptionBudget> {
    Api::namespaced(scene.world.client.clone(), scene.name)
}

//! What people and other programs see of a maintenance, and what is put back afterwards.

use k8s_openapi::api::policy::v1::PodDisruptionBudget;

use super::*;

pub async fn what_autoscalers_were_told_before_is_put_back(world: &World) {
    let scene = world.scene("autoscalers").await;
    let node = objects::node(&scene.of("n1")).label("pool", &scene.of("blue"));
    let before = scene.node_from(node.annotation(names::SCALE_DOWN_DISABLED_ANNOTATION, "false")).await;
    scene.maintain("blue", "blue", Stage::Cordon).await;
    let node = scene.until_cordoned("n1").await;
    for annotation in [names::SCALE_DOWN_DISABLED_ANNOTATION, names::DO_NOT_DISRUPT_ANNOTATION] {
        assert_eq!(node.annotations()[annotation], "true");
    }
    scene.set_stage("blue", Stage::Complete).await;
    scene.until_completed("blue").await;
    scene.until_as_before(&before).await;
}

pub async fn a_budget_in_the_way_is_told_and_so_is_that_it_is_gone(world: &World) {
    let scene = world.scene("budget").await;
    scene.node("n1", "blue").await;
    scene.pod_from(objects::pod("web-1").label("app", "web"), "n1").await;
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(world.client.clone(), scene.name);
    let budget = objects::pdb("web").namespace(scene.name).min_available("1").build();
    budgets.create(&PostParams::default(), &budget).await.unwrap();
    let covers = |budget: &PodDisruptionBudget| budget.status.as_ref().is_some_and(|s| s.expected_pods == 1);
    wait::present(budgets.clone(), "web", "covers the pod", SOON, covers).await.unwrap();

    scene.maintain("blue", "blue", Stage::Drain).await;
    let blocked = scene.until_blocked("blue", &[(Some("web-1"), names::reason::BUDGET_EXHAUSTED)]).await;
    let message = drain(&blocked).blockers.swap_remove(0).message;
    assert!(message.contains("PodDisruptionBudget web"), "{message}");
    let is_blocked = |m: &NodeMaintenance| is(m, names::condition::BLOCKED);
    assert!(is_blocked(&blocked));
    let note = scene.until_event("blue", names::event::BLOCKED).await;
    assert_eq!(note, "Not leaving: 1 DisruptionBudgetExhausted");

    let loosen = Patch::Merge(json!({"spec": {"minAvailable": 0}}));
    budgets.patch("web", &PatchParams::default(), &loosen).await.unwrap();
    let note = scene.until_event("blue", names::event::UNBLOCKED).await;
    assert_eq!(note, "Nothing is in the way any longer");
    let drained = scene.until_drained("blue").await;
    assert!(!is_blocked(&drained));
}

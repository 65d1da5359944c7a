//! What people and other programs see of a maintenance, and what is restored afterwards.

use futures::future::join_all;
use haulout_api_types::bounded::MAX_TEXT;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;

use super::*;

pub async fn autoscalers_are_held_while_a_maintenance_requests_it(env: &TestEnv) {
    let scenario = env.scenario("autoscalers").await;
    let node = objects::node(&scenario.of("n1")).label("pool", &scenario.of("blue"));
    let before = scenario.node_from(node.annotation(names::SCALE_DOWN_DISABLED_ANNOTATION, "false")).await;
    scenario.maintain("blue", "blue", Stage::Cordon).await;
    let node = scenario.until_cordoned("n1").await;
    let held = [names::SCALE_DOWN_DISABLED_ANNOTATION, names::DO_NOT_DISRUPT_ANNOTATION];
    let autoscaler_annotations =
        |node: &Node| held.map(|annotation| node.annotations().get(annotation).cloned());
    let as_held = held.map(|_| Some("true".to_owned()));
    assert_eq!(autoscaler_annotations(&node), as_held);
    // A second maintenance does not request it: autoscalers are held as long as the first one exists.
    scenario.maintain("other", "blue", Stage::Idle).await;
    let want = async |hold: bool| {
        let patch = Patch::Merge(json!({"spec": {"holdAutoscalers": hold}}));
        scenario.maintenances().patch(&scenario.of("other"), &PatchParams::default(), &patch).await.unwrap();
    };
    want(false).await;
    scenario.set_stage("other", Stage::Cordon).await;
    let by_both = |node: &Node| {
        let named = [scenario.of("blue"), scenario.of("other")];
        let status = node.annotations().get(names::MAINTENANCE_STATUS_ANNOTATION);
        status.is_some_and(|status| named.iter().all(|name| status.contains(name)))
    };
    assert_eq!(autoscaler_annotations(&scenario.until_node("n1", "is held by both", by_both).await), as_held);
    scenario.set_stage("blue", Stage::Complete).await;
    scenario.until_completed("blue").await;
    let let_go =
        |node: &Node| autoscaler_annotations(node) == autoscaler_annotations(&before) && is_cordoned(node);
    scenario.until_node("n1", "is cordoned and not held", let_go).await;
    want(true).await;
    scenario.until_node("n1", "is held again", |node| autoscaler_annotations(node) == as_held).await;
    scenario.set_stage("other", Stage::Complete).await;
    scenario.until_completed("other").await;
    scenario.until_restored(&before).await;
}

pub async fn blocking_budget_is_reported_until_it_is_gone(env: &TestEnv) {
    let scenario = env.scenario("budget").await;
    scenario.node("n1", "blue").await;
    pod_and_budget(&scenario, "web", "n1").await;
    scenario.maintain("blue", "blue", Stage::Drain).await;
    let blocked = scenario.until_blocked("blue", &[(Some("web"), names::reason::BUDGET_EXHAUSTED)]).await;
    let message = drain(&blocked).blockers.swap_remove(0).message;
    assert!(message.contains("PodDisruptionBudget web"), "{message}");
    let is_blocked = |m: &NodeMaintenance| is(m, names::condition::BLOCKED);
    assert!(is_blocked(&blocked));
    let message = scenario.until_event("blue", names::event::BLOCKED).await;
    assert_eq!(message, "Blockers: 1 DisruptionBudgetExhausted");

    relax_budget(&scenario, "web").await;
    let message = scenario.until_event("blue", names::event::UNBLOCKED).await;
    assert_eq!(message, "Nothing blocks the drain any longer");
    let drained = scenario.until_drained("blue").await;
    assert!(!is_blocked(&drained));

    // Again, on a node that is added with a running pod: the same event, with a count.
    scenario.node("n2", "green").await;
    pod_and_budget(&scenario, "late", "n2").await;
    scenario.patch_node("n2", json!({"metadata": {"labels": {"pool": scenario.of("blue")}}})).await;
    scenario.until_blocked("blue", &[(Some("late"), names::reason::BUDGET_EXHAUSTED)]).await;
    scenario.until_event_repeated("blue", names::event::BLOCKED).await;
    relax_budget(&scenario, "late").await;
    scenario.until_drained("blue").await;
}

/// Who may report on an Evacuation chooses reasons and messages as long as the schema allows.
pub async fn long_text_of_tenants_does_not_stop_the_status(env: &TestEnv) {
    const BLOCKED: usize = 34;
    let scenario = env.scenario("flood").await;
    scenario.node("n1", "blue").await;
    let names: Vec<_> = (0..=BLOCKED).map(|number| format!("web-{number:02}")).collect();
    let pods = join_all(names.iter().map(|name| scenario.slow_pod(name, "n1"))).await;
    scenario.maintain("blue", "blue", Stage::Drain).await;
    let evacuations = join_all(pods.iter().map(|pod| scenario.until_evacuator_active(pod))).await;
    let report = async |evacuation: &String, status: Value| {
        let patch = Patch::Merge(json!({"status": status}));
        scenario.evacuations().patch_status(evacuation, &PatchParams::default(), &patch).await.unwrap();
    };
    let blocked = |status: &str, number: usize| {
        let reason = format!("R{number:02}{}", "x".repeat(998));
        json!({"conditions": [{"type": "Blocked", "status": status, "reason": reason, "message": "ü".repeat(8192),
            "lastTransitionTime": "2026-01-01T00:00:00Z"}]})
    };
    let (talkative, others) = evacuations.split_last().unwrap();
    report(talkative, json!({"message": "ü".repeat(32_768)})).await;
    for (number, evacuation) in others.iter().enumerate() {
        report(evacuation, blocked("True", number)).await;
    }
    let message = format!("Blockers: {BLOCKED} Other");
    let all_listed = |m: &NodeMaintenance| {
        condition_of(m, names::condition::BLOCKED) == ("True".into(), "Other".into(), message.clone())
    };
    let listed = drain(&scenario.until("blue", &message, all_listed).await);
    assert_eq!(listed.blockers.len(), 20);
    for blocker in &listed.blockers {
        let text = &blocker.message;
        assert!(blocker.reason == "Other" && text.starts_with('R') && text.ends_with('…'), "{blocker:?}");
        assert!(text.len() <= MAX_TEXT, "{}", text.len());
    }
    let [waiting] = &*listed.waiting_for else { panic!("{:?}", listed.waiting_for) };
    assert_eq!((&*waiting.pod, &*waiting.reason), ("web-34", "EvacuatorActive"));
    assert!(waiting.message.starts_with("evacuator slow.example.com is active: üü"), "{}", waiting.message);
    assert!(waiting.message.len() <= MAX_TEXT && waiting.message.ends_with('…'), "{}", waiting.message);

    for (number, evacuation) in others.iter().enumerate() {
        report(evacuation, blocked("False", number)).await;
    }
    scenario.until("blue", "is not blocked", |m| drain(m).blockers.is_empty()).await;
    for evacuation in &evacuations {
        report(evacuation, json!({"activeEvacuatorCompleted": true})).await;
    }
    scenario.until_drained("blue").await;
}

/// A running pod, and a budget that does not allow its eviction.
async fn pod_and_budget(scenario: &Scenario<'_>, app: &str, node: &str) {
    scenario.pod_from(objects::pod(app).label("app", app), node).await;
    let budget = objects::pdb(app).namespace(scenario.name).min_available("1").build();
    budgets(scenario).create(&PostParams::default(), &budget).await.unwrap();
    let covers = |budget: &PodDisruptionBudget| budget.status.as_ref().is_some_and(|s| s.expected_pods == 1);
    wait::present(budgets(scenario), app, "covers the pod", SOON, covers).await.unwrap();
}

async fn relax_budget(scenario: &Scenario<'_>, app: &str) {
    let patch = Patch::Merge(json!({"spec": {"minAvailable": 0}}));
    budgets(scenario).patch(app, &PatchParams::default(), &patch).await.unwrap();
}

fn budgets(scenario: &Scenario<'_>) -> Api<PodDisruptionBudget> {
    Api::namespaced(scenario.env.client.clone(), scenario.name)
}

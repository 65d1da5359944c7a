//! A cancelled evacuation leaves everything as it was.

use super::*;

/// Drains the only node, so that the replacement stays pending.
async fn waiting_for_room<'a>(env: &'a Env, name: &'static str, cost: Option<&str>) -> (App<'a>, Pod) {
    let deployment = objects::deployment("web");
    let deployment = match cost {
        Some(cost) => deployment.pods(|pod| pod.annotation(names::POD_DELETION_COST_ANNOTATION, cost)),
        None => deployment,
    };
    let app = App::with(env, name, &["a"], deployment).await;
    let old = app.pod().await;
    app.drain().await;
    app.until_pod("is moved", |pod| pod.uid() == old.uid() && is_moved(pod)).await;
    app.until_evacuation(&old, "is blocked", |evacuation| {
        let status = evacuation.status.clone().unwrap_or_default();
        conditions::is_true(&status.conditions, names::condition::BLOCKED)
    })
    .await;
    (app, old)
}

pub async fn pod_stays_and_its_replacement_goes(env: &Env) {
    let (app, old) = waiting_for_room(env, "cancel", None).await;
    let held = app
        .until_evacuation(&old, "has our finalizer", |evacuation| evacuation.finalizers().len() == 2)
        .await;
    assert!(held.finalizers().iter().any(|finalizer| finalizer.ends_with(class::DEPLOYMENT)));
    app.scenario.delete("a").await;
    let only =
        |pods: &[Pod]| pods.len() == 1 && pods.iter().all(|pod| pod.uid() == old.uid() && is_untouched(pod));
    app.until_pods("are the old one", only).await;
    app.explained(wait::gone(app.scenario.evacuations(), &held.name_any(), SOON).await);
    app.is_as_before().await;
    let note = app.until_event(names::event::REPLACEMENT_CANCELLED).await;
    assert!(note.contains(&old.name_any()), "{note}");
}

pub async fn deletion_cost_is_restored(env: &Env) {
    let (app, old) = waiting_for_room(env, "cancel-cost", Some("7")).await;
    app.scenario.delete("a").await;
    let restored = |pod: &Pod| {
        pod.uid() == old.uid()
            && !is_moved(pod)
            && !pod.annotations().contains_key(names::FORMER_OWNER_ANNOTATION)
            && pod.annotations().get(names::POD_DELETION_COST_ANNOTATION).map(String::as_str) == Some("7")
    };
    app.until_pods("are the old one", |pods| pods.len() == 1 && pods.iter().all(restored)).await;
}

/// Events that repeat are counted, so that they do not flood the cluster.
pub async fn repeated_cancellations_are_one_event(env: &Env) {
    let (app, old) = waiting_for_room(env, "cancel-again", None).await;
    let gone = async || {
        app.scenario.delete("a").await;
        let only = |pods: &[Pod]| pods.len() == 1 && pods.iter().all(is_untouched);
        app.until_pods("are the old one", only).await;
        let evacuations = app.scenario.evacuations();
        let none = |evacuations: &[Evacuation]| evacuations.is_empty();
        app.explained(wait::all(evacuations, watcher::Config::default(), "are gone", SOON, none).await);
    };
    gone().await;
    app.drain().await;
    app.until_pod("is moved again", |pod| pod.uid() == old.uid() && is_moved(pod)).await;
    gone().await;
    let events: Api<k8s_openapi::api::events::v1::Event> = app.api();
    let counted = |events: &[k8s_openapi::api::events::v1::Event]| {
        let mut cancelled = events
            .iter()
            .filter(|event| event.reason.as_deref() == Some(names::event::REPLACEMENT_CANCELLED));
        let first = cancelled.next().and_then(|event| event.series.as_ref());
        cancelled.next().is_none() && first.is_some_and(|series| series.count == 2)
    };
    app.explained(wait::all(events, watcher::Config::default(), "are counted", SOON, counted).await);
}

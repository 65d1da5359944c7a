//! A cancelled evacuation leaves everything as it was.

use super::*;

/// Drains the only node, so that the replacement stays pending. It would not fit there either: the scheduler may learn of the
/// cordon late. When the node is uncordoned, the replacement may start there
/// before the cancellation has arrived, and it must not be ready.
async fn waiting_for_room<'a>(env: &'a Env, name: &'static str, cost: Option<&str>) -> (App<'a>, Pod) {
    let half = json!({"requests": {"cpu": "60"}});
    let deployment = objects::deployment("web").pods(|pod| {
        pod.with(|spec| spec.containers[0].resources = Some(serde_json::from_value(half).unwrap()))
    });
    let deployment = match cost {
        Some(cost) => deployment.pods(|pod| pod.annotation(names::POD_DELETION_COST_ANNOTATION, cost)),
        None => deployment,
    };
    let app = App::empty(env, name, &["a"]).await;
    Box::pin(app.deploy_slow(deployment)).await;
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

/// The pod stays as it was before, and its replacement is gone.
async fn only_the_old_pod_is_left(app: &App<'_>, old: &Pod) {
    let only =
        |pods: &[Pod]| pods.len() == 1 && pods.iter().all(|pod| pod.uid() == old.uid() && is_untouched(pod));
    app.until_pods("are the old one", only).await;
    app.is_as_before().await;
}

/// A pod that was moved although the API server rejects the finalizer of the workload evacuator.
async fn moved_without_finalizer<'a>(env: &'a Env, name: &'static str) -> (App<'a>, Pod) {
    let app = App::slow(env, name, &["a", "b"], 1).await;
    app.open(&["b"]).await;
    let old = app.pod().await;
    app.reject_finalizers(&old).await;
    (app, old)
}

fn has_our_finalizer(evacuation: &Evacuation) -> bool {
    evacuation.finalizers().iter().any(|finalizer| finalizer.ends_with(class::DEPLOYMENT))
}

pub async fn pod_without_our_finalizer_is_given_back_when_cancelled(env: &Env) {
    let (app, old) = moved_without_finalizer(env, "no-finalizer").await;
    app.drain().await;
    app.until_moved("b").await;
    let evacuation = app.until_evacuation(&old, "exists", |_| true).await;
    assert!(!has_our_finalizer(&evacuation), "{:?}", evacuation.metadata);
    app.scenario.delete("a").await;
    only_the_old_pod_is_left(&app, &old).await;
    let note = app.until_event(names::event::REPLACEMENT_CANCELLED).await;
    assert!(note.contains(&old.name_any()), "{note}");
}

/// The evacuator never observes it as cancelled.
pub async fn pod_is_given_back_when_its_evacuation_is_gone(env: &Env) {
    let (app, old) = moved_without_finalizer(env, "gone").await;
    let evacuations = app.scenario.evacuations();
    let requested = rejection::evacuation(&old, "descheduler.example.com");
    // Nobody removes the Evacuation before its last finalizer.
    let requested = evacuations.create(&PostParams::default(), &requested).await.unwrap();
    app.until_moved("b").await;
    evacuations.delete(&requested.name_any(), &kube::api::DeleteParams::default()).await.unwrap();
    let none = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    evacuations.patch(&requested.name_any(), &PatchParams::default(), &none).await.unwrap();
    only_the_old_pod_is_left(&app, &old).await;
}

/// An Evacuation that is being deleted takes no new finalizers, and goes on until its instigator withdraws.
pub async fn deleted_evacuation_in_the_queue_is_cancelled_by_its_instigator(env: &Env) {
    let app = App::slow(env, "queue", &["a", "b"], 2).await;
    app.open(&["b"]).await;
    app.drain().await;
    let (first, replacement) = app.until_moved("b").await;
    let node = app.scenario.of("a");
    let second = app.until_pod("waits", |pod| is_on(pod, &node) && pod.uid() != first.uid()).await;
    let queued =
        app.until_evacuation(&second, "waits in the queue", |e| message(e).contains("place 1")).await;
    let evacuations = app.scenario.evacuations();
    evacuations.delete(&queued.name_any(), &kube::api::DeleteParams::default()).await.unwrap();
    app.make_ready(&replacement).await;
    app.scenario.until_pod_gone(&first.name_any()).await;
    app.until_pod("is moved", |pod| pod.uid() == second.uid() && is_moved(pod)).await;
    let deleted = evacuations.get(&queued.name_any()).await.unwrap();
    assert!(deleted.metadata.deletion_timestamp.is_some(), "{deleted:?}");
    // If its pod was the first one for a moment, it had our finalizer before.
    assert_eq!(has_our_finalizer(&deleted), has_our_finalizer(&queued), "{deleted:?}");
    app.scenario.delete("a").await;
    let as_before = |pods: &[Pod]| {
        let stays = |wanted: &Pod| pods.iter().any(|pod| pod.uid() == wanted.uid() && is_untouched(pod));
        pods.len() == 2 && stays(&second) && stays(&replacement)
    };
    app.until_pods("are the second one and the first replacement", as_before).await;
    app.is_as_before().await;
}

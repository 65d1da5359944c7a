//! The workload evacuator is killed after it has moved pods, or has no leader for long.

use super::history::History;
use super::*;

impl Env {
    /// Kills the evacuator. No replica is left.
    async fn kill_evacuator(&self) {
        let evacuator = self.evacuator();
        evacuator.signal(rustix::process::Signal::KILL).unwrap();
        evacuator.exited().await;
    }

    async fn start_evacuator(&self) {
        let new = start(&self.cluster, &["--lease-seconds", SHORT_LEASE]).await;
        *self.evacuator.lock().unwrap() = Some(Arc::new(new));
    }
}

/// A slow app on node `a`, which is being drained. One of its pods is moved.
async fn moved<'a>(env: &'a Env, name: &'static str, replicas: i32) -> (App<'a>, Pod, Pod) {
    let app = App::slow(env, name, &["a", "b"], replicas).await;
    app.budget(objects::pdb("web").max_unavailable("0").namespace(name).selects("app", "web").build()).await;
    app.open(&["b"]).await;
    app.drain().await;
    let (old, new) = app.until_moved("b").await;
    (app, old, new)
}

/// A moved pod whose Evacuation is gone, and that only its annotation identifies.
async fn moved_without_finalizer<'a>(env: &'a Env, name: &'static str) -> (App<'a>, Pod) {
    let app = App::slow(env, name, &["a", "b"], 1).await;
    app.open(&["b"]).await;
    app.reject_finalizers(&app.pod().await).await;
    app.drain().await;
    let (old, _) = app.until_moved("b").await;
    (app, old)
}

/// Much happens while no evacuator runs: evacuations are cancelled, Deployments are scaled down, replacements become ready.
pub async fn killed_evacuator_continues_where_it_stopped(env: &Env) {
    let (cancelled, unheld, fewer, none, ready) = tokio::join!(
        moved(env, "restart-cancel", 1),
        moved_without_finalizer(env, "restart-unheld"),
        moved(env, "restart-fewer", 2),
        moved(env, "restart-none", 1),
        moved(env, "restart-ready", 1),
    );
    let ready_endpoints = EndpointWatch::start(&ready.0).await;
    let fewer_endpoints = EndpointWatch::start(&fewer.0).await;
    env.kill_evacuator().await;

    tokio::join!(cancel(&cancelled.0), cancel(&unheld.0));
    fewer.0.patch(json!({"spec": {"replicas": 1}})).await;
    none.0.patch(json!({"spec": {"replicas": 0}})).await;
    ready.0.make_ready(&ready.2).await;
    let first = unheld.0.pods().await;
    assert!(first.iter().any(is_moved), "nobody gives it back: {first:?}");
    none.0.until_pods("are the moved one", |pods| pods.len() == 1 && pods.iter().all(is_moved)).await;
    env.start_evacuator().await;

    for (app, old) in [(&cancelled.0, &cancelled.1), (&unheld.0, &unheld.1)] {
        let only = |pods: &[Pod]| pods.len() == 1 && pods[0].uid() == old.uid() && is_untouched(&pods[0]);
        app.until_pods("are the old one", only).await;
        app.is_as_before().await;
    }
    scaled_down(&fewer.0, &fewer.1).await;
    assert!(fewer_endpoints.least() >= 1);
    none.0.until_pods("are gone", <[Pod]>::is_empty).await;
    none.0.scenario.until_drained("a").await;
    ready.0.scenario.until_pod_gone(&ready.1.name_any()).await;
    ready.0.scenario.until_drained("a").await;
    ready.0.is_as_before().await;
    assert_eq!(ready_endpoints.least(), 1);
    nothing_is_left(env, &[&cancelled.0, &unheld.0, &fewer.0, &none.0, &ready.0]).await;
}

/// Deletes the maintenance. It may wait for its Evacuations.
async fn cancel(app: &App<'_>) {
    let params = kube::api::DeleteParams::default();
    app.scenario.maintenances().delete(&app.scenario.of("a"), &params).await.unwrap();
}

/// The moved pod goes first, because another one is available. Then the other one is replaced.
async fn scaled_down(app: &App<'_>, old: &Pod) {
    app.scenario.until_pod_gone(&old.name_any()).await;
    let (_, new) = app.until_moved("b").await;
    app.make_ready(&new).await;
    app.scenario.until_drained("a").await;
    app.until_pods("are as before", |pods| pods.len() == 1 && pods.iter().all(is_untouched)).await;
}

/// No Evacuation, and no metric of a moved pod.
async fn nothing_is_left(env: &Env, apps: &[&App<'_>]) {
    for app in apps {
        let none = wait::all(
            app.scenario.evacuations(),
            watcher::Config::default(),
            "are gone",
            SOON,
            <[_]>::is_empty,
        );
        app.explained(none.await);
    }
    let metrics = ["haulout_workload_evacuator_moved_pods", "haulout_workload_evacuator_active_evacuations"];
    for metric in metrics {
        let evacuator = env.evacuator();
        let what = format!("{metric} is 0");
        let zero =
            wait::eventually(
                &what,
                SOON,
                async || Ok((evacuator.metric(metric).await? == 0.0).then_some(())),
            );
        zero.await.unwrap();
    }
}

/// The Lease of the service behind the built-in class is stale. The pod is evicted as far as its budget allows, and replaced
/// when the service is back.
pub async fn evacuator_without_a_leader_is_passed_over_after_a_minute(env: &Env) {
    let name = "stale-lease";
    let (free, strict) =
        tokio::join!(App::new(env, "stale-lease-free", &["a", "b"], 1), App::new(env, name, &["a", "b"], 1));
    strict.budget(objects::pdb("web").min_available("1").namespace(name).selects("app", "web").build()).await;
    let (pod, old) = (free.pod().await, strict.pod().await);
    let messages = History::start(free.scenario.evacuations(), &evacuation_name(&pod), message).await;
    let endpoints = EndpointWatch::start(&strict).await;
    env.kill_evacuator().await;
    for app in [&free, &strict] {
        app.open(&["b"]).await;
        app.drain().await;
    }
    let is_active = |evacuation: &Evacuation| evacuation.is_active(class::DEPLOYMENT);
    free.until_evacuation(&pod, "has our class", is_active).await;
    strict.until_evacuation(&old, "has our class", is_active).await;
    env.evacuation_controller().shift_clock(Duration::from_secs(61)).await.unwrap();
    free.scenario.until_pod_gone(&pod.name_any()).await;
    let why = format!("the service of evacuator {} has had no leader since", class::DEPLOYMENT);
    messages.until("the Evacuation says why", |message| message.contains(&why)).await;
    free.scenario.until_drained("a").await;

    strict
        .until_evacuation(&old, "is blocked by its budget", |evacuation| {
            let status = evacuation.status.clone().unwrap_or_default();
            let blocked = conditions::find(&status.conditions, names::condition::BLOCKED);
            blocked.is_some_and(|c| c.status == "True" && c.reason == names::reason::BUDGET_EXHAUSTED)
        })
        .await;
    env.start_evacuator().await;
    strict.scenario.until_pod_gone(&old.name_any()).await;
    strict.scenario.until_drained("a").await;
    let note = strict.until_event(names::event::POD_REPLACED).await;
    assert!(note.contains(&old.name_any()), "{note}");
    assert_eq!(endpoints.least(), 1);
    strict.is_as_before().await;
}

fn evacuation_name(pod: &Pod) -> String {
    haulout_api_types::evacuators::evacuation_name(&pod.uid().unwrap(), &pod.name_any())
}

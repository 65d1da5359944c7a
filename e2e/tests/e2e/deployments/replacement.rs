//! The replacement is available before its pod is evicted.

use super::*;

pub async fn single_replica_leaves_with_min_available_1(env: &Env) {
    Box::pin(single_replica(env, "replace-min", objects::pdb("web").min_available("1"))).await;
}

pub async fn single_replica_leaves_with_max_unavailable_0(env: &Env) {
    Box::pin(single_replica(env, "replace-max", objects::pdb("web").max_unavailable("0"))).await;
}

async fn single_replica(env: &Env, name: &'static str, budget: objects::PdbBuilder) {
    let app = App::new(env, name, &["a", "b"], 1).await;
    app.budget(budget.namespace(name).selects("app", "web").build()).await;
    app.open(&["b"]).await;
    let (old, endpoints) = (app.pod().await, EndpointWatch::start(&app).await);
    app.drain().await;
    app.scenario.until_drained("a").await;
    app.scenario.until_pod_gone(&old.name_any()).await;
    assert_eq!(endpoints.least(), 1);
    let new = app.pod().await;
    assert!(is_on(&new, &app.scenario.of("b")), "{new:?}");
    app.is_as_before().await;
    let note = app.until_event(names::event::POD_REPLACED).await;
    assert!(note.contains(&old.name_any()) && note.contains("1 of 1 pods available"), "{note}");
    app.scenario.delete("a").await;
}

pub async fn twenty_replicas_stay_ready(env: &Env) {
    let app = App::new(env, "replace-20", &["a", "b", "c"], 20).await;
    app.budget(objects::pdb("web").min_available("20").namespace("replace-20").selects("app", "web").build())
        .await;
    app.open(&["b", "c"]).await;
    let endpoints = EndpointWatch::start(&app).await;
    // The budget is never larger than maxSurge, 25%.
    let most = Arc::new(Mutex::new(0));
    app.drain().await;
    let (count, max) = (Arc::clone(&most), |pods: &[Pod]| {
        pods.iter().filter(|pod| is_moved(pod) && !is_terminating(pod)).count()
    });
    let node = app.scenario.of("a");
    for left in [15, 10, 5, 0] {
        app.until_pods(&format!("leave node a up to {left}"), |pods| {
            let mut most = count.lock().unwrap();
            *most = max(pods).max(*most);
            pods.iter().filter(|pod| is_on(pod, &node)).count() <= left
        })
        .await;
    }
    assert_eq!(endpoints.least(), 20);
    let most = *most.lock().unwrap();
    assert!((2..=5).contains(&most), "{most}");
    app.scenario.until_drained("a").await;
    app.until_pods("are as before", |pods| pods.len() == 20 && pods.iter().all(is_untouched)).await;
    app.is_as_before().await;
}

pub async fn unavailable_replica_is_not_waited_for(env: &Env) {
    let app = App::new(env, "replace-broken", &["a", "b"], 2).await;
    app.open(&["b"]).await;
    // The other pod is on node b, and is not ready any more.
    let pods = app.pods().await;
    app.scenario.pods().delete(&pods[1].name_any(), &kube::api::DeleteParams::default()).await.unwrap();
    let second = app.scenario.of("b");
    let other = app.until_pod("runs on node b", |pod| is_on(pod, &second) && is_ready(pod)).await;
    app.patch_pod(&other, json!({"metadata": {"annotations": {"haulout.test/ready": "false"}}})).await;
    let not_ready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    let status = Patch::Strategic(not_ready);
    app.scenario.pods().patch_status(&other.name_any(), &PatchParams::default(), &status).await.unwrap();
    app.drain().await;
    app.scenario.until_drained("a").await;
    let pods = app.pods().await;
    assert!(pods.iter().any(|pod| pod.uid() == other.uid() && !is_ready(pod)), "{pods:?}");
    let note = app.until_event(names::event::POD_REPLACED).await;
    assert!(note.contains("1 of 2 pods available"), "{note}");
}

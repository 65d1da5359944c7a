//! The template of a Deployment changes while its pods are replaced.

use super::*;

/// Changes annotations of the template, which starts a rollout.
pub(super) async fn change_template(app: &App<'_>, annotations: Value) {
    app.patch(json!({"spec": {"template": {"metadata": {"annotations": annotations}}}})).await;
}

/// Waits until all pods are of the latest revision and available, and no others are left.
async fn until_rolled_out(app: &App<'_>) {
    let replicas = usize::try_from(app.replicas().await).unwrap();
    let rolled_out = |deployment: &Deployment| {
        let status = deployment.status.clone().unwrap_or_default();
        let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas);
        let counts = [status.replicas, status.updated_replicas, status.available_replicas];
        status.observed_generation == deployment.metadata.generation && counts == [wanted; 3]
    };
    let deployments = app.scenario.deployments();
    app.explained(wait::present(deployments, app.name, "is rolled out", SOON, rolled_out).await);
    app.until_pods("are of the latest revision", |pods| {
        pods.len() == replicas && pods.iter().all(|pod| is_untouched(pod) && is_ready(pod))
    })
    .await;
}

fn is_running(pod: &Pod) -> bool {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
}

/// The rollout is stuck: its first pod does not become ready. The old pods leave all the same.
pub async fn rollout_is_in_progress_when_the_drain_starts(env: &Env) {
    let app = App::new(env, "rollout-before", &["a", "b"], 3).await;
    app.open(&["b"]).await;
    let endpoints = EndpointWatch::start(&app).await;
    change_template(&app, json!({"haulout.test/ready": "false"})).await;
    app.until_pods("include one that is not ready", |pods| {
        pods.len() == 4 && pods.iter().any(|pod| is_running(pod) && !is_ready(pod))
    })
    .await;
    app.drain().await;
    app.scenario.until_drained("a").await;
    let second = app.scenario.of("b");
    let pods = app.pods().await;
    assert!(pods.iter().filter(|pod| is_ready(pod)).all(|pod| is_on(pod, &second)), "{pods:?}");
    change_template(&app, json!({"haulout.test/ready": null})).await;
    until_rolled_out(&app).await;
    assert_eq!(endpoints.least(), 3);
    app.scenario.delete("a").await;
}

/// A pod is already moved, and its replacement is pending.
pub async fn rollout_starts_in_the_middle(env: &Env) {
    let app = App::new(env, "rollout-middle", &["a"], 1).await;
    let (old, endpoints) = (app.pod().await, EndpointWatch::start(&app).await);
    app.drain().await;
    app.until_pod("is moved", is_moved).await;
    change_template(&app, json!({"example.com/revision": "2"})).await;
    app.until_pods("include one of the new revision", |pods| {
        pods.iter().any(|pod| pod.annotations().contains_key("example.com/revision"))
    })
    .await;
    app.scenario.node("b", "pool").await;
    app.scenario.until_drained("a").await;
    app.scenario.until_pod_gone(&old.name_any()).await;
    until_rolled_out(&app).await;
    assert_eq!(endpoints.least(), 1);
    app.scenario.delete("a").await;
}

/// Pods of both revisions come and go while others are moved.
pub async fn rollout_and_drain_start_at_once(env: &Env) {
    let deployment =
        objects::deployment("web").replicas(6).pods(|pod| pod.annotation("haulout.test/ready-after", "1s"));
    let app = App::with(env, "rollout-at-once", &["a", "b"], deployment).await;
    app.open(&["b"]).await;
    let endpoints = EndpointWatch::start(&app).await;
    let template = json!({"example.com/revision": "2"});
    futures::join!(app.drain(), change_template(&app, template));
    app.scenario.until_drained("a").await;
    until_rolled_out(&app).await;
    // The rollout itself has maxUnavailable 25%, rounded down.
    assert!(endpoints.least() >= 5, "{}", endpoints.least());
    app.scenario.delete("a").await;
}

/// Its last revision is not rolled out, but its pods are replaced as usual.
pub async fn paused_deployment_replaces_its_pods(env: &Env) {
    let slow = objects::deployment("web").pods(|pod| pod.annotation("haulout.test/ready-after", "2s"));
    let app = App::with(env, "paused", &["a", "b"], slow).await;
    app.open(&["b"]).await;
    app.patch(json!({"spec": {"paused": true}})).await;
    change_template(&app, json!({"example.com/revision": "2"})).await;
    let (old, endpoints) = (app.pod().await, EndpointWatch::start(&app).await);
    app.drain().await;
    app.scenario.until_drained("a").await;
    app.scenario.until_pod_gone(&old.name_any()).await;
    let new = app.pod().await;
    assert!(is_untouched(&new) && !new.annotations().contains_key("example.com/revision"), "{new:?}");
    assert_eq!(endpoints.least(), 1);
    app.patch(json!({"spec": {"paused": false}})).await;
    until_rolled_out(&app).await;
    assert_eq!(endpoints.least(), 1);
    app.scenario.delete("a").await;
}

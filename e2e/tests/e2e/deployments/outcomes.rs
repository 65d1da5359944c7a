//! What happens to pods that cannot be replaced, and when the Deployment changes in the middle.

use super::*;

pub async fn deployments_that_cannot_surge_are_evicted(env: &Env) {
    for (name, patch, why) in [
        (
            "recreate",
            json!({"spec": {"strategy": {"type": "Recreate", "rollingUpdate": null}}}),
            "strategy Recreate",
        ),
        (
            "no-surge",
            json!({"spec": {"strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}}}),
            "maxSurge 0",
        ),
        (
            "opt-out",
            json!({"metadata": {"annotations": {names::REPLACE_ANNOTATION: "false"}}}),
            "Deployment web has the annotation",
        ),
    ] {
        let app = App::new(env, name, &["a", "b"], 1).await;
        app.open(&["b"]).await;
        app.patch(patch).await;
        let old = app.pod().await;
        app.drain().await;
        app.scenario.until_pod_gone(&old.name_any()).await;
        let note = app.until_event(names::event::POD_NOT_REPLACED).await;
        assert!(note.contains(why), "{note}");
        app.scenario.delete("a").await;
    }
}

pub async fn pods_without_a_deployment_are_evicted(env: &Env) {
    let app = App::empty(env, "bare-set", &["a"]).await;
    let sets: Api<ReplicaSet> = app.api();
    // The label of Deployments makes our class responsible.
    let set = objects::deployment("web").namespace("bare-set").pods(|pod| {
        let here = json!({"pool": app.scenario.of("pool")});
        pod.label(names::POD_TEMPLATE_HASH_LABEL, "x")
            .with(|spec| spec.node_selector = serde_json::from_value(here).unwrap())
    });
    sets.create(&PostParams::default(), &set.build_replica_set()).await.unwrap();
    let old = app
        .until_pod("runs", |pod| pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running"))
        .await;
    app.drain().await;
    app.scenario.until_pod_gone(&old.name_any()).await;
    app.scenario.delete("a").await;
}

/// The replacement stays pending, and the pod belongs to the Deployment.
pub(super) async fn waiting<'a>(env: &'a Env, name: &'static str) -> (App<'a>, Pod) {
    let app = App::new(env, name, &["a"], 1).await;
    app.budget(objects::pdb("web").min_available("1").namespace(name).selects("app", "web").build()).await;
    let old = app.pod().await;
    app.drain().await;
    app.until_pod("is moved", |pod| pod.uid() == old.uid() && is_moved(pod)).await;
    (app, old)
}

/// Its budget would keep the pod for ever, but nobody wants it.
pub async fn deployment_scaled_to_zero_takes_the_pod_along(env: &Env) {
    let (app, _) = waiting(env, "zero").await;
    app.patch(json!({"spec": {"replicas": 0}})).await;
    app.until_pods("are gone", <[Pod]>::is_empty).await;
    app.scenario.until_drained("a").await;
    app.scenario.delete("a").await;
}

pub async fn deployment_deleted_with_orphans_keeps_its_pods(env: &Env) {
    let (app, old) = waiting(env, "orphan").await;
    let orphan = kube::api::DeleteParams {
        propagation_policy: Some(kube::api::PropagationPolicy::Orphan),
        ..Default::default()
    };
    app.scenario.deployments().delete("web", &orphan).await.unwrap();
    app.explained(wait::gone(app.scenario.deployments(), "web", SOON).await);
    app.scenario.delete("a").await;
    let clean = |pod: &Pod| !pod.annotations().contains_key(names::FORMER_OWNER_ANNOTATION) && !is_moved(pod);
    app.until_pods("are clean", |pods| {
        pods.iter().all(clean) && pods.iter().any(|pod| pod.uid() == old.uid() && !is_terminating(pod))
    })
    .await;
}

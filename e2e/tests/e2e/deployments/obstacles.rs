//! What keeps a replacement from starting.

use super::*;

/// The pod leaves although it gets no replacement, and the event says why.
async fn evicted_without_replacement(app: &App<'_>, why: &str) {
    let first = app.scenario.of("a");
    let old = app.pods().await.into_iter().find(|pod| is_on(pod, &first)).unwrap();
    app.drain().await;
    app.scenario.until_pod_gone(&old.name_any()).await;
    let note = app.until_event(names::event::POD_NOT_REPLACED).await;
    assert!(note.contains(why), "{note}");
    app.scenario.delete("a").await;
}

pub async fn anti_affinity_to_itself_leads_to_eviction(env: &Env) {
    let apart = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {"matchLabels": {"app": "web"}}, "topologyKey": "kubernetes.io/hostname"},
    ]}});
    let app = App::empty(env, "anti-affinity", &["a", "b"]).await;
    app.open(&["b"]).await;
    let deployment = objects::deployment("web")
        .replicas(2)
        .pods(|pod| pod.with(|spec| spec.affinity = Some(serde_json::from_value(apart).unwrap())));
    app.deploy(deployment).await;
    evicted_without_replacement(&app, "anti-affinity").await;
}

pub async fn volume_of_one_node_leads_to_eviction(env: &Env) {
    let app = App::empty(env, "volume", &["a", "b"]).await;
    let claims: Api<k8s_openapi::api::core::v1::PersistentVolumeClaim> = app.api();
    let claim = json!({
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": app.scenario.of("data"),
            "resources": {"requests": {"storage": "1Gi"}}},
    });
    let volumes: Api<k8s_openapi::api::core::v1::PersistentVolume> = Api::all(app.client());
    let volume = json!({
        "metadata": {"name": app.scenario.of("data")},
        "spec": {"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}, "storageClassName": "",
            "hostPath": {"path": "/data"}},
    });
    volumes.create(&PostParams::default(), &serde_json::from_value(volume).unwrap()).await.unwrap();
    claims.create(&PostParams::default(), &serde_json::from_value(claim).unwrap()).await.unwrap();
    app.deploy(objects::deployment("web").pods(|pod| pod.claim("data"))).await;
    app.open(&["b"]).await;
    evicted_without_replacement(
        &app,
        "data of the pod cannot be mounted by a pod on another node (ReadWriteOnce)",
    )
    .await;
}

pub async fn quota_leads_to_eviction(env: &Env) {
    let app = App::new(env, "quota", &["a", "b"], 1).await;
    app.open(&["b"]).await;
    let quotas: Api<k8s_openapi::api::core::v1::ResourceQuota> = app.api();
    let quota = json!({"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}});
    quotas.create(&PostParams::default(), &serde_json::from_value(quota).unwrap()).await.unwrap();
    let counted = |quota: &k8s_openapi::api::core::v1::ResourceQuota| {
        quota
            .status
            .as_ref()
            .and_then(|status| status.used.as_ref())
            .is_some_and(|used| used["pods"].0 == "1")
    };
    wait::present(quotas, "few", "has counted", SOON, counted).await.unwrap();
    evicted_without_replacement(&app, "exceeded quota").await;
}

pub async fn lack_of_room_is_waited_for(env: &Env) {
    let app = App::new(env, "room", &["a"], 1).await;
    let (old, endpoints) = (app.pod().await, EndpointWatch::start(&app).await);
    app.drain().await;
    let blocked = app
        .until_evacuation(&old, "is blocked", |evacuation| {
            let status = evacuation.status.clone().unwrap_or_default();
            let blocked = conditions::find(&status.conditions, names::condition::BLOCKED);
            blocked.is_some_and(|c| c.status == "True" && c.reason == names::reason::NO_ROOM)
        })
        .await;
    let text = message(&blocked);
    assert!(text.contains("is pending: 0/") && text.contains("Add nodes"), "{text}");
    let maintenance = app
        .scenario
        .until("a", "names the blocker", |maintenance| {
            let blockers = maintenance
                .status
                .iter()
                .flat_map(|status| &status.drain_status)
                .flat_map(|drain| &drain.blockers);
            blockers.into_iter().any(|blocker| blocker.reason == names::reason::NO_ROOM)
        })
        .await;
    drop(maintenance);
    app.scenario.node("b", "pool").await;
    app.scenario.until_drained("a").await;
    app.scenario.until_pod_gone(&old.name_any()).await;
    assert_eq!(endpoints.least(), 1);
    app.is_as_before().await;
    app.scenario.delete("a").await;
}

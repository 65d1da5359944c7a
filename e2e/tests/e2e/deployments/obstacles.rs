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

pub async fn host_port_in_use_leads_to_eviction(env: &Env) {
    let app = App::empty(env, "host-port", &["a", "b"]).await;
    app.open(&["b"]).await;
    let port = json!([{"containerPort": 80, "hostPort": 8080}]);
    let deployment = objects::deployment("web")
        .replicas(2)
        .pods(|pod| pod.with(|spec| spec.containers[0].ports = serde_json::from_value(port).unwrap()));
    app.deploy(deployment).await;
    evicted_without_replacement(&app, "free ports").await;
}

/// Three pods on two nodes: with one more on either node, the numbers would differ by two.
pub async fn topology_spread_that_cannot_hold_leads_to_eviction(env: &Env) {
    let app = App::empty(env, "spread", &["a", "b"]).await;
    app.open(&["b"]).await;
    let spread = json!([{
        "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": "web"}},
    }]);
    let deployment = objects::deployment("web").replicas(3).pods(|pod| {
        pod.with(|spec| spec.topology_spread_constraints = serde_json::from_value(spread).unwrap())
    });
    app.deploy(deployment).await;
    evicted_without_replacement(&app, "topology spread constraints").await;
}

pub async fn policy_that_rejects_the_move_leads_to_eviction(env: &Env) {
    let app = App::new(env, "reject-move", &["a", "b"], 1).await;
    app.open(&["b"]).await;
    app.reject_moves(&app.pod().await).await;
    evicted_without_replacement(&app, rejection::POLICY).await;
    let note = app.until_event(names::event::POD_NOT_REPLACED).await;
    assert!(note.contains("the API server rejects the change of the owner or annotations of pod"), "{note}");
}

pub async fn policy_that_rejects_the_new_pod_leads_to_eviction(env: &Env) {
    let app = App::new(env, "reject-pod", &["a", "b"], 1).await;
    app.open(&["b"]).await;
    app.reject_pods().await;
    evicted_without_replacement(&app, rejection::POLICY).await;
    let note = app.until_event(names::event::POD_NOT_REPLACED).await;
    assert!(note.contains("no pod can be created"), "{note}");
}

/// It may answer later, so the move is retried.
pub async fn webhook_that_does_not_answer_is_waited_for(env: &Env) {
    let app = App::new(env, "no-webhook", &["a", "b"], 1).await;
    app.budget(
        objects::pdb("web").max_unavailable("0").namespace("no-webhook").selects("app", "web").build(),
    )
    .await;
    app.open(&["b"]).await;
    let old = app.pod().await;
    let webhooks = app.fail_changes(&old).await;
    app.drain().await;
    let why = format!("Failed to change the owner of pod {}, retrying: ", old.name_any());
    app.until_evacuation(&old, "says why", |evacuation| {
        let message = message(evacuation);
        message.starts_with(&why) && message.contains("missing.example.com")
    })
    .await;
    webhooks.delete(&app.scenario.of("policy"), &kube::api::DeleteParams::default()).await.unwrap();
    app.scenario.until_drained("a").await;
    let note = app.until_event(names::event::POD_REPLACED).await;
    assert!(note.contains(&old.name_any()), "{note}");
    app.is_as_before().await;
}

/// The first attempt to pull may fail for reasons that pass.
pub async fn image_that_cannot_be_pulled_leads_to_eviction(env: &Env) {
    let app = App::slow(env, "image", &["a", "b"], 1).await;
    app.open(&["b"]).await;
    app.drain().await;
    let (old, new) = app.until_moved("b").await;
    let waits = async |reason: &str| {
        let status = json!({"status": {"containerStatuses": [{
            "name": "main", "image": "example.invalid/main", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"waiting": {"reason": reason, "message": "manifest unknown"}},
        }]}});
        let params = PatchParams::default();
        app.scenario.pods().patch_status(&new.name_any(), &params, &Patch::Merge(status)).await.unwrap();
    };
    waits("ErrImagePull").await;
    let first = format!("pod {} waits (ErrImagePull)", new.name_any());
    app.until_evacuation(&old, "waits for the image", |evacuation| message(evacuation).contains(&first))
        .await;
    waits("ImagePullBackOff").await;
    app.scenario.until_pod_gone(&old.name_any()).await;
    let note = app.until_event(names::event::POD_NOT_REPLACED).await;
    assert!(note.contains("cannot start: ImagePullBackOff"), "{note}");
    app.scenario.delete("a").await;
}

pub async fn replacement_that_is_never_ready_is_waited_for_until_the_progress_deadline(env: &Env) {
    let app = App::slow(env, "never-ready", &["a", "b"], 1).await;
    app.patch(json!({"spec": {"progressDeadlineSeconds": 8}})).await;
    app.open(&["b"]).await;
    let old = app.pod().await;
    let waits = app.until_evacuation(&old, "waits", |evacuation| message(evacuation).contains("is starting"));
    // It is watched from before its creation.
    tokio::join!(waits, app.drain());
    app.scenario.until_pod_gone(&old.name_any()).await;
    let note = app.until_event(names::event::POD_NOT_REPLACED).await;
    assert!(waited_seconds(&note) >= 8, "{note}");
    assert!(note.contains("is starting. The pod is evicted without one"), "{note}");
    app.scenario.delete("a").await;
}

/// With `--wait-for-room-seconds 5`.
pub async fn room_is_waited_for_as_long_as_configured(env: &Env) {
    let app = App::new(env, "no-room", &["a"], 1).await;
    let old = app.pod().await;
    let is_blocked = |evacuation: &Evacuation| {
        let status = evacuation.status.clone().unwrap_or_default();
        let blocked = conditions::find(&status.conditions, names::condition::BLOCKED);
        blocked.is_some_and(|c| c.status == "True" && c.reason == names::reason::NO_ROOM)
    };
    // It is watched from before its creation.
    tokio::join!(app.until_evacuation(&old, "is blocked", is_blocked), app.drain());
    app.scenario.until_pod_gone(&old.name_any()).await;
    let note = app.until_event(names::event::POD_NOT_REPLACED).await;
    assert!(waited_seconds(&note) >= 5 && note.contains("nodes are available"), "{note}");
    app.scenario.delete("a").await;
}

/// How long the evacuator has waited for a replacement, from the note of its event.
fn waited_seconds(note: &str) -> u64 {
    let words = note.split_once("has no available replacement after ");
    let number = words.and_then(|(_, rest)| rest.split(' ').next()).and_then(|number| number.parse().ok());
    number.unwrap_or_else(|| panic!("{note}"))
}

/// The namespace has the annotation before its Deployment exists.
pub async fn namespace_that_opts_out_leads_to_eviction(env: &Env) {
    let app = App::empty(env, "opt-out-namespace", &["a", "b"]).await;
    let namespaces: Api<k8s_openapi::api::core::v1::Namespace> = Api::all(app.client());
    let patch = Patch::Merge(json!({"metadata": {"annotations": {names::REPLACE_ANNOTATION: "false"}}}));
    namespaces.patch(app.scenario.name, &PatchParams::default(), &patch).await.unwrap();
    app.deploy(objects::deployment("web")).await;
    app.open(&["b"]).await;
    evicted_without_replacement(&app, "Namespace opt-out-namespace has the annotation").await;
}

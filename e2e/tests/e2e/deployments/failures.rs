//! The old pod or its node goes away by itself while the replacement starts.

use std::time::Duration;

use kube::api::DeleteParams;

use super::*;

/// The pod garbage collector waits for 40 s, and looks every 20 s. The node lifecycle controller waits for 50 s.
const POD_GARBAGE_COLLECTION: Duration = Duration::from_secs(240);

/// The replacement starts on another node, and the ReplicaSet creates and deletes pods as usual.
async fn until_replaced(app: &App<'_>, old: &Pod) {
    app.scenario.node("b", "pool").await;
    let is_replacement = |pod: &Pod| pod.uid() != old.uid() && is_ready(pod) && is_untouched(pod);
    app.until_pod("is the replacement", is_replacement).await;
    app.patch(json!({"spec": {"replicas": 2}})).await;
    app.until_pods("include two new ones", |pods| pods.iter().filter(|pod| is_replacement(pod)).count() == 2)
        .await;
}

async fn until_old_pod_is_gone(app: &App<'_>, old: &Pod) {
    app.explained(wait::gone(app.scenario.pods(), &old.name_any(), POD_GARBAGE_COLLECTION).await);
    let (config, none) = (watcher::Config::default(), |all: &[Evacuation]| all.is_empty());
    app.explained(wait::all(app.scenario.evacuations(), config, "are gone", SOON, none).await);
    app.until_pods("are the two new ones", |pods| pods.len() == 2 && pods.iter().all(is_untouched)).await;
}

pub async fn old_pod_is_deleted_by_somebody(env: &Env) {
    let (app, old) = outcomes::waiting(env, "pod-deleted").await;
    app.scenario.pods().delete(&old.name_any(), &DeleteParams::default()).await.unwrap();
    app.scenario.until_pod_gone(&old.name_any()).await;
    app.scenario.until_drained("a").await;
    until_replaced(&app, &old).await;
    until_old_pod_is_gone(&app, &old).await;
    app.scenario.delete("a").await;
}

/// Nothing has to wait for its replacement any more.
pub async fn old_pod_fails(env: &Env) {
    let (app, old) = outcomes::waiting(env, "pod-failed").await;
    let failed = json!({"status": {"phase": "Failed", "conditions": [{"type": "Ready", "status": "False"}]}});
    let params = PatchParams::default();
    app.scenario.pods().patch_status(&old.name_any(), &params, &Patch::Strategic(failed)).await.unwrap();
    app.scenario.until_pod_gone(&old.name_any()).await;
    app.scenario.until_drained("a").await;
    until_replaced(&app, &old).await;
    until_old_pod_is_gone(&app, &old).await;
    app.scenario.delete("a").await;
}

pub async fn node_of_the_old_pod_is_deleted(env: &Env) {
    let (app, old) = outcomes::waiting(env, "node-deleted").await;
    app.scenario.nodes().delete(&app.scenario.of("a"), &DeleteParams::default()).await.unwrap();
    until_replaced(&app, &old).await;
    until_old_pod_is_gone(&app, &old).await;
    app.scenario.delete("a").await;
}

/// Its kubelet does not answer any more. The taint manager deletes the pod, which stays terminating until the pod garbage
/// collector removes it.
pub async fn node_of_the_old_pod_is_not_ready(env: &Env) {
    let (app, old) = outcomes::waiting(env, "node-not-ready").await;
    env.cluster.silence_node(&app.scenario.of("a")).await.unwrap();
    let key = "node.kubernetes.io/out-of-service";
    let taints = json!([{"key": key, "value": "nodeshutdown", "effect": "NoExecute"}]);
    app.scenario.patch_node("a", json!({"spec": {"taints": taints}})).await;
    app.until_pod("is terminating", |pod| pod.uid() == old.uid() && is_terminating(pod)).await;
    until_replaced(&app, &old).await;
    until_old_pod_is_gone(&app, &old).await;
    app.scenario.until_drained("a").await;
    app.scenario.delete("a").await;
}

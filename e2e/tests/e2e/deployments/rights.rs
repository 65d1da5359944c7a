//! What the account of the workload evacuator can do if its token is stolen.

use kube::api::DeleteParams;

use super::*;

pub async fn account_can_only_change_owners_of_pods(env: &Env) {
    let app = App::new(env, "rights", &["a"], 1).await;
    let pod = app.pod().await;
    let kubeconfig = env
        .cluster
        .service_account_kubeconfig(haulout_e2e::service::NAMESPACE, "haulout-workload-evacuator")
        .await
        .unwrap();
    let pods: Api<Pod> =
        Api::namespaced(env.cluster.client_from(&kubeconfig, "stolen").await.unwrap(), "rights");
    let name = pod.name_any();
    let refused = |answer: kube::Result<Pod>, what: &str| {
        let text = answer.expect_err(what).to_string();
        assert!(text.contains("the workload evacuator must"), "{what}: {text}");
    };
    let params = PatchParams::default();
    for (what, patch) in [
        ("label", json!({"metadata": {"labels": {"app": "other"}}})),
        ("annotation", json!({"metadata": {"annotations": {"example.com/a": "b"}}})),
        ("finalizer", json!({"metadata": {"finalizers": ["example.com/a"]}})),
        ("image", json!({"spec": {"containers": [{"name": "main", "image": "evil"}]}})),
        ("no owner", json!({"metadata": {"ownerReferences": null}})),
        (
            "another owner",
            json!({"metadata": {"ownerReferences": [
                {"apiVersion": "v1", "kind": "Secret", "name": "x", "uid": "x", "controller": true},
            ]}}),
        ),
        (
            "one more owner",
            json!({"metadata": {"ownerReferences": [
                pod.owner_references()[0], {"apiVersion": "v1", "kind": "Secret", "name": "x", "uid": "x"},
            ]}}),
        ),
    ] {
        let owners = patch["metadata"].get("ownerReferences").is_some();
        let patch = if owners { Patch::Merge(patch) } else { Patch::Strategic(patch) };
        refused(pods.patch(&name, &params, &patch).await, what);
    }
    let deleted = pods.delete(&name, &DeleteParams::default()).await.expect_err("delete").to_string();
    assert!(deleted.contains("must not create, delete or evict"), "{deleted}");
    let evicted = pods.evict(&name, &kube::api::EvictParams::default()).await.expect_err("evict").to_string();
    assert!(evicted.contains("pods/eviction"), "{evicted}");
    let cost = json!({"metadata": {"annotations": {names::POD_DELETION_COST_ANNOTATION: "1"}}});
    pods.patch(&name, &params, &Patch::Merge(cost)).await.unwrap();
}

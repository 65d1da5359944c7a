//! With OwnerReferencesPermissionEnforcement, as on OpenShift, whoever changes an owner reference of a pod needs permissions
//! that no request of ours shows.

use std::time::Duration;

use haulout_api_types::former_owner::FormerOwner;
use haulout_e2e::service::NAMESPACE;
use haulout_e2e::{Cluster, Component, objects, wait};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Client, ResourceExt as _};
use serde_json::Value;

use super::{Permission, all_but, apply, programs};

const SOON: Duration = Duration::from_secs(60);

/// Moves the pod to its Deployment, or back.
async fn change_owner(client: &Client, patch: &Value) -> kube::Result<Pod> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), "default");
    let pod = patch["name"].as_str().unwrap();
    pods.patch(pod, &PatchParams::default(), &Patch::Merge(&patch["patch"])).await
}

#[tokio::test]
async fn owner_changes_need_permissions_on_pods_and_owners() {
    let plugins = "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement";
    let cluster = Cluster::builder().name("owner-references").extra_args(Component::ApiServer, [plugins]);
    let cluster = cluster.boot().await.unwrap();
    cluster.install_chart(&[]).await.unwrap();
    let admin = cluster.client().await.unwrap();
    let deployments: Api<Deployment> = Api::namespaced(admin.clone(), "default");
    let deployment = objects::deployment("web").namespace("default").build();
    let deployment = deployments.create(&PostParams::default(), &deployment).await.unwrap();
    let pods: Api<Pod> = Api::namespaced(admin.clone(), "default");
    let web = watcher::Config::default().labels("app=web");
    let pod = wait::all(pods.clone(), web, "exist", SOON, |pods| !pods.is_empty()).await.unwrap().remove(0);
    let name = pod.name_any();
    let owner = (deployment.name_any(), deployment.uid().unwrap());
    let to_deployment = FormerOwner::move_patch(&pod.metadata, (&owner.0, &owner.1), 1, 0).unwrap();
    let to_deployment = serde_json::json!({"name": name, "patch": to_deployment});
    let moved = change_owner(&admin, &to_deployment).await.unwrap();
    let former = FormerOwner::of(&moved.metadata).unwrap();
    assert!(former.block_owner_deletion, "its ReplicaSet sets this");
    let back = serde_json::json!({"name": name, "patch": former.give_back_patch(&moved.metadata)});
    change_owner(&admin, &back).await.unwrap();

    let all = programs(&cluster).await;
    for service in ["workload-evacuator", "cleanup", "withdraw"] {
        let permissions = &all[service].permissions;
        let find = |verb: &str, resource: &str| -> Permission {
            let is = |one: &&Permission| one.verb == verb && one.resource == resource;
            permissions.iter().find(is).unwrap().clone()
        };
        for (missing, rejected) in
            [(find("delete", "pods"), &to_deployment), (find("update", "replicasets/finalizers"), &back)]
        {
            let kind = if missing.verb == "delete" { "pods" } else { "owners" };
            let (all, without) = (format!("{service}-all"), format!("{service}-without-{kind}"));
            let nothing = Permission { verb: "x".into(), ..missing.clone() };
            apply(&cluster, &all_but(permissions, &nothing, &all)).await;
            apply(&cluster, &all_but(permissions, &missing, &without)).await;
            let client = async |account: &str| {
                let kubeconfig = cluster.service_account_kubeconfig(NAMESPACE, account).await.unwrap();
                cluster.client_from(&kubeconfig, account).await.unwrap()
            };
            let (able, unable) = (client(&all).await, client(&without).await);
            // In the state in which the patch changes something.
            let before = if missing.verb == "delete" { &back } else { &to_deployment };
            change_owner(&admin, before).await.unwrap();
            // New roles apply a little later. Before that, the rejection has another cause.
            let annotate = serde_json::json!({"name": name, "patch": {"metadata": {"annotations": {"example.com/a": without}}}});
            wait::eventually("the role applies", SOON, async || {
                Ok(change_owner(&unable, &annotate).await.ok())
            })
            .await
            .unwrap();
            let answer = change_owner(&unable, rejected).await.unwrap_err();
            assert!(matches!(&answer, kube::Error::Api(status) if status.code == 403), "{without}: {answer}");
            wait::eventually("the role applies", SOON, async || Ok(change_owner(&able, rejected).await.ok()))
                .await
                .unwrap();
        }
    }
    cluster.shutdown().await;
}

//! Replicas that die, stop or hang, and a webhook that is down.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use haulout_api_types::{Evacuation, NodeMaintenance};
use haulout_e2e::service::{NAMESPACE, Service};
use haulout_e2e::{Cluster, Webhook, objects, wait, webhook};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt as _};
use rustix::process::Signal;
use serde_json::json;

use super::{SOON, ask, cluster};

/// Returns the replica that the API server uses first.
async fn busiest(replicas: Vec<Service>) -> (Service, Service) {
    let mut counted = Vec::new();
    for replica in replicas {
        counted.push((replica.metric("haulout_admission_requests_total").await.unwrap(), replica));
    }
    counted.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    let mut replicas = counted.into_iter().map(|(_, replica)| replica);
    let (less, more) = (replicas.next().unwrap(), replicas.next().unwrap());
    (more, less)
}

#[tokio::test]
async fn requests_succeed_with_one_replica() {
    let cluster = cluster("webhook-replicas").await;
    let webhook = Webhook::install(&cluster, &[]).await.unwrap();
    let replicas =
        vec![webhook.start(&cluster, &[]).await.unwrap(), webhook.start(&cluster, &[]).await.unwrap()];
    Webhook::reachable(&cluster).await.unwrap();
    let api: Api<NodeMaintenance> = Api::all(cluster.client().await.unwrap());
    for _ in 0..50 {
        ask(&api).await.unwrap();
    }
    let (busy, other) = busiest(replicas).await;
    busy.kill().unwrap();
    // Requests in flight at that moment are lost; a second later, none is.
    tokio::time::sleep(Duration::from_secs(1)).await;
    for number in 0..200 {
        ask(&api).await.unwrap_or_else(|error| panic!("request {number} after the kill: {error}"));
    }

    // A replica that stops gracefully loses no request, although new connections arrive for a while.
    let successor = webhook.start(&cluster, &[]).await.unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let asked = Arc::new(AtomicUsize::new(0));
    let load = tokio::spawn({
        let (api, over, asked) = (api.clone(), Arc::clone(&over), Arc::clone(&asked));
        async move {
            while !over.load(Ordering::Relaxed) {
                ask(&api).await.expect("a request during the stop");
                asked.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    other.signal(Signal::TERM).unwrap();
    wait::eventually("the replica is not ready", SOON, async || {
        // At the very end, it does not answer at all.
        let answer = other.get("/readyz").await.unwrap_or_default();
        Ok((!answer.starts_with("HTTP/1.1 200 ")).then_some(()))
    })
    .await
    .unwrap();
    webhook.forwarder.remove(webhook::address(&other).unwrap());
    let status = tokio::time::timeout(SOON, other.exited()).await.expect("it ends");
    assert!(status.success(), "{status}");
    let before = asked.load(Ordering::Relaxed);
    wait::eventually("the successor serves", SOON, async || {
        assert!(!load.is_finished(), "a request failed: see above");
        Ok((asked.load(Ordering::Relaxed) > before + 50).then_some(()))
    })
    .await
    .unwrap();
    over.store(true, Ordering::Relaxed);
    load.await.unwrap();
    assert!(successor.metric("haulout_admission_requests_total").await.unwrap() > 0.0);
    drop(successor);
    cluster.shutdown().await;
}

#[tokio::test]
async fn only_foreign_writes_fail_without_the_webhook() {
    let cluster = Cluster::builder().name("webhook-down").boot().await.unwrap();
    let client = cluster.client().await.unwrap();
    let (_webhook, replica) = Webhook::with_replica(&cluster).await.unwrap();
    let nodes: Api<Node> = Api::all(client.clone());
    nodes.create(&PostParams::default(), &objects::node("down-1").build()).await.unwrap();
    let namespaces: Api<Namespace> = Api::all(client.clone());
    namespaces.create(&PostParams::default(), &objects::namespace("down")).await.unwrap();
    let pods: Api<Pod> = Api::namespaced(client.clone(), "down");
    let kubectl = async |args: &[&str]| cluster.kubectl(args).await.unwrap().success();
    let create_pod = async |name: &str| {
        let pod = objects::pod(name).namespace("down").node("down-1").grace(0);
        let annotated = pod.annotation("evacuation.coordination.k8s.io/priority_a.example.com", "10/guest");
        pods.create(&PostParams::default(), &annotated.build()).await.unwrap()
    };
    wait::eventually("pods can be created", SOON, async || {
        let accounts: Api<k8s_openapi::api::core::v1::ServiceAccount> =
            Api::namespaced(client.clone(), "down");
        Ok(accounts.get_opt("default").await?.map(|_| ()))
    })
    .await
    .unwrap();

    let pod = create_pod("web-1").await;
    let evacuation = format!("{}-web-1", pod.uid().unwrap());
    let object = json!({
        "apiVersion": "evacuation.coordination.k8s.io/v1alpha1",
        "kind": "Evacuation",
        "metadata": {
            "name": evacuation, "namespace": "down",
            "finalizers": ["evacuation.coordination.k8s.io/instigator_test.example.com"]
        },
        "spec": {"podRef": {"name": "web-1", "uid": pod.uid().unwrap()}, "progressDeadlineSeconds": 600}
    });
    cluster.kubectl_with(&["create", "-f", "-"], &object.to_string()).await.unwrap().success().unwrap();

    let account =
        cluster.service_account_kubeconfig(NAMESPACE, "haulout-evacuation-controller").await.unwrap();
    let own = cluster.client_from(&account, "haulout-evacuation-controller").await.unwrap();
    let own: Api<Evacuation> = Api::namespaced(own, "down");

    // First the webhook hangs, then it is down.
    for how in ["hangs", "is gone"] {
        if how == "hangs" {
            replica.pause().unwrap();
        } else {
            replica.kill().unwrap();
        }
        let error = ask(&Api::all(client.clone())).await.unwrap_err().to_string();
        assert!(error.contains("failed calling webhook"), "it {how}: {error}");
        let annotate = ["annotate", "-n", "down", "evacuation", &evacuation, "--overwrite"];
        kubectl(&[annotate.as_slice(), &["note=a"]].concat()).await.unwrap_err();

        create_pod("web-2").await;
        let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "web-2"}});
        let eviction: k8s_openapi::api::policy::v1::Eviction = serde_json::from_value(eviction).unwrap();
        let _: kube::core::Status = pods
            .create_subresource("eviction", "web-2", &PostParams::default(), &eviction)
            .await
            .unwrap_or_else(|error| panic!("it {how}: {error}"));
        wait::gone(pods.clone(), "web-2", SOON).await.unwrap();
        create_pod("web-3").await;
        pods.delete("web-3", &DeleteParams::default()).await.unwrap();
        wait::gone(pods.clone(), "web-3", SOON).await.unwrap();
        kubectl(&["cordon", "down-1"]).await.unwrap();
        kubectl(&["uncordon", "down-1"]).await.unwrap();

        // Our own controllers continue: their writes bypass the webhook.
        let counter = json!({"status": {"failedEvictionCounter": if how == "hangs" { 1 } else { 2 }}});
        own.patch_status(&evacuation, &PatchParams::default(), &Patch::Merge(counter)).await.unwrap();
    }

    // The namespace is deleted with its Evacuation, whose finalizer our controller removes.
    kubectl(&["delete", "namespace", "down", "--wait=false"]).await.unwrap();
    let release = json!({"metadata": {"finalizers": null}});
    own.patch(&evacuation, &PatchParams::default(), &Patch::Merge(release)).await.unwrap();
    wait::gone(namespaces, "down", 2 * SOON).await.unwrap();
    cluster.shutdown().await;
}

//! Tests of the test cluster itself, which tests, benchmarks and the demo use.

use std::process::Command;
use std::time::Duration;

use haulout_e2e::soak::{Victim, kill_in_demo};
use haulout_e2e::{Cluster, Component, Kubernetes, objects, wait};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, Pod, ServiceAccount};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::support::{shared, xtask};

const SOON: Duration = Duration::from_secs(60);

fn phase(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.phase.as_deref()
}

fn condition<'a>(node: &'a Node, kind: &str) -> Option<&'a str> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == kind).map(|condition| condition.status.as_str())
}

#[tokio::test]
async fn cluster_runs_the_chosen_kubernetes_version() {
    let cluster = shared().await;
    let chosen = Kubernetes::chosen().unwrap().to_string();
    let server = cluster.client().await.unwrap().apiserver_version().await.unwrap();
    assert_eq!(server.git_version, chosen);
    let kubectl = cluster.kubectl(&["version", "--output", "json"]).await.unwrap().success().unwrap();
    let versions: serde_json::Value = serde_json::from_str(&kubectl).unwrap();
    assert_eq!(versions["clientVersion"]["gitVersion"], chosen.as_str());
    for program in ["kube-apiserver", "kube-controller-manager", "kube-scheduler"] {
        let output = Command::new(cluster.tools.path(program)).arg("--version").output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), format!("Kubernetes {chosen}"));
    }
}

#[tokio::test]
async fn killing_xtask_leaves_no_process_behind() {
    kill_in_demo(&xtask(), Victim::Xtask).await.unwrap();
}

#[tokio::test]
async fn killed_component_ends_the_cluster_with_an_error() {
    kill_in_demo(&xtask(), Victim::Component(Component::Etcd)).await.unwrap();
}

const ON_PURPOSE: &str = "HAULOUT_FAIL_ON_PURPOSE";

/// Not a test itself: the next test runs it, and it fails on request.
#[tokio::test]
async fn fails_on_purpose() {
    if std::env::var_os(ON_PURPOSE).is_some() {
        let _cluster = Cluster::builder().name("purpose").boot().await.unwrap();
        panic!("on purpose");
    }
}

#[test]
fn failed_test_keeps_only_its_logs() {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["harness::fails_on_purpose", "--exact", "--nocapture"])
        .env(ON_PURPOSE, "1")
        .env("TMPDIR", folder.path())
        .output()
        .unwrap();
    assert!(!output.status.success());
    let mut left: Vec<_> = walk(folder.path());
    left.sort();
    let logs: Vec<_> = Component::ALL.iter().map(|component| format!("{component}.log")).collect();
    let names: Vec<_> =
        left.iter().map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect();
    assert!(logs.iter().all(|log| names.contains(log)), "{names:?}");
    assert!(left.iter().all(|path| path.extension().is_some_and(|extension| extension == "log")), "{left:?}");
    let place = left[0].parent().unwrap().display().to_string();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains(&place), "{place} is missing in: {said}");
}

fn walk(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}

#[tokio::test]
async fn clusters_run_side_by_side_and_survive_restarts() {
    let (left, right) = tokio::join!(
        Cluster::builder().name("left").scheduler(false).kwok(false).boot(),
        Cluster::builder().name("right").scheduler(false).kwok(false).boot()
    );
    let (left, right) = (left.unwrap(), right.unwrap());
    let namespaces: Api<Namespace> = Api::all(left.client().await.unwrap());
    namespaces.create(&PostParams::default(), &objects::namespace("only-left")).await.unwrap();
    let others: Api<Namespace> = Api::all(right.client().await.unwrap());
    assert!(others.get_opt("only-left").await.unwrap().is_none());

    left.stop(Component::ApiServer).await.unwrap();
    assert!(!left.is_running(Component::ApiServer));
    namespaces.get("only-left").await.expect_err("nobody listens");
    others.get("default").await.expect("the other cluster is unaffected");
    left.start(Component::ApiServer).await.unwrap();
    namespaces.get("only-left").await.unwrap();

    left.kill(Component::Etcd).await.unwrap();
    left.start(Component::Etcd).await.unwrap();
    wait::eventually("the API server reaches etcd again", SOON, async || {
        Ok(namespaces.get("only-left").await.ok())
    })
    .await
    .unwrap();
    let roots = [left.root.clone(), right.root.clone()];
    left.shutdown().await;
    right.shutdown().await;
    assert!(roots.iter().all(|root| !root.exists()), "a cluster removes its folder");
}

#[tokio::test]
async fn simulated_nodes_run_pods() {
    let cluster = shared().await;
    let client = cluster.client().await.unwrap();
    let nodes: Api<Node> = Api::all(client.clone());
    for node in [objects::node("kwok-1"), objects::node("kwok-real").unmanaged()] {
        nodes.create(&PostParams::default(), &node.label("test", "kwok").build()).await.unwrap();
    }
    wait::present(nodes.clone(), "kwok-1", "is Ready", SOON, |node| condition(node, "Ready") == Some("True"))
        .await
        .unwrap();
    let real = nodes.get("kwok-real").await.unwrap();
    assert_ne!(condition(&real, "Ready"), Some("True"), "KWOK manages only nodes with its annotation");

    let deployments: Api<Deployment> = Api::default_namespaced(client.clone());
    let deployment = objects::deployment("kwok-web")
        .replicas(3)
        .pods(|pod| pod.with(|spec| spec.node_selector = Some([("test".into(), "kwok".into())].into())))
        .build();
    deployments.create(&PostParams::default(), &deployment).await.unwrap();
    wait::present(deployments.clone(), "kwok-web", "is available", SOON, |deployment| {
        deployment.status.as_ref().and_then(|status| status.available_replicas) == Some(3)
    })
    .await
    .unwrap();

    let pods: Api<Pod> = Api::default_namespaced(client);
    for pod in [
        objects::pod("kwok-plain"),
        objects::pod("kwok-not-ready").not_ready(),
        objects::pod("kwok-held").finalizer("example.com/hold"),
        objects::pod("kwok-slow").delete_delay(3),
    ] {
        pods.create(&PostParams::default(), &pod.node("kwok-1").build()).await.unwrap();
    }
    let ready = |pod: &Pod| {
        let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
        conditions.is_some_and(|all| all.iter().any(|c| c.type_ == "Ready" && c.status == "True"))
    };
    for (name, expected) in
        [("kwok-plain", true), ("kwok-not-ready", false), ("kwok-held", true), ("kwok-slow", true)]
    {
        wait::present(pods.clone(), name, "runs", SOON, |pod| {
            phase(pod) == Some("Running") && ready(pod) == expected
        })
        .await
        .unwrap();
    }
    for name in ["kwok-plain", "kwok-held", "kwok-slow"] {
        pods.delete(name, &DeleteParams::default()).await.unwrap();
    }
    wait::gone(pods.clone(), "kwok-plain", SOON).await.unwrap();
    let slow = pods.get("kwok-slow").await.expect("the pod terminates slowly");
    assert!(slow.metadata.deletion_timestamp.is_some());
    wait::gone(pods.clone(), "kwok-slow", SOON).await.unwrap();
    let held = pods.get("kwok-held").await.expect("a foreign finalizer is respected");
    assert_eq!(held.metadata.finalizers.unwrap(), ["example.com/hold"]);
    let free = json!({"metadata": {"finalizers": null}});
    pods.patch("kwok-held", &PatchParams::default(), &Patch::Merge(free)).await.unwrap();
    wait::gone(pods.clone(), "kwok-held", SOON).await.unwrap();
    deployments.delete("kwok-web", &DeleteParams::default()).await.unwrap();
    for name in ["kwok-1", "kwok-real"] {
        nodes.delete(name, &DeleteParams::default()).await.unwrap();
    }
}

#[tokio::test]
async fn built_in_taint_eviction_can_be_disabled() {
    let tainted = |name: &str| objects::node(name).taint("example.com/out", "", "NoExecute").build();
    let put = async |cluster: &haulout_e2e::Handle| {
        let client = cluster.client().await.unwrap();
        let nodes: Api<Node> = Api::all(client.clone());
        nodes.create(&PostParams::default(), &tainted("taint-1")).await.unwrap();
        let pods: Api<Pod> = Api::default_namespaced(client);
        pods.create(&PostParams::default(), &objects::pod("taint-1").node("taint-1").build()).await.unwrap();
        pods
    };
    let ours = Cluster::builder().name("no-taint-eviction").taint_eviction(false).boot().await.unwrap();
    let pods = put(&ours).await;
    let theirs = shared().await;
    wait::gone(put(&theirs).await, "taint-1", SOON).await.expect("kube-controller-manager evicts by default");
    let pod =
        wait::present(pods, "taint-1", "runs", SOON, |pod| phase(pod) == Some("Running")).await.unwrap();
    assert_eq!(pod.metadata.deletion_timestamp, None);
    let log = std::fs::read_to_string(ours.component_log(Component::ControllerManager)).unwrap();
    let disabled =
        log.lines().any(|line| line.contains("disabled") && line.contains("taint-eviction-controller"));
    assert!(disabled, "kube-controller-manager does not log that the controller is disabled");
    theirs.kubectl(&["delete", "node", "taint-1"]).await.unwrap().success().unwrap();
    ours.shutdown().await;
}

#[tokio::test]
async fn requests_are_counted_by_user_agent_and_verb() {
    let cluster = shared().await;
    let agent = "haulout-counted/1.0";
    let maps: Api<ConfigMap> = Api::default_namespaced(cluster.client_as(agent).await.unwrap());
    let mark = cluster.requests_mark().unwrap();
    let map: ConfigMap = serde_json::from_value(json!({"metadata": {"name": "counted"}})).unwrap();
    maps.create(&PostParams::default(), &map).await.unwrap();
    for number in 0..3 {
        let patch = Patch::Merge(json!({"data": {"number": number.to_string()}}));
        maps.patch("counted", &PatchParams::default(), &patch).await.unwrap();
    }
    maps.list(&ListParams::default()).await.unwrap();
    maps.delete("counted", &DeleteParams::default()).await.unwrap();
    let requests = cluster.requests_since(mark).unwrap().by_user_agent("haulout-counted");
    let count = |verb: &str| requests.verb(verb).count();
    assert_eq!(["create", "patch", "list", "delete"].map(count), [1, 3, 1, 1]);
    assert_eq!((requests.writes().count(), requests.resource("configmaps", "").count()), (5, 6));
    assert_eq!(cluster.requests_since(mark).unwrap().by_user_agent("nobody").count(), 0);
}

#[tokio::test]
async fn service_account_has_only_its_own_permissions() {
    let cluster = shared().await;
    let client = cluster.client().await.unwrap();
    let namespaces: Api<Namespace> = Api::all(client.clone());
    namespaces.create(&PostParams::default(), &objects::namespace("accounts")).await.unwrap();
    let accounts: Api<ServiceAccount> = Api::namespaced(client, "accounts");
    let account = serde_json::from_value(json!({"metadata": {"name": "service"}})).unwrap();
    accounts.create(&PostParams::default(), &account).await.unwrap();
    let bind = [
        "create",
        "rolebinding",
        "service",
        "-n",
        "accounts",
        "--clusterrole=view",
        "--serviceaccount=accounts:service",
    ];
    cluster.kubectl(&bind).await.unwrap().success().unwrap();
    let config = cluster.service_account_kubeconfig("accounts", "service").await.unwrap();
    let as_service = cluster.client_from(&config, "haulout-service").await.unwrap();
    let pods: Api<Pod> = Api::namespaced(as_service, "accounts");
    wait::eventually("the binding applies", SOON, async || Ok(pods.list(&ListParams::default()).await.ok()))
        .await
        .unwrap();
    let rejection = pods
        .create(&PostParams::default(), &objects::pod("x").namespace("accounts").build())
        .await
        .unwrap_err();
    assert!(rejection.to_string().contains("system:serviceaccount:accounts:service"), "{rejection}");
    cluster.kubectl(&["delete", "namespace", "accounts", "--wait=false"]).await.unwrap().success().unwrap();
}

#[tokio::test]
async fn failed_wait_prints_the_object() {
    let cluster = shared().await;
    let namespaces: Api<Namespace> = Api::all(cluster.client().await.unwrap());
    let wait = wait::present(namespaces, "default", "is purple", Duration::from_secs(5), |_| false);
    let message = format!("{:#}", wait.await.unwrap_err());
    assert!(message.contains("Namespace default is purple"), "{message}");
    assert!(message.contains("kubernetes.io/metadata.name: default"), "{message}");
}

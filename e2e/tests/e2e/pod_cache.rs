//! The slim pod cache with the real API server: after any event, it holds exactly what the API has, and it has
//! reported every gap.

mod churn;
mod fields;

use std::collections::BTreeMap;
use std::time::Duration;

use haulout_e2e::etcd::Etcd;
use haulout_e2e::{Cluster, Component, Handle, objects, wait};
use haulout_service_runtime::metrics::Metrics;
use haulout_service_runtime::pods::{PodCache, Subscription, Uid};
use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use kube::Api;
use kube::api::{ListParams, PostParams};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

const SOON: Duration = Duration::from_secs(60);

/// A cluster in which only the test changes pods.
async fn boot(name: &str) -> Cluster {
    Cluster::builder()
        .name(name)
        .scheduler(false)
        .kwok(false)
        .audit(false)
        .extra_args(Component::ControllerManager, ["--controllers=serviceaccount-controller"])
        .boot()
        .await
        .unwrap()
}

async fn namespace(cluster: &Handle, name: &str) {
    let client = cluster.client().await.unwrap();
    let namespaces: Api<Namespace> = Api::all(client.clone());
    namespaces.create(&PostParams::default(), &objects::namespace(name)).await.unwrap();
    let accounts: Api<ServiceAccount> = Api::namespaced(client, name);
    wait::until(accounts, "default", "exists", SOON, |account| account.is_some()).await.unwrap();
}

/// All pods of the API, with the fields that the cache keeps.
async fn in_the_api(cluster: &Handle) -> BTreeMap<String, Value> {
    let pods: Api<Pod> = Api::all(cluster.client().await.unwrap());
    let pods = pods.list(&ListParams::default()).await.unwrap();
    pods.items.iter().map(|pod| (pod.metadata.uid.clone().unwrap(), fields::of_api(pod))).collect()
}

fn in_the_cache(cache: &PodCache) -> BTreeMap<String, Value> {
    let index = cache.read();
    for pod in index.iter() {
        assert_eq!(index.find(&pod.namespace, &pod.name).map(|pod| pod.uid), Some(pod.uid));
        let on_node = |node: &str| index.on_node(node).iter().any(|other| other.uid == pod.uid);
        assert!(pod.node.as_deref().is_none_or(on_node), "{} is not on its node", pod.name);
    }
    index.iter().map(|pod| (pod.uid.to_string(), fields::of_cache(pod))).collect()
}

/// Waits until the cache has caught up with the API, in which nothing changes any more.
async fn until_equal(cluster: &Handle, cache: &PodCache) {
    let expected = in_the_api(cluster).await;
    let equal = wait::eventually("the cache equals the API", SOON, async || {
        Ok((in_the_cache(cache) == expected).then_some(()))
    });
    if equal.await.is_err() {
        let actual = in_the_cache(cache);
        for uid in expected.keys().chain(actual.keys()) {
            assert_eq!(actual.get(uid), expected.get(uid), "pod {uid}");
        }
    }
}

/// Reads a subscription slowly and stores what it delivers.
fn follow(mut changes: Subscription) -> JoinHandle<()> {
    tokio::spawn(async move {
        let mut known: BTreeMap<Uid, _> = BTreeMap::new();
        loop {
            for change in changes.changes().await {
                let uid = change.pod().unwrap().uid;
                let before = known.remove(&uid);
                assert_eq!(before.is_some(), change.old.is_some(), "changes of pod {uid} are out of order");
                known.extend(change.new.map(|pod| (uid, pod)));
            }
            if known.values().any(|pod| &*pod.name == "stop") {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let received: Vec<_> = known.values().map(|pod| fields::without_version(pod)).collect();
        let held: BTreeMap<_, _> = changes.cache().read().iter().map(|pod| (pod.uid, pod.clone())).collect();
        assert_eq!(received, held.values().map(|pod| fields::without_version(pod)).collect::<Vec<_>>());
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn cache_equals_api_after_changes_and_outage() {
    equal_after(3_000).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "slow"]
async fn cache_equals_api_after_20_000_changes() {
    equal_after(20_000).await;
}

/// Makes this many random changes, and restarts the API server halfway.
async fn equal_after(changes: usize) {
    let cluster = boot("pod-cache").await;
    for name in ["shop", "batch"] {
        namespace(&cluster, name).await;
    }
    let metrics = Metrics::new("test", "0");
    let cache = PodCache::with_page_size(cluster.client().await.unwrap(), metrics.clone(), 50);
    cache.ready().await;
    let follower = follow(cache.subscribe());
    let mut churn = churn::Churn::start(&cluster, changes).await;
    churn.until(changes / 2).await;
    cluster.restart(Component::ApiServer).await.unwrap();
    churn.finish().await;
    until_equal(&cluster, &cache).await;
    let continuity = cache.continuity();
    assert!(continuity.gaps >= 1, "the restart of the API server was not reported as a gap: {continuity:?}");
    assert!(continuity.gap_since.is_none() && continuity.last_gap_ended.is_some(), "{continuity:?}");
    assert!(metrics.watch_restarts("pods") >= 1);
    assert!(cache.read().len() > 100, "too few pods are left to compare: {}", cache.read().len());

    // The follower compares what it received with the cache once it has received this pod.
    let pods: Api<Pod> = Api::default_namespaced(cluster.client().await.unwrap());
    pods.create(&PostParams::default(), &objects::pod("stop").build()).await.unwrap();
    tokio::time::timeout(SOON, follower).await.expect("the follower did not receive the last pod").unwrap();
    cluster.shutdown().await;
}

/// While the API server is down, pods are created and deleted in etcd, and the history is compacted.
#[tokio::test(flavor = "multi_thread")]
async fn cache_equals_api_after_version_expired() {
    let cluster = boot("pod-cache-expired").await;
    let pods: Api<Pod> = Api::default_namespaced(cluster.client().await.unwrap());
    for n in 0..20 {
        let pod =
            objects::pod(&format!("pod-{n}")).node(&format!("node-{}", n % 3)).label("n", &n.to_string());
        pods.create(&PostParams::default(), &pod.build()).await.unwrap();
    }
    let cache = PodCache::with_page_size(cluster.client().await.unwrap(), Metrics::new("test", "0"), 7);
    cache.ready().await;
    until_equal(&cluster, &cache).await;
    let mut changes = cache.subscribe();
    assert_eq!(changes.changes().await.len(), 20);
    let mut continuity = cache.watch_continuity();
    let template = serde_json::to_value(pods.get("pod-19").await.unwrap()).unwrap();

    cluster.stop(Component::ApiServer).await.unwrap();
    let began = tokio::time::timeout(SOON, continuity.wait_for(|now| now.gap_since.is_some())).await;
    assert_eq!(began.expect("no gap was reported").unwrap().gaps, 1);
    let etcd = cluster.etcd().unwrap();
    for n in 0..5 {
        etcd.delete(Etcd::pod_key("default", &format!("pod-{n}"))).await.unwrap();
    }
    // One pod is new, and one has the name of a deleted pod.
    for (name, uid) in
        [("new", "00000000-0000-4000-8000-000000000001"), ("pod-5", "00000000-0000-4000-8000-000000000002")]
    {
        let mut pod = template.clone();
        pod["metadata"]["name"] = json!(name);
        pod["metadata"]["uid"] = json!(uid);
        pod["metadata"].as_object_mut().unwrap().remove("resourceVersion");
        etcd.put(vec![(Etcd::pod_key("default", name), pod.to_string().into_bytes())]).await.unwrap();
    }
    etcd.compact().await.unwrap();
    cluster.start(Component::ApiServer).await.unwrap();

    let ended = tokio::time::timeout(SOON, continuity.wait_for(|now| now.gap_since.is_none())).await;
    assert!(ended.expect("the gap has no end").unwrap().last_gap_ended.is_some());
    assert_eq!((cache.relists(), cache.continuity().gaps), (1, 1), "the version has not expired");
    until_equal(&cluster, &cache).await;
    let received = changes.changes().await;
    let (gone, new): (Vec<_>, Vec<_>) = received.iter().partition(|change| change.new.is_none());
    assert_eq!((gone.len(), new.len()), (6, 2), "{received:?}");
    cluster.shutdown().await;
}

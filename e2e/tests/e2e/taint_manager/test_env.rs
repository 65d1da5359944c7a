//! Helpers for tests of the taint manager: a cluster, its nodes, pods and taints.

use std::time::Duration;

use haulout_api_types::names::TAINTS_FIRST_SEEN_ANNOTATION;
use haulout_e2e::objects::{self, PodBuilder};
use haulout_e2e::{Builder, Cluster, Service, wait};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use k8s_openapi::api::events::v1::Event;
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, Client};
use serde_json::{Value, json};

pub const SOON: Duration = Duration::from_secs(60);
pub const NAMESPACE: &str = "shop";
/// A finalizer that keeps a deleted pod visible.
pub const HOLD: &str = "example.com/hold";

/// A cluster with the chart and a namespace.
pub struct TestEnv {
    pub cluster: Cluster,
    pub client: Client,
}

impl TestEnv {
    pub async fn boot(cluster: Builder) -> Self {
        let cluster = cluster.boot().await.unwrap();
        cluster.install_chart(&[("taintManager.enabled", "true")]).await.unwrap();
        let client = cluster.client().await.unwrap();
        let namespaces: Api<Namespace> = Api::all(client.clone());
        namespaces.create(&PostParams::default(), &objects::namespace(NAMESPACE)).await.unwrap();
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), NAMESPACE);
        wait::until(accounts, "default", "exists", SOON, |account| account.is_some()).await.unwrap();
        Self { cluster, client }
    }

    /// A leading replica without a grace period after watch gaps.
    pub async fn serve(&self, args: &[&str]) -> Service {
        let service = self.replica(&[&["--watch-gap-grace-seconds", "0"], args].concat()).await;
        service.leads().await.unwrap();
        service
    }

    /// A replica whose Lease does not expire on a busy machine.
    pub async fn replica(&self, args: &[&str]) -> Service {
        self.replica_with_lease("30", args).await
    }

    pub async fn replica_with_lease(&self, seconds: &str, args: &[&str]) -> Service {
        let args = [&["--lease-seconds", seconds], args].concat();
        Service::start(&self.cluster, "taint-manager", &args).await.unwrap()
    }

    pub async fn node(&self, name: &str) {
        let nodes: Api<Node> = Api::all(self.client.clone());
        nodes.create(&PostParams::default(), &objects::node(name).build()).await.unwrap();
    }

    pub async fn taint(&self, node: &str, taints: Value) {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let patch = Patch::Merge(json!({"spec": {"taints": taints}}));
        // Not everything that the API server accepts can be parsed.
        nodes.patch_metadata(node, &PatchParams::default(), &patch).await.unwrap();
    }

    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// Creates a pod and waits until it runs.
    pub async fn run(&self, pod: PodBuilder) {
        let pod = pod.namespace(NAMESPACE).build();
        let created = self.pods().create(&PostParams::default(), &pod).await.unwrap();
        let running = |pod: &Pod| pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running");
        let name = created.metadata.name.unwrap();
        wait::present(self.pods(), &name, "runs", SOON, running).await.unwrap();
    }

    /// Waits until the pod is terminating.
    pub async fn leaves(&self, name: &str) -> Pod {
        let leaves = |pod: &Pod| pod.metadata.deletion_timestamp.is_some();
        wait::present(self.pods(), name, "is deleted", SOON, leaves).await.unwrap()
    }

    pub async fn stays(&self, name: &str) {
        let pod = self.pods().get(name).await.unwrap();
        assert_eq!(pod.metadata.deletion_timestamp, None, "{name}");
    }

    pub async fn event(&self, reason: &str, note: &str) {
        self.event_that(reason, note, |_| true).await;
    }

    /// Equal events are combined into one series with a count.
    pub async fn event_repeated(&self, reason: &str, note: &str) {
        self.event_that(reason, note, |event| event.series.as_ref().is_some_and(|series| series.count > 1))
            .await;
    }

    async fn event_that(&self, reason: &str, note: &str, has: impl Fn(&Event) -> bool) {
        let api: Api<Event> = Api::namespaced(self.client.clone(), NAMESPACE);
        let found = |events: &[Event]| {
            events.iter().any(|event| {
                event.reason.as_deref() == Some(reason)
                    && event.note.as_deref().is_some_and(|said| said.contains(note))
                    && has(event)
            })
        };
        wait::all(api, watcher::Config::default(), note, SOON, found).await.unwrap();
    }

    /// Waits until taint times are recorded on a node. Returns them.
    pub async fn recorded_taint_times(&self, node: &str) -> String {
        let mut kept = None;
        self.first_seen(node, "has a recorded taint", |text| {
            kept = text.cloned();
            kept.is_some()
        })
        .await;
        kept.unwrap()
    }

    /// The API server records taint changes to the second: waits until the next change has another time.
    pub async fn next_second(&self) {
        let now = Timestamp::now().as_second();
        let later = wait::eventually("the second is over", SOON, async || {
            Ok((Timestamp::now().as_second() > now).then_some(()))
        });
        later.await.unwrap();
    }

    pub async fn first_seen(
        &self,
        node: &str,
        what: &str,
        mut expected: impl FnMut(Option<&String>) -> bool,
    ) {
        let api: Api<Node> = Api::all(self.client.clone());
        let annotation = |node: &Node| {
            expected(node.metadata.annotations.as_ref().and_then(|all| all.get(TAINTS_FIRST_SEEN_ANNOTATION)))
        };
        wait::present(api, node, what, SOON, annotation).await.unwrap();
    }
}

pub fn pod(name: &str, node: &str) -> PodBuilder {
    objects::pod(name).node(node)
}

pub fn taint(key: &str) -> Value {
    json!([{"key": key, "effect": "NoExecute"}])
}

/// Waits until a metric has reached this value.
pub async fn at_least(service: &Service, metric: &str, least: f64) {
    wait::eventually(&format!("{metric} is at least {least}"), SOON, async || {
        Ok((service.metric(metric).await? >= least).then_some(()))
    })
    .await
    .unwrap();
}

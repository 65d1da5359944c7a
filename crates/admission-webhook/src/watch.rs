//! What the rules know of the cluster: pods, nodes, maintenances and drain rules, kept up to date by watches.

use std::sync::Arc;

use haulout_api_types::{DrainRule, NodeMaintenance};
use haulout_service_runtime::metrics::Metrics;
use haulout_service_runtime::pods::{self, Pod, PodCache};
use haulout_service_runtime::service::Context;
use haulout_service_runtime::term::Term;
use haulout_service_runtime::watch::{Source, Store};
use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::core::PartialObjectMeta;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

/// What is known of the cluster.
pub struct World {
    client: Client,
    pods: PodCache,
    nodes: Arc<Store<PartialObjectMeta<Node>>>,
    maintenances: Arc<Store<NodeMaintenance>>,
    drain_rules: Arc<Store<DrainRule>>,
    looked_up: Family<ResultLabel, Counter>,
}

impl World {
    /// Starts to watch. The service is ready once all of it has been listed.
    pub fn start(context: &Context, term: &mut Term) -> Self {
        const CACHES: &str = "caches";
        context.readiness.wait_for(CACHES);
        let world = Self::watch(&context.clients.direct, context.pod_cache(), &context.metrics, term);
        let (nodes, maintenances, rules) =
            (world.nodes.clone(), world.maintenances.clone(), world.drain_rules.clone());
        let (pods, readiness) = (world.pods.clone(), context.readiness.clone());
        term.spawn(async move {
            tokio::join!(pods.ready(), nodes.synced(), maintenances.synced(), rules.synced());
            readiness.done(CACHES);
        });
        world
    }

    /// Starts to watch all but the pods.
    pub fn watch(client: &Client, pods: PodCache, metrics: &Metrics, term: &mut Term) -> Self {
        // Labels alone are read; a node's annotations and field managers are most of its metadata.
        let slim_node = |node: &mut PartialObjectMeta<Node>| {
            node.metadata.annotations = None;
            node.metadata.managed_fields = None;
        };
        let slim_maintenance = |maintenance: &mut NodeMaintenance| {
            maintenance.metadata.managed_fields = None;
            maintenance.spec.drain_plan = Vec::new();
            maintenance.status = None;
        };
        let nodes = Arc::new(Store::new(slim_node, Arc::default()));
        let maintenances = Arc::new(Store::new(slim_maintenance, Arc::default()));
        let drain_rules = Arc::new(Store::default());
        term.watch(Source::all("nodes").metadata_only(), &nodes);
        term.watch(Source::all("nodemaintenances"), &maintenances);
        term.watch(Source::all("drainrules"), &drain_rules);
        let looked_up = Family::default();
        metrics.register(|registry| {
            let help = "Pods that Evacuations are about, by where they were found";
            registry.register("haulout_admission_pod_lookups", help, looked_up.clone());
        });
        Self { client: client.clone(), pods, nodes, maintenances, drain_rules, looked_up }
    }

    /// The pod that has this name now. The cache is believed if it has the pod that is meant; it can be behind
    /// in everything else.
    pub async fn pod(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
    ) -> Result<Option<Arc<Pod>>, pods::FetchError> {
        let current = self.pods.continuity().gap_since.is_none();
        let cached = current.then(|| self.pods.read().find(namespace, name).cloned()).flatten();
        if let Some(pod) = cached.filter(|pod| pod.uid.to_string() == uid) {
            self.looked_up.get_or_create(&ResultLabel { result: "cached" }).inc();
            return Ok(Some(pod));
        }
        self.live_pod(namespace, name).await
    }

    /// The pod that has this name now, asked for past the cache.
    pub async fn live_pod(&self, namespace: &str, name: &str) -> Result<Option<Arc<Pod>>, pods::FetchError> {
        // Both become parts of a URL, and a mutating webhook sees names before their syntax has been judged.
        if !is_plain(namespace) || !is_plain(name) {
            return Ok(None);
        }
        self.looked_up.get_or_create(&ResultLabel { result: "live" }).inc();
        Ok(Box::pin(pods::fetch(&self.client, namespace, name)).await?.map(Arc::new))
    }

    /// The node with this name.
    pub fn node(&self, name: &str) -> Option<Arc<PartialObjectMeta<Node>>> {
        self.nodes.get(name)
    }

    /// All nodes: their names and labels.
    pub async fn nodes(&self) -> Vec<Arc<PartialObjectMeta<Node>>> {
        listed(&self.nodes).await
    }

    /// All maintenances that can be read, without plan and status.
    pub async fn maintenances(&self) -> Vec<Arc<NodeMaintenance>> {
        listed(&self.maintenances).await
    }

    /// All drain rules that can be read.
    pub async fn drain_rules(&self) -> Vec<Arc<DrainRule>> {
        listed(&self.drain_rules).await
    }
}

fn is_plain(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(plain)
}

/// An empty store is no answer before the first list.
async fn listed<K>(store: &Store<K>) -> Vec<Arc<K>> {
    store.synced().await;
    store.all()
}

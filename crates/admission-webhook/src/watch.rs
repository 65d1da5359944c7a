//! Watches pods, nodes, maintenances and drain rules. Each kind has a cache that the rules read.

use std::sync::Arc;

use haulout_api_types::evacuation::LocalPodReference;
use haulout_api_types::{DrainRule, NodeMaintenance};
use haulout_service_runtime::pods::{Pod, PodCache};
use haulout_service_runtime::service::Context;
use haulout_service_runtime::term::Term;
use haulout_service_runtime::watch::{Source, Store};
use k8s_openapi::api::core::v1::Node;
use kube::core::PartialObjectMeta;

use crate::metrics::Metrics;

/// The caches. Clones share them.
#[derive(Clone)]
pub struct Caches {
    pods: PodCache,
    /// Names and labels of nodes.
    pub nodes: Arc<Store<PartialObjectMeta<Node>>>,
    /// Readable maintenances, without plan and status.
    pub maintenances: Arc<Store<NodeMaintenance>>,
    /// Readable drain rules.
    pub drain_rules: Arc<Store<DrainRule>>,
    metrics: Metrics,
}

impl Caches {
    /// Starts the watches. The service is ready after all of them have synced.
    pub fn start(context: &Context, term: &mut Term, metrics: Metrics) -> Self {
        const CACHES: &str = "caches";
        context.readiness.wait_for(CACHES);
        // Only labels are read. Annotations and managed fields are most of a node's metadata.
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
        let pods = context.pod_cache();
        term.watch(Source::all("nodes").metadata_only(), &nodes);
        term.watch(Source::all("nodemaintenances"), &maintenances);
        term.watch(Source::all("drainrules"), &drain_rules);
        let caches = Self { pods, nodes, maintenances, drain_rules, metrics };
        let (all, readiness) = (caches.clone(), context.readiness.clone());
        term.spawn(async move {
            all.pods.ready().await;
            tokio::join!(all.nodes.synced(), all.maintenances.synced(), all.drain_rules.synced());
            readiness.done(CACHES);
        });
        caches
    }

    /// The referenced pod, if the cache has it and its watch has no gap.
    pub fn pod(&self, namespace: &str, wanted: &LocalPodReference) -> Option<Arc<Pod>> {
        let current = self.pods.continuity().gap_since.is_none();
        let cached = current.then(|| self.pods.read().find(namespace, &wanted.name).cloned()).flatten();
        cached.filter(|pod| pod.uid.to_string() == wanted.uid).inspect(|_| self.metrics.pod_lookup("cached"))
    }
}

//! What the rules know of the cluster: pods, nodes, maintenances and drain rules, kept up to date by watches.

use std::sync::Arc;

use futures::{Stream, StreamExt as _};
use haulout_api_types::{DrainRule, NodeMaintenance};
use haulout_service_runtime::metrics::Metrics;
use haulout_service_runtime::pods::{self, Pod, PodCache};
use haulout_service_runtime::service::Context;
use k8s_openapi::api::core::v1::Node;
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::reflector::{self, Lookup, ObjectRef, Store};
use kube::runtime::watcher::{self, Event, watcher};
use kube::runtime::{WatchStreamExt as _, reflector as reflect};
use kube::{Api, Client};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

/// What is known of the cluster. Its watches end with it.
pub struct World {
    client: Client,
    pods: PodCache,
    nodes: Store<PartialObjectMeta<Node>>,
    maintenances: Store<DeserializeGuard<NodeMaintenance>>,
    drain_rules: Store<DeserializeGuard<DrainRule>>,
    looked_up: Family<ResultLabel, Counter>,
    _watches: Vec<AbortOnDropHandle<()>>,
}

impl World {
    /// Starts to watch. The service is ready once all of it has been listed.
    pub fn start(context: &Context) -> Self {
        const CACHES: &str = "caches";
        context.readiness.wait_for(CACHES);
        let world = Self::watch(&context.clients.direct, context.pod_cache(), &context.metrics);
        let (nodes, maintenances, rules) =
            (world.nodes.clone(), world.maintenances.clone(), world.drain_rules.clone());
        let (pods, readiness) = (world.pods.clone(), context.readiness.clone());
        tokio::spawn(async move {
            pods.ready().await;
            let listed = tokio::join!(
                nodes.wait_until_ready(),
                maintenances.wait_until_ready(),
                rules.wait_until_ready()
            );
            if matches!(listed, (Ok(()), Ok(()), Ok(()))) {
                readiness.done(CACHES);
            }
        });
        world
    }

    /// Starts to watch all but the pods with this client, which should not retry by itself.
    pub(super) fn watch(client: &Client, pods: PodCache, metrics: &Metrics) -> Self {
        let everything = watcher::Config::default;
        // Labels alone are read; a node's annotations and field managers are most of its metadata.
        let all_nodes =
            watcher(Api::<PartialObjectMeta<Node>>::all(client.clone()), everything()).modify(|node| {
                node.metadata.annotations = None;
                node.metadata.managed_fields = None;
            });
        let all_maintenances =
            watcher(Api::<DeserializeGuard<NodeMaintenance>>::all(client.clone()), everything()).modify(
                |object| {
                    if let Ok(maintenance) = &mut object.0 {
                        maintenance.metadata.managed_fields = None;
                        maintenance.spec.drain_plan = Vec::new();
                        maintenance.status = None;
                    }
                },
            );
        let all_rules = watcher(Api::<DeserializeGuard<DrainRule>>::all(client.clone()), everything());
        let (nodes, node_watch) = keep("nodes", all_nodes, metrics);
        let (maintenances, maintenance_watch) = keep("nodemaintenances", all_maintenances, metrics);
        let (drain_rules, rule_watch) = keep("drainrules", all_rules, metrics);
        let looked_up = Family::default();
        metrics.register(|registry| {
            let help = "Pods that Evacuations are about, by where they were found";
            registry.register("haulout_admission_pod_lookups", help, looked_up.clone());
        });
        let watches = vec![node_watch, maintenance_watch, rule_watch];
        Self { client: client.clone(), pods, nodes, maintenances, drain_rules, looked_up, _watches: watches }
    }

    /// The pod that has this name now. The cache is believed if it has the pod that is meant; it can be behind
    /// in everything else.
    pub async fn pod(&self, namespace: &str, name: &str, uid: &str) -> Result<Option<Arc<Pod>>, pods::Error> {
        let current = self.pods.continuity().gap_since.is_none();
        let cached = current.then(|| self.pods.read().find(namespace, name).cloned()).flatten();
        if let Some(pod) = cached.filter(|pod| pod.uid.to_string() == uid) {
            self.looked_up.get_or_create(&ResultLabel { result: "cached" }).inc();
            return Ok(Some(pod));
        }
        self.live_pod(namespace, name).await
    }

    /// The pod that has this name now, asked for past the cache.
    pub async fn live_pod(&self, namespace: &str, name: &str) -> Result<Option<Arc<Pod>>, pods::Error> {
        // Both become parts of a URL, and a mutating webhook sees names before their syntax has been judged.
        if !is_plain(namespace) || !is_plain(name) {
            return Ok(None);
        }
        self.looked_up.get_or_create(&ResultLabel { result: "live" }).inc();
        Ok(Box::pin(pods::fetch(&self.client, namespace, name)).await?.map(Arc::new))
    }

    /// The node with this name.
    pub fn node(&self, name: &str) -> Option<Arc<PartialObjectMeta<Node>>> {
        self.nodes.get(&ObjectRef::new(name))
    }

    /// All nodes: their names and labels.
    pub async fn nodes(&self) -> Vec<Arc<PartialObjectMeta<Node>>> {
        listed(&self.nodes).await
    }

    /// All maintenances, without plan and status.
    pub async fn maintenances(&self) -> Vec<Arc<DeserializeGuard<NodeMaintenance>>> {
        listed(&self.maintenances).await
    }

    /// All drain rules.
    pub async fn drain_rules(&self) -> Vec<Arc<DeserializeGuard<DrainRule>>> {
        listed(&self.drain_rules).await
    }
}

fn is_plain(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(plain)
}

/// An empty store is no answer before the first list.
async fn listed<K: Lookup<DynamicType = ()> + Clone + 'static>(store: &Store<K>) -> Vec<Arc<K>> {
    // The writer lives as long as the watch, which lives as long as we do.
    let _ = store.wait_until_ready().await;
    store.state()
}

fn keep<K: Lookup<DynamicType = ()> + Clone + Send + Sync + 'static>(
    resource: &'static str,
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
    metrics: &Metrics,
) -> (Store<K>, AbortOnDropHandle<()>) {
    let (store, writer) = reflector::store();
    let metrics = metrics.clone();
    let watch = reflect(writer, events.default_backoff()).for_each(move |event| {
        if let Err(error) = event {
            metrics.watch_restarted(resource);
            warn!(resource, %error, "a watch broke, and begins anew");
        }
        std::future::ready(())
    });
    (store, AbortOnDropHandle::new(tokio::spawn(watch)))
}

//! Tells the manager what happens in the cluster, and the queue whom that concerns.

mod policy;
mod rivals;

use std::collections::HashSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt as _;
use haulout_api_types::names::instigator;
use haulout_api_types::{Evacuation, instigators};
use haulout_service_runtime::metrics::Metrics;
use haulout_service_runtime::pods::Uid;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::error_boundary::InvalidObject;
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event};
use kube::{Api, ResourceExt as _};
use serde::Deserialize;
use tracing::{info, warn};

use crate::controller::{Controller, Source, Wanted, lock};
use crate::notice;

pub(crate) use self::policy::policy;
pub(crate) use self::rivals::rivals;

/// How long a watch of nodes that broke waits for the next one.
const PAUSE: Duration = Duration::from_secs(1);

/// What we read of a Node.
#[derive(Clone, Debug, Deserialize, kube::Resource)]
#[resource(inherit = core::Node)]
struct Node {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: NodeSpec,
    #[serde(default)]
    status: NodeStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct NodeSpec {
    taints: Option<Vec<core::Taint>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct NodeStatus {
    conditions: Option<Vec<NodeCondition>>,
}

#[derive(Clone, Debug, Deserialize)]
struct NodeCondition {
    r#type: String,
    status: String,
}

impl Node {
    fn is_ready(&self) -> bool {
        let mut conditions = self.status.conditions.iter().flatten();
        conditions.any(|condition| condition.r#type == "Ready" && condition.status == "True")
    }
}

/// Follows all pods, and gaps in what we see of them.
pub(crate) async fn pods(controller: Arc<Controller>) {
    let mut subscription = controller.pods.subscribe();
    let mut continuity = controller.pods.watch_continuity();
    // The first list may have been quicker than we were.
    continuity.mark_changed();
    loop {
        tokio::select! {
            changes = subscription.changes() => {
                let keys: Vec<_> = {
                    let mut manager = controller.manager();
                    changes.iter().filter_map(|change| manager.apply_pod(change)).collect()
                };
                controller.enqueue(keys);
            }
            // The sender lives in the cache, which we hold.
            Ok(()) = continuity.changed() => {
                let seen = *continuity.borrow_and_update();
                controller.sees(Source::Pods, seen.ready && seen.gap_since.is_none());
            }
        }
    }
}

/// Follows all nodes. A watch that broke is begun anew with a list, because kube's watcher does not tell when one
/// that it resumed works again, and until then we must take ourselves for blind. One node that cannot be read does
/// not hide the others.
pub(crate) async fn nodes(controller: Arc<Controller>, metrics: Metrics) {
    let api: Api<DeserializeGuard<Node>> = Api::all(controller.clients.direct.clone());
    loop {
        let mut events = pin!(watcher::watcher(api.clone(), watcher::Config::default()));
        let mut listed = HashSet::new();
        loop {
            match events.try_next().await {
                Ok(Some(Event::Init)) => listed.clear(),
                Ok(Some(Event::InitApply(node))) => {
                    listed.insert(node.name_any());
                    apply_node(&controller, node);
                }
                Ok(Some(Event::InitDone)) => {
                    controller.tell(|manager, pods| manager.index.retain_nodes(&listed, pods));
                    listed = HashSet::new();
                    controller.sees(Source::Nodes, true);
                }
                Ok(Some(Event::Apply(node))) => apply_node(&controller, node),
                Ok(Some(Event::Delete(node))) => {
                    let name = node.name_any();
                    lock(&controller.wanted).remove(name.as_str());
                    controller.tell(|manager, pods| manager.index.delete_node(&name, pods));
                }
                Ok(None) => break,
                Err(error) => {
                    warn!(%error, "nodes cannot be watched; trying again");
                    metrics.watch_restarted("nodes");
                    break;
                }
            }
        }
        controller.sees(Source::Nodes, false);
        tokio::time::sleep(PAUSE).await;
    }
}

fn apply_node(controller: &Controller, DeserializeGuard(node): DeserializeGuard<Node>) {
    let node = match node {
        Ok(node) => node,
        Err(problem) => return apply_unreadable_node(controller, &problem),
    };
    let taints = node.spec.taints.as_deref().unwrap_or_default();
    let now = controller.clock.now();
    let mut annotation = None;
    controller.tell(|manager, pods| {
        let news = manager.index.apply_node(&node.metadata, taints, node.is_ready(), pods, now);
        annotation = news.annotation;
        news.pods
    });
    let name: Arc<str> = node.name_any().into();
    match (annotation, node.uid()) {
        (Some(text), Some(uid)) => {
            lock(&controller.wanted).insert(Arc::clone(&name), Wanted { uid, text });
            controller.nodes.add(name);
        }
        _ => drop(lock(&controller.wanted).remove(&name)),
    }
}

fn apply_unreadable_node(controller: &Controller, problem: &InvalidObject) {
    let InvalidObject { error, metadata } = problem;
    let Some(name) = metadata.name.as_deref() else { return };
    lock(&controller.wanted).remove(name);
    let mut is_new = false;
    controller.tell(|manager, pods| {
        let concerned = manager.index.apply_unreadable_node(name, pods);
        is_new = concerned.is_some();
        concerned.unwrap_or_default()
    });
    if is_new {
        warn!(node = name, error, "failed to read Node: its pods stay until it can be read");
        controller.publish(notice::unreadable(metadata, error));
    }
}

/// Follows the labels of all namespaces.
pub(crate) async fn namespaces(controller: Arc<Controller>, metrics: Metrics) {
    let api: Api<PartialObjectMeta<core::Namespace>> = Api::all(controller.clients.direct.clone());
    let mut events = pin!(watcher::watcher(api, watcher::Config::default()).default_backoff());
    loop {
        match events.try_next().await {
            Ok(Some(Event::InitApply(namespace) | Event::Apply(namespace))) => {
                let (name, labels) = (namespace.name_any(), namespace.labels().clone());
                controller.tell(|manager, pods| manager.index.apply_namespace(&name, labels, pods));
            }
            Ok(Some(Event::Delete(namespace))) => {
                controller.manager().index.delete_namespace(&namespace.name_any());
            }
            Ok(Some(Event::InitDone)) => controller.sees(Source::Namespaces, true),
            Ok(Some(Event::Init)) => {}
            Ok(None) => return,
            Err(error) => {
                warn!(%error, "namespaces cannot be watched; trying again");
                metrics.watch_restarted("namespaces");
            }
        }
    }
}

/// Follows which pods have an Evacuation that we asked for.
pub(crate) async fn evacuations(controller: Arc<Controller>, metrics: Metrics) {
    let api: Api<PartialObjectMeta<Evacuation>> = Api::all(controller.clients.direct.clone());
    let mut events = pin!(watcher::watcher(api, watcher::Config::default()).default_backoff());
    let mut listed = HashSet::new();
    let wanted = |uid: Option<Uid>, wanted: bool| {
        let Some(uid) = uid else { return };
        controller.tell(|manager, pods| manager.index.apply_evacuation(uid, wanted, pods));
    };
    loop {
        match events.try_next().await {
            Ok(Some(Event::Init)) => listed.clear(),
            Ok(Some(Event::InitApply(evacuation))) => {
                let uid = pod_of(&evacuation);
                if is_ours(&evacuation) {
                    listed.extend(uid);
                }
                wanted(uid, is_ours(&evacuation));
            }
            Ok(Some(Event::InitDone)) => {
                let gone = controller.manager().index.evacuations_beside(&listed);
                for uid in gone {
                    wanted(Some(uid), false);
                }
                listed = HashSet::new();
                controller.sees(Source::Evacuations, true);
            }
            Ok(Some(Event::Apply(evacuation))) => wanted(pod_of(&evacuation), is_ours(&evacuation)),
            Ok(Some(Event::Delete(evacuation))) => wanted(pod_of(&evacuation), false),
            Ok(None) => return,
            Err(error) => {
                info!(%error, "Evacuations cannot be watched; trying again");
                metrics.watch_restarted("evacuations");
            }
        }
    }
}

/// Whether we want it. One that somebody has deleted goes on while our finalizer is on it.
fn is_ours(evacuation: &PartialObjectMeta<Evacuation>) -> bool {
    evacuation.finalizers().contains(&instigators::finalizer(instigator::TAINT_MANAGER))
}

/// The pod's UID is what the name begins with.
fn pod_of(evacuation: &PartialObjectMeta<Evacuation>) -> Option<Uid> {
    evacuation.metadata.name.as_deref().and_then(|name| name.get(..36)).and_then(|uid| uid.parse().ok())
}

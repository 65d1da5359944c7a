//! Which kinds are watched, and what each change means for the state.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use haulout_api_types::names::instigator;
use haulout_api_types::{Evacuation, instigators};
use haulout_service_runtime::pods::{Change, Subscriber, Uid};
use haulout_service_runtime::watch::{Handler, Identity, Unreadable};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;
use kube::core::PartialObjectMeta;
use serde::Deserialize;
use tracing::warn;

use crate::decide::conflict::conflicting_source;
use crate::events;
use crate::reconcile::{Controller, Source, Wanted, lock};

/// What we read of a Node.
#[derive(Clone, Debug, Deserialize, kube::Resource)]
#[resource(inherit = core::Node)]
pub(crate) struct Node {
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

impl Subscriber for Controller {
    fn apply(&self, changes: Vec<Change>) {
        let keys: Vec<_> = {
            let mut state = self.state();
            changes.iter().filter_map(|change| state.apply_pod(change)).collect()
        };
        self.enqueue(keys);
    }

    fn interrupted(&self, ago: Duration) {
        self.interrupted(Source::Pods, ago);
    }

    fn resumed(&self) {
        self.resumed(Source::Pods);
    }
}

impl Handler<Node> for Controller {
    type Key = Arc<str>;

    fn key(identity: Identity<'_>) -> Option<Arc<str>> {
        Some(identity.name.into())
    }

    fn apply(&self, name: Arc<str>, node: Node) {
        let taints = node.spec.taints.as_deref().unwrap_or_default();
        let now = self.clock.now();
        let mut annotation = None;
        self.tell(|state, pods| {
            let news = state.index.apply_node(&node.metadata, taints, node.is_ready(), pods, now);
            annotation = news.annotation;
            news.pods
        });
        match (annotation, node.uid()) {
            (Some(text), Some(uid)) => {
                lock(&self.wanted).insert(Arc::clone(&name), Wanted { uid, text });
                self.nodes.add(name);
            }
            _ => drop(lock(&self.wanted).remove(&name)),
        }
    }

    fn unreadable(&self, name: Arc<str>, problem: Unreadable) {
        lock(&self.wanted).remove(&name);
        let mut is_new = false;
        self.tell(|state, pods| {
            let concerned = state.index.apply_unreadable_node(&name, pods);
            is_new = concerned.is_some();
            concerned.unwrap_or_default()
        });
        if is_new {
            self.publish(events::unreadable(&problem.metadata, &problem.error));
        }
    }

    fn delete(&self, name: Arc<str>) {
        lock(&self.wanted).remove(&name);
        self.tell(|state, pods| state.index.delete_node(&name, pods));
    }

    fn reset(&self, listed: &HashSet<Arc<str>>) {
        lock(&self.wanted).retain(|name, _| listed.contains(name));
        self.tell(|state, pods| state.index.retain_nodes(listed, pods));
    }

    fn interrupted(&self, ago: Duration) {
        self.interrupted(Source::Nodes, ago);
    }

    fn resumed(&self) {
        self.resumed(Source::Nodes);
    }
}

impl Handler<PartialObjectMeta<core::Namespace>> for Controller {
    type Key = Box<str>;

    fn key(identity: Identity<'_>) -> Option<Box<str>> {
        Some(identity.name.into())
    }

    fn apply(&self, name: Box<str>, namespace: PartialObjectMeta<core::Namespace>) {
        let labels = namespace.metadata.labels.unwrap_or_default();
        self.tell(|state, pods| state.index.apply_namespace(&name, labels, pods));
    }

    fn delete(&self, name: Box<str>) {
        self.state().index.delete_namespace(&name);
    }

    fn reset(&self, listed: &HashSet<Box<str>>) {
        self.state().index.retain_namespaces(listed);
    }

    fn interrupted(&self, ago: Duration) {
        self.interrupted(Source::Namespaces, ago);
    }

    fn resumed(&self) {
        self.resumed(Source::Namespaces);
    }
}

impl Handler<PartialObjectMeta<Evacuation>> for Controller {
    /// The pod's UID, which the name begins with.
    type Key = Uid;

    fn key(identity: Identity<'_>) -> Option<Uid> {
        identity.name.get(..36)?.parse().ok()
    }

    fn apply(&self, pod: Uid, evacuation: PartialObjectMeta<Evacuation>) {
        // One that somebody has deleted goes on while our finalizer is on it.
        let ours = evacuation.finalizers().contains(&instigators::finalizer(instigator::TAINT_MANAGER));
        self.tell(|state, pods| state.index.apply_evacuation(pod, ours, pods));
    }

    fn delete(&self, pod: Uid) {
        self.tell(|state, pods| state.index.apply_evacuation(pod, false, pods));
    }

    fn reset(&self, listed: &HashSet<Uid>) {
        self.tell(|state, pods| state.index.retain_evacuations(listed, pods));
    }

    fn interrupted(&self, ago: Duration) {
        self.interrupted(Source::Evacuations, ago);
    }

    fn resumed(&self) {
        self.resumed(Source::Evacuations);
    }
}

/// Events tell of others who act on the same taints. What has gone does not matter.
impl Handler<core::Event> for Controller {
    type Key = ();

    fn key(_: Identity<'_>) -> Option<()> {
        Some(())
    }

    fn apply(&self, (): (), event: core::Event) {
        let Some(source) = conflicting_source(&event, self.started) else { return };
        self.metrics.conflict();
        if lock(&self.rivals).insert(source.to_owned()) {
            warn!(source, "somebody else makes pods leave tainted nodes too: {}", events::CONFLICT_ADVICE);
            self.publish(events::conflict(&self.own, source));
        }
    }

    fn delete(&self, (): ()) {}

    fn reset(&self, _: &HashSet<()>) {}
}

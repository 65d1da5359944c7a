//! The watched kinds, and the state method that each watch event calls.

use std::sync::Arc;
use std::time::Duration;

use haulout_api_types::names::instigator;
use haulout_api_types::{Evacuation, bounded, instigators};
use haulout_service_runtime::pods::{Change, Subscriber};
use haulout_service_runtime::watch::{EvacuatedPod, Handler, Unreadable};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;
use kube::core::PartialObjectMeta;
use serde::Deserialize;
use tracing::warn;

use crate::decide::conflict::conflicting_source;
use crate::events;
use crate::reconcile::Controller;
use crate::state::watch_gap::Watch;

/// The fields of a Node that we use.
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
        self.update(|state, _| -> Vec<_> {
            changes.iter().filter_map(|change| state.apply_pod(change)).collect()
        });
    }

    fn interrupted(&self, ago: Duration) {
        self.watch_interrupted(Watch::Pods, ago);
    }

    fn resumed(&self) {
        self.watch_resumed(Watch::Pods);
    }
}

impl Handler<Node> for Controller {
    type Key = Arc<str>;

    fn apply(&self, name: Arc<str>, node: Node) {
        let taints = node.spec.taints.as_deref().unwrap_or_default();
        let (ready, now) = (node.is_ready(), self.clock.now());
        self.update(|state, pods| state.apply_node(&name, &node.metadata, taints, ready, pods, now));
        if self.state().unwritten_annotation(&name).is_some() {
            self.nodes.add(name);
        }
    }

    fn unreadable(&self, name: Arc<str>, problem: Unreadable) {
        let mut is_new = false;
        self.update(|state, pods| {
            let affected = state.apply_unreadable_node(&name, pods);
            is_new = affected.is_some();
            affected.unwrap_or_default()
        });
        if is_new {
            self.publish(events::unreadable(&problem.metadata, &problem.error));
        }
    }

    fn delete(&self, name: Arc<str>) {
        self.update(|state, pods| state.delete_node(&name, pods));
    }

    fn interrupted(&self, ago: Duration) {
        self.watch_interrupted(Watch::Nodes, ago);
    }

    fn resumed(&self) {
        self.watch_resumed(Watch::Nodes);
    }
}

impl Handler<PartialObjectMeta<core::Namespace>> for Controller {
    type Key = Arc<str>;

    fn apply(&self, name: Arc<str>, namespace: PartialObjectMeta<core::Namespace>) {
        let labels = namespace.metadata.labels.unwrap_or_default();
        self.update(|state, pods| state.apply_namespace(&name, labels, pods));
    }

    fn delete(&self, name: Arc<str>) {
        self.state().delete_namespace(&name);
    }

    fn interrupted(&self, ago: Duration) {
        self.watch_interrupted(Watch::Namespaces, ago);
    }

    fn resumed(&self) {
        self.watch_resumed(Watch::Namespaces);
    }
}

impl Handler<PartialObjectMeta<Evacuation>> for Controller {
    type Key = EvacuatedPod;

    fn apply(&self, EvacuatedPod(pod): EvacuatedPod, evacuation: PartialObjectMeta<Evacuation>) {
        // A deleted Evacuation continues while it has our finalizer.
        let ours = evacuation.finalizers().contains(&instigators::finalizer(instigator::TAINT_MANAGER));
        self.update(|state, pods| state.apply_evacuation(pod, ours, pods));
    }

    fn delete(&self, EvacuatedPod(pod): EvacuatedPod) {
        self.update(|state, pods| state.apply_evacuation(pod, false, pods));
    }

    fn interrupted(&self, ago: Duration) {
        self.watch_interrupted(Watch::Evacuations, ago);
    }

    fn resumed(&self) {
        self.watch_resumed(Watch::Evacuations);
    }
}

/// Events of other controllers that act on the same taints. Deleted events are ignored.
impl Handler<core::Event> for Controller {
    type Key = ();

    fn apply(&self, (): (), event: core::Event) {
        let Some(source) = conflicting_source(&event, self.started) else { return };
        self.metrics.conflict();
        if self.state().apply_conflict(source) {
            let source = &bounded::text(source);
            warn!(source, "another controller removes pods from tainted nodes: {}", events::CONFLICT_ADVICE);
            self.publish(events::conflict(&self.own, source));
        }
    }

    fn delete(&self, (): ()) {}
}

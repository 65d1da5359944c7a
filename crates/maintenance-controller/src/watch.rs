//! The kinds that are watched, and the state method that each event calls.

use std::sync::Arc;

use haulout_api_types::{DrainRule, NodeMaintenance};
use haulout_service_runtime::events::reference;
use haulout_service_runtime::pods::{Change, Subscriber};
use haulout_service_runtime::watch::{EvacuatedPod, Handler, Source, Unreadable};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt as _;
use kube::core::{PartialObjectMeta, PartialObjectMetaExt as _};
use tracing::warn;

use crate::events;
use crate::observed::{
    ObservedAttachment, ObservedEvacuation, ObservedNode, ObservedOwnPod, SlimEvacuation, SlimNode,
};
use crate::reconcile::Controller;

/// The labels that the chart gives to the pods of all services.
const OWN_PODS: &str = "app.kubernetes.io/name=haulout,app.kubernetes.io/component";

/// Haulout's own pods. The planner checks on which other nodes they can run.
pub(crate) fn own_pods(namespace: &str) -> Source<Pod> {
    Source::in_namespace("pods", namespace).labels(OWN_PODS)
}

impl Subscriber for Controller {
    fn apply(&self, changes: Vec<Change>) {
        let now = self.clock.now();
        for change in &changes {
            self.update(|state| state.apply_pod(change, now));
        }
    }
}

impl Handler<SlimNode> for Controller {
    type Key = Arc<str>;

    fn apply(&self, name: Arc<str>, node: SlimNode) {
        self.update(|state| state.apply_node(name, ObservedNode::new(node)));
    }

    fn delete(&self, name: Arc<str>) {
        let now = self.clock.now();
        self.update_with_pods(|state, pods| state.delete_node(&name, pods, now));
    }
}

impl Handler<NodeMaintenance> for Controller {
    type Key = Arc<str>;

    fn apply(&self, name: Arc<str>, maintenance: NodeMaintenance) {
        let regarding = reference(&maintenance);
        if let Err(error) = self.update(|state| state.apply_maintenance(maintenance)) {
            warn!(%name, %error, "unreadable NodeMaintenance, its nodes are not released");
            self.events.publish(events::unreadable(regarding, &error.to_string()));
        }
    }

    fn unreadable(&self, name: Arc<str>, Unreadable { metadata, error }: Unreadable) {
        let uid = metadata.uid.as_deref().unwrap_or_default();
        self.update(|state| state.mark_unreadable(name, uid, None, error.clone()));
        let object: PartialObjectMeta<NodeMaintenance> = metadata.into_request_partial();
        self.events.publish(events::unreadable(reference(&object), &error));
    }

    fn delete(&self, name: Arc<str>) {
        self.update(|state| state.delete_maintenance(&name));
    }
}

impl Handler<DrainRule> for Controller {
    type Key = Arc<str>;

    fn apply(&self, name: Arc<str>, rule: DrainRule) {
        let regarding = reference(&rule);
        if let Err(error) = self.update(|state| state.apply_rule(name.to_string(), Some(rule))) {
            warn!(%name, %error, "unreadable DrainRule, pods that it may exclude are not evacuated");
            self.events.publish(events::unreadable(regarding, &error.to_string()));
        }
    }

    fn unreadable(&self, name: Arc<str>, Unreadable { metadata, error }: Unreadable) {
        // The error is reported below.
        let _ = self.update(|state| state.apply_rule(name.to_string(), None));
        let object: PartialObjectMeta<DrainRule> = metadata.into_request_partial();
        self.events.publish(events::unreadable(reference(&object), &error));
    }

    fn delete(&self, name: Arc<str>) {
        self.update(|state| state.delete_rule(&name));
    }
}

impl Handler<SlimEvacuation> for Controller {
    type Key = EvacuatedPod;

    fn apply(&self, EvacuatedPod(pod): EvacuatedPod, evacuation: SlimEvacuation) {
        self.update_with_pods(|state, pods| {
            state.apply_evacuation(pod, ObservedEvacuation::new(evacuation), pods);
        });
    }

    fn delete(&self, EvacuatedPod(pod): EvacuatedPod) {
        self.update_with_pods(|state, pods| state.delete_evacuation(pod, pods));
    }
}

impl Handler<VolumeAttachment> for Controller {
    type Key = Arc<str>;

    fn apply(&self, name: Arc<str>, attachment: VolumeAttachment) {
        self.update(|state| state.apply_attachment(name, ObservedAttachment::new(attachment)));
    }

    fn delete(&self, name: Arc<str>) {
        self.update(|state| state.apply_attachment(name, None));
    }
}

impl Handler<PartialObjectMeta<Namespace>> for Controller {
    type Key = Arc<str>;

    fn apply(&self, name: Arc<str>, namespace: PartialObjectMeta<Namespace>) {
        let labels = namespace.labels().iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        self.update(|state| state.apply_namespace(name, Some(labels)));
    }

    fn delete(&self, name: Arc<str>) {
        self.update(|state| state.apply_namespace(name, None));
    }
}

impl Handler<Pod> for Controller {
    type Key = Arc<str>;

    fn apply(&self, name: Arc<str>, pod: Pod) {
        self.update_with_pods(|state, pods| state.apply_own_pod(name, ObservedOwnPod::new(pod), pods));
    }

    fn delete(&self, name: Arc<str>) {
        self.update_with_pods(|state, pods| state.apply_own_pod(name, None, pods));
    }
}

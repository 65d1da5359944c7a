//! The kinds that are watched, and the state method that each event calls.

use std::sync::Arc;

use haulout_api_types::{DrainRule, NodeMaintenance};
use haulout_service_runtime::access::lease_name;
use haulout_service_runtime::events::reference;
use haulout_service_runtime::pods::{Change, Subscriber};
use haulout_service_runtime::watch::{EvacuatedPod, Handler, Source, Unreadable};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::api::ListParams;
use kube::core::{PartialObjectMeta, PartialObjectMetaExt as _};
use kube::{Api, ResourceExt as _};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tracing::warn;

use crate::BACKOFF;
use crate::events;
use crate::leader::Leader;
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

/// Watches the Lease of the evacuation controller, and detects when it is no longer renewed.
pub(crate) struct EvacuationController {
    leader: Mutex<Leader>,
    changed: Notify,
    controller: Arc<Controller>,
    api: Api<Lease>,
    fields: String,
}

impl EvacuationController {
    pub(crate) fn new(controller: Arc<Controller>, namespace: &str) -> Arc<Self> {
        Arc::new(Self {
            leader: Mutex::new(Leader::new(controller.clock.now())),
            changed: Notify::new(),
            api: Api::namespaced(controller.clients.direct.clone(), namespace),
            fields: format!("metadata.name={}", lease_name("evacuation-controller")),
            controller,
        })
    }

    pub(crate) fn source(&self, namespace: &str) -> Source<Lease> {
        Source::in_namespace("leases", namespace).fields(&self.fields)
    }

    fn observe(&self, lease: Option<&Lease>) {
        let lease = lease.and_then(|lease| lease.spec.as_ref());
        self.leader.lock().observe(lease, self.controller.clock.now());
        self.changed.notify_one();
    }

    /// Updates the state with the time since when there is no leader, once a request has confirmed it: with a half-open watch
    /// connection, the Lease also appears not to be renewed.
    pub(crate) async fn run(self: Arc<Self>) {
        let clock = &self.controller.clock;
        let (mut confirmed, mut failures) = (false, 0);
        loop {
            let now = clock.now();
            let (absent, due) = {
                let leader = self.leader.lock();
                (leader.absent_since(now), leader.due())
            };
            let confirm_at = match absent {
                None => {
                    (confirmed, failures) = (false, 0);
                    due
                }
                // The watch delivers the Lease when there is a leader again.
                Some(_) if confirmed => Timestamp::MAX,
                Some(_) if failures == 0 => now,
                Some(_) => {
                    now.saturating_add(BACKOFF.delay(failures, fastrand::f64())).unwrap_or(Timestamp::MAX)
                }
            };
            self.controller.update(|state| state.apply_evacuation_controller(absent.filter(|_| confirmed)));
            tokio::select! {
                () = self.changed.notified() => {}
                () = clock.sleep_until(confirm_at) => {
                    match self.api.list(&ListParams::default().fields(&self.fields)).await {
                        Ok(found) => {
                            self.observe(found.items.first());
                            confirmed = true;
                        }
                        Err(error) => {
                            warn!(%error, "failed to get the Lease of the evacuation controller, retrying");
                            failures += 1;
                        }
                    }
                }
            }
        }
    }
}

impl Handler<Lease> for EvacuationController {
    type Key = ();

    fn apply(&self, (): (), lease: Lease) {
        self.observe(Some(&lease));
    }

    fn delete(&self, (): ()) {
        self.observe(None);
    }
}

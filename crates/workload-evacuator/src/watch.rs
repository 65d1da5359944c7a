//! The watched kinds, and the state method that each watch event calls.

use std::sync::Arc;
use std::time::Duration;

use haulout_api_types::Evacuation;
use haulout_service_runtime::pods::Uid;
use haulout_service_runtime::watch::{EvacuatedPod, Handler, Unreadable};
use k8s_openapi::api::core::v1::Namespace;
use kube::core::PartialObjectMeta;

use crate::objects::{Deployment, Evac, Pod, ReplicaSet, SlimDeployment, SlimPod, SlimReplicaSet, opts_out};
use crate::reconcile::Controller;

/// The names of the watches in the state.
const PODS: &str = "pods";
const SETS: &str = "replicasets";
const DEPLOYMENTS: &str = "deployments";
const EVACUATIONS: &str = "evacuations";

impl Handler<SlimPod> for Controller {
    type Key = Uid;

    fn apply(&self, uid: Uid, pod: SlimPod) {
        match Pod::read(pod) {
            Some(pod) => self.apply_pod(pod),
            // It has another owner now.
            None => self.delete_pod(uid),
        }
    }

    fn unreadable(&self, uid: Uid, _: Unreadable) {
        self.delete_pod(uid);
    }

    fn delete(&self, uid: Uid) {
        self.delete_pod(uid);
    }

    fn interrupted(&self, _: Duration) {
        self.update(|state| state.set_gap(PODS, true));
    }

    fn resumed(&self) {
        self.update(|state| state.set_gap(PODS, false));
    }
}

impl Handler<SlimReplicaSet> for Controller {
    type Key = Uid;

    fn apply(&self, uid: Uid, set: SlimReplicaSet) {
        self.update(|state| state.apply_set(uid, ReplicaSet::read(set)));
    }

    fn delete(&self, uid: Uid) {
        self.update(|state| state.delete_set(uid));
    }

    fn interrupted(&self, _: Duration) {
        self.update(|state| state.set_gap(SETS, true));
    }

    fn resumed(&self) {
        self.update(|state| state.set_gap(SETS, false));
    }
}

impl Handler<SlimDeployment> for Controller {
    type Key = Uid;

    fn apply(&self, uid: Uid, deployment: SlimDeployment) {
        self.update(|state| match Deployment::read(deployment) {
            Some(deployment) => state.apply_deployment(deployment),
            None => state.delete_deployment(uid),
        });
    }

    fn delete(&self, uid: Uid) {
        self.update(|state| state.delete_deployment(uid));
    }

    fn interrupted(&self, _: Duration) {
        self.update(|state| state.set_gap(DEPLOYMENTS, true));
    }

    fn resumed(&self) {
        self.update(|state| state.set_gap(DEPLOYMENTS, false));
    }
}

impl Handler<Evacuation> for Controller {
    type Key = EvacuatedPod;

    fn apply(&self, EvacuatedPod(pod): EvacuatedPod, evacuation: Evacuation) {
        self.update(|state| state.apply_evac(pod, Evac::read(evacuation)).into_iter().collect());
    }

    fn delete(&self, EvacuatedPod(pod): EvacuatedPod) {
        self.update(|state| state.apply_evac(pod, None).into_iter().collect());
    }

    fn interrupted(&self, _: Duration) {
        self.update(|state| state.set_gap(EVACUATIONS, true));
    }

    fn resumed(&self) {
        self.update(|state| state.set_gap(EVACUATIONS, false));
    }
}

impl Handler<PartialObjectMeta<Namespace>> for Controller {
    type Key = Arc<str>;

    fn apply(&self, name: Arc<str>, namespace: PartialObjectMeta<Namespace>) {
        let opted_out = opts_out(&namespace.metadata);
        self.update(|state| state.apply_namespace(name, opted_out));
    }

    fn delete(&self, name: Arc<str>) {
        self.update(|state| state.apply_namespace(name, false));
    }
}

//! The requests to the API server.

use std::collections::BTreeSet;

use haulout_api_types::former_owner::FormerOwner;
use haulout_api_types::names::{class, condition, instigator, reason};
use haulout_api_types::{Evacuation, conditions, evacuators, instigators};
use haulout_service_runtime::api::{Object, Operation, RequestError, Writer, Written};
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Client;
use kube::api::PostParams;
use serde_json::{Map, Value, json};

use crate::decide::Report;
use crate::objects::{Evac, Pod, SlimPod};

/// The field manager of our writes.
pub const MANAGER: &str = "haulout-workload-evacuator";

/// A change of a pod's metadata.
#[derive(Clone, Debug)]
pub enum PodWrite<'a> {
    /// Give it the lowest deletion cost.
    Prefer {
        /// Now.
        since: Timestamp,
    },
    /// Move it to its Deployment.
    Move {
        /// The name and UID of the Deployment.
        owner: (&'a str, String),
        /// The number of available pods.
        available: i32,
        /// Now.
        since: Timestamp,
    },
    /// Give it back to its ReplicaSet.
    GiveBack,
    /// Remove our annotation, and restore the deletion cost.
    Restore,
}

impl PodWrite<'_> {
    /// The patch; `None` if the pod has changed so that it makes no sense.
    fn patch(&self, pod: &ObjectMeta) -> Option<Value> {
        match self {
            Self::Move { .. } | Self::Prefer { .. } if pod.deletion_timestamp.is_some() => None,
            Self::Prefer { since } => FormerOwner::prefer_patch(pod, since.as_second()),
            Self::Move { owner: (name, uid), available, since } => {
                FormerOwner::move_patch(pod, (name, uid), *available, since.as_second())
            }
            Self::GiveBack => Some(FormerOwner::of(pod)?.give_back_patch(pod)),
            Self::Restore => Some(FormerOwner::restore_patch(FormerOwner::of(pod).as_ref())),
        }
    }
}

/// Sends requests.
pub struct Api {
    client: Client,
    writer: Writer,
}

impl Api {
    /// Sends requests with this client, which must not retry by itself.
    pub fn new(client: Client) -> Self {
        Self { writer: Writer::new(client.clone(), MANAGER), client }
    }

    /// Changes the metadata of a pod, if it has not changed meanwhile. The answer is `None` if the change makes no sense any more.
    pub async fn write_pod(
        &self,
        pod: &Pod,
        write: PodWrite<'_>,
    ) -> Result<Written<Option<SlimPod>>, RequestError> {
        let Some(metadata) = self.metadata(pod).await? else { return Ok(Written::Gone) };
        let Some(patch) = write.patch(&metadata) else { return Ok(Written::Done(None)) };
        Ok(self.writer.patch::<SlimPod>(&Object::of(&metadata), patch).await?.map(Some))
    }

    /// The metadata of the pod with this UID, if it exists.
    async fn metadata(&self, pod: &Pod) -> Result<Option<ObjectMeta>, RequestError> {
        let api: kube::Api<core::Pod> = kube::Api::namespaced(self.client.clone(), &pod.namespace);
        let operation = Operation::new("get", "Pod", &pod.namespace, &pod.name);
        let found = operation.result(api.get_metadata_opt(&pod.name).await)?;
        Ok(found.map(|found| found.metadata).filter(|metadata| metadata.uid == Some(pod.uid.to_string())))
    }

    /// Whether a replacement can mount the volumes of a pod while it runs. If not, why.
    pub async fn check_volumes(&self, pod: &Pod) -> Result<Result<(), Box<str>>, RequestError> {
        for claim in &pod.claims {
            let api: kube::Api<core::PersistentVolumeClaim> =
                kube::Api::namespaced(self.client.clone(), &pod.namespace);
            let operation = Operation::new("get", "PersistentVolumeClaim", &pod.namespace, claim);
            let Some(found) = operation.result(api.get_opt(claim).await)? else { continue };
            let modes = found.spec.and_then(|spec| spec.access_modes).unwrap_or_default();
            if !modes.iter().any(|mode| mode.ends_with("Many")) {
                let text = format!(
                    "PersistentVolumeClaim {claim} of the pod cannot be mounted by a pod on another node ({})",
                    modes.join(", ")
                );
                return Ok(Err(text.into()));
            }
        }
        Ok(Ok(()))
    }

    /// Adds our finalizer to an Evacuation, or removes it.
    pub async fn set_finalizer(
        &self,
        evac: &Evac,
        wanted: bool,
    ) -> Result<Written<Evacuation>, RequestError> {
        let ours = instigators::finalizer(class::DEPLOYMENT);
        let others = evac.finalizers.iter().map(AsRef::as_ref).filter(|finalizer| *finalizer != ours);
        let finalizers: Vec<_> = others.chain(wanted.then_some(ours.as_str())).collect();
        self.writer.patch(&evac.object(), json!({"metadata": {"finalizers": finalizers}})).await
    }

    /// Reports what we wait for.
    pub async fn report(
        &self,
        evac: &Evac,
        report: &Report,
        now: Timestamp,
    ) -> Result<Written<Evacuation>, RequestError> {
        let mut status = Map::new();
        status.insert("message".into(), report.message.as_str().into());
        status.insert("expectedEvacuationFinishTime".into(), json!(report.expected_end.map(Time)));
        if report.progress {
            status.insert("evacuationProgressTimestamp".into(), json!(Time(now)));
        }
        status.extend(blocked(evac, report.no_room, &report.message, now));
        self.writer.patch_status(&evac.object(), status.into()).await
    }

    /// Reports that we have completed.
    pub async fn complete(&self, evac: &Evac, message: &str) -> Result<Written<Evacuation>, RequestError> {
        let mut status = Map::new();
        status.insert("message".into(), message.into());
        status.insert("activeEvacuatorCompleted".into(), true.into());
        status.extend(blocked(evac, false, message, Timestamp::now()));
        self.writer.patch_status(&evac.object(), status.into()).await
    }

    /// Requests an Evacuation for a pod, as instigator.
    pub async fn evacuate(&self, pod: &Pod, served: &BTreeSet<String>) -> Result<Written<()>, RequestError> {
        let Some(metadata) = self.metadata(pod).await? else { return Ok(Written::Gone) };
        let built = evacuators::evacuation_for(&metadata, instigator::WORKLOAD_EVACUATOR, served);
        let Ok((evacuation, _)) = built else { return Ok(Written::Conflict) };
        let api: kube::Api<Evacuation> = kube::Api::namespaced(self.client.clone(), &pod.namespace);
        let operation = Operation::new("create", "Evacuation", &pod.namespace, &pod.name);
        let created = api.create(&PostParams::default(), &evacuation).await;
        // The watch delivers it.
        Ok(operation.written(created)?.map(|_| ()))
    }
}

/// The conditions, if the condition `Blocked` changes.
fn blocked(evac: &Evac, no_room: bool, message: &str, now: Timestamp) -> Option<(String, Value)> {
    let is_blocked = evac.blocked.as_deref() == Some(reason::NO_ROOM);
    if !no_room && !is_blocked {
        return None;
    }
    let reason = if no_room { reason::NO_ROOM } else { reason::NOT_BLOCKED };
    let mut all = evac.conditions.to_vec();
    conditions::set(&mut all, conditions::condition(condition::BLOCKED, no_room, reason, message, now));
    Some(("conditions".into(), json!(all)))
}

//! The calls to the API server. Each has the UID as a precondition, so that a delayed request does not affect another
//! object with the same name.

use std::collections::BTreeSet;

use haulout_api_types::evacuation::CancellationPolicy;
use haulout_api_types::names::{TAINTS_FIRST_SEEN_ANNOTATION, condition, instigator};
use haulout_api_types::{Evacuation, evacuators, instigators};
use haulout_service_runtime::eviction::{self, Answer};
use haulout_service_runtime::pods::{self, Pod};
use http::HeaderValue;
use http::header::ACCEPT;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::{DeserializeGuard, PartialObjectMeta, Request};
use kube::{Client, Resource as _, ResourceExt as _};
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use thiserror::Error;

use crate::decide::RemovalAction;
use crate::events::{CONDITION_MESSAGE, CONDITION_REASON, SOURCE};

/// Why a request to the API server failed.
#[derive(Debug, Error)]
pub enum ApiError {
    /// The API server rejected the request, or did not answer.
    #[error(transparent)]
    Api(#[from] kube::Error),
    /// The pod could not be looked up.
    #[error(transparent)]
    LookUp(#[from] pods::FetchError),
    /// The Eviction API did not evict the pod.
    #[error(transparent)]
    Eviction(#[from] eviction::Failure),
    /// An earlier Evacuation of the pod still exists.
    #[error("an earlier Evacuation of the pod is still being deleted")]
    EarlierEvacuation,
    /// The pod lacks a field that the API server always sets.
    #[error(transparent)]
    Incomplete(#[from] evacuators::IncompletePod),
}

/// Removes a pod from its node. `served` are the built-in evacuator classes of this installation. Returns `false` if it is gone already.
pub async fn remove(
    client: &Client,
    pod: &Pod,
    how: RemovalAction,
    served: &BTreeSet<String>,
    now: Timestamp,
) -> Result<bool, ApiError> {
    match how {
        RemovalAction::Delete => delete(client, pod, false, now).await,
        RemovalAction::ForceDelete => delete(client, pod, true, now).await,
        RemovalAction::Evict => evict(client, pod).await,
        RemovalAction::Evacuate => evacuate(client, pod, served).await,
    }
}

/// Writes the reason first, then deletes the pod. kube-controller-manager's disruption controller removes the reason if
/// no deletion follows.
async fn delete(client: &Client, pod: &Pod, force: bool, now: Timestamp) -> Result<bool, ApiError> {
    let pods = Request::new(core::Pod::url_path(&(), Some(&pod.namespace)));
    let patch = Patch::Strategic(reason_of_deletion(pod, force, now));
    if !send(client, pods.patch_subresource("status", &pod.name, &manager(), &patch)).await? {
        return Ok(false);
    }
    let params = DeleteParams {
        preconditions: Some(Preconditions { uid: Some(pod.uid.to_string()), resource_version: None }),
        grace_period_seconds: force.then_some(0),
        ..DeleteParams::default()
    };
    send(client, pods.delete(&pod.name, &params)).await
}

/// The patch with the reason. No kubelet reports the end of a pod on a node that is down, so a forced deletion sets the
/// phase `Failed`.
fn reason_of_deletion(pod: &Pod, force: bool, now: Timestamp) -> Value {
    let mut status = json!({"conditions": [{
        "type": condition::DISRUPTION_TARGET,
        "status": "True",
        "reason": CONDITION_REASON,
        "message": CONDITION_MESSAGE,
        "lastTransitionTime": Time(now),
    }]});
    if let (true, Some(status)) = (force && !pod.is_finished(), status.as_object_mut()) {
        status.insert("phase".into(), "Failed".into());
    }
    json!({"metadata": {"uid": pod.uid.to_string()}, "status": status})
}

async fn evict(client: &Client, pod: &Pod) -> Result<bool, ApiError> {
    if !eviction::has_unique_name(pod) && !eviction::exists(client, pod).await? {
        return Ok(false);
    }
    match eviction::evict(client, pod).await {
        Answer::Evicted => Ok(true),
        Answer::Gone => Ok(false),
        Answer::Failed(failure) => Err(failure.into()),
    }
}

/// Requests an Evacuation, or joins an existing one as instigator.
async fn evacuate(client: &Client, pod: &Pod, served: &BTreeSet<String>) -> Result<bool, ApiError> {
    let (evacuation, _) = evacuators::evacuation_for(&pod.metadata(), instigator::TAINT_MANAGER, served)?;
    let api: Api<Evacuation> = Api::namespaced(client.clone(), &pod.namespace);
    match api.create(&PostParams::default(), &evacuation).await {
        Ok(_) => return Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => {}
        Err(error) => return Err(error.into()),
    }
    let ours = instigators::finalizer(instigator::TAINT_MANAGER);
    // The API server rejects new finalizers on an object that is being deleted.
    let can_be_ours = |existing: &PartialObjectMeta<Evacuation>| {
        existing.metadata.deletion_timestamp.is_none() || existing.finalizers().contains(&ours)
    };
    let existing = api.get_metadata_opt(&evacuation.name_any()).await?.filter(can_be_ours);
    let existing = existing.ok_or(ApiError::EarlierEvacuation)?;
    write_finalizers(client, &existing.metadata, true).await?;
    Ok(true)
}

/// Removes our finalizer from the pod's Evacuation. Returns `false` if the evacuator forbids cancellation.
pub async fn release(client: &Client, pod: &Pod) -> Result<bool, ApiError> {
    let api: Api<DeserializeGuard<Evacuation>> = Api::namespaced(client.clone(), &pod.namespace);
    let name = evacuators::evacuation_name(&pod.uid.to_string(), &pod.name);
    let metadata = match api.get_opt(&name).await? {
        None => return Ok(true),
        Some(DeserializeGuard(Ok(found))) if found.cancellation_policy() == CancellationPolicy::Forbid => {
            return Ok(false);
        }
        Some(DeserializeGuard(Ok(found))) => found.metadata,
        Some(DeserializeGuard(Err(unreadable))) => unreadable.metadata,
    };
    write_finalizers(client, &metadata, false).await?;
    Ok(true)
}

async fn write_finalizers(client: &Client, meta: &ObjectMeta, wanted: bool) -> Result<(), ApiError> {
    let ours = instigators::finalizer(instigator::TAINT_MANAGER);
    let mut finalizers = meta.finalizers.clone().unwrap_or_default();
    if finalizers.contains(&ours) == wanted {
        return Ok(());
    }
    finalizers.retain(|finalizer| *finalizer != ours);
    finalizers.extend(wanted.then_some(ours));
    let patch = json!({"metadata": {
        "uid": meta.uid, "resourceVersion": meta.resource_version, "finalizers": finalizers,
    }});
    let (namespace, name) = (meta.namespace.as_deref(), meta.name.as_deref().unwrap_or_default());
    let request = Request::new(Evacuation::url_path(&(), namespace));
    send(client, request.patch(name, &manager(), &Patch::Merge(patch))).await?;
    Ok(())
}

/// Writes the Node annotation with the times at which taints were first observed.
pub async fn annotate(client: &Client, node: &str, uid: &str, text: Option<&str>) -> Result<(), ApiError> {
    let patch = json!({"metadata": {"uid": uid, "annotations": {TAINTS_FIRST_SEEN_ANNOTATION: text}}});
    let request = Request::new(core::Node::url_path(&(), None));
    send(client, request.patch(node, &manager(), &Patch::Merge(patch))).await?;
    Ok(())
}

fn manager() -> PatchParams {
    PatchParams { field_manager: Some(SOURCE.into()), ..PatchParams::default() }
}

const METADATA: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";

type Built = Result<http::Request<Vec<u8>>, kube::core::request::Error>;

/// Sends a write. Returns `false` if the object is gone. The response body is not used, so only metadata is requested.
async fn send(client: &Client, request: Built) -> Result<bool, ApiError> {
    let mut request = request.map_err(kube::Error::BuildRequest)?;
    request.headers_mut().insert(ACCEPT, HeaderValue::from_static(METADATA));
    match client.request(request).await {
        Ok(IgnoredAny) => Ok(true),
        Err(kube::Error::Api(status)) if eviction::is_gone(&status) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

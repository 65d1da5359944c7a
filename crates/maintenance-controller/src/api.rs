//! The API calls. Each carries the UID of what it means and, where it decides something, the resourceVersion that
//! the decision was made on; what a frozen process sends too late changes nothing.

use haulout_api_types::names::MAINTENANCES_ANNOTATION;
use haulout_api_types::{Evacuation, NodeMaintenance};
use haulout_service_runtime::api::{Doing, RequestError, Written};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::Client;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::{DeserializeGuard, PartialObjectMeta};
use serde_json::{Map, Value, json};

use crate::seen::{EvacuationSeen, MaintenanceSeen, SlimEvacuation, SlimNode, Version};

/// Who writes, as `kubectl get --show-managed-fields` tells.
const MANAGER: &str = "haulout-maintenance-controller";

fn params() -> PatchParams {
    PatchParams { field_manager: Some(MANAGER.into()), ..PatchParams::default() }
}

/// Adds to a patch which object it means.
fn means(mut patch: Value, uid: &str) -> Value {
    if let Some(root) = patch.as_object_mut() {
        let metadata = root.entry("metadata").or_insert_with(|| json!({}));
        if let Some(metadata) = metadata.as_object_mut() {
            metadata.insert("uid".into(), uid.into());
        }
    }
    patch
}

/// Changes cordon and annotations of a node.
pub async fn mark_node(
    client: &Client,
    name: &str,
    uid: &str,
    patch: Value,
) -> Result<Written<SlimNode>, RequestError> {
    let patch = Patch::Merge(means(patch, uid));
    let answer = Api::<SlimNode>::all(client.clone()).patch(name, &params(), &patch).await;
    Doing::new("patch", "Node", "", name).written(answer)
}

/// Changes conditions of a node.
pub async fn mark_node_status(
    client: &Client,
    name: &str,
    uid: &str,
    patch: Value,
) -> Result<Written<SlimNode>, RequestError> {
    let patch = Patch::Strategic(means(patch, uid));
    let answer = Api::<SlimNode>::all(client.clone()).patch_status(name, &params(), &patch).await;
    Doing::new("patch the status of", "Node", "", name).written(answer)
}

/// Makes an Evacuation. If there is one already, that is a failure: it has to be seen before anything is decided.
pub async fn create_evacuation(client: &Client, evacuation: &Evacuation) -> Result<(), RequestError> {
    let namespace = evacuation.metadata.namespace.as_deref().unwrap_or_default();
    let api: Api<Evacuation> = Api::namespaced(client.clone(), namespace);
    let params = PostParams { field_manager: Some(MANAGER.into()), ..PostParams::default() };
    let name = evacuation.metadata.name.as_deref().unwrap_or_default();
    let answer = api.create(&params, evacuation).await.map(|_| ());
    Doing::new("create", "Evacuation", namespace, name).result(answer)
}

/// Puts our finalizer onto an Evacuation, with the maintenances that we want it for; or takes both off.
pub async fn write_finalizer(
    client: &Client,
    evacuation: &EvacuationSeen,
    why: Option<&str>,
) -> Result<Written<SlimEvacuation>, RequestError> {
    let api: Api<SlimEvacuation> = Api::namespaced(client.clone(), &evacuation.namespace);
    let finalizers = evacuation.finalizers_with_ours(why.is_some());
    let metadata = json!({"finalizers": finalizers, "annotations": {MAINTENANCES_ANNOTATION: why}});
    let patch = at(&evacuation.version, json!({"metadata": metadata}));
    let answer = api.patch(&evacuation.name, &params(), &Patch::Merge(patch)).await;
    Doing::new("patch", "Evacuation", &evacuation.namespace, &evacuation.name).written(answer)
}

/// Changes metadata or spec of a maintenance.
pub async fn write_maintenance(
    client: &Client,
    seen: &MaintenanceSeen,
    patch: Value,
) -> Result<Written<Option<NodeMaintenance>>, RequestError> {
    let name = seen.object.metadata.name.as_deref().unwrap_or_default();
    let patch = Patch::Merge(at(&seen.version, patch));
    let answer = Api::all(client.clone()).patch(name, &params(), &patch).await;
    Doing::new("patch", "NodeMaintenance", "", name).written(answer.map(readable))
}

/// Deletes a maintenance, if it is still as it was seen.
pub async fn delete_maintenance(
    client: &Client,
    seen: &MaintenanceSeen,
) -> Result<Written<()>, RequestError> {
    let name = seen.object.metadata.name.as_deref().unwrap_or_default();
    let preconditions = Preconditions {
        uid: Some(seen.version.uid.to_string()),
        resource_version: Some(seen.version.version.to_string()),
    };
    let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    let api: Api<PartialObjectMeta<NodeMaintenance>> = Api::all(client.clone());
    let answer = api.delete(name, &params).await.map(|_| ());
    Doing::new("delete", "NodeMaintenance", "", name).written(answer)
}

/// Turns the status of a maintenance into this one.
pub async fn write_status(
    client: &Client,
    object: &NodeMaintenance,
    status: Value,
) -> Result<Written<Option<NodeMaintenance>>, RequestError> {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let patch = difference(&json!(object.status), &status);
    let patch = Patch::Merge(at(&Version::of(&object.metadata), json!({"status": patch})));
    let answer = Api::all(client.clone()).patch_status(name, &params(), &patch).await;
    Doing::new("patch the status of", "NodeMaintenance", "", name).written(answer.map(readable))
}

/// The answer to a write is of use only if it can be read.
fn readable(DeserializeGuard(object): DeserializeGuard<NodeMaintenance>) -> Option<NodeMaintenance> {
    object.ok()
}

/// Adds to a patch which state of which object it means.
fn at(version: &Version, patch: Value) -> Value {
    let mut patch = means(patch, &version.uid);
    if let Some(metadata) = patch.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.insert("resourceVersion".into(), (*version.version).into());
    }
    patch
}

/// The merge patch that turns one value into another: what is no longer there has to be named.
fn difference(old: &Value, new: &Value) -> Value {
    let (Some(old), Some(new)) = (old.as_object(), new.as_object()) else { return new.clone() };
    let mut patch = Map::new();
    for (key, value) in new {
        match old.get(key) {
            Some(known) if known == value => {}
            Some(known) => {
                patch.insert(key.clone(), difference(known, value));
            }
            None => {
                patch.insert(key.clone(), value.clone());
            }
        }
    }
    for key in old.keys().filter(|key| !new.contains_key(*key)) {
        patch.insert(key.clone(), Value::Null);
    }
    patch.into()
}

/// The name of the volume that a claim is bound to; `None` if it is to none, or gone.
pub async fn volume_of(
    client: &Client,
    namespace: &str,
    claim: &str,
) -> Result<Option<String>, RequestError> {
    let api: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
    let doing = Doing::new("get", "PersistentVolumeClaim", namespace, claim);
    let found = doing.result(api.get_opt(claim).await)?;
    Ok(found.and_then(|claim| claim.spec?.volume_name).filter(|name| !name.is_empty()))
}

/// What a persistent volume is called in the `volumesAttached` of a node; `None` if it is none of CSI, or gone.
pub async fn handle_of(client: &Client, volume: &str) -> Result<Option<String>, RequestError> {
    let found = Api::<PersistentVolume>::all(client.clone()).get_opt(volume).await;
    let found = Doing::new("get", "PersistentVolume", "", volume).result(found)?;
    let csi = found.and_then(|volume| volume.spec?.csi);
    Ok(csi.map(|csi| format!("kubernetes.io/csi/{}^{}", csi.driver, csi.volume_handle)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_names_what_changes_and_what_goes() {
        let old = json!({"same": 1, "list": [1, 2], "inner": {"gone": 1, "kept": 2}, "gone": {"x": 1}});
        let new = json!({"same": 1, "list": [2], "inner": {"kept": 2, "new": 3}, "fresh": {"y": 1}});
        let patch = difference(&old, &new);
        let expected =
            json!({"list": [2], "inner": {"gone": null, "new": 3}, "gone": null, "fresh": {"y": 1}});
        assert_eq!(patch, expected);
        assert_eq!(difference(&Value::Null, &new), new);
    }
}

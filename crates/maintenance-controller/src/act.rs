//! The API calls. Each carries the UID of what it means and, where it decides something, the resourceVersion that
//! the decision was made on; what a frozen process sends too late changes nothing.

use haulout_api_types::names::MAINTENANCES_ANNOTATION;
use haulout_api_types::{Evacuation, NodeMaintenance};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::seen::{EvacuationSeen, MaintenanceSeen, SlimEvacuation, SlimNode, Version};

/// Who writes, as `kubectl get --show-managed-fields` tells.
const MANAGER: &str = "haulout-maintenance-controller";

/// What came of a write.
#[derive(Debug)]
pub enum Written<K> {
    /// It took effect; the object as it is now.
    Done(K),
    /// Somebody else wrote before us: what we knew is old, and the watch will tell what is new.
    Outdated,
    /// There is no such object any more.
    Gone,
}

fn params() -> PatchParams {
    PatchParams { field_manager: Some(MANAGER.into()), ..PatchParams::default() }
}

fn written<K>(answer: kube::Result<K>) -> kube::Result<Written<K>> {
    match answer {
        Ok(object) => Ok(Written::Done(object)),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(Written::Gone),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(Written::Outdated),
        Err(error) => Err(error),
    }
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
) -> kube::Result<Written<SlimNode>> {
    let patch = Patch::Merge(means(patch, uid));
    written(Api::<SlimNode>::all(client.clone()).patch(name, &params(), &patch).await)
}

/// Changes conditions of a node.
pub async fn mark_node_status(
    client: &Client,
    name: &str,
    uid: &str,
    patch: Value,
) -> kube::Result<Written<SlimNode>> {
    let patch = Patch::Strategic(means(patch, uid));
    written(Api::<SlimNode>::all(client.clone()).patch_status(name, &params(), &patch).await)
}

/// Makes an Evacuation. If there is one already, that is a failure: it has to be seen before anything is decided.
pub async fn create_evacuation(client: &Client, evacuation: &Evacuation) -> kube::Result<()> {
    let namespace = evacuation.metadata.namespace.as_deref().unwrap_or_default();
    let api: Api<Evacuation> = Api::namespaced(client.clone(), namespace);
    let params = PostParams { field_manager: Some(MANAGER.into()), ..PostParams::default() };
    api.create(&params, evacuation).await.map(|_| ())
}

/// Puts our finalizer onto an Evacuation, with the maintenances that we want it for; or takes both off.
pub async fn write_wish(
    client: &Client,
    evacuation: &EvacuationSeen,
    why: Option<&str>,
) -> kube::Result<Written<SlimEvacuation>> {
    let api: Api<SlimEvacuation> = Api::namespaced(client.clone(), &evacuation.namespace);
    let finalizers = evacuation.finalizers_with_ours(why.is_some());
    let metadata = json!({"finalizers": finalizers, "annotations": {MAINTENANCES_ANNOTATION: why}});
    let patch = at(&evacuation.version, json!({"metadata": metadata}));
    written(api.patch(&evacuation.name, &params(), &Patch::Merge(patch)).await)
}

/// Changes metadata or spec of a maintenance.
pub async fn write_maintenance(
    client: &Client,
    seen: &MaintenanceSeen,
    patch: Value,
) -> kube::Result<Written<Option<NodeMaintenance>>> {
    let name = seen.object.metadata.name.as_deref().unwrap_or_default();
    let patch = Patch::Merge(at(&seen.version, patch));
    guarded(Api::all(client.clone()).patch(name, &params(), &patch).await)
}

/// Deletes a maintenance, if it is still as it was seen.
pub async fn delete_maintenance(client: &Client, seen: &MaintenanceSeen) -> kube::Result<Written<()>> {
    let name = seen.object.metadata.name.as_deref().unwrap_or_default();
    let preconditions = Preconditions {
        uid: Some(seen.version.uid.to_string()),
        resource_version: Some(seen.version.version.to_string()),
    };
    let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    let api: Api<PartialObjectMeta<NodeMaintenance>> = Api::all(client.clone());
    written(api.delete(name, &params).await.map(|_| ()))
}

/// Turns the status of a maintenance into this one.
pub async fn write_status(
    client: &Client,
    object: &NodeMaintenance,
    status: Value,
) -> kube::Result<Written<Option<NodeMaintenance>>> {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let patch = difference(&json!(object.status), &status);
    let patch = Patch::Merge(at(&Version::of(&object.metadata), json!({"status": patch})));
    guarded(Api::all(client.clone()).patch_status(name, &params(), &patch).await)
}

fn guarded<K>(answer: kube::Result<DeserializeGuard<K>>) -> kube::Result<Written<Option<K>>>
where
    K: Resource + DeserializeOwned,
{
    written(answer.map(|DeserializeGuard(object)| object.ok()))
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
pub async fn volume_of(client: &Client, namespace: &str, claim: &str) -> kube::Result<Option<String>> {
    let api: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
    let found = api.get_opt(claim).await?;
    Ok(found.and_then(|claim| claim.spec?.volume_name).filter(|name| !name.is_empty()))
}

/// What a persistent volume is called in the `volumesAttached` of a node; `None` if it is none of CSI, or gone.
pub async fn handle_of(client: &Client, volume: &str) -> kube::Result<Option<String>> {
    let found = Api::<PersistentVolume>::all(client.clone()).get_opt(volume).await?;
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

//! Requests to the API server.

use haulout_api_types::names::MAINTENANCES_ANNOTATION;
use haulout_api_types::{Evacuation, NodeMaintenance};
use haulout_service_runtime::api::{Object, Operation, RequestError, Writer, Written};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::Client;
use kube::api::{Api, PostParams};
use kube::core::DeserializeGuard;
use serde_json::{Map, Value, json};

use crate::observed::{ObservedEvacuation, SlimEvacuation};

/// The field manager.
pub const MANAGER: &str = "haulout-maintenance-controller";

/// Creates an Evacuation. An existing one is an error: it has to be observed before the next decision.
pub async fn create_evacuation(client: &Client, evacuation: &Evacuation) -> Result<(), RequestError> {
    let namespace = evacuation.metadata.namespace.as_deref().unwrap_or_default();
    let api: Api<Evacuation> = Api::namespaced(client.clone(), namespace);
    let params = PostParams { field_manager: Some(MANAGER.into()), ..PostParams::default() };
    let name = evacuation.metadata.name.as_deref().unwrap_or_default();
    let answer = api.create(&params, evacuation).await.map(|_| ());
    Operation::new("create", "Evacuation", namespace, name).result(answer)
}

/// Adds our finalizer to an Evacuation, with the annotation `maintenances`; or removes both if `on_behalf_of` is `None`.
pub async fn write_finalizer(
    writer: &Writer,
    evacuation: &ObservedEvacuation,
    on_behalf_of: Option<&str>,
) -> Result<Written<SlimEvacuation>, RequestError> {
    let finalizers = evacuation.finalizers_with_ours(on_behalf_of.is_some());
    let metadata = json!({"finalizers": finalizers, "annotations": {MAINTENANCES_ANNOTATION: on_behalf_of}});
    let object = evacuation.version.object(&evacuation.namespace, &evacuation.name);
    writer.patch(&object, json!({"metadata": metadata})).await
}

/// The API server's answer to a write of a maintenance, which may be unreadable.
pub type Answer = DeserializeGuard<NodeMaintenance>;

/// Writes the status of a maintenance.
pub async fn write_status(
    writer: &Writer,
    maintenance: &NodeMaintenance,
    status: Value,
) -> Result<Written<Answer>, RequestError> {
    let status = difference(&json!(maintenance.status), &status);
    writer.patch_status(&Object::of(&maintenance.metadata), status).await
}

/// The JSON merge patch from one value to another. Removed fields become null.
fn difference(old: &Value, new: &Value) -> Value {
    let (Some(old), Some(new)) = (old.as_object(), new.as_object()) else { return new.clone() };
    let mut patch = Map::new();
    for (key, value) in new {
        let known = old.get(key).unwrap_or(&Value::Null);
        if known != value {
            patch.insert(key.clone(), difference(known, value));
        }
    }
    for key in old.keys().filter(|key| !new.contains_key(*key)) {
        patch.insert(key.clone(), Value::Null);
    }
    patch.into()
}

/// The name of the volume that a claim is bound to; `None` if it is unbound or does not exist.
pub async fn volume_of(
    client: &Client,
    namespace: &str,
    claim: &str,
) -> Result<Option<String>, RequestError> {
    let api: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
    let doing = Operation::new("get", "PersistentVolumeClaim", namespace, claim);
    let found = doing.result(api.get_opt(claim).await)?;
    Ok(found.and_then(|claim| claim.spec?.volume_name).filter(|name| !name.is_empty()))
}

/// The name of a persistent volume in a node's `volumesAttached`; `None` if it is not a CSI volume or does not exist.
pub async fn handle_of(client: &Client, volume: &str) -> Result<Option<String>, RequestError> {
    let found = Api::<PersistentVolume>::all(client.clone()).get_opt(volume).await;
    let found = Operation::new("get", "PersistentVolume", "", volume).result(found)?;
    let csi = found.and_then(|volume| volume.spec?.csi);
    Ok(csi.map(|csi| format!("kubernetes.io/csi/{}^{}", csi.driver, csi.volume_handle)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patch_contains_changes_and_removals() {
        let old = json!({"same": 1, "list": [1, 2], "inner": {"gone": 1, "kept": 2}, "gone": {"x": 1}});
        let new = json!({"same": 1, "list": [2], "inner": {"kept": 2, "new": 3}, "fresh": {"y": 1}});
        let patch = difference(&old, &new);
        let expected =
            json!({"list": [2], "inner": {"gone": null, "new": 3}, "gone": null, "fresh": {"y": 1}});
        assert_eq!(patch, expected);
        assert_eq!(difference(&Value::Null, &new), new);
    }
}

//! The API calls. Each carries the UID of what it means and, where it decides something, the resourceVersion
//! that the decision was made on; what a frozen process sends too late changes nothing.

use haulout_api_types::Evacuation;
use haulout_service_runtime::api::{Doing, RequestError, Written};
use kube::Client;
use kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions};
use kube::core::DeserializeGuard;
use serde_json::{Value, json};

use crate::record::Record;

/// Who writes, as `kubectl get --show-managed-fields` tells.
const MANAGER: &str = "haulout-evacuation-controller";

/// The object as it is after a write, unless it cannot be read.
pub type Answer = Option<Box<Evacuation>>;

/// Changes fields of the status. With none, nothing is written, and the answer still tells whether the record is up to
/// date.
pub async fn write_status(
    client: &Client,
    record: &Record,
    status: Value,
) -> Result<Written<Answer>, RequestError> {
    let patch = json!({
        "metadata": {"uid": record.uid.to_string(), "resourceVersion": &*record.version},
        "status": status,
    });
    let params = PatchParams { field_manager: Some(MANAGER.into()), ..PatchParams::default() };
    let answer = evacuations(client, record).patch_status(&record.name, &params, &Patch::Merge(patch)).await;
    written("patch the status of", record, answer)
}

/// Leaves only these finalizers.
pub async fn write_finalizers(
    client: &Client,
    record: &Record,
    keep: &[String],
) -> Result<Written<Answer>, RequestError> {
    let patch = json!({
        "metadata": {"uid": record.uid.to_string(), "resourceVersion": &*record.version, "finalizers": keep},
    });
    let params = PatchParams { field_manager: Some(MANAGER.into()), ..PatchParams::default() };
    let answer = evacuations(client, record).patch(&record.name, &params, &Patch::Merge(patch)).await;
    written("patch", record, answer)
}

/// Deletes the Evacuation if it is still as it was.
pub async fn delete(client: &Client, record: &Record) -> Result<Written<Answer>, RequestError> {
    let params = DeleteParams {
        preconditions: Some(Preconditions {
            uid: Some(record.uid.to_string()),
            resource_version: Some(record.version.to_string()),
        }),
        ..DeleteParams::default()
    };
    let answer = evacuations(client, record).delete(&record.name, &params).await;
    let answer = answer.map(|either| either.left().unwrap_or(DeserializeGuard(Ok(Evacuation::default()))));
    written("delete", record, answer)
}

fn evacuations(client: &Client, record: &Record) -> Api<DeserializeGuard<Evacuation>> {
    Api::namespaced(client.clone(), &record.namespace)
}

fn written(
    verb: &'static str,
    record: &Record,
    answer: kube::Result<DeserializeGuard<Evacuation>>,
) -> Result<Written<Answer>, RequestError> {
    let answer = answer.map(|DeserializeGuard(object)| object.ok().map(Box::new));
    Doing::new(verb, "Evacuation", &record.namespace, &record.name).written(answer)
}

//! The API calls of this service. What an eviction's answer means is in [`haulout_service_runtime::eviction`].

use haulout_api_types::Evacuation;
use haulout_service_runtime::api::{RequestError, Writer, Written};
use kube::core::DeserializeGuard;
use serde_json::{Value, json};

use crate::record::Record;

/// Who writes, as `kubectl get --show-managed-fields` shows.
pub const MANAGER: &str = "haulout-evacuation-controller";

/// The object as it is after a write, if it can be read.
pub type Answer = DeserializeGuard<Evacuation>;

/// Changes fields of the status. With none, nothing is written, and the answer still tells whether the record is up to
/// date.
pub async fn write_status(
    writer: &Writer,
    record: &Record,
    status: Value,
) -> Result<Written<Answer>, RequestError> {
    writer.patch_status(&record.object(), status).await
}

/// Leaves only these finalizers.
pub async fn write_finalizers(
    writer: &Writer,
    record: &Record,
    keep: &[String],
) -> Result<Written<Answer>, RequestError> {
    writer.patch(&record.object(), json!({"metadata": {"finalizers": keep}})).await
}

/// Deletes the Evacuation if it is still as it was.
pub async fn delete(writer: &Writer, record: &Record) -> Result<Written<()>, RequestError> {
    writer.delete::<Evacuation>(&record.object()).await
}

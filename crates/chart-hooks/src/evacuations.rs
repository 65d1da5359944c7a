//! Lists, withdraws and deletes Evacuations for `cleanup` and `withdraw`, and checks whether they forbid cancellation.

use futures::{StreamExt as _, TryStreamExt as _, stream};
use haulout_api_types::evacuation::LocalPodReference;
use haulout_api_types::{Evacuation, instigators};
use haulout_service_runtime::api::{Object, Operation, Written};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::Api;
use kube::{Client, ResourceExt as _};
use serde::Deserialize;

use crate::cleanup::{CONCURRENCY, CleanupError, count, pages, remove_finalizers, writer};

/// The fields of an Evacuation that the hooks read, so that Evacuations of a later version are readable too.
#[derive(Clone, Debug, Default, Deserialize, kube::Resource)]
#[resource(inherit = Evacuation)]
#[serde(default)]
pub(crate) struct PartialEvacuation {
    metadata: ObjectMeta,
    spec: Spec,
    status: Status,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Spec {
    pod_ref: LocalPodReference,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    evacuation_cancellation_policy: Option<String>,
}

impl PartialEvacuation {
    /// Whether the evacuation cannot be cancelled. An unknown policy counts as `Forbid`.
    fn forbids_cancellation(&self) -> bool {
        self.status.evacuation_cancellation_policy.as_deref().is_some_and(|policy| policy != "Allow")
    }

    fn full_name(&self) -> String {
        format!("{}/{}", self.namespace().unwrap_or_default(), self.name_any())
    }

    async fn pod_exists(&self, client: &Client) -> Result<bool, CleanupError> {
        let pods: Api<Pod> = Api::namespaced(client.clone(), &self.namespace().unwrap_or_default());
        let LocalPodReference { name, uid } = &self.spec.pod_ref;
        let operation = Operation::new("get", "Pod", Object::of(&self.metadata).namespace, name);
        let found = operation.result(pods.get_metadata_opt(name).await)?;
        Ok(found.is_some_and(|pod| pod.metadata.uid.as_deref() == Some(uid)))
    }
}

/// Lists all Evacuations. Returns none if the kind is no longer served.
pub(crate) async fn list(client: &Client) -> Result<Vec<PartialEvacuation>, CleanupError> {
    let api: Api<PartialEvacuation> = Api::all(client.clone());
    pages("evacuations", async |params| api.list(params).await).await
}

/// Fails if an Evacuation forbids cancellation and its pod exists.
pub(crate) async fn reject_forbidden_cancellation(
    client: &Client,
    all: &[PartialEvacuation],
    progress: &'static str,
) -> Result<(), CleanupError> {
    let forbidding = all.iter().filter(|evacuation| evacuation.forbids_cancellation());
    let check = async |evacuation: &PartialEvacuation| {
        let exists = evacuation.pod_exists(client).await?;
        Ok::<_, CleanupError>(exists.then(|| evacuation.full_name()))
    };
    let found = stream::iter(forbidding).map(check).buffer_unordered(CONCURRENCY);
    let mut names: Vec<_> = found.try_filter_map(async |name| Ok(name)).try_collect().await?;
    names.sort_unstable();
    if names.is_empty() { Ok(()) } else { Err(CleanupError::cancellation_forbidden(&names, progress)) }
}

/// Removes the finalizers of these instigators, and returns the number of changed Evacuations. An Evacuation that forbids
/// cancellation keeps them until the evacuation controller removes them, when the pod is gone.
pub(crate) async fn withdraw(
    client: &Client,
    all: &[PartialEvacuation],
    of: &[&str],
) -> Result<usize, CleanupError> {
    let ours: Vec<_> = of.iter().map(|subdomain| instigators::finalizer(subdomain)).collect();
    let writer = writer(client);
    let cancellable = all.iter().filter(|evacuation| !evacuation.forbids_cancellation());
    let clean = async |evacuation: &PartialEvacuation| {
        let unwanted = |finalizer: &str| ours.iter().any(|our| our == finalizer);
        let written = remove_finalizers::<Evacuation>(&writer, &evacuation.metadata, unwanted).await?;
        Ok(written.is_some())
    };
    count(stream::iter(cancellable).map(clean)).await
}

/// Deletes all Evacuations, each in the version that was listed. Without an evacuation controller, nobody would remove
/// their finalizers, and they would block the deletion of their namespaces.
pub(crate) async fn delete_all(client: &Client, all: &[PartialEvacuation]) -> Result<usize, CleanupError> {
    let writer = writer(client);
    let clean = async |evacuation: &PartialEvacuation| {
        let unwanted = |finalizer: &str| instigators::subdomain(finalizer).is_some();
        let written = remove_finalizers::<Evacuation>(&writer, &evacuation.metadata, unwanted).await?;
        let metadata = match &written {
            None => &evacuation.metadata,
            Some(Written::Done(written)) => &written.metadata,
            Some(_) => return Ok(true),
        };
        if evacuation.metadata.deletion_timestamp.is_some() {
            return Ok(written.is_some());
        }
        writer.delete::<Evacuation>(&Object::of(metadata)).await?;
        Ok(true)
    };
    count(stream::iter(all).map(clean)).await
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn only_allow_or_no_policy_allows_cancellation() {
        let evacuation = |status: Value| -> PartialEvacuation {
            serde_json::from_value(json!({
                "metadata": {"name": "u-web", "namespace": "shop"},
                "spec": {"podRef": {"name": "web", "uid": "u"}},
                "status": status,
            }))
            .unwrap()
        };
        for (status, expected) in [
            (json!({}), false),
            (json!({"evacuationCancellationPolicy": "Allow"}), false),
            (json!({"evacuationCancellationPolicy": "Forbid"}), true),
            (json!({"evacuationCancellationPolicy": "LaterVersion"}), true),
        ] {
            assert_eq!(evacuation(status.clone()).forbids_cancellation(), expected, "{status}");
        }
        let bare: PartialEvacuation = serde_json::from_value(json!({"metadata": {"name": "u-web"}})).unwrap();
        assert!(!bare.forbids_cancellation(), "a new one has no status");
    }
}

//! What becomes of Evacuations when an installation or one of its services ends: those that the service asked for
//! are withdrawn, or all of them are deleted. What an evacuator cannot stop half-way is found before anything else.

use futures::{StreamExt as _, TryStreamExt as _, stream};
use haulout_api_types::evacuation::LocalPodReference;
use haulout_api_types::{Evacuation, instigators};
use haulout_service_runtime::api::{Doing, Object, Written};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::Api;
use kube::{Client, ResourceExt as _};
use serde::Deserialize;

use crate::cleanup::{AT_ONCE, CleanupError, count, pages, without_finalizers, writer};

/// What is read of an Evacuation; one of a later version can be read too.
#[derive(Clone, Debug, Default, Deserialize, kube::Resource)]
#[resource(inherit = Evacuation)]
#[serde(default)]
pub(crate) struct Slim {
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

impl Slim {
    /// Whether its evacuator cannot stop half-way. A policy that we do not know is taken for one that says so.
    fn forbids_cancellation(&self) -> bool {
        self.status.evacuation_cancellation_policy.as_deref().is_some_and(|policy| policy != "Allow")
    }

    fn full_name(&self) -> String {
        format!("{}/{}", self.namespace().unwrap_or_default(), self.name_any())
    }

    async fn has_its_pod(&self, client: &Client) -> Result<bool, CleanupError> {
        let pods: Api<Pod> = Api::namespaced(client.clone(), &self.namespace().unwrap_or_default());
        let LocalPodReference { name, uid } = &self.spec.pod_ref;
        let doing = Doing::new("get", "Pod", Object::of(&self.metadata).namespace, name);
        let found = doing.result(pods.get_metadata_opt(name).await)?;
        Ok(found.is_some_and(|pod| pod.metadata.uid.as_deref() == Some(uid)))
    }
}

/// All Evacuations; none if the kind is no longer served.
pub(crate) async fn list(client: &Client) -> Result<Vec<Slim>, CleanupError> {
    let api: Api<Slim> = Api::all(client.clone());
    pages("evacuations", async |params| api.list(params).await).await
}

/// Stops if one of them must not be cancelled, because an evacuator cannot stop and the pod is still there.
pub(crate) async fn refuse_past_recall(
    client: &Client,
    all: &[Slim],
    so_far: &'static str,
) -> Result<(), CleanupError> {
    let forbidding = all.iter().filter(|evacuation| evacuation.forbids_cancellation());
    let look = async |evacuation: &Slim| {
        let there = evacuation.has_its_pod(client).await?;
        Ok::<_, CleanupError>(there.then(|| evacuation.full_name()))
    };
    let found = stream::iter(forbidding).map(look).buffer_unordered(AT_ONCE);
    let mut names: Vec<_> = found.try_filter_map(async |name| Ok(name)).try_collect().await?;
    names.sort_unstable();
    if names.is_empty() { Ok(()) } else { Err(CleanupError::past_recall(&names, so_far)) }
}

/// Withdraws what these instigators asked for, and counts where. An Evacuation that forbids cancellation goes on:
/// it keeps their finalizers, which the evacuation controller removes when the pod has gone.
pub(crate) async fn withdraw(client: &Client, all: &[Slim], of: &[&str]) -> Result<usize, CleanupError> {
    let ours: Vec<_> = of.iter().map(|subdomain| instigators::finalizer(subdomain)).collect();
    let writer = writer(client);
    let cancellable = all.iter().filter(|evacuation| !evacuation.forbids_cancellation());
    let clean = async |evacuation: &Slim| {
        let unwanted = |finalizer: &str| ours.iter().any(|our| our == finalizer);
        let written = without_finalizers::<Evacuation>(&writer, &evacuation.metadata, unwanted).await?;
        Ok(written.is_some())
    };
    count(stream::iter(cancellable).map(clean)).await
}

/// Deletes all of them, each in the version that was seen: without an evacuation controller nobody would ever act
/// on them or take finalizers off them, and they would hold up the deletion of their namespaces.
pub(crate) async fn end(client: &Client, all: &[Slim]) -> Result<usize, CleanupError> {
    let writer = writer(client);
    let clean = async |evacuation: &Slim| {
        let unwanted = |finalizer: &str| instigators::subdomain(finalizer).is_some();
        let written = without_finalizers::<Evacuation>(&writer, &evacuation.metadata, unwanted).await?;
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
    fn only_allow_and_absence_allow_cancellation() {
        let evacuation = |status: Value| -> Slim {
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
        let bare: Slim = serde_json::from_value(json!({"metadata": {"name": "u-web"}})).unwrap();
        assert!(!bare.forbids_cancellation(), "a new one has no status");
    }
}

//! Gives pods that the workload evacuator has moved to their Deployments back to their ReplicaSets, for `cleanup` and
//! `withdraw`: nobody else would do that once the service is gone.

use std::time::{Duration, Instant};

use futures::{StreamExt as _, TryStreamExt as _, stream};
use haulout_api_types::former_owner::FormerOwner;
use haulout_api_types::names::FORMER_OWNER_ANNOTATION;
use haulout_api_types::pod::controller_of;
use haulout_service_runtime::access::Permission;
use haulout_service_runtime::api::{Object, Operation};
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::Api;
use kube::core::PartialObjectMeta;
use kube::{Client, ResourceExt as _};
use serde::Deserialize;
use tracing::warn;

use crate::cleanup::{CONCURRENCY, CleanupError, pages, writer};

/// How long a ReplicaSet may take to delete the replacement of a pod that it got back. Until then, the pod keeps the
/// deletion cost that makes the ReplicaSet delete the replacement and not the pod.
const REPLACEMENT_LIMIT: Duration = Duration::from_secs(30);
/// The pauses while ReplicaSets act.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(3);

/// The permissions that [`give_back`] needs. With OwnerReferencesPermissionEnforcement, the API server requires `delete` for
/// changes of owner references, and `update` on the finalizers of an owner whose deletion the reference blocks.
pub(crate) fn permissions() -> Vec<Permission> {
    vec![
        Permission::cluster("list", "", "pods"),
        Permission::cluster("patch", "", "pods"),
        Permission::cluster("delete", "", "pods"),
        Permission::cluster("get", "apps", "replicasets"),
        Permission::cluster("update", "apps", "replicasets/finalizers"),
    ]
}

/// The fields of a ReplicaSet that decide whether it can take a pod back.
#[derive(Clone, Debug, Default, Deserialize, kube::Resource)]
#[resource(inherit = ReplicaSet)]
#[serde(default)]
struct SlimReplicaSet {
    metadata: ObjectMeta,
    spec: Spec,
    status: Status,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Spec {
    replicas: i32,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    replicas: i32,
}

/// What has to be done for a pod with our annotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Its controller is the Deployment, and the ReplicaSet can take it back.
    GiveBack,
    /// Its ReplicaSet still has a pod too many.
    Wait,
    /// Remove the annotation and restore the deletion cost.
    Restore,
}

/// Decides on one pod. `set` is the ReplicaSet of the annotation, if it exists.
fn decide(pod: &ObjectMeta, set: Option<&SlimReplicaSet>) -> Step {
    let controller = controller_of(pod).map(|owner| owner.kind.as_str());
    match (controller, set.filter(|set| set.metadata.deletion_timestamp.is_none())) {
        // A ReplicaSet that wants no pods would delete it without regard to its budget.
        (Some("Deployment"), Some(set)) if set.spec.replicas > 0 => Step::GiveBack,
        (Some("ReplicaSet"), Some(set)) if set.status.replicas > set.spec.replicas => Step::Wait,
        _ => Step::Restore,
    }
}

/// Gives all moved pods back, until no pod has our annotation. Returns the number of these pods.
pub(crate) async fn give_back(client: &Client) -> Result<usize, CleanupError> {
    let api: Api<Pod> = Api::all(client.clone());
    let (begun, mut pause, mut most) = (Instant::now(), FIRST_PAUSE, 0);
    loop {
        let mut pods = pages("pods", async |params| api.list_metadata(params).await).await?;
        pods.retain(|pod| {
            pod.metadata.deletion_timestamp.is_none()
                && pod.annotations().contains_key(FORMER_OWNER_ANNOTATION)
        });
        if pods.is_empty() {
            return Ok(most);
        }
        most = most.max(pods.len());
        let is_late = begun.elapsed() > REPLACEMENT_LIMIT;
        let steps = stream::iter(&pods).map(|pod| step(client, &pod.metadata, is_late));
        let waiting = steps.buffer_unordered(CONCURRENCY);
        let waits = waiting.try_fold(false, |any, waits| async move { Ok(any || waits) }).await?;
        if waits {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }
}

/// Does what one pod needs. Returns whether its ReplicaSet has to act first. The next pass handles conflicts.
async fn step(client: &Client, pod: &ObjectMeta, is_late: bool) -> Result<bool, CleanupError> {
    let former = FormerOwner::of(pod);
    let set = match &former {
        Some(former) => replica_set(client, pod, former).await?,
        None => None,
    };
    let (patch, waits) = match (decide(pod, set.as_ref()), &former) {
        (Step::GiveBack, Some(former)) => (former.give_back_patch(pod), true),
        (Step::Wait, _) if !is_late => return Ok(true),
        _ => {
            if controller_of(pod).is_some_and(|owner| owner.kind == "Deployment") {
                let (namespace, name) = (pod.namespace.as_deref(), pod.name.as_deref());
                warn!(
                    namespace,
                    name,
                    "no ReplicaSet can take the pod back, so it belongs to its Deployment directly: delete the pod when it is no \
                     longer needed"
                );
            }
            (FormerOwner::restore_patch(former.as_ref()), false)
        }
    };
    writer(client).patch::<PartialObjectMeta<Pod>>(&Object::of(pod), patch).await?;
    Ok(waits)
}

/// The ReplicaSet of the annotation, if it exists.
async fn replica_set(
    client: &Client,
    pod: &ObjectMeta,
    former: &FormerOwner,
) -> Result<Option<SlimReplicaSet>, CleanupError> {
    let namespace = pod.namespace.as_deref().unwrap_or_default();
    let api: Api<SlimReplicaSet> = Api::namespaced(client.clone(), namespace);
    let operation = Operation::new("get", "ReplicaSet", namespace, &former.replica_set);
    let found = operation.result(api.get_opt(&former.replica_set).await)?;
    Ok(found.filter(|set| set.metadata.uid.as_deref() == Some(&former.uid)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(kind: &str) -> ObjectMeta {
        let owner =
            json!({"apiVersion": "apps/v1", "kind": kind, "name": "web", "uid": "x", "controller": true});
        serde_json::from_value(json!({"name": "web-1", "ownerReferences": [owner]})).unwrap()
    }

    fn set(metadata: Value, wanted: i32, has: i32) -> SlimReplicaSet {
        let set = json!({"metadata": metadata, "spec": {"replicas": wanted}, "status": {"replicas": has}});
        serde_json::from_value(set).unwrap()
    }

    #[test]
    fn pods_are_given_back_to_sets_that_want_them() {
        let deleted = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        for (owner, set, expected) in [
            ("Deployment", Some(set(json!({}), 1, 1)), Step::GiveBack),
            ("Deployment", Some(set(json!({}), 0, 0)), Step::Restore),
            ("Deployment", Some(set(deleted.clone(), 1, 1)), Step::Restore),
            ("Deployment", None, Step::Restore),
            ("ReplicaSet", Some(set(json!({}), 1, 2)), Step::Wait),
            ("ReplicaSet", Some(set(json!({}), 1, 1)), Step::Restore),
            ("ReplicaSet", None, Step::Restore),
        ] {
            assert_eq!(decide(&pod(owner), set.as_ref()), expected, "{owner} {set:?}");
        }
    }
}

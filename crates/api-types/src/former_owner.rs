//! The annotation of a pod that belongs directly to its Deployment while its ReplicaSet creates a replacement, and the
//! patches that move the pod to the Deployment and back. All of it that has to be undone is in the annotation.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::names::{FORMER_OWNER_ANNOTATION, POD_DELETION_COST_ANNOTATION};
use crate::pod::controller_of;

/// The highest deletion cost: the ReplicaSet deletes all other ready pods first.
const HIGHEST_COST: &str = "2147483647";
/// The lowest deletion cost: the ReplicaSet deletes this pod before other ready pods.
const LOWEST_COST: &str = "-2147483648";

/// Where a pod belonged before it was moved to its Deployment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FormerOwner {
    /// The name of the ReplicaSet.
    pub replica_set: String,
    /// The UID of the ReplicaSet.
    pub uid: String,
    /// Whether the reference to it had `blockOwnerDeletion`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub block_owner_deletion: bool,
    /// The number of available pods that the Deployment had before.
    pub available: i32,
    /// When the pod was moved, in seconds since 1970.
    pub since: i64,
    /// Its deletion cost before, if it had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deletion_cost: Option<String>,
}

impl FormerOwner {
    /// Reads the annotation; `None` if there is none, or if somebody has made it unreadable.
    pub fn of(pod: &ObjectMeta) -> Option<Self> {
        Self::parse(pod.annotations.as_ref()?.get(FORMER_OWNER_ANNOTATION)?)
    }

    /// Reads the value of the annotation.
    pub fn parse(value: &str) -> Option<Self> {
        serde_json::from_str(value).ok()
    }

    /// The patch that moves the pod to its Deployment. `available` and `since` are those of the annotation. `None` if the pod
    /// does not belong to a ReplicaSet.
    ///
    /// `blockOwnerDeletion` stays unset: setting it requires permission to update the finalizers of the owner.
    pub fn move_patch(
        pod: &ObjectMeta,
        deployment: (&str, &str),
        available: i32,
        since: i64,
    ) -> Option<Value> {
        let former = Self::now(pod, available, since)?;
        let cost = former.deletion_cost.clone();
        let (name, uid) = deployment;
        let reference = OwnerReference {
            api_version: "apps/v1".into(),
            kind: "Deployment".into(),
            name: name.into(),
            uid: uid.into(),
            controller: Some(true),
            block_owner_deletion: None,
        };
        Some(json!({"metadata": {
            "ownerReferences": with_controller(pod, reference),
            "annotations": {FORMER_OWNER_ANNOTATION: json!(former).to_string(), POD_DELETION_COST_ANNOTATION: cost},
        }}))
    }

    /// The annotation for a pod of a ReplicaSet.
    fn now(pod: &ObjectMeta, available: i32, since: i64) -> Option<Self> {
        let owner = controller_of(pod).filter(|owner| owner.kind == "ReplicaSet")?;
        let cost = pod.annotations.as_ref().and_then(|all| all.get(POD_DELETION_COST_ANNOTATION)).cloned();
        Some(Self {
            replica_set: owner.name.clone(),
            uid: owner.uid.clone(),
            block_owner_deletion: owner.block_owner_deletion.unwrap_or_default(),
            available,
            since,
            // If there is an annotation, the cost is one of ours.
            deletion_cost: Self::of(pod).map_or(cost, |earlier| earlier.deletion_cost),
        })
    }

    /// The patch for a pod that waits until it is moved: if the Deployment is scaled down, it is deleted before others.
    pub fn prefer_patch(pod: &ObjectMeta, since: i64) -> Option<Value> {
        let former = Self::now(pod, 0, since)?;
        Some(json!({"metadata": {"annotations": {
            FORMER_OWNER_ANNOTATION: json!(former).to_string(), POD_DELETION_COST_ANNOTATION: LOWEST_COST,
        }}}))
    }

    /// The patch that gives the pod back to its ReplicaSet, which then has one pod too many and deletes the replacement, because
    /// of the deletion costs. The annotation stays until [`FormerOwner::restore_patch`].
    pub fn give_back_patch(&self, pod: &ObjectMeta) -> Value {
        let reference = OwnerReference {
            api_version: "apps/v1".into(),
            kind: "ReplicaSet".into(),
            name: self.replica_set.clone(),
            uid: self.uid.clone(),
            controller: Some(true),
            block_owner_deletion: self.block_owner_deletion.then_some(true),
        };
        json!({"metadata": {
            "ownerReferences": with_controller(pod, reference),
            "annotations": {POD_DELETION_COST_ANNOTATION: HIGHEST_COST},
        }})
    }

    /// The patch that removes the annotation and restores the deletion cost.
    pub fn restore_patch(former: Option<&Self>) -> Value {
        let mut annotations = json!({FORMER_OWNER_ANNOTATION: null});
        if let (Some(former), Some(annotations)) = (former, annotations.as_object_mut()) {
            annotations.insert(POD_DELETION_COST_ANNOTATION.into(), json!(former.deletion_cost));
        }
        json!({"metadata": {"annotations": annotations}})
    }
}

/// The owner references of the pod, with this controller.
fn with_controller(pod: &ObjectMeta, controller: OwnerReference) -> Vec<OwnerReference> {
    let others = pod.owner_references.iter().flatten().filter(|owner| owner.controller != Some(true));
    others.cloned().chain([controller]).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Applies a merge patch to the metadata of a pod, as the API server does.
    fn patched(pod: &ObjectMeta, patch: &Value) -> ObjectMeta {
        let mut pod = pod.clone();
        let metadata = &patch["metadata"];
        if let Some(owners) = metadata.get("ownerReferences") {
            pod.owner_references = Some(serde_json::from_value(owners.clone()).unwrap());
        }
        for (key, value) in metadata["annotations"].as_object().unwrap() {
            let annotations = pod.annotations.get_or_insert_default();
            match value.as_str() {
                Some(value) => annotations.insert(key.clone(), value.into()),
                None => annotations.remove(key),
            };
        }
        pod
    }

    fn pod(cost: Option<&str>, block_owner_deletion: Option<bool>) -> ObjectMeta {
        let owner = |kind: &str, controller| OwnerReference {
            api_version: "apps/v1".into(),
            kind: kind.into(),
            name: "web-5d".into(),
            uid: "u".into(),
            controller,
            block_owner_deletion,
        };
        let cost = cost.map(|cost| (POD_DELETION_COST_ANNOTATION.to_owned(), cost.to_owned()));
        let other = ("example.com/a".to_owned(), "b".to_owned());
        ObjectMeta {
            owner_references: Some(vec![owner("ConfigMap", None), owner("ReplicaSet", Some(true))]),
            annotations: Some(cost.into_iter().chain([other]).collect::<BTreeMap<_, _>>()),
            ..ObjectMeta::default()
        }
    }

    #[test]
    fn pod_is_the_same_after_it_was_moved_and_given_back() {
        for cost in [None, Some("5")] {
            for block_owner_deletion in [None, Some(true)] {
                let before = pod(cost, block_owner_deletion);
                let patch = FormerOwner::move_patch(&before, ("web", "d"), 3, 17).unwrap();
                let moved = patched(&before, &patch);
                let controller = controller_of(&moved).unwrap();
                assert_eq!((controller.kind.as_str(), controller.uid.as_str()), ("Deployment", "d"));
                assert_eq!(controller.block_owner_deletion, None);
                assert_eq!(moved.owner_references.as_ref().unwrap().len(), 2);
                assert_eq!(
                    moved.annotations.as_ref().unwrap().get(POD_DELETION_COST_ANNOTATION).map(String::as_str),
                    cost
                );
                let former = FormerOwner::of(&moved).unwrap();
                assert_eq!((former.available, former.since), (3, 17));

                let back = patched(&moved, &former.give_back_patch(&moved));
                assert_eq!(back.owner_references, before.owner_references);
                assert_eq!(back.annotations.as_ref().unwrap()[POD_DELETION_COST_ANNOTATION], HIGHEST_COST);
                let again = patched(&back, &FormerOwner::move_patch(&back, ("web", "d"), 3, 18).unwrap());
                assert_eq!(FormerOwner::of(&again).unwrap().deletion_cost.as_deref(), cost);
                assert_eq!(
                    again.annotations.as_ref().unwrap().get(POD_DELETION_COST_ANNOTATION).map(String::as_str),
                    cost
                );

                let former = FormerOwner::of(&back);
                assert_eq!(patched(&back, &FormerOwner::restore_patch(former.as_ref())), before);
            }
        }
    }

    #[test]
    fn unreadable_annotation_is_removed_and_the_cost_stays() {
        let mut pod = pod(Some("5"), None);
        let before = pod.clone();
        pod.annotations.get_or_insert_default().insert(FORMER_OWNER_ANNOTATION.into(), "{}".into());
        assert_eq!(FormerOwner::of(&pod), None);
        assert_eq!(patched(&pod, &FormerOwner::restore_patch(None)), before);
    }

    #[test]
    fn only_pods_of_replica_sets_are_moved() {
        let mut pod = pod(None, None);
        pod.owner_references.get_or_insert_default().retain(|owner| owner.controller.is_none());
        assert_eq!(FormerOwner::move_patch(&pod, ("web", "d"), 1, 1), None);
    }
}

//! The type of a pod, and whether it has finished.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use crate::names::MIRROR_POD_ANNOTATION;
use crate::node_maintenance::PodType;

/// The owner reference of the managing controller.
pub fn controller_of(meta: &ObjectMeta) -> Option<&OwnerReference> {
    meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

impl PodType {
    /// The type of the pod with this metadata.
    pub fn of(meta: &ObjectMeta) -> Self {
        let mirror = meta.annotations.as_ref().is_some_and(|all| all.contains_key(MIRROR_POD_ANNOTATION));
        Self::classify(mirror, controller_of(meta).map(|owner| owner.kind.as_str()))
    }

    /// The type of a pod, from its mirror annotation and the kind of its controller. The API group of the controller does not
    /// matter: DaemonSets of other groups also create pods on cordoned nodes.
    pub fn classify(is_mirror: bool, controller_kind: Option<&str>) -> Self {
        match controller_kind {
            _ if is_mirror => Self::Static,
            Some("DaemonSet") => Self::DaemonSet,
            _ => Self::Default,
        }
    }
}

/// Whether a pod in this phase has finished. A finished pod counts as gone.
pub fn is_finished(phase: Option<&str>) -> bool {
    matches!(phase, Some("Succeeded" | "Failed"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn pod_type_depends_on_mirror_annotation_and_controller() {
        let owner = |kind: &str, controller: bool| json!({"apiVersion": "apps/v1", "kind": kind, "name": "x", "uid": "u", "controller": controller});
        let mirror = json!({MIRROR_POD_ANNOTATION: "hash"});
        let cases = [
            (json!({}), PodType::Default),
            (json!({"ownerReferences": [owner("ReplicaSet", true)]}), PodType::Default),
            (json!({"ownerReferences": [owner("DaemonSet", true)]}), PodType::DaemonSet),
            (json!({"ownerReferences": [owner("DaemonSet", false)]}), PodType::Default),
            (json!({"ownerReferences": [owner("Foo", false), owner("DaemonSet", true)]}), PodType::DaemonSet),
            (json!({"annotations": mirror}), PodType::Static),
            (json!({"annotations": mirror, "ownerReferences": [owner("Node", true)]}), PodType::Static),
        ];
        for (meta, expected) in cases {
            assert_eq!(PodType::of(&serde_json::from_value(meta.clone()).unwrap()), expected, "{meta}");
        }
    }

    #[test]
    fn finished_pods_succeeded_or_failed() {
        let finished: Vec<_> =
            [None, Some("Pending"), Some("Running"), Some("Succeeded"), Some("Failed"), Some("Unknown")]
                .into_iter()
                .filter(|phase| is_finished(*phase))
                .collect();
        assert_eq!(finished, [Some("Succeeded"), Some("Failed")]);
    }

    proptest! {
        /// A mirror pod is Static, and only the managing owner decides about DaemonSet.
        #[test]
        fn mirrors_are_static_and_only_the_controller_counts(
            mirror: bool,
            kinds in proptest::collection::vec(proptest::sample::select(vec!["DaemonSet", "ReplicaSet", "Node"]), 0..4),
            controller in 0usize..5,
        ) {
            let owners: Vec<_> = kinds.iter().enumerate().map(|(i, kind)| {
                json!({"apiVersion": "x/v1", "kind": kind, "name": "x", "uid": "u", "controller": i == controller})
            }).collect();
            let annotations = if mirror { json!({MIRROR_POD_ANNOTATION: ""}) } else { json!({}) };
            let meta = serde_json::from_value(json!({"annotations": annotations, "ownerReferences": owners})).unwrap();
            let expected = match (mirror, kinds.get(controller)) {
                (true, _) => PodType::Static,
                (false, Some(&"DaemonSet")) => PodType::DaemonSet,
                _ => PodType::Default,
            };
            prop_assert_eq!(PodType::of(&meta), expected);
        }
    }
}

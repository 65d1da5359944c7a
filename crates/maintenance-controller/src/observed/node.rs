//! A node, as observed.

use std::sync::Arc;

use haulout_drain_planner::cordon::NodeMarkers;
use haulout_drain_planner::placement::Taint;
use haulout_service_runtime::pods::{LabelSet, Toleration};
use k8s_openapi::api::core::v1::{self as core, Node, NodeCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::{Deserialize, Serialize};

use super::Version;

/// The fields of a Node that are deserialized.
#[derive(Resource, Clone, Debug, Deserialize, Serialize)]
#[resource(inherit = Node)]
pub struct SlimNode {
    /// The metadata.
    pub metadata: ObjectMeta,
    #[serde(default)]
    spec: SlimNodeSpec,
    #[serde(default)]
    status: SlimNodeStatus,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct SlimNodeSpec {
    unschedulable: bool,
    taints: Vec<core::Taint>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimNodeStatus {
    conditions: Vec<NodeCondition>,
    volumes_attached: Vec<SlimVolume>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct SlimVolume {
    name: String,
}

/// A node, as last observed.
#[derive(Clone, Debug, PartialEq)]
pub struct ObservedNode {
    /// The version of this state.
    pub version: Version,
    /// Its labels.
    pub labels: LabelSet,
    /// The volumes in `status.volumesAttached`. CSI volumes are named `kubernetes.io/csi/DRIVER^HANDLE` there.
    pub volumes: Box<[Arc<str>]>,
    /// The taints that keep new pods away, except the taint of a cordon.
    pub taints: Arc<[Taint]>,
    /// The annotations and conditions of maintenances.
    pub markers: NodeMarkers,
}

impl ObservedNode {
    /// Keeps what is needed of a Node.
    pub fn new(node: SlimNode) -> Self {
        let SlimNode { metadata, spec, status } = node;
        let labels = metadata.labels.iter().flatten().map(|(key, value)| (key.as_str(), value.as_str()));
        Self {
            version: Version::of(&metadata),
            labels: labels.collect(),
            volumes: status.volumes_attached.into_iter().map(|volume| volume.name.into()).collect(),
            taints: spec.taints.into_iter().filter_map(repelling_taint).collect(),
            markers: NodeMarkers::new(
                spec.unschedulable,
                metadata.annotations.into_iter().flatten(),
                status.conditions,
            ),
        }
    }
}

fn repelling_taint(taint: core::Taint) -> Option<Taint> {
    let repels = matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute") && taint.key != CORDON_TAINT;
    let value = taint.value.unwrap_or_default();
    repels.then(|| Taint { key: taint.key.into(), value: value.into(), effect: taint.effect.into() })
}

/// The taint that the control plane adds to an unschedulable node.
const CORDON_TAINT: &str = "node.kubernetes.io/unschedulable";

/// Whether one of these tolerations matches `node.kubernetes.io/unschedulable:NoSchedule`.
pub fn tolerates_cordon(tolerations: &[Toleration]) -> bool {
    tolerations.iter().any(|toleration| toleration.matches(CORDON_TAINT, "", "NoSchedule"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cordon_is_tolerated_by_key_or_wildcard() {
        let toleration = |key: Option<&str>, operator: Option<&str>, effect: Option<&str>| Toleration {
            key: key.map(Into::into),
            operator: operator.map(Into::into),
            effect: effect.map(Into::into),
            ..Toleration::default()
        };
        let cordon = Some("node.kubernetes.io/unschedulable");
        let cases = [
            (toleration(None, Some("Exists"), None), true),
            (toleration(cordon, Some("Exists"), Some("NoSchedule")), true),
            (toleration(cordon, None, Some("NoSchedule")), true),
            (toleration(cordon, Some("Exists"), Some("NoExecute")), false),
            (toleration(Some("dedicated"), Some("Exists"), None), false),
            (Toleration { value: Some("x".into()), ..toleration(cordon, Some("Equal"), None) }, false),
        ];
        for (toleration, expected) in cases {
            assert_eq!(tolerates_cordon(std::slice::from_ref(&toleration)), expected, "{toleration:?}");
        }
    }
}

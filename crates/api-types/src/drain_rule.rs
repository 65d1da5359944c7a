//! DrainRule (Cluster API's MachineDrainRules, for nodes): which pods a drain leaves out, waits for or
//! takes later than the others.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::node_maintenance::PodType;
use crate::schema;

/// Which pods on which nodes the rule is about, and what a drain does with them.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[kube(
    group = "nodemaintenance.k8s.io",
    version = "v1alpha1",
    kind = "DrainRule",
    plural = "drainrules",
    shortname = "drule",
    category = "haulout",
    derive = "PartialEq",
    derive = "Default",
    doc = "DrainRule says how a drain treats certain pods: in which order they leave, whether they are left alone, or waited for until they finish. Of all rules that match a pod, the first in alphabetical order applies; the pod label cluster.x-k8s.io/drain (skip or wait-completed) beats every rule.",
    printcolumn(
        name = "Behavior",
        type_ = "string",
        json_path = ".spec.drain.behavior",
        description = "What a drain does with the pods."
    ),
    printcolumn(
        name = "Order",
        type_ = "integer",
        json_path = ".spec.drain.order",
        description = "When the pods leave; higher is later."
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
pub struct DrainRuleSpec {
    /// What a drain does with the pods that the rule matches.
    pub drain: DrainRuleDrain,

    /// The nodes to which the rule applies, ORed. Absent or empty: all nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub nodes: Vec<DrainRuleNodes>,

    /// The pods to which the rule applies, ORed. Absent or empty: all pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub pods: Vec<DrainRulePods>,
}

/// What a drain does with matching pods.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[x_kube(
    validation = Rule::new("!has(self.order) || self.behavior == 'Drain'")
        .message("order can only be set with behavior Drain: remove it or change the behavior")
        .field_path(".order"),
)]
pub struct DrainRuleDrain {
    /// Drain: the pods are evacuated, in the given order. Skip: they are left alone, and neither they
    /// nor their volumes are waited for. WaitCompleted: they are not evacuated, and the drain of their node
    /// waits until they have finished; it applies to pods of type Default only.
    pub behavior: DrainBehavior,

    /// When the pods leave, with behavior Drain: those with a higher order leave later. Pods that no
    /// rule matches have order 0; a negative order leaves before them, a positive one after them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = i32::MIN, max = i32::MAX))]
    pub order: Option<i32>,
}

/// What a drain does with a pod.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DrainBehavior {
    /// Evacuate it.
    #[default]
    Drain,
    /// Leave it alone; wait neither for it nor for its volumes.
    Skip,
    /// Wait until it has finished by itself. Only for pods of type Default.
    WaitCompleted,
}

/// Nodes that a rule applies to.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct DrainRuleNodes {
    /// Labels of the node. Empty: all nodes.
    #[schemars(schema_with = "schema::label_selector")]
    pub selector: LabelSelector,
}

/// Pods that a rule applies to. All that is given must match.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.selector) || has(self.namespaceSelector) || has(self.podTypes)")
        .message("say which pods: give selector, namespaceSelector or podTypes; all pods are selector: {}"),
)]
pub struct DrainRulePods {
    /// Labels of the pod. Absent or empty: all pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::label_selector")]
    pub selector: Option<LabelSelector>,

    /// Labels of the pod's namespace. Absent or empty: all namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::label_selector")]
    pub namespace_selector: Option<LabelSelector>,

    /// Types of the pod. Absent or empty: all types.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 3))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub pod_types: Vec<PodType>,
}

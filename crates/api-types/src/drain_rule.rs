//! DrainRule (Cluster API's MachineDrainRules, for nodes): which pods a drain skips, waits for, or evacuates earlier or
//! later.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::node_maintenance::PodType;
use crate::schema;

/// Specification of a DrainRule: the nodes and pods to which it applies, and what a drain does with the pods.
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
    doc = "DrainRule changes how drains handle selected pods: the order in which they leave, whether they stay, or whether the drain waits until they finish. If several rules match a pod, the first in alphabetical order applies. The pod label cluster.x-k8s.io/drain (skip or wait-completed) overrides all rules.",
    printcolumn(
        name = "Behavior",
        type_ = "string",
        json_path = ".spec.drain.behavior",
        description = "How drains handle the pods."
    ),
    printcolumn(
        name = "Order",
        type_ = "integer",
        json_path = ".spec.drain.order",
        description = "Order in which the pods leave. Higher is later."
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
pub struct DrainRuleSpec {
    /// How drains handle the pods that match the rule.
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

/// How drains handle matching pods.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[x_kube(
    validation = Rule::new("!has(self.order) || self.behavior == 'Drain'")
        .message("order can only be set with behavior Drain: remove it or change the behavior")
        .field_path(".order"),
)]
pub struct DrainRuleDrain {
    /// Drain: the pods are evacuated, in the given order. Skip: the pods stay, and the drain waits neither for them nor for
    /// their volumes. WaitCompleted: the pods are not evacuated, and the drain of their node waits until they have finished;
    /// applies to pods of type Default only.
    pub behavior: DrainBehavior,

    /// Order in which the pods leave, with behavior Drain. Pods with a higher order leave later. Pods that no rule matches
    /// have order 0. Pods with a negative order leave before them, pods with a positive order after them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = i32::MIN, max = i32::MAX))]
    pub order: Option<i32>,
}

/// How a drain handles a pod.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DrainBehavior {
    /// The drain evacuates the pod.
    #[default]
    Drain,
    /// The pod stays. The drain waits neither for it nor for its volumes.
    Skip,
    /// The drain waits until the pod has finished. Applies to pods of type Default only.
    WaitCompleted,
}

/// Nodes to which a rule applies.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct DrainRuleNodes {
    /// Labels of the node. Empty: all nodes.
    #[schemars(schema_with = "schema::label_selector")]
    pub selector: LabelSelector,
}

/// Pods to which a rule applies. All given fields must match.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.selector) || has(self.namespaceSelector) || has(self.podTypes)")
        .message("set selector, namespaceSelector or podTypes; to select all pods, set selector: {}"),
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

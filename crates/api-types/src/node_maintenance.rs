//! NodeMaintenance (KEP-4212): a request to cordon, drain or release nodes, and its status.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::NodeSelector;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector, Time};
use kube::core::{Message, Rule};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use crate::drain_plan::DEFAULT_PRIORITIES;
use crate::schema;

/// Maximum number of blockers in the status. The metric counts all of them.
pub const MAX_BLOCKERS: usize = 20;
/// Maximum number of entries in `waitingFor` of the status.
pub const MAX_WAITING_FOR: usize = 20;

/// Maximum number of drained nodes in the status.
pub const MAX_DRAINED_NODES: usize = 100;

/// Specification of a maintenance. Node selector and drain plan are immutable.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[kube(
    group = "nodemaintenance.k8s.io",
    version = "v1alpha1",
    kind = "NodeMaintenance",
    plural = "nodemaintenances",
    shortname = "nm",
    category = "haulout",
    status = "NodeMaintenanceStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "NodeMaintenance requests that the selected nodes are cordoned, drained or returned to service, depending on its stage. Its status shows the progress and what blocks it.",
    selectable = ".spec.stage",
    printcolumn(
        name = "Stage",
        type_ = "string",
        json_path = ".spec.stage",
        description = "Requested stage."
    ),
    printcolumn(
        name = "Drained",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Drained")].status"#,
        description = "Whether every pod that has to leave has left."
    ),
    printcolumn(
        name = "Nodes",
        type_ = "integer",
        json_path = ".status.nodesSelected",
        description = "Number of selected nodes."
    ),
    printcolumn(
        name = "Pods Left",
        type_ = "integer",
        json_path = ".status.drainStatus.podsLeft",
        description = "Number of pods that still have to leave."
    ),
    printcolumn(
        name = "Blocked",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Blocked")].reason"#,
        description = "What blocks the drain. See status.drainStatus.blockers for details."
    ),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.drainStatus.drainMessage",
        description = "What the drain is doing.",
        priority = 1
    ),
    printcolumn(
        name = "Nodes Drained",
        type_ = "integer",
        json_path = ".status.drainStatus.nodesDrained",
        description = "Number of selected nodes that are drained.",
        priority = 1
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".spec.reason",
        description = "Reason for the maintenance."
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(
    validation = schema::immutable("nodeSelector", "create another NodeMaintenance for other nodes"),
    validation = schema::immutable_list("drainPlan", &not_default(), "complete this NodeMaintenance and create one with the new plan"),
    validation = legal_transition(),
)]
pub struct NodeMaintenanceSpec {
    /// Selects the nodes. Terms are ORed, requirements within a term are ANDed, and a term without requirements matches
    /// nothing. Nodes that match later are included. Immutable.
    #[schemars(schema_with = "schema::node_selector")]
    pub node_selector: NodeSelector,

    /// Requested stage: Idle, Cordon, Drain or Complete. Stages can be skipped. A maintenance cannot return to an earlier
    /// stage. Deleting a NodeMaintenance after Idle completes it first.
    #[serde(default)]
    pub stage: Stage,

    /// Order in which pods leave, entry by entry: Default pods before DaemonSet pods before static pods, and lower priorities
    /// first. For every pod type, the plan always includes the default entries, with the priorities 1000000000, 2000000000,
    /// 2000001000 and 2147483647. Immutable, except for default entries. At most 100 entries besides them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 112))]
    #[x_kube(
        merge_strategy = ListMerge::Atomic,
        validation = no_entry_twice(),
        validation = Rule::new(format!("self.filter(e, {}).size() <= 100", not_default()))
            .message("drainPlan can have at most 100 entries besides the default ones"),
    )]
    pub drain_plan: Vec<DrainPlanEntry>,

    /// How long, in seconds, the drain of a node waits for volumes to be detached after their pods have left. If several
    /// NodeMaintenances drain a node, the longest timeout applies. Absent: no timeout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = i32::MAX))]
    pub volume_detach_timeout_seconds: Option<i32>,

    /// Time in seconds after completion until the NodeMaintenance is deleted. Absent: it is not deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = i32::MAX))]
    pub ttl_seconds_after_complete: Option<i32>,

    /// Whether to keep cluster-autoscaler and Karpenter from removing nodes under maintenance, if the installation enables
    /// this. Absent: true. If several NodeMaintenances hold a node, it is enough that one of them is not false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold_autoscalers: Option<bool>,

    /// Reason for the maintenance, as text for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub reason: String,
}

/// CEL expression: the entry `e` is not a default entry. Default entries are ignored when plans are compared, so that a
/// manifest without them can still be applied after they were added.
fn not_default() -> String {
    format!("has(e.podSelector) || !(e.podPriority in {DEFAULT_PRIORITIES:?})")
}

/// Evaluated only when the plan changes, because comparing all pairs is slow and rules run with every status update.
fn no_entry_twice() -> Rule {
    Rule::new("(oldSelf.hasValue() && oldSelf.value() == self) || self.all(a, self.exists_one(b, a == b))")
        .message("drainPlan must not have the same entry twice")
        .optional_old_self(true)
}

/// The rule is evaluated after defaulting, so removing the field means returning to Idle.
fn legal_transition() -> Rule {
    Rule::new(
        "self.stage == oldSelf.stage || oldSelf.stage == 'Idle' \
         || (oldSelf.stage == 'Cordon' && self.stage in ['Drain', 'Complete']) \
         || (oldSelf.stage == 'Drain' && self.stage == 'Complete')",
    )
    .message(Message::Expression(
        "'stage cannot change from ' + oldSelf.stage + ' to ' + self.stage + ': ' \
         + (oldSelf.stage == 'Cordon' ? 'only Drain or Complete can follow Cordon' \
         : oldSelf.stage == 'Drain' ? 'only Complete can follow Drain' \
         : 'Complete is the last stage, create another NodeMaintenance')"
            .into(),
    ))
    .field_path(".stage")
}

/// Stage of a maintenance.
#[derive(
    Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash,
)]
pub enum Stage {
    /// Nothing happens.
    #[default]
    Idle,
    /// The nodes are cordoned and stay cordoned.
    Cordon,
    /// The nodes are cordoned, and their pods are evacuated in the order of the drain plan.
    Drain,
    /// Evacuations of this maintenance are cancelled, and the nodes are schedulable again, unless another maintenance holds
    /// them.
    Complete,
}

impl Stage {
    /// All stages, in order. An update can only keep the stage or move to a later one.
    pub const ALL: [Self; 4] = [Self::Idle, Self::Cordon, Self::Drain, Self::Complete];

    /// The value in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "Idle",
            Self::Cordon => "Cordon",
            Self::Drain => "Drain",
            Self::Complete => "Complete",
        }
    }
}

/// Type of a pod. Pods leave in the order of these types.
#[derive(
    Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash,
)]
pub enum PodType {
    /// All other pods.
    #[default]
    Default,
    /// A pod whose controller is a DaemonSet.
    DaemonSet,
    /// A static pod, represented by its mirror pod.
    Static,
}

impl PodType {
    /// All types, in the order in which their pods leave.
    pub const ALL: [Self; 3] = [Self::Default, Self::DaemonSet, Self::Static];
}

/// One step of a drain: pods of one type up to a priority, optionally only those with certain labels.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct DrainPlanEntry {
    /// Selects only pods with matching labels, so that they leave before others of the same priority.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::label_selector")]
    pub pod_selector: Option<LabelSelector>,

    /// Selects pods whose priority is less than or equal to this value.
    // API servers before 1.36 do not check the format, and a larger number would make the object unreadable.
    #[schemars(range(min = i32::MIN, max = i32::MAX))]
    pub pod_priority: i32,

    /// Selects pods by type: DaemonSet pods, Static pods, or Default for all others.
    #[serde(default)]
    pub pod_type: PodType,
}

/// Status of a maintenance.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct NodeMaintenanceStatus {
    /// Generation of the spec that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// Number of nodes that the selector matches.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub nodes_selected: i32,

    /// When each stage started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub stage_statuses: Vec<StageStatus>,

    /// Progress of the drain. After Complete, it keeps its last value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain_status: Option<DrainStatus>,

    /// Cordoned, Drained and Blocked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// When a stage started.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct StageStatus {
    /// Stage.
    pub name: Stage,
    /// When the stage started.
    pub start_timestamp: Time,
}

/// Progress of the drain on all selected nodes.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct DrainStatus {
    /// Drain targets that all selected nodes have reached. A single node can be ahead, as its annotation shows. The
    /// targets of a node never shrink. These targets can shrink when another node is selected.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 112))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub reached_drain_targets: Vec<DrainPlanEntry>,

    /// What the drain does, or which maintenance it waits for.
    #[serde(default)]
    #[schemars(length(max = 32768))]
    pub drain_message: String,

    /// Number of pods that still have to leave: pending and evacuating.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub pods_left: i32,

    /// Number of pods that have to leave and whose evacuation has not started.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub pods_pending_evacuation: i32,

    /// Number of pods that have an Evacuation or are terminating.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub pods_evacuating: i32,

    /// Number of pods that have left since the drain started.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub pods_evacuated: i32,

    /// Number of pods that stay because this installation does not evacuate their type.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub pods_unsupported: i32,

    /// Number of pods that stay because of a DrainRule or their label cluster.x-k8s.io/drain. The condition Drained names the
    /// first of them.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub pods_skipped: i32,

    /// Number of nodes that the selector matches.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub nodes_selected: i32,

    /// Number of selected nodes that are drained: they are cordoned and have no pod left that has to leave.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub nodes_drained: i32,

    /// Number of nodes that were deleted after they were drained. A new node with the same name has to be drained again
    /// and is no longer counted here.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub nodes_drained_and_deleted: i32,

    /// Names of drained nodes, at most 100. Deleted nodes come first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub drained_nodes: Vec<String>,

    /// The first 20 pods that cannot leave, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub blockers: Vec<Blocker>,

    /// The first 20 pods that are leaving: what the drain waits for, since when and until when.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub waiting_for: Vec<WaitingFor>,
}

/// Something that blocks the drain of a node.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Blocker {
    /// Node that is blocked. Absent if all nodes are affected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Namespace of the pod. Absent if no pod is the cause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Name of the pod. Absent if no pod is the cause, for example for an attached volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// Machine-readable reason.
    pub reason: String,
    /// What blocks the drain and what to do, as text for people.
    pub message: String,
    /// Since when the drain is blocked.
    pub since: Time,
}

/// A pod that is leaving, and what the drain waits for.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct WaitingFor {
    /// Node of the pod.
    pub node: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Machine-readable reason.
    pub reason: String,
    /// Active evacuator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evacuator_class: Option<String>,
    /// What the drain waits for, as text for people. Includes the message of the evacuator.
    pub message: String,
    /// Since when the drain waits.
    pub since: Time,
    /// When the wait ends at the latest, rounded up to the minute: the progress deadline of the active evacuator, which a
    /// progress report extends, or the end of the pod's grace period. Absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Time>,
    /// When the active evacuator expects to finish, rounded up to the minute. Absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_finish_time: Option<Time>,
}

/// The content of the Node annotation `nodemaintenance.k8s.io/maintenance-status`, as JSON.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct MaintenanceStatus {
    /// The maintenances that hold this node, and completed ones to whose drain its targets belong. Absent if an earlier
    /// version wrote the annotation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maintenances: Option<Vec<MaintenanceOnNode>>,
    /// The drain targets of this node. They never shrink.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drain_targets: Vec<DrainPlanEntry>,
    /// What the drain of this node does, or which maintenance it waits for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub drain_message: String,
    /// Set while the node waits, with a timeout, for volumes whose pods have left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_wait: Option<VolumeWait>,
}

/// The wait for the volumes of a node.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct VolumeWait {
    /// Since when the node waits.
    pub since: Time,
    /// Whether the timeout has passed and the drain continues.
    #[serde(default)]
    pub over: bool,
}

/// A maintenance in the annotation of a node.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct MaintenanceOnNode {
    /// Its UID.
    pub uid: String,
    /// Its name.
    pub name: String,
    /// Cordon or Drain while it holds the node. Complete if it has released the node and the targets belong to its drain. An
    /// unknown stage counts as Drain: the maintenance holds the node.
    #[serde(deserialize_with = "known_or_drain")]
    pub stage: Stage,
}

fn known_or_drain<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Stage, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    Ok(serde_json::from_value(value).unwrap_or(Stage::Drain))
}

/// The content of the Node annotation `nodemaintenance.k8s.io/before-maintenance`, as JSON: the state of the node before its
/// first maintenance.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct BeforeMaintenance {
    /// Whether the node was cordoned.
    #[serde(default)]
    pub unschedulable: bool,
    /// The annotations that a maintenance has set, with their earlier values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, Option<String>>,
    /// How often the controller cordoned the node again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reverts: Option<CordonReverts>,
}

/// How often, and when last, the controller cordoned a node again that somebody had uncordoned during its maintenance.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct CordonReverts {
    /// How often in a row.
    pub times: u32,
    /// When last.
    pub last: Time,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_only_go_forward() {
        use Stage::{Complete, Cordon, Drain, Idle};
        let legal = [
            (Idle, Cordon),
            (Idle, Drain),
            (Idle, Complete),
            (Cordon, Drain),
            (Cordon, Complete),
            (Drain, Complete),
        ];
        for from in Stage::ALL {
            for to in Stage::ALL {
                assert_eq!(from <= to, from == to || legal.contains(&(from, to)), "{from:?} to {to:?}");
            }
        }
    }

    #[test]
    fn stage_names_match_the_api() {
        for stage in Stage::ALL {
            assert_eq!(serde_json::to_value(stage).unwrap(), stage.as_str());
        }
    }
}

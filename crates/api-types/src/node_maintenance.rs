//! NodeMaintenance (KEP-4212): which nodes are to be maintained, how far, and how far it has come.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::NodeSelector;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector, Time};
use kube::core::{Message, Rule};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use crate::drain_plan::DEFAULT_PRIORITIES;
use crate::schema;

/// How many blockers the status lists; the metric counts them all.
pub const MAX_BLOCKERS: usize = 20;
/// How many pods the status lists that are waited for.
pub const MAX_WAITING_FOR: usize = 20;

/// How many names of drained nodes the status lists.
pub const MAX_DRAINED_NODES: usize = 100;

/// The desired maintenance. Nodes and plan are fixed at creation.
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
    doc = "NodeMaintenance declares that a set of nodes is to be maintained: its stage says whether they are cordoned, drained or back in service, its status how far that has come and what is in the way.",
    selectable = ".spec.stage",
    printcolumn(
        name = "Stage",
        type_ = "string",
        json_path = ".spec.stage",
        description = "How far the maintenance is to go."
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
        description = "How many nodes are selected."
    ),
    printcolumn(
        name = "Pods Left",
        type_ = "integer",
        json_path = ".status.drainStatus.podsLeft",
        description = "How many pods still have to leave."
    ),
    printcolumn(
        name = "Blocked",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Blocked")].reason"#,
        description = "What keeps pods from leaving; status.drainStatus.blockers has more."
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
        description = "How many of the selected nodes are drained.",
        priority = 1
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".spec.reason",
        description = "Why the maintenance takes place."
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(
    validation = schema::immutable("nodeSelector", "create another NodeMaintenance for other nodes"),
    validation = schema::immutable_list("drainPlan", &not_default(), "complete this NodeMaintenance and create one with the new plan"),
    validation = legal_transition(),
)]
pub struct NodeMaintenanceSpec {
    /// Selects the nodes. Terms are ORed, requirements within a term are ANDed, and a term without
    /// requirements matches nothing. Nodes that come to match later are maintained too. Immutable.
    #[schemars(schema_with = "schema::node_selector")]
    pub node_selector: NodeSelector,

    /// How far the maintenance is to go: Idle, Cordon, Drain, Complete, in this order. Stages can be
    /// skipped, never gone back to. Deleting a NodeMaintenance beyond Idle completes it first.
    #[serde(default)]
    pub stage: Stage,

    /// The order in which pods leave, entry by entry: Default pods before DaemonSet pods before static
    /// pods, and lower priorities first. For every pod type, entries for the priorities 1000000000,
    /// 2000000000, 2000001000 and 2147483647 are carried out even where they are missing. Immutable,
    /// apart from those; at most 100 entries besides them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 112))]
    #[x_kube(
        merge_strategy = ListMerge::Atomic,
        validation = no_entry_twice(),
        validation = Rule::new(format!("self.filter(e, {}).size() <= 100", not_default()))
            .message("drainPlan can have at most 100 entries besides the default ones"),
    )]
    pub drain_plan: Vec<DrainPlanEntry>,

    /// How many seconds a drain waits on each node for volumes to be detached once the pods that used them have left, before
    /// it goes on without. Where several NodeMaintenances drain a node, the longest counts. Absent: as long as it takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = i32::MAX))]
    pub volume_detach_timeout_seconds: Option<i32>,

    /// How many seconds after its completion the NodeMaintenance is deleted. Absent: it stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = i32::MAX))]
    pub ttl_seconds_after_complete: Option<i32>,

    /// Whether cluster-autoscaler and Karpenter are kept from removing the nodes while they are under maintenance, where
    /// the installation does that. Absent: true. If several NodeMaintenances hold a node, one that does not say false is
    /// enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold_autoscalers: Option<bool>,

    /// Why the maintenance takes place, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub reason: String,
}

/// CEL: the entry `e` is none of the twelve that every plan has. Those count for nothing when plans are
/// compared, so that a manifest without them can be applied again after somebody has added them.
fn not_default() -> String {
    format!("has(e.podSelector) || !(e.podPriority in {DEFAULT_PRIORITIES:?})")
}

/// Only judged when the plan changes: comparing all with all is slow, and rules run again with every write of the
/// status.
fn no_entry_twice() -> Rule {
    Rule::new("(oldSelf.hasValue() && oldSelf.value() == self) || self.all(a, self.exists_one(b, a == b))")
        .message("drainPlan must not have the same entry twice")
        .optional_old_self(true)
}

/// Where the rule stands it sees the defaulted stage, so leaving the field out is going back to Idle.
fn legal_transition() -> Rule {
    Rule::new(
        "self.stage == oldSelf.stage || oldSelf.stage == 'Idle' \
         || (oldSelf.stage == 'Cordon' && self.stage in ['Drain', 'Complete']) \
         || (oldSelf.stage == 'Drain' && self.stage == 'Complete')",
    )
    .message(Message::Expression(
        "'stage cannot go from ' + oldSelf.stage + ' to ' + self.stage + ': ' \
         + (oldSelf.stage == 'Cordon' ? 'after Cordon come Drain and Complete' \
         : oldSelf.stage == 'Drain' ? 'after Drain comes only Complete' \
         : 'Complete is the last stage, create another NodeMaintenance')"
            .into(),
    ))
    .field_path(".stage")
}

/// How far a maintenance is to go.
#[derive(
    Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash,
)]
pub enum Stage {
    /// Planned only: nothing in the cluster is touched.
    #[default]
    Idle,
    /// The nodes are made unschedulable and kept so.
    Cordon,
    /// The nodes are cordoned and their pods evacuated, following the drain plan.
    Drain,
    /// Evacuations of this maintenance are cancelled and the nodes made schedulable again, unless
    /// another maintenance holds them.
    Complete,
}

impl Stage {
    /// All stages in their order: an update leaves the stage as it is or goes to a later one.
    pub const ALL: [Self; 4] = [Self::Idle, Self::Cordon, Self::Drain, Self::Complete];

    /// The word that stands in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "Idle",
            Self::Cordon => "Cordon",
            Self::Drain => "Drain",
            Self::Complete => "Complete",
        }
    }
}

/// What kind of pod it is, as far as a drain is concerned. The order is the order of leaving.
#[derive(
    Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash,
)]
pub enum PodType {
    /// Every pod that is of neither of the other types.
    #[default]
    Default,
    /// A pod whose controller is a DaemonSet.
    DaemonSet,
    /// A static pod, seen through its mirror.
    Static,
}

impl PodType {
    /// All types in the order of leaving.
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
    // API servers before 1.36 do not check the format, and we could not read a number that does not fit.
    #[schemars(range(min = i32::MIN, max = i32::MAX))]
    pub pod_priority: i32,

    /// Selects pods by type: DaemonSet pods, Static pods, or Default for all others.
    #[serde(default)]
    pub pod_type: PodType,
}

/// How far a maintenance has come.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct NodeMaintenanceStatus {
    /// The generation of the spec that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// Number of nodes that the selector matches.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub nodes_selected: i32,

    /// When each stage began.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub stage_statuses: Vec<StageStatus>,

    /// How far the drain has come; from Complete on, how far it had come when it was completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain_status: Option<DrainStatus>,

    /// Cordoned, Drained and Blocked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// When a stage began.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct StageStatus {
    /// The stage.
    pub name: Stage,
    /// When it began.
    pub start_timestamp: Time,
}

/// How far a drain has come over all selected nodes.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct DrainStatus {
    /// The pods that are being evacuated from every selected node: the lowest drain targets among
    /// them. A node may be further; its own annotation tells. Those of a node only ever grow; these
    /// may fall when another node comes to be selected.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 112))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub reached_drain_targets: Vec<DrainPlanEntry>,

    /// What the drain is doing, or which maintenance it waits for.
    #[serde(default)]
    #[schemars(length(max = 32768))]
    pub drain_message: String,

    /// Number of pods that still have to leave: those pending and those evacuating.
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

    /// Number of pods that have left since the drain began.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub pods_evacuated: i32,

    /// Number of pods that are left alone because nothing in this installation evacuates their type.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub pods_unsupported: i32,

    /// Number of pods that are left alone because a DrainRule or their label cluster.x-k8s.io/drain says so; the condition
    /// Drained names the first of them.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub pods_skipped: i32,

    /// Number of nodes that the selector matches.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub nodes_selected: i32,

    /// Number of selected nodes that are drained: cordoned, and nothing is left on them that has to leave.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub nodes_drained: i32,

    /// Number of nodes that were deleted after they had been drained. A node that is created again under
    /// the same name has to be drained again and is no longer counted here.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub nodes_drained_and_deleted: i32,

    /// Names of drained nodes, at most 100: first those that have been deleted since.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub drained_nodes: Vec<String>,

    /// The first 20 pods that cannot leave, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub blockers: Vec<Blocker>,

    /// The first 20 pods that are on their way out, what the drain waits for with each of them, and until when.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub waiting_for: Vec<WaitingFor>,
}

/// Something that keeps a node from being drained.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Blocker {
    /// The node that is not drained because of it; absent where all nodes are concerned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Namespace of the pod; absent where no pod is to blame.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Name of the pod; absent where no pod is to blame, as with an attached volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// Why, in one word for machines.
    pub reason: String,
    /// Why, and what can be done about it, for people.
    pub message: String,
    /// Since when.
    pub since: Time,
}

/// A pod that is on its way out, and what the drain waits for.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct WaitingFor {
    /// The node that the pod is on.
    pub node: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// What is waited for, in one word for machines.
    pub reason: String,
    /// The evacuator that is in charge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evacuator_class: Option<String>,
    /// What is waited for, for people; with the evacuator's own message.
    pub message: String,
    /// Since when.
    pub since: Time,
    /// When the wait ends at the latest, rounded up to the minute: the next evacuator takes over, unless the one in
    /// charge reports progress before then; or the pod's grace period is over. Absent where nobody can tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Time>,
    /// When the evacuator in charge expects to be done, rounded up to the minute; absent if it does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_finish_time: Option<Time>,
}

/// What the annotation `nodemaintenance.k8s.io/maintenance-status` of a Node holds as JSON.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct MaintenanceStatus {
    /// The maintenances that hold this node, and those that have drained it since its targets began to grow. Absent if it
    /// was written by a version that did not record them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maintenances: Option<Vec<MaintenanceOnNode>>,
    /// The pods that are being evacuated from this node. Targets only ever grow.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drain_targets: Vec<DrainPlanEntry>,
    /// What the drain of this node is doing, or which maintenance it waits for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub drain_message: String,
    /// Set while volumes are attached whose pods have left, if they are waited for no longer than for a while.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_wait: Option<VolumeWait>,
}

/// The wait for the volumes of a node.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct VolumeWait {
    /// Since when they are waited for.
    pub since: Time,
    /// Whether that was long enough, and the drain goes on without.
    #[serde(default)]
    pub over: bool,
}

/// A maintenance of a node, as the node's annotation has it.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct MaintenanceOnNode {
    /// Its UID.
    pub uid: String,
    /// Its name.
    pub name: String,
    /// Cordon or Drain while it holds the node; Complete for one that has let go of it, and whose drain the targets
    /// are of. One of a later version that this one does not know is taken for Drain: it holds the node.
    #[serde(deserialize_with = "known_or_drain")]
    pub stage: Stage,
}

fn known_or_drain<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Stage, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    Ok(serde_json::from_value(value).unwrap_or(Stage::Drain))
}

/// What the annotation `nodemaintenance.k8s.io/before-maintenance` of a Node holds as JSON: how the node was
/// when the first maintenance reached it.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct BeforeMaintenance {
    /// Whether somebody had cordoned it.
    #[serde(default)]
    pub unschedulable: bool,
    /// The annotations that a maintenance has set, with the values that they had, if they were there.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, Option<String>>,
    /// How often the cordon was put back after somebody had taken it off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reverts: Option<CordonReverts>,
}

/// How often, and when last, a node was cordoned again that somebody had made schedulable during its maintenance.
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
    fn the_words_for_stages_are_those_of_the_api() {
        for stage in Stage::ALL {
            assert_eq!(serde_json::to_value(stage).unwrap(), stage.as_str());
        }
    }
}

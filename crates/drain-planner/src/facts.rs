//! The planner's input: pods, nodes and maintenances, reduced to what a drain depends on.

use std::collections::BTreeSet;
use std::sync::Arc;

use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::{MaintenanceOnNode, PodType, Stage, VolumeWait};
use haulout_api_types::selector::NodeMatcher;
use haulout_api_types::uid::Uid;
use jiff::{SignedDuration, Timestamp};

use crate::placement::{Placement, Taint};
use crate::plan::Plan;

/// Identifies a pod. A new pod with the same name is a different pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodKey {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// Its UID.
    pub uid: Uid,
}

/// A pod that is bound to a node.
#[derive(Clone, Debug, PartialEq)]
pub struct PodFacts<L> {
    /// Namespace, name and UID.
    pub key: PodKey,
    /// The node that it is bound to.
    pub node: Arc<str>,
    /// Its labels.
    pub labels: L,
    /// Its type.
    pub pod_type: PodType,
    /// Its priority.
    pub priority: i32,
    /// Whether it has succeeded or failed. A finished pod counts as gone.
    pub finished: bool,
    /// Whether it is terminating.
    pub terminating: bool,
    /// When its grace period ends, if it is terminating and has one.
    pub deadline: Option<Timestamp>,
    /// Whether it has an Evacuation, and whether we are an instigator.
    pub evacuation: EvacuationOwnership,
    /// The persistent volumes that it uses, by name.
    pub volumes: Arc<[Arc<str>]>,
    /// Set if it was created on the node after the drain had started.
    pub returned: Option<Box<Returned>>,
    /// Set for one of Haulout's own pods, which needs another node before it may leave.
    pub placement: Option<Arc<Placement>>,
    /// What blocks it, according to its Evacuation, or why the Evacuation cannot be written.
    pub blocked: Option<Blocked>,
    /// Whether `blocked` is about writing the Evacuation.
    pub failed_write: bool,
    /// The turn of its active evacuator.
    pub turn: Option<Arc<Turn>>,
}

/// The turn of an evacuator. Times are rounded up to the minute, so that an evacuator that reports progress every second does
/// not cause a status write every second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Its class.
    pub class: Arc<str>,
    /// The evacuator's own message.
    pub message: Arc<str>,
    /// When its turn started, if that is known.
    pub since: Option<Timestamp>,
    /// When its turn ends unless it reports progress.
    pub until: Timestamp,
    /// When it expects to finish.
    pub expected: Option<Timestamp>,
}

/// A pod that was created on a node after its drain had started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Returned {
    /// Why that was possible although the node is cordoned.
    pub cause: ReturnCause,
    /// When it was created.
    pub since: Timestamp,
    /// It is not evacuated before this time, because pods of its owner return repeatedly.
    pub until: Timestamp,
}

/// Why a pod can be created on a node that is cordoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReturnCause {
    /// It tolerates `node.kubernetes.io/unschedulable:NoSchedule`.
    ToleratesCordon,
    /// Somebody had uncordoned the node.
    Uncordoned,
    /// It was bound to the node without the scheduler.
    BypassesScheduler,
}

/// Whether a pod has an Evacuation, and whether we are one of its instigators.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EvacuationOwnership {
    /// There is no Evacuation.
    #[default]
    NoEvacuation,
    /// There is an Evacuation without our instigator finalizer.
    Foreign,
    /// There is an Evacuation with our instigator finalizer.
    Ours,
    /// As `Ours`, and the Evacuation cannot be cancelled while its pod exists.
    OursUncancellable,
}

/// Why a pod cannot leave, or why an object cannot be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocked {
    /// The machine-readable reason, one of `names::reason`.
    pub reason: Arc<str>,
    /// The message for users.
    pub message: Arc<str>,
    /// Since when, if that is known.
    pub since: Option<Timestamp>,
}

/// A node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeFacts<L> {
    /// Its name.
    pub name: Arc<str>,
    /// Its labels.
    pub labels: L,
    /// Whether it is unschedulable.
    pub cordoned: bool,
    /// When its cordon may be restored, if somebody uncordons it repeatedly.
    pub cordon_due: Option<Timestamp>,
    /// Since when it is under maintenance, according to its condition.
    pub held_since: Option<Timestamp>,
    /// Whether it has any of our annotations or conditions, that is, anything to restore.
    pub has_markers: bool,
    /// The taints that keep new pods away, except the taint of a cordon.
    pub taints: Arc<[Taint]>,
    /// The persistent volumes that are attached to it, by name.
    pub volumes: Arc<BTreeSet<Arc<str>>>,
    /// Why it cannot be written, if it cannot.
    pub failed_write: Option<Blocked>,
    /// Whether a drain does not wait for its volumes to be detached.
    pub ignores_volumes: bool,
    /// How long a drain has waited for its volumes, if the wait has a timeout.
    pub volume_wait: Option<VolumeWait>,
    /// The drain targets in its annotation. They are used when the planner first sees the node in a drain of one of the
    /// maintenances that reached them. From then on, the planner keeps the targets itself.
    pub reached: DrainTargets,
    /// The maintenances in its annotation; `None` if the annotation does not list them.
    pub maintenances: Option<Arc<[MaintenanceOnNode]>>,
}

/// Maximum length of a maintenance's reason on nodes and Evacuations, in characters.
pub const MAX_REASON: usize = 120;

/// A maintenance.
#[derive(Clone, Debug, PartialEq)]
pub struct MaintenanceFacts {
    /// Its name.
    pub name: Arc<str>,
    /// Its UID.
    pub uid: Arc<str>,
    /// When it was created. Older maintenances come first; those of equal age are ordered by name.
    pub created: Timestamp,
    /// The stage that is acted on.
    pub stage: Stage,
    /// Whether its nodes are made schedulable no matter who cordoned them: it went to Complete without Cordon or Drain.
    pub uncordons: bool,
    /// Its reason, in one line.
    pub reason: Arc<str>,
    /// Whether autoscalers must not remove its nodes.
    pub holds_autoscalers: bool,
    /// The nodes that it selects.
    pub nodes: NodeMatcher,
    /// How long it waits for volumes on each node; `None` means no limit.
    pub volume_timeout: Option<SignedDuration>,
    /// The steps in which it drains.
    pub plan: Arc<Plan>,
    /// Number of pods that have left according to its status. Used when the planner first sees the maintenance.
    pub evacuated: u32,
    /// Number of pods that still had to leave according to its status. Pods that are gone when the planner first sees the
    /// maintenance have left while there was no leader.
    pub remaining_in_status: u32,
    /// Number of unsupported and skipped pods according to its status. A pod that is unsupported or skipped only since then
    /// has not left.
    pub staying_in_status: u32,
    /// The drained nodes in its status. Nodes among them that no longer exist were deleted since. Used when the planner
    /// first sees the maintenance.
    pub drained_nodes: Arc<[Arc<str>]>,
    /// Number of nodes that were deleted after they had been drained, according to its status. Used when the planner first
    /// sees the maintenance.
    pub drained_and_deleted: u32,
    /// When its drain started, if it has.
    pub drain_started: Option<Timestamp>,
}

impl MaintenanceFacts {
    /// Its entry in a node's annotation.
    pub(crate) fn on_node(&self, stage: Stage) -> MaintenanceOnNode {
        MaintenanceOnNode { uid: self.uid.to_string(), name: self.name.to_string(), stage }
    }
}

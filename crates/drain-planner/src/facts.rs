//! What the planner has to know: pods, nodes and maintenances, reduced to what a drain depends on.

use std::collections::BTreeSet;
use std::sync::Arc;

use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::{MaintenanceOnNode, PodType, Stage, VolumeWait};
use haulout_api_types::selector::NodeMatcher;
use haulout_api_types::uid::Uid;
use jiff::{SignedDuration, Timestamp};

use crate::placement::{Placement, Taint};
use crate::plan::Plan;

/// Identifies a pod: one that is made anew under the same name is another pod.
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
    /// Which pod it is.
    pub key: PodKey,
    /// The node that it is bound to.
    pub node: Arc<str>,
    /// Its labels.
    pub labels: L,
    /// Its type.
    pub pod_type: PodType,
    /// Its priority.
    pub priority: i32,
    /// Whether it has succeeded or failed; then it counts as gone.
    pub finished: bool,
    /// Whether it has been asked to end; then nobody has to ask again.
    pub terminating: bool,
    /// When its grace period ends, if it is terminating and says so.
    pub deadline: Option<Timestamp>,
    /// Whether it has an Evacuation.
    pub evacuation: EvacuationOf,
    /// The persistent volumes that it uses, by name.
    pub volumes: Arc<[Arc<str>]>,
    /// Set if it was put onto the node after the drain had begun, and is not merely late.
    pub returned: Option<Box<Returned>>,
    /// Set for a pod of Haulout itself, which needs another node to run on before it may leave.
    pub placement: Option<Arc<Placement>>,
    /// What keeps it from leaving, as its Evacuation says.
    pub blocked: Option<Blocked>,
    /// The evacuator that is in charge of it.
    pub turn: Option<Arc<Turn>>,
}

/// The turn of an evacuator. Times are rounded up to the minute, so that one that reports every second is not news
/// every second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Its class.
    pub class: Arc<str>,
    /// What it says itself.
    pub message: Arc<str>,
    /// Since when, where that is known.
    pub since: Option<Timestamp>,
    /// When its turn ends unless it reports progress.
    pub until: Timestamp,
    /// When it expects to be done.
    pub expected: Option<Timestamp>,
}

/// A pod that was put onto a node after its drain had begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Returned {
    /// How that was possible although the node is cordoned.
    pub how: Return,
    /// When it was created.
    pub since: Timestamp,
    /// Until when it is left alone, because pods of its owner come back again and again. In the past if it is not.
    pub until: Timestamp,
}

/// How a pod can be put onto a node that is cordoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Return {
    /// It tolerates `node.kubernetes.io/unschedulable:NoSchedule`.
    ToleratesCordon,
    /// Somebody had uncordoned the node.
    Uncordoned,
    /// Whoever put it there did not ask the scheduler.
    BypassesScheduler,
}

/// Whether a pod has an Evacuation, and whose wish that is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EvacuationOf {
    /// There is none.
    #[default]
    Nobody,
    /// There is one, without our instigator finalizer.
    Others,
    /// There is one with our instigator finalizer.
    Us,
    /// The same, and it cannot be cancelled while its pod exists, whether or not we still want it.
    UsPastRecall,
}

/// Why a pod does not leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocked {
    /// In one word, one of `names::reason`.
    pub reason: Arc<str>,
    /// For people.
    pub message: Arc<str>,
    /// Since when, where that is known.
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
    /// When its cordon may be put back, if somebody takes it off again and again.
    pub cordon_due: Option<Timestamp>,
    /// Since when it is under maintenance, where it says so.
    pub held_since: Option<Timestamp>,
    /// Whether it carries any of our marks; that is, anything to restore.
    pub marked: bool,
    /// The taints that keep new pods away, but for that of a cordon.
    pub taints: Arc<[Taint]>,
    /// The persistent volumes that are attached to it, by name.
    pub volumes: Arc<BTreeSet<Arc<str>>>,
    /// What keeps it from being written, if anything does.
    pub refused: Option<Blocked>,
    /// Whether a drain does not wait for them.
    pub ignores_volumes: bool,
    /// How long they have been waited for, if that is limited.
    pub volume_wait: Option<VolumeWait>,
    /// The targets that its annotation says it has reached. They count when the node is first seen under a
    /// drain of one of the maintenances that reached them; from then on the planner knows better.
    pub reached: DrainTargets,
    /// The maintenances that its annotation names; `None` if it does not say.
    pub maintenances: Option<Arc<[MaintenanceOnNode]>>,
}

/// How many characters of a maintenance's reason are repeated on nodes and Evacuations.
pub const MAX_REASON: usize = 120;

/// A maintenance.
#[derive(Clone, Debug, PartialEq)]
pub struct MaintenanceFacts {
    /// Its name.
    pub name: Arc<str>,
    /// Its UID.
    pub uid: Arc<str>,
    /// When it was created: older ones come first, and among equals the alphabet decides.
    pub created: Timestamp,
    /// The stage that is acted on.
    pub stage: Stage,
    /// Whether its nodes are made schedulable whoever cordoned them: it went to Complete without having been in Cordon or Drain.
    pub uncordons: bool,
    /// Why it takes place, in one line.
    pub reason: Arc<str>,
    /// Whether autoscalers are to be kept away from its nodes.
    pub holds_autoscalers: bool,
    /// The nodes that it selects.
    pub nodes: NodeMatcher,
    /// How long it waits for volumes on each node; `None` if as long as it takes.
    pub volume_timeout: Option<SignedDuration>,
    /// The steps in which it drains.
    pub plan: Arc<Plan>,
    /// How many pods have left so far according to its status. Counts when it is first seen.
    pub evacuated: u32,
    /// How many pods had yet to leave according to its status. Those that are not there any more when it is first seen have
    /// left while nobody led.
    pub left_before: u32,
    /// How many pods stayed because nobody evacuates their type or a rule skips them, according to its status. What stays
    /// now and did not then has not left.
    pub stayed_before: u32,
    /// The nodes that its status names as drained. Those of them that do not exist were deleted since. Counts when
    /// it is first seen.
    pub drained_nodes: Arc<[Arc<str>]>,
    /// How many nodes were deleted after they had been drained, according to its status. Counts when it is first
    /// seen.
    pub drained_and_deleted: u32,
    /// When its drain began, once it has.
    pub drain_began: Option<Timestamp>,
}

impl MaintenanceFacts {
    /// How a node's annotation names it.
    pub(crate) fn on_node(&self, stage: Stage) -> MaintenanceOnNode {
        MaintenanceOnNode { uid: self.uid.to_string(), name: self.name.to_string(), stage }
    }
}

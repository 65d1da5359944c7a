//! What a drain waits for. Every targeted pod is either blocked or has one of these reasons, so a drain always reports what
//! it waits for.

use std::sync::Arc;

use haulout_api_types::names::reason;

use jiff::Timestamp;

use crate::facts::{PodKey, Turn};

/// What the drain waits for until a pod has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WaitReason {
    /// The active evacuator.
    EvacuatorActive,
    /// The end of the pod's grace period.
    GracePeriod,
    /// The evacuation controller, which has not acted on the Evacuation yet.
    Requested,
    /// Its node, which is not cordoned yet or does not list the pod's drain target in its annotation yet.
    Node,
    /// Its Evacuation, which is not created yet.
    Pending,
    /// Other pods, which a DrainRule orders before it.
    Order,
}

impl WaitReason {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::EvacuatorActive, Self::GracePeriod, Self::Requested, Self::Node, Self::Pending, Self::Order];

    /// The machine-readable reason, one of `names::reason`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::EvacuatorActive => reason::EVACUATOR_ACTIVE,
            Self::GracePeriod => reason::TERMINATION_GRACE_PERIOD,
            Self::Requested => reason::EVACUATION_REQUESTED,
            Self::Node => reason::WAITING_FOR_NODE,
            Self::Pending => reason::EVACUATION_PENDING,
            Self::Order => reason::WAITING_FOR_ORDER,
        }
    }
}

/// Number of pods by wait reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitCounts([u32; WaitReason::ALL.len()]);

impl WaitCounts {
    /// Number of pods with this reason.
    pub fn of(self, reason: WaitReason) -> u32 {
        self.0.get(reason as usize).copied().unwrap_or_default()
    }

    /// Number of pods with any reason.
    pub fn total(self) -> u32 {
        self.0.iter().sum()
    }

    /// The reasons that occur, with the number of pods.
    pub fn iter(self) -> impl Iterator<Item = (WaitReason, u32)> {
        WaitReason::ALL.into_iter().zip(self.0).filter(|(_, number)| *number > 0)
    }

    /// Counts one more pod.
    pub fn add(&mut self, reason: WaitReason) {
        if let Some(number) = self.0.get_mut(reason as usize) {
            *number += 1;
        }
    }

    pub(crate) fn each<'a>(&'a mut self, other: &'a Self) -> impl Iterator<Item = (&'a mut u32, u32)> {
        self.0.iter_mut().zip(other.0)
    }
}

/// A pod that is leaving.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingPod {
    /// The pod.
    pub pod: PodKey,
    /// What the drain waits for.
    pub reason: WaitReason,
    /// The turn of the active evacuator, if there is one.
    pub turn: Option<Arc<Turn>>,
    /// When its grace period ends, if it is terminating.
    pub deadline: Option<Timestamp>,
}

//! What is waited for while pods leave: every targeted pod that nothing blocks is in one of these cases, so that a
//! drain never stands still without a word.

use std::sync::Arc;

use haulout_api_types::names::reason;

use jiff::Timestamp;

use crate::facts::{PodKey, Turn};

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Waiting {
    /// An evacuator, which is at work.
    EvacuatorActive,
    /// The end of the pod's grace period.
    GracePeriod,
    /// The evacuation controller, which has not acted on the Evacuation yet.
    Requested,
    /// Its node, which has yet to be cordoned or to announce that the pod is to leave.
    Node,
    /// Its Evacuation, which has yet to be made.
    Pending,
    /// Other pods, which a drain rule has leave before it.
    Order,
}

impl Waiting {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::EvacuatorActive, Self::GracePeriod, Self::Requested, Self::Node, Self::Pending, Self::Order];

    /// In one word, one of `names::reason`.
    pub fn reason(self) -> &'static str {
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

/// How many pods wait, by what for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits([u32; Waiting::ALL.len()]);

impl Waits {
    /// How many wait for this.
    pub fn of(self, waiting: Waiting) -> u32 {
        self.0.get(waiting as usize).copied().unwrap_or_default()
    }

    /// How many there are.
    pub fn total(self) -> u32 {
        self.0.iter().sum()
    }

    /// What is waited for, with how many wait for it.
    pub fn iter(self) -> impl Iterator<Item = (Waiting, u32)> {
        Waiting::ALL.into_iter().zip(self.0).filter(|(_, number)| *number > 0)
    }

    /// Counts one more.
    pub fn add(&mut self, waiting: Waiting) {
        if let Some(number) = self.0.get_mut(waiting as usize) {
            *number += 1;
        }
    }

    pub(crate) fn each<'a>(&'a mut self, other: &'a Self) -> impl Iterator<Item = (&'a mut u32, u32)> {
        self.0.iter_mut().zip(other.0)
    }
}

/// A pod that leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// Which.
    pub pod: PodKey,
    /// What is waited for.
    pub waiting: Waiting,
    /// The evacuator in charge, if one is.
    pub turn: Option<Arc<Turn>>,
    /// When its grace period ends, if it is terminating.
    pub deadline: Option<Timestamp>,
}

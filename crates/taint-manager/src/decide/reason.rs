//! Why a pod stays or leaves, with a message for logs and events.

use std::fmt;

use jiff::{Timestamp, Unit};

use crate::taint::Taint;

/// The reason of a decision about a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Its node has no `NoExecute` taints, or is unknown.
    NotTainted,
    /// It tolerates all of its node's taints forever.
    Tolerated,
    /// The policy ignores the taint.
    Ignored(Taint),
    /// It has finished.
    Finished,
    /// It is terminating already.
    Terminating,
    /// It does not tolerate the taint.
    NotTolerated(Taint),
    /// It tolerates the taint until a certain time.
    ToleratedUntil {
        /// The taint.
        taint: Taint,
        /// The time.
        due: Timestamp,
    },
    /// It has to leave, unless its node reports within the grace period after a watch gap.
    WatchGapGrace(Taint),
    /// A watch is interrupted, so the taint may be gone.
    WatchGap,
    /// The policy selects by namespace labels, and those of the pod's namespace have not arrived yet.
    NamespaceUnknown,
    /// Its Node cannot be parsed, so its taints are unknown.
    NodeUnreadable,
    /// It is stuck in termination on a node that is out of service.
    StuckOutOfService,
    /// It is stuck in termination on a node that is unreachable.
    StuckUnreachable,
    /// It was force-deleted, and a finalizer holds it.
    HeldByFinalizer,
    /// Its node is tainted as out of service, but is ready.
    InService,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotTainted => f.write_str("its node has no NoExecute taint"),
            Self::Tolerated => f.write_str("it tolerates all NoExecute taints of its node"),
            Self::Ignored(taint) => write!(f, "the policy ignores the taint {taint}"),
            Self::Finished => f.write_str("it has finished"),
            Self::Terminating => f.write_str("it is terminating"),
            Self::NotTolerated(taint) => write!(f, "it does not tolerate the taint {taint}"),
            Self::ToleratedUntil { taint, due } => {
                let due = due.round(Unit::Second).unwrap_or(*due);
                write!(f, "it tolerates the taint {taint} until {due}")
            }
            Self::WatchGapGrace(taint) => write!(
                f,
                "it has to leave because of the taint {taint} when the grace period after the watch gap ends, unless the taint is removed before"
            ),
            Self::WatchGap => f.write_str("a watch is interrupted, so the taint may be gone"),
            Self::NamespaceUnknown => f.write_str("the labels of its namespace have not been received yet"),
            Self::NodeUnreadable => f.write_str("its Node is unreadable, so its taints are unknown"),
            Self::StuckOutOfService => {
                f.write_str("it is stuck in termination on a node that is out of service")
            }
            Self::StuckUnreachable => f.write_str("it is stuck in termination on an unreachable node"),
            Self::HeldByFinalizer => f.write_str("it was force-deleted, but a finalizer holds it"),
            Self::InService => f.write_str(
                "its node is tainted as out of service but ready: shut the node down or remove the taint",
            ),
        }
    }
}

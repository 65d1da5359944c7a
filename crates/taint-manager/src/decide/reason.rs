//! Why a pod stays or leaves, with a sentence for people.

use std::fmt;

use jiff::{Timestamp, Unit};

use crate::taint::Taint;

/// Why something was decided about a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Its node has no `NoExecute` taints, or is not known.
    NotTainted,
    /// It tolerates all of its node's taints for ever.
    Tolerated,
    /// The policy says to ignore the taint.
    Ignored(Taint),
    /// It has finished.
    Finished,
    /// It is on its way out already.
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
    /// It would have to leave, but we or the API server were away until a moment ago.
    Settling(Taint),
    /// A watch is interrupted, so that nobody knows whether the taint is still there.
    WatchGap,
    /// The policy asks for labels of the pod's namespace, and those are not known yet.
    NamespaceUnknown,
    /// Its Node cannot be read, so that nobody knows its taints.
    NodeUnreadable,
    /// It hangs in termination on a node that is out of service.
    StuckOutOfService,
    /// It hangs in termination on a node that is unreachable.
    StuckUnreachable,
    /// It was deleted by force and a finalizer holds it.
    HeldByFinalizer,
    /// Its node is marked as out of service, but sends heartbeats.
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
            Self::Settling(taint) => write!(
                f,
                "it has to leave because of the taint {taint}, unless its node reports shortly now that all watches work again"
            ),
            Self::WatchGap => f.write_str("a watch is interrupted, so the taint may be gone"),
            Self::NamespaceUnknown => f.write_str("the labels of its namespace are not known yet"),
            Self::NodeUnreadable => f.write_str("its Node cannot be read, so its taints are not known"),
            Self::StuckOutOfService => {
                f.write_str("it hangs in termination on a node that is out of service")
            }
            Self::StuckUnreachable => f.write_str("it hangs in termination on an unreachable node"),
            Self::HeldByFinalizer => f.write_str("it was deleted by force and is held by a finalizer"),
            Self::InService => f.write_str(
                "its node is tainted as out of service but ready: shut the node down or remove the taint",
            ),
        }
    }
}

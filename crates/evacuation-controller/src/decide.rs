//! Decides the next action for one Evacuation: a pure function of the Evacuation, its pod, local state and the time.

mod cleanup;
mod turns;

use std::time::Duration;

use haulout_api_types::conditions;
use haulout_api_types::evacuation::CancellationPolicy;
use haulout_api_types::names::reason;
use haulout_api_types::node_maintenance::PodType;
use haulout_service_runtime::eviction::{Failure, is_failure};
use haulout_service_runtime::pods::Pod;
use jiff::Timestamp;

pub use self::cleanup::end_after_pod;
use self::turns::TurnDecision;
pub use self::turns::{EvictionCause, is_evicting};
use crate::backoff::{self, after};
use crate::record::Record;
use crate::status;

/// The grace period after a watch gap in which a passed deadline does not count as missed, so that evacuators can
/// report.
pub const WATCH_GAP_GRACE: Duration = Duration::from_secs(30);
/// How long an evicted pod may take until the watch reports it as terminating. Afterwards the eviction is repeated.
const EVICTION_TIMEOUT: Duration = Duration::from_secs(60);

/// The state of the Evacuation's pod, identified by its UID.
#[derive(Clone, Copy, Debug)]
pub enum PodState<'a> {
    /// The pod exists.
    Present(&'a Pod),
    /// The pod no longer exists. A UID is never reused.
    Gone,
    /// The cache does not have the pod. Its watch event may be delayed.
    Unknown,
}

/// State of an Evacuation that exists only in memory. A new leader starts without it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalState {
    /// The pod's budget allows the next attempt at once, without waiting for the backoff.
    pub admitted: bool,
    /// When the Eviction API accepted the eviction. The watch may not have delivered the terminating pod yet.
    pub evicted: Option<Timestamp>,
    /// How the evacuation ended, once we have deleted the Evacuation. The watch may not have delivered the deletion
    /// yet.
    pub deleted: Option<End>,
    /// The next attempt, if the last one failed with a transient error.
    pub retry: Option<Box<Retry>>,
    /// A failure that is not in the status yet, for example because of a write conflict.
    pub pending_failure: Option<Box<Failure>>,
    /// How often in a row the API server had the pod and the cache did not.
    pub cache_misses: u32,
    /// The resets of the cancellation policy, if there were any.
    pub policy_resets: Option<Box<PolicyResets>>,
}

/// Resets of a cancellation policy that an evacuator set to Forbid after its deadline. The pauses between them grow, in
/// case it sets the policy again and again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyResets {
    /// Their number.
    pub count: u32,
    /// When the next one is due, if it is necessary.
    pub due: Timestamp,
}

/// The next attempt after a transient failure. It does not wait for the backoff of rejected evictions. The default is
/// an immediate attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retry {
    /// The number of transient failures in a row.
    pub failures: u32,
    /// When the next attempt is due.
    pub due: Timestamp,
}

/// The current time and the state of the watches.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// The current time.
    pub now: Timestamp,
    /// When the watches last synced: at the start, or at the end of the last gap.
    pub resumed: Timestamp,
    /// Whether a watch is interrupted now.
    pub gap: bool,
    /// Since when the service behind the active evacuator has had no leader, if it is a service of this installation.
    pub unserved: Option<Timestamp>,
}

/// The next action for an Evacuation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Do nothing.
    Wait {
        /// When to decide again if no event arrives before.
        until: Option<Timestamp>,
    },
    /// Get the pod from the API server.
    LookUp,
    /// Activate the first evacuator.
    Activate {
        /// The class of the evacuator.
        class: String,
        /// Whether to set the progress timestamp, so that the deadline starts now.
        stamp: bool,
    },
    /// Activate the next evacuator.
    Switch {
        /// The class that was active.
        from: String,
        /// The class that becomes active.
        to: String,
        /// Why the turn of `from` ended.
        eviction_cause: EvictionCause,
    },
    /// Replace a progress time in the future by the current time.
    Clamp,
    /// Allow cancellation again, because the evacuator that forbade it no longer answers.
    AllowCancellation,
    /// Evict the pod.
    Evict {
        /// Why no evacuator is active.
        eviction_cause: EvictionCause,
        /// The status write before the eviction.
        before: BeforeEviction,
    },
    /// Set the condition `Blocked` to True.
    Block {
        /// The reason.
        reason: &'static str,
        /// The message of the condition.
        message: String,
    },
    /// Set the condition `Blocked` to False.
    Unblock {
        /// The reason.
        reason: &'static str,
        /// The message of the condition.
        message: String,
    },
    /// Report the finalizers that hold an Evacuation that has ended.
    Hold {
        /// How the evacuation ended.
        end: End,
        /// The message of the condition.
        message: String,
    },
    /// Remove all instigator finalizers, because the pod is gone.
    Release {
        /// The finalizers that stay.
        keep: Vec<String>,
    },
    /// Delete the Evacuation.
    Delete {
        /// How the evacuation ended.
        end: End,
    },
}

/// Wait for the next event.
const WAIT: Action = Action::Wait { until: None };

/// The status write before an eviction. If an evacuator has reported progress and our watch has not delivered it yet,
/// the write fails with a conflict, and the pod is not evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BeforeEviction {
    /// No write: no evacuator can report.
    Nothing,
    /// Write the message that the pod is about to be evicted.
    WriteMessage,
    /// Write an empty patch, only for its preconditions.
    CheckVersion,
}

/// How an evacuation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The pod was evicted.
    Evicted,
    /// The pod left without our eviction.
    Evacuated,
    /// All instigators withdrew.
    Cancelled,
}

/// Decides the next action for one Evacuation. Its deletion has no effect while an instigator finalizer remains.
pub fn decide(record: &Record, pod: PodState<'_>, local: &LocalState, moment: Moment) -> Action {
    let pod = match pod {
        PodState::Unknown => return Action::LookUp,
        PodState::Gone => return cleanup::clean_up_after_pod(record, local, moment),
        PodState::Present(pod) => pod,
    };
    if record.is_cancelled() {
        return cleanup::delete(record, local, moment, End::Cancelled);
    }
    if pod.terminating {
        return terminating(record, pod, moment);
    }
    match turns::turn(record, moment) {
        TurnDecision::Act(action) => action,
        // Earlier rejected evictions do not matter while an evacuator is active.
        TurnDecision::Wait { overdue: false, until } => {
            unblock_or_wait(record, reason::NOT_BLOCKED, || status::progress_resumed(record), until)
        }
        TurnDecision::Wait { until, .. } => Action::Wait { until },
        TurnDecision::Evict(eviction_cause) => {
            let reset = policy_reset_due(record, local, eviction_cause);
            if reset.is_some_and(|due| due <= moment.now) {
                return Action::AllowCancellation;
            }
            match evict(record, pod, local, moment, eviction_cause) {
                Action::Wait { until } => Action::Wait { until: until.into_iter().chain(reset).min() },
                action => action,
            }
        }
    }
}

/// When to allow cancellation again, if an evacuator forbids it that has missed its deadline.
fn policy_reset_due(record: &Record, local: &LocalState, eviction_cause: EvictionCause) -> Option<Timestamp> {
    let forbids = record.policy == CancellationPolicy::Forbid && eviction_cause.is_unanswered();
    forbids.then(|| local.policy_resets.as_ref().map_or(Timestamp::MIN, |resets| resets.due))
}

/// Whether this reason of the condition `Blocked` is one that we set.
fn is_ours(reason: &str) -> bool {
    is_failure(reason)
        || matches!(reason, reason::UNSUPPORTED | reason::TERMINATING | reason::EVACUATION_HELD)
}

/// The pod is not blocked: sets the condition to False if it is True, and waits otherwise.
fn unblock_or_wait(
    record: &Record,
    reason: &'static str,
    message: impl FnOnce() -> String,
    until: Option<Timestamp>,
) -> Action {
    if record.blocked_by().is_some_and(is_ours) {
        return Action::Unblock { reason, message: message() };
    }
    Action::Wait { until }
}

/// The pod is terminating.
fn terminating(record: &Record, pod: &Pod, moment: Moment) -> Action {
    let end = pod.deletion_timestamp();
    let overdue = end.map(conditions::overdue);
    let Some(end) = end.filter(|_| overdue.is_some_and(|overdue| overdue <= moment.now)) else {
        return unblock_or_wait(record, reason::EVACUATING, || status::terminating(pod), overdue);
    };
    if record.blocked_by() == Some(reason::TERMINATING) {
        return WAIT;
    }
    let held = if pod.has_finalizers {
        "a finalizer holds it; ask the owner of the finalizer to remove it"
    } else {
        "its node may be unreachable, or its containers may hang; check the node and its kubelet"
    };
    let message = format!("Pod {} should have terminated by {end}: {held}.", pod.name);
    Action::Block { reason: reason::TERMINATING, message }
}

fn evict(
    record: &Record,
    pod: &Pod,
    local: &LocalState,
    moment: Moment,
    eviction_cause: EvictionCause,
) -> Action {
    if pod.pod_type != PodType::Default {
        if record.blocked_by() == Some(reason::UNSUPPORTED) {
            return WAIT;
        }
        let kind = if pod.pod_type == PodType::DaemonSet { "belongs to a DaemonSet" } else { "is static" };
        let message = format!(
            "Pod {} {kind}. Such pods are never evicted: only an evacuator can make it leave.",
            pod.name
        );
        return Action::Block { reason: reason::UNSUPPORTED, message };
    }
    if let Some(evicted) = local.evicted {
        let retry_at = after(evicted, EVICTION_TIMEOUT);
        if moment.now < retry_at {
            let message = || status::evicting(record, eviction_cause);
            return unblock_or_wait(record, reason::EVACUATING, message, Some(retry_at));
        }
    }
    let due = match &local.retry {
        _ if local.admitted => None,
        Some(retry) => Some(retry.due),
        None => backoff::due(record, moment.resumed, moment.now),
    };
    if let Some(due) = due.filter(|due| *due > moment.now) {
        return Action::Wait { until: Some(due) };
    }
    let before = match eviction_cause {
        cause if !cause.is_unanswered() => BeforeEviction::Nothing,
        _ if record.blocked_by().is_some_and(is_failure) => BeforeEviction::CheckVersion,
        _ => BeforeEviction::WriteMessage,
    };
    Action::Evict { eviction_cause, before }
}

#[cfg(test)]
mod tests;

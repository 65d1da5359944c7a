//! What to do about one Evacuation: a pure function of what is known of it, its pod and the time. The same facts
//! always give the same action, whoever asks.

mod class;
mod garbage;

use std::time::Duration;

use haulout_api_types::conditions;
use haulout_api_types::names::reason;
use haulout_api_types::node_maintenance::PodType;
use haulout_service_runtime::eviction::{Failure, is_failure};
use haulout_service_runtime::pods::Pod;
use jiff::Timestamp;

use self::class::Stage;
pub use self::class::{Why, is_evicting};
pub use self::garbage::after_pod;
use crate::backoff::{self, after};
use crate::record::Record;
use crate::status;

/// How long after a gap a deadline that passed in it is not yet missed: evacuators report first.
pub const SETTLE: Duration = Duration::from_secs(30);
/// After how long a pod that was evicted and is still not seen to leave is looked at again.
const UNSEEN: Duration = Duration::from_secs(60);

/// What is known of the pod with the Evacuation's UID.
#[derive(Clone, Copy, Debug)]
pub enum Known<'a> {
    /// It is there, in this state.
    Present(&'a Pod),
    /// It does not exist any more, and never will again.
    Gone,
    /// Nothing: its own watch event may not have come yet.
    Nothing,
}

/// What only this process knows. A new one does well without.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// A budget has made room for this pod.
    pub admitted: bool,
    /// When the Eviction API took the pod; its own watch event may not have come yet.
    pub evicted: Option<Timestamp>,
    /// We have deleted the Evacuation because it ended so; its own watch event may not have come yet.
    pub deleted: Option<End>,
    /// Its last attempt failed for a reason that passes by itself.
    pub soon: Option<Box<Soon>>,
    /// A failure that has not been written yet, because somebody else wrote at the same time.
    pub unwritten: Option<Box<Failure>>,
    /// How often in a row the API server had its pod, and the cache did not.
    pub unwatched: u32,
}

/// The next attempt after one that failed for a reason that passes by itself. It does not wait for the backoff of
/// refusals. By default nothing has failed that would be worth a pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Soon {
    /// How many attempts in a row failed so.
    pub failures: u32,
    /// When the next one is due.
    pub due: Timestamp,
}

/// When it is, and how well we have been able to see.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// The time.
    pub now: Timestamp,
    /// When we began to see, or saw again after a gap.
    pub resumed: Timestamp,
    /// Whether we cannot see now.
    pub gap: bool,
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    Wait {
        /// When to look again if nothing happens before.
        until: Option<Timestamp>,
    },
    /// Asks the API server for the pod.
    LookUp,
    /// Gives the first evacuator control; `stamp` if its time to answer has to begin now.
    Activate {
        /// Its class.
        class: String,
        /// Whether the progress timestamp is set.
        stamp: bool,
    },
    /// Passes control on.
    Switch {
        /// The class that had control.
        from: String,
        /// The class that gets it.
        to: String,
        /// Why.
        why: Why,
    },
    /// Sets a progress time that is in the future to the present.
    Clamp,
    /// Evicts the pod.
    Evict {
        /// Why nobody else is asked.
        why: Why,
        /// What to do before.
        before: Before,
    },
    /// Says what keeps the pod from leaving.
    Block {
        /// The reason.
        reason: &'static str,
        /// A sentence.
        message: String,
    },
    /// Says that nothing keeps the pod from leaving any more.
    Unblock {
        /// The reason of the condition that is false from now on.
        reason: &'static str,
        /// A sentence.
        message: String,
    },
    /// Says which finalizers keep an Evacuation that should be gone.
    Hold {
        /// How the evacuation ended.
        end: End,
        /// A sentence.
        message: String,
    },
    /// The pod is gone: only these finalizers stay.
    Release {
        /// The finalizers that are not of the instigator form.
        keep: Vec<String>,
    },
    /// Deletes the Evacuation.
    Delete {
        /// Why.
        end: End,
    },
}

/// Nothing until an event changes something.
const WAIT: Action = Action::Wait { until: None };

/// What comes before an eviction. A report that is stored and that our watch has not delivered yet makes the write
/// fail, and then the eviction is off: until it is sent, a report wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// Nothing: nobody may report.
    Nothing,
    /// Write that the pod is about to be evicted.
    Announce,
    /// Write nothing, with the same preconditions.
    Confirm,
}

/// How an evacuation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The pod was evicted.
    Evicted,
    /// The pod has left in another way.
    Evacuated,
    /// Nobody wants it any longer.
    Cancelled,
}

/// Decides about one Evacuation. Whether somebody has deleted it plays no part while an instigator wants it.
pub fn decide(record: &Record, pod: Known<'_>, live: &Live, moment: Moment) -> Action {
    let pod = match pod {
        Known::Nothing => return Action::LookUp,
        Known::Gone => return garbage::after_the_pod(record, live, moment),
        Known::Present(pod) => pod,
    };
    if record.is_cancelled() {
        return garbage::delete(record, live, moment, End::Cancelled);
    }
    if pod.terminating {
        return leaving(record, pod, moment);
    }
    match class::stage(record, moment) {
        Stage::Act(action) => action,
        // What was refused before does not matter as long as an evacuator is at work.
        Stage::Wait { overdue: false, until } => {
            unblock_or_wait(record, reason::NOT_BLOCKED, || status::at_work(record), until)
        }
        Stage::Wait { until, .. } => Action::Wait { until },
        Stage::Evict(why) => evict(record, pod, live, moment, why),
    }
}

/// Whether the reason of a blockade is one that we set.
fn is_ours(reason: &str) -> bool {
    is_failure(reason)
        || matches!(reason, reason::UNSUPPORTED | reason::TERMINATING | reason::EVACUATION_HELD)
}

/// Nothing keeps the pod from leaving: says so if the condition says otherwise.
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

/// The pod has been asked to end.
fn leaving(record: &Record, pod: &Pod, moment: Moment) -> Action {
    let end = pod.deletion_timestamp();
    let overdue = end.map(conditions::overdue);
    let Some(end) = end.filter(|_| overdue.is_some_and(|overdue| overdue <= moment.now)) else {
        return unblock_or_wait(record, reason::EVACUATING, || status::terminating(pod), overdue);
    };
    if record.blocked_by() == Some(reason::TERMINATING) {
        return WAIT;
    }
    let held = if pod.has_finalizers {
        "a finalizer holds it"
    } else {
        "its node may be unreachable or its containers may hang"
    };
    let message = format!("Pod {} should have ended by {end} and has not: {held}.", pod.name);
    Action::Block { reason: reason::TERMINATING, message }
}

fn evict(record: &Record, pod: &Pod, live: &Live, moment: Moment, why: Why) -> Action {
    if pod.pod_type != PodType::Default {
        if record.blocked_by() == Some(reason::UNSUPPORTED) {
            return WAIT;
        }
        let kind = if pod.pod_type == PodType::DaemonSet { "belongs to a DaemonSet" } else { "is static" };
        let message = format!(
            "Pod {} {kind}, and such pods are never evicted: it takes an evacuator to make it leave.",
            pod.name
        );
        return Action::Block { reason: reason::UNSUPPORTED, message };
    }
    if let Some(evicted) = live.evicted {
        let unseen = after(evicted, UNSEEN);
        if moment.now < unseen {
            let message = || status::evicting(record, why);
            return unblock_or_wait(record, reason::EVACUATING, message, Some(unseen));
        }
    }
    let due = match &live.soon {
        _ if live.admitted => None,
        Some(soon) => Some(soon.due),
        None => backoff::due(record, moment.resumed, moment.now),
    };
    if let Some(due) = due.filter(|due| *due > moment.now) {
        return Action::Wait { until: Some(due) };
    }
    let before = match why {
        Why::Silent if record.blocked_by().is_some_and(is_failure) => Before::Confirm,
        Why::Silent => Before::Announce,
        Why::None | Why::Completed => Before::Nothing,
    };
    Action::Evict { why, before }
}

#[cfg(test)]
mod tests;

//! Cleans up Evacuations that have ended: the pod is gone, or all instigators withdrew.

use std::time::Duration;

use haulout_api_types::names::reason;

use super::turns::{self, TurnDecision};
use super::{Action, End, LocalState, Moment, WAIT};
use crate::backoff::after;
use crate::record::Record;
use crate::status;

/// How long finalizers may hold a deleted Evacuation before this is reported.
const FINALIZER_GRACE_PERIOD: Duration = Duration::from_secs(5);

/// The pod is gone: removes the instigator finalizers, then deletes the Evacuation. Other finalizers stay.
pub(super) fn clean_up_after_pod(record: &Record, local: &LocalState, moment: Moment) -> Action {
    let keep = record.foreign_finalizers();
    if keep.len() < record.finalizers.len() {
        return Action::Release { keep };
    }
    delete(record, local, moment, end_after_pod(record, local, moment))
}

/// The evacuation has ended: deletes the Evacuation. Evacuators that have to clean up hold it with their finalizers.
pub(super) fn delete(record: &Record, local: &LocalState, moment: Moment, end: End) -> Action {
    let is_deleted = record.deleted.is_some() || local.deleted.is_some();
    if is_deleted { held(record, local, moment, end) } else { Action::Delete { end } }
}

/// The Evacuation is deleted, and finalizers may hold it.
fn held(record: &Record, local: &LocalState, moment: Moment, end: End) -> Action {
    // The watch has not delivered the deletion yet.
    let Some(deleted) = record.deleted.filter(|_| !record.finalizers.is_empty()) else { return WAIT };
    let due = after(deleted, FINALIZER_GRACE_PERIOD);
    if moment.now < due {
        return Action::Wait { until: Some(due) };
    }
    let ended = match end {
        End::Cancelled => "The evacuation is cancelled",
        End::Evicted | End::Evacuated => "The pod is gone",
    };
    let message = status::held(record, ended);
    if record.has_blocked_condition(reason::EVACUATION_HELD, &message) {
        return WAIT;
    }
    Action::Hold { end: local.deleted.unwrap_or(end), message }
}

/// How an evacuation ended whose pod is gone.
pub fn end_after_pod(record: &Record, local: &LocalState, moment: Moment) -> End {
    let evicting = matches!(turns::turn(record, moment), TurnDecision::Evict(_));
    // We do not know what an earlier leader did. If no evacuator was active and no eviction was rejected, it evicted
    // the pod.
    let earlier = record.created < moment.resumed && record.blocked_by().is_none();
    if evicting && (local.evicted.is_some() || earlier) { End::Evicted } else { End::Evacuated }
}

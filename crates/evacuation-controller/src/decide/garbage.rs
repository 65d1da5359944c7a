//! The end of an Evacuation: when its pod has gone, and when nobody wants it any longer.

use std::time::Duration;

use haulout_api_types::names::reason;

use super::class::{self, Stage};
use super::{Action, End, Live, Moment, WAIT};
use crate::backoff::after;
use crate::record::Record;
use crate::status;

/// How long the owners of other finalizers have before it is reported that they hold the Evacuation.
const PATIENCE: Duration = Duration::from_secs(5);

/// The pod has gone: instigators are released, everybody else's finalizers stay, and the Evacuation goes.
pub(super) fn after_the_pod(record: &Record, live: &Live, moment: Moment) -> Action {
    let keep = record.foreign_finalizers();
    if keep.len() < record.finalizers.len() {
        return Action::Release { keep };
    }
    delete(record, live, moment, after_pod(record, live, moment))
}

/// The evacuation has ended: the Evacuation is deleted. Evacuators that want to clean up hold it with their finalizers.
pub(super) fn delete(record: &Record, live: &Live, moment: Moment, end: End) -> Action {
    let is_deleted = record.deleted.is_some() || live.deleted.is_some();
    if is_deleted { held(record, live, moment, end) } else { Action::Delete { end } }
}

/// It has been deleted, and finalizers of others keep it.
fn held(record: &Record, live: &Live, moment: Moment, end: End) -> Action {
    // We have just deleted it, or it is gone and the watch event has yet to come.
    let Some(deleted) = record.deleted.filter(|_| !record.finalizers.is_empty()) else { return WAIT };
    let due = after(deleted, PATIENCE);
    if moment.now < due {
        return Action::Wait { until: Some(due) };
    }
    let ended = match end {
        End::Cancelled => "The evacuation is cancelled",
        End::Evicted | End::Evacuated => "The pod is gone",
    };
    let message = status::held(record, ended);
    if record.is_blocked_saying(reason::EVACUATION_HELD, &message) {
        return WAIT;
    }
    Action::Hold { end: live.deleted.unwrap_or(end), message }
}

/// How the evacuation ended of a pod that is gone.
pub fn after_pod(record: &Record, live: &Live, moment: Moment) -> End {
    let evicting = matches!(class::stage(record, moment), Stage::Evict(_));
    // What an earlier leader did is not known. It evicted a pod that nobody else was in charge of, unless it was refused.
    let earlier = record.created < moment.resumed && record.blocked_by().is_none();
    if evicting && (live.evicted.is_some() || earlier) { End::Evicted } else { End::Evacuated }
}

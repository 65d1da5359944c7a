//! The end of an Evacuation: when its pod has gone, and when nobody wants it any longer.

use super::{Action, End, Plan, now, wait};
use crate::record::Record;

/// The pod has gone: instigators are released, everybody else's finalizers stay, and the Evacuation goes.
pub(super) fn after_the_pod(record: &Record, deleting: bool) -> Plan {
    let keep = record.foreign_finalizers();
    if keep.len() < record.finalizers.len() {
        return now(Action::Release { keep: keep.into_iter().map(Into::into).collect() });
    }
    if deleting { wait(None) } else { now(Action::Delete { end: End::Evacuated }) }
}

/// Nobody wants it: the Evacuation is deleted. Evacuators that want to clean up hold it with their finalizers.
pub(super) fn cancelled(deleting: bool) -> Plan {
    if deleting { wait(None) } else { now(Action::Delete { end: End::Cancelled }) }
}

//! Whose turn it is: evacuators by priority, each until it has done its part or been silent for too long, and
//! the Eviction API after the last.

use haulout_api_types::evacuation::Evacuator;
use haulout_api_types::reports::MAX_AHEAD;
use jiff::Timestamp;

use super::{Action, Moment, SETTLE};
use crate::backoff::after;
use crate::record::Record;

/// Why the evacuator in charge is in charge no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The pod has no evacuator.
    None,
    /// It has done its part, and the pod is still there.
    Completed,
    /// It has reported no progress for too long.
    Silent,
}

/// Where an evacuation stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Another evacuator is to be given control, or what the one in charge has reported is to be corrected.
    Act(Action),
    /// An evacuator is at work; its deadline is then, or not yet known. `overdue` if it has passed, and only the
    /// time after a gap is granted.
    Wait { until: Option<Timestamp>, overdue: bool },
    /// No evacuator is left.
    Evict(Why),
}

/// Where this evacuation stands.
pub(super) fn stage(record: &Record, moment: Moment) -> Stage {
    let Some(first) = record.evacuators.first() else {
        return Stage::Evict(Why::None);
    };
    let Some((active, next)) = active_and_next(record) else {
        // The deadline runs from the creation. One that we have let run for a while is begun anew: the
        // evacuator is not to blame.
        let stamp = moment.now > after(record.created, SETTLE);
        return Stage::Act(Action::Activate { class: first.evacuator_class.clone(), stamp });
    };
    let ahead = moment.now.saturating_add(MAX_AHEAD).unwrap_or(Timestamp::MAX);
    let why = if record.completed {
        Why::Completed
    } else if record.progress.is_some_and(|progress| progress > ahead) {
        // A time that is still to come counts as now: otherwise the deadline would never come.
        return Stage::Act(Action::Clamp);
    } else {
        let stored = after(record.progress.unwrap_or(record.created), record.progress_deadline);
        // Nobody can see now, or until a moment ago could not, whether it has reported.
        match (!moment.gap).then(|| stored.max(after(moment.resumed, SETTLE))) {
            Some(deadline) if deadline <= moment.now => Why::Silent,
            until => return Stage::Wait { until, overdue: stored <= moment.now },
        }
    };
    match next {
        Some(next) => {
            let (from, to) = (active.evacuator_class.clone(), next.evacuator_class.clone());
            Stage::Act(Action::Switch { from, to, why })
        }
        None => Stage::Evict(why),
    }
}

/// Whether no evacuator is left at this time, so that the pod is being evicted. What the class in charge is stays in the
/// status, because it may still report.
pub fn is_evicting(record: &Record, now: Timestamp) -> bool {
    matches!(stage(record, Moment { now, resumed: Timestamp::MIN, gap: false }), Stage::Evict(_))
}

/// The evacuator in charge, and who comes after it.
fn active_and_next(record: &Record) -> Option<(&Evacuator, Option<&Evacuator>)> {
    let active = record.active.as_deref()?;
    let mut from = record.evacuators.iter().skip_while(|evacuator| evacuator.evacuator_class != active);
    from.next().map(|active| (active, from.next()))
}

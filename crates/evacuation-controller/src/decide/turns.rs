//! The turns of evacuators: highest priority first, each until it completes or misses its progress deadline. After the
//! last one, the pod is evicted.

use std::time::Duration;

use haulout_api_types::evacuation::Evacuator;
use haulout_api_types::reports::MAX_AHEAD;
use jiff::Timestamp;

use super::{Action, Moment, WATCH_GAP_GRACE};
use crate::backoff::after;
use crate::record::Record;

/// How long the services of this installation may take to elect leaders after a watch gap, which affects them too.
const SERVICE_GRACE: Duration = Duration::from_secs(60);

/// Why the turn of the last active evacuator has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionCause {
    /// The pod has no evacuator.
    NoEvacuator,
    /// The evacuator has completed, and the pod still exists.
    Completed,
    /// The evacuator has not reported progress before its deadline.
    TimedOut,
    /// The evacuator is a service of this installation that has had no leader since this time.
    Unserved(Timestamp),
}

impl EvictionCause {
    /// Whether the turn ended without an answer of the evacuator.
    pub fn is_unanswered(self) -> bool {
        matches!(self, Self::TimedOut | Self::Unserved(_))
    }
}

/// What the turns of evacuators require now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TurnDecision {
    /// Activate another evacuator, or correct the report of the active one.
    Act(Action),
    /// An evacuator is active, with a deadline at `until`, or unknown during a watch gap. `overdue` means that the
    /// deadline has passed and the grace period after a watch gap applies.
    Wait { until: Option<Timestamp>, overdue: bool },
    /// No evacuator is left: evict the pod.
    Evict(EvictionCause),
}

/// Whose turn it is.
pub(super) fn turn(record: &Record, moment: Moment) -> TurnDecision {
    let Some(first) = record.evacuators.first() else {
        return TurnDecision::Evict(EvictionCause::NoEvacuator);
    };
    let Some((active, next)) = active_and_next(record) else {
        // The deadline starts at the creation. If we activate the evacuator late, the deadline starts now, because the
        // delay is not the evacuator's fault.
        let stamp = moment.now > after(record.created, WATCH_GAP_GRACE);
        return TurnDecision::Act(Action::Activate { class: first.evacuator_class.clone(), stamp });
    };
    let ahead = moment.now.saturating_add(MAX_AHEAD).unwrap_or(Timestamp::MAX);
    let eviction_cause = if record.completed {
        EvictionCause::Completed
    } else if record.progress.is_some_and(|progress| progress > ahead) {
        // A time in the future counts as now. Otherwise the deadline would never pass.
        return TurnDecision::Act(Action::Clamp);
    } else if let Some(since) =
        moment.unserved.filter(|_| !moment.gap && after(moment.resumed, SERVICE_GRACE) <= moment.now)
    {
        EvictionCause::Unserved(since)
    } else {
        let stored = after(record.progress.unwrap_or(record.created), record.progress_deadline);
        // During a watch gap, and shortly after it, a report may not have arrived yet.
        match (!moment.gap).then(|| stored.max(after(moment.resumed, WATCH_GAP_GRACE))) {
            Some(deadline) if deadline <= moment.now => EvictionCause::TimedOut,
            until => {
                // The service may have had no leader because of the gap.
                let served_by = moment.unserved.map(|_| after(moment.resumed, SERVICE_GRACE));
                let until = until.into_iter().chain(served_by.filter(|_| !moment.gap)).min();
                return TurnDecision::Wait { until, overdue: stored <= moment.now };
            }
        }
    };
    match next {
        Some(next) => {
            let (from, to) = (active.evacuator_class.clone(), next.evacuator_class.clone());
            TurnDecision::Act(Action::Switch { from, to, eviction_cause })
        }
        None => TurnDecision::Evict(eviction_cause),
    }
}

/// Whether no evacuator is left, so that the pod is being evicted. The last class stays in the status, because it may
/// still report.
pub fn is_evicting(record: &Record, unserved: Option<Timestamp>, now: Timestamp) -> bool {
    let moment = Moment { now, resumed: Timestamp::MIN, gap: false, unserved };
    matches!(turn(record, moment), TurnDecision::Evict(_))
}

/// The active evacuator, and the next one.
fn active_and_next(record: &Record) -> Option<(&Evacuator, Option<&Evacuator>)> {
    let active = record.active.as_deref()?;
    let mut from = record.evacuators.iter().skip_while(|evacuator| evacuator.evacuator_class != active);
    from.next().map(|active| (active, from.next()))
}

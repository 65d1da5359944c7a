//! Decides which events are written. The first event is written at once, equal ones as a series at growing intervals.
//! If very many objects have events with the same reason at once, some get their own event, and one event summarizes
//! the rest.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use haulout_api_types::bounded;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;

use super::{MAX_NOTE_BYTES, NewEvent, Severity};

/// Delay of the update of a series. It doubles from the first to the last value.
const REPEAT_FIRST: Duration = Duration::from_secs(10);
const REPEAT_LAST: Duration = Duration::from_secs(320);
/// After this time without a repeat, an equal event is a new event.
const FORGET_AFTER: Duration = Duration::from_secs(640);
/// Number of events with one reason that are written at once, and per second after that.
const BURST: u32 = 50;
const PER_SECOND: u32 = 10;

/// What to write.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Write {
    /// A new event.
    Create { name: String, event: NewEvent, first: Timestamp },
    /// An update of the total count.
    Repeat { name: String, regarding: ObjectReference, count: i32, last: Timestamp },
}

/// The fields in which equal events agree.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    kind: String,
    namespace: String,
    name: String,
    uid: String,
    severity: Severity,
    reason: &'static str,
    action: &'static str,
    note: String,
}

#[derive(Debug)]
struct Series {
    name: String,
    regarding: ObjectReference,
    count: i32,
    written: i32,
    last: Timestamp,
    /// The time of the last write, and the delay of the next.
    wrote: Timestamp,
    wait: Duration,
}

/// The rate limit of one reason, and its suppressed events.
#[derive(Debug)]
struct Budget {
    left: u32,
    refilled: Timestamp,
    /// The latest suppressed event, its time, and the number of others.
    suppressed: Option<(NewEvent, Timestamp, u32)>,
}

/// The recent events.
#[derive(Debug, Default)]
pub(super) struct Aggregator {
    series: HashMap<Key, Series>,
    budgets: BTreeMap<&'static str, Budget>,
    new: Vec<Write>,
    /// Makes names unique within one microsecond.
    number: u64,
}

impl Aggregator {
    /// Adds an event.
    pub(super) fn observe(&mut self, event: NewEvent, now: Timestamp) {
        let key = Key::of(&event);
        if let Some(series) = self.series.get_mut(&key)
            && !is_expired(series, now)
        {
            series.count = series.count.saturating_add(1);
            series.last = now;
            return;
        }
        let budget = self.budgets.entry(event.reason).or_insert(Budget {
            left: BURST,
            refilled: now,
            suppressed: None,
        });
        budget.refill(now);
        if budget.left == 0 {
            let others = budget.suppressed.take().map_or(0, |(_, _, others)| others + 1);
            budget.suppressed = Some((event, now, others));
            return;
        }
        budget.left -= 1;
        self.start_series(key, event, now, now);
    }

    /// The writes that are due.
    pub(super) fn due(&mut self, now: Timestamp) -> Vec<Write> {
        let mut released = Vec::new();
        for budget in self.budgets.values_mut() {
            budget.refill(now);
            if budget.left > 0
                && let Some((mut event, time, others)) = budget.suppressed.take()
            {
                budget.left -= 1;
                if others > 0 {
                    let rest = format!(" (and {others} similar events on other objects)");
                    let note = bounded::cut(&event.note, MAX_NOTE_BYTES.saturating_sub(rest.len()));
                    event.note = format!("{note}{rest}");
                }
                released.push((event, time));
            }
        }
        for (event, time) in released {
            self.start_series(Key::of(&event), event, time, now);
        }
        let mut writes = std::mem::take(&mut self.new);
        self.series.retain(|_, series| {
            if series.count > series.written && now >= next_write(series) {
                series.written = series.count;
                series.wrote = now;
                series.wait = (series.wait * 2).min(REPEAT_LAST);
                writes.push(Write::Repeat {
                    name: series.name.clone(),
                    regarding: series.regarding.clone(),
                    count: series.count,
                    last: series.last,
                });
            }
            series.count > series.written || !is_expired(series, now)
        });
        writes
    }

    /// All pending writes, for shutdown.
    pub(super) fn flush(&mut self, now: Timestamp) -> Vec<Write> {
        for budget in self.budgets.values_mut() {
            budget.left = budget.left.max(1);
        }
        for series in self.series.values_mut() {
            series.wait = Duration::ZERO;
        }
        self.due(now)
    }

    /// The event with this name does not exist: the next equal event is a new event.
    pub(super) fn forget(&mut self, name: &str) {
        self.series.retain(|_, series| series.name != name);
    }

    /// The time of the next write, if no event is added before.
    pub(super) fn next_due(&self) -> Option<Timestamp> {
        let repeats = self.series.values().map(|series| {
            if series.count > series.written { next_write(series) } else { after(series.last, FORGET_AFTER) }
        });
        let suppressed = self.budgets.values().filter(|budget| budget.suppressed.is_some());
        repeats.chain(suppressed.map(|budget| after(budget.refilled, Duration::from_secs(1)))).min()
    }

    fn start_series(&mut self, key: Key, event: NewEvent, first: Timestamp, now: Timestamp) {
        self.number += 1;
        // Like in client-go: the name of the object and a unique suffix.
        let object: String = event.regarding.name.as_deref().unwrap_or("unnamed").chars().take(200).collect();
        let name = format!(
            "{}.{:x}{:04x}",
            object.trim_end_matches(['-', '.']),
            first.as_microsecond(),
            self.number & 0xffff
        );
        let series = Series {
            name: name.clone(),
            regarding: event.regarding.clone(),
            count: 1,
            written: 1,
            last: now,
            wrote: now,
            wait: REPEAT_FIRST,
        };
        self.series.insert(key, series);
        self.new.push(Write::Create { name, event, first });
    }
}

impl Key {
    fn of(event: &NewEvent) -> Self {
        let part = |text: &Option<String>| text.clone().unwrap_or_default();
        Self {
            kind: part(&event.regarding.kind),
            namespace: part(&event.regarding.namespace),
            name: part(&event.regarding.name),
            uid: part(&event.regarding.uid),
            severity: event.severity,
            reason: event.reason,
            action: event.action,
            note: event.note.clone(),
        }
    }
}

impl Budget {
    fn refill(&mut self, now: Timestamp) {
        // The clock may have been set back.
        self.refilled = self.refilled.min(now);
        let seconds = u32::try_from(now.duration_since(self.refilled).as_secs()).unwrap_or(0);
        if seconds > 0 {
            self.left = self.left.saturating_add(seconds.saturating_mul(PER_SECOND)).min(BURST);
            self.refilled = after(self.refilled, Duration::from_secs(u64::from(seconds)));
        }
    }
}

fn after(time: Timestamp, wait: Duration) -> Timestamp {
    time.saturating_add(wait).unwrap_or(Timestamp::MAX)
}

fn next_write(series: &Series) -> Timestamp {
    after(series.wrote, series.wait)
}

fn is_expired(series: &Series, now: Timestamp) -> bool {
    now >= after(series.last, FORGET_AFTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn event(object: &str, note: &str) -> NewEvent {
        NewEvent {
            regarding: ObjectReference {
                name: Some(object.into()),
                uid: Some(object.into()),
                ..ObjectReference::default()
            },
            severity: Severity::Normal,
            reason: "Evicting",
            action: "Evict",
            note: note.into(),
        }
    }

    fn count(writes: &[Write]) -> (usize, Vec<i32>) {
        let creates = writes.iter().filter(|write| matches!(write, Write::Create { .. })).count();
        let repeats = writes.iter().filter_map(|write| match write {
            Write::Repeat { count, .. } => Some(*count),
            Write::Create { .. } => None,
        });
        (creates, repeats.collect())
    }

    /// Advances the time until nothing is pending, and returns all writes.
    fn run_to_end(aggregator: &mut Aggregator, mut now: Timestamp) -> Vec<Write> {
        let mut writes = aggregator.due(now);
        while let Some(due) = aggregator.next_due() {
            now = due.max(now);
            writes.extend(aggregator.due(now));
        }
        writes
    }

    #[test]
    fn thousand_equal_events_on_one_object_cost_two_writes() {
        let mut aggregator = Aggregator::default();
        for _ in 0..1000 {
            aggregator.observe(event("a", "x"), at(0));
        }
        assert_eq!(count(&run_to_end(&mut aggregator, at(0))), (1, vec![1000]));
        assert!(aggregator.series.is_empty(), "old series are removed");
    }

    #[test]
    fn first_event_is_immediate_and_repeats_back_off() {
        let mut aggregator = Aggregator::default();
        let mut log = Vec::new();
        for second in 0..200 {
            aggregator.observe(event("a", "x"), at(second));
            for write in aggregator.due(at(second)) {
                log.push((second, count(&[write])));
            }
        }
        assert_eq!(log[0], (0, (1, vec![])));
        let repeats: Vec<_> = log[1..].iter().map(|(second, (_, counts))| (*second, counts[0])).collect();
        assert_eq!(repeats, [(10, 11), (30, 31), (70, 71), (150, 151)]);
    }

    #[test]
    fn different_objects_or_notes_are_different_events() {
        let mut aggregator = Aggregator::default();
        for (object, note) in [("a", "x"), ("b", "x"), ("a", "y")] {
            aggregator.observe(event(object, note), at(0));
        }
        assert_eq!(count(&aggregator.due(at(0))), (3, vec![]));
    }

    #[test]
    fn same_event_on_a_thousand_objects_is_summarized() {
        let mut aggregator = Aggregator::default();
        for number in 0..1000 {
            aggregator.observe(event(&format!("pod-{number}"), "leaving"), at(0));
        }
        let writes = run_to_end(&mut aggregator, at(0));
        assert_eq!(count(&writes), (51, vec![]));
        let mut notes = writes.iter().filter_map(|write| match write {
            Write::Create { event, .. } => Some(event.note.as_str()),
            Write::Repeat { .. } => None,
        });
        assert_eq!(notes.next_back().unwrap(), "leaving (and 949 similar events on other objects)");
    }

    #[test]
    fn repeat_after_a_long_pause_is_a_new_event() {
        let mut aggregator = Aggregator::default();
        aggregator.observe(event("a", "x"), at(0));
        aggregator.due(at(0));
        aggregator.observe(event("a", "x"), at(641));
        assert_eq!(count(&aggregator.due(at(641))), (1, vec![]));
    }
}

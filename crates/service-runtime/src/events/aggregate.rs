//! Decides which events are written. The first of its kind on an object is written at once, repeats as a
//! series at growing intervals; and when very many objects have the same news at once, some get an event of
//! their own and one tells of the rest.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;

use super::{MAX_NOTE, News, Severity, shorten};

/// How long a repeat waits to be written: doubling from the first to the last.
const REPEAT_FIRST: Duration = Duration::from_secs(10);
const REPEAT_LAST: Duration = Duration::from_secs(320);
/// After this long without a repeat, the next one is a new event.
const FORGET_AFTER: Duration = Duration::from_secs(640);
/// How many events of one reason are written at once, and how many more a second after that.
const BURST: u32 = 50;
const PER_SECOND: u32 = 10;

/// What to write.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Write {
    /// A new event.
    Create { name: String, news: News, first: Timestamp },
    /// It has happened again, this often in all.
    Repeat { name: String, regarding: ObjectReference, count: i32, last: Timestamp },
}

/// News on the same object that say the same.
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
    /// When the last write was, and how long the next one waits after it.
    wrote: Timestamp,
    wait: Duration,
}

/// The budget of one reason, and who had to go without.
#[derive(Debug)]
struct Budget {
    left: u32,
    refilled: Timestamp,
    /// The latest that was held back, and how many others.
    held: Option<(News, Timestamp, u32)>,
}

/// All that has been seen lately.
#[derive(Debug, Default)]
pub(super) struct Aggregator {
    series: HashMap<Key, Series>,
    budgets: BTreeMap<&'static str, Budget>,
    new: Vec<Write>,
    /// Makes names unique that begin in the same microsecond.
    number: u64,
}

impl Aggregator {
    /// Takes news.
    pub(super) fn observe(&mut self, news: News, now: Timestamp) {
        let key = Key::of(&news);
        if let Some(series) = self.series.get_mut(&key)
            && !is_over(series, now)
        {
            series.count = series.count.saturating_add(1);
            series.last = now;
            return;
        }
        let budget =
            self.budgets.entry(news.reason).or_insert(Budget { left: BURST, refilled: now, held: None });
        budget.refill(now);
        if budget.left == 0 {
            let others = budget.held.take().map_or(0, |(_, _, others)| others + 1);
            budget.held = Some((news, now, others));
            return;
        }
        budget.left -= 1;
        self.begin(key, news, now, now);
    }

    /// What is to be written by now.
    pub(super) fn due(&mut self, now: Timestamp) -> Vec<Write> {
        let mut released = Vec::new();
        for budget in self.budgets.values_mut() {
            budget.refill(now);
            if budget.left > 0
                && let Some((mut news, seen, others)) = budget.held.take()
            {
                budget.left -= 1;
                if others > 0 {
                    let rest =
                        format!(" (and the like for {others} others, in one event to spare the API server)");
                    shorten(&mut news.note, MAX_NOTE - rest.len());
                    news.note.push_str(&rest);
                }
                released.push((news, seen));
            }
        }
        for (news, seen) in released {
            self.begin(Key::of(&news), news, seen, now);
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
            series.count > series.written || !is_over(series, now)
        });
        writes
    }

    /// All that would be written later, for the end.
    pub(super) fn rest(&mut self, now: Timestamp) -> Vec<Write> {
        for budget in self.budgets.values_mut() {
            budget.left = budget.left.max(1);
        }
        for series in self.series.values_mut() {
            series.wait = Duration::ZERO;
        }
        self.due(now)
    }

    /// The event of this name is not there: what would repeat it begins anew.
    pub(super) fn forget(&mut self, name: &str) {
        self.series.retain(|_, series| series.name != name);
    }

    /// When to look again, if nothing is observed before.
    pub(super) fn next_due(&self) -> Option<Timestamp> {
        let repeats = self.series.values().map(|series| {
            if series.count > series.written { next_write(series) } else { after(series.last, FORGET_AFTER) }
        });
        let held = self.budgets.values().filter(|budget| budget.held.is_some());
        repeats.chain(held.map(|budget| after(budget.refilled, Duration::from_secs(1)))).min()
    }

    fn begin(&mut self, key: Key, news: News, first: Timestamp, now: Timestamp) {
        self.number += 1;
        // As client-go names them: the object's name and something unique.
        let object: String = news.regarding.name.as_deref().unwrap_or("unnamed").chars().take(200).collect();
        let name = format!(
            "{}.{:x}{:04x}",
            object.trim_end_matches(['-', '.']),
            first.as_microsecond(),
            self.number & 0xffff
        );
        let series = Series {
            name: name.clone(),
            regarding: news.regarding.clone(),
            count: 1,
            written: 1,
            last: now,
            wrote: now,
            wait: REPEAT_FIRST,
        };
        self.series.insert(key, series);
        self.new.push(Write::Create { name, news, first });
    }
}

impl Key {
    fn of(news: &News) -> Self {
        let part = |text: &Option<String>| text.clone().unwrap_or_default();
        Self {
            kind: part(&news.regarding.kind),
            namespace: part(&news.regarding.namespace),
            name: part(&news.regarding.name),
            uid: part(&news.regarding.uid),
            severity: news.severity,
            reason: news.reason,
            action: news.action,
            note: news.note.clone(),
        }
    }
}

impl Budget {
    fn refill(&mut self, now: Timestamp) {
        // Somebody has set the clock back.
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

fn is_over(series: &Series, now: Timestamp) -> bool {
    now >= after(series.last, FORGET_AFTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn news(object: &str, note: &str) -> News {
        News {
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

    /// Runs the aggregator on until nothing is due any more, and gives all that it writes.
    fn settle(aggregator: &mut Aggregator, mut now: Timestamp) -> Vec<Write> {
        let mut writes = aggregator.due(now);
        while let Some(due) = aggregator.next_due() {
            now = due.max(now);
            writes.extend(aggregator.due(now));
        }
        writes
    }

    #[test]
    fn a_thousand_alike_on_one_object_cost_two_writes() {
        let mut aggregator = Aggregator::default();
        for _ in 0..1000 {
            aggregator.observe(news("a", "x"), at(0));
        }
        assert_eq!(count(&settle(&mut aggregator, at(0))), (1, vec![1000]));
        assert!(aggregator.series.is_empty(), "nothing is kept for ever");
    }

    #[test]
    fn the_first_is_written_at_once_and_repeats_at_growing_intervals() {
        let mut aggregator = Aggregator::default();
        let mut log = Vec::new();
        for second in 0..200 {
            aggregator.observe(news("a", "x"), at(second));
            for write in aggregator.due(at(second)) {
                log.push((second, count(&[write])));
            }
        }
        assert_eq!(log[0], (0, (1, vec![])));
        let repeats: Vec<_> = log[1..].iter().map(|(second, (_, counts))| (*second, counts[0])).collect();
        assert_eq!(repeats, [(10, 11), (30, 31), (70, 71), (150, 151)]);
    }

    #[test]
    fn other_objects_and_other_notes_are_other_events() {
        let mut aggregator = Aggregator::default();
        for (object, note) in [("a", "x"), ("b", "x"), ("a", "y")] {
            aggregator.observe(news(object, note), at(0));
        }
        assert_eq!(count(&aggregator.due(at(0))), (3, vec![]));
    }

    #[test]
    fn the_same_news_on_a_thousand_objects_spare_the_api_server_and_say_so() {
        let mut aggregator = Aggregator::default();
        for number in 0..1000 {
            aggregator.observe(news(&format!("pod-{number}"), "leaving"), at(0));
        }
        let writes = settle(&mut aggregator, at(0));
        assert_eq!(count(&writes), (51, vec![]));
        let mut told = writes.iter().filter_map(|write| match write {
            Write::Create { news, .. } => Some(news.note.as_str()),
            Write::Repeat { .. } => None,
        });
        assert_eq!(
            told.next_back().unwrap(),
            "leaving (and the like for 949 others, in one event to spare the API server)"
        );
    }

    #[test]
    fn after_a_long_silence_it_is_a_new_event() {
        let mut aggregator = Aggregator::default();
        aggregator.observe(news("a", "x"), at(0));
        aggregator.due(at(0));
        aggregator.observe(news("a", "x"), at(641));
        assert_eq!(count(&aggregator.due(at(641))), (1, vec![]));
    }
}

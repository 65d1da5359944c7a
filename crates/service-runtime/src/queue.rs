//! The keyed work queue as plain data: which key is to be worked on next, and when. It has no clock, no
//! lock and no task; [`crate::workers`] drives it.
//!
//! A key is in at most one place: ready, running, or asleep until it is due. What is added while it runs is
//! remembered once and makes it ready again afterwards, at the end of the line, so that a busy key cannot
//! starve the others.

mod lanes;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::time::Duration;

use jiff::Timestamp;

use self::lanes::Lanes;

/// How long a failed key sleeps: doubling from `first` to `most`, of which up to half is left to chance, so
/// that keys which failed together do not come back together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// After the first failure.
    pub first: Duration,
    /// After many.
    pub most: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { first: Duration::from_millis(250), most: Duration::from_secs(15 * 60) }
    }
}

impl Backoff {
    /// The delay after this many failures in a row, at least one; `chance` is from 0 to 1.
    pub fn delay(&self, failures: u32, chance: f64) -> Duration {
        let doubled = self.first.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1)));
        let full = doubled.min(self.most);
        full / 2 + full.mul_f64(chance.clamp(0.0, 1.0) / 2.0)
    }
}

/// The number of the lane or group of this name.
pub fn number_of(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

/// What came of working on a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Done; nothing to do until something changes.
    Done,
    /// Done; look again at this time. It replaces what was planned before.
    Until(Timestamp),
    /// Failed; try again after the backoff.
    Failed,
}

#[derive(Debug, Default)]
struct Entry {
    place: Place,
    /// In `asleep` with this time and number, if it is to be woken.
    due: Option<(Timestamp, u64)>,
    failures: u32,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Asleep,
    Ready {
        since: Timestamp,
    },
    Running {
        again: bool,
    },
}

/// Keys and when to work on them.
#[derive(Debug)]
pub struct Queue<K> {
    entries: HashMap<K, Entry>,
    ready: Lanes<K>,
    asleep: BTreeSet<(Timestamp, u64, K)>,
    /// Keeps keys that are due at the same time in the order in which they came.
    next_number: u64,
    backoff: Backoff,
    group: fn(&K) -> Option<u64>,
    groups: HashMap<u64, Group<K>>,
    /// Groups that have parked keys and room for one of them.
    roomy: VecDeque<u64>,
    /// How many keys of one group may run at once.
    group_limit: usize,
}

/// Keys that share something slow, such as the admission webhooks of their namespace.
#[derive(Debug)]
struct Group<K> {
    running: usize,
    /// Keys that are ready and whose group has no room.
    parked: Lanes<K>,
}

impl<K: Clone + Eq + Hash + Ord> Queue<K> {
    /// An empty queue with one line.
    pub fn new(backoff: Backoff) -> Self {
        Self::fair(backoff, |_| 0)
    }

    /// An empty queue in which keys of different lanes take turns, so that one lane with very many keys does
    /// not hold up the others.
    pub fn fair(backoff: Backoff, lane: fn(&K) -> u64) -> Self {
        Self {
            entries: HashMap::new(),
            ready: Lanes::new(lane),
            asleep: BTreeSet::new(),
            next_number: 0,
            backoff,
            group: |_| None,
            groups: HashMap::new(),
            roomy: VecDeque::new(),
            group_limit: usize::MAX,
        }
    }

    /// The same queue with groups of keys; `None` for a key that is in none.
    #[must_use]
    pub fn with_groups(self, group: fn(&K) -> Option<u64>) -> Self {
        Self { group, ..self }
    }

    /// How many keys of one group may run at once, at least one: those that are slow leave room for all others.
    pub fn limit_groups(&mut self, limit: usize) {
        self.group_limit = limit.max(1);
    }

    /// Asks for work on a key now. Whether that is news: a key that is ready already stays where it is.
    pub fn add(&mut self, key: K, now: Timestamp) -> bool {
        let entry = self.entries.entry(key.clone()).or_default();
        match &mut entry.place {
            Place::Ready { .. } => false,
            Place::Running { again } => !std::mem::replace(again, true),
            Place::Asleep => {
                entry.place = Place::Ready { since: now };
                if let Some((time, number)) = entry.due.take() {
                    self.asleep.remove(&(time, number, key.clone()));
                }
                self.make_ready(key);
                true
            }
        }
    }

    /// Asks for work on a key at this time, or earlier if that was planned already.
    pub fn add_at(&mut self, key: K, due: Timestamp) {
        let number = self.next_number;
        self.next_number += 1;
        let entry = self.entries.entry(key.clone()).or_default();
        if matches!(entry.place, Place::Ready { .. }) || entry.due.is_some_and(|(planned, _)| planned <= due)
        {
            return;
        }
        if let Some((time, number)) = entry.due.replace((due, number)) {
            self.asleep.remove(&(time, number, key.clone()));
        }
        self.asleep.insert((due, number, key));
    }

    /// The next key to work on, and how long it was ready. It is running from now on, until [`Self::finish`].
    pub fn next(&mut self, now: Timestamp) -> Option<(K, Duration)> {
        self.wake(now);
        let key = self.next_parked().or_else(|| self.next_ready())?;
        let entry = self.entries.get_mut(&key)?;
        let waited = match entry.place {
            Place::Ready { since } => Duration::try_from(now.duration_since(since)).unwrap_or_default(),
            _ => Duration::ZERO,
        };
        entry.place = Place::Running { again: false };
        Some((key, waited))
    }

    /// Puts a key behind all that wait with it: where its group has no room, with the others of its group.
    fn make_ready(&mut self, key: K) {
        let group = (self.group)(&key).and_then(|name| self.groups.get_mut(&name));
        match group.filter(|group| group.running >= self.group_limit || !group.parked.is_empty()) {
            Some(group) => group.parked.push_back(key),
            None => self.ready.push_back(key),
        }
    }

    /// The first key of a group that has room again.
    fn next_parked(&mut self) -> Option<K> {
        while let Some(name) = self.roomy.pop_front() {
            let Some(group) = self.groups.get_mut(&name) else { continue };
            if group.running < self.group_limit
                && let Some(key) = group.parked.pop_front()
            {
                group.running += 1;
                return Some(key);
            }
        }
        None
    }

    /// The first key whose group has room. Who comes later than parked keys of its group is parked behind them.
    fn next_ready(&mut self) -> Option<K> {
        loop {
            let key = self.ready.pop_front()?;
            let Some(name) = (self.group)(&key) else { return Some(key) };
            let lane = self.ready.lane();
            let group =
                self.groups.entry(name).or_insert_with(|| Group { running: 0, parked: Lanes::new(lane) });
            if group.running < self.group_limit && group.parked.is_empty() {
                group.running += 1;
                return Some(key);
            }
            group.parked.push_back(key);
        }
    }

    /// Ends work on a key that was cut short and is to be done again.
    pub fn give_back(&mut self, key: &K, now: Timestamp) {
        if let Some(entry) = self.entries.get_mut(key)
            && matches!(entry.place, Place::Running { .. })
        {
            entry.place = Place::Asleep;
            self.leave_group(key);
            self.add(key.clone(), now);
        }
    }

    /// A key runs no longer: the next one of its group may run.
    fn leave_group(&mut self, key: &K) {
        let Some(name) = (self.group)(key) else { return };
        let Some(group) = self.groups.get_mut(&name) else { return };
        group.running = group.running.saturating_sub(1);
        if !group.parked.is_empty() {
            self.roomy.push_back(name);
        } else if group.running == 0 {
            self.groups.remove(&name);
        }
    }

    /// When the next sleeping key is due.
    pub fn next_due(&self) -> Option<Timestamp> {
        self.asleep.first().map(|(due, _, _)| *due)
    }

    /// Ends the work on a key. `chance`, from 0 to 1, spreads retries. After which pause it is retried, if it failed.
    pub fn finish(&mut self, key: &K, outcome: Outcome, now: Timestamp, chance: f64) -> Option<Duration> {
        let entry = self.entries.get_mut(key)?;
        let again = entry.place == Place::Running { again: true };
        let ran = matches!(entry.place, Place::Running { .. });
        entry.place = Place::Asleep;
        let (due, pause) = match outcome {
            Outcome::Done => (None, None),
            Outcome::Until(due) => (Some(due), None),
            Outcome::Failed => {
                entry.failures = entry.failures.saturating_add(1);
                let pause = self.backoff.delay(entry.failures, chance);
                (Some(now.saturating_add(pause).unwrap_or(Timestamp::MAX)), Some(pause))
            }
        };
        if outcome != Outcome::Failed {
            entry.failures = 0;
        }
        let planned = entry.due.is_some();
        if ran {
            self.leave_group(key);
        }
        if again {
            self.add(key.clone(), now);
        } else if let Some(due) = due {
            self.add_at(key.clone(), due);
        } else if !planned {
            self.entries.remove(key);
        }
        pause.map(|pause| if again { Duration::ZERO } else { pause })
    }

    /// How many keys are ready.
    pub fn depth(&self) -> usize {
        self.ready.len() + self.groups.values().map(|group| group.parked.len()).sum::<usize>()
    }

    /// How many keys sleep until they are due.
    #[cfg(test)]
    pub(crate) fn sleeping(&self) -> usize {
        self.asleep.len()
    }

    /// Makes the keys ready that are due, and tells how many. [`Self::next`] does so by itself.
    pub fn wake(&mut self, now: Timestamp) -> usize {
        let mut woken = 0;
        while let Some((due, _, _)) = self.asleep.first()
            && *due <= now
            && let Some((due, _, key)) = self.asleep.pop_first()
        {
            let Some(entry) = self.entries.get_mut(&key) else { continue };
            entry.due = None;
            match &mut entry.place {
                Place::Asleep => {
                    // Ready since it was due: how late we are is part of how long it waited.
                    entry.place = Place::Ready { since: due };
                    self.make_ready(key);
                    woken += 1;
                }
                Place::Running { again } => woken += usize::from(!std::mem::replace(again, true)),
                Place::Ready { .. } => {}
            }
        }
        woken
    }
}

#[cfg(test)]
mod tests;

//! A keyed work queue as plain data: which key to process next, and when. It has no clock, no lock and no task; see
//! [`crate::workers`].
//!
//! A key is ready, running, or asleep until it is due. If a running key is added, it becomes ready again afterwards, at
//! the end of the queue, so that a busy key cannot starve others.

mod lanes;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::time::Duration;

use jiff::Timestamp;

use self::lanes::Lanes;

/// Backoff of failed keys: it doubles from `first` to `max`, and up to half of it is jitter, so that keys that failed
/// together are not retried together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// The backoff after the first failure.
    pub first: Duration,
    /// The maximum backoff.
    pub max: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { first: Duration::from_millis(250), max: Duration::from_secs(15 * 60) }
    }
}

impl Backoff {
    /// The delay after this number of consecutive failures, at least one. `jitter` is from 0 to 1.
    pub fn delay(&self, failures: u32, jitter: f64) -> Duration {
        let doubled = self.first.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1)));
        let full = doubled.min(self.max);
        full / 2 + full.mul_f64(jitter.clamp(0.0, 1.0) / 2.0)
    }
}

/// The ID of the lane or group with this name.
pub fn id_of(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

/// The result of processing a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Done. Nothing to do until something changes.
    Done,
    /// Done. Process the key again at this time, which replaces an earlier planned time.
    Until(Timestamp),
    /// Failed. Retry after the backoff.
    Failed,
}

#[derive(Debug, Default)]
struct Entry {
    state: KeyState,
    /// The time and number of its entry in `asleep`, if any.
    due: Option<(Timestamp, u64)>,
    failures: u32,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum KeyState {
    #[default]
    Asleep,
    Ready {
        since: Timestamp,
    },
    Running {
        again: bool,
    },
}

/// The keys, and when to process them.
#[derive(Debug)]
pub struct Queue<K> {
    entries: HashMap<K, Entry>,
    ready: Lanes<K>,
    asleep: BTreeSet<(Timestamp, u64, K)>,
    /// Keeps the order of keys with the same due time.
    next_number: u64,
    backoff: Backoff,
    group: fn(&K) -> Option<u64>,
    groups: HashMap<u64, Group<K>>,
    /// Groups with parked keys that may run another key.
    groups_with_room: VecDeque<u64>,
    /// Maximum number of running keys per group.
    group_limit: usize,
}

/// Keys that share something slow, such as the admission webhooks of their namespace.
#[derive(Debug)]
struct Group<K> {
    running: usize,
    /// Ready keys whose group has reached its limit.
    parked: Lanes<K>,
}

impl<K: Clone + Eq + Hash + Ord> Queue<K> {
    /// An empty queue with a single lane.
    pub fn new(backoff: Backoff) -> Self {
        Self::fair(backoff, |_| 0)
    }

    /// An empty queue in which lanes take turns, so that a lane with very many keys does not delay the others.
    pub fn fair(backoff: Backoff, lane: fn(&K) -> u64) -> Self {
        Self {
            entries: HashMap::new(),
            ready: Lanes::new(lane),
            asleep: BTreeSet::new(),
            next_number: 0,
            backoff,
            group: |_| None,
            groups: HashMap::new(),
            groups_with_room: VecDeque::new(),
            group_limit: usize::MAX,
        }
    }

    /// Adds groups to the queue. `None` for keys without a group.
    #[must_use]
    pub fn with_groups(self, group: fn(&K) -> Option<u64>) -> Self {
        Self { group, ..self }
    }

    /// Sets the maximum number of running keys per group, at least one, so that slow groups leave workers for others.
    pub fn limit_groups(&mut self, limit: usize) {
        self.group_limit = limit.max(1);
    }

    /// Adds a key. Returns false if it is already ready or will run again; a ready key keeps its position.
    pub fn add(&mut self, key: K, now: Timestamp) -> bool {
        let entry = self.entries.entry(key.clone()).or_default();
        match &mut entry.state {
            KeyState::Ready { .. } => false,
            KeyState::Running { again } => !std::mem::replace(again, true),
            KeyState::Asleep => {
                entry.state = KeyState::Ready { since: now };
                if let Some((time, number)) = entry.due.take() {
                    self.asleep.remove(&(time, number, key.clone()));
                }
                self.make_ready(key);
                true
            }
        }
    }

    /// Schedules a key for this time, unless an earlier time is planned.
    pub fn add_at(&mut self, key: K, due: Timestamp) {
        let number = self.next_number;
        self.next_number += 1;
        let entry = self.entries.entry(key.clone()).or_default();
        if matches!(entry.state, KeyState::Ready { .. })
            || entry.due.is_some_and(|(planned, _)| planned <= due)
        {
            return;
        }
        if let Some((time, number)) = entry.due.replace((due, number)) {
            self.asleep.remove(&(time, number, key.clone()));
        }
        self.asleep.insert((due, number, key));
    }

    /// The next key, and how long it was ready. The key is running until [`Self::finish`].
    pub fn next(&mut self, now: Timestamp) -> Option<(K, Duration)> {
        self.wake(now);
        let key = self.next_parked().or_else(|| self.next_ready())?;
        let entry = self.entries.get_mut(&key)?;
        let waited = match entry.state {
            KeyState::Ready { since } => Duration::try_from(now.duration_since(since)).unwrap_or_default(),
            _ => Duration::ZERO,
        };
        entry.state = KeyState::Running { again: false };
        Some((key, waited))
    }

    /// Appends a key to the ready keys, or to the parked keys of its group if the group has reached its limit.
    fn make_ready(&mut self, key: K) {
        let group = (self.group)(&key).and_then(|name| self.groups.get_mut(&name));
        match group.filter(|group| group.running >= self.group_limit || !group.parked.is_empty()) {
            Some(group) => group.parked.push_back(key),
            None => self.ready.push_back(key),
        }
    }

    /// The first parked key of a group that may run another key.
    fn next_parked(&mut self) -> Option<K> {
        while let Some(name) = self.groups_with_room.pop_front() {
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

    /// The first ready key whose group may run another key. A key whose group has parked keys is parked behind them.
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

    /// Makes a running key ready again whose processing was aborted.
    pub fn requeue(&mut self, key: &K, now: Timestamp) {
        if let Some(entry) = self.entries.get_mut(key)
            && matches!(entry.state, KeyState::Running { .. })
        {
            entry.state = KeyState::Asleep;
            self.leave_group(key);
            self.add(key.clone(), now);
        }
    }

    /// A key has stopped, so that the next key of its group may run.
    fn leave_group(&mut self, key: &K) {
        let Some(name) = (self.group)(key) else { return };
        let Some(group) = self.groups.get_mut(&name) else { return };
        group.running = group.running.saturating_sub(1);
        if !group.parked.is_empty() {
            self.groups_with_room.push_back(name);
        } else if group.running == 0 {
            self.groups.remove(&name);
        }
    }

    /// When the next sleeping key is due.
    pub fn next_due(&self) -> Option<Timestamp> {
        self.asleep.first().map(|(due, _, _)| *due)
    }

    /// Finishes a running key. `jitter` is from 0 to 1. Returns the backoff if the key failed.
    pub fn finish(&mut self, key: &K, outcome: Outcome, now: Timestamp, jitter: f64) -> Option<Duration> {
        let entry = self.entries.get_mut(key)?;
        let again = entry.state == KeyState::Running { again: true };
        let ran = matches!(entry.state, KeyState::Running { .. });
        entry.state = KeyState::Asleep;
        let (due, pause) = match outcome {
            Outcome::Done => (None, None),
            Outcome::Until(due) => (Some(due), None),
            Outcome::Failed => {
                entry.failures = entry.failures.saturating_add(1);
                let pause = self.backoff.delay(entry.failures, jitter);
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

    /// The number of ready keys.
    pub fn depth(&self) -> usize {
        self.ready.len() + self.groups.values().map(|group| group.parked.len()).sum::<usize>()
    }

    /// The number of sleeping keys.
    #[cfg(test)]
    pub(crate) fn sleeping(&self) -> usize {
        self.asleep.len()
    }

    /// Makes due keys ready, and returns their number. [`Self::next`] calls this too.
    pub fn wake(&mut self, now: Timestamp) -> usize {
        let mut woken = 0;
        while let Some((due, _, _)) = self.asleep.first()
            && *due <= now
            && let Some((due, _, key)) = self.asleep.pop_first()
        {
            let Some(entry) = self.entries.get_mut(&key) else { continue };
            entry.due = None;
            match &mut entry.state {
                KeyState::Asleep => {
                    // The key is ready since it was due, so that the delay counts as waiting time.
                    entry.state = KeyState::Ready { since: due };
                    self.make_ready(key);
                    woken += 1;
                }
                KeyState::Running { again } => woken += usize::from(!std::mem::replace(again, true)),
                KeyState::Ready { .. } => {}
            }
        }
        woken
    }
}

#[cfg(test)]
mod tests;

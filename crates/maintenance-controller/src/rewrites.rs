//! What was last written to each object. Writing the same again means that somebody has undone it, and waits.

use std::collections::HashMap;
use std::hash::Hash;

use haulout_drain_planner::pause::{QUIET, after};
use jiff::{SignedDuration, Timestamp};

/// What was last written to each object. The same again means that somebody has undone it.
#[derive(Clone, Debug)]
pub struct Rewrites<K> {
    last: HashMap<K, Written>,
}

impl<K> Default for Rewrites<K> {
    fn default() -> Self {
        Self { last: HashMap::new() }
    }
}

#[derive(Clone, Copy, Debug)]
struct Written {
    /// Stands for what was written.
    fingerprint: u64,
    /// How often it was written again.
    again: u32,
    at: Timestamp,
}

impl Written {
    fn is_repeated_by(self, fingerprint: u64, now: Timestamp) -> bool {
        // A clock that was put back must not hold writes up for as long as it was wrong.
        let lately = (SignedDuration::ZERO..QUIET).contains(&now.duration_since(self.at));
        lately && self.fingerprint == fingerprint
    }
}

impl<K: Hash + Eq> Rewrites<K> {
    /// When this may be written to the object, if it is too early.
    pub fn pause(&self, key: &K, fingerprint: u64, now: Timestamp) -> Option<Timestamp> {
        let last = self.last.get(key).filter(|last| last.is_repeated_by(fingerprint, now))?;
        let due = last.at.saturating_add(after(last.again)).unwrap_or(Timestamp::MAX);
        (now < due).then_some(due)
    }

    /// This has been written to the object.
    pub fn written(&mut self, key: K, fingerprint: u64, now: Timestamp) {
        let last = self.last.get(&key).filter(|last| last.is_repeated_by(fingerprint, now));
        let again = last.map_or(0, |last| last.again.saturating_add(1));
        self.last.insert(key, Written { fingerprint, again, at: now });
    }

    /// Forgets an object that is gone.
    pub fn forget(&mut self, key: &K) {
        self.last.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::at;

    #[test]
    fn what_is_undone_each_time_is_written_after_growing_pauses() {
        let mut rewrites = Rewrites::default();
        let (mut now, mut written) = (0, Vec::new());
        while now < 100 {
            if let Some(due) = rewrites.pause(&"n", 7, at(now)) {
                now = due.as_second() - at(0).as_second();
            } else {
                rewrites.written("n", 7, at(now));
                written.push(now);
            }
        }
        assert_eq!(written, [0, 0, 10, 30, 70]);
        assert_eq!(rewrites.pause(&"n", 8, at(71)), None, "something else");
        assert_eq!(rewrites.pause(&"m", 7, at(71)), None, "another object");
        assert_eq!(rewrites.pause(&"n", 7, at(60)), None, "the clock was put back");
        assert_eq!(rewrites.pause(&"n", 7, at(70 + 1800)), None, "it was quiet for long");
        rewrites.written("n", 8, at(71));
        rewrites.written("n", 7, at(72));
        assert_eq!(rewrites.pause(&"n", 7, at(73)), None, "it begins with the second time in a row");
        rewrites.written("n", 7, at(73));
        assert_eq!(rewrites.pause(&"n", 7, at(74)), Some(at(83)));
        rewrites.forget(&"n");
        assert_eq!(rewrites.pause(&"n", 7, at(74)), None);
    }
}

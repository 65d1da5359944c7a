//! How long to wait before something is done again that somebody keeps undoing: pods that come back to a node, a
//! cordon or an annotation that is taken off.

use std::collections::HashMap;
use std::hash::Hash;

use jiff::{SignedDuration, Timestamp};

/// The wait before the second time. It doubles from then on.
const FIRST: SignedDuration = SignedDuration::from_secs(10);
/// The longest wait.
const MOST: SignedDuration = SignedDuration::from_mins(15);
/// After this long without being undone, it starts from the beginning. Longer than the longest wait.
pub const QUIET: SignedDuration = SignedDuration::from_mins(30);

/// The wait before it is done again, by how often it has been done again before: none the first time.
pub fn after(times: u32) -> SignedDuration {
    match times {
        0 => SignedDuration::ZERO,
        times => FIRST.checked_mul(2_i32.saturating_pow(times - 1)).unwrap_or(MOST).min(MOST),
    }
}

/// How often something must have been done again that has been undone at once each time for this long.
pub fn times_within(elapsed: SignedDuration) -> u32 {
    // The waits before were 0 s, 10 s, 20 s, …: 10 s × (2^n - 1) for n of them that were not 0.
    let waits = elapsed.as_secs().max(0) / FIRST.as_secs();
    1 + waits.saturating_add(1).ilog2()
}

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
    fn waits_double_from_ten_seconds_to_fifteen_minutes() {
        let waits: Vec<_> = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, u32::MAX].map(|n| after(n).as_secs()).into();
        assert_eq!(waits, [0, 10, 20, 40, 80, 160, 320, 640, 900, 900, 900]);
        assert!(QUIET > MOST);
    }

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

    #[test]
    fn how_often_follows_from_how_long() {
        let mut elapsed = SignedDuration::ZERO;
        for times in 0..8 {
            elapsed += after(times);
            assert_eq!(times_within(elapsed), times + 1, "after {elapsed:?}");
        }
        assert_eq!(times_within(SignedDuration::from_secs(-5)), 1);
    }
}

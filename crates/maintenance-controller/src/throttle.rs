//! Keeps writes to one object apart. Who is turned away comes again at the time named, with what is true then, so
//! that the last state always gets through.

use std::collections::HashMap;
use std::hash::Hash;

use jiff::{SignedDuration, Timestamp};

/// When each object was last written.
#[derive(Clone, Debug)]
pub struct Throttle<K> {
    apart: SignedDuration,
    last: HashMap<K, Timestamp>,
}

impl<K: Hash + Eq + Clone> Throttle<K> {
    /// Lets each object be written once in this time.
    pub fn new(apart: SignedDuration) -> Self {
        Self { apart, last: HashMap::new() }
    }

    /// Whether the object may be written now, which is then taken as done; else when it may.
    pub fn ask(&mut self, key: &K, now: Timestamp) -> Result<(), Timestamp> {
        self.ask_less_often(1, key, now)
    }

    /// The same for a write that matters less, so many times less often.
    pub fn ask_less_often(&mut self, times: i32, key: &K, now: Timestamp) -> Result<(), Timestamp> {
        if let Some(last) = self.last.get(key) {
            let next = last.saturating_add(self.apart * times).unwrap_or(Timestamp::MAX);
            // A clock that was put back must not hold writes up for as long as it was wrong.
            if *last <= now && now < next {
                return Err(next);
            }
        }
        self.last.insert(key.clone(), now);
        Ok(())
    }

    /// Forgets an object that is gone.
    pub fn forget(&mut self, key: &K) {
        self.last.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(milliseconds: i64) -> Timestamp {
        Timestamp::from_millisecond(1_700_000_000_000 + milliseconds).unwrap()
    }

    #[test]
    fn an_object_is_written_once_a_second_and_others_do_not_matter() {
        let mut throttle = Throttle::new(SignedDuration::from_secs(1));
        let cases = [
            ("a", 0, Ok(())),
            ("a", 10, Err(at(1000))),
            ("b", 20, Ok(())),
            ("a", 999, Err(at(1000))),
            ("a", 1000, Ok(())),
            ("a", 1500, Err(at(2000))),
            ("a", -5000, Ok(())),
        ];
        for (key, now, expected) in cases {
            assert_eq!(throttle.ask(&key, at(now)), expected, "{key} at {now}");
        }
        assert_eq!(throttle.ask_less_often(5, &"b", at(5000)), Err(at(5020)));
        throttle.forget(&"b");
        assert_eq!(throttle.ask(&"b", at(21)), Ok(()));
    }

    proptest! {
        /// However changes come, the last one is written, and no two writes are closer than a second.
        #[test]
        fn the_last_state_gets_through(mut changes in proptest::collection::vec(0i64..5000, 1..40)) {
            changes.sort_unstable();
            let mut throttle = Throttle::new(SignedDuration::from_secs(1));
            let (mut written, mut retry): (Vec<(i64, i64)>, Option<i64>) = (Vec::new(), None);
            let mut state = -1;
            let mut offer = |now: i64, state: i64, written: &mut Vec<(i64, i64)>| match throttle.ask(&(), at(now)) {
                Ok(()) => { written.push((now, state)); None }
                Err(next) => Some((next.as_millisecond() - 1_700_000_000_000).max(now)),
            };
            for now in changes {
                if let Some(due) = retry.filter(|due| *due <= now) {
                    retry = offer(due, state, &mut written);
                }
                state = now;
                retry = offer(now, state, &mut written).or(retry.filter(|due| *due > now));
            }
            if let Some(due) = retry {
                offer(due, state, &mut written);
            }
            prop_assert_eq!(written.last().map(|(_, state)| *state), Some(state));
            prop_assert!(written.windows(2).all(|pair| pair[1].0 - pair[0].0 >= 1000));
        }
    }
}

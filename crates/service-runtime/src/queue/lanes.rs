//! Lanes of ready keys that take turns. Each lane is first in, first out, and no lane waits for all keys of another lane.

use std::collections::{HashMap, VecDeque};
use std::fmt;

/// Ready keys by lane.
pub(super) struct Lanes<K> {
    lane: fn(&K) -> u64,
    keys: HashMap<u64, VecDeque<K>>,
    /// The lanes with keys, in the order of their turns.
    turns: VecDeque<u64>,
    len: usize,
}

impl<K> Lanes<K> {
    pub(super) fn new(lane: fn(&K) -> u64) -> Self {
        Self { lane, keys: HashMap::new(), turns: VecDeque::new(), len: 0 }
    }

    /// The function that returns the lane of a key.
    pub(super) fn lane(&self) -> fn(&K) -> u64 {
        self.lane
    }

    /// Appends a key to its lane.
    pub(super) fn push_back(&mut self, key: K) {
        let lane = (self.lane)(&key);
        let keys = self.keys.entry(lane).or_default();
        if keys.is_empty() {
            self.turns.push_back(lane);
        }
        keys.push_back(key);
        self.len += 1;
    }

    /// Removes the first key of the next lane.
    pub(super) fn pop_front(&mut self) -> Option<K> {
        let lane = self.turns.pop_front()?;
        let keys = self.keys.get_mut(&lane)?;
        let key = keys.pop_front();
        if keys.is_empty() {
            self.keys.remove(&lane);
        } else {
            self.turns.push_back(lane);
        }
        self.len -= usize::from(key.is_some());
        key
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.turns.is_empty() && self.len == 0
    }

    #[cfg(test)]
    pub(super) fn back(&self) -> Option<&K> {
        self.keys.get(self.turns.back()?)?.back()
    }
}

impl<K: fmt::Debug> fmt::Debug for Lanes<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.turns.iter().map(|lane| (lane, self.keys.get(lane)))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lanes(keys: &[(u64, u32)]) -> Lanes<(u64, u32)> {
        let mut lanes = Lanes::new(|(lane, _): &(u64, u32)| *lane);
        for key in keys {
            lanes.push_back(*key);
        }
        lanes
    }

    #[test]
    fn long_lane_does_not_delay_another_lane() {
        let mut lanes = lanes(&(0..5_000).map(|n| (1, n)).collect::<Vec<_>>());
        lanes.push_back((2, 0));
        let first: Vec<_> = std::iter::from_fn(|| lanes.pop_front()).take(4).collect();
        assert_eq!(first, [(1, 0), (2, 0), (1, 1), (1, 2)]);
        assert_eq!(lanes.len(), 4_997);
    }

    proptest! {
        #[test]
        fn lanes_keep_order_take_turns_and_lose_nothing(keys in proptest::collection::vec(0u64..4, 0..60)) {
            let keys: Vec<_> = (0..).zip(keys).map(|(n, lane)| (lane, n)).collect();
            let mut lanes = lanes(&keys);
            let served: Vec<_> = std::iter::from_fn(|| lanes.pop_front()).collect();
            prop_assert!(lanes.is_empty());
            for lane in 0..4 {
                let of = |all: &[(u64, u32)]| all.iter().filter(|key| key.0 == lane).copied().collect::<Vec<_>>();
                prop_assert_eq!(of(&served), of(&keys));
            }
            // If two lanes have keys, neither is served twice before the other.
            for (place, pair) in served.windows(2).enumerate() {
                let others = served.iter().skip(place + 2).any(|key| key.0 != pair[0].0);
                prop_assert!(pair[0].0 != pair[1].0 || !others);
            }
        }
    }
}

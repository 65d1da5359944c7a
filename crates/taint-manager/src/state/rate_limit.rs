//! Limits the number of pods that are removed per second.

use std::collections::HashMap;

use haulout_service_runtime::pods::Uid;
use jiff::{SignedDuration, Timestamp};

/// Assigns each pod a time at which it may be removed.
#[derive(Clone, Debug)]
pub struct RateLimit {
    /// The time between two removals; `None` without a limit.
    interval: Option<SignedDuration>,
    /// How many pods may be removed at once after an idle time.
    burst: u32,
    /// The next free time, without the burst.
    next: Timestamp,
    /// The reserved times of waiting pods.
    reserved: HashMap<Uid, Timestamp>,
}

impl RateLimit {
    /// Allows this many removals per second, with a burst of one second's worth.
    pub fn per_second(rate: Option<f64>) -> Self {
        let rate = rate.filter(|rate| rate.is_finite() && *rate > 0.0);
        Self {
            interval: rate.and_then(|rate| SignedDuration::try_from_secs_f64(1.0 / rate).ok()),
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped before")]
            burst: rate.map_or(1, |rate| rate.floor().clamp(1.0, 1e6) as u32),
            next: Timestamp::MIN,
            reserved: HashMap::new(),
        }
    }

    /// Returns `Ok` if this pod may be removed now, and otherwise when to ask again. The pod keeps its reserved time if
    /// it asks again.
    pub fn acquire(&mut self, pod: Uid, now: Timestamp) -> Result<(), Timestamp> {
        let Some(interval) = self.interval else { return Ok(()) };
        let time = self.reserved.get(&pod).copied().unwrap_or_else(|| self.reserve(interval, now));
        if time <= now {
            self.reserved.remove(&pod);
            return Ok(());
        }
        self.reserved.insert(pod, time);
        Err(time)
    }

    /// The pod no longer has to leave, or is gone: drops its reserved time.
    pub fn cancel(&mut self, pod: Uid) {
        self.reserved.remove(&pod);
    }

    fn reserve(&mut self, interval: SignedDuration, now: Timestamp) -> Timestamp {
        let saved = interval.saturating_mul(self.burst.saturating_sub(1).try_into().unwrap_or(i32::MAX));
        let time = self.next.max(now.saturating_sub(saved).unwrap_or(now));
        self.next = time.saturating_add(interval).unwrap_or(Timestamp::MAX);
        time
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{at, uid};
    use proptest::prelude::*;

    #[test]
    fn without_a_limit_all_pods_leave_at_once() {
        for rate in [None, Some(0.0), Some(-1.0), Some(f64::NAN)] {
            let mut limit = RateLimit::per_second(rate);
            assert!((0..1000).all(|n| limit.acquire(uid(n), at(0)) == Ok(())), "{rate:?}");
        }
    }

    #[test]
    fn burst_is_immediate_and_the_rest_one_by_one() {
        let mut limit = RateLimit::per_second(Some(2.0));
        let half = |halves: i64| Timestamp::from_millisecond(10_000 + 500 * halves).unwrap();
        let answers: Vec<_> = (0..5).map(|n| limit.acquire(uid(n), at(10))).collect();
        assert_eq!(answers, [Ok(()), Ok(()), Err(half(1)), Err(half(2)), Err(half(3))]);
        assert_eq!(limit.acquire(uid(4), at(10)), Err(half(3)), "it keeps its reserved time");
        assert_eq!(limit.acquire(uid(2), half(1)), Ok(()));
        limit.cancel(uid(3));
        assert_eq!(limit.acquire(uid(3), half(2)), Err(half(4)), "its reserved time was dropped");
    }

    #[test]
    fn rates_below_one_per_second_have_no_burst() {
        let mut limit = RateLimit::per_second(Some(0.1));
        assert_eq!(limit.acquire(uid(1), at(0)), Ok(()));
        assert_eq!(limit.acquire(uid(2), at(0)), Err(at(10)));
        assert_eq!(limit.acquire(uid(2), at(10)), Ok(()));
        assert_eq!(limit.acquire(uid(3), at(1000)), Ok(()));
        assert_eq!(limit.acquire(uid(4), at(1000)), Err(at(1010)));
    }

    proptest! {
        /// In every time window, removals do not exceed the rate plus one second's worth.
        #[test]
        fn rate_is_kept_in_every_window(rate in 1u32..20, gaps in proptest::collection::vec(0i64..400, 1..80)) {
            let mut limit = RateLimit::per_second(Some(f64::from(rate)));
            let mut now = 0;
            let mut times = Vec::new();
            for (n, gap) in (0..).zip(gaps) {
                now += gap;
                let time = match limit.acquire(uid(n), Timestamp::from_millisecond(now).unwrap()) {
                    Ok(()) => now,
                    Err(later) => later.as_millisecond(),
                };
                times.push(time);
            }
            for (i, first) in times.iter().enumerate() {
                for (j, last) in times.iter().enumerate().skip(i) {
                    let count = i64::try_from(j - i + 1).unwrap();
                    let allowed = (last - first + 2) * i64::from(rate) / 1000 + i64::from(rate) + 1;
                    prop_assert!(count <= allowed, "{count} in {} ms at {rate}/s", last - first);
                }
            }
        }
    }
}

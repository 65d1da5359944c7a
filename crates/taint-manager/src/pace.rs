//! How fast pods are made to leave: an optional limit on all of them together, and how long one that failed
//! waits for its next try.

use std::collections::HashMap;
use std::time::Duration;

use haulout_service_runtime::pods::Uid;
use haulout_service_runtime::queue::Backoff;
use jiff::{SignedDuration, Timestamp};

/// Retries never end. A minute is short enough for a webhook that comes back, and long enough for one that
/// refuses a thousand pods for ever.
pub const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), most: Duration::from_secs(60) };

/// Gives each pod a time at which it may be made to leave, so many in a second.
#[derive(Clone, Debug)]
pub struct Limit {
    /// The time from one to the next; `None` without a limit.
    interval: Option<SignedDuration>,
    /// How many may leave at once after a quiet time.
    burst: u32,
    /// When the next one would be, if there had never been a quiet time.
    next: Timestamp,
    /// Who has a time and has not come yet.
    given: HashMap<Uid, Timestamp>,
}

impl Limit {
    /// At most so many in a second, of which a second's worth may come at once.
    pub fn per_second(rate: Option<f64>) -> Self {
        let rate = rate.filter(|rate| rate.is_finite() && *rate > 0.0);
        Self {
            interval: rate.and_then(|rate| SignedDuration::try_from_secs_f64(1.0 / rate).ok()),
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped before")]
            burst: rate.map_or(1, |rate| rate.floor().clamp(1.0, 1e6) as u32),
            next: Timestamp::MIN,
            given: HashMap::new(),
        }
    }

    /// Whether this pod may be made to leave now; otherwise when to come again. It keeps its place however
    /// often it asks.
    pub fn ask(&mut self, pod: Uid, now: Timestamp) -> Result<(), Timestamp> {
        let Some(interval) = self.interval else { return Ok(()) };
        let time = self.given.get(&pod).copied().unwrap_or_else(|| self.book(interval, now));
        if time <= now {
            self.given.remove(&pod);
            return Ok(());
        }
        self.given.insert(pod, time);
        Err(time)
    }

    /// The pod does not come.
    pub fn forget(&mut self, pod: Uid) {
        self.given.remove(&pod);
    }

    fn book(&mut self, interval: SignedDuration, now: Timestamp) -> Timestamp {
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
    fn without_a_limit_everybody_goes_at_once() {
        for rate in [None, Some(0.0), Some(-1.0), Some(f64::NAN)] {
            let mut limit = Limit::per_second(rate);
            assert!((0..1000).all(|n| limit.ask(uid(n), at(0)) == Ok(())), "{rate:?}");
        }
    }

    #[test]
    fn a_second_s_worth_goes_at_once_and_the_others_get_times_of_their_own() {
        let mut limit = Limit::per_second(Some(2.0));
        let half = |halves: i64| Timestamp::from_millisecond(10_000 + 500 * halves).unwrap();
        let answers: Vec<_> = (0..5).map(|n| limit.ask(uid(n), at(10))).collect();
        assert_eq!(answers, [Ok(()), Ok(()), Err(half(1)), Err(half(2)), Err(half(3))]);
        assert_eq!(limit.ask(uid(4), at(10)), Err(half(3)), "it keeps its place");
        assert_eq!(limit.ask(uid(2), half(1)), Ok(()));
        limit.forget(uid(3));
        assert_eq!(limit.ask(uid(3), half(2)), Err(half(4)), "it gave its place away");
    }

    #[test]
    fn slow_rates_are_one_at_a_time() {
        let mut limit = Limit::per_second(Some(0.1));
        assert_eq!(limit.ask(uid(1), at(0)), Ok(()));
        assert_eq!(limit.ask(uid(2), at(0)), Err(at(10)));
        assert_eq!(limit.ask(uid(2), at(10)), Ok(()));
        assert_eq!(limit.ask(uid(3), at(1000)), Ok(()));
        assert_eq!(limit.ask(uid(4), at(1000)), Err(at(1010)));
    }

    proptest! {
        /// In no window of time do more leave than the rate allows, with a second's worth on top.
        #[test]
        fn the_rate_is_kept_in_every_window(rate in 1u32..20, gaps in proptest::collection::vec(0i64..400, 1..80)) {
            let mut limit = Limit::per_second(Some(f64::from(rate)));
            let mut now = 0;
            let mut times = Vec::new();
            for (n, gap) in (0..).zip(gaps) {
                now += gap;
                let time = match limit.ask(uid(n), Timestamp::from_millisecond(now).unwrap()) {
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

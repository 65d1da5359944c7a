//! When to try an eviction again. Computed from what the Evacuation's status holds, so that a restart neither
//! forgets it nor tries everything at once.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use haulout_service_runtime::pods::Uid;
use jiff::Timestamp;

use crate::record::Record;

/// After the first refusal, and after many.
const FIRST: Duration = Duration::from_secs(5);
const MOST: Duration = Duration::from_secs(15 * 60);
/// How much of a delay differs from pod to pod, so that those refused together do not come back together.
const SPREAD: f64 = 0.25;

/// The delay after this many refusals, which is always the same for the same pod.
fn delay(failed: i32, uid: Uid) -> Duration {
    let doublings = u32::try_from(failed.saturating_sub(1)).unwrap_or_default();
    let full = FIRST.saturating_mul(2_u32.saturating_pow(doublings)).min(MOST);
    full.mul_f64(1.0 - SPREAD * fraction(uid, failed))
}

/// From 0 to 1, evenly spread over pods.
fn fraction(uid: Uid, salt: i32) -> f64 {
    let mut hasher = DefaultHasher::new();
    (uid, salt).hash(&mut hasher);
    f64::from(u32::try_from(hasher.finish() >> 32).unwrap_or_default()) / f64::from(u32::MAX)
}

/// When the next attempt is due; `None` if there was none yet. Attempts that came due while nobody looked,
/// before `resumed`, are spread over the time of one delay.
pub fn due(record: &Record, resumed: Timestamp, now: Timestamp) -> Option<Timestamp> {
    if record.failed == 0 {
        return None;
    }
    let delay = delay(record.failed, record.uid);
    // Whoever wrote a time that is still to come had another clock.
    let last = record.last_failed.filter(|last| *last <= now);
    let due = last.map(|last| after(last, delay));
    Some(due.filter(|due| *due > resumed).unwrap_or_else(|| {
        let spread = delay.mul_f64(fraction(record.uid, -1));
        after(resumed, spread)
    }))
}

/// The time this much later.
pub fn after(time: Timestamp, delay: Duration) -> Timestamp {
    time.saturating_add(delay).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{at, record, uid};

    #[test]
    fn delays_double_to_a_quarter_of_an_hour() {
        let seconds: Vec<_> = (1..=12).map(|failed| delay(failed, uid(1)).as_secs_f64()).collect();
        let full = [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 900.0, 900.0, 900.0, 900.0];
        for (delay, full) in seconds.iter().zip(full) {
            assert!((full * 0.75..=full).contains(delay), "{delay} is not close to {full}");
        }
    }

    #[test]
    fn a_pod_that_was_never_refused_is_tried_at_once() {
        assert_eq!(due(&record(1), at(0), at(10)), None);
    }

    proptest! {
        #[test]
        fn a_restart_forgets_nothing_that_is_still_to_come(n: u32, failed in 1..40, last in 0i64..100_000, resumed in 0i64..100_000) {
            let mut record = record(n);
            (record.failed, record.last_failed) = (failed, Some(at(last)));
            let now = at(last.max(resumed));
            let before = due(&record, at(0), now).unwrap();
            let after = due(&record, at(resumed), now).unwrap();
            if before > at(resumed) {
                prop_assert_eq!(before, after);
            } else {
                prop_assert!((at(resumed)..=at(resumed + 900)).contains(&after));
            }
        }

        #[test]
        fn a_time_from_a_clock_that_runs_ahead_delays_no_more_than_any_other(n: u32, failed in 1..40, ahead in 1i64..1_000_000) {
            let mut record = record(n);
            (record.failed, record.last_failed) = (failed, Some(at(100 + ahead)));
            prop_assert!(due(&record, at(100), at(100)).unwrap() <= at(1000));
        }
    }

    #[test]
    fn a_thousand_that_are_overdue_after_a_long_pause_come_back_one_by_one() {
        let resumed = at(1_000_000);
        let mut times: Vec<_> = (0..1000)
            .map(|n| {
                let mut record = record(n);
                (record.failed, record.last_failed) = (20, Some(at(0)));
                due(&record, resumed, resumed).unwrap()
            })
            .collect();
        times.sort_unstable();
        let in_one_minute = |start: usize| {
            let end = after(times[start], Duration::from_secs(60));
            times[start..].iter().take_while(|time| **time < end).count()
        };
        let most = (0..1000).map(in_one_minute).max().unwrap();
        assert!(most < 200, "{most} of 1000 come within one minute");
    }
}

//! When an eviction is retried. The time is computed from the Evacuation's status, so that a new leader neither forgets
//! a backoff nor retries all evictions at once.

use std::time::Duration;

use haulout_service_runtime::eviction::{is_failure, is_transient};
use haulout_service_runtime::pods::Uid;
use jiff::Timestamp;

use crate::record::{Record, fingerprint};

/// The first and the longest delay after a rejected eviction.
const FIRST: Duration = Duration::from_secs(5);
const MAX: Duration = Duration::from_secs(15 * 60);
/// The first and the longest delay after a transient failure.
const FIRST_TRANSIENT: Duration = Duration::from_secs(1);
const MAX_TRANSIENT: Duration = Duration::from_secs(60);
/// The first and the longest delay between look-ups of a pod that is missing from the cache.
const FIRST_CACHE_MISS: Duration = Duration::from_secs(5);
const MAX_CACHE_MISS: Duration = Duration::from_secs(5 * 60);
/// The share of a delay that varies from pod to pod, so that evictions that were rejected together are not retried
/// together.
const JITTER: f64 = 0.25;

/// The delay after this many rejections. It is deterministic for each pod.
fn rejection_delay(failed: u32, uid: Uid) -> Duration {
    exponential(FIRST, failed, MAX).mul_f64(1.0 - JITTER * fraction(uid, failed))
}

/// The delay after this many transient failures in a row.
pub fn transient_delay(failures: u32, uid: Uid) -> Duration {
    exponential(FIRST_TRANSIENT, failures, MAX_TRANSIENT).mul_f64(1.0 - JITTER * fraction(uid, failures))
}

/// The delay before a pod that is missing from the cache is looked up again, after this many look-ups in a row. The
/// cache may miss the pod's deletion too.
pub fn cache_miss_delay(look_ups: u32) -> Duration {
    exponential(FIRST_CACHE_MISS, look_ups, MAX_CACHE_MISS)
}

fn exponential(first: Duration, count: u32, max: Duration) -> Duration {
    first.saturating_mul(2_u32.saturating_pow(count.saturating_sub(1))).min(max)
}

/// A number from 0 to 1, evenly distributed over pods.
fn fraction(uid: Uid, salt: u32) -> f64 {
    f64::from(fingerprint((uid, salt))) / f64::from(u32::MAX)
}

/// When the next attempt is due; `None` if no attempt has failed since an evacuator was last active. Attempts that
/// became due before `resumed`, while no controller was running, are spread over one delay.
pub fn due(record: &Record, resumed: Timestamp, now: Timestamp) -> Option<Timestamp> {
    let reason = record.blocked_by().filter(|reason| is_failure(reason))?;
    let failed = u32::try_from(record.failed).unwrap_or_default().max(1);
    let delay = if is_transient(reason) {
        transient_delay(1, record.uid)
    } else {
        rejection_delay(failed, record.uid)
    };
    // A time in the future was written by a process with a different clock.
    let last = record.last_failed.filter(|last| *last <= now);
    let due = last.map(|last| after(last, delay));
    Some(due.filter(|due| *due > resumed).unwrap_or_else(|| {
        let spread = delay.mul_f64(fraction(record.uid, u32::MAX));
        after(resumed, spread)
    }))
}

/// Adds a delay to a time.
pub fn after(time: Timestamp, delay: Duration) -> Timestamp {
    time.saturating_add(delay).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::record::{Blocked, Record};
    use crate::testing::{at, blocked, record, uid};
    use haulout_api_types::names::reason;

    /// An Evacuation with this many rejected evictions, the last one at this time.
    fn rejected(n: u32, failed: i32, last: i64) -> Record {
        let blocked = Some(blocked(reason::BUDGET_EXHAUSTED));
        Record { failed, last_failed: Some(at(last)), blocked, ..record(n) }
    }

    #[test]
    fn delays_double_up_to_fifteen_minutes() {
        let seconds: Vec<_> = (1..=12).map(|failed| rejection_delay(failed, uid(1)).as_secs_f64()).collect();
        let full = [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 900.0, 900.0, 900.0, 900.0];
        for (delay, full) in seconds.iter().zip(full) {
            assert!((full * 0.75..=full).contains(delay), "{delay} is not close to {full}");
        }
    }

    #[test]
    fn transient_failures_are_retried_at_most_every_minute() {
        let seconds: Vec<_> =
            (1..=8).map(|failures| transient_delay(failures, uid(1)).as_secs_f64()).collect();
        for (delay, full) in seconds.iter().zip([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]) {
            assert!((full * 0.75..=full).contains(delay), "{delay} is not close to {full}");
        }
        let look_ups: Vec<_> = (1..=8).map(|count| cache_miss_delay(count).as_secs()).collect();
        assert_eq!(look_ups, [5, 10, 20, 40, 80, 160, 300, 300]);
    }

    #[test]
    fn only_a_current_failure_delays_the_next_attempt() {
        assert_eq!(due(&record(1), at(0), at(10)), None, "never rejected");
        let many = rejected(1, 20, 100);
        assert!(due(&many, at(0), at(110)).unwrap() > at(700));
        let over = Record {
            blocked: Some(Blocked { is_true: false, ..blocked(reason::NOT_BLOCKED) }),
            ..many.clone()
        };
        assert_eq!(due(&over, at(0), at(110)), None, "an evacuator has been active since");
        // A new leader does not know how many transient failures there were.
        for reason in [reason::SERVER_BUSY, reason::BUDGET_STALE] {
            let busy = Record { blocked: Some(blocked(reason)), ..many.clone() };
            assert!(due(&busy, at(0), at(100)).unwrap() <= at(101), "{reason} is transient");
        }
    }

    proptest! {
        #[test]
        fn restart_keeps_future_attempts(n: u32, failed in 1..40, last in 0i64..100_000, resumed in 0i64..100_000) {
            let record = rejected(n, failed, last);
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
        fn future_failure_time_does_not_extend_the_backoff(n: u32, failed in 1..40, ahead in 1i64..1_000_000) {
            let record = rejected(n, failed, 100 + ahead);
            prop_assert!(due(&record, at(100), at(100)).unwrap() <= at(1000));
        }
    }

    #[test]
    fn overdue_attempts_are_spread_out_after_a_long_pause() {
        let resumed = at(1_000_000);
        let mut times: Vec<_> =
            (0..1000).map(|n| due(&rejected(n, 20, 0), resumed, resumed).unwrap()).collect();
        times.sort_unstable();
        let in_one_minute = |start: usize| {
            let end = after(times[start], Duration::from_secs(60));
            times[start..].iter().take_while(|time| **time < end).count()
        };
        let max = (0..1000).map(in_one_minute).max().unwrap();
        assert!(max < 200, "{max} of 1000 attempts are in one minute");
    }
}

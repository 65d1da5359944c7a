//! When to try an eviction again. Computed from what the Evacuation's status holds, so that a restart neither
//! forgets it nor tries everything at once.

use std::time::Duration;

use haulout_service_runtime::eviction::{is_failure, is_transient};
use haulout_service_runtime::pods::Uid;
use jiff::Timestamp;

use crate::record::{Record, fingerprint};

/// After the first refusal, and after many.
const FIRST: Duration = Duration::from_secs(5);
const MOST: Duration = Duration::from_secs(15 * 60);
/// After the first failure that passes by itself, and after many.
const FIRST_SOON: Duration = Duration::from_secs(1);
const MOST_SOON: Duration = Duration::from_secs(60);
/// After the first look-up of a pod that the cache does not know, and after many.
const FIRST_UNWATCHED: Duration = Duration::from_secs(5);
const MOST_UNWATCHED: Duration = Duration::from_secs(5 * 60);
/// How much of a delay differs from pod to pod, so that those refused together do not come back together.
const SPREAD: f64 = 0.25;

/// The delay after this many refusals, which is always the same for the same pod.
fn delay(failed: u32, uid: Uid) -> Duration {
    doubled(FIRST, failed, MOST).mul_f64(1.0 - SPREAD * fraction(uid, failed))
}

/// The delay after this many failures in a row that pass by themselves.
pub fn soon(failures: u32, uid: Uid) -> Duration {
    doubled(FIRST_SOON, failures, MOST_SOON).mul_f64(1.0 - SPREAD * fraction(uid, failures))
}

/// How long until a pod is looked up again that the cache does not know, after this many look-ups in a row: its end could
/// be missed too.
pub fn unwatched(look_ups: u32) -> Duration {
    doubled(FIRST_UNWATCHED, look_ups, MOST_UNWATCHED)
}

fn doubled(first: Duration, times: u32, most: Duration) -> Duration {
    first.saturating_mul(2_u32.saturating_pow(times.saturating_sub(1))).min(most)
}

/// From 0 to 1, evenly spread over pods.
fn fraction(uid: Uid, salt: u32) -> f64 {
    f64::from(fingerprint((uid, salt))) / f64::from(u32::MAX)
}

/// When the next attempt is due; `None` if none has failed since an evacuator was last at work. Attempts that came due
/// while nobody looked, before `resumed`, are spread over the time of one delay.
pub fn due(record: &Record, resumed: Timestamp, now: Timestamp) -> Option<Timestamp> {
    let reason = record.blocked_by().filter(|reason| is_failure(reason))?;
    let failed = u32::try_from(record.failed).unwrap_or_default().max(1);
    let delay = if is_transient(reason) { soon(1, record.uid) } else { delay(failed, record.uid) };
    // Whoever wrote a time that is still to come had another clock.
    let last = record.last_failed.filter(|last| *last <= now);
    let due = last.map(|last| after(last, delay));
    Some(due.filter(|due| *due > resumed).unwrap_or_else(|| {
        let spread = delay.mul_f64(fraction(record.uid, u32::MAX));
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
    use crate::record::{Blocked, Record};
    use crate::testing::{at, blocked, record, uid};
    use haulout_api_types::names::reason;

    /// Refused so often, the last time then.
    fn refused(n: u32, failed: i32, last: i64) -> Record {
        let blocked = Some(blocked(reason::BUDGET_EXHAUSTED));
        Record { failed, last_failed: Some(at(last)), blocked, ..record(n) }
    }

    #[test]
    fn delays_double_to_a_quarter_of_an_hour() {
        let seconds: Vec<_> = (1..=12).map(|failed| delay(failed, uid(1)).as_secs_f64()).collect();
        let full = [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 900.0, 900.0, 900.0, 900.0];
        for (delay, full) in seconds.iter().zip(full) {
            assert!((full * 0.75..=full).contains(delay), "{delay} is not close to {full}");
        }
    }

    #[test]
    fn transient_failures_retry_soon_and_then_every_minute() {
        let seconds: Vec<_> = (1..=8).map(|failures| soon(failures, uid(1)).as_secs_f64()).collect();
        for (delay, full) in seconds.iter().zip([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]) {
            assert!((full * 0.75..=full).contains(delay), "{delay} is not close to {full}");
        }
        let look_ups: Vec<_> = (1..=8).map(|count| unwatched(count).as_secs()).collect();
        assert_eq!(look_ups, [5, 10, 20, 40, 80, 160, 300, 300]);
    }

    #[test]
    fn only_a_failure_in_force_delays_the_next_attempt() {
        assert_eq!(due(&record(1), at(0), at(10)), None, "never refused");
        let many = refused(1, 20, 100);
        assert!(due(&many, at(0), at(110)).unwrap() > at(700));
        let over = Record {
            blocked: Some(Blocked { is_true: false, ..blocked(reason::NOT_BLOCKED) }),
            ..many.clone()
        };
        assert_eq!(due(&over, at(0), at(110)), None, "an evacuator was at work since");
        // After a restart nothing else is known of how often it failed so.
        for reason in [reason::SERVER_BUSY, reason::BUDGET_STALE] {
            let busy = Record { blocked: Some(blocked(reason)), ..many.clone() };
            assert!(due(&busy, at(0), at(100)).unwrap() <= at(101), "{reason} passes by itself");
        }
    }

    proptest! {
        #[test]
        fn a_restart_forgets_nothing_that_is_still_to_come(n: u32, failed in 1..40, last in 0i64..100_000, resumed in 0i64..100_000) {
            let record = refused(n, failed, last);
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
            let record = refused(n, failed, 100 + ahead);
            prop_assert!(due(&record, at(100), at(100)).unwrap() <= at(1000));
        }
    }

    #[test]
    fn a_thousand_that_are_overdue_after_a_long_pause_come_back_one_by_one() {
        let resumed = at(1_000_000);
        let mut times: Vec<_> =
            (0..1000).map(|n| due(&refused(n, 20, 0), resumed, resumed).unwrap()).collect();
        times.sort_unstable();
        let in_one_minute = |start: usize| {
            let end = after(times[start], Duration::from_secs(60));
            times[start..].iter().take_while(|time| **time < end).count()
        };
        let most = (0..1000).map(in_one_minute).max().unwrap();
        assert!(most < 200, "{most} of 1000 come within one minute");
    }
}

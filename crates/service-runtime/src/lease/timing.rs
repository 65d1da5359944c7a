//! The durations of a leader election, and which combinations are safe.

use std::time::Duration;

/// The durations of a leader election. All candidates for a Lease should use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// How long a Lease is valid after a renewal. The Lease stores whole seconds, so fractions are rounded up.
    pub lease_duration: Duration,
    /// How long a leader acts after it sent its last successful renewal.
    pub renew_deadline: Duration,
    /// How often a leader renews.
    pub renew_interval: Duration,
    /// The backoff after a failed request. It doubles with every further failure, up to `renew_interval`.
    pub retry_period: Duration,
    /// Timeout of a request.
    pub request_timeout: Duration,
    /// Timeout for the future of the leader to end after shutdown starts.
    pub stop_timeout: Duration,
}

/// A [`Timing`] with which two candidates could lead at once, or nobody for a long time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid leader election timing: {0}")]
pub struct InvalidTiming(&'static str);

/// The default of services.
#[cfg(test)]
impl Default for Timing {
    fn default() -> Self {
        Self::for_lease(Duration::from_secs(15))
    }
}

impl Timing {
    /// The timing for this lease duration. For 15 seconds: a leader acts for 10 seconds without renewal, renews every 2
    /// seconds, has a request timeout of 3 seconds and retries after half a second.
    pub fn for_lease(lease_duration: Duration) -> Self {
        Self {
            lease_duration,
            renew_deadline: lease_duration * 2 / 3,
            renew_interval: lease_duration * 2 / 15,
            retry_period: lease_duration / 30,
            request_timeout: lease_duration / 5,
            // Together with the following requests, this is less than the ten seconds of a shutdown.
            stop_timeout: Duration::from_secs(3),
        }
    }

    /// The duration in the Lease, which a standby waits at least.
    pub(super) fn lease_seconds(&self) -> i32 {
        let seconds = self.lease_duration.as_secs() + u64::from(self.lease_duration.subsec_nanos() > 0);
        seconds.try_into().unwrap_or(i32::MAX)
    }

    pub(super) fn check(&self) -> Result<(), InvalidTiming> {
        let wrong = |what| Err(InvalidTiming(what));
        if self.lease_duration.is_zero() || self.lease_duration.as_secs() >= 86_400 {
            return wrong("lease_duration must be greater than 0 and less than 24h");
        }
        // Clocks of two machines can differ in speed, and a request of the old leader can be in flight at a takeover.
        if self.renew_deadline * 5 > self.lease_duration * 4 {
            return wrong("renew_deadline must not exceed four fifths of lease_duration");
        }
        if self.renew_interval.is_zero() || self.retry_period.is_zero() || self.request_timeout.is_zero() {
            return wrong("renew_interval, retry_period and request_timeout must be greater than 0");
        }
        if self.renew_interval + self.retry_period + self.request_timeout * 2 > self.renew_deadline {
            return wrong("two renewals, the first of which times out, must fit into renew_deadline");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_match_the_docs() {
        let timing = Timing::default();
        assert_eq!(
            [timing.renew_deadline, timing.renew_interval, timing.retry_period, timing.request_timeout],
            [10_000, 2000, 500, 3000].map(Duration::from_millis)
        );
    }

    #[test]
    fn timing_for_any_lease_duration_is_valid() {
        for (millis, expected) in [(1, 1), (999, 1), (1000, 1), (1001, 2), (15_000, 15), (60_000, 60)] {
            let timing = Timing::for_lease(Duration::from_millis(millis));
            assert_eq!(timing.check(), Ok(()), "{millis} ms");
            assert_eq!(timing.lease_seconds(), expected, "{millis} ms");
        }
    }

    #[test]
    fn unsafe_timings_are_rejected() {
        let good = Timing::default();
        let seconds = Duration::from_secs;
        for bad in [
            Timing { lease_duration: seconds(0), ..good },
            Timing { lease_duration: seconds(1_000_000), ..good },
            Timing { renew_deadline: seconds(13), ..good },
            Timing { renew_deadline: seconds(15), ..good },
            Timing { request_timeout: seconds(5), ..good },
            Timing { renew_interval: seconds(0), ..good },
            Timing { retry_period: seconds(0), ..good },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}

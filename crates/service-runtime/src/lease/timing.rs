//! How long things take in an election, and which combinations are safe.

use std::time::Duration;

/// The durations of an election. All candidates for one Lease should have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// How long a Lease that is not renewed keeps others away. The Lease stores whole seconds: a
    /// fraction counts as a full one.
    pub lease_duration: Duration,
    /// How long a leader acts after it began its last successful renewal.
    pub act_for: Duration,
    /// How often a leader renews.
    pub renew_every: Duration,
    /// The first pause after a failed request. It doubles with every further failure, up to
    /// `renew_every`.
    pub retry_after: Duration,
    /// How long one request may take.
    pub request_timeout: Duration,
    /// How long the leading future may take to end after the shutdown has begun.
    pub stop_within: Duration,
}

/// A [`Timing`] with which two could lead at once, or nobody for long.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("leader election cannot work with this timing: {0}")]
pub struct InvalidTiming(&'static str);

/// What a service has unless it is told otherwise.
#[cfg(test)]
impl Default for Timing {
    fn default() -> Self {
        Self::for_lease(Duration::from_secs(15))
    }
}

impl Timing {
    /// The usual proportions for this lease duration: of 15 seconds a leader acts for 10 without
    /// renewal, renews every 2, gives a request 3 and tries again after half a second.
    pub fn for_lease(lease_duration: Duration) -> Self {
        Self {
            lease_duration,
            act_for: lease_duration * 2 / 3,
            renew_every: lease_duration * 2 / 15,
            retry_after: lease_duration / 30,
            request_timeout: lease_duration / 5,
            // With the requests that follow it stays below the ten seconds that a shutdown may take.
            stop_within: Duration::from_secs(3),
        }
    }

    /// What the Lease says, and what a standby waits at least.
    pub(super) fn lease_seconds(&self) -> i32 {
        let seconds = self.lease_duration.as_secs() + u64::from(self.lease_duration.subsec_nanos() > 0);
        seconds.try_into().unwrap_or(i32::MAX)
    }

    pub(super) fn check(&self) -> Result<(), InvalidTiming> {
        let wrong = |what| Err(InvalidTiming(what));
        if self.lease_duration.is_zero() || self.lease_duration.as_secs() >= 86_400 {
            return wrong("lease_duration must be more than nothing and less than a day");
        }
        // Clocks of two machines do not run equally fast, and a take-over may find a request of the
        // old leader on its way.
        if self.act_for * 5 > self.lease_duration * 4 {
            return wrong("act_for must not exceed four fifths of lease_duration");
        }
        if self.renew_every.is_zero() || self.retry_after.is_zero() || self.request_timeout.is_zero() {
            return wrong("renew_every, retry_after and request_timeout must be more than nothing");
        }
        if self.renew_every + self.retry_after + self.request_timeout * 2 > self.act_for {
            return wrong("a renewal that times out and another one must fit into act_for");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_those_that_the_docs_name() {
        let timing = Timing::default();
        assert_eq!(
            [timing.act_for, timing.renew_every, timing.retry_after, timing.request_timeout],
            [10_000, 2000, 500, 3000].map(Duration::from_millis)
        );
    }

    #[test]
    fn usual_proportions_are_valid_at_any_length_and_fractions_of_seconds_are_rounded_up() {
        for (millis, expected) in [(1, 1), (999, 1), (1000, 1), (1001, 2), (15_000, 15), (60_000, 60)] {
            let timing = Timing::for_lease(Duration::from_millis(millis));
            assert_eq!(timing.check(), Ok(()), "{millis} ms");
            assert_eq!(timing.lease_seconds(), expected, "{millis} ms");
        }
    }

    #[test]
    fn unsafe_combinations_are_refused() {
        let good = Timing::default();
        let seconds = Duration::from_secs;
        for bad in [
            Timing { lease_duration: seconds(0), ..good },
            Timing { lease_duration: seconds(1_000_000), ..good },
            Timing { act_for: seconds(13), ..good },
            Timing { act_for: seconds(15), ..good },
            Timing { request_timeout: seconds(5), ..good },
            Timing { renew_every: seconds(0), ..good },
            Timing { retry_after: seconds(0), ..good },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}

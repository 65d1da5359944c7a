//! The clock for leadership.

use std::ops::Add;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds since the machine booted, including the time while it was suspended.
///
/// This is not `std::time::Instant`, which stops while a virtual machine is suspended, and not the wall clock, which
/// people and NTP set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Moment(u64);

impl Moment {
    /// A moment that is always in the past.
    pub const PAST: Self = Self(0);

    pub fn now() -> Self {
        Self::PAST + Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default()
    }

    pub fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    pub fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time from `now` to this moment; zero if it has passed.
    pub fn left(self, now: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(now.0))
    }
}

impl Add<Duration> for Moment {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        // This overflows after 584 years of uptime.
        Self(self.0.saturating_add(duration.as_nanos().try_into().unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_ordered_and_past_ones_have_no_time_left() {
        let now = Moment::now();
        let later = now + Duration::from_millis(1500);
        assert!(now > Moment::PAST && later > now && Moment::now() >= now);
        assert_eq!(later.left(now), Duration::from_millis(1500));
        assert_eq!(now.left(later), Duration::ZERO);
        assert_eq!(Moment::from_nanos(now.as_nanos()), now);
    }
}

//! The clock that leadership is measured by.

use std::ops::Add;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A moment on this machine's clock: nanoseconds since it booted, with the time it was suspended.
///
/// Not `std::time::Instant`, which stands still while a virtual machine is suspended, and not the
/// wall clock, which people and NTP set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Moment(u64);

impl Moment {
    /// The moment that has always passed.
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

    /// How long it is from `now` to this moment; nothing when it has passed.
    pub fn left(self, now: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(now.0))
    }
}

impl Add<Duration> for Moment {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        // The end of what fits is 584 years of uptime away.
        Self(self.0.saturating_add(duration.as_nanos().try_into().unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_ordered_and_what_has_passed_has_nothing_left() {
        let now = Moment::now();
        let later = now + Duration::from_millis(1500);
        assert!(now > Moment::PAST && later > now && Moment::now() >= now);
        assert_eq!(later.left(now), Duration::from_millis(1500));
        assert_eq!(now.left(later), Duration::ZERO);
        assert_eq!(Moment::from_nanos(now.as_nanos()), now);
    }
}

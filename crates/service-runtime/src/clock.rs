//! The clock of a service. Deadlines are wall-clock times in API objects, so this is wall-clock time too. Test builds
//! can shift the clock, to test long deadlines.
//!
//! ```no_run
//! use haulout_service_runtime::clock::Clock;
//! use jiff::{SignedDuration, Timestamp};
//!
//! /// Decisions take `now` as an argument.
//! fn is_missed(deadline: Timestamp, now: Timestamp) -> bool {
//!     now >= deadline
//! }
//!
//! async fn wait(clock: &Clock) {
//!     let deadline = clock.now() + SignedDuration::from_mins(30);
//!     clock.sleep_until(deadline).await;
//!     assert!(is_missed(deadline, clock.now()));
//! }
//! ```
//!
//! A [`WorkQueue`](crate::workers::WorkQueue) uses this clock for keys with deadlines. In services that are built with the
//! feature `test-clock`, `POST /shift-clock` with a number of seconds shifts the clock. Durations and leadership are measured
//! with other clocks.

use std::time::Duration;

use jiff::Timestamp;
#[cfg(feature = "test-clock")]
use {jiff::SignedDuration, std::sync::Arc, tokio::sync::watch};

/// Maximum time of a single sleep, because the wall clock can be set meanwhile.
const MAX_SLEEP: Duration = Duration::from_secs(300);

/// The clock of a service. Clones share one clock.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    #[cfg(feature = "test-clock")]
    shift: Arc<watch::Sender<SignedDuration>>,
}

impl Clock {
    /// The current time.
    #[cfg(not(feature = "test-clock"))]
    #[allow(clippy::unused_self, reason = "only test builds use it")]
    pub fn now(&self) -> Timestamp {
        Timestamp::now()
    }

    /// The current time, shifted.
    #[cfg(feature = "test-clock")]
    pub fn now(&self) -> Timestamp {
        Timestamp::now().saturating_add(*self.shift.borrow()).unwrap_or(Timestamp::MAX)
    }

    /// Sets the shift of the clock, replacing an earlier shift.
    #[cfg(feature = "test-clock")]
    pub fn shift(&self, by: SignedDuration) {
        self.shift.send_replace(by);
    }

    /// Sleeps until this time, even if the clock is set or shifted meanwhile. Without a time, it never resolves.
    pub async fn sleep_until(&self, due: impl Into<Option<Timestamp>>) {
        let Some(due) = due.into() else { return std::future::pending().await };
        loop {
            // Subscribe before reading the clock, so that no shift is missed.
            let shifted = self.shifted();
            let left = Duration::try_from(due.duration_since(self.now())).unwrap_or_default();
            if left.is_zero() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(left.min(MAX_SLEEP)) => {}
                () = shifted => {}
            }
        }
    }

    /// Resolves when the clock is shifted after this call. It never resolves in release builds.
    #[cfg_attr(not(feature = "test-clock"), allow(clippy::unused_self, reason = "it cannot be shifted"))]
    pub fn shifted(&self) -> impl Future<Output = ()> + Send + use<> {
        #[cfg(feature = "test-clock")]
        let mut shift = self.shift.subscribe();
        async move {
            #[cfg(feature = "test-clock")]
            if shift.changed().await.is_ok() {
                return;
            }
            std::future::pending::<()>().await;
        }
    }
}

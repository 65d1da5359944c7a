//! The one source of `now`. Deadlines are wall-clock times stored in API objects, so this is wall-clock
//! time too. Test builds can shift it, because nobody waits half an hour for a progress deadline.
//!
//! ```no_run
//! use haulout_service_runtime::clock::Clock;
//! use jiff::{SignedDuration, Timestamp};
//!
//! /// What decides takes `now` as an argument.
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
//! Keys with deadlines belong into a [`WorkQueue`](crate::workers::WorkQueue), which follows this clock by
//! itself. A test shifts the clock of a running service, built with the feature `test-clock`, by
//! `POST /shift-clock` with a number of seconds. How long something takes, and leadership, are not measured
//! with it.

use std::time::Duration;

use jiff::Timestamp;
#[cfg(feature = "test-clock")]
use {jiff::SignedDuration, std::sync::Arc, tokio::sync::watch};

/// The longest nap: somebody may set the wall clock while we sleep.
const LONGEST_NAP: Duration = Duration::from_secs(300);

/// Tells the time. Clones are the same clock.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    #[cfg(feature = "test-clock")]
    shift: Arc<watch::Sender<SignedDuration>>,
}

impl Clock {
    /// What time it is.
    #[cfg(not(feature = "test-clock"))]
    #[allow(clippy::unused_self, reason = "only test builds have something to look at")]
    pub fn now(&self) -> Timestamp {
        Timestamp::now()
    }

    /// What time it is, shifted.
    #[cfg(feature = "test-clock")]
    pub fn now(&self) -> Timestamp {
        Timestamp::now().saturating_add(*self.shift.borrow()).unwrap_or(Timestamp::MAX)
    }

    /// Puts the clock forward (or back) by this much in all, replacing an earlier shift.
    #[cfg(feature = "test-clock")]
    pub fn shift(&self, by: SignedDuration) {
        self.shift.send_replace(by);
    }

    /// Resolves when this time has come, also when the clock is set or shifted meanwhile; never if there is none.
    pub async fn sleep_until(&self, due: impl Into<Option<Timestamp>>) {
        let Some(due) = due.into() else { return std::future::pending().await };
        loop {
            // Before the look at the clock: a shift right after it must not be slept through.
            let shifted = self.shifted();
            let left = Duration::try_from(due.duration_since(self.now())).unwrap_or_default();
            if left.is_zero() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(left.min(LONGEST_NAP)) => {}
                () = shifted => {}
            }
        }
    }

    /// Resolves when the clock has been shifted after this call. In released builds, never.
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

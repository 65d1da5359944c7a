//! The one source of `now`. Deadlines are wall-clock times stored in API objects, so this is wall-clock
//! time too. Test builds can shift it, because nobody waits half an hour for a progress deadline.

use jiff::Timestamp;
#[cfg(feature = "test-clock")]
use {jiff::SignedDuration, std::sync::Arc, tokio::sync::watch};

/// Tells the time.
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

    /// Resolves when the clock has been shifted. In released builds, never.
    pub async fn shifted(&self) {
        #[cfg(feature = "test-clock")]
        if self.shift.subscribe().changed().await.is_ok() {
            return;
        }
        std::future::pending::<()>().await;
    }
}

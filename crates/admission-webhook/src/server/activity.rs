//! Whether anything is being asked on a connection, so that those can be closed that only hold a place.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::time::{Instant, sleep_until};

/// What has been asked on one connection.
#[derive(Debug)]
pub(super) struct Activity(Mutex<State>);

#[derive(Debug)]
struct State {
    asked: bool,
    under_way: usize,
    last: Instant,
}

impl Activity {
    pub(super) fn new() -> Self {
        Self(Mutex::new(State { asked: false, under_way: 0, last: Instant::now() }))
    }

    /// Notes a request.
    pub(super) fn begin(self: &Arc<Self>) -> UnderWay {
        let mut state = self.state();
        state.asked = true;
        state.under_way += 1;
        UnderWay(Arc::clone(self))
    }

    /// Resolves when there has been no first request for so long, or no further one for so long.
    pub(super) async fn quiet(&self, first: Duration, further: Duration) {
        let begun = Instant::now();
        loop {
            let (until, due) = {
                let state = self.state();
                let limit = if state.asked { further } else { first };
                let now = Instant::now();
                let since = if state.under_way == 0 { state.last.max(begun) } else { now };
                (since + limit, state.under_way == 0 && now >= since + limit)
            };
            if due {
                return;
            }
            sleep_until(until).await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }
}

/// One request that is under way, until it is dropped.
pub(super) struct UnderWay(Arc<Activity>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.under_way -= 1;
        state.last = Instant::now();
    }
}

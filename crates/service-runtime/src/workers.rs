//! Works on the keys of a [`Queue`]: a bounded number at once, none held while waiting, one timer for any
//! number of sleeping keys.

use std::collections::HashMap;
use std::future::Future;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::Notify;
use tokio::task::{Id, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::error;

use crate::clock::Clock;
use crate::metrics::QueueMetrics;
use crate::queue::{Backoff, Outcome, Queue};

/// The longest nap: the wall clock may be set while we sleep.
const LONGEST_NAP: Duration = Duration::from_secs(300);
/// How long work that has begun may go on after the order to stop.
const LAST_WORK: Duration = Duration::from_secs(5);

/// A shared work queue. Clones are the same queue.
#[derive(Clone, Debug)]
pub struct WorkQueue<K> {
    inner: Arc<Inner<K>>,
}

#[derive(Debug)]
struct Inner<K> {
    queue: Mutex<Queue<K>>,
    changed: Notify,
    clock: Clock,
    metrics: QueueMetrics,
}

impl<K: Clone + Eq + Hash + Ord + Send + std::fmt::Debug + 'static> WorkQueue<K> {
    /// An empty queue.
    pub fn new(clock: Clock, backoff: Backoff, metrics: QueueMetrics) -> Self {
        let queue = Mutex::new(Queue::new(backoff));
        Self { inner: Arc::new(Inner { queue, changed: Notify::new(), clock, metrics }) }
    }

    /// Asks for work on a key now.
    pub fn add(&self, key: K) {
        let now = self.inner.clock.now();
        if self.lock().add(key, now) {
            self.inner.metrics.added();
            self.inner.changed.notify_one();
        }
    }

    /// Asks for work on a key at this time, or earlier if that was planned already.
    pub fn add_at(&self, key: K, due: Timestamp) {
        let mut queue = self.lock();
        let before = queue.next_due();
        queue.add_at(key, due);
        if queue.next_due() != before {
            self.inner.changed.notify_one();
        }
    }

    /// How many keys sleep until they are due.
    pub fn sleeping(&self) -> usize {
        self.lock().sleeping()
    }

    /// Works on keys, at most `workers` at once, until the order to stop. A handler that panics has failed.
    pub async fn run<F>(&self, workers: usize, stop: CancellationToken, handle: impl Fn(K) -> F)
    where
        F: Future<Output = Outcome> + Send + 'static,
    {
        let mut running: JoinSet<Outcome> = JoinSet::new();
        let mut keys: HashMap<Id, K> = HashMap::new();
        while !stop.is_cancelled() {
            let due = self.start(workers, &mut running, &mut keys, &handle);
            tokio::select! {
                () = stop.cancelled() => break,
                Some(ended) = running.join_next_with_id() => self.end(ended, &mut keys),
                () = self.inner.changed.notified() => {}
                () = self.inner.clock.shifted() => {}
                () = sleep_until(due, &self.inner.clock) => {}
            }
        }
        let last = async {
            while let Some(ended) = running.join_next_with_id().await {
                self.end(ended, &mut keys);
            }
        };
        // What is not done by then is done by whoever comes after us: all work is repeatable.
        let _ = tokio::time::timeout(LAST_WORK, last).await;
    }

    /// Starts work on what is ready, and tells when to look again.
    fn start<F>(
        &self,
        workers: usize,
        running: &mut JoinSet<Outcome>,
        keys: &mut HashMap<Id, K>,
        handle: &impl Fn(K) -> F,
    ) -> Option<Timestamp>
    where
        F: Future<Output = Outcome> + Send + 'static,
    {
        let mut queue = self.lock();
        while running.len() < workers {
            let Some((key, waited)) = queue.next(self.inner.clock.now()) else { break };
            let id = running.spawn(handle(key.clone())).id();
            self.inner.metrics.started(id, waited);
            keys.insert(id, key);
        }
        self.inner.metrics.depth(queue.depth());
        // With all workers at work nothing can start before one of them ends.
        if running.len() < workers { queue.next_due() } else { None }
    }

    fn end(&self, ended: Result<(Id, Outcome), tokio::task::JoinError>, keys: &mut HashMap<Id, K>) {
        let (id, outcome) = match ended {
            Ok(ended) => ended,
            Err(panic) => {
                error!(key = ?keys.get(&panic.id()), %panic, "working on a key panicked; it will be retried");
                (panic.id(), Outcome::Failed)
            }
        };
        let retried = keys
            .remove(&id)
            .is_some_and(|key| self.lock().finish(&key, outcome, self.inner.clock.now(), fastrand::f64()));
        self.inner.metrics.ended(id, retried);
    }

    fn lock(&self) -> MutexGuard<'_, Queue<K>> {
        self.inner.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn sleep_until(due: Option<Timestamp>, clock: &Clock) {
    let Some(due) = due else { return std::future::pending().await };
    let left = Duration::try_from(due.duration_since(clock.now())).unwrap_or_default();
    tokio::time::sleep(left.min(LONGEST_NAP)).await;
}

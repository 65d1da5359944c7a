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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::metrics::Metrics;

    fn queue() -> WorkQueue<u32> {
        let backoff = Backoff { first: Duration::from_millis(2), most: Duration::from_millis(20) };
        WorkQueue::new(Clock::default(), backoff, Metrics::new("test", "0").queue("test"))
    }

    /// Runs the queue until `done` says so.
    async fn run<F>(
        queue: &WorkQueue<u32>,
        workers: usize,
        done: impl Fn() -> bool,
        handle: impl Fn(u32) -> F,
    ) where
        F: Future<Output = Outcome> + Send + 'static,
    {
        let stop = CancellationToken::new();
        let watch = async {
            while !done() {
                tokio::task::yield_now().await;
            }
            stop.cancel();
        };
        let all = async { tokio::join!(queue.run(workers, stop.clone(), handle), watch) };
        tokio::time::timeout(Duration::from_secs(20), all).await.expect("it is done in time");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn every_key_is_worked_on_and_never_more_at_once_than_there_are_workers() {
        let queue = queue();
        for key in 0..200 {
            queue.add(key);
        }
        let (now, most, done) = <(Arc<AtomicUsize>, Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
        let handle = |_| {
            let (now, most, done) = (Arc::clone(&now), Arc::clone(&most), Arc::clone(&done));
            async move {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                now.fetch_sub(1, Ordering::SeqCst);
                done.fetch_add(1, Ordering::SeqCst);
                Outcome::Done
            }
        };
        run(&queue, 3, || done.load(Ordering::SeqCst) == 200, handle).await;
        assert!(most.load(Ordering::SeqCst) <= 3);
    }

    #[tokio::test]
    async fn a_key_that_fails_or_panics_is_tried_again_and_holds_up_nobody() {
        let queue = queue();
        for key in 0..3 {
            queue.add(key);
        }
        let counts: Arc<Mutex<BTreeMap<u32, u32>>> = Arc::default();
        let count = |key: u32| counts.lock().unwrap().get(&key).copied().unwrap_or_default();
        let handle = |key: u32| {
            let counts = Arc::clone(&counts);
            async move {
                let tried = {
                    let mut counts = counts.lock().unwrap();
                    let count = counts.entry(key).or_default();
                    *count += 1;
                    *count
                };
                match (key, tried) {
                    (0, 1..=3) => panic!("on purpose"),
                    (1, 1..=3) => Outcome::Failed,
                    _ => Outcome::Done,
                }
            }
        };
        run(&queue, 1, || (count(0), count(1), count(2)) == (4, 4, 1), handle).await;
    }

    #[tokio::test]
    async fn ten_thousand_sleeping_keys_wake_nobody() {
        let queue = queue();
        let hour = Timestamp::now().saturating_add(Duration::from_secs(3600)).unwrap();
        for key in 0..10_000 {
            queue.add_at(key, hour);
        }
        queue.add(10_000);
        let worked = Arc::new(AtomicUsize::new(0));
        let handle = |key| {
            let worked = Arc::clone(&worked);
            async move {
                assert_eq!(key, 10_000);
                worked.fetch_add(1, Ordering::SeqCst);
                Outcome::Done
            }
        };
        run(&queue, 4, || worked.load(Ordering::SeqCst) == 1, handle).await;
        assert_eq!(queue.sleeping(), 10_000);
    }
}

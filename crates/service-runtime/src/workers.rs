//! Processes the keys of a [`Queue`] with a limited number of workers. Waiting keys occupy no worker, and one timer
//! serves all sleeping keys.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use haulout_service_runtime::api::RequestError;
//! use haulout_service_runtime::queue::{Backoff, Outcome};
//! use haulout_service_runtime::service::{Context, LeaderContext};
//! use haulout_service_runtime::workers::WorkQueue;
//!
//! struct Controller { /* index, clients, events, clock */ }
//!
//! impl Controller {
//!     /// Reconciles a node, regardless of which event triggered it.
//!     async fn reconcile(&self, node: &str) -> Result<Outcome, RequestError> {
//!         // Done, or Until(the next deadline). Errors are retried with backoff.
//!         Ok(Outcome::Done)
//!     }
//! }
//!
//! async fn lead(context: &Context, leading: LeaderContext) {
//!     let controller = Arc::new(Controller {});
//!     let queue = WorkQueue::new(context.clock.clone(), Backoff::default(), context.metrics.queue("nodes"));
//!     queue.add("node-1".to_owned());
//!     let later = context.clock.now() + jiff::SignedDuration::from_mins(30);
//!     queue.add_at("node-2".to_owned(), later);
//!     let handle = |node: String| {
//!         let controller = Arc::clone(&controller);
//!         async move { controller.reconcile(&node).await }
//!     };
//!     queue.run(8, context.stop.clone(), handle).await;
//! }
//! ```
//!
//! - A key is never processed twice at the same time. If a running key is added, it is processed again afterwards.
//!   Adding a ready key has no effect.
//! - [`WorkQueue::add`] skips planned times and backoffs, because something has changed. A handler that writes to its
//!   own object on each failure is therefore called again at once. It should store the time of its next attempt and
//!   return [`Outcome::Until`].
//! - Create the queue in each term of leadership, or once for all terms. Keys whose processing was aborted at the end
//!   of a term are processed in the next.
//! - Only one run at a time processes a queue.

use std::collections::HashMap;
use std::fmt::Display;
use std::future::Future;
use std::hash::Hash;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::task::{Id, JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::field::Empty;
use tracing::{Instrument as _, Span, info_span, warn};

use crate::clock::Clock;
use crate::metrics::QueueMetrics;
use crate::queue::{Backoff, Outcome, Queue};

/// How long running handlers may continue after `stop` is cancelled.
const SHUTDOWN_GRACE_PERIOD: Duration = Duration::from_secs(5);

/// A shared work queue. Clones share the queue.
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

/// A key of a work queue.
pub trait Key: Clone + Eq + Hash + Ord + Send + std::fmt::Debug + 'static {}

impl<K: Clone + Eq + Hash + Ord + Send + std::fmt::Debug + 'static> Key for K {}

impl<K: Key> WorkQueue<K> {
    /// An empty queue.
    pub fn new(clock: Clock, backoff: Backoff, metrics: QueueMetrics) -> Self {
        Self::of(Queue::new(backoff), clock, metrics)
    }

    /// An empty queue in which lanes take turns, and each group uses at most half of the workers.
    pub fn fair(
        clock: Clock,
        backoff: Backoff,
        metrics: QueueMetrics,
        lane: fn(&K) -> u64,
        group: fn(&K) -> Option<u64>,
    ) -> Self {
        Self::of(Queue::fair(backoff, lane).with_groups(group), clock, metrics)
    }

    fn of(queue: Queue<K>, clock: Clock, metrics: QueueMetrics) -> Self {
        let queue = Mutex::new(queue);
        Self { inner: Arc::new(Inner { queue, changed: Notify::new(), clock, metrics }) }
    }

    /// Adds a key.
    pub fn add(&self, key: K) {
        let now = self.inner.clock.now();
        if self.lock().add(key, now) {
            self.inner.metrics.added(1);
            self.inner.changed.notify_one();
        }
    }

    /// Schedules a key for this time, unless an earlier time is planned.
    pub fn add_at(&self, key: K, due: Timestamp) {
        let mut queue = self.lock();
        let before = queue.next_due();
        queue.add_at(key, due);
        if queue.next_due() != before {
            self.inner.changed.notify_one();
        }
    }

    /// Processes keys, at most `workers` at once and at least one, until `stop` is cancelled. Running handlers then
    /// have five seconds to finish. A handler fails if it panics or returns an error, which is logged. Keys that are
    /// not finished when this future ends or is dropped are processed again by the next run.
    pub async fn run<F, E>(&self, workers: usize, stop: CancellationToken, handle: impl Fn(K) -> F)
    where
        F: Future<Output = Result<Outcome, E>> + Send + 'static,
        E: Display + Send + 'static,
    {
        self.lock().limit_groups(workers / 2);
        let mut work = Work { queue: self, running: JoinSet::new(), keys: HashMap::new() };
        while !stop.is_cancelled() {
            let due = work.start(workers.max(1), &handle);
            tokio::select! {
                () = stop.cancelled() => break,
                Some(ended) = work.running.join_next_with_id() => work.end(ended),
                () = self.inner.changed.notified() => {}
                () = self.inner.clock.sleep_until(due) => {}
            }
        }
        let last = async {
            while let Some(ended) = work.running.join_next_with_id().await {
                work.end(ended);
            }
        };
        let _ = tokio::time::timeout(SHUTDOWN_GRACE_PERIOD, last).await;
    }

    fn lock(&self) -> MutexGuard<'_, Queue<K>> {
        self.inner.queue.lock()
    }
}

/// The running handlers of one run.
struct Work<'a, K: Key, E: 'static> {
    queue: &'a WorkQueue<K>,
    running: JoinSet<Result<Outcome, E>>,
    keys: HashMap<Id, K>,
}

impl<K: Key, E: Display + Send + 'static> Work<'_, K, E> {
    /// Starts handlers for ready keys, and returns when the next key is due.
    fn start<F>(&mut self, workers: usize, handle: &impl Fn(K) -> F) -> Option<Timestamp>
    where
        F: Future<Output = Result<Outcome, E>> + Send + 'static,
    {
        let Inner { clock, metrics, .. } = &*self.queue.inner;
        let woken = self.queue.lock().wake(clock.now());
        metrics.added(woken);
        while self.running.len() < workers {
            // The lock is not held while the handler is called, because the handler can use the queue.
            let Some((key, waited)) = self.queue.lock().next(clock.now()) else { break };
            let id = match catch_unwind(AssertUnwindSafe(|| handle(key.clone()))) {
                Ok(work) => self.running.spawn(work.instrument(span(metrics.name, &key))).id(),
                Err(panic) => self.running.spawn(async move { resume_unwind(panic) }).id(),
            };
            metrics.started(id, waited);
            self.keys.insert(id, key);
        }
        let queue = self.queue.lock();
        metrics.depth(queue.depth());
        queue.next_due()
    }

    fn end(&mut self, ended: Result<(Id, Result<Outcome, E>), JoinError>) {
        let Inner { clock, metrics, .. } = &*self.queue.inner;
        let (id, outcome, problem) = match ended {
            Ok((id, Ok(outcome))) => (id, outcome, None),
            Ok((id, Err(error))) => (id, Outcome::Failed, Some(error.to_string())),
            Err(panic) => (panic.id(), Outcome::Failed, Some(panic.to_string())),
        };
        let key = self.keys.remove(&id);
        let pause =
            key.as_ref().and_then(|key| self.queue.lock().finish(key, outcome, clock.now(), fastrand::f64()));
        if let (Some(problem), Some(pause)) = (problem, pause) {
            let queue = metrics.name;
            warn!(queue, ?key, "{problem}; retrying in {:.1}s", pause.as_secs_f64());
        }
        metrics.ended(id, pause.is_some());
    }
}

impl<K: Key, E: 'static> Drop for Work<'_, K, E> {
    /// Leadership was lost, or the last handlers took too long. Running keys become ready again, because the queue may
    /// outlive this run.
    fn drop(&mut self) {
        self.running.abort_all();
        let Inner { clock, metrics, .. } = &*self.queue.inner;
        for (id, key) in self.keys.drain() {
            metrics.aborted(id);
            self.queue.lock().requeue(&key, clock.now());
        }
        // A replica that does not lead reports an empty queue.
        metrics.depth(0);
    }
}

/// The span of one reconcile. Requests to the API server are spans under it.
fn span<K: std::fmt::Debug>(queue: &'static str, key: &K) -> Span {
    info_span!("reconcile", queue, ?key, namespace = Empty, name = Empty)
}

/// Records the reconciled object in the current span, because the key alone may not identify it for people.
pub fn record_object(namespace: &str, name: &str) {
    let span = Span::current();
    if !namespace.is_empty() {
        span.record("namespace", namespace);
    }
    span.record("name", name);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::metrics::Metrics;

    fn queue() -> WorkQueue<u32> {
        let backoff = Backoff { first: Duration::from_millis(2), max: Duration::from_millis(20) };
        WorkQueue::new(Clock::default(), backoff, Metrics::new("test", "0").queue("test"))
    }

    /// Runs the queue until `done` says so.
    async fn run<F>(
        queue: &WorkQueue<u32>,
        workers: usize,
        done: impl Fn() -> bool,
        handle: impl Fn(u32) -> F,
    ) where
        F: Future<Output = Result<Outcome, String>> + Send + 'static,
    {
        let stop = CancellationToken::new();
        let watch = async {
            while !done() {
                tokio::task::yield_now().await;
            }
            stop.cancel();
        };
        let all = async { tokio::join!(queue.run(workers, stop.clone(), handle), watch) };
        tokio::time::timeout(Duration::from_secs(20), all).await.expect("the keys are processed in time");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn worker_count_limits_concurrency() {
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
                Ok(Outcome::Done)
            }
        };
        run(&queue, 3, || done.load(Ordering::SeqCst) == 200, handle).await;
        assert!(most.load(Ordering::SeqCst) <= 3);
    }

    #[tokio::test]
    async fn failed_or_panicked_key_is_retried() {
        let queue = queue();
        for key in 0..3 {
            queue.add(key);
        }
        let counts: Arc<Mutex<BTreeMap<u32, u32>>> = Arc::default();
        let count = |key: u32| counts.lock().get(&key).copied().unwrap_or_default();
        let handle = |key: u32| {
            let counts = Arc::clone(&counts);
            async move {
                let tried = {
                    let mut counts = counts.lock();
                    let count = counts.entry(key).or_default();
                    *count += 1;
                    *count
                };
                match (key, tried) {
                    (0, 1..=3) => panic!("on purpose"),
                    (1, 1..=2) => Ok(Outcome::Failed),
                    (1, 3) => Err("on purpose".to_owned()),
                    _ => Ok(Outcome::Done),
                }
            }
        };
        run(&queue, 1, || (count(0), count(1), count(2)) == (4, 4, 1), handle).await;
    }

    #[tokio::test]
    async fn sleeping_keys_cause_no_work() {
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
                Ok(Outcome::Done)
            }
        };
        run(&queue, 4, || worked.load(Ordering::SeqCst) == 1, handle).await;
        assert_eq!(queue.lock().sleeping(), 10_000);
    }

    /// As when leadership is lost while a handler runs, and acquired again.
    #[tokio::test]
    async fn key_of_a_dropped_run_is_processed_by_the_next() {
        let metrics = Metrics::new("test", "0");
        let queue = WorkQueue::new(Clock::default(), Backoff::default(), metrics.queue("test"));
        queue.add(1);
        queue.add(2);
        let begun = Arc::new(Notify::new());
        let hang = |_| {
            let begun = Arc::clone(&begun);
            async move {
                begun.notify_one();
                std::future::pending::<Result<Outcome, String>>().await
            }
        };
        tokio::select! {
            () = queue.run(1, CancellationToken::new(), hang) => panic!("nobody stopped it"),
            () = begun.notified() => {}
        }
        let text = metrics.encode().unwrap();
        assert!(text.contains("workqueue_unfinished_work_seconds{name=\"test\"} 0.0"), "{text}");
        assert!(text.contains("workqueue_depth{name=\"test\"} 0"), "{text}");
        let worked = Arc::new(AtomicUsize::new(0));
        let handle = |_| {
            let worked = Arc::clone(&worked);
            async move {
                worked.fetch_add(1, Ordering::SeqCst);
                Ok(Outcome::Done)
            }
        };
        run(&queue, 1, || worked.load(Ordering::SeqCst) == 2, handle).await;
    }

    #[tokio::test]
    async fn handler_may_use_the_queue_and_may_panic() {
        let queue = queue();
        queue.add(0);
        let made = AtomicUsize::new(0);
        let handle = |key| {
            queue.add(1);
            assert!(key == 1 || made.fetch_add(1, Ordering::SeqCst) > 0, "on purpose");
            std::future::ready(Ok(Outcome::Done))
        };
        run(&queue, 1, || made.load(Ordering::SeqCst) == 2, handle).await;
    }

    #[tokio::test]
    async fn due_keys_count_as_added_while_workers_are_busy() {
        let metrics = Metrics::new("test", "0");
        let queue = WorkQueue::new(Clock::default(), Backoff::default(), metrics.queue("test"));
        queue.add(0);
        for key in 1..=3 {
            queue.add_at(key, Timestamp::now().saturating_add(Duration::from_millis(50)).unwrap());
        }
        let shows = || {
            let text = metrics.encode().unwrap();
            text.contains("workqueue_depth{name=\"test\"} 3")
                && text.contains("workqueue_adds_total{name=\"test\"} 4")
        };
        run(&queue, 1, shows, |_| async {
            tokio::time::sleep(Duration::from_secs(3)).await;
            Ok(Outcome::Done)
        })
        .await;
    }
}

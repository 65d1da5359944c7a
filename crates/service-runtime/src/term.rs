//! The watches and background tasks of a controller. A leader creates a [`Term`] with empty caches each time it is elected. A
//! service without leader election creates one at its start.

use std::any::Any;
use std::future::Future;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::join_all;
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use crate::metrics::Metrics;
use crate::pods::{PodCache, Subscriber};
use crate::service::Context;
use crate::watch::{self, Handler, Source};

/// Watches and background tasks. They end when this is dropped.
pub struct Term {
    client: Client,
    metrics: Metrics,
    stop: CancellationToken,
    tasks: JoinSet<()>,
    unsynced: Vec<CancellationToken>,
}

impl Term {
    /// A term without tasks.
    pub fn new(context: &Context) -> Self {
        Self {
            // A client that retries by itself would hide watch gaps.
            client: context.clients.direct.clone(),
            metrics: context.metrics.clone(),
            stop: context.stop.clone(),
            tasks: JoinSet::new(),
            unsynced: Vec::new(),
        }
    }

    /// Watches objects and passes them to the handler.
    pub fn watch<K, H>(&mut self, source: Source<K>, handler: &Arc<H>)
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Send + 'static,
        H: Handler<K>,
    {
        let synced = self.sync();
        let (client, metrics) = (self.client.clone(), self.metrics.clone());
        self.tasks.spawn(watch::run(client, source, Arc::clone(handler), metrics, synced));
    }

    /// Passes pods to the subscriber: first all existing pods, then changes.
    pub fn subscribe<S: Subscriber>(&mut self, pods: &PodCache, subscriber: &Arc<S>) {
        let synced = self.sync();
        let (pods, subscriber) = (pods.clone(), Arc::clone(subscriber));
        self.tasks.spawn(async move {
            pods.ready().await;
            let mut continuity = pods.watch_continuity();
            let mut last = *continuity.borrow_and_update();
            let mut subscription = pods.subscribe();
            subscriber.apply(subscription.changes().now_or_never().unwrap_or_default());
            if last.gap_since.is_none() {
                subscriber.resumed();
            }
            synced.cancel();
            loop {
                tokio::select! {
                    changes = subscription.changes() => subscriber.apply(changes),
                    // This cannot fail: the cache, which owns the sender, is alive.
                    Ok(()) = continuity.changed() => {
                        let now = *continuity.borrow_and_update();
                        if now.gaps != last.gaps {
                            subscriber.interrupted(now.last_gap_began.map_or(Duration::ZERO, |began| began.elapsed()));
                        }
                        if now.gap_since.is_none() && (now.gaps, now.last_gap_ended) != (last.gaps, last.last_gap_ended) {
                            subscriber.resumed();
                        }
                        last = now;
                    }
                }
            }
        });
    }

    /// Runs a background task. If it panics, the service exits.
    pub fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    fn sync(&mut self) -> CancellationToken {
        let synced = CancellationToken::new();
        self.unsynced.push(synced.clone());
        synced
    }

    /// Waits until every watch has listed its objects. Returns false if the service has to stop before.
    pub async fn synced(&mut self) -> bool {
        let waiting = std::mem::take(&mut self.unsynced);
        tokio::select! {
            _ = join_all(waiting.iter().map(CancellationToken::cancelled)) => {
                info!("caches synced, starting workers");
                true
            }
            () = self.stop.cancelled() => false,
            never = panicked(&mut self.tasks) => match never {},
        }
    }

    /// Runs the workers. All background tasks end with them.
    pub async fn run(mut self, workers: impl Future<Output = ()>) {
        tokio::select! {
            () = workers => {}
            never = panicked(&mut self.tasks) => match never {},
        }
    }
}

/// Propagates the panic of a task. Without its watch or planner, a controller would appear alive and do nothing.
async fn panicked(tasks: &mut JoinSet<()>) -> std::convert::Infallible {
    loop {
        match tasks.join_next().await {
            Some(Err(problem)) if problem.is_panic() => end(problem),
            Some(_) => {}
            None => std::future::pending().await,
        }
    }
}

fn end(problem: JoinError) -> ! {
    let panic: Box<dyn Any + Send> = problem.into_panic();
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    error!(panic = text, "background task panicked, ending the service");
    resume_unwind(panic)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::context;

    #[tokio::test]
    #[should_panic(expected = "on purpose")]
    async fn panic_of_a_task_ends_the_term() {
        let mut term = Term::new(&context(|_| None));
        term.spawn(async { panic!("on purpose") });
        term.run(std::future::pending()).await;
    }

    #[tokio::test]
    async fn ended_task_does_not_end_the_term() {
        let mut term = Term::new(&context(|_| None));
        term.spawn(async {});
        assert!(term.synced().await);
        term.run(async { tokio::task::yield_now().await }).await;
    }
}

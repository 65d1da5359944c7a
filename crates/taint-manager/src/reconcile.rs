//! A leader at work: takes one pod after the other, asks what its next step is, and does it.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use haulout_service_runtime::clients::Clients;
use haulout_service_runtime::clock::Clock;
use haulout_service_runtime::events::{Events, News};
use haulout_service_runtime::pods::{PodCache, PodIndex};
use haulout_service_runtime::queue::{Backoff, Outcome};
use haulout_service_runtime::workers::{WorkQueue, reconciling};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use thiserror::Error;
use tracing::{debug, info};

use crate::api::{self, ActError};
use crate::decide::How;
use crate::events;
use crate::index::Key;
use crate::metrics::Metrics;
use crate::state::{State, Step};

/// Retries never end. A minute is short enough for a webhook that comes back, and long enough for one that
/// refuses a thousand pods for ever.
pub(crate) const BACKOFF: Backoff =
    Backoff { first: Duration::from_millis(250), most: Duration::from_secs(60) };

/// What has to be in sight before anybody has to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    Evacuations,
    Namespaces,
    Nodes,
    Pods,
}

const SOURCES: usize = 4;

/// What a Node's annotation has to say.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) uid: String,
    pub(crate) text: Option<String>,
}

/// Why a reconcile failed.
#[derive(Debug, Error)]
pub(crate) enum ReconcileError {
    /// The pod could not be made to leave.
    #[error("failed to make pod {pod} leave by {how}: {source}")]
    Leave { pod: String, how: &'static str, source: ActError },
    /// Its evacuation could not be cancelled.
    #[error("failed to cancel the evacuation of pod {pod}: {source}")]
    Release { pod: String, source: ActError },
    /// The times of taints could not be written.
    #[error("failed to record taint times on node {node}: {source}")]
    Annotate { node: Arc<str>, source: ActError },
}

/// What a leader works with.
pub(crate) struct Controller {
    pub(crate) clients: Clients,
    pub(crate) clock: Clock,
    pub(crate) events: Events,
    pub(crate) metrics: Metrics,
    pub(crate) state: Arc<Mutex<State>>,
    pub(crate) pods: PodCache,
    pub(crate) queue: WorkQueue<Key>,
    /// Nodes whose annotation has to be written.
    pub(crate) nodes: WorkQueue<Arc<str>>,
    pub(crate) wanted: Mutex<HashMap<Arc<str>, Wanted>>,
    /// The sources whose watch works.
    pub(crate) synced: Mutex<BTreeSet<Source>>,
    pub(crate) started: Timestamp,
    /// Others who are known to act on the same taints.
    pub(crate) rivals: Mutex<BTreeSet<String>>,
    pub(crate) dry_run: bool,
    /// Our own pod, on which people find what concerns no other object.
    pub(crate) own: ObjectReference,
}

impl Controller {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Tells the state something, with the pods at hand, and has those looked at whom it concerns. The two
    /// locks are always taken in this order.
    pub(crate) fn tell<I: IntoIterator<Item = Key>>(&self, news: impl FnOnce(&mut State, &PodIndex) -> I) {
        let keys = {
            let mut state = self.state();
            news(&mut state, &self.pods.read())
        };
        self.enqueue(keys);
    }

    pub(crate) fn enqueue(&self, keys: impl IntoIterator<Item = Key>) {
        for key in keys {
            self.queue.add(key);
        }
    }

    /// The watch of a source is broken, and has been for so long.
    pub(crate) fn interrupted(&self, source: Source, ago: Duration) {
        // Held to the end, as below: otherwise a gap could end that has just begun.
        let mut synced = lock(&self.synced);
        synced.remove(&source);
        let began = self.clock.now().saturating_sub(ago).unwrap_or(Timestamp::MIN);
        self.state().gaps.begin(began);
    }

    /// A source has been listed for the first time, or its watch works again.
    pub(crate) fn resumed(&self, source: Source) {
        let mut synced = lock(&self.synced);
        synced.insert(source);
        if synced.len() < SOURCES {
            return;
        }
        let now = self.clock.now();
        self.tell(|state, pods| {
            state.gaps.end(now);
            let (everybody, tainted_nodes) = (state.index.everybody(pods), state.index.tainted_nodes());
            info!(pods = everybody.len(), tainted_nodes, "all watches work");
            everybody
        });
    }

    pub(crate) fn publish(&self, news: News) {
        if !self.dry_run {
            self.events.publish(news);
        }
    }

    /// Does the next step for a pod.
    pub(crate) async fn handle(self: Arc<Self>, key: Key) -> Result<Outcome, ReconcileError> {
        let Some(pod) = self.pods.read().get(key.uid).cloned() else { return Ok(Outcome::Done) };
        let now = self.clock.now();
        let step = self.state().next(&pod, now);
        let (namespace, name) = (&pod.namespace, &pod.name);
        reconciling(namespace, name);
        debug!(%namespace, %name, ?step, "decided");
        let Step { act, due, release, news, again, message, .. } = step;
        let next = again.map_or(Outcome::Done, Outcome::Until);
        if self.dry_run {
            if let Some(how) = act {
                info!(%namespace, %name, node = %key.node, how = how.as_str(), message, "would act");
            }
            return Ok(next);
        }
        if let Some(news) = news {
            self.events.publish(news);
        }
        if release {
            match api::release(&self.clients.direct, &pod).await {
                Ok(true) => self.tell(|state, pods| state.index.apply_evacuation(pod.uid, false, pods)),
                Ok(false) => {
                    info!(%namespace, %name, "the evacuation cannot be cancelled: its evacuator forbids it");
                    self.state().index.evacuation_past_recall(pod.uid);
                }
                Err(source) => {
                    self.plan_again(key, again);
                    return Err(ReconcileError::Release { pod: format!("{namespace}/{name}"), source });
                }
            }
        }
        let Some(how) = act else { return Ok(next) };
        match api::leave(&self.clients.direct, &pod, how, now).await {
            Ok(false) => Ok(next),
            Ok(true) => {
                let late = due.map(|due| self.clock.now().duration_since(due).try_into().unwrap_or_default());
                self.metrics.left(how, late.unwrap_or_default());
                info!(%namespace, %name, node = %key.node, how = how.as_str(), message, "made to leave");
                if how == How::Evacuate {
                    self.tell(|state, pods| state.index.apply_evacuation(pod.uid, true, pods));
                }
                Ok(next)
            }
            Err(source) => {
                self.metrics.failed(how);
                self.events.publish(events::failed(&pod, how, &source.to_string()));
                self.plan_again(key, again);
                Err(ReconcileError::Leave { pod: format!("{namespace}/{name}"), how: how.as_str(), source })
            }
        }
    }

    /// What was planned comes in its time, even if the retry is later.
    fn plan_again(&self, key: Key, again: Option<Timestamp>) {
        if let Some(again) = again {
            self.queue.add_at(key, again);
        }
    }

    /// Writes what a Node's annotation has to say.
    pub(crate) async fn annotate(self: Arc<Self>, node: Arc<str>) -> Result<Outcome, ReconcileError> {
        let Some(Wanted { uid, text }) = lock(&self.wanted).get(&node).cloned() else {
            return Ok(Outcome::Done);
        };
        if self.dry_run {
            return Ok(Outcome::Done);
        }
        match api::annotate(&self.clients.direct, &node, &uid, text.as_deref()).await {
            Ok(()) => Ok(Outcome::Done),
            Err(source) => Err(ReconcileError::Annotate { node, source }),
        }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;

//! Takes one pod after the other, asks the state what its next step is, and does it; and writes the annotations of Nodes.

use std::sync::Arc;
use std::time::Duration;

use haulout_service_runtime::clients::Clients;
use haulout_service_runtime::clock::Clock;
use haulout_service_runtime::events::{Events, News};
use haulout_service_runtime::pods::{Pod, PodCache, PodIndex};
use haulout_service_runtime::queue::{Backoff, Outcome};
use haulout_service_runtime::service::Context;
use haulout_service_runtime::workers::{WorkQueue, reconciling};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use parking_lot::{Mutex, MutexGuard};
use thiserror::Error;
use tracing::field::display;
use tracing::{debug, info};

use crate::api::{self, ActError};
use crate::decide::{How, Reason};
use crate::events;
use crate::metrics::Metrics;
use crate::state::watch_gap::Watch;
use crate::state::{Annotation, Key, State};

/// Retries never end. A minute is short enough for a webhook that comes back, and long enough for one that
/// refuses a thousand pods for ever.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), most: Duration::from_secs(60) };

/// Why a reconcile failed.
#[derive(Debug, Error)]
#[error("failed to {doing}: {source}")]
pub(crate) struct ReconcileError {
    /// What was being done, to which object.
    doing: String,
    source: ActError,
}

/// What a leader works with.
pub(crate) struct Controller {
    clients: Clients,
    pub(crate) clock: Clock,
    events: Events,
    pub(crate) metrics: Metrics,
    pub(crate) state: Arc<Mutex<State>>,
    pub(crate) pods: PodCache,
    pub(crate) queue: WorkQueue<Key>,
    /// Nodes whose annotation has to be written.
    pub(crate) nodes: WorkQueue<Arc<str>>,
    pub(crate) started: Timestamp,
    dry_run: bool,
    /// Our own pod, on which people find events that concern no other object.
    pub(crate) own: ObjectReference,
}

impl Controller {
    pub(crate) fn new(
        context: &Context,
        clients: Clients,
        metrics: Metrics,
        state: State,
        dry_run: bool,
    ) -> Self {
        let (clock, all) = (&context.clock, &context.metrics);
        let group = |key: &Key| Some(key.namespace);
        Self {
            clients,
            clock: clock.clone(),
            events: context.events.clone(),
            metrics,
            state: Arc::new(Mutex::new(state)),
            pods: context.pod_cache(),
            queue: WorkQueue::fair(clock.clone(), BACKOFF, all.queue("pods"), Key::lane, group),
            nodes: WorkQueue::new(clock.clone(), BACKOFF, all.queue("nodes")),
            started: clock.now(),
            dry_run,
            own: ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("Pod".into()),
                namespace: Some(context.namespace.clone()),
                name: Some(context.instance.clone()),
                ..ObjectReference::default()
            },
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Changes the state, with the pods at hand, and enqueues the pods that this concerns. The two locks are always
    /// taken in this order.
    pub(crate) fn update<I>(&self, change: impl FnOnce(&mut State, &PodIndex) -> I)
    where
        I: IntoIterator<Item = Key>,
    {
        let keys = change(&mut self.state(), &self.pods.read());
        for key in keys {
            self.queue.add(key);
        }
    }

    /// A watch is interrupted, and has been for so long.
    pub(crate) fn watch_interrupted(&self, watch: Watch, ago: Duration) {
        let since = self.clock.now().saturating_sub(ago).unwrap_or(Timestamp::MIN);
        self.state().gaps.begin(watch, since);
    }

    /// A watch has listed all objects for the first time, or works again.
    pub(crate) fn watch_resumed(&self, watch: Watch) {
        let now = self.clock.now();
        self.update(|state, pods| {
            let keys = state.resume(watch, pods, now);
            if let Some(keys) = &keys {
                let tainted_nodes = state.tainted_nodes();
                info!(pods = keys.len(), tainted_nodes, "all watches work");
            }
            keys.unwrap_or_default()
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
        let step = self.state().next(&pod, self.clock.now());
        let (namespace, name) = (&pod.namespace, &pod.name);
        reconciling(namespace, name);
        debug!(%namespace, %name, ?step, "decided");
        if self.dry_run {
            if let Some((how, _)) = step.act {
                let message = step.reason.to_string();
                info!(%namespace, %name, node = %key.node, how = how.as_str(), message, "would act");
            }
            return Ok(step.again.map_or(Outcome::Done, Outcome::Until));
        }
        if let Some(news) = step.news {
            self.events.publish(news);
        }
        let again = step.again;
        let done = async {
            if step.release {
                self.release(&pod).await?;
            }
            if let Some((how, due)) = step.act {
                self.leave(&pod, how, due, &step.reason).await?;
            }
            Ok(again.map_or(Outcome::Done, Outcome::Until))
        };
        let done = done.await;
        // What was planned comes in its time, even if the retry is later.
        if let (Err(_), Some(again)) = (&done, again) {
            self.queue.add_at(key, again);
        }
        done
    }

    /// Cancels our part of the evacuation of a pod that may stay.
    async fn release(&self, pod: &Pod) -> Result<(), ReconcileError> {
        let Pod { namespace, name, uid, .. } = pod;
        match api::release(&self.clients.direct, pod).await {
            Ok(true) => self.update(|state, pods| state.apply_evacuation(*uid, false, pods)),
            Ok(false) => {
                info!(%namespace, %name, "the evacuation cannot be cancelled: its evacuator forbids it");
                self.state().set_uncancellable(*uid);
            }
            Err(source) => {
                let doing = format!("cancel the evacuation of pod {namespace}/{name}");
                return Err(ReconcileError { doing, source });
            }
        }
        Ok(())
    }

    /// Makes a pod leave.
    async fn leave(
        &self,
        pod: &Pod,
        how: How,
        due: Timestamp,
        reason: &Reason,
    ) -> Result<(), ReconcileError> {
        let Pod { namespace, name, node, .. } = pod;
        match api::leave(&self.clients.direct, pod, how, self.clock.now()).await {
            Ok(false) => {}
            Ok(true) => {
                let late = self.clock.now().duration_since(due).try_into().unwrap_or_default();
                self.metrics.left(how, late);
                let (node, message) = (node.as_deref().map(display), reason.to_string());
                info!(%namespace, %name, node, how = how.as_str(), message, "made to leave");
                if how == How::Evacuate {
                    let now = self.clock.now();
                    self.update(|state, _| state.evacuation_created(pod, now));
                }
            }
            Err(source) => {
                self.metrics.failed(how);
                self.events.publish(events::failed(pod, how, &source.to_string()));
                let doing = format!("make pod {namespace}/{name} leave by {}", how.as_str());
                return Err(ReconcileError { doing, source });
            }
        }
        Ok(())
    }

    /// Writes when a node's taints were first seen to its annotation.
    pub(crate) async fn annotate(self: Arc<Self>, node: Arc<str>) -> Result<Outcome, ReconcileError> {
        let annotation = self.state().unwritten_annotation(&node).cloned();
        if let Some(Annotation { uid, value }) = annotation.filter(|_| !self.dry_run) {
            let written = api::annotate(&self.clients.direct, &node, &uid, value.as_deref()).await;
            let doing = || format!("record taint times on node {node}");
            written.map_err(|source| ReconcileError { doing: doing(), source })?;
        }
        Ok(Outcome::Done)
    }
}

#[cfg(test)]
mod tests;

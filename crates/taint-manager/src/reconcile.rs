//! Reconciles one pod at a time: gets the next step from the state and executes it. Also writes the annotations of
//! Nodes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use haulout_service_runtime::clients::Clients;
use haulout_service_runtime::clock::Clock;
use haulout_service_runtime::events::{Events, NewEvent};
use haulout_service_runtime::pods::{Pod, PodCache, PodIndex};
use haulout_service_runtime::queue::{Backoff, Outcome};
use haulout_service_runtime::service::Context;
use haulout_service_runtime::workers::{WorkQueue, record_object};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use parking_lot::{Mutex, MutexGuard};
use thiserror::Error;
use tracing::field::display;
use tracing::{debug, info};

use crate::api::{self, ApiError};
use crate::decide::{Reason, RemovalAction};
use crate::events;
use crate::metrics::Metrics;
use crate::state::watch_gap::Watch;
use crate::state::{Annotation, Key, State};

/// The retry delays after a failure. Retries never end. One minute is short enough for a webhook that recovers, and
/// long enough for one that rejects a thousand pods permanently.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), max: Duration::from_secs(60) };

/// Why a reconcile failed.
#[derive(Debug, Error)]
#[error("failed to {operation}: {source}")]
pub(crate) struct ReconcileError {
    /// What failed, on which object.
    operation: String,
    source: ApiError,
}

/// The clients, caches and queues of a leader.
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
    /// The built-in evacuator classes of this installation.
    served: BTreeSet<String>,
    dry_run: bool,
    /// Our own pod, for events without another object.
    pub(crate) own: ObjectReference,
}

impl Controller {
    pub(crate) fn new(
        context: &Context,
        clients: Clients,
        metrics: Metrics,
        state: State,
        served: BTreeSet<String>,
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
            served,
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

    /// Changes the state, with access to the pod cache, and enqueues the affected pods. The two locks are always taken
    /// in this order.
    pub(crate) fn update<I>(&self, change: impl FnOnce(&mut State, &PodIndex) -> I)
    where
        I: IntoIterator<Item = Key>,
    {
        let keys = change(&mut self.state(), &self.pods.read());
        for key in keys {
            self.queue.add(key);
        }
    }

    /// A watch has been interrupted for this long.
    pub(crate) fn watch_interrupted(&self, watch: Watch, ago: Duration) {
        let since = self.clock.now().saturating_sub(ago).unwrap_or(Timestamp::MIN);
        self.state().gaps.begin(watch, since);
    }

    /// A watch has synced, at the start or after an interruption.
    pub(crate) fn watch_resumed(&self, watch: Watch) {
        let now = self.clock.now();
        self.update(|state, pods| {
            let keys = state.resume(watch, pods, now);
            if let Some(keys) = &keys {
                let tainted_nodes = state.tainted_nodes();
                info!(pods = keys.len(), tainted_nodes, "all watches synced");
            }
            keys.unwrap_or_default()
        });
    }

    pub(crate) fn publish(&self, event: NewEvent) {
        if !self.dry_run {
            self.events.publish(event);
        }
    }

    /// Executes the next step for a pod.
    pub(crate) async fn handle(self: Arc<Self>, key: Key) -> Result<Outcome, ReconcileError> {
        let Some(pod) = self.pods.read().get(key.uid).cloned() else { return Ok(Outcome::Done) };
        let step = self.state().next(&pod, self.clock.now());
        let (namespace, name) = (&pod.namespace, &pod.name);
        record_object(namespace, name);
        debug!(%namespace, %name, ?step, "decided");
        if self.dry_run {
            if let Some((how, _)) = step.act {
                let message = step.reason.to_string();
                info!(%namespace, %name, node = %key.node, action = how.as_str(), message, "dry run: would remove pod");
            }
            return Ok(step.requeue_at.map_or(Outcome::Done, Outcome::Until));
        }
        if let Some(event) = step.event {
            self.events.publish(event);
        }
        let requeue_at = step.requeue_at;
        let result = async {
            if step.release {
                self.release(&pod).await?;
            }
            if let Some((how, due)) = step.act {
                self.remove(&pod, how, due, &step.reason).await?;
            }
            Ok(requeue_at.map_or(Outcome::Done, Outcome::Until))
        };
        let result = result.await;
        // The planned requeue is kept, even if the retry is later.
        if let (Err(_), Some(requeue_at)) = (&result, requeue_at) {
            self.queue.add_at(key, requeue_at);
        }
        result
    }

    /// Withdraws our request to evacuate a pod that may stay.
    async fn release(&self, pod: &Pod) -> Result<(), ReconcileError> {
        let Pod { namespace, name, uid, .. } = pod;
        match api::release(&self.clients.direct, pod).await {
            Ok(true) => self.update(|state, pods| state.apply_evacuation(*uid, false, pods)),
            Ok(false) => {
                info!(%namespace, %name, "evacuation cannot be cancelled: the evacuator forbids it");
                self.state().set_uncancellable(*uid);
            }
            Err(source) => {
                let operation = format!("cancel the evacuation of pod {namespace}/{name}");
                return Err(ReconcileError { operation, source });
            }
        }
        Ok(())
    }

    /// Removes a pod from its node.
    async fn remove(
        &self,
        pod: &Pod,
        how: RemovalAction,
        due: Timestamp,
        reason: &Reason,
    ) -> Result<(), ReconcileError> {
        let Pod { namespace, name, node, .. } = pod;
        match api::remove(&self.clients.direct, pod, how, &self.served, self.clock.now()).await {
            Ok(false) => {}
            Ok(true) => {
                let delay = self.clock.now().duration_since(due).try_into().unwrap_or_default();
                self.metrics.removed(how, delay);
                let (node, message) = (node.as_deref().map(display), reason.to_string());
                info!(%namespace, %name, node, action = how.as_str(), message, "pod removal requested");
                if how == RemovalAction::Evacuate {
                    let now = self.clock.now();
                    self.update(|state, _| state.evacuation_created(pod, now));
                }
            }
            Err(source) => {
                self.metrics.failed(how);
                self.events.publish(events::failed(pod, how, &source.to_string()));
                let operation = format!("remove pod {namespace}/{name} ({})", how.as_str());
                return Err(ReconcileError { operation, source });
            }
        }
        Ok(())
    }

    /// Writes the Node annotation with the times at which taints were first observed.
    pub(crate) async fn annotate(self: Arc<Self>, node: Arc<str>) -> Result<Outcome, ReconcileError> {
        let annotation = self.state().unwritten_annotation(&node).cloned();
        if let Some(Annotation { uid, value }) = annotation.filter(|_| !self.dry_run) {
            let written = api::annotate(&self.clients.direct, &node, &uid, value.as_deref()).await;
            let operation = || format!("record taint times on node {node}");
            written.map_err(|source| ReconcileError { operation: operation(), source })?;
        }
        Ok(Outcome::Done)
    }
}

#[cfg(test)]
mod tests;

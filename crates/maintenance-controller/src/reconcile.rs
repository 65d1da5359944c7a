//! Reconciles one key at a time: reads the state, decides, and writes to the API server. The answer to a write is applied to
//! the state at once, without waiting for the watch.

mod maintenance;
mod pod;

use std::collections::BTreeSet;
use std::sync::Arc;

use haulout_drain_planner::NodePlan;
use haulout_drain_planner::cordon::{self, CordonEvent, NodeChanges};
use haulout_service_runtime::api::{Object, RequestError, Writer, Written};
use haulout_service_runtime::clients::Clients;
use haulout_service_runtime::clock::Clock;
use haulout_service_runtime::events::Events;
use haulout_service_runtime::pods::{PodCache, PodIndex};
use haulout_service_runtime::queue::Outcome;
use haulout_service_runtime::workers::{WorkQueue, record_object};
use jiff::Timestamp;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tracing::{debug, warn};

use crate::api;
use crate::events;
use crate::metrics::Metrics;
use crate::observed::{ObservedNode, SlimNode};
use crate::state::{MayWrite, NotConverged, State, Work};
use crate::status::{self, MaintenanceEvent};
use crate::writes::Failure;

/// The blocker message of a node that lacks a change although the write succeeded.
const CHANGE_DROPPED: &str = "the API server accepted a change of the node, but the node lacks it; check for a mutating webhook or policy that removes it";
/// Maximum number of steps in one reconciliation. No key needs as many.
const MAX_STEPS: usize = 10;

/// The controller of one term of leadership.
pub struct Controller {
    pub(crate) clients: Clients,
    pub(crate) writer: Writer,
    pub(crate) clock: Clock,
    pub(crate) events: Events,
    pub(crate) state: Arc<Mutex<State>>,
    pub(crate) metrics: Metrics,
    pub(crate) pods: PodCache,
    /// Whether autoscalers are kept from removing nodes under maintenance.
    pub(crate) hold_autoscalers: bool,
    /// The built-in evacuator classes of this installation.
    pub(crate) served: BTreeSet<String>,
    pub(crate) queue: WorkQueue<Work>,
    /// Notified when the planner has changes to process.
    pub(crate) plan_changed: Notify,
}

/// What follows a step.
enum Next {
    /// Another step.
    Continue,
    /// The reconciliation ends with this outcome.
    Finish(Outcome),
}

/// The result of a write to a node.
enum NodeWrite {
    /// The node has the change.
    Done,
    /// The write succeeded, but the node does not have the change.
    Dropped,
    /// The node was changed or deleted meanwhile.
    Skipped(Outcome),
}

impl Controller {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Changes the state and notifies the planner.
    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut self.state());
        self.plan_changed.notify_one();
        result
    }

    /// As `update`, with the pod cache. The two locks are always taken in this order.
    pub(crate) fn update_with_pods<T>(&self, change: impl FnOnce(&mut State, &PodIndex) -> T) -> T {
        self.update(|state| change(state, &self.pods.read()))
    }

    /// Reads the state and the pod cache.
    fn read_with_pods<T>(&self, read: impl FnOnce(&State, &PodIndex) -> T) -> T {
        read(&self.state(), &self.pods.read())
    }

    /// Runs the planner whenever it is notified, a few steps at a time, and enqueues the keys that have changed.
    pub(crate) async fn converge(self: Arc<Self>) {
        loop {
            let changed = {
                let (now, mut state) = (self.clock.now(), self.state());
                state.converge(&self.pods.read(), now).then(|| state.take_changed())
            };
            let Some(changed) = changed else {
                tokio::task::yield_now().await;
                continue;
            };
            for work in changed {
                self.queue.add(work);
            }
            self.plan_changed.notified().await;
        }
    }

    /// Reconciles one key until there is nothing more to do for now.
    pub(crate) async fn handle(self: Arc<Self>, work: Work) -> Result<Outcome, RequestError> {
        for _ in 0..MAX_STEPS {
            let next = match &work {
                Work::Node(name) => {
                    record_object("", name);
                    self.node(name).await
                }
                Work::Maintenance(name) => {
                    record_object("", name);
                    self.maintenance(name).await
                }
                Work::Pod(pod) => self.pod(pod.uid).await,
            };
            match next? {
                Next::Continue => {}
                Next::Finish(outcome) => return Ok(outcome),
            }
        }
        warn!(?work, "still changing after {MAX_STEPS} steps, retrying");
        Ok(Outcome::Failed)
    }

    async fn node(&self, name: &Arc<str>) -> Result<Next, RequestError> {
        let now = self.clock.now();
        let view = self.update_with_pods(|state, pods| state.node(name, pods, now));
        let (observed, plan) = match view {
            Ok(Some(view)) => view,
            Ok(None) => return Ok(Next::Finish(Outcome::Done)),
            Err(NotConverged) => return Ok(self.wait_for_planner()),
        };
        self.report_ignored_volumes(name, &observed, &plan);
        let changes = cordon::decide(&observed.markers, &plan, self.hold_autoscalers, now);
        let mut requeue_at = changes.requeue_at.into_iter().chain(plan.requeue_at).min();
        if changes.is_empty() {
            self.update(|state| state.node_succeeded(name));
        } else {
            let may_write = self.update(|state| state.may_write_node(name, &changes, now));
            match may_write {
                MayWrite::Now => return self.write_node(name, &observed, &plan, &changes).await,
                MayWrite::Later(when) => requeue_at = requeue_at.into_iter().chain([when]).min(),
                MayWrite::Blocked(retry) => {
                    return self.node_not_writable(name, &observed, &plan, retry).await;
                }
            }
        }
        let next_lookup = self.reconcile_pods(name, &observed, &plan).await?;
        let requeue_at = requeue_at.into_iter().chain(next_lookup).min();
        Ok(Next::Finish(requeue_at.map_or(Outcome::Done, Outcome::Until)))
    }

    /// Writes a node, and records failures.
    async fn write_node(
        &self,
        name: &Arc<str>,
        observed: &ObservedNode,
        plan: &NodePlan,
        changes: &NodeChanges,
    ) -> Result<Next, RequestError> {
        let failure = match self.write_markers(name, observed, plan, changes).await {
            Ok(NodeWrite::Done) => {
                let now = self.clock.now();
                self.update(|state| state.node_written(name, changes, now));
                self.report_cordon(name, plan, changes.event);
                return Ok(Next::Continue);
            }
            Ok(NodeWrite::Skipped(outcome)) => return Ok(Next::Finish(outcome)),
            Ok(NodeWrite::Dropped) => Failure::permanent(&CHANGE_DROPPED),
            Err(error) => {
                warn!(%name, %error, "failed to write node");
                Failure::from(error.source.as_ref())
            }
        };
        let now = self.clock.now();
        let retry = self.update(|state| state.node_failed(name, failure, now, fastrand::f64()));
        self.node_not_writable(name, observed, plan, retry).await
    }

    /// Continues while a node cannot be written. Pods whose targets the node already lists leave, and Evacuations that are no
    /// longer needed are withdrawn.
    async fn node_not_writable(
        &self,
        name: &Arc<str>,
        observed: &ObservedNode,
        plan: &NodePlan,
        retry: Timestamp,
    ) -> Result<Next, RequestError> {
        let next_lookup = self.reconcile_pods(name, observed, plan).await?;
        let requeue_at = next_lookup.into_iter().chain(plan.requeue_at).fold(retry, Timestamp::min);
        Ok(Next::Finish(Outcome::Until(requeue_at)))
    }

    async fn write_markers(
        &self,
        name: &Arc<str>,
        observed: &ObservedNode,
        plan: &NodePlan,
        changes: &NodeChanges,
    ) -> Result<NodeWrite, RequestError> {
        debug!(%name, ?changes, "writing node");
        let node = observed.version.object("", name);
        let mut answers = Vec::new();
        if let Some(patch) = changes.node_patch() {
            answers.push(self.writer.patch::<SlimNode>(&node, patch).await?);
        }
        let succeeded = answers.iter().all(|answer| matches!(answer, Written::Done(_)));
        if let Some(status) = changes.status_patch().filter(|_| succeeded) {
            // No precondition on the version: kubelets write the status frequently, and the conditions are valid for any.
            let node = Object { version: None, ..node };
            answers.push(self.writer.patch_status_strategic(&node, status).await?);
        }
        let mut dropped = false;
        for answer in answers {
            match answer {
                Written::Done(node) => {
                    let observed = ObservedNode::new(node);
                    dropped =
                        cordon::decide(&observed.markers, plan, self.hold_autoscalers, self.clock.now())
                            .urgent;
                    self.update(|state| state.refresh_node(name, observed));
                }
                Written::Conflict => return Ok(NodeWrite::Skipped(Outcome::Failed)),
                Written::Gone => return Ok(NodeWrite::Skipped(Outcome::Done)),
            }
        }
        Ok(if dropped { NodeWrite::Dropped } else { NodeWrite::Done })
    }

    /// Publishes an event, once, if the drain of a node ignores attached volumes.
    fn report_ignored_volumes(&self, name: &Arc<str>, observed: &ObservedNode, plan: &NodePlan) {
        if plan.counts.volumes_ignored == 0 {
            self.state().volumes_ignored.remove(name);
            return;
        }
        let now = self.clock.now();
        let first = self.update_with_pods(|state, pods| {
            let pods = pods.on_node(name);
            // Until all lookups are done, volumes of pods that stay may be included.
            let known = state.claims_to_look_up(pods, now).is_empty()
                && state.handles_to_look_up(name, pods).is_empty();
            known && state.volumes_ignored.insert(name.clone())
        });
        if !first {
            return;
        }
        let by_annotation = observed.markers.ignores_volumes();
        let event = status::volumes_ignored(name, plan.counts.volumes_ignored, by_annotation);
        self.publish(&plan.holders, &event);
    }

    /// Publishes an event of these maintenances. Returns whether any of them exists.
    fn publish(&self, maintenances: &[Arc<str>], event: &MaintenanceEvent) -> bool {
        let state = self.state();
        let known: Vec<_> = maintenances.iter().filter_map(|name| state.maintenances.get(name)).collect();
        for maintenance in &known {
            self.events.publish(events::for_maintenance(&maintenance.object, event.clone()));
        }
        !known.is_empty()
    }

    fn report_cordon(&self, name: &Arc<str>, plan: &NodePlan, event: Option<CordonEvent>) {
        let holders = if plan.holders.is_empty() {
            self.state().holders.remove(name).unwrap_or_default()
        } else {
            self.state().holders.insert(name.clone(), plan.holders.clone());
            plan.holders.clone()
        };
        let Some(event) = event.map(|event| status::cordon_event(name, event)) else { return };
        if !self.publish(&holders, &event) {
            self.events.publish(events::for_node(name, event));
        }
    }

    /// Enqueues the pods of a node whose Evacuations have to be written. If volumes are attached, looks up which of them belong
    /// to pods that stay. Returns when to look up unbound claims again.
    async fn reconcile_pods(
        &self,
        name: &str,
        observed: &ObservedNode,
        plan: &NodePlan,
    ) -> Result<Option<Timestamp>, RequestError> {
        if observed.markers.unschedulable || plan.holders.is_empty() {
            let now = self.clock.now();
            let pods = self.read_with_pods(|state, pods| state.pods_to_reconcile(name, pods, now));
            for pod in pods {
                self.queue.add(Work::Pod(pod));
            }
        }
        if plan.counts.volumes + plan.counts.volumes_ignored > 0 {
            let now = self.clock.now();
            let claims = self.read_with_pods(|state, pods| state.claims_to_look_up(pods.on_node(name), now));
            for claim in claims {
                let volume = api::volume_of(&self.clients.direct, &claim.0, &claim.1).await?.map(Into::into);
                let now = self.clock.now();
                self.update_with_pods(|state, pods| {
                    state.set_claim_volume(claim, volume, name, pods.on_node(name), now);
                });
            }
            let volumes =
                self.read_with_pods(|state, pods| state.handles_to_look_up(name, pods.on_node(name)));
            for volume in volumes {
                let handle = api::handle_of(&self.clients.direct, &volume).await?;
                self.update(|state| state.set_volume_handle(volume, handle, name));
            }
            return Ok(self.read_with_pods(|state, pods| state.next_claim_lookup(pods.on_node(name))));
        }
        Ok(None)
    }

    /// Ends the reconciliation. The key is enqueued again when the planner has converged.
    fn wait_for_planner(&self) -> Next {
        self.plan_changed.notify_one();
        Next::Finish(Outcome::Done)
    }
}

#[cfg(test)]
mod tests;

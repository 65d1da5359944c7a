//! A leader at work: takes one node, maintenance or pod after the other, asks what to do about it, and does it.
//! What a write answers is known at once, without waiting for the watch.

mod maintenance;
mod pod;

use std::sync::Arc;

use haulout_drain_planner::NodePlan;
use haulout_drain_planner::cordon::{self, CordonNotice, NodeChanges};
use haulout_service_runtime::api::{Object, RequestError, Writer, Written};
use haulout_service_runtime::clients::Clients;
use haulout_service_runtime::clock::Clock;
use haulout_service_runtime::events::Events;
use haulout_service_runtime::pods::{PodCache, PodIndex};
use haulout_service_runtime::queue::Outcome;
use haulout_service_runtime::workers::{WorkQueue, reconciling};
use jiff::Timestamp;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tracing::{debug, warn};

use crate::api;
use crate::events;
use crate::metrics::Metrics;
use crate::seen::{NodeSeen, SlimNode};
use crate::state::{MayWrite, State, Unsettled, Work};
use crate::status::{self, Notice};
use crate::writes::Failure;

/// What is said of a node that does not have what was written to it.
const LOST: &str = "it takes the change, and the node does not have it afterwards: a mutating webhook or policy takes it off";
/// More steps than anything ever needs at one go.
const MOST_STEPS: usize = 10;

/// What a leader works with.
pub struct Controller {
    pub(crate) clients: Clients,
    pub(crate) writer: Writer,
    pub(crate) clock: Clock,
    pub(crate) events: Events,
    pub(crate) state: Arc<Mutex<State>>,
    pub(crate) metrics: Metrics,
    pub(crate) pods: PodCache,
    /// Whether autoscalers are kept away from nodes under maintenance.
    pub(crate) protect: bool,
    pub(crate) queue: WorkQueue<Work>,
    /// Told when the planner has something to catch up with.
    pub(crate) behind: Notify,
}

/// What comes after a step.
enum Next {
    /// Another one.
    Again,
    /// This.
    Rest(Outcome),
}

/// What came of marking a node.
enum Marked {
    /// It has the marks.
    Done,
    /// The API server took the marks, and the node does not have them.
    Lost,
    /// It was changed or deleted meanwhile.
    Not(Outcome),
}

impl Controller {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Changes the state and has the planner catch up.
    pub(crate) fn tell<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let told = change(&mut self.state());
        self.behind.notify_one();
        told
    }

    /// The same with the pods at hand. The two locks are always taken in this order.
    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut State, &PodIndex) -> T) -> T {
        self.tell(|state| change(state, &self.pods.read()))
    }

    /// Reads the state with the pods at hand.
    fn read<T>(&self, read: impl FnOnce(&State, &PodIndex) -> T) -> T {
        read(&self.state(), &self.pods.read())
    }

    /// Lets the planner catch up whenever there is something, a little at a time, and has what follows from it
    /// done.
    pub(crate) async fn settle(self: Arc<Self>) {
        loop {
            let changed = {
                let (now, mut state) = (self.clock.now(), self.state());
                state.settle(&self.pods.read(), now).then(|| state.take_changed())
            };
            let Some(changed) = changed else {
                tokio::task::yield_now().await;
                continue;
            };
            for work in changed {
                self.queue.add(work);
            }
            self.behind.notified().await;
        }
    }

    /// Works on one thing until there is nothing more to do for now.
    pub(crate) async fn handle(self: Arc<Self>, work: Work) -> Result<Outcome, RequestError> {
        for _ in 0..MOST_STEPS {
            let next = match &work {
                Work::Node(name) => {
                    reconciling("", name);
                    self.node(name).await
                }
                Work::Maintenance(name) => {
                    reconciling("", name);
                    self.maintenance(name).await
                }
                Work::Pod(pod) => self.pod(pod.uid).await,
            };
            match next? {
                Next::Again => {}
                Next::Rest(outcome) => return Ok(outcome),
            }
        }
        warn!(?work, "not at rest after {MOST_STEPS} steps, retrying");
        Ok(Outcome::Failed)
    }

    async fn node(&self, name: &Arc<str>) -> Result<Next, RequestError> {
        let now = self.clock.now();
        let view = self.update(|state, pods| state.node(name, pods, now));
        let (seen, plan) = match view {
            Ok(Some(view)) => view,
            Ok(None) => return Ok(Next::Rest(Outcome::Done)),
            Err(Unsettled) => return Ok(self.later()),
        };
        self.tell_of_volumes(name, &seen, &plan);
        let changes = cordon::decide(&seen.marks, &plan, self.protect, now);
        let mut again = changes.again.into_iter().chain(plan.wake).min();
        if changes.is_empty() {
            self.tell(|state| state.node_succeeded(name));
        } else {
            let may_write = self.tell(|state| state.may_write_node(name, &changes, now));
            match may_write {
                MayWrite::Now => return self.mark(name, &seen, &plan, &changes).await,
                MayWrite::Later(when) => again = again.into_iter().chain([when]).min(),
                MayWrite::Blocked(retry) => return self.leave_node(name, &seen, &plan, retry).await,
            }
        }
        let ask = self.work_on_pods(name, &seen, &plan).await?;
        let again = again.into_iter().chain(ask).min();
        Ok(Next::Rest(again.map_or(Outcome::Done, Outcome::Until)))
    }

    /// Marks a node, or takes note that this is refused or does not last.
    async fn mark(
        &self,
        name: &Arc<str>,
        seen: &NodeSeen,
        plan: &NodePlan,
        changes: &NodeChanges,
    ) -> Result<Next, RequestError> {
        let failure = match self.write_marks(name, seen, plan, changes).await {
            Ok(Marked::Done) => {
                let now = self.clock.now();
                self.tell(|state| state.node_written(name, changes, now));
                self.tell_of_cordon(name, plan, changes.notice);
                return Ok(Next::Again);
            }
            Ok(Marked::Not(outcome)) => return Ok(Next::Rest(outcome)),
            Ok(Marked::Lost) => Failure::impossible(&LOST),
            Err(error) => {
                warn!(%name, %error, "failed to write a node");
                Failure::from(error.source.as_ref())
            }
        };
        let now = self.clock.now();
        let retry = self.tell(|state| state.node_failed(name, failure, now, fastrand::f64()));
        self.leave_node(name, seen, plan, retry).await
    }

    /// What is done while a node cannot be written: no pod is asked to leave it before its targets are there for others
    /// to see, but Evacuations that nobody wants any more are withdrawn.
    async fn leave_node(
        &self,
        name: &Arc<str>,
        seen: &NodeSeen,
        plan: &NodePlan,
        retry: Timestamp,
    ) -> Result<Next, RequestError> {
        if plan.holders.is_empty() {
            self.work_on_pods(name, seen, plan).await?;
        }
        Ok(Next::Rest(Outcome::Until(plan.wake.map_or(retry, |wake| wake.min(retry)))))
    }

    async fn write_marks(
        &self,
        name: &Arc<str>,
        seen: &NodeSeen,
        plan: &NodePlan,
        changes: &NodeChanges,
    ) -> Result<Marked, RequestError> {
        debug!(%name, ?changes, "marking a node");
        let node = seen.version.object("", name);
        let mut answers = Vec::new();
        if let Some(patch) = changes.node_patch() {
            answers.push(self.writer.patch::<SlimNode>(&node, patch).await?);
        }
        let went_well = answers.iter().all(|answer| matches!(answer, Written::Done(_)));
        if let Some(status) = changes.status_patch().filter(|_| went_well) {
            // Kubelets write the status all the time: the conditions are right in any state.
            let node = Object { version: None, ..node };
            answers.push(self.writer.patch_status_strategic(&node, status).await?);
        }
        let mut lost = false;
        for answer in answers {
            match answer {
                Written::Done(node) => {
                    let seen = NodeSeen::new(node);
                    lost = cordon::decide(&seen.marks, plan, self.protect, self.clock.now()).urgent;
                    self.tell(|state| state.refresh_node(name, seen));
                }
                Written::Outdated => return Ok(Marked::Not(Outcome::Failed)),
                Written::Gone => return Ok(Marked::Not(Outcome::Done)),
            }
        }
        Ok(if lost { Marked::Lost } else { Marked::Done })
    }

    /// Tells once that volumes of a node are not waited for.
    fn tell_of_volumes(&self, name: &Arc<str>, seen: &NodeSeen, plan: &NodePlan) {
        if plan.counts.volumes_ignored == 0 {
            self.state().volumes_ignored.remove(name);
            return;
        }
        let now = self.clock.now();
        let first = self.update(|state, pods| {
            let pods = pods.on_node(name);
            // Else what belongs to pods that stay is not known yet.
            let known =
                state.unknown_claims(pods, now).is_empty() && state.unknown_handles(name, pods).is_empty();
            known && state.volumes_ignored.insert(name.clone())
        });
        if !first {
            return;
        }
        let by_annotation = seen.marks.ignores_volumes();
        let notice = status::volumes_ignored(name, plan.counts.volumes_ignored, by_annotation);
        self.publish(&plan.holders, &notice);
    }

    /// Publishes a notice as an event of these maintenances; whether there is any of them.
    fn publish(&self, maintenances: &[Arc<str>], notice: &Notice) -> bool {
        let state = self.state();
        let known: Vec<_> = maintenances.iter().filter_map(|name| state.maintenances.get(name)).collect();
        for maintenance in &known {
            self.events.publish(events::of(&maintenance.object, notice.clone()));
        }
        !known.is_empty()
    }

    fn tell_of_cordon(&self, name: &Arc<str>, plan: &NodePlan, notice: Option<CordonNotice>) {
        let holders = if plan.holders.is_empty() {
            self.state().holders.remove(name).unwrap_or_default()
        } else {
            self.state().holders.insert(name.clone(), plan.holders.clone());
            plan.holders.clone()
        };
        let Some(notice) = notice.map(|notice| status::cordon_notice(name, notice)) else { return };
        if !self.publish(&holders, &notice) {
            self.events.publish(events::of_node(name, notice));
        }
    }

    /// Has the Evacuations of a node's pods looked after. If volumes are in the way, finds out which of them
    /// belong to pods that stay, and tells when to ask again for those that have none yet.
    async fn work_on_pods(
        &self,
        name: &str,
        seen: &NodeSeen,
        plan: &NodePlan,
    ) -> Result<Option<Timestamp>, RequestError> {
        if seen.marks.unschedulable || plan.holders.is_empty() {
            let now = self.clock.now();
            let pods = self.read(|state, pods| state.pods_to_reconcile(name, pods, now));
            for pod in pods {
                self.queue.add(Work::Pod(pod));
            }
        }
        if plan.counts.volumes + plan.counts.volumes_ignored > 0 {
            let now = self.clock.now();
            let claims = self.read(|state, pods| state.unknown_claims(pods.on_node(name), now));
            for claim in claims {
                let volume = api::volume_of(&self.clients.direct, &claim.0, &claim.1).await?.map(Into::into);
                let now = self.clock.now();
                self.update(|state, pods| state.learn_claim(claim, volume, name, pods.on_node(name), now));
            }
            let volumes = self.read(|state, pods| state.unknown_handles(name, pods.on_node(name)));
            for volume in volumes {
                let handle = api::handle_of(&self.clients.direct, &volume).await?;
                self.tell(|state| state.learn_handle(volume, handle, name));
            }
            return Ok(self.read(|state, pods| state.next_claim(pods.on_node(name))));
        }
        Ok(None)
    }

    /// The planner is behind; who asked is called again when it is not.
    fn later(&self) -> Next {
        self.behind.notify_one();
        Next::Rest(Outcome::Done)
    }
}

#[cfg(test)]
mod tests;

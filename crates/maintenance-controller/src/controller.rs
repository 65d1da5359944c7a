//! A leader at work: takes one node, maintenance or pod after the other, asks what to do about it, and does it.
//! What a write answers is known at once, without waiting for the watch.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use haulout_api_types::NodeMaintenance;
use haulout_api_types::evacuators::evacuation_for;
use haulout_api_types::names::instigator;
use haulout_api_types::node_maintenance::{NodeMaintenanceStatus, Stage};
use haulout_service_runtime::clients::Clients;
use haulout_service_runtime::clock::Clock;
use haulout_service_runtime::events::Events;
use haulout_service_runtime::pods::{Pod, PodCache, Uid};
use haulout_service_runtime::queue::Outcome;
use haulout_service_runtime::workers::WorkQueue;
use jiff::Timestamp;
use serde_json::json;
use tokio::sync::Notify;
use tracing::{debug, warn};

use crate::act::{self, Written};
use crate::cordon::{self, CordonNotice, NodeChanges};
use crate::facts::EvacuationOf;
use crate::index::{Index, Unsettled, Wish, Work};
use crate::metrics::Metrics;
use crate::news;
use crate::planner::{MaintenancePlan, NodePlan};
use crate::seen::{EvacuationSeen, MaintenanceSeen, NodeSeen};
use crate::stage::{self, Step};
use crate::status;

/// More steps than anything ever needs at one go.
const MOST_STEPS: usize = 10;

/// What a leader works with.
pub struct Controller {
    pub(crate) clients: Clients,
    pub(crate) clock: Clock,
    pub(crate) events: Events,
    pub(crate) index: Arc<Mutex<Index>>,
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

impl Controller {
    /// Who needs the pods too reads them first: two who wait for each other would wait for ever.
    pub(crate) fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the index and has the planner catch up.
    pub(crate) fn tell<T>(&self, change: impl FnOnce(&mut Index) -> T) -> T {
        let told = change(&mut self.index());
        self.behind.notify_one();
        told
    }

    /// Takes in all pods that there are.
    pub(crate) fn learn_pods(&self) {
        let (now, pods) = (self.clock.now(), self.pods.read());
        let mut index = self.index();
        for pod in pods.iter() {
            if let Some(when) = index.put_pod(pod, now) {
                self.queue.add_at(Work::Pod(pod.uid), when);
            }
        }
    }

    /// Lets the planner catch up whenever there is something, a little at a time, and has what follows from it
    /// done.
    pub(crate) async fn settle(self: Arc<Self>) {
        loop {
            let changed = {
                let mut index = self.index();
                index.settle().then(|| index.take_changed())
            };
            match changed {
                Some(changed) => {
                    for work in changed {
                        self.queue.add(work);
                    }
                    self.behind.notified().await;
                }
                None => tokio::task::yield_now().await,
            }
        }
    }

    /// Works on one thing until there is nothing more to do for now.
    pub(crate) async fn handle(self: Arc<Self>, work: Work) -> Outcome {
        for _ in 0..MOST_STEPS {
            let next = match &work {
                Work::Node(name) => self.node(name).await,
                Work::Maintenance(name) => self.maintenance(name).await,
                Work::Pod(uid) => self.pod(*uid).await,
            };
            match next {
                Ok(Next::Again) => {}
                Ok(Next::Rest(outcome)) => return outcome,
                Err(error) => {
                    warn!(?work, %error, "a step failed and will be repeated");
                    return Outcome::Failed;
                }
            }
        }
        Outcome::Failed
    }

    async fn node(&self, name: &Arc<str>) -> kube::Result<Next> {
        let now = self.clock.now();
        let view = self.index().node(name);
        let (seen, plan) = match view {
            Ok(Some(view)) => view,
            Ok(None) => return Ok(Next::Rest(Outcome::Done)),
            Err(Unsettled) => return Ok(self.later()),
        };
        let changes = cordon::decide(&seen.marks, &plan, self.protect, now);
        let allowed = if changes == NodeChanges::default() {
            None
        } else {
            Some(self.index().throttle.ask(&Work::Node(name.clone()), now))
        };
        match allowed {
            Some(Err(when)) if changes.unschedulable.is_none() => {
                self.work_on_pods(name, &seen, &plan).await?;
                Ok(Next::Rest(Outcome::Until(when)))
            }
            Some(_) => self.mark(name, &seen, &plan, &changes).await,
            None => {
                self.work_on_pods(name, &seen, &plan).await?;
                Ok(Next::Rest(Outcome::Done))
            }
        }
    }

    async fn mark(
        &self,
        name: &Arc<str>,
        seen: &NodeSeen,
        plan: &NodePlan,
        changes: &NodeChanges,
    ) -> kube::Result<Next> {
        debug!(%name, ?changes, "marking a node");
        let (client, uid) = (&self.clients.retrying, &seen.version.uid);
        let mut answers = Vec::new();
        if let Some(patch) = changes.node_patch(&seen.version.version) {
            answers.push(act::mark_node(client, name, uid, patch).await?);
        }
        let went_well = answers.iter().all(|answer| matches!(answer, Written::Done(_)));
        if let Some(patch) = changes.status_patch().filter(|_| went_well) {
            answers.push(act::mark_node_status(client, name, uid, patch).await?);
        }
        let mut next = Next::Again;
        for answer in answers {
            match answer {
                Written::Done(node) => self.tell(|index| index.refresh_node(name, NodeSeen::new(node))),
                Written::Outdated => next = Next::Rest(Outcome::Failed),
                Written::Gone => next = Next::Rest(Outcome::Done),
            }
        }
        if matches!(next, Next::Again) {
            self.tell_of_cordon(name, plan, changes.notice);
        }
        Ok(next)
    }

    fn tell_of_cordon(&self, name: &Arc<str>, plan: &NodePlan, notice: Option<CordonNotice>) {
        let mut index = self.index();
        let holders = if plan.holders.is_empty() {
            index.races.forget(name);
            index.holders.remove(name).unwrap_or_default()
        } else {
            index.holders.insert(name.clone(), plan.holders.clone());
            plan.holders.clone()
        };
        let Some(notice) = notice else { return };
        let reverts = match notice {
            CordonNotice::Reverted => index.races.reverted(name, self.clock.now()),
            CordonNotice::LeftCordoned => None,
        };
        let Some(told) = status::cordon_notice(name, notice, reverts) else { return };
        let maintenances: Vec<_> = holders
            .iter()
            .filter_map(|name| index.maintenance_seen(name))
            .map(|m| m.object.clone())
            .collect();
        drop(index);
        for maintenance in &maintenances {
            self.events.publish(news::of(maintenance, told.clone()));
        }
        if maintenances.is_empty() {
            self.events.publish(news::of_node(name, told));
        }
    }

    /// Has the Evacuations of a node's pods looked after. If volumes are in the way, finds out which of them
    /// belong to pods that stay.
    async fn work_on_pods(&self, name: &str, seen: &NodeSeen, plan: &NodePlan) -> kube::Result<()> {
        if seen.marks.unschedulable || plan.holders.is_empty() {
            let pods = self.index().to_do(plan, self.clock.now());
            for pod in pods {
                self.queue.add(Work::Pod(pod));
            }
        }
        if plan.counts.volumes > 0 {
            let claims = {
                let pods = self.pods.read();
                self.index().unknown_claims(pods.on_node(name))
            };
            for claim in claims {
                let volume = act::volume_of(&self.clients.retrying, &claim.0, &claim.1).await?;
                let (now, pods) = (self.clock.now(), self.pods.read());
                let volume = volume.map(Into::into);
                self.tell(|index| index.learn_claim(claim, volume, pods.on_node(name), now));
            }
        }
        Ok(())
    }

    async fn pod(&self, uid: Uid) -> kube::Result<Next> {
        let now = self.clock.now();
        let Some(pod) = self.pods.read().get(uid).cloned() else { return Ok(Next::Rest(Outcome::Done)) };
        // Time may have changed something: a pod that should have ended has not.
        let wake = self.tell(|index| index.put_pod(&pod, now));
        let rest = wake.map_or(Outcome::Done, Outcome::Until);
        let (wish, evacuation) = {
            let mut index = self.index();
            match index.wish(&pod) {
                Ok(Some(wish)) => (wish, index.evacuation(uid).cloned()),
                Ok(None) => return Ok(Next::Rest(rest)),
                Err(Unsettled) => return Ok(self.later()),
            }
        };
        match (wish, evacuation) {
            (Wish::Evacuate, None) => self.create(&pod, now).await,
            (Wish::Evacuate, Some(seen)) if seen.of() == EvacuationOf::Us => Ok(Next::Rest(rest)),
            // It takes no new finalizers: when it is gone, there will be another.
            (Wish::Evacuate, Some(seen)) if seen.deleting => Ok(Next::Rest(rest)),
            (Wish::Evacuate, Some(seen)) => self.write_finalizers(uid, &seen, true).await,
            (Wish::Withdraw, Some(seen)) if seen.of() == EvacuationOf::Us => {
                self.write_finalizers(uid, &seen, false).await
            }
            (Wish::Withdraw, _) => Ok(Next::Rest(rest)),
        }
    }

    async fn create(&self, pod: &Pod, now: Timestamp) -> kube::Result<Next> {
        if let Err(until) = self.index().making(pod.uid, now) {
            return Ok(Next::Rest(Outcome::Until(until)));
        }
        let made = evacuation_for(&pod.metadata(), instigator::NODE_MAINTENANCE, &BTreeSet::new());
        let (evacuation, violations) = match made {
            Ok(made) => made,
            Err(error) => {
                warn!(namespace = %pod.namespace, pod = %pod.name, %error, "a pod cannot be evacuated");
                return Ok(Next::Rest(Outcome::Done));
            }
        };
        for violation in violations {
            warn!(namespace = %pod.namespace, pod = %pod.name, %violation, "an annotation is ignored");
        }
        match act::create_evacuation(&self.clients.retrying, &evacuation).await {
            Ok(Written::Done(())) => Ok(Next::Rest(Outcome::Done)),
            // There is one that we have not seen yet; or its namespace is gone, and the pod with it.
            Ok(Written::Outdated | Written::Gone) => {
                self.index().not_made(pod.uid);
                Ok(Next::Rest(Outcome::Failed))
            }
            Err(error) => {
                self.index().not_made(pod.uid);
                Err(error)
            }
        }
    }

    async fn write_finalizers(&self, pod: Uid, seen: &EvacuationSeen, ours: bool) -> kube::Result<Next> {
        let finalizers = seen.finalizers_with_ours(ours);
        match act::write_finalizers(&self.clients.retrying, seen, &finalizers).await? {
            Written::Done(evacuation) => {
                let (now, pods) = (self.clock.now(), self.pods.read());
                let seen = EvacuationSeen::new(evacuation);
                self.tell(|index| index.refresh_evacuation(pod, seen, &pods, now));
                Ok(Next::Rest(Outcome::Done))
            }
            Written::Outdated => Ok(Next::Rest(Outcome::Failed)),
            Written::Gone => Ok(Next::Rest(Outcome::Done)),
        }
    }

    async fn maintenance(&self, name: &Arc<str>) -> kube::Result<Next> {
        let view = self.index().maintenance(name);
        let (seen, plan) = match view {
            Ok(Some(view)) => view,
            Ok(None) => return Ok(Next::Rest(Outcome::Done)),
            Err(Unsettled) => return Ok(self.later()),
        };
        let client = &self.clients.retrying;
        let life = seen.life(plan.nodes_unreleased);
        let step = stage::next(life);
        debug!(%name, ?step, "looked at a maintenance");
        let patch = match step {
            Some(Step::AddFinalizer) => json!({"metadata": {"finalizers": seen.finalizers_with_ours(true)}}),
            Some(Step::RemoveFinalizer) => {
                json!({"metadata": {"finalizers": seen.finalizers_with_ours(false)}})
            }
            Some(Step::SetStage(stage)) => json!({"spec": {"stage": stage}}),
            Some(Step::Begin(stage)) => return self.write_status(name, &seen, &plan, stage, true).await,
            None => return self.write_status(name, &seen, &plan, stage::planned(life), false).await,
        };
        let written = act::write_maintenance(client, &seen, patch).await?;
        if life.deleting && step == Some(Step::RemoveFinalizer) && matches!(written, Written::Done(_)) {
            // With the last finalizer it is gone; if somebody else has one, the watch will tell.
            return Ok(Next::Rest(Outcome::Done));
        }
        Ok(self.take(written))
    }

    async fn write_status(
        &self,
        name: &Arc<str>,
        seen: &MaintenanceSeen,
        plan: &MaintenancePlan,
        stage: Stage,
        begins: bool,
    ) -> kube::Result<Next> {
        let (now, none) = (self.clock.now(), NodeMaintenanceStatus::default());
        let old = seen.object.status.as_ref().unwrap_or(&none);
        let generation = seen.object.metadata.generation;
        let new = status::status(status::Context { old, generation, stage, now }, plan);
        if new == *old {
            return Ok(Next::Rest(Outcome::Done));
        }
        let allowed = self.index().throttle.ask(&Work::Maintenance(name.clone()), now);
        if let (Err(when), false) = (allowed, begins) {
            return Ok(Next::Rest(Outcome::Until(when)));
        }
        let written = act::write_status(&self.clients.retrying, seen, json!(new)).await?;
        if matches!(written, Written::Done(_)) {
            self.metrics.status_written(old, &new, now);
            let forwarded = {
                let mut index = self.index();
                status::fast_forwarded(plan, index.forwarded.entry(name.clone()).or_default())
            };
            for notice in status::notices(old, &new).into_iter().chain(forwarded) {
                self.events.publish(news::of(&seen.object, notice));
            }
        }
        Ok(self.take(written))
    }

    /// Takes in what the API server answered to a write.
    fn take(&self, written: Written<Option<NodeMaintenance>>) -> Next {
        match written {
            Written::Done(Some(maintenance)) => {
                self.tell(|index| index.refresh_maintenance(maintenance));
                Next::Again
            }
            // The watch will tell.
            Written::Done(None) | Written::Gone => Next::Rest(Outcome::Done),
            Written::Outdated => Next::Rest(Outcome::Failed),
        }
    }

    /// The planner is behind; who asked is called again when it is not.
    fn later(&self) -> Next {
        self.behind.notify_one();
        Next::Rest(Outcome::Done)
    }
}

//! The state of the cluster: the objects as last observed, and the planner. Synchronous code: `watch` applies changes,
//! `reconcile` queries. Pods are in the pod cache, which is passed to the methods that need them.

mod pods;
mod returns;
mod volumes;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use haulout_api_types::drain_rules::DrainRules;
use haulout_api_types::names::reason;
use haulout_api_types::selector::SelectorError;
use haulout_api_types::{DrainRule, NodeMaintenance};
use haulout_drain_planner::cordon::{self, NodeChanges};
use haulout_drain_planner::facts::{Blocked, NodeFacts, PodFacts};
use haulout_drain_planner::plan::ServedPodTypes;
use haulout_drain_planner::{Desired, MaintenancePlan, NodePlan, Planner, PodScope, Summary};
use haulout_service_runtime::access::lease_name;
use haulout_service_runtime::pods::{Change, LabelSet, Pod, PodIndex, Uid};
use haulout_service_runtime::queue::id_of;
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt as _;

use self::pods::PodState;
use crate::observed::{
    ObservedAttachment, ObservedEvacuation, ObservedMaintenance, ObservedNode, ObservedOwnPod,
};
use crate::writes::{Failure, WriteLog};

/// Maximum number of planner steps while the lock is held.
const MAX_PLANNER_STEPS: usize = 64;
/// How long an Evacuation that was created may be missing from the watch before it is created again.
const CREATE_TIMEOUT: SignedDuration = SignedDuration::from_secs(10);
/// The blocker message of a node on which another program reverts our changes.
const CHANGE_REVERTED: &str =
    "another program reverts each change of the node; find out what changes its annotations and conditions";

/// A key of the work queue.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Work {
    /// The cordon, annotations and conditions of a node.
    Node(Arc<str>),
    /// The lifecycle and status of a maintenance.
    Maintenance(Arc<str>),
    /// The Evacuation of a pod.
    Pod(PodRef),
}

/// A pod in the work queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PodRef {
    /// Its UID.
    pub uid: Uid,
    /// The hash of its namespace, whose admission webhooks may be slow.
    pub namespace: u64,
}

impl PodRef {
    /// The reference to a pod.
    pub fn of(pod: &Pod) -> Self {
        Self { uid: pod.uid, namespace: id_of(&pod.namespace) }
    }
}

impl Work {
    /// Nodes, maintenances and pods take turns, so that very many pods do not delay a cordon.
    pub fn lane(&self) -> u64 {
        match self {
            Self::Node(_) => 0,
            Self::Maintenance(_) => 1,
            Self::Pod(_) => 2,
        }
    }

    /// Evacuations of one namespace share its admission webhooks.
    pub fn group(&self) -> Option<u64> {
        match self {
            Self::Pod(pod) => Some(pod.namespace),
            Self::Node(_) | Self::Maintenance(_) => None,
        }
    }
}

/// The planner has not processed all changes yet. The key is returned by [`State::take_changed`] once it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotConverged;

/// Namespace and name of a PersistentVolumeClaim.
pub type Claim = (Arc<str>, Box<str>);

/// A maintenance that cannot be parsed, for example after a downgrade.
#[derive(Clone, Debug)]
pub struct UnreadableMaintenance {
    /// Its UID.
    pub uid: Arc<str>,
    /// The object, if it can be deserialized.
    pub object: Option<Arc<NodeMaintenance>>,
    /// Why it cannot be parsed.
    pub error: String,
}

/// See the [module](self).
pub struct State {
    served: ServedPodTypes,
    planner: Planner<LabelSet>,
    nodes: HashMap<Arc<str>, ObservedNode>,
    pub(crate) maintenances: BTreeMap<Arc<str>, ObservedMaintenance>,
    /// Unreadable maintenances. Nodes whose annotation lists one of them are not released.
    pub(crate) unreadable: BTreeMap<Arc<str>, UnreadableMaintenance>,
    /// Everything about pods that is not in the pod cache.
    pods: PodState,
    /// Evacuations that were created but not yet delivered by the watch, with the time after which they are created again.
    pending_creates: HashMap<Uid, Timestamp>,
    /// `None` for an unreadable DrainRule.
    rules: BTreeMap<String, Option<DrainRule>>,
    node_writes: WriteLog<Arc<str>>,
    pub(crate) maintenance_writes: WriteLog<Arc<str>>,
    /// Since when the evacuation controller has no leader.
    no_leader_since: Option<Timestamp>,
    /// Keys to reconcile once the planner has converged.
    pending: BTreeSet<Work>,
    /// For each maintenance, those that are reported to fast-forward it.
    pub(crate) forwarded: HashMap<Arc<str>, BTreeSet<Arc<str>>>,
    /// The last holders of each node. They get the event when the node is released.
    pub(crate) holders: HashMap<Arc<str>, Vec<Arc<str>>>,
    /// Nodes for which ignored volumes have been reported.
    pub(crate) volumes_ignored: BTreeSet<Arc<str>>,
}

/// Whether a change of a node may be written now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MayWrite {
    /// Now.
    Now,
    /// At this time. No pod waits for the change.
    Later(Timestamp),
    /// Not before this time. No pod of the node is asked to leave before.
    Blocked(Timestamp),
}

impl State {
    /// An empty state for an installation that serves these pod types.
    pub fn new(served: ServedPodTypes, now: Timestamp) -> Self {
        Self {
            served,
            planner: Planner::new(served),
            nodes: HashMap::new(),
            maintenances: BTreeMap::new(),
            unreadable: BTreeMap::new(),
            pods: PodState::new(now),
            pending_creates: HashMap::new(),
            rules: BTreeMap::new(),
            node_writes: WriteLog::new(reason::NODE_UPDATE_REJECTED, "the node"),
            maintenance_writes: WriteLog::new(reason::MAINTENANCE_UPDATE_REJECTED, "the NodeMaintenance"),
            no_leader_since: None,
            pending: BTreeSet::new(),
            forwarded: HashMap::new(),
            holders: HashMap::new(),
            volumes_ignored: BTreeSet::new(),
        }
    }

    /// Runs some steps of the planner. Returns whether it has converged.
    pub fn converge(&mut self, pods: &PodIndex, now: Timestamp) -> bool {
        let Self { planner, nodes, pods: known, .. } = self;
        let mut read = reader(known, nodes, pods, now);
        (0..MAX_PLANNER_STEPS).any(|_| !planner.converge_one(now, &mut read))
    }

    /// The keys to reconcile, once the planner has converged.
    pub fn take_changed(&mut self) -> BTreeSet<Work> {
        let mut changed = std::mem::take(&mut self.pending);
        changed.extend(self.planner.take_changed_nodes().into_iter().map(Work::Node));
        changed.extend(self.planner.take_changed_maintenances().into_iter().map(Work::Maintenance));
        changed
    }

    fn converged(
        &mut self,
        pods: &PodIndex,
        now: Timestamp,
        key: impl FnOnce() -> Work,
    ) -> Result<(), NotConverged> {
        if self.converge(pods, now) {
            return Ok(());
        }
        self.pending.insert(key());
        Err(NotConverged)
    }

    /// A node and its plan; `None` if there is no such node.
    pub fn node(
        &mut self,
        name: &Arc<str>,
        pods: &PodIndex,
        now: Timestamp,
    ) -> Result<Option<(ObservedNode, NodePlan)>, NotConverged> {
        self.planner.reassess_if_due(name, now);
        self.converged(pods, now, || Work::Node(name.clone()))?;
        let found = self.nodes.get(name).zip(self.planner.node(name));
        Ok(found.map(|(observed, plan)| (observed.clone(), plan)))
    }

    /// A maintenance and its plan; `None` if there is no such maintenance or it was never readable.
    pub fn maintenance(
        &mut self,
        name: &Arc<str>,
        pods: &PodIndex,
        now: Timestamp,
    ) -> Result<Option<(ObservedMaintenance, MaintenancePlan)>, NotConverged> {
        self.converged(pods, now, || Work::Maintenance(name.clone()))?;
        let found = self.maintenances.get(name).zip(self.planner.maintenance(name));
        Ok(found.map(|(observed, mut plan)| {
            if let Some(since) = self.no_leader_since.filter(|_| plan.counts.to_evacuate > 0) {
                plan.block(&evacuation_controller_unavailable(since));
            }
            if let Some(failed) = self.maintenance_writes.blocked(name) {
                plan.block(&failed);
            }
            (observed.clone(), plan)
        }))
    }

    /// The desired state of a pod's Evacuation, if any, and the observed Evacuation.
    pub fn pod(
        &mut self,
        pod: &Pod,
        pods: &PodIndex,
        now: Timestamp,
    ) -> Result<(Option<Desired>, Option<ObservedEvacuation>), NotConverged> {
        self.converged(pods, now, || Work::Pod(PodRef::of(pod)))?;
        let desired = pod.node.as_ref().and_then(|node| self.planner.desired(node, pod.uid));
        Ok((desired, self.pods.evacuations.get(&pod.uid).cloned()))
    }

    /// The pods of a node whose Evacuations have to be written now.
    pub fn pods_to_reconcile(&self, node: &str, pods: &PodIndex, now: Timestamp) -> Vec<PodRef> {
        let created = |uid: &Uid| self.pending_creates.get(uid).is_some_and(|until| now < *until);
        let in_backoff = |uid: &Uid| self.pods.writes.backoff_until(uid, now).is_some();
        let due = self.planner.to_reconcile(node).filter(|uid| !created(uid) && !in_backoff(uid));
        due.filter_map(|uid| pods.get(uid)).map(|pod| PodRef::of(pod)).collect()
    }

    /// Records that an Evacuation is about to be created for a pod. If it was created already, returns how long to wait for the
    /// watch.
    pub fn begin_create(&mut self, pod: Uid, now: Timestamp) -> Result<(), Timestamp> {
        if let Some(until) = self.pending_creates.get(&pod).filter(|until| now < **until) {
            return Err(*until);
        }
        self.pending_creates.insert(pod, now.saturating_add(CREATE_TIMEOUT).unwrap_or(Timestamp::MAX));
        Ok(())
    }

    /// When the Evacuation of a pod may be written again, if it is in backoff.
    pub fn pod_backoff_until(&self, pod: Uid, now: Timestamp) -> Option<Timestamp> {
        self.pods.writes.backoff_until(&pod, now)
    }

    /// The claims of these pods that have to be looked up: their volume is not known, or they were unbound at the last lookup.
    pub fn claims_to_look_up(&self, pods: &[Arc<Pod>], now: Timestamp) -> BTreeSet<Claim> {
        self.pods.volumes.claims_to_look_up(pods, now)
    }

    /// When the next unbound claim of these pods has to be looked up again.
    pub fn next_claim_lookup(&self, pods: &[Arc<Pod>]) -> Option<Timestamp> {
        self.pods.volumes.next_claim_lookup(pods)
    }

    /// The persistent volumes of a node, or of these pods on it, whose names in `volumesAttached` have to be looked up.
    pub fn handles_to_look_up(&self, node: &str, pods: &[Arc<Pod>]) -> BTreeSet<Arc<str>> {
        let reported = self.nodes.get(node).is_some_and(|observed| !observed.volumes.is_empty());
        if reported { self.pods.volumes.handles_to_look_up(node, pods) } else { BTreeSet::new() }
    }

    /// Numbers over all nodes.
    pub fn summary(&self) -> Summary {
        let mut summary = self.planner.summary();
        if self.no_leader_since.is_some() && summary.pending + summary.evacuating > 0 {
            summary.blockers.insert(reason::EVACUATION_CONTROLLER_UNAVAILABLE.into(), 1);
        }
        summary
    }

    /// Applies a pod that was created, changed or deleted.
    pub fn apply_pod(&mut self, change: &Change, now: Timestamp) {
        let Change { old, new } = change;
        let node_of = |pod: &Option<Arc<Pod>>| pod.as_ref().and_then(|pod| pod.node.clone());
        let (before, after) = (node_of(old), node_of(new));
        match (old, new) {
            (_, Some(pod)) => {
                let node = after.as_deref().unwrap_or_default();
                if let Some((observed, drain_started)) =
                    self.nodes.get(node).zip(self.planner.drain_started(node))
                {
                    let uncordoned = observed.markers.was_uncordoned();
                    self.pods.returns.observe(pod, before != after, drain_started, uncordoned, now);
                }
            }
            (Some(pod), None) => {
                self.pods.delete(pod, now);
                self.pending_creates.remove(&pod.uid);
            }
            (None, None) => {}
        }
        let has_evacuation = change.pod().is_some_and(|pod| self.pods.evacuations.contains_key(&pod.uid));
        for node in [&before, &after].into_iter().flatten() {
            self.planner.pod_changed(node, has_evacuation);
        }
    }

    /// Something about a pod has changed that is not in the pod cache.
    fn pod_changed(&mut self, pod: Option<&Pod>) {
        if let Some(node) = pod.and_then(|pod| pod.node.as_ref()) {
            self.planner.pod_changed(node, true);
        }
    }

    /// Records that the Evacuation of a pod could not be written. Returns when to retry.
    pub fn pod_failed(
        &mut self,
        pod: &Pod,
        failure: Failure,
        pods: &PodIndex,
        now: Timestamp,
        jitter: f64,
    ) -> Timestamp {
        self.pending_creates.remove(&pod.uid);
        let retry = self.pods.writes.failed(pod.uid, failure, now, jitter);
        if pods.get(pod.uid).is_none() {
            // Nothing would remove the failure.
            self.pods.writes.forget(&pod.uid);
        }
        self.pod_changed(Some(pod));
        retry
    }

    /// Records that the Evacuation of a pod was written, or does not have to be.
    pub fn pod_succeeded(&mut self, pod: &Pod) {
        if self.pods.writes.succeeded(&pod.uid) {
            self.pod_changed(Some(pod));
        }
    }

    /// Applies one of Haulout's own pods; `None` if it was deleted.
    pub fn apply_own_pod(&mut self, name: Arc<str>, observed: Option<ObservedOwnPod>, pods: &PodIndex) {
        for uid in self.pods.apply_own_pod(name, observed) {
            self.pod_changed(pods.get(uid).map(AsRef::as_ref));
        }
    }

    /// Applies the Evacuation of a pod.
    pub fn apply_evacuation(&mut self, pod: Uid, observed: ObservedEvacuation, pods: &PodIndex) {
        self.pending_creates.remove(&pod);
        let known = self.pods.evacuations.get(&pod);
        if known.is_some_and(|known| known.version.supersedes(&observed.version)) {
            return;
        }
        self.pods.evacuations.insert(pod, observed);
        self.pod_changed(pods.get(pod).map(AsRef::as_ref));
    }

    /// Applies the API server's answer to a write, if the object still exists.
    pub fn refresh_evacuation(&mut self, pod: Uid, observed: ObservedEvacuation, pods: &PodIndex) {
        let known = self.pods.evacuations.get(&pod);
        if known.is_some_and(|known| known.version.is_older_than(&observed.version)) {
            self.apply_evacuation(pod, observed, pods);
        }
    }

    /// Deletes an Evacuation.
    pub fn delete_evacuation(&mut self, pod: Uid, pods: &PodIndex) {
        self.pending_creates.remove(&pod);
        if self.pods.evacuations.remove(&pod).is_some() {
            self.pod_changed(pods.get(pod).map(AsRef::as_ref));
        }
    }

    /// Records the result of looking up the volume of a claim of a pod on this node.
    pub fn set_claim_volume(
        &mut self,
        claim: Claim,
        volume: Option<Arc<str>>,
        node: &str,
        pods: &[Arc<Pod>],
        now: Timestamp,
    ) {
        let names = |pod: &Arc<Pod>| pod.namespace == claim.0 && pod.claims.contains(&claim.1);
        // If its pods are gone meanwhile, the claim would never be removed.
        if pods.iter().any(names) {
            self.pods.volumes.set_claim_volume(claim, volume, now);
            self.planner.pod_changed(node, true);
        }
    }

    /// Records the name of a volume in `volumesAttached`; `None` if it has none there.
    pub fn set_volume_handle(&mut self, volume: Arc<str>, handle: Option<String>, node: &str) {
        self.pods.volumes.set_volume_handle(volume, handle.map(Into::into));
        self.planner.pod_changed(node, true);
        self.plan_node(node);
    }

    /// Applies a VolumeAttachment; `None` if it was deleted or nothing is attached.
    pub fn apply_attachment(&mut self, name: Arc<str>, observed: Option<ObservedAttachment>) {
        for node in self.pods.volumes.apply_attachment(name, observed) {
            self.plan_node(&node);
        }
    }

    /// Applies a node.
    pub fn apply_node(&mut self, name: Arc<str>, observed: ObservedNode) {
        let known = self.nodes.get(&name);
        if known.is_some_and(|known| known.version.supersedes(&observed.version)) {
            return;
        }
        self.nodes.insert(name.clone(), observed);
        self.plan_node(&name);
    }

    /// Applies the API server's answer to a write, if the node still exists.
    pub fn refresh_node(&mut self, name: &Arc<str>, observed: ObservedNode) {
        if self.nodes.get(name).is_some_and(|known| known.version.is_older_than(&observed.version)) {
            self.apply_node(name.clone(), observed);
        }
    }

    /// Passes the current state of a node to the planner.
    fn plan_node(&mut self, name: &str) {
        let Some((name, observed)) = self.nodes.get_key_value(name) else { return };
        let status = observed.markers.status().unwrap_or_default();
        self.planner.apply_node(NodeFacts {
            name: name.clone(),
            labels: observed.labels.clone(),
            cordoned: observed.markers.unschedulable,
            cordon_due: observed.markers.cordon_due(),
            held_since: observed.markers.held_since(),
            has_markers: observed.markers.has_markers(),
            taints: observed.taints.clone(),
            volumes: Arc::new(self.pods.volumes.attached_to(name, &observed.volumes)),
            failed_write: self.node_writes.blocked(name),
            ignores_volumes: observed.markers.ignores_volumes(),
            reached: cordon::reached(&status),
            volume_wait: status.volume_wait,
            maintenances: status.maintenances.map(Into::into),
        });
    }

    /// Deletes a node.
    pub fn delete_node(&mut self, name: &Arc<str>, pods: &PodIndex, now: Timestamp) {
        let Self { planner, nodes, pods: known, .. } = self;
        planner.delete_node(name, now, &mut reader(known, nodes, pods, now));
        self.nodes.remove(name);
        self.node_writes.forget(name);
        self.holders.remove(name);
        self.pods.returns.forget(name);
        self.volumes_ignored.remove(name);
    }

    /// Records that a node could not be written. Returns when to retry.
    pub fn node_failed(
        &mut self,
        name: &Arc<str>,
        failure: Failure,
        now: Timestamp,
        jitter: f64,
    ) -> Timestamp {
        let retry = self.node_writes.failed(name.clone(), failure, now, jitter);
        if !self.nodes.contains_key(name) {
            // A new node with this name would inherit the failure.
            self.node_writes.forget(name);
        }
        self.plan_node(name);
        retry
    }

    /// Whether these changes of a node may be written now. If so, the write counts for the rate limit.
    pub fn may_write_node(&mut self, name: &Arc<str>, changes: &NodeChanges, now: Timestamp) -> MayWrite {
        if let Some(retry) = self.node_writes.backoff_until(name, now) {
            return MayWrite::Blocked(retry);
        }
        let reverted = self.node_writes.rewrite_at(name, changes.fingerprint(), now);
        if let Some(retry) = reverted.filter(|_| changes.urgent) {
            self.node_writes.delay(name.clone(), Failure::permanent(&CHANGE_REVERTED), now, retry);
            self.plan_node(name);
            return MayWrite::Blocked(retry);
        }
        let allowed = self.node_writes.try_acquire(name.clone(), 1, now);
        allowed.err().filter(|_| !changes.urgent).max(reverted).map_or(MayWrite::Now, MayWrite::Later)
    }

    /// Records that these changes of a node were written.
    pub fn node_written(&mut self, name: &Arc<str>, changes: &NodeChanges, now: Timestamp) {
        self.node_writes.written(name.clone(), changes.fingerprint(), now);
        self.node_succeeded(name);
    }

    /// Records that a node was written, or does not have to be.
    pub fn node_succeeded(&mut self, name: &Arc<str>) {
        if self.node_writes.succeeded(name) {
            self.plan_node(name);
        }
    }

    /// Records that a maintenance could not be written.
    pub fn maintenance_failed(&mut self, name: &Arc<str>, failure: Failure, now: Timestamp, jitter: f64) {
        // A new maintenance with this name would inherit the failure of a deleted one.
        if self.maintenances.contains_key(name) || self.unreadable.contains_key(name) {
            self.maintenance_writes.failed(name.clone(), failure, now, jitter);
        }
    }

    /// Sets since when the evacuation controller has no leader; `None` if it has one.
    pub fn apply_evacuation_controller(&mut self, absent_since: Option<Timestamp>) {
        if std::mem::replace(&mut self.no_leader_since, absent_since) != absent_since {
            self.pending.extend(self.maintenances.keys().cloned().map(Work::Maintenance));
        }
    }

    /// Applies a maintenance. Returns an error if it is unreadable.
    pub fn apply_maintenance(&mut self, object: NodeMaintenance) -> Result<(), SelectorError> {
        let name: Arc<str> = object.name_any().into();
        // Changes that the planner does not use, such as finalizers, have to be reconciled too.
        self.pending.insert(Work::Maintenance(name.clone()));
        let observed = match ObservedMaintenance::new(object.clone(), self.served) {
            Ok(observed) => observed,
            Err(error) => {
                let uid = object.metadata.uid.clone().unwrap_or_default();
                self.mark_unreadable(name, &uid, Some(object), error.to_string());
                return Err(error);
            }
        };
        let known = self.maintenances.get(&name);
        if known.is_some_and(|known| known.version.supersedes(&observed.version)) {
            return Ok(());
        }
        self.planner.apply_maintenance(observed.facts(&name));
        self.maintenances.insert(name.clone(), observed);
        self.mark_readable(&name);
        Ok(())
    }

    /// Applies the API server's answer to a write, if the maintenance still exists.
    pub fn refresh_maintenance(&mut self, object: NodeMaintenance) {
        let known = self.maintenances.get(object.name_any().as_str());
        if known.is_some_and(|known| object.metadata.uid.as_deref() == Some(&*known.version.uid)) {
            // An error was reported when the maintenance was observed by the watch.
            let _ = self.apply_maintenance(object);
        }
    }

    /// Marks a maintenance as unreadable. Its last readable state stays in effect, and nodes whose annotation lists it are not
    /// released.
    pub fn mark_unreadable(
        &mut self,
        name: Arc<str>,
        uid: &str,
        object: Option<NodeMaintenance>,
        error: String,
    ) {
        let unreadable = UnreadableMaintenance { uid: uid.into(), object: object.map(Arc::new), error };
        self.unreadable.insert(name, unreadable);
        self.plan_unreadable();
    }

    fn mark_readable(&mut self, name: &str) {
        if self.unreadable.remove(name).is_some() {
            self.plan_unreadable();
        }
    }

    fn plan_unreadable(&mut self) {
        let uids = self.unreadable.values().map(|unreadable| unreadable.uid.clone()).collect();
        self.planner.set_unreadable(uids);
    }

    /// Deletes a maintenance.
    pub fn delete_maintenance(&mut self, name: &Arc<str>) {
        self.maintenances.remove(name);
        self.maintenance_writes.forget(name);
        self.forwarded.remove(name);
        self.planner.delete_maintenance(name);
        self.mark_readable(name);
    }

    /// Applies the labels of a namespace; `None` if it was deleted.
    pub fn apply_namespace(&mut self, name: Arc<str>, labels: Option<LabelSet>) {
        self.planner.apply_namespace(name, labels);
    }

    /// Applies a DrainRule; `None` if it is unreadable. Returns an error if a selector is invalid.
    pub fn apply_rule(&mut self, name: String, rule: Option<DrainRule>) -> Result<(), SelectorError> {
        let same = |known: &Option<DrainRule>| {
            known.as_ref().map(|known| &known.spec) == rule.as_ref().map(|rule| &rule.spec)
        };
        if self.rules.get(&name).is_some_and(same) {
            return Ok(());
        }
        self.rules.insert(name.clone(), rule);
        let invalid = self.plan_rules();
        invalid.into_iter().find(|(of, _)| *of == name).map_or(Ok(()), |(_, error)| Err(error))
    }

    /// Deletes a DrainRule.
    pub fn delete_rule(&mut self, name: &str) {
        if self.rules.remove(name).is_some() {
            self.plan_rules();
        }
    }

    fn plan_rules(&mut self) -> Vec<(String, SelectorError)> {
        let unreadable = self.rules.iter().filter(|(_, rule)| rule.is_none()).map(|(name, _)| name.as_str());
        let (rules, invalid) = DrainRules::new(self.rules.values().flatten());
        self.planner.apply_rules(rules.with_unreadable(unreadable));
        invalid
    }
}

/// The function that reads the pods of a node for the planner.
fn reader<'a>(
    known: &'a mut PodState,
    nodes: &'a HashMap<Arc<str>, ObservedNode>,
    pods: &'a PodIndex,
    now: Timestamp,
) -> impl FnMut(&Arc<str>, PodScope) -> Vec<PodFacts<LabelSet>> {
    move |name, scope| match nodes.get(name) {
        Some(node) => known.facts(name, scope, node, pods.on_node(name), now),
        None => Vec::new(),
    }
}

/// The blocker while the evacuation controller has no leader.
fn evacuation_controller_unavailable(since: Timestamp) -> Blocked {
    let message = format!(
        "no evacuation controller has renewed its Lease {} for one minute, so no evacuator is activated and no pod is evicted; check its pods and logs",
        lease_name("evacuation-controller")
    );
    let reason = reason::EVACUATION_CONTROLLER_UNAVAILABLE;
    Blocked { reason: reason.into(), message: message.into(), since: Some(since) }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;

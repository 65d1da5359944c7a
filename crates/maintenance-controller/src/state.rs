//! What is known of the cluster: the objects as they were last observed, and the planner. Plain synchronous code: `watch`
//! says what happens, `reconcile` asks what to do. Pods are read from the pod cache, which every method gets that needs them.

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
use haulout_drain_planner::placement::NodeChoice;
use haulout_drain_planner::plan::Served;
use haulout_drain_planner::{Desired, MaintenancePlan, NodePlan, Planner, Summary, Which};
use haulout_service_runtime::access::lease_name;
use haulout_service_runtime::pods::{Change, LabelSet, Pod, PodIndex, Uid};
use haulout_service_runtime::queue::number_of;
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt as _;

use self::pods::Pods;
use crate::seen::{AttachmentSeen, EvacuationSeen, MaintenanceSeen, NodeSeen};
use crate::writes::{Failure, WriteLog};

/// How many steps of the planner may be made at once by somebody who waits for its answer.
const STEPS: usize = 64;
/// How long an Evacuation that was created may be missing from the watch before it is created again.
const CREATE_TIMEOUT: SignedDuration = SignedDuration::from_secs(10);
/// What is said of a node on which somebody undoes what is written to it.
const UNDONE: &str = "it takes the change, and somebody undoes it each time: find out who removes or changes annotations and conditions of the node";

/// What is to be worked on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Work {
    /// The marks of a node.
    Node(Arc<str>),
    /// The life and status of a maintenance.
    Maintenance(Arc<str>),
    /// The Evacuation of a pod.
    Pod(PodRef),
}

/// A pod to be worked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PodRef {
    /// Which one.
    pub uid: Uid,
    /// The number of its namespace, whose admission webhooks may be slow.
    pub namespace: u64,
}

impl PodRef {
    /// That of a pod.
    pub fn of(pod: &Pod) -> Self {
        Self { uid: pod.uid, namespace: number_of(&pod.namespace) }
    }
}

impl Work {
    /// Nodes, maintenances and pods take turns, so that very many pods hold up no cordon.
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

/// The planner has not caught up with what happened. Whoever asked is among [`State::take_changed`] when it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsettled;

/// A claim that pods name: its namespace and name.
pub type Claim = (Arc<str>, Box<str>);

/// A maintenance that exists and cannot be followed, as may be after a downgrade.
#[derive(Clone, Debug)]
pub struct Unfollowed {
    /// Its UID.
    pub uid: Arc<str>,
    /// The object, if at least that can be read.
    pub object: Option<Arc<NodeMaintenance>>,
    /// What is wrong with it.
    pub why: String,
}

/// See the [module](self).
pub struct State {
    served: Served,
    planner: Planner<LabelSet>,
    nodes: HashMap<Arc<str>, NodeSeen>,
    pub(crate) maintenances: BTreeMap<Arc<str>, MaintenanceSeen>,
    /// Those that cannot be followed. The nodes whose annotation names one of them are not released.
    pub(crate) unfollowed: BTreeMap<Arc<str>, Unfollowed>,
    /// What decides about pods besides the pods themselves.
    pods: Pods,
    /// Evacuations that were created and that the watch has not delivered yet, and until when that is waited for.
    pending_creates: HashMap<Uid, Timestamp>,
    /// `None` for one that cannot be read, as may be after a downgrade.
    rules: BTreeMap<String, Option<DrainRule>>,
    node_writes: WriteLog<Arc<str>>,
    pub(crate) maintenance_writes: WriteLog<Arc<str>>,
    /// Since when no evacuation controller has led, if none does.
    leaderless: Option<Timestamp>,
    /// Who asked while the planner was behind.
    waiting: BTreeSet<Work>,
    /// By whom each maintenance is known to be fast-forwarded.
    pub(crate) forwarded: HashMap<Arc<str>, BTreeSet<Arc<str>>>,
    /// Who last held a node, for what is told when it is released.
    pub(crate) holders: HashMap<Arc<str>, Vec<Arc<str>>>,
    /// Nodes whose volumes are known not to be waited for.
    pub(crate) volumes_ignored: BTreeSet<Arc<str>>,
}

/// When changes of a node may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MayWrite {
    /// Now.
    Now,
    /// At this time. Nothing else waits for them.
    Later(Timestamp),
    /// Not before this time, and no pod is asked to leave before.
    Blocked(Timestamp),
}

impl State {
    /// A state that knows nothing yet, for an installation that serves these pod types.
    pub fn new(served: Served, now: Timestamp) -> Self {
        Self {
            served,
            planner: Planner::new(served),
            nodes: HashMap::new(),
            maintenances: BTreeMap::new(),
            unfollowed: BTreeMap::new(),
            pods: Pods::new(now),
            pending_creates: HashMap::new(),
            rules: BTreeMap::new(),
            node_writes: WriteLog::new(reason::NODE_UPDATE_REFUSED, "the node"),
            maintenance_writes: WriteLog::new(reason::MAINTENANCE_UPDATE_REFUSED, "the NodeMaintenance"),
            leaderless: None,
            waiting: BTreeSet::new(),
            forwarded: HashMap::new(),
            holders: HashMap::new(),
            volumes_ignored: BTreeSet::new(),
        }
    }

    /// Lets the planner go some steps; whether it has caught up with everything.
    pub fn settle(&mut self, pods: &PodIndex, now: Timestamp) -> bool {
        let Self { planner, nodes, pods: known, .. } = self;
        let mut read = reader(known, nodes, pods, now);
        (0..STEPS).any(|_| !planner.settle_one(now, &mut read))
    }

    /// What may look different now, once the planner has caught up.
    pub fn take_changed(&mut self) -> BTreeSet<Work> {
        let mut changed = std::mem::take(&mut self.waiting);
        changed.extend(self.planner.take_changed_nodes().into_iter().map(Work::Node));
        changed.extend(self.planner.take_changed_maintenances().into_iter().map(Work::Maintenance));
        changed
    }

    fn settled(
        &mut self,
        pods: &PodIndex,
        now: Timestamp,
        asks: impl FnOnce() -> Work,
    ) -> Result<(), Unsettled> {
        if self.settle(pods, now) {
            return Ok(());
        }
        self.waiting.insert(asks());
        Err(Unsettled)
    }

    /// A node and what is planned for it; `None` if there is no such node.
    pub fn node(
        &mut self,
        name: &Arc<str>,
        pods: &PodIndex,
        now: Timestamp,
    ) -> Result<Option<(NodeSeen, NodePlan)>, Unsettled> {
        self.planner.wake(name, now);
        self.settled(pods, now, || Work::Node(name.clone()))?;
        let found = self.nodes.get(name).zip(self.planner.node(name));
        Ok(found.map(|(seen, plan)| (seen.clone(), plan)))
    }

    /// A maintenance and how far it has come; `None` if there is none that can be followed.
    pub fn maintenance(
        &mut self,
        name: &Arc<str>,
        pods: &PodIndex,
        now: Timestamp,
    ) -> Result<Option<(MaintenanceSeen, MaintenancePlan)>, Unsettled> {
        self.settled(pods, now, || Work::Maintenance(name.clone()))?;
        let found = self.maintenances.get(name).zip(self.planner.maintenance(name));
        Ok(found.map(|(seen, mut plan)| {
            if let Some(since) = self.leaderless.filter(|_| plan.counts.to_evacuate > 0) {
                plan.block(&without_evacuation_controller(since));
            }
            if let Some(refused) = self.maintenance_writes.blocked(name) {
                plan.block(&refused);
            }
            (seen.clone(), plan)
        }))
    }

    /// What is wanted for a pod, if anything, and its Evacuation.
    pub fn pod(
        &mut self,
        pod: &Pod,
        pods: &PodIndex,
        now: Timestamp,
    ) -> Result<(Option<Desired>, Option<EvacuationSeen>), Unsettled> {
        self.settled(pods, now, || Work::Pod(PodRef::of(pod)))?;
        let desired = pod.node.as_ref().and_then(|node| self.planner.desired(node, pod.uid));
        Ok((desired, self.pods.evacuations.get(&pod.uid).cloned()))
    }

    /// The pods of a node whose Evacuations have to be written now.
    pub fn pods_to_reconcile(&self, node: &str, pods: &PodIndex, now: Timestamp) -> Vec<PodRef> {
        let created = |uid: &Uid| self.pending_creates.get(uid).is_some_and(|until| now < *until);
        let pauses = |uid: &Uid| self.pods.writes.pause(uid, now).is_some();
        let due = self.planner.to_reconcile(node).filter(|uid| !created(uid) && !pauses(uid));
        due.filter_map(|uid| pods.get(uid)).map(|pod| PodRef::of(pod)).collect()
    }

    /// Says that an Evacuation is about to be created for a pod; if that has been done, until when to wait for the watch.
    pub fn begin_create(&mut self, pod: Uid, now: Timestamp) -> Result<(), Timestamp> {
        if let Some(until) = self.pending_creates.get(&pod).filter(|until| now < **until) {
            return Err(*until);
        }
        self.pending_creates.insert(pod, now.saturating_add(CREATE_TIMEOUT).unwrap_or(Timestamp::MAX));
        Ok(())
    }

    /// When to try again to write the Evacuation of a pod, if it is too early.
    pub fn pod_pause(&self, pod: Uid, now: Timestamp) -> Option<Timestamp> {
        self.pods.writes.pause(&pod, now)
    }

    /// The claims of these pods that have to be asked for: their volumes are not known, or they had none when they were
    /// last asked for.
    pub fn unknown_claims(&self, pods: &[Arc<Pod>], now: Timestamp) -> BTreeSet<Claim> {
        self.pods.volumes.unknown_claims(pods, now)
    }

    /// When the next claim of these pods has to be asked for again.
    pub fn next_claim(&self, pods: &[Arc<Pod>]) -> Option<Timestamp> {
        self.pods.volumes.next_claim(pods)
    }

    /// The persistent volumes of a node or of these pods on it whose names in `volumesAttached` have to be known to
    /// tell which are which.
    pub fn unknown_handles(&self, node: &str, pods: &[Arc<Pod>]) -> BTreeSet<Arc<str>> {
        let reported = self.nodes.get(node).is_some_and(|seen| !seen.volumes.is_empty());
        if reported { self.pods.volumes.unknown_handles(node, pods) } else { BTreeSet::new() }
    }

    /// The numbers over all nodes.
    pub fn summary(&self) -> Summary {
        let mut summary = self.planner.summary();
        if self.leaderless.is_some() && summary.pending + summary.evacuating > 0 {
            summary.blockers.insert(reason::EVACUATION_CONTROLLER_UNAVAILABLE.into(), 1);
        }
        summary
    }

    /// A pod has appeared, changed or gone.
    pub fn apply_pod(&mut self, change: &Change, now: Timestamp) {
        let Change { old, new } = change;
        let node_of = |pod: &Option<Arc<Pod>>| pod.as_ref().and_then(|pod| pod.node.clone());
        let (before, after) = (node_of(old), node_of(new));
        match (old, new) {
            (_, Some(pod)) => {
                let node = after.as_deref().unwrap_or_default();
                if let Some((seen, began)) = self.nodes.get(node).zip(self.planner.drain_began(node)) {
                    let uncordoned = seen.marks.was_uncordoned();
                    self.pods.returns.observe(pod, before != after, began, uncordoned, now);
                }
            }
            (Some(pod), None) => {
                self.pods.remove(pod, now);
                self.pending_creates.remove(&pod.uid);
            }
            (None, None) => {}
        }
        let has_evacuation = change.pod().is_some_and(|pod| self.pods.evacuations.contains_key(&pod.uid));
        for node in [&before, &after].into_iter().flatten() {
            self.planner.pod_changed(node, has_evacuation);
        }
    }

    /// What is known of a pod beside the pod itself has changed.
    fn look_at(&mut self, pod: Option<&Pod>) {
        if let Some(node) = pod.and_then(|pod| pod.node.as_ref()) {
            self.planner.pod_changed(node, true);
        }
    }

    /// The Evacuation of a pod could not be written; when to try again.
    pub fn pod_failed(&mut self, pod: &Pod, failure: Failure, now: Timestamp, chance: f64) -> Timestamp {
        self.pending_creates.remove(&pod.uid);
        let retry = self.pods.writes.failed(pod.uid, failure, now, chance);
        self.look_at(Some(pod));
        retry
    }

    /// The Evacuation of a pod was written, or does not have to be.
    pub fn pod_succeeded(&mut self, pod: &Pod) {
        if self.pods.writes.succeeded(&pod.uid) {
            self.look_at(Some(pod));
        }
    }

    /// Takes in a pod of Haulout itself, with the nodes that it asks for; `None` if it is gone.
    pub fn apply_own_pod(&mut self, name: Arc<str>, seen: Option<(Uid, NodeChoice)>, pods: &PodIndex) {
        for uid in self.pods.put_own(name, seen) {
            self.look_at(pods.get(uid).map(AsRef::as_ref));
        }
    }

    /// Takes in an Evacuation of a pod.
    pub fn apply_evacuation(&mut self, pod: Uid, seen: EvacuationSeen, pods: &PodIndex) {
        self.pending_creates.remove(&pod);
        let known = self.pods.evacuations.get(&pod);
        if known.is_some_and(|known| known.version.makes_old(&seen.version)) {
            return;
        }
        self.pods.evacuations.insert(pod, seen);
        self.look_at(pods.get(pod).map(AsRef::as_ref));
    }

    /// Takes in what a write answered, if the object is still there.
    pub fn refresh_evacuation(&mut self, pod: Uid, seen: EvacuationSeen, pods: &PodIndex) {
        let known = self.pods.evacuations.get(&pod);
        if known.is_some_and(|known| known.version.is_followed_by(&seen.version)) {
            self.apply_evacuation(pod, seen, pods);
        }
    }

    /// An Evacuation is gone.
    pub fn delete_evacuation(&mut self, pod: Uid, pods: &PodIndex) {
        self.pending_creates.remove(&pod);
        if self.pods.evacuations.remove(&pod).is_some() {
            self.look_at(pods.get(pod).map(AsRef::as_ref));
        }
    }

    /// The volume of a claim of a pod on this node has been looked up.
    pub fn learn_claim(
        &mut self,
        claim: Claim,
        volume: Option<Arc<str>>,
        node: &str,
        pods: &[Arc<Pod>],
        now: Timestamp,
    ) {
        let names = |pod: &Arc<Pod>| pod.namespace == claim.0 && pod.claims.contains(&claim.1);
        // Those who named it may have gone meanwhile, and nobody would forget it.
        if pods.iter().any(names) {
            self.pods.volumes.learn_claim(claim, volume, now);
            self.planner.pod_changed(node, true);
        }
    }

    /// The name has been looked up that a volume has in `volumesAttached`; empty if it has none there.
    pub fn learn_handle(&mut self, volume: Arc<str>, handle: Option<String>, node: &str) {
        self.pods.volumes.learn_handle(volume, handle.map(Into::into));
        self.planner.pod_changed(node, true);
        self.plan_node(node);
    }

    /// Takes in an attachment of a volume; `None` if it is gone.
    pub fn apply_attachment(&mut self, name: Arc<str>, seen: Option<AttachmentSeen>) {
        for node in self.pods.volumes.put_attachment(name, seen) {
            self.plan_node(&node);
        }
    }

    /// Takes in a node.
    pub fn apply_node(&mut self, name: Arc<str>, seen: NodeSeen) {
        let known = self.nodes.get(&name);
        if known.is_some_and(|known| known.version.makes_old(&seen.version)) {
            return;
        }
        self.nodes.insert(name.clone(), seen);
        self.plan_node(&name);
    }

    /// Takes in what a write answered, if the node is still there.
    pub fn refresh_node(&mut self, name: &Arc<str>, seen: NodeSeen) {
        if self.nodes.get(name).is_some_and(|known| known.version.is_followed_by(&seen.version)) {
            self.apply_node(name.clone(), seen);
        }
    }

    /// Has the planner know a node as it is now.
    fn plan_node(&mut self, name: &str) {
        let Some((name, seen)) = self.nodes.get_key_value(name) else { return };
        let status = seen.marks.status().unwrap_or_default();
        self.planner.put_node(NodeFacts {
            name: name.clone(),
            labels: seen.labels.clone(),
            cordoned: seen.marks.unschedulable,
            cordon_due: seen.marks.cordon_due(),
            held_since: seen.marks.held_since(),
            marked: seen.marks.is_marked(),
            taints: seen.taints.clone(),
            volumes: Arc::new(self.pods.volumes.attached_to(name, &seen.volumes)),
            refused: self.node_writes.blocked(name),
            ignores_volumes: seen.marks.ignores_volumes(),
            reached: cordon::reached(&status),
            volume_wait: status.volume_wait,
            maintenances: status.maintenances.map(Into::into),
        });
    }

    /// A node is gone.
    pub fn delete_node(&mut self, name: &Arc<str>, pods: &PodIndex, now: Timestamp) {
        let Self { planner, nodes, pods: known, .. } = self;
        planner.remove_node(name, now, &mut reader(known, nodes, pods, now));
        self.nodes.remove(name);
        self.node_writes.forget(name);
        self.holders.remove(name);
        self.pods.returns.forget(name);
        self.volumes_ignored.remove(name);
    }

    /// A node could not be written; when to try again.
    pub fn node_failed(
        &mut self,
        name: &Arc<str>,
        failure: Failure,
        now: Timestamp,
        chance: f64,
    ) -> Timestamp {
        let retry = self.node_writes.failed(name.clone(), failure, now, chance);
        self.plan_node(name);
        retry
    }

    /// When these changes of a node may be written. Now is then taken as done.
    pub fn may_write_node(&mut self, name: &Arc<str>, changes: &NodeChanges, now: Timestamp) -> MayWrite {
        if let Some(retry) = self.node_writes.pause(name, now) {
            return MayWrite::Blocked(retry);
        }
        let undone = self.node_writes.undone(name, changes.fingerprint(), now);
        if let Some(retry) = undone.filter(|_| changes.urgent) {
            self.node_writes.wait(name.clone(), Failure::impossible(&UNDONE), now, retry);
            self.plan_node(name);
            return MayWrite::Blocked(retry);
        }
        let allowed = self.node_writes.ask(name.clone(), 1, now);
        allowed.err().filter(|_| !changes.urgent).max(undone).map_or(MayWrite::Now, MayWrite::Later)
    }

    /// These changes of a node were written.
    pub fn node_written(&mut self, name: &Arc<str>, changes: &NodeChanges, now: Timestamp) {
        self.node_writes.written(name.clone(), changes.fingerprint(), now);
        self.node_succeeded(name);
    }

    /// A node was written, or does not have to be.
    pub fn node_succeeded(&mut self, name: &Arc<str>) {
        if self.node_writes.succeeded(name) {
            self.plan_node(name);
        }
    }

    /// Takes in since when no evacuation controller has led, if none does.
    pub fn apply_evacuation_controller(&mut self, absent_since: Option<Timestamp>) {
        if std::mem::replace(&mut self.leaderless, absent_since) != absent_since {
            self.waiting.extend(self.maintenances.keys().cloned().map(Work::Maintenance));
        }
    }

    /// Takes in a maintenance; says what is wrong with one that cannot be followed.
    pub fn apply_maintenance(&mut self, object: NodeMaintenance) -> Result<(), SelectorError> {
        let name: Arc<str> = object.name_any().into();
        // What is not the planner's concern, such as a finalizer, has to be looked at too.
        self.waiting.insert(Work::Maintenance(name.clone()));
        let seen = match MaintenanceSeen::new(object.clone(), self.served) {
            Ok(seen) => seen,
            Err(error) => {
                let uid = object.metadata.uid.clone().unwrap_or_default();
                self.do_not_follow(name, &uid, Some(object), error.to_string());
                return Err(error);
            }
        };
        let known = self.maintenances.get(&name);
        if known.is_some_and(|known| known.version.makes_old(&seen.version)) {
            return Ok(());
        }
        self.planner.put_maintenance(seen.facts(&name));
        self.maintenances.insert(name.clone(), seen);
        self.follow(&name);
        Ok(())
    }

    /// Takes in what a write answered, if the maintenance is still there.
    pub fn refresh_maintenance(&mut self, object: NodeMaintenance) {
        let known = self.maintenances.get(object.name_any().as_str());
        if known.is_some_and(|known| object.metadata.uid.as_deref() == Some(&*known.version.uid)) {
            // What is wrong with it was reported when it was first observed.
            let _ = self.apply_maintenance(object);
        }
    }

    /// Takes note of a maintenance that cannot be followed. What is known of it from before goes on, and nodes whose
    /// annotation names it keep what they have.
    pub fn do_not_follow(&mut self, name: Arc<str>, uid: &str, object: Option<NodeMaintenance>, why: String) {
        self.unfollowed.insert(name, Unfollowed { uid: uid.into(), object: object.map(Arc::new), why });
        self.plan_unfollowed();
    }

    fn follow(&mut self, name: &str) {
        if self.unfollowed.remove(name).is_some() {
            self.plan_unfollowed();
        }
    }

    fn plan_unfollowed(&mut self) {
        let uids = self.unfollowed.values().map(|unfollowed| unfollowed.uid.clone()).collect();
        self.planner.put_unreadable(uids);
    }

    /// A maintenance is gone.
    pub fn delete_maintenance(&mut self, name: &Arc<str>) {
        self.maintenances.remove(name);
        self.maintenance_writes.forget(name);
        self.forwarded.remove(name);
        self.planner.remove_maintenance(name);
        self.follow(name);
    }

    /// Takes in the labels of a namespace; `None` if it is gone.
    pub fn apply_namespace(&mut self, name: Arc<str>, labels: Option<LabelSet>) {
        self.planner.put_namespace(name, labels);
    }

    /// Takes in a drain rule, which cannot be read if it is `None`; says what is wrong with its selectors.
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

    /// A drain rule is gone.
    pub fn delete_rule(&mut self, name: &str) {
        if self.rules.remove(name).is_some() {
            self.plan_rules();
        }
    }

    fn plan_rules(&mut self) -> Vec<(String, SelectorError)> {
        let unreadable = self.rules.iter().filter(|(_, rule)| rule.is_none()).map(|(name, _)| name.as_str());
        let (rules, invalid) = DrainRules::new(self.rules.values().flatten());
        self.planner.put_rules(rules.with_unreadable(unreadable));
        invalid
    }
}

/// Reads the pods of a node for the planner.
fn reader<'a>(
    known: &'a mut Pods,
    nodes: &'a HashMap<Arc<str>, NodeSeen>,
    pods: &'a PodIndex,
    now: Timestamp,
) -> impl FnMut(&Arc<str>, Which) -> Vec<PodFacts<LabelSet>> {
    move |name, which| match nodes.get(name) {
        Some(node) => known.facts(name, which, node, pods.on_node(name), now),
        None => Vec::new(),
    }
}

/// What to say of pods that are to leave while no evacuation controller leads.
fn without_evacuation_controller(since: Timestamp) -> Blocked {
    let message = format!(
        "no evacuation controller has renewed its Lease {} for a minute, so no Evacuation makes progress: look whether its pods run, and at their logs",
        lease_name("evacuation-controller")
    );
    let reason = reason::EVACUATION_CONTROLLER_UNAVAILABLE;
    Blocked { reason: reason.into(), message: message.into(), since: Some(since) }
}

#[cfg(test)]
mod tests;

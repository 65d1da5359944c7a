//! What is known of the cluster: the objects as they were last seen, and the planner that they are fed to. Plain
//! synchronous code; `feed` tells it what happens, `controller` asks it what to do.

mod volumes;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use haulout_api_types::drain_rules::DrainRules;
use haulout_api_types::{DrainRule, NodeMaintenance};
use haulout_service_runtime::pods::{LabelSet, Pod, PodIndex, Uid};
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt as _;
use tracing::warn;

use self::volumes::Volumes;
use crate::cordon::Races;
use crate::facts::{Blocked, EvacuationOf, NodeFacts, PodFacts, PodKey};
use crate::plan::Served;
use crate::planner::{Change, MaintenancePlan, NodePlan, Planner, Summary};
use crate::seen::{AttachmentSeen, EvacuationSeen, MaintenanceSeen, NodeSeen, tolerates_cordon};
use crate::throttle::Throttle;

/// How many steps of the planner may be made at once by somebody who waits for its answer.
const STEPS: usize = 64;
/// How far writes of progress to one object are apart.
const APART: SignedDuration = SignedDuration::from_secs(1);
/// How long an Evacuation that was made may be missing from the watch before it is made again.
const UNSEEN: SignedDuration = SignedDuration::from_secs(10);

/// What is to be worked on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Work {
    /// The marks of a node.
    Node(Arc<str>),
    /// The life and status of a maintenance.
    Maintenance(Arc<str>),
    /// The Evacuation of a pod.
    Pod(Uid),
}

/// What we want of a pod's Evacuation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// That there is one of ours.
    Evacuate,
    /// That it is no longer ours.
    Withdraw,
}

/// The planner has not caught up with what happened. Whoever asked is among [`Index::take_changed`] when it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsettled;

/// A claim that pods name: its namespace and name.
pub type Claim = (Arc<str>, Box<str>);

/// See the [module](self).
pub struct Index {
    served: Served,
    planner: Planner<LabelSet>,
    nodes: HashMap<Arc<str>, NodeSeen>,
    maintenances: BTreeMap<Arc<str>, MaintenanceSeen>,
    evacuations: HashMap<Uid, EvacuationSeen>,
    /// Evacuations that have been made and not been seen, and until when that is no wonder.
    made: HashMap<Uid, Timestamp>,
    rules: BTreeMap<String, DrainRule>,
    volumes: Volumes,
    /// Who asked while the planner was behind.
    waiting: BTreeSet<Work>,
    /// By whom each maintenance is known to be fast-forwarded.
    pub(crate) forwarded: HashMap<Arc<str>, BTreeSet<Arc<str>>>,
    /// Who last held a node, for what is told when it is released.
    pub(crate) holders: HashMap<Arc<str>, Vec<Arc<str>>>,
    pub(crate) races: Races,
    pub(crate) throttle: Throttle<Work>,
}

impl Index {
    /// An index that knows nothing yet, for an installation that serves these pod types.
    pub fn new(served: Served) -> Self {
        Self {
            served,
            planner: Planner::new(served),
            nodes: HashMap::new(),
            maintenances: BTreeMap::new(),
            evacuations: HashMap::new(),
            made: HashMap::new(),
            rules: BTreeMap::new(),
            volumes: Volumes::default(),
            waiting: BTreeSet::new(),
            forwarded: HashMap::new(),
            holders: HashMap::new(),
            races: Races::default(),
            throttle: Throttle::new(APART),
        }
    }

    /// Lets the planner go some steps; whether it has caught up with everything.
    pub fn settle(&mut self) -> bool {
        (0..STEPS).any(|_| !self.planner.settle_one())
    }

    /// What may look different now, once the planner has caught up.
    pub fn take_changed(&mut self) -> BTreeSet<Work> {
        let mut changed = std::mem::take(&mut self.waiting);
        changed.extend(self.planner.take_changed_nodes().into_iter().map(Work::Node));
        changed.extend(self.planner.take_changed_maintenances().into_iter().map(Work::Maintenance));
        changed
    }

    fn settled(&mut self, asks: impl FnOnce() -> Work) -> Result<(), Unsettled> {
        if self.settle() {
            return Ok(());
        }
        self.waiting.insert(asks());
        Err(Unsettled)
    }

    /// A node and what is planned for it; `None` if there is no such node.
    pub fn node(&mut self, name: &Arc<str>) -> Result<Option<(NodeSeen, NodePlan)>, Unsettled> {
        self.settled(|| Work::Node(name.clone()))?;
        let found = self.nodes.get(name).zip(self.planner.node(name));
        Ok(found.map(|(seen, plan)| (seen.clone(), plan)))
    }

    /// A maintenance and how far it has come; `None` if there is none that can be followed.
    pub fn maintenance(
        &mut self,
        name: &Arc<str>,
    ) -> Result<Option<(MaintenanceSeen, MaintenancePlan)>, Unsettled> {
        self.settled(|| Work::Maintenance(name.clone()))?;
        let found = self.maintenances.get(name).zip(self.planner.maintenance(name));
        Ok(found.map(|(seen, plan)| (seen.clone(), plan)))
    }

    /// What is wanted for a pod, if anything. Nobody is asked to leave a node that still takes new pods.
    pub fn wish(&mut self, pod: &Pod) -> Result<Option<Wish>, Unsettled> {
        self.settled(|| Work::Pod(pod.uid))?;
        let Some(node) = &pod.node else { return Ok(None) };
        let Some(plan) = self.planner.node(node) else { return Ok(None) };
        let cordoned = self.nodes.get(node).is_some_and(|seen| seen.marks.unschedulable);
        let uid = pod.uid.to_string();
        let is = |key: &PodKey| *key.uid == *uid;
        Ok(match () {
            () if plan.withdraw.iter().any(is) => Some(Wish::Withdraw),
            () if cordoned && plan.evacuate.iter().any(|evacuate| is(&evacuate.pod)) => Some(Wish::Evacuate),
            () => None,
        })
    }

    /// The pods of a node whose Evacuations are not as its plan wants them.
    pub fn to_do(&self, plan: &NodePlan, now: Timestamp) -> Vec<Uid> {
        let ours = |uid: &Uid| {
            self.evacuations.get(uid).is_some_and(|seen| seen.of() == EvacuationOf::Us)
                || self.made.get(uid).is_some_and(|until| now < *until)
        };
        let evacuate = plan
            .evacuate
            .iter()
            .filter_map(|evacuate| evacuate.pod.uid.parse().ok())
            .filter(|uid| !ours(uid));
        let withdraw = plan.withdraw.iter().filter_map(|key| key.uid.parse().ok());
        evacuate.chain(withdraw).collect()
    }

    /// The Evacuation of a pod.
    pub fn evacuation(&self, pod: Uid) -> Option<&EvacuationSeen> {
        self.evacuations.get(&pod)
    }

    /// Says that an Evacuation is about to be made for a pod; unless that has been done, and until when to
    /// wait until it is seen.
    pub fn making(&mut self, pod: Uid, now: Timestamp) -> Result<(), Timestamp> {
        if let Some(until) = self.made.get(&pod).filter(|until| now < **until) {
            return Err(*until);
        }
        self.made.insert(pod, now.saturating_add(UNSEEN).unwrap_or(Timestamp::MAX));
        Ok(())
    }

    /// It was not made after all.
    pub fn not_made(&mut self, pod: Uid) {
        self.made.remove(&pod);
    }

    /// Takes in a pod, with its Evacuation if it has one; when to look again, if time alone changes something.
    pub fn put_pod(&mut self, pod: &Pod, now: Timestamp) -> Option<Timestamp> {
        let node = pod.node.clone()?;
        let evacuation = self.evacuations.get(&pod.uid);
        let (blocked, wake) = match pod.deletion_timestamp() {
            Some(deadline) if pod.terminating => match Blocked::overdue(deadline, now) {
                Ok(blocked) => (Some(blocked), None),
                Err(when) => (None, Some(when)),
            },
            _ => (evacuation.and_then(|seen| seen.blocked.clone()), None),
        };
        let facts = PodFacts {
            key: key(pod),
            node,
            labels: pod.labels.clone(),
            pod_type: pod.pod_type,
            priority: pod.priority,
            finished: pod.is_finished(),
            terminating: pod.terminating,
            evacuation: evacuation.map(EvacuationSeen::of).unwrap_or_default(),
            volumes: self.volumes.of_pod(pod),
            created: pod.created_at(),
            tolerates_cordon: tolerates_cordon(&pod.tolerations),
            blocked,
        };
        self.planner.apply(Change::Pod(facts));
        wake
    }

    /// A pod is gone.
    pub fn remove_pod(&mut self, pod: &Pod) {
        self.planner.apply(Change::PodGone(key(pod)));
        self.made.remove(&pod.uid);
        self.volumes.forget_claims(pod);
    }

    /// The claims of these pods whose volumes are not known.
    pub fn unknown_claims(&self, pods: &[Arc<Pod>]) -> BTreeSet<Claim> {
        self.volumes.unknown_claims(pods)
    }

    /// The volume of a claim of a pod on this node has been looked up.
    pub fn learn_claim(&mut self, claim: Claim, volume: Option<Arc<str>>, pods: &[Arc<Pod>], now: Timestamp) {
        let names = |pod: &&Arc<Pod>| pod.namespace == claim.0 && pod.claims.contains(&claim.1);
        let concerned: Vec<_> = pods.iter().filter(names).collect();
        // Those who named it may have gone meanwhile, and nobody would forget it.
        if !concerned.is_empty() {
            self.volumes.learn_claim(claim.clone(), volume);
            for pod in concerned {
                self.put_pod(pod, now);
            }
        }
    }

    /// Takes in an Evacuation of a pod.
    pub fn put_evacuation(&mut self, pod: Uid, seen: EvacuationSeen, pods: &PodIndex, now: Timestamp) {
        self.made.remove(&pod);
        let known = self.evacuations.get(&pod);
        if known.is_some_and(|known| known.version.makes_old(&seen.version)) {
            return;
        }
        self.evacuations.insert(pod, seen);
        self.put_again(pod, pods, now);
    }

    /// Takes in what a write answered, if the object is still there.
    pub fn refresh_evacuation(&mut self, pod: Uid, seen: EvacuationSeen, pods: &PodIndex, now: Timestamp) {
        if self.evacuations.get(&pod).is_some_and(|known| known.version.is_followed_by(&seen.version)) {
            self.put_evacuation(pod, seen, pods, now);
        }
    }

    /// An Evacuation is gone.
    pub fn remove_evacuation(&mut self, pod: Uid, pods: &PodIndex, now: Timestamp) {
        self.made.remove(&pod);
        if self.evacuations.remove(&pod).is_some() {
            self.put_again(pod, pods, now);
        }
    }

    fn put_again(&mut self, pod: Uid, pods: &PodIndex, now: Timestamp) {
        if let Some(pod) = pods.get(pod) {
            // Whoever told of the pod itself has planned when to look again.
            let _ = self.put_pod(pod, now);
        }
    }

    /// Takes in a node.
    pub fn put_node(&mut self, name: Arc<str>, seen: NodeSeen) {
        let known = self.nodes.get(&name);
        if known.is_some_and(|known| known.version.makes_old(&seen.version)) {
            return;
        }
        self.nodes.insert(name.clone(), seen);
        self.tell_node(&name);
    }

    /// Takes in what a write answered, if the node is still there.
    pub fn refresh_node(&mut self, name: &Arc<str>, seen: NodeSeen) {
        if self.nodes.get(name).is_some_and(|known| known.version.is_followed_by(&seen.version)) {
            self.put_node(name.clone(), seen);
        }
    }

    fn tell_node(&mut self, name: &Arc<str>) {
        let Some(seen) = self.nodes.get(name) else { return };
        self.planner.apply(Change::Node(NodeFacts {
            name: name.clone(),
            labels: seen.labels.clone(),
            cordoned: seen.marks.unschedulable,
            marked: seen.marks.is_marked(),
            volumes: Arc::new(self.volumes.attached_to(name)),
            reached: seen.reached(),
        }));
    }

    /// A node is gone.
    pub fn remove_node(&mut self, name: &Arc<str>) {
        self.nodes.remove(name);
        self.holders.remove(name);
        self.races.forget(name);
        self.throttle.forget(&Work::Node(name.clone()));
        self.planner.apply(Change::NodeGone(name.clone()));
    }

    /// Takes in a maintenance. One that cannot be followed is left as it was.
    pub fn put_maintenance(&mut self, object: NodeMaintenance) {
        let name: Arc<str> = object.name_any().into();
        match MaintenanceSeen::new(object, self.served) {
            Ok(seen) => {
                let known = self.maintenances.get(&name);
                if known.is_some_and(|known| known.version.makes_old(&seen.version)) {
                    return;
                }
                self.planner.apply(Change::Maintenance(seen.facts(&name)));
                // What is not the planner's concern, such as a finalizer, has to be looked at too.
                self.waiting.insert(Work::Maintenance(name.clone()));
                self.maintenances.insert(name, seen);
            }
            Err(error) => warn!(%name, %error, "a NodeMaintenance that cannot be followed is left alone"),
        }
    }

    /// Takes in what a write answered, if the maintenance is still there.
    pub fn refresh_maintenance(&mut self, object: NodeMaintenance) {
        let known = self.maintenances.get(object.name_any().as_str());
        if known.is_some_and(|known| object.metadata.uid.as_deref() == Some(&*known.version.uid)) {
            self.put_maintenance(object);
        }
    }

    /// A maintenance is gone.
    pub fn remove_maintenance(&mut self, name: &Arc<str>) {
        self.maintenances.remove(name);
        self.forwarded.remove(name);
        self.throttle.forget(&Work::Maintenance(name.clone()));
        self.planner.apply(Change::MaintenanceGone(name.clone()));
    }

    /// A maintenance as it was last seen.
    pub fn maintenance_seen(&self, name: &str) -> Option<&MaintenanceSeen> {
        self.maintenances.get(name)
    }

    /// All maintenances.
    pub fn maintenances(&self) -> impl Iterator<Item = &MaintenanceSeen> {
        self.maintenances.values()
    }

    /// The numbers over all nodes.
    pub fn summary(&self) -> Summary {
        self.planner.summary()
    }

    /// Takes in the labels of a namespace; `None` if it is gone.
    pub fn put_namespace(&mut self, name: &str, labels: Option<LabelSet>) {
        self.planner.apply(Change::Namespace(name.into(), labels));
    }

    /// Takes in a drain rule; `None` if it is gone.
    pub fn put_rule(&mut self, name: String, rule: Option<DrainRule>) {
        let known = self.rules.get(&name).map(|known| &known.spec);
        if known == rule.as_ref().map(|rule| &rule.spec) {
            return;
        }
        match rule {
            Some(rule) => self.rules.insert(name, rule),
            None => self.rules.remove(&name),
        };
        let (rules, invalid) = DrainRules::new(self.rules.values());
        for (name, error) in invalid {
            warn!(name, %error, "a DrainRule that cannot be followed has no effect");
        }
        self.planner.apply(Change::Rules(rules));
    }

    /// Takes in an attachment of a volume; `None` if it is gone.
    pub fn put_attachment(&mut self, name: Arc<str>, seen: Option<AttachmentSeen>) {
        for node in self.volumes.put_attachment(name, seen) {
            self.tell_node(&node);
        }
    }
}

fn key(pod: &Pod) -> PodKey {
    PodKey { namespace: pod.namespace.clone(), name: (*pod.name).into(), uid: pod.uid.to_string().into() }
}

#[cfg(test)]
mod tests;

//! What is known of the cluster: the objects as they were last seen, and the planner that they are fed to. Plain
//! synchronous code; `feed` tells it what happens, `controller` asks it what to do.

mod apply;
mod returns;
mod volumes;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use haulout_api_types::names::reason;
use haulout_api_types::{DrainRule, NodeMaintenance};
use haulout_service_runtime::pods::{LabelSet, Pod, Uid};
use haulout_service_runtime::queue::number_of;
use jiff::{SignedDuration, Timestamp};

use self::returns::Returns;
use self::volumes::Volumes;
use crate::facts::{Blocked, EvacuationOf, PodKey};
use crate::pause::Rewrites;
use crate::placement::NodeChoice;
use crate::plan::Served;
use crate::planner::{MaintenancePlan, NodePlan, Planner, Summary};
use crate::refusals::Refusals;
use crate::seen::{EvacuationSeen, MaintenanceSeen, NodeSeen};
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

/// What we want of a pod's Evacuation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wish {
    /// That there is one of ours.
    Evacuate {
        /// The maintenances for which the pod leaves, with their reasons.
        why: String,
    },
    /// That it is no longer ours.
    Withdraw,
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
    maintenances: BTreeMap<Arc<str>, MaintenanceSeen>,
    /// The nodes whose annotation names one of them are not released.
    unfollowed: BTreeMap<Arc<str>, Unfollowed>,
    evacuations: HashMap<Uid, EvacuationSeen>,
    /// Evacuations that have been made and not been seen, and until when that is no wonder.
    made: HashMap<Uid, Timestamp>,
    /// `None` for one that cannot be read, as may be after a downgrade.
    rules: BTreeMap<String, Option<DrainRule>>,
    volumes: Volumes,
    /// The pods of Haulout itself by name, with the nodes that they ask for.
    own_pods: HashMap<Arc<str>, (Uid, Arc<NodeChoice>)>,
    /// Pods whose Evacuations cannot be written.
    pub(crate) refused_pods: Refusals<Uid>,
    /// Nodes that cannot be written.
    pub(crate) refused_nodes: Refusals<Arc<str>>,
    /// Maintenances that cannot be written.
    pub(crate) refused_maintenances: Refusals<Arc<str>>,
    /// Since when no evacuation controller has led, if none does.
    leaderless: Option<Timestamp>,
    /// Who asked while the planner was behind.
    waiting: BTreeSet<Work>,
    /// By whom each maintenance is known to be fast-forwarded.
    pub(crate) forwarded: HashMap<Arc<str>, BTreeSet<Arc<str>>>,
    /// Who last held a node, for what is told when it is released.
    pub(crate) holders: HashMap<Arc<str>, Vec<Arc<str>>>,
    returns: Returns,
    /// What was last written to nodes.
    pub(crate) rewrites: Rewrites<Arc<str>>,
    /// Nodes whose volumes are known not to be waited for.
    pub(crate) volumes_ignored: BTreeSet<Arc<str>>,
    pub(crate) throttle: Throttle<Work>,
}

impl State {
    /// An index that knows nothing yet, for an installation that serves these pod types.
    pub fn new(served: Served, now: Timestamp) -> Self {
        Self {
            served,
            planner: Planner::new(served),
            nodes: HashMap::new(),
            maintenances: BTreeMap::new(),
            unfollowed: BTreeMap::new(),
            evacuations: HashMap::new(),
            made: HashMap::new(),
            rules: BTreeMap::new(),
            volumes: Volumes::default(),
            own_pods: HashMap::new(),
            refused_pods: Refusals::new(reason::EVACUATION_REFUSED, "its Evacuation"),
            refused_nodes: Refusals::new(reason::NODE_UPDATE_REFUSED, "the node"),
            refused_maintenances: Refusals::new(reason::MAINTENANCE_UPDATE_REFUSED, "the NodeMaintenance"),
            leaderless: None,
            waiting: BTreeSet::new(),
            forwarded: HashMap::new(),
            holders: HashMap::new(),
            returns: Returns::new(now),
            rewrites: Rewrites::default(),
            volumes_ignored: BTreeSet::new(),
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
        Ok(found.map(|(seen, mut plan)| {
            if let Some(since) = self.leaderless.filter(|_| plan.counts.to_evacuate > 0) {
                plan.block(&Blocked::without_evacuation_controller(since));
            }
            if let Some(refused) = self.refused_maintenances.blocked(name) {
                plan.block(&refused);
            }
            (seen.clone(), plan)
        }))
    }

    /// What is wanted for a pod, if anything. Nobody is asked to leave a node that still takes new pods, or that does not
    /// say yet that its pods are to leave.
    pub fn wish(&mut self, pod: &Pod) -> Result<Option<Wish>, Unsettled> {
        self.settled(|| Work::Pod(PodRef::of(pod)))?;
        let Some(node) = &pod.node else { return Ok(None) };
        let Some(plan) = self.planner.node(node) else { return Ok(None) };
        let cordoned = self.nodes.get(node).is_some_and(|seen| seen.marks.unschedulable);
        let uid = pod.uid.to_string();
        let is = |key: &PodKey| *key.uid == *uid;
        if plan.withdraw.iter().any(is) {
            return Ok(Some(Wish::Withdraw));
        }
        let wanted = plan.evacuate.iter().find(|wanted| wanted.announced && is(&wanted.pod));
        Ok(wanted.filter(|_| cordoned).map(|wanted| Wish::Evacuate { why: plan.why(wanted) }))
    }

    /// The pods of a node whose Evacuations are not as its plan wants them.
    pub fn to_do(&self, plan: &NodePlan, now: Timestamp) -> Vec<PodRef> {
        let ours = |uid: &Uid| {
            self.evacuations.get(uid).is_some_and(|seen| seen.of() == EvacuationOf::Us)
                || self.made.get(uid).is_some_and(|until| now < *until)
        };
        let pauses = |uid: &Uid| self.refused_pods.pause(uid, now).is_some();
        let pod =
            |key: &PodKey| Some(PodRef { uid: key.uid.parse().ok()?, namespace: number_of(&key.namespace) });
        let evacuate = plan
            .evacuate
            .iter()
            .filter(|wanted| wanted.announced)
            .filter_map(|evacuate| pod(&evacuate.pod))
            .filter(|pod| !ours(&pod.uid));
        let withdraw = plan.withdraw.iter().filter_map(pod);
        evacuate.chain(withdraw).filter(|pod| !pauses(&pod.uid)).collect()
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

    /// The claims of these pods that have to be asked for: their volumes are not known, or they had none when they were
    /// last asked for.
    pub fn unknown_claims(&self, pods: &[Arc<Pod>], now: Timestamp) -> BTreeSet<Claim> {
        self.volumes.unknown_claims(pods, now)
    }

    /// When the next claim of these pods has to be asked for again.
    pub fn next_claim(&self, pods: &[Arc<Pod>]) -> Option<Timestamp> {
        self.volumes.next_claim(pods)
    }

    /// The persistent volumes of a node or of these pods on it whose names in `volumesAttached` have to be known to
    /// tell which are which.
    pub fn unknown_handles(&self, node: &str, pods: &[Arc<Pod>]) -> BTreeSet<Arc<str>> {
        let reported = self.nodes.get(node).is_some_and(|seen| !seen.volumes.is_empty());
        if reported { self.volumes.unknown_handles(node, pods) } else { BTreeSet::new() }
    }

    /// A maintenance as it was last seen.
    pub fn maintenance_seen(&self, name: &str) -> Option<&MaintenanceSeen> {
        self.maintenances.get(name)
    }

    /// All maintenances.
    pub fn maintenances(&self) -> impl Iterator<Item = &MaintenanceSeen> {
        self.maintenances.values()
    }

    /// A maintenance that cannot be followed.
    pub fn unfollowed(&self, name: &str) -> Option<&Unfollowed> {
        self.unfollowed.get(name)
    }

    /// How many maintenances cannot be followed.
    pub fn unfollowed_count(&self) -> usize {
        self.unfollowed.len()
    }

    /// The numbers over all nodes.
    pub fn summary(&self) -> Summary {
        let mut summary = self.planner.summary();
        if self.leaderless.is_some() && summary.pending + summary.evacuating > 0 {
            summary.blockers.insert(reason::EVACUATION_CONTROLLER_UNAVAILABLE.into(), 1);
        }
        summary
    }
}

#[cfg(test)]
mod tests;

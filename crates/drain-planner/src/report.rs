//! The planner's output for a node and for a maintenance: targets, numbers, messages and pods to reconcile.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use haulout_api_types::names::reason;
use haulout_api_types::node_maintenance::{
    DrainPlanEntry, MAX_BLOCKERS, MAX_DRAINED_NODES, MAX_WAITING_FOR, MaintenanceOnNode, Stage,
};
use haulout_api_types::selector::Labels;
use haulout_api_types::uid::Uid;
use jiff::{SignedDuration, Timestamp};

use crate::announce;
use crate::assess::{self, Assessment, Counts, MAX_SKIPPED};
use crate::blockers::{self, Blocker};
use crate::facts::{Blocked, EvacuationOwnership, MaintenanceFacts, PodKey};
use crate::node::{Cordon, NodeRecord};
use crate::planner::{Id, Planner};
use crate::waiting::WaitingPod;

/// Maximum number of names in a message.
const MAX_NAMES: usize = 20;

/// Maximum number of maintenances in the condition of a node and in the annotation of an Evacuation.
const MAX_HOLDERS: usize = 10;

/// The message of a finished drain.
pub const DRAINED: &str = "Drained";

/// The state of the drain of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeState {
    /// No maintenance drains it.
    Idle,
    /// Targeted pods are leaving, volumes are being detached, or the drain waits until pods have finished.
    Evacuating,
    /// Pods remain, and none of them is targeted yet.
    Waiting,
    /// Nothing that has to leave remains, but it is not cordoned yet.
    Cordoning,
    /// It is cordoned, and nothing that has to leave remains.
    Drained,
}

/// The desired state of a pod's Evacuation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Desired {
    /// The pod has an Evacuation with our instigator finalizer.
    Evacuate {
        /// The maintenances for which the pod leaves, with their reasons.
        on_behalf_of: String,
    },
    /// The pod's Evacuation does not have our instigator finalizer.
    Withdraw,
}

/// The planner's output for a node.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::struct_excessive_bools, reason = "they are independent of each other")]
pub struct NodePlan {
    /// The state of the drain.
    pub state: NodeState,
    /// The maintenances in stage Cordon or Drain that select it, oldest first.
    pub holders: Vec<Arc<str>>,
    /// The reasons of these maintenances, by name. Maintenances without a reason are absent.
    pub reasons: BTreeMap<Arc<str>, Arc<str>>,
    /// Whether one of them requires that autoscalers do not remove the node.
    pub hold_autoscalers: bool,
    /// Whether one of them drains it.
    pub draining: bool,
    /// Whether it has to be made schedulable, no matter who cordoned it.
    pub uncordon: bool,
    /// Whether it is not released, because an unreadable maintenance may hold it: see [`Planner::set_unreadable`].
    pub held_back: bool,
    /// The maintenances for its annotation.
    pub maintenances: Vec<MaintenanceOnNode>,
    /// The drain targets for its annotation.
    pub targets: Vec<DrainPlanEntry>,
    /// How long the drain waits for its volumes; `None` means no limit.
    pub volume_timeout: Option<SignedDuration>,
    /// What the drain does; empty if no maintenance drains it.
    pub message: String,
    /// The numbers.
    pub counts: Counts,
    /// Everything that blocks the drain.
    pub blockers: Vec<Blocker>,
    /// When to reconcile it again, because time alone changes the result.
    pub requeue_at: Option<Timestamp>,
}

impl NodePlan {
    /// The maintenances that hold it, with their reasons: `a (new kernel), b and 3 more`.
    pub fn held_by(&self) -> String {
        with_reasons(&self.holders, &self.reasons)
    }
}

/// The first maintenances with their reasons, and the number of others.
fn with_reasons(names: &[Arc<str>], reasons: &BTreeMap<Arc<str>, Arc<str>>) -> String {
    let one = |name: &Arc<str>| match reasons.get(name) {
        Some(reason) => format!("{name} ({reason})").into(),
        None => name.clone(),
    };
    let shown: Vec<Arc<str>> = names.iter().take(MAX_HOLDERS).map(one).collect();
    list(&shown, names.len())
}

/// The planner's output for a maintenance.
#[derive(Clone, Debug, PartialEq)]
pub struct MaintenancePlan {
    /// The lowest drain targets among its nodes.
    pub reached: Vec<DrainPlanEntry>,
    /// What the drain does; empty outside of stage Drain.
    pub message: String,
    /// Whether every selected node exists, is cordoned and holds nothing that has to leave; false outside of stage
    /// Drain, and if no node was selected.
    pub drained: bool,
    /// Whether it waits for other maintenances.
    pub waiting: bool,
    /// The numbers, over all its nodes.
    pub counts: Counts,
    /// Number of pods that have left since the drain started.
    pub evacuated: u32,
    /// Nodes that it selects.
    pub nodes_selected: usize,
    /// Those of them that are drained.
    pub nodes_drained: usize,
    /// Nodes that were deleted after they had been drained.
    pub nodes_drained_and_deleted: usize,
    /// The names of drained nodes, as many as a status lists. Nodes that have been deleted since come first.
    pub drained_nodes: Vec<Arc<str>>,
    /// Number of nodes that its selector names but that do not exist, except those deleted after they had been drained.
    pub nodes_missing: usize,
    /// The names of the first missing nodes.
    pub missing_nodes: Vec<Arc<str>>,
    /// Number of selected nodes that are cordoned.
    pub nodes_cordoned: usize,
    /// The first node that somebody uncordons repeatedly, and when it is cordoned again.
    pub cordon_due: Option<(Arc<str>, Timestamp)>,
    /// Number of selected nodes that still have markers or Evacuations that no maintenance needs.
    pub nodes_unreleased: u32,
    /// Number of these that are not released, because an unreadable maintenance may hold them.
    pub nodes_held_back: u32,
    /// The maintenances that are ahead of it on some node, oldest first: it is fast-forwarded there.
    pub forwarded_by: Vec<Arc<str>>,
    /// The first blockers, with their nodes if they concern one.
    pub blockers: Vec<(Option<Arc<str>>, Blocker)>,
    /// Number of blockers by reason.
    pub blockers_by_reason: BTreeMap<Arc<str>, u32>,
    /// The first pods that are leaving, with their nodes, sorted.
    pub waiting_for: Vec<(Arc<str>, WaitingPod)>,
    /// The first pods that a DrainRule or their label skips, in the order of their nodes.
    pub skipped: Vec<PodKey>,
}

impl MaintenancePlan {
    /// Adds a blocker of the maintenance as a whole.
    pub fn block(&mut self, blocked: &Blocked) {
        *self.blockers_by_reason.entry(blocked.reason.clone()).or_default() += 1;
        self.blockers.push((None, Blocker::new(None, blocked)));
    }
}

/// Numbers over all nodes. A pod is counted once, even if several maintenances drain its node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Nodes under maintenance by state: cordoned, evacuating, waiting, cordoning or drained.
    pub nodes: BTreeMap<&'static str, u32>,
    /// Pods that have to leave, have no Evacuation and are not terminating.
    pub pending: u32,
    /// Pods that have an Evacuation or are terminating.
    pub evacuating: u32,
    /// Blockers by reason.
    pub blockers: BTreeMap<Arc<str>, u32>,
}

impl<L: Labels + Clone + PartialEq> Planner<L> {
    /// The desired state of the Evacuation of a pod, if any. A pod is not asked to leave before its node is cordoned and lists
    /// the pod's target in its annotation.
    pub fn desired(&self, node: &str, pod: Uid) -> Option<Desired> {
        let record = self.nodes.get(node)?;
        match record.assessment.pods.get(&pod)?.desired.as_ref()? {
            assess::Desired::Withdraw => Some(Desired::Withdraw),
            assess::Desired::Evacuate { reached_by, announced } => (*announced && record.facts.cordoned)
                .then(|| Desired::Evacuate { on_behalf_of: self.on_behalf_of(record, reached_by) }),
        }
    }

    /// The pods of a node whose observed Evacuation differs from the [desired](Self::desired) state.
    pub fn to_reconcile(&self, node: &str) -> impl Iterator<Item = Uid> {
        let pods = self.nodes.get(node).into_iter().flat_map(|record| {
            record.assessment.pods.iter().map(|(uid, pod)| (uid, pod, record.facts.cordoned))
        });
        pods.filter(|(_, pod, cordoned)| match &pod.desired {
            None => false,
            Some(assess::Desired::Withdraw) => true,
            Some(assess::Desired::Evacuate { announced, .. }) => {
                let ours = matches!(
                    pod.evacuation,
                    EvacuationOwnership::Ours | EvacuationOwnership::OursUncancellable
                );
                *announced && *cordoned && !ours
            }
        })
        .map(|(uid, ..)| *uid)
    }

    /// The maintenances for which a pod leaves, with their reasons. If those that have reached it no longer drain the node, all
    /// maintenances that drain the node now.
    fn on_behalf_of(&self, record: &NodeRecord<L>, reached_by: &[Id]) -> String {
        let names = if reached_by.is_empty() {
            self.names(record.drains.iter().map(|drain| &drain.id))
        } else {
            self.names(reached_by)
        };
        with_reasons(&names, &self.reasons(record))
    }

    /// The reasons of the maintenances of a node, by name. Maintenances without a reason are absent.
    fn reasons(&self, record: &NodeRecord<L>) -> BTreeMap<Arc<str>, Arc<str>> {
        let with_reason = self.holding(record).filter(|facts| !facts.reason.is_empty());
        with_reason.map(|facts| (facts.name.clone(), facts.reason.clone())).collect()
    }

    /// The maintenances in stage Cordon or Drain that select a node, oldest first.
    fn holding(&self, record: &NodeRecord<L>) -> impl Iterator<Item = &MaintenanceFacts> {
        let all = record.members.iter().filter_map(|id| Some(&self.maintenances.get(id)?.facts));
        all.filter(|facts| matches!(facts.stage, Stage::Cordon | Stage::Drain))
    }

    /// The plan for a node; `None` if the planner does not know it.
    pub fn node(&self, name: &str) -> Option<NodePlan> {
        let record = self.nodes.get(name)?;
        let counts = record.assessment.counts;
        let state = state(record);
        let message = match state {
            NodeState::Idle => String::new(),
            NodeState::Cordoning => "Waiting to be cordoned.".into(),
            NodeState::Drained => DRAINED.into(),
            NodeState::Evacuating if counts.targeted == 0 => waiting_without_targets(&counts),
            NodeState::Evacuating => {
                let oldest = record.assessment.drains.first();
                let limiters = oldest.into_iter().flat_map(|oldest| record.assessment.limiters(oldest));
                evacuating(&self.names(limiters))
            }
            NodeState::Waiting => {
                let oldest = record.drains.first().and_then(|oldest| self.maintenances.get(&oldest.id));
                waiting(&self.names(oldest.into_iter().flat_map(|oldest| &oldest.waits_for)))
            }
        };
        let plans = record.drains.iter().filter_map(|drain| self.maintenances.get(&drain.id));
        let slots = plans.flat_map(|m| m.facts.plan.slots());
        let targets = announce::entries(&record.targets, slots, &record.facts.reached);
        Some(NodePlan {
            state,
            holders: self.holding(record).map(|facts| facts.name.clone()).collect(),
            reasons: self.reasons(record),
            hold_autoscalers: self.holding(record).any(|facts| facts.holds_autoscalers),
            draining: !record.drains.is_empty(),
            uncordon: record.cordon == Cordon::Unwanted,
            held_back: record.is_held_back(&self.unreadable),
            maintenances: self.maintenances_on(record),
            targets,
            volume_timeout: record.volume_timeout,
            message,
            counts,
            blockers: record.assessment.blockers.clone(),
            requeue_at: record.assessment.requeue_at,
        })
    }

    /// The plan for a maintenance; `None` if the planner does not know it.
    pub fn maintenance(&self, name: &str) -> Option<MaintenancePlan> {
        let id = self.ids.get(name)?;
        let maintenance = self.maintenances.get(id)?;
        let (facts, totals) = (&maintenance.facts, &maintenance.totals);
        let draining = facts.stage == Stage::Drain;
        let counts = totals.counts;
        let moving = counts.moving() > 0;
        let older = |other: &&Id| self.maintenances.get(other).is_some_and(|m| m.age() < maintenance.age());
        let nodes_missing = maintenance.missing().count();
        let missing: Vec<_> = maintenance.missing().take(MAX_NAMES).cloned().collect();
        let (selected, cordoned) = (maintenance.nodes.len(), totals.cordoned_nodes as usize);
        let deleted = maintenance.deleted.len() + maintenance.deleted_unnamed as usize;
        let is_drained = draining
            && counts.remaining == 0
            && cordoned >= selected
            && nodes_missing == 0
            && selected + deleted > 0;
        let message = match () {
            () if !draining => String::new(),
            () if is_drained => DRAINED.into(),
            () if counts.remaining == 0 && cordoned < selected => {
                format!("Waiting for {} of {selected} nodes to be cordoned.", selected - cordoned)
            }
            () if counts.remaining == 0 && nodes_missing > 0 => {
                format!("Waiting for nodes that do not exist: {}.", list(&missing, nodes_missing))
            }
            () if selected == 0 => "No node is selected.".into(),
            () if counts.targeted == 0 && moving => waiting_without_targets(&counts),
            () if moving => evacuating(&self.names(totals.limiters.keys().filter(older))),
            () => waiting(&self.names(&maintenance.waits_for)),
        };
        let mut forwarded_by = self.names(totals.forwarded_by.keys());
        forwarded_by.extend(totals.forwarded_by_past.keys().cloned());
        // Deleted nodes come first: only the status remembers them.
        let drained_nodes = maintenance.deleted.iter().chain(&totals.drained_nodes);
        let blocked = self.found_on(&totals.blocked_nodes, |found| &found.blockers).take(MAX_BLOCKERS);
        let failed_writes =
            self.found_on(&totals.nodes_with_failed_writes, |found| &found.failed_writes).take(MAX_BLOCKERS);
        let is_missing = |name: &Arc<str>| (name.clone(), Blocker::new(None, &blockers::node_missing()));
        let absent = missing.iter().filter(|_| draining).map(is_missing).take(MAX_BLOCKERS);
        let blockers =
            blocked.chain(failed_writes).chain(absent).map(|(node, blocker)| (Some(node), blocker));
        let blockers = blockers.collect();
        let waiting_for = self.found_on(&totals.leaving_nodes, |found| &found.waiting_for);
        let skipped = self.found_on(&totals.skipped_nodes, |found| &found.skipped).map(|(_, pod)| pod);
        let mut blockers_by_reason = totals.reasons.clone();
        if draining && nodes_missing > 0 {
            let number = u32::try_from(nodes_missing).unwrap_or(u32::MAX);
            blockers_by_reason.insert(reason::NODE_MISSING.into(), number);
        }
        Some(MaintenancePlan {
            reached: if draining { totals.reached(&facts.plan) } else { Vec::new() },
            message,
            drained: is_drained,
            waiting: draining && counts.remaining > 0 && !moving,
            counts,
            evacuated: totals.evacuated,
            nodes_selected: selected,
            nodes_drained: totals.drained_nodes.len(),
            nodes_drained_and_deleted: deleted,
            drained_nodes: drained_nodes.take(MAX_DRAINED_NODES).cloned().collect(),
            nodes_missing,
            missing_nodes: missing,
            nodes_cordoned: cordoned,
            cordon_due: totals.cordons_due.first_key_value().map(|(node, due)| (node.clone(), *due)),
            nodes_unreleased: totals.unreleased_nodes,
            nodes_held_back: totals.held_back_nodes,
            forwarded_by,
            blockers,
            blockers_by_reason,
            waiting_for: waiting_for.take(MAX_WAITING_FOR).collect(),
            skipped: skipped.take(MAX_SKIPPED).collect(),
        })
    }

    /// A part of the assessments of these nodes, with the node names.
    fn found_on<'a, T: Clone + 'a>(
        &'a self,
        nodes: &'a BTreeSet<Arc<str>>,
        of: fn(&Assessment) -> &Vec<T>,
    ) -> impl Iterator<Item = (Arc<str>, T)> + 'a {
        let found = nodes.iter().filter_map(move |node| Some((node, of(&self.nodes.get(node)?.assessment))));
        found.flat_map(|(node, all)| all.iter().map(|one| (node.clone(), one.clone())))
    }

    /// The maintenances for a node's annotation: those that hold it, unreadable maintenances that held it before, and those
    /// that no longer drain it but have reached some of its targets.
    fn maintenances_on(&self, record: &NodeRecord<L>) -> Vec<MaintenanceOnNode> {
        let mut all: Vec<_> = self.holding(record).map(|facts| facts.on_node(facts.stage)).collect();
        if record.facts.has_markers && record.facts.maintenances.is_none() {
            // The annotation does not list who held it: any unreadable maintenance may have.
            let may_hold = |uid: &Arc<str>| MaintenanceOnNode {
                uid: uid.to_string(),
                name: String::new(),
                stage: Stage::Drain,
            };
            all.extend(self.unreadable.iter().map(may_hold));
        }
        for other in record.held_by(&self.unreadable).chain(&record.past) {
            if !all.iter().any(|known| known.uid == other.uid) {
                all.push(other.clone());
            }
        }
        all
    }

    /// Numbers over all nodes.
    pub fn summary(&self) -> Summary {
        let mut summary = Summary::default();
        for record in self.nodes.values() {
            let mut count = |blockers: &[Blocker]| {
                for blocker in blockers {
                    *summary.blockers.entry(blocker.reason.clone()).or_default() += 1;
                }
            };
            count(&record.assessment.failed_writes);
            count(&record.assessment.blockers);
            let state = match state(record) {
                NodeState::Idle if record.cordon == Cordon::Wanted => "cordoned",
                NodeState::Idle => continue,
                NodeState::Evacuating => "evacuating",
                NodeState::Waiting => "waiting",
                NodeState::Cordoning => "cordoning",
                NodeState::Drained => "drained",
            };
            *summary.nodes.entry(state).or_default() += 1;
            summary.pending += record.assessment.counts.pending;
            summary.evacuating += record.assessment.counts.evacuating;
        }
        summary
    }

    /// The names of these maintenances, oldest first.
    pub(crate) fn names<'a>(&self, ids: impl IntoIterator<Item = &'a Id>) -> Vec<Arc<str>> {
        let mut found: Vec<_> = ids.into_iter().filter_map(|id| self.maintenances.get(id)).collect();
        found.sort_by(|a, b| a.age().cmp(&b.age()));
        found.into_iter().map(|maintenance| maintenance.facts.name.clone()).collect()
    }
}

fn state<L>(record: &NodeRecord<L>) -> NodeState {
    let counts = record.assessment.counts;
    match () {
        () if record.drains.is_empty() => NodeState::Idle,
        () if counts.remaining == 0 && !record.assessment.hold_state.cordoned => NodeState::Cordoning,
        () if counts.remaining == 0 => NodeState::Drained,
        () if counts.moving() > 0 => NodeState::Evacuating,
        () => NodeState::Waiting,
    }
}

/// The message while no targeted pod remains.
fn waiting_without_targets(counts: &Counts) -> String {
    let number = |number: u32, what: &str| format!("{number} {what}{}", if number == 1 { "" } else { "s" });
    match (counts.volumes, counts.completing) {
        (0, 0) => format!("Waiting for a node for {} of Haulout.", number(counts.has_no_alternative, "pod")),
        (0, pods) => format!("Waiting for {} to complete.", number(pods, "pod")),
        (volumes, 0) => format!("Waiting for {} to be detached.", number(volumes, "volume")),
        (volumes, pods) => {
            let volumes = number(volumes, "volume");
            format!("Waiting for {volumes} to be detached and {} to complete.", number(pods, "pod"))
        }
    }
}

fn evacuating(limiters: &[Arc<str>]) -> String {
    if limiters.is_empty() {
        "Evacuating".into()
    } else {
        format!("Evacuating (limited by {})", list(limiters, limiters.len()))
    }
}

fn waiting(roots: &[Arc<str>]) -> String {
    format!("Waiting for {}.", list(roots, roots.len()))
}

/// The first names, and the number of others. `all` is the total number.
pub fn list(names: &[Arc<str>], all: usize) -> String {
    let shown: Vec<&str> = names.iter().take(MAX_NAMES).map(AsRef::as_ref).collect();
    match all.saturating_sub(shown.len()) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

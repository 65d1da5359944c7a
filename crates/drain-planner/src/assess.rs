//! Assesses a node and its pods: which pods have to leave, which ones leave now, what blocks them, and what each maintenance
//! still waits for on the node. A pure function. Its result is all that the planner stores about pods.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use fixedbitset::FixedBitSet;
use haulout_api_types::conditions;
use haulout_api_types::drain_plan::EntryMatcher;
use haulout_api_types::drain_rule::DrainBehavior;
use haulout_api_types::drain_rules::{DrainRules, Evaluation, Source};
use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::{MAX_WAITING_FOR, PodType};
use haulout_api_types::selector::Labels;
use haulout_api_types::uid::Uid;
use jiff::Timestamp;

use crate::blockers::{self, Blocker};
use crate::facts::{EvacuationOwnership, PodFacts, PodKey};
use crate::node::{Cordon, Drain, NodeRecord};
use crate::own_pods::OwnPods;
use crate::plan::{Plan, ServedPodTypes, StepNumber, is_targeted};
use crate::planner::Id;
use crate::waiting::{WaitCounts, WaitReason, WaitingPod};

/// Maximum number of skipped pods that are listed.
pub const MAX_SKIPPED: usize = 5;

/// The desired state of a pod's Evacuation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Desired {
    /// The pod has an Evacuation with our instigator finalizer.
    Evacuate {
        /// The maintenances that have reached it, oldest first.
        reached_by: Box<[Id]>,
        /// Whether the observed annotation of the node lists the pod's drain target. The pod is not asked to leave
        /// before.
        announced: bool,
    },
    /// The pod's Evacuation does not have our instigator finalizer.
    Withdraw,
}

/// The assessment of one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodAssessment {
    /// Whether it has to leave.
    pub leaving: bool,
    /// Whether it had an Evacuation.
    pub evacuation: EvacuationOwnership,
    pub desired: Option<Desired>,
}

/// Number of a node's pods and volumes by the first step that selects them.
pub(crate) type Steps = BTreeMap<StepNumber, u32>;

/// The assessment of one maintenance that drains the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DrainAssessment {
    pub id: Id,
    /// Number of pods and volumes by the first step that selects them.
    pub steps: Steps,
    /// Number of targeted pods and volumes that it has reached itself.
    pub own: u32,
    /// The maintenances that limit it, by their index among those that drain the node.
    pub limited_by: FixedBitSet,
}

/// Whether a node is cordoned, and whether it is released.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HoldState {
    pub cordoned: bool,
    /// When its cordon is restored, if somebody uncordons it repeatedly.
    pub cordon_due: Option<Timestamp>,
    /// Whether it still has markers or Evacuations of ours that no maintenance needs.
    pub unreleased: bool,
    /// Whether these stay, because an unreadable maintenance may need them.
    pub held_back: bool,
}

/// The assessment of a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Assessment {
    pub hold_state: HoldState,
    pub counts: Counts,
    /// The unfinished pods of a node that is being drained; of any other node, the pods whose Evacuation is no longer needed.
    pub pods: HashMap<Uid, PodAssessment>,
    /// One for each maintenance that drains the node, oldest first.
    pub drains: Vec<DrainAssessment>,
    /// The first pods that a DrainRule or their label skips.
    pub skipped: Vec<PodKey>,
    pub blockers: Vec<Blocker>,
    /// Rejected writes, which concern all maintenances of the node.
    pub failed_writes: Vec<Blocker>,
    /// The first pods that are leaving, in order.
    pub waiting_for: Vec<WaitingPod>,
    /// Whether later pod types wait for a Default pod that stays for now.
    pub defers_later_types: bool,
    /// Entries for pods that all maintenances have reached but that are not among the targets, because the intersection of
    /// the plans was truncated.
    pub truncated: Vec<EntryMatcher>,
    /// When to assess the node again, because time alone changes the result.
    pub requeue_at: Option<Timestamp>,
}

/// Numbers of pods and volumes. They are the same for all maintenances of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pods that have to leave, have no Evacuation and are not terminating.
    pub pending: u32,
    /// Pods that have an Evacuation or are terminating.
    pub evacuating: u32,
    /// Pods of a type that this installation does not evacuate.
    pub unsupported: u32,
    /// Pods that a DrainRule or their label skips.
    pub skipped: u32,
    /// Pods that have to leave and are among the targets, except those that the drain waits for until they finish, and those
    /// that leave after them.
    pub targeted: u32,
    /// Pods that the drain waits for until they finish.
    pub completing: u32,
    /// Haulout's own pods that no other node accepts.
    pub has_no_alternative: u32,
    /// Volumes that the drain waits for after all Default pods have left.
    pub volumes: u32,
    /// Volumes that are still attached but that the drain does not wait for.
    pub volumes_ignored: u32,
    /// All pods and volumes that still have to leave.
    pub remaining: u32,
    /// Targeted pods that leave only through an Evacuation.
    pub to_evacuate: u32,
    /// Targeted pods that are not blocked, by what the drain waits for.
    pub waiting: WaitCounts,
}

impl Counts {
    /// Pods and volumes that do not wait for another maintenance: pods that are leaving, finishing or has_no_alternative, and volumes
    /// that are being detached.
    pub fn moving(&self) -> u32 {
        let staying = self.completing.saturating_add(self.has_no_alternative);
        self.targeted.saturating_add(self.volumes).saturating_add(staying)
    }
}

/// The input of an assessment besides pods and time.
pub(crate) struct View<'a, L> {
    pub served: ServedPodTypes,
    pub rules: &'a DrainRules,
    pub namespaces: &'a HashMap<Arc<str>, L>,
    pub node: &'a NodeRecord<L>,
    /// The maintenances that drain it, with their plans, oldest first.
    pub drains: Vec<(&'a Drain, &'a Plan)>,
    /// The UIDs of unreadable maintenances.
    pub unreadable: &'a BTreeSet<Arc<str>>,
    pub own_pods: &'a OwnPods,
}

/// What happens to a pod.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Disposition {
    /// It has finished.
    Finished,
    /// A DrainRule or its label skips it.
    Skipped,
    /// This installation does not evacuate its type.
    Unsupported,
    /// It has to leave.
    Leaving,
}

/// A pod and how the DrainRules apply to it.
struct Pod<'a, L> {
    facts: &'a PodFacts<L>,
    evaluation: Evaluation<'a>,
    disposition: Disposition,
    /// Whether it stays because it is one of Haulout's own pods and no other node accepts it. Without it, the drain could
    /// neither continue nor report why.
    has_no_alternative: bool,
}

impl<L> Pod<'_, L> {
    fn leaves(&self) -> bool {
        self.disposition == Disposition::Leaving
    }

    /// Whether it is not known yet if a DrainRule excludes it. Until then, the pod stays.
    fn is_undecided(&self) -> bool {
        matches!(self.evaluation.source, Source::Unreadable(_) | Source::NamespaceUnknown(_))
    }

    /// Whether the drain waits until it has finished.
    fn completes(&self) -> bool {
        self.evaluation.behavior == DrainBehavior::WaitCompleted && !self.is_undecided() && self.leaves()
    }

    fn is_in(&self, targets: &DrainTargets) -> bool
    where
        L: Labels,
    {
        let PodFacts { pod_type, priority, labels, .. } = self.facts;
        is_targeted(targets, *pod_type, *priority, self.evaluation.order, labels)
    }

    fn is_default(&self) -> bool {
        self.facts.pod_type == PodType::Default
    }

    fn is_evacuating(&self) -> bool {
        self.facts.terminating || self.facts.evacuation != EvacuationOwnership::NoEvacuation
    }

    /// When its grace period ends, and when it is reported as overdue.
    fn overdue(&self) -> Option<(Timestamp, Timestamp)> {
        let deadline = self.facts.deadline.filter(|_| self.facts.terminating)?;
        Some((deadline, conditions::overdue(deadline)))
    }

    /// Until when it is not evacuated, because it returns repeatedly.
    fn held_until(&self, now: Timestamp) -> Option<Timestamp> {
        self.facts.returned.as_deref().map(|returned| returned.until).filter(|until| now < *until)
    }

    /// When time alone changes its assessment.
    fn requeue_at(&self, now: Timestamp) -> Option<Timestamp> {
        let overdue = self.overdue().map(|(_, overdue)| overdue).filter(|overdue| now < *overdue);
        overdue.into_iter().chain(self.held_until(now)).min()
    }

    /// What blocks it, if anything does.
    fn blocker(&self, now: Timestamp) -> Option<Blocker> {
        let returned = self.facts.returned.as_deref();
        let blocked = match (self.overdue(), &self.facts.blocked, self.evaluation.source) {
            (Some((deadline, overdue)), ..) if overdue <= now => blockers::terminating(deadline),
            (None, Some(blocked), _) => blocked.clone(),
            (.., Source::Unreadable(rule)) => blockers::rule_unreadable(rule),
            (.., Source::NamespaceUnknown(rule)) => blockers::namespace_unknown(rule),
            _ if self.evaluation.behavior == DrainBehavior::WaitCompleted => {
                blockers::waiting_for_completion()
            }
            _ => blockers::returns(returned?, now),
        };
        Some(Blocker::new(Some(&self.facts.key), &blocked))
    }
}

/// What the assessment of each pod needs to know about the other pods of the node.
struct NodeContext {
    /// Whether the drain waits until one of them has finished.
    completing: bool,
    /// Whether one of them is has_no_alternative.
    has_no_alternative: bool,
    /// The lowest order among the pods of each type that have to leave and can.
    lowest: BTreeMap<PodType, i32>,
}

impl NodeContext {
    fn new<L>(pods: &[Pod<'_, L>]) -> Self {
        let mut lowest = BTreeMap::new();
        for pod in pods.iter().filter(|pod| pod.leaves() && !pod.has_no_alternative) {
            let order = lowest.entry(pod.facts.pod_type).or_insert(pod.evaluation.order);
            *order = pod.evaluation.order.min(*order);
        }
        Self {
            completing: pods.iter().any(Pod::completes),
            has_no_alternative: pods.iter().any(|pod| pod.has_no_alternative),
            lowest,
        }
    }

    /// Whether later pod types wait for a Default pod that stays for now.
    fn defers_later_types(&self) -> bool {
        self.completing || self.has_no_alternative
    }

    /// Whether a pod leaves only after pods that stay for now: it has a later type, or a higher order than the pods that the
    /// drain waits for.
    fn defers<L>(&self, pod: &Pod<'_, L>) -> bool {
        (self.defers_later_types() && !pod.is_default()) || (self.completing && pod.evaluation.order > 0)
    }

    fn is_next<L>(&self, pod: &Pod<'_, L>) -> bool {
        self.lowest.get(&pod.facts.pod_type).is_none_or(|lowest| *lowest >= pod.evaluation.order)
    }
}

/// Assesses a node and all its pods.
pub(crate) fn assess<L: Labels>(view: &View<'_, L>, pods: &[PodFacts<L>], now: Timestamp) -> Assessment {
    let mut pods: Vec<Pod<'_, L>> = pods.iter().map(|facts| view.classify(facts)).collect();
    pods.sort_by(|a, b| a.facts.key.cmp(&b.facts.key));
    let context = NodeContext::new(&pods);
    let limited_by = FixedBitSet::with_capacity(view.drains.len());
    let drain = |(drain, _): &(&Drain, _)| DrainAssessment {
        id: drain.id,
        steps: Steps::new(),
        own: 0,
        limited_by: limited_by.clone(),
    };
    let mut found = Assessment {
        drains: view.drains.iter().map(drain).collect(),
        defers_later_types: context.defers_later_types(),
        ..Assessment::default()
    };
    found
        .failed_writes
        .extend(view.node.facts.failed_write.as_ref().map(|failed_writes| Blocker::new(None, failed_writes)));
    for pod in &pods {
        found.assess_pod(view, &context, pod, now);
    }
    if !view.drains.is_empty() {
        found.assess_volumes(view, &pods);
        let due = view.cordon_due();
        found.blockers.extend(due.map(|due| Blocker::new(None, &blockers::cordon_race(due))));
    }
    found.hold_state = view.hold_state(pods.iter().any(|pod| view.has_unneeded_evacuation(pod)));
    found
}

impl Assessment {
    /// The maintenances that limit a maintenance on this node.
    pub fn limiters(&self, drain: &DrainAssessment) -> impl Iterator<Item = &Id> {
        drain.limited_by.ones().filter_map(|place| Some(&self.drains.get(place)?.id))
    }

    fn assess_pod<L: Labels>(
        &mut self,
        view: &View<'_, L>,
        context: &NodeContext,
        pod: &Pod<'_, L>,
        now: Timestamp,
    ) {
        let (facts, counts) = (pod.facts, &mut self.counts);
        let unneeded = view.has_unneeded_evacuation(pod);
        if unneeded {
            let failed_writes =
                facts.blocked.as_ref().filter(|_| facts.failed_write && pod.overdue().is_none());
            self.failed_writes
                .extend(failed_writes.map(|failed_writes| Blocker::new(Some(&facts.key), failed_writes)));
        }
        let withdraw = (unneeded && !view.keeps_evacuations()).then_some(Desired::Withdraw);
        if view.drains.is_empty() {
            if withdraw.is_some() {
                let kept = PodAssessment { leaving: false, evacuation: facts.evacuation, desired: withdraw };
                self.pods.insert(facts.key.uid, kept);
            }
            return;
        }
        match pod.disposition {
            Disposition::Finished => return,
            Disposition::Leaving => {}
            Disposition::Unsupported => {
                counts.unsupported += 1;
                return self.record_pod(pod, withdraw);
            }
            Disposition::Skipped => {
                counts.skipped += 1;
                if self.skipped.len() < MAX_SKIPPED {
                    self.skipped.push(facts.key.clone());
                }
                return self.record_pod(pod, withdraw);
            }
        }
        self.requeue_at = self.requeue_at.into_iter().chain(pod.requeue_at(now)).min();
        counts.remaining += 1;
        *(if pod.is_evacuating() { &mut counts.evacuating } else { &mut counts.pending }) += 1;
        if pod.completes() {
            counts.completing += 1;
            self.blockers.extend(pod.blocker(now));
            return self.record_pod(pod, withdraw);
        }
        if pod.has_no_alternative {
            counts.has_no_alternative += 1;
            self.blockers.push(Blocker::new(Some(&facts.key), &blockers::no_node_for_own_pod()));
            return self.record_pod(pod, withdraw);
        }
        if context.defers(pod) {
            // The pod that it waits for is reported. But another instigator may have started to evacuate this pod.
            self.blockers.extend(pod.blocker(now).filter(|_| pod.is_evacuating()));
            return self.record_pod(pod, withdraw);
        }
        let first = view.first_steps(pod);
        for (drain, step) in self.drains.iter_mut().zip(&first) {
            *drain.steps.entry(*step).or_default() += 1;
        }
        let reached = view.reached(&first);
        let announced = pod.is_in(&view.node.facts.reached);
        let in_targets = pod.is_in(&view.node.targets);
        let desired = if in_targets || reached.is_full() {
            counts.targeted += 1;
            for (place, drain) in self.drains.iter_mut().enumerate() {
                drain.own += u32::from(reached.contains(place));
            }
            let evacuates = !facts.terminating && pod.evaluation.behavior == DrainBehavior::Drain;
            counts.to_evacuate += u32::from(evacuates);
            let unannounced = view.node.too_large && !pod.is_evacuating() && !announced;
            if unannounced {
                self.blockers.push(Blocker::new(Some(&facts.key), &blockers::targets_too_large()));
            } else if let Some(blocker) = pod.blocker(now) {
                self.blockers.push(blocker);
            } else {
                self.record_wait(pod, context, view.node.facts.cordoned && announced);
            }
            let leaves_now = evacuates && pod.held_until(now).is_none() && context.is_next(pod);
            leaves_now.then(|| Desired::Evacuate { reached_by: view.ids(&reached), announced })
        } else {
            for (place, drain) in self.drains.iter_mut().enumerate() {
                if reached.contains(place) {
                    drain.limited_by.extend(reached.zeroes());
                }
            }
            None
        };
        if view.drains.len() > 1 && pod.evaluation.order == 0 && reached.is_full() && !in_targets {
            self.truncated.extend(view.entry(&first));
        }
        self.record_pod(pod, withdraw.or(desired));
    }

    fn record_pod<L>(&mut self, pod: &Pod<'_, L>, desired: Option<Desired>) {
        let (leaving, evacuation) = (pod.leaves(), pod.facts.evacuation);
        self.pods.insert(pod.facts.key.uid, PodAssessment { leaving, evacuation, desired });
    }

    /// Records what the drain waits for until a pod has left. `node_ready` says whether the node is cordoned and lists the
    /// pod's target.
    fn record_wait<L>(&mut self, pod: &Pod<'_, L>, context: &NodeContext, node_ready: bool) {
        let facts = pod.facts;
        let turn = facts.turn.clone().filter(|_| !facts.terminating);
        let reason = match facts.evacuation {
            _ if facts.terminating => WaitReason::GracePeriod,
            _ if turn.is_some() => WaitReason::EvacuatorActive,
            EvacuationOwnership::Ours | EvacuationOwnership::OursUncancellable => WaitReason::Requested,
            _ if !context.is_next(pod) => WaitReason::Order,
            _ if !node_ready => WaitReason::Node,
            _ => WaitReason::Pending,
        };
        self.counts.waiting.add(reason);
        if self.waiting_for.len() < MAX_WAITING_FOR {
            let deadline = facts.deadline.filter(|_| facts.terminating);
            self.waiting_for.push(WaitingPod { pod: facts.key.clone(), reason, turn, deadline });
        }
    }

    fn assess_volumes<L: Labels>(&mut self, view: &View<'_, L>, pods: &[Pod<'_, L>]) {
        let default_left = pods.iter().any(|pod| pod.leaves() && pod.is_default());
        let attached = view.attached(pods);
        let number = u32::try_from(attached.len()).unwrap_or(u32::MAX);
        if view.ignores_volumes() {
            self.counts.volumes_ignored = if default_left { 0 } else { number };
            return;
        }
        self.counts.remaining += number;
        if number == 0 {
            return;
        }
        if !self.defers_later_types {
            for (drain, (_, plan)) in self.drains.iter_mut().zip(&view.drains) {
                *drain.steps.entry(plan.volume_step()).or_default() += number;
            }
        }
        if default_left {
            return;
        }
        self.counts.volumes = number;
        for (found, (drain, plan)) in self.drains.iter_mut().zip(&view.drains) {
            if drain.at.is_some_and(|at| plan.volume_step() <= at) {
                found.own += number;
            }
        }
        let since = view.node.facts.volume_wait.as_ref().map(|wait| wait.since.0);
        let timeout = since.zip(view.node.volume_timeout);
        let until = timeout.and_then(|(since, timeout)| since.saturating_add(timeout).ok());
        let blocked = blockers::volumes_attached(attached.into_iter(), since, until);
        self.blockers.push(Blocker::new(None, &blocked));
    }
}

impl<L: Labels> View<'_, L> {
    /// Applies the DrainRules to a pod.
    fn classify<'a>(&'a self, facts: &'a PodFacts<L>) -> Pod<'a, L> {
        let namespace = self.namespaces.get(&facts.key.namespace);
        let evaluation =
            self.rules.evaluate(&self.node.facts.labels, namespace, &facts.labels, facts.pod_type);
        let disposition = match () {
            () if facts.finished => Disposition::Finished,
            () if evaluation.behavior == DrainBehavior::Skip => Disposition::Skipped,
            () if self.served.serves(facts.pod_type) => Disposition::Leaving,
            () => Disposition::Unsupported,
        };
        let mut pod = Pod { facts, evaluation, disposition, has_no_alternative: false };
        pod.has_no_alternative = self.own_pods.has_no_alternative(facts.key.uid)
            && pod.is_default()
            && evaluation.behavior == DrainBehavior::Drain
            && !pod.is_undecided()
            && !facts.terminating
            && facts.evacuation != EvacuationOwnership::OursUncancellable
            && pod.leaves();
        pod
    }

    /// For each maintenance that drains the node, the first step that selects a pod.
    fn first_steps(&self, pod: &Pod<'_, L>) -> Vec<StepNumber> {
        let PodFacts { pod_type, priority, labels, .. } = pod.facts;
        let first = |plan: &Plan| plan.first_step(*pod_type, *priority, pod.evaluation.order, labels);
        self.drains.iter().map(|(_, plan)| first(plan)).collect()
    }

    /// The maintenances that have reached a pod, by index.
    fn reached(&self, first: &[StepNumber]) -> FixedBitSet {
        let mut reached = FixedBitSet::with_capacity(self.drains.len());
        for (place, (step, (drain, _))) in first.iter().zip(&self.drains).enumerate() {
            reached.set(place, drain.at.is_some_and(|at| *step <= at));
        }
        reached
    }

    fn ids(&self, indices: &FixedBitSet) -> Box<[Id]> {
        indices.ones().filter_map(|index| Some(self.drains.get(index)?.0.id)).collect()
    }

    /// The intersection of these steps of all maintenances.
    fn entry(&self, steps: &[StepNumber]) -> Option<EntryMatcher> {
        let mut entries = self.drains.iter().zip(steps).map(|((_, plan), step)| plan.entry(*step));
        let first = entries.next()??.clone();
        entries.try_fold(first, |both, next| both.and(next?))
    }

    /// Whether a pod has an Evacuation of ours that is no longer needed.
    fn has_unneeded_evacuation(&self, pod: &Pod<'_, L>) -> bool {
        let evacuated = pod.leaves()
            && (pod.evaluation.behavior == DrainBehavior::Drain || pod.is_undecided())
            && !pod.has_no_alternative
            && !self.drains.is_empty();
        pod.facts.evacuation == EvacuationOwnership::Ours && !pod.facts.finished && !evacuated
    }

    /// Whether Evacuations stay although no known maintenance needs them, because an unreadable maintenance may.
    fn keeps_evacuations(&self) -> bool {
        self.drains.is_empty() && self.node.may_be_drained_by(self.unreadable)
    }

    /// Whether the drain does not wait for volumes: the node's annotation says so, or the timeout has passed.
    fn ignores_volumes(&self) -> bool {
        let over = self.node.facts.volume_wait.as_ref().is_some_and(|wait| wait.over);
        self.node.facts.ignores_volumes || (over && self.node.volume_timeout.is_some())
    }

    /// Attached volumes that have to be detached. Volumes of pods that stay, or that leave after the wait for volumes, are
    /// excluded.
    fn attached(&self, pods: &[Pod<'_, L>]) -> BTreeSet<&Arc<str>> {
        let mut volumes: BTreeSet<_> = self.node.facts.volumes.iter().collect();
        let stays = |pod: &&Pod<'_, L>| !pod.facts.finished && (!pod.leaves() || !pod.is_default());
        if !volumes.is_empty() {
            for volume in pods.iter().filter(stays).flat_map(|pod| pod.facts.volumes.iter()) {
                volumes.remove(volume);
            }
        }
        volumes
    }

    fn cordon_due(&self) -> Option<Timestamp> {
        self.node.facts.cordon_due.filter(|_| self.node.cordon == Cordon::Wanted)
    }

    /// `unneeded` says whether a pod has an Evacuation of ours that is no longer needed.
    fn hold_state(&self, unneeded: bool) -> HoldState {
        let NodeRecord { cordon, facts, .. } = self.node;
        let left_over = (*cordon != Cordon::Wanted && facts.has_markers)
            || (*cordon == Cordon::Unwanted && facts.cordoned);
        let unreleased = left_over || (self.drains.is_empty() && unneeded);
        HoldState {
            cordoned: facts.cordoned,
            cordon_due: self.cordon_due(),
            unreleased,
            held_back: unreleased && self.node.is_held_back(self.unreadable),
        }
    }
}

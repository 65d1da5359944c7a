//! One look at a node and the pods on it: which have to leave, which are asked to leave now, what is in the way, and what
//! each maintenance still waits for there. A pure function; what it returns is all that the planner keeps of pods.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use fixedbitset::FixedBitSet;
use haulout_api_types::conditions;
use haulout_api_types::drain_plan::EntryMatcher;
use haulout_api_types::drain_rule::DrainBehavior;
use haulout_api_types::drain_rules::{DrainRules, Source, Treatment};
use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::names::reason;
use haulout_api_types::node_maintenance::{MAX_WAITING_FOR, PodType};
use haulout_api_types::selector::Labels;
use haulout_api_types::uid::Uid;
use jiff::Timestamp;

use crate::blockers::{self, Blocker};
use crate::facts::{EvacuationOf, PodFacts, PodKey};
use crate::node::{Cordon, Drain, NodeRecord};
use crate::places::Places;
use crate::plan::{Plan, Served, StepNumber, is_targeted};
use crate::planner::Id;
use crate::waiting::{Awaited, Waiting, Waits};

/// How many of its skipped pods a node names: a message does not list more.
pub const MAX_SKIPPED: usize = 5;

/// What is wanted for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Desired {
    /// That it is evacuated.
    Evacuate {
        /// The maintenances that have reached it, oldest first.
        reached_by: Box<[Id]>,
        /// Whether the node's annotation, as it was last observed, has the pod among its drain targets. Nobody is asked
        /// to leave before.
        announced: bool,
    },
    /// That its Evacuation is no longer ours.
    Withdraw,
}

/// What was found of one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodAssessment {
    /// Whether it has to leave.
    pub leaving: bool,
    /// Whose Evacuation it had.
    pub evacuation: EvacuationOf,
    pub desired: Option<Desired>,
}

/// How many of a node's pods and volumes are first selected in which step.
pub(crate) type Steps = BTreeMap<StepNumber, u32>;

/// What was found for one maintenance that drains the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DrainAssessment {
    pub id: Id,
    /// What its steps first select here.
    pub steps: Steps,
    /// Of what is targeted, how much it has reached itself.
    pub own: u32,
    /// Who holds back pods that it has reached, by their places among those that drain the node.
    pub limited_by: FixedBitSet,
}

/// What a node shows of its maintenances.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Marks {
    pub cordoned: bool,
    /// When its cordon is put back that somebody takes off again and again.
    pub cordon_due: Option<Timestamp>,
    /// Whether something of ours is left over on it that nobody wants.
    pub unreleased: bool,
    /// Whether that stays, because a maintenance that cannot be followed may want it.
    pub held_back: bool,
}

/// What one look at a node finds.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Assessment {
    pub marks: Marks,
    pub counts: Counts,
    /// The unfinished pods of a node that is drained; of any other, those with an Evacuation that nobody wants.
    pub pods: HashMap<Uid, PodAssessment>,
    /// One for each maintenance that drains the node, oldest first.
    pub drains: Vec<DrainAssessment>,
    /// The first pods that a drain rule or their label has skipped.
    pub skipped: Vec<PodKey>,
    pub blockers: Vec<Blocker>,
    /// What cannot be written, whoever maintains the node.
    pub refused: Vec<Blocker>,
    /// The first pods that leave, in order.
    pub waiting_for: Vec<Awaited>,
    /// Whether later pod types have to wait for a Default pod that stays for now.
    pub lingers: bool,
    /// Entries for pods that all have reached and that are not among the targets, because these were cut.
    pub cut: Vec<EntryMatcher>,
    /// When to look again, because time alone changes something.
    pub wake: Option<Timestamp>,
}

/// Numbers that all maintenances of a node share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pods that have to leave and are not on their way.
    pub pending: u32,
    /// Pods that have an Evacuation or are terminating.
    pub evacuating: u32,
    /// Pods that nobody evacuates here.
    pub unsupported: u32,
    /// Pods that a drain rule or their label has skipped.
    pub skipped: u32,
    /// Pods that have to leave and are among the targets, but for those that are waited for or that wait for them.
    pub targeted: u32,
    /// Pods that are waited for until they have finished.
    pub completing: u32,
    /// Pods of Haulout itself that have nowhere to go.
    pub stranded: u32,
    /// Volumes that are waited for, now that no Default pod is left.
    pub volumes: u32,
    /// Volumes that would be waited for, if the node did not say otherwise.
    pub volumes_ignored: u32,
    /// Pods and volumes that are left in all.
    pub left: u32,
    /// Pods that are targeted and that only an Evacuation makes leave.
    pub to_evacuate: u32,
    /// Pods that are targeted and that nothing keeps from leaving, by what is waited for.
    pub waiting: Waits,
}

impl Counts {
    /// What does not wait for any other maintenance to get further: pods that leave or finish or have nowhere to go, and
    /// volumes that are being detached.
    pub fn moving(&self) -> u32 {
        let waited_for = self.completing.saturating_add(self.stranded);
        self.targeted.saturating_add(self.volumes).saturating_add(waited_for)
    }
}

/// What a look at a node depends on besides its pods and the time.
pub(crate) struct View<'a, L> {
    pub served: Served,
    pub rules: &'a DrainRules,
    pub namespaces: &'a HashMap<Arc<str>, L>,
    pub node: &'a NodeRecord<L>,
    /// The maintenances that drain it, with their plans, oldest first.
    pub drains: Vec<(&'a Drain, &'a Plan)>,
    /// The UIDs of maintenances that cannot be followed.
    pub unreadable: &'a BTreeSet<Arc<str>>,
    pub places: &'a Places,
}

/// What becomes of a pod.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It has finished.
    Finished,
    /// A drain rule or its label says that it stays.
    Skipped,
    /// Nobody evacuates its type here.
    Unsupported,
    /// It has to leave.
    Leaving,
}

/// A pod with what the rules make of it.
struct Pod<'a, L> {
    facts: &'a PodFacts<L>,
    treatment: Treatment<'a>,
    fate: Fate,
    /// Whether it stays because it is of Haulout itself and has nowhere to go: nobody would be left to go on with the
    /// drain, or to say why it does not.
    stranded: bool,
}

impl<L> Pod<'_, L> {
    fn leaves(&self) -> bool {
        self.fate == Fate::Leaving
    }

    /// Whether a rule may say that it stays and it is not known whether it does. Until it is, the pod stays.
    fn is_unclear(&self) -> bool {
        matches!(self.treatment.source, Source::Unreadable(_) | Source::NamespaceUnknown(_))
    }

    /// Whether it is waited for until it has finished.
    fn completes(&self) -> bool {
        self.treatment.behavior == DrainBehavior::WaitCompleted && !self.is_unclear() && self.leaves()
    }

    fn is_among(&self, targets: &DrainTargets) -> bool
    where
        L: Labels,
    {
        let PodFacts { pod_type, priority, labels, .. } = self.facts;
        is_targeted(targets, *pod_type, *priority, self.treatment.order, labels)
    }

    fn is_default(&self) -> bool {
        self.facts.pod_type == PodType::Default
    }

    fn on_its_way(&self) -> bool {
        self.facts.terminating || self.facts.evacuation != EvacuationOf::Nobody
    }

    /// When it will have been terminating for too long.
    fn overdue(&self) -> Option<(Timestamp, Timestamp)> {
        let deadline = self.facts.deadline.filter(|_| self.facts.terminating)?;
        Some((deadline, conditions::overdue(deadline)))
    }

    /// Until when it is left alone, because it comes back again and again.
    fn held_until(&self, now: Timestamp) -> Option<Timestamp> {
        self.facts.returned.as_deref().map(|returned| returned.until).filter(|until| now < *until)
    }

    /// When time alone changes what is said or wanted of it.
    fn wake(&self, now: Timestamp) -> Option<Timestamp> {
        let overdue = self.overdue().map(|(_, overdue)| overdue).filter(|overdue| now < *overdue);
        overdue.into_iter().chain(self.held_until(now)).min()
    }

    /// What keeps it from leaving, as far as is known.
    fn blocker(&self, now: Timestamp) -> Option<Blocker> {
        let returned = self.facts.returned.as_deref();
        let blocked = match (self.overdue(), &self.facts.blocked, self.treatment.source) {
            (Some((deadline, overdue)), ..) if overdue <= now => blockers::terminating(deadline),
            (None, Some(blocked), _) => blocked.clone(),
            (.., Source::Unreadable(rule)) => blockers::rule_unreadable(rule),
            (.., Source::NamespaceUnknown(rule)) => blockers::namespace_unknown(rule),
            _ if self.treatment.behavior == DrainBehavior::WaitCompleted => blockers::waits_for_completion(),
            _ => blockers::returns(returned?, now),
        };
        Some(Blocker::new(Some(&self.facts.key), &blocked))
    }
}

/// What the pods of a node have in common that decides about each of them.
struct Together {
    /// Whether one of them is waited for until it has finished.
    completing: bool,
    /// Whether one is of Haulout itself and has nowhere to go.
    stranded: bool,
    /// The lowest order among the pods of each type that have to leave and can.
    lowest: BTreeMap<PodType, i32>,
}

impl Together {
    fn new<L>(pods: &[Pod<'_, L>]) -> Self {
        let mut lowest = BTreeMap::new();
        for pod in pods.iter().filter(|pod| pod.leaves() && !pod.stranded) {
            let order = lowest.entry(pod.facts.pod_type).or_insert(pod.treatment.order);
            *order = pod.treatment.order.min(*order);
        }
        Self {
            completing: pods.iter().any(Pod::completes),
            stranded: pods.iter().any(|pod| pod.stranded),
            lowest,
        }
    }

    /// Whether later pod types have to wait for a Default pod that stays for now.
    fn lingers(&self) -> bool {
        self.completing || self.stranded
    }

    /// Whether a pod leaves only after those that stay for now: it is of a later type, or of a higher order than those
    /// that are waited for.
    fn holds_back<L>(&self, pod: &Pod<'_, L>) -> bool {
        (self.lingers() && !pod.is_default()) || (self.completing && pod.treatment.order > 0)
    }

    fn is_next<L>(&self, pod: &Pod<'_, L>) -> bool {
        self.lowest.get(&pod.facts.pod_type).is_none_or(|lowest| *lowest >= pod.treatment.order)
    }
}

/// Looks at a node and all pods on it.
pub(crate) fn assess<L: Labels>(view: &View<'_, L>, pods: &[PodFacts<L>], now: Timestamp) -> Assessment {
    let mut pods: Vec<Pod<'_, L>> = pods.iter().map(|facts| view.classify(facts)).collect();
    pods.sort_by(|a, b| a.facts.key.cmp(&b.facts.key));
    let together = Together::new(&pods);
    let limited_by = FixedBitSet::with_capacity(view.drains.len());
    let drain = |(drain, _): &(&Drain, _)| DrainAssessment {
        id: drain.id,
        steps: Steps::new(),
        own: 0,
        limited_by: limited_by.clone(),
    };
    let mut found = Assessment {
        drains: view.drains.iter().map(drain).collect(),
        lingers: together.lingers(),
        ..Assessment::default()
    };
    found.refused.extend(view.node.facts.refused.as_ref().map(|refused| Blocker::new(None, refused)));
    for pod in &pods {
        found.assess_pod(view, &together, pod, now);
    }
    if !view.drains.is_empty() {
        found.assess_volumes(view, &pods);
        let due = view.cordon_due();
        found.blockers.extend(due.map(|due| Blocker::new(None, &blockers::cordon_race(due))));
    }
    found.marks = view.marks(pods.iter().any(|pod| view.is_unwanted(pod)));
    found
}

impl Assessment {
    /// Who holds back pods that a maintenance has reached here.
    pub fn limiters(&self, drain: &DrainAssessment) -> impl Iterator<Item = &Id> {
        drain.limited_by.ones().filter_map(|place| Some(&self.drains.get(place)?.id))
    }

    fn assess_pod<L: Labels>(
        &mut self,
        view: &View<'_, L>,
        together: &Together,
        pod: &Pod<'_, L>,
        now: Timestamp,
    ) {
        let (facts, counts) = (pod.facts, &mut self.counts);
        let unwanted = view.is_unwanted(pod);
        if unwanted {
            let refused = facts
                .blocked
                .as_ref()
                .filter(|blocked| &*blocked.reason == reason::EVACUATION_REFUSED && pod.overdue().is_none());
            self.refused.extend(refused.map(|refused| Blocker::new(Some(&facts.key), refused)));
        }
        let withdraw = (unwanted && !view.keeps_evacuations()).then_some(Desired::Withdraw);
        if view.drains.is_empty() {
            if withdraw.is_some() {
                let kept = PodAssessment { leaving: false, evacuation: facts.evacuation, desired: withdraw };
                self.pods.insert(facts.key.uid, kept);
            }
            return;
        }
        match pod.fate {
            Fate::Finished => return,
            Fate::Leaving => {}
            Fate::Unsupported => {
                counts.unsupported += 1;
                return self.keep(pod, withdraw);
            }
            Fate::Skipped => {
                counts.skipped += 1;
                if self.skipped.len() < MAX_SKIPPED {
                    self.skipped.push(facts.key.clone());
                }
                return self.keep(pod, withdraw);
            }
        }
        self.wake = self.wake.into_iter().chain(pod.wake(now)).min();
        counts.left += 1;
        *(if pod.on_its_way() { &mut counts.evacuating } else { &mut counts.pending }) += 1;
        if pod.completes() {
            counts.completing += 1;
            self.blockers.extend(pod.blocker(now));
            return self.keep(pod, withdraw);
        }
        if pod.stranded {
            counts.stranded += 1;
            self.blockers.push(Blocker::new(Some(&facts.key), &blockers::no_node()));
            return self.keep(pod, withdraw);
        }
        if together.holds_back(pod) {
            // What it waits for is named; but somebody else may have asked it to leave.
            self.blockers.extend(pod.blocker(now).filter(|_| pod.on_its_way()));
            return self.keep(pod, withdraw);
        }
        let first = view.first_steps(pod);
        for (drain, step) in self.drains.iter_mut().zip(&first) {
            *drain.steps.entry(*step).or_default() += 1;
        }
        let reached = view.reached(&first);
        let announced = pod.is_among(&view.node.facts.reached);
        let in_targets = pod.is_among(&view.node.targets);
        let desired = if in_targets || reached.is_full() {
            counts.targeted += 1;
            for (place, drain) in self.drains.iter_mut().enumerate() {
                drain.own += u32::from(reached.contains(place));
            }
            let evacuates = !facts.terminating && pod.treatment.behavior == DrainBehavior::Drain;
            counts.to_evacuate += u32::from(evacuates);
            let unannounced = view.node.too_large && !pod.on_its_way() && !announced;
            if unannounced {
                self.blockers.push(Blocker::new(Some(&facts.key), &blockers::targets_too_large()));
            } else if let Some(blocker) = pod.blocker(now) {
                self.blockers.push(blocker);
            } else {
                self.wait_for(pod, together, view.node.facts.cordoned && announced);
            }
            let now = evacuates && pod.held_until(now).is_none() && together.is_next(pod);
            now.then(|| Desired::Evacuate { reached_by: view.ids(&reached), announced })
        } else {
            for (place, drain) in self.drains.iter_mut().enumerate() {
                if reached.contains(place) {
                    drain.limited_by.extend(reached.zeroes());
                }
            }
            None
        };
        if view.drains.len() > 1 && pod.treatment.order == 0 && reached.is_full() && !in_targets {
            self.cut.extend(view.entry(&first));
        }
        self.keep(pod, withdraw.or(desired));
    }

    fn keep<L>(&mut self, pod: &Pod<'_, L>, desired: Option<Desired>) {
        let (leaving, evacuation) = (pod.leaves(), pod.facts.evacuation);
        self.pods.insert(pod.facts.key.uid, PodAssessment { leaving, evacuation, desired });
    }

    /// Takes note of what is waited for until a pod has left. `prepared` says whether its node lets it be asked.
    fn wait_for<L>(&mut self, pod: &Pod<'_, L>, together: &Together, prepared: bool) {
        let facts = pod.facts;
        let turn = facts.turn.clone().filter(|_| !facts.terminating);
        let waiting = match facts.evacuation {
            _ if facts.terminating => Waiting::GracePeriod,
            _ if turn.is_some() => Waiting::EvacuatorActive,
            EvacuationOf::Us | EvacuationOf::UsPastRecall => Waiting::Requested,
            _ if !together.is_next(pod) => Waiting::Order,
            _ if !prepared => Waiting::Node,
            _ => Waiting::Pending,
        };
        self.counts.waiting.add(waiting);
        if self.waiting_for.len() < MAX_WAITING_FOR {
            let deadline = facts.deadline.filter(|_| facts.terminating);
            self.waiting_for.push(Awaited { pod: facts.key.clone(), waiting, turn, deadline });
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
        self.counts.left += number;
        if number == 0 {
            return;
        }
        if !self.lingers {
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
    /// What the drain rules make of a pod.
    fn classify<'a>(&'a self, facts: &'a PodFacts<L>) -> Pod<'a, L> {
        let namespace = self.namespaces.get(&facts.key.namespace);
        let treatment = self.rules.treat(&self.node.facts.labels, namespace, &facts.labels, facts.pod_type);
        let fate = match () {
            () if facts.finished => Fate::Finished,
            () if treatment.behavior == DrainBehavior::Skip => Fate::Skipped,
            () if self.served.serves(facts.pod_type) => Fate::Leaving,
            () => Fate::Unsupported,
        };
        let mut pod = Pod { facts, treatment, fate, stranded: false };
        pod.stranded = self.places.is_placeless(facts.key.uid)
            && pod.is_default()
            && treatment.behavior == DrainBehavior::Drain
            && !pod.is_unclear()
            && !facts.terminating
            && facts.evacuation != EvacuationOf::UsPastRecall
            && pod.leaves();
        pod
    }

    /// For each maintenance that drains the node, the first step that selects a pod.
    fn first_steps(&self, pod: &Pod<'_, L>) -> Vec<StepNumber> {
        let PodFacts { pod_type, priority, labels, .. } = pod.facts;
        let first = |plan: &Plan| plan.first_step(*pod_type, *priority, pod.treatment.order, labels);
        self.drains.iter().map(|(_, plan)| first(plan)).collect()
    }

    /// The maintenances, by place, that have reached a pod.
    fn reached(&self, first: &[StepNumber]) -> FixedBitSet {
        let mut reached = FixedBitSet::with_capacity(self.drains.len());
        for (place, (step, (drain, _))) in first.iter().zip(&self.drains).enumerate() {
            reached.set(place, drain.at.is_some_and(|at| *step <= at));
        }
        reached
    }

    fn ids(&self, places: &FixedBitSet) -> Box<[Id]> {
        places.ones().filter_map(|place| Some(self.drains.get(place)?.0.id)).collect()
    }

    /// The entry that selects what these steps of all maintenances select.
    fn entry(&self, steps: &[StepNumber]) -> Option<EntryMatcher> {
        let mut entries = self.drains.iter().zip(steps).map(|((_, plan), step)| plan.entry(*step));
        let first = entries.next()??.clone();
        entries.try_fold(first, |both, next| both.and(next?))
    }

    /// Whether an Evacuation of ours has lost its purpose.
    fn is_unwanted(&self, pod: &Pod<'_, L>) -> bool {
        let evacuated = pod.leaves()
            && (pod.treatment.behavior == DrainBehavior::Drain || pod.is_unclear())
            && !pod.stranded
            && !self.drains.is_empty();
        pod.facts.evacuation == EvacuationOf::Us && !pod.facts.finished && !evacuated
    }

    /// Whether Evacuations stay though nobody is known who wants them, because a maintenance that cannot be followed may.
    fn keeps_evacuations(&self) -> bool {
        self.drains.is_empty() && self.node.may_be_drained_by(self.unreadable)
    }

    /// Whether its volumes are not waited for, or have been for as long as its maintenances want.
    fn ignores_volumes(&self) -> bool {
        let over = self.node.facts.volume_wait.as_ref().is_some_and(|wait| wait.over);
        self.node.facts.ignores_volumes || (over && self.node.volume_timeout.is_some())
    }

    /// Attached volumes that somebody should be rid of: not those of pods that stay, or that leave later
    /// than the volumes are waited for.
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

    /// `unwanted` says whether an Evacuation of ours is.
    fn marks(&self, unwanted: bool) -> Marks {
        let NodeRecord { cordon, facts, .. } = self.node;
        let left_over =
            (*cordon != Cordon::Wanted && facts.marked) || (*cordon == Cordon::Unwanted && facts.cordoned);
        let unreleased = left_over || (self.drains.is_empty() && unwanted);
        Marks {
            cordoned: facts.cordoned,
            cordon_due: self.cordon_due(),
            unreleased,
            held_back: unreleased && self.node.is_held_back(self.unreadable),
        }
    }
}

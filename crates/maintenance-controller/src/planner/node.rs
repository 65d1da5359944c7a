//! One node and its pods: who is still there, who is targeted, who leaves now, who holds whom back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fixedbitset::FixedBitSet;
use haulout_api_types::drain_plan::EntryMatcher;
use haulout_api_types::drain_rule::DrainBehavior;
use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::names::{EXCLUDE_VOLUME_DETACH_ANNOTATION, event, reason};
use haulout_api_types::node_maintenance::{MaintenanceOnNode, PodType, Stage};
use haulout_api_types::selector::Labels;
use jiff::{SignedDuration, Timestamp};

use super::Id;
use super::leaving::{Awaited, Waiting, Waits};
use crate::announce;
use crate::facts::{Blocked, EvacuationOf, NodeFacts, PodFacts, PodKey, Return, Wait};
use crate::plan::{Plan, Served, StepNumber, is_targeted};

/// A pod with what rules and plans make of it.
pub(super) struct PodRecord<L> {
    pub facts: PodFacts<L>,
    pub behavior: DrainBehavior,
    pub order: i32,
    /// Why nobody knows what becomes of it; until that is known, it stays.
    pub unclear: Option<Unclear>,
    /// For each draining maintenance, the first step that selects it.
    pub first: Vec<StepNumber>,
    /// Whether it is of Haulout itself and no other node would take it.
    pub placeless: bool,
}

/// Why it is not known what becomes of a pod.
#[derive(Clone)]
pub(super) enum Unclear {
    /// This rule may say that it stays, and cannot be read.
    Rule(Arc<str>),
    /// This rule may say that it stays, and asks for the labels of its namespace, which are not known yet.
    Namespace(Arc<str>),
}

/// What becomes of a pod.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// It has finished.
    Finished,
    /// A drain rule or its label says that it stays.
    Skipped,
    /// Nobody evacuates its type here.
    Unsupported,
    /// It has to leave.
    Leaving,
}

impl<L> PodRecord<L> {
    pub fn fate(&self, served: Served) -> Fate {
        if self.facts.finished {
            Fate::Finished
        } else if self.behavior == DrainBehavior::Skip {
            Fate::Skipped
        } else if served.serves(self.facts.pod_type) {
            Fate::Leaving
        } else {
            Fate::Unsupported
        }
    }

    /// What keeps it from leaving, as far as is known.
    fn blocker(&self) -> Option<Blocker> {
        let blocker = |reason: &str, message: &str, since| {
            Some(Blocker {
                pod: Some(self.facts.key.clone()),
                reason: reason.into(),
                message: message.into(),
                since,
            })
        };
        if let Some(blocked) = &self.facts.blocked {
            return blocker(&blocked.reason, &blocked.message, blocked.since);
        }
        match &self.unclear {
            Some(Unclear::Rule(rule)) => {
                return blocker(
                    reason::DRAIN_RULE_UNREADABLE,
                    &format!(
                        "the DrainRule {rule} cannot be read and may say that this pod stays: fix or delete it, its event {} says what is wrong",
                        event::NOT_FOLLOWED
                    ),
                    None,
                );
            }
            Some(Unclear::Namespace(rule)) => {
                return blocker(
                    reason::NAMESPACE_UNKNOWN,
                    &format!(
                        "the DrainRule {rule} may say that this pod stays, and the labels of its namespace are not known yet: if this lasts, look whether the maintenance controller can watch namespaces"
                    ),
                    None,
                );
            }
            None => {}
        }
        if self.behavior == DrainBehavior::WaitCompleted {
            return blocker(
                reason::WAITING_FOR_COMPLETION,
                "a drain rule or its label cluster.x-k8s.io/drain says to wait until it has finished",
                None,
            );
        }
        let returned = self.facts.returned.as_deref()?;
        let (how, remedy) = match returned.how {
            Return::ToleratesCordon => (
                "it tolerates the cordon and was",
                "remove its toleration of node.kubernetes.io/unschedulable",
            ),
            Return::Uncordoned => {
                ("the node was uncordoned during the drain and the pod", "find out who uncordons the node")
            }
            Return::BypassesScheduler => ("it was", "stop what puts it there past the scheduler"),
        };
        let until = returned.until.map(|until| {
            format!("; so that it is not killed in a loop, it is asked to leave again at {until:.0}")
        });
        let message = format!(
            "{how} put onto the node after the drain had begun{}: {remedy}, or let a DrainRule skip it",
            until.unwrap_or_default()
        );
        blocker(reason::RETURNS_TO_NODE, &message, Some(returned.since))
    }

    /// Whether it is left alone for now, because it comes back again and again.
    fn is_held(&self) -> bool {
        self.facts.returned.as_deref().is_some_and(|returned| returned.until.is_some())
    }

    /// Whether it stays because it is of Haulout itself and has nowhere to go: nobody would be left to go on with the
    /// drain, or to say why it does not.
    fn is_stranded(&self, served: Served) -> bool {
        self.placeless
            && self.facts.pod_type == PodType::Default
            && self.behavior == DrainBehavior::Drain
            && self.unclear.is_none()
            && !self.facts.terminating
            && self.facts.evacuation != EvacuationOf::UsPastRecall
            && self.fate(served) == Fate::Leaving
    }

    /// Whether it is waited for until it has finished.
    fn waits(&self, served: Served) -> bool {
        self.behavior == DrainBehavior::WaitCompleted
            && self.unclear.is_none()
            && self.fate(served) == Fate::Leaving
    }

    /// What is waited for, if nothing keeps it from leaving. `prepared` says whether its node lets it be asked.
    fn waiting(&self, lowest: &BTreeMap<PodType, i32>, prepared: bool) -> Waiting {
        let facts = &self.facts;
        match () {
            () if facts.terminating => Waiting::GracePeriod,
            () if matches!(facts.wait.as_deref(), Some(Wait::Evacuator(_))) => Waiting::EvacuatorActive,
            () if matches!(facts.evacuation, EvacuationOf::Us | EvacuationOf::UsPastRecall) => {
                Waiting::Requested
            }
            () if lowest.get(&facts.pod_type).is_some_and(|lowest| *lowest < self.order) => Waiting::Order,
            () if !prepared => Waiting::Node,
            () => Waiting::Pending,
        }
    }

    fn on_its_way(&self) -> bool {
        self.facts.terminating || self.facts.evacuation != EvacuationOf::Nobody
    }
}

/// Whether a node is to be cordoned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Cordon {
    /// No maintenance minds: it is as somebody else wants it.
    Nobodys,
    /// A maintenance in stage Cordon or Drain wants it so.
    Wanted,
    /// It is to be made schedulable, whoever cordoned it.
    Unwanted,
}

/// How many of a node's pods are first selected in which step.
pub(super) type Histogram = Vec<(StepNumber, u32)>;

/// A node with its pods and what the drain has made of it. The lists of maintenances are sorted by age, and
/// what concerns one of them stands at its place.
#[allow(clippy::struct_excessive_bools, reason = "they are independent of each other")]
pub(super) struct NodeRecord<L> {
    pub facts: Option<NodeFacts<L>>,
    pub pods: BTreeMap<PodKey, PodRecord<L>>,
    /// All maintenances that select it.
    pub members: Vec<Id>,
    pub cordon: Cordon,
    /// Those of them that drain it.
    pub draining: Vec<Id>,
    /// The step that each has reached here; `None` until it has been looked at.
    pub at: Vec<Option<StepNumber>>,
    /// What each has counted here.
    pub counted: Vec<Histogram>,
    /// By whom each is fast-forwarded here.
    pub forwarded: Vec<FixedBitSet>,
    /// Whether each is fast-forwarded here by one that has let go of the node.
    pub forwarded_by_past: Vec<bool>,
    pub targets: DrainTargets,
    /// The maintenances that helped to reach the targets and drain the node no longer.
    pub past: Vec<MaintenanceOnNode>,
    /// Whether its targets do not fit into its annotation.
    pub too_large: bool,
    /// How long its volumes are waited for; `None` if as long as it takes.
    pub volume_timeout: Option<SignedDuration>,
    /// Whether others drain it than when its targets were last raised.
    pub reassigned: bool,
    /// Targets that won a tie and are to be added.
    pub extra: Option<Arc<DrainTargets>>,
    pub view: View,
    /// What it showed when it was last looked at.
    pub counted_marks: Marks,
    /// Whether a pod on it is waited for until it has finished.
    pub completing: bool,
    /// Whether a pod of Haulout itself on it has nowhere to go.
    pub stranded: bool,
    /// Whether it waits in the queue.
    pub queued: bool,
}

impl<L> Default for NodeRecord<L> {
    fn default() -> Self {
        Self {
            facts: None,
            pods: BTreeMap::new(),
            members: Vec::new(),
            cordon: Cordon::Nobodys,
            draining: Vec::new(),
            at: Vec::new(),
            counted: Vec::new(),
            forwarded: Vec::new(),
            forwarded_by_past: Vec::new(),
            targets: DrainTargets::default(),
            past: Vec::new(),
            too_large: false,
            volume_timeout: None,
            reassigned: false,
            extra: None,
            view: View::default(),
            counted_marks: Marks::default(),
            completing: false,
            stranded: false,
            queued: false,
        }
    }
}

/// What a node shows of its maintenances.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Marks {
    pub cordoned: bool,
    /// When its cordon is put back that somebody takes off again and again.
    pub cordon_due: Option<Timestamp>,
    /// Whether something of ours is left over on it that nobody wants.
    pub unreleased: bool,
    /// Whether that stays, because a maintenance that cannot be followed may want it.
    pub held_back: bool,
}

/// How many of its skipped pods a node names: a message does not list more.
pub const MAX_SKIPPED: usize = 5;

/// What one look at a node finds.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct View {
    pub counts: Counts,
    /// The first pods that a drain rule or their label has skipped.
    pub skipped: Vec<PodKey>,
    /// Of what is targeted, how much each maintenance has reached itself.
    pub own: Vec<u32>,
    /// Who holds back pods that each maintenance has reached.
    pub limiters: Vec<FixedBitSet>,
    pub blockers: Vec<Blocker>,
    /// What cannot be written, whoever maintains the node.
    pub refused: Vec<Blocker>,
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
    /// Evacuations of ours that are no longer wanted.
    pub unwanted: u32,
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

/// Something that keeps a node from being drained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocker {
    /// The pod, unless it is a volume.
    pub pod: Option<PodKey>,
    /// In one word, one of `names::reason`.
    pub reason: Arc<str>,
    /// For people.
    pub message: Arc<str>,
    /// Since when, where that is known.
    pub since: Option<Timestamp>,
}

fn too_large<L>(pod: &PodRecord<L>) -> Blocker {
    Blocker {
        pod: Some(pod.facts.key.clone()),
        reason: reason::DRAIN_TARGETS_TOO_LARGE.into(),
        message: format!(
            "the drain targets of its node need more than the {} bytes that an annotation of the node may take, and the pod is not among those that fit: complete the maintenances of the node, and use plans with fewer or shorter selectors",
            announce::MAX_BYTES
        )
        .into(),
        since: None,
    }
}

fn no_node(pod: &PodKey) -> Blocker {
    Blocker {
        pod: Some(pod.clone()),
        reason: reason::NO_NODE_FOR_CONTROLLER.into(),
        message: "this pod of Haulout stays, because no node would take it that is schedulable and under no maintenance, and the drain needs it: add or uncordon a node with the labels and taints that suit it, or complete a maintenance; to drain the node around it, let a DrainRule skip it".into(),
        since: None,
    }
}

fn cordon_race(due: Timestamp) -> Blocker {
    Blocker {
        pod: None,
        reason: reason::CORDON_RACE.into(),
        message: format!(
            "somebody makes the node schedulable again and again; it is cordoned again at {due:.0}, and no pod is asked to leave before: stop what uncordons the node, or complete the maintenance"
        )
        .into(),
        since: None,
    }
}

impl Blocker {
    /// Of a pod, or of the node itself.
    pub(crate) fn new(pod: Option<&PodKey>, blocked: &Blocked) -> Self {
        let Blocked { reason, message, since } = blocked.clone();
        Self { pod: pod.cloned(), reason, message, since }
    }
}

impl<L: Labels> NodeRecord<L> {
    /// Attached volumes that somebody should be rid of: not those of pods that stay, or that leave later
    /// than the volumes are waited for.
    pub fn volumes(&self, served: Served) -> BTreeSet<&Arc<str>> {
        if self.facts.as_ref().is_some_and(|facts| facts.ignores_volumes) || self.has_waited_for_volumes() {
            return BTreeSet::new();
        }
        self.attached(served)
    }

    /// Whether its volumes have been waited for as long as its maintenances want.
    fn has_waited_for_volumes(&self) -> bool {
        let wait = self.facts.as_ref().and_then(|facts| facts.volume_wait.as_ref());
        self.volume_timeout.is_some() && wait.is_some_and(|wait| wait.over)
    }

    fn attached(&self, served: Served) -> BTreeSet<&Arc<str>> {
        let mut volumes: BTreeSet<_> = self.facts.iter().flat_map(|facts| facts.volumes.iter()).collect();
        if !volumes.is_empty() {
            let stays = |pod: &&PodRecord<L>| {
                !pod.facts.finished
                    && (pod.fate(served) != Fate::Leaving || pod.facts.pod_type != PodType::Default)
            };
            for volume in self.pods.values().filter(stays).flat_map(|pod| pod.facts.volumes.iter()) {
                volumes.remove(volume);
            }
        }
        volumes
    }

    /// Whether it is cordoned and nothing is left on it that has to leave.
    pub fn is_drained(&self, served: Served) -> bool {
        self.facts.as_ref().is_some_and(|facts| facts.cordoned)
            && !self.pods.values().any(|pod| pod.fate(served) == Fate::Leaving)
            && self.volumes(served).is_empty()
    }

    /// Whether a pod is waited for until it has finished.
    pub fn has_completing(&self, served: Served) -> bool {
        self.pods.values().any(|pod| pod.waits(served))
    }

    /// Whether a pod of Haulout itself has nowhere to go.
    pub fn has_stranded(&self, served: Served) -> bool {
        self.pods.values().any(|pod| pod.is_stranded(served))
    }

    /// Whether later pod types have to wait here for a Default pod that stays for now.
    pub fn lingers(&self) -> bool {
        self.completing || self.stranded
    }

    /// Whether a pod leaves only after those that stay for now: it is of a later type, or of a higher order than those
    /// that are waited for.
    fn is_behind(&self, pod: &PodRecord<L>) -> bool {
        (self.lingers() && pod.facts.pod_type != PodType::Default) || (self.completing && pod.order > 0)
    }

    /// Whether new pods can come here: it is schedulable, and no maintenance wants it not to be.
    pub fn is_open(&self) -> bool {
        self.cordon != Cordon::Wanted && self.facts.as_ref().is_some_and(|facts| !facts.cordoned)
    }

    /// Counts for each draining maintenance what its steps first select here. What is waited for holds up its own node
    /// and no other one, and so does what comes after it.
    pub fn count(&self, served: Served, volume_steps: &[StepNumber]) -> Vec<Histogram> {
        let volumes = if self.lingers() { 0 } else { self.volumes(served).len() };
        let volumes = u32::try_from(volumes).unwrap_or(u32::MAX);
        let mut all: Vec<BTreeMap<StepNumber, u32>> = vec![BTreeMap::new(); self.draining.len()];
        let counts = |pod: &&PodRecord<L>| {
            pod.fate(served) == Fate::Leaving
                && !pod.waits(served)
                && !pod.is_stranded(served)
                && !self.is_behind(pod)
        };
        for pod in self.pods.values().filter(counts) {
            for (histogram, step) in all.iter_mut().zip(&pod.first) {
                *histogram.entry(*step).or_default() += 1;
            }
        }
        for (histogram, step) in all.iter_mut().zip(volume_steps).filter(|_| volumes > 0) {
            *histogram.entry(*step).or_default() += volumes;
        }
        all.into_iter().map(|histogram| histogram.into_iter().collect()).collect()
    }

    /// The maintenances, by place, that have reached a pod.
    fn reached_by(&self, first: &[StepNumber]) -> FixedBitSet {
        let mut reached = FixedBitSet::with_capacity(self.draining.len());
        for (place, (step, at)) in first.iter().zip(&self.at).enumerate() {
            reached.set(place, at.is_some_and(|at| *step <= at));
        }
        reached
    }

    fn targets_pod(&self, pod: &PodRecord<L>, reached: &FixedBitSet) -> bool {
        let facts = &pod.facts;
        !self.draining.is_empty()
            && (reached.is_full()
                || is_targeted(&self.targets, facts.pod_type, facts.priority, pod.order, &facts.labels))
    }

    /// Entries for pods that all have reached and that are not among the targets, because these were cut: one for each.
    pub fn cut(&self, served: Served, plans: &[Arc<Plan>]) -> Vec<EntryMatcher> {
        let is_cut = |pod: &&PodRecord<L>| {
            let PodFacts { pod_type, priority, labels, .. } = &pod.facts;
            pod.order == 0
                && pod.fate(served) == Fate::Leaving
                && self.reached_by(&pod.first).is_full()
                && !is_targeted(&self.targets, *pod_type, *priority, pod.order, labels)
        };
        let entry = |pod: &PodRecord<L>| {
            let mut own = plans.iter().zip(&pod.first).map(|(plan, step)| plan.entry(*step));
            let first = own.next()??.clone();
            own.try_fold(first, |both, next| both.and(next?))
        };
        // One maintenance alone has them all.
        let several = self.draining.len() > 1;
        self.pods.values().filter(|_| several).filter(is_cut).filter_map(entry).collect()
    }

    /// What it shows of its maintenances.
    pub fn marks(&self, view: &View, unreadable: &BTreeSet<Arc<str>>) -> Marks {
        let Some(facts) = &self.facts else { return Marks::default() };
        let left_over = (self.cordon != Cordon::Wanted && facts.marked)
            || (self.cordon == Cordon::Unwanted && facts.cordoned);
        let unreleased = left_over || (self.draining.is_empty() && view.counts.unwanted > 0);
        Marks {
            cordoned: facts.cordoned,
            cordon_due: self.cordon_due(),
            unreleased,
            held_back: unreleased && self.is_held_back(unreadable),
        }
    }

    /// The maintenances among these that hold it according to its annotation.
    pub fn held_by<'a>(
        &'a self,
        uids: &'a BTreeSet<Arc<str>>,
    ) -> impl Iterator<Item = &'a MaintenanceOnNode> {
        let all = self.facts.iter().filter_map(|facts| facts.maintenances.as_deref()).flatten();
        all.filter(|known| known.stage != Stage::Complete && uids.contains(known.uid.as_str()))
    }

    /// Whether one of these maintenances may drain it.
    pub fn may_be_drained_by(&self, uids: &BTreeSet<Arc<str>>) -> bool {
        let says = self.facts.as_ref().is_some_and(|facts| facts.maintenances.is_some());
        self.held_by(uids).any(|known| known.stage == Stage::Drain) || (!says && self.is_held_back(uids))
    }

    /// Whether it keeps what it has, because one of these maintenances may hold it.
    pub fn is_held_back(&self, uids: &BTreeSet<Arc<str>>) -> bool {
        let unknown = |facts: &NodeFacts<L>| facts.marked && facts.maintenances.is_none();
        self.held_by(uids).next().is_some() || (!uids.is_empty() && self.facts.as_ref().is_some_and(unknown))
    }

    fn cordon_due(&self) -> Option<Timestamp> {
        self.facts.as_ref()?.cordon_due.filter(|_| self.cordon == Cordon::Wanted)
    }

    /// Looks at everything.
    pub fn look(&self, served: Served, volume_steps: &[StepNumber]) -> View {
        let places = self.draining.len();
        let mut view = View {
            own: vec![0; places],
            limiters: vec![FixedBitSet::with_capacity(places); places],
            ..View::default()
        };
        let refused = self.facts.as_ref().and_then(|facts| facts.refused.as_ref());
        view.refused.extend(refused.map(|refused| Blocker::new(None, refused)));
        let lowest = if places > 0 { self.lowest_orders(served) } else { BTreeMap::new() };
        let mut default_pods = false;
        for pod in self.pods.values() {
            let fate = pod.fate(served);
            if self.is_unwanted(pod, served) {
                view.counts.unwanted += 1;
                let refused = pod.facts.blocked.as_ref().filter(|b| &*b.reason == reason::EVACUATION_REFUSED);
                view.refused.extend(refused.map(|refused| Blocker::new(Some(&pod.facts.key), refused)));
            }
            if places == 0 {
                continue;
            }
            match fate {
                Fate::Leaving => {}
                Fate::Finished => continue,
                Fate::Unsupported => {
                    view.counts.unsupported += 1;
                    continue;
                }
                Fate::Skipped => {
                    view.counts.skipped += 1;
                    if view.skipped.len() < MAX_SKIPPED {
                        view.skipped.push(pod.facts.key.clone());
                    }
                    continue;
                }
            }
            default_pods |= pod.facts.pod_type == PodType::Default;
            view.counts.left += 1;
            if pod.on_its_way() {
                view.counts.evacuating += 1;
            } else {
                view.counts.pending += 1;
            }
            if pod.waits(served) {
                view.counts.completing += 1;
                view.blockers.extend(pod.blocker());
                continue;
            }
            if pod.is_stranded(served) {
                view.counts.stranded += 1;
                view.blockers.push(no_node(&pod.facts.key));
                continue;
            }
            if self.is_behind(pod) {
                // What it waits for is named; but somebody else may have asked it to leave.
                view.blockers.extend(pod.blocker().filter(|_| pod.on_its_way()));
                continue;
            }
            let reached = self.reached_by(&pod.first);
            if self.targets_pod(pod, &reached) {
                view.counts.targeted += 1;
                for (place, own) in view.own.iter_mut().enumerate() {
                    *own += u32::from(reached.contains(place));
                }
                let leaves = !pod.facts.terminating && pod.behavior == DrainBehavior::Drain;
                view.counts.to_evacuate += u32::from(leaves);
                match self.blocker(pod) {
                    Some(blocker) => view.blockers.push(blocker),
                    None => view.counts.waiting.add(pod.waiting(&lowest, self.is_prepared(pod))),
                }
            } else {
                for (place, limiters) in view.limiters.iter_mut().enumerate() {
                    if reached.contains(place) {
                        limiters.extend(reached.zeroes());
                    }
                }
            }
        }
        if places > 0 {
            self.look_at_volumes(served, volume_steps, default_pods, &mut view);
            view.blockers.extend(self.cordon_due().map(cordon_race));
        }
        view
    }

    /// What keeps a targeted pod from leaving.
    fn blocker(&self, pod: &PodRecord<L>) -> Option<Blocker> {
        let unannounced = self.too_large && !pod.on_its_way() && !self.announces_pod(pod);
        if unannounced { Some(too_large(pod)) } else { pod.blocker() }
    }

    /// The pods that are targeted and that nothing keeps from leaving, in order.
    pub fn awaited(&self, served: Served) -> impl Iterator<Item = Awaited> {
        let lowest = self.lowest_orders(served);
        let leaves = move |pod: &&PodRecord<L>| {
            pod.fate(served) == Fate::Leaving
                && !pod.waits(served)
                && !pod.is_stranded(served)
                && !self.is_behind(pod)
                && self.targets_pod(pod, &self.reached_by(&pod.first))
                && self.blocker(pod).is_none()
        };
        self.pods.values().filter(leaves).map(move |pod| Awaited {
            pod: pod.facts.key.clone(),
            waiting: pod.waiting(&lowest, self.is_prepared(pod)),
            wait: pod.facts.wait.clone(),
        })
    }

    /// The lowest order among the pods of each type that have to leave and can.
    fn lowest_orders(&self, served: Served) -> BTreeMap<PodType, i32> {
        let mut lowest = BTreeMap::new();
        let leaves = |pod: &&PodRecord<L>| pod.fate(served) == Fate::Leaving && !pod.is_stranded(served);
        for pod in self.pods.values().filter(leaves) {
            let order = lowest.entry(pod.facts.pod_type).or_insert(pod.order);
            *order = pod.order.min(*order);
        }
        lowest
    }

    fn look_at_volumes(&self, served: Served, steps: &[StepNumber], default_pods: bool, view: &mut View) {
        let volumes = self.volumes(served);
        let number = u32::try_from(volumes.len()).unwrap_or(u32::MAX);
        if number == 0 && !default_pods {
            view.counts.volumes_ignored = u32::try_from(self.attached(served).len()).unwrap_or(u32::MAX);
        }
        view.counts.left += number;
        if number == 0 || default_pods {
            return;
        }
        view.counts.volumes = number;
        for ((own, step), at) in view.own.iter_mut().zip(steps).zip(&self.at) {
            if at.is_some_and(|at| *step <= at) {
                *own += number;
            }
        }
        let mut names: Vec<&str> = volumes.iter().take(10).map(AsRef::as_ref).collect();
        let more = format!("{} more", volumes.len() - names.len());
        if volumes.len() > names.len() {
            names.push(&more);
        }
        let what = if number == 1 { "volume is" } else { "volumes are" };
        let since = self.facts.as_ref().and_then(|facts| Some(facts.volume_wait.as_ref()?.since.0));
        let until = since.zip(self.volume_timeout).and_then(|(since, most)| since.saturating_add(most).ok());
        let until = until.map(|until| format!("; the drain goes on without at {until:.0}"));
        view.blockers.push(Blocker {
            pod: None,
            reason: reason::VOLUMES_ATTACHED.into(),
            message: format!(
                "{number} {what} still attached though the pods have left: {}; look at the VolumeAttachments and the CSI driver, or annotate the node with {EXCLUDE_VOLUME_DETACH_ANNOTATION} to go on without{}",
                names.join(", "),
                until.unwrap_or_default()
            )
            .into(),
            since,
        });
    }

    /// Whether the node's annotation has a pod among its drain targets.
    pub fn announces(&self, pod: &PodKey) -> bool {
        self.pods.get(pod).is_some_and(|pod| self.announces_pod(pod))
    }

    fn announces_pod(&self, pod: &PodRecord<L>) -> bool {
        let PodFacts { pod_type, priority, labels, .. } = &pod.facts;
        let reached = self.facts.as_ref().map(|facts| &facts.reached);
        reached.is_some_and(|reached| is_targeted(reached, *pod_type, *priority, pod.order, labels))
    }

    /// Whether the pod may be asked to leave: the node takes no new pods, and says that this one is to leave.
    fn is_prepared(&self, pod: &PodRecord<L>) -> bool {
        self.facts.as_ref().is_some_and(|facts| facts.cordoned) && self.announces_pod(pod)
    }

    /// Whether an Evacuation of ours has lost its purpose.
    fn is_unwanted(&self, pod: &PodRecord<L>, served: Served) -> bool {
        pod.facts.evacuation == EvacuationOf::Us
            && !pod.facts.finished
            && !(pod.fate(served) == Fate::Leaving
                && (pod.behavior == DrainBehavior::Drain || pod.unclear.is_some())
                && !pod.is_stranded(served)
                && !self.draining.is_empty())
    }

    /// The pods whose Evacuations are to be withdrawn.
    pub fn unwanted(&self, served: Served) -> impl Iterator<Item = &PodKey> {
        self.pods.iter().filter(move |(_, pod)| self.is_unwanted(pod, served)).map(|(key, _)| key)
    }

    /// The pods that are to be evacuated now, with the places of those who want it: what is targeted, is not
    /// ending already, and has no pod of lower order before it.
    pub fn evacuate(&self, served: Served) -> Vec<(&PodKey, Vec<usize>)> {
        let lowest = self.lowest_orders(served);
        let mut evacuate = Vec::new();
        for (key, pod) in self.pods.iter().filter(|(_, pod)| pod.fate(served) == Fate::Leaving) {
            let reached = self.reached_by(&pod.first);
            let now = pod.behavior == DrainBehavior::Drain
                && !pod.facts.terminating
                && !pod.is_held()
                && !pod.is_stranded(served)
                && !self.is_behind(pod)
                && lowest.get(&pod.facts.pod_type) == Some(&pod.order)
                && self.targets_pod(pod, &reached);
            if now {
                evacuate.push((key, reached.ones().collect()));
            }
        }
        evacuate
    }
}

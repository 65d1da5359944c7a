//! Decides what to do for the pods of one Deployment. A pod that has to leave is moved from its ReplicaSet to the
//! Deployment, so that the ReplicaSet creates a replacement. When as many pods are available as before, the evacuator has
//! completed, and the evacuation controller evicts the pod. Pods of cancelled evacuations are given back.

mod obstacle;
mod queue;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use haulout_api_types::names::reason;
use haulout_service_runtime::pods::Uid;
use jiff::{SignedDuration, Timestamp};

pub use self::obstacle::Obstacle;
use crate::objects::{Deployment, Evac, Owner, Pod, ReplicaSet};
use crate::status;

/// How long a replacement may take before we report that we wait for it. Most need no longer.
const QUIET: SignedDuration = SignedDuration::from_secs(2);
/// By how much our clock and the API server's may differ.
const CLOCK_SKEW: SignedDuration = SignedDuration::from_secs(30);
/// How long the objects of a pod may be missing in our caches: their watches are independent.
const CACHE_GRACE: SignedDuration = SignedDuration::from_secs(10);

/// A Deployment with everything that belongs to it.
#[derive(Clone, Debug)]
pub struct View {
    /// The Deployment.
    pub deployment: Deployment,
    /// Whether its namespace asks for evictions without a replacement.
    pub namespace_opted_out: bool,
    /// Its ReplicaSets.
    pub sets: HashMap<Uid, ReplicaSet>,
    /// Its pods, and those of its ReplicaSets.
    pub pods: Vec<PodView>,
}

/// A pod with its Evacuation.
#[derive(Clone, Debug)]
pub struct PodView {
    /// The pod.
    pub pod: Arc<Pod>,
    /// Its Evacuation, if we are one of its evacuators.
    pub evac: Option<Arc<Evac>>,
    /// What we found out by requests.
    pub local: Local,
}

/// What we found out about a pod by requests. It is in memory only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Local {
    /// Why its volumes cannot be mounted by a replacement; `None` if that is not known yet.
    pub volumes: Option<Result<(), Box<str>>>,
    /// Why the API server rejects to move it.
    pub rejected: Option<Box<str>>,
    /// Whether the API server rejects our finalizer on its Evacuation.
    pub finalizer_rejected: bool,
}

/// What to do for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Read its PersistentVolumeClaims.
    CheckVolumes,
    /// Add our finalizer to its Evacuation.
    Hold,
    /// Remove our finalizer from its Evacuation.
    Release,
    /// Give it the lowest deletion cost: if the Deployment is scaled down, pods that have to leave go first.
    Prefer,
    /// Move it to its Deployment.
    Move {
        /// The number of available pods before.
        available: i32,
    },
    /// Report what we wait for.
    Report(Report),
    /// Report that we have completed.
    Complete {
        /// The result, for the metrics.
        outcome: Outcome,
        /// The message.
        message: String,
    },
    /// Give it back to its ReplicaSet.
    GiveBack,
    /// Remove our annotation and restore the deletion cost.
    Restore,
    /// Request an Evacuation: no ReplicaSet can take it back.
    Evacuate,
}

/// What we wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The message.
    pub message: String,
    /// Whether something has moved on since the last report.
    pub progress: bool,
    /// When we expect to complete.
    pub expected_end: Option<Timestamp>,
    /// Whether no node has room.
    pub no_room: bool,
}

/// How our turn ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// As many pods are available as before.
    Replaced,
    /// The pod is not ready, so that nothing is lost.
    NotReady,
    /// The Deployment does not support replacement, or asks for none.
    Unsupported,
    /// Something keeps every replacement from starting.
    Obstructed,
    /// No node had room in time.
    NoRoom,
    /// The replacement was not available in time.
    TimedOut,
}

impl Outcome {
    /// The value of the label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Replaced => "replaced",
            Self::NotReady => "not_ready",
            Self::Unsupported => "unsupported",
            Self::Obstructed => "obstructed",
            Self::NoRoom => "no_room",
            Self::TimedOut => "timed_out",
        }
    }
}

/// What to do now, and when to decide again if nothing changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// At most one action per pod.
    pub actions: Vec<(Uid, Action)>,
    /// When to decide again.
    pub wake: Option<Timestamp>,
}

impl Plan {
    fn act(&mut self, pod: &PodView, action: Action) {
        self.actions.push((pod.pod.uid, action));
    }

    fn wake_at(&mut self, time: Timestamp) {
        self.wake = Some(self.wake.map_or(time, |wake| wake.min(time)));
    }
}

/// Decides what to do for a Deployment. `wait_for_room` is how long to wait for a node with room.
pub fn decide(view: &View, wait_for_room: SignedDuration, now: Timestamp) -> Plan {
    let mut plan = Plan::default();
    let counts = Counts::of(view, now, &mut plan);
    let mut waiting: Vec<(&PodView, &Evac)> = Vec::new();
    let mut moved: Vec<(&PodView, &Evac)> = Vec::new();
    for pod in &view.pods {
        match &pod.evac {
            _ if pod.pod.leaving => leaving(view, pod, &mut plan),
            Some(evac) if !evac.cancelled => {
                // Nobody wants its pods any more: its ReplicaSet deletes this one, too.
                if pod.pod.is_moved() && view.deployment.replicas == 0 && view.former_set(pod).is_some() {
                    plan.act(pod, Action::GiveBack);
                } else if evac.is_active() && pod.pod.is_moved() {
                    moved.push((pod, evac));
                } else if evac.is_active() {
                    waiting.push((pod, evac));
                }
            }
            evac => undo(view, &counts, pod, evac.as_deref(), &mut plan),
        }
    }
    let order = |(pod, evac): &(&PodView, &Evac)| (evac.created, pod.pod.created, pod.pod.uid);
    moved.sort_by_key(order);
    waiting.sort_by_key(order);
    let mut completed = BTreeSet::new();
    for (pod, evac) in moved {
        if replacement(view, &counts, (pod, evac), &completed, wait_for_room, now, &mut plan) {
            completed.insert(pod.pod.uid);
        }
    }
    queue::decide(view, &counts, &waiting, now, &mut plan);
    plan
}

impl View {
    /// The ReplicaSet of a pod.
    fn set(&self, pod: &PodView) -> Option<&ReplicaSet> {
        let Some(Owner::ReplicaSet(uid)) = pod.pod.owner else { return None };
        self.sets.get(&uid)
    }

    /// The ReplicaSet that a pod belonged to before it was moved.
    fn former_set(&self, pod: &PodView) -> Option<&ReplicaSet> {
        let uid = pod.pod.former.known()?.uid.parse().ok()?;
        self.sets.get(&uid).filter(|set| !set.deleted)
    }
}

/// The numbers of a Deployment's pods. Terminating pods do not count.
struct Counts {
    /// The available pods of its ReplicaSets that do not leave, too.
    available: i32,
    /// The pods that were moved to the Deployment.
    moved: i32,
    /// The pods of each ReplicaSet.
    by_set: HashMap<Uid, i32>,
    /// When something last moved on: a pod was moved, created, or became ready.
    changed: Timestamp,
}

impl Counts {
    fn of(view: &View, now: Timestamp, plan: &mut Plan) -> Self {
        let mut counts = Self { available: 0, moved: 0, by_set: HashMap::new(), changed: Timestamp::MIN };
        for PodView { pod, evac, .. } in view.pods.iter().filter(|pod| !pod.pod.leaving) {
            counts.changed = counts.changed.max(pod.created).max(pod.ready.unwrap_or(Timestamp::MIN));
            match pod.owner {
                Some(Owner::ReplicaSet(set)) => {
                    *counts.by_set.entry(set).or_default() += 1;
                    if evac.as_ref().is_some_and(|evac| evac.lets_pod_leave()) {
                        continue;
                    }
                    match pod.available_at(view.deployment.min_ready) {
                        Some(time) if time <= now => counts.available += 1,
                        Some(time) => {
                            counts.changed = counts.changed.max(now.min(time));
                            plan.wake_at(time);
                        }
                        None => {}
                    }
                }
                Some(Owner::Deployment(_)) => {
                    counts.moved += 1;
                    if let Some(former) = pod.former.known() {
                        counts.changed = counts.changed.max(time(former.since));
                    }
                }
                None => {}
            }
        }
        counts.changed = counts.changed.min(now);
        counts
    }

    /// Whether the ReplicaSet has acted on its latest specification and has no pod too many. Otherwise it may be deleting
    /// this very pod, and would wait for minutes until it observes that.
    fn has_converged(&self, uid: Uid, set: &ReplicaSet) -> bool {
        let pods = self.by_set.get(&uid).copied().unwrap_or_default();
        set.current && pods <= set.wanted && set.reported <= set.wanted
    }
}

fn time(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap_or(Timestamp::MIN)
}

fn after(time: Timestamp, duration: SignedDuration) -> Timestamp {
    time.saturating_add(duration).unwrap_or(Timestamp::MAX)
}

/// A terminating or finished pod.
fn leaving(view: &View, pod: &PodView, plan: &mut Plan) {
    let evac = pod.evac.as_deref();
    if pod.pod.finished && evac.is_some_and(Evac::is_active) {
        let message = status::finished(&pod.pod);
        plan.act(pod, Action::Complete { outcome: Outcome::NotReady, message });
        return;
    }
    let unexpected = evac.is_none_or(|evac| evac.is_active() || evac.cancelled);
    if pod.pod.is_moved() && view.former_set(pod).is_some() {
        // Its ReplicaSet may have deleted it just when we moved it, even if it was evicted, too. The ReplicaSet has to observe
        // the deletion: otherwise it creates and deletes no other pod for five minutes.
        plan.act(pod, Action::GiveBack);
    } else if pod.pod.finished && unexpected && !pod.pod.is_moved() && pod.pod.former.exists() {
        plan.act(pod, Action::Restore);
    } else if evac.is_some_and(|evac| evac.cancelled && evac.is_held()) {
        plan.act(pod, Action::Release);
    }
}

/// A pod that stays: its evacuation is cancelled, or has never existed.
fn undo(view: &View, counts: &Counts, pod: &PodView, evac: Option<&Evac>, plan: &mut Plan) {
    let held = evac.is_some_and(Evac::is_held);
    if pod.pod.is_moved() {
        match view.former_set(pod) {
            // A ReplicaSet that wants no pods would delete it without regard to its budget.
            Some(set) if set.wanted > 0 || view.deployment.replicas == 0 => plan.act(pod, Action::GiveBack),
            _ if view.deployment.deleted => {}
            // No new Evacuation is possible before this one is gone.
            _ if held => plan.act(pod, Action::Release),
            _ if evac.is_none() => plan.act(pod, Action::Evacuate),
            _ => {}
        }
        return;
    }
    if pod.pod.former.exists() {
        let has_converged = |uid| view.sets.get(&uid).is_none_or(|set| counts.has_converged(uid, set));
        let restored = match pod.pod.owner {
            Some(Owner::ReplicaSet(uid)) => has_converged(uid),
            _ => true,
        };
        if restored {
            plan.act(pod, Action::Restore);
        }
    } else if held {
        plan.act(pod, Action::Release);
    }
}

/// A pod whose replacement starts. Returns whether we have completed.
fn replacement(
    view: &View,
    counts: &Counts,
    (pod, evac): (&PodView, &Evac),
    completed: &BTreeSet<Uid>,
    wait_for_room: SignedDuration,
    now: Timestamp,
    plan: &mut Plan,
) -> bool {
    let deployment = &view.deployment;
    let former = pod.pod.former.known();
    let since = former.map_or(evac.created, |former| time(former.since));
    let target = former.map_or(deployment.replicas, |former| former.available).min(deployment.replicas);
    let stays = |other: &&PodView| {
        other.pod.uid != pod.pod.uid
            && other.pod.is_moved()
            && !other.pod.leaving
            && other.pod.ready.is_some()
            && !completed.contains(&other.pod.uid)
            && other.evac.as_ref().is_some_and(|evac| evac.is_active())
    };
    let others = i32::try_from(view.pods.iter().filter(stays).count()).unwrap_or(i32::MAX);
    let mut complete = |outcome, message: String| {
        plan.act(pod, Action::Complete { outcome, message });
        true
    };
    // Most of the progress deadline is left for others to act.
    let limit = |duration: SignedDuration| duration.min(evac.deadline / 2);
    let due = after(since, limit(deployment.progress_deadline.saturating_add(deployment.min_ready)));
    let enough = counts.available.saturating_add(others) >= target;
    // Its controller may be about to create or delete pods.
    if enough && (deployment.current || now >= due) {
        return complete(Outcome::Replaced, status::replaced(deployment, target));
    }
    if deployment.deleted {
        return complete(Outcome::Unsupported, status::deleted(deployment));
    }
    // Pods that were not available before are not waited for.
    let earliest = since.saturating_sub(CLOCK_SKEW).unwrap_or(Timestamp::MIN);
    let starting: Vec<_> = view
        .pods
        .iter()
        .filter(|other| other.evac.as_ref().is_none_or(|evac| !evac.lets_pod_leave()))
        .map(|other| &other.pod)
        .filter(|other| matches!(other.owner, Some(Owner::ReplicaSet(_))) && !other.leaving)
        .filter(|other| {
            other.created >= earliest && other.available_at(deployment.min_ready).is_none_or(|at| at > now)
        })
        .collect();
    let set = view.former_set(pod);
    let failure = set.and_then(|set| set.failure.as_deref());
    let obstacle = if enough { None } else { obstacle::find(&starting, set) };
    let (due, no_room) = match &obstacle {
        Some(Obstacle::Structural(text)) => {
            return complete(Outcome::Obstructed, status::obstructed(deployment, text));
        }
        Some(Obstacle::Room { since, .. }) => {
            (after(no_room_since(view, &starting, *since), limit(wait_for_room)), true)
        }
        None => (due, false),
    };
    if now >= due {
        let waited = now.duration_since(since);
        let outcome = if no_room { Outcome::NoRoom } else { Outcome::TimedOut };
        return complete(outcome, status::gave_up(deployment, &starting, failure, obstacle.as_ref(), waited));
    }
    plan.wake_at(due);
    let loud = after(since, QUIET);
    if now < loud && !no_room {
        plan.wake_at(loud);
        return false;
    }
    let message = match &obstacle {
        Some(Obstacle::Room { text, .. }) => status::no_room(&starting, text, due),
        _ if enough => status::not_observed(deployment),
        _ => status::starting(deployment, &starting, failure),
    };
    let expected_end = expected_end(view, since).filter(|_| !no_room);
    let report = Report { message, progress: counts.changed > last_report(evac), expected_end, no_room };
    report_if_changed(evac, report, now, plan, pod);
    false
}

/// Since when no node has room for a pod of these ReplicaSets. Replacements of pods that have left already may wait, too: what
/// comes after them does not wait as long again.
fn no_room_since(view: &View, starting: &[&Arc<Pod>], since: Timestamp) -> Timestamp {
    let pods = view.pods.iter().map(|view| &view.pod).filter(|pod| !pod.leaving);
    let same_set = pods.filter(|pod| starting.iter().any(|other| other.owner == pod.owner));
    same_set.filter_map(|pod| pod.unschedulable_since()).fold(since, Timestamp::min)
}

/// When we last reported progress, or had no reason to.
fn last_report(evac: &Evac) -> Timestamp {
    evac.progress.unwrap_or(evac.created)
}

/// Reports what has changed. If only the progress has, a tenth of the deadline passes first.
fn report_if_changed(evac: &Evac, report: Report, now: Timestamp, plan: &mut Plan, pod: &PodView) {
    let is_blocked = evac.blocked.as_deref() == Some(reason::NO_ROOM);
    if *evac.message != *report.message || is_blocked != report.no_room {
        plan.act(pod, Action::Report(report));
        return;
    }
    if report.progress {
        let due = after(last_report(evac), evac.deadline / 10);
        if now >= due {
            plan.act(pod, Action::Report(report));
        } else {
            plan.wake_at(due);
        }
    }
}

/// When the replacement is expected to be available: as fast as the fastest pod of the Deployment so far.
fn expected_end(view: &View, since: Timestamp) -> Option<Timestamp> {
    let duration = |pod: &PodView| {
        let ready = pod.pod.ready?;
        Some(ready.duration_since(pod.pod.created)).filter(SignedDuration::is_positive)
    };
    let fastest = view.pods.iter().filter_map(duration).min()?;
    Some(after(since, fastest.saturating_add(view.deployment.min_ready)))
}

/// A pod that belongs to no Deployment, or whose owners are not known yet.
#[derive(Clone, Debug)]
pub struct LonePod {
    /// The pod, if it is a pod of a ReplicaSet or was moved.
    pub pod: Option<Arc<Pod>>,
    /// Its ReplicaSet, if it is known.
    pub set: Option<ReplicaSet>,
    /// Its Evacuation.
    pub evac: Option<Arc<Evac>>,
}

/// Decides what to do for a pod that belongs to no Deployment.
pub fn decide_lone(
    LonePod { pod, set, evac }: &LonePod,
    now: Timestamp,
) -> (Option<Action>, Option<Timestamp>) {
    if let Some(pod) = pod
        && pod.former.exists()
        && (!pod.leaving || pod.finished)
        && !pod.is_moved()
        && evac.as_ref().is_none_or(|evac| evac.cancelled)
    {
        // Its Deployment was deleted, and it was not.
        return (Some(Action::Restore), None);
    }
    let Some(evac) = evac else { return (None, None) };
    if evac.cancelled {
        return (evac.is_held().then_some(Action::Release), None);
    }
    if !evac.is_active() {
        return (None, None);
    }
    let known = set.as_ref().is_some_and(|set| set.deployment.is_none());
    let due = after(last_report(evac), CACHE_GRACE);
    if !known && now < due {
        return (None, Some(due));
    }
    let message = status::no_deployment(set.as_ref().and_then(|set| set.other_owner.as_deref()));
    (Some(Action::Complete { outcome: Outcome::Unsupported, message }), None)
}

#[cfg(test)]
mod tests;

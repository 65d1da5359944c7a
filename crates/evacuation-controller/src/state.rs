//! Everything that is known of Evacuations and budgets, fed by watch events. Plain synchronous state: it says
//! which Evacuations have to be looked at, and what is known of one.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use haulout_api_types::evacuators;
use haulout_api_types::names::reason;
use haulout_service_runtime::api::is_later;
use haulout_service_runtime::eviction::{Failure, is_transient, waits_for_budget};
use haulout_service_runtime::pods::{Change, Interner, Pod, PodIndex, Uid};
use haulout_service_runtime::queue::number_of;
use jiff::Timestamp;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;

use crate::backoff::{self, after};
use crate::budget::{Budgets, Covered};
use crate::decide::{End, Live, Soon};
use crate::record::Record;

/// The Evacuation that is meant: its UID.
pub type Key = Uid;

/// An Evacuation that has to be looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Queued {
    /// Which one.
    pub key: Key,
    /// The number of its namespace, whose admission webhooks may be slow.
    pub namespace: u64,
}

/// All that is known.
#[derive(Debug, Default)]
pub struct State {
    entries: HashMap<Key, Entry>,
    /// By the UID of the pod. There is more than one only if somebody made up a pod's name.
    by_pod: BTreeSet<(Uid, Key)>,
    /// Those that wait for a budget.
    waiting: BTreeSet<Place>,
    /// How many Evacuations have been seen.
    seen: u64,
    /// All budgets.
    pub budgets: Budgets,
    /// Whether all budgets are known: until then a pod may seem to have none.
    budgets_known: bool,
    /// Pods that budgets do not count as healthy, by namespace: not ready, or asked to end.
    unhealthy: BTreeSet<(Arc<str>, Uid)>,
    /// How many pods name each evacuator class in their annotations, whether or not they have an Evacuation.
    pub pod_classes: BTreeMap<String, u32>,
    /// What many Evacuations have in common: namespaces, finalizers, classes, reasons.
    texts: Interner,
}

/// A place in the line of a namespace: by creation and, because that is told in whole seconds, by when it was first seen.
type Place = (Arc<str>, Timestamp, u64, Key);

#[derive(Debug)]
struct Entry {
    record: Arc<Record>,
    live: Live,
    /// The number under which it was first seen.
    seen: u64,
    /// Whether the API server says that its pod is gone. A UID never comes back, whatever a watch that is behind says.
    pod_gone: bool,
    /// Whether its pod has been in the cache: if it is there no longer, it is gone, whether or not its change has been
    /// applied here.
    cached: bool,
    /// What was known of its budgets when it was last tried.
    tried: Option<Covered>,
}

impl Entry {
    fn place(&self) -> Place {
        let Record { namespace, created, uid, .. } = &*self.record;
        (Arc::clone(namespace), *created, self.seen, *uid)
    }
}

/// What is known of one Evacuation at one moment.
#[derive(Clone, Debug)]
pub struct View {
    /// The Evacuation.
    pub record: Arc<Record>,
    /// Its pod, if it is known to exist.
    pub pod: Option<Arc<Pod>>,
    /// Whether its pod is known not to exist any more.
    pub pod_gone: bool,
    /// What only we know.
    pub live: Live,
}

impl State {
    /// The shared copy of this text.
    pub fn share(&mut self, text: &str) -> Arc<str> {
        self.texts.share(text)
    }

    /// An Evacuation is there, in this state. Whether that is news.
    pub fn apply(&mut self, record: Record) -> bool {
        let (key, pod) = (record.uid, record.pod_uid);
        let waits = record.blocked_by().is_some_and(waits_for_budget) && !record.is_cancelled();
        let record = Arc::new(record);
        let place = if let Some(entry) = self.entries.get_mut(&key) {
            if !is_later(&record.version, &entry.record.version) {
                return false;
            }
            entry.record = record;
            entry.place()
        } else {
            self.seen += 1;
            let (seen, live) = (self.seen, Live::default());
            let entry = Entry { record, live, seen, pod_gone: false, cached: false, tried: None };
            let place = entry.place();
            self.entries.insert(key, entry);
            place
        };
        self.by_pod.insert((pod, key));
        if waits {
            self.waiting.insert(place)
        } else {
            self.waiting.remove(&place)
        };
        true
    }

    /// Takes the answer to a write of ours. One that has been deleted meanwhile does not come back.
    pub fn refresh(&mut self, record: Record) {
        if self.entries.contains_key(&record.uid) {
            self.apply(record);
        }
    }

    /// The Evacuation with this UID is gone: what was known of it, if anything, and who may try in its place.
    pub fn remove(&mut self, key: Key, pods: &PodIndex) -> (Option<View>, Vec<Key>) {
        let view = self.view(key, pods);
        let Some(entry) = self.entries.remove(&key) else { return (None, Vec::new()) };
        self.waiting.remove(&entry.place());
        let Record { namespace, pod_uid, .. } = &*entry.record;
        self.by_pod.remove(&(*pod_uid, key));
        let freed = self.budgets.end(namespace, key);
        let woken = if freed { self.admit(namespace, pods) } else { Vec::new() };
        self.texts.changed();
        (view, woken)
    }

    /// A pod has changed. Which Evacuations have to be looked at.
    pub fn pod_changed(&mut self, change: &Change, pods: &PodIndex) -> Vec<Key> {
        let Some(pod) = change.pod() else { return Vec::new() };
        self.note_health(pod, change.new.is_some());
        self.note_classes(change);
        let mut keys: Vec<_> = of_pod(&self.by_pod, pod.uid).collect();
        let mut waits = false;
        for key in &keys {
            if let Some(entry) = self.entries.get_mut(key) {
                entry.live.unwatched = 0;
                entry.cached |= change.new.is_none();
                // The budget's own numbers tell of it, and wake who may try instead.
                if change.new.is_none() || pod.terminating {
                    self.budgets.end(&pod.namespace, *key);
                }
                waits |= entry.record.blocked_by().is_some_and(waits_for_budget);
            }
        }
        // One that is not ready any more may be of no interest to its budget, and so may one with other labels.
        let counts = |pod: &Pod| (pod.ready, pod.phase, pod.labels.clone());
        if waits && change.old.as_deref().map(counts) != change.new.as_deref().map(counts) {
            keys.extend(self.admit(&pod.namespace, pods));
        }
        keys
    }

    /// A budget is there, in this state. Who may try now.
    pub fn budget_applied(&mut self, budget: PodDisruptionBudget, pods: &PodIndex) -> Vec<Key> {
        let namespace = self.share(budget.metadata.namespace.as_deref().unwrap_or_default());
        self.budgets.apply(&namespace, budget);
        self.admit(&namespace, pods)
    }

    /// A budget is gone. Who may try now.
    pub fn budget_deleted(&mut self, namespace: &str, name: &str, pods: &PodIndex) -> Vec<Key> {
        self.budgets.delete(namespace, name);
        self.admit(namespace, pods)
    }

    /// All budgets are known. Who may try now.
    pub fn budgets_synced(&mut self, pods: &PodIndex) -> Vec<Key> {
        self.budgets_known = true;
        let namespaces: BTreeSet<_> =
            self.waiting.iter().map(|(namespace, ..)| Arc::clone(namespace)).collect();
        namespaces.iter().flat_map(|namespace| self.admit(namespace, pods)).collect()
    }

    /// Lets those who wait in this namespace try, the oldest first, as far as their budgets allow.
    pub fn admit(&mut self, namespace: &str, pods: &PodIndex) -> Vec<Key> {
        if !self.budgets_known {
            return Vec::new();
        }
        let first = (namespace.into(), Timestamp::MIN, 0, Uid::MIN);
        let waiting = self.waiting.range(first..).take_while(|(of, ..)| **of == *namespace);
        let candidates: Vec<_> = waiting
            .filter_map(|(.., key)| {
                let entry = self.entries.get(key)?;
                let pod = pods.get(entry.record.pod_uid)?;
                let live = &entry.live;
                let idle = !live.admitted && live.evicted.is_none() && live.unwritten.is_none();
                (idle && !pod.terminating && !entry.pod_gone).then_some((*key, pod.as_ref()))
            })
            .collect();
        let mut woken = self.budgets.admit(namespace, candidates.iter().copied());
        for key in &woken {
            if let Some(entry) = self.entries.get_mut(key) {
                entry.live.admitted = true;
            }
        }
        // Other budgets than those that its status tells of cover it now: the next attempt says which.
        for (key, pod) in candidates {
            let Some(entry) = self.entries.get_mut(&key).filter(|entry| !entry.live.admitted) else {
                continue;
            };
            let covered = self.budgets.covered(pod);
            if entry.tried.is_some_and(|tried| tried.by != covered.by) {
                entry.tried = Some(covered);
                entry.live.soon.get_or_insert_default();
                woken.push(key);
            }
        }
        woken
    }

    /// What is known of an Evacuation; `None` if there is no such.
    pub fn view(&mut self, key: Key, pods: &PodIndex) -> Option<View> {
        let Entry { record, live, pod_gone, cached, .. } = self.entries.get_mut(&key)?;
        let named = |pod: &&Arc<Pod>| pod.namespace == record.namespace && *pod.name == *record.pod_name;
        let pod = pods.get(record.pod_uid).filter(named).cloned();
        let pod_gone = *pod_gone || (*cached && pod.is_none());
        *cached |= pod.is_some();
        Some(View { record: Arc::clone(record), pod, pod_gone, live: live.clone() })
    }

    /// The API server has no such pod any more.
    pub fn pod_is_gone(&mut self, key: Key) {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.pod_gone = true;
        }
    }

    /// The API server has the pod, and the cache does not: for how many look-ups in a row that has been so.
    pub fn pod_is_unwatched(&mut self, key: Key) -> u32 {
        self.entries.get_mut(&key).map_or(1, |entry| {
            entry.live.unwatched = entry.live.unwatched.saturating_add(1);
            entry.live.unwatched
        })
    }

    /// An eviction is about to be tried.
    pub fn eviction_begins(&mut self, key: Key, pod: &Pod) {
        self.budgets.begin(key, pod);
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.live.admitted = false;
            entry.tried = Some(self.budgets.covered(pod));
        }
    }

    /// The Eviction API has taken the pod. It takes the room of its budget until it is seen to leave.
    pub fn evicted(&mut self, key: Key, now: Timestamp) {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.live.evicted = Some(now);
            entry.live.soon = None;
        }
    }

    /// An eviction has failed, which is kept until it has been written. Who may try instead: nobody if it was for its
    /// budget's sake, which then has no room for others either.
    pub fn eviction_failed(
        &mut self,
        key: Key,
        failure: Failure,
        now: Timestamp,
        pods: &PodIndex,
    ) -> Vec<Key> {
        let Some(entry) = self.entries.get_mut(&key) else { return Vec::new() };
        entry.live.evicted = None;
        entry.live.soon = is_transient(failure.reason).then(|| {
            let failures = entry.live.soon.as_ref().map_or(0, |soon| soon.failures).saturating_add(1);
            Box::new(Soon { failures, due: after(now, backoff::soon(failures, key)) })
        });
        let by_budget = waits_for_budget(failure.reason);
        entry.live.unwritten = Some(Box::new(failure));
        let namespace = Arc::clone(&entry.record.namespace);
        self.budgets.end(&namespace, key);
        if by_budget { Vec::new() } else { self.admit(&namespace, pods) }
    }

    /// A failure that has not been written is of no interest any more: the pod is on its way out.
    pub fn forget_failure(&mut self, key: Key) {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.live.unwritten = None;
        }
    }

    /// Work on someone who was admitted ended without an attempt to evict. Who may try instead. Where that was because
    /// something failed, it may try again itself, without waiting for the backoff of its refusals.
    pub fn give_back(&mut self, key: Key, failed: bool, pods: &PodIndex) -> Vec<Key> {
        let Some(entry) = self.entries.get_mut(&key) else { return Vec::new() };
        if !std::mem::take(&mut entry.live.admitted) {
            return Vec::new();
        }
        if failed {
            entry.live.soon.get_or_insert_default();
        }
        let place = entry.place();
        self.budgets.end(&place.0, key);
        // Not itself again: it would be admitted for ever.
        let waited = self.waiting.remove(&place);
        let others = self.admit(&place.0, pods);
        self.waiting.extend(waited.then_some(place));
        others
    }

    /// A failure has been written, and who was refused waits from now on. What its budgets did since it tried has woken
    /// nobody: who may try now.
    pub fn failure_written(&mut self, key: Key, pods: &PodIndex) -> Vec<Key> {
        let Some(entry) = self.entries.get_mut(&key) else { return Vec::new() };
        entry.live.unwritten = None;
        let pod = pods.get(entry.record.pod_uid);
        if pod.is_none_or(|pod| Some(self.budgets.covered(pod)) == entry.tried) {
            return Vec::new();
        }
        let namespace = Arc::clone(&entry.record.namespace);
        self.admit(&namespace, pods)
    }

    /// We have deleted the Evacuation, because it ended so.
    pub fn deleted(&mut self, key: Key, end: End) {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.live.deleted = Some(end);
        }
    }

    /// A failure with what is known here of the pod's budgets, as far as that agrees with the API server's answer.
    pub fn explain(&self, failure: Failure, pod: &Pod, pods: &PodIndex) -> Failure {
        let message = match failure.reason {
            reason::BUDGET_EXHAUSTED if self.budgets.is_exhausted(pod) => self.describe_budgets(pod, pods),
            reason::SEVERAL_BUDGETS if self.budgets.covering(pod).len() > 1 => {
                format!("{} {}", failure.message, self.describe_budgets(pod, pods))
            }
            _ => failure.message,
        };
        Failure { message, ..failure }
    }

    /// What people should know of the budgets of this pod.
    pub fn describe_budgets(&self, pod: &Pod, pods: &PodIndex) -> String {
        let first = (Arc::clone(&pod.namespace), Uid::MIN);
        let unhealthy =
            self.unhealthy.range(first..).take_while(|(namespace, _)| *namespace == pod.namespace);
        self.budgets.describe(pod, unhealthy.filter_map(|(_, uid)| pods.get(*uid).map(AsRef::as_ref)))
    }

    /// All Evacuations, in no particular order.
    pub fn records(&self) -> impl Iterator<Item = &Record> {
        self.entries.values().map(|entry| entry.record.as_ref())
    }

    /// What to put into the queue for an Evacuation; `None` if there is no such.
    pub fn queued(&self, key: Key) -> Option<Queued> {
        let namespace = number_of(&self.entries.get(&key)?.record.namespace);
        Some(Queued { key, namespace })
    }

    /// All keys.
    pub fn keys(&self) -> Vec<Key> {
        self.entries.keys().copied().collect()
    }

    fn note_health(&mut self, pod: &Pod, exists: bool) {
        let unhealthy = exists && !pod.is_finished() && (!pod.ready || pod.terminating);
        let pod = (Arc::clone(&pod.namespace), pod.uid);
        if unhealthy {
            self.unhealthy.insert(pod)
        } else {
            self.unhealthy.remove(&pod)
        };
    }

    fn note_classes(&mut self, change: &Change) {
        let annotations = |pod: &Option<Arc<Pod>>| pod.as_ref()?.evacuator_annotations.clone();
        let (old, new) = (annotations(&change.old), annotations(&change.new));
        if old == new {
            return;
        }
        let classes = |annotations: Option<Arc<BTreeMap<_, _>>>| {
            let evacuators = annotations.map(|annotations| evacuators::read(&annotations).0);
            evacuators.into_iter().flatten().map(|evacuator| evacuator.evacuator_class)
        };
        for class in classes(new) {
            *self.pod_classes.entry(class).or_default() += 1;
        }
        for class in classes(old) {
            if let Some(pods) = self.pod_classes.get_mut(&class) {
                *pods = pods.saturating_sub(1);
            }
        }
        self.pod_classes.retain(|_, pods| *pods > 0);
    }
}

/// The Evacuations of the pod with this UID.
fn of_pod(by_pod: &BTreeSet<(Uid, Key)>, pod: Uid) -> impl Iterator<Item = Key> {
    by_pod.range((pod, Uid::MIN)..).take_while(move |(of, _)| *of == pod).map(|(_, key)| *key)
}

#[cfg(test)]
mod tests;

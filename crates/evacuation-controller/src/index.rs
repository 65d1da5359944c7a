//! Everything that is known of Evacuations and budgets, fed by watch events. Plain synchronous state: it says
//! which Evacuations have to be looked at, and what is known of one.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use haulout_service_runtime::pods::{Change, Pod, PodIndex, Uid};
use jiff::Timestamp;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;

use crate::budget::Budgets;
use crate::decide::Live;
use crate::eviction::{Refusal, waits_for_budget};
use crate::record::Record;

/// How many Evacuations go before texts are looked through for those that nobody uses.
const REMOVED_BETWEEN_SWEEPS: usize = 1024;

/// The Evacuation that is meant: its UID.
pub type Key = Uid;

/// All that is known.
#[derive(Debug, Default)]
pub struct Index {
    entries: HashMap<Key, Entry>,
    /// By the UID of the pod. There is more than one only if somebody made up a pod's name.
    by_pod: BTreeSet<(Uid, Key)>,
    /// Those that wait for a budget, by namespace, oldest first.
    waiting: HashMap<Arc<str>, BTreeSet<Place>>,
    /// How many Evacuations have been seen.
    seen: u64,
    budgets: Budgets,
    /// Whether all budgets are known: until then a pod may seem to have none.
    budgets_known: bool,
    /// Pods that budgets do not count as healthy, by namespace: not ready, or asked to end.
    unhealthy: HashMap<Arc<str>, BTreeSet<Uid>>,
    /// What many Evacuations have in common: namespaces, finalizers, classes, reasons.
    texts: HashSet<Arc<str>>,
    /// How many have gone since texts that nobody uses were forgotten.
    removed: usize,
    /// While everything is being listed anew: what has been listed so far.
    relist: Option<HashSet<Key>>,
}

/// A place in the line: by creation and, because that is told in whole seconds, by when it was first seen.
type Place = (Timestamp, u64, Key);

#[derive(Debug)]
struct Entry {
    record: Arc<Record>,
    live: Live,
    /// The number under which it was first seen.
    seen: u64,
    pod_gone: bool,
    /// The last change of its budgets that was known when it was last tried.
    tried: Option<u64>,
    /// A refusal that has not been written yet, because somebody else wrote at the same time.
    unwritten: Option<Box<Refusal>>,
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
    /// A refusal that has not been written yet.
    pub unwritten: Option<Box<Refusal>>,
}

impl Index {
    /// The shared copy of this text.
    pub fn share(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.texts.get(text) {
            return Arc::clone(known);
        }
        let new: Arc<str> = text.into();
        self.texts.insert(Arc::clone(&new));
        new
    }

    /// An Evacuation is there, in this state. Whether that is news.
    pub fn apply(&mut self, record: Record) -> bool {
        let key = record.uid;
        if let Some(listed) = &mut self.relist {
            listed.insert(key);
        }
        let known = self.entries.get(&key).map(|entry| (Arc::clone(&entry.record), entry.seen));
        let seen = if let Some((old, seen)) = known {
            if !record.is_later_than(&old) {
                return false;
            }
            self.stop_waiting(&old, seen);
            seen
        } else {
            self.seen += 1;
            self.seen
        };
        self.by_pod.insert((record.pod_uid, key));
        self.start_waiting(&record, seen);
        let record = Arc::new(record);
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.record = record;
        } else {
            let entry =
                Entry { record, live: Live::default(), seen, pod_gone: false, tried: None, unwritten: None };
            self.entries.insert(key, entry);
        }
        true
    }

    /// Takes the answer to a write of ours. One that has been deleted meanwhile does not come back.
    pub fn refresh(&mut self, record: Record) {
        if self.entries.contains_key(&record.uid) {
            self.apply(record);
        }
    }

    /// The Evacuation with this UID is gone.
    pub fn remove(&mut self, key: Key) {
        if let Some(Entry { record, seen, .. }) = self.entries.remove(&key) {
            self.by_pod.remove(&(record.pod_uid, key));
            self.stop_waiting(&record, seen);
            self.budgets.end(&record.namespace, key);
            drop(record);
            self.forget_texts();
        }
    }

    /// Forgets texts that nobody uses, once in a while.
    fn forget_texts(&mut self) {
        self.removed += 1;
        if self.removed > REMOVED_BETWEEN_SWEEPS {
            self.removed = 0;
            self.texts.retain(|text| Arc::strong_count(text) > 1);
        }
    }

    /// All Evacuations are about to be listed: what is applied from now on to [`Self::end_relist`] is all.
    pub fn begin_relist(&mut self) {
        self.relist = Some(HashSet::new());
    }

    /// All Evacuations have been listed.
    pub fn end_relist(&mut self) {
        let Some(listed) = self.relist.take() else { return };
        let gone: Vec<_> = self.entries.keys().filter(|key| !listed.contains(key)).copied().collect();
        for key in gone {
            self.remove(key);
        }
    }

    /// A pod has changed. Which Evacuations have to be looked at.
    pub fn pod_changed(&mut self, change: &Change, pods: &PodIndex) -> Vec<Key> {
        let Some(pod) = change.pod() else { return Vec::new() };
        self.note_health(pod, change.new.is_some());
        let mut keys: Vec<_> = of_pod(&self.by_pod, pod.uid).collect();
        let mut waits = false;
        for key in &keys {
            if let Some(entry) = self.entries.get_mut(key) {
                entry.pod_gone = change.new.is_none();
                if entry.pod_gone || pod.terminating {
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

    /// All budgets have been listed, and there are no others. Who may try now.
    pub fn budgets_listed(&mut self, names: &BTreeSet<(String, String)>, pods: &PodIndex) -> Vec<Key> {
        self.budgets.keep(names);
        self.budgets_known = true;
        self.admit_all(pods)
    }

    /// Lets those who wait anywhere try, as far as their budgets allow.
    pub fn admit_all(&mut self, pods: &PodIndex) -> Vec<Key> {
        let namespaces: Vec<_> = self.waiting.keys().cloned().collect();
        namespaces.iter().flat_map(|namespace| self.admit(namespace, pods)).collect()
    }

    /// Lets those who wait in this namespace try, the oldest first, as far as their budgets allow.
    pub fn admit(&mut self, namespace: &str, pods: &PodIndex) -> Vec<Key> {
        let Some(waiting) = self.waiting.get(namespace).filter(|_| self.budgets_known) else {
            return Vec::new();
        };
        let candidates = waiting.iter().filter_map(|(_, _, key)| {
            let entry = self.entries.get(key)?;
            let pod = pods.get(entry.record.pod_uid)?;
            let idle = !entry.live.admitted && entry.live.evicted.is_none() && !pod.terminating;
            idle.then_some((*key, pod.as_ref()))
        });
        let admitted = self.budgets.admit(namespace, candidates);
        for key in &admitted {
            if let Some(entry) = self.entries.get_mut(key) {
                entry.live.admitted = true;
            }
        }
        admitted
    }

    /// What is known of an Evacuation; `None` if there is no such.
    pub fn view(&self, key: Key, pods: &PodIndex) -> Option<View> {
        let Entry { record, live, pod_gone, unwritten, .. } = self.entries.get(&key)?;
        let named = |pod: &&Arc<Pod>| pod.namespace == record.namespace && pod.name == record.pod_name;
        let pod = pods.get(record.pod_uid).filter(named).cloned();
        let (record, live, unwritten) = (Arc::clone(record), live.clone(), unwritten.clone());
        Some(View { record, pod_gone: pod.is_none() && *pod_gone, pod, live, unwritten })
    }

    /// The API server has no such pod any more.
    pub fn pod_is_gone(&mut self, key: Key) {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.pod_gone = true;
        }
    }

    /// An eviction is about to be tried.
    pub fn eviction_begins(&mut self, key: Key, pod: &Pod) {
        self.budgets.begin(key, pod);
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.live.admitted = false;
            entry.tried = self.budgets.last_change(pod);
        }
    }

    /// An eviction has been tried: when it took place, if it did.
    pub fn eviction_ends(&mut self, key: Key, evicted: Option<Timestamp>) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        entry.live.evicted = evicted;
        if evicted.is_none() {
            let namespace = Arc::clone(&entry.record.namespace);
            self.budgets.end(&namespace, key);
        }
    }

    /// Someone who was admitted did not try after all: who may try instead.
    pub fn give_back(&mut self, key: Key, pods: &PodIndex) -> Vec<Key> {
        let Some(entry) = self.entries.get_mut(&key) else { return Vec::new() };
        if !std::mem::take(&mut entry.live.admitted) {
            return Vec::new();
        }
        let (record, seen) = (Arc::clone(&entry.record), entry.seen);
        self.budgets.end(&record.namespace, key);
        // Not itself again: it would be admitted for ever.
        self.stop_waiting(&record, seen);
        let others = self.admit(&record.namespace, pods);
        self.start_waiting(&record, seen);
        others
    }

    /// Keeps a refusal until it has been written.
    pub fn keep_unwritten(&mut self, key: Key, refusal: Refusal) {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.unwritten = Some(Box::new(refusal));
        }
    }

    /// A refusal has been written, and who was refused waits from now on. What its budgets did since it tried has woken
    /// nobody: who may try now.
    pub fn refusal_written(&mut self, key: Key, pods: &PodIndex) -> Vec<Key> {
        let Some(entry) = self.entries.get_mut(&key) else { return Vec::new() };
        entry.unwritten = None;
        let pod = pods.get(entry.record.pod_uid);
        if pod.is_none_or(|pod| self.budgets.last_change(pod) == entry.tried) {
            return Vec::new();
        }
        let namespace = Arc::clone(&entry.record.namespace);
        self.admit(&namespace, pods)
    }

    /// We have deleted the Evacuation.
    pub fn deleted(&mut self, key: Key) {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.live.deleted = true;
        }
    }

    /// What people should know of the budgets of this pod.
    pub fn describe_budgets(&self, pod: &Pod, pods: &PodIndex) -> String {
        let unhealthy = self.unhealthy.get(&pod.namespace);
        self.budgets.describe(
            pod,
            unhealthy.into_iter().flatten().filter_map(|uid| pods.get(*uid).map(AsRef::as_ref)),
        )
    }

    /// The budgets.
    pub fn budgets(&self) -> &Budgets {
        &self.budgets
    }

    /// All Evacuations, in no particular order.
    pub fn records(&self) -> impl Iterator<Item = &Record> {
        self.entries.values().map(|entry| entry.record.as_ref())
    }

    /// All keys.
    pub fn keys(&self) -> Vec<Key> {
        self.entries.keys().copied().collect()
    }

    fn note_health(&mut self, pod: &Pod, exists: bool) {
        let unhealthy = exists && !pod.is_finished() && (!pod.ready || pod.terminating);
        if unhealthy {
            self.unhealthy.entry(Arc::clone(&pod.namespace)).or_default().insert(pod.uid);
        } else if let Some(all) = self.unhealthy.get_mut(&pod.namespace) {
            all.remove(&pod.uid);
            if all.is_empty() {
                self.unhealthy.remove(&pod.namespace);
            }
        }
    }

    fn start_waiting(&mut self, record: &Record, seen: u64) {
        if record.blocked_by().is_some_and(waits_for_budget) && !record.deleting {
            let waiting = self.waiting.entry(Arc::clone(&record.namespace)).or_default();
            waiting.insert((record.created, seen, record.uid));
        }
    }

    fn stop_waiting(&mut self, record: &Record, seen: u64) {
        if let Some(waiting) = self.waiting.get_mut(&record.namespace) {
            waiting.remove(&(record.created, seen, record.uid));
            if waiting.is_empty() {
                self.waiting.remove(&record.namespace);
            }
        }
    }
}

/// The Evacuations of the pod with this UID.
fn of_pod(by_pod: &BTreeSet<(Uid, Key)>, pod: Uid) -> impl Iterator<Item = Key> {
    by_pod.range((pod, Uid::MIN)..).take_while(move |(of, _)| *of == pod).map(|(_, key)| *key)
}

#[cfg(test)]
mod tests;

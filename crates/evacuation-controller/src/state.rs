//! The synchronous store of Evacuations and budgets. Watch events update it, and it returns the Evacuations to
//! reconcile. Pods are in the shared pod cache.

use std::collections::btree_map::Entry as MapEntry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use haulout_api_types::evacuators;
use haulout_api_types::names::reason;
use haulout_service_runtime::api::is_later;
use haulout_service_runtime::eviction::{Failure, is_transient, waits_for_budget};
use haulout_service_runtime::pods::{Change, Interner, Pod, PodIndex, Uid};
use haulout_service_runtime::queue::id_of;
use jiff::Timestamp;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;

use crate::backoff::{self, after};
use crate::budget::{Budgets, Coverage};
use crate::decide::{End, LocalState, Retry};
use crate::record::Record;

/// The UID of an Evacuation.
pub type Key = Uid;

/// An Evacuation to reconcile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Queued {
    /// Its key.
    pub key: Key,
    /// The number of its namespace. The queue shares workers fairly between namespaces, because the admission webhooks
    /// of one may be slow.
    pub namespace: u64,
}

/// The store.
#[derive(Debug, Default)]
pub struct State {
    entries: HashMap<Key, Entry>,
    /// Evacuations by the UID of their pod. A pod has more than one only if an Evacuation has a wrong pod name.
    by_pod: BTreeSet<(Uid, Key)>,
    /// Evacuations that wait for a budget, in the order in which they are admitted.
    waiting: BTreeSet<WaitOrder>,
    /// The sequence number of the last new Evacuation.
    sequence: u64,
    /// All budgets.
    pub budgets: Budgets,
    /// Whether the watch of budgets has synced. Before, a pod may appear to have no budget.
    budgets_known: bool,
    /// Pods that budgets do not count as healthy, by namespace: not ready, or terminating.
    unhealthy: BTreeSet<(Arc<str>, Uid)>,
    /// The number of pods by evacuator class in their annotations, with or without an Evacuation.
    pub pod_classes: BTreeMap<String, u32>,
    /// The built-in classes whose service has no leader, and since when.
    unserved: BTreeMap<&'static str, Timestamp>,
    /// Interned texts that many Evacuations have in common: namespaces, finalizers, classes, reasons.
    texts: Interner,
}

/// The order of waiting Evacuations in a namespace: by creation and, because that has whole seconds, by sequence
/// number.
type WaitOrder = (Arc<str>, Timestamp, u64, Key);

#[derive(Debug)]
struct Entry {
    record: Arc<Record>,
    local: LocalState,
    /// The sequence number, in the order of arrival.
    sequence: u64,
    /// Whether the API server has answered that the pod is gone. A UID is never reused, even if a delayed watch still
    /// has the pod.
    pod_gone: bool,
    /// Whether the pod has been in the cache. A pod that has left the cache is gone, even if its change has not been
    /// applied here yet.
    cached: bool,
    /// The state of its budgets at the last attempt.
    last_attempt: Option<Coverage>,
}

impl Entry {
    fn wait_order(&self) -> WaitOrder {
        let Record { namespace, created, uid, .. } = &*self.record;
        (Arc::clone(namespace), *created, self.sequence, *uid)
    }
}

/// A snapshot of one Evacuation and its pod.
#[derive(Clone, Debug)]
pub struct View {
    /// The Evacuation.
    pub record: Arc<Record>,
    /// Its pod, if the cache has it.
    pub pod: Option<Arc<Pod>>,
    /// Whether the pod is known to be gone.
    pub pod_gone: bool,
    /// Its in-memory state.
    pub local: LocalState,
    /// Since when the service behind the active evacuator has had no leader.
    pub unserved: Option<Timestamp>,
}

impl State {
    /// The shared copy of this text.
    pub fn share(&mut self, text: &str) -> Arc<str> {
        self.texts.share(text)
    }

    /// Stores an Evacuation that was added or has changed. Returns whether this version is newer.
    pub fn apply(&mut self, record: Record) -> bool {
        let (key, pod) = (record.uid, record.pod_uid);
        let waits = record.blocked_by().is_some_and(waits_for_budget) && !record.is_cancelled();
        let record = Arc::new(record);
        let order = if let Some(entry) = self.entries.get_mut(&key) {
            if !is_later(&record.version, &entry.record.version) {
                return false;
            }
            entry.record = record;
            entry.wait_order()
        } else {
            self.sequence += 1;
            let (sequence, local) = (self.sequence, LocalState::default());
            let entry = Entry { record, local, sequence, pod_gone: false, cached: false, last_attempt: None };
            let order = entry.wait_order();
            self.entries.insert(key, entry);
            order
        };
        self.by_pod.insert((pod, key));
        if waits {
            self.waiting.insert(order)
        } else {
            self.waiting.remove(&order)
        };
        // Its former finalizers and reasons may be unused now.
        self.texts.changed();
        true
    }

    /// Stores the response to one of our writes, unless the Evacuation was deleted meanwhile.
    pub fn apply_written(&mut self, record: Record) {
        if self.entries.contains_key(&record.uid) {
            self.apply(record);
        }
    }

    /// Removes an Evacuation. Returns its last view, and the Evacuations that are admitted in its place.
    pub fn delete(&mut self, key: Key, pods: &PodIndex) -> (Option<View>, Vec<Key>) {
        let view = self.view(key, pods);
        let Some(entry) = self.entries.remove(&key) else { return (None, Vec::new()) };
        self.waiting.remove(&entry.wait_order());
        let Record { namespace, pod_uid, .. } = &*entry.record;
        self.by_pod.remove(&(*pod_uid, key));
        let was_in_flight = self.budgets.end_eviction(namespace, key);
        let admitted = if was_in_flight { self.admit(namespace, pods) } else { Vec::new() };
        self.texts.changed();
        (view, admitted)
    }

    /// A pod was added, changed or deleted. Returns the Evacuations to reconcile.
    pub fn apply_pod(&mut self, change: &Change, pods: &PodIndex) -> Vec<Key> {
        let Some(pod) = change.pod() else { return Vec::new() };
        self.update_unhealthy(pod, change.new.is_some());
        self.update_pod_classes(change);
        let mut keys: Vec<_> = evacuations_of_pod(&self.by_pod, pod.uid).collect();
        let mut waits = false;
        for key in &keys {
            if let Some(entry) = self.entries.get_mut(key) {
                entry.local.cache_misses = 0;
                entry.cached |= change.new.is_none();
                // The status of the budget changes next, and that admits others.
                if change.new.is_none() || pod.terminating {
                    self.budgets.end_eviction(&pod.namespace, *key);
                }
                waits |= entry.record.blocked_by().is_some_and(waits_for_budget);
            }
        }
        // A pod that is no longer ready, or has other labels, may not count against its budget any more.
        let counts = |pod: &Pod| (pod.ready, pod.phase, pod.labels.clone());
        if waits && change.old.as_deref().map(counts) != change.new.as_deref().map(counts) {
            keys.extend(self.admit(&pod.namespace, pods));
        }
        keys
    }

    /// Stores a budget that was added or has changed. Returns the Evacuations to reconcile.
    pub fn apply_budget(&mut self, budget: PodDisruptionBudget, pods: &PodIndex) -> Vec<Key> {
        let namespace = self.share(budget.metadata.namespace.as_deref().unwrap_or_default());
        self.budgets.apply(&namespace, budget);
        self.admit(&namespace, pods)
    }

    /// Removes a deleted budget. Returns the Evacuations to reconcile.
    pub fn delete_budget(&mut self, namespace: &str, name: &str, pods: &PodIndex) -> Vec<Key> {
        self.budgets.delete(namespace, name);
        self.admit(namespace, pods)
    }

    /// The watch of budgets has synced. Returns the Evacuations to reconcile.
    pub fn budgets_synced(&mut self, pods: &PodIndex) -> Vec<Key> {
        self.budgets_known = true;
        let namespaces: BTreeSet<_> =
            self.waiting.iter().map(|(namespace, ..)| Arc::clone(namespace)).collect();
        namespaces.iter().flat_map(|namespace| self.admit(namespace, pods)).collect()
    }

    /// Admits waiting Evacuations of this namespace, the oldest first, as far as their budgets allow. Returns the
    /// Evacuations to reconcile.
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
                let local = &entry.local;
                let idle = !local.admitted && local.evicted.is_none() && local.pending_failure.is_none();
                (idle && !pod.terminating && !entry.pod_gone).then_some((*key, pod.as_ref()))
            })
            .collect();
        let mut keys = self.budgets.admit(namespace, candidates.iter().copied());
        for key in &keys {
            if let Some(entry) = self.entries.get_mut(key) {
                entry.local.admitted = true;
            }
        }
        // Other budgets cover the pod now than its status says. The next attempt updates the status.
        for (key, pod) in candidates {
            let Some(entry) = self.entries.get_mut(&key).filter(|entry| !entry.local.admitted) else {
                continue;
            };
            let coverage = self.budgets.coverage(pod);
            if entry.last_attempt.is_some_and(|last| last.names != coverage.names) {
                entry.last_attempt = Some(coverage);
                entry.local.retry.get_or_insert_default();
                keys.push(key);
            }
        }
        keys
    }

    /// Sets since when the service behind a built-in class has no leader; `None` if it has one. Returns the Evacuations to
    /// reconcile.
    pub fn apply_service(&mut self, class: &'static str, absent_since: Option<Timestamp>) -> Vec<Key> {
        let before = match absent_since {
            Some(since) => self.unserved.insert(class, since),
            None => self.unserved.remove(class),
        };
        if before == absent_since {
            return Vec::new();
        }
        let is_active = |entry: &Entry| entry.record.active.as_deref() == Some(class);
        self.entries.iter().filter(|(_, entry)| is_active(entry)).map(|(key, _)| *key).collect()
    }

    /// Since when the service behind the active evacuator has no leader.
    pub fn unserved(&self, record: &Record) -> Option<Timestamp> {
        self.unserved.get(record.active.as_deref()?).copied()
    }

    /// The snapshot of an Evacuation; `None` if it does not exist.
    pub fn view(&mut self, key: Key, pods: &PodIndex) -> Option<View> {
        let Entry { record, local, pod_gone, cached, .. } = self.entries.get_mut(&key)?;
        let named = |pod: &&Arc<Pod>| pod.namespace == record.namespace && *pod.name == *record.pod_name;
        let pod = pods.get(record.pod_uid).filter(named).cloned();
        let pod_gone = *pod_gone || (*cached && pod.is_none());
        *cached |= pod.is_some();
        let unserved = record.active.as_deref().and_then(|class| self.unserved.get(class)).copied();
        Some(View { record: Arc::clone(record), pod, pod_gone, local: local.clone(), unserved })
    }

    /// The API server has answered that the pod is gone.
    pub fn set_pod_gone(&mut self, key: Key) {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.pod_gone = true;
        }
    }

    /// The API server has the pod and the cache does not. Returns how often in a row.
    pub fn count_cache_miss(&mut self, key: Key) -> u32 {
        self.entries.get_mut(&key).map_or(1, |entry| {
            entry.local.cache_misses = entry.local.cache_misses.saturating_add(1);
            entry.local.cache_misses
        })
    }

    /// The Eviction API is about to be called.
    pub fn eviction_started(&mut self, key: Key, pod: &Pod) {
        self.budgets.start_eviction(key, pod);
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.local.admitted = false;
            entry.last_attempt = Some(self.budgets.coverage(pod));
        }
    }

    /// The Eviction API has accepted the eviction. It counts as in flight until the watch reports that the pod leaves.
    pub fn evicted(&mut self, key: Key, now: Timestamp) {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.local.evicted = Some(now);
            entry.local.retry = None;
        }
    }

    /// An eviction has failed. The failure is kept until it is in the status. Returns the Evacuations that are admitted
    /// instead: none if the budget rejected the eviction, because it allows no others either.
    pub fn eviction_failed(
        &mut self,
        key: Key,
        failure: Failure,
        now: Timestamp,
        pods: &PodIndex,
    ) -> Vec<Key> {
        let Some(entry) = self.entries.get_mut(&key) else { return Vec::new() };
        entry.local.evicted = None;
        entry.local.retry = is_transient(failure.reason).then(|| {
            let failures = entry.local.retry.as_ref().map_or(0, |retry| retry.failures).saturating_add(1);
            Box::new(Retry { failures, due: after(now, backoff::transient_delay(failures, key)) })
        });
        let by_budget = waits_for_budget(failure.reason);
        entry.local.pending_failure = Some(Box::new(failure));
        let namespace = Arc::clone(&entry.record.namespace);
        self.budgets.end_eviction(&namespace, key);
        if by_budget { Vec::new() } else { self.admit(&namespace, pods) }
    }

    /// Drops a failure that is not in the status yet, because the pod is leaving.
    pub fn clear_pending_failure(&mut self, key: Key) {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.local.pending_failure = None;
        }
    }

    /// An admitted Evacuation was reconciled without an eviction. Returns the Evacuations that are admitted instead. If
    /// the reconcile failed, this Evacuation may retry without waiting for the backoff of rejected evictions.
    pub fn return_admission(&mut self, key: Key, failed: bool, pods: &PodIndex) -> Vec<Key> {
        let Some(entry) = self.entries.get_mut(&key) else { return Vec::new() };
        if !std::mem::take(&mut entry.local.admitted) {
            return Vec::new();
        }
        if failed {
            entry.local.retry.get_or_insert_default();
        }
        let order = entry.wait_order();
        self.budgets.end_eviction(&order.0, key);
        // It must not be admitted again itself, or this would never end.
        let was_waiting = self.waiting.remove(&order);
        let others = self.admit(&order.0, pods);
        self.waiting.extend(was_waiting.then_some(order));
        others
    }

    /// A failure is in the status now, so that the Evacuation waits for its budget. Its budgets may have changed since
    /// the attempt. Returns the Evacuations to reconcile.
    pub fn failure_written(&mut self, key: Key, pods: &PodIndex) -> Vec<Key> {
        let Some(entry) = self.entries.get_mut(&key) else { return Vec::new() };
        entry.local.pending_failure = None;
        let pod = pods.get(entry.record.pod_uid);
        if pod.is_none_or(|pod| Some(self.budgets.coverage(pod)) == entry.last_attempt) {
            return Vec::new();
        }
        let namespace = Arc::clone(&entry.record.namespace);
        self.admit(&namespace, pods)
    }

    /// Records that we have reset the cancellation policy.
    pub fn policy_reset(&mut self, key: Key, now: Timestamp) {
        if let Some(entry) = self.entries.get_mut(&key) {
            let resets = entry.local.policy_resets.get_or_insert_default();
            resets.count = resets.count.saturating_add(1);
            resets.due = after(now, backoff::transient_delay(resets.count, key));
        }
    }

    /// Records that we have deleted the Evacuation, and how it ended.
    pub fn set_deleted(&mut self, key: Key, end: End) {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.local.deleted = Some(end);
        }
    }

    /// Adds details about the pod's budgets to a failure, if they agree with the API server's answer.
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

    /// Describes the budgets of this pod for a message.
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

    /// The queue entry of an Evacuation; `None` if it does not exist.
    pub fn queued(&self, key: Key) -> Option<Queued> {
        let namespace = id_of(&self.entries.get(&key)?.record.namespace);
        Some(Queued { key, namespace })
    }

    /// The keys of all Evacuations.
    pub fn keys(&self) -> Vec<Key> {
        self.entries.keys().copied().collect()
    }

    fn update_unhealthy(&mut self, pod: &Pod, exists: bool) {
        let unhealthy = exists && !pod.is_finished() && (!pod.ready || pod.terminating);
        let pod = (Arc::clone(&pod.namespace), pod.uid);
        if unhealthy {
            self.unhealthy.insert(pod)
        } else {
            self.unhealthy.remove(&pod)
        };
    }

    fn update_pod_classes(&mut self, change: &Change) {
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
            if let MapEntry::Occupied(mut pods) = self.pod_classes.entry(class) {
                *pods.get_mut() -= 1;
                if *pods.get() == 0 {
                    pods.remove();
                }
            }
        }
    }
}

/// The Evacuations of the pod with this UID.
fn evacuations_of_pod(by_pod: &BTreeSet<(Uid, Key)>, pod: Uid) -> impl Iterator<Item = Key> {
    by_pod.range((pod, Uid::MIN)..).take_while(move |(of, _)| *of == pod).map(|(_, key)| *key)
}

#[cfg(test)]
mod tests;

//! The synchronous store of nodes, namespaces and Evacuations. Watch events update it, and it returns the pods to
//! reconcile and the next step for a pod. Pods are in the shared pod cache.
//!
//! The order of events does not matter: a pod may arrive before its node, and a namespace after its pod.

pub mod rate_limit;
pub mod watch_gap;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use haulout_api_types::bounded;
use haulout_api_types::names::TAINTS_FIRST_SEEN_ANNOTATION;
use haulout_service_runtime::events::NewEvent;
use haulout_service_runtime::pods::{Change, Pod, PodIndex, Uid};
use haulout_service_runtime::queue::id_of;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use self::rate_limit::RateLimit;
use self::watch_gap::{Watch, WatchGaps};
use crate::decide::{Decision, NodeFacts, Reason, RemovalAction, Verdict, View, decide};
use crate::events::PublishedEvents;
use crate::policy::Policy;
use crate::taint::{FirstSeen, Observed, taints_changed};

/// How long a requested Evacuation may be missing from the watch before it is requested again. It may have been deleted
/// in a watch gap.
const CREATE_TIMEOUT: SignedDuration = SignedDuration::from_secs(10);

/// A pod to reconcile.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The pod's node.
    pub node: Arc<str>,
    /// The pod.
    pub uid: Uid,
    /// The number of its namespace. The queue shares workers fairly between namespaces, because the admission webhooks
    /// of one may be slow.
    pub namespace: u64,
}

impl Key {
    /// The key of a pod; `None` if it has no node yet.
    pub fn of(pod: &Pod) -> Option<Self> {
        let node = Arc::clone(pod.node.as_ref()?);
        Some(Self { node, uid: pod.uid, namespace: id_of(&pod.namespace) })
    }

    /// The lane of the queue. Pods of one node share a lane, so that a node with thousands of pods does not delay the
    /// others.
    pub fn lane(&self) -> u64 {
        id_of(&self.node)
    }
}

/// A node that has taints or our annotation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Node {
    facts: NodeFacts,
    /// When taints were first observed, whether or not the annotation has been written.
    first_seen: FirstSeen,
    unwritten: Option<Annotation>,
}

/// A pending change of the Node annotation `nodemaintenance.k8s.io/taints-first-seen`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Annotation {
    /// The UID of the Node.
    pub uid: String,
    /// The new value; `None` removes the annotation.
    pub value: Option<String>,
}

/// Maximum number of other controllers that are reported in a term.
const MAX_CONFLICTS: usize = 16;

/// The store.
#[derive(Debug)]
pub struct State {
    policy: Policy,
    /// Only nodes with taints or our annotation. On all others, every pod stays.
    nodes: HashMap<Arc<str>, Node>,
    namespaces: HashMap<Box<str>, BTreeMap<String, String>>,
    /// The pods with an Evacuation that we requested.
    evacuations: HashSet<Uid>,
    /// The pods whose requested Evacuation the watch has not delivered yet, and until when to wait for it.
    pending_creates: HashMap<Uid, Timestamp>,
    /// The pods that may stay, but whose evacuations cannot be cancelled now.
    uncancellable: HashSet<Uid>,
    /// The gaps of our watches.
    pub gaps: WatchGaps,
    rate_limit: RateLimit,
    published: PublishedEvents,
    /// Other controllers that act on the same taints.
    conflicts: BTreeSet<String>,
    /// Whether the policy file is rejected, so that `policy` is the previous one.
    pub policy_rejected: bool,
}

/// The next step for a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Remove the pod in this way, which was due at this time.
    pub act: Option<(RemovalAction, Timestamp)>,
    /// Remove our instigator finalizer from its Evacuation.
    pub release: bool,
    /// Publish this event.
    pub event: Option<NewEvent>,
    /// Reconcile the pod again at this time, even if nothing has changed.
    pub requeue_at: Option<Timestamp>,
    /// The reason.
    pub reason: Reason,
}

impl State {
    /// An empty store. `grace` is the grace period after a watch gap, `rate` the maximum number of pods to remove per
    /// second.
    pub fn new(policy: Policy, grace: SignedDuration, rate: Option<f64>) -> Self {
        Self {
            policy,
            nodes: HashMap::new(),
            namespaces: HashMap::new(),
            evacuations: HashSet::new(),
            pending_creates: HashMap::new(),
            uncancellable: HashSet::new(),
            gaps: WatchGaps::new(grace),
            rate_limit: RateLimit::per_second(rate),
            published: PublishedEvents::default(),
            conflicts: BTreeSet::new(),
            policy_rejected: false,
        }
    }

    /// Replaces the policy. Returns all pods on tainted nodes.
    pub fn set_policy(&mut self, policy: Policy, pods: &PodIndex) -> Vec<Key> {
        self.policy = policy;
        self.policy_rejected = false;
        self.all_keys(pods)
    }

    /// A watch has synced. Returns the pods to reconcile if all watches are synced.
    pub fn resume(&mut self, watch: Watch, pods: &PodIndex, now: Timestamp) -> Option<Vec<Key>> {
        self.gaps.end(watch, now).then(|| self.all_keys(pods))
    }

    /// All pods on tainted nodes, or with an Evacuation that we requested.
    fn all_keys(&self, pods: &PodIndex) -> Vec<Key> {
        let tainted = self.nodes.keys().flat_map(|node| on_node(node, pods));
        let evacuated = self.evacuations.iter().filter_map(|uid| pods.get(*uid));
        tainted.chain(evacuated.filter_map(|pod| Key::of(pod))).collect()
    }

    /// The number of nodes with `NoExecute` taints.
    pub fn tainted_nodes(&self) -> usize {
        self.nodes.values().filter(|node| !node.facts.taints.is_empty()).count()
    }

    /// The number of unreadable nodes.
    pub fn unreadable_nodes(&self) -> usize {
        self.nodes.values().filter(|node| node.facts.unreadable).count()
    }

    /// The number of pods that wait for a deadline or are being removed.
    pub fn pending_pods(&self) -> usize {
        self.published.len()
    }

    /// A node was added or has changed. Returns the pods to reconcile.
    pub fn apply_node(
        &mut self,
        name: &str,
        meta: &ObjectMeta,
        taints: &[core::Taint],
        ready: bool,
        pods: &PodIndex,
        now: Timestamp,
    ) -> Vec<Key> {
        let annotation = meta.annotations.as_ref().and_then(|all| all.get(TAINTS_FIRST_SEEN_ANNOTATION));
        let old = self.nodes.get(name);
        let changed = taints_changed(meta);
        // The annotation may be older than our own observations, for example if a taint was removed and added again. An
        // annotation from before our watch, or from while the node was unreadable, may be about an earlier taint.
        let first_seen = match old.filter(|old| !old.facts.unreadable) {
            Some(watched) => watched.first_seen.clone(),
            None => FirstSeen::read(annotation.map(String::as_str)).unless_changed(changed),
        };
        let Observed { no_execute: taints, out_of_service, kept } = first_seen.observe(taints, changed, now);
        let tainted = !taints.is_empty() || out_of_service.is_some();
        let facts = NodeFacts { taints, out_of_service, ready: ready && tainted, unreadable: false };
        let affects_pods = &facts != old.map_or(&NodeFacts::default(), |old| &old.facts);
        if tainted || annotation.is_some() {
            let value = kept.annotation();
            let is_unwritten = value.as_ref() != annotation;
            let uid = meta.uid.clone().filter(|_| is_unwritten);
            let unwritten = uid.map(|uid| Annotation { uid, value });
            self.nodes.insert(name.into(), Node { facts, first_seen: kept, unwritten });
        } else {
            self.nodes.remove(name);
        }
        if affects_pods { on_node(name, pods).collect() } else { Vec::new() }
    }

    /// The annotation to write to a node, if it has to change.
    pub fn unwritten_annotation(&self, node: &str) -> Option<&Annotation> {
        self.nodes.get(node)?.unwritten.as_ref()
    }

    /// A node is unreadable, so its pods stay. Returns the pods to reconcile; `None` if it was unreadable before.
    pub fn apply_unreadable_node(&mut self, name: &str, pods: &PodIndex) -> Option<Vec<Key>> {
        let facts = NodeFacts { unreadable: true, ..NodeFacts::default() };
        let old = self.nodes.insert(name.into(), Node { facts, ..Node::default() });
        let is_new = old.is_none_or(|old| !old.facts.unreadable);
        is_new.then(|| on_node(name, pods).collect())
    }

    /// A node was deleted. Returns its pods, which no longer have to leave because of its taints.
    pub fn delete_node(&mut self, name: &str, pods: &PodIndex) -> Vec<Key> {
        if self.nodes.remove(name).is_some() { on_node(name, pods).collect() } else { Vec::new() }
    }

    /// A pod was added, has changed or was deleted. Returns its key if it has to be reconciled.
    pub fn apply_pod(&mut self, change: &Change) -> Option<Key> {
        if let (Some(deleted), None) = (&change.old, &change.new) {
            self.published.delete(deleted.uid);
            self.pending_creates.remove(&deleted.uid);
            self.rate_limit.cancel(deleted.uid);
        }
        let key = Key::of(change.new.as_deref()?)?;
        let is_affected = self.nodes.contains_key(&key.node) || self.evacuations.contains(&key.uid);
        is_affected.then_some(key)
    }

    /// A namespace was added or has changed. Returns the pods to reconcile, if the policy selects by namespace labels.
    pub fn apply_namespace(
        &mut self,
        name: &str,
        labels: BTreeMap<String, String>,
        pods: &PodIndex,
    ) -> Vec<Key> {
        if self.namespaces.get(name) == Some(&labels) {
            return Vec::new();
        }
        self.namespaces.insert(name.into(), labels);
        if !self.policy.needs_namespaces() {
            return Vec::new();
        }
        let here = |pod: &&Arc<Pod>| &*pod.namespace == name;
        let tainted = self.nodes.keys().flat_map(|node| pods.on_node(node));
        tainted.filter(here).filter_map(|pod| Key::of(pod)).collect()
    }

    /// A namespace was deleted.
    pub fn delete_namespace(&mut self, name: &str) {
        self.namespaces.remove(name);
    }

    /// The Evacuation of a pod was requested.
    pub fn evacuation_created(&mut self, pod: &Pod, now: Timestamp) -> Option<Key> {
        if !self.evacuations.contains(&pod.uid) {
            let until = now.saturating_add(CREATE_TIMEOUT).unwrap_or(Timestamp::MAX);
            self.pending_creates.insert(pod.uid, until);
        }
        Key::of(pod)
    }

    /// The Evacuation of a pod was added, has changed or was deleted. `ours` is whether it has our instigator
    /// finalizer.
    pub fn apply_evacuation(&mut self, pod: Uid, ours: bool, pods: &PodIndex) -> Option<Key> {
        self.pending_creates.remove(&pod);
        let changed = if ours { self.evacuations.insert(pod) } else { self.evacuations.remove(&pod) };
        // The evacuator may allow cancellation now.
        let changed = self.uncancellable.remove(&pod) || changed;
        pods.get(pod).filter(|_| changed).and_then(|pod| Key::of(pod))
    }

    /// The evacuation of a pod that may stay cannot be cancelled. The pod is reconciled again when its Evacuation
    /// changes.
    pub fn set_uncancellable(&mut self, pod: Uid) {
        self.uncancellable.insert(pod);
    }

    /// Another controller acts on the same taints. Returns whether to report this: once for each of the first ones.
    pub fn apply_conflict(&mut self, source: &str) -> bool {
        // Users who may create events choose the source, and must not be able to hide the real one.
        let expected = source == "taint-eviction-controller";
        (expected || self.conflicts.len() < MAX_CONFLICTS) && self.conflicts.insert(bounded::text(source))
    }

    fn decide(&self, pod: &Pod, now: Timestamp) -> Decision {
        let view = View {
            pod,
            node: pod.node.as_ref().and_then(|node| self.nodes.get(node)).map(|node| &node.facts),
            namespace: self.namespaces.get(&*pod.namespace),
            evacuation: self.evacuations.contains(&pod.uid) || self.pending_creates.contains_key(&pod.uid),
            policy: &self.policy,
            synced: self.gaps.synced(),
        };
        decide(&view, now)
    }

    /// The next step for a pod.
    pub fn next(&mut self, pod: &Pod, now: Timestamp) -> Step {
        let pending = self.pending_creates.get(&pod.uid).copied().filter(|until| now < *until);
        if pending.is_none() {
            self.pending_creates.remove(&pod.uid);
        }
        let Decision { verdict, reason, release } = self.decide(pod, now);
        let requeue_at = verdict.requeue_at().into_iter().chain(pending).min();
        let mut step = Step { act: None, release, event: None, requeue_at, reason };
        if let Verdict::Act { how, due, .. } = verdict {
            // A request for an evacuation does not disrupt the pod.
            let permit =
                if how == RemovalAction::Evacuate { Ok(()) } else { self.rate_limit.acquire(pod.uid, now) };
            if let Err(later) = permit {
                self.published.rate_limited(pod.uid);
                step.requeue_at = step.requeue_at.into_iter().chain([later]).min();
                return step;
            }
            step.act = Some((how, due));
        } else {
            self.rate_limit.cancel(pod.uid);
        }
        step.event = self.published.record(pod, verdict, &step.reason);
        step
    }
}

/// The pods on a node.
fn on_node<'a>(node: &str, pods: &'a PodIndex) -> impl Iterator<Item = Key> + 'a {
    pods.on_node(node).iter().filter_map(|pod| Key::of(pod))
}

#[cfg(test)]
mod tests;

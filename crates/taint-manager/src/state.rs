//! Everything that is known of nodes, namespaces and Evacuations, fed by watch events. Plain synchronous state: it says
//! which pods an event concerns, and what the next step for a pod is. Pods themselves are in the shared pod cache.
//!
//! Nothing depends on the order of events: a pod may come before its node, a namespace after its pod.

pub mod rate_limit;
pub mod watch_gap;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use haulout_api_types::names::TAINTS_FIRST_SEEN_ANNOTATION;
use haulout_service_runtime::events::News;
use haulout_service_runtime::pods::{Change, Pod, PodIndex, Uid};
use haulout_service_runtime::queue::number_of;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use self::rate_limit::RateLimit;
use self::watch_gap::{Watch, WatchGaps};
use crate::decide::{Decision, How, NodeFacts, Reason, Verdict, View, decide};
use crate::events::Announced;
use crate::policy::Policy;
use crate::taint::{FirstSeen, Observed, taints_changed};

/// How long an Evacuation that was asked for may be missing from the watch before it is asked for again. It may have been
/// deleted in a gap of the watch.
const CREATE_TIMEOUT: SignedDuration = SignedDuration::from_secs(10);

/// A pod to reconcile.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The pod's node.
    pub node: Arc<str>,
    /// The pod.
    pub uid: Uid,
    /// The number of its namespace, whose admission webhooks may be slow.
    pub namespace: u64,
}

impl Key {
    /// The key of a pod; `None` if it has no node yet.
    pub fn of(pod: &Pod) -> Option<Self> {
        let node = Arc::clone(pod.node.as_ref()?);
        Some(Self { node, uid: pod.uid, namespace: number_of(&pod.namespace) })
    }

    /// Pods of one node share a lane of the queue, so that a node with thousands of pods does not hold up the others.
    pub fn lane(&self) -> u64 {
        number_of(&self.node)
    }
}

/// What is known of a node that has taints, or our annotation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Node {
    facts: NodeFacts,
    /// When taints were first seen, whether or not that has been written yet.
    first_seen: FirstSeen,
    unwritten: Option<Annotation>,
}

/// What a Node's annotation `nodemaintenance.k8s.io/taints-first-seen` has to be changed to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Annotation {
    /// The UID of the Node.
    pub uid: String,
    /// The new value; `None` removes the annotation.
    pub value: Option<String>,
}

/// All that the taint manager knows.
#[derive(Debug)]
pub struct State {
    policy: Policy,
    /// Only those with taints or our annotation: on all others every pod stays.
    nodes: HashMap<Arc<str>, Node>,
    namespaces: HashMap<Box<str>, BTreeMap<String, String>>,
    /// The pods with an Evacuation that we asked for.
    evacuations: HashSet<Uid>,
    /// The pods whose Evacuation was asked for and has not been delivered by the watch yet, and until when that is waited
    /// for.
    pending_creates: HashMap<Uid, Timestamp>,
    /// Pods that may stay, and whose evacuations cannot be cancelled for now.
    uncancellable: HashSet<Uid>,
    /// Gaps in our watches.
    pub gaps: WatchGaps,
    rate_limit: RateLimit,
    announced: Announced,
    /// Other controllers that act on the same taints.
    conflicts: BTreeSet<String>,
}

/// What to do about a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Make it leave in this way, which was due at this time.
    pub act: Option<(How, Timestamp)>,
    /// Take our instigator off its Evacuation.
    pub release: bool,
    /// Publish this event.
    pub news: Option<News>,
    /// Reconcile it again at this time, even if nothing has changed.
    pub again: Option<Timestamp>,
    /// Why.
    pub reason: Reason,
}

impl State {
    /// Knows nothing but the policy. `settle` is how long nodes have to report after a gap, `rate` how many pods may be
    /// made to leave in a second.
    pub fn new(policy: Policy, settle: SignedDuration, rate: Option<f64>) -> Self {
        Self {
            policy,
            nodes: HashMap::new(),
            namespaces: HashMap::new(),
            evacuations: HashSet::new(),
            pending_creates: HashMap::new(),
            uncancellable: HashSet::new(),
            gaps: WatchGaps::new(settle),
            rate_limit: RateLimit::per_second(rate),
            announced: Announced::default(),
            conflicts: BTreeSet::new(),
        }
    }

    /// Another policy is in force. Returns all pods on tainted nodes.
    pub fn set_policy(&mut self, policy: Policy, pods: &PodIndex) -> Vec<Key> {
        self.policy = policy;
        self.all_keys(pods)
    }

    /// A watch is synced. Returns the pods to reconcile when all are.
    pub fn resume(&mut self, watch: Watch, pods: &PodIndex, now: Timestamp) -> Option<Vec<Key>> {
        self.gaps.end(watch, now).then(|| self.all_keys(pods))
    }

    /// All pods on tainted nodes or with an Evacuation of ours.
    fn all_keys(&self, pods: &PodIndex) -> Vec<Key> {
        let tainted = self.nodes.keys().flat_map(|node| on_node(node, pods));
        let evacuated = self.evacuations.iter().filter_map(|uid| pods.get(*uid));
        tainted.chain(evacuated.filter_map(|pod| Key::of(pod))).collect()
    }

    /// How many nodes have taints that make pods leave.
    pub fn tainted_nodes(&self) -> usize {
        self.nodes.values().filter(|node| !node.facts.taints.is_empty()).count()
    }

    /// How many nodes cannot be read.
    pub fn unreadable_nodes(&self) -> usize {
        self.nodes.values().filter(|node| node.facts.unreadable).count()
    }

    /// How many pods wait for a deadline or are being made to leave.
    pub fn concerned_pods(&self) -> usize {
        self.announced.len()
    }

    /// A node was added or has changed.
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
        // What is written may lag behind what we saw ourselves, such as a taint that went and came back. What was
        // written before we watched, or while we could not read the node, may be about an earlier taint.
        let first_seen = match old.filter(|old| !old.facts.unreadable) {
            Some(watched) => watched.first_seen.clone(),
            None => FirstSeen::read(annotation.map(String::as_str)).unless_changed(changed),
        };
        let Observed { no_execute: taints, out_of_service, kept } = first_seen.observe(taints, changed, now);
        let tainted = !taints.is_empty() || out_of_service.is_some();
        let facts = NodeFacts { taints, out_of_service, ready: ready && tainted, unreadable: false };
        let concerns_pods = &facts != old.map_or(&NodeFacts::default(), |old| &old.facts);
        if tainted || annotation.is_some() {
            let value = kept.annotation();
            let is_unwritten = value.as_ref() != annotation;
            let uid = meta.uid.clone().filter(|_| is_unwritten);
            let unwritten = uid.map(|uid| Annotation { uid, value });
            self.nodes.insert(name.into(), Node { facts, first_seen: kept, unwritten });
        } else {
            self.nodes.remove(name);
        }
        if concerns_pods { on_node(name, pods).collect() } else { Vec::new() }
    }

    /// What has to be written to a node.
    pub fn unwritten_annotation(&self, node: &str) -> Option<&Annotation> {
        self.nodes.get(node)?.unwritten.as_ref()
    }

    /// A node was added or has changed and cannot be read: its pods stay as they are. `None` if it was so before.
    pub fn apply_unreadable_node(&mut self, name: &str, pods: &PodIndex) -> Option<Vec<Key>> {
        let facts = NodeFacts { unreadable: true, ..NodeFacts::default() };
        let old = self.nodes.insert(name.into(), Node { facts, ..Node::default() });
        let is_new = old.is_none_or(|old| !old.facts.unreadable);
        is_new.then(|| on_node(name, pods).collect())
    }

    /// A node was deleted. Its pods are not our business any longer.
    pub fn delete_node(&mut self, name: &str, pods: &PodIndex) -> Vec<Key> {
        if self.nodes.remove(name).is_some() { on_node(name, pods).collect() } else { Vec::new() }
    }

    /// A pod was added, has changed or was deleted.
    pub fn apply_pod(&mut self, change: &Change) -> Option<Key> {
        if let (Some(deleted), None) = (&change.old, &change.new) {
            self.announced.delete(deleted.uid);
            self.pending_creates.remove(&deleted.uid);
            self.rate_limit.cancel(deleted.uid);
        }
        let key = Key::of(change.new.as_deref()?)?;
        let concerned = self.nodes.contains_key(&key.node) || self.evacuations.contains(&key.uid);
        concerned.then_some(key)
    }

    /// A namespace has these labels. They matter only if the policy selects by them.
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

    /// The Evacuation of a pod was asked for.
    pub fn evacuation_created(&mut self, pod: &Pod, now: Timestamp) -> Option<Key> {
        if !self.evacuations.contains(&pod.uid) {
            let until = now.saturating_add(CREATE_TIMEOUT).unwrap_or(Timestamp::MAX);
            self.pending_creates.insert(pod.uid, until);
        }
        Key::of(pod)
    }

    /// Whether there is an Evacuation of this pod that we asked for.
    pub fn apply_evacuation(&mut self, pod: Uid, ours: bool, pods: &PodIndex) -> Option<Key> {
        self.pending_creates.remove(&pod);
        let changed = if ours { self.evacuations.insert(pod) } else { self.evacuations.remove(&pod) };
        // Its evacuator may allow to cancel it now.
        let changed = self.uncancellable.remove(&pod) || changed;
        pods.get(pod).filter(|_| changed).and_then(|pod| Key::of(pod))
    }

    /// The evacuation of a pod that may stay cannot be cancelled. The pod is reconciled when its Evacuation changes.
    pub fn set_uncancellable(&mut self, pod: Uid) {
        self.uncancellable.insert(pod);
    }

    /// Another controller acts on the same taints. Returns whether that is new.
    pub fn apply_conflict(&mut self, source: &str) -> bool {
        self.conflicts.insert(source.to_owned())
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
        let again = verdict.again().into_iter().chain(pending).min();
        let mut step = Step { act: None, release, news: None, again, reason };
        if let Verdict::Act { how, due, .. } = verdict {
            // Asking for an evacuation disrupts nobody.
            let turn = if how == How::Evacuate { Ok(()) } else { self.rate_limit.acquire(pod.uid, now) };
            if let Err(later) = turn {
                self.announced.rate_limited(pod.uid);
                step.again = step.again.into_iter().chain([later]).min();
                return step;
            }
            step.act = Some((how, due));
        } else {
            self.rate_limit.cancel(pod.uid);
        }
        step.news = self.announced.record(pod, verdict, &step.reason);
        step
    }
}

/// The pods on a node.
fn on_node<'a>(node: &str, pods: &'a PodIndex) -> impl Iterator<Item = Key> + 'a {
    pods.on_node(node).iter().filter_map(|pod| Key::of(pod))
}

#[cfg(test)]
mod tests;

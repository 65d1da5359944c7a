//! What is known of nodes, namespaces and Evacuations, and whom an event concerns. Pods themselves are in the
//! shared pod cache; here is only what they are judged by.
//!
//! Nothing depends on the order in which things are seen: a pod before its node, a namespace after its pod.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use haulout_api_types::names::TAINTS_FIRST_SEEN_ANNOTATION;
use haulout_service_runtime::pods::{Change, Pod, PodIndex, Uid};
use haulout_service_runtime::queue::number_of;
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::decide::{Decision, NodeFacts, View, decide};
use crate::policy::Policy;
use crate::sight::Sight;
use crate::taint::{FirstSeen, Observed, taints_changed};

/// A pod to be decided about. Pods of one node stand in one line, and all lines move on in turn, so that a
/// node with thousands of pods does not hold up the others.
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

    /// Pods of one node stand in one line.
    pub fn lane(&self) -> u64 {
        number_of(&self.node)
    }
}

/// What follows from an event about a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeNews {
    /// The pods to decide about.
    pub pods: Vec<Key>,
    /// What the Node's annotation `nodemaintenance.k8s.io/taints-first-seen` has to be changed to; the inner
    /// `None` removes it.
    #[allow(clippy::option_option, reason = "a change of something that may be absent")]
    pub annotation: Option<Option<String>>,
}

/// What is known of a node that has taints, or our annotation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Node {
    facts: NodeFacts,
    /// When taints were first seen, whether or not that has been written yet.
    first_seen: FirstSeen,
}

/// All that pods are judged by.
#[derive(Debug)]
pub struct Index {
    policy: Arc<Policy>,
    /// Only those that have something to do with us: on all others every pod stays.
    nodes: HashMap<Arc<str>, Node>,
    namespaces: HashMap<Box<str>, BTreeMap<String, String>>,
    /// The pods with an Evacuation that we asked for.
    evacuations: HashSet<Uid>,
    /// Pods that may stay, and whose evacuations cannot be cancelled for now.
    past_recall: HashSet<Uid>,
}

impl Index {
    /// Nothing is known but the policy.
    pub fn new(policy: Policy) -> Self {
        Self {
            policy: Arc::new(policy),
            nodes: HashMap::new(),
            namespaces: HashMap::new(),
            evacuations: HashSet::new(),
            past_recall: HashSet::new(),
        }
    }

    /// Another policy is in force. Whom that concerns: everybody on a tainted node.
    pub fn set_policy(&mut self, policy: Policy, pods: &PodIndex) -> Vec<Key> {
        self.policy = Arc::new(policy);
        self.everybody(pods)
    }

    /// All pods on tainted nodes or with an Evacuation of ours: who has to be judged anew when a gap has ended.
    pub fn everybody(&self, pods: &PodIndex) -> Vec<Key> {
        let tainted = self.nodes.keys().flat_map(|node| on_node(node, pods));
        let evacuated = self.evacuations.iter().filter_map(|uid| pods.get(*uid));
        tainted.chain(evacuated.filter_map(|pod| Key::of(pod))).collect()
    }

    /// How many nodes have taints that make pods leave.
    pub fn tainted_nodes(&self) -> usize {
        self.nodes.values().filter(|node| !node.facts.taints.is_empty()).count()
    }

    /// A node is there, in this state.
    pub fn apply_node(
        &mut self,
        meta: &ObjectMeta,
        taints: &[core::Taint],
        ready: bool,
        pods: &PodIndex,
        now: Timestamp,
    ) -> NodeNews {
        let Some(name) = meta.name.as_deref() else { return NodeNews::default() };
        let annotation = meta
            .annotations
            .as_ref()
            .and_then(|all| all.get(TAINTS_FIRST_SEEN_ANNOTATION))
            .map(String::as_str);
        let old = self.nodes.get(name);
        let changed = taints_changed(meta);
        // What is written may lag behind what we saw ourselves, such as a taint that went and came back. What was
        // written before we watched, or while we could not read the node, may be about an earlier taint.
        let watched = old.filter(|old| !old.facts.unreadable);
        let first_seen = watched.map_or_else(
            || FirstSeen::read(annotation).unless_changed(changed),
            |watched| watched.first_seen.clone(),
        );
        let Observed { no_execute: taints, out_of_service, kept } = first_seen.observe(taints, changed, now);
        let wanted = kept.annotation();
        let tainted = !taints.is_empty() || out_of_service.is_some();
        let facts = NodeFacts { taints, out_of_service, ready, unreadable: false };
        let facts = if tainted { facts } else { NodeFacts::default() };
        let changed = facts != old.map(|old| old.facts.clone()).unwrap_or_default();
        if tainted || annotation.is_some() {
            self.nodes.insert(name.into(), Node { facts, first_seen: kept });
        } else {
            self.nodes.remove(name);
        }
        NodeNews {
            pods: if changed { on_node(name, pods).collect() } else { Vec::new() },
            annotation: (wanted.as_deref() != annotation).then_some(wanted),
        }
    }

    /// A node is there, and what it is like cannot be read: its pods stay as they are. Whom that concerns; `None` if
    /// it was so before.
    pub fn apply_unreadable_node(&mut self, name: &str, pods: &PodIndex) -> Option<Vec<Key>> {
        let facts = NodeFacts { unreadable: true, ..NodeFacts::default() };
        let old = self.nodes.insert(name.into(), Node { facts, first_seen: FirstSeen::default() });
        let is_new = old.is_none_or(|old| !old.facts.unreadable);
        is_new.then(|| on_node(name, pods).collect())
    }

    /// How many nodes cannot be read.
    pub fn unreadable_nodes(&self) -> usize {
        self.nodes.values().filter(|node| node.facts.unreadable).count()
    }

    /// A node is gone. Its pods are not our business any longer.
    pub fn delete_node(&mut self, name: &str, pods: &PodIndex) -> Vec<Key> {
        if self.nodes.remove(name).is_some() { on_node(name, pods).collect() } else { Vec::new() }
    }

    /// All nodes have been listed: others are gone.
    pub fn retain_nodes(&mut self, listed: &HashSet<Arc<str>>, pods: &PodIndex) -> Vec<Key> {
        let gone: Vec<_> = self.nodes.keys().filter(|name| !listed.contains(*name)).cloned().collect();
        gone.iter().flat_map(|name| self.delete_node(name, pods)).collect()
    }

    /// Something happened to a pod.
    pub fn apply_pod(&self, change: &Change) -> Option<Key> {
        let pod = change.new.as_deref()?;
        let key = Key::of(pod)?;
        let concerned = self.nodes.contains_key(&key.node) || self.evacuations.contains(&pod.uid);
        concerned.then_some(key)
    }

    /// A namespace has these labels. Only worth telling if the policy asks for them.
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

    /// A namespace is gone.
    pub fn delete_namespace(&mut self, name: &str) {
        self.namespaces.remove(name);
    }

    /// All namespaces have been listed: others are gone.
    pub fn retain_namespaces(&mut self, listed: &HashSet<Box<str>>) {
        self.namespaces.retain(|name, _| listed.contains(name));
    }

    /// Whether there is an Evacuation for a pod that we want. Whom that concerns: the pod, if it is there.
    pub fn apply_evacuation(&mut self, pod: Uid, wanted: bool, pods: &PodIndex) -> Option<Key> {
        let changed = if wanted { self.evacuations.insert(pod) } else { self.evacuations.remove(&pod) };
        // Its evacuator may allow it now.
        let changed = self.past_recall.remove(&pod) || changed;
        pods.get(pod).filter(|_| changed).and_then(|pod| Key::of(pod))
    }

    /// The evacuation of a pod that may stay cannot be cancelled. The pod is decided about again when its Evacuation
    /// changes.
    pub fn evacuation_past_recall(&mut self, pod: Uid) {
        self.past_recall.insert(pod);
    }

    /// All Evacuations have been listed: others are gone. Whom that concerns.
    pub fn retain_evacuations(&mut self, listed: &HashSet<Uid>, pods: &PodIndex) -> Vec<Key> {
        let gone: Vec<_> = self.evacuations.difference(listed).copied().collect();
        gone.into_iter().filter_map(|pod| self.apply_evacuation(pod, false, pods)).collect()
    }

    /// Decides about a pod.
    pub fn decide<'a>(&'a self, pod: &'a Pod, sight: Sight, now: Timestamp) -> Decision<'a> {
        let view = View {
            pod,
            node: pod.node.as_ref().and_then(|node| self.nodes.get(node)).map(|node| &node.facts),
            namespace: self.namespaces.get(&*pod.namespace),
            evacuation: self.evacuations.contains(&pod.uid),
            policy: &self.policy,
            sight,
        };
        decide(&view, now)
    }
}

/// The pods on a node.
fn on_node<'a>(node: &str, pods: &'a PodIndex) -> impl Iterator<Item = Key> + 'a {
    pods.on_node(node).iter().filter_map(|pod| Key::of(pod))
}

#[cfg(test)]
mod tests;

//! The index of all pods, by UID, by namespace and name, and by node. Updates return the resulting changes. The index does no
//! I/O and has no clock.

use std::borrow::Borrow;
use std::collections::{HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use super::Uid;
use super::pod::Pod;

/// A change of one pod. At least one of the two states is present.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The old state; `None` if the pod is new.
    pub old: Option<Arc<Pod>>,
    /// The new state; `None` if the pod is deleted.
    pub new: Option<Arc<Pod>>,
}

impl Change {
    /// The latest known state.
    pub fn pod(&self) -> Option<&Arc<Pod>> {
        self.new.as_ref().or(self.old.as_ref())
    }
}

/// All pods.
#[derive(Debug, Default)]
pub struct PodIndex {
    by_uid: HashSet<ByUid>,
    by_namespace: HashMap<Arc<str>, HashSet<ByName>>,
    /// Sorted by UID. A node has at most some hundreds of pods, for which a vector is cheaper than a tree.
    by_node: HashMap<Arc<str>, Vec<Arc<Pod>>>,
}

impl PodIndex {
    /// The pod with this UID.
    pub fn get(&self, uid: Uid) -> Option<&Arc<Pod>> {
        self.by_uid.get(&uid).map(|ByUid(pod)| pod)
    }

    /// The pod that has this name now.
    pub fn find(&self, namespace: &str, name: &str) -> Option<&Arc<Pod>> {
        self.by_namespace.get(namespace)?.get(name).map(|ByName(pod)| pod)
    }

    /// The pods on this node, sorted by UID.
    pub fn on_node(&self, node: &str) -> &[Arc<Pod>] {
        self.by_node.get(node).map(Vec::as_slice).unwrap_or_default()
    }

    /// All pods, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Pod>> {
        self.by_uid.iter().map(|ByUid(pod)| pod)
    }

    /// The number of pods.
    pub fn len(&self) -> usize {
        self.by_uid.len()
    }

    /// Whether there are no pods.
    pub fn is_empty(&self) -> bool {
        self.by_uid.is_empty()
    }

    /// Adds or updates a pod. Returns no change if only its `resourceVersion` differs. Returns two changes if the pod
    /// replaces another pod with the same name, whose deletion was missed.
    pub fn apply(&mut self, mut pod: Pod) -> Vec<Change> {
        let mut changes = Vec::new();
        let old = self.remove(pod.uid);
        if let Some(other) = self.find(&pod.namespace, &pod.name).map(|other| other.uid) {
            changes.extend(self.remove(other).map(|other| Change { old: Some(other), new: None }));
        }
        let same = old.as_deref().is_some_and(|old| {
            let version = std::mem::replace(&mut pod.version, old.version);
            let same = pod == *old;
            pod.version = version;
            same
        });
        let new = Arc::new(pod);
        self.insert(&new);
        if !same {
            changes.push(Change { old, new: Some(new) });
        }
        changes
    }

    /// Deletes the pod with this UID.
    pub fn delete(&mut self, uid: Uid) -> Option<Change> {
        self.remove(uid).map(|old| Change { old: Some(old), new: None })
    }

    /// Deletes all pods except those with these UIDs.
    pub fn retain(&mut self, uids: &HashSet<Uid>) -> Vec<Change> {
        let gone: Vec<_> = self.iter().map(|pod| pod.uid).filter(|uid| !uids.contains(uid)).collect();
        gone.into_iter().filter_map(|uid| self.delete(uid)).collect()
    }

    fn insert(&mut self, pod: &Arc<Pod>) {
        self.by_uid.insert(ByUid(Arc::clone(pod)));
        let namespace = self.by_namespace.entry(Arc::clone(&pod.namespace)).or_default();
        namespace.insert(ByName(Arc::clone(pod)));
        if let Some(node) = &pod.node {
            let pods = self.by_node.entry(Arc::clone(node)).or_default();
            let position = pods.partition_point(|other| other.uid < pod.uid);
            pods.insert(position, Arc::clone(pod));
        }
    }

    fn remove(&mut self, uid: Uid) -> Option<Arc<Pod>> {
        let ByUid(pod) = self.by_uid.take(&uid)?;
        if let Some(pods) = self.by_namespace.get_mut(&pod.namespace) {
            pods.remove(pod.name.as_ref());
            if pods.is_empty() {
                self.by_namespace.remove(&pod.namespace);
            }
        }
        if let Some(node) = &pod.node
            && let Some(pods) = self.by_node.get_mut(node)
        {
            if let Ok(position) = pods.binary_search_by_key(&uid, |other| other.uid) {
                pods.remove(position);
            }
            if pods.is_empty() {
                self.by_node.remove(node);
            }
        }
        Some(pod)
    }
}

/// A pod that is hashed by its UID, so that the set needs no copy of the key.
#[derive(Debug)]
struct ByUid(Arc<Pod>);

impl PartialEq for ByUid {
    fn eq(&self, other: &Self) -> bool {
        self.0.uid == other.0.uid
    }
}

impl Eq for ByUid {}

impl Hash for ByUid {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.uid.hash(state);
    }
}

impl Borrow<Uid> for ByUid {
    fn borrow(&self) -> &Uid {
        &self.0.uid
    }
}

/// A pod that is hashed by its name.
#[derive(Debug)]
struct ByName(Arc<Pod>);

impl PartialEq for ByName {
    fn eq(&self, other: &Self) -> bool {
        self.0.name == other.0.name
    }
}

impl Eq for ByName {}

impl Hash for ByName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.name.hash(state);
    }
}

impl Borrow<str> for ByName {
    fn borrow(&self) -> &str {
        &self.0.name
    }
}

#[cfg(test)]
mod tests;

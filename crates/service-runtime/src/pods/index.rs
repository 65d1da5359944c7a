//! All pods, findable by UID, by namespace and name, and by node. It is told what happened and tells what
//! changed; it does no I/O and knows no time.

use std::borrow::Borrow;
use std::collections::{HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use super::Uid;
use super::pod::Pod;

/// What happened to one pod. One of the two is always there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The pod before; `None` if it is new.
    pub old: Option<Arc<Pod>>,
    /// The pod now; `None` if it is gone.
    pub new: Option<Arc<Pod>>,
}

impl Change {
    /// The pod in the latest state that is known.
    pub fn pod(&self) -> Option<&Arc<Pod>> {
        self.new.as_ref().or(self.old.as_ref())
    }
}

/// All pods.
#[derive(Debug, Default)]
pub struct PodIndex {
    by_uid: HashSet<ByUid>,
    by_namespace: HashMap<Arc<str>, HashSet<ByName>>,
    /// Sorted by UID. A node has hundreds of pods, so that a shift costs less than a tree's bookkeeping.
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

    /// How many pods there are.
    pub fn len(&self) -> usize {
        self.by_uid.len()
    }

    /// Whether there are no pods.
    pub fn is_empty(&self) -> bool {
        self.by_uid.is_empty()
    }

    /// A pod is there, in this state. There is no change if it was already there in this state but for its
    /// `resourceVersion`, and there are two if it took the name of another, which must have gone unseen.
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

    /// The pod with this UID is gone.
    pub fn delete(&mut self, uid: Uid) -> Option<Change> {
        self.remove(uid).map(|old| Change { old: Some(old), new: None })
    }

    /// Only pods with these UIDs are there; all others are gone.
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
            let place = pods.partition_point(|other| other.uid < pod.uid);
            pods.insert(place, Arc::clone(pod));
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
            if let Ok(place) = pods.binary_search_by_key(&uid, |other| other.uid) {
                pods.remove(place);
            }
            if pods.is_empty() {
                self.by_node.remove(node);
            }
        }
        Some(pod)
    }
}

/// A pod as its UID: the sets hold pointers only, and no second copy of what they are sorted by.
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

/// A pod as its name.
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

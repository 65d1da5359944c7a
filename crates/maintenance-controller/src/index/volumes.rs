//! Which volumes are attached to which node, and which belong to the claims of which pods.
//!
//! A VolumeAttachment names a persistent volume, a node's `volumesAttached` the driver and its handle: the same volume
//! is in both as a rule, and counts once when it is known what it is called there.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use haulout_service_runtime::pods::Pod;

use super::Claim;
use crate::seen::AttachmentSeen;

#[derive(Default)]
pub(super) struct Volumes {
    attachments: HashMap<Arc<str>, AttachmentSeen>,
    /// The volumes of each node; twice where two attachments name the same.
    attached: HashMap<Arc<str>, Vec<Arc<str>>>,
    /// The volumes of claims, `None` for those that have none, as long as a pod names them.
    claims: HashMap<Claim, Option<Arc<str>>>,
    /// What persistent volumes are called in `volumesAttached`, as far as that had to be looked up.
    handles: HashMap<Arc<str>, Option<Arc<str>>>,
    none: Arc<[Arc<str>]>,
}

impl Volumes {
    /// What is attached to a node, which reports these itself.
    pub fn attached_to(&self, node: &str, reported: &[Arc<str>]) -> BTreeSet<Arc<str>> {
        let known: BTreeSet<_> = self.attached.get(node).into_iter().flatten().cloned().collect();
        let handles: BTreeSet<_> = known.iter().filter_map(|volume| self.handle(volume)).collect();
        let others: Vec<_> = reported.iter().filter(|volume| !handles.contains(volume)).cloned().collect();
        known.into_iter().chain(others).collect()
    }

    fn handle(&self, volume: &str) -> Option<&Arc<str>> {
        self.handles.get(volume)?.as_ref()
    }

    /// The persistent volumes that are attached to a node, or belong to these pods, and whose handle is not known.
    pub fn unknown_handles(&self, node: &str, pods: &[Arc<Pod>]) -> BTreeSet<Arc<str>> {
        let attached = self.attached.get(node).into_iter().flatten().cloned();
        let claimed =
            pods.iter().flat_map(|pod| claims_of(pod)).filter_map(|claim| self.claims.get(&claim)?.clone());
        attached.chain(claimed).filter(|volume| !self.handles.contains_key(volume)).collect()
    }

    pub fn learn_handle(&mut self, volume: Arc<str>, handle: Option<Arc<str>>) {
        self.handles.insert(volume, handle);
    }

    /// Takes in an attachment, `None` if it is gone; the nodes that this concerns.
    pub fn put_attachment(&mut self, name: Arc<str>, seen: Option<AttachmentSeen>) -> Vec<Arc<str>> {
        let known = match &seen {
            Some(seen) => self.attachments.insert(name, seen.clone()),
            None => self.attachments.remove(&name),
        };
        if known == seen {
            return Vec::new();
        }
        let mut concerned = Vec::new();
        if let Some(known) = known {
            self.handles.remove(&known.volume);
            if let Some(volumes) = self.attached.get_mut(&known.node) {
                if let Some(place) = volumes.iter().position(|volume| *volume == known.volume) {
                    volumes.swap_remove(place);
                }
                if volumes.is_empty() {
                    self.attached.remove(&known.node);
                }
            }
            concerned.push(known.node);
        }
        if let Some(seen) = seen {
            self.attached.entry(seen.node.clone()).or_default().push(seen.volume);
            concerned.push(seen.node);
        }
        concerned
    }

    /// The volumes of a pod, as far as they are known, under both names.
    pub fn of_pod(&self, pod: &Pod) -> Arc<[Arc<str>]> {
        if pod.claims.is_empty() || self.claims.is_empty() {
            return self.none.clone();
        }
        let volumes = claims_of(pod).filter_map(|claim| self.claims.get(&claim)?.clone());
        volumes.flat_map(|volume| [self.handle(&volume).cloned(), Some(volume)]).flatten().collect()
    }

    /// The claims of these pods whose volumes are not known.
    pub fn unknown_claims(&self, pods: &[Arc<Pod>]) -> BTreeSet<Claim> {
        let all = pods.iter().flat_map(|pod| claims_of(pod));
        all.filter(|claim| !self.claims.contains_key(claim)).collect()
    }

    pub fn learn_claim(&mut self, claim: Claim, volume: Option<Arc<str>>) {
        self.claims.insert(claim, volume);
    }

    pub fn forget_claims(&mut self, pod: &Pod) {
        for claim in claims_of(pod) {
            if let Some(Some(volume)) = self.claims.remove(&claim) {
                self.handles.remove(&volume);
            }
        }
    }
}

fn claims_of(pod: &Pod) -> impl Iterator<Item = Claim> {
    pod.claims.iter().map(|claim| (pod.namespace.clone(), claim.clone()))
}

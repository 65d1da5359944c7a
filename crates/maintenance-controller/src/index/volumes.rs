//! Which volumes are attached to which node, and which belong to the claims of which pods.

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
    none: Arc<[Arc<str>]>,
}

impl Volumes {
    /// What is attached to a node.
    pub fn attached_to(&self, node: &str) -> BTreeSet<Arc<str>> {
        self.attached.get(node).into_iter().flatten().cloned().collect()
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

    /// The volumes of a pod, as far as they are known.
    pub fn of_pod(&self, pod: &Pod) -> Arc<[Arc<str>]> {
        if pod.claims.is_empty() || self.claims.is_empty() {
            return self.none.clone();
        }
        claims_of(pod).filter_map(|claim| self.claims.get(&claim)?.clone()).collect()
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
            self.claims.remove(&claim);
        }
    }
}

fn claims_of(pod: &Pod) -> impl Iterator<Item = Claim> {
    pod.claims.iter().map(|claim| (pod.namespace.clone(), claim.clone()))
}

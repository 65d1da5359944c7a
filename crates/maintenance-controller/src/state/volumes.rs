//! Which volumes are attached to which node, and which belong to the claims of which pods.
//!
//! A VolumeAttachment names a persistent volume, a node's `volumesAttached` the driver and its handle: the same volume
//! is in both as a rule, and counts once when it is known what it is called there.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use haulout_service_runtime::pods::Pod;
use haulout_service_runtime::queue::Backoff;
use jiff::Timestamp;

use super::Claim;
use crate::seen::AttachmentSeen;

#[derive(Default)]
pub(super) struct Volumes {
    attachments: HashMap<Arc<str>, AttachmentSeen>,
    /// The volumes of each node; twice where two attachments name the same.
    attached: HashMap<Arc<str>, Vec<Arc<str>>>,
    /// The volumes of claims, as long as a pod names them.
    claims: HashMap<Claim, Bound>,
    /// What persistent volumes are called in `volumesAttached`, as far as that had to be looked up.
    handles: HashMap<Arc<str>, Option<Arc<str>>>,
    none: Arc<[Arc<str>]>,
}

/// Whether a claim has a volume.
enum Bound {
    To(Arc<str>),
    /// It had none, so often in a row; when to ask again.
    Not {
        times: u32,
        again: Timestamp,
    },
}

impl Bound {
    fn volume(&self) -> Option<&Arc<str>> {
        match self {
            Self::To(volume) => Some(volume),
            Self::Not { .. } => None,
        }
    }
}

/// How long to wait before a claim without a volume is asked for again.
const ASK_AGAIN: Backoff = Backoff { first: Duration::from_secs(1), most: Duration::from_secs(300) };

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
        let claimed = pods
            .iter()
            .flat_map(|pod| claims_of(pod))
            .filter_map(|claim| self.claims.get(&claim)?.volume().cloned());
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
        let volumes = claims_of(pod).filter_map(|claim| self.claims.get(&claim)?.volume().cloned());
        volumes.flat_map(|volume| [self.handle(&volume).cloned(), Some(volume)]).flatten().collect()
    }

    /// The claims of these pods that have to be asked for.
    pub fn unknown_claims(&self, pods: &[Arc<Pod>], now: Timestamp) -> BTreeSet<Claim> {
        let all = pods.iter().flat_map(|pod| claims_of(pod));
        let unknown = |claim: &Claim| match self.claims.get(claim) {
            None => true,
            Some(Bound::To(_)) => false,
            Some(Bound::Not { again, .. }) => *again <= now,
        };
        all.filter(unknown).collect()
    }

    /// When the next claim of these pods has to be asked for again.
    pub fn next_claim(&self, pods: &[Arc<Pod>]) -> Option<Timestamp> {
        let all = pods.iter().flat_map(|pod| claims_of(pod));
        let again = all.filter_map(|claim| match self.claims.get(&claim)? {
            Bound::To(_) => None,
            Bound::Not { again, .. } => Some(*again),
        });
        again.min()
    }

    pub fn learn_claim(&mut self, claim: Claim, volume: Option<Arc<str>>, now: Timestamp) {
        let bound = if let Some(volume) = volume {
            Bound::To(volume)
        } else {
            let times = match self.claims.get(&claim) {
                Some(Bound::Not { times, .. }) => times.saturating_add(1),
                _ => 1,
            };
            let pause = ASK_AGAIN.delay(times, 1.0);
            Bound::Not { times, again: now.saturating_add(pause).unwrap_or(Timestamp::MAX) }
        };
        self.claims.insert(claim, bound);
    }

    pub fn forget_claims(&mut self, pod: &Pod) {
        for claim in claims_of(pod) {
            if let Some(Bound::To(volume)) = self.claims.remove(&claim) {
                self.handles.remove(&volume);
            }
        }
    }
}

fn claims_of(pod: &Pod) -> impl Iterator<Item = Claim> {
    pod.claims.iter().map(|claim| (pod.namespace.clone(), claim.clone()))
}

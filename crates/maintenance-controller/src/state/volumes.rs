//! Maps nodes to attached volumes, and pods to the volumes of their claims.
//!
//! A VolumeAttachment has the name of the persistent volume. A node's `volumesAttached` has the driver and the volume handle.
//! Usually the same volume is in both. It is counted once when its handle is known.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use haulout_service_runtime::pods::Pod;
use haulout_service_runtime::queue::Backoff;
use jiff::Timestamp;

use super::Claim;
use crate::observed::ObservedAttachment;

#[derive(Default)]
pub(super) struct Volumes {
    attachments: HashMap<Arc<str>, ObservedAttachment>,
    /// The volumes of each node. A volume with two attachments occurs twice.
    attached: HashMap<Arc<str>, Vec<Arc<str>>>,
    /// The volumes of claims that pods use.
    claims: HashMap<Claim, Binding>,
    /// The names of persistent volumes in `volumesAttached`, as far as they were looked up.
    handles: HashMap<Arc<str>, Option<Arc<str>>>,
    none: Arc<[Arc<str>]>,
}

/// Whether a claim has a volume.
enum Binding {
    Bound(Arc<str>),
    /// It was unbound at the last lookups.
    Unbound {
        lookups: u32,
        retry_at: Timestamp,
    },
}

impl Binding {
    fn volume(&self) -> Option<&Arc<str>> {
        match self {
            Self::Bound(volume) => Some(volume),
            Self::Unbound { .. } => None,
        }
    }
}

/// Backoff of lookups of an unbound claim.
const LOOKUP_BACKOFF: Backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(300) };

impl Volumes {
    /// The volumes that are attached to a node. `reported` is the node's `volumesAttached`.
    pub fn attached_to(&self, node: &str, reported: &[Arc<str>]) -> BTreeSet<Arc<str>> {
        let known: BTreeSet<_> = self.attached.get(node).into_iter().flatten().cloned().collect();
        let handles: BTreeSet<_> = known.iter().filter_map(|volume| self.handle(volume)).collect();
        let others: Vec<_> = reported.iter().filter(|volume| !handles.contains(volume)).cloned().collect();
        known.into_iter().chain(others).collect()
    }

    fn handle(&self, volume: &str) -> Option<&Arc<str>> {
        self.handles.get(volume)?.as_ref()
    }

    /// The persistent volumes that are attached to a node, or belong to these pods, and whose handle is not known yet.
    pub fn handles_to_look_up(&self, node: &str, pods: &[Arc<Pod>]) -> BTreeSet<Arc<str>> {
        let attached = self.attached.get(node).into_iter().flatten().cloned();
        let claimed = pods
            .iter()
            .flat_map(|pod| claims_of(pod))
            .filter_map(|claim| self.claims.get(&claim)?.volume().cloned());
        attached.chain(claimed).filter(|volume| !self.handles.contains_key(volume)).collect()
    }

    pub fn set_volume_handle(&mut self, volume: Arc<str>, handle: Option<Arc<str>>) {
        self.handles.insert(volume, handle);
    }

    /// Applies an attachment; `None` if it was deleted. Returns the affected nodes.
    pub fn apply_attachment(
        &mut self,
        name: Arc<str>,
        observed: Option<ObservedAttachment>,
    ) -> Vec<Arc<str>> {
        let known = match &observed {
            Some(observed) => self.attachments.insert(name, observed.clone()),
            None => self.attachments.remove(&name),
        };
        if known == observed {
            return Vec::new();
        }
        let mut affected = Vec::new();
        if let Some(known) = known {
            self.handles.remove(&known.volume);
            if let Some(volumes) = self.attached.get_mut(&known.node) {
                if let Some(index) = volumes.iter().position(|volume| *volume == known.volume) {
                    volumes.swap_remove(index);
                }
                if volumes.is_empty() {
                    self.attached.remove(&known.node);
                }
            }
            affected.push(known.node);
        }
        if let Some(observed) = observed {
            self.attached.entry(observed.node.clone()).or_default().push(observed.volume);
            affected.push(observed.node);
        }
        affected
    }

    /// The known volumes of a pod, under both names.
    pub fn of_pod(&self, pod: &Pod) -> Arc<[Arc<str>]> {
        if pod.claims.is_empty() || self.claims.is_empty() {
            return self.none.clone();
        }
        let volumes = claims_of(pod).filter_map(|claim| self.claims.get(&claim)?.volume().cloned());
        volumes.flat_map(|volume| [self.handle(&volume).cloned(), Some(volume)]).flatten().collect()
    }

    /// The claims of these pods that have to be looked up.
    pub fn claims_to_look_up(&self, pods: &[Arc<Pod>], now: Timestamp) -> BTreeSet<Claim> {
        let all = pods.iter().flat_map(|pod| claims_of(pod));
        let is_due = |claim: &Claim| match self.claims.get(claim) {
            None => true,
            Some(Binding::Bound(_)) => false,
            Some(Binding::Unbound { retry_at, .. }) => *retry_at <= now,
        };
        all.filter(is_due).collect()
    }

    /// When the next unbound claim of these pods has to be looked up again.
    pub fn next_claim_lookup(&self, pods: &[Arc<Pod>]) -> Option<Timestamp> {
        let all = pods.iter().flat_map(|pod| claims_of(pod));
        let retries = all.filter_map(|claim| match self.claims.get(&claim)? {
            Binding::Bound(_) => None,
            Binding::Unbound { retry_at, .. } => Some(*retry_at),
        });
        retries.min()
    }

    pub fn set_claim_volume(&mut self, claim: Claim, volume: Option<Arc<str>>, now: Timestamp) {
        let binding = if let Some(volume) = volume {
            Binding::Bound(volume)
        } else {
            let lookups = match self.claims.get(&claim) {
                Some(Binding::Unbound { lookups, .. }) => lookups.saturating_add(1),
                _ => 1,
            };
            let delay = LOOKUP_BACKOFF.delay(lookups, 1.0);
            Binding::Unbound { lookups, retry_at: now.saturating_add(delay).unwrap_or(Timestamp::MAX) }
        };
        self.claims.insert(claim, binding);
    }

    pub fn forget_claims(&mut self, pod: &Pod) {
        for claim in claims_of(pod) {
            if let Some(Binding::Bound(volume)) = self.claims.remove(&claim) {
                self.handles.remove(&volume);
            }
        }
    }
}

fn claims_of(pod: &Pod) -> impl Iterator<Item = Claim> {
    pod.claims.iter().map(|claim| (pod.namespace.clone(), claim.clone()))
}

//! When there was last activity on each node, and who leads since when.

use std::collections::{BTreeMap, HashMap};

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::view::{ClusterView, Kind, Read as _};

/// How late the renewal of a Lease may be received.
const LATE: SignedDuration = SignedDuration::from_secs(1);
/// How long after its grace period a terminating pod still counts as active.
const OVERDUE: SignedDuration = SignedDuration::from_secs(55);

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Activity {
    /// Time of the last activity, by node.
    nodes: HashMap<String, Timestamp>,
    /// The node of each pod, by UID.
    pods: HashMap<String, String>,
    /// When each maintenance started to drain.
    drains: HashMap<String, Timestamp>,
    leases: BTreeMap<String, Lease>,
}

#[derive(Debug)]
struct Lease {
    holder: String,
    /// Since when this holder has held it without a gap.
    since: Timestamp,
    renewed: Timestamp,
    lasts: SignedDuration,
}

/// Whether a controller leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leadership {
    /// The same replica leads, since this time.
    Since(Timestamp),
    /// Nobody leads, since this time.
    Nobody(Timestamp),
}

fn has_ended(pod: &Value) -> bool {
    pod.is_terminating() || matches!(pod.text("/status/phase"), "Succeeded" | "Failed")
}

impl Activity {
    /// Applies a change of an object. Returns a description if it counts as activity.
    pub fn apply(
        &mut self,
        kind: Kind,
        old: Option<&Value>,
        new: Option<&Value>,
        now: Timestamp,
    ) -> Option<String> {
        match kind {
            Kind::Pod => self.pod(old, new, now),
            Kind::Evacuation => self.evacuation(old, new, now),
            Kind::Maintenance => {
                self.maintenance(old, new, now);
                None
            }
            Kind::Lease => new.and_then(|lease| self.lease(lease, now)),
            _ => None,
        }
    }

    fn pod(&mut self, old: Option<&Value>, new: Option<&Value>, now: Timestamp) -> Option<String> {
        let pod = new.or(old)?;
        let node = pod.text("/spec/nodeName");
        if node.is_empty() {
            return None;
        }
        self.pods.insert(pod.uid().to_owned(), node.to_owned());
        let ended = match (old, new) {
            (_, None) => "is gone",
            (Some(old), Some(new)) if !has_ended(old) && has_ended(new) => {
                if new.is_terminating() {
                    "is terminating"
                } else {
                    "has finished"
                }
            }
            _ => return None,
        };
        self.nodes.insert(node.to_owned(), now);
        Some(format!("{} on {node} {ended}", pod.key()))
    }

    fn evacuation(&mut self, old: Option<&Value>, new: Option<&Value>, now: Timestamp) -> Option<String> {
        let new = new?;
        let class = |of: &Value| of.text("/status/activeEvacuatorClass").to_owned();
        let progress = |of: &Value| of.text("/status/evacuationProgressTimestamp").to_owned();
        let (before, after) = (old.map(|old| (class(old), progress(old))), (class(new), progress(new)));
        let before = before.unwrap_or_default();
        if before == after {
            return None;
        }
        if let Some(node) = self.pods.get(new.text("/spec/podRef/uid")) {
            self.nodes.insert(node.clone(), now);
        }
        // The evacuator writes its own line to the timeline.
        let (class, pod) = (after.0, new.text("/spec/podRef/name"));
        (before.0 != class).then(|| format!("evacuation of {pod}: {class} is active"))
    }

    fn maintenance(&mut self, old: Option<&Value>, new: Option<&Value>, now: Timestamp) {
        let drains = |of: Option<&Value>| of.is_some_and(|of| of.text("/spec/stage") == "Drain");
        if let Some(new) = new.filter(|new| drains(Some(new)) && !drains(old)) {
            self.drains.insert(new.uid().to_owned(), now);
        }
    }

    fn lease(&mut self, lease: &Value, now: Timestamp) -> Option<String> {
        let next = Lease {
            holder: lease.text("/spec/holderIdentity").to_owned(),
            since: now,
            renewed: lease.time("/spec/renewTime").unwrap_or_default(),
            lasts: SignedDuration::from_secs(lease.number("/spec/leaseDurationSeconds")),
        };
        let name = lease.name().to_owned();
        let known = self.leases.get(&name);
        let held = known.filter(|known| known.holder == next.holder && next.renewed <= known.stops_acting());
        let since = held.map_or(now, |known| known.since);
        let change = held.is_none().then(|| match next.holder.as_str() {
            "" => format!("nobody leads {name}"),
            holder => format!("{holder} leads {name}"),
        });
        self.leases.insert(name, Lease { since, ..next });
        change
    }

    /// Whether the controller with this Lease leads.
    pub fn leads(&self, lease: &str, now: Timestamp) -> Leadership {
        match self.leases.get(lease) {
            Some(lease) if !lease.holder.is_empty() && now <= lease.expires() => {
                Leadership::Since(lease.since)
            }
            Some(lease) => Leadership::Nobody(lease.renewed),
            None => Leadership::Nobody(Timestamp::MIN),
        }
    }

    /// Since when there has been no activity on the nodes of a maintenance, no matter who leads; `None` while a pod
    /// there is terminating. `clock` is the time on the controllers' clocks.
    pub fn quiet_since(
        &self,
        maintenance: &Value,
        view: &ClusterView,
        clock: Timestamp,
    ) -> Option<Timestamp> {
        let ending = |pod: &&Value| {
            let end = pod.time("/metadata/deletionTimestamp");
            end.is_some_and(|end| clock <= end.saturating_add(OVERDUE).unwrap_or(Timestamp::MAX))
        };
        if view.leaving(maintenance).iter().any(ending) {
            return None;
        }
        let nodes = view.nodes_of(maintenance);
        let moved = nodes.iter().filter_map(|node| self.nodes.get(node.name()));
        moved.chain(self.drains.get(maintenance.uid())).max().copied().or(Some(Timestamp::MIN))
    }
}

impl Lease {
    /// When a holder stops to act that has not renewed the Lease, at the earliest. If it renews the Lease later, it leads
    /// again, with empty caches, and nothing in the Lease shows that.
    fn stops_acting(&self) -> Timestamp {
        self.renewed.saturating_add(self.lasts / 2).unwrap_or(Timestamp::MAX)
    }

    fn expires(&self) -> Timestamp {
        let end = self.renewed.saturating_add(self.lasts).unwrap_or(Timestamp::MAX);
        end.saturating_add(LATE).unwrap_or(Timestamp::MAX)
    }
}

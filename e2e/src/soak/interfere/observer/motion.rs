//! When something last moved on each node, and who leads since when.

use std::collections::{BTreeMap, HashMap};

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::world::{Kind, Read as _, World};

/// How late the renewal of a Lease may be noticed.
const LATE: SignedDuration = SignedDuration::from_secs(1);
/// How long after its time a terminating pod still counts as on its way.
const OVERDUE: SignedDuration = SignedDuration::from_secs(55);

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Motion {
    /// When something last moved, by node.
    nodes: HashMap<String, Timestamp>,
    /// Where pods are, by UID.
    pods: HashMap<String, String>,
    /// When each maintenance came to drain.
    drains: HashMap<String, Timestamp>,
    leases: BTreeMap<String, Lease>,
}

#[derive(Debug)]
struct Lease {
    holder: String,
    /// Since when it has been held by this one without a gap.
    since: Timestamp,
    renewed: Timestamp,
    lasts: SignedDuration,
}

/// Whether a controller leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leads {
    /// The same replica, since then.
    Since(Timestamp),
    /// Nobody, since then.
    Nobody(Timestamp),
}

fn has_ended(pod: &Value) -> bool {
    pod.is_terminating() || matches!(pod.text("/status/phase"), "Succeeded" | "Failed")
}

impl Motion {
    /// Takes in a change of an object. What moved, for people.
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
                    "is asked to end"
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
        // Who reports says so itself.
        let (class, pod) = (after.0, new.text("/spec/podRef/name"));
        (before.0 != class).then(|| format!("evacuation of {pod}: it is the turn of {class}"))
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
        let held = known.filter(|known| known.holder == next.holder && next.renewed <= known.expires());
        let since = held.map_or(now, |known| known.since);
        let change = held.is_none().then(|| match next.holder.as_str() {
            "" => format!("nobody leads {name}"),
            holder => format!("{holder} leads {name}"),
        });
        self.leases.insert(name, Lease { since, ..next });
        change
    }

    /// Whether the controller with this Lease leads.
    pub fn leads(&self, lease: &str, now: Timestamp) -> Leads {
        match self.leases.get(lease) {
            Some(lease) if !lease.holder.is_empty() && now <= lease.expires() => Leads::Since(lease.since),
            Some(lease) => Leads::Nobody(lease.renewed),
            None => Leads::Nobody(Timestamp::MIN),
        }
    }

    /// Since when nothing has moved on the nodes of a maintenance, whoever leads; `None` while a pod there is on its
    /// way out. `clock` is what time it is on the controllers' clocks.
    pub fn quiet_since(&self, maintenance: &Value, world: &World, clock: Timestamp) -> Option<Timestamp> {
        let ending = |pod: &&Value| {
            let end = pod.time("/metadata/deletionTimestamp");
            end.is_some_and(|end| clock <= end.saturating_add(OVERDUE).unwrap_or(Timestamp::MAX))
        };
        if world.leaving(maintenance).iter().any(ending) {
            return None;
        }
        let nodes = world.nodes_of(maintenance);
        let moved = nodes.iter().filter_map(|node| self.nodes.get(node.name()));
        moved.chain(self.drains.get(maintenance.uid())).max().copied().or(Some(Timestamp::MIN))
    }
}

impl Lease {
    fn expires(&self) -> Timestamp {
        let end = self.renewed.saturating_add(self.lasts).unwrap_or(Timestamp::MAX);
        end.saturating_add(LATE).unwrap_or(Timestamp::MAX)
    }
}

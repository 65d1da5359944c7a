//! Detects that the evacuation controller has no leader. Without one, no pod leaves, and no other service reports it.
//!
//! There is a leader as long as the watched Lease changes. Only our own clock is used, not the times in the Lease.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::LeaseSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

/// How long the Lease may stay unchanged. A new leader takes over within this time.
pub const RENEWAL_TIMEOUT: SignedDuration = SignedDuration::from_mins(1);

/// The holder of a Lease and its renew time.
type Renewal = (String, Option<MicroTime>);

/// The leader, as last observed.
#[derive(Clone, Debug)]
pub struct Leader {
    /// Whether the Lease has been observed.
    is_observed: bool,
    /// The last renewal; `None` if the Lease has no holder.
    renewal: Option<Renewal>,
    /// When it last changed; initially the start time.
    changed: Timestamp,
}

impl Leader {
    /// Nothing is observed yet.
    pub fn new(now: Timestamp) -> Self {
        Self { is_observed: false, renewal: None, changed: now }
    }

    /// Applies the Lease; `None` if it does not exist.
    pub fn observe(&mut self, lease: Option<&LeaseSpec>, now: Timestamp) {
        let held = |lease: &LeaseSpec| {
            let holder = lease.holder_identity.clone().filter(|holder| !holder.is_empty())?;
            Some((holder, lease.renew_time.clone()))
        };
        let renewal = lease.and_then(held);
        // The first observed state may be days old.
        if renewal.is_some() && self.is_observed && self.renewal != renewal {
            self.changed = now;
        }
        self.is_observed = true;
        self.renewal = renewal;
    }

    /// When there is no leader anymore, if the Lease does not change before.
    pub fn due(&self) -> Timestamp {
        self.changed.saturating_add(RENEWAL_TIMEOUT).unwrap_or(Timestamp::MAX)
    }

    /// Since when the Lease has not been renewed, if that is longer than the timeout.
    pub fn absent_since(&self, now: Timestamp) -> Option<Timestamp> {
        (now >= self.due()).then_some(self.changed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::at;

    fn lease(holder: &str, renewed: i64) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(holder.into()),
            renew_time: Some(MicroTime(at(renewed))),
            ..LeaseSpec::default()
        }
    }

    #[test]
    fn leader_exists_while_its_lease_changes() {
        // Name, observed Leases by second, current second, since when there is no leader.
        type Case<'a> = (&'a str, &'a [(i64, Option<LeaseSpec>)], i64, Option<i64>);
        let renewed = [(1, Some(lease("a", 5000))), (30, Some(lease("a", 5010)))];
        let cases: [Case; 8] = [
            ("just started", &[], 59, None),
            ("never a leader", &[], 60, Some(0)),
            ("a leader that stopped long ago", &[(1, Some(lease("a", 5000)))], 60, Some(0)),
            ("a leader that renews, with another clock", &renewed, 89, None),
            ("a leader that has stopped", &renewed, 90, Some(30)),
            (
                "a relist without a change",
                &[(1, Some(lease("a", 1))), (50, Some(lease("a", 1)))],
                60,
                Some(0),
            ),
            (
                "a leader that released the Lease",
                &[(1, Some(lease("a", 1))), (50, Some(lease("", 2))), (55, None)],
                60,
                Some(0),
            ),
            ("a new leader", &[(1, None), (50, Some(lease("b", 1)))], 100, None),
        ];
        for (what, observed, now, expected) in cases {
            let mut leader = Leader::new(at(0));
            for (second, lease) in observed {
                leader.observe(lease.as_ref(), at(*second));
            }
            assert_eq!(leader.absent_since(at(now)), expected.map(at), "{what}");
        }
    }
}

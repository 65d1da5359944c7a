//! Whether an evacuation controller leads: without one no pod leaves, and nobody else would say so.
//!
//! Its Lease is watched. By our own clock alone, a leader is there as long as the Lease keeps changing: what others
//! take for the time does not matter.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::LeaseSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

/// How long the Lease may stay as it is. A new leader takes over within this time.
pub const PATIENCE: SignedDuration = SignedDuration::from_mins(1);

/// Who renewed a Lease, and when by their own clock.
type Renewal = (String, Option<MicroTime>);

/// What is known of the leader.
#[derive(Clone, Debug)]
pub struct Leader {
    /// Whether the Lease has been looked at.
    looked: bool,
    /// The last renewal; `None` if nobody holds the Lease.
    seen: Option<Renewal>,
    /// When it last changed. At first, when we began to look.
    changed: Timestamp,
}

impl Leader {
    /// Nothing is known yet.
    pub fn new(now: Timestamp) -> Self {
        Self { looked: false, seen: None, changed: now }
    }

    /// Takes in the Lease as it is now; `None` if there is none.
    pub fn observe(&mut self, lease: Option<&LeaseSpec>, now: Timestamp) {
        let held = |lease: &LeaseSpec| {
            let holder = lease.holder_identity.clone().filter(|holder| !holder.is_empty())?;
            Some((holder, lease.renew_time.clone()))
        };
        let renewal = lease.and_then(held);
        // A Lease that is seen for the first time may have been like this for days.
        if renewal.is_some() && self.looked && self.seen != renewal {
            self.changed = now;
        }
        self.looked = true;
        self.seen = renewal;
    }

    /// When there is no leader any more if the Lease does not change before.
    pub fn due(&self) -> Timestamp {
        self.changed.saturating_add(PATIENCE).unwrap_or(Timestamp::MAX)
    }

    /// Since when nobody has renewed the Lease, if that is too long.
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
    fn a_leader_is_there_while_its_lease_changes() {
        // What is seen at which second, and since when nobody leads at which later second.
        type Case<'a> = (&'a str, &'a [(i64, Option<LeaseSpec>)], i64, Option<i64>);
        let renewed = [(1, Some(lease("a", 5000))), (30, Some(lease("a", 5010)))];
        let cases: [Case; 8] = [
            ("just started", &[], 59, None),
            ("nobody ever came", &[], 60, Some(0)),
            ("one that died long ago", &[(1, Some(lease("a", 5000)))], 60, Some(0)),
            ("one that renews, with a clock of its own", &renewed, 89, None),
            ("one that has stopped", &renewed, 90, Some(30)),
            (
                "a list that tells the same again",
                &[(1, Some(lease("a", 1))), (50, Some(lease("a", 1)))],
                60,
                Some(0),
            ),
            (
                "one that let go",
                &[(1, Some(lease("a", 1))), (50, Some(lease("", 2))), (55, None)],
                60,
                Some(0),
            ),
            ("another that took over", &[(1, None), (50, Some(lease("b", 1)))], 100, None),
        ];
        for (what, seen, now, expected) in cases {
            let mut leader = Leader::new(at(0));
            for (second, lease) in seen {
                leader.observe(lease.as_ref(), at(*second));
            }
            assert_eq!(leader.absent_since(at(now)), expected.map(at), "{what}");
        }
    }
}

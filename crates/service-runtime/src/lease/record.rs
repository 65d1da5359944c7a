//! Reads and builds the Lease object.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

use super::timing::Timing;

/// The holder of the Lease; `None` if it is free.
pub(super) fn holder(lease: &Lease) -> Option<&str> {
    lease.spec.as_ref()?.holder_identity.as_deref().filter(|holder| !holder.is_empty())
}

/// The lease duration of the holder.
pub(super) fn duration(lease: &Lease) -> Duration {
    let seconds = lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds).unwrap_or_default();
    Duration::from_secs(seconds.try_into().unwrap_or_default())
}

/// Whether the holder has renewed the Lease between these two states. Changes of metadata do not count: otherwise,
/// somebody who changes a label every second would keep the Lease of a dead leader alive.
pub(super) fn is_renewed(before: &Lease, after: &Lease) -> bool {
    let renew_time = |lease: &Lease| lease.spec.as_ref().and_then(|spec| spec.renew_time.clone());
    holder(before) != holder(after) || renew_time(before) != renew_time(after)
}

/// The Lease held by `me`. All other fields of the last known Lease are kept.
pub(super) fn held(over: Option<&Lease>, me: &str, timing: &Timing, now: Timestamp) -> Lease {
    let mut lease = over.cloned().unwrap_or_default();
    let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
    if spec.holder_identity.as_deref() != Some(me) {
        spec.holder_identity = Some(me.to_owned());
        spec.acquire_time = Some(MicroTime(now));
        // The first holder of a new Lease is not a transition.
        spec.lease_transitions = Some(spec.lease_transitions.map_or(0, |count| count.saturating_add(1)));
    }
    spec.lease_duration_seconds = Some(timing.lease_seconds());
    spec.renew_time = Some(MicroTime(other_than(spec.renew_time.as_ref(), now)));
    lease
}

/// The Lease, released by its holder.
pub(super) fn released(lease: &Lease, now: Timestamp) -> Lease {
    let mut lease = lease.clone();
    let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
    // The API server rejects an empty string only with coordinated leader election. client-go writes an empty string too.
    spec.holder_identity = Some(String::new());
    spec.renew_time = Some(MicroTime(other_than(spec.renew_time.as_ref(), now)));
    lease
}

/// The wall clock, plus one microsecond if it has not advanced. The API server ignores a write that changes nothing,
/// and standbys would then consider the holder dead.
fn other_than(before: Option<&MicroTime>, now: Timestamp) -> Timestamp {
    match before {
        Some(before) if before.0.as_microsecond() == now.as_microsecond() => {
            now.checked_add(SignedDuration::from_micros(1)).unwrap_or(now)
        }
        _ => now,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(microsecond: i64) -> Timestamp {
        Timestamp::from_microsecond(microsecond).unwrap()
    }

    fn spec(lease: &Lease) -> &LeaseSpec {
        lease.spec.as_ref().unwrap()
    }

    #[test]
    fn acquire_renew_release_and_takeover_set_the_spec() {
        let timing = Timing::default();
        let made = held(None, "a", &timing, at(1));
        assert_eq!((holder(&made), duration(&made)), (Some("a"), Duration::from_secs(15)));
        assert_eq!(
            (spec(&made).lease_transitions, &spec(&made).acquire_time),
            (Some(0), &Some(MicroTime(at(1))))
        );

        let renewed = held(Some(&made), "a", &timing, at(9));
        assert_eq!(
            (&spec(&renewed).acquire_time, &spec(&renewed).renew_time),
            (&Some(MicroTime(at(1))), &Some(MicroTime(at(9))))
        );
        assert_eq!(spec(&renewed).lease_transitions, Some(0));

        let free = released(&renewed, at(20));
        assert_eq!(holder(&free), None);

        let taken = held(Some(&free), "b", &timing, at(30));
        assert_eq!((holder(&taken), spec(&taken).lease_transitions), (Some("b"), Some(1)));
        assert_eq!(spec(&taken).acquire_time, Some(MicroTime(at(30))));
    }

    #[test]
    fn labels_are_kept_and_do_not_renew() {
        let made = held(None, "a", &Timing::default(), at(1));
        let mut labelled = made.clone();
        labelled.metadata.labels = Some([("team".to_owned(), "x".to_owned())].into());
        labelled.metadata.resource_version = Some("7".to_owned());
        assert!(!is_renewed(&made, &labelled));
        let renewed = held(Some(&labelled), "a", &Timing::default(), at(2));
        assert_eq!(renewed.metadata, labelled.metadata);
        assert!(is_renewed(&labelled, &renewed));
    }

    #[test]
    fn renewal_is_visible_if_the_clock_stops_or_goes_back() {
        let made = held(None, "a", &Timing::default(), at(5));
        for now in [at(5), at(4), at(6)] {
            assert!(is_renewed(&made, &held(Some(&made), "a", &Timing::default(), now)), "{now}");
        }
    }
}

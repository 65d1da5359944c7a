//! Detects that another service has no leader: its Lease is no longer renewed. Whatever waits for that service would
//! otherwise wait without a reason.
//!
//! There is a leader as long as the watched Lease changes. Only our own clock is used, not the times in the Lease.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::Api;
use kube::api::ListParams;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tracing::warn;

use crate::access::{Permission, lease_name};
use crate::clock::Clock;
use crate::queue::Backoff;
use crate::service::Context;
use crate::term::Term;
use crate::watch::{Handler, Source};

/// The delays between attempts to read a Lease.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), max: Duration::from_secs(60) };

/// The permissions for observing the leader of this service, which is in our own namespace.
pub fn permissions(service: &str) -> [Permission; 2] {
    let on = |verb| Permission::own(verb, "coordination.k8s.io", "leases").on(&lease_name(service));
    ["list", "watch"].map(on)
}

/// Watches the Lease of a service in our own namespace. `report` is called with the time since when there is no leader,
/// or `None` if there is one, whenever this may have changed.
pub fn observe(
    term: &mut Term,
    context: &Context,
    service: &'static str,
    report: impl Fn(Option<Timestamp>) + Send + Sync + 'static,
) {
    let observer = Arc::new(Observer {
        service,
        leader: Mutex::new(Leader::new(context.clock.now())),
        changed: Notify::new(),
        api: Api::namespaced(context.clients.direct.clone(), &context.namespace),
        clock: context.clock.clone(),
        report,
    });
    term.watch(Source::in_namespace("leases", &context.namespace).named(&lease_name(service)), &observer);
    term.spawn(observer.run());
}

/// Observes the leader of a service.
struct Observer<R> {
    service: &'static str,
    leader: Mutex<Leader>,
    changed: Notify,
    api: Api<Lease>,
    clock: Clock,
    report: R,
}

impl<R: Fn(Option<Timestamp>) + Send + Sync + 'static> Observer<R> {
    fn apply_lease(&self, lease: Option<&Lease>) {
        let lease = lease.and_then(|lease| lease.spec.as_ref());
        self.leader.lock().observe(lease, self.clock.now());
        self.changed.notify_one();
    }

    /// Reports that there is no leader only after a request has confirmed it: with a half-open watch connection, the
    /// Lease also appears not to be renewed.
    async fn run(self: Arc<Self>) {
        let clock = &self.clock;
        let lease = ListParams::default().fields(&format!("metadata.name={}", lease_name(self.service)));
        let (mut confirmed, mut failures) = (false, 0);
        loop {
            let now = clock.now();
            let (absent, due) = {
                let leader = self.leader.lock();
                (leader.absent_since(now), leader.due())
            };
            let confirm_at = match absent {
                None => {
                    (confirmed, failures) = (false, 0);
                    due
                }
                // The watch delivers the Lease when there is a leader again.
                Some(_) if confirmed => Timestamp::MAX,
                Some(_) if failures == 0 => now,
                Some(_) => {
                    now.saturating_add(BACKOFF.delay(failures, fastrand::f64())).unwrap_or(Timestamp::MAX)
                }
            };
            (self.report)(absent.filter(|_| confirmed));
            tokio::select! {
                () = self.changed.notified() => {}
                () = clock.sleep_until(confirm_at) => match self.api.list(&lease).await {
                    Ok(found) => {
                        self.apply_lease(found.items.first());
                        confirmed = true;
                    }
                    Err(error) => {
                        let service = self.service;
                        warn!(%error, service, "failed to get the Lease of another service, retrying");
                        failures += 1;
                    }
                }
            }
        }
    }
}

impl<R: Fn(Option<Timestamp>) + Send + Sync + 'static> Handler<Lease> for Observer<R> {
    type Key = ();

    fn apply(&self, (): (), lease: Lease) {
        self.apply_lease(Some(&lease));
    }

    fn delete(&self, (): ()) {
        self.apply_lease(None);
    }
}

/// How long the Lease may stay unchanged. A new leader takes over within this time.
const RENEWAL_TIMEOUT: SignedDuration = SignedDuration::from_mins(1);

/// The holder of a Lease and its renew time.
type Renewal = (String, Option<MicroTime>);

/// The leader, as last observed.
#[derive(Clone, Debug)]
struct Leader {
    /// Whether the Lease has been observed.
    is_observed: bool,
    /// The last renewal; `None` if the Lease has no holder.
    renewal: Option<Renewal>,
    /// When it last changed; initially the start time.
    changed: Timestamp,
}

impl Leader {
    /// Nothing is observed yet.
    fn new(now: Timestamp) -> Self {
        Self { is_observed: false, renewal: None, changed: now }
    }

    /// Applies the Lease; `None` if it does not exist.
    fn observe(&mut self, lease: Option<&LeaseSpec>, now: Timestamp) {
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
    fn due(&self) -> Timestamp {
        self.changed.saturating_add(RENEWAL_TIMEOUT).unwrap_or(Timestamp::MAX)
    }

    /// Since when the Lease has not been renewed, if that is longer than the timeout.
    fn absent_since(&self, now: Timestamp) -> Option<Timestamp> {
        (now >= self.due()).then_some(self.changed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

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

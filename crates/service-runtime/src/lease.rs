//! Leader election on a Lease (`coordination.k8s.io/v1`).
//!
//! A leader acts only while its own clock says so: [`Leadership`] ends `act_for` after the last
//! successful renewal was begun, well before a standby may take the Lease. Standbys watch the Lease
//! and keep nothing else. What a candidate does is decided in `decide`, done in `driver` and
//! enforced in `fence`.
//!
//! It needs `list`, `watch` and `update` on this Lease and `create` on leases. `list` and `watch` may
//! be granted by resource name, because both ask for this one name.
//!
//! Whoever writes the Lease's spec by hand can make two candidates lead for a moment, and so can
//! somebody who deletes the Lease in the second in which another candidate starts.

mod decide;
mod driver;
mod fence;
mod leadership;
mod moment;
mod record;
mod timing;

use std::pin::pin;

use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{error, warn};

use self::driver::{Driver, Place};
pub use self::fence::NotLeading;
pub use self::leadership::Leadership;
pub use self::timing::{InvalidTiming, Timing};

/// One candidate for one Lease.
pub struct Election {
    place: Place,
    leading: watch::Sender<bool>,
}

impl Election {
    /// A candidate with an identity of its own, which begins with the name of the replica. The client must not retry
    /// by itself, because a renewal that is late is worth nothing.
    pub fn new(
        client: Client,
        namespace: &str,
        name: &str,
        replica: &str,
        timing: Timing,
    ) -> Result<Self, InvalidTiming> {
        timing.check()?;
        let place = Place {
            api: Api::namespaced(client, namespace),
            name: name.to_owned(),
            lease: format!("{namespace}/{name}"),
            identity: identity(replica),
            timing,
        };
        Ok(Self { place, leading: watch::Sender::new(false) })
    }

    /// Whether it leads, for metrics and readiness. Whoever acts asks its [`Leadership`].
    pub fn leading(&self) -> watch::Receiver<bool> {
        self.leading.subscribe()
    }

    /// Runs the future that `lead` makes whenever this candidate leads. It is dropped when leadership
    /// is lost, and made anew when leadership comes back.
    ///
    /// When `shutdown` is cancelled, which the future should watch as well, it has `stop_within` to
    /// end, still leading; then the Lease is given up. A future that ends by itself has the
    /// Lease given up, too, and its output is returned; `None` means that it was dropped or never made.
    ///
    /// Dropping the returned future ends leadership at once and leaves the Lease to run out.
    pub async fn run<T, F: Future<Output = T>>(
        &self,
        shutdown: CancellationToken,
        lead: impl FnMut(Leadership) -> F,
    ) -> Option<T> {
        let (terms, office) = watch::channel(None);
        let resign = CancellationToken::new();
        let driver = Driver::new(self.place.clone(), terms, self.leading.clone());
        let driver = AbortOnDropHandle::new(tokio::spawn(driver.run(resign.clone())));
        let output = self.lead(shutdown, office, lead).await;
        resign.cancel();
        let Place { lease, identity, timing, .. } = &self.place;
        // One request that is on its way, one that releases.
        match timeout(timing.request_timeout * 2, driver).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => error!(lease, identity, %error, "leader election has failed"),
            Err(_) => warn!(lease, identity, "could not release the Lease in time: it will run out"),
        }
        output
    }

    async fn lead<T, F: Future<Output = T>>(
        &self,
        shutdown: CancellationToken,
        mut office: watch::Receiver<Option<Leadership>>,
        mut lead: impl FnMut(Leadership) -> F,
    ) -> Option<T> {
        loop {
            let term = office.wait_for(|term| term.as_ref().is_some_and(Leadership::is_held));
            let leadership = tokio::select! {
                biased;
                () = shutdown.cancelled() => return None,
                // An error would mean that the driver is gone, of which `run` tells.
                term = term => term.ok()?.clone()?,
            };
            let mut leading = pin!(lead(leadership.clone()));
            tokio::select! {
                biased;
                () = leadership.lost() => {}
                () = shutdown.cancelled() => {
                    return tokio::select! {
                        biased;
                        () = leadership.lost() => None,
                        output = &mut leading => Some(output),
                        () = sleep(self.place.timing.stop_within) => {
                            let Place { lease, identity, .. } = &self.place;
                            warn!(lease, identity, "the leader did not end in time and was dropped");
                            None
                        }
                    };
                }
                output = &mut leading => return Some(output),
            }
            // It was noticed here: whatever the driver thinks, this term is over.
            leadership.end();
        }
    }
}

/// An identity that no other process has, not even the same replica after its restart.
fn identity(replica: &str) -> String {
    format!("{replica}_{:016x}", fastrand::u64(..))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_readable_and_differ() {
        let (one, other) = (identity("web-1"), identity("web-1"));
        assert_ne!(one, other);
        assert!(
            one.rsplit_once('_').is_some_and(|(replica, random)| replica == "web-1" && random.len() == 16)
        );
    }
}

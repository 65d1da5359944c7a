//! Leader election on a Lease (`coordination.k8s.io/v1`).
//!
//! A leader acts only as long as its own clock allows: [`Leadership`] ends `renew_deadline` after the last successful renewal
//! was sent, well before a standby can take over the Lease. A standby only watches the Lease. The decisions of a
//! candidate are in `decide`, its requests in `driver`. `fence` rejects writes of a candidate that does not lead.
//!
//! It needs `list`, `watch` and `update` on this Lease and `create` on leases. `list` and `watch` can be granted by
//! resource name, because both request only this name.
//!
//! Two candidates can lead for a moment if somebody edits the Lease's spec, or deletes the Lease in the second in which
//! another candidate starts.

pub mod absence;
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

use self::driver::{CandidateConfig, Driver};
pub use self::fence::NotLeading;
pub use self::leadership::Leadership;
pub use self::timing::{InvalidTiming, Timing};

/// One candidate for one Lease.
pub struct Election {
    config: CandidateConfig,
    leading: watch::Sender<bool>,
}

impl Election {
    /// A candidate with a unique identity, which starts with the name of the replica. The client must not retry by
    /// itself, because a late renewal is useless.
    pub fn new(
        client: Client,
        namespace: &str,
        name: &str,
        replica: &str,
        timing: Timing,
    ) -> Result<Self, InvalidTiming> {
        timing.check()?;
        let config = CandidateConfig {
            api: Api::namespaced(client, namespace),
            name: name.to_owned(),
            lease: format!("{namespace}/{name}"),
            identity: identity(replica),
            timing,
        };
        Ok(Self { config, leading: watch::Sender::new(false) })
    }

    /// Whether this candidate leads, for metrics and readiness. Use [`Leadership`] to decide whether to act.
    pub fn leading(&self) -> watch::Receiver<bool> {
        self.leading.subscribe()
    }

    /// Runs the future of `lead` whenever this candidate leads. It is dropped when leadership is lost, and created
    /// again in the next term.
    ///
    /// When `shutdown` is cancelled, the future, which should watch `shutdown` too, has `stop_timeout` to end while it
    /// still leads. Then the Lease is released. If the future ends by itself, the Lease is released and the output is
    /// returned. `None` means that the future was dropped or never created.
    ///
    /// Dropping the returned future ends leadership at once. The Lease then expires.
    pub async fn run<T, F: Future<Output = T>>(
        &self,
        shutdown: CancellationToken,
        lead: impl FnMut(Leadership) -> F,
    ) -> Option<T> {
        let (sender, terms) = watch::channel(None);
        let resign = CancellationToken::new();
        let driver = Driver::new(self.config.clone(), sender, self.leading.clone());
        let driver = AbortOnDropHandle::new(tokio::spawn(driver.run(resign.clone())));
        let output = self.run_terms(shutdown, terms, lead).await;
        resign.cancel();
        let CandidateConfig { lease, identity, timing, .. } = &self.config;
        // Time for one request in flight, and for the release.
        match timeout(timing.request_timeout * 2, driver).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => error!(lease, identity, %error, "leader election failed"),
            Err(_) => warn!(lease, identity, "failed to release the Lease in time, it will expire"),
        }
        output
    }

    async fn run_terms<T, F: Future<Output = T>>(
        &self,
        shutdown: CancellationToken,
        mut terms: watch::Receiver<Option<Leadership>>,
        mut lead: impl FnMut(Leadership) -> F,
    ) -> Option<T> {
        loop {
            let term = terms.wait_for(|term| term.as_ref().is_some_and(Leadership::is_held));
            let leadership = tokio::select! {
                biased;
                () = shutdown.cancelled() => return None,
                // An error means that the driver has ended, which `run` reports.
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
                        () = sleep(self.config.timing.stop_timeout) => {
                            let CandidateConfig { lease, identity, .. } = &self.config;
                            warn!(lease, identity, "leader did not stop in time, aborting it");
                            None
                        }
                    };
                }
                output = &mut leading => return Some(output),
            }
            // This term is over, even if the driver has not noticed it yet.
            leadership.end();
        }
    }
}

/// A unique identity, which also differs from the identity of the same replica before a restart.
fn identity(replica: &str) -> String {
    format!("{replica}_{:016x}", fastrand::u64(..))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_readable_and_unique() {
        let (one, other) = (identity("web-1"), identity("web-1"));
        assert_ne!(one, other);
        assert!(
            one.rsplit_once('_').is_some_and(|(replica, random)| replica == "web-1" && random.len() == 16)
        );
    }
}

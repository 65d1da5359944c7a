//! Keeps our own certificate: watches the Secret and the configurations, does what `decide` says, and serves what
//! the Secret holds. Every replica does all of it; whoever comes second finds nothing left to do.

use std::sync::Arc;
use std::time::Duration;

use haulout_service_runtime::service::Context;
use haulout_service_runtime::watch;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::{ObjectMeta, PostParams};
use thiserror::Error;
use tokio::sync::Notify;
use tracing::{debug, info, warn};

use super::configurations::Configurations;
use super::decide::{Policy, Step, decide};
use super::issue::issue;
use super::pair::PairError;
use super::secret::{Generation, Store, Unusable};
use super::served::Served;

/// Wall clocks jump: no matter how far away, a deadline is looked at this often.
const LONGEST_SLEEP: Duration = Duration::from_secs(3600);

/// Why a step was not taken.
#[derive(Debug, Error)]
enum StepError {
    #[error("making a certificate: {0}")]
    Issue(#[from] rcgen::Error),
    #[error("reading back a certificate that we made: {0}")]
    Read(#[from] PairError),
    #[error("{doing} {object}: {source}")]
    Api { doing: &'static str, object: String, source: Box<kube::Error> },
}

impl StepError {
    /// Whether somebody else has changed the object since we saw it.
    fn is_conflict(&self) -> bool {
        // 409 for a Secret; a patch whose test of the resourceVersion fails is a 422.
        matches!(self, Self::Api { source, .. }
            if matches!(source.as_ref(), kube::Error::Api(status) if matches!(status.code, 409 | 422)))
    }
}

struct Manager<'a> {
    secrets: Api<Secret>,
    name: String,
    policy: Policy,
    configurations: Configurations,
    context: &'a Context,
    served: &'a Served,
    secret: Arc<watch::Store<Secret>>,
    changed: &'a Notify,
    /// The last one that was good; its current generation is what we serve.
    remembered: Option<Store>,
}

/// Runs until the service is to end.
pub(super) async fn run(
    (name, secret): (String, Arc<watch::Store<Secret>>),
    policy: Policy,
    configurations: Configurations,
    context: &Context,
    served: &Served,
    changed: &Notify,
) {
    let secrets: Api<Secret> = Api::namespaced(context.clients.retrying.clone(), &context.namespace);
    let remembered = None;
    let mut manager =
        Manager { secrets, name, policy, configurations, context, served, secret, changed, remembered };
    manager.run().await;
}

impl Manager<'_> {
    async fn run(&mut self) {
        let mut failures = 0;
        loop {
            let wait = match self.go_on().await {
                Ok(wait) => {
                    failures = 0;
                    wait
                }
                Err(error) => {
                    // Somebody can be faster once or twice; what goes on is something else.
                    if error.is_conflict() && failures < 3 {
                        debug!(%error, "another replica was faster, and its work is on the way to us");
                    } else {
                        warn!(%error, "managing the certificate");
                    }
                    failures += 1;
                    backoff(failures)
                }
            };
            tokio::select! {
                () = self.context.stop.cancelled() => return,
                () = tokio::time::sleep(wait) => {}
                () = self.context.clock.shifted() => {}
                () = self.changed.notified() => {}
            }
        }
    }

    /// Takes all steps that are due; returns how long nothing will be if nothing changes.
    async fn go_on(&mut self) -> Result<Duration, StepError> {
        loop {
            if !self.secret.is_synced() || !self.configurations.synced() {
                return Ok(LONGEST_SLEEP);
            }
            let found = self.look();
            let now = self.context.clock.now();
            if let Some(store) = &found {
                self.serve(store);
                let trust = self.configurations.trust(&store.bundle()).await;
                let wrote = trust.map_err(|source| StepError::Api {
                    doing: "putting our authority into the webhook",
                    object: "configurations".into(),
                    source: Box::new(source),
                })?;
                if wrote {
                    info!("the webhook configurations trust our authority");
                }
            }
            let present = self.configurations.present();
            let decision =
                decide(found.as_ref(), self.remembered.as_ref(), present.iter(), &self.policy, now);
            let Some(step) = decision.step else {
                let wake = decision.wake.map_or(LONGEST_SLEEP, |wake| until(wake, now));
                return Ok(wake.min(LONGEST_SLEEP));
            };
            info!(?step, "certificate");
            let store = self.take(&step, found, now)?;
            self.write(&store).await?;
        }
    }

    /// What is in the Secret, if that is there and usable.
    fn look(&self) -> Option<Store> {
        let read = Store::read(&*self.secret.get(&self.name)?);
        let warn = |error: &Unusable| {
            warn!(%error, secret = self.name, "the Secret of our certificate is unusable and is written anew");
        };
        read.inspect_err(warn).ok()
    }

    fn serve(&mut self, store: &Store) {
        if self.remembered.as_ref().is_none_or(|known| known.current != store.current) {
            self.served.set(&store.current.pair, Some(store.current.pair.expires));
        }
        if self.remembered.as_ref() != Some(store) {
            self.remembered = Some(store.clone());
        }
    }

    fn take(&self, step: &Step, found: Option<Store>, now: Timestamp) -> Result<Store, StepError> {
        let make = |names: &[String]| -> Result<Generation, StepError> {
            Ok(Generation::new(issue(names, self.policy.lifetime, now)?)?)
        };
        if let (Step::Restore, Some(store)) = (step, &self.remembered) {
            return Ok(store.clone());
        }
        Ok(match (step, found) {
            (Step::Stage(names), Some(store)) => store.staged(make(names)?),
            (Step::Trusted, Some(store)) => store.trusted(now),
            (Step::Promote, Some(store)) => store.promoted(now),
            (Step::Forget, Some(store)) => store.forgotten(),
            _ => Store::begun(make(&self.policy.names)?, now),
        })
    }

    /// Creates the Secret, or replaces it in the version that we know.
    async fn write(&mut self, store: &Store) -> Result<(), StepError> {
        let known = self.secret.get(&self.name).map(|known| Secret::clone(&known));
        let exists = known.is_some();
        let mut secret = known.unwrap_or_else(|| Secret {
            metadata: ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() },
            type_: Some("kubernetes.io/tls".into()),
            ..Secret::default()
        });
        store.write(&mut secret);
        let post = PostParams::default();
        let written = if exists {
            self.secrets.replace(&self.name, &post, &secret).await
        } else {
            self.secrets.create(&post, &secret).await
        };
        let written = written.map_err(|source| StepError::Api {
            doing: "writing Secret",
            object: format!("{}/{}", self.context.namespace, self.name),
            source: Box::new(source),
        })?;
        self.secret.put(&self.name, written);
        Ok(())
    }
}

/// How long it is until then.
fn until(time: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(time.duration_since(now)).unwrap_or_default()
}

/// How long to wait before the next try after so many failures in a row.
fn backoff(failures: u32) -> Duration {
    let longest = Duration::from_millis(500 << failures.min(6));
    // Replicas that failed together need not try again together.
    longest.mul_f64(0.5 + fastrand::f64() / 2.0)
}

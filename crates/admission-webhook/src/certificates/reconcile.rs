//! Keeps our own certificate: watches the Secret and the configurations, does what `decide` says, and serves what
//! the Secret holds. Every replica does all of it; whoever comes second finds nothing left to do.

use std::sync::Arc;
use std::time::Duration;

use haulout_service_runtime::queue::Backoff;
use haulout_service_runtime::service::Context;
use haulout_service_runtime::term::Term;
use haulout_service_runtime::watch::{Handler as _, Source, Store};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::{ObjectMeta, PostParams};
use thiserror::Error;
use tokio::sync::Notify;
use tracing::{debug, info, warn};

use super::configurations::{Configurations, named};
use super::decide::{Decision, Policy, Step, decide};
use super::issue::issue;
use super::pair::PairError;
use super::secret::{Contents, Generation, Unusable};
use super::served::Served;
use crate::args::CertificateArgs;

/// Wall clocks jump: no matter how far away, a deadline is looked at this often.
const LONGEST_SLEEP: Duration = Duration::from_secs(3600);
/// The pauses after failures.
const BACKOFF: Backoff = Backoff { first: Duration::from_secs(1), most: Duration::from_secs(32) };

/// Why a step was not taken.
#[derive(Debug, Error)]
enum StepError {
    #[error("making a certificate: {0}")]
    Issue(#[from] rcgen::Error),
    #[error("reading back a certificate that we made: {0}")]
    Read(#[from] PairError),
    #[error("{doing}: {source}")]
    Api { doing: String, source: Box<kube::Error> },
}

impl StepError {
    /// Says what the API server was asked for.
    fn doing(what: impl Into<String>) -> impl FnOnce(kube::Error) -> Self {
        |source| Self::Api { doing: what.into(), source: Box::new(source) }
    }

    /// Whether somebody else has changed the object since we saw it.
    fn is_conflict(&self) -> bool {
        // 409 for a Secret; a patch whose test of the resourceVersion fails is a 422.
        matches!(self, Self::Api { source, .. }
            if matches!(source.as_ref(), kube::Error::Api(status) if matches!(status.code, 409 | 422)))
    }
}

/// What keeps the certificate.
pub(super) struct Manager<'a> {
    secrets: Api<Secret>,
    name: String,
    policy: Policy,
    configurations: Configurations,
    context: &'a Context,
    served: &'a Served,
    secret: Arc<Store<Secret>>,
    changed: Arc<Notify>,
    /// The last one that was good; its current generation is what we serve.
    remembered: Option<Contents>,
}

impl<'a> Manager<'a> {
    /// Starts to watch the Secret.
    pub(super) fn start(
        args: CertificateArgs,
        configurations: Configurations,
        context: &'a Context,
        term: &mut Term,
        served: &'a Served,
        changed: Arc<Notify>,
    ) -> Self {
        let secret = Arc::new(Store::new(|_| {}, Arc::clone(&changed)));
        let source = Source::in_namespace("secrets", &context.namespace);
        term.watch(named(source, &args.certificate_secret), &secret);
        Self {
            secrets: Api::namespaced(context.clients.retrying.clone(), &context.namespace),
            name: args.certificate_secret,
            policy: Policy::new(args.serving_names, args.certificate_lifetime),
            configurations,
            context,
            served,
            secret,
            changed,
            remembered: None,
        }
    }

    /// Runs until the service is to end.
    pub(super) async fn run(&mut self) {
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
                    BACKOFF.delay(failures, fastrand::f64())
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
            if !self.secret.is_synced() || !self.configurations.is_synced() {
                return Ok(LONGEST_SLEEP);
            }
            let found = self.look();
            let now = self.context.clock.now();
            if let Some(contents) = &found {
                self.serve(contents);
                let doing = StepError::doing("putting our authority into the webhook configurations");
                if self.configurations.trust(&contents.bundle()).await.map_err(doing)? {
                    info!("the webhook configurations trust our authority");
                }
            }
            let present = self.configurations.present();
            let step = match decide(found.as_ref(), self.remembered.as_ref(), &present, &self.policy, now) {
                Decision::Now(step) => step,
                Decision::At(time) => {
                    // A time that has passed is now.
                    let wait = Duration::try_from(time.duration_since(now)).unwrap_or_default();
                    return Ok(wait.min(LONGEST_SLEEP));
                }
            };
            info!(?step, "certificate");
            let contents = self.take(&step, found, now)?;
            self.write(&contents).await?;
        }
    }

    /// What is in the Secret, if that is there and usable.
    fn look(&self) -> Option<Contents> {
        let read = Contents::read(&*self.secret.get(&self.name)?);
        let warn = |error: &Unusable| {
            warn!(%error, secret = self.name, "the Secret of our certificate is unusable and is written anew");
        };
        read.inspect_err(warn).ok()
    }

    fn serve(&mut self, contents: &Contents) {
        if self.remembered.as_ref().is_none_or(|known| known.current != contents.current) {
            self.served.set(&contents.current.pair, Some(contents.current.pair.expires));
        }
        self.remembered = Some(contents.clone());
    }

    fn take(&self, step: &Step, found: Option<Contents>, now: Timestamp) -> Result<Contents, StepError> {
        let make = |names: &[String]| -> Result<Generation, StepError> {
            Ok(Generation::new(issue(names, self.policy.lifetime, now)?)?)
        };
        Ok(match (step, found, &self.remembered) {
            (Step::Restore, _, Some(remembered)) => remembered.clone(),
            (Step::Stage(names), Some(contents), _) => contents.staged(make(names)?),
            (Step::Trusted, Some(contents), _) => contents.trusted(now),
            (Step::Promote, Some(contents), _) => contents.promoted(now),
            (Step::Forget, Some(contents), _) => contents.forgotten(),
            _ => Contents::begun(make(&self.policy.names)?, now),
        })
    }

    /// Creates the Secret, or replaces it in the version that we know.
    async fn write(&self, contents: &Contents) -> Result<(), StepError> {
        let known = self.secret.get(&self.name).map(|known| Secret::clone(&known));
        let exists = known.is_some();
        let mut secret = known.unwrap_or_else(|| Secret {
            metadata: ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() },
            type_: Some("kubernetes.io/tls".into()),
            ..Secret::default()
        });
        contents.write(&mut secret);
        let post = PostParams::default();
        let written = if exists {
            self.secrets.replace(&self.name, &post, &secret).await
        } else {
            self.secrets.create(&post, &secret).await
        };
        if matches!(&written, Err(kube::Error::Api(status)) if status.code == 404) {
            // It was deleted before we took the answer to our own write: the watch has told of both already.
            self.secret.delete(self.name.as_str().into());
        }
        let doing = StepError::doing(format!("writing Secret {}/{}", self.context.namespace, self.name));
        self.secret.put(&self.name, written.map_err(doing)?);
        Ok(())
    }
}

//! Manages the service's own certificate: watches the Secret and the webhook configurations, takes the steps that
//! `decide` returns, and serves the certificate from the Secret. Every replica does this. If another replica was first,
//! nothing is left to do.

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
use super::secret::{Contents, Generation, SecretError};
use super::serving::ServingCertificate;
use crate::args::CertificateArgs;

/// Wall clocks can jump, so every deadline is checked at least this often.
const MAX_SLEEP: Duration = Duration::from_secs(3600);
/// Delays after failures.
const BACKOFF: Backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(32) };

/// Why a step failed.
#[derive(Debug, Error)]
enum StepError {
    #[error("failed to issue a certificate: {0}")]
    Issue(#[from] rcgen::Error),
    #[error("failed to parse the issued certificate: {0}")]
    Read(#[from] PairError),
    #[error("failed to {action}: {source}")]
    Api { action: String, source: Box<kube::Error> },
}

impl StepError {
    /// Adds what failed.
    fn failed_to(action: impl Into<String>) -> impl FnOnce(kube::Error) -> Self {
        |source| Self::Api { action: action.into(), source: Box::new(source) }
    }

    /// Whether somebody else changed the object at the same time.
    fn is_conflict(&self) -> bool {
        // 409 for a Secret; a patch whose test of the resourceVersion fails is a 422.
        matches!(self, Self::Api { source, .. }
            if matches!(source.as_ref(), kube::Error::Api(status) if matches!(status.code, 409 | 422)))
    }
}

/// Manages the certificate.
pub(super) struct Manager<'a> {
    secrets: Api<Secret>,
    name: String,
    policy: Policy,
    configurations: Configurations,
    context: &'a Context,
    serving: &'a ServingCertificate,
    secret: Arc<Store<Secret>>,
    changed: Arc<Notify>,
    /// The last valid content. Its current generation is served.
    last_good: Option<Contents>,
}

impl<'a> Manager<'a> {
    /// Starts the watch of the Secret.
    pub(super) fn start(
        args: CertificateArgs,
        configurations: Configurations,
        context: &'a Context,
        term: &mut Term,
        serving: &'a ServingCertificate,
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
            serving,
            secret,
            changed,
            last_good: None,
        }
    }

    /// Runs until the service stops.
    pub(super) async fn run(&mut self) {
        let mut failures = 0;
        loop {
            let wait = match self.reconcile().await {
                Ok(wait) => {
                    failures = 0;
                    wait
                }
                Err(error) => {
                    // Conflicts with other replicas are normal, but not many in a row.
                    if error.is_conflict() && failures < 3 {
                        debug!(%error, "another replica changed the object first, retrying");
                    } else {
                        warn!(%error, "failed to manage the serving certificate; retrying");
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

    /// Takes all steps that are due. Returns how long to wait if nothing changes.
    async fn reconcile(&mut self) -> Result<Duration, StepError> {
        loop {
            if !self.secret.is_synced() || !self.configurations.is_synced() {
                return Ok(MAX_SLEEP);
            }
            let found = self.read_secret();
            let now = self.context.clock.now();
            if let Some(contents) = &found {
                self.serve(contents);
                let failed = StepError::failed_to("write the CA bundle into the webhook configurations");
                if self.configurations.apply_bundle(&contents.bundle()).await.map_err(failed)? {
                    info!("CA bundle written into the webhook configurations");
                }
            }
            let present = self.configurations.present();
            let step = match decide(found.as_ref(), self.last_good.as_ref(), &present, &self.policy, now) {
                Decision::Now(step) => step,
                Decision::At(time) => {
                    // A time in the past means now.
                    let wait = Duration::try_from(time.duration_since(now)).unwrap_or_default();
                    return Ok(wait.min(MAX_SLEEP));
                }
            };
            info!(?step, "updating the certificate Secret");
            let contents = self.apply_step(&step, found, now)?;
            self.write(&contents).await?;
        }
    }

    /// The content of the Secret, if it exists and is valid.
    fn read_secret(&self) -> Option<Contents> {
        let read = Contents::read(&*self.secret.get(&self.name)?);
        let warn = |error: &SecretError| {
            warn!(%error, secret = self.name, "certificate Secret is invalid, replacing it");
        };
        read.inspect_err(warn).ok()
    }

    fn serve(&mut self, contents: &Contents) {
        if self.last_good.as_ref().is_none_or(|known| known.current != contents.current) {
            self.serving.set(&contents.current.pair, Some(contents.current.pair.expires));
        }
        self.last_good = Some(contents.clone());
    }

    fn apply_step(
        &self,
        step: &Step,
        found: Option<Contents>,
        now: Timestamp,
    ) -> Result<Contents, StepError> {
        let make = |names: &[String]| -> Result<Generation, StepError> {
            Ok(Generation::new(issue(names, self.policy.lifetime, now)?)?)
        };
        Ok(match (step, found, &self.last_good) {
            (Step::Restore, _, Some(last_good)) => last_good.clone(),
            (Step::Stage(names), Some(contents), _) => contents.staged(make(names)?),
            (Step::MarkTrusted, Some(contents), _) => contents.trusted(now),
            (Step::Promote, Some(contents), _) => contents.promoted(now),
            (Step::DropPrevious, Some(contents), _) => contents.without_previous(),
            _ => Contents::initial(make(&self.policy.names)?, now),
        })
    }

    /// Creates the Secret, or replaces the version that was read.
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
            // It was deleted before this response was handled, and the watch has delivered both events already.
            self.secret.delete(self.name.as_str().into());
        }
        let failed = StepError::failed_to(format!("write Secret {}/{}", self.context.namespace, self.name));
        self.secret.put(&self.name, written.map_err(failed)?);
        Ok(())
    }
}

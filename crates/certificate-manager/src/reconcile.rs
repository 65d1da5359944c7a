//! Takes the steps that `decide` returns: writes the Secret and the webhook configurations. The service may not create
//! Secrets: the chart renders an empty one, and restores it if it is deleted.

use std::sync::Arc;
use std::time::Duration;

use haulout_service_runtime::certificate::{Pair, PairError, expiry};
use haulout_service_runtime::clients::Clients;
use haulout_service_runtime::queue::Backoff;
use haulout_service_runtime::service::Context;
use haulout_service_runtime::term::Term;
use haulout_service_runtime::watch::{Handler as _, Source, Store};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::PostParams;
use thiserror::Error;
use tokio::sync::Notify;
use tracing::{info, warn};

use crate::args::Args;
use crate::configurations::Configurations;
use crate::decide::{Decision, Policy, Step, decide};
use crate::issue::issue;
use crate::metrics::Metrics;
use crate::secret::{Contents, Generation};

/// Wall clocks can jump, so every deadline is checked at least this often.
const MAX_SLEEP: Duration = Duration::from_secs(3600);
/// Delays after failures.
const BACKOFF: Backoff = Backoff { first: Duration::from_secs(1), max: Duration::from_secs(32) };

/// Why a step failed.
#[derive(Debug, Error)]
pub enum StepError {
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
}

/// Manages the certificate during one term as leader.
pub struct Manager<'a> {
    secrets: Api<Secret>,
    name: String,
    /// How to issue certificates. Absent if another program issues them.
    policy: Option<Policy>,
    configurations: Configurations,
    context: &'a Context,
    metrics: Metrics,
    secret: Arc<Store<Secret>>,
    changed: Arc<Notify>,
    /// The last valid content.
    last_good: Option<Contents>,
    /// Whether the absence of the Secret was reported.
    missing: bool,
}

impl Drop for Manager<'_> {
    /// The next leader reports it.
    fn drop(&mut self) {
        self.metrics.secret_missing(false);
    }
}

impl<'a> Manager<'a> {
    /// Starts the watches of the Secret and of the configurations.
    pub fn start(
        args: &Args,
        context: &'a Context,
        clients: &Clients,
        metrics: Metrics,
        term: &mut Term,
    ) -> Self {
        let changed = Arc::default();
        let secret = Arc::new(Store::new(|_| {}, Arc::clone(&changed)));
        let source = Source::in_namespace("secrets", &context.namespace);
        term.watch(source.named(&args.certificate_secret), &secret);
        let issues = !args.ca_bundle_only;
        Self {
            secrets: Api::namespaced(clients.retrying.clone(), &context.namespace),
            name: args.certificate_secret.clone(),
            policy: issues.then(|| Policy::new(args.serving_names.clone(), args.certificate_lifetime)),
            configurations: Configurations::watch(args, &clients.retrying, term, &changed),
            context,
            metrics,
            secret,
            changed,
            last_good: None,
            missing: false,
        }
    }

    /// Runs until the service stops. The watches have synced.
    pub async fn run(&mut self) {
        let mut failures = 0;
        loop {
            let wait = match self.reconcile().await {
                Ok(wait) => {
                    failures = 0;
                    wait
                }
                Err(error) => {
                    warn!(%error, "failed to manage the webhook's certificate; retrying");
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
            let secret = self.secret.get(&self.name);
            self.report_missing(secret.is_none());
            let Some(policy) = self.policy.clone() else {
                if let Some(bundle) = secret.as_deref().and_then(|secret| self.read_bundle(secret)) {
                    self.apply_bundle(&bundle).await?;
                }
                return Ok(MAX_SLEEP);
            };
            let found = secret.as_deref().and_then(|secret| self.read_contents(secret));
            if found.is_some() {
                self.last_good.clone_from(&found);
            }
            if let Some(contents) = &self.last_good {
                self.apply_bundle(&contents.bundle()).await?;
            }
            let Some(secret) = secret else { return Ok(MAX_SLEEP) };
            let now = self.context.clock.now();
            let present = self.configurations.present();
            let step = match decide(found.as_ref(), self.last_good.as_ref(), &present, &policy, now) {
                Decision::Now(step) => step,
                Decision::At(time) => {
                    // A time in the past means now.
                    let wait = Duration::try_from(time.duration_since(now)).unwrap_or_default();
                    return Ok(wait.min(MAX_SLEEP));
                }
            };
            info!(?step, "updating the certificate Secret");
            let contents = self.apply_step(&step, found, &policy, now)?;
            self.write(Secret::clone(&secret), &contents).await?;
        }
    }

    /// Reports that the Secret is missing or back, once each.
    fn report_missing(&mut self, missing: bool) {
        self.metrics.secret_missing(missing);
        let (namespace, secret) = (&self.context.namespace, &self.name);
        match (std::mem::replace(&mut self.missing, missing), missing) {
            (false, true) if self.policy.is_some() => {
                warn!(
                    namespace,
                    secret, "certificate Secret does not exist; run `helm upgrade` to create it"
                );
            }
            (false, true) => warn!(namespace, secret, "certificate Secret does not exist; create it"),
            (true, false) => info!(namespace, secret, "certificate Secret exists again"),
            _ => {}
        }
    }

    /// The content of the Secret, if it is valid.
    fn read_contents(&self, secret: &Secret) -> Option<Contents> {
        // The chart renders it without data.
        secret.data.as_ref().filter(|data| !data.is_empty())?;
        let read = Contents::read(secret);
        read.inspect_err(
            |error| warn!(%error, secret = self.name, "certificate Secret is invalid, replacing it"),
        )
        .ok()
    }

    /// The CA bundle that another program has put into the Secret.
    fn read_bundle(&self, secret: &Secret) -> Option<String> {
        let part = |key: &str| {
            let part = secret.data.as_ref().and_then(|data| data.get(key));
            part.map(|part| part.0.clone()).unwrap_or_default()
        };
        let authority =
            String::from_utf8(part("ca.crt")).ok().filter(|text| expiry(text.as_bytes()).is_some());
        // While the webhook cannot use a new certificate, it serves the previous one, which the new authority would not
        // make trusted.
        let problem = match (Pair::read(&part("tls.crt"), &part("tls.key")), &authority) {
            (Err(error), _) => error.to_string(),
            (Ok(_), None) => "ca.crt contains no certificate".into(),
            (Ok(_), Some(_)) => return authority,
        };
        warn!(
            secret = self.name,
            problem, "Secret cannot be used; keeping the CA bundle of the webhook configurations"
        );
        None
    }

    async fn apply_bundle(&self, bundle: &str) -> Result<(), StepError> {
        let failed = StepError::failed_to("write the CA bundle into the webhook configurations");
        if self.configurations.apply_bundle(bundle).await.map_err(failed)? {
            info!("CA bundle written into the webhook configurations");
        }
        Ok(())
    }

    fn apply_step(
        &self,
        step: &Step,
        found: Option<Contents>,
        policy: &Policy,
        now: Timestamp,
    ) -> Result<Contents, StepError> {
        let make = |names: &[String]| -> Result<Generation, StepError> {
            Ok(Generation::new(issue(names, policy.lifetime, now)?)?)
        };
        Ok(match (step, found, &self.last_good) {
            (Step::Restore, _, Some(last_good)) => last_good.clone(),
            (Step::Stage(names), Some(contents), _) => contents.staged(make(names)?),
            (Step::MarkTrusted, Some(contents), _) => contents.trusted(now),
            (Step::Promote, Some(contents), _) => contents.promoted(now),
            (Step::DropPrevious, Some(contents), _) => contents.without_previous(),
            _ => Contents::initial(make(&policy.names)?, now),
        })
    }

    /// Replaces the version that was read.
    async fn write(&self, mut secret: Secret, contents: &Contents) -> Result<(), StepError> {
        contents.write(&mut secret);
        let written = self.secrets.replace(&self.name, &PostParams::default(), &secret).await;
        if matches!(&written, Err(kube::Error::Api(status)) if status.code == 404) {
            // It was deleted before the response to an earlier write was handled, and the watch has reported that
            // already.
            self.secret.delete(self.name.as_str().into());
        }
        let failed = StepError::failed_to(format!("write Secret {}/{}", self.context.namespace, self.name));
        self.secret.put(&self.name, written.map_err(failed)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests;

//! The serving certificate: ours, kept in a Secret and trusted through our webhook configurations, or somebody
//! else's, read from files. Either way it is replaced without a restart.

mod configurations;
mod decide;
mod files;
mod issue;
mod pair;
mod reconcile;
mod secret;
mod served;

use std::path::PathBuf;
use std::sync::Arc;

use haulout_service_runtime::access::Permission;
use haulout_service_runtime::service::Context;
use haulout_service_runtime::term::Term;
use haulout_service_runtime::watch::{Source, Store};
use thiserror::Error;

use self::configurations::{Configurations, named};
use self::decide::Policy;
use self::pair::PairError;
pub use self::served::Served;
use crate::args::CertificateArgs;

impl CertificateArgs {
    /// What the service has to be allowed for it: nothing where others look after certificate and trust.
    pub fn permissions(&self) -> Vec<Permission> {
        const GROUP: &str = "admissionregistration.k8s.io";
        let own = self.cert_dir.is_none();
        let mut needed = Vec::new();
        if own {
            let on = |verb| Permission::own(verb, "", "secrets").on(&self.certificate_secret);
            needed.push(Permission::own("create", "", "secrets"));
            needed.extend(["list", "watch", "update"].map(on));
        }
        if own || self.manage_ca_bundle {
            let mutating = self.mutating_configurations.iter().map(|n| ("mutatingwebhookconfigurations", n));
            let validating =
                self.validating_configurations.iter().map(|n| ("validatingwebhookconfigurations", n));
            for (resource, name) in mutating.chain(validating) {
                needed.extend(
                    ["list", "watch", "patch"]
                        .map(|verb| Permission::cluster(verb, GROUP, resource).on(name)),
                );
            }
        }
        needed
    }
}

/// Why there is no certificate to serve.
#[derive(Debug, Error)]
pub enum CertificateError {
    #[error("--cert-dir: reading {}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error("--cert-dir {}: {source}", dir.display())]
    Pair { dir: PathBuf, source: PairError },
}

/// Keeps `served` up to date until the service is to end.
pub async fn run(args: CertificateArgs, context: &Context, served: &Served) -> Result<(), CertificateError> {
    let (mut term, changed) = (Term::new(context), Arc::default());
    let own = args.cert_dir.is_none();
    let configurations = (own || args.manage_ca_bundle).then(|| {
        let (mutating, validating) = (&args.mutating_configurations, &args.validating_configurations);
        Configurations::watch(&context.clients.retrying, mutating, validating, &mut term, &changed)
    });
    if let Some(dir) = args.cert_dir {
        let mut ended = Ok(());
        let files = async { ended = files::run(dir, configurations, context, served, &changed).await };
        term.run(files).await;
        return ended;
    }
    let Some(configurations) = configurations else { return Ok(()) };
    let name = args.certificate_secret;
    let secret = Arc::new(Store::new(|_| {}, Arc::clone(&changed)));
    term.watch(named(Source::in_namespace("secrets", &context.namespace), &name), &secret);
    let policy = Policy::new(args.serving_names, args.certificate_lifetime);
    term.run(reconcile::run((name, secret), policy, configurations, context, served, &changed)).await;
    Ok(())
}

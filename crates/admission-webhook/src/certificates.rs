//! The serving certificate. Either the service issues it, stores it in a Secret and writes its CA into the webhook
//! configurations, or it is read from files. Both are rotated without a restart.

mod configurations;
mod decide;
mod files;
mod issue;
mod pair;
mod reconcile;
mod secret;
mod serving;

use std::path::PathBuf;
use std::sync::Arc;

use futures::future::LocalBoxFuture;
use haulout_service_runtime::access::Permission;
use haulout_service_runtime::service::Context;
use haulout_service_runtime::term::Term;
use thiserror::Error;

use self::configurations::Configurations;
use self::pair::PairError;
use self::reconcile::Manager;
pub use self::serving::ServingCertificate;
use crate::args::CertificateArgs;

/// The permissions that this requires: none if the certificate and the CA bundle are managed by others.
pub fn permissions(args: &CertificateArgs) -> Vec<Permission> {
    let mut needed = Vec::new();
    if args.cert_dir.is_none() {
        let on = |verb| Permission::own(verb, "", "secrets").on(&args.certificate_secret);
        needed.push(Permission::own("create", "", "secrets"));
        needed.extend(["list", "watch", "update"].map(on));
    }
    for (resource, names) in args.managed_configurations() {
        for name in names {
            let on = |verb| Permission::cluster(verb, "admissionregistration.k8s.io", resource).on(name);
            needed.extend(["list", "watch", "patch"].map(on));
        }
    }
    needed
}

/// Why no certificate can be loaded.
#[derive(Debug, Error)]
pub enum CertificateError {
    #[error("failed to read {} (--cert-dir): {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error("failed to load the certificate from --cert-dir {}: {source}", dir.display())]
    Pair { dir: PathBuf, source: PairError },
}

/// Starts the watches that the certificate depends on. The returned future keeps `serving` up to date until the service
/// stops.
pub fn start<'a>(
    args: CertificateArgs,
    context: &'a Context,
    term: &mut Term,
    serving: &'a ServingCertificate,
) -> LocalBoxFuture<'a, Result<(), CertificateError>> {
    let changed = Arc::default();
    let configurations = Configurations::watch(&args, &context.clients.retrying, term, &changed);
    if let Some(dir) = args.cert_dir {
        return Box::pin(files::run(dir, configurations, context, serving, changed));
    }
    let mut manager = Manager::start(args, configurations, context, term, serving, changed);
    Box::pin(async move {
        manager.run().await;
        Ok(())
    })
}

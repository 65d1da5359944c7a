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

use futures::future::LocalBoxFuture;
use haulout_service_runtime::access::Permission;
use haulout_service_runtime::service::Context;
use haulout_service_runtime::term::Term;
use thiserror::Error;

use self::configurations::Configurations;
use self::pair::PairError;
use self::reconcile::Manager;
pub use self::served::Served;
use crate::args::CertificateArgs;

/// What the service has to be allowed for it: nothing where others look after certificate and trust.
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

/// Why there is no certificate to serve.
#[derive(Debug, Error)]
pub enum CertificateError {
    #[error("--cert-dir: reading {}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error("--cert-dir {}: {source}", dir.display())]
    Pair { dir: PathBuf, source: PairError },
}

/// Starts to watch what the certificate depends on. What it returns keeps `served` up to date until the service is to end.
pub fn start<'a>(
    args: CertificateArgs,
    context: &'a Context,
    term: &mut Term,
    served: &'a Served,
) -> LocalBoxFuture<'a, Result<(), CertificateError>> {
    let changed = Arc::default();
    let configurations = Configurations::watch(&args, &context.clients.retrying, term, &changed);
    if let Some(dir) = args.cert_dir {
        return Box::pin(files::run(dir, configurations, context, served, changed));
    }
    let mut manager = Manager::start(args, configurations, context, term, served, changed);
    Box::pin(async move {
        manager.run().await;
        Ok(())
    })
}

//! The serving certificate: from a Secret that the certificate manager keeps, or from files. Both are reloaded without a
//! restart.

mod secret;
mod serving;

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::future::LocalBoxFuture;
use haulout_service_runtime::access::Permission;
use haulout_service_runtime::certificate::{Pair, PairError, expiry};
use haulout_service_runtime::service::Context;
use haulout_service_runtime::term::Term;
use haulout_service_runtime::watch::{Source, Store};
use thiserror::Error;
use tokio::sync::Notify;

pub use self::serving::ServingCertificate;
use crate::args::CertificateArgs;
use crate::files;

/// The permissions that this requires: none if the certificate is in files.
pub fn permissions(args: &CertificateArgs) -> Vec<Permission> {
    if args.cert_dir.is_some() {
        return Vec::new();
    }
    let on = |verb| Permission::own(verb, "", "secrets").on(&args.certificate_secret);
    ["list", "watch"].map(on).into()
}

/// Why no certificate can be loaded.
#[derive(Debug, Error)]
pub enum CertificateError {
    #[error("failed to read {} (--cert-dir): {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error("failed to load the certificate from --cert-dir {}: {source}", dir.display())]
    Pair { dir: PathBuf, source: PairError },
}

/// A certificate with its key and, if it is known, its authority, in PEM.
#[derive(Clone, Default, PartialEq, Eq)]
struct Pem {
    certificate: Vec<u8>,
    key: Vec<u8>,
    authority: Option<Vec<u8>>,
}

impl Pem {
    async fn read(dir: &Path) -> Result<Self, CertificateError> {
        let read = async |name: &str| {
            let path = dir.join(name);
            tokio::fs::read(&path).await.map_err(|source| CertificateError::File { path, source })
        };
        // Only for a metric, and cert-manager omits it if the issuer has none.
        let authority = read("ca.crt").await.ok();
        Ok(Self { certificate: read("tls.crt").await?, key: read("tls.key").await?, authority })
    }

    fn serve(&self, serving: &ServingCertificate) -> Result<(), PairError> {
        let pair = Pair::read(&self.certificate, &self.key)?;
        serving.set(&pair, self.authority.as_deref().and_then(expiry));
        Ok(())
    }
}

/// Starts the watch that the certificate depends on. The returned future keeps `serving` up to date. It ends only if
/// there is no valid certificate at the start.
pub fn start<'a>(
    args: CertificateArgs,
    context: &Context,
    term: &mut Term,
    serving: &'a ServingCertificate,
) -> LocalBoxFuture<'a, Result<Infallible, CertificateError>> {
    if let Some(dir) = args.cert_dir {
        return Box::pin(follow_files(dir, serving));
    }
    let changed: Arc<Notify> = Arc::default();
    let store = Arc::new(Store::new(|_| {}, Arc::clone(&changed)));
    let source = Source::in_namespace("secrets", &context.namespace);
    term.watch(source.named(&args.certificate_secret), &store);
    Box::pin(async move { Ok(secret::follow(store, args.certificate_secret, changed, serving).await) })
}

/// Serves the certificate from the directory. An invalid certificate is an error only at the start.
async fn follow_files(dir: PathBuf, serving: &ServingCertificate) -> Result<Infallible, CertificateError> {
    let serve =
        |pem: &Pem| pem.serve(serving).map_err(|source| CertificateError::Pair { dir: dir.clone(), source });
    let first = Pem::read(&dir).await?;
    serve(&first)?;
    Ok(files::reload("certificate", first, async || Pem::read(&dir).await, serve).await)
}

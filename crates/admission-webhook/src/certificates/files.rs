//! A certificate from a directory that another program maintains. The kubelet updates mounted files by swapping a
//! symbolic link above them, which a file watch would miss. Therefore the files are read every few seconds and
//! compared.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use haulout_service_runtime::service::Context;
use tokio::sync::Notify;
use tracing::{info, warn};

use super::CertificateError;
use super::configurations::Configurations;
use super::pair::{Pair, expiry};
use super::serving::ServingCertificate;

const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// Contents of the directory.
#[derive(Clone, PartialEq, Eq)]
struct Files {
    certificate: Vec<u8>,
    key: Vec<u8>,
    authority: Option<String>,
}

async fn read(dir: &Path) -> Result<Files, CertificateError> {
    let read = async |name: &str| {
        let path = dir.join(name);
        tokio::fs::read(&path).await.map_err(|source| CertificateError::File { path, source })
    };
    // Only --manage-ca-bundle needs ca.crt, and cert-manager omits it if the issuer has none.
    let authority = read("ca.crt").await.ok().and_then(|bytes| String::from_utf8(bytes).ok());
    Ok(Files { certificate: read("tls.crt").await?, key: read("tls.key").await?, authority })
}

fn serve(dir: &Path, files: &Files, serving: &ServingCertificate) -> Result<(), CertificateError> {
    let pair = Pair::read(&files.certificate, &files.key)
        .map_err(|source| CertificateError::Pair { dir: dir.into(), source })?;
    serving.set(&pair, files.authority.as_ref().and_then(|text| expiry(text.as_bytes())));
    Ok(())
}

/// Serves the certificate from the directory until the service stops. An invalid certificate is an error only at the
/// start. Later it is logged, and the previous certificate stays in use.
pub(super) async fn run(
    dir: PathBuf,
    configurations: Configurations,
    context: &Context,
    serving: &ServingCertificate,
    changed: Arc<Notify>,
) -> Result<(), CertificateError> {
    let mut files = read(&dir).await?;
    serve(&dir, &files, serving)?;
    let mut tick = tokio::time::Instant::now() + POLL_INTERVAL;
    loop {
        if let Some(authority) = &files.authority
            && let Err(error) = configurations.apply_bundle(authority).await
        {
            warn!(%error, "failed to write ca.crt into the webhook configurations; retrying");
        }
        tokio::select! {
            () = context.stop.cancelled() => return Ok(()),
            () = changed.notified() => {}
            () = tokio::time::sleep_until(tick) => {
                tick = tokio::time::Instant::now() + POLL_INTERVAL;
                match read(&dir).await {
                    Ok(found) if found != files => {
                        info!(dir = %dir.display(), "certificate files changed");
                        if let Err(error) = serve(&dir, &found, serving) {
                            warn!(%error, "failed to load the new certificate; keeping the previous one");
                        }
                        // An invalid certificate is logged once, not at every poll.
                        files = found;
                    }
                    Ok(_) => {}
                    Err(error) => warn!(%error, "failed to load the new certificate; keeping the previous one"),
                }
            }
        }
    }
}

//! Somebody else's certificate, read from a folder. The kubelet swaps a symbolic link above the files, so that
//! a watch on them would go stale: they are read every few seconds, and their content tells whether they are new.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use haulout_service_runtime::service::Context;
use tokio::sync::Notify;
use tracing::{info, warn};

use super::CertificateError;
use super::configurations::Configurations;
use super::pair::{Pair, expiry};
use super::served::Served;

const PAUSE: Duration = Duration::from_secs(5);

/// What was in the folder.
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
    // Only --manage-ca-bundle needs it, and cert-manager leaves it out where the issuer has none.
    let authority = read("ca.crt").await.ok().and_then(|bytes| String::from_utf8(bytes).ok());
    Ok(Files { certificate: read("tls.crt").await?, key: read("tls.key").await?, authority })
}

fn serve(dir: &Path, files: &Files, served: &Served) -> Result<(), CertificateError> {
    let pair = Pair::read(&files.certificate, &files.key)
        .map_err(|source| CertificateError::Pair { dir: dir.into(), source })?;
    served.set(&pair, files.authority.as_ref().and_then(|text| expiry(text.as_bytes())));
    Ok(())
}

/// Serves what is in the folder until the service is to end. Only a bad beginning is an error: what is bad later
/// is told, and the old certificate stays.
pub(super) async fn run(
    dir: PathBuf,
    configurations: Configurations,
    context: &Context,
    served: &Served,
    changed: Arc<Notify>,
) -> Result<(), CertificateError> {
    let mut files = read(&dir).await?;
    serve(&dir, &files, served)?;
    let mut tick = tokio::time::Instant::now() + PAUSE;
    loop {
        if let Some(authority) = &files.authority
            && let Err(error) = configurations.trust(authority).await
        {
            warn!(%error, "putting ca.crt into the webhook configurations");
        }
        tokio::select! {
            () = context.stop.cancelled() => return Ok(()),
            () = changed.notified() => {}
            () = tokio::time::sleep_until(tick) => {
                tick = tokio::time::Instant::now() + PAUSE;
                match read(&dir).await {
                    Ok(found) if found != files => {
                        info!(dir = %dir.display(), "the certificate files have changed");
                        if let Err(error) = serve(&dir, &found, served) {
                            warn!(%error, "the old certificate is served on");
                        }
                        // A bad one is told once, not every few seconds.
                        files = found;
                    }
                    Ok(_) => {}
                    Err(error) => warn!(%error, "the old certificate is served on"),
                }
            }
        }
    }
}

//! The certificate that is currently served.

use std::sync::Arc;

use haulout_service_runtime::certificate::Pair;
use haulout_service_runtime::server::Readiness;
use jiff::Timestamp;
use parking_lot::RwLock;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tracing::info;

use crate::metrics::Metrics;

const CERTIFICATE: &str = "certificate";

/// The certificate for new connections. Clones share it.
#[derive(Clone, Debug)]
pub struct ServingCertificate {
    key: Arc<RwLock<Option<Arc<CertifiedKey>>>>,
    metrics: Metrics,
    readiness: Readiness,
}

impl ServingCertificate {
    /// No certificate yet. The service is not ready until there is one.
    pub fn new(metrics: Metrics, readiness: Readiness) -> Self {
        readiness.wait_for(CERTIFICATE);
        Self { key: Arc::default(), metrics, readiness }
    }

    /// Serves this certificate from now on.
    pub(super) fn set(&self, pair: &Pair, authority_expires: Option<Timestamp>) {
        self.metrics.certificate_expires("serving", pair.expires);
        if let Some(expires) = authority_expires {
            self.metrics.certificate_expires("authority", expires);
        }
        *self.key.write() = Some(Arc::clone(&pair.key));
        self.readiness.done(CERTIFICATE);
        info!(expires = %pair.expires, names = pair.names.join(","), "serving a new certificate");
    }
}

#[cfg(test)]
impl ServingCertificate {
    /// The first certificate of the chain.
    pub fn leaf(&self) -> Option<rustls::pki_types::CertificateDer<'static>> {
        self.key.read().as_ref()?.cert.first().cloned()
    }
}

impl ResolvesServerCert for ServingCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.key.read().clone()
    }
}

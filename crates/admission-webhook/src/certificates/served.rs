//! The certificate that is being served at this moment.

use std::sync::Arc;

use haulout_service_runtime::server::Readiness;
use jiff::Timestamp;
use parking_lot::RwLock;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tracing::info;

use super::pair::Pair;
use crate::metrics::Metrics;

const CERTIFICATE: &str = "certificate";

/// What new connections are shown. Clones are the same.
#[derive(Clone, Debug)]
pub struct Served {
    key: Arc<RwLock<Option<Arc<CertifiedKey>>>>,
    metrics: Metrics,
    readiness: Readiness,
}

impl Served {
    /// Nothing yet; the service is not ready without.
    pub fn new(metrics: Metrics, readiness: Readiness) -> Self {
        readiness.wait_for(CERTIFICATE);
        Self { key: Arc::default(), metrics, readiness }
    }

    /// Serves this one from now on.
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

impl ResolvesServerCert for Served {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.key.read().clone()
    }
}

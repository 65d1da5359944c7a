//! The certificate that is being served at this moment.

use std::sync::{Arc, PoisonError, RwLock};

use haulout_service_runtime::metrics::Metrics;
use haulout_service_runtime::server::Readiness;
use jiff::Timestamp;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Unit;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tracing::info;

use super::pair::Pair;

const CERTIFICATE: &str = "certificate";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CertificateLabel {
    certificate: &'static str,
}

/// What new connections are shown. Clones are the same.
#[derive(Clone, Debug)]
pub struct Served {
    key: Arc<RwLock<Option<Arc<CertifiedKey>>>>,
    expiry: Family<CertificateLabel, Gauge>,
    readiness: Readiness,
}

impl Served {
    /// Nothing yet; the service is not ready without.
    pub fn new(metrics: &Metrics, readiness: Readiness) -> Self {
        readiness.wait_for(CERTIFICATE);
        let expiry = Family::<CertificateLabel, Gauge>::default();
        metrics.register(|registry| {
            registry.register_with_unit(
                "haulout_certificate_expiry_timestamp",
                "When the certificate expires: the one that is served, and its authority where that is known",
                Unit::Seconds,
                expiry.clone(),
            );
        });
        Self { key: Arc::default(), expiry, readiness }
    }

    /// Serves this one from now on.
    pub(super) fn set(&self, pair: &Pair, authority_expires: Option<Timestamp>) {
        let expiry = |certificate, time: Timestamp| {
            self.expiry.get_or_create(&CertificateLabel { certificate }).set(time.as_second());
        };
        expiry("serving", pair.expires);
        if let Some(expires) = authority_expires {
            expiry("authority", expires);
        }
        *self.key.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&pair.key));
        self.readiness.done(CERTIFICATE);
        info!(expires = %pair.expires, names = pair.names.join(","), "serving a new certificate");
    }
}

impl ResolvesServerCert for Served {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.key.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

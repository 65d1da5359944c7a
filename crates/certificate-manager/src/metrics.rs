//! The metrics of the certificate manager.

use haulout_service_runtime::metrics::Metrics as ServiceMetrics;
use prometheus_client::metrics::gauge::Gauge;

/// The metrics of this service. Clones share their values.
#[derive(Clone, Debug)]
pub struct Metrics {
    secret_missing: Gauge,
}

impl Metrics {
    /// Registers the metrics.
    pub fn new(all: &ServiceMetrics) -> Self {
        Self {
            secret_missing: all.add(
                "haulout_certificate_secret_missing",
                "1 while the certificate Secret does not exist, on the leader",
            ),
        }
    }

    /// Sets whether the Secret is missing.
    pub fn secret_missing(&self, missing: bool) {
        self.secret_missing.set(missing.into());
    }
}

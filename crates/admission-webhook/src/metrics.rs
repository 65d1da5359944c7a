//! The webhook's metrics. Labels never contain object names, and each has a bounded number of values.

use std::time::Duration;

use haulout_service_runtime::metrics::Metrics as ServiceMetrics;
use jiff::Timestamp;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};

use crate::decide::Verdict;
use crate::review::{Hook, Operation};

/// Label names and values.
type Labels<const N: usize> = [(&'static str, &'static str); N];

/// The metrics of this service. Clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    requests: Family<Labels<4>, Counter>,
    durations: Family<Labels<2>, Histogram>,
    denials: Family<Labels<2>, Counter>,
    connections: Gauge,
    closed: Family<Labels<1>, Counter>,
    pod_lookups: Family<Labels<1>, Counter>,
    access_reviews: Family<Labels<1>, Counter>,
    certificate_expiry: Family<Labels<1>, Gauge>,
}

impl Metrics {
    /// Registers the metrics.
    pub fn new(all: &ServiceMetrics) -> Self {
        Self {
            requests: all.add(
                "haulout_admission_requests",
                "Number of admission requests by type, resource, operation and verdict: allowed, warned, denied, or \
                 failed if there was no verdict",
            ),
            durations: all.add_seconds(
                "haulout_admission_duration",
                "Time from receiving a complete admission request to its response",
                // From 62.5 microseconds, doubling, to more than the longest webhook timeout.
                Family::new_with_constructor(|| Histogram::new(exponential_buckets(0.000_062_5, 2.0, 20))),
            ),
            denials: all.add("haulout_admission_denials", "Number of denied requests by resource and cause"),
            connections: all.add("haulout_admission_connections", "Number of open connections"),
            closed: all.add(
                "haulout_admission_connections_closed",
                "Number of connections closed by the webhook, by cause: failed or slow TLS handshake, idle, client that \
                 did not receive, or idle or slow when another client needed the place or the memory",
            ),
            pod_lookups: all.add(
                "haulout_admission_pod_lookups",
                "Number of lookups of an Evacuation's pod, by source: cached or live",
            ),
            access_reviews: all.add(
                "haulout_admission_access_reviews",
                "Number of access reviews by result: live, cached or failed",
            ),
            certificate_expiry: all.add_seconds(
                "haulout_certificate_expiry_timestamp",
                "Expiry time of the serving certificate and, if known, of its authority",
                Family::default(),
            ),
        }
    }

    /// Counts a review with a verdict.
    pub fn answered(&self, hook: Hook, operation: Operation, verdict: &Verdict, took: Duration) {
        let resource = ("resource", hook.resource());
        let result = match verdict.violations.first() {
            Some(first) => {
                self.denials.get_or_create(&[resource, ("cause", first.cause.label())]).inc();
                "denied"
            }
            None if verdict.warnings.is_empty() => "allowed",
            None => "warned",
        };
        self.request(hook, operation.as_str(), result);
        self.durations.get_or_create(&[kind_of(hook), resource]).observe(took.as_secs_f64());
    }

    /// Counts a review without a verdict.
    pub fn failed(&self, hook: Hook, operation: Option<Operation>) {
        self.request(hook, operation.map_or("unknown", Operation::as_str), "failed");
    }

    fn request(&self, hook: Hook, operation: &'static str, verdict: &'static str) {
        let (kind, resource) = (kind_of(hook), ("resource", hook.resource()));
        let labels = [kind, resource, ("operation", operation), ("verdict", verdict)];
        self.requests.get_or_create(&labels).inc();
    }

    /// Counts a connection until the returned value is dropped.
    pub fn connection(&self) -> Connection {
        self.connections.inc();
        Connection(self.connections.clone())
    }

    /// Counts a connection that the webhook closed.
    pub fn closed(&self, cause: &'static str) {
        self.closed.get_or_create(&[("cause", cause)]).inc();
    }

    /// Counts a pod lookup.
    pub fn pod_lookup(&self, result: &'static str) {
        self.pod_lookups.get_or_create(&[("result", result)]).inc();
    }

    /// Counts an access review.
    pub fn access_review(&self, result: &'static str) {
        self.access_reviews.get_or_create(&[("result", result)]).inc();
    }

    /// Sets the expiry time of this certificate, `serving` or `authority`.
    pub fn certificate_expires(&self, certificate: &'static str, time: Timestamp) {
        self.certificate_expiry.get_or_create(&[("certificate", certificate)]).set(time.as_second());
    }
}

/// The label that the API server uses in its own webhook metrics.
fn kind_of(hook: Hook) -> (&'static str, &'static str) {
    ("type", if hook.mutates() { "admit" } else { "validating" })
}

/// An open connection.
#[derive(Debug)]
pub struct Connection(Gauge);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.dec();
    }
}

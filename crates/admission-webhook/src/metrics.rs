//! What `/metrics` shows of the webhook.

use std::time::Duration;

use haulout_service_runtime::metrics::Metrics;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Unit;

use crate::review::{Answer, Hook, Operation};

/// From a sixteenth of a millisecond, by doubling, past the longest time-out there is.
#[derive(Clone, Copy, Debug)]
struct Seconds;

impl MetricConstructor<Histogram> for Seconds {
    fn new_metric(&self) -> Histogram {
        Histogram::new(exponential_buckets(0.000_062_5, 2.0, 20))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HookLabels {
    r#type: &'static str,
    resource: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    r#type: &'static str,
    resource: &'static str,
    operation: &'static str,
    verdict: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DenialLabels {
    resource: &'static str,
    cause: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CutLabel {
    cause: &'static str,
}

/// The metrics of the server. Clones are the same.
#[derive(Clone, Debug)]
pub struct ServerMetrics {
    requests: Family<RequestLabels, Counter>,
    durations: Family<HookLabels, Histogram, Seconds>,
    denials: Family<DenialLabels, Counter>,
    connections: Gauge,
    cut: Family<CutLabel, Counter>,
}

impl ServerMetrics {
    /// Adds them to those of the service.
    pub fn new(metrics: &Metrics) -> Self {
        let new = Self {
            requests: Family::default(),
            durations: Family::new_with_constructor(Seconds),
            denials: Family::default(),
            connections: Gauge::default(),
            cut: Family::default(),
        };
        metrics.register(|registry| {
            registry.register(
                "haulout_admission_requests",
                "Reviews by type, resource, operation and verdict: allowed, warned, denied, or failed when \
                 there was none",
                new.requests.clone(),
            );
            registry.register_with_unit(
                "haulout_admission_duration",
                "Time from a whole request to its answer",
                Unit::Seconds,
                new.durations.clone(),
            );
            registry.register(
                "haulout_admission_denials",
                "Denials by resource and by the rule that denied",
                new.denials.clone(),
            );
            registry.register("haulout_admission_connections", "Open connections", new.connections.clone());
            registry.register(
                "haulout_admission_connections_cut",
                "Connections that we ended: no TLS, too slow, or idle",
                new.cut.clone(),
            );
        });
        new
    }

    /// Counts a connection for as long as what it returns lives.
    pub fn connection(&self) -> Connection {
        self.connections.inc();
        Connection(self.connections.clone())
    }

    pub fn cut(&self, cause: &'static str) {
        self.cut.get_or_create(&CutLabel { cause }).inc();
    }

    pub fn answered(&self, hook: Hook, operation: Operation, answer: &Answer, took: Duration) {
        let verdict = match answer {
            Answer::Allowed { warnings, .. } if warnings.is_empty() => "allowed",
            Answer::Allowed { .. } => "warned",
            Answer::Denied { cause, .. } => {
                self.denials.get_or_create(&DenialLabels { resource: hook.resource(), cause }).inc();
                "denied"
            }
        };
        self.request(hook, operation.as_str(), verdict);
        let labels = HookLabels { r#type: kind_of(hook), resource: hook.resource() };
        self.durations.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// Counts a request without a verdict.
    pub fn failed(&self, hook: Hook, operation: Option<Operation>) {
        self.request(hook, operation.map_or("unknown", Operation::as_str), "failed");
    }

    fn request(&self, hook: Hook, operation: &'static str, verdict: &'static str) {
        let (r#type, resource) = (kind_of(hook), hook.resource());
        self.requests.get_or_create(&RequestLabels { r#type, resource, operation, verdict }).inc();
    }
}

/// In the API server's words for its own metrics of webhooks.
fn kind_of(hook: Hook) -> &'static str {
    if hook.mutates() { "admit" } else { "validating" }
}

/// An open connection.
#[derive(Debug)]
pub struct Connection(Gauge);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.dec();
    }
}

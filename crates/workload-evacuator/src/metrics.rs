//! The metrics of the workload evacuator.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::decide::Outcome;
use crate::state::{Outage, State};

/// The metrics of this service. Clones share their values.
#[derive(Clone, Debug)]
pub struct Metrics {
    pods: Family<[(&'static str, &'static str); 1], Counter>,
    unavailable: Counter<f64, AtomicU64>,
    gauges: Gauges,
}

impl Metrics {
    /// Registers the metrics.
    pub fn new(all: &haulout_service_runtime::metrics::Metrics) -> Self {
        let gauges = Gauges::default();
        all.register(|registry| registry.register_collector(Box::new(gauges.clone())));
        Self {
            pods: all
                .add("haulout_workload_evacuator_pods", "Pods of Deployments that had to leave, by outcome"),
            unavailable: all.add_seconds(
                "haulout_workload_evacuator_unavailable",
                "Time without a ready pod of a Deployment while one of its pods was replaced",
                Counter::default(),
            ),
            gauges,
        }
    }

    /// Exports gauges from this state until the returned value is dropped, at the end of the term.
    pub fn export_gauges(&self, state: &Arc<Mutex<State>>) {
        *self.gauges.0.lock() = Arc::downgrade(state);
    }

    /// Counts a pod for which our turn has ended.
    pub fn completed(&self, outcome: Outcome) {
        self.pods.get_or_create(&[("outcome", outcome.as_str())]).inc();
    }

    /// Counts a pod that stays, because its evacuation was cancelled.
    pub fn cancelled(&self) {
        self.pods.get_or_create(&[("outcome", "cancelled")]).inc();
    }

    /// Adds the length of an outage that has ended.
    pub fn outage_ended(&self, outage: Option<Outage>) {
        if let Some(Outage(duration)) = outage {
            self.unavailable.inc_by(duration.as_secs_f64().max(0.0));
        }
    }
}

/// Computes gauges from the leader's state when metrics are scraped.
#[derive(Clone, Debug, Default)]
struct Gauges(Arc<Mutex<Weak<Mutex<State>>>>);

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let Some(state) = self.0.lock().upgrade() else { return Ok(()) };
        let counts = state.lock().counts();
        let gauges = [
            (
                "haulout_workload_evacuator_moved_pods",
                "Pods that belong to their Deployment while a replacement starts",
            ),
            (
                "haulout_workload_evacuator_active_evacuations",
                "Evacuations that wait for the workload evacuator",
            ),
            (
                "haulout_workload_evacuator_outages",
                "Deployments without a ready pod while one of their pods is replaced",
            ),
        ];
        for ((name, help), count) in gauges.into_iter().zip(counts) {
            let gauge = ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX));
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}

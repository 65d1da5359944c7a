//! Metrics of maintenances. Labels have a bounded number of values and never contain object names.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Weak};

use haulout_api_types::conditions;
use haulout_api_types::names::condition;
use haulout_api_types::node_maintenance::{NodeMaintenanceStatus, Stage};
use jiff::Timestamp;
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::stage;
use crate::state::State;

/// From a second to a day.
const DURATIONS: [f64; 14] =
    [1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 21_600.0, 86_400.0];

/// The metrics of this service. Clones share their values.
#[derive(Clone, Debug)]
pub struct Metrics {
    drains: Histogram,
    collector: StateCollector,
}

impl Metrics {
    /// Registers them in addition to the metrics of every service.
    pub fn new(all: &haulout_service_runtime::metrics::Metrics) -> Self {
        let collector = StateCollector::default();
        all.register(|registry| registry.register_collector(Box::new(collector.clone())));
        let drains = all.add_seconds(
            "haulout_maintenance_drain_duration",
            "Time from the cordon until all nodes of a maintenance were drained",
            Histogram::new(DURATIONS),
        );
        Self { drains, collector }
    }

    /// Exports the gauges of this state until it is dropped.
    pub fn set_state(&self, state: &Arc<Mutex<State>>) {
        *self.collector.0.lock() = Arc::downgrade(state);
    }

    /// Observes the duration of a drain that has just finished.
    pub fn status_written(&self, old: &NodeMaintenanceStatus, new: &NodeMaintenanceStatus, now: Timestamp) {
        let drained =
            |status: &NodeMaintenanceStatus| conditions::is_true(&status.conditions, condition::DRAINED);
        let cordoned = |stage: Stage| matches!(stage, Stage::Cordon | Stage::Drain);
        let started =
            new.stage_statuses.iter().filter(|b| cordoned(b.name)).map(|b| b.start_timestamp.0).min();
        if let Some(started) = started.filter(|_| drained(new) && !drained(old)) {
            self.drains.observe(now.duration_since(started).as_secs_f64());
        }
    }
}

/// Computes the gauges from the state when metrics are collected.
#[derive(Clone, Debug, Default)]
struct StateCollector(Arc<Mutex<Weak<Mutex<State>>>>);

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").finish_non_exhaustive()
    }
}

impl Collector for StateCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        // Replicas that do not lead export no gauges.
        let Some(known) = self.0.lock().upgrade() else { return Ok(()) };
        let (stages, unreadable, summary) = {
            let known = known.lock();
            let mut stages: BTreeMap<String, u32> =
                Stage::ALL.iter().map(|stage| (stage.as_str().to_owned(), 0)).collect();
            for maintenance in known.maintenances.values() {
                let lifecycle = maintenance.lifecycle(0);
                let stage = stage::effective_stage(lifecycle.stage, lifecycle.deleting);
                *stages.entry(stage.as_str().to_owned()).or_default() += 1;
            }
            (stages, known.unreadable.len(), known.summary())
        };
        let pods = [("pending", summary.pending), ("evacuating", summary.evacuating)];
        let families = [
            ("haulout_maintenances", "NodeMaintenances by stage", "stage", stages),
            (
                "haulout_maintenance_nodes",
                "Nodes under maintenance by state",
                "state",
                by_label(summary.nodes),
            ),
            (
                "haulout_maintenance_pods",
                "Pods that have to leave nodes under maintenance",
                "state",
                by_label(pods),
            ),
            (
                "haulout_maintenance_blockers",
                "Blockers of drains by reason",
                "reason",
                by_label(summary.blockers),
            ),
        ];
        let name = "haulout_maintenances_unreadable";
        let help = "Unreadable NodeMaintenances; the nodes that they hold are not released";
        let unreadable = ConstGauge::new(i64::try_from(unreadable).unwrap_or(i64::MAX));
        unreadable.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        for (name, help, label, counts) in families {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (value, count) in counts {
                ConstGauge::new(i64::from(count)).encode(family.encode_family(&[(label, value)])?)?;
            }
        }
        Ok(())
    }
}

fn by_label<K: ToString>(counts: impl IntoIterator<Item = (K, u32)>) -> BTreeMap<String, u32> {
    counts.into_iter().map(|(key, count)| (key.to_string(), count)).collect()
}

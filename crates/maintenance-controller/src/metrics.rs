//! What `/metrics` tells of maintenances. No label holds the name of an object, and each has a bounded number of
//! values.

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

/// The metrics of this service. Clones are the same.
#[derive(Clone, Debug)]
pub struct Metrics {
    drains: Histogram,
    shown: Shown,
}

impl Metrics {
    /// Adds them to those that every service has.
    pub fn new(all: &haulout_service_runtime::metrics::Metrics) -> Self {
        let shown = Shown::default();
        all.register(|registry| registry.register_collector(Box::new(shown.clone())));
        let drains = all.add_seconds(
            "maintenance_controller_drain_duration",
            "From the cordon of a maintenance's nodes until all of them were drained",
            Histogram::new(DURATIONS),
        );
        Self { drains, shown }
    }

    /// Shows what this state holds, for as long as somebody else keeps it.
    pub fn show(&self, state: &Arc<Mutex<State>>) {
        *self.shown.0.lock() = Arc::downgrade(state);
    }

    /// Takes the time of a drain that has just ended.
    pub fn status_written(&self, old: &NodeMaintenanceStatus, new: &NodeMaintenanceStatus, now: Timestamp) {
        let drained =
            |status: &NodeMaintenanceStatus| conditions::is_true(&status.conditions, condition::DRAINED);
        let cordoned = |stage: Stage| matches!(stage, Stage::Cordon | Stage::Drain);
        let begun = new.stage_statuses.iter().filter(|b| cordoned(b.name)).map(|b| b.start_timestamp.0).min();
        if let Some(begun) = begun.filter(|_| drained(new) && !drained(old)) {
            self.drains.observe(now.duration_since(begun).as_secs_f64());
        }
    }
}

/// Counts what the state holds when somebody asks.
#[derive(Clone, Debug, Default)]
struct Shown(Arc<Mutex<Weak<Mutex<State>>>>);

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").finish_non_exhaustive()
    }
}

impl Collector for Shown {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        // Those who stand by have nothing to show.
        let Some(known) = self.0.lock().upgrade() else { return Ok(()) };
        let (stages, unfollowed, summary) = {
            let known = known.lock();
            let mut stages: BTreeMap<String, u32> =
                Stage::ALL.iter().map(|stage| (stage.as_str().to_owned(), 0)).collect();
            for maintenance in known.maintenances.values() {
                let life = maintenance.life(0);
                let stage = stage::effective(life.stage, life.deleting);
                *stages.entry(stage.as_str().to_owned()).or_default() += 1;
            }
            (stages, known.unfollowed.len(), known.summary())
        };
        let pods = [("pending", summary.pending), ("evacuating", summary.evacuating)];
        let families = [
            ("maintenances", "NodeMaintenances by stage", "stage", stages),
            ("nodes", "Nodes under maintenance by how they stand", "state", text(summary.nodes)),
            ("pods", "Pods that have to leave nodes under maintenance", "state", text(pods)),
            ("blockers", "What keeps nodes from being drained, by reason", "reason", text(summary.blockers)),
        ];
        let name = "maintenance_controller_unfollowed_maintenances";
        let help = "NodeMaintenances that cannot be read; the nodes that they hold are not released";
        let unfollowed = ConstGauge::new(i64::try_from(unfollowed).unwrap_or(i64::MAX));
        unfollowed.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        for (name, help, label, counts) in families {
            let name = format!("maintenance_controller_{name}");
            let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?;
            for (value, count) in counts {
                ConstGauge::new(i64::from(count)).encode(family.encode_family(&[(label, value)])?)?;
            }
        }
        Ok(())
    }
}

fn text<K: ToString>(counts: impl IntoIterator<Item = (K, u32)>) -> BTreeMap<String, u32> {
    counts.into_iter().map(|(key, count)| (key.to_string(), count)).collect()
}

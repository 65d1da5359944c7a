//! What `/metrics` shows of tainted nodes: upstream's two metrics under their own names, with the unit right, and what
//! upstream does not show.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use haulout_service_runtime::metrics::Metrics as Runtime;
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;

use crate::decide::How;
use crate::state::State;

/// Upstream's buckets, in seconds: from 5 ms to 4 min.
const BUCKETS: [f64; 12] = [0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0, 120.0, 180.0, 240.0];

/// How a pod was made to leave.
type HowLabel = [(&'static str, &'static str); 1];

fn label(how: How) -> HowLabel {
    [("how", how.as_str())]
}

/// The metrics of this service. Clones are the same.
#[derive(Clone, Debug)]
pub struct Metrics {
    deletions: Counter,
    latency: Histogram,
    departures: Family<HowLabel, Counter>,
    departure_latency: Family<HowLabel, Histogram>,
    failures: Family<HowLabel, Counter>,
    conflicts: Counter,
    policy_refused: Gauge,
    shown: Shown,
}

impl Metrics {
    /// Adds them to those that every service has.
    pub fn new(all: &Runtime) -> Self {
        let shown = Shown::default();
        let metrics = Self {
            deletions: all.add(
                "taint_eviction_controller_pod_deletions",
                "Pods deleted because of NoExecute taints",
            ),
            latency: all.add_seconds(
                "taint_eviction_controller_pod_deletion_duration",
                "From when a pod had to leave to its deletion",
                Histogram::new(BUCKETS),
            ),
            departures: all.add("taint_manager_departures", "Pods that were made to leave, by how"),
            departure_latency: all.add_seconds(
                "taint_manager_departure_duration",
                "From when a pod had to leave to its deletion, its eviction or the request for its evacuation, by how",
                Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            ),
            failures: all.add(
                "taint_manager_failures",
                "Attempts to make a pod leave that failed and are repeated, by how",
            ),
            conflicts: all.add(
                "taint_manager_rival_evictions",
                "Evictions by somebody else who acts on NoExecute taints",
            ),
            policy_refused: all.add(
                "taint_manager_policy_refused",
                "1 while the policy file cannot be used and an earlier one is in force",
            ),
            shown: shown.clone(),
        };
        all.register(|registry| registry.register_collector(Box::new(shown)));
        metrics
    }

    /// Shows what this state knows, for as long as somebody else keeps it.
    pub fn show(&self, state: &Arc<Mutex<State>>) {
        *self.shown.0.lock() = Arc::downgrade(state);
    }

    /// Counts a pod that was made to leave so long after it had to.
    pub fn left(&self, how: How, late: Duration) {
        let label = label(how);
        self.departures.get_or_create(&label).inc();
        self.departure_latency.get_or_create(&label).observe(late.as_secs_f64());
        if matches!(how, How::Delete | How::ForceDelete) {
            self.deletions.inc();
            self.latency.observe(late.as_secs_f64());
        }
    }

    /// Counts a failure.
    pub fn failed(&self, how: How) {
        self.failures.get_or_create(&label(how)).inc();
    }

    /// Counts an eviction by another controller.
    pub fn conflict(&self) {
        self.conflicts.inc();
    }

    /// Says whether the policy file was refused.
    pub fn policy_refused(&self, refused: bool) {
        self.policy_refused.set(i64::from(refused));
    }
}

/// Looks at the state when somebody asks.
#[derive(Clone, Debug, Default)]
struct Shown(Arc<Mutex<Weak<Mutex<State>>>>);

impl Collector for Shown {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        // Only a leader has something to show.
        let Some(state) = self.0.lock().upgrade() else { return Ok(()) };
        let (nodes, unreadable, pods) = {
            let state = state.lock();
            (state.tainted_nodes(), state.unreadable_nodes(), state.concerned_pods())
        };
        for (name, help, count) in [
            ("taint_manager_tainted_nodes", "Nodes with NoExecute taints", nodes),
            (
                "taint_manager_unreadable_nodes",
                "Nodes that cannot be read, so that their pods stay",
                unreadable,
            ),
            ("taint_manager_concerned_pods", "Pods that wait for a deadline or are made to leave", pods),
        ] {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX)).encode(metric)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_leave_has_its_latency() {
        let all = Runtime::new("test", "0");
        let metrics = Metrics::new(&all);
        let ways = [How::Delete, How::ForceDelete, How::Evict, How::Evacuate];
        for how in ways {
            metrics.left(how, Duration::from_millis(30));
        }
        let text = all.encode().unwrap();
        for how in ways {
            let labels = format!("{{how=\"{}\"}} 1\n", how.as_str());
            for metric in ["taint_manager_departures_total", "taint_manager_departure_duration_seconds_count"]
            {
                assert!(text.contains(&format!("{metric}{labels}")), "{metric} of {how:?} is not in\n{text}");
            }
        }
        let upstream = "taint_eviction_controller_pod_deletion_duration_seconds_count 2\n";
        assert!(text.contains(upstream), "the deletions alone:\n{text}");
    }
}

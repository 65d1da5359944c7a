//! The metrics of the taint manager: the two of kube-controller-manager's taint-eviction-controller, under the same
//! names and in seconds, and our own.

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
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::decide::RemovalAction;
use crate::state::State;

/// The buckets of taint-eviction-controller, in seconds: from 5 ms to 4 min.
const BUCKETS: [f64; 12] = [0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0, 120.0, 180.0, 240.0];

/// The label with the action.
type ActionLabel = [(&'static str, &'static str); 1];

fn label(how: RemovalAction) -> ActionLabel {
    [("action", how.as_str())]
}

/// The metrics of this service. Clones share their values.
#[derive(Clone, Debug)]
pub struct Metrics {
    deletions: Counter,
    latency: Histogram,
    removals: Family<ActionLabel, Counter>,
    removal_delay: Family<ActionLabel, Histogram>,
    failures: Family<ActionLabel, Counter>,
    conflicts: Counter,
    gauges: Gauges,
}

impl Metrics {
    /// Registers the metrics.
    pub fn new(all: &Runtime) -> Self {
        let gauges = Gauges::default();
        let metrics = Self {
            deletions: all.add(
                "taint_eviction_controller_pod_deletions",
                "Pods deleted because of NoExecute taints",
            ),
            latency: all.add_seconds(
                "taint_eviction_controller_pod_deletion_duration",
                "Delay from the deadline of a pod to its deletion",
                Histogram::new(BUCKETS),
            ),
            removals: all.add("haulout_taint_manager_removals", "Pods that were deleted, evicted or requested to be evacuated, by action"),
            removal_delay: all.add_seconds(
                "haulout_taint_manager_removal_delay",
                "Delay from the deadline of a pod to its deletion, its eviction or the request for its evacuation, by action",
                Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            ),
            failures: all.add(
                "haulout_taint_manager_failures",
                "Failed attempts to remove a pod, which are retried, by action",
            ),
            conflicts: all.add(
                "haulout_taint_manager_conflicting_evictions",
                "Evictions by another controller because of NoExecute taints",
            ),
            gauges: gauges.clone(),
        };
        all.register(|registry| registry.register_collector(Box::new(gauges)));
        metrics
    }

    /// Exports gauges from this state for as long as it exists.
    pub fn export_gauges(&self, state: &Arc<Mutex<State>>) {
        *self.gauges.0.lock() = Arc::downgrade(state);
    }

    /// Counts a removed pod, and its delay after the deadline.
    pub fn removed(&self, how: RemovalAction, delay: Duration) {
        let label = label(how);
        self.removals.get_or_create(&label).inc();
        self.removal_delay.get_or_create(&label).observe(delay.as_secs_f64());
        if matches!(how, RemovalAction::Delete | RemovalAction::ForceDelete) {
            self.deletions.inc();
            self.latency.observe(delay.as_secs_f64());
        }
    }

    /// Counts a failed removal.
    pub fn failed(&self, how: RemovalAction) {
        self.failures.get_or_create(&label(how)).inc();
    }

    /// Counts an eviction by another controller.
    pub fn conflict(&self) {
        self.conflicts.inc();
    }
}

/// Computes gauges from the leader's state when metrics are scraped.
#[derive(Clone, Debug, Default)]
struct Gauges(Arc<Mutex<Weak<Mutex<State>>>>);

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        // Only the leader has a state.
        let Some(state) = self.0.lock().upgrade() else { return Ok(()) };
        let (nodes, unreadable, pods, policy_rejected) = {
            let state = state.lock();
            let rejected = usize::from(state.policy_rejected);
            (state.tainted_nodes(), state.unreadable_nodes(), state.pending_pods(), rejected)
        };
        for (name, help, count) in [
            ("haulout_taint_manager_tainted_nodes", "Nodes with NoExecute taints", nodes),
            ("haulout_taint_manager_unreadable_nodes", "Unreadable nodes, whose pods stay", unreadable),
            (
                "haulout_taint_manager_pending_pods",
                "Pods that wait for a deadline or are being removed",
                pods,
            ),
            (
                "haulout_taint_manager_policy_rejected",
                "1 while the policy file is rejected and the previous policy is in effect",
                policy_rejected,
            ),
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
    fn every_action_has_a_removal_delay() {
        let all = Runtime::new("test", "0");
        let metrics = Metrics::new(&all);
        let actions = [
            RemovalAction::Delete,
            RemovalAction::ForceDelete,
            RemovalAction::Evict,
            RemovalAction::Evacuate,
        ];
        for how in actions {
            metrics.removed(how, Duration::from_millis(30));
        }
        let text = all.encode().unwrap();
        for how in actions {
            let labels = format!("{{action=\"{}\"}} 1\n", how.as_str());
            for metric in
                ["haulout_taint_manager_removals_total", "haulout_taint_manager_removal_delay_seconds_count"]
            {
                assert!(text.contains(&format!("{metric}{labels}")), "{metric} of {how:?} is not in\n{text}");
            }
        }
        let upstream = "taint_eviction_controller_pod_deletion_duration_seconds_count 2\n";
        assert!(text.contains(upstream), "only deletions:\n{text}");
    }
}

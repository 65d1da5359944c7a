//! What `/metrics` tells of evacuations. No label holds the name of an object, and each has a bounded number of
//! values.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Unit;

use crate::decide::End;
use crate::eviction::Verdict;
use crate::index::Index;
use crate::record::Record;

/// How many classes or instigators have a label of their own; the others share one.
const MOST_NAMES: usize = 50;
const OTHERS: &str = "others";
/// The class of pods that left without an evacuator.
const NO_CLASS: &str = "none";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndLabels {
    class: String,
    outcome: &'static str,
}

/// From a second to nine hours.
#[derive(Clone, Copy, Debug)]
struct Durations;

impl MetricConstructor<Histogram> for Durations {
    fn new_metric(&self) -> Histogram {
        let buckets = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 28_800];
        Histogram::new(buckets.map(f64::from))
    }
}

/// The metrics of this service. Clones are the same.
#[derive(Clone, Debug)]
pub struct Metrics {
    evictions: Family<ResultLabel, Counter>,
    durations: Family<EndLabels, Histogram, Durations>,
    classes: Arc<Mutex<Names>>,
    shown: Shown,
}

impl Metrics {
    /// Adds them to those that every service has.
    pub fn new(all: &haulout_service_runtime::metrics::Metrics) -> Self {
        let metrics = Self {
            evictions: Family::default(),
            durations: Family::new_with_constructor(Durations),
            classes: Arc::default(),
            shown: Shown::default(),
        };
        all.register(|registry| {
            registry.register(
                "evacuation_controller_evictions",
                "Calls of the Eviction API by result",
                metrics.evictions.clone(),
            );
            registry.register_with_unit(
                "evacuation_controller_evacuation_duration",
                "From the creation of an Evacuation to its end, by the last evacuator and outcome",
                Unit::Seconds,
                metrics.durations.clone(),
            );
            registry.register_collector(Box::new(metrics.shown.clone()));
        });
        metrics
    }

    /// Shows what this index holds, for as long as somebody else keeps it.
    pub fn show(&self, index: &Arc<Mutex<Index>>) {
        *lock(&self.shown.0) = Arc::downgrade(index);
    }

    /// Counts a call of the Eviction API.
    pub fn eviction(&self, verdict: &Verdict) {
        let result = match verdict {
            Verdict::Evicted => "Evicted",
            Verdict::Gone => "Gone",
            Verdict::Refused(refusal) => refusal.reason,
            Verdict::Conflict => "Conflict",
            Verdict::Unanswered(_) => "Unanswered",
        };
        self.evictions.get_or_create(&ResultLabel { result }).inc();
    }

    /// Counts an evacuation that took so long.
    pub fn ended(&self, record: &Record, end: End, took: Duration) {
        let class = lock(&self.classes).bounded(record.active.as_deref().unwrap_or(NO_CLASS));
        let outcome = match end {
            End::Evacuated => "evacuated",
            End::Cancelled => "cancelled",
        };
        self.durations.get_or_create(&EndLabels { class, outcome }).observe(took.as_secs_f64());
    }
}

/// The first names that come get a label of their own.
#[derive(Debug, Default)]
struct Names(std::collections::BTreeSet<String>);

impl Names {
    fn bounded(&mut self, name: &str) -> String {
        if !self.0.contains(name) {
            if self.0.len() >= MOST_NAMES {
                return OTHERS.to_owned();
            }
            self.0.insert(name.to_owned());
        }
        name.to_owned()
    }
}

/// Counts what the index holds when somebody asks.
#[derive(Clone, Debug, Default)]
struct Shown(Arc<Mutex<Weak<Mutex<Index>>>>);

#[derive(Debug, Default)]
struct Counts {
    active: BTreeMap<String, u32>,
    instigators: BTreeMap<String, u32>,
    evacuators: BTreeMap<String, u32>,
    blocked: BTreeMap<String, u32>,
}

impl Counts {
    fn of<'a>(records: impl Iterator<Item = &'a Record>) -> Self {
        let mut counts = Self::default();
        let add = |to: &mut BTreeMap<String, u32>, name: &str| {
            if let Some(count) = to.get_mut(name) {
                *count += 1;
            } else {
                let name = if to.len() < MOST_NAMES { name } else { OTHERS };
                *to.entry(name.to_owned()).or_default() += 1;
            }
        };
        for record in records {
            add(&mut counts.active, record.active.as_deref().unwrap_or(NO_CLASS));
            record.instigators().for_each(|name| add(&mut counts.instigators, name));
            record.evacuators.iter().for_each(|e| add(&mut counts.evacuators, &e.evacuator_class));
            if let Some(reason) = record.blocked_by() {
                add(&mut counts.blocked, reason);
            }
        }
        counts
    }
}

impl Collector for Shown {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        // Those who stand by have nothing to show.
        let Some(index) = lock(&self.0).upgrade() else { return Ok(()) };
        let counts = Counts::of(lock(&index).records());
        let families = [
            ("active_evacuator", "Evacuations by the evacuator in charge", "class", counts.active),
            ("active_instigator", "Evacuations by who wants them", "instigator", counts.instigators),
            (
                "pod_evacuators",
                "Evacuations by the evacuators that their pods have",
                "class",
                counts.evacuators,
            ),
            ("blocked_pods", "Pods that cannot leave by reason", "reason", counts.blocked),
        ];
        for (name, help, label, counts) in families {
            let name = format!("evacuation_controller_{name}");
            let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?;
            for (value, count) in counts {
                ConstGauge::new(i64::from(count)).encode(family.encode_family(&[(label, value)])?)?;
            }
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::record;

    #[test]
    fn what_is_there_is_counted_by_class_instigator_and_reason() {
        let all = haulout_service_runtime::metrics::Metrics::new("test", "0");
        let metrics = Metrics::new(&all);
        let index = Arc::new(Mutex::new(Index::default()));
        metrics.show(&index);
        for n in 0..3 {
            lock(&index).apply(record(n));
        }
        metrics.ended(&record(9), End::Evacuated, Duration::from_secs(3));
        metrics.eviction(&Verdict::Evicted);
        let text = all.encode().unwrap();
        for line in [
            "evacuation_controller_active_evacuator{class=\"none\"} 3",
            "evacuation_controller_active_instigator{instigator=\"nodemaintenance.k8s.io\"} 3",
            "evacuation_controller_evictions_total{result=\"Evicted\"} 1",
            "evacuation_controller_evacuation_duration_seconds_count{class=\"none\",outcome=\"evacuated\"} 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        drop(index);
        assert!(!all.encode().unwrap().contains("active_evacuator{"), "a standby shows nothing");
    }

    #[test]
    fn no_label_has_more_values_than_people_can_read() {
        let records: Vec<_> = (0..1000)
            .map(|n| {
                let mut record = record(n);
                record.active = Some(format!("class-{n}.example.com").into());
                record
            })
            .collect();
        let counts = Counts::of(records.iter());
        assert_eq!(counts.active.len(), MOST_NAMES + 1);
        assert_eq!(counts.active.values().sum::<u32>(), 1000);
        let mut names = Names::default();
        let labels: std::collections::BTreeSet<_> =
            (0..1000).map(|n| names.bounded(&n.to_string())).collect();
        assert_eq!(labels.len(), MOST_NAMES + 1);
    }
}

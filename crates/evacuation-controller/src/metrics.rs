//! The metrics of the evacuation controller. No label contains an object name, and every label has a bounded number of
//! values.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Weak};

use haulout_api_types::names::{class, instigator, reason};
use haulout_service_runtime::clock::Clock;
use haulout_service_runtime::eviction::Answer;
use haulout_service_runtime::metrics::LabelValues;
use jiff::Timestamp;
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Unit;

use crate::decide::{End, is_evicting};
use crate::record::Record;
use crate::state::State;

/// The class while no evacuator is active: the pod is being evicted.
const NO_CLASS: &str = "none";
/// Classes and instigators that always have their own label value.
const OUR_CLASSES: &[&str] = &[NO_CLASS, class::DEPLOYMENT, class::STATEFUL_SET, class::DAEMON_SET];
const OUR_INSTIGATORS: &[&str] =
    &[instigator::NODE_MAINTENANCE, instigator::TAINT_MANAGER, instigator::WORKLOAD_EVACUATOR];

/// Histogram buckets from one second to eight hours.
const DURATIONS: [u16; 15] = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 28_800];

/// The metrics of this service. Clones share their values.
#[derive(Clone, Debug)]
pub struct Metrics {
    evictions: Family<[(&'static str, &'static str); 1], Counter>,
    durations: Family<[(&'static str, String); 2], Histogram>,
    gauges: Gauges,
}

impl Metrics {
    /// Registers the metrics.
    pub fn new(all: &haulout_service_runtime::metrics::Metrics) -> Self {
        let gauges = Gauges::default();
        all.register(|registry| registry.register_collector(Box::new(gauges.clone())));
        Self {
            evictions: all.add("evacuation_controller_evictions", "Eviction API calls, by result"),
            durations: all.add_seconds(
                "haulout_evacuation_duration",
                "Time from the creation of an Evacuation to its end, by the evacuator that was active at the end and outcome",
                Family::new_with_constructor(|| Histogram::new(DURATIONS.map(f64::from))),
            ),
            gauges,
        }
    }

    /// Exports gauges from this state until the returned value is dropped, at the end of the term.
    #[must_use]
    pub fn export_gauges(&self, state: &Arc<Mutex<State>>, clock: Clock) -> Arc<GaugeSource> {
        let source = Arc::new((Arc::clone(state), clock));
        *self.gauges.source.lock() = Arc::downgrade(&source);
        source
    }

    /// Counts an Eviction API call.
    pub fn eviction(&self, answer: &Answer) {
        let result = match answer {
            Answer::Evicted => "Evicted",
            Answer::Gone => "Gone",
            Answer::Failed(failure) => failure.reason,
        };
        self.evictions.get_or_create(&[("result", result)]).inc();
    }

    /// Counts an evacuation that has ended. `unserved` is the time since when the service behind its active evacuator has had
    /// no leader.
    pub fn ended(&self, record: &Record, unserved: Option<Timestamp>, end: End, now: Timestamp) {
        let class = self.gauges.labels.classes.bounded(class_of(record, unserved, now));
        let outcome = match end {
            End::Evicted => "evicted",
            End::Evacuated => "evacuated",
            End::Cancelled => "cancelled",
        };
        let duration = now.duration_since(record.created).as_secs_f64().max(0.0);
        let labels = [("class", class), ("outcome", outcome.to_owned())];
        self.durations.get_or_create(&labels).observe(duration);
    }
}

/// The active class. `status.activeEvacuatorClass` keeps the last one while the pod is being evicted, because it may
/// still report.
fn class_of(record: &Record, unserved: Option<Timestamp>, now: Timestamp) -> &str {
    record.active.as_deref().filter(|_| !is_evicting(record, unserved, now)).unwrap_or(NO_CLASS)
}

/// The label values that users choose.
#[derive(Clone, Debug)]
struct Labels {
    classes: LabelValues,
    instigators: LabelValues,
}

impl Default for Labels {
    fn default() -> Self {
        Self { classes: LabelValues::new(OUR_CLASSES), instigators: LabelValues::new(OUR_INSTIGATORS) }
    }
}

/// Computes gauges from the leader's state when metrics are scraped.
#[derive(Clone, Debug, Default)]
struct Gauges {
    source: Arc<Mutex<Weak<GaugeSource>>>,
    labels: Labels,
}

/// The state of the leader, and its clock.
pub type GaugeSource = (Arc<Mutex<State>>, Clock);

type Numbers = BTreeMap<String, i64>;

#[derive(Debug, Default)]
struct Counts {
    active: Numbers,
    /// The age of the oldest Evacuation, in seconds.
    oldest: Numbers,
    instigators: Numbers,
    evacuators: Numbers,
    blocked: Numbers,
}

impl Counts {
    fn of(state: &State, labels: &Labels, now: Timestamp) -> Self {
        let mut counts = Self::default();
        for record in state.records() {
            let unserved = state.unserved(record);
            let class = labels.classes.bounded(class_of(record, unserved, now));
            *counts.active.entry(class.clone()).or_default() += 1;
            let oldest = counts.oldest.entry(class).or_default();
            *oldest = now.duration_since(record.created).as_secs().max(*oldest);
            for name in record.instigators() {
                *counts.instigators.entry(labels.instigators.bounded(name)).or_default() += 1;
            }
            // Other programs may set the condition with any reason.
            if let Some(reason) = record.blocked_by() {
                *counts.blocked.entry(reason::known(reason).to_owned()).or_default() += 1;
            }
        }
        for (class, pods) in &state.pod_classes {
            *counts.evacuators.entry(labels.classes.bounded(class)).or_default() += i64::from(*pods);
        }
        counts
    }
}

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let Some(source) = self.source.lock().upgrade() else { return Ok(()) };
        let (state, clock) = &*source;
        let counts = Counts::of(&state.lock(), &self.labels, clock.now());
        let families = [
            (
                "evacuation_controller_active_evacuator",
                "Evacuations, by active evacuator",
                None,
                "class",
                counts.active,
            ),
            (
                "haulout_evacuation_oldest_age",
                "Age of the oldest Evacuation, by active evacuator",
                Some(Unit::Seconds),
                "class",
                counts.oldest,
            ),
            (
                "evacuation_controller_active_instigator",
                "Evacuations, by instigator",
                None,
                "instigator",
                counts.instigators,
            ),
            (
                "evacuation_controller_pod_evacuators",
                "Pods by the evacuators in their annotations, with or without an Evacuation",
                None,
                "class",
                counts.evacuators,
            ),
            (
                "haulout_evacuation_blocked_pods",
                "Pods that cannot leave, by reason",
                None,
                "reason",
                counts.blocked,
            ),
        ];
        for (name, help, unit, label, counts) in families {
            let mut family = encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
            for (value, count) in counts {
                ConstGauge::new(count).encode(family.encode_family(&[(label, value)])?)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use haulout_api_types::instigators;
    use haulout_service_runtime::metrics::MAX_LABEL_VALUES;
    use haulout_service_runtime::pods::{Change, PodIndex};
    use serde_json::json;

    use super::*;
    use crate::testing::{at, blocked, evacuators, pod_with, record};

    fn state_with(records: impl IntoIterator<Item = Record>) -> Arc<Mutex<State>> {
        let mut state = State::default();
        for record in records {
            state.apply(record);
        }
        Arc::new(Mutex::new(state))
    }

    fn assert_contains(text: &str, lines: &[&str]) {
        for line in lines {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn gauges_are_exported_only_while_leading() {
        let all = haulout_service_runtime::metrics::Metrics::new("test", "0");
        let metrics = Metrics::new(&all);
        let state = state_with((0..3).map(record));
        let exported = metrics.export_gauges(&state, Clock::default());
        let text = all.encode().unwrap();
        assert_contains(
            &text,
            &[
                "evacuation_controller_active_evacuator{class=\"none\"} 3",
                "evacuation_controller_active_instigator{instigator=\"nodemaintenance.k8s.io\"} 3",
                "haulout_evacuation_oldest_age_seconds{class=\"none\"} ",
            ],
        );
        drop(exported);
        assert!(!all.encode().unwrap().contains("evacuator{"), "the term has ended");
    }

    #[test]
    fn evictions_and_ends_are_counted_by_class_and_outcome() {
        let all = haulout_service_runtime::metrics::Metrics::new("test", "0");
        let metrics = Metrics::new(&all);
        let with_a = Record { evacuators: evacuators(&["a"]), active: Some("a".into()), ..record(9) };
        metrics.ended(&with_a, None, End::Evacuated, at(3));
        metrics.ended(&with_a, None, End::Evicted, at(601));
        metrics.ended(&record(9), None, End::Cancelled, at(3));
        metrics.eviction(&Answer::Evicted);
        let name = "haulout_evacuation_duration_seconds_count";
        assert_contains(
            &all.encode().unwrap(),
            &[
                "evacuation_controller_evictions_total{result=\"Evicted\"} 1",
                &format!("{name}{{class=\"a\",outcome=\"evacuated\"}} 1"),
                &format!("{name}{{class=\"none\",outcome=\"evicted\"}} 1"),
                &format!("{name}{{class=\"none\",outcome=\"cancelled\"}} 1"),
            ],
        );
    }

    #[test]
    fn class_is_none_while_evicting_and_oldest_age_is_exported() {
        let with_a = |n: u32, created: i64| Record {
            evacuators: evacuators(&["a"]),
            active: Some("a".into()),
            created: at(created),
            ..record(n)
        };
        let reporting = |n, created, progress| Record { progress: Some(at(progress)), ..with_a(n, created) };
        let done = Record { completed: true, ..with_a(4, 900) };
        let state = state_with([with_a(1, 0), reporting(2, 100, 950), reporting(3, 500, 990), done]);
        let counts = Counts::of(&state.lock(), &Labels::default(), at(1000));
        let numbers =
            |all: &[(&str, i64)]| all.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect::<Numbers>();
        assert_eq!(counts.active, numbers(&[("a", 2), ("none", 2)]), "one has timed out, one has completed");
        assert_eq!(counts.oldest, numbers(&[("a", 900), ("none", 1000)]));
    }

    #[test]
    fn pods_are_counted_by_class_without_an_evacuation() {
        let annotated = |n: u32, classes: &[&str]| {
            let annotations: serde_json::Map<_, _> = classes
                .iter()
                .map(|class| (format!("evacuation.coordination.k8s.io/priority_{class}"), json!("5")))
                .collect();
            Arc::new(pod_with(n, &[("/metadata/annotations", annotations.into())]))
        };
        let mut state = State::default();
        let mut change = |old: Option<&Arc<_>>, new: Option<&Arc<_>>| {
            state.apply_pod(&Change { old: old.cloned(), new: new.cloned() }, &PodIndex::default());
            Counts::of(&state, &Labels::default(), at(0)).evacuators.into_iter().collect::<Vec<_>>()
        };
        let (one, two) =
            (annotated(1, &["a.example.com"]), annotated(2, &["a.example.com", "b.example.com"]));
        let bare = annotated(2, &[]);
        let [a, b] = ["a.example.com", "b.example.com"].map(ToOwned::to_owned);
        assert_eq!(change(None, Some(&one)), [(a.clone(), 1)]);
        assert_eq!(change(None, Some(&two)), [(a.clone(), 2), (b, 1)]);
        assert_eq!(change(Some(&two), Some(&bare)), [(a, 1)]);
        assert_eq!(change(Some(&one), None), []);
    }

    #[test]
    fn label_values_are_bounded() {
        let now = Clock::default().now();
        let records = (0..1000).map(|n| {
            let class = format!("class-{n}.example.com");
            let finalizer = instigators::finalizer(&format!("instigator-{n}.example.com")).into();
            let blocked = Some(blocked(&format!("Reason{n}")));
            let (evacuators, active) = (evacuators(&[&class]), Some(class.into()));
            let (finalizers, progress) = (Box::new([finalizer]), Some(now));
            Record { finalizers, evacuators, active, progress, blocked, ..record(n) }
        });
        let state = state_with(records);
        state.lock().pod_classes = (0..1000).map(|n| (format!("class-{n}.example.com"), 1)).collect();
        let all = haulout_service_runtime::metrics::Metrics::new("test", "0");
        let metrics = Metrics::new(&all);
        state.lock().records().for_each(|record| metrics.ended(record, None, End::Evacuated, now));
        let exported = metrics.export_gauges(&state, Clock::default());
        let text = all.encode().unwrap();
        for name in [
            "haulout_evacuation_duration_seconds_count",
            "evacuation_controller_active_evacuator",
            "haulout_evacuation_oldest_age_seconds",
            "evacuation_controller_active_instigator",
            "evacuation_controller_pod_evacuators",
        ] {
            let series = text.matches(&format!("\n{name}{{")).count();
            assert!((2..=MAX_LABEL_VALUES + 2).contains(&series), "{name} has {series} series");
        }
        assert_contains(&text, &["haulout_evacuation_blocked_pods{reason=\"Other\"} 1000"]);
        // Other classes and a new term.
        let built_in = Record { active: Some(class::DEPLOYMENT.into()), progress: Some(now), ..record(2000) };
        state.lock().apply(Record { evacuators: evacuators(&[class::DEPLOYMENT]), ..built_in });
        drop(exported);
        let _exported = metrics.export_gauges(&state, Clock::default());
        let again = all.encode().unwrap();
        let values = |text: &str| {
            let lines = text.lines().filter(|line| line.starts_with("evacuation_controller_pod_evacuators{"));
            lines.map(ToOwned::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(values(&text), values(&again), "values keep their series");
        let built_in = format!("evacuation_controller_active_evacuator{{class=\"{}\"}}", class::DEPLOYMENT);
        assert_contains(&again, &[&built_in]);
    }
}

//! The metrics of every service: process, build, API requests, work queues, watches, leadership. They have the names of
//! client-go's metrics where those exist, so that existing dashboards work.

mod label_values;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry, Unit};
use tokio::task::Id;

pub use self::label_values::{LabelValues, MAX_LABEL_VALUES, OTHER_VALUES};

/// Buckets from a millisecond to a minute and a half.
#[derive(Clone, Copy, Debug)]
struct Seconds;

impl MetricConstructor<Histogram> for Seconds {
    fn new_metric(&self) -> Histogram {
        Histogram::new(exponential_buckets(0.001, 2.0, 17))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    verb: &'static str,
    code: String,
}

/// A label with its value.
type Label = [(&'static str, &'static str); 1];

/// All metrics of a service. Clones share the metrics.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
    requests: Family<RequestLabels, Counter>,
    durations: Family<Label, Histogram, Seconds>,
    watch_restarts: Family<Label, Counter>,
    leading: Family<Label, Gauge>,
    events_dropped: Counter,
    queues: Queues,
}

#[derive(Clone, Debug)]
struct Queues {
    depth: Family<Label, Gauge>,
    adds: Family<Label, Counter>,
    retries: Family<Label, Counter>,
    waited: Family<Label, Histogram, Seconds>,
    worked: Family<Label, Histogram, Seconds>,
    unfinished: Unfinished,
}

/// The start time of each running task of a queue.
type Running = Arc<Mutex<HashMap<Id, Instant>>>;

impl Metrics {
    /// The metrics of this service in this version.
    pub fn new(service: &'static str, version: &'static str) -> Self {
        let mut registry = Registry::default();
        let build = Info::new(vec![("service", service), ("version", version)]);
        registry.register("haulout_build", "Service and version", build);
        registry.register_collector(Box::new(Process { started: SystemTime::now() }));
        let all = &mut registry;
        let requests =
            add(all, "rest_client_requests", "API requests by verb and status code", Family::default());
        let durations = add_seconds(
            all,
            "rest_client_request_duration",
            "Time until the response of the API server started",
            seconds(),
        );
        let watch_restarts =
            add(all, "haulout_watch_restarts", "Watches that ended and were restarted", Family::default());
        let leading =
            add(all, "leader_election_master_status", "1 while this replica leads", Family::default());
        let events_dropped =
            add(all, "haulout_events_dropped", "Events that were not written", Counter::default());
        let queues = Queues {
            depth: add(all, "workqueue_depth", "Keys that wait for a worker", Family::default()),
            adds: add(all, "workqueue_adds", "Keys added to the queue", Family::default()),
            retries: add(all, "workqueue_retries", "Failed keys that are retried", Family::default()),
            waited: add_seconds(
                all,
                "workqueue_queue_duration",
                "Time that keys waited for a worker",
                seconds(),
            ),
            worked: add_seconds(all, "workqueue_work_duration", "Time that processing a key took", seconds()),
            unfinished: Unfinished::default(),
        };
        registry.register_collector(Box::new(queues.unfinished.clone()));
        let registry = Arc::new(Mutex::new(registry));
        Self { registry, requests, durations, watch_restarts, leading, events_dropped, queues }
    }

    /// Adds a metric of a service. Call this once at startup, not in each term of leadership, because Prometheus
    /// rejects duplicate metrics.
    pub fn add<M: Metric + Clone + Default>(&self, name: &str, help: &str) -> M {
        add(&mut self.registry.lock(), name, help, M::default())
    }

    /// Adds a metric for durations. The name gets the suffix `_seconds`.
    pub fn add_seconds<M: Metric + Clone>(&self, name: &str, help: &str, metric: M) -> M {
        add_seconds(&mut self.registry.lock(), name, help, metric)
    }

    /// Adds several metrics at once; see [`Metrics::add`].
    pub fn register(&self, add: impl FnOnce(&mut Registry)) {
        add(&mut self.registry.lock());
    }

    /// The metrics of the work queue with this name. Queues with the same name share the metrics.
    pub fn queue(&self, name: &'static str) -> QueueMetrics {
        let label = [("name", name)];
        let running = Arc::clone(self.queues.unfinished.0.lock().entry(name).or_default());
        QueueMetrics {
            name,
            depth: self.queues.depth.get_or_create(&label).clone(),
            adds: self.queues.adds.get_or_create(&label).clone(),
            retries: self.queues.retries.get_or_create(&label).clone(),
            waited: self.queues.waited.get_or_create(&label).clone(),
            worked: self.queues.worked.get_or_create(&label).clone(),
            running,
        }
    }

    /// Counts a request and its status code; `None` if there was no answer.
    pub(crate) fn request(&self, verb: &'static str, code: Option<u16>, took: Duration) {
        let code = code.map_or_else(|| "<error>".to_owned(), |code| code.to_string());
        self.requests.get_or_create(&RequestLabels { verb, code }).inc();
        self.durations.get_or_create(&[("verb", verb)]).observe(took.as_secs_f64());
    }

    /// Counts a restart of a watch of this resource.
    pub fn watch_restarted(&self, resource: &'static str) {
        self.watch_restarts.get_or_create(&[("resource", resource)]).inc();
    }

    /// Number of watches of this resource that have ended, for any reason.
    pub fn watch_restarts(&self, resource: &'static str) -> u64 {
        self.watch_restarts.get_or_create(&[("resource", resource)]).get()
    }

    /// Sets whether this replica is the leader.
    pub fn set_leader(&self, name: &'static str, leads: bool) {
        self.leading.get_or_create(&[("name", name)]).set(i64::from(leads));
    }

    /// Counts an event that was not written.
    pub(crate) fn event_dropped(&self) {
        self.events_dropped.inc();
    }

    /// All metrics in the text format of Prometheus.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        text::encode(&mut text, &self.registry.lock())?;
        Ok(text)
    }
}

/// The metrics of one work queue.
#[derive(Clone, Debug)]
pub struct QueueMetrics {
    /// The name of the queue.
    pub(crate) name: &'static str,
    depth: Gauge,
    adds: Counter,
    retries: Counter,
    waited: Histogram,
    worked: Histogram,
    running: Running,
}

impl QueueMetrics {
    pub(crate) fn added(&self, keys: usize) {
        self.adds.inc_by(u64::try_from(keys).unwrap_or(u64::MAX));
    }

    pub(crate) fn depth(&self, keys: usize) {
        self.depth.set(i64::try_from(keys).unwrap_or(i64::MAX));
    }

    pub(crate) fn started(&self, id: Id, waited: Duration) {
        self.waited.observe(waited.as_secs_f64());
        self.running.lock().insert(id, Instant::now());
    }

    pub(crate) fn ended(&self, id: Id, retried: bool) {
        if let Some(started_at) = self.running.lock().remove(&id) {
            self.worked.observe(started_at.elapsed().as_secs_f64());
        }
        if retried {
            self.retries.inc();
        }
    }

    pub(crate) fn aborted(&self, id: Id) {
        self.running.lock().remove(&id);
    }
}

/// The running work of all queues, collected at each scrape.
#[derive(Clone, Debug, Default)]
struct Unfinished(Arc<Mutex<BTreeMap<&'static str, Running>>>);

impl Collector for Unfinished {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let queues = self.0.lock();
        let add: fn(f64, f64) -> f64 = |all, one| all + one;
        for (name, help, combine) in [
            ("workqueue_unfinished_work", "Total time that the running reconciles have taken so far", add),
            (
                "workqueue_longest_running_processor",
                "Time that the longest running reconcile has taken so far",
                f64::max,
            ),
        ] {
            let mut metric =
                encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Gauge)?;
            for (name, running) in queues.iter() {
                let times = running
                    .lock()
                    .values()
                    .map(|started_at| started_at.elapsed().as_secs_f64())
                    .fold(0.0, combine);
                ConstGauge::new(times).encode(metric.encode_family(&[("name", *name)])?)?;
            }
        }
        Ok(())
    }
}

/// The process metrics of Prometheus' client libraries, read from `/proc` at each scrape.
#[derive(Debug)]
struct Process {
    started: SystemTime,
}

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let start = self.started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let gauges = [
            ("process_start_time", "Start time of the process", Some(Unit::Seconds), Some(start)),
            ("process_resident_memory", "Resident memory", Some(Unit::Bytes), resident_bytes()),
            ("process_open_fds", "Open files", None, open_files()),
        ];
        for (name, help, unit, value) in gauges {
            if let Some(value) = value {
                let metric = encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
                ConstGauge::new(value).encode(metric)?;
            }
        }
        let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        let seconds = Duration::try_from(cpu).unwrap_or_default().as_secs_f64();
        let metric = encoder.encode_descriptor(
            "process_cpu",
            "CPU time used",
            Some(&Unit::Seconds),
            MetricType::Counter,
        )?;
        ConstCounter::new(seconds).encode(metric)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a gauge is a float, and memory is far below 2^53")]
pub(crate) fn resident_bytes() -> Option<f64> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    let resident: u64 = pages.split_whitespace().nth(1)?.parse().ok()?;
    Some((resident * rustix::param::page_size() as u64) as f64)
}

#[expect(clippy::cast_precision_loss, reason = "a gauge is a float, and there are few files")]
fn open_files() -> Option<f64> {
    Some(std::fs::read_dir("/proc/self/fd").ok()?.count() as f64)
}

fn seconds<L: Clone + Eq + Hash>() -> Family<L, Histogram, Seconds> {
    Family::new_with_constructor(Seconds)
}

fn add<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register(name, help, metric.clone());
    metric
}

fn add_seconds<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register_with_unit(name, help, Unit::Seconds, metric.clone());
    metric
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_have_the_names_of_client_go() {
        let metrics = Metrics::new("probe", "1.2.3");
        metrics.request("patch", Some(409), Duration::from_millis(3));
        metrics.request("watch", None, Duration::from_millis(3));
        metrics.watch_restarted("pods");
        metrics.set_leader("probe", true);
        let queue = metrics.queue("probe");
        queue.added(1);
        queue.depth(7);
        let text = metrics.encode().unwrap();
        for line in [
            "haulout_build_info{service=\"probe\",version=\"1.2.3\"} 1",
            "rest_client_requests_total{verb=\"patch\",code=\"409\"} 1",
            "rest_client_requests_total{verb=\"watch\",code=\"<error>\"} 1",
            "rest_client_request_duration_seconds_count{verb=\"patch\"} 1",
            "haulout_watch_restarts_total{resource=\"pods\"} 1",
            "leader_election_master_status{name=\"probe\"} 1",
            "workqueue_adds_total{name=\"probe\"} 1",
            "workqueue_depth{name=\"probe\"} 7",
            "workqueue_retries_total{name=\"probe\"} 0",
            "workqueue_unfinished_work_seconds{name=\"probe\"} 0.0",
            "workqueue_longest_running_processor_seconds{name=\"probe\"} 0.0",
            "process_cpu_seconds_total ",
            "process_resident_memory_bytes ",
            "process_open_fds ",
            "process_start_time_seconds ",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }

    /// A leader creates its queue in each term, and Prometheus rejects duplicate series.
    #[test]
    fn recreated_queue_has_one_series() {
        let metrics = Metrics::new("probe", "1.2.3");
        let _queues = [metrics.queue("probe"), metrics.queue("probe")];
        let text = metrics.encode().unwrap();
        for name in ["workqueue_unfinished_work_seconds", "workqueue_longest_running_processor_seconds"] {
            let series = format!("{name}{{name=\"probe\"}}");
            assert_eq!(text.matches(&series).count(), 1, "{text}");
        }
    }

    /// Alerts on restarts count how often it changes.
    #[test]
    fn process_start_time_is_constant() {
        let metrics = Metrics::new("probe", "1.2.3");
        let start = || {
            let text = metrics.encode().unwrap();
            text.lines().find(|line| line.starts_with("process_start_time_seconds ")).unwrap().to_owned()
        };
        let first = start();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(first, start());
    }
}

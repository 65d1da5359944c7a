//! The process that holds the cache and measures itself.

use std::convert::Infallible;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use haulout_service_runtime::clock::Clock;
use haulout_service_runtime::metrics::Metrics;
use haulout_service_runtime::pods::{self, PodCache};
use haulout_service_runtime::queue::{Backoff, Outcome};
use haulout_service_runtime::watch::PAGE_SIZE;
use haulout_service_runtime::workers::WorkQueue;
use jiff::{SignedDuration, Timestamp};
use kube::Client;
use kube::api::ListParams;
use kube::client::Body;
use kube::core::Request;
use rustix::time::{ClockId, clock_gettime};
use tokio_util::sync::CancellationToken;

use super::super::{Results, count, median};
use crate::handle::Handle;

/// Set in the environment of the probe: the path of the cluster description.
pub(super) const ENV: &str = "HAULOUT_CACHE_PROBE";
/// Set if the probe also measures itself at rest.
pub(super) const REST_ENV: &str = "HAULOUT_CACHE_PROBE_RESTS";

pub(super) const PODS: &str = "pods";
pub(super) const RSS: &str = "rss_bytes";
pub(super) const PEAK: &str = "peak_rss_bytes";
pub(super) const LIST: &str = "list_s";
pub(super) const LIST_CPU: &str = "list_cpu_s";
pub(super) const MEMORY_CPU: &str = "memory_cpu_s";
pub(super) const DECODE_CPU: &str = "decode_cpu_s";
pub(super) const WIRE: &str = "wire_bytes_per_pod";
pub(super) const IDLE: &str = "idle_cpu_percent";

const SLEEPING_KEYS: u32 = 10_000;
/// Work that follows the first list is finished after this time.
const WARM_UP: Duration = Duration::from_secs(5);
const REST: Duration = Duration::from_secs(30);
const DECODINGS: usize = 3;

pub(super) async fn run(cluster: &Path) -> Result<Results> {
    let client = Handle::from_file(cluster)?.client().await?;
    let (begun, cpu) = (Instant::now(), processor_seconds());
    let cache = PodCache::start(client.clone(), Metrics::new("probe", "0"));
    let mut changes = cache.subscribe();
    let subscriber = tokio::spawn(async move {
        loop {
            changes.changes().await;
        }
    });
    cache.ready().await;
    let (list, list_cpu) = (begun.elapsed().as_secs_f64(), processor_seconds() - cpu);
    let stop = CancellationToken::new();
    let queue = sleeping_keys(&stop)?;
    tokio::time::sleep(WARM_UP).await;
    let held = cache.read().len();
    let mut results = vec![
        (PODS, count(held)),
        (RSS, memory("VmRSS")?),
        (PEAK, memory("VmHWM")?),
        (LIST, list),
        (LIST_CPU, list_cpu),
    ];
    if std::env::var_os(REST_ENV).is_some() {
        let (begun, cpu) = (Instant::now(), processor_seconds());
        tokio::time::sleep(REST).await;
        let share = (processor_seconds() - cpu) / begun.elapsed().as_secs_f64();
        results.push((IDLE, 100.0 * share));
    }
    stop.cancel();
    queue.await.context("stopping the queue")?;
    subscriber.abort();
    drop(cache);
    let pages = pages(&client).await?;
    let mut took_from_memory = Vec::new();
    for _ in 0..DECODINGS {
        let client = replay(pages.clone());
        let cpu = processor_seconds();
        let cache = PodCache::start(client, Metrics::new("probe", "0"));
        cache.ready().await;
        took_from_memory.push(processor_seconds() - cpu);
        anyhow::ensure!(cache.read().len() == held, "not all pods came from memory");
    }
    results.push((MEMORY_CPU, median(took_from_memory)));
    let mut took = Vec::new();
    for _ in 0..DECODINGS {
        let cpu = processor_seconds();
        let decoded = pages.iter().map(|page| pods::decode_page(page)).sum::<Result<usize, _>>()?;
        took.push(processor_seconds() - cpu);
        anyhow::ensure!(decoded == held, "the API has {decoded} pods and the cache had {held}");
    }
    results.push((DECODE_CPU, median(took)));
    results.push((WIRE, count(pages.iter().map(Bytes::len).sum()) / count(held)));
    Ok(results)
}

/// A queue like that of a controller with many deadlines. No key is due during the measurement.
fn sleeping_keys(stop: &CancellationToken) -> Result<tokio::task::JoinHandle<()>> {
    let metrics = Metrics::new("probe", "0").queue("probe");
    let queue = WorkQueue::new(Clock::default(), Backoff::default(), metrics);
    let due = Timestamp::now().checked_add(SignedDuration::from_hours(1)).context("the time in an hour")?;
    for key in 0..SLEEPING_KEYS {
        queue.add_at(key, due + SignedDuration::from_millis(key.into()));
    }
    let stop = stop.clone();
    Ok(tokio::spawn(async move {
        queue.run(8, stop, |_| async { Ok::<_, Infallible>(Outcome::Done) }).await;
    }))
}

/// The same pages as the cache requests.
async fn pages(client: &Client) -> Result<Vec<Bytes>> {
    let mut params = ListParams::default().limit(PAGE_SIZE);
    let mut pages = Vec::new();
    loop {
        let request = Request::new("/api/v1/pods").list(&params).context("making a request")?;
        let page = client.request_text(request).await.context("listing pods")?;
        let next = pods::continue_token(page.as_bytes())?;
        pages.push(Bytes::from(page));
        match next {
            Some(token) => params.continue_token = Some(token),
            None => return Ok(pages),
        }
    }
}

/// A client with an in-memory API server that answers lists with these pages in order, and never answers watches.
fn replay(pages: Vec<Bytes>) -> Client {
    let pages = Arc::new(Mutex::new(pages.into_iter()));
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let watches = request.uri().query().is_some_and(|query| query.contains("watch=true"));
        let page = pages.lock().unwrap_or_else(PoisonError::into_inner).next().filter(|_| !watches);
        async move {
            match page {
                Some(page) => Ok::<_, Infallible>(http::Response::new(Body::from(page))),
                None => std::future::pending().await,
            }
        }
    });
    Client::new(service, "default")
}

/// Processor time of this process so far, user and system.
#[expect(clippy::cast_precision_loss, reason = "a process of an hour has few enough nanoseconds")]
fn processor_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// A line of this process's `/proc` status, in bytes.
fn memory(line: &str) -> Result<f64> {
    let status = fs::read_to_string("/proc/self/status").context("reading this process's status")?;
    let value = status.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(':'));
    let kilobytes = value.and_then(|value| value.split_whitespace().next()?.parse::<f64>().ok());
    Ok(1024.0 * kilobytes.with_context(|| format!("there is no {line} in this process's status"))?)
}

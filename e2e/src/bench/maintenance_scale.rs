//! What one event costs the maintenance controller, depending on the number of nodes.

mod cluster;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use self::cluster::BenchEnv;
use super::{Progress, Results, count, stop};
use crate::service::Service;

const SIZES: [usize; 3] = [100, 300, 1_000];
const PODS_PER_NODE: usize = 30;
const MAINTENANCES: usize = 50;
const EVENTS: usize = 300;
const CONTROLLER: &str = "maintenance-controller";
/// Interval at which the controller's processor time is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Idle time after which the controller has finished with an event.
const EVENT_IDLE: Duration = Duration::from_millis(60);
/// Idle time after which the controller has finished its start. It delays work by at most one second.
const START_IDLE: Duration = Duration::from_secs(3);
const LIMIT: Duration = Duration::from_secs(600);

/// The nodes and pods exist in the API only; nothing runs them. Each of the 50 maintenances is in stage Drain and
/// selects half of the nodes at random, so that each node has about 25 maintenances. Their plans have four entries,
/// and the first selects a tenth of the pods. Those pods have Evacuations, but no evacuation controller runs: nothing
/// happens except what the benchmark does. It waits until the controller is idle, triggers one event, and waits
/// again.
///
/// - `event_p50_ms_N`, `event_p99_ms_N`: with N nodes, the processor time of the controller's whole process from one
///   event until it is idle: reading the event, updating plans, writing nodes, Evacuations and statuses, and reading
///   the answers and the resulting watch events. A status is written at most once per second. Work that earlier
///   events delayed is counted for the event during which it happens. There are 300 events of six kinds in turn: a
///   pod is changed, deleted or created; a node reports, is uncordoned, or gets a label that other maintenances
///   select. No event lets a maintenance start its next entry, because that concerns all its nodes.
/// - `event_growth`: `event_p99_ms_1000` ÷ `event_p99_ms_100`.
/// - `start_s`, `start_cpu_s`: with 1,000 nodes, from the start of the process until it is idle, minus the idle time,
///   and its processor time for that: all nodes are annotated and all Evacuations created.
/// - `rss_mib`: resident memory with 1,000 nodes after all events.
pub(super) async fn run(progress: Progress) -> Result<Results> {
    let mut env = BenchEnv::new(progress).await?;
    let mut results = Vec::new();
    let mut p99s = Vec::new();
    for (size, names) in SIZES.into_iter().zip(NAMES) {
        progress(&format!("{size} nodes: writing them"));
        env.grow(size).await?;
        progress(&format!("{size} nodes: start"));
        let begun = Instant::now();
        let controller = Service::start(&env.cluster, CONTROLLER, &[]).await?;
        controller.leads().await?;
        let cpu = rest(&controller, START_IDLE).await?;
        let start = begun.elapsed().saturating_sub(START_IDLE);
        env.ensure_drains(&controller, size).await?;
        progress(&format!("{size} nodes: {EVENTS} events"));
        let mut events = Vec::with_capacity(EVENTS);
        for number in 0..EVENTS {
            let before = rest(&controller, EVENT_IDLE).await?;
            env.event(number).await?;
            tokio::time::sleep(EVENT_IDLE).await;
            events.push(rest(&controller, EVENT_IDLE).await?.saturating_sub(before).as_secs_f64() * 1000.0);
        }
        events.sort_by(f64::total_cmp);
        let nth = |percent: usize| events.get((events.len() - 1) * percent / 100).copied();
        let (p50, p99) = (nth(50).context("no events")?, nth(99).context("no events")?);
        let [p50_name, p99_name] = names;
        results.extend([(p50_name, p50), (p99_name, p99)]);
        p99s.push(p99);
        if Some(&size) == SIZES.last() {
            results.push(("start_s", start.as_secs_f64()));
            results.push(("start_cpu_s", cpu.as_secs_f64()));
            results.push(("rss_mib", controller.resident_bytes()? / 1024.0 / 1024.0));
        }
        stop(controller).await?;
    }
    env.cluster.shutdown().await;
    let growth = p99s.last().zip(p99s.first()).map(|(last, first)| last / first);
    results.push(("event_growth", growth.context("no sizes")?));
    results.push(("pods", count(SIZES.iter().max().copied().unwrap_or_default() * PODS_PER_NODE)));
    Ok(results)
}

const NAMES: [[&str; 2]; 3] = [
    ["event_p50_ms_100", "event_p99_ms_100"],
    ["event_p50_ms_300", "event_p99_ms_300"],
    ["event_p50_ms_1000", "event_p99_ms_1000"],
];

/// Waits until a service has been nearly idle for this time. Returns the processor time that it has used. It always
/// renews its Lease.
async fn rest(service: &Service, quiet: Duration) -> Result<Duration> {
    let begun = Instant::now();
    let (mut used, mut since) = (service.processor_time()?, Instant::now());
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let now = service.processor_time()?;
        if now.saturating_sub(used) > quiet / 100 {
            since = Instant::now();
            used = now;
        } else if since.elapsed() >= quiet {
            return Ok(now);
        }
        ensure!(begun.elapsed() < LIMIT, "the controller does not become idle");
    }
}

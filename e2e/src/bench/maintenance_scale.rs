//! What one event costs the maintenance controller, by the number of nodes.

mod cluster;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use self::cluster::World;
use super::{Progress, Results, count, stop};
use crate::service::Service;

const SIZES: [usize; 3] = [100, 300, 1_000];
const PODS_PER_NODE: usize = 30;
const MAINTENANCES: usize = 50;
const EVENTS: usize = 300;
const CONTROLLER: &str = "maintenance-controller";
/// How often it is looked whether the controller is still at work.
const LOOK: Duration = Duration::from_millis(5);
/// Without work for so long after an event, it is done with it.
const DONE: Duration = Duration::from_millis(60);
/// Without work for so long after its start, it is done with that: what it puts off, it puts off by a second.
const SETTLED: Duration = Duration::from_secs(3);
const LIMIT: Duration = Duration::from_secs(600);

/// The nodes and pods are in the API, and nobody runs them. Each of the 50 maintenances is in stage Drain and selects
/// half of the nodes at random, so that each node has about 25 of them; their plans have four entries, of which the
/// first selects a tenth of the pods. Those have Evacuations, which nobody follows: nothing happens but what the
/// benchmark does. It waits until the controller has come to rest, makes one event, and waits again.
///
/// - `event_p50_ms_N`, `event_p99_ms_N`: with N nodes, the processor time of the controller's whole process from one
///   event to rest: reading it, planning anew whatever follows from it, asking for nodes, Evacuations and statuses to
///   be written, and reading the answers and the watch events of that. A status is written once a second at most; what
///   was put off by earlier events counts for the one that is measured when it is done. There are 300 events, of six
///   kinds in turn: a pod is changed, deleted or created; a node reports, is uncordoned by somebody, or gets a label
///   that other maintenances select. None of them lets a maintenance go on to its next entry: that concerns all its
///   nodes, not one.
/// - `event_growth`: `event_p99_ms_1000` ÷ `event_p99_ms_100`.
/// - `start_s`, `start_cpu_s`: with 1,000 nodes, from the start of the process until it has come to rest, less the
///   time in which it is seen to rest, and its processor time for that: all nodes are marked and all Evacuations made.
/// - `rss_mib`: resident memory with 1,000 nodes after all events.
pub(super) async fn run(progress: Progress) -> Result<Results> {
    let mut world = World::new(progress).await?;
    let mut results = Vec::new();
    let mut p99s = Vec::new();
    for (size, names) in SIZES.into_iter().zip(NAMES) {
        progress(&format!("{size} nodes: writing them"));
        world.grow(size).await?;
        progress(&format!("{size} nodes: start"));
        let begun = Instant::now();
        let controller = Service::start(&world.cluster, CONTROLLER, &[]).await?;
        controller.leads().await?;
        let cpu = rest(&controller, SETTLED).await?;
        let start = begun.elapsed().saturating_sub(SETTLED);
        world.ensure_drains(&controller, size).await?;
        progress(&format!("{size} nodes: {EVENTS} events"));
        let mut events = Vec::with_capacity(EVENTS);
        for number in 0..EVENTS {
            let before = rest(&controller, DONE).await?;
            world.event(number).await?;
            tokio::time::sleep(DONE).await;
            events.push(rest(&controller, DONE).await?.saturating_sub(before).as_secs_f64() * 1000.0);
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
    world.cluster.shutdown().await;
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

/// Waits until a service has next to nothing done for so long; the processor time that it has used by then. It renews
/// its Lease all the time.
async fn rest(service: &Service, quiet: Duration) -> Result<Duration> {
    let begun = Instant::now();
    let (mut used, mut since) = (service.processor_time()?, Instant::now());
    loop {
        tokio::time::sleep(LOOK).await;
        let now = service.processor_time()?;
        if now.saturating_sub(used) > quiet / 100 {
            since = Instant::now();
            used = now;
        } else if since.elapsed() >= quiet {
            return Ok(now);
        }
        ensure!(begun.elapsed() < LIMIT, "it never comes to rest");
    }
}

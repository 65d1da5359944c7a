//! What 20,000 blocked Evacuations cost: at the start and at rest.

mod blocked;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use jiff::{SignedDuration, Timestamp};

use self::blocked::{BLOCKED, BlockedPods};
use super::{Progress, Results, count, median, stop};
use crate::cluster::{Cluster, Component};
use crate::requests::{Request, Requests};
use crate::service::{NAMESPACE, Service};
use crate::wait;

const FEW: usize = 5_000;
/// Times and sizes at the start are medians of this many starts.
const ROUNDS: usize = 3;
const CONTROLLER: &str = "evacuation-controller";
/// Work that follows the start is finished after this time.
const WARM_UP: Duration = Duration::from_secs(10);
const REST: Duration = Duration::from_secs(60);
const LIMIT: Duration = Duration::from_secs(300);

/// There are 20,000 pods in 100 namespaces, covered by 1,000 budgets that allow no disruption, and one Evacuation per
/// pod. The Eviction API has rejected each of them twelve times: the next attempt is due 11 to 15 minutes after the
/// last. They are copies of one Evacuation that the controller itself reported as blocked.
///
/// - `start_s`: from the start of the controller's process until it leads, its caches are synced and it has
///   reconciled every Evacuation. `start_cpu_s`: its processor time for that.
/// - `start_evictions`: eviction attempts until then and in the next ten seconds. None is due.
/// - `bytes_per_evacuation`: the slope of its resident memory, ten seconds after the start, between 5,000 and 20,000
///   Evacuations, with the same 20,000 pods in the cache.
/// - `idle_cpu_percent`: of one processor, and `idle_writes_per_min`: write requests without Lease renewals
///   (`idle_lease_writes_per_min`), both over one minute in which no attempt is due.
/// - `overdue_evictions_per_s`: attempts per second in the first minute after a start at which all are overdue,
///   because no controller ran for a day. `overdue_busiest_s`: the attempts in the busiest second. Evenly distributed
///   over the 15 minutes of the backoff, there would be 25 per second.
pub(super) async fn run(progress: Progress) -> Result<Results> {
    let booting = Cluster::builder().name("bench-evacuation-scale").scheduler(false).audit(true);
    let cluster = booting.progress(progress).boot().await?;
    cluster.install_chart(&[("admissionWebhook.enabled", "false")]).await?;
    let blocked = BlockedPods::create(&cluster).await?;
    // They would recalculate the budgets, and delete pods whose nodes do not exist.
    for component in [Component::ControllerManager, Component::Kwok, Component::KwokNodes] {
        cluster.stop(component).await?;
    }
    progress(&format!("writing {BLOCKED} pods and {FEW} Evacuations into etcd"));
    blocked.store_pods(&cluster).await?;
    blocked.store_evacuations(&cluster, 0..FEW, Timestamp::now()).await?;
    let few = Start::measure(&cluster, FEW).await?;
    stop(few.controller).await?;
    progress(&format!("writing {} more", BLOCKED - FEW));
    blocked.store_evacuations(&cluster, FEW..BLOCKED, Timestamp::now()).await?;
    let (mut starts, mut rest) = (Vec::new(), None);
    for round in 1..=ROUNDS {
        progress(&format!("start {round} of {ROUNDS} with {BLOCKED} Evacuations"));
        let start = Start::measure(&cluster, BLOCKED).await?;
        if round == ROUNDS {
            progress("at rest");
            rest = Some(Rest::measure(&cluster, &start.controller).await?);
        }
        stop(start.controller).await?;
        starts.push(start.figures);
    }
    let rest = rest.context("there was a round")?;
    progress("start when all are overdue");
    let yesterday = Timestamp::now() - SignedDuration::from_hours(24);
    blocked.store_evacuations(&cluster, 0..BLOCKED, yesterday).await?;
    let overdue = overdue(&cluster).await?;
    cluster.shutdown().await;
    let middle = |figure: fn(&Figures) -> f64| median(starts.iter().map(figure).collect());
    let bytes = middle(|start| start.bytes);
    let slope = (bytes - few.figures.bytes) / count(BLOCKED - FEW);
    Ok(vec![
        ("evacuations", count(BLOCKED)),
        ("idle_cpu_percent", rest.cpu_percent),
        ("idle_writes_per_min", rest.writes),
        ("idle_lease_writes_per_min", rest.lease_writes),
        ("bytes_per_evacuation", slope),
        ("rss_mib", bytes / 1024.0 / 1024.0),
        ("start_s", middle(|start| start.seconds)),
        ("start_cpu_s", middle(|start| start.cpu)),
        ("start_evictions", middle(|start| start.evictions)),
        ("overdue_evictions_per_s", count(overdue.len()) / REST.as_secs_f64()),
        ("overdue_busiest_s", busiest_second(overdue)),
    ])
}

/// A controller that has just started.
struct Start {
    controller: Service,
    figures: Figures,
}

struct Figures {
    seconds: f64,
    cpu: f64,
    evictions: f64,
    bytes: f64,
}

impl Start {
    async fn measure(cluster: &Cluster, evacuations: usize) -> Result<Self> {
        let mark = cluster.requests_mark()?;
        let begun = Instant::now();
        let controller = Service::start(cluster, CONTROLLER, &[]).await?;
        controller.leads().await?;
        wait::eventually("the controller has reconciled all Evacuations", LIMIT, async || {
            let looked = controller.metric("workqueue_work_duration_seconds_count").await?;
            let waiting = controller.metric("workqueue_depth").await?;
            Ok((looked >= count(evacuations) && waiting < 0.5).then_some(()))
        })
        .await?;
        let (seconds, cpu) = (begun.elapsed().as_secs_f64(), controller.processor_seconds()?);
        let blocked = controller.metric("haulout_evacuation_blocked_pods").await?;
        ensure!((blocked - count(evacuations)).abs() < 0.5, "{blocked} of {evacuations} are blocked");
        tokio::time::sleep(WARM_UP).await;
        let evictions = count(attempts(&cluster.requests_since(mark)?).count());
        let bytes = controller.resident_bytes()?;
        Ok(Self { controller, figures: Figures { seconds, cpu, evictions, bytes } })
    }
}

struct Rest {
    cpu_percent: f64,
    writes: f64,
    lease_writes: f64,
}

impl Rest {
    async fn measure(cluster: &Cluster, controller: &Service) -> Result<Self> {
        let mark = cluster.requests_mark()?;
        let (begun, cpu) = (Instant::now(), controller.processor_seconds()?);
        tokio::time::sleep(REST).await;
        let cpu = controller.processor_seconds()? - cpu;
        let (seconds, requests) = (begun.elapsed().as_secs_f64(), cluster.requests_since(mark)?);
        let writes = by_controller(&requests).writes();
        let is_lease = |request: &Request| request.resource == "leases";
        let per_minute = |of: &Requests| count(of.count()) * 60.0 / seconds;
        Ok(Self {
            cpu_percent: 100.0 * cpu / seconds,
            writes: per_minute(&writes.only(|request| !is_lease(request))),
            lease_writes: per_minute(&writes.only(is_lease)),
        })
    }
}

/// The times of eviction attempts in the first minute after a start.
async fn overdue(cluster: &Cluster) -> Result<Vec<Timestamp>> {
    let mark = cluster.requests_mark()?;
    let controller = Service::start(cluster, CONTROLLER, &[]).await?;
    controller.leads().await?;
    tokio::time::sleep(REST).await;
    let requests = cluster.requests_since(mark)?;
    stop(controller).await?;
    Ok(attempts(&requests).iter().map(|request| request.received).collect())
}

fn busiest_second(mut times: Vec<Timestamp>) -> f64 {
    times.sort_unstable();
    let within_one = |start: &[Timestamp]| {
        let first = start.first().copied().unwrap_or_default();
        start.iter().take_while(|time| time.duration_since(first) < SignedDuration::from_secs(1)).count()
    };
    let tails = (0..times.len()).filter_map(|start| times.get(start..));
    count(tails.map(within_one).max().unwrap_or_default())
}

fn attempts(requests: &Requests) -> Requests {
    by_controller(requests).verb("create").resource("pods", "eviction")
}

fn by_controller(requests: &Requests) -> Requests {
    requests.by_user(&format!("system:serviceaccount:{NAMESPACE}:haulout-{CONTROLLER}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busiest_second_may_start_at_any_time() {
        let at = |milliseconds| Timestamp::from_millisecond(milliseconds).unwrap();
        let times = [0, 900, 1000, 1800, 1899, 5000].map(at);
        assert!((busiest_second(times.into()) - 4.0).abs() < f64::EPSILON);
        assert!(busiest_second(Vec::new()).abs() < f64::EPSILON);
    }
}

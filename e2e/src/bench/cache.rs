//! What the slim pod cache costs with 50,000 pods on the real API server: memory, time for the first list, and
//! processor time at rest. The cache runs in its own process (`probe`), with only a subscriber and a work queue.
//! Neither this benchmark nor the creation of pods is counted.

mod fixture;
mod probe;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use super::{Progress, Results, median};
use crate::cluster::{Cluster, Component};
use crate::process::Command;

const FEW: u32 = 10_000;
const MANY: u32 = 50_000;
/// Times and processor times are medians of this many probes.
const ROUNDS: usize = 3;

/// - `bytes_per_pod`: the slope of the resident set between 10,000 and 50,000 pods, each in a new process some
///   seconds after its first list.
/// - `list_s`: from the start of the cache to the end of the first list. `list_cpu_s`: the processor time (user and
///   system, all threads) of the process during that time. Most of both is the API server's encoding, which runs on
///   the same processors, and TLS and wake-ups, because the API server sends pod by pod.
/// - `decode_ratio`: processor time of a cache for its first list when an in-memory API server replays the recorded
///   pages (`memory_cpu_s`: requests, reading, decoding, sharing, indexing) ÷ processor time of
///   `serde_json::from_slice` alone for the same bytes and the same type (`decode_cpu_s`).
/// - `idle_cpu_percent`: of one processor, over half a minute, with 50,000 pods and 10,000 sleeping keys.
pub(super) async fn run(progress: Progress) -> Result<Results> {
    if let Some(cluster) = std::env::var_os(probe::ENV) {
        return probe::run(Path::new(&cluster)).await;
    }
    let cluster = Cluster::builder()
        .name("bench-cache")
        .scheduler(false)
        .kwok(false)
        .audit(false)
        .progress(progress)
        .boot()
        .await?;
    // It would garbage-collect pods whose node or owner does not exist.
    cluster.stop(Component::ControllerManager).await?;
    progress(&format!("writing {FEW} pods into etcd"));
    let fixture = fixture::Fixture::create(&cluster).await?;
    fixture.fill(0..FEW).await?;
    let few = measure(&cluster, FEW, false).await?;
    progress(&format!("writing {} more", MANY - FEW));
    fixture.fill(FEW..MANY).await?;
    let mut many = Vec::new();
    for round in 1..=ROUNDS {
        progress(&format!("round {round} of {ROUNDS} with {MANY} pods"));
        many.push(measure(&cluster, MANY, round == 1).await?);
    }
    cluster.shutdown().await;
    let middle = |name: &str| median(many.iter().filter_map(|figures| figures.get(name).copied()).collect());
    let bytes = middle(probe::RSS) - few.get(probe::RSS).copied().unwrap_or(f64::NAN);
    Ok(vec![
        ("pods", f64::from(MANY)),
        ("wire_bytes_per_pod", middle(probe::WIRE)),
        ("bytes_per_pod", bytes / f64::from(MANY - FEW)),
        ("rss_mib", middle(probe::RSS) / 1024.0 / 1024.0),
        ("peak_rss_mib", middle(probe::PEAK) / 1024.0 / 1024.0),
        ("list_s", middle(probe::LIST)),
        ("list_cpu_s", middle(probe::LIST_CPU)),
        ("memory_cpu_s", middle(probe::MEMORY_CPU)),
        ("decode_cpu_s", middle(probe::DECODE_CPU)),
        ("decode_ratio", middle(probe::MEMORY_CPU) / middle(probe::DECODE_CPU)),
        ("idle_cpu_percent", middle(probe::IDLE)),
    ])
}

/// Runs a probe: this same program, in another role.
async fn measure(cluster: &Cluster, pods: u32, rest: bool) -> Result<BTreeMap<String, f64>> {
    #[derive(Deserialize)]
    struct Answer {
        results: BTreeMap<String, f64>,
    }

    let this = std::env::current_exe().context("finding this program")?;
    let mut command =
        Command::new(this).args(["bench", "cache", "--json"]).env(probe::ENV, cluster.description());
    if rest {
        command = command.env(probe::REST_ENV, "1");
    }
    let answer = command.output("the probe").await?.success().context("measuring the cache")?;
    let Answer { results } = serde_json::from_str(&answer).context("parsing the results of the probe")?;
    let found = results.get(probe::PODS).copied().unwrap_or_default();
    ensure!((found - f64::from(pods)).abs() < 0.5, "the cache has {found} of {pods} pods");
    Ok(results)
}

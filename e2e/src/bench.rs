//! Benchmarks. Each one boots the clusters that it needs and measures Haulout and its peers side by side in one run.
//! Figures of different runs or machines are not comparable.

mod admission;
mod baseline;
mod cache;
mod drain;
mod evacuation;
mod evacuation_scale;
mod maintenance_scale;
mod stored;
mod surge;
mod taint;

use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use haulout_api_types::Evacuation;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::Eviction;
use kube::api::{ObjectMeta, PostParams};
use kube::runtime::watcher;
use kube::{Api, Client};

use crate::requests::{Request, Requests};
use crate::service::{NAMESPACE, Service};
use crate::wait;

/// Named figures, in display order.
pub type Results = Vec<(&'static str, f64)>;

/// Receives progress messages of a benchmark.
pub type Progress = fn(&str);

/// One benchmark.
pub struct Benchmark {
    /// The name on the command line.
    pub name: &'static str,
    /// What the benchmark measures.
    pub about: &'static str,
    /// Runs the benchmark and reports progress.
    pub run: fn(Progress) -> LocalBoxFuture<'static, Result<Results>>,
}

/// All benchmarks.
pub const BENCHMARKS: &[Benchmark] = &[
    Benchmark {
        name: "admission",
        about: "what the admission webhook costs clients that create Evacuations, and what it costs itself",
        run: |progress| admission::run(progress).boxed_local(),
    },
    Benchmark {
        name: "baseline",
        about: "baseline of this machine's control plane: boot, evictions, kubectl drain",
        run: |progress| baseline::run(progress).boxed_local(),
    },
    Benchmark {
        name: "cache",
        about: "what the slim pod cache costs with 50,000 pods: memory, first list, rest",
        run: |progress| cache::run(progress).boxed_local(),
    },
    Benchmark {
        name: "drain",
        about: "how fast ten nodes with 500 pods are drained and at what cost, compared with kubectl drain and a plain loop",
        run: |progress| drain::run(progress).boxed_local(),
    },
    Benchmark {
        name: "evacuation",
        about: "how fast 2,000 pods are evacuated and at what cost, compared with plain loops and kubectl drain",
        run: |progress| evacuation::run(progress).boxed_local(),
    },
    Benchmark {
        name: "evacuation-scale",
        about: "what 20,000 blocked Evacuations cost: memory, start, rest",
        run: |progress| evacuation_scale::run(progress).boxed_local(),
    },
    Benchmark {
        name: "maintenance-scale",
        about: "what one pod or node event costs with 1,000 nodes, 30,000 pods and 50 overlapping maintenances",
        run: |progress| maintenance_scale::run(progress).boxed_local(),
    },
    Benchmark {
        name: "surge",
        about: "how long 100 Deployments with one replica and a strict budget are unavailable when their node is drained, and at what cost",
        run: |progress| surge::run(progress).boxed_local(),
    },
    Benchmark {
        name: "taint",
        about: "how fast 2,000 pods leave tainted nodes and at what cost, compared with kube-controller-manager",
        run: |progress| taint::run(progress).boxed_local(),
    },
];

/// The median. For an even number of figures, the upper of the middle two.
fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}

#[expect(clippy::cast_precision_loss, reason = "there are fewer than 2^52 of anything here")]
fn count(number: usize) -> f64 {
    number as f64
}

/// Evicts a pod with a single request.
async fn evict(pods: &Api<Pod>, name: &str) -> Result<()> {
    let eviction = Eviction {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        ..Eviction::default()
    };
    let answer = pods.create_subresource("eviction", name, &PostParams::default(), &eviction).await;
    let _: kube::core::Status = answer.with_context(|| format!("evicting pod {name}"))?;
    Ok(())
}

/// Whether a pod is ready.
fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().filter_map(|status| status.conditions.as_ref()).flatten();
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Waits until no Evacuation is left.
async fn until_no_evacuation(client: &Client, limit: Duration) -> Result<()> {
    let evacuations: Api<Evacuation> = Api::all(client.clone());
    wait::all(evacuations, watcher::Config::default(), "are gone", limit, <[_]>::is_empty).await?;
    Ok(())
}

/// The write requests of some of our services and of the webhook, for each of this many pods: all except events and
/// SubjectAccessReviews, which are reads although they are POST requests, and events.
fn writes_per_pod(requests: &Requests, services: &[&str], pods: usize) -> (f64, f64) {
    let account = |name: &&str| format!("system:serviceaccount:{NAMESPACE}:haulout-{name}");
    let accounts: Vec<_> =
        services.iter().chain(&["admission-webhook", "certificate-manager"]).map(account).collect();
    let ours = requests.writes().only(|r| accounts.contains(&r.user) && r.user_agent.starts_with("haulout-"));
    let is_event = |request: &Request| request.resource == "events";
    let asks = |request: &Request| request.resource == "subjectaccessreviews";
    let per_pod = |of: &Requests| count(of.count()) / count(pods);
    (per_pod(&ours.only(|request| !is_event(request) && !asks(request))), per_pod(&ours.only(is_event)))
}

/// Stops a service gracefully.
async fn stop(service: Service) -> Result<()> {
    const LIMIT: Duration = Duration::from_secs(10);
    let stopped = tokio::task::spawn_blocking(move || service.stop(LIMIT)).await;
    stopped.context("stopping a service")??;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_the_middle_value() {
        assert!((median(vec![3.0, 1.0, 2.0]) - 2.0).abs() < f64::EPSILON);
        assert!(median(vec![]).is_nan());
    }
}

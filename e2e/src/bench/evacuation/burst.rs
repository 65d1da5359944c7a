//! Many evacuations at once.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::runtime::watcher;

use super::super::{count, stop};
use super::{BenchEnv, CONTROLLER, INSTIGATOR_AGENT, LIMIT, NODES, evict, node};
use crate::requests::{Request, Requests};
use crate::service::NAMESPACE;
use crate::wait;

const PODS: usize = 2_000;
const IN_FLIGHT: usize = 32;
/// The number of nodes for `kubectl drain`.
const FEW_NODES: usize = 5;
/// After this time, the last events are written.
const EVENT_FLUSH: Duration = Duration::from_secs(3);

/// Figures of one burst.
pub(super) struct Burst {
    pub(super) pods_per_s: f64,
    pub(super) writes: f64,
    pub(super) events: f64,
    pub(super) reads: f64,
}

impl BenchEnv {
    /// The controller evacuates all pods.
    pub(super) async fn burst(&self) -> Result<Burst> {
        // The controller lists the pods at its start. On a slow machine, their watch events would arrive after the
        // requests.
        let pods = self.pods(PODS, NODES).await?;
        let controller = self.controller().await?;
        let mark = self.cluster.requests_mark()?;
        let begun = Instant::now();
        each(&pods, async |pod| self.ask_for(pod).await.map(drop)).await?;
        self.until_over().await?;
        let pods_per_s = rate(PODS, begun);
        self.ensure_empty().await?;
        tokio::time::sleep(EVENT_FLUSH).await;
        let requests = self.cluster.requests_since(mark)?;
        stop(controller).await?;
        let ours = ours(&requests);
        let per_pod = |of: &Requests| count(of.count()) / count(PODS);
        let is_event = |request: &Request| request.resource == "events";
        let asks = |request: &Request| request.resource == "subjectaccessreviews";
        let writes = ours.writes();
        Ok(Burst {
            pods_per_s,
            writes: per_pod(&writes.only(|request| !is_event(request) && !asks(request))),
            events: per_pod(&writes.only(is_event)),
            reads: per_pod(&ours.only(|r| matches!(r.verb.as_str(), "get" | "list") || asks(r))),
        })
    }

    /// The minimal loop that reaches the same result.
    pub(super) async fn plain_loop(&self) -> Result<f64> {
        let pods = self.pods(PODS, NODES).await?;
        let api = self.acting_pods();
        let begun = Instant::now();
        each(&pods, async |pod| {
            let evacuation = self.ask_for(pod).await?;
            evict(&api, &pod.name_any()).await?;
            self.end(&evacuation).await
        })
        .await?;
        self.until_over().await?;
        let pods_per_s = rate(PODS, begun);
        self.ensure_empty().await?;
        Ok(pods_per_s)
    }

    pub(super) async fn evictions_alone(&self) -> Result<f64> {
        let pods = self.pods(PODS, NODES).await?;
        let api = self.acting_pods();
        let begun = Instant::now();
        each(&pods, async |pod| evict(&api, &pod.name_any()).await).await?;
        let evictions_per_s = rate(PODS, begun);
        self.ensure_empty().await?;
        Ok(evictions_per_s)
    }

    pub(super) async fn kubectl_drain(&self) -> Result<f64> {
        let pods = self.pods(PODS / NODES * FEW_NODES, FEW_NODES).await?;
        let nodes: Vec<_> = (0..FEW_NODES).map(node).collect();
        let mut args = vec!["drain", "--force"];
        args.extend(nodes.iter().map(String::as_str));
        let begun = Instant::now();
        self.cluster.kubectl(&args).await?.success().context("kubectl drain")?;
        let pods_per_s = rate(pods.len(), begun);
        self.ensure_empty().await?;
        Ok(pods_per_s)
    }

    /// Waits until no Evacuation is left. Each is deleted after its pod.
    async fn until_over(&self) -> Result<()> {
        let all = watcher::Config::default();
        wait::all(self.evacuations(), all, "are gone", LIMIT, <[_]>::is_empty).await?;
        Ok(())
    }
}

/// Runs the work for all pods, with a limited number in flight.
async fn each(pods: &[Pod], work: impl AsyncFn(&Pod) -> Result<()>) -> Result<()> {
    stream::iter(pods).map(|pod| work(pod)).buffer_unordered(IN_FLIGHT).try_collect().await
}

fn rate(pods: usize, begun: Instant) -> f64 {
    count(pods) / begun.elapsed().as_secs_f64()
}

/// The requests of all clients that take part in evacuations.
fn ours(requests: &Requests) -> Requests {
    let account = |name: &str| format!("system:serviceaccount:{NAMESPACE}:haulout-{name}");
    let accounts = [account(CONTROLLER), account("admission-webhook")];
    requests.only(|r| {
        r.user_agent == INSTIGATOR_AGENT
            || (accounts.contains(&r.user) && r.user_agent.starts_with("haulout-"))
    })
}

//! Many pods at once.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use jiff::Timestamp;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use super::super::count;
use super::{MANAGER, NODES, PODS, World};
use crate::requests::{Request, Requests};
use crate::service::NAMESPACE;

const IN_FLIGHT: usize = 32;
/// When the last events have been written.
const EVENTS_SETTLED: Duration = Duration::from_secs(3);

/// Figures of one burst of ours.
pub(super) struct Burst {
    pub(super) pods_per_s: f64,
    pub(super) calls: f64,
    pub(super) events: f64,
}

impl World {
    /// Whoever runs makes so many pods leave; how many in a second.
    pub(super) async fn burst(&self, pods: usize) -> Result<f64> {
        self.pods(pods).await?;
        let begun = Instant::now();
        self.taint(0..NODES).await?;
        self.until_empty().await?;
        let pods_per_s = rate(pods, begun);
        self.untaint().await?;
        Ok(pods_per_s)
    }

    /// Ours makes all pods leave.
    pub(super) async fn our_burst(&self) -> Result<Burst> {
        let mark = self.cluster.requests_mark()?;
        let pods_per_s = self.burst(PODS).await?;
        tokio::time::sleep(EVENTS_SETTLED).await;
        let account = format!("system:serviceaccount:{NAMESPACE}:haulout-{MANAGER}");
        let ours = self.cluster.requests_since(mark)?.by_user(&account);
        let is_event = |request: &Request| request.resource == "events" && request.verb != "watch";
        let is_call = |request: &Request| {
            request.verb != "watch" && !matches!(request.resource.as_str(), "events" | "leases")
        };
        let per_pod = |of: &Requests| count(of.count()) / count(PODS);
        Ok(Burst { pods_per_s, calls: per_pod(&ours.only(is_call)), events: per_pod(&ours.only(is_event)) })
    }

    /// The least that leads to the same end.
    pub(super) async fn requests_alone(&self) -> Result<f64> {
        let pods = self.pods(PODS).await?;
        let api = self.api();
        let condition = json!({
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "DeletionByTaintManager",
            "message": "Taint manager: deleting due to NoExecute taint",
            "lastTransitionTime": Timestamp::now().to_string(),
        });
        let patch = Patch::Strategic(json!({"status": {"conditions": [condition]}}));
        let begun = Instant::now();
        let requests = stream::iter(&pods)
            .map(async |pod| {
                let name = pod.name_any();
                api.patch_status(&name, &PatchParams::default(), &patch).await.context("patching a pod")?;
                api.delete(&name, &DeleteParams::default()).await.context("deleting a pod")?;
                anyhow::Ok(())
            })
            .buffer_unordered(IN_FLIGHT)
            .try_collect::<()>();
        // The watch that sees the end costs the API server something, here as there.
        tokio::try_join!(requests, self.until_empty())?;
        Ok(rate(PODS, begun))
    }
}

fn rate(pods: usize, begun: Instant) -> f64 {
    count(pods) / begun.elapsed().as_secs_f64()
}

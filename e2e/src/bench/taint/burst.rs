//! Many pods leave at once.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, Request};
use kube::{Resource as _, ResourceExt as _};
use serde::de::IgnoredAny;
use serde_json::json;

use super::super::count;
use super::{BenchEnv, MANAGER, NODES, PODS};
use crate::requests::{self, Requests};
use crate::service::NAMESPACE;

const IN_FLIGHT: usize = 32;
/// After this time, the last events are written.
const EVENT_FLUSH: Duration = Duration::from_secs(3);

/// Figures of one burst by the taint manager.
pub(super) struct Burst {
    pub(super) pods_per_s: f64,
    pub(super) calls: f64,
    pub(super) events: f64,
}

impl BenchEnv {
    /// The running manager removes this many pods. Returns the pods per second.
    pub(super) async fn burst(&self, pods: usize) -> Result<f64> {
        self.pods(pods).await?;
        let begun = Instant::now();
        self.taint(0..NODES).await?;
        self.until_empty().await?;
        let pods_per_s = rate(pods, begun);
        self.untaint().await?;
        Ok(pods_per_s)
    }

    /// The taint manager removes all pods.
    pub(super) async fn our_burst(&self) -> Result<Burst> {
        let mark = self.cluster.requests_mark()?;
        let pods_per_s = self.burst(PODS).await?;
        tokio::time::sleep(EVENT_FLUSH).await;
        let account = format!("system:serviceaccount:{NAMESPACE}:haulout-{MANAGER}");
        let ours = self.cluster.requests_since(mark)?.by_user(&account);
        let is_event = |request: &requests::Request| request.resource == "events" && request.verb != "watch";
        let is_call = |request: &requests::Request| {
            request.verb != "watch" && !matches!(request.resource.as_str(), "events" | "leases")
        };
        let per_pod = |of: &Requests| count(of.count()) / count(PODS);
        Ok(Burst { pods_per_s, calls: per_pod(&ours.only(is_call)), events: per_pod(&ours.only(is_event)) })
    }

    /// Plain requests that reach the same result.
    pub(super) async fn requests_alone(&self) -> Result<f64> {
        let pods = self.pods(PODS).await?;
        let place =
            pods.first().map(|pod| Pod::url_path(&(), pod.namespace().as_deref())).unwrap_or_default();
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
                let request = Request::new(&place);
                let patch = request.patch_subresource("status", &name, &PatchParams::default(), &patch)?;
                self.send(patch).await.context("patching a pod")?;
                self.send(request.delete(&name, &DeleteParams::default())?).await.context("deleting a pod")
            })
            .buffer_unordered(IN_FLIGHT)
            .try_collect::<()>();
        // The watch that detects the end has a cost on the API server, in all candidates.
        tokio::try_join!(requests, self.until_empty())?;
        Ok(rate(PODS, begun))
    }

    /// Requests the smallest possible answer.
    async fn send(&self, mut request: http::Request<Vec<u8>>) -> Result<()> {
        let metadata = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
        request.headers_mut().insert(http::header::ACCEPT, http::HeaderValue::from_static(metadata));
        let IgnoredAny = self.client.request(request).await?;
        Ok(())
    }
}

fn rate(pods: usize, begun: Instant) -> f64 {
    count(pods) / begun.elapsed().as_secs_f64()
}

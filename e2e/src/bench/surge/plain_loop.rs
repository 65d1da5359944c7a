//! The minimal loop that moves pods of Deployments as the workload evacuator and the evacuation controller do.

use std::collections::HashMap;
use std::pin::pin;

use anyhow::{Context as _, Result, bail};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use haulout_api_types::former_owner::FormerOwner;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{Patch, PatchParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt as _};
use tokio::sync::watch;

use super::super::{evict, is_ready};
use super::apps::NAMESPACE;

/// What the loop waits for, for one Deployment.
#[derive(Clone, Copy, Default)]
struct Progress {
    /// Whether a pod other than the old one is ready.
    is_replaced: bool,
    /// Whether the budget allows a disruption.
    is_allowed: bool,
}

/// A pod with its Deployment.
struct Move<'a> {
    pod: &'a Pod,
    deployment: &'a Deployment,
    progress: watch::Sender<Progress>,
}

/// Moves all pods at once. `moving` may change pods, `evicting` may evict them. Deployments, budgets and the label `app` of pods
/// have the same names.
pub(super) async fn run(
    moving: &Client,
    evicting: &Client,
    pods: &[Pod],
    deployments: &[Deployment],
) -> Result<()> {
    let by_name: HashMap<_, _> = deployments.iter().map(|one| (one.name_any(), one)).collect();
    let mut moves = HashMap::new();
    for pod in pods {
        let app = pod.labels().get("app").context("a pod without label")?.as_str();
        let deployment = by_name.get(app).with_context(|| format!("no Deployment {app}"))?;
        moves.insert(app, Move { pod, deployment, progress: watch::Sender::default() });
    }
    let work = stream::iter(moves.values()).map(|one| one.run(moving, evicting));
    let work = work.buffer_unordered(moves.len()).try_collect::<()>();
    tokio::select! {
        done = work => done,
        ended = watch_progress(evicting, &moves) => bail!("the watches of the loop ended: {ended:?}"),
    }
}

impl Move<'_> {
    async fn run(&self, moving: &Client, evicting: &Client) -> Result<()> {
        let deployment = (self.deployment.name_any(), self.deployment.uid().context("no UID")?);
        let now = Timestamp::now().as_second();
        let patch = FormerOwner::move_patch(&self.pod.metadata, (&deployment.0, &deployment.1), 1, now);
        let mut patch = patch.context("the pod does not belong to a ReplicaSet")?;
        if let Some(metadata) = patch.get_mut("metadata").and_then(|metadata| metadata.as_object_mut()) {
            metadata.insert("uid".into(), self.pod.uid().into());
            metadata.insert("resourceVersion".into(), self.pod.resource_version().into());
        }
        let (name, pods): (_, Api<Pod>) = (self.pod.name_any(), Api::namespaced(moving.clone(), NAMESPACE));
        let moved = pods.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await;
        moved.with_context(|| format!("moving pod {name}"))?;
        let mut progress = self.progress.subscribe();
        let may_leave = progress.wait_for(|progress| progress.is_replaced && progress.is_allowed);
        drop(may_leave.await.context("waiting for a replacement")?);
        evict(&Api::namespaced(evicting.clone(), NAMESPACE), &name).await
    }
}

/// Watches the pods and their budgets.
async fn watch_progress(client: &Client, moves: &HashMap<&str, Move<'_>>) -> Result<()> {
    type Change = Box<dyn Fn(&Move<'_>) + Send>;
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(client.clone(), NAMESPACE);
    let pods = watcher(pods, watcher::Config::default()).default_backoff().applied_objects();
    let pods = pods.map_ok(|pod| {
        let app = pod.labels().get("app").cloned().unwrap_or_default();
        let change: Change = Box::new(move |one| {
            if pod.uid() != one.pod.uid() && is_ready(&pod) {
                one.progress.send_modify(|progress| progress.is_replaced = true);
            }
        });
        (app, change)
    });
    let budgets = watcher(budgets, watcher::Config::default()).default_backoff().applied_objects();
    let budgets = budgets.map_ok(|budget| {
        let allowed = budget.status.as_ref().is_some_and(|status| status.disruptions_allowed > 0);
        let change: Change =
            Box::new(move |one| one.progress.send_modify(|progress| progress.is_allowed = allowed));
        (budget.name_any(), change)
    });
    let mut changes = pin!(stream::select(pods, budgets));
    while let Some((app, change)) = changes.try_next().await? {
        if let Some(one) = moves.get(app.as_str()) {
            change(one);
        }
    }
    Ok(())
}

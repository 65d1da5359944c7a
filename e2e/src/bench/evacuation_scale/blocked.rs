//! A large number of pods that cannot leave, with their budgets and Evacuations.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use anyhow::{Context as _, Result};
use haulout_api_types::{Evacuation, names::condition};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;

use super::super::{stop, stored};
use super::CONTROLLER;
use crate::cluster::Cluster;
use crate::service::Service;
use crate::{objects, wait};

/// The number of pods.
pub(super) const BLOCKED: usize = 20_000;
const NAMESPACES: usize = 100;
const BUDGETS_PER_NAMESPACE: usize = 10;
const PODS_PER_BUDGET: usize = BLOCKED / NAMESPACES / BUDGETS_PER_NAMESPACE;
const NODES: usize = 1_000;
/// Enough rejections to reach the longest backoff.
const REJECTED: i32 = 12;
const LIMIT: Duration = Duration::from_secs(60);

pub(super) struct BlockedPods {
    pods: Vec<Pod>,
    /// An Evacuation that the controller has reported as blocked.
    blocked: Evacuation,
}

impl BlockedPods {
    /// Runs one pod that is covered by a budget and blocked. It is copied later.
    pub(super) async fn create(cluster: &Cluster) -> Result<Self> {
        let client = cluster.client().await?;
        let nodes: Api<Node> = Api::all(client.clone());
        nodes
            .create(&PostParams::default(), &objects::node("node-0").build())
            .await
            .context("creating a node")?;
        let pod = objects::pod("template").node("node-0").label("app", "budget-0").build();
        let template = stored::pod(&client, &pod).await?;
        let blocked = blocked(cluster, &template).await?;
        let pods = (0..BLOCKED).map(|number| {
            let budget = number / PODS_PER_BUDGET;
            let (namespace, app) = (budget / BUDGETS_PER_NAMESPACE, budget % BUDGETS_PER_NAMESPACE);
            let mut pod =
                stored::copy(&template, format!("pod-{number}"), format!("node-{}", number % NODES));
            pod.metadata.namespace = Some(format!("team-{namespace}"));
            pod.metadata.labels = Some(BTreeMap::from([("app".to_owned(), format!("budget-{app}"))]));
            pod
        });
        Ok(Self { pods: pods.collect(), blocked })
    }

    /// Writes namespaces, budgets and pods.
    pub(super) async fn store_pods(&self, cluster: &Cluster) -> Result<()> {
        let namespaces: Api<Namespace> = Api::all(cluster.client().await?);
        let mut budgets = Vec::new();
        for namespace in (0..NAMESPACES).map(|number| format!("team-{number}")) {
            let object = objects::namespace(&namespace);
            namespaces.create(&PostParams::default(), &object).await.context("creating a namespace")?;
            budgets.extend((0..BUDGETS_PER_NAMESPACE).map(|number| budget(&namespace, number)));
        }
        let etcd = cluster.etcd()?;
        stored::store(&etcd, stored::BUDGETS, &budgets).await?;
        stored::store(&etcd, stored::PODS, &self.pods).await
    }

    /// Writes the Evacuations of these pods, with a rejection by the Eviction API at this time.
    pub(super) async fn store_evacuations(
        &self,
        cluster: &Cluster,
        which: Range<usize>,
        rejected: Timestamp,
    ) -> Result<()> {
        let evacuations = self.pods.get(which).unwrap_or_default().iter().map(|pod| {
            let Evacuation { metadata, spec, .. } = stored::evacuation(pod)?;
            let mut evacuation = self.blocked.clone();
            evacuation.metadata.name = metadata.name;
            evacuation.metadata.namespace = metadata.namespace;
            // Evacuations that are written twice stay the same.
            evacuation.metadata.uid = pod.uid();
            evacuation.spec = spec;
            if let Some(status) = &mut evacuation.status {
                status.failed_eviction_counter = REJECTED;
                status.last_failed_eviction_time = Some(Time(rejected));
            }
            Ok(evacuation)
        });
        let evacuations = evacuations.collect::<Result<Vec<_>>>()?;
        stored::store(&cluster.etcd()?, stored::EVACUATIONS, &evacuations).await
    }
}

/// Lets the controller report a pod like this as blocked, and deletes everything again.
async fn blocked(cluster: &Cluster, template: &Pod) -> Result<Evacuation> {
    let client = cluster.client().await?;
    let budgets: Api<PodDisruptionBudget> = Api::default_namespaced(client.clone());
    let evacuations: Api<Evacuation> = Api::default_namespaced(client.clone());
    let pods: Api<Pod> = Api::default_namespaced(client);
    stored::store(&cluster.etcd()?, stored::PODS, std::slice::from_ref(template)).await?;
    let budget = objects::pdb("budget-0").min_available("1").build();
    budgets.create(&PostParams::default(), &budget).await.context("creating a budget")?;
    let covers = |budget: &PodDisruptionBudget| budget.status.as_ref().is_some_and(|s| s.expected_pods == 1);
    wait::present(budgets.clone(), "budget-0", "covers the pod", LIMIT, covers).await?;
    let asked_for = stored::evacuation(template)?;
    let name = evacuations.create(&PostParams::default(), &asked_for).await?.name_any();
    let controller = Service::start(cluster, CONTROLLER, &[]).await?;
    let is_blocked = |evacuation: &Evacuation| {
        let conditions = evacuation.status.iter().flat_map(|status| &status.conditions);
        conditions.into_iter().any(|found| found.type_ == condition::BLOCKED)
    };
    let mut found = wait::present(evacuations.clone(), &name, "is blocked", LIMIT, is_blocked).await?;
    stop(controller).await?;
    let released = Patch::Merge(json!({"metadata": {"finalizers": []}}));
    evacuations.patch(&name, &PatchParams::default(), &released).await.context("dropping the finalizer")?;
    evacuations.delete(&name, &DeleteParams::default()).await.context("deleting an Evacuation")?;
    budgets.delete("budget-0", &DeleteParams::default()).await.context("deleting the budget")?;
    pods.delete(&template.name_any(), &DeleteParams::default().grace_period(0)).await?;
    found.metadata.resource_version = None;
    Ok(found)
}

/// A budget that allows no disruption, with the status that the disruption controller would write.
fn budget(namespace: &str, number: usize) -> PodDisruptionBudget {
    let pods = i32::try_from(PODS_PER_BUDGET).unwrap_or(i32::MAX);
    let name = format!("budget-{number}");
    let mut budget = objects::pdb(&name).namespace(namespace).min_available(&pods.to_string()).build();
    budget.metadata.uid = Some(stored::uid());
    budget.metadata.generation = Some(1);
    budget.metadata.creation_timestamp = Some(Time(Timestamp::now()));
    budget.status = Some(PodDisruptionBudgetStatus {
        observed_generation: Some(1),
        current_healthy: pods,
        desired_healthy: pods,
        expected_pods: pods,
        disruptions_allowed: 0,
        ..PodDisruptionBudgetStatus::default()
    });
    budget
}

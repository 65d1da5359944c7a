//! The Deployments that move from one node to the other, each with a Service and a budget that allows no disruption.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, Service, ServiceAccount};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, Client, Resource};
use serde_json::json;

use super::super::is_ready;
use crate::nodes::is_initialized;
use crate::{objects, wait};

pub(super) const DEPLOYMENTS: usize = 100;
pub(super) const NAMESPACE: &str = "surge";
/// The pods are on one of these.
const NODES: [&str; 2] = ["node-a", "node-b"];
const IN_FLIGHT: usize = 8;
const LIMIT: Duration = Duration::from_secs(600);

pub(super) struct Apps {
    client: Client,
}

impl Apps {
    /// Creates the Deployments on the first node, and then the second node.
    pub(super) async fn create(client: &Client) -> Result<Self> {
        let apps = Self { client: client.clone() };
        let [first, second] = NODES;
        apps.create_node(first).await?;
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let created = namespaces.create(&PostParams::default(), &objects::namespace(NAMESPACE)).await;
        created.context("creating a namespace")?;
        wait::present(apps.api::<ServiceAccount>(), "default", "exists", LIMIT, |_| true).await?;
        let created = stream::iter(0..DEPLOYMENTS).map(|number| apps.create_app(number));
        created.buffer_unordered(IN_FLIGHT).try_collect::<()>().await?;
        apps.until_at_rest().await?;
        apps.create_node(second).await?;
        Ok(apps)
    }

    async fn create_node(&self, name: &str) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let node = objects::node(name).build();
        nodes.create(&PostParams::default(), &node).await.context("creating a node")?;
        wait::present(nodes, name, "is ready", LIMIT, is_initialized).await?;
        Ok(())
    }

    async fn create_app(&self, number: usize) -> Result<()> {
        let (name, params) = (format!("app-{number}"), PostParams::default());
        let service = json!({
            "metadata": {"name": name},
            "spec": {"selector": {"app": name}, "ports": [{"port": 80}]},
        });
        let service: Service = serde_json::from_value(service).context("creating a Service")?;
        self.api().create(&params, &service).await.context("creating a Service")?;
        let deployment = objects::deployment(&name).namespace(NAMESPACE).pods(|pod| pod.grace(0));
        self.api().create(&params, &deployment.build()).await.context("creating a Deployment")?;
        let budget = objects::pdb(&name).namespace(NAMESPACE).min_available("1");
        self.budgets().create(&params, &budget.build()).await.context("creating a budget")?;
        Ok(())
    }

    /// Waits until everything is as after a rollout: one pod and one endpoint for each Deployment, and budgets that know this.
    pub(super) async fn until_at_rest(&self) -> Result<()> {
        self.until_available().await?;
        let is_exhausted = |budget: &PodDisruptionBudget| {
            budget.status.as_ref().is_some_and(|status| {
                (status.expected_pods, status.current_healthy, status.disruptions_allowed) == (1, 1, 0)
                    && status.observed_generation == budget.metadata.generation
                    && status.disrupted_pods.as_ref().is_none_or(std::collections::BTreeMap::is_empty)
            })
        };
        self.until_all("have observed their only pod", is_exhausted).await
    }

    /// Waits until each Deployment has one pod, and each Service one endpoint.
    pub(super) async fn until_available(&self) -> Result<()> {
        self.until_all("are ready", is_ready).await?;
        self.until_all("have one available replica", |deployment: &Deployment| {
            let status = deployment.status.clone().unwrap_or_default();
            let replicas = [status.replicas, status.updated_replicas, status.available_replicas];
            replicas == [Some(1); 3] && status.observed_generation == deployment.metadata.generation
        })
        .await?;
        self.until_all("list one ready endpoint", |slice: &EndpointSlice| {
            let is_ready = |conditions: &k8s_openapi::api::discovery::v1::EndpointConditions| {
                conditions.ready == Some(true)
            };
            let [endpoint] = &slice.endpoints[..] else { return false };
            endpoint.conditions.as_ref().is_some_and(is_ready)
        })
        .await
    }

    /// Waits until there is one object per Deployment, and all of them meet the condition.
    async fn until_all<K>(&self, what: &str, condition: impl Fn(&K) -> bool) -> Result<()>
    where
        K: wait::Watchable + Resource<Scope = NamespaceResourceScope>,
    {
        let met = |all: &[K]| all.len() == DEPLOYMENTS && all.iter().all(&condition);
        wait::all(self.api(), watcher::Config::default(), what, LIMIT, met).await?;
        Ok(())
    }

    /// The node of all pods.
    pub(super) async fn node(&self) -> Result<String> {
        let (pods, _) = self.list().await?;
        let node = pods.first().and_then(node_of).context("the first pod has no node")?;
        ensure!(pods.iter().all(|pod| node_of(pod) == Some(node)), "not all pods are on {node}");
        Ok(node.to_owned())
    }

    /// Fails if a pod is left on this node.
    pub(super) async fn ensure_left(&self, node: &str) -> Result<()> {
        let (pods, _) = self.list().await?;
        let left = pods.iter().filter(|pod| node_of(pod) == Some(node)).count();
        ensure!(left == 0, "{left} pods are left on the drained node {node}");
        Ok(())
    }

    /// All pods and Deployments.
    pub(super) async fn list(&self) -> Result<(Vec<Pod>, Vec<Deployment>)> {
        let all = ListParams::default();
        let pods = self.pods().list(&all).await.context("listing the pods")?;
        let deployments = self.api::<Deployment>().list(&all).await.context("listing the Deployments")?;
        Ok((pods.items, deployments.items))
    }

    /// Cordons or uncordons a node.
    pub(super) async fn set_cordon(&self, node: &str, cordoned: bool) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let patch = Patch::Merge(json!({"spec": {"unschedulable": cordoned}}));
        nodes.patch(node, &PatchParams::default(), &patch).await.context("cordoning a node")?;
        Ok(())
    }

    pub(super) fn pods(&self) -> Api<Pod> {
        self.api()
    }

    pub(super) fn endpoint_slices(&self) -> Api<EndpointSlice> {
        self.api()
    }

    pub(super) fn budgets(&self) -> Api<PodDisruptionBudget> {
        self.api()
    }

    fn api<K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

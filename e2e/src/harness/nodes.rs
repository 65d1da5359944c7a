//! Simulates nodes that lose their network and recover, and compares the state of nodes before and after a maintenance.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result};
use futures::future::try_join_all;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;

use crate::handle::Handle;

/// The label that selects KWOK's nodes.
pub(crate) const MANAGED_LABEL: &str = "kwok.x-k8s.io/node";
/// Its value on running nodes.
pub(crate) const MANAGED: &str = "fake";
const SILENT: &str = "silent";

/// The parts of a node that must be unchanged after a maintenance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeState {
    unschedulable: bool,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    conditions: BTreeSet<String>,
}

impl NodeState {
    /// The state of this node.
    pub fn of(node: &Node) -> Self {
        let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
        Self {
            unschedulable: node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or_default(),
            labels: node.labels().clone(),
            annotations: node.annotations().clone(),
            conditions: conditions.map(|condition| condition.type_.clone()).collect(),
        }
    }
}

/// Whether a node accepts pods and has the annotation and labels that the controller manager adds. Otherwise these
/// would later look like changes.
pub(crate) fn is_initialized(node: &Node) -> bool {
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    node.annotations().contains_key("node.alpha.kubernetes.io/ttl")
        && node.labels().contains_key("beta.kubernetes.io/os")
        && !taints.into_iter().any(|taint| taint.key == "node.kubernetes.io/not-ready")
}

impl Handle {
    /// Stops the heartbeat of a node and everything its kubelet would do: new pods do not start and deleted pods do not
    /// terminate. The node lifecycle controller taints the node after its grace period: 50 s, or the controller
    /// manager's `--node-monitor-grace-period`.
    pub async fn silence_node(&self, name: &str) -> Result<()> {
        self.label_node(name, SILENT).await.with_context(|| format!("failed to silence node {name}"))
    }

    /// Restores a silenced node. It is ready immediately.
    pub async fn revive_node(&self, name: &str) -> Result<()> {
        self.label_node(name, MANAGED).await.with_context(|| format!("failed to revive node {name}"))
    }

    async fn label_node(&self, name: &str, value: &str) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.client().await?);
        let change = Patch::Merge(json!({ "metadata": { "labels": { MANAGED_LABEL: value } } }));
        nodes.patch_metadata(name, &PatchParams::default(), &change).await?;
        Ok(())
    }

    /// Releases the Leases of a KWOK process that has exited. Otherwise its successor would wait until they expire.
    pub(crate) async fn release_nodes(&self) -> Result<()> {
        let leases: Api<Lease> = Api::namespaced(self.client().await?, "kube-node-lease");
        let held = leases.list(&ListParams::default()).await.context("failed to list the leases of nodes")?;
        let free = Patch::Merge(json!({ "spec": { "holderIdentity": null } }));
        let freed = held.items.iter().map(async |lease| {
            let name = lease.name_any();
            leases.patch(&name, &PatchParams::default(), &free).await
        });
        try_join_all(freed).await.context("failed to release the Leases of nodes")?;
        Ok(())
    }
}

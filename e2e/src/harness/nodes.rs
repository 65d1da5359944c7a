//! Makes pretended nodes fall silent and come back, as when a machine loses its network; and what of a node must be
//! as before when nobody maintains it any longer.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result};
use futures::future::try_join_all;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;

use crate::handle::Handle;

/// The label by which KWOK knows its nodes.
pub(crate) const MANAGED_LABEL: &str = "kwok.x-k8s.io/node";
/// Its value on nodes that live.
pub(crate) const MANAGED: &str = "fake";
const SILENT: &str = "silent";

/// What of a node a maintenance that is over must not have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    unschedulable: bool,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    conditions: BTreeSet<String>,
}

impl Look {
    /// How this node looks.
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

/// Whether a node takes pods and has what the controller manager adds: an annotation and labels that would later look
/// like changes of ours.
pub(crate) fn is_settled(node: &Node) -> bool {
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    node.annotations().contains_key("node.alpha.kubernetes.io/ttl")
        && node.labels().contains_key("beta.kubernetes.io/os")
        && !taints.into_iter().any(|taint| taint.key == "node.kubernetes.io/not-ready")
}

impl Handle {
    /// Stops the heartbeat of a node and everything its kubelet would do: new pods there do not
    /// start and deleted ones do not end. The node lifecycle controller taints it when its grace
    /// period is over: 50 s, or what the controller manager's `--node-monitor-grace-period` says.
    pub async fn silence_node(&self, name: &str) -> Result<()> {
        self.label_node(name, SILENT).await.with_context(|| format!("silencing node {name}"))
    }

    /// Lets a silenced node come back; it is ready again at once.
    pub async fn revive_node(&self, name: &str) -> Result<()> {
        self.label_node(name, MANAGED).await.with_context(|| format!("reviving node {name}"))
    }

    async fn label_node(&self, name: &str, value: &str) -> Result<()> {
        let nodes: Api<Node> = Api::all(self.client().await?);
        let change = Patch::Merge(json!({ "metadata": { "labels": { MANAGED_LABEL: value } } }));
        nodes.patch_metadata(name, &PatchParams::default(), &change).await?;
        Ok(())
    }

    /// Frees the leases that a KWOK which is gone has left behind: its successor would wait until
    /// they have run out.
    pub(crate) async fn release_nodes(&self) -> Result<()> {
        let leases: Api<Lease> = Api::namespaced(self.client().await?, "kube-node-lease");
        let held = leases.list(&ListParams::default()).await.context("listing the leases of nodes")?;
        let free = Patch::Merge(json!({ "spec": { "holderIdentity": null } }));
        let freed = held.items.iter().map(async |lease| {
            let name = lease.name_any();
            leases.patch(&name, &PatchParams::default(), &free).await
        });
        try_join_all(freed).await.context("freeing the leases of nodes")?;
        Ok(())
    }
}

//! Makes pretended nodes fall silent and come back, as when a machine loses its network.
//!
//! KWOK keeps a node's Lease only while nobody else holds it, and touches neither the node nor its
//! pods while somebody does.

use anyhow::{Context as _, Result};
use futures::future::try_join_all;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

use crate::handle::Handle;

const SILENCER: &str = "haulout-e2e-silence";

impl Handle {
    /// Stops the heartbeat of a node and everything its kubelet would do: new pods there do not
    /// start and deleted ones do not end. The node lifecycle controller taints it when its grace
    /// period (50 s unless the controller manager was told otherwise) is over.
    pub async fn silence_node(&self, name: &str) -> Result<()> {
        let spec = json!({ "holderIdentity": SILENCER, "leaseDurationSeconds": i32::MAX });
        patch(&self.node_leases().await?, name.to_owned(), &spec)
            .await
            .with_context(|| format!("silencing node {name}"))
    }

    /// Lets a silenced node come back. KWOK notices within about 10 seconds.
    pub async fn revive_node(&self, name: &str) -> Result<()> {
        let spec = json!({ "holderIdentity": null, "leaseDurationSeconds": 40 });
        patch(&self.node_leases().await?, name.to_owned(), &spec)
            .await
            .with_context(|| format!("reviving node {name}"))
    }

    /// Frees the leases that a KWOK which is gone has left behind, except those of silenced nodes.
    pub(crate) async fn release_nodes(&self) -> Result<()> {
        let leases = self.node_leases().await?;
        let held = leases
            .list(&ListParams::default())
            .await
            .context("listing the leases of nodes")?;
        let abandoned = held.items.iter().filter(|lease| {
            let holder = lease
                .spec
                .as_ref()
                .and_then(|spec| spec.holder_identity.as_deref());
            holder.is_some_and(|holder| holder != SILENCER)
        });
        let free = json!({ "holderIdentity": null });
        try_join_all(abandoned.map(|lease| patch(&leases, lease.name_any(), &free)))
            .await
            .context("freeing the leases of nodes")?;
        Ok(())
    }

    async fn node_leases(&self) -> Result<Api<Lease>> {
        Ok(Api::namespaced(self.client().await?, "kube-node-lease"))
    }
}

async fn patch(leases: &Api<Lease>, name: String, spec: &Value) -> Result<()> {
    let change = Patch::Merge(json!({ "spec": spec }));
    leases.patch(&name, &PatchParams::default(), &change).await?;
    Ok(())
}

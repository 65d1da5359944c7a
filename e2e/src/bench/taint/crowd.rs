//! What very many pods cost that need not leave.

use std::time::Duration;

use anyhow::Result;

use super::super::{Progress, stop, stored};
use super::{LIMIT, MANAGER, World, node};
use crate::cluster::Component;
use crate::service::Service;
use crate::wait;

const PODS: usize = 50_000;
const NODES: usize = 1_000;
/// Each as big as a team's.
const NAMESPACES: usize = 100;
/// When what comes right after the start is over.
const SETTLED: Duration = Duration::from_secs(10);

impl World {
    /// Resident bytes with very many pods. Ends the life of this cluster.
    pub(super) async fn crowd(&self, progress: Progress) -> Result<f64> {
        // They would take away pods whose nodes and namespaces do not exist.
        for component in [Component::ControllerManager, Component::Kwok, Component::KwokNodes] {
            self.cluster.stop(component).await?;
        }
        progress(&format!("writing {PODS} pods into etcd"));
        let pods: Vec<_> = (0..PODS)
            .map(|number| {
                let mut pod = stored::copy(&self.template, format!("crowd-{number}"), node(number % NODES));
                pod.metadata.namespace = Some(format!("team-{}", number % NAMESPACES));
                pod
            })
            .collect();
        stored::store(&self.cluster.etcd()?, stored::PODS, &pods).await?;
        progress(&format!("start with {PODS} pods"));
        let manager = Service::start(&self.cluster, MANAGER, &[]).await?;
        manager.leads().await?;
        wait::eventually("it has seen everything", LIMIT, async || {
            Ok(manager.text().contains("all watches work").then_some(()))
        })
        .await?;
        tokio::time::sleep(SETTLED).await;
        let bytes = manager.resident_bytes()?;
        stop(manager).await?;
        Ok(bytes)
    }
}

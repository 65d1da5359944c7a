//! What a large number of pods costs that do not have to leave.

use std::time::Duration;

use anyhow::Result;

use super::super::{Progress, stop, stored};
use super::{BenchEnv, LIMIT, MANAGER, node};
use crate::cluster::Component;
use crate::service::Service;
use crate::wait;

const PODS: usize = 50_000;
const NODES: usize = 1_000;
/// Each of a typical size.
const NAMESPACES: usize = 100;
/// Work that follows the start is finished after this time.
const WARM_UP: Duration = Duration::from_secs(10);

impl BenchEnv {
    /// Resident bytes with a large number of pods. The cluster cannot be used afterwards.
    pub(super) async fn memory(&self, progress: Progress) -> Result<f64> {
        // They would delete pods whose nodes and namespaces do not exist.
        for component in [Component::ControllerManager, Component::Kwok, Component::KwokNodes] {
            self.cluster.stop(component).await?;
        }
        progress(&format!("writing {PODS} pods into etcd"));
        let pods: Vec<_> = (0..PODS)
            .map(|number| {
                let mut pod = stored::copy(&self.template, format!("idle-{number}"), node(number % NODES));
                pod.metadata.namespace = Some(format!("team-{}", number % NAMESPACES));
                pod
            })
            .collect();
        stored::store(&self.cluster.etcd()?, stored::PODS, &pods).await?;
        progress(&format!("start with {PODS} pods"));
        let manager = Service::start(&self.cluster, MANAGER, &[]).await?;
        manager.leads().await?;
        wait::eventually("the taint manager's caches are synced", LIMIT, async || {
            Ok(manager.text().contains("all watches synced").then_some(()))
        })
        .await?;
        tokio::time::sleep(WARM_UP).await;
        let bytes = manager.resident_bytes()?;
        stop(manager).await?;
        Ok(bytes)
    }
}

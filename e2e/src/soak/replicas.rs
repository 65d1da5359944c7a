//! Two replicas of a controller, of which the one that leads is killed again and again.

use std::time::Duration;

use anyhow::Result;

use crate::handle::Handle;
use crate::service::Service;
use crate::wait;

/// How soon a standby takes over from one that was killed.
const ARGS: [&str; 2] = ["--lease-seconds", "2"];
const LIMIT: Duration = Duration::from_secs(300);

/// See the [module](self).
pub(super) struct Replicas<'a> {
    cluster: &'a Handle,
    name: &'static str,
    pair: [Service; 2],
    /// How many were killed.
    pub(super) kills: u32,
}

impl<'a> Replicas<'a> {
    /// Starts both; they are ready when this returns.
    pub(super) async fn start(cluster: &'a Handle, name: &'static str) -> Result<Self> {
        let start = || Service::start(cluster, name, &ARGS);
        let pair = [start().await?, start().await?];
        for replica in &pair {
            replica.ready().await?;
        }
        Ok(Self { cluster, name, pair, kills: 0 })
    }

    /// Waits until one of them leads; which one.
    async fn leader(&self) -> Result<usize> {
        wait::eventually("somebody leads", LIMIT, async || {
            for (place, replica) in self.pair.iter().enumerate() {
                if replica.metric("leader_election_master_status").await? > 0.0 {
                    return Ok(Some(place));
                }
            }
            Ok(None)
        })
        .await
    }

    /// Kills the one that leads, so long after it is known to, and starts another in its place.
    pub(super) async fn kill_leader(&mut self, after: Duration) -> Result<()> {
        let leader = self.leader().await?;
        tokio::time::sleep(after).await;
        if let Some(leader) = self.pair.get_mut(leader) {
            leader.kill()?;
            self.kills += 1;
            *leader = Service::start(self.cluster, self.name, &ARGS).await?;
        }
        Ok(())
    }
}

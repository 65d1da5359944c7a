//! Two replicas of a controller, of which the one that leads is killed again and again.

use std::time::Duration;

use anyhow::Result;
use rustix::process::Signal;

use crate::handle::Handle;
use crate::service::Service;
use crate::wait;

const LIMIT: Duration = Duration::from_secs(300);

/// See the [module](self).
pub(super) struct Replicas<'a> {
    cluster: &'a Handle,
    name: &'static str,
    /// How soon a standby takes over from one that was killed.
    lease_seconds: &'static str,
    /// Two of them, or none while it is stopped.
    pair: Vec<Service>,
    /// How much their clocks are ahead.
    ahead: Duration,
    /// How many were killed.
    pub(super) kills: u32,
}

impl<'a> Replicas<'a> {
    /// Starts both; they are ready when this returns. A standby takes over within two seconds from one that was killed.
    pub(super) async fn start(cluster: &'a Handle, name: &'static str) -> Result<Self> {
        Self::start_with(cluster, name, "2").await
    }

    /// The same with Leases of so many seconds.
    pub(super) async fn start_with(
        cluster: &'a Handle,
        name: &'static str,
        lease_seconds: &'static str,
    ) -> Result<Self> {
        let (pair, ahead) = (Vec::new(), Duration::ZERO);
        let mut replicas = Self { cluster, name, lease_seconds, pair, ahead, kills: 0 };
        replicas.start_again().await?;
        Ok(replicas)
    }

    async fn start_one(&self) -> Result<Service> {
        let service =
            Service::start(self.cluster, self.name, &["--lease-seconds", self.lease_seconds]).await?;
        if !self.ahead.is_zero() {
            service.shift_clock(self.ahead).await?;
        }
        Ok(service)
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

    /// Kills the one that leads, so long after it is known to, and starts another in its place. Nothing happens while
    /// it is stopped.
    pub(super) async fn kill_leader(&mut self, after: Duration) -> Result<Option<String>> {
        if self.pair.is_empty() {
            return Ok(None);
        }
        let leader = self.leader().await?;
        tokio::time::sleep(after).await;
        let Some(killed) = self.pair.get(leader) else { return Ok(None) };
        killed.kill()?;
        self.kills += 1;
        let other = self.start_one().await?;
        if let Some(leader) = self.pair.get_mut(leader) {
            *leader = other;
        }
        Ok(Some(format!("the leader of {} was killed", self.name)))
    }

    /// Stops both, by force or in good order.
    pub(super) async fn stop(&mut self, force: bool) -> Result<()> {
        let signal = if force { Signal::KILL } else { Signal::TERM };
        let pair = std::mem::take(&mut self.pair);
        for replica in &pair {
            replica.signal(signal)?;
        }
        for replica in &pair {
            replica.exited().await;
        }
        Ok(())
    }

    /// Starts both after they were stopped; they are ready when this returns. Nothing happens while they run.
    pub(super) async fn start_again(&mut self) -> Result<()> {
        while self.pair.len() < 2 {
            let replica = self.start_one().await?;
            self.pair.push(replica);
        }
        for replica in &self.pair {
            replica.ready().await?;
        }
        Ok(())
    }

    /// Puts their clocks forward by this much.
    pub(super) async fn put_clocks_forward(&mut self, by: Duration) -> Result<()> {
        self.ahead = by;
        for replica in &self.pair {
            replica.shift_clock(by).await?;
        }
        Ok(())
    }
}

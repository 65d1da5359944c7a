//! Two replicas of a controller. The leader is killed repeatedly.

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
    /// Lease duration, which limits how soon a standby takes over from a killed leader.
    lease_seconds: &'static str,
    /// More arguments.
    args: &'static [&'static str],
    /// Two replicas, or none while the controller is stopped.
    pair: Vec<Service>,
    /// How far their clocks are ahead.
    ahead: Duration,
    /// Number of killed replicas.
    pub(super) kills: u32,
}

impl<'a> Replicas<'a> {
    /// Starts both replicas and waits until they are ready. A standby takes over from a killed leader within two
    /// seconds.
    pub(super) async fn start(cluster: &'a Handle, name: &'static str) -> Result<Self> {
        Self::start_with(cluster, name, "2", &[]).await
    }

    /// The same with this Lease duration, in seconds, and more arguments.
    pub(super) async fn start_with(
        cluster: &'a Handle,
        name: &'static str,
        lease_seconds: &'static str,
        args: &'static [&'static str],
    ) -> Result<Self> {
        let (pair, ahead) = (Vec::new(), Duration::ZERO);
        let mut replicas = Self { cluster, name, lease_seconds, args, pair, ahead, kills: 0 };
        replicas.start_again().await?;
        Ok(replicas)
    }

    async fn start_one(&self) -> Result<Service> {
        let args = [&["--lease-seconds", self.lease_seconds], self.args].concat();
        let service = Service::start(self.cluster, self.name, &args).await?;
        if !self.ahead.is_zero() {
            service.shift_clock(self.ahead).await?;
        }
        Ok(service)
    }

    /// Waits until one of them leads. Returns its index.
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

    /// Kills the leader, some time after it is known to lead, and starts another replica. Does nothing while the
    /// controller is stopped.
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

    /// Stops both replicas, by SIGKILL or gracefully.
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

    /// Starts both replicas after they were stopped, and waits until they are ready. Does nothing while they run.
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

    /// Moves their clocks forward by this much.
    pub(super) async fn put_clocks_forward(&mut self, by: Duration) -> Result<()> {
        self.ahead = by;
        for replica in &self.pair {
            replica.shift_clock(by).await?;
        }
        Ok(())
    }
}

//! Command line flags.

use std::path::PathBuf;

use haulout_service_runtime::service::{CommonArgs, ElectionArgs, EvacuatorArgs};

/// Removes pods from nodes with NoExecute taints; replaces kube-controller-manager's taint-eviction-controller
#[derive(Clone, Debug, clap::Parser)]
#[command(version)]
pub struct Args {
    /// Flags that every service has.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Policy, a YAML file with rules; if unset, every pod that has to leave is deleted
    #[arg(long, env = "HAULOUT_POLICY")]
    pub policy: Option<PathBuf>,

    /// Grace period after a start or an API server outage before old taints apply, so that nodes can report; in seconds
    #[arg(long, default_value_t = 60)]
    pub watch_gap_grace_seconds: u32,

    /// Maximum number of pods to delete or evict per second; if unset, unlimited
    #[arg(long, value_parser = parse_rate)]
    pub max_per_second: Option<f64>,

    /// Log what would happen, without changing anything
    #[arg(long)]
    pub dry_run: bool,

    /// Flags about evacuators.
    #[command(flatten)]
    pub evacuators: EvacuatorArgs,

    /// Leader election flags.
    #[command(flatten)]
    pub election: ElectionArgs,
}

fn parse_rate(text: &str) -> Result<f64, String> {
    let rate = text.parse::<f64>().ok().filter(|rate| rate.is_finite() && *rate > 0.0);
    rate.ok_or_else(|| "must be a number greater than 0".into())
}

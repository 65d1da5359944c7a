//! The flags of the service.

use std::path::PathBuf;

use haulout_service_runtime::service::{CommonArgs, ElectionArgs};

/// Makes pods leave nodes with NoExecute taints, instead of kube-controller-manager's taint-eviction-controller
#[derive(Clone, Debug, clap::Parser)]
#[command(version)]
pub struct Args {
    /// What every service has.
    #[command(flatten)]
    pub common: CommonArgs,

    /// The policy: a YAML file with rules; without one, every pod that has to leave is deleted
    #[arg(long, env = "HAULOUT_POLICY")]
    pub policy: Option<PathBuf>,

    /// For how many seconds nodes may report after a start or an outage, before old taints count
    #[arg(long, default_value_t = 60)]
    pub settle_seconds: u32,

    /// How many pods are made to leave in a second at most; without it, as many as the API server takes
    #[arg(long, value_parser = parse_rate)]
    pub max_per_second: Option<f64>,

    /// Decides and reports, and touches nothing
    #[arg(long)]
    pub dry_run: bool,

    /// How its leader is elected.
    #[command(flatten)]
    pub election: ElectionArgs,
}

fn parse_rate(text: &str) -> Result<f64, String> {
    let rate = text.parse::<f64>().ok().filter(|rate| rate.is_finite() && *rate > 0.0);
    rate.ok_or_else(|| "a number above 0 is needed".into())
}

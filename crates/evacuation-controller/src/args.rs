//! Command line flags.

use haulout_service_runtime::service::{CommonArgs, ElectionArgs};

/// Evacuates pods: activates their evacuators one after the other, then evicts
#[derive(Clone, Debug, clap::Parser)]
#[command(version)]
pub struct Args {
    /// Flags that every service has.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Leader election flags.
    #[command(flatten)]
    pub election: ElectionArgs,
}

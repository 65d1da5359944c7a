//! Command line flags.

use haulout_service_runtime::service::{CommonArgs, ElectionArgs, EvacuatorArgs};

/// Evacuates pods: activates their evacuators one after the other, then evicts
#[derive(Clone, Debug, clap::Parser)]
#[command(version)]
pub struct Args {
    /// Flags that every service has.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Flags about evacuators.
    #[command(flatten)]
    pub evacuators: EvacuatorArgs,

    /// Leader election flags.
    #[command(flatten)]
    pub election: ElectionArgs,
}

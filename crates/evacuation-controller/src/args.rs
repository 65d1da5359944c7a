//! The flags of the service.

use haulout_service_runtime::service::{CommonArgs, ElectionArgs};

/// Takes pods off their nodes: asks their evacuators, and evicts as the last resort.
#[derive(Clone, Debug, clap::Parser)]
#[command(version)]
pub struct Args {
    /// What every service has.
    #[command(flatten)]
    pub common: CommonArgs,

    /// How its leader is elected.
    #[command(flatten)]
    pub election: ElectionArgs,
}

//! Command line flags.

use haulout_service_runtime::service::{CommonArgs, ElectionArgs};

/// Replaces pods of Deployments before they are evicted: evacuator of the class deployment.apps.k8s.io
#[derive(Clone, Debug, clap::Parser)]
#[command(name = "haulout-workload-evacuator", version)]
pub struct Args {
    /// Flags of every service.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Leader election flags.
    #[command(flatten)]
    pub election: ElectionArgs,

    /// How long to wait for a node with room for a replacement, in seconds; after that, the pod is evicted without one
    #[arg(long, env = "HAULOUT_WAIT_FOR_ROOM_SECONDS", default_value_t = 300)]
    pub wait_for_room_seconds: u32,
}

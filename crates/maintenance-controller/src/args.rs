//! Command-line flags.

use haulout_api_types::node_maintenance::PodType;
use haulout_service_runtime::service::{CommonArgs, ElectionArgs, EvacuatorArgs};

/// Cordons nodes, drains them and returns them to service, as requested by NodeMaintenances.
#[derive(Clone, Debug, clap::Parser)]
#[command(version)]
pub struct Args {
    /// Flags of all services.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Flags of leader election.
    #[command(flatten)]
    pub election: ElectionArgs,

    /// Flags about evacuators.
    #[command(flatten)]
    pub evacuators: EvacuatorArgs,

    /// Pod types that drains evacuate: Default, DaemonSet, Static. Pods of other types stay
    #[arg(long, env = "HAULOUT_POD_TYPES", value_delimiter = ',', default_value = "Default", value_parser = parse_pod_type)]
    pub pod_types: Vec<PodType>,

    /// Keep cluster-autoscaler and Karpenter from removing nodes under maintenance
    #[arg(long, env = "HAULOUT_HOLD_AUTOSCALERS", default_value_t = true, action = clap::ArgAction::Set)]
    pub hold_autoscalers: bool,

    /// The evacuation controller is part of this installation; report when it is unavailable
    #[arg(long, env = "HAULOUT_EVACUATION_CONTROLLER_ENABLED", default_value_t = true, action = clap::ArgAction::Set)]
    pub evacuation_controller_enabled: bool,
}

fn parse_pod_type(text: &str) -> Result<PodType, String> {
    let found = PodType::ALL.into_iter().find(|pod_type| format!("{pod_type:?}") == text);
    found.ok_or_else(|| "expected Default, DaemonSet or Static".into())
}

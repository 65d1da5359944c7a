//! The flags of the service.

use haulout_api_types::node_maintenance::PodType;
use haulout_service_runtime::service::{CommonArgs, ElectionArgs};

/// Cordons and drains nodes and puts them back into service, as NodeMaintenances say.
#[derive(Clone, Debug, clap::Parser)]
#[command(version)]
pub struct Args {
    /// What every service has.
    #[command(flatten)]
    pub common: CommonArgs,

    /// How its leader is elected.
    #[command(flatten)]
    pub election: ElectionArgs,

    /// The pod types that somebody evacuates here: Default, DaemonSet, Static. Pods of others are left alone
    #[arg(long, env = "HAULOUT_POD_TYPES", value_delimiter = ',', default_value = "Default", value_parser = parse_pod_type)]
    pub pod_types: Vec<PodType>,

    /// Whether cluster-autoscaler and Karpenter are kept from removing nodes under maintenance
    #[arg(long, env = "HAULOUT_HOLD_AUTOSCALERS", default_value_t = true, action = clap::ArgAction::Set)]
    pub hold_autoscalers: bool,

    /// Whether the evacuation controller belongs to this installation, so that its absence is reported
    #[arg(long, env = "HAULOUT_FOLLOW_EVACUATION_CONTROLLER", default_value_t = true, action = clap::ArgAction::Set)]
    pub follow_evacuation_controller: bool,
}

fn parse_pod_type(text: &str) -> Result<PodType, String> {
    let found = PodType::ALL.into_iter().find(|pod_type| format!("{pod_type:?}") == text);
    found.ok_or_else(|| "one of Default, DaemonSet and Static is needed".into())
}

//! `chart-hooks withdraw`: removes the instigator finalizers of a service that is switched off, because nobody else would
//! cancel its Evacuations.
//!
//! It repeats passes over the whole cluster until a pass finds nothing. It can be repeated at any time.

use haulout_api_types::names;
use haulout_service_runtime::access::Permission;
use haulout_service_runtime::service::Context;
use tracing::info;

use crate::cleanup::CleanupError;
use crate::evacuations;

/// Withdraw the Evacuations that a service requested; the chart runs this when the service is switched off
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Service that was switched off
    #[arg(value_enum)]
    pub service: Instigator,
}

/// The services that request Evacuations and can be switched off while the evacuation controller runs.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Instigator {
    /// The taint manager
    TaintManager,
}

impl Args {
    /// The permissions that this command needs.
    pub fn permissions() -> Vec<Permission> {
        ["list", "patch"].map(|verb| Permission::cluster(verb, names::EVACUATION_GROUP, "evacuations")).into()
    }
}

/// Withdraws until nothing is left to withdraw.
pub async fn run(args: Args, context: Context) -> Result<(), CleanupError> {
    let Instigator::TaintManager = args.service;
    let client = &context.clients.retrying;
    loop {
        let all = evacuations::list(client).await?;
        let withdrawn = evacuations::withdraw(client, &all, &[names::instigator::TAINT_MANAGER]).await?;
        info!(withdrawn, "withdrew Evacuations of the taint manager");
        if withdrawn == 0 {
            return Ok(());
        }
    }
}

//! `chart-hooks withdraw`: the end of one service of an installation that goes on. Takes its instigator
//! off every Evacuation, so that pods do not leave for somebody who is not there any more to take it back.
//!
//! Each pass looks at the whole cluster; the last one finds nothing. It can be repeated at any time.

use haulout_api_types::names;
use haulout_service_runtime::access::Permission;
use haulout_service_runtime::service::Context;
use tracing::info;

use crate::cleanup::CleanupError;
use crate::evacuations;

/// Withdraws the Evacuations that a service has asked for; the chart runs this when the service is switched off
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The service that is not there any more
    #[arg(value_enum)]
    pub service: Instigator,
}

/// The services that ask for Evacuations and can be switched off while others use the evacuation controller.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Instigator {
    /// The taint manager
    TaintManager,
}

impl Args {
    /// What it has to be allowed.
    pub fn permissions() -> Vec<Permission> {
        ["list", "patch"].map(|verb| Permission::cluster(verb, names::EVACUATION_GROUP, "evacuations")).into()
    }
}

/// Withdraws, and returns when nothing is left that can be withdrawn.
pub async fn run(args: Args, context: Context) -> Result<(), CleanupError> {
    let Instigator::TaintManager = args.service;
    let client = &context.clients.retrying;
    loop {
        let all = evacuations::list(client).await?;
        let withdrawn = evacuations::withdraw(client, &all, &[names::instigator::TAINT_MANAGER]).await?;
        info!(withdrawn, "withdrew evacuations of the taint manager");
        if withdrawn == 0 {
            return Ok(());
        }
    }
}

//! `chart-hooks withdraw`: undoes what services that are switched off would have undone themselves. It removes their
//! finalizers from Evacuations, because nobody else would cancel these or clean up after them, and gives the pods that the
//! workload evacuator has moved back to their ReplicaSets.
//!
//! It repeats passes over the whole cluster until a pass finds nothing. It can be repeated at any time.

use haulout_api_types::names::{self, class, instigator};
use haulout_service_runtime::access::Permission;
use haulout_service_runtime::service::Context;
use tracing::info;

use crate::cleanup::CleanupError;
use crate::{evacuations, moved_pods};

/// Undo what services requested or changed; the chart runs this when they are switched off
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Services that were switched off
    #[arg(value_enum, required = true)]
    pub services: Vec<Switchable>,
}

/// The services that can be switched off while the evacuation controller runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Switchable {
    /// The taint manager
    TaintManager,
    /// The workload evacuator
    WorkloadEvacuator,
}

impl Switchable {
    /// The names in its finalizers.
    fn finalizers(self) -> &'static [&'static str] {
        match self {
            Self::TaintManager => &[instigator::TAINT_MANAGER],
            Self::WorkloadEvacuator => &[instigator::WORKLOAD_EVACUATOR, class::DEPLOYMENT],
        }
    }
}

impl Args {
    fn moves_pods(&self) -> bool {
        self.services.contains(&Switchable::WorkloadEvacuator)
    }

    /// The permissions that this command needs.
    pub fn permissions(&self) -> Vec<Permission> {
        let evacuations =
            ["list", "patch"].map(|verb| Permission::cluster(verb, names::EVACUATION_GROUP, "evacuations"));
        let pods = if self.moves_pods() { moved_pods::permissions() } else { Vec::new() };
        evacuations.into_iter().chain(pods).collect()
    }
}

/// Withdraws until nothing is left to withdraw.
pub async fn run(args: Args, context: Context) -> Result<(), CleanupError> {
    let client = &context.clients.retrying;
    let finalizers: Vec<_> = args.services.iter().flat_map(|service| service.finalizers()).copied().collect();
    loop {
        let all = evacuations::list(client).await?;
        let withdrawn = evacuations::withdraw(client, &all, &finalizers).await?;
        info!(withdrawn, "withdrew Evacuations of services that are switched off");
        if withdrawn == 0 {
            break;
        }
    }
    if args.moves_pods() {
        let pods = moved_pods::give_back(client).await?;
        info!(pods, "moved pods given back to their ReplicaSets");
    }
    Ok(())
}

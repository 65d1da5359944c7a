//! `cargo xtask soak`: long fault-injection campaigns that can be repeated with their seed.

use std::rc::Rc;

use anyhow::{Context, Result, bail};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use haulout_e2e::soak::{CAMPAIGNS, Campaign, Round};
use haulout_e2e::tools;

use crate::repo;
use crate::ui::{self, Step};

#[derive(clap::Args)]
pub struct Args {
    /// Campaign to run; without it, all of them
    name: Option<String>,
    /// Number of rounds; each campaign has a default
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Seed of an earlier run, to repeat it
    #[arg(long)]
    seed: Option<u64>,
    /// In addition to killing processes, injects interference by people: deletes, changes and rejects objects of a
    /// drain
    #[arg(long)]
    interfere: bool,
    /// Limits --interfere to this action; can be repeated. An invalid name lists all actions
    #[arg(long, value_name = "ACTION", requires = "interfere")]
    only: Vec<String>,
    /// Number of rounds that run in parallel, each with its own cluster. Rounds mostly wait
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    at_once: u32,
}

pub fn run(args: &Args) -> Result<()> {
    let wanted = |campaign: &&Campaign| {
        args.name.as_deref().is_none_or(|name| name == campaign.name && args.interfere == campaign.interfere)
            && (campaign.interfere || !args.interfere)
    };
    let campaigns: Vec<_> = CAMPAIGNS.iter().filter(wanted).collect();
    if campaigns.is_empty() {
        let names: Vec<_> = CAMPAIGNS.iter().map(command).collect();
        bail!("unknown campaign; available campaigns: {}", names.join(", "));
    }
    tools::ensure(ui::note)?;
    repo::build_services()?;
    for campaign in campaigns {
        run_one(campaign, args)?;
    }
    Ok(())
}

/// The arguments that run a campaign.
fn command(campaign: &Campaign) -> String {
    let interfere = if campaign.interfere { " --interfere" } else { "" };
    format!("{}{interfere}", campaign.name)
}

fn run_one(campaign: &Campaign, args: &Args) -> Result<()> {
    let Args { at_once, only, .. } = args;
    let rounds = args.rounds.unwrap_or(campaign.rounds);
    let seed = args.seed.unwrap_or_else(|| fastrand::u64(..));
    let xtask = std::env::current_exe().context("failed to find this program")?;
    let runtime = tokio::runtime::Runtime::new().context("failed to start the async runtime")?;
    let only_these: String = only.iter().flat_map(|action| [" --only ", action]).collect();
    let repeat = |rounds: u32, seed: u64| {
        format!("cargo xtask soak {}{only_these} --rounds {rounds} --seed {seed}", command(campaign))
    };
    ui::note(&format!("    {}: {}", campaign.about, repeat(rounds, seed)));
    let run = async |number: u32| {
        // Each round can be repeated alone: the first round of a run uses the seed of the run.
        let seed = seed.wrapping_add(u64::from(number - 1));
        let name = format!("{}, round {number} of {rounds}", command(campaign));
        let step = Step::begin(&name);
        let progress = Rc::new(move |text: &str| ui::note(&format!("    round {number}: {text}")));
        let round = Round { xtask: xtask.clone(), seed, full: true, only: only.clone(), progress };
        let result = (campaign.round)(round).await;
        step.end(result.is_ok(), result.as_deref().unwrap_or_default());
        result.with_context(|| format!("round {number} failed; repeat it with `{}`", repeat(1, seed)))
    };
    let all = stream::iter(1..=rounds).map(run).buffer_unordered(usize::try_from(*at_once)?);
    runtime.block_on(all.try_for_each(async |_| Ok(())))
}

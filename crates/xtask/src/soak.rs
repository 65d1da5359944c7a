//! `cargo xtask soak`: long fault campaigns, repeatable by their seed.

use anyhow::{Context, Result, bail};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use haulout_e2e::soak::{CAMPAIGNS, Campaign, Round};
use haulout_e2e::tools;

use crate::repo;
use crate::ui::{self, Step};

#[derive(clap::Args)]
pub struct Args {
    /// The campaign; all of them if absent
    name: Option<String>,
    /// How many rounds to run; each campaign has a default
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Repeats the run that printed this seed
    #[arg(long)]
    seed: Option<u64>,
    /// How many rounds run at once, each with a cluster of its own; most of the time, a round waits
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    at_once: u32,
}

pub fn run(args: &Args) -> Result<()> {
    let wanted = |campaign: &&Campaign| args.name.as_deref().is_none_or(|name| name == campaign.name);
    let campaigns: Vec<_> = CAMPAIGNS.iter().filter(wanted).collect();
    if campaigns.is_empty() {
        let names: Vec<_> = CAMPAIGNS.iter().map(|campaign| campaign.name).collect();
        bail!("there is no such campaign; there are: {}", names.join(", "));
    }
    tools::ensure(ui::note)?;
    repo::build_services()?;
    for campaign in campaigns {
        run_one(campaign, args.rounds.unwrap_or(campaign.rounds), args.at_once, args.seed, true)?;
    }
    Ok(())
}

/// Runs all campaigns for a test run: with as many rounds as it can bear, and small ones, or with ten full ones.
pub fn all(full: bool) -> Result<()> {
    let rounds = |campaign: &Campaign| if full { 10 } else { campaign.rounds_in_test };
    let at_once = if full { 3 } else { 1 };
    CAMPAIGNS.iter().try_for_each(|campaign| run_one(campaign, rounds(campaign), at_once, None, full))
}

fn run_one(campaign: &Campaign, rounds: u32, at_once: u32, seed: Option<u64>, full: bool) -> Result<()> {
    if rounds == 0 {
        return Ok(());
    }
    let seed = seed.unwrap_or_else(|| fastrand::u64(..));
    let xtask = std::env::current_exe().context("finding this program")?;
    let runtime = tokio::runtime::Runtime::new().context("starting the async runtime")?;
    let repeat = format!("cargo xtask soak {} --rounds {rounds} --seed {seed}", campaign.name);
    ui::note(&format!("    {}: {repeat}", campaign.about));
    let mut random = fastrand::Rng::with_seed(seed);
    let all = (1..=rounds).map(|round| (round, Round { xtask: xtask.clone(), random: random.fork(), full }));
    let run = async |(number, round)| {
        let step = Step::begin(&format!("{}, round {number} of {rounds}", campaign.name));
        let result = (campaign.round)(round).await;
        step.end(result.is_ok(), result.as_deref().unwrap_or_default());
        result.with_context(|| format!("round {number} failed; repeat it with `{repeat}`"))
    };
    let all = stream::iter(all).map(run).buffer_unordered(usize::try_from(at_once)?);
    runtime.block_on(all.try_for_each(async |_| Ok(())))
}

//! Rounds of the fault campaigns of `cargo xtask soak`: one small round if that is quick, more and larger ones with
//! `--full`. A failure prints how to repeat its round.

use std::rc::Rc;

use futures::{StreamExt as _, stream};
use haulout_e2e::soak::{CAMPAIGNS, Campaign, Round};

use crate::support::xtask;

/// How many rounds run at the same time, each with its own cluster: a round mostly waits.
const AT_ONCE: usize = 2;

async fn rounds(count: u64, name: &str, interfere: bool, full: bool) {
    let wanted = |campaign: &&Campaign| campaign.name == name && campaign.interfere == interfere;
    let campaign = CAMPAIGNS.iter().find(wanted).expect("the campaign exists");
    let round = async |seed: u64| {
        println!("round with seed {seed}");
        let progress = Rc::new(|text: &str| println!("{text}"));
        let round = Round { xtask: xtask(), seed, full, only: Vec::new(), progress };
        let result = (campaign.round)(round).await;
        let interfere = if interfere { " --interfere" } else { "" };
        result.err().map(|error| {
            format!("cargo xtask soak {name}{interfere} --rounds 1 --seed {seed} repeats this: {error:#}")
        })
    };
    let first = fastrand::u64(..u64::MAX - count);
    let failures: Vec<_> = stream::iter(first..first + count)
        .map(round)
        .buffer_unordered(AT_ONCE)
        .filter_map(async |f| f)
        .collect()
        .await;
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

#[tokio::test]
async fn one_kill_leaves_no_process_behind() {
    rounds(1, "cluster", false, false).await;
}

#[tokio::test]
async fn pods_leave_once_in_one_round_of_kills() {
    rounds(1, "evacuation", false, false).await;
}

#[tokio::test]
#[ignore = "slow"]
async fn ten_kills_leave_no_process_behind() {
    rounds(10, "cluster", false, true).await;
}

#[tokio::test]
#[ignore = "slow"]
async fn pods_leave_once_in_ten_rounds_of_kills() {
    rounds(10, "evacuation", false, true).await;
}

#[tokio::test]
#[ignore = "slow"]
async fn drains_complete_in_ten_rounds_of_kills() {
    rounds(10, "drain", false, true).await;
}

#[tokio::test]
#[ignore = "slow"]
async fn drains_report_blockers_while_people_interfere() {
    rounds(3, "drain", true, true).await;
}

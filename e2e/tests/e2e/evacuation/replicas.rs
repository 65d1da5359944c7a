//! Replicas, restarts and outages.

use std::time::{Duration, Instant};

use haulout_e2e::{Component, objects};
use rustix::process::Signal;

use super::{NAMESPACE, SOON, World, failed};

#[tokio::test]
async fn a_leader_hands_over_and_the_next_one_carries_on_without_forgetting_the_backoff() {
    let mut world = World::new("evacuation-replicas").await;
    world.budget(objects::pdb("web").namespace(NAMESPACE).min_available("1").build()).await;
    let pod = world.pod("web-1", &[]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    // Backoff by backoff, so that the next attempt is far away.
    let mut shift = Duration::ZERO;
    for count in 2..8 {
        shift += Duration::from_secs(5 << (count - 2));
        world.controller.shift_clock(shift).await.unwrap();
        world.until(&evacuation, "was refused again", |e| failed(e) == count).await;
    }
    let second = World::replica(&world.cluster).await;
    second.ready().await.unwrap();
    // Replicas' clocks agree: a refusal in the future would count as one of an unknown time.
    second.shift_clock(shift).await.unwrap();
    let first = std::mem::replace(&mut world.controller, second);
    first.signal(Signal::TERM).unwrap();
    let status = tokio::time::timeout(SOON, first.exited()).await.unwrap();
    assert_eq!(status.code(), Some(0));
    world.controller.leads().await.unwrap();
    // Busy with others, the new leader leaves this one alone.
    world.let_it_act("other").await;
    assert_eq!(world.evictions().await, "1", "that of the other pod");
    world.delete_budget("web").await;
    world.until_gone(&pod, &evacuation).await;
}

#[tokio::test]
async fn a_deadline_that_passed_while_nobody_looked_is_missed_only_after_evacuators_could_report() {
    let mut world = World::new("evacuation-settle").await;
    let pod = world.pod("web-1", &["a.example.com", "b.example.com"]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_active(&evacuation, "a.example.com").await;
    // The report of an hour ago: everybody was away since.
    world
        .report(&evacuation, serde_json::json!({"evacuationProgressTimestamp": "2026-01-01T00:00:00Z"}))
        .await;
    world.controller.signal(Signal::KILL).unwrap();
    let begun = jiff::Timestamp::now();
    let second = World::replica(&world.cluster).await;
    drop(std::mem::replace(&mut world.controller, second));
    world.controller.leads().await.unwrap();
    world.let_it_act("other").await;
    world.controller.shift_clock(Duration::from_secs(31)).await.unwrap();
    let switched = world.until_active(&evacuation, "b.example.com").await;
    let at = switched.status.unwrap().evacuation_progress_timestamp.unwrap().0;
    let waited = at.duration_since(begun).as_secs();
    assert!(waited >= 29, "control passed on {waited} s after the start by the controller's clock");
}

#[tokio::test]
async fn evacuations_go_on_after_an_outage_of_the_api_server() {
    let world = World::new("evacuation-outage").await;
    let pod = world.pod("web-1", &[]).await;
    world.cluster.kill(Component::ApiServer).await.unwrap();
    let begun = Instant::now();
    world.cluster.start(Component::ApiServer).await.unwrap();
    assert!(begun.elapsed() < SOON);
    let evacuation = world.evacuate(&pod).await;
    world.until_gone(&pod, &evacuation).await;
}

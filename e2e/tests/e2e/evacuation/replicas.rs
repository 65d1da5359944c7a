//! Replicas, restarts, outages and watches that are behind.

use std::sync::Arc;
use std::time::{Duration, Instant};

use haulout_e2e::{Component, Forwarder, objects};
use kube::ResourceExt as _;
use kube::api::{Patch, PatchParams};
use rustix::process::Signal;
use serde_json::json;

use super::{Ground, SOON, failed, replica};

pub async fn a_leader_hands_over_and_the_next_one_carries_on_without_forgetting_the_backoff(ground: &Ground) {
    // Longer than anybody waits here: the next one can only lead because the first one has let go.
    let lease = "600";
    let first = Arc::new(replica(&ground.cluster, lease).await);
    first.leads().await.unwrap();
    let mut world = ground.world(&first).await;
    world.budget(objects::pdb("web").namespace(&world.namespace).min_available("1").build()).await;
    let pod = world.pod("web-1", &[]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    // Backoff by backoff, so that the next attempt is far away.
    let mut shift = Duration::ZERO;
    for count in 2..8 {
        shift += Duration::from_secs(5 << (count - 2));
        world.controller.shift_clock(shift).await.unwrap();
        world.until(&evacuation, "was refused again", |e| failed(e) >= count).await;
    }
    let before = world.evictions();
    world.controller = Arc::new(replica(&ground.cluster, lease).await);
    world.controller.ready().await.unwrap();
    // Replicas' clocks agree: a refusal in the future would count as one of an unknown time.
    world.controller.shift_clock(shift).await.unwrap();
    let begun = Instant::now();
    first.signal(Signal::TERM).unwrap();
    world.controller.leads().await.unwrap();
    println!("the next replica leads {} ms after SIGTERM", begun.elapsed().as_millis());
    let status = tokio::time::timeout(SOON, first.exited()).await.unwrap();
    assert_eq!(status.code(), Some(0));
    // Busy with others, the new leader leaves this one alone.
    world.let_it_act("other").await;
    assert_eq!(world.evictions(), before + 1, "that of the other pod");
    world.delete_budget("web").await;
    world.until_gone(&pod, &evacuation).await;
    world.end();
}

pub async fn a_deadline_that_passed_while_nobody_looked_is_missed_only_after_evacuators_could_report(
    ground: &Ground,
) {
    // A lease that is soon over, because nobody gives it back.
    let lease = "5";
    let first = Arc::new(replica(&ground.cluster, lease).await);
    first.leads().await.unwrap();
    let mut world = ground.world(&first).await;
    let pod = world.pod("web-1", &["a.example.com", "b.example.com"]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_active(&evacuation, "a.example.com").await;
    // The report of an hour ago: everybody was away since.
    world.report(&evacuation, json!({"evacuationProgressTimestamp": "2026-01-01T00:00:00Z"})).await;
    first.signal(Signal::KILL).unwrap();
    let begun = jiff::Timestamp::now();
    world.controller = Arc::new(replica(&ground.cluster, lease).await);
    world.controller.leads().await.unwrap();
    world.let_it_act("other").await;
    world.controller.shift_clock(Duration::from_secs(31)).await.unwrap();
    let switched = world.until_active(&evacuation, "b.example.com").await;
    let at = switched.status.unwrap().evacuation_progress_timestamp.unwrap().0;
    let waited = at.duration_since(begun).as_secs();
    assert!(waited >= 29, "control passed on {waited} s after the start by the controller's clock");
    world.end();
}

pub async fn an_evacuation_that_arrives_before_its_pods_watch_event_is_not_a_failure(ground: &Ground) {
    let slow = Forwarder::start().await.unwrap();
    slow.add(ground.cluster.server.trim_start_matches("https://").parse().unwrap());
    let mut behind = ground.cluster.handle().clone();
    behind.server = format!("https://{}", slow.address());
    let controller = Arc::new(replica(&behind, "30").await);
    controller.leads().await.unwrap();
    let world = ground.world(&controller).await;
    world.let_it_act("other").await;

    // The watch of pods is the connection on which much comes when a pod changes often.
    let noisy = world.pod("noisy", &[]).await.name_any();
    let connections = slow.connections();
    let before: Vec<_> = connections.iter().map(|connection| connection.received()).collect();
    for n in 0..50 {
        let patch = Patch::Merge(json!({"metadata": {"annotations": {"n": n.to_string()}}}));
        world.pods().patch(&noisy, &PatchParams::default(), &patch).await.unwrap();
    }
    let (watch, _) =
        connections.iter().zip(before).max_by_key(|(one, before)| one.received() - before).unwrap();
    watch.hold(true);

    let pods = futures::future::join_all((0..5).map(async |n| {
        let pod = world.pod(&format!("web-{n}"), &[]).await;
        (world.evacuate(&pod).await, pod)
    }));
    for (evacuation, pod) in pods.await {
        world.until_gone(&pod, &evacuation).await;
    }
    let looked_up = world.requests().resource("pods", "").verb("get").only(|r| r.name.starts_with("web-"));
    assert!(looked_up.count() >= 5, "nothing was behind: {looked_up:?}");
    let refused = world.requests().resource("pods", "eviction").only(|r| r.code != 201);
    assert_eq!(refused.count(), 0, "{refused:?}");
    watch.hold(false);
    world.end();
}

pub async fn evacuations_go_on_after_an_outage_of_the_api_server(ground: &Ground) {
    let world = ground.fresh().await;
    let pod = world.pod("web-1", &[]).await;
    world.cluster.kill(Component::ApiServer).await.unwrap();
    world.cluster.start(Component::ApiServer).await.unwrap();
    let evacuation = world.evacuate(&pod).await;
    world.until_gone(&pod, &evacuation).await;
}

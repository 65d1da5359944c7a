//! Replicas, restarts, outages and watches that are behind.

use std::sync::Arc;
use std::time::{Duration, Instant};

use haulout_e2e::forwarder::Connection;
use haulout_e2e::{Component, Forwarder, objects, wait};
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use rustix::process::Signal;
use serde_json::json;

use super::{DEADLINE, Ground, SOON, World, blocked, failed, replica};

pub async fn backoff_survives_a_leader_change(ground: &Ground) {
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
    world.end().await;
}

pub async fn deadline_missed_in_a_gap_gets_a_grace_period(ground: &Ground) {
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
    world.end().await;
}

/// A namespace, and a controller of its own whose connections can be held.
async fn behind(ground: &Ground) -> (World, Forwarder) {
    let slow = Forwarder::start().await.unwrap();
    slow.add(ground.cluster.server.trim_start_matches("https://").parse().unwrap());
    let mut behind = ground.cluster.handle().clone();
    behind.server = format!("https://{}", slow.address());
    let controller = Arc::new(replica(&behind, "30").await);
    controller.leads().await.unwrap();
    (ground.world(&controller).await, slow)
}

/// The controller's watch of these objects: the connection on which much comes when one of them changes often.
async fn watch_of<K>(slow: &Forwarder, api: Api<K>, noisy: &str) -> Arc<Connection>
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let connections = slow.connections();
    let before: Vec<_> = connections.iter().map(|connection| connection.received()).collect();
    for n in 0..50 {
        let patch = Patch::Merge(json!({"metadata": {"annotations": {"n": n.to_string()}}}));
        api.patch(noisy, &PatchParams::default(), &patch).await.unwrap();
    }
    let with_most = connections.into_iter().zip(before).max_by_key(|(one, before)| one.received() - before);
    with_most.unwrap().0
}

pub async fn a_pod_that_is_gone_is_looked_up_once_if_the_cache_is_late(ground: &Ground) {
    let (world, slow) = behind(ground).await;
    // A budget covers it, and its name may come back: its UID is compared before it is evicted.
    world.budget(objects::pdb("web").namespace(&world.namespace).max_unavailable("1").build()).await;
    let pod = world.pod("web-1", &[]).await;
    let watch = watch_of(&slow, world.pods(), "web-1").await;
    world.let_it_act("other").await;
    watch.hold(true);
    world.pods().delete("web-1", &DeleteParams::default()).await.unwrap();
    wait::gone(world.pods(), "web-1", SOON).await.unwrap();
    let evacuation = world.evacuate(&pod).await;
    world.until_evacuation_gone(&evacuation).await;
    let looked_up = world.requests().resource("pods", "").verb("get").only(|r| r.name == "web-1");
    assert_eq!(looked_up.count(), 1, "{looked_up:?}");
    assert_eq!(world.requests().resource("pods", "eviction").only(|r| r.name == "web-1").count(), 0);
    assert!(world.controller.text().contains("pod is gone, and the cache is behind"));
    watch.hold(false);
    world.end().await;
}

pub async fn undelivered_report_stops_an_eviction(ground: &Ground) {
    let (world, slow) = behind(ground).await;
    world.budget(objects::pdb("web").namespace(&world.namespace).min_available("1").build()).await;
    let pod = world.pod("web-1", &["a.example.com"]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_active(&evacuation, "a.example.com").await;
    let shift = DEADLINE + Duration::from_secs(1);
    world.controller.shift_clock(shift).await.unwrap();
    world.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    let watch = watch_of(&slow, world.evacuations(), &evacuation).await;
    // Whatever it had still to say of this one is written.
    world.let_it_act("other").await;
    watch.hold(true);
    let reported = jiff::Timestamp::now().saturating_add(shift).unwrap();
    let progress = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(reported);
    world.report(&evacuation, json!({"evacuationProgressTimestamp": progress})).await;
    world.delete_budget("web").await;
    let refused = || {
        let writes = world.requests().resource("evacuations", "status").code(409);
        writes.only(|r| r.name == evacuation).count()
    };
    wait::eventually("the eviction is tried", SOON, async || {
        Ok((refused() > 0 || !world.is_left_alone(&pod).await).then_some(()))
    })
    .await
    .unwrap();
    assert!(world.is_left_alone(&pod).await, "its evacuator has reported");
    watch.hold(false);
    world.until(&evacuation, "is not blocked", |e| blocked(e).is_none()).await;
    assert!(world.is_left_alone(&pod).await);
    world.end().await;
}

pub async fn evacuation_may_arrive_before_its_pod(ground: &Ground) {
    let (world, slow) = behind(ground).await;
    world.let_it_act("other").await;
    let noisy = world.pod("noisy", &[]).await;
    let watch = watch_of(&slow, world.pods(), &noisy.name_any()).await;
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
    world.end().await;
}

pub async fn evacuations_go_on_after_an_outage_of_the_api_server(ground: &Ground) {
    let world = ground.fresh().await;
    let pod = world.pod("web-1", &[]).await;
    world.cluster.kill(Component::ApiServer).await.unwrap();
    world.cluster.start(Component::ApiServer).await.unwrap();
    let evacuation = world.evacuate(&pod).await;
    world.until_gone(&pod, &evacuation).await;
}

//! Replicas, restarts, outages and watches that lag.

use std::sync::Arc;
use std::time::{Duration, Instant};

use haulout_e2e::forwarder::Connection;
use haulout_e2e::{Component, Forwarder, objects, wait};
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use rustix::process::Signal;
use serde_json::json;

use super::{DEADLINE, SOON, TestEnv, TestNamespace, blocked, failed, replica};

pub async fn backoff_survives_a_leader_change(env: &TestEnv) {
    // Longer than the test waits: the next replica can only lead because the first one released the Lease.
    let lease = "600";
    let first = Arc::new(replica(&env.cluster, lease).await);
    first.leads().await.unwrap();
    let mut test = env.test_namespace(&first).await;
    test.budget(objects::pdb("web").namespace(&test.namespace).min_available("1").build()).await;
    let pod = test.pod("web-1", &[]).await;
    let evacuation = test.evacuate(&pod).await;
    test.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    // Several backoffs, so that the next attempt is far away.
    let mut shift = Duration::ZERO;
    for count in 2..8 {
        shift += Duration::from_secs(5 << (count - 2));
        test.controller.shift_clock(shift).await.unwrap();
        test.until(&evacuation, "was rejected again", |e| failed(e) >= count).await;
    }
    let before = test.evictions();
    test.controller = Arc::new(replica(&env.cluster, lease).await);
    test.controller.ready().await.unwrap();
    // The replicas' clocks agree: a rejection in the future would count as one at an unknown time.
    test.controller.shift_clock(shift).await.unwrap();
    let begun = Instant::now();
    first.signal(Signal::TERM).unwrap();
    test.controller.leads().await.unwrap();
    println!("the next replica leads {} ms after SIGTERM", begun.elapsed().as_millis());
    let status = tokio::time::timeout(SOON, first.exited()).await.unwrap();
    assert_eq!(status.code(), Some(0));
    // The new leader handles other Evacuations and does not retry this one.
    test.let_controller_act("other").await;
    assert_eq!(test.evictions(), before + 1, "the eviction of the other pod");
    test.delete_budget("web").await;
    test.until_gone(&pod, &evacuation).await;
    test.end().await;
}

pub async fn deadline_missed_in_a_gap_gets_a_grace_period(env: &TestEnv) {
    // A short Lease, because nobody releases it.
    let lease = "5";
    let first = Arc::new(replica(&env.cluster, lease).await);
    first.leads().await.unwrap();
    let mut test = env.test_namespace(&first).await;
    let pod = test.pod("web-1", &["a.example.com", "b.example.com"]).await;
    let evacuation = test.evacuate(&pod).await;
    test.until_active(&evacuation, "a.example.com").await;
    // The last report is an hour old: no controller ran since.
    test.report(&evacuation, json!({"evacuationProgressTimestamp": "2026-01-01T00:00:00Z"})).await;
    first.signal(Signal::KILL).unwrap();
    let begun = jiff::Timestamp::now();
    test.controller = Arc::new(replica(&env.cluster, lease).await);
    test.controller.leads().await.unwrap();
    test.let_controller_act("other").await;
    test.controller.shift_clock(Duration::from_secs(31)).await.unwrap();
    let switched = test.until_active(&evacuation, "b.example.com").await;
    let at = switched.status.unwrap().evacuation_progress_timestamp.unwrap().0;
    let waited = at.duration_since(begun).as_secs();
    assert!(
        waited >= 29,
        "the next evacuator was active {waited} s after the start by the controller's clock"
    );
    test.end().await;
}

/// A namespace with its own controller whose connections can be delayed.
async fn with_slow_watches(env: &TestEnv) -> (TestNamespace, Forwarder) {
    let slow = Forwarder::start().await.unwrap();
    slow.add(env.cluster.server.trim_start_matches("https://").parse().unwrap());
    let mut handle = env.cluster.handle().clone();
    handle.server = format!("https://{}", slow.address());
    let controller = Arc::new(replica(&handle, "30").await);
    controller.leads().await.unwrap();
    (env.test_namespace(&controller).await, slow)
}

/// The controller's watch of these objects: the connection with the most traffic when one of them changes often.
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

pub async fn deleted_pod_is_looked_up_once_when_the_cache_lags(env: &TestEnv) {
    let (test, slow) = with_slow_watches(env).await;
    // A budget covers the pod, and its name may be reused: its UID is compared before the eviction.
    test.budget(objects::pdb("web").namespace(&test.namespace).max_unavailable("1").build()).await;
    let pod = test.pod("web-1", &[]).await;
    let watch = watch_of(&slow, test.pods(), "web-1").await;
    test.let_controller_act("other").await;
    watch.hold(true);
    test.pods().delete("web-1", &DeleteParams::default()).await.unwrap();
    wait::gone(test.pods(), "web-1", SOON).await.unwrap();
    let evacuation = test.evacuate(&pod).await;
    test.until_evacuation_gone(&evacuation).await;
    let looked_up = test.requests().resource("pods", "").verb("get").only(|r| r.name == "web-1");
    assert_eq!(looked_up.count(), 1, "{looked_up:?}");
    assert_eq!(test.requests().resource("pods", "eviction").only(|r| r.name == "web-1").count(), 0);
    assert!(test.controller.text().contains("pod is gone, cache is stale"));
    watch.hold(false);
    test.end().await;
}

pub async fn undelivered_report_stops_an_eviction(env: &TestEnv) {
    let (test, slow) = with_slow_watches(env).await;
    test.budget(objects::pdb("web").namespace(&test.namespace).min_available("1").build()).await;
    let pod = test.pod("web-1", &["a.example.com"]).await;
    let evacuation = test.evacuate(&pod).await;
    test.until_active(&evacuation, "a.example.com").await;
    let shift = DEADLINE + Duration::from_secs(1);
    test.controller.shift_clock(shift).await.unwrap();
    test.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    let watch = watch_of(&slow, test.evacuations(), &evacuation).await;
    // All pending writes of the controller for this Evacuation are done.
    test.let_controller_act("other").await;
    watch.hold(true);
    let reported = jiff::Timestamp::now().saturating_add(shift).unwrap();
    let progress = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(reported);
    test.report(&evacuation, json!({"evacuationProgressTimestamp": progress})).await;
    test.delete_budget("web").await;
    let rejected = || {
        let writes = test.requests().resource("evacuations", "status").code(409);
        writes.only(|r| r.name == evacuation).count()
    };
    wait::eventually("the eviction is attempted", SOON, async || {
        Ok((rejected() > 0 || !test.is_not_terminating(&pod).await).then_some(()))
    })
    .await
    .unwrap();
    assert!(test.is_not_terminating(&pod).await, "its evacuator has reported");
    watch.hold(false);
    test.until(&evacuation, "is not blocked", |e| blocked(e).is_none()).await;
    assert!(test.is_not_terminating(&pod).await);
    test.end().await;
}

pub async fn evacuation_may_arrive_before_its_pod(env: &TestEnv) {
    let (test, slow) = with_slow_watches(env).await;
    test.let_controller_act("other").await;
    let noisy = test.pod("noisy", &[]).await;
    let watch = watch_of(&slow, test.pods(), &noisy.name_any()).await;
    watch.hold(true);

    let pods = futures::future::join_all((0..5).map(async |n| {
        let pod = test.pod(&format!("web-{n}"), &[]).await;
        (test.evacuate(&pod).await, pod)
    }));
    for (evacuation, pod) in pods.await {
        test.until_gone(&pod, &evacuation).await;
    }
    let looked_up = test.requests().resource("pods", "").verb("get").only(|r| r.name.starts_with("web-"));
    assert!(looked_up.count() >= 5, "no watch was delayed: {looked_up:?}");
    let rejected = test.requests().resource("pods", "eviction").only(|r| r.code != 201);
    assert_eq!(rejected.count(), 0, "{rejected:?}");
    watch.hold(false);
    test.end().await;
}

pub async fn evacuations_continue_after_an_api_server_outage(env: &TestEnv) {
    let test = env.test_namespace_with_controller().await;
    let pod = test.pod("web-1", &[]).await;
    test.cluster.kill(Component::ApiServer).await.unwrap();
    test.cluster.start(Component::ApiServer).await.unwrap();
    let evacuation = test.evacuate(&pod).await;
    test.until_gone(&pod, &evacuation).await;
}

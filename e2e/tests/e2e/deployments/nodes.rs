//! Two nodes are drained at the same time.

use std::collections::BTreeSet;

use super::*;

/// The replacement starts on a node that is drained before it is ready. It leaves, and another one starts elsewhere. The old pod
/// stays meanwhile.
pub async fn replacement_lands_on_a_node_under_maintenance(env: &Env) {
    let slow = objects::deployment("web").pods(|pod| pod.annotation("haulout.test/ready-after", "8s"));
    let app = App::with(env, "second-node", &["a", "b", "c"], slow).await;
    app.open(&["b"]).await;
    let (old, endpoints) = (app.pod().await, EndpointWatch::start(&app).await);
    app.drain().await;
    let second = app.scenario.of("b");
    let replacement = app.until_pod("is on node b", |pod| is_on(pod, &second)).await;
    app.drain_node("b").await;
    app.scenario.until_cordoned("b").await;
    app.scenario.until_pod_gone(&replacement.name_any()).await;
    app.open(&["c"]).await;
    app.scenario.until_drained("a").await;
    app.scenario.until_drained("b").await;
    app.scenario.until_pod_gone(&old.name_any()).await;
    let third = app.scenario.of("c");
    app.until_pods("are on node c", |pods| {
        pods.len() == 1 && pods.iter().all(|pod| is_on(pod, &third) && is_ready(pod))
    })
    .await;
    app.is_as_before().await;
    assert_eq!(endpoints.least(), 1);
    app.scenario.delete("a").await;
    app.scenario.delete("b").await;
}

/// At most maxSurge pods are moved at once over both Evacuations of a Deployment, and all that wait report their places.
pub async fn two_nodes_are_drained_at_once(env: &Env) {
    let app = App::new(env, "two-nodes", &["a", "b", "c"], 3).await;
    scaling::scale_up_on(&app, "b", &["a"], 6).await;
    let endpoints = EndpointWatch::start(&app).await;
    futures::join!(app.drain_node("a"), app.drain_node("b"));
    // Of six pods, 25% are moved at once, rounded up.
    let places: BTreeSet<_> = (1..=4).map(|place| format!("place {place}:")).collect();
    let config = watcher::Config::default();
    let report = |evacuations: &[Evacuation]| {
        let messages: Vec<_> = evacuations.iter().map(message).collect();
        places.iter().all(|place| messages.iter().any(|message| message.contains(place)))
    };
    let evacuations = wait::all(app.scenario.evacuations(), config, "report their places", SOON, report);
    app.explained(evacuations.await);
    let most = Arc::new(Mutex::new(0));
    let (nodes, count) = ([app.scenario.of("a"), app.scenario.of("b")], Arc::clone(&most));
    app.open(&["c"]).await;
    app.until_pods("leave both nodes", |pods| {
        let moved = pods.iter().filter(|pod| is_moved(pod) && !is_terminating(pod)).count();
        let mut most = count.lock().unwrap();
        *most = moved.max(*most);
        !pods.iter().any(|pod| nodes.iter().any(|node| is_on(pod, node)))
    })
    .await;
    assert_eq!(*most.lock().unwrap(), 2);
    assert_eq!(endpoints.least(), 6);
    app.scenario.until_drained("a").await;
    app.scenario.until_drained("b").await;
    app.until_pods("are as before", |pods| pods.len() == 6 && pods.iter().all(is_untouched)).await;
    app.scenario.delete("a").await;
    app.scenario.delete("b").await;
}

//! Restarts, outages and what cannot be read, and what is written in all that time. With the admission webhook on.

use haulout_e2e::{Component, Mark, Requests};

use super::*;

/// One after the other: each disturbs the whole cluster, or needs it at rest.
#[tokio::test]
async fn drain_survives_faults_and_writes_little() {
    let world = World::with_webhook("maintenance-trouble").await;
    let scenarios = scenarios![&world;
        status_is_written_once_a_second_and_not_at_rest,
        super::waiting::an_absent_evacuation_controller_is_a_blocker,
        super::waiting::removed_annotation_is_restored_with_backoff,
        completion_and_deletion_need_no_write_of_the_status,
        new_leader_requests_nothing_after_completion_or_deletion,
        a_new_leader_carries_on_where_the_old_one_died,
        a_drain_goes_on_after_an_outage_of_the_api_server,
        unreadable_maintenance_holds_only_its_nodes,
        unreadable_rule_keeps_pods_it_may_match,
    ];
    one_by_one(scenarios).await;
}

/// What the maintenance controller has written since, but for its Lease.
fn written(world: &World, since: Mark) -> Requests {
    let account = "system:serviceaccount:haulout-system:haulout-maintenance-controller";
    let requests = world.cluster.requests_since(since).unwrap().by_user(account).writes();
    requests.only(|request| request.resource != "leases")
}

async fn status_is_written_once_a_second_and_not_at_rest(world: &World) {
    const PODS: usize = 40;
    let scene = world.scene("writes").await;
    scene.node("n1", "blue").await;
    scene.deploy(objects::deployment("web").replicas(40).pods(|pod| pod.grace(1)), &["blue", "green"]).await;
    scene.until_run_on("n1", PODS).await;
    scene.node("n2", "green").await;
    let begun = world.cluster.requests_mark().unwrap();
    scene.maintain("blue", "blue", Stage::Drain).await;
    let drained = scene.until_drained("blue").await;
    assert_eq!(drain(&drained).pods_evacuated, 40);
    scene.until_event("blue", names::event::DRAINED).await;
    scene
        .until_node("n1", "is drained", |node| {
            condition(node, names::condition::DRAINED).is_some_and(|(status, _)| status == "True")
        })
        .await;
    let statuses = written(world, begun).resource("nodemaintenances", "status");
    let times: Vec<_> = statuses.iter().map(|request| request.received).collect();
    // One a second, besides the first, which says that the stage has begun. Requests do not all travel equally fast,
    // so that what counts is how many there are.
    let (first, last) = (times[0], times[times.len() - 1]);
    let seconds = last.duration_since(first).as_secs();
    assert!(times.len() <= 3 + usize::try_from(seconds).unwrap(), "these are too many: {times:?}");

    // At rest, for as long as it takes to renew the Lease three times.
    let rest = world.cluster.requests_mark().unwrap();
    let renewed = wait::eventually("the lease is renewed three times", SOON, async || {
        let requests = world.cluster.requests_since(rest)?.writes();
        let renewals = requests.only(|r| r.resource == "leases" && r.name.contains("maintenance"));
        Ok((renewals.count() >= 3).then_some(()))
    });
    scene.explained(renewed.await);
    let restless: Vec<_> = written(world, rest).iter().cloned().collect();
    assert!(restless.is_empty(), "{restless:?}");
    scene.delete("blue").await;
}

async fn completion_and_deletion_need_no_write_of_the_status(world: &World) {
    let scene = world.scene("at-once").await;
    let mut held = Vec::new();
    for (name, pool) in [("done", "blue"), ("deleted", "green")] {
        let node = scene.node(pool, pool).await;
        let pod = scene.slow_pod(pool, pool).await;
        scene.maintain(name, pool, Stage::Drain).await;
        scene.in_charge(&pod).await;
        scene.until(name, "evacuates", |m| drain(m).pods_evacuating == 1).await;
        held.push((node, scene.refuse_maintenance(name, "nodemaintenances/status").await));
    }
    scene.set_stage("done", Stage::Complete).await;
    scene.maintenances().delete(&scene.of("deleted"), &DeleteParams::default()).await.unwrap();
    for (before, _) in &held {
        scene.until_as_before(before).await;
    }
    scene.until_evacuating(&[]).await;
    for (_, binding) in &held {
        scene.lift(binding).await;
    }
    scene.until_completed("done").await;
    scene.explained(wait::gone(scene.maintenances(), &scene.of("deleted"), SOON).await);
}

async fn new_leader_requests_nothing_after_completion_or_deletion(world: &World) {
    let scene = world.scene("too-late").await;
    let pools = ["blue", "green"];
    for pool in pools {
        scene.node(pool, pool).await;
        let pod = scene.slow_pod(pool, pool).await;
        scene.maintain(pool, pool, Stage::Drain).await;
        scene.in_charge(&pod).await;
    }
    world.stop_controller();
    let scene = &scene;
    let pods = pools.into_iter().flat_map(|pool| (0..10).map(move |number| (pool, number)));
    let pods = pods.map(async |(pool, number)| scene.pod(&format!("{pool}-{number}"), pool).await);
    futures::future::join_all(pods).await;
    scene.set_stage("blue", Stage::Complete).await;
    scene.maintenances().delete(&scene.of("green"), &DeleteParams::default()).await.unwrap();
    let begun = world.cluster.requests_mark().unwrap();
    world.start_controller().await;
    scene.until_completed("blue").await;
    scene.explained(wait::gone(scene.maintenances(), &scene.of("green"), SOON).await);
    let made = written(world, begun).verb("create").resource("evacuations", "");
    assert_eq!(made.count(), 0, "{:?}", made.iter().next());
    scene.until_evacuating(&[]).await;
}

async fn a_drain_goes_on_after_an_outage_of_the_api_server(world: &World) {
    let scene = world.scene("outage").await;
    let before = scene.node("n1", "blue").await;
    let first = scene.slow_pod("web-1", "n1").await;
    scene.pod_from(objects::pod("web-2").priority_class("system-cluster-critical"), "n1").await;
    scene.maintain("blue", "blue", Stage::Drain).await;
    scene.in_charge(&first).await;
    world.cluster.restart(Component::ApiServer).await.unwrap();
    scene.pods().delete("web-1", &DeleteParams::default().grace_period(0)).await.unwrap();
    scene.until_pod_gone("web-2").await;
    let drained = scene.until_drained("blue").await;
    assert_eq!(drain(&drained).pods_evacuated, 2);
    scene.set_stage("blue", Stage::Complete).await;
    scene.until_completed("blue").await;
    scene.until_as_before(&before).await;
    scene.until_evacuating(&[]).await;
}

async fn unreadable_maintenance_holds_only_its_nodes(world: &World) {
    let scene = world.scene("unreadable").await;
    let before = scene.node("n1", "blue").await;
    scene.node("n2", "green").await;
    scene.maintain("known", "blue", Stage::Cordon).await;
    let newer = scene.maintain("newer", "green", Stage::Cordon).await;
    scene.until_cordoned("n1").await;
    scene.until_cordoned("n2").await;
    // As a later version might have stored it, with the finalizer and status that it had.
    let newer = scene.maintenances().get(&newer.name_any()).await.unwrap();
    let store = async |stage: &str| {
        let mut object = json!(newer);
        object["spec"]["stage"] = json!(stage);
        scene.store("nodemaintenances", object).await;
    };
    store("Hibernate").await;
    world.roll_controller().await;
    // Nodes that are not its own are released as always.
    scene.set_stage("known", Stage::Complete).await;
    scene.until_completed("known").await;
    scene.until_as_before(&before).await;
    let told = scene.until_event("newer", names::event::NOT_FOLLOWED).await;
    assert!(told.contains("Hibernate"), "{told}");
    // Its own one is not, even if it no longer matches any selector that can be read.
    scene.patch_node("n2", json!({"metadata": {"labels": {"pool": scene.of("other")}}})).await;
    scene.maintain("beside", "other", Stage::Cordon).await;
    let both = |node: &Node| node.annotations()[names::MAINTENANCE_STATUS_ANNOTATION].contains("beside");
    scene.until_node("n2", "is held by both", both).await;
    scene.set_stage("beside", Stage::Complete).await;
    let held_back = |m: &NodeMaintenance| {
        let conditions = m.status.iter().flat_map(|status| &status.conditions);
        conditions
            .into_iter()
            .any(|c| c.message.contains("held by a NodeMaintenance that cannot be followed"))
    };
    scene.until("beside", "is held back", held_back).await;
    let node = scene.nodes().get(&scene.of("n2")).await.unwrap();
    assert!(is_cordoned(&node) && is_marked(&node), "n2 was released");
    store("Cordon").await;
    scene.until_completed("beside").await;
    scene.until_node("n2", "is schedulable", |node| !is_cordoned(node) && !is_marked(node)).await;
    scene.delete("newer").await;
}

async fn unreadable_rule_keeps_pods_it_may_match(world: &World) {
    let scene = world.scene("unclear").await;
    scene.node("n1", "blue").await;
    for pod in ["db", "web"] {
        scene.pod_from(objects::pod(pod).label("app", pod), "n1").await;
    }
    let skip = json!({"drain": {"behavior": "Skip"}, "pods": [{"selector": {"matchLabels": {"app": "db"}}}]});
    scene.rule("keep", skip).await;
    let mut rule = json!(scene.rules().get(&scene.of("keep")).await.unwrap());
    rule["spec"]["drain"]["behavior"] = json!("Freeze");
    scene.store("drainrules", rule).await;
    world.roll_controller().await;
    scene.maintain("m", "blue", Stage::Drain).await;
    let reason = names::reason::DRAIN_RULE_UNREADABLE;
    let blocked = scene.until_blocked("m", &[(Some("db"), reason), (Some("web"), reason)]).await;
    let message = &drain(&blocked).blockers[0].message;
    assert!(message.contains(&scene.of("keep")), "{message}");
    assert_eq!(scene.evacuated().await, BTreeSet::new());
    let mend = Patch::Merge(json!({"spec": {"drain": {"behavior": "Skip"}}}));
    scene.rules().patch(&scene.of("keep"), &PatchParams::default(), &mend).await.unwrap();
    scene.until_drained("m").await;
    scene.until_pod_gone("web").await;
    assert!(scene.pods().get("db").await.is_ok(), "it was to be kept");
    scene.delete("m").await;
}

impl Scene<'_> {
    /// Puts an object into etcd, as a later version might have stored it.
    async fn store(&self, resource: &str, mut object: Value) {
        object["metadata"].as_object_mut().unwrap().remove("resourceVersion");
        let name = object["metadata"]["name"].as_str().unwrap();
        let key = format!("/registry/nodemaintenance.k8s.io/{resource}/{name}");
        self.world.cluster.etcd().unwrap().put(vec![(key, object.to_string().into_bytes())]).await.unwrap();
    }
}

async fn a_new_leader_carries_on_where_the_old_one_died(world: &World) {
    let scene = world.scene("replicas").await;
    let before = scene.node("n1", "blue").await;
    scene.pod("web-1", "n1").await;
    let pod = scene.slow_pod("web-2", "n1").await;
    scene.maintain("blue", "blue", Stage::Drain).await;
    let evacuation = scene.in_charge(&pod).await;
    scene.until("blue", "is halfway", |m| (drain(m).pods_evacuated, drain(m).pods_left) == (1, 1)).await;
    world.kill_controller().await;
    // While nobody leads, the node is uncordoned and the pod leaves.
    scene.patch_node("n1", json!({"spec": {"unschedulable": false}})).await;
    let status = Patch::Merge(json!({"status": {"activeEvacuatorCompleted": true}}));
    scene.evacuations().patch_status(&evacuation, &PatchParams::default(), &status).await.unwrap();
    scene.until_pod_gone("web-2").await;
    world.controller().leads().await.unwrap();
    scene.until_cordoned("n1").await;
    scene.until_drained("blue").await;
    scene.delete("blue").await;
    scene.until_as_before(&before).await;
}

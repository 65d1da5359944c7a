//! Restarts, outages and unreadable objects, and the number of writes during all that. The admission webhook is
//! enabled.

use haulout_e2e::{Component, Mark, Requests};

use super::*;

/// One after the other: each scenario disturbs the whole cluster, or needs it at rest.
#[tokio::test]
async fn drain_survives_faults_and_writes_little() {
    let env = TestEnv::with_webhook("maintenance-faults").await;
    let scenarios = scenarios![&env;
        status_is_written_once_a_second_and_not_at_rest,
        super::gitops::maintenance_in_git_stays_in_sync,
        super::gitops::evacuations_are_marked_for_argo_cd,
        super::waiting::missing_evacuation_controller_is_a_blocker,
        super::waiting::removed_annotation_is_restored_with_backoff,
        completion_and_deletion_work_without_status_writes,
        new_leader_requests_nothing_after_completion_or_deletion,
        new_leader_continues_the_drain,
        drain_continues_after_an_api_server_outage,
        unreadable_maintenance_holds_only_its_nodes,
        unreadable_rule_keeps_pods_it_may_match,
    ];
    one_by_one(scenarios).await;
}

/// The maintenance controller's writes since then, except for its Lease.
fn written(env: &TestEnv, since: Mark) -> Requests {
    let account = "system:serviceaccount:haulout-system:haulout-maintenance-controller";
    let requests = env.cluster.requests_since(since).unwrap().by_user(account).writes();
    requests.only(|request| request.resource != "leases")
}

async fn status_is_written_once_a_second_and_not_at_rest(env: &TestEnv) {
    const PODS: usize = 40;
    let scenario = env.scenario("writes").await;
    scenario.node("n1", "blue").await;
    scenario
        .deploy(objects::deployment("web").replicas(40).pods(|pod| pod.grace(1)), &["blue", "green"])
        .await;
    scenario.until_run_on("n1", PODS).await;
    scenario.node("n2", "green").await;
    let begun = env.cluster.requests_mark().unwrap();
    scenario.maintain("blue", "blue", Stage::Drain).await;
    let drained = scenario.until_drained("blue").await;
    assert_eq!(drain(&drained).pods_evacuated, 40);
    scenario.until_event("blue", names::event::DRAINED).await;
    scenario
        .until_node("n1", "is drained", |node| {
            condition(node, names::condition::DRAINED).is_some_and(|(status, _)| status == "True")
        })
        .await;
    let statuses = written(env, begun).resource("nodemaintenances", "status");
    let times: Vec<_> = statuses.iter().map(|request| request.received).collect();
    // One write per second, plus the first, which reports the start of the stage. Requests take different times, so
    // the number of writes is what counts.
    let (first, last) = (times[0], times[times.len() - 1]);
    let seconds = last.duration_since(first).as_secs();
    assert!(times.len() <= 3 + usize::try_from(seconds).unwrap(), "these are too many: {times:?}");

    // At rest, for three renewals of the Lease.
    let rest = env.cluster.requests_mark().unwrap();
    let renewed = wait::eventually("the lease is renewed three times", SOON, async || {
        let requests = env.cluster.requests_since(rest)?.writes();
        let renewals = requests.only(|r| r.resource == "leases" && r.name.contains("maintenance"));
        Ok((renewals.count() >= 3).then_some(()))
    });
    scenario.explained(renewed.await);
    let restless: Vec<_> = written(env, rest).iter().cloned().collect();
    assert!(restless.is_empty(), "{restless:?}");
    scenario.delete("blue").await;
}

async fn completion_and_deletion_work_without_status_writes(env: &TestEnv) {
    let scenario = env.scenario("at-once").await;
    let mut held = Vec::new();
    for (name, pool) in [("done", "blue"), ("deleted", "green")] {
        let node = scenario.node(pool, pool).await;
        let pod = scenario.slow_pod(pool, pool).await;
        scenario.maintain(name, pool, Stage::Drain).await;
        scenario.until_evacuator_active(&pod).await;
        scenario.until(name, "evacuates", |m| drain(m).pods_evacuating == 1).await;
        held.push((node, scenario.reject_maintenance(name, "nodemaintenances/status").await));
    }
    scenario.set_stage("done", Stage::Complete).await;
    scenario.maintenances().delete(&scenario.of("deleted"), &DeleteParams::default()).await.unwrap();
    for (before, _) in &held {
        scenario.until_restored(before).await;
    }
    scenario.until_evacuating(&[]).await;
    for (_, binding) in &held {
        scenario.lift(binding).await;
    }
    scenario.until_completed("done").await;
    scenario.explained(wait::gone(scenario.maintenances(), &scenario.of("deleted"), SOON).await);
}

async fn new_leader_requests_nothing_after_completion_or_deletion(env: &TestEnv) {
    let scenario = env.scenario("too-late").await;
    let pools = ["blue", "green"];
    for pool in pools {
        scenario.node(pool, pool).await;
        let pod = scenario.slow_pod(pool, pool).await;
        scenario.maintain(pool, pool, Stage::Drain).await;
        scenario.until_evacuator_active(&pod).await;
    }
    env.stop_controller();
    let scenario = &scenario;
    let pods = pools.into_iter().flat_map(|pool| (0..10).map(move |number| (pool, number)));
    let pods = pods.map(async |(pool, number)| scenario.pod(&format!("{pool}-{number}"), pool).await);
    futures::future::join_all(pods).await;
    scenario.set_stage("blue", Stage::Complete).await;
    scenario.maintenances().delete(&scenario.of("green"), &DeleteParams::default()).await.unwrap();
    let begun = env.cluster.requests_mark().unwrap();
    env.start_controller().await;
    scenario.until_completed("blue").await;
    scenario.explained(wait::gone(scenario.maintenances(), &scenario.of("green"), SOON).await);
    let made = written(env, begun).verb("create").resource("evacuations", "");
    assert_eq!(made.count(), 0, "{:?}", made.iter().next());
    scenario.until_evacuating(&[]).await;
}

async fn drain_continues_after_an_api_server_outage(env: &TestEnv) {
    let scenario = env.scenario("outage").await;
    let before = scenario.node("n1", "blue").await;
    let first = scenario.slow_pod("web-1", "n1").await;
    scenario.pod_from(objects::pod("web-2").priority_class("system-cluster-critical"), "n1").await;
    scenario.maintain("blue", "blue", Stage::Drain).await;
    scenario.until_evacuator_active(&first).await;
    env.cluster.restart(Component::ApiServer).await.unwrap();
    scenario.pods().delete("web-1", &DeleteParams::default().grace_period(0)).await.unwrap();
    scenario.until_pod_gone("web-2").await;
    let drained = scenario.until_drained("blue").await;
    assert_eq!(drain(&drained).pods_evacuated, 2);
    scenario.set_stage("blue", Stage::Complete).await;
    scenario.until_completed("blue").await;
    scenario.until_restored(&before).await;
    scenario.until_evacuating(&[]).await;
}

async fn unreadable_maintenance_holds_only_its_nodes(env: &TestEnv) {
    let scenario = env.scenario("unreadable").await;
    let before = scenario.node("n1", "blue").await;
    scenario.node("n2", "green").await;
    scenario.maintain("known", "blue", Stage::Cordon).await;
    let newer = scenario.maintain("newer", "green", Stage::Cordon).await;
    scenario.until_cordoned("n1").await;
    scenario.until_cordoned("n2").await;
    // As a later version might have stored it, with its finalizer and status.
    let newer = scenario.maintenances().get(&newer.name_any()).await.unwrap();
    let store = async |stage: &str| {
        let mut object = json!(newer);
        object["spec"]["stage"] = json!(stage);
        scenario.store("nodemaintenances", object).await;
    };
    store("Hibernate").await;
    env.rollout_restart_controller().await;
    // Nodes of other maintenances are released as usual.
    scenario.set_stage("known", Stage::Complete).await;
    scenario.until_completed("known").await;
    scenario.until_restored(&before).await;
    let message = scenario.until_event("newer", names::event::UNREADABLE).await;
    assert!(message.contains("Hibernate"), "{message}");
    // Its own node is not released, even if no readable selector matches it.
    scenario.patch_node("n2", json!({"metadata": {"labels": {"pool": scenario.of("other")}}})).await;
    scenario.maintain("overlapping", "other", Stage::Cordon).await;
    let both = |node: &Node| node.annotations()[names::MAINTENANCE_STATUS_ANNOTATION].contains("overlapping");
    scenario.until_node("n2", "is held by both", both).await;
    scenario.set_stage("overlapping", Stage::Complete).await;
    let held_back = |m: &NodeMaintenance| {
        let conditions = m.status.iter().flat_map(|status| &status.conditions);
        conditions.into_iter().any(|c| c.message.contains("held by an unreadable NodeMaintenance"))
    };
    scenario.until("overlapping", "is blocked by it", held_back).await;
    let node = scenario.nodes().get(&scenario.of("n2")).await.unwrap();
    assert!(is_cordoned(&node) && is_marked(&node), "n2 was released");
    store("Cordon").await;
    scenario.until_completed("overlapping").await;
    scenario.until_node("n2", "is schedulable", |node| !is_cordoned(node) && !is_marked(node)).await;
    scenario.delete("newer").await;
}

async fn unreadable_rule_keeps_pods_it_may_match(env: &TestEnv) {
    let scenario = env.scenario("unclear").await;
    scenario.node("n1", "blue").await;
    for pod in ["db", "web"] {
        scenario.pod_from(objects::pod(pod).label("app", pod), "n1").await;
    }
    let skip = json!({"drain": {"behavior": "Skip"}, "pods": [{"selector": {"matchLabels": {"app": "db"}}}]});
    scenario.rule("keep", skip).await;
    let mut rule = json!(scenario.rules().get(&scenario.of("keep")).await.unwrap());
    rule["spec"]["drain"]["behavior"] = json!("Freeze");
    scenario.store("drainrules", rule).await;
    env.rollout_restart_controller().await;
    scenario.maintain("m", "blue", Stage::Drain).await;
    let reason = names::reason::DRAIN_RULE_UNREADABLE;
    let blocked = scenario.until_blocked("m", &[(Some("db"), reason), (Some("web"), reason)]).await;
    let message = &drain(&blocked).blockers[0].message;
    assert!(message.contains(&scenario.of("keep")), "{message}");
    assert_eq!(scenario.pods_with_evacuation().await, BTreeSet::new());
    let readable = Patch::Merge(json!({"spec": {"drain": {"behavior": "Skip"}}}));
    scenario.rules().patch(&scenario.of("keep"), &PatchParams::default(), &readable).await.unwrap();
    scenario.until_drained("m").await;
    scenario.until_pod_gone("web").await;
    assert!(scenario.pods().get("db").await.is_ok(), "the rule keeps this pod");
    scenario.delete("m").await;
}

impl Scenario<'_> {
    /// Writes an object to etcd, as a later version might have stored it.
    async fn store(&self, resource: &str, mut object: Value) {
        object["metadata"].as_object_mut().unwrap().remove("resourceVersion");
        let name = object["metadata"]["name"].as_str().unwrap();
        let key = format!("/registry/nodemaintenance.k8s.io/{resource}/{name}");
        self.env.cluster.etcd().unwrap().put(vec![(key, object.to_string().into_bytes())]).await.unwrap();
    }
}

async fn new_leader_continues_the_drain(env: &TestEnv) {
    let scenario = env.scenario("replicas").await;
    let before = scenario.node("n1", "blue").await;
    scenario.pod("web-1", "n1").await;
    let pod = scenario.slow_pod("web-2", "n1").await;
    scenario.maintain("blue", "blue", Stage::Drain).await;
    let evacuation = scenario.until_evacuator_active(&pod).await;
    scenario.until("blue", "is halfway", |m| (drain(m).pods_evacuated, drain(m).pods_left) == (1, 1)).await;
    env.kill_controller().await;
    // While no controller leads, the node is uncordoned and the pod leaves.
    scenario.patch_node("n1", json!({"spec": {"unschedulable": false}})).await;
    let status = Patch::Merge(json!({"status": {"activeEvacuatorCompleted": true}}));
    scenario.evacuations().patch_status(&evacuation, &PatchParams::default(), &status).await.unwrap();
    scenario.until_pod_gone("web-2").await;
    env.controller().leads().await.unwrap();
    scenario.until_cordoned("n1").await;
    scenario.until_drained("blue").await;
    scenario.delete("blue").await;
    scenario.until_restored(&before).await;
}

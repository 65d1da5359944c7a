//! Several maintenances on the same nodes.

use futures::future::join_all;

use super::*;

pub async fn maintenances_sharing_a_node_finish_in_any_order(env: &TestEnv) {
    let scenario = env.scenario("overlap").await;
    let (blue, shared, green) = (
        scenario.node("n1", "blue").await,
        scenario.node("n2", "shared").await,
        scenario.node("n3", "green").await,
    );
    let pod = scenario.slow_pod("web-1", "n2").await;
    for (round, [first, second]) in [["a", "b"], ["b", "a"]].into_iter().enumerate() {
        let name = |which: &str| format!("{which}-{round}");
        scenario.maintain(&name("a"), "blue,shared", Stage::Drain).await;
        scenario.maintain(&name("b"), "green,shared", Stage::Drain).await;
        for node in ["n1", "n2", "n3"] {
            scenario.until_cordoned(node).await;
        }
        scenario.until_evacuator_active(&pod).await;
        scenario.set_stage(&name(first), Stage::Complete).await;
        scenario.until_completed(&name(first)).await;
        let (released, held) = if first == "a" { (&blue, &green) } else { (&green, &blue) };
        scenario.until_restored(released).await;
        for node in [&shared, held] {
            let node = scenario.nodes().get(&node.name_any()).await.unwrap();
            assert!(is_cordoned(&node) && is_marked(&node), "{} is still under maintenance", node.name_any());
        }
        let evacuation =
            scenario.evacuations().get(&scenario.until_evacuator_active(&pod).await).await.unwrap();
        assert!(
            evacuation.has_instigator(names::instigator::NODE_MAINTENANCE),
            "the other maintenance needs it"
        );
        scenario.set_stage(&name(second), Stage::Complete).await;
        scenario.until_completed(&name(second)).await;
        for node in [&blue, &shared, &green] {
            scenario.until_restored(node).await;
        }
        scenario.until_evacuating(&[]).await;
    }
    assert_eq!(scenario.pods().get("web-1").await.unwrap().uid(), pod.uid());
}

/// Number of pods pending and evacuating, message, and the priority of the drain targets.
type Says<'a> = (i32, i32, &'a str, i32);

impl Scenario<'_> {
    async fn until_says(&self, name: &str, says: Says<'_>) {
        let what = format!("says {says:?}");
        let name = &self.of(name);
        let found = wait::present(self.maintenances(), name, &what, SOON, |m| {
            let status = drain(m);
            let reached: Vec<_> =
                status.reached_drain_targets.iter().map(|entry| entry.pod_priority).collect();
            (status.pods_pending_evacuation, status.pods_evacuating, status.drain_message.as_str())
                == (says.0, says.1, says.2)
                && reached == [says.3]
        });
        if let Err(error) = found.await {
            panic!("{error:#}, but {:?}", drain(&self.maintenances().get(name).await.unwrap()));
        }
    }

    async fn until_node_says(&self, name: &str, message: &str, priority: i32) {
        let expected = json!({
            "drainTargets": [{"podPriority": priority, "podType": "Default"}],
            "drainMessage": message,
        });
        let says = |node: &Node| -> Option<Value> {
            let text = node.annotations().get(names::MAINTENANCE_STATUS_ANNOTATION)?;
            let mut status: Value = serde_json::from_str(text).ok()?;
            status.as_object_mut()?.remove("maintenances");
            Some(status)
        };
        let what = format!("says {message:?} at {priority}");
        let name = &self.of(name);
        let found =
            wait::present(self.nodes(), name, &what, SOON, |node| says(node).as_ref() == Some(&expected));
        if let Err(error) = found.await {
            panic!("{error:#}, but {:?}", says(&self.nodes().get(name).await.unwrap()));
        }
    }

    /// Creates this many pods of this priority on this node, each with a slow evacuator.
    async fn create_slow_pods(&self, node: &str, number: usize, priority: i32) {
        let pods = (0..number).map(async |n| {
            let pod = objects::pod(&format!("{node}-{priority}-{n}")).priority_class(&format!("p{priority}"));
            self.pod_from(pod.annotation(&slow(), "100"), node).await;
        });
        join_all(pods).await;
    }

    /// Pods of this priority leave this node.
    async fn leave(&self, node: &str, priority: i32, numbers: std::ops::Range<usize>) {
        let leaving = numbers.map(async |n| {
            let name = format!("{node}-{priority}-{n}");
            self.pods().delete(&name, &DeleteParams::default().grace_period(0)).await.unwrap();
            self.until_pod_gone(&name).await;
        });
        join_all(leaving).await;
    }
}

/// "Pod Selection and DrainTargets Example" of KEP-4212, state by state.
pub async fn kep_4212_example_works_step_by_step(env: &TestEnv) {
    let scenario = env.scenario("kep").await;
    let classes: Api<k8s_openapi::api::scheduling::v1::PriorityClass> = Api::all(env.client.clone());
    for value in [2000, 5000, 10_000, 15_000, 20_000] {
        let class = json!({"metadata": {"name": format!("p{value}")}, "value": value});
        classes.create(&PostParams::default(), &serde_json::from_value(class).unwrap()).await.unwrap();
    }
    for node in ["one", "two", "three", "four"] {
        scenario.node(node, node).await;
    }
    let pods = [
        ("one", 10, 5000),
        ("one", 30, 10_000),
        ("one", 70, 15_000),
        ("two", 7, 5000),
        ("two", 9, 15_000),
        ("two", 21, 20_000),
        ("three", 25, 10_000),
        ("three", 45, 15_000),
        ("four", 5, 2000),
        ("four", 20, 15_000),
    ];
    for (node, number, priority) in pods {
        scenario.create_slow_pods(node, number, priority).await;
    }
    let plan = |priorities: &[i32]| -> Value {
        priorities.iter().map(|priority| json!({"podPriority": priority, "podType": "Default"})).collect()
    };
    // The planner receives both at the same moment; the states in between do not matter.
    scenario.maintain_with("maintenance-a", "one,two", Stage::Idle, plan(&[5000, 15_000])).await;
    scenario.maintain_with("maintenance-b", "one,three", Stage::Idle, plan(&[10_000, 15_000])).await;
    scenario.set_stage("maintenance-a", Stage::Drain).await;
    scenario.until_says("maintenance-a", (130, 17, "Evacuating", 5000)).await;
    scenario.set_stage("maintenance-b", Stage::Drain).await;

    scenario.until_says("maintenance-b", (145, 35, "Evacuating (limited by kep-maintenance-a)", 5000)).await;
    scenario.until_says("maintenance-a", (130, 17, "Evacuating", 5000)).await;
    scenario.until_node_says("one", "Evacuating", 5000).await;
    scenario.until_node_says("two", "Evacuating", 5000).await;
    scenario.until_node_says("three", "Evacuating", 10_000).await;

    scenario.leave("three", 10_000, 0..25).await;
    scenario.leave("one", 5000, 0..5).await;
    scenario.until_says("maintenance-b", (145, 5, "Evacuating (limited by kep-maintenance-a)", 5000)).await;
    scenario.until_node_says("three", "Waiting for kep-maintenance-a.", 10_000).await;

    scenario.leave("one", 5000, 5..10).await;
    scenario.leave("two", 5000, 0..5).await;
    scenario.until_says("maintenance-a", (130, 2, "Evacuating", 5000)).await;
    scenario.until_says("maintenance-b", (145, 0, "Waiting for kep-maintenance-a.", 5000)).await;
    scenario.until_node_says("one", "Waiting for kep-maintenance-a.", 5000).await;
    scenario.until_node_says("two", "Evacuating", 5000).await;
    scenario.until_node_says("three", "Waiting for kep-maintenance-a.", 10_000).await;

    scenario.leave("two", 5000, 5..7).await;
    scenario.until_says("maintenance-a", (91, 39, "Evacuating", 10_000)).await;
    scenario.until_says("maintenance-b", (115, 30, "Evacuating", 10_000)).await;
    scenario.until_node_says("one", "Evacuating (limited by kep-maintenance-b)", 10_000).await;
    scenario.until_node_says("two", "Evacuating", 15_000).await;
    scenario.until_node_says("three", "Waiting for kep-maintenance-b.", 10_000).await;

    scenario.maintain_with("maintenance-c", "one,four", Stage::Drain, plan(&[2000, 15_000])).await;
    scenario.until_says("maintenance-c", (90, 35, "Evacuating", 2000)).await;
    scenario
        .until_node_says("one", "Evacuating (limited by kep-maintenance-b, kep-maintenance-c)", 10_000)
        .await;
    scenario.until_node_says("four", "Evacuating", 2000).await;
    let note = scenario.until_event("maintenance-c", names::event::FAST_FORWARDED).await;
    assert!(note.contains("kep-maintenance-a, kep-maintenance-b"), "{note}");
}

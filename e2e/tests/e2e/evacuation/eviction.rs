//! Eviction as the last resort.

use haulout_e2e::{objects, wait};
use k8s_openapi::api::apps::v1::{DaemonSet, StatefulSet};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use serde_json::json;

use super::{Ground, SOON, World, blocked, failed};

pub async fn a_pod_without_evacuators_is_evicted_with_few_requests(world: World) {
    let pods = futures::future::join_all((0..20).map(|n| {
        let world = &world;
        async move { world.pod(&format!("web-{n}"), &[]).await }
    }))
    .await;
    for pod in &pods {
        world.evacuate(pod).await;
    }
    for pod in &pods {
        let name = format!("{}-{}", pod.uid().unwrap(), pod.name_any());
        world.until_gone(pod, &name).await;
    }
    let about = |resource: &str| world.requests().only(|r| r.resource == resource);
    let writes = || about("evacuations").writes().count() + about("pods").writes().count();
    // With the create there are four for each pod: eviction, finalizers, delete. The last one may not be on record yet.
    let enough = wait::eventually("all writes are on record", SOON, async || {
        Ok((writes() >= 3 * pods.len()).then_some(()))
    });
    enough.await.unwrap();
    assert_eq!(writes(), 3 * pods.len(), "{:?}", about("evacuations").writes());
    assert_eq!(about("pods").verb("get").count(), 0, "the cache knows these pods");
}

pub async fn blocked_pod_is_evicted_when_the_budget_allows(world: World) {
    world.budget(objects::pdb("web").namespace(&world.namespace).min_available("1").build()).await;
    let pod = world.pod("web-1", &[]).await;
    let evacuation = world.evacuate(&pod).await;
    let refused = world.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    let status = refused.status.unwrap();
    // On a busy machine it may have been tried again already.
    assert!(status.failed_eviction_counter >= 1);
    assert!(status.last_failed_eviction_time.is_some());
    assert!(status.message.starts_with("PodDisruptionBudget web allows 0 disruptions"), "{}", status.message);
    assert!(world.is_left_alone(&pod).await);
    world.until_event(&evacuation, "Blocked").await;
    // It takes its time to end, so that there is something to read meanwhile.
    let hold = Patch::Merge(json!({"metadata": {"finalizers": ["example.com/hold"]}}));
    world.pods().patch("web-1", &PatchParams::default(), &hold).await.unwrap();
    let patch = Patch::Merge(json!({"spec": {"minAvailable": 0}}));
    world.budgets().patch("web", &PatchParams::default(), &patch).await.unwrap();
    let leaving = world.until(&evacuation, "is not blocked", |e| blocked(e).is_none()).await.status.unwrap();
    let condition = leaving.conditions.iter().find(|c| c.type_ == "Blocked").expect("it is never removed");
    assert_eq!((condition.status.as_str(), condition.reason.as_str()), ("False", "Evacuating"));
    assert!(!leaving.message.contains("allows 0 disruptions"), "{}", leaving.message);
    assert_eq!(leaving.message, condition.message);
    let free = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    world.pods().patch("web-1", &PatchParams::default(), &free).await.unwrap();
    world.until_gone(&pod, &evacuation).await;
}

/// None of them tries by itself meanwhile: that would be another order.
pub async fn pods_that_wait_for_a_budget_leave_oldest_first(ground: &Ground) {
    let world = ground.fresh().await;
    // Replacements never come, so that the budget frees up only by our own doing.
    let mut pods = Vec::new();
    for n in 0..6 {
        pods.push(world.pod(&format!("web-{n}"), &[]).await);
    }
    world.budget(objects::pdb("web").namespace(&world.namespace).min_available("6").build()).await;
    let mut names = Vec::new();
    for pod in &pods {
        let evacuation = world.evacuate(pod).await;
        world.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
        names.push(evacuation);
    }
    refuse_often(&world, &names).await;
    for left in (0..6).rev() {
        let patch = Patch::Merge(json!({"spec": {"minAvailable": left}}));
        world.budgets().patch("web", &PatchParams::default(), &patch).await.unwrap();
        let oldest = 5 - left;
        world.until_gone(&pods[oldest], &names[oldest]).await;
        for pod in &pods[oldest + 1..] {
            assert!(world.is_left_alone(pod).await, "{} is not the oldest", pod.name_any());
        }
    }
    world.end().await;
}

/// Has them refused so often that their backoff is longer than any test.
async fn refuse_often(world: &World, evacuations: &[String]) {
    let mut shift = std::time::Duration::ZERO;
    for count in 2..8 {
        shift += std::time::Duration::from_secs(5 << (count - 2));
        world.controller.shift_clock(shift).await.unwrap();
        for evacuation in evacuations {
            // Time passes by itself as well: on a busy machine there may be one more.
            world.until(evacuation, "was refused again", |e| failed(e) >= count).await;
        }
    }
}

pub async fn several_budgets_on_a_pod_are_reported(world: World) {
    world
        .budget(
            objects::pdb("one").namespace(&world.namespace).selects("app", "web").min_available("0").build(),
        )
        .await;
    world
        .budget(
            objects::pdb("two").namespace(&world.namespace).selects("app", "web").min_available("0").build(),
        )
        .await;
    let pod = world.pod("web-1", &[]).await;
    let evacuation = world.evacuate(&pod).await;
    let refused = world.until_blocked(&evacuation, "SeveralDisruptionBudgets").await;
    let message = refused.status.unwrap().message;
    assert!(message.ends_with("The pod is covered by one, two."), "{message}");
    // The disruption controller does not look at the other one when the first one goes.
    world.delete_budget("one").await;
    world.delete_budget("two").await;
    world.until_gone(&pod, &evacuation).await;
}

pub async fn daemon_set_and_mirror_pods_are_never_evicted(world: World) {
    let sets: Api<DaemonSet> = Api::namespaced(world.client.clone(), &world.namespace);
    let set: DaemonSet = serde_json::from_value(json!({
        "metadata": {"name": "agent"},
        "spec": {
            "selector": {"matchLabels": {"app": "agent"}},
            "template": {
                "metadata": {"labels": {"app": "agent"}},
                "spec": {"nodeName": "n1", "containers": [{"name": "main", "image": "x"}]},
            },
        },
    }))
    .unwrap();
    sets.create(&PostParams::default(), &set).await.unwrap();
    let its = watcher::Config::default().labels("app=agent");
    let daemon = wait::all(world.pods(), its, "of the DaemonSet exist", SOON, |pods| !pods.is_empty()).await;
    let daemon = daemon.unwrap().remove(0);
    let mirror = objects::pod("static-1").annotation("kubernetes.io/config.mirror", "hash");
    let mirror = mirror.namespace(&world.namespace).node("n1").build();
    let mirror = world.pods().create(&PostParams::default(), &mirror).await.unwrap();
    for pod in [&daemon, &mirror] {
        let evacuation = world.evacuate(pod).await;
        let status = world.until_blocked(&evacuation, "Unsupported").await.status.unwrap();
        assert!(status.message.contains("never evicted"), "{}", status.message);
    }
    world.let_it_act("other").await;
    assert!(world.is_left_alone(&daemon).await && world.is_left_alone(&mirror).await);
    assert_eq!(world.evictions(), 1, "that of the other pod");
}

pub async fn a_terminating_pod_is_left_to_finish(ground: &Ground) {
    let world = ground.fresh().await;
    let pod = world.pod_from(objects::pod("web-1").finalizer("example.com/hold"), &[]).await;
    world.pods().delete(&pod.name_any(), &DeleteParams::default()).await.unwrap();
    let evacuation = world.evacuate(&pod).await;
    world.let_it_act("other").await;
    assert_eq!(world.evictions(), 1, "that of the other pod");
    // Long after its grace period somebody should know.
    world.controller.shift_clock(std::time::Duration::from_secs(200)).await.unwrap();
    let status = world.until_blocked(&evacuation, "Terminating").await.status.unwrap();
    assert!(status.message.contains("a finalizer holds it"), "{}", status.message);
    let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    world.pods().patch(&pod.name_any(), &PatchParams::default(), &patch).await.unwrap();
    world.until_gone(&pod, &evacuation).await;
    world.end().await;
}

pub async fn pod_recreated_under_the_same_name_is_not_evicted(world: World) {
    let sets: Api<StatefulSet> = Api::namespaced(world.client.clone(), &world.namespace);
    let set: StatefulSet = serde_json::from_value(json!({
        "metadata": {"name": "db"},
        "spec": {
            "serviceName": "db",
            "selector": {"matchLabels": {"app": "db"}},
            "template": {
                "metadata": {"labels": {"app": "db"}},
                "spec": {"nodeName": "n1", "containers": [{"name": "main", "image": "x"}]},
            },
        },
    }))
    .unwrap();
    sets.create(&PostParams::default(), &set).await.unwrap();
    world.budget(objects::pdb("db").namespace(&world.namespace).max_unavailable("1").build()).await;
    let is_ready = |pod: &Pod| {
        let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref());
        conditions.unwrap_or_default().iter().any(|c| c.type_ == "Ready" && c.status == "True")
    };
    let ready = |api| async move { wait::present(api, "db-0", "is ready", SOON, is_ready).await.unwrap() };
    let first = ready(world.pods()).await;
    let allows = |budget: &PodDisruptionBudget| {
        budget.status.as_ref().is_some_and(|status| status.disruptions_allowed == 1)
    };
    wait::present(world.budgets(), "db", "has counted the pod", SOON, allows).await.unwrap();
    let evacuation = world.evacuate(&first).await;
    world.until_gone(&first, &evacuation).await;
    let second = ready(world.pods()).await;
    assert_ne!(first.uid(), second.uid());
    // An Evacuation of the first one, made again, does nothing to the second.
    let again = world.evacuate(&first).await;
    world.until_evacuation_gone(&again).await;
    assert!(world.is_left_alone(&second).await);
    assert_eq!(world.evictions(), 1);
}

/// The API server is too busy for the pod that its budget has just made room for, and then for all others that get the
/// room in its place. All of them have been refused so often that their backoff is longer than this test.
pub async fn room_goes_to_the_next_when_an_admitted_eviction_fails(ground: &Ground) {
    let world = ground.fresh().await;
    world.budget(objects::pdb("web").namespace(&world.namespace).min_available("3").build()).await;
    let mut evacuations = Vec::new();
    for n in 0..3 {
        let pod = world.pod(&format!("web-{n}"), &[]).await;
        let evacuation = world.evacuate(&pod).await;
        world.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
        evacuations.push(evacuation);
    }
    refuse_often(&world, &evacuations).await;
    let jam = world.jam("room").await;
    let mut refused = Vec::new();
    for evacuation in &evacuations {
        refused.push(failed(&world.evacuations().get(evacuation).await.unwrap()));
    }
    let patch = Patch::Merge(json!({"spec": {"minAvailable": 2}}));
    world.budgets().patch("web", &PatchParams::default(), &patch).await.unwrap();
    for (evacuation, refused) in evacuations.iter().zip(refused) {
        let busy = world.until_blocked(evacuation, "ServerBusy").await;
        assert!(failed(&busy) > refused, "every unsuccessful attempt counts");
    }
    // One of them leaves soon, the others wait for the budget again.
    jam.end().await;
    let one_left =
        wait::all(world.pods(), watcher::Config::default().labels("app=web"), "are two", SOON, |pods| {
            pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).count() == 2
        });
    one_left.await.unwrap();
    world.delete_budget("web").await;
    for evacuation in &evacuations {
        world.until_evacuation_gone(evacuation).await;
    }
    world.end().await;
}

pub async fn rejected_eviction_is_retried_after_the_backoff(ground: &Ground) {
    let world = ground.fresh().await;
    world.budget(objects::pdb("web").namespace(&world.namespace).min_available("1").build()).await;
    let pod = world.pod("web-1", &[]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    let mut shift = std::time::Duration::ZERO;
    for count in 2..6 {
        world.let_it_act(&format!("other-{count}")).await;
        shift += std::time::Duration::from_secs(5 << (count - 2));
        world.controller.shift_clock(shift).await.unwrap();
        // Time passes by itself as well: on a busy machine there may be one more.
        world.until(&evacuation, "was refused again", |e| failed(e) >= count).await;
    }
    assert!(blocked(&world.evacuations().get(&evacuation).await.unwrap()).is_some());
    assert!(world.is_left_alone(&pod).await);
    world.end().await;
}

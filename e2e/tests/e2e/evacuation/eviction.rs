//! Eviction after the last evacuator.

use haulout_e2e::{objects, wait};
use k8s_openapi::api::apps::v1::{DaemonSet, StatefulSet};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use serde_json::json;

use super::{SOON, TestEnv, TestNamespace, blocked, failed};

pub async fn pod_without_evacuators_is_evicted_with_few_requests(test: TestNamespace) {
    let pods = futures::future::join_all((0..20).map(|n| {
        let test = &test;
        async move { test.pod(&format!("web-{n}"), &[]).await }
    }))
    .await;
    for pod in &pods {
        test.evacuate(pod).await;
    }
    for pod in &pods {
        let name = format!("{}-{}", pod.uid().unwrap(), pod.name_any());
        test.until_gone(pod, &name).await;
    }
    let about = |resource: &str| test.requests().only(|r| r.resource == resource);
    let writes = || about("evacuations").writes().count() + about("pods").writes().count();
    // With the create, each pod needs four writes: eviction, finalizers, delete. The last one may not be in the audit
    // log yet.
    let enough = wait::eventually("all writes are in the audit log", SOON, async || {
        Ok((writes() >= 3 * pods.len()).then_some(()))
    });
    enough.await.unwrap();
    assert_eq!(writes(), 3 * pods.len(), "{:?}", about("evacuations").writes());
    assert_eq!(about("pods").verb("get").count(), 0, "the cache has these pods");
}

pub async fn blocked_pod_is_evicted_when_the_budget_allows(test: TestNamespace) {
    test.budget(objects::pdb("web").namespace(&test.namespace).min_available("1").build()).await;
    let pod = test.pod("web-1", &[]).await;
    let evacuation = test.evacuate(&pod).await;
    let rejected = test.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    let status = rejected.status.unwrap();
    // On a busy machine, it may have been retried already.
    assert!(status.failed_eviction_counter >= 1);
    assert!(status.last_failed_eviction_time.is_some());
    assert!(status.message.starts_with("PodDisruptionBudget web allows 0 disruptions"), "{}", status.message);
    assert!(test.is_not_terminating(&pod).await);
    test.until_event(&evacuation, "Blocked").await;
    // The pod takes a while to terminate, so that the status can be read.
    let hold = Patch::Merge(json!({"metadata": {"finalizers": ["example.com/hold"]}}));
    test.pods().patch("web-1", &PatchParams::default(), &hold).await.unwrap();
    let patch = Patch::Merge(json!({"spec": {"minAvailable": 0}}));
    test.budgets().patch("web", &PatchParams::default(), &patch).await.unwrap();
    let leaving = test.until(&evacuation, "is not blocked", |e| blocked(e).is_none()).await.status.unwrap();
    let condition = leaving.conditions.iter().find(|c| c.type_ == "Blocked").expect("it is never removed");
    assert_eq!((condition.status.as_str(), condition.reason.as_str()), ("False", "Evacuating"));
    assert!(!leaving.message.contains("allows 0 disruptions"), "{}", leaving.message);
    assert_eq!(leaving.message, condition.message);
    let free = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    test.pods().patch("web-1", &PatchParams::default(), &free).await.unwrap();
    test.until_gone(&pod, &evacuation).await;
}

/// None of them is retried on its own in the meantime: that would change the order.
pub async fn pods_blocked_by_a_budget_leave_oldest_first(env: &TestEnv) {
    let test = env.test_namespace_with_controller().await;
    // There are no replacements, so that the budget allows disruptions only when the test changes it.
    let mut pods = Vec::new();
    for n in 0..6 {
        pods.push(test.pod(&format!("web-{n}"), &[]).await);
    }
    test.budget(objects::pdb("web").namespace(&test.namespace).min_available("6").build()).await;
    let mut names = Vec::new();
    for pod in &pods {
        let evacuation = test.evacuate(pod).await;
        test.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
        names.push(evacuation);
    }
    reject_often(&test, &names).await;
    for left in (0..6).rev() {
        let patch = Patch::Merge(json!({"spec": {"minAvailable": left}}));
        test.budgets().patch("web", &PatchParams::default(), &patch).await.unwrap();
        let oldest = 5 - left;
        test.until_gone(&pods[oldest], &names[oldest]).await;
        for pod in &pods[oldest + 1..] {
            assert!(test.is_not_terminating(pod).await, "{} is not the oldest", pod.name_any());
        }
    }
    test.end().await;
}

/// Lets evictions be rejected so often that their backoff is longer than any test.
async fn reject_often(test: &TestNamespace, evacuations: &[String]) {
    let mut shift = std::time::Duration::ZERO;
    for count in 2..8 {
        shift += std::time::Duration::from_secs(5 << (count - 2));
        test.controller.shift_clock(shift).await.unwrap();
        for evacuation in evacuations {
            // Real time passes too: on a busy machine, there may be one more attempt.
            test.until(evacuation, "was rejected again", |e| failed(e) >= count).await;
        }
    }
}

pub async fn several_budgets_on_a_pod_are_reported(test: TestNamespace) {
    test.budget(
        objects::pdb("one").namespace(&test.namespace).selects("app", "web").min_available("0").build(),
    )
    .await;
    test.budget(
        objects::pdb("two").namespace(&test.namespace).selects("app", "web").min_available("0").build(),
    )
    .await;
    let pod = test.pod("web-1", &[]).await;
    let evacuation = test.evacuate(&pod).await;
    let rejected = test.until_blocked(&evacuation, "SeveralDisruptionBudgets").await;
    let message = rejected.status.unwrap().message;
    assert!(message.ends_with("The pod is covered by one, two."), "{message}");
    // The disruption controller does not update the second budget when the first is deleted.
    test.delete_budget("one").await;
    test.delete_budget("two").await;
    test.until_gone(&pod, &evacuation).await;
}

pub async fn daemon_set_and_mirror_pods_are_never_evicted(test: TestNamespace) {
    let sets: Api<DaemonSet> = Api::namespaced(test.client.clone(), &test.namespace);
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
    let daemon = wait::all(test.pods(), its, "of the DaemonSet exist", SOON, |pods| !pods.is_empty()).await;
    let daemon = daemon.unwrap().remove(0);
    let mirror = objects::pod("static-1").annotation("kubernetes.io/config.mirror", "hash");
    let mirror = mirror.namespace(&test.namespace).node("n1").build();
    let mirror = test.pods().create(&PostParams::default(), &mirror).await.unwrap();
    for pod in [&daemon, &mirror] {
        let evacuation = test.evacuate(pod).await;
        let status = test.until_blocked(&evacuation, "Unsupported").await.status.unwrap();
        assert!(status.message.contains("never evicted"), "{}", status.message);
    }
    test.let_controller_act("other").await;
    assert!(test.is_not_terminating(&daemon).await && test.is_not_terminating(&mirror).await);
    assert_eq!(test.evictions(), 1, "the eviction of the other pod");
}

pub async fn terminating_pod_is_not_evicted(env: &TestEnv) {
    let test = env.test_namespace_with_controller().await;
    let pod = test.pod_from(objects::pod("web-1").finalizer("example.com/hold"), &[]).await;
    test.pods().delete(&pod.name_any(), &DeleteParams::default()).await.unwrap();
    let evacuation = test.evacuate(&pod).await;
    test.let_controller_act("other").await;
    assert_eq!(test.evictions(), 1, "the eviction of the other pod");
    // Long after the grace period, the pod is reported.
    test.controller.shift_clock(std::time::Duration::from_secs(200)).await.unwrap();
    let status = test.until_blocked(&evacuation, "Terminating").await.status.unwrap();
    assert!(status.message.contains("a finalizer holds it"), "{}", status.message);
    let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    test.pods().patch(&pod.name_any(), &PatchParams::default(), &patch).await.unwrap();
    test.until_gone(&pod, &evacuation).await;
    test.end().await;
}

pub async fn pod_recreated_under_the_same_name_is_not_evicted(test: TestNamespace) {
    let sets: Api<StatefulSet> = Api::namespaced(test.client.clone(), &test.namespace);
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
    test.budget(objects::pdb("db").namespace(&test.namespace).max_unavailable("1").build()).await;
    let is_ready = |pod: &Pod| {
        let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref());
        conditions.unwrap_or_default().iter().any(|c| c.type_ == "Ready" && c.status == "True")
    };
    let ready = |api| async move { wait::present(api, "db-0", "is ready", SOON, is_ready).await.unwrap() };
    let first = ready(test.pods()).await;
    let allows = |budget: &PodDisruptionBudget| {
        budget.status.as_ref().is_some_and(|status| status.disruptions_allowed == 1)
    };
    wait::present(test.budgets(), "db", "has counted the pod", SOON, allows).await.unwrap();
    let evacuation = test.evacuate(&first).await;
    test.until_gone(&first, &evacuation).await;
    let second = ready(test.pods()).await;
    assert_ne!(first.uid(), second.uid());
    // A recreated Evacuation of the first pod does not affect the second.
    let again = test.evacuate(&first).await;
    test.until_evacuation_gone(&again).await;
    assert!(test.is_not_terminating(&second).await);
    assert_eq!(test.evictions(), 1);
}

/// The API server is too busy for the pod that its budget has just allowed, and then for all others that are tried
/// instead. All of them have been rejected so often that their backoff is longer than this test.
pub async fn next_pod_is_tried_when_an_allowed_eviction_fails(env: &TestEnv) {
    let test = env.test_namespace_with_controller().await;
    test.budget(objects::pdb("web").namespace(&test.namespace).min_available("3").build()).await;
    let mut evacuations = Vec::new();
    for n in 0..3 {
        let pod = test.pod(&format!("web-{n}"), &[]).await;
        let evacuation = test.evacuate(&pod).await;
        test.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
        evacuations.push(evacuation);
    }
    reject_often(&test, &evacuations).await;
    let overload = test.overload("room").await;
    let mut rejected = Vec::new();
    for evacuation in &evacuations {
        rejected.push(failed(&test.evacuations().get(evacuation).await.unwrap()));
    }
    let patch = Patch::Merge(json!({"spec": {"minAvailable": 2}}));
    test.budgets().patch("web", &PatchParams::default(), &patch).await.unwrap();
    for (evacuation, rejected) in evacuations.iter().zip(rejected) {
        let busy = test.until_blocked(evacuation, "ServerBusy").await;
        assert!(failed(&busy) > rejected, "every unsuccessful attempt counts");
    }
    // One of them leaves soon, the others wait for the budget again.
    overload.end().await;
    let one_left =
        wait::all(test.pods(), watcher::Config::default().labels("app=web"), "are two", SOON, |pods| {
            pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).count() == 2
        });
    one_left.await.unwrap();
    test.delete_budget("web").await;
    for evacuation in &evacuations {
        test.until_evacuation_gone(evacuation).await;
    }
    test.end().await;
}

pub async fn rejected_eviction_is_retried_after_the_backoff(env: &TestEnv) {
    let test = env.test_namespace_with_controller().await;
    test.budget(objects::pdb("web").namespace(&test.namespace).min_available("1").build()).await;
    let pod = test.pod("web-1", &[]).await;
    let evacuation = test.evacuate(&pod).await;
    test.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    let mut shift = std::time::Duration::ZERO;
    for count in 2..6 {
        test.let_controller_act(&format!("other-{count}")).await;
        shift += std::time::Duration::from_secs(5 << (count - 2));
        test.controller.shift_clock(shift).await.unwrap();
        // Real time passes too: on a busy machine, there may be one more attempt.
        test.until(&evacuation, "was rejected again", |e| failed(e) >= count).await;
    }
    assert!(blocked(&test.evacuations().get(&evacuation).await.unwrap()).is_some());
    assert!(test.is_not_terminating(&pod).await);
    test.end().await;
}

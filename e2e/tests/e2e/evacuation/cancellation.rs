//! Cancellation and deletion of Evacuations.

use haulout_api_types::instigators;
use haulout_e2e::{objects, wait};
use kube::api::DeleteParams;
use serde_json::json;

use super::{SOON, TestNamespace, active, finalizer};

const FOREIGN: &str = "example.com/report";

pub async fn last_instigator_cancels_the_evacuation(test: TestNamespace) {
    let other = instigators::finalizer("descheduler.example.com");
    for (n, leaves_first) in [finalizer(), other.clone()].iter().enumerate() {
        let pod = test.pod(&format!("web-{n}"), &["a.example.com"]).await;
        let both = [finalizer(), other.clone()];
        let evacuation = test.evacuate_with(&pod, |e| e.metadata.finalizers = Some(both.to_vec())).await;
        test.until_active(&evacuation, "a.example.com").await;
        let left: Vec<_> = both.iter().filter(|f| *f != leaves_first).map(String::as_str).collect();
        test.set_finalizers(&evacuation, &left).await;
        test.let_controller_act(&format!("other-{n}")).await;
        let still = test.evacuations().get(&evacuation).await.unwrap();
        assert_eq!(still.metadata.deletion_timestamp, None, "one instigator is left");
        test.set_finalizers(&evacuation, &[]).await;
        test.until_evacuation_gone(&evacuation).await;
        assert!(test.is_not_terminating(&pod).await);
        test.until_event(&evacuation, "Cancelled").await;
    }
}

pub async fn evacuator_finalizer_is_not_an_instigator(test: TestNamespace) {
    let pod = test.pod("web-1", &["a.example.com"]).await;
    let evacuation = test.evacuate(&pod).await;
    test.until_active(&evacuation, "a.example.com").await;
    let own = instigators::finalizer("a.example.com");
    test.set_finalizers(&evacuation, &[&own]).await;
    let ending =
        test.until(&evacuation, "is being deleted", |e| e.metadata.deletion_timestamp.is_some()).await;
    assert_eq!(ending.metadata.finalizers, Some(vec![own.clone()]), "the evacuator has to clean up first");
    let held = test.until_blocked(&evacuation, "EvacuationHeld").await.status.unwrap();
    assert!(held.message.starts_with("The evacuation is cancelled, but finalizers keep"), "{}", held.message);
    assert!(
        held.message.contains(&format!("{own} (evacuator a.example.com has to clean up)")),
        "{}",
        held.message
    );
    test.set_finalizers(&evacuation, &[]).await;
    test.until_evacuation_gone(&evacuation).await;
    assert!(test.is_not_terminating(&pod).await);
}

pub async fn forbidden_cancellation_continues_the_evacuation(test: TestNamespace) {
    let pod = test.pod("web-1", &["a.example.com"]).await;
    let evacuation = test.evacuate(&pod).await;
    test.until_active(&evacuation, "a.example.com").await;
    test.report(&evacuation, json!({"evacuationCancellationPolicy": "Forbid"})).await;
    test.set_finalizers(&evacuation, &[]).await;
    test.let_controller_act("other").await;
    let still = test.evacuations().get(&evacuation).await.unwrap();
    assert_eq!(still.metadata.deletion_timestamp, None);
    test.complete(&evacuation).await;
    test.until_gone(&pod, &evacuation).await;
}

pub async fn foreign_finalizers_stay_when_the_pod_is_gone(test: TestNamespace) {
    let pod = test.pod("web-1", &[]).await;
    let finalizers = vec![finalizer(), FOREIGN.to_owned()];
    let evacuation = test.evacuate_with(&pod, |e| e.metadata.finalizers = Some(finalizers)).await;
    let ending =
        test.until(&evacuation, "is being deleted", |e| e.metadata.deletion_timestamp.is_some()).await;
    assert_eq!(ending.metadata.finalizers, Some(vec![FOREIGN.to_owned()]));
    let held = test.until_blocked(&evacuation, "EvacuationHeld").await.status.unwrap();
    assert_eq!(
        held.message,
        format!(
            "The pod is gone, but finalizers keep the Evacuation from being removed: {FOREIGN}. Their owners have to \
             remove them."
        )
    );
    test.until_event(&evacuation, "Blocked").await;
    test.set_finalizers(&evacuation, &[]).await;
    test.until_gone(&pod, &evacuation).await;
}

/// Evacuators, rejections and evictions of an Evacuation that was deleted at the beginning.
pub async fn deleted_evacuation_continues_while_an_instigator_remains(test: TestNamespace) {
    test.budget(objects::pdb("web").namespace(&test.namespace).min_available("1").build()).await;
    let pod = test.pod("web-1", &["a.example.com", "b.example.com"]).await;
    let evacuation = test.evacuate(&pod).await;
    test.until_active(&evacuation, "a.example.com").await;
    test.evacuations().delete(&evacuation, &DeleteParams::default()).await.unwrap();
    test.complete(&evacuation).await;
    test.until_active(&evacuation, "b.example.com").await;
    test.complete(&evacuation).await;
    test.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    assert!(test.is_not_terminating(&pod).await);
    test.delete_budget("web").await;
    test.until_gone(&pod, &evacuation).await;
}

pub async fn deleted_evacuation_is_cancelled_by_its_last_instigator(test: TestNamespace) {
    let pod = test.pod("web-1", &["a.example.com"]).await;
    let evacuation = test.evacuate(&pod).await;
    test.until_active(&evacuation, "a.example.com").await;
    test.evacuations().delete(&evacuation, &DeleteParams::default()).await.unwrap();
    test.set_finalizers(&evacuation, &[]).await;
    test.until_evacuation_gone(&evacuation).await;
    assert!(test.is_not_terminating(&pod).await);
    test.until_event(&evacuation, "Cancelled").await;
}

/// Uses its own class, so that no other test changes the metrics.
pub async fn evacuation_is_counted_once_with_its_outcome(test: TestNamespace) {
    const CLASS: &str = "counted.example.com";
    let metric = async |name: &str, label: &str| {
        let label = if label.is_empty() { format!("class=\"{CLASS}\"") } else { label.to_owned() };
        test.controller.metric_where(name, &label).await
    };
    let until = async |what: &str, name: &str, label: &str, expected: f64| {
        let reached = wait::eventually(what, SOON, async || {
            Ok(((metric(name, label).await? - expected).abs() < 0.1).then_some(()))
        });
        reached.await.unwrap();
    };
    let ended = |outcome: &str| format!("class=\"{CLASS}\",outcome=\"{outcome}\"");
    let count = "haulout_evacuation_duration_seconds_count";

    // Cancelled, with an evacuator whose clean-up takes longer than the termination of its pod.
    let (pod, other) = (test.pod("web-1", &[CLASS]).await, test.pod("web-2", &[CLASS]).await);
    until("both pods are counted, without an Evacuation", "evacuation_controller_pod_evacuators", "", 2.0)
        .await;
    let own = instigators::finalizer(CLASS);
    let evacuation = test.evacuate(&pod).await;
    test.until_active(&evacuation, CLASS).await;
    until("the evacuator is active for one", "evacuation_controller_active_evacuator", "", 1.0).await;
    test.set_finalizers(&evacuation, &[&own]).await;
    test.until_blocked(&evacuation, "EvacuationHeld").await;
    test.pods().delete("web-1", &DeleteParams::default()).await.unwrap();
    test.until_gone(&pod, &evacuation).await;

    // Evacuated, and evicted after its evacuator.
    let evacuation = test.evacuate(&other).await;
    test.until_active(&evacuation, CLASS).await;
    test.pods().delete("web-2", &DeleteParams::default()).await.unwrap();
    test.until_gone(&other, &evacuation).await;
    until("the second one is counted", count, &ended("evacuated"), 1.0).await;
    let third = test.pod("web-3", &[CLASS]).await;
    test.budget(objects::pdb("web").namespace(&test.namespace).min_available("1").build()).await;
    let evacuation = test.evacuate(&third).await;
    test.until_active(&evacuation, CLASS).await;
    test.complete(&evacuation).await;
    let evicting = test.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    assert_eq!(active(&evicting), Some(CLASS), "it may still report");
    until("no evacuator is active", "evacuation_controller_active_evacuator", "", 0.0).await;
    test.delete_budget("web").await;
    test.until_gone(&third, &evacuation).await;
    until("no pod is left", "evacuation_controller_pod_evacuators", "", 0.0).await;

    assert!((metric(count, &ended("cancelled")).await.unwrap() - 1.0).abs() < 0.1);
    assert!((metric(count, "").await.unwrap() - 2.0).abs() < 0.1, "each is counted once");
}

pub async fn evacuation_without_a_pod_is_deleted(test: TestNamespace) {
    let pod = test.pod("web-1", &["a.example.com"]).await;
    test.pods().delete("web-1", &DeleteParams::default()).await.unwrap();
    wait::gone(test.pods(), "web-1", SOON).await.unwrap();
    let evacuation = test.evacuate(&pod).await;
    test.until_evacuation_gone(&evacuation).await;
}

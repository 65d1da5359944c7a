//! Cancellation and garbage collection.

use haulout_api_types::instigators;
use haulout_e2e::{objects, wait};
use kube::api::DeleteParams;
use serde_json::json;

use super::{SOON, World, active, finalizer};

const FOREIGN: &str = "example.com/report";

pub async fn last_instigator_cancels_the_evacuation(world: World) {
    let other = instigators::finalizer("descheduler.example.com");
    for (n, leaves_first) in [finalizer(), other.clone()].iter().enumerate() {
        let pod = world.pod(&format!("web-{n}"), &["a.example.com"]).await;
        let both = [finalizer(), other.clone()];
        let evacuation = world.evacuate_with(&pod, |e| e.metadata.finalizers = Some(both.to_vec())).await;
        world.until_active(&evacuation, "a.example.com").await;
        let left: Vec<_> = both.iter().filter(|f| *f != leaves_first).map(String::as_str).collect();
        world.set_finalizers(&evacuation, &left).await;
        world.let_it_act(&format!("other-{n}")).await;
        let still = world.evacuations().get(&evacuation).await.unwrap();
        assert_eq!(still.metadata.deletion_timestamp, None, "one of two still wants it");
        world.set_finalizers(&evacuation, &[]).await;
        world.until_evacuation_gone(&evacuation).await;
        assert!(world.is_left_alone(&pod).await);
        world.until_event(&evacuation, "Cancelled").await;
    }
}

pub async fn evacuator_finalizer_is_not_an_instigator(world: World) {
    let pod = world.pod("web-1", &["a.example.com"]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_active(&evacuation, "a.example.com").await;
    let own = instigators::finalizer("a.example.com");
    world.set_finalizers(&evacuation, &[&own]).await;
    let ending =
        world.until(&evacuation, "is being deleted", |e| e.metadata.deletion_timestamp.is_some()).await;
    assert_eq!(ending.metadata.finalizers, Some(vec![own.clone()]), "it wants to clean up first");
    let held = world.until_blocked(&evacuation, "EvacuationHeld").await.status.unwrap();
    assert!(held.message.starts_with("The evacuation is cancelled, but finalizers keep"), "{}", held.message);
    assert!(
        held.message.contains(&format!("{own} (evacuator a.example.com has to clean up)")),
        "{}",
        held.message
    );
    world.set_finalizers(&evacuation, &[]).await;
    world.until_evacuation_gone(&evacuation).await;
    assert!(world.is_left_alone(&pod).await);
}

pub async fn forbidden_cancellation_continues_the_evacuation(world: World) {
    let pod = world.pod("web-1", &["a.example.com"]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_active(&evacuation, "a.example.com").await;
    world.report(&evacuation, json!({"evacuationCancellationPolicy": "Forbid"})).await;
    world.set_finalizers(&evacuation, &[]).await;
    world.let_it_act("other").await;
    let still = world.evacuations().get(&evacuation).await.unwrap();
    assert_eq!(still.metadata.deletion_timestamp, None);
    world.complete(&evacuation).await;
    world.until_gone(&pod, &evacuation).await;
}

pub async fn finalizers_of_others_stay_when_the_pod_has_gone(world: World) {
    let pod = world.pod("web-1", &[]).await;
    let finalizers = vec![finalizer(), FOREIGN.to_owned()];
    let evacuation = world.evacuate_with(&pod, |e| e.metadata.finalizers = Some(finalizers)).await;
    let ending =
        world.until(&evacuation, "is being deleted", |e| e.metadata.deletion_timestamp.is_some()).await;
    assert_eq!(ending.metadata.finalizers, Some(vec![FOREIGN.to_owned()]));
    let held = world.until_blocked(&evacuation, "EvacuationHeld").await.status.unwrap();
    assert_eq!(
        held.message,
        format!(
            "The pod is gone, but finalizers keep the Evacuation from being removed: {FOREIGN}. Their owners have to \
             remove them."
        )
    );
    world.until_event(&evacuation, "Blocked").await;
    world.set_finalizers(&evacuation, &[]).await;
    world.until_gone(&pod, &evacuation).await;
}

/// Turns, refusals and evictions, all of one that somebody deleted at the beginning.
pub async fn a_deleted_evacuation_goes_on_while_an_instigator_remains(world: World) {
    world.budget(objects::pdb("web").namespace(&world.namespace).min_available("1").build()).await;
    let pod = world.pod("web-1", &["a.example.com", "b.example.com"]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_active(&evacuation, "a.example.com").await;
    world.evacuations().delete(&evacuation, &DeleteParams::default()).await.unwrap();
    world.complete(&evacuation).await;
    world.until_active(&evacuation, "b.example.com").await;
    world.complete(&evacuation).await;
    world.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    assert!(world.is_left_alone(&pod).await);
    world.delete_budget("web").await;
    world.until_gone(&pod, &evacuation).await;
}

pub async fn a_deleted_evacuation_is_cancelled_by_its_last_instigator(world: World) {
    let pod = world.pod("web-1", &["a.example.com"]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_active(&evacuation, "a.example.com").await;
    world.evacuations().delete(&evacuation, &DeleteParams::default()).await.unwrap();
    world.set_finalizers(&evacuation, &[]).await;
    world.until_evacuation_gone(&evacuation).await;
    assert!(world.is_left_alone(&pod).await);
    world.until_event(&evacuation, "Cancelled").await;
}

/// Its class is its own, so that the numbers are, too.
pub async fn an_evacuation_is_counted_once_with_its_outcome(world: World) {
    const CLASS: &str = "counted.example.com";
    let metric = async |name: &str, label: &str| {
        let label = if label.is_empty() { format!("class=\"{CLASS}\"") } else { label.to_owned() };
        world.controller.metric_where(&format!("evacuation_controller_{name}"), &label).await
    };
    let until = async |what: &str, name: &str, label: &str, expected: f64| {
        let reached = wait::eventually(what, SOON, async || {
            Ok(((metric(name, label).await? - expected).abs() < 0.1).then_some(()))
        });
        reached.await.unwrap();
    };
    let ended = |outcome: &str| format!("class=\"{CLASS}\",outcome=\"{outcome}\"");
    let count = "evacuation_duration_seconds_count";

    // Cancelled, with an evacuator that takes longer to clean up than its pod takes to go.
    let (pod, other) = (world.pod("web-1", &[CLASS]).await, world.pod("web-2", &[CLASS]).await);
    until("both pods are counted, without an Evacuation", "pod_evacuators", "", 2.0).await;
    let own = instigators::finalizer(CLASS);
    let evacuation = world.evacuate(&pod).await;
    world.until_active(&evacuation, CLASS).await;
    until("the evacuator is in charge of one", "active_evacuator", "", 1.0).await;
    world.set_finalizers(&evacuation, &[&own]).await;
    world.until_blocked(&evacuation, "EvacuationHeld").await;
    world.pods().delete("web-1", &DeleteParams::default()).await.unwrap();
    world.until_gone(&pod, &evacuation).await;

    // Evacuated, and evicted after its evacuator.
    let evacuation = world.evacuate(&other).await;
    world.until_active(&evacuation, CLASS).await;
    world.pods().delete("web-2", &DeleteParams::default()).await.unwrap();
    world.until_gone(&other, &evacuation).await;
    until("the second one is counted", count, &ended("evacuated"), 1.0).await;
    let third = world.pod("web-3", &[CLASS]).await;
    world.budget(objects::pdb("web").namespace(&world.namespace).min_available("1").build()).await;
    let evacuation = world.evacuate(&third).await;
    world.until_active(&evacuation, CLASS).await;
    world.complete(&evacuation).await;
    let evicting = world.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    assert_eq!(active(&evicting), Some(CLASS), "it may still report");
    until("no evacuator is in charge any more", "active_evacuator", "", 0.0).await;
    world.delete_budget("web").await;
    world.until_gone(&third, &evacuation).await;
    until("no pod is left", "pod_evacuators", "", 0.0).await;

    assert!((metric(count, &ended("cancelled")).await.unwrap() - 1.0).abs() < 0.1);
    assert!((metric(count, "").await.unwrap() - 2.0).abs() < 0.1, "each is counted once");
}

pub async fn an_evacuation_without_a_pod_is_removed(world: World) {
    let pod = world.pod("web-1", &["a.example.com"]).await;
    world.pods().delete("web-1", &DeleteParams::default()).await.unwrap();
    wait::gone(world.pods(), "web-1", SOON).await.unwrap();
    let evacuation = world.evacuate(&pod).await;
    world.until_evacuation_gone(&evacuation).await;
}

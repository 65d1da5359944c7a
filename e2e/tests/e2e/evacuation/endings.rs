//! Cancellation and garbage collection.

use haulout_api_types::instigators;
use haulout_e2e::objects;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use super::{World, finalizer};

const FOREIGN: &str = "example.com/report";

pub async fn instigators_cancel_in_either_order_and_the_last_one_ends_the_evacuation(world: World) {
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

pub async fn an_evacuators_own_finalizer_neither_keeps_an_evacuation_alive_nor_is_it_taken_away(
    world: World,
) {
    let pod = world.pod("web-1", &["a.example.com"]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_active(&evacuation, "a.example.com").await;
    let own = instigators::finalizer("a.example.com");
    world.set_finalizers(&evacuation, &[&own]).await;
    let ending =
        world.until(&evacuation, "is being deleted", |e| e.metadata.deletion_timestamp.is_some()).await;
    assert_eq!(ending.metadata.finalizers, Some(vec![own]), "it wants to clean up first");
    world.set_finalizers(&evacuation, &[]).await;
    world.until_evacuation_gone(&evacuation).await;
    assert!(world.is_left_alone(&pod).await);
}

pub async fn an_evacuation_that_forbids_cancellation_goes_on_without_instigators(world: World) {
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
    world.set_finalizers(&evacuation, &[]).await;
    world.until_gone(&pod, &evacuation).await;
}

pub async fn an_evacuation_that_somebody_deletes_does_nothing_new_until_its_instigators_agree(world: World) {
    world.budget(objects::pdb("web").namespace(&world.namespace).min_available("1").build()).await;
    let pod = world.pod("web-1", &[]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    world.evacuations().delete(&evacuation, &DeleteParams::default()).await.unwrap();
    world.delete_budget("web").await;
    world.let_it_act("other").await;
    assert!(world.is_left_alone(&pod).await);
    let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    world.evacuations().patch(&evacuation, &PatchParams::default(), &patch).await.unwrap();
    world.until_evacuation_gone(&evacuation).await;
    assert!(world.is_left_alone(&pod).await);
}

pub async fn an_evacuation_without_a_pod_is_removed(world: World) {
    let pod = world.pod("web-1", &["a.example.com"]).await;
    world.pods().delete("web-1", &DeleteParams::default()).await.unwrap();
    haulout_e2e::wait::gone(world.pods(), "web-1", super::SOON).await.unwrap();
    let evacuation = world.evacuate(&pod).await;
    world.until_evacuation_gone(&evacuation).await;
}

//! Whose turn it is.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;
use kube::api::DeleteParams;
use serde_json::json;

use super::{DEADLINE, Ground, World, active, blocked};

const A: &str = "a.example.com";
const B: &str = "b.example.com";
const C: &str = "c.example.com";

pub async fn evacuators_act_by_priority_before_eviction(world: World) {
    // The names are in another order than the priorities.
    let pod = world.pod("web-1", &[C, A, B]).await;
    let evacuation = world.evacuate(&pod).await;
    for class in [C, A, B] {
        world.until_active(&evacuation, class).await;
        assert!(world.is_left_alone(&pod).await);
        world.complete(&evacuation).await;
    }
    world.until_gone(&pod, &evacuation).await;
    for reason in ["EvacuatorActivated", "EvacuatorSwitched", "Evicting", "Evacuated"] {
        world.until_event(&evacuation, reason).await;
    }
}

pub async fn silent_evacuator_times_out_after_creation(ground: &Ground) {
    let world = ground.fresh().await;
    let pod = world.pod("web-1", &[A, B]).await;
    let evacuation = world.evacuate(&pod).await;
    let first = world.until_active(&evacuation, A).await;
    assert_eq!(first.status.unwrap().evacuation_progress_timestamp, None, "the creation time counts");
    world.controller.shift_clock(DEADLINE.saturating_sub(Duration::from_secs(60))).await.unwrap();
    world.let_it_act("early").await;
    let still = world.evacuations().get(&evacuation).await.unwrap();
    assert_eq!(active(&still), Some(A), "a minute is left");
    world.controller.shift_clock(DEADLINE + Duration::from_secs(1)).await.unwrap();
    let second = world.until_active(&evacuation, B).await;
    assert!(second.status.unwrap().message.contains("a.example.com has reported no progress for 600 s"));
    // The next one has its own deadline, from the switch.
    world.controller.shift_clock(2 * DEADLINE + Duration::from_secs(2)).await.unwrap();
    world.until_gone(&pod, &evacuation).await;
    world.end().await;
}

pub async fn evacuator_times_out_after_its_last_report(ground: &Ground) {
    let world = ground.fresh().await;
    let pod = world.pod("web-1", &[A, B]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_active(&evacuation, A).await;
    let shift = DEADLINE.saturating_sub(Duration::from_secs(60));
    world.controller.shift_clock(shift).await.unwrap();
    let reported = Timestamp::now().saturating_add(shift).unwrap();
    world.report(&evacuation, json!({"evacuationProgressTimestamp": Time(reported)})).await;
    world.controller.shift_clock(DEADLINE + Duration::from_secs(60)).await.unwrap();
    world.let_it_act("other").await;
    let still = world.evacuations().get(&evacuation).await.unwrap();
    assert_eq!(active(&still), Some(A), "it has reported two minutes ago");
    world.controller.shift_clock(2 * DEADLINE).await.unwrap();
    world.until_active(&evacuation, B).await;
    world.end().await;
}

pub async fn partial_evacuators_run_before_the_last_one(world: World) {
    let pod = world.pod("web-1", &[A, B]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_active(&evacuation, A).await;
    world.complete(&evacuation).await;
    world.until_active(&evacuation, B).await;
    world.pods().delete(&pod.name_any(), &DeleteParams::default()).await.unwrap();
    world.until_gone(&pod, &evacuation).await;
    assert_eq!(world.evictions(), 0);
}

pub async fn completed_evacuator_hands_over_to_eviction(world: World) {
    let pod = world.pod("web-1", &[A]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_active(&evacuation, A).await;
    world.complete(&evacuation).await;
    world.until_gone(&pod, &evacuation).await;
    assert_eq!(world.evictions(), 1);
}

pub async fn late_progress_cancels_a_pending_eviction(ground: &Ground) {
    let world = ground.fresh().await;
    let pod = world.pod("web-1", &[A]).await;
    world
        .budget(haulout_e2e::objects::pdb("web").namespace(&world.namespace).min_available("1").build())
        .await;
    let evacuation = world.evacuate(&pod).await;
    world.until_active(&evacuation, A).await;
    let shift = DEADLINE + Duration::from_secs(1);
    world.controller.shift_clock(shift).await.unwrap();
    let refused = world.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    assert_eq!(active(&refused), Some(A));
    let reported = Timestamp::now().saturating_add(shift).unwrap();
    world.report(&evacuation, json!({"evacuationProgressTimestamp": Time(reported)})).await;
    let freed = world.until(&evacuation, "is not blocked", |e| blocked(e).is_none()).await.status.unwrap();
    let condition = freed.conditions.iter().find(|c| c.type_ == "Blocked").expect("it is never removed");
    assert_eq!((condition.status.as_str(), condition.reason.as_str()), ("False", "NotBlocked"));
    assert_eq!(freed.message, format!("Evacuator {A} reports progress again: the pod is not evicted."));
    // Now the budget would let it go, but an evacuator is at work.
    world.delete_budget("web").await;
    world.let_it_act("other").await;
    assert!(world.is_left_alone(&pod).await);
    let silent = 2 * DEADLINE + Duration::from_secs(2);
    world.controller.shift_clock(silent).await.unwrap();
    world.until_gone(&pod, &evacuation).await;
    world.end().await;
}

/// No webhook is there to refuse it.
pub async fn a_progress_time_in_the_future_is_set_to_the_present(ground: &Ground) {
    let world = ground.fresh().await;
    let pod = world.pod("web-1", &[A, B]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_active(&evacuation, A).await;
    let reported = Timestamp::now().saturating_add(Duration::from_secs(100_000)).unwrap();
    world.report(&evacuation, json!({"evacuationProgressTimestamp": Time(reported)})).await;
    // However late the controller is, a day is left to what was reported.
    let soon = Timestamp::now().saturating_add(Duration::from_secs(3_600)).unwrap();
    let clamped = |e: &haulout_api_types::Evacuation| {
        let progress = e.status.as_ref().and_then(|status| status.evacuation_progress_timestamp.as_ref());
        progress.is_some_and(|progress| progress.0 < soon)
    };
    world.until(&evacuation, "has a progress time that is now", clamped).await;
    world.controller.shift_clock(DEADLINE + Duration::from_secs(60)).await.unwrap();
    world.until_active(&evacuation, B).await;
    world.end().await;
}

pub async fn switching_resets_what_the_last_evacuator_had_reported(world: World) {
    let pod = world.pod("web-1", &[A, B]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_active(&evacuation, A).await;
    let begun = Timestamp::now();
    let condition = json!([{"type": "Surged", "status": "True", "reason": "Done", "message": "", "lastTransitionTime": Time(begun)}]);
    world
        .report(
            &evacuation,
            json!({
                "activeEvacuatorCompleted": true,
                "evacuationProgressTimestamp": "2020-01-01T00:00:00Z",
                "expectedEvacuationFinishTime": Time(begun),
                "evacuationCancellationPolicy": "Forbid",
                "message": "half done",
                "conditions": condition,
            }),
        )
        .await;
    let status = world.until_active(&evacuation, B).await.status.unwrap();
    assert!(!status.active_evacuator_completed);
    assert!(
        status.evacuation_progress_timestamp.unwrap().0
            >= begun.round(jiff::Unit::Minute).unwrap() - jiff::SignedDuration::from_mins(2)
    );
    assert_eq!(status.expected_evacuation_finish_time, None);
    assert_eq!(
        status.message,
        "Evacuator a.example.com has done its part and the pod is still there: evacuator b.example.com takes over."
    );
    assert_eq!(format!("{:?}", status.evacuation_cancellation_policy), "Forbid", "that stays");
    assert!(status.conditions.iter().any(|c| c.type_ == "Surged"), "that stays");
}

//! Which evacuator is active, and for how long.

use std::time::Duration;

use haulout_api_types::Evacuation;
use haulout_api_types::evacuation::CancellationPolicy;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use super::{DEADLINE, TestEnv, TestNamespace, active, blocked};

const A: &str = "a.example.com";
const B: &str = "b.example.com";
const C: &str = "c.example.com";

pub async fn evacuators_act_by_priority_before_eviction(test: TestNamespace) {
    // The names are not in the order of the priorities.
    let pod = test.pod("web-1", &[C, A, B]).await;
    let evacuation = test.evacuate(&pod).await;
    for class in [C, A, B] {
        test.until_active(&evacuation, class).await;
        assert!(test.is_not_terminating(&pod).await);
        test.complete(&evacuation).await;
    }
    test.until_gone(&pod, &evacuation).await;
    for reason in ["EvacuatorActivated", "EvacuatorSwitched", "Evicting", "Evacuated"] {
        test.until_event(&evacuation, reason).await;
    }
}

pub async fn silent_evacuator_times_out_after_creation(env: &TestEnv) {
    let test = env.test_namespace_with_controller().await;
    let pod = test.pod("web-1", &[A, B]).await;
    let evacuation = test.evacuate(&pod).await;
    let first = test.until_active(&evacuation, A).await;
    assert_eq!(first.status.unwrap().evacuation_progress_timestamp, None, "the deadline starts at creation");
    test.controller.shift_clock(DEADLINE.saturating_sub(Duration::from_secs(60))).await.unwrap();
    test.let_controller_act("early").await;
    let still = test.evacuations().get(&evacuation).await.unwrap();
    assert_eq!(active(&still), Some(A), "a minute is left");
    test.controller.shift_clock(DEADLINE + Duration::from_secs(1)).await.unwrap();
    let second = test.until_active(&evacuation, B).await;
    assert!(second.status.unwrap().message.contains("a.example.com has reported no progress for 600 s"));
    // The next evacuator has its own deadline, from the switch on.
    test.controller.shift_clock(2 * DEADLINE + Duration::from_secs(2)).await.unwrap();
    test.until_gone(&pod, &evacuation).await;
    test.end().await;
}

pub async fn evacuator_times_out_after_its_last_report(env: &TestEnv) {
    let test = env.test_namespace_with_controller().await;
    let pod = test.pod("web-1", &[A, B]).await;
    let evacuation = test.evacuate(&pod).await;
    test.until_active(&evacuation, A).await;
    let shift = DEADLINE.saturating_sub(Duration::from_secs(60));
    test.controller.shift_clock(shift).await.unwrap();
    let reported = Timestamp::now().saturating_add(shift).unwrap();
    test.report(&evacuation, json!({"evacuationProgressTimestamp": Time(reported)})).await;
    test.controller.shift_clock(DEADLINE + Duration::from_secs(60)).await.unwrap();
    test.let_controller_act("other").await;
    let still = test.evacuations().get(&evacuation).await.unwrap();
    assert_eq!(active(&still), Some(A), "it reported two minutes ago");
    test.controller.shift_clock(2 * DEADLINE).await.unwrap();
    test.until_active(&evacuation, B).await;
    test.end().await;
}

pub async fn partial_evacuators_run_before_the_last_one(test: TestNamespace) {
    let pod = test.pod("web-1", &[A, B]).await;
    let evacuation = test.evacuate(&pod).await;
    test.until_active(&evacuation, A).await;
    test.complete(&evacuation).await;
    test.until_active(&evacuation, B).await;
    test.pods().delete(&pod.name_any(), &DeleteParams::default()).await.unwrap();
    test.until_gone(&pod, &evacuation).await;
    assert_eq!(test.evictions(), 0);
}

pub async fn completed_evacuator_hands_over_to_eviction(test: TestNamespace) {
    let pod = test.pod("web-1", &[A]).await;
    let evacuation = test.evacuate(&pod).await;
    test.until_active(&evacuation, A).await;
    test.complete(&evacuation).await;
    test.until_gone(&pod, &evacuation).await;
    assert_eq!(test.evictions(), 1);
}

/// An evacuator must not be able to fill the object, because later writes of the controller would then fail.
pub async fn largest_status_does_not_keep_a_pod(test: TestNamespace) {
    let pod = test.pod("web-1", &[A]).await;
    test.budget(haulout_e2e::objects::pdb("web").namespace(&test.namespace).min_available("1").build()).await;
    let evacuation = test.evacuate(&pod).await;
    test.until_active(&evacuation, A).await;
    let report = |conditions: usize, text: usize| {
        // The API server stores this character as six.
        let condition = |number| {
            json!({"type": format!("example.com/{number}"), "status": "True", "reason": "R".repeat(1024),
                   "message": "<".repeat(text), "lastTransitionTime": "2026-01-01T00:00:00Z"})
        };
        let conditions: Vec<_> = (0..conditions).map(condition).collect();
        json!({"status": {"conditions": conditions, "message": "<".repeat(32_768)}})
    };
    let api = test.evacuations();
    for (conditions, text, field, rule) in [
        (16, 1, "status.conditions: ", "at most 15 conditions besides Blocked"),
        (1, 8193, "status.conditions[0].message: ", "8192"),
    ] {
        let report = Patch::Merge(report(conditions, text));
        let rejected = api.patch_status(&evacuation, &PatchParams::default(), &report).await;
        let Err(kube::Error::Api(status)) = rejected else { panic!("{conditions} {text}: {rejected:?}") };
        assert!(
            status.code == 422 && [field, rule].iter().all(|part| status.message.contains(part)),
            "{status:?}"
        );
    }
    let largest = Patch::Merge(report(15, 8192));
    api.patch_status(&evacuation, &PatchParams::default(), &largest).await.unwrap();
    test.complete(&evacuation).await;
    test.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    test.delete_budget("web").await;
    test.until_gone(&pod, &evacuation).await;
}

pub async fn late_progress_cancels_a_pending_eviction(env: &TestEnv) {
    let test = env.test_namespace_with_controller().await;
    let pod = test.pod("web-1", &[A]).await;
    test.budget(haulout_e2e::objects::pdb("web").namespace(&test.namespace).min_available("1").build()).await;
    let evacuation = test.evacuate(&pod).await;
    test.until_active(&evacuation, A).await;
    let shift = DEADLINE + Duration::from_secs(1);
    test.controller.shift_clock(shift).await.unwrap();
    let rejected = test.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    assert_eq!(active(&rejected), Some(A));
    let reported = Timestamp::now().saturating_add(shift).unwrap();
    test.report(&evacuation, json!({"evacuationProgressTimestamp": Time(reported)})).await;
    let freed = test.until(&evacuation, "is not blocked", |e| blocked(e).is_none()).await.status.unwrap();
    let condition = freed.conditions.iter().find(|c| c.type_ == "Blocked").expect("it is never removed");
    assert_eq!((condition.status.as_str(), condition.reason.as_str()), ("False", "NotBlocked"));
    assert_eq!(freed.message, format!("Evacuator {A} is active again: the pod is not evicted."));
    // The budget would now allow the eviction, but an evacuator is active.
    test.delete_budget("web").await;
    test.let_controller_act("other").await;
    assert!(test.is_not_terminating(&pod).await);
    let silent = 2 * DEADLINE + Duration::from_secs(2);
    test.controller.shift_clock(silent).await.unwrap();
    test.until_gone(&pod, &evacuation).await;
    test.end().await;
}

pub async fn future_progress_timestamp_is_set_to_now(env: &TestEnv) {
    let test = env.test_namespace_with_controller().await;
    let pod = test.pod("web-1", &[A, B]).await;
    let evacuation = test.evacuate(&pod).await;
    test.until_active(&evacuation, A).await;
    let reported = Timestamp::now().saturating_add(Duration::from_secs(100_000)).unwrap();
    test.report(&evacuation, json!({"evacuationProgressTimestamp": Time(reported)})).await;
    // However late the controller is, the reported time is a day ahead.
    let soon = Timestamp::now().saturating_add(Duration::from_secs(3_600)).unwrap();
    let clamped = |e: &Evacuation| {
        let progress = e.status.as_ref().and_then(|status| status.evacuation_progress_timestamp.as_ref());
        progress.is_some_and(|progress| progress.0 < soon)
    };
    test.until(&evacuation, "has the current time as progress timestamp", clamped).await;
    test.controller.shift_clock(DEADLINE + Duration::from_secs(60)).await.unwrap();
    test.until_active(&evacuation, B).await;
    test.end().await;
}

/// The user may report for both evacuators, and never reports progress.
pub async fn silent_evacuator_cannot_forbid_for_ever(env: &TestEnv) {
    let test = env.test_namespace_with_controller().await;
    let silent = test.reporter("silent", &[A, B]).await;
    let pod = test.pod("web-1", &[A, B]).await;
    test.budget(haulout_e2e::objects::pdb("web").namespace(&test.namespace).min_available("1").build()).await;
    let evacuation = test.evacuate(&pod).await;
    let forbid = async || {
        let forbid = Patch::Merge(json!({"status": {"evacuationCancellationPolicy": "Forbid"}}));
        let written = silent.patch_status(&evacuation, &PatchParams::default(), &forbid).await.unwrap();
        assert_eq!(policy(&written), CancellationPolicy::Forbid);
    };
    test.until_active(&evacuation, A).await;
    forbid().await;
    test.controller.shift_clock(DEADLINE + Duration::from_secs(1)).await.unwrap();
    let second = test.until_active(&evacuation, B).await;
    assert_eq!(policy(&second), CancellationPolicy::Allow, "reset in the same write");
    assert!(second.status.unwrap().message.contains("a.example.com has reported no progress for 600 s"));
    forbid().await;
    test.controller.shift_clock(2 * DEADLINE + Duration::from_secs(2)).await.unwrap();
    let evicting = test.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    assert_eq!(policy(&evicting), CancellationPolicy::Allow, "reset before the eviction");
    // Its turn is over: it may still report, but has reported no progress.
    for _ in 0..2 {
        forbid().await;
        let allows = |e: &Evacuation| policy(e) == CancellationPolicy::Allow;
        test.until(&evacuation, "allows cancellation again", allows).await;
    }
    test.delete_budget("web").await;
    test.until_gone(&pod, &evacuation).await;
    test.end().await;
}

fn policy(evacuation: &Evacuation) -> CancellationPolicy {
    evacuation.status.clone().unwrap_or_default().evacuation_cancellation_policy
}

pub async fn switching_evacuators_resets_reported_status(test: TestNamespace) {
    let pod = test.pod("web-1", &[A, B]).await;
    let evacuation = test.evacuate(&pod).await;
    test.until_active(&evacuation, A).await;
    let begun = Timestamp::now();
    let condition = json!([{"type": "Surged", "status": "True", "reason": "Done", "message": "", "lastTransitionTime": Time(begun)}]);
    test.report(
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
    let status = test.until_active(&evacuation, B).await.status.unwrap();
    assert!(!status.active_evacuator_completed);
    assert!(
        status.evacuation_progress_timestamp.unwrap().0
            >= begun.round(jiff::Unit::Minute).unwrap() - jiff::SignedDuration::from_mins(2)
    );
    assert_eq!(status.expected_evacuation_finish_time, None);
    assert_eq!(
        status.message,
        "Evacuator a.example.com has completed, but the pod still exists: evacuator b.example.com is active now."
    );
    assert_eq!(format!("{:?}", status.evacuation_cancellation_policy), "Forbid", "that stays");
    assert!(status.conditions.iter().any(|c| c.type_ == "Surged"), "that stays");
}

//! Evacuations as the watch delivers them, with any status that the active evacuator may have written.

use std::sync::Arc;

use haulout_api_types::Evacuation;
use haulout_api_types::names::reason;
use haulout_service_runtime::testing::{fuzz, status_violations};
use jiff::Timestamp;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::core::DeserializeGuard;
use serde_json::{Value, json};

use crate::budget::Budgets;
use crate::decide::{LocalState, Moment, PodState, decide};
use crate::record::Record;
use crate::status;
use crate::testing::{at, pod};

fn corpus() -> Vec<Vec<u8>> {
    let evacuation = json!({
        "apiVersion": "evacuation.coordination.k8s.io/v1alpha1", "kind": "Evacuation",
        "metadata": {
            "name": "00000000-0000-0000-0000-000000000001-web-1", "namespace": "shop", "resourceVersion": "7",
            "uid": "eeeeeeee-0000-0000-0000-000000000001", "creationTimestamp": "2026-01-01T00:00:00Z",
            "deletionTimestamp": "2026-01-01T00:00:00Z",
            "finalizers": ["evacuation.coordination.k8s.io/instigator_a.example.com", "example.com/x"]
        },
        "spec": {
            "podRef": {"name": "web-1", "uid": "00000000-0000-0000-0000-000000000001"},
            "progressDeadlineSeconds": 600,
            "evacuators": [{"evacuatorClass": "a.example.com", "priority": 7, "role": "x"},
                {"evacuatorClass": "b.example.com", "priority": 10_000, "role": "controller"}]
        },
        "status": {
            "activeEvacuatorClass": "a.example.com", "activeEvacuatorCompleted": true, "message": "m",
            "evacuationProgressTimestamp": "2026-01-01T00:00:00Z", "evacuationCancellationPolicy": "Forbid",
            "expectedEvacuationFinishTime": "2026-01-01T00:00:00Z", "failedEvictionCounter": 3,
            "lastFailedEvictionTime": "2026-01-01T00:00:00Z",
            "conditions": [
                {"type": "Blocked", "status": "True", "reason": "DisruptionBudgetExhausted", "message": "m",
                    "lastTransitionTime": "2026-01-01T00:00:00Z"},
                {"type": "example.com/Mine", "status": "True", "reason": "R", "message": "m",
                    "lastTransitionTime": "2026-01-01T00:00:00Z"}]
        }
    });
    let budget = json!({
        "metadata": {"name": "web", "namespace": "shop", "generation": 3},
        "spec": {"selector": {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["x"]}]}, "maxUnavailable": "10%"},
        "status": {"observedGeneration": 3, "disruptionsAllowed": 1, "currentHealthy": 2, "desiredHealthy": 1,
            "expectedPods": 2, "disruptedPods": {"web-1": "2026-01-01T00:00:00Z"}}
    });
    [evacuation, budget].map(|object| object.to_string().into_bytes()).into()
}

fn read(input: &[u8]) {
    let pod = pod(1);
    if let Ok(DeserializeGuard(Ok(budget))) =
        serde_json::from_slice::<DeserializeGuard<PodDisruptionBudget>>(input)
    {
        let mut budgets = Budgets::default();
        budgets.apply(&pod.namespace, budget);
        budgets.start_eviction(pod.uid, &pod);
        budgets.admit(&pod.namespace, [(pod.uid, &pod)]);
        assert!(budgets.describe(&pod, [&pod]).len() < 16 * 1024);
    }
    let Ok(DeserializeGuard(Ok(evacuation))) = serde_json::from_slice::<DeserializeGuard<Evacuation>>(input)
    else {
        return;
    };
    let Ok(record) = Record::read(evacuation, |text| Arc::from(text)) else { return };
    for now in [Timestamp::MIN, at(0), Timestamp::MAX] {
        for state in [PodState::Unknown, PodState::Gone, PodState::Present(&pod)] {
            let moment = Moment { now, resumed: at(0), gap: false, unserved: None };
            decide(&record, state, &LocalState::default(), moment);
        }
    }
    // The API server validates types of conditions, which is not repeated here.
    let long = record
        .other_conditions
        .iter()
        .any(|c| c.type_.len() > 316 || c.reason.len() > 1024 || c.reason.is_empty());
    let known = |status: &str| ["True", "False", "Unknown"].contains(&status);
    if !long && record.other_conditions.iter().all(|c| known(&c.status)) {
        let status =
            Value::from(status::blocked(&record, reason::SERVER_BUSY, &status::held(&record, "x"), at(1)));
        let found: Vec<_> = status_violations("Evacuation", &status);
        assert!(found.iter().all(|violation| violation.contains("observedGeneration")), "{found:?}");
    }
}

#[test]
fn mutated_evacuations_are_processed_quickly() {
    fuzz::fuzz("evacuations", fuzz::QUICK, &corpus(), read);
}

#[test]
#[ignore = "slow"]
fn mutated_evacuations_are_processed() {
    fuzz::fuzz("evacuations", fuzz::SLOW, &corpus(), read);
}

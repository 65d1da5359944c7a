//! Admission by budgets, as tables and as a property.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::testing::{budget, key, pod, pod_with};

fn budgets(all: &[PodDisruptionBudget]) -> Budgets {
    let mut budgets = Budgets::default();
    for budget in all {
        budgets.apply(&Arc::from("test"), budget.clone());
    }
    budgets
}

fn admit(budgets: &mut Budgets, pods: &[(u32, Pod)]) -> Vec<Uid> {
    budgets.admit("test", pods.iter().map(|(n, pod)| (key(*n), pod)))
}

fn pods(count: u32) -> Vec<(u32, Pod)> {
    (0..count).map(|n| (n, pod(n))).collect()
}

#[test]
fn oldest_are_admitted_as_far_as_the_budget_allows() {
    let cases: [(&str, Vec<PodDisruptionBudget>, usize); 5] = [
        ("no budget", vec![], 4),
        ("nothing allowed", vec![budget("web", 0, &[])], 0),
        ("two allowed", vec![budget("web", 2, &[])], 2),
        ("more than wait", vec![budget("web", 9, &[])], 4),
        ("several budgets", vec![budget("a", 9, &[]), budget("b", 9, &[])], 0),
    ];
    for (name, all, expected) in cases {
        let expected: Vec<_> = (0..4).map(key).take(expected).collect();
        assert_eq!(admit(&mut budgets(&all), &pods(4)), expected, "{name}");
    }
}

#[test]
fn evictions_in_flight_count_until_the_status_has_them() {
    let mut all = budgets(&[budget("web", 2, &[])]);
    assert_eq!(admit(&mut all, &pods(4)), [key(0), key(1)]);
    assert_eq!(admit(&mut all, &pods(4)), [], "both are in flight");
    // The API server has accepted the eviction of pod-0. It allows one more, which is for pod-1.
    all.apply(&Arc::from("test"), budget("web", 1, &["pod-0"]));
    assert_eq!(admit(&mut all, &pods(4)[1..]), []);
    all.end_eviction("test", key(1));
    assert_eq!(admit(&mut all, &pods(4)[2..]), [key(2)], "the eviction of pod-1 was rejected");
}

#[test]
fn outdated_status_allows_nothing() {
    let mut stale = budget("web", 2, &[]);
    stale.metadata.generation = Some(2);
    assert_eq!(admit(&mut budgets(&[stale]), &pods(2)), []);
}

#[test]
fn exempt_pods_are_admitted_without_an_allowance() {
    let not_ready = json!([{"type": "Ready", "status": "False"}]);
    let mut always = budget("web", 0, &[]);
    always.spec.as_mut().unwrap().unhealthy_pod_eviction_policy = Some("AlwaysAllow".into());
    let mut lacking = budget("web", 0, &[]);
    lacking.status.as_mut().unwrap().current_healthy = 1;
    always.status = lacking.status.clone();
    let cases = [
        ("ready", budget("web", 0, &[]), pod(0), false),
        (
            "not ready, enough others",
            budget("web", 0, &[]),
            pod_with(0, &[("/status/conditions", not_ready.clone())]),
            true,
        ),
        (
            "not ready, not enough others",
            lacking.clone(),
            pod_with(0, &[("/status/conditions", not_ready.clone())]),
            false,
        ),
        ("not ready, policy AlwaysAllow", always, pod_with(0, &[("/status/conditions", not_ready)]), true),
        ("pending", lacking.clone(), pod_with(0, &[("/status/phase", json!("Pending"))]), true),
        ("finished", lacking, pod_with(0, &[("/status/phase", json!("Succeeded"))]), true),
    ];
    for (name, budget, pod, expected) in cases {
        let admitted = admit(&mut budgets(&[budget]), &[(0, pod)]);
        assert_eq!(!admitted.is_empty(), expected, "{name}");
    }
}

#[test]
fn message_has_the_numbers_and_pods_of_the_budget() {
    let not_ready = |n| pod_with(n, &[("/status/conditions", json!([{"type": "Ready", "status": "False"}]))]);
    let terminating = pod_with(5, &[("/metadata/deletionTimestamp", json!("2023-01-01T00:00:30Z"))]);
    let foreign = || pod_with(6, &[("/metadata/labels", json!({"app": "db"}))]);
    let numbers = "PodDisruptionBudget web allows 0 disruptions: 2 of 3 pods are healthy, 2 required";
    let cases: [(&[Pod], &str); 5] = [
        (&[], ""),
        (&[foreign()], ""),
        (&[foreign(), not_ready(1)], "; pod pod-1 is not ready"),
        (&[terminating, not_ready(2)], "; pod pod-2 is not ready, pod pod-5 is terminating"),
        (
            &[not_ready(1), not_ready(2), not_ready(3), not_ready(4)],
            "; pod pod-1 is not ready, pod pod-2 is not ready, pod pod-3 is not ready, and others",
        ),
    ];
    let one = budgets(&[budget("web", 0, &[])]);
    for (unhealthy, expected) in cases {
        assert_eq!(one.describe(&pod(0), unhealthy), format!("{numbers}{expected}."));
    }
    // The status of the budget is older than the cache of pods.
    let mut whole = budget("web", 0, &[]);
    whole.status.as_mut().unwrap().expected_pods = 2;
    assert!(budgets(&[whole]).describe(&pod(0), &[not_ready(1)]).ends_with("2 required."));
    // Disrupted pods that do not leave.
    let disrupted = budgets(&[budget("web", 0, &["pod-7"])]).describe(&pod(0), &[not_ready(1)]);
    let expected = "; pod pod-1 is not ready; pod pod-7 counts as disrupted until 2023-01-01T00:02:00Z.";
    assert_eq!(disrupted, format!("{numbers}{expected}"));
    let many = budgets(&[budget("web", 0, &["a", "b", "c", "d"])]).describe(&pod(0), &[]);
    assert!(many.contains("pod c counts as disrupted until") && many.ends_with(", and others."), "{many}");
    let several = budgets(&[budget("a", 1, &[]), budget("b", 1, &[])]).describe(&pod(0), &[]);
    assert_eq!(several, "The pod is covered by a, b.");
}

#[test]
fn message_names_the_first_of_very_many_budgets() {
    let all: Vec<_> = (0..5000).map(|n| budget(&format!("{}{n:04}", "x".repeat(249)), 1, &[])).collect();
    let message = budgets(&all).describe(&pod(0), &[]);
    assert!(message.ends_with("x0002 and 4997 more.") && message.len() < 1000, "{message}");
}

#[test]
fn deleted_budget_no_longer_covers_pods() {
    let mut all = budgets(&[budget("a", 0, &[]), budget("b", 0, &[])]);
    all.delete("test", "b");
    assert_eq!(all.covering(&pod(0)).len(), 1);
    all.delete("test", "a");
    assert!(all.covering(&pod(0)).is_empty());
}

/// What happens to a budget and to the Evacuations that wait for it.
#[derive(Clone, Debug)]
enum Step {
    /// The status of the budget allows this many disruptions now.
    Allow(i32),
    /// Waiting Evacuations are admitted.
    Admit,
    /// The n-th eviction in flight is rejected.
    Reject(usize),
    /// The n-th eviction in flight is accepted, and the status of the budget counts it.
    Evict(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0..5i32).prop_map(Step::Allow),
        Just(Step::Admit),
        (0..8usize).prop_map(Step::Reject),
        (0..8usize).prop_map(Step::Evict),
    ];
    proptest::collection::vec(step, 1..40)
}

proptest! {
    /// In any order of steps, the number of evictions in flight never exceeds the last observed allowance, and no
    /// Evacuation is admitted before an older one.
    #[test]
    fn admissions_never_exceed_the_allowance_and_are_fair(steps in steps()) {
        let mut all = budgets(&[budget("web", 0, &[])]);
        let mut allowed = 0;
        let mut waiting: BTreeMap<u32, Pod> = pods(12).into_iter().collect();
        let mut in_flight: Vec<u32> = Vec::new();
        let mut gone: Vec<String> = Vec::new();
        let apply = |all: &mut Budgets, allowed: i32, gone: &[String]| {
            let gone: Vec<_> = gone.iter().map(String::as_str).collect();
            all.apply(&Arc::from("test"), budget("web", allowed, &gone));
        };
        for step in steps {
            match step {
                Step::Allow(now) => {
                    allowed = now;
                    apply(&mut all, allowed, &gone);
                }
                Step::Admit => {
                    let candidates: Vec<_> = waiting.iter().map(|(n, pod)| (*n, pod.clone())).collect();
                    let admitted = admit(&mut all, &candidates);
                    let new: Vec<_> = waiting.keys().copied().filter(|n| admitted.contains(&key(*n))).collect();
                    let remaining = usize::try_from(allowed).unwrap().saturating_sub(in_flight.len());
                    prop_assert_eq!(new.len(), remaining.min(waiting.len()));
                    let oldest: Vec<_> = waiting.keys().copied().take(new.len()).collect();
                    prop_assert_eq!(&new, &oldest);
                    for n in new {
                        waiting.remove(&n);
                        in_flight.push(n);
                    }
                }
                Step::Reject(position) if position < in_flight.len() => {
                    let n = in_flight.remove(position);
                    all.end_eviction("test", key(n));
                    waiting.insert(n, pod(n));
                }
                Step::Evict(position) if position < in_flight.len() && allowed > 0 => {
                    let n = in_flight.remove(position);
                    gone.push(format!("pod-{n}"));
                    allowed -= 1;
                    apply(&mut all, allowed, &gone);
                }
                Step::Reject(_) | Step::Evict(_) => {}
            }
        }
    }
}

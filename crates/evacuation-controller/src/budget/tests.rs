//! Who is admitted, in tables and as a property.

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
fn the_first_that_wait_are_admitted_as_far_as_the_budget_allows() {
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
fn those_on_their_way_take_room_until_the_numbers_show_them() {
    let mut all = budgets(&[budget("web", 2, &[])]);
    assert_eq!(admit(&mut all, &pods(4)), [key(0), key(1)]);
    assert_eq!(admit(&mut all, &pods(4)), [], "both are on their way");
    // The API server has let pod-0 go and still allows one, which is the one for pod-1.
    all.apply(&Arc::from("test"), budget("web", 1, &["pod-0"]));
    assert_eq!(admit(&mut all, &pods(4)[1..]), []);
    all.end("test", key(1));
    assert_eq!(admit(&mut all, &pods(4)[2..]), [key(2)], "pod-1 was refused");
}

#[test]
fn a_status_that_is_older_than_the_spec_allows_nothing() {
    let mut stale = budget("web", 2, &[]);
    stale.metadata.generation = Some(2);
    assert_eq!(admit(&mut budgets(&[stale]), &pods(2)), []);
}

#[test]
fn pods_that_the_budget_does_not_count_need_no_room() {
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
        ("not ready, but it may always go", always, pod_with(0, &[("/status/conditions", not_ready)]), true),
        ("pending", lacking.clone(), pod_with(0, &[("/status/phase", json!("Pending"))]), true),
        ("finished", lacking, pod_with(0, &[("/status/phase", json!("Succeeded"))]), true),
    ];
    for (name, budget, pod, expected) in cases {
        let admitted = admit(&mut budgets(&[budget]), &[(0, pod)]);
        assert_eq!(!admitted.is_empty(), expected, "{name}");
    }
}

#[test]
fn a_budget_tells_its_numbers_and_who_makes_them_so_and_several_tell_their_names() {
    let not_ready = |n| pod_with(n, &[("/status/conditions", json!([{"type": "Ready", "status": "False"}]))]);
    let ending = pod_with(5, &[("/metadata/deletionTimestamp", json!("2023-01-01T00:00:30Z"))]);
    let foreign = || pod_with(6, &[("/metadata/labels", json!({"app": "db"}))]);
    let numbers = "PodDisruptionBudget web allows 0 disruptions: 2 of 3 pods are healthy and 2 have to be";
    let cases: [(&[Pod], &str); 5] = [
        (&[], ""),
        (&[foreign()], ""),
        (&[foreign(), not_ready(1)], "; pod pod-1 is not ready"),
        (&[ending, not_ready(2)], "; pod pod-2 is not ready, pod pod-5 is terminating"),
        (
            &[not_ready(1), not_ready(2), not_ready(3), not_ready(4)],
            "; pod pod-1 is not ready, pod pod-2 is not ready, pod pod-3 is not ready, and so are others",
        ),
    ];
    let one = budgets(&[budget("web", 0, &[])]);
    for (unhealthy, expected) in cases {
        assert_eq!(one.describe(&pod(0), unhealthy), format!("{numbers}{expected}."));
    }
    // The numbers are older than what is known of the pods.
    let mut whole = budget("web", 0, &[]);
    whole.status.as_mut().unwrap().expected_pods = 2;
    assert!(budgets(&[whole]).describe(&pod(0), &[not_ready(1)]).ends_with("2 have to be."));
    // Those that it has let go, and that do not leave.
    let disrupted = budgets(&[budget("web", 0, &["pod-7"])]).describe(&pod(0), &[not_ready(1)]);
    let expected = "; pod pod-1 is not ready; pod pod-7 counts as disrupted until 2023-01-01T00:02:00Z.";
    assert_eq!(disrupted, format!("{numbers}{expected}"));
    let many = budgets(&[budget("web", 0, &["a", "b", "c", "d"])]).describe(&pod(0), &[]);
    assert!(
        many.contains("pod c counts as disrupted until") && many.ends_with(", and so do others."),
        "{many}"
    );
    let several = budgets(&[budget("a", 1, &[]), budget("b", 1, &[])]).describe(&pod(0), &[]);
    assert_eq!(several, "The pod is covered by a, b.");
}

#[test]
fn a_deleted_budget_is_gone() {
    let mut all = budgets(&[budget("a", 0, &[]), budget("b", 0, &[])]);
    all.delete("test", "b");
    assert_eq!(all.covering(&pod(0)).len(), 1);
    all.delete("test", "a");
    assert!(all.covering(&pod(0)).is_empty());
}

/// What happens to a budget and to those who wait for it.
#[derive(Clone, Debug)]
enum Step {
    /// The API server allows so many now.
    Allow(i32),
    /// All who wait are asked.
    Admit,
    /// The n-th of those on their way is refused.
    Refuse(usize),
    /// The n-th of those on their way is evicted, and the budget's numbers show it.
    Evict(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0..5i32).prop_map(Step::Allow),
        Just(Step::Admit),
        (0..8usize).prop_map(Step::Refuse),
        (0..8usize).prop_map(Step::Evict),
    ];
    proptest::collection::vec(step, 1..40)
}

proptest! {
    /// Whatever the order, there are never more on their way than the API server was last known to allow when
    /// they were admitted, and nobody is passed over by somebody younger.
    #[test]
    fn wake_ups_never_exceed_the_allowance_and_are_fair(steps in steps()) {
        let mut all = budgets(&[budget("web", 0, &[])]);
        let mut allowed = 0;
        let mut waiting: BTreeMap<u32, Pod> = pods(12).into_iter().collect();
        let mut on_their_way: Vec<u32> = Vec::new();
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
                    let room = usize::try_from(allowed).unwrap().saturating_sub(on_their_way.len());
                    prop_assert_eq!(new.len(), room.min(waiting.len()));
                    let oldest: Vec<_> = waiting.keys().copied().take(new.len()).collect();
                    prop_assert_eq!(&new, &oldest);
                    for n in new {
                        waiting.remove(&n);
                        on_their_way.push(n);
                    }
                }
                Step::Refuse(place) if place < on_their_way.len() => {
                    let n = on_their_way.remove(place);
                    all.end("test", key(n));
                    waiting.insert(n, pod(n));
                }
                Step::Evict(place) if place < on_their_way.len() && allowed > 0 => {
                    let n = on_their_way.remove(place);
                    gone.push(format!("pod-{n}"));
                    allowed -= 1;
                    apply(&mut all, allowed, &gone);
                }
                Step::Refuse(_) | Step::Evict(_) => {}
            }
        }
    }
}

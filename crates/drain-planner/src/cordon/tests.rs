//! Nodes through whole maintenances: what is set, reverted and restored.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::Counts;
use crate::testing::{at, entry};
use haulout_api_types::node_maintenance::{PodType, Stage};

fn plan(holders: &[&str], draining: bool, state: NodeState) -> NodePlan {
    NodePlan {
        state,
        holders: holders.iter().map(|name| Arc::from(*name)).collect(),
        reasons: BTreeMap::new(),
        hold_autoscalers: true,
        draining,
        uncordon: false,
        held_back: false,
        maintenances: holders.iter().map(|name| on_node(name, draining)).collect(),
        targets: vec![entry(PodType::Default, 1000, None)],
        volume_timeout: None,
        message: "Evacuating".into(),
        counts: Counts::default(),
        blockers: Vec::new(),
        requeue_at: None,
    }
}

fn on_node(name: &str, draining: bool) -> MaintenanceOnNode {
    let stage = if draining { Stage::Drain } else { Stage::Cordon };
    MaintenanceOnNode { uid: format!("uid of {name}"), name: name.into(), stage }
}

fn idle() -> NodePlan {
    plan(&[], false, NodeState::Idle)
}

fn apply_changes(markers: &mut NodeMarkers, changes: &NodeChanges) {
    markers.unschedulable = changes.unschedulable.unwrap_or(markers.unschedulable);
    for (key, value) in &changes.annotations {
        match value {
            Some(value) => drop(markers.annotations.insert(key.clone(), value.clone())),
            None => drop(markers.annotations.remove(key)),
        }
    }
    let gone = |known: &NodeCondition| {
        changes.remove_conditions.contains(&known.type_.as_str())
            || changes.set_conditions.iter().any(|set| set.type_ == known.type_)
    };
    markers.conditions.retain(|known| !gone(known));
    markers.conditions.extend(changes.set_conditions.iter().cloned());
}

/// Applies the decided changes and checks that no further change follows.
fn reach(markers: &mut NodeMarkers, plan: &NodePlan) -> Option<CordonEvent> {
    let changes = decide(markers, plan, true, at(0));
    apply_changes(markers, &changes);
    assert_eq!(decide(markers, plan, true, at(9)), NodeChanges::default(), "once is enough");
    changes.event
}

fn annotated(of: &[(&str, &str)]) -> BTreeMap<String, String> {
    of.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
}

fn conditions(markers: &NodeMarkers) -> Vec<(&str, &str)> {
    let mut all: Vec<_> = markers.conditions.iter().map(|c| (c.type_.as_str(), c.status.as_str())).collect();
    all.sort_unstable();
    all
}

#[test]
fn node_is_restored_after_maintenance() {
    let beginnings = [
        NodeMarkers::default(),
        NodeMarkers { unschedulable: true, ..NodeMarkers::default() },
        NodeMarkers {
            annotations: annotated(&[
                (SCALE_DOWN_DISABLED_ANNOTATION, "false"),
                (DO_NOT_DISRUPT_ANNOTATION, "true"),
            ]),
            ..NodeMarkers::default()
        },
    ];
    for beginning in beginnings {
        let mut markers = beginning.clone();
        assert_eq!(reach(&mut markers, &plan(&["a"], false, NodeState::Idle)), None);
        assert!(markers.unschedulable && markers.has_markers());
        assert_eq!(conditions(&markers), [("MaintenanceInProgress", "True")]);
        assert_eq!(markers.annotations[SCALE_DOWN_DISABLED_ANNOTATION], "true");
        assert_eq!(markers.annotations[DO_NOT_DISRUPT_ANNOTATION], "true");

        assert_eq!(reach(&mut markers, &plan(&["a", "b"], true, NodeState::Evacuating)), None);
        let under_way =
            [("DrainInProgress", "True"), ("Drained", "False"), ("MaintenanceInProgress", "True")];
        assert_eq!(conditions(&markers), under_way);
        let status = markers.status().unwrap();
        assert_eq!((status.drain_message.as_str(), status.drain_targets.len()), ("Evacuating", 1));

        assert_eq!(reach(&mut markers, &plan(&["b"], true, NodeState::Drained)), None, "b still holds it");
        let done = [("DrainInProgress", "False"), ("Drained", "True"), ("MaintenanceInProgress", "True")];
        assert_eq!(conditions(&markers), done);

        let event = reach(&mut markers, &idle());
        assert_eq!(event, beginning.unschedulable.then_some(CordonEvent::LeftCordoned));
        assert_eq!(markers, beginning);
    }
}

#[test]
fn condition_names_maintenances_and_reasons() {
    let message = |markers: &NodeMarkers| markers.conditions[0].message.clone().unwrap();
    let mut markers = NodeMarkers::default();
    let both = plan(&["a", "b"], false, NodeState::Idle);
    reach(&mut markers, &both);
    assert_eq!(message(&markers), "Under maintenance by a, b");
    let reasons = BTreeMap::from([("a".into(), "new kernel".into())]);
    let why = NodePlan { reasons: reasons.clone(), ..both };
    assert!(!decide(&markers, &why, true, at(0)).urgent, "no pod waits for this write");
    reach(&mut markers, &why);
    assert_eq!(message(&markers), "Under maintenance by a (new kernel), b");
    let many: Vec<String> = (0..12).map(|i| format!("m{i}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    reach(&mut markers, &plan(&many, false, NodeState::Idle));
    assert!(message(&markers).ends_with("m8, m9 and 2 more"), "{}", message(&markers));
}

#[test]
fn uncordon_is_reverted_and_ends_an_earlier_cordon() {
    let mut markers = NodeMarkers { unschedulable: true, ..NodeMarkers::default() };
    let cordon = plan(&["a"], false, NodeState::Idle);
    reach(&mut markers, &cordon);
    markers.unschedulable = false;
    assert_eq!(reach(&mut markers, &cordon), None, "once may be a mistake");
    assert!(markers.unschedulable);
    reach(&mut markers, &idle());
    assert!(!markers.unschedulable, "the earlier cordon has ended");
}

#[test]
fn cordon_stays_ours_when_the_annotation_is_lost() {
    let mut markers = NodeMarkers::default();
    let cordon = plan(&["a"], false, NodeState::Idle);
    for invalid in [None, Some("no JSON")] {
        reach(&mut markers, &cordon);
        markers.annotations.remove(BEFORE_MAINTENANCE_ANNOTATION);
        markers
            .annotations
            .extend(invalid.map(|text| (BEFORE_MAINTENANCE_ANNOTATION.to_string(), text.to_string())));
        reach(&mut markers, &cordon);
        reach(&mut markers, &idle());
        assert!(!markers.unschedulable, "{invalid:?}");
    }
}

#[test]
fn foreign_cordon_is_removed_only_by_direct_completion() {
    let mut markers = NodeMarkers { unschedulable: true, ..NodeMarkers::default() };
    assert_eq!(decide(&markers, &idle(), true, at(0)), NodeChanges::default());
    reach(&mut markers, &NodePlan { uncordon: true, ..idle() });
    assert_eq!(markers, NodeMarkers::default());
}

#[test]
fn annotations_changed_by_others_stay() {
    let mut markers = NodeMarkers::default();
    let changes = decide(&markers, &plan(&["a"], false, NodeState::Idle), true, at(0));
    apply_changes(&mut markers, &changes);
    markers.annotations.insert(SCALE_DOWN_DISABLED_ANNOTATION.into(), "false".into());
    reach(&mut markers, &idle());
    assert_eq!(markers.annotations, annotated(&[(SCALE_DOWN_DISABLED_ANNOTATION, "false")]));
}

#[test]
fn autoscaler_annotations_can_be_disabled() {
    let own = annotated(&[(DO_NOT_DISRUPT_ANNOTATION, "true")]);
    let mut markers = NodeMarkers { annotations: own, ..NodeMarkers::default() };
    let beginning = markers.clone();
    for plan in [plan(&["a"], false, NodeState::Idle), idle()] {
        let changes = decide(&markers, &plan, false, at(0));
        apply_changes(&mut markers, &changes);
    }
    assert_eq!(markers, beginning, "annotations of the user stay");
    let changes = decide(&NodeMarkers::default(), &plan(&["a"], false, NodeState::Idle), false, at(0));
    assert_eq!(
        changes.annotations.keys().collect::<Vec<_>>(),
        [BEFORE_MAINTENANCE_ANNOTATION, MAINTENANCE_STATUS_ANNOTATION]
    );
}

#[test]
fn autoscalers_are_held_while_a_maintenance_requests_it() {
    let beginning = annotated(&[(SCALE_DOWN_DISABLED_ANNOTATION, "false")]);
    let mut markers = NodeMarkers { annotations: beginning.clone(), ..NodeMarkers::default() };
    let holding = plan(&["a"], false, NodeState::Idle);
    let letting = NodePlan { hold_autoscalers: false, ..holding.clone() };
    let visible = |markers: &NodeMarkers| -> BTreeMap<String, String> {
        markers
            .annotations
            .clone()
            .into_iter()
            .filter(|(key, _)| AUTOSCALER_ANNOTATIONS.contains(&key.as_str()))
            .collect()
    };
    let held = annotated(&[(SCALE_DOWN_DISABLED_ANNOTATION, "true"), (DO_NOT_DISRUPT_ANNOTATION, "true")]);
    for (plan, expected) in
        [(&letting, &beginning), (&holding, &held), (&letting, &beginning), (&holding, &held)]
    {
        reach(&mut markers, plan);
        assert_eq!((&visible(&markers), markers.unschedulable), (expected, true));
    }
    // An unreadable maintenance may require it. A value that somebody has changed since stays, and is restored later.
    let unknown = NodePlan { held_back: true, ..letting.clone() };
    reach(&mut markers, &unknown);
    assert_eq!(visible(&markers), held);
    markers.annotations.insert(SCALE_DOWN_DISABLED_ANNOTATION.into(), "later".into());
    reach(&mut markers, &letting);
    let changed = annotated(&[(SCALE_DOWN_DISABLED_ANNOTATION, "later")]);
    assert_eq!(visible(&markers), changed);
    for plan in [holding, idle()] {
        reach(&mut markers, &plan);
    }
    assert_eq!(markers.annotations, changed);
}

#[test]
fn patches_contain_only_changes() {
    let changes = decide(&NodeMarkers::default(), &plan(&["a"], false, NodeState::Idle), false, at(0));
    assert_eq!(
        changes.node_patch().unwrap(),
        json!({
            "metadata": {"annotations": {
                BEFORE_MAINTENANCE_ANNOTATION: r#"{"unschedulable":false}"#,
                MAINTENANCE_STATUS_ANNOTATION: r#"{"maintenances":[{"name":"a","stage":"Cordon","uid":"uid of a"}]}"#,
            }},
            "spec": {"unschedulable": true},
        })
    );
    let mut markers = NodeMarkers::default();
    apply_changes(&mut markers, &changes);
    let end = decide(&markers, &idle(), false, at(1));
    assert_eq!(
        end.status_patch().unwrap(),
        json!({"conditions": [{"type": "MaintenanceInProgress", "$patch": "delete"}]})
    );
    assert_eq!((NodeChanges::default().node_patch(), NodeChanges::default().status_patch()), (None, None));
}

/// The seconds at which a cordon is restored that somebody removes immediately each time, and the first second with an event.
fn restore_times(markers: &mut NodeMarkers, from: i64, until: i64) -> (Vec<i64>, Option<i64>) {
    let cordon = plan(&["a"], false, NodeState::Idle);
    let (mut now, mut seconds, mut reported) = (from, Vec::new(), None);
    while now <= until {
        markers.unschedulable = false;
        let changes = decide(markers, &cordon, true, at(now));
        apply_changes(markers, &changes);
        if let Some(again) = changes.requeue_at {
            assert!(changes.is_empty(), "nothing is written meanwhile: {changes:?}");
            assert_eq!(markers.cordon_due(), Some(again));
            now = again.as_second() - at(0).as_second();
        } else {
            assert!(markers.unschedulable);
            seconds.push(now);
            let event = changes.event.map(|_| now);
            assert!(reported.is_none() || event.is_some(), "an event each time");
            reported = reported.or(event);
        }
    }
    (seconds, reported)
}

#[test]
fn cordon_is_restored_with_growing_delays() {
    let mut markers = NodeMarkers::default();
    reach(&mut markers, &plan(&["a"], false, NodeState::Idle));
    let cases: [(&str, i64, i64, &[i64], i64); 4] = [
        ("once may be a mistake", 0, 3000, &[0, 10, 30, 70, 150, 310, 630, 1270, 2170], 10),
        ("another replica continues the backoff", 2171, 3500, &[3070], 3070),
        ("after a quiet time", 3070 + 30 * 60, 4900, &[4870, 4880, 4900], 4880),
        ("a clock that was set back causes no delay", 100, 115, &[100, 110], 110),
    ];
    for (what, from, until, seconds, reported) in cases {
        assert_eq!(restore_times(&mut markers, from, until), (seconds.to_vec(), Some(reported)), "{what}");
    }
    reach(&mut markers, &idle());
    assert_eq!(markers, NodeMarkers::default());
}

#[test]
fn changes_that_pods_wait_for_are_urgent() {
    let mut markers = NodeMarkers::default();
    let at_priority = |priority| NodePlan {
        targets: vec![entry(PodType::Default, priority, None)],
        ..plan(&["a"], true, NodeState::Evacuating)
    };
    let mut urgent = |plan: &NodePlan| {
        let changes = decide(&markers, plan, true, at(0));
        apply_changes(&mut markers, &changes);
        (changes.urgent, changes.is_empty())
    };
    assert_eq!(urgent(&at_priority(1000)), (true, false), "the cordon");
    assert_eq!(urgent(&at_priority(1000)), (false, true));
    assert_eq!(urgent(&at_priority(2000)), (true, false), "more targets");
    let message = NodePlan { message: "Waiting for b.".into(), ..at_priority(2000) };
    assert_eq!(urgent(&message), (false, false), "only a message");
    assert_eq!(urgent(&idle()), (true, false), "the node is released");
}

#[test]
fn drain_of_an_unreadable_maintenance_stays() {
    let mut markers = NodeMarkers::default();
    reach(&mut markers, &plan(&["unreadable"], true, NodeState::Evacuating));
    let targets = |markers: &NodeMarkers| reached(&markers.status().unwrap());
    let reached = targets(&markers);
    let both = vec![on_node("a", false), on_node("unreadable", true)];
    let held =
        NodePlan { held_back: true, maintenances: both.clone(), ..plan(&["a"], false, NodeState::Idle) };
    let changes = decide(&markers, &held, true, at(0));
    assert!(changes.urgent, "after a crash, the next leader has to know who holds the node");
    apply_changes(&mut markers, &changes);
    assert_eq!((markers.status().unwrap().maintenances, targets(&markers)), (Some(both), reached));
}

#[test]
fn release_never_cordons() {
    let mut markers = NodeMarkers { unschedulable: true, ..NodeMarkers::default() };
    let cordon = plan(&["a"], false, NodeState::Idle);
    reach(&mut markers, &cordon);
    // While there is no leader, the node is uncordoned and the maintenance completed.
    markers.unschedulable = false;
    assert_eq!(reach(&mut markers, &idle()), None);
    assert_eq!(markers, NodeMarkers::default());
}

proptest! {
    /// After any sequence of maintenances, a node is restored, if nobody else changed its cordon.
    #[test]
    fn node_is_restored_after_any_sequence(
        unschedulable: bool,
        scale_down in proptest::option::of("true|false"),
        do_not_disrupt in proptest::option::of("true|false"),
        course in proptest::collection::vec((0usize..3, any::<bool>(), any::<bool>(), any::<bool>()), 0..8),
    ) {
        let mut annotations = BTreeMap::new();
        annotations.extend(scale_down.map(|value| (SCALE_DOWN_DISABLED_ANNOTATION.to_string(), value)));
        annotations.extend(do_not_disrupt.map(|value| (DO_NOT_DISRUPT_ANNOTATION.to_string(), value)));
        let beginning = NodeMarkers { unschedulable, annotations, conditions: Vec::new() };
        let mut markers = beginning.clone();
        for (holders, draining, drained, hold_autoscalers) in course {
            prop_assert_ne!(decide(&markers, &idle(), true, at(0)).unschedulable, Some(true));
            let state = if drained { NodeState::Drained } else { NodeState::Evacuating };
            let names = &["a", "b"][..holders];
            let plan = plan(names, draining && holders > 0, state);
            reach(&mut markers, &NodePlan { hold_autoscalers, ..plan });
            for key in AUTOSCALER_ANNOTATIONS {
                let held = Some("true").filter(|_| hold_autoscalers && holders > 0);
                let expected = held.or(beginning.annotations.get(key).map(String::as_str));
                prop_assert_eq!(markers.annotations.get(key).map(String::as_str), expected, "{}", key);
            }
            prop_assert!(holders == 0 || markers.unschedulable);
            prop_assert!(holders > 0 || markers == beginning);
        }
        reach(&mut markers, &idle());
        prop_assert_eq!(markers, beginning);
    }
}

#[test]
fn held_back_node_is_unchanged() {
    let mut markers = NodeMarkers::default();
    let changes = decide(&markers, &plan(&["a"], false, NodeState::Idle), true, at(0));
    apply_changes(&mut markers, &changes);
    let held_back = NodePlan { held_back: true, uncordon: true, ..idle() };
    assert_eq!(decide(&markers, &held_back, true, at(1)), NodeChanges::default());
    let wanted = NodePlan { held_back: true, ..plan(&["a"], true, NodeState::Evacuating) };
    assert_ne!(decide(&markers, &wanted, true, at(1)), NodeChanges::default(), "other maintenances continue");
    assert_ne!(decide(&markers, &idle(), true, at(1)), NodeChanges::default());
}

#[test]
fn volume_wait_ends_at_its_timeout() {
    let counts = |volumes, volumes_ignored| Counts { volumes, volumes_ignored, ..Counts::default() };
    let mut waiting = plan(&["a"], true, NodeState::Evacuating);
    (waiting.counts, waiting.volume_timeout) = (counts(1, 0), Some(SignedDuration::from_secs(60)));
    let mut markers = NodeMarkers::default();
    let step = |markers: &mut NodeMarkers, plan: &NodePlan, second: i64| {
        let changes = decide(markers, plan, true, at(second));
        apply_changes(markers, &changes);
        (markers.status().unwrap().volume_wait.map(|wait| (wait.since.0, wait.over)), changes.requeue_at)
    };
    assert_eq!(step(&mut markers, &waiting, 0), (Some((at(0), false)), Some(at(60))));
    assert_eq!(
        step(&mut markers, &waiting, 59),
        (Some((at(0), false)), Some(at(60))),
        "at every reconciliation"
    );
    assert_eq!(step(&mut markers, &waiting, 60), (Some((at(0), true)), None));
    let over = NodePlan { counts: counts(0, 1), ..waiting.clone() };
    assert_eq!(step(&mut markers, &over, 61), (Some((at(0), true)), None), "and it stays so");
    let longer = NodePlan { volume_timeout: Some(SignedDuration::from_secs(90)), ..over };
    assert_eq!(
        step(&mut markers, &longer, 62),
        (Some((at(0), false)), Some(at(90))),
        "until the limit is raised"
    );

    let detached = NodePlan { counts: counts(0, 0), ..waiting.clone() };
    assert_eq!(step(&mut markers, &detached, 70), (None, None));
    assert_eq!(
        step(&mut markers, &waiting, 80),
        (Some((at(80), false)), Some(at(140))),
        "the next wait starts again"
    );
    assert_eq!(
        step(&mut markers, &waiting, 10),
        (Some((at(10), false)), Some(at(70))),
        "a start in the future is discarded"
    );
    let unlimited = NodePlan { volume_timeout: None, ..waiting.clone() };
    assert_eq!(step(&mut markers, &unlimited, 20), (None, None));
}

//! Nodes through whole maintenances: what is set, what is reverted, what is put back.

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
        wake: None,
    }
}

fn on_node(name: &str, draining: bool) -> MaintenanceOnNode {
    let stage = if draining { Stage::Drain } else { Stage::Cordon };
    MaintenanceOnNode { uid: format!("uid of {name}"), name: name.into(), stage }
}

fn idle() -> NodePlan {
    plan(&[], false, NodeState::Idle)
}

fn carry_out(marks: &mut NodeMarks, changes: &NodeChanges) {
    marks.unschedulable = changes.unschedulable.unwrap_or(marks.unschedulable);
    for (key, value) in &changes.annotations {
        match value {
            Some(value) => drop(marks.annotations.insert(key.clone(), value.clone())),
            None => drop(marks.annotations.remove(key)),
        }
    }
    let gone = |known: &NodeCondition| {
        changes.remove_conditions.contains(&known.type_.as_str())
            || changes.set_conditions.iter().any(|set| set.type_ == known.type_)
    };
    marks.conditions.retain(|known| !gone(known));
    marks.conditions.extend(changes.set_conditions.iter().cloned());
}

/// Carries out what is decided and checks that nothing more is.
fn reach(marks: &mut NodeMarks, plan: &NodePlan) -> Option<CordonNotice> {
    let changes = decide(marks, plan, true, at(0));
    carry_out(marks, &changes);
    assert_eq!(decide(marks, plan, true, at(9)), NodeChanges::default(), "once is enough");
    changes.notice
}

fn annotated(of: &[(&str, &str)]) -> BTreeMap<String, String> {
    of.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
}

fn conditions(marks: &NodeMarks) -> Vec<(&str, &str)> {
    let mut all: Vec<_> = marks.conditions.iter().map(|c| (c.type_.as_str(), c.status.as_str())).collect();
    all.sort_unstable();
    all
}

#[test]
fn a_node_ends_as_it_began() {
    let beginnings = [
        NodeMarks::default(),
        NodeMarks { unschedulable: true, ..NodeMarks::default() },
        NodeMarks {
            annotations: annotated(&[
                (SCALE_DOWN_DISABLED_ANNOTATION, "false"),
                (DO_NOT_DISRUPT_ANNOTATION, "true"),
            ]),
            ..NodeMarks::default()
        },
    ];
    for beginning in beginnings {
        let mut marks = beginning.clone();
        assert_eq!(reach(&mut marks, &plan(&["a"], false, NodeState::Idle)), None);
        assert!(marks.unschedulable && marks.is_marked());
        assert_eq!(conditions(&marks), [("MaintenanceInProgress", "True")]);
        assert_eq!(marks.annotations[SCALE_DOWN_DISABLED_ANNOTATION], "true");
        assert_eq!(marks.annotations[DO_NOT_DISRUPT_ANNOTATION], "true");

        assert_eq!(reach(&mut marks, &plan(&["a", "b"], true, NodeState::Evacuating)), None);
        let under_way =
            [("DrainInProgress", "True"), ("Drained", "False"), ("MaintenanceInProgress", "True")];
        assert_eq!(conditions(&marks), under_way);
        let status = marks.status().unwrap();
        assert_eq!((status.drain_message.as_str(), status.drain_targets.len()), ("Evacuating", 1));

        assert_eq!(reach(&mut marks, &plan(&["b"], true, NodeState::Drained)), None, "b still holds it");
        let done = [("DrainInProgress", "False"), ("Drained", "True"), ("MaintenanceInProgress", "True")];
        assert_eq!(conditions(&marks), done);

        let notice = reach(&mut marks, &idle());
        assert_eq!(notice, beginning.unschedulable.then_some(CordonNotice::LeftCordoned));
        assert_eq!(marks, beginning);
    }
}

#[test]
fn a_node_says_who_maintains_it_and_why() {
    let message = |marks: &NodeMarks| marks.conditions[0].message.clone().unwrap();
    let mut marks = NodeMarks::default();
    let both = plan(&["a", "b"], false, NodeState::Idle);
    reach(&mut marks, &both);
    assert_eq!(message(&marks), "Under maintenance by a, b");
    let reasons = BTreeMap::from([("a".into(), "new kernel".into())]);
    let why = NodePlan { reasons: reasons.clone(), ..both };
    assert!(!decide(&marks, &why, true, at(0)).urgent, "no pod waits for it");
    reach(&mut marks, &why);
    assert_eq!(message(&marks), "Under maintenance by a (new kernel), b");
    let many: Vec<String> = (0..12).map(|i| format!("m{i}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    reach(&mut marks, &plan(&many, false, NodeState::Idle));
    assert!(message(&marks).ends_with("m8, m9 and 2 more"), "{}", message(&marks));
}

#[test]
fn an_uncordon_by_others_is_reverted_and_ends_an_earlier_cordon() {
    let mut marks = NodeMarks { unschedulable: true, ..NodeMarks::default() };
    let cordon = plan(&["a"], false, NodeState::Idle);
    reach(&mut marks, &cordon);
    marks.unschedulable = false;
    assert_eq!(reach(&mut marks, &cordon), None, "once may be a mistake");
    assert!(marks.unschedulable);
    reach(&mut marks, &idle());
    assert!(!marks.unschedulable, "nobody wants it cordoned any longer");
}

#[test]
fn a_lost_memory_does_not_make_our_cordon_somebody_elses() {
    let mut marks = NodeMarks::default();
    let cordon = plan(&["a"], false, NodeState::Idle);
    for scribble in [None, Some("no JSON")] {
        reach(&mut marks, &cordon);
        marks.annotations.remove(BEFORE_MAINTENANCE_ANNOTATION);
        marks
            .annotations
            .extend(scribble.map(|text| (BEFORE_MAINTENANCE_ANNOTATION.to_string(), text.to_string())));
        reach(&mut marks, &cordon);
        reach(&mut marks, &idle());
        assert!(!marks.unschedulable, "{scribble:?}");
    }
}

#[test]
fn a_cordon_without_maintenance_is_left_alone_unless_a_completion_without_a_start_asks() {
    let mut marks = NodeMarks { unschedulable: true, ..NodeMarks::default() };
    assert_eq!(decide(&marks, &idle(), true, at(0)), NodeChanges::default());
    reach(&mut marks, &NodePlan { uncordon: true, ..idle() });
    assert_eq!(marks, NodeMarks::default());
}

#[test]
fn what_others_have_set_in_the_meantime_stays() {
    let mut marks = NodeMarks::default();
    let changes = decide(&marks, &plan(&["a"], false, NodeState::Idle), true, at(0));
    carry_out(&mut marks, &changes);
    marks.annotations.insert(SCALE_DOWN_DISABLED_ANNOTATION.into(), "false".into());
    reach(&mut marks, &idle());
    assert_eq!(marks.annotations, annotated(&[(SCALE_DOWN_DISABLED_ANNOTATION, "false")]));
}

#[test]
fn autoscalers_are_left_alone_where_that_is_switched_off() {
    let own = annotated(&[(DO_NOT_DISRUPT_ANNOTATION, "true")]);
    let mut marks = NodeMarks { annotations: own, ..NodeMarks::default() };
    let beginning = marks.clone();
    for plan in [plan(&["a"], false, NodeState::Idle), idle()] {
        let changes = decide(&marks, &plan, false, at(0));
        carry_out(&mut marks, &changes);
    }
    assert_eq!(marks, beginning, "what the user has set is the user's");
    let changes = decide(&NodeMarks::default(), &plan(&["a"], false, NodeState::Idle), false, at(0));
    assert_eq!(
        changes.annotations.keys().collect::<Vec<_>>(),
        [BEFORE_MAINTENANCE_ANNOTATION, MAINTENANCE_STATUS_ANNOTATION]
    );
}

#[test]
fn autoscalers_are_held_while_a_maintenance_wants_that() {
    let beginning = annotated(&[(SCALE_DOWN_DISABLED_ANNOTATION, "false")]);
    let mut marks = NodeMarks { annotations: beginning.clone(), ..NodeMarks::default() };
    let holding = plan(&["a"], false, NodeState::Idle);
    let letting = NodePlan { hold_autoscalers: false, ..holding.clone() };
    let shown = |marks: &NodeMarks| -> BTreeMap<String, String> {
        marks.annotations.clone().into_iter().filter(|(key, _)| PROTECTIVE.contains(&key.as_str())).collect()
    };
    let held = annotated(&[(SCALE_DOWN_DISABLED_ANNOTATION, "true"), (DO_NOT_DISRUPT_ANNOTATION, "true")]);
    for (plan, expected) in
        [(&letting, &beginning), (&holding, &held), (&letting, &beginning), (&holding, &held)]
    {
        reach(&mut marks, plan);
        assert_eq!((&shown(&marks), marks.unschedulable), (expected, true));
    }
    // What cannot be read may want it; what somebody has changed since stays, and is what it was before from then on.
    let unknown = NodePlan { held_back: true, ..letting.clone() };
    reach(&mut marks, &unknown);
    assert_eq!(shown(&marks), held);
    marks.annotations.insert(SCALE_DOWN_DISABLED_ANNOTATION.into(), "later".into());
    reach(&mut marks, &letting);
    let changed = annotated(&[(SCALE_DOWN_DISABLED_ANNOTATION, "later")]);
    assert_eq!(shown(&marks), changed);
    for plan in [holding, idle()] {
        reach(&mut marks, &plan);
    }
    assert_eq!(marks.annotations, changed);
}

#[test]
fn patches_say_no_more_than_what_changes() {
    let changes = decide(&NodeMarks::default(), &plan(&["a"], false, NodeState::Idle), false, at(0));
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
    let mut marks = NodeMarks::default();
    carry_out(&mut marks, &changes);
    let end = decide(&marks, &idle(), false, at(1));
    assert_eq!(
        end.status_patch().unwrap(),
        json!({"conditions": [{"type": "MaintenanceInProgress", "$patch": "delete"}]})
    );
    assert_eq!((NodeChanges::default().node_patch(), NodeChanges::default().status_patch()), (None, None));
}

/// The seconds at which a cordon is put back that somebody takes off at once each time, and from which on that is told.
fn put_back(marks: &mut NodeMarks, from: i64, until: i64) -> (Vec<i64>, Option<i64>) {
    let cordon = plan(&["a"], false, NodeState::Idle);
    let (mut now, mut seconds, mut told) = (from, Vec::new(), None);
    while now <= until {
        marks.unschedulable = false;
        let changes = decide(marks, &cordon, true, at(now));
        carry_out(marks, &changes);
        if let Some(again) = changes.again {
            assert!(changes.is_empty(), "nothing is written meanwhile: {changes:?}");
            assert_eq!(marks.cordon_due(), Some(again));
            now = again.as_second() - at(0).as_second();
        } else {
            assert!(marks.unschedulable);
            seconds.push(now);
            let notice = changes.notice.map(|_| now);
            assert!(told.is_none() || notice.is_some(), "it is told each time");
            told = told.or(notice);
        }
    }
    (seconds, told)
}

#[test]
fn cordons_that_others_take_off_are_put_back_more_slowly() {
    let mut marks = NodeMarks::default();
    reach(&mut marks, &plan(&["a"], false, NodeState::Idle));
    let cases: [(&str, i64, i64, &[i64], i64); 4] = [
        ("once may be a mistake", 0, 3000, &[0, 10, 30, 70, 150, 310, 630, 1270, 2170], 10),
        ("another replica goes on where the first stopped", 2171, 3500, &[3070], 3070),
        ("after a quiet time", 3070 + 30 * 60, 4900, &[4870, 4880, 4900], 4880),
        ("a clock that was put back does not hold it up", 100, 115, &[100, 110], 110),
    ];
    for (what, from, until, seconds, told) in cases {
        assert_eq!(put_back(&mut marks, from, until), (seconds.to_vec(), Some(told)), "{what}");
    }
    reach(&mut marks, &idle());
    assert_eq!(marks, NodeMarks::default());
}

#[test]
fn what_pods_wait_for_is_written_at_once() {
    let mut marks = NodeMarks::default();
    let at_priority = |priority| NodePlan {
        targets: vec![entry(PodType::Default, priority, None)],
        ..plan(&["a"], true, NodeState::Evacuating)
    };
    let mut urgent = |plan: &NodePlan| {
        let changes = decide(&marks, plan, true, at(0));
        carry_out(&mut marks, &changes);
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
fn the_drain_of_a_maintenance_that_cannot_be_followed_stays() {
    let mut marks = NodeMarks::default();
    reach(&mut marks, &plan(&["unreadable"], true, NodeState::Evacuating));
    let targets = |marks: &NodeMarks| reached(&marks.status().unwrap());
    let reached = targets(&marks);
    let both = vec![on_node("a", false), on_node("unreadable", true)];
    let held =
        NodePlan { held_back: true, maintenances: both.clone(), ..plan(&["a"], false, NodeState::Idle) };
    let changes = decide(&marks, &held, true, at(0));
    assert!(changes.urgent, "whoever comes after a crash has to know whose the node is");
    carry_out(&mut marks, &changes);
    assert_eq!((marks.status().unwrap().maintenances, targets(&marks)), (Some(both), reached));
}

#[test]
fn a_release_never_cordons() {
    let mut marks = NodeMarks { unschedulable: true, ..NodeMarks::default() };
    let cordon = plan(&["a"], false, NodeState::Idle);
    reach(&mut marks, &cordon);
    // While nobody leads, the node is uncordoned and the maintenance completed.
    marks.unschedulable = false;
    assert_eq!(reach(&mut marks, &idle()), None);
    assert_eq!(marks, NodeMarks::default());
}

proptest! {
    /// Whatever maintenances come and go, and however often, a node whose cordon nobody touches ends as it began.
    #[test]
    fn any_course_ends_where_it_began(
        unschedulable: bool,
        scale_down in proptest::option::of("true|false"),
        do_not_disrupt in proptest::option::of("true|false"),
        course in proptest::collection::vec((0usize..3, any::<bool>(), any::<bool>(), any::<bool>()), 0..8),
    ) {
        let mut annotations = BTreeMap::new();
        annotations.extend(scale_down.map(|value| (SCALE_DOWN_DISABLED_ANNOTATION.to_string(), value)));
        annotations.extend(do_not_disrupt.map(|value| (DO_NOT_DISRUPT_ANNOTATION.to_string(), value)));
        let beginning = NodeMarks { unschedulable, annotations, conditions: Vec::new() };
        let mut marks = beginning.clone();
        for (holders, draining, drained, hold_autoscalers) in course {
            prop_assert_ne!(decide(&marks, &idle(), true, at(0)).unschedulable, Some(true));
            let state = if drained { NodeState::Drained } else { NodeState::Evacuating };
            let names = &["a", "b"][..holders];
            let plan = plan(names, draining && holders > 0, state);
            reach(&mut marks, &NodePlan { hold_autoscalers, ..plan });
            for key in PROTECTIVE {
                let held = Some("true").filter(|_| hold_autoscalers && holders > 0);
                let expected = held.or(beginning.annotations.get(key).map(String::as_str));
                prop_assert_eq!(marks.annotations.get(key).map(String::as_str), expected, "{}", key);
            }
            prop_assert!(holders == 0 || marks.unschedulable);
            prop_assert!(holders > 0 || marks == beginning);
        }
        reach(&mut marks, &idle());
        prop_assert_eq!(marks, beginning);
    }
}

#[test]
fn what_is_held_back_stays_as_it_is() {
    let mut marks = NodeMarks::default();
    let changes = decide(&marks, &plan(&["a"], false, NodeState::Idle), true, at(0));
    carry_out(&mut marks, &changes);
    let held_back = NodePlan { held_back: true, uncordon: true, ..idle() };
    assert_eq!(decide(&marks, &held_back, true, at(1)), NodeChanges::default());
    let wanted = NodePlan { held_back: true, ..plan(&["a"], true, NodeState::Evacuating) };
    assert_ne!(decide(&marks, &wanted, true, at(1)), NodeChanges::default(), "holding goes on");
    assert_ne!(decide(&marks, &idle(), true, at(1)), NodeChanges::default());
}

#[test]
fn volumes_are_waited_for_no_longer_than_is_wanted() {
    let counts = |volumes, volumes_ignored| Counts { volumes, volumes_ignored, ..Counts::default() };
    let mut waiting = plan(&["a"], true, NodeState::Evacuating);
    (waiting.counts, waiting.volume_timeout) = (counts(1, 0), Some(SignedDuration::from_secs(60)));
    let mut marks = NodeMarks::default();
    let step = |marks: &mut NodeMarks, plan: &NodePlan, second: i64| {
        let changes = decide(marks, plan, true, at(second));
        carry_out(marks, &changes);
        (marks.status().unwrap().volume_wait.map(|wait| (wait.since.0, wait.over)), changes.again)
    };
    assert_eq!(step(&mut marks, &waiting, 0), (Some((at(0), false)), Some(at(60))));
    assert_eq!(step(&mut marks, &waiting, 59), (Some((at(0), false)), Some(at(60))), "whoever asks");
    assert_eq!(step(&mut marks, &waiting, 60), (Some((at(0), true)), None));
    let over = NodePlan { counts: counts(0, 1), ..waiting.clone() };
    assert_eq!(step(&mut marks, &over, 61), (Some((at(0), true)), None), "and it stays so");
    let longer = NodePlan { volume_timeout: Some(SignedDuration::from_secs(90)), ..over };
    assert_eq!(
        step(&mut marks, &longer, 62),
        (Some((at(0), false)), Some(at(90))),
        "until the limit is raised"
    );

    let detached = NodePlan { counts: counts(0, 0), ..waiting.clone() };
    assert_eq!(step(&mut marks, &detached, 70), (None, None));
    assert_eq!(
        step(&mut marks, &waiting, 80),
        (Some((at(80), false)), Some(at(140))),
        "the next begins anew"
    );
    assert_eq!(
        step(&mut marks, &waiting, 10),
        (Some((at(10), false)), Some(at(70))),
        "nothing was in the future"
    );
    let unlimited = NodePlan { volume_timeout: None, ..waiting.clone() };
    assert_eq!(step(&mut marks, &unlimited, 20), (None, None));
}

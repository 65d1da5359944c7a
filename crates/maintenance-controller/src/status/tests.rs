//! The status through the stages of a maintenance: its content, that it is stable, and its size.

use std::collections::BTreeMap;

use haulout_service_runtime::pods::Uid;

use super::*;
use crate::testing::{at, entry};
use haulout_api_types::node_maintenance::PodType;
use haulout_drain_planner::facts::{Blocked, PodKey};
use haulout_drain_planner::{Blocker as Found, Counts, WaitCounts};

fn plan() -> MaintenancePlan {
    MaintenancePlan {
        reached: vec![entry(PodType::Default, 1000, None)],
        message: "Evacuating".into(),
        drained: false,
        waiting: false,
        counts: Counts {
            pending: 3,
            evacuating: 2,
            targeted: 2,
            remaining: 5,
            waiting: waits(&[WaitReason::Requested; 2]),
            ..Counts::default()
        },
        evacuated: 4,
        nodes_selected: 2,
        nodes_drained: 0,
        nodes_drained_and_deleted: 0,
        drained_nodes: Vec::new(),
        nodes_missing: 0,
        missing_nodes: Vec::new(),
        nodes_cordoned: 2,
        cordon_due: None,
        nodes_unreleased: 0,
        nodes_held_back: 0,
        forwarded_by: Vec::new(),
        blockers: Vec::new(),
        blockers_by_reason: BTreeMap::new(),
        waiting_for: Vec::new(),
        skipped: Vec::new(),
    }
}

fn waits(all: &[WaitReason]) -> WaitCounts {
    let mut waits = WaitCounts::default();
    for waiting in all {
        waits.add(*waiting);
    }
    waits
}

fn pod_key(pod: &str) -> PodKey {
    PodKey { namespace: "ns".into(), name: pod.into(), uid: Uid::MIN }
}

fn pod_blocker(node: &str, pod: &str, why: &str, since: Option<Timestamp>) -> (Option<Arc<str>>, Found) {
    let pod = pod_key(pod);
    (Some(node.into()), Found { pod: Some(pod), reason: why.into(), message: "because".into(), since })
}

fn context(old: &NodeMaintenanceStatus, stage: Stage, second: i64) -> Context<'_> {
    Context { old, generation: Some(3), stage, now: at(second) }
}

/// `Drained=False Evacuating: 5 pods still have to leave` and the like.
fn show(status: &NodeMaintenanceStatus) -> Vec<String> {
    let one = |c: &Condition| format!("{}={} {}: {}", c.type_, c.status, c.reason, c.message);
    status.conditions.iter().map(one).collect()
}

#[test]
fn skipped_pods_are_counted_and_listed() {
    let say = |skipped: u32, names: &[&str], drained: bool| {
        let counts = Counts { skipped, remaining: u32::from(!drained), pending: 1, ..Counts::default() };
        let skipped = names.iter().map(|name| pod_key(name)).collect();
        let plan = MaintenancePlan { drained, counts, skipped, nodes_drained: 2, ..plan() };
        let new = status(context(&NodeMaintenanceStatus::default(), Stage::Drain, 1), &plan);
        assert_eq!(
            new.drain_status.as_ref().unwrap().pods_skipped,
            i32::try_from(plan.counts.skipped).unwrap()
        );
        show(&new).pop().unwrap()
    };
    let left = "Drained=True Complete: Every pod that has to leave has left";
    assert_eq!(say(0, &[], true), left);
    assert_eq!(
        say(1, &["a"], true),
        format!("{left}; 1 pod stays, because a DrainRule or its label says skip: ns/a")
    );
    assert_eq!(
        say(7, &["a", "b", "c", "d", "e"], true),
        format!(
            "{left}; 7 pods stay, because a DrainRule or their label says skip: ns/a, ns/b, ns/c, ns/d, ns/e and 2 more"
        )
    );
    assert!(
        say(1, &["a"], false)
            .ends_with("to leave; 1 pod stays, because a DrainRule or its label says skip: ns/a")
    );
}

#[test]
fn conditions_from_stage_to_stage() {
    let base = plan();
    let blockers = [("Terminating".into(), 1), ("DisruptionBudgetExhausted".into(), 2)];
    let blocked = MaintenancePlan { blockers_by_reason: BTreeMap::from(blockers), ..base.clone() };
    let waiting = MaintenancePlan { waiting: true, message: "Waiting for a.".into(), ..base.clone() };
    let counts = Counts { unsupported: 2, ..Counts::default() };
    let drained = MaintenancePlan { drained: true, counts, nodes_drained: 2, ..base.clone() };
    let volumes = MaintenancePlan {
        counts: Counts { volumes: 1, remaining: 1, ..Counts::default() },
        message: "Waiting for 1 volume to be detached.".into(),
        blockers_by_reason: BTreeMap::from([("VolumesAttached".into(), 1)]),
        ..base.clone()
    };
    let cordoning = MaintenancePlan { nodes_cordoned: 1, ..base.clone() };
    let nothing = MaintenancePlan { nodes_selected: 0, nodes_cordoned: 0, ..nothing_left() };
    let all = "Cordoned=True Cordoned: Every selected node is cordoned";
    let free = "Blocked=False NotBlocked: Waiting for 2 pods to leave: 2 EvacuationRequested";
    let left = "Drained=False Evacuating: 5 pods still have to leave";
    let cases: [(&str, Stage, &MaintenancePlan, &[&str]); 9] = [
        ("planned", Stage::Idle, &base, &[]),
        ("cordoning", Stage::Cordon, &cordoning, &["Cordoned=False Cordoning: 1 of 2 nodes are cordoned"]),
        ("draining", Stage::Drain, &base, &[free, all, left]),
        (
            "blocked",
            Stage::Drain,
            &blocked,
            &[
                "Blocked=True DisruptionBudgetExhausted: Blockers: 2 DisruptionBudgetExhausted, 1 Terminating",
                all,
                left,
            ],
        ),
        (
            "waiting",
            Stage::Drain,
            &waiting,
            &[
                "Blocked=False WaitingForMaintenance: Waiting for another maintenance",
                all,
                "Drained=False WaitingForMaintenance: Waiting for a",
            ],
        ),
        (
            "detaching",
            Stage::Drain,
            &volumes,
            &[
                "Blocked=True VolumesAttached: Blockers: 1 VolumesAttached",
                all,
                "Drained=False VolumesAttached: Waiting for 1 volume to be detached",
            ],
        ),
        (
            "drained",
            Stage::Drain,
            &drained,
            &[
                "Blocked=False NotBlocked: Nothing is left to evacuate",
                all,
                "Drained=True Complete: Every pod that has to leave has left; 2 pods stay, because this installation does not evacuate their type (Unsupported)",
            ],
        ),
        (
            "no nodes left",
            Stage::Drain,
            &nothing,
            &[
                "Blocked=False NoNodes: No node is selected",
                "Cordoned=False NoNodesLeft: No selected node is left: each was deleted or relabelled before it was drained",
                "Drained=False NoNodesLeft: No selected node is left: each was deleted or relabelled before it was drained",
            ],
        ),
        (
            "over",
            Stage::Complete,
            &base,
            &[
                "Blocked=False NotBlocked: No drain is in progress",
                "Cordoned=False Released: The nodes are released",
                "Drained=False Released: Completed before the drain had finished",
            ],
        ),
    ];
    let mut old = NodeMaintenanceStatus::default();
    for (second, (what, stage, plan, expected)) in (0..).zip(cases) {
        let new = status(context(&old, stage, second), plan);
        assert_eq!(show(&new), expected, "{what}");
        assert_eq!(status(context(&new, stage, second + 100), plan), new, "{what}: no second write");
        assert_eq!(new.drain_status.is_some(), stage >= Stage::Drain);
        old = new;
    }
    let begun: Vec<_> =
        old.stage_statuses.iter().map(|begun| (begun.name, begun.start_timestamp.0)).collect();
    assert_eq!(
        begun,
        [(Stage::Idle, at(0)), (Stage::Cordon, at(1)), (Stage::Drain, at(2)), (Stage::Complete, at(8))]
    );
}

/// Two nodes with nothing on them.
fn nothing_left() -> MaintenancePlan {
    MaintenancePlan { counts: Counts::default(), message: String::new(), ..plan() }
}

#[test]
fn drained_needs_nodes_that_exist_and_are_cordoned() {
    let none = MaintenancePlan { nodes_selected: 0, nodes_cordoned: 0, ..nothing_left() };
    let named = MaintenancePlan { nodes_missing: 1, missing_nodes: vec!["n9".into()], ..none.clone() };
    let cordoning = MaintenancePlan {
        nodes_cordoned: 1,
        message: "Waiting for 1 of 2 nodes to be cordoned.".into(),
        ..nothing_left()
    };
    let missing = MaintenancePlan {
        nodes_missing: 21,
        missing_nodes: (1..=20).map(|i| format!("m{i}").into()).collect(),
        ..nothing_left()
    };
    let deleted = MaintenancePlan { drained: true, nodes_drained_and_deleted: 2, ..nothing_left() };
    let all_deleted = MaintenancePlan { nodes_drained_and_deleted: 1, drained: true, ..none.clone() };
    let twenty: Vec<String> = (1..=20).map(|i| format!("m{i}")).collect();
    let twenty = twenty.join(", ");
    let race = MaintenancePlan { cordon_due: Some(("n1".into(), at(7))), ..cordoning.clone() };
    let cases: [(&str, &MaintenancePlan, &str, &str); 7] = [
        (
            "never a node",
            &none,
            "Cordoned=False NoNodes: The selector has not matched any node so far",
            "Drained=False NoNodes: The selector has not matched any node so far",
        ),
        (
            "never a node, and one is named",
            &named,
            "Cordoned=False NoNodes: The selector has not matched any node so far; 1 node that the selector names does not exist: n9",
            "Drained=False NoNodes: The selector has not matched any node so far; 1 node that the selector names does not exist: n9",
        ),
        (
            "empty and not cordoned",
            &cordoning,
            "Cordoned=False Cordoning: 1 of 2 nodes are cordoned",
            "Drained=False Cordoning: Waiting for 1 of 2 nodes to be cordoned",
        ),
        (
            "uncordoned again and again",
            &race,
            "Cordoned=False CordonRace: 1 of 2 nodes are cordoned; n1 is uncordoned repeatedly and is cordoned again at 2023-11-14T22:13:27Z",
            "Drained=False Cordoning: Waiting for 1 of 2 nodes to be cordoned",
        ),
        (
            "some are missing",
            &missing,
            &format!(
                "Cordoned=False NodeMissing: 21 nodes that the selector names do not exist: {twenty} and 1 more"
            ),
            &format!(
                "Drained=False NodeMissing: 21 nodes that the selector names do not exist: {twenty} and 1 more"
            ),
        ),
        (
            "some were deleted when drained",
            &deleted,
            "Cordoned=True Cordoned: Every selected node is cordoned; 2 nodes were deleted after they had been drained",
            "Drained=True Complete: Every pod that has to leave has left; 2 nodes were deleted after they had been drained",
        ),
        (
            "all were deleted when drained",
            &all_deleted,
            "Cordoned=True Cordoned: Every selected node is cordoned; 1 node was deleted after it had been drained",
            "Drained=True Complete: Every pod that has to leave has left; 1 node was deleted after it had been drained",
        ),
    ];
    for (what, plan, cordoned, drained) in cases {
        let new = status(context(&NodeMaintenanceStatus::default(), Stage::Drain, 1), plan);
        assert_eq!(show(&new)[1..], [cordoned, drained], "{what}");
        assert_eq!(status(context(&new, Stage::Drain, 9), plan), new, "{what}: no second write");
    }
}

#[test]
fn condition_time_changes_only_with_its_status() {
    let foreign = Condition {
        type_: "Approved".into(),
        status: "True".into(),
        reason: "Yes".into(),
        message: String::new(),
        observed_generation: None,
        last_transition_time: Time(at(0)),
    };
    let old = NodeMaintenanceStatus { conditions: vec![foreign.clone()], ..Default::default() };
    let first = status(context(&old, Stage::Drain, 1), &plan());
    let counts = Counts { pending: 1, ..plan().counts };
    let second = status(context(&first, Stage::Drain, 2), &MaintenancePlan { counts, ..plan() });
    let third = status(context(&second, Stage::Drain, 3), &MaintenancePlan { drained: true, ..plan() });
    let since = |status: &NodeMaintenanceStatus, type_: &str| {
        status.conditions.iter().find(|known| known.type_ == type_).unwrap().last_transition_time.0
    };
    assert_eq!([&first, &second, &third].map(|status| since(status, "Drained")), [at(1), at(1), at(3)]);
    assert!(third.conditions.contains(&foreign));
}

#[test]
fn first_blockers_are_sorted_and_keep_their_time() {
    let many = |from: usize| -> Vec<_> {
        (from..30).rev().map(|i| pod_blocker("n", &format!("pod-{i:02}"), "Terminating", None)).collect()
    };
    let first = status(
        context(&NodeMaintenanceStatus::default(), Stage::Drain, 1),
        &MaintenancePlan { blockers: many(5), ..plan() },
    );
    let second = status(context(&first, Stage::Drain, 9), &MaintenancePlan { blockers: many(3), ..plan() });
    let shown: Vec<_> =
        second.drain_status.unwrap().blockers.into_iter().map(|b| (b.pod.unwrap(), b.since.0)).collect();
    assert_eq!(shown.len(), 20);
    assert_eq!(shown[..3], [("pod-03".into(), at(9)), ("pod-04".into(), at(9)), ("pod-05".into(), at(1))]);

    let volume = Found { pod: None, reason: "VolumesAttached".into(), message: "pv-1".into(), since: None };
    let mixed = vec![
        pod_blocker("b", "x", "Terminating", Some(at(-7))),
        (Some("b".into()), volume),
        pod_blocker("a", "y", "Terminating", None),
    ];
    let new = status(
        context(&NodeMaintenanceStatus::default(), Stage::Drain, 1),
        &MaintenancePlan { blockers: mixed, ..plan() },
    );
    let shown: Vec<_> =
        new.drain_status.unwrap().blockers.into_iter().map(|b| (b.node, b.pod, b.since.0)).collect();
    assert_eq!(
        shown,
        [
            (Some("a".into()), Some("y".into()), at(1)),
            (Some("b".into()), None, at(1)),
            (Some("b".into()), Some("x".into()), at(-7))
        ]
    );
}

#[test]
fn active_evacuator_is_not_a_blocker() {
    let waiting = waits(&[WaitReason::GracePeriod, WaitReason::EvacuatorActive, WaitReason::Order]);
    let plan = MaintenancePlan { counts: Counts { waiting, ..plan().counts }, ..plan() };
    let new = status(context(&NodeMaintenanceStatus::default(), Stage::Drain, 1), &plan);
    assert_eq!(
        show(&new)[0],
        "Blocked=False EvacuatorActive: Waiting for 3 pods to leave: 1 EvacuatorActive, 1 TerminationGracePeriod, 1 WaitingForOrder"
    );
}

#[test]
fn drain_status_stays_after_completion() {
    let drained = MaintenancePlan { drained: true, message: "Drained".into(), evacuated: 4, ..plan() };
    let old = status(context(&NodeMaintenanceStatus::default(), Stage::Drain, 1), &drained);
    let over = MaintenancePlan { message: String::new(), counts: Counts::default(), evacuated: 5, ..plan() };
    let new = status(context(&old, Stage::Complete, 2), &over);
    let drain = new.drain_status.clone().unwrap();
    assert_eq!((drain.pods_evacuated, drain.drain_message.as_str(), drain.nodes_selected), (5, "Drained", 2));
    assert!(
        show(&new).contains(&"Drained=True Complete: Every pod that has to leave has left".into()),
        "{new:?}"
    );
    // A maintenance that was completed before the drain had finished says so, and does not list what it waited for.
    let old = status(context(&NodeMaintenanceStatus::default(), Stage::Drain, 1), &leaving("x", "copying"));
    let new = status(context(&old, Stage::Complete, 2), &over);
    let drain = new.drain_status.unwrap();
    assert_eq!(
        (drain.drain_message.as_str(), drain.pods_left),
        ("Completed before the drain had finished", 5)
    );
    assert_eq!((drain.waiting_for, drain.blockers), (vec![], vec![]));
}

/// One pod with an active evacuator and one in its grace period.
fn leaving(class: &str, message: &str) -> MaintenancePlan {
    let turn = Turn {
        class: class.into(),
        message: message.into(),
        since: None,
        until: at(600),
        expected: Some(at(300)),
    };
    let one = |pod: &str, reason, turn: Option<Turn>, deadline| {
        ("n".into(), WaitingPod { pod: pod_key(pod), reason, turn: turn.map(Arc::new), deadline })
    };
    MaintenancePlan {
        waiting_for: vec![
            one("a", WaitReason::EvacuatorActive, Some(turn), None),
            one("b", WaitReason::GracePeriod, None, Some(at(30))),
        ],
        ..plan()
    }
}

#[test]
fn waiting_pods_are_listed_with_times() {
    let shown = |status: &NodeMaintenanceStatus| {
        let drain = status.drain_status.clone().unwrap();
        let second = |time: Time| time.0.duration_since(at(0)).as_secs();
        let one = |one: WaitingFor| {
            format!(
                "{} {}: {} since {} until {:?} expected {:?}",
                one.pod,
                one.reason,
                one.message,
                second(one.since),
                one.until.map(second),
                one.expected_finish_time.map(second),
            )
        };
        drain.waiting_for.into_iter().map(one).collect::<Vec<_>>()
    };
    let old = NodeMaintenanceStatus::default();
    let first = status(context(&old, Stage::Drain, 1), &leaving("x.example.com", "copying"));
    let ending = "b TerminationGracePeriod: the pod is terminating within its grace period";
    assert_eq!(
        shown(&first),
        [
            "a EvacuatorActive: evacuator x.example.com is active: copying since 1 until Some(600) expected Some(300)".into(),
            format!("{ending} since 1 until Some(30) expected None"),
        ]
    );
    // A new message alone does not start a new wait, and is written less often. Another evacuator does.
    let second = status(context(&first, Stage::Drain, 5), &leaving("x.example.com", "half done"));
    assert!(only_messages_differ(&first, &second) && first != second);
    assert!(shown(&second)[0].contains("half done since 1"), "{:?}", shown(&second));
    let third = status(context(&second, Stage::Drain, 9), &leaving("y.example.com", ""));
    assert!(!only_messages_differ(&second, &third));
    assert!(shown(&third)[0].contains("evacuator y.example.com is active since 9"), "{:?}", shown(&third));
    assert!(shown(&third)[1].contains("since 1"), "{:?}", shown(&third));
}

#[test]
fn rejected_writes_are_reported_in_every_stage() {
    let failed = Blocked { reason: "NodeUpdateRejected".into(), message: "no".into(), since: None };
    let mut plan = plan();
    plan.blockers = vec![(Some("n1".into()), Found::new(None, &failed))];
    plan.blockers_by_reason = BTreeMap::from([("NodeUpdateRejected".into(), 1)]);
    let message = |stage| {
        let new = status(context(&NodeMaintenanceStatus::default(), stage, 1), &plan);
        show(&new).into_iter().find(|text| text.starts_with("Blocked"))
    };
    let elsewhere = "Blocked=True NodeUpdateRejected: Failed writes: 1 NodeUpdateRejected; node n1: no";
    for stage in [Stage::Idle, Stage::Cordon, Stage::Complete] {
        assert_eq!(message(stage).as_deref(), Some(elsewhere), "{stage:?}");
    }
    let drain = "Blocked=True NodeUpdateRejected: Blockers: 1 NodeUpdateRejected";
    assert_eq!(message(Stage::Drain).as_deref(), Some(drain));
}

#[test]
fn status_changes_emit_events() {
    let reasons = |old: &NodeMaintenanceStatus, new: &NodeMaintenanceStatus| -> Vec<&str> {
        transition_events(old, new).into_iter().map(|event| event.reason).collect()
    };
    let empty = NodeMaintenanceStatus::default();
    let by_reason = BTreeMap::from([("Terminating".into(), 1)]);
    let draining = status(context(&empty, Stage::Drain, 1), &plan());
    let blocked = status(
        context(&draining, Stage::Drain, 2),
        &MaintenancePlan { blockers_by_reason: by_reason, ..plan() },
    );
    let drained = status(context(&blocked, Stage::Drain, 3), &MaintenancePlan { drained: true, ..plan() });
    assert_eq!(reasons(&empty, &draining), ["StageStarted"; 2], "Drain includes Cordon");
    assert_eq!(reasons(&draining, &blocked), ["Blocked"]);
    assert_eq!(reasons(&blocked, &drained), ["Drained", "Unblocked"]);
    assert_eq!(reasons(&drained, &drained), [""; 0]);

    let mut known = BTreeSet::new();
    let forwarded = |names: &[&str]| MaintenancePlan {
        forwarded_by: names.iter().map(|n| Arc::from(*n)).collect(),
        ..plan()
    };
    assert_eq!(fast_forwarded(&plan(), &mut known), None);
    let reported = fast_forwarded(&forwarded(&["a", "b"]), &mut known).unwrap();
    assert!(
        reported.message.starts_with("Fast-forwarded: on nodes that are or were shared with a, b, pods"),
        "{}",
        reported.message
    );
    assert_eq!(fast_forwarded(&forwarded(&["b"]), &mut known), None, "it is reported only once");
    assert!(fast_forwarded(&forwarded(&["b", "c"]), &mut known).unwrap().message.contains("with c, pods"));
}

#[test]
fn cordon_events_have_reason_and_severity() {
    let reported = |event| {
        let event = cordon_event("n", event);
        (event.reason, event.warning)
    };
    assert_eq!(reported(CordonEvent::Reverted), ("CordonRace", true));
    assert_eq!(reported(CordonEvent::LeftCordoned), ("LeftCordoned", false));
}

/// With names and plans of maximum length, and very long messages. The limit of etcd is 1.5 MiB.
#[test]
fn status_of_five_thousand_nodes_fits() {
    let long = "x".repeat(253);
    let selector = "y".repeat(63);
    let mut plan = plan();
    plan.nodes_selected = 5000;
    plan.message = format!("Evacuating (limited by {})", [long.as_str(); 20].join(", "));
    plan.reached = (0..112).map(|i| entry(PodType::Default, i, Some(&selector))).collect();
    plan.blockers = (0..5000)
        .map(|i| {
            let (node, blocker) = pod_blocker(&long, &format!("{i}{}", &long[..240]), "Terminating", None);
            (node, Found { message: "ü".repeat(100_000).into(), ..blocker })
        })
        .collect();
    plan.waiting_for = (0..5000)
        .flat_map(|i| {
            let mut all = leaving(&long, &"ü".repeat(100_000)).waiting_for;
            for (_, one) in &mut all {
                one.pod.name = format!("{i}{}", &long[..240]).into();
            }
            all
        })
        .collect();
    plan.blockers_by_reason = (0..30).map(|i| (format!("Reason{i}").into(), 150_000)).collect();
    let status = status(context(&NodeMaintenanceStatus::default(), Stage::Drain, 1), &plan);
    let size = serde_json::to_vec(&status).unwrap().len();
    assert!(size < 100_000, "{size} bytes");
    let drain = status.drain_status.unwrap();
    assert!(drain.drain_message.len() < 32_768);
    assert_eq!((drain.blockers.len(), drain.waiting_for.len()), (20, 20));
}

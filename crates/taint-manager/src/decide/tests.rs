//! Tables of decisions: the scenarios of kube-controller-manager, policies and watch gaps.

use serde_json::{Value, json};

use super::*;
use crate::testing::scenario::{act, delete, on, wait};
use crate::testing::{at, pod, synced_since, taint, tolerations};

const UNREACHABLE: &str = "node.kubernetes.io/unreachable";

#[test]
fn pod_leaves_now_later_or_never() {
    let cases = [
        ("no taints", on(&[]), pod(1), 100, Verdict::Keep, "NotTainted"),
        ("not tolerated", on(&[("k", 50)]), pod(1), 100, delete(50), "NotTolerated"),
        (
            "another tolerated",
            on(&[("k", 50)]),
            pod(1).tolerating("l", None),
            100,
            delete(50),
            "NotTolerated",
        ),
        ("forever", on(&[("k", 50)]), pod(1).tolerating("k", None), 100, Verdict::Keep, "Tolerated"),
        ("for a while", on(&[("k", 50)]), pod(1).tolerating("k", 60), 100, wait(110), "ToleratedUntil"),
        ("no longer", on(&[("k", 50)]), pod(1).tolerating("k", 60), 110, delete(110), "ToleratedUntil"),
        ("for no time", on(&[("k", 50)]), pod(1).tolerating("k", 0), 100, delete(50), "NotTolerated"),
        (
            "for less than no time",
            on(&[("k", 50)]),
            pod(1).tolerating("k", -3),
            100,
            delete(50),
            "NotTolerated",
        ),
        (
            "for longer than time lasts",
            on(&[("k", 50)]),
            pod(1).tolerating("k", i64::MAX),
            100,
            Verdict::Wait { until: Timestamp::MAX },
            "ToleratedUntil",
        ),
    ];
    for (name, scenario, pod, now, verdict, reason) in cases {
        assert_eq!(scenario.decide(&pod, now), (verdict, reason.to_owned(), false), "{name}");
    }
}

#[test]
fn earliest_deadline_of_several_taints_applies() {
    let both = pod(1).tolerating("a", 100).tolerating("b", 10);
    let cases = [
        ("one of two tolerated", on(&[("a", 0), ("b", 0)]), pod(1).tolerating("a", None), 5, delete(0)),
        ("the shorter one", on(&[("a", 0), ("b", 0)]), both.clone(), 5, wait(10)),
        ("it has run out", on(&[("a", 0), ("b", 0)]), both.clone(), 10, delete(10)),
        ("the shorter one came later", on(&[("a", 0), ("b", 95)]), both.clone(), 96, wait(100)),
        ("the longer one remains", on(&[("a", 0)]), both, 96, wait(100)),
        (
            "one forever",
            on(&[("a", 0), ("b", 0)]),
            pod(1).tolerating("a", None).tolerating("b", 10),
            5,
            wait(10),
        ),
        (
            "all forever",
            on(&[("a", 0), ("b", 0)]),
            pod(1).tolerating("a", None).tolerating("b", None),
            5,
            Verdict::Keep,
        ),
    ];
    for (name, scenario, pod, now, expected) in cases {
        assert_eq!(scenario.verdict(&pod, now), expected, "{name}");
    }
}

#[test]
fn pod_scheduled_late_gets_its_full_toleration() {
    let late = pod(1).scheduled(80).tolerating("k", 60);
    let bound = late.clone().with("/status/conditions", json!([]));
    let created = bound.clone().with("/metadata/creationTimestamp", at(70).to_string());
    let cases = [
        ("scheduled late", late, wait(140)),
        ("bound without the scheduler, created late", created, wait(130)),
        ("time unknown", bound, delete(110)),
    ];
    for (name, pod, expected) in cases {
        assert_eq!(on(&[("k", 50)]).verdict(&pod, 120), expected, "{name}");
    }
    assert_eq!(on(&[("k", 50)]).verdict(&pod(1).scheduled(80), 120), delete(80), "it was never tolerated");
}

#[test]
fn changed_toleration_moves_the_deadline_both_ways() {
    let scenario = on(&[("k", 50)]);
    assert_eq!(scenario.verdict(&pod(1).tolerating("k", 300), 100), wait(350));
    assert_eq!(scenario.verdict(&pod(1).tolerating("k", 100), 100), wait(150));
    assert_eq!(scenario.verdict(&pod(1).tolerating("k", 20), 100), delete(70));
    assert_eq!(scenario.verdict(&pod(1).tolerating("k", 900), 100), wait(950));
}

#[test]
fn finished_and_terminating_pods_are_ignored() {
    let cases = [
        (pod(1).with("/status/phase", "Succeeded"), "Finished"),
        (pod(1).with("/status/phase", "Failed"), "Finished"),
        (pod(1).terminating(200, 30), "Terminating"),
        (pod(1).terminating(20, 30), "Terminating"),
    ];
    for (pod, reason) in cases {
        assert_eq!(on(&[("k", 50)]).decide(&pod, 100), (Verdict::Keep, reason.to_owned(), false));
    }
    assert_eq!(on(&[("k", 50)]).verdict(&pod(1).with("/status/phase", "Pending"), 100), delete(50));
}

#[test]
fn daemon_set_and_static_pods_are_never_evacuated() {
    let daemon = json!([
        {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u", "controller": true}
    ]);
    let of_daemon_set = pod(1).with("/metadata/ownerReferences", daemon);
    let mirror = json!({"kubernetes.io/config.mirror": "x"});
    let of_kubelet = pod(1).with("/metadata/annotations", mirror);
    let cases = [
        ("Delete", RemovalAction::Delete, RemovalAction::Delete),
        ("Evict", RemovalAction::Evict, RemovalAction::Evict),
        ("Evacuate", RemovalAction::Evacuate, RemovalAction::Delete),
    ];
    for (action, default, other) in cases {
        let scenario = on(&[("k", 50)]).under(&format!("{{key: k, action: {action}}}"));
        assert_eq!(scenario.verdict(&pod(1), 100), act(default, 50), "{action}");
        assert_eq!(scenario.verdict(&of_daemon_set, 100), act(other, 50), "{action}");
        assert_eq!(scenario.verdict(&of_kubelet, 100), act(other, 50), "{action}");
    }
    let scenario = on(&[("k", 50)]).under("{key: k, action: Ignore}");
    assert_eq!(scenario.decide(&pod(1), 100), (Verdict::Keep, "Ignored".to_owned(), false));
    let label = json!({"nodemaintenance.k8s.io/taint-action": "Evict"});
    assert_eq!(
        on(&[("k", 50)]).verdict(&pod(1).with("/metadata/labels", label), 100),
        act(RemovalAction::Evict, 50)
    );
}

#[test]
fn harshest_due_action_wins_and_later_ones_are_kept() {
    let rules = "{key: soft, action: Evacuate}, {key: middle, action: Evict}, {key: none, action: Ignore}";
    let requeue_at =
        |how, due, requeue_at| Verdict::Act { how, due: at(due), requeue_at: Some(at(requeue_at)) };
    let tolerating = pod(1).tolerating("hard", 100).tolerating("middle", 40).tolerating("later", 30);
    let cases = [
        ("both due", on(&[("soft", 5), ("hard", 0)]), pod(1), delete(0)),
        (
            "the harsher one later",
            on(&[("soft", 5), ("hard", 0)]),
            tolerating.clone(),
            requeue_at(RemovalAction::Evacuate, 5, 100),
        ),
        (
            "three",
            on(&[("hard", 0), ("middle", 0), ("soft", 9)]),
            tolerating.clone(),
            requeue_at(RemovalAction::Evacuate, 9, 40),
        ),
        ("a gentler one later", on(&[("hard", 0), ("soft", 0)]), pod(1).tolerating("soft", 70), delete(0)),
        ("ignored beside", on(&[("none", 0), ("hard", 0)]), tolerating, wait(100)),
    ];
    for (name, scenario, pod, expected) in cases {
        assert_eq!(scenario.under(rules).verdict(&pod, 20), expected, "{name}");
    }
}

#[test]
fn evacuation_continues_until_harsher_is_due_or_pod_stays() {
    let evacuate = "{key: soft, action: Evacuate}";
    let leaving = |requeue_at: Option<i64>| Verdict::Leaving { requeue_at: requeue_at.map(at) };
    let cases = [
        ("continues", on(&[("soft", 0)]), pod(1), leaving(None), false),
        ("harsher later", on(&[("soft", 0), ("k", 0)]), pod(1).tolerating("k", 60), leaving(Some(60)), false),
        ("harsher now", on(&[("soft", 0), ("k", 0)]), pod(1).tolerating("k", 20), delete(20), false),
        ("the taint is gone", on(&[]), pod(1), Verdict::Keep, true),
        ("tolerated by now", on(&[("soft", 0)]), pod(1).tolerating("soft", None), Verdict::Keep, true),
        ("tolerated for a while", on(&[("soft", 0)]), pod(1).tolerating("soft", 90), wait(90), true),
        ("finished", on(&[("soft", 0)]), pod(1).with("/status/phase", "Succeeded"), Verdict::Keep, true),
        ("terminating", on(&[("soft", 0)]), pod(1).terminating(60, 30), Verdict::Keep, false),
    ];
    for (name, scenario, pod, verdict, release) in cases {
        let (found, _, released) = scenario.under(evacuate).evacuating().decide(&pod, 30);
        assert_eq!((found, released), (verdict, release), "{name}");
    }
}

#[test]
fn old_deadlines_apply_after_the_watch_gap_grace_period() {
    let tolerating = pod(1).tolerating("k", 10);
    let cases = [
        ("in the gap", on(&[("k", 50)]).synced(None), &tolerating, 100, Verdict::Hold, "WatchGap"),
        (
            "not yet due in the gap",
            on(&[("k", 95)]).synced(None),
            &tolerating,
            100,
            wait(105),
            "ToleratedUntil",
        ),
        ("overdue", on(&[("k", 50)]).synced(synced_since(90)), &tolerating, 100, wait(150), "WatchGapGrace"),
        (
            "after the grace period",
            on(&[("k", 50)]).synced(synced_since(90)),
            &tolerating,
            150,
            delete(60),
            "ToleratedUntil",
        ),
        ("due soon", on(&[("k", 85)]).synced(synced_since(90)), &tolerating, 91, wait(150), "ToleratedUntil"),
        (
            "new since then",
            on(&[("k", 95)]).synced(synced_since(90)),
            &pod(1),
            100,
            delete(95),
            "NotTolerated",
        ),
        (
            "heartbeats",
            on(&[(UNREACHABLE, 95)]).synced(synced_since(90)),
            &pod(1),
            100,
            wait(150),
            "WatchGapGrace",
        ),
    ];
    for (name, scenario, pod, now, verdict, reason) in cases {
        assert_eq!(scenario.decide(pod, now), (verdict, reason.to_owned(), false), "{name}");
    }
}

#[test]
fn evacuation_is_not_released_while_the_pod_may_have_to_leave() {
    let evacuate = "{key: soft, action: Evacuate}, {key: k, action: Evacuate}";
    let soft = || on(&[("soft", 50)]).under(evacuate).evacuating();
    let both = || on(&[("soft", 50), ("k", 95)]).under(evacuate).evacuating();
    let tolerating = pod(1).tolerating("k", 20);
    let cases = [
        ("node unknown", on(&[]).evacuating().synced(None), pod(1), Verdict::Keep, false),
        ("in a gap", soft().synced(None), pod(1), Verdict::Hold, false),
        ("tolerated, in a gap", soft().synced(None), pod(1).tolerating("soft", 90), wait(140), false),
        ("a new leader", soft().synced(synced_since(90)), pod(1), wait(150), false),
        ("beside a newer taint", both().synced(synced_since(90)), tolerating, wait(115), false),
        ("tolerated by now", soft().synced(synced_since(90)), pod(1).tolerating("soft", 90), wait(150), true),
    ];
    for (name, scenario, pod, verdict, release) in cases {
        let (found, _, released) = scenario.decide(&pod, 100);
        assert_eq!((found, released), (verdict, release), "{name}");
    }
}

#[test]
fn decision_waits_for_missing_information() {
    let policy =
        Policy::from_yaml("rules: [{key: k, namespaceSelector: {matchLabels: {a: b}}, action: Evict}]");
    let (policy, pod, scenario) = (policy.unwrap(), pod(1).read(), on(&[("k", 0)]));
    let none = BTreeMap::new();
    let view = View {
        pod: &pod,
        node: Some(&scenario.node),
        namespace: None,
        evacuation: true,
        policy: &policy,
        synced: scenario.synced,
    };
    let decision = decide(&view, at(9));
    assert_eq!(
        (decision.verdict, decision.reason, decision.release),
        (Verdict::Hold, Reason::NamespaceUnknown, false)
    );
    let known = decide(&View { namespace: Some(&none), ..view }, at(9));
    assert_eq!(known.verdict, delete(0));
    let no_node = decide(&View { node: None, ..view }, at(9));
    assert_eq!((no_node.verdict, no_node.release), (Verdict::Keep, true));
}

#[test]
fn reasons_name_the_taint() {
    let on_node = taint("example.com/repair=disk", 0);
    let cases = [
        (Reason::NotTolerated(on_node.clone()), "it does not tolerate the taint example.com/repair=disk"),
        (
            Reason::ToleratedUntil { taint: on_node.clone(), due: at(90) },
            "it tolerates the taint example.com/repair=disk until 1970-01-01T00:01:30Z",
        ),
        (Reason::Ignored(on_node.clone()), "the policy ignores the taint example.com/repair=disk"),
    ];
    for (reason, expected) in cases {
        assert_eq!(reason.to_string(), expected);
    }
}

const FOREVER: Option<SignedDuration> = None;
const NOT_AT_ALL: Option<SignedDuration> = Some(SignedDuration::ZERO);

fn tolerated(of_pod: Value, taint_text: &str) -> Option<SignedDuration> {
    toleration_duration(&tolerations(of_pod), &taint(taint_text, 0))
}

#[test]
fn toleration_matches_key_value_operator_and_effect() {
    let cases = [
        ("k=v", json!({"key": "k", "operator": "Equal", "value": "v", "effect": "NoExecute"}), true),
        ("k=v", json!({"key": "k", "value": "v"}), true),
        ("k=v", json!({"key": "k", "value": "w"}), false),
        ("k=v", json!({"key": "k"}), false),
        ("k", json!({"key": "k"}), true),
        ("k", json!({"key": "k", "operator": "Equal", "value": ""}), true),
        ("k=v", json!({"key": "l", "value": "v"}), false),
        ("k=v", json!({"key": "k", "operator": "Exists"}), true),
        ("k=v", json!({"key": "l", "operator": "Exists"}), false),
        ("k=v", json!({"operator": "Exists"}), true),
        ("k=v", json!({"operator": "Exists", "effect": "NoExecute"}), true),
        ("k=v", json!({"operator": "Exists", "effect": "NoSchedule"}), false),
        ("k=v", json!({"key": "k", "value": "v", "effect": "PreferNoSchedule"}), false),
        ("k=v", json!({"key": "k", "value": "v", "effect": ""}), true),
        ("k=v", json!({"key": "k", "operator": "", "value": "v"}), true),
        ("k=v", json!({"key": "k", "operator": "exists"}), false),
        ("k=v", json!({"key": "k", "operator": "In", "value": "v"}), false),
        ("k=v", json!({}), false),
        ("k", json!({}), true),
    ];
    for (on_node, toleration, expected) in cases {
        let expected = if expected { FOREVER } else { NOT_AT_ALL };
        assert_eq!(tolerated(json!([toleration.clone()]), on_node), expected, "{on_node} {toleration}");
    }
}

#[test]
fn only_plain_decimal_numbers_are_compared() {
    let cases = [
        ("Gt", "5", "6", true),
        ("Gt", "5", "5", false),
        ("Gt", "5", "4", false),
        ("Lt", "5", "4", true),
        ("Lt", "5", "5", false),
        ("Lt", "5", "6", false),
        ("Lt", "0", "-3", true),
        ("Gt", "-10", "-3", true),
        ("Gt", "9223372036854775806", "9223372036854775807", true),
        ("Gt", "5", "9223372036854775808", false),
        ("Gt", "5", "06", false),
        ("Gt", "05", "6", false),
        ("Gt", "5", "+6", false),
        ("Gt", "-1", "-0", false),
        ("Gt", "5", "6.0", false),
        ("Gt", "5", "", false),
        ("Gt", "", "6", false),
        ("Gt", "five", "6", false),
        ("Gt", "5", " 6", false),
    ];
    for (operator, bound, value, expected) in cases {
        let toleration = json!({"key": "k", "operator": operator, "value": bound});
        let expected = if expected { FOREVER } else { NOT_AT_ALL };
        assert_eq!(
            tolerated(json!([toleration]), &format!("k={value}")),
            expected,
            "{value} {operator} {bound}"
        );
    }
}

#[test]
fn first_matching_toleration_applies() {
    let seconds = |seconds: i64| json!({"key": "k", "operator": "Exists", "tolerationSeconds": seconds});
    let forever = json!({"operator": "Exists"});
    let other = json!({"key": "other", "operator": "Exists", "tolerationSeconds": 1});
    let cases = [
        (json!([]), NOT_AT_ALL),
        (json!([other]), NOT_AT_ALL),
        (json!([seconds(300)]), Some(SignedDuration::from_secs(300))),
        (json!([seconds(1)]), Some(SignedDuration::from_secs(1))),
        (json!([seconds(0)]), NOT_AT_ALL),
        (json!([seconds(-5)]), NOT_AT_ALL),
        (json!([other, forever]), FOREVER),
        (json!([forever, seconds(5)]), FOREVER),
        (json!([seconds(5), forever]), Some(SignedDuration::from_secs(5))),
        (json!([seconds(-1), forever]), NOT_AT_ALL),
        (json!([seconds(i64::MAX)]), Some(SignedDuration::from_secs(i64::MAX))),
    ];
    for (of_pod, expected) in cases {
        assert_eq!(tolerated(of_pod.clone(), "k=v"), expected, "{of_pod}");
    }
}

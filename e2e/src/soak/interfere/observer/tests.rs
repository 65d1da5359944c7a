//! Tests of the observer itself: recorded objects and the expected verdict. Each check is shown to pass and to fail,
//! so that a check that cannot fail is detected.

mod replacements;

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::activity::{Activity, Leadership};
use super::audit::{Request, request};
use super::history::{Change, History};
use super::leftovers::{Expected, leftovers};
use super::stall::problems;
use super::timeline::Timeline;
use super::truth::{self, Answer, Facts, Rejection};
use super::view::{ClusterView, Kind, Read as _};

/// A timestamp, in seconds.
fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + seconds).unwrap()
}

const NOW: i64 = 1000;

fn facts() -> Facts {
    Facts { now: at(NOW), ..Facts::default() }
}

fn node(name: &str, cordoned: bool) -> Value {
    let metadata = json!({"name": name, "uid": name, "labels": {"pool": "a"}});
    json!({"metadata": metadata, "spec": {"unschedulable": cordoned}})
}

fn pod(name: &str, app: &str) -> Value {
    json!({
        "metadata": {
            "name": name, "namespace": "shop", "uid": format!("uid-of-{name}"), "labels": {"app": app},
            "creationTimestamp": at(0).to_string(),
        },
        "spec": {"nodeName": "n1", "priority": 0},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    })
}

fn budget(name: &str, app: &str, allowed: i64) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "shop", "uid": name, "generation": 1},
        "spec": {"selector": {"matchLabels": {"app": app}}},
        "status": {"observedGeneration": 1, "disruptionsAllowed": allowed, "desiredHealthy": 2},
    })
}

fn evacuation(pod: &str, status: Value) -> Value {
    let uid = format!("uid-of-{pod}");
    json!({
        "metadata": {
            "name": format!("{uid}-{pod}"), "namespace": "shop", "uid": format!("evacuation-of-{pod}"),
            "creationTimestamp": at(900).to_string(),
            "finalizers": ["evacuation.coordination.k8s.io/instigator_nodemaintenance.k8s.io"],
        },
        "spec": {"podRef": {"name": pod, "uid": uid}, "progressDeadlineSeconds": 1800},
        "status": status,
    })
}

/// A maintenance of pool a that drains, with these blockers and conditions.
fn maintenance(blockers: Value, conditions: Value) -> Value {
    let pool = json!({"key": "pool", "operator": "In", "values": ["a"]});
    json!({
        "metadata": {"name": "m1", "uid": "m1"},
        "spec": {"stage": "Drain", "nodeSelector": {"nodeSelectorTerms": [{"matchExpressions": [pool]}]}},
        "status": {
            "stageStatuses": [{"name": "Drain", "startTimestamp": at(500).to_string()}],
            "drainStatus": {"drainMessage": "Evacuating", "blockers": blockers},
            "conditions": conditions,
        },
    })
}

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": message})
}

fn blocker(pod: &str, reason: &str, message: &str) -> Value {
    json!({
        "node": "n1", "namespace": "shop", "pod": pod, "reason": reason, "message": message,
        "since": at(900).to_string(),
    })
}

fn view(objects: impl IntoIterator<Item = (Kind, Value)>) -> ClusterView {
    let mut view = ClusterView::default();
    for (kind, object) in objects {
        view.put(kind, Arc::new(object));
    }
    view
}

/// A cordoned node with the pod `web-1`, and these objects.
fn node_with_pod(more: impl IntoIterator<Item = (Kind, Value)>) -> ClusterView {
    view([(Kind::Node, node("n1", true)), (Kind::Pod, pod("web-1", "web"))].into_iter().chain(more))
}

/// The subjects of this maintenance's problems.
fn about(maintenance: &Value, view: &ClusterView, facts: &Facts) -> Vec<String> {
    problems(maintenance, view, facts).into_iter().map(|problem| problem.about).collect()
}

/// Whether a blocker of `web-1` is true.
#[track_caller]
fn check(reason: &str, message: &str, view: &ClusterView, facts: &Facts) -> Result<(), String> {
    let m = maintenance(json!([blocker("web-1", reason, message)]), json!([]));
    let claims = super::claims::claims(&m);
    assert_eq!(claims.len(), 1);
    truth::check(&claims[0], &m, view, facts)
}

#[track_caller]
fn is_untrue(reason: &str, message: &str, view: &ClusterView, facts: &Facts, why: &str) {
    let said = check(reason, message, view, facts).unwrap_err();
    assert!(said.contains(why), "{said}");
}

#[test]
fn status_without_a_reason_is_a_stall() {
    let source = crate::repository().join("crates/maintenance-controller/src/status.rs");
    let source = std::fs::read_to_string(source).unwrap();
    let claiming = |nothing: &str| {
        assert!(source.contains(&format!("{nothing:?}")), "the controller never says: {nothing}");
        let nothing = condition("Blocked", "False", "NotBlocked", nothing);
        let drained = condition("Drained", "False", "Evacuating", "1 pod still has to leave");
        maintenance(json!([]), json!([nothing, drained]))
    };
    for nothing in super::stall::NOTHING_TO_DO {
        assert_eq!(
            about(&claiming(nothing), &node_with_pod([]), &facts()),
            ["silent", "unexplained shop/web-1"]
        );
    }
    let m = claiming(super::stall::NOTHING_TO_DO[0]);
    // If nothing is left to do, or if a pod stays or has finished, no reason is needed.
    let done = maintenance(json!([]), json!([condition("Drained", "True", "Complete", "")]));
    assert!(about(&done, &view([(Kind::Node, node("n1", true))]), &facts()).is_empty());
    let mut stays = pod("web-1", "web");
    stays["metadata"]["labels"]["cluster.x-k8s.io/drain"] = json!("skip");
    assert!(about(&done, &node_with_pod([(Kind::Pod, stays)]), &facts()).is_empty());
    // Nothing is expected of a maintenance that does not drain.
    let mut idle = m.clone();
    idle["spec"]["stage"] = json!("Cordon");
    assert!(about(&idle, &node_with_pod([]), &facts()).is_empty());
}

#[test]
fn not_blocked_is_wrong_while_a_pod_stays() {
    let active = evacuation("web-1", json!({"activeEvacuatorClass": "a.example.com"}));
    let mut waiting = blocker("web-1", "EvacuatorActive", "evacuator a.example.com is active");
    waiting["evacuatorClass"] = json!("a.example.com");
    waiting["until"] = json!(at(900 + 1800).to_string());
    let waiting = json!([waiting]);
    let cluster = node_with_pod([(Kind::Evacuation, active)]);
    let wrong = condition("Blocked", "False", "NotBlocked", "Nothing is left to evacuate");
    assert_eq!(about(&maintenance(waiting.clone(), json!([wrong])), &cluster, &facts()), ["nothing to do"]);
    let right = condition("Blocked", "False", "EvacuatorActive", "1 pod waits for its evacuator");
    assert!(about(&maintenance(waiting, json!([right])), &cluster, &facts()).is_empty());
}

#[test]
fn drained_means_empty_and_cordoned() {
    let m = maintenance(json!([]), json!([condition("Drained", "True", "Complete", "")]));
    assert_eq!(about(&m, &node_with_pod([]), &facts()), ["drained"]);
    assert_eq!(about(&m, &view([(Kind::Node, node("n1", false))]), &facts()), ["drained"]);
    let not = maintenance(json!([]), json!([condition("Drained", "False", "Evacuating", "")]));
    assert_eq!(about(&not, &view([(Kind::Node, node("n1", true))]), &facts()), ["not drained"]);
    assert_eq!(about(&not, &view([(Kind::Node, node("n1", false))]), &facts()), ["open n1"]);
}

#[test]
fn every_due_pod_needs_a_reason() {
    let mut later = pod("api-1", "api");
    later["spec"]["priority"] = json!(2_000_000_000);
    let more =
        [(Kind::Budget, budget("web", "web", 0)), (Kind::Pod, pod("web-2", "web")), (Kind::Pod, later)];
    let cluster = node_with_pod(more);
    let said = "PodDisruptionBudget web allows 0 disruptions";
    let one = maintenance(json!([blocker("web-1", "DisruptionBudgetExhausted", said)]), json!([]));
    assert_eq!(about(&one, &cluster, &facts()), ["unexplained shop/web-2"]);
    // If another maintenance drains the same node, it may be the one that holds the pod.
    let mut other = one.clone();
    other["metadata"]["name"] = json!("m2");
    let mut shared = cluster.clone();
    shared.put(Kind::Maintenance, Arc::new(other));
    assert!(about(&one, &shared, &facts()).is_empty());
    // A reason for the whole node explains all its pods.
    let rejected = json!([blocker("web-1", "DisruptionBudgetExhausted", said), {"node": "n1", "reason": "VolumesAttached", "message": ""}]);
    assert!(
        !about(&maintenance(rejected, json!([])), &cluster, &facts())
            .contains(&"unexplained shop/web-2".into())
    );
}

#[test]
fn claimed_pods_must_exist_on_their_node() {
    let message = "PodDisruptionBudget web allows 0 disruptions";
    let budgets = || [(Kind::Budget, budget("web", "web", 0))];
    let m = |node: &str, pod: &str| {
        let mut entry = blocker(pod, "DisruptionBudgetExhausted", message);
        entry["node"] = json!(node);
        maintenance(json!([entry]), json!([]))
    };
    let untrue = |node: &str, pod: &str, view: &ClusterView| {
        let found = problems(&m(node, pod), view, &facts());
        found.into_iter().find(|problem| problem.about.starts_with("untrue")).map(|problem| problem.text)
    };
    assert_eq!(untrue("n1", "web-1", &node_with_pod(budgets())), None);
    assert!(untrue("n1", "web-9", &node_with_pod(budgets())).unwrap().contains("does not exist"));
    assert!(untrue("n9", "web-1", &node_with_pod(budgets())).unwrap().contains("node n9 does not exist"));
    let mut moved = pod("web-1", "web");
    moved["spec"]["nodeName"] = json!("n2");
    let elsewhere = node_with_pod(budgets().into_iter().chain([(Kind::Pod, moved)]));
    assert!(untrue("n1", "web-1", &elsewhere).unwrap().contains("the pod is on node \"n2\""));
    let mut ending = pod("web-1", "web");
    ending["metadata"]["deletionTimestamp"] = json!(at(NOW).to_string());
    let ending = node_with_pod(budgets().into_iter().chain([(Kind::Pod, ending)]));
    assert!(untrue("n1", "web-1", &ending).unwrap().contains("terminating already"));
}

#[test]
fn exhausted_budget_covers_the_pod_and_allows_nothing() {
    let reason = "DisruptionBudgetExhausted";
    let message = "PodDisruptionBudget web allows 0 disruptions: 1 of 2 pods are healthy, 1 required.";
    let with = |budgets: &[Value]| node_with_pod(budgets.iter().map(|budget| (Kind::Budget, budget.clone())));
    let tight = budget("web", "web", 0);
    assert_eq!(check(reason, message, &with(std::slice::from_ref(&tight)), &facts()), Ok(()));
    is_untrue(reason, message, &with(&[]), &facts(), "no PodDisruptionBudget covers the pod");
    is_untrue(reason, message, &with(&[budget("web", "web", 1)]), &facts(), "allows 1 disruptions");
    is_untrue(reason, message, &with(&[budget("web", "db", 0)]), &facts(), "no PodDisruptionBudget covers");
    is_untrue(reason, message, &with(&[budget("new", "web", 0)]), &facts(), "web does not exist");
    let unnamed =
        "The PodDisruptionBudget allows no disruption: The disruption budget web needs 1 healthy pods";
    assert_eq!(check(reason, unnamed, &with(std::slice::from_ref(&tight)), &facts()), Ok(()));
    let stale = json!({"generation": 2, "name": "web", "namespace": "shop"});
    let mut changed = budget("web", "web", 1);
    changed["metadata"] = stale;
    assert_eq!(check(reason, message, &with(&[changed]), &facts()), Ok(()));
    // With two budgets, the pod cannot leave either.
    assert_eq!(check(reason, message, &with(&[tight, budget("more", "web", 1)]), &facts()), Ok(()));
}

#[test]
fn several_and_stale_budget_claims_are_checked() {
    let one = node_with_pod([(Kind::Budget, budget("web", "web", 0))]);
    let two =
        node_with_pod([(Kind::Budget, budget("web", "web", 0)), (Kind::Budget, budget("more", "web", 0))]);
    let reason = "SeveralDisruptionBudgets";
    assert_eq!(check(reason, "The pod is covered by more, web.", &two, &facts()), Ok(()));
    is_untrue(reason, "The pod is covered by more, web.", &one, &facts(), "1 PodDisruptionBudgets cover");
    is_untrue(reason, "The pod is covered by old, web.", &two, &facts(), "old does not exist");
    let message = "The PodDisruptionBudget has changed and its status is outdated.";
    is_untrue("DisruptionBudgetStale", message, &one, &facts(), "no PodDisruptionBudget of the pod is stale");
}

#[test]
fn active_evacuator_claim_is_checked() {
    let status = |completed: bool, progress: i64| {
        json!({
            "activeEvacuatorClass": "a.example.com", "activeEvacuatorCompleted": completed,
            "evacuationProgressTimestamp": at(progress).to_string(),
        })
    };
    let with = |status: Value| node_with_pod([(Kind::Evacuation, evacuation("web-1", status))]);
    let said = |class: &str, until: i64, view: &ClusterView, facts: &Facts| {
        let mut entry = blocker("web-1", "EvacuatorActive", "it works");
        entry["evacuatorClass"] = json!(class);
        entry["until"] = json!(at(until).to_string());
        let mut m = maintenance(json!([]), json!([]));
        m["status"]["drainStatus"]["waitingFor"] = json!([entry]);
        truth::check(&super::claims::claims(&m)[0], &m, view, facts).err().unwrap_or_default()
    };
    let (class, until, now) = ("a.example.com", 950 + 1800, facts());
    assert_eq!(said(class, until, &with(status(false, 950)), &now), "");
    // The deadline may be rounded up to the minute.
    assert_eq!(said(class, until + 59, &with(status(false, 950)), &now), "");
    let ahead = Facts { ahead: SignedDuration::from_hours(1), ..facts() };
    // A new leader lets evacuators report first.
    let new = Facts { led_since: Some(at(NOW - 20)), ..ahead.clone() };
    assert_eq!(said(class, until, &with(status(false, 950)), &new), "");
    for (said, why) in [
        (said(class, until, &node_with_pod([]), &now), "has no Evacuation"),
        (said(class, until, &with(json!({})), &now), "no evacuator is active"),
        (said(class, until, &with(status(true, 950)), &now), "has completed"),
        (said(class, until, &with(status(false, -1000)), &now), "its deadline passed at"),
        (said(class, until, &with(status(false, 700)), &now), "does not say that the deadline is"),
        (said("b.example.com", until, &with(status(false, 950)), &now), "is a.example.com"),
        // The controllers' clocks may be ahead.
        (said(class, until, &with(status(false, 950)), &ahead), "its deadline passed at"),
    ] {
        assert!(said.contains(why), "{said}");
    }
}

#[test]
fn pending_claims_expire() {
    let with = |change: fn(&mut Value)| {
        let mut pod = pod("web-1", "web");
        change(&mut pod);
        node_with_pod([(Kind::Pod, pod)])
    };
    let ending = with(|pod| pod["metadata"]["deletionTimestamp"] = json!(at(NOW - 5).to_string()));
    assert_eq!(check("TerminationGracePeriod", "", &ending, &facts()), Ok(()));
    let late = with(|pod| pod["metadata"]["deletionTimestamp"] = json!(at(NOW - 80).to_string()));
    is_untrue("TerminationGracePeriod", "", &late, &facts(), "should have terminated");
    is_untrue("TerminationGracePeriod", "", &node_with_pod([]), &facts(), "not terminating");
    let new = with(|pod| pod["metadata"]["creationTimestamp"] = json!(at(NOW - 5).to_string()));
    assert_eq!(check("EvacuationPending", "", &new, &facts()), Ok(()));
    is_untrue("EvacuationPending", "", &node_with_pod([]), &facts(), "had time to create one");
    let open = node_with_pod([(Kind::Node, node("n1", false))]);
    assert_eq!(check("WaitingForNode", "", &open, &facts()), Ok(()));
    is_untrue(
        "WaitingForNode",
        "",
        &node_with_pod([(Kind::Node, node("n1", true))]),
        &facts(),
        "is cordoned",
    );
    let with_evacuation =
        |evacuation| node_with_pod([(Kind::Node, node("n1", false)), (Kind::Evacuation, evacuation)]);
    let requested = evacuation("web-1", json!({}));
    let mut cancelled = requested.clone();
    cancelled["metadata"]["finalizers"] = json!([]);
    is_untrue("WaitingForNode", "", &with_evacuation(requested), &facts(), "has an Evacuation");
    assert_eq!(check("WaitingForNode", "", &with_evacuation(cancelled), &facts()), Ok(()));
    let asked = node_with_pod([(Kind::Evacuation, evacuation("web-1", json!({})))]);
    is_untrue("EvacuationPending", "", &asked, &facts(), "has an Evacuation");
    is_untrue("EvacuationRequested", "", &asked, &facts(), "has had time");
    is_untrue("EvacuationRequested", "", &node_with_pod([]), &facts(), "has no Evacuation");
    let soon = Facts { now: at(905), ..facts() };
    assert_eq!(check("EvacuationRequested", "", &asked, &soon), Ok(()));
}

#[test]
fn rejected_write_claim_is_checked() {
    let rejected = |until: Option<i64>| {
        let resources = vec!["nodes".to_owned()];
        let rejection = Rejection { name: "p".into(), resources, from: at(0), until: until.map(at) };
        Facts { rejections: vec![rejection], ..facts() }
    };
    let words = "denied request: not during the sale";
    assert_eq!(check("NodeUpdateRejected", words, &node_with_pod([]), &rejected(None)), Ok(()));
    assert_eq!(check("NodeUpdateRejected", words, &node_with_pod([]), &rejected(Some(NOW - 30))), Ok(()));
    is_untrue(
        "NodeUpdateRejected",
        words,
        &node_with_pod([]),
        &rejected(Some(NOW - 100)),
        "can be written since",
    );
    is_untrue(
        "NodeUpdateRejected",
        "no",
        &node_with_pod([]),
        &rejected(None),
        "does not have the API server's answer",
    );
    is_untrue(
        "EvacuationRejected",
        words,
        &node_with_pod([]),
        &rejected(None),
        "nothing has ever rejected evacuations",
    );
}

#[test]
fn missing_node_and_cordon_race_claims_are_checked() {
    is_untrue("NodeMissing", "", &node_with_pod([]), &facts(), "node n1 exists");
    assert_eq!(check("NodeMissing", "", &ClusterView::default(), &facts()), Ok(()));
    is_untrue("CordonRace", "", &node_with_pod([]), &facts(), "the node is cordoned");
    assert_eq!(check("CordonRace", "", &view([(Kind::Node, node("n1", false))]), &facts()), Ok(()));
}

#[test]
fn missing_controller_claim_is_checked() {
    let reason = "EvacuationControllerUnavailable";
    let away = |since: i64| Facts { absent_since: Some(at(since)), ..facts() };
    assert_eq!(check(reason, "", &node_with_pod([]), &away(NOW - 80)), Ok(()));
    is_untrue(reason, "", &node_with_pod([]), &facts(), "the evacuation controller leads");
    is_untrue(reason, "", &node_with_pod([]), &away(NOW - 20), "only since");
    // A status that reports only something else is not enough.
    let budgets = node_with_pod([(Kind::Budget, budget("web", "web", 0))]);
    let m = maintenance(json!([blocker("web-1", "DisruptionBudgetExhausted", "")]), json!([]));
    assert_eq!(about(&m, &budgets, &facts()), Vec::<String>::new());
    assert_eq!(about(&m, &budgets, &away(NOW - 80)), ["absent"]);
    // Nobody can correct the Evacuation's condition in that time.
    let said = "PodDisruptionBudget web allows 0 disruptions";
    let blocked = json!({"conditions": [condition("Blocked", "True", "DisruptionBudgetExhausted", said)]});
    let freed = node_with_pod([(Kind::Evacuation, evacuation("web-1", blocked))]);
    assert_eq!(check("DisruptionBudgetExhausted", said, &freed, &away(NOW - 80)), Ok(()));
    is_untrue("DisruptionBudgetExhausted", said, &freed, &facts(), "no PodDisruptionBudget covers the pod");
    is_untrue("DisruptionBudgetExhausted", "else", &freed, &away(NOW - 80), "no PodDisruptionBudget covers");
}

#[test]
fn rejected_eviction_claim_is_checked() {
    let reason = "EvictionForbidden";
    let status = |last: i64, failed: i64| json!({"failedEvictionCounter": failed, "lastFailedEvictionTime": at(last).to_string()});
    let with = |status: Value| node_with_pod([(Kind::Evacuation, evacuation("web-1", status))]);
    let rejected = |until: Option<i64>| {
        let resources = vec!["pods/eviction".to_owned()];
        let rejection = Rejection { name: "p".into(), resources, from: at(0), until: until.map(at) };
        Facts { rejections: vec![rejection], ..facts() }
    };
    assert_eq!(check(reason, "", &with(status(NOW - 500, 1)), &rejected(None)), Ok(()));
    is_untrue(reason, "", &with(status(NOW - 5, 1)), &facts(), "nothing has ever rejected");
    // Rejected five times, the last time 20 seconds ago: the next attempt is due after 80.
    assert_eq!(check(reason, "", &with(status(NOW - 20, 5)), &rejected(Some(NOW - 15))), Ok(()));
    is_untrue(reason, "", &with(status(NOW - 100, 5)), &rejected(Some(NOW - 90)), "was not made");
    is_untrue(reason, "", &with(status(NOW - 20, 5)), &rejected(Some(NOW - 60)), "one failed at");
}

#[test]
fn busy_server_claim_is_checked() {
    let answered = |code: i64, ago: i64| {
        let answer = Answer { at: at(NOW - ago), code };
        Facts { evictions: [("shop/web-1".to_owned(), answer)].into(), ..facts() }
    };
    assert_eq!(check("ServerBusy", "", &node_with_pod([]), &answered(429, 3)), Ok(()));
    assert_eq!(check("ServerBusy", "", &node_with_pod([]), &answered(503, 3)), Ok(()));
    is_untrue("ServerBusy", "", &node_with_pod([]), &answered(429, 30), "is not busy");
    is_untrue("ServerBusy", "", &node_with_pod([]), &answered(201, 3), "answered with 201");
    is_untrue("ServerBusy", "", &node_with_pod([]), &facts(), "nobody has tried");
    let overload = Rejection {
        name: "overload".into(),
        resources: vec!["overload pods/eviction".into()],
        from: at(0),
        until: None,
    };
    let overloaded = Facts { rejections: vec![overload], ..answered(429, 30) };
    assert_eq!(check("ServerBusy", "", &node_with_pod([]), &overloaded), Ok(()));
    assert_eq!(check("HandledElsewhere", "", &node_with_pod([]), &answered(429, 30)), Ok(()));
    is_untrue("HandledElsewhere", "", &node_with_pod([]), &answered(500, 3), "answered with 500");
}

#[test]
fn returning_pod_claim_is_checked() {
    let returned = |tolerations: Value, created: i64| {
        let mut pod = pod("web-1", "web");
        pod["spec"]["tolerations"] = tolerations;
        pod["metadata"]["creationTimestamp"] = json!(at(created).to_string());
        node_with_pod([(Kind::Pod, pod)])
    };
    let tolerates = json!([{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]);
    assert_eq!(check("ReturnsToNode", "", &returned(tolerates.clone(), 600), &facts()), Ok(()));
    is_untrue("ReturnsToNode", "", &returned(tolerates.clone(), 400), &facts(), "the drain started");
    is_untrue("ReturnsToNode", "", &returned(json!([]), 600), &facts(), "tolerates the cordon: false");
    let said = "the node was uncordoned during the drain";
    is_untrue("ReturnsToNode", said, &returned(tolerates, 600), &facts(), "tolerates the cordon: true");
    is_untrue("ReturnsToNode", said, &returned(json!([]), 600), &facts(), "nobody uncordoned");
    let mut view = returned(json!([]), 600);
    let mut reverted = node("n1", true);
    let before = json!({"unschedulable": false, "reverts": {"times": 1, "last": at(590).to_string()}});
    reverted["metadata"]["annotations"] =
        json!({"nodemaintenance.k8s.io/before-maintenance": before.to_string()});
    view.put(Kind::Node, Arc::new(reverted));
    assert_eq!(check("ReturnsToNode", said, &view, &facts()), Ok(()));
}

#[test]
fn terminating_and_completion_claims_are_checked() {
    let with = |change: fn(&mut Value)| {
        let mut pod = pod("web-1", "web");
        change(&mut pod);
        node_with_pod([(Kind::Pod, pod)])
    };
    let late = with(|pod| pod["metadata"]["deletionTimestamp"] = json!(at(NOW - 70).to_string()));
    assert_eq!(check("Terminating", "", &late, &facts()), Ok(()));
    let fresh = with(|pod| pod["metadata"]["deletionTimestamp"] = json!(at(NOW - 5).to_string()));
    is_untrue("Terminating", "", &fresh, &facts(), "ended only at");
    is_untrue("Terminating", "", &node_with_pod([]), &facts(), "not terminating");
    let waits = with(|pod| pod["metadata"]["labels"]["cluster.x-k8s.io/drain"] = json!("wait-completed"));
    assert_eq!(check("WaitingForCompletion", "", &waits, &facts()), Ok(()));
    is_untrue("WaitingForCompletion", "", &node_with_pod([]), &facts(), "the label of the pod says None");
}

#[test]
fn waiting_for_maintenance_claim_is_checked() {
    let waits = condition("Drained", "False", "WaitingForMaintenance", "Waiting for m2");
    let m = maintenance(json!([]), json!([waits]));
    let mut other = maintenance(json!([]), json!([]));
    other["metadata"]["name"] = json!("m2");
    let about = |other: &Value| about(&m, &node_with_pod([(Kind::Maintenance, other.clone())]), &facts());
    assert!(about(&other).is_empty());
    let mut done = other.clone();
    done["spec"]["stage"] = json!("Complete");
    assert!(about(&done).contains(&"untrue WaitingForMaintenance".into()));
    let mut unknown = other;
    unknown["metadata"]["name"] = json!("m3");
    assert!(about(&unknown).contains(&"untrue WaitingForMaintenance".into()));
}

#[test]
fn held_evacuation_claim_names_the_finalizer() {
    let mut held = evacuation("web-1", json!({}));
    held["metadata"]["finalizers"] = json!(["example.com/hold"]);
    let with = |evacuation: &Value| node_with_pod([(Kind::Evacuation, evacuation.clone())]);
    is_untrue(
        "EvacuationHeld",
        "held by example.com/hold",
        &with(&held),
        &facts(),
        "no Evacuation of the pod",
    );
    held["metadata"]["deletionTimestamp"] = json!(at(900).to_string());
    assert_eq!(check("EvacuationHeld", "held by example.com/hold", &with(&held), &facts()), Ok(()));
    is_untrue("EvacuationHeld", "held by somebody", &with(&held), &facts(), "finalizer that is named");
}

#[test]
fn unknown_reasons_are_violations() {
    let blocked = json!({"conditions": [condition("Blocked", "True", "Scribble", "")]});
    let with = |status: Value| node_with_pod([(Kind::Evacuation, evacuation("web-1", status))]);
    assert_eq!(check("Other", "", &with(blocked), &facts()), Ok(()));
    is_untrue("Other", "", &with(json!({})), &facts(), "is not blocked");
    is_untrue("BadLuck", "", &node_with_pod([]), &facts(), "there is no check");
}

/// Every reason that users can read has a check.
#[test]
fn every_documented_reason_has_a_check() {
    let root = crate::repository().join("docs");
    let mut reasons = Vec::new();
    for (page, heading) in [
        ("evacuation.md", "## Why a pod does not leave"),
        ("maintenance.md", "## What can block a drain"),
        ("maintenance.md", "## What a drain waits for"),
    ] {
        let text = std::fs::read_to_string(root.join(page)).unwrap();
        let (_, rest) = text.split_once(heading).unwrap();
        let rows = rest.split("\n## ").next().unwrap().lines().filter(|line| line.starts_with("| `"));
        let cells = rows.filter_map(|row| row.split('|').nth(1));
        reasons.extend(cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned));
    }
    assert!(reasons.len() > 10, "{reasons:?}");
    for reason in reasons {
        let said = check(&reason, "", &node_with_pod([]), &facts()).err().unwrap_or_default();
        assert!(!said.contains("there is no check"), "{said}");
    }
}

/// A history: revision, kind, object, and whether it exists.
fn history(changes: &[(u64, Kind, &Value, bool)], requests: &[Request]) -> History {
    let change = |(revision, kind, object, exists): &(u64, Kind, &Value, bool)| Change {
        revision: *revision,
        // One revision per second, so that tests can express the age of a change.
        at: at(i64::try_from(*revision).unwrap()),
        kind: *kind,
        key: object.key(),
        object: exists.then(|| Arc::new((*object).clone())),
    };
    let changes = changes.iter().map(change).collect();
    History { changes, requests: requests.to_vec(), ..History::default() }
}

fn asked(service: &str, verb: &str, resource: &str, key: &str, code: i64, at_second: i64) -> Request {
    Request {
        service: service.into(),
        verb: verb.into(),
        resource: resource.into(),
        key: key.into(),
        code,
        received: at(at_second),
        answered: at(at_second),
    }
}

fn evicted(pod: &str, at_second: i64) -> Request {
    asked("evacuation-controller", "create", "pods/eviction", &format!("shop/{pod}"), 201, at_second)
}

fn terminating(name: &str) -> Value {
    let mut pod = pod(name, "web");
    pod["metadata"]["deletionTimestamp"] = json!(at(0).to_string());
    pod
}

#[test]
fn eviction_below_a_budget_is_a_violation() {
    let (one, two, three) = (pod("web-1", "web"), pod("web-2", "web"), pod("web-3", "web"));
    let (web, ending_1, ending_2) = (budget("web", "web", 1), terminating("web-1"), terminating("web-2"));
    let mut changes = vec![
        (1, Kind::Pod, &one, true),
        (2, Kind::Pod, &two, true),
        (3, Kind::Pod, &three, true),
        (4, Kind::Budget, &web, true),
        (30, Kind::Pod, &ending_1, true),
    ];
    // Two of three have to be healthy: the first may leave.
    assert!(history(&changes, &[evicted("web-1", 30)]).violations().is_empty());
    changes.push((50, Kind::Pod, &ending_2, true));
    let both = [evicted("web-1", 30), evicted("web-2", 50)];
    let found = history(&changes, &both).violations();
    assert_eq!(
        found,
        ["we evicted pod shop/web-2, and PodDisruptionBudget shop/web has 1 healthy pods of 2"]
    );
    // The order in which watches deliver does not matter.
    let mut shuffled = changes.clone();
    shuffled.reverse();
    assert_eq!(history(&shuffled, &both).violations(), found);
    // Deletions by others are not our fault, nor is an eviction by us right after one.
    assert!(history(&changes, &[evicted("web-1", 30)]).violations().is_empty());
    changes[5].0 = 33;
    assert!(history(&changes, &[evicted("web-2", 33)]).violations().is_empty());
    // A new budget may not have counted its pods yet.
    let mut new = changes.clone();
    new[3].0 = 29;
    assert!(history(&new, &[evicted("web-1", 30), evicted("web-2", 33)]).violations().is_empty());
    // With two budgets, the Eviction API should have rejected the eviction.
    let more = budget("more", "web", 1);
    let doubled =
        [changes[0], changes[1], changes[2], changes[3], (5, Kind::Budget, &more, true), changes[4]];
    assert_eq!(history(&doubled, &[evicted("web-1", 30)]).violations().len(), 2);
}

#[test]
fn pod_deletion_is_a_violation() {
    let deleted = asked("maintenance-controller", "delete", "pods", "shop/web-1", 200, 5);
    let rejected = asked("maintenance-controller", "delete", "pods", "shop/web-2", 403, 5);
    let found = history(&[], &[deleted, rejected]).violations();
    assert_eq!(found, ["maintenance-controller deleted pod shop/web-1"]);
}

#[test]
fn evacuation_without_a_drain_is_a_violation() {
    let (node, pod, made) = (node("n1", true), pod("web-1", "web"), evacuation("web-1", json!({})));
    let drains = maintenance(json!([]), json!([]));
    let mut over = drains.clone();
    over["spec"]["stage"] = json!("Complete");
    let mut deleted = drains.clone();
    deleted["metadata"]["deletionTimestamp"] = json!(at(10).to_string());
    let create =
        |second: i64| asked("maintenance-controller", "create", "evacuations", &made.key(), 201, second);
    let base =
        [(1, Kind::Node, &node, true), (2, Kind::Pod, &pod, true), (3, Kind::Maintenance, &drains, true)];
    let when = |second: u64, end: Option<&Value>, gone: bool| {
        let mut changes = base.to_vec();
        changes.extend(end.map(|end| (10, Kind::Maintenance, end, !gone)));
        changes.push((second, Kind::Evacuation, &made, true));
        history(&changes, &[create(i64::try_from(second).unwrap())]).violations().len()
    };
    assert_eq!(when(20, None, false), 0);
    // The controller may have decided before the end.
    assert_eq!(when(12, Some(&over), false), 0);
    for (end, gone) in [(&over, false), (&deleted, false), (&drains, true)] {
        assert_eq!(when(20, Some(end), gone), 1);
    }
}

#[test]
fn eviction_loop_is_a_violation() {
    let owned = |number: usize| {
        let mut pod = pod(&format!("web-{number}"), "web");
        pod["metadata"]["ownerReferences"] =
            json!([{"kind": "ReplicaSet", "name": "web", "controller": true}]);
        pod
    };
    let pods: Vec<Value> = (0..30).map(owned).collect();
    let changes: Vec<_> = (1..).zip(&pods).map(|(revision, pod)| (revision, Kind::Pod, pod, true)).collect();
    let evictions = |count: usize| -> Vec<Request> {
        pods.iter().take(count).map(|pod| evicted(pod.name(), 500)).collect()
    };
    assert!(history(&changes, &evictions(10)).violations().is_empty());
    let found = history(&changes, &evictions(30)).violations();
    assert_eq!(found, ["30 pods of ReplicaSet web were evicted from node n1"]);
}

#[test]
fn maintenance_without_activity_is_quiet() {
    let (m, mut activity) = (maintenance(json!([]), json!([])), Activity::default());
    let (mut view, running, ending) = (node_with_pod([]), pod("web-1", "web"), terminating("web-1"));
    activity.apply(Kind::Maintenance, None, Some(&m), at(1));
    activity.apply(Kind::Pod, None, Some(&running), at(2));
    assert_eq!(activity.quiet_since(&m, &view, at(NOW)), Some(at(1)));
    // Progress, a new class and the end of a pod are activity; a change of labels is not.
    let (before, after) =
        (evacuation("web-1", json!({})), evacuation("web-1", json!({"activeEvacuatorClass": "a"})));
    activity.apply(Kind::Evacuation, None, Some(&before), at(3));
    assert_eq!(activity.quiet_since(&m, &view, at(NOW)), Some(at(1)));
    activity.apply(Kind::Evacuation, Some(&before), Some(&after), at(4));
    assert_eq!(activity.quiet_since(&m, &view, at(NOW)), Some(at(4)));
    let progress = json!({"activeEvacuatorClass": "a", "evacuationProgressTimestamp": at(5).to_string()});
    activity.apply(Kind::Evacuation, Some(&after), Some(&evacuation("web-1", progress)), at(5));
    assert_eq!(activity.quiet_since(&m, &view, at(NOW)), Some(at(5)));
    activity.apply(Kind::Pod, Some(&running), Some(&pod("web-1", "other")), at(6));
    assert_eq!(activity.quiet_since(&m, &view, at(NOW)), Some(at(5)));
    activity.apply(Kind::Pod, Some(&running), Some(&ending), at(7));
    view.put(Kind::Pod, Arc::new(ending));
    // While a pod is terminating, the maintenance is not quiet, unless the pod is overdue.
    assert_eq!(activity.quiet_since(&m, &view, at(10)), None);
    assert_eq!(activity.quiet_since(&m, &view, at(70)), Some(at(7)));
}

#[test]
fn leader_is_read_from_the_lease() {
    let lease = |holder: &str, renewed: i64| {
        json!({
            "metadata": {"name": "l"},
            "spec": {"holderIdentity": holder, "renewTime": at(renewed).to_string(), "leaseDurationSeconds": 2},
        })
    };
    let mut activity = Activity::default();
    assert_eq!(activity.leads("l", at(0)), Leadership::Nobody(Timestamp::MIN));
    activity.apply(Kind::Lease, None, Some(&lease("one", 1)), at(1));
    activity.apply(Kind::Lease, None, Some(&lease("one", 2)), at(2));
    activity.apply(Kind::Lease, None, Some(&lease("one", 3)), at(3));
    assert_eq!(activity.leads("l", at(4)), Leadership::Since(at(1)));
    assert_eq!(activity.leads("l", at(20)), Leadership::Nobody(at(3)));
    // The same holder after a gap, even if the Lease has not expired, and another holder, start a new term.
    activity.apply(Kind::Lease, None, Some(&lease("one", 5)), at(5));
    assert_eq!(activity.leads("l", at(5)), Leadership::Since(at(5)));
    activity.apply(Kind::Lease, None, Some(&lease("one", 3)), at(5));
    activity.apply(Kind::Lease, None, Some(&lease("one", 30)), at(30));
    assert_eq!(activity.leads("l", at(30)), Leadership::Since(at(30)));
    activity.apply(Kind::Lease, None, Some(&lease("two", 31)), at(31));
    assert_eq!(activity.leads("l", at(31)), Leadership::Since(at(31)));
    activity.apply(Kind::Lease, None, Some(&lease("", 32)), at(32));
    assert_eq!(activity.leads("l", at(32)), Leadership::Nobody(at(32)));
}

#[test]
fn leftovers_are_found() {
    let expected =
        |cordoned: bool| BTreeMap::from([("n1".into(), Expected { cordoned, ..Expected::default() })]);
    let clean = view([(Kind::Node, node("n1", false))]);
    assert!(leftovers(&clean, &expected(false)).is_empty());
    assert_eq!(leftovers(&clean, &expected(true)), ["node n1 is no longer cordoned"]);
    let cordoned = view([(Kind::Node, node("n1", true))]);
    assert!(leftovers(&cordoned, &expected(true)).is_empty());
    assert_eq!(leftovers(&cordoned, &expected(false)), ["node n1 is still cordoned"]);
    let mut marked = node("n1", false);
    let annotations = json!({"nodemaintenance.k8s.io/before-maintenance": "{}", "karpenter.sh/do-not-disrupt": "true", "mine": "x"});
    marked["metadata"]["annotations"] = annotations;
    marked["status"]["conditions"] =
        json!([condition("Ready", "True", "", ""), condition("Drained", "True", "", "")]);
    assert_eq!(leftovers(&view([(Kind::Node, marked.clone())]), &expected(false)).len(), 3);
    let mut kept = expected(false);
    kept.get_mut("n1").unwrap().annotations.insert("karpenter.sh/do-not-disrupt".into(), "true".into());
    assert_eq!(leftovers(&view([(Kind::Node, marked)]), &kept).len(), 2);
    assert_eq!(
        leftovers(&clean, &kept),
        ["node n1 has lost the annotation karpenter.sh/do-not-disrupt: \"true\""]
    );
    assert_eq!(leftovers(&ClusterView::default(), &expected(false)), ["node n1 is gone"]);
    let left = view([
        (Kind::Node, node("n1", false)),
        (Kind::Evacuation, evacuation("web-1", json!({}))),
        (Kind::Maintenance, maintenance(json!([]), json!([]))),
    ]);
    assert_eq!(leftovers(&left, &expected(false)).len(), 2);
}

#[test]
fn only_answered_writes_of_our_services_are_read() {
    let line = |user: &str, verb: &str, stage: &str| {
        json!({
            "stage": stage, "verb": verb, "user": {"username": user},
            "objectRef": {"resource": "pods", "subresource": "eviction", "namespace": "shop", "name": "web-1"},
            "responseStatus": {"code": 429},
            "requestReceivedTimestamp": "2026-11-16T06:00:00.25Z", "stageTimestamp": "2026-11-16T06:00:00.375Z",
        })
        .to_string()
    };
    let ours = "system:serviceaccount:haulout-system:haulout-evacuation-controller";
    let read = request(&line(ours, "create", "ResponseComplete")).unwrap().unwrap();
    assert_eq!((read.service.as_str(), read.resource.as_str()), ("evacuation-controller", "pods/eviction"));
    assert_eq!((read.key.as_str(), read.code), ("shop/web-1", 429));
    assert!(read.received < read.answered);
    for (user, verb, stage) in [
        ("admin", "create", "ResponseComplete"),
        (ours, "get", "ResponseComplete"),
        (ours, "create", "ResponseStarted"),
    ] {
        assert_eq!(request(&line(user, verb, stage)).unwrap(), None);
    }
}

#[test]
fn timeline_shows_its_end_and_counts_repetitions() {
    let timeline = Timeline::new();
    for number in 0..5 {
        timeline.note("somebody", format!("did {number}"));
    }
    timeline.note("somebody", "did 4");
    let text = timeline.last(2);
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 3);
    assert!(lines[0].contains("3 lines before"), "{text}");
    assert!(lines[2].ends_with("did 4 (and 1 times more)"), "{text}");
    timeline.note("somebody", "x".repeat(1000));
    assert!(timeline.last(1).len() < 600);
}

/// The purpose of the observer depends on it.
#[test]
fn observer_uses_none_of_our_code() {
    let folder = crate::repository().join("e2e/src/soak/interfere");
    let mut files = vec![folder.join("observer.rs")];
    let inside = std::fs::read_dir(folder.join("observer")).unwrap();
    files.extend(inside.map(|file| file.unwrap().path()).filter(|path| path.is_file()));
    assert!(files.len() > 5);
    for file in files.iter().filter(|file| !file.ends_with("tests.rs")) {
        let text = std::fs::read_to_string(file).unwrap();
        for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
            for ours in ["haulout_", "crate::", "super::super"] {
                assert!(!line.contains(ours), "{}: {line}", file.display());
            }
        }
    }
}

//! The observer's own judgement: given recorded objects, its verdict. Each check is shown to pass and to fail, so that one
//! that cannot fail is noticed.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::audit::{Request, request};
use super::history::{Change, History};
use super::leftovers::{Expected, leftovers};
use super::motion::{Leads, Motion};
use super::stall::complaints;
use super::timeline::Timeline;
use super::truth::{self, Answer, Facts, Refusal};
use super::world::{Kind, Read as _, World};

/// A time of day.
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

fn world(objects: impl IntoIterator<Item = (Kind, Value)>) -> World {
    let mut world = World::default();
    for (kind, object) in objects {
        world.put(kind, Arc::new(object));
    }
    world
}

/// A cordoned node with the pod `web-1`, and these.
fn scene(more: impl IntoIterator<Item = (Kind, Value)>) -> World {
    world([(Kind::Node, node("n1", true)), (Kind::Pod, pod("web-1", "web"))].into_iter().chain(more))
}

/// What the complaints about this maintenance are about.
fn about(maintenance: &Value, world: &World, facts: &Facts) -> Vec<String> {
    complaints(maintenance, world, facts).into_iter().map(|complaint| complaint.about).collect()
}

/// Whether a blocker of `web-1` is true.
#[track_caller]
fn check(reason: &str, message: &str, world: &World, facts: &Facts) -> Result<(), String> {
    let m = maintenance(json!([blocker("web-1", reason, message)]), json!([]));
    let claims = super::claims::claims(&m);
    assert_eq!(claims.len(), 1);
    truth::check(&claims[0], &m, world, facts)
}

#[track_caller]
fn is_untrue(reason: &str, message: &str, world: &World, facts: &Facts, why: &str) {
    let said = check(reason, message, world, facts).unwrap_err();
    assert!(said.contains(why), "{said}");
}

#[test]
fn a_status_that_names_nothing_is_a_stall() {
    let nothing = condition("Blocked", "False", "NotBlocked", "Nothing is in the way");
    let drained = condition("Drained", "False", "Evacuating", "1 pod has yet to leave");
    let m = maintenance(json!([]), json!([nothing, drained]));
    assert_eq!(about(&m, &scene([]), &facts()), ["silent", "unexplained shop/web-1"]);
    // With nothing left to do, and with a pod that stays or has finished, nothing has to be named.
    let done = maintenance(json!([]), json!([condition("Drained", "True", "Complete", "")]));
    assert!(about(&done, &world([(Kind::Node, node("n1", true))]), &facts()).is_empty());
    let mut stays = pod("web-1", "web");
    stays["metadata"]["labels"]["cluster.x-k8s.io/drain"] = json!("skip");
    assert!(about(&done, &scene([(Kind::Pod, stays)]), &facts()).is_empty());
    // Nobody expects anything of one that does not drain.
    let mut idle = m.clone();
    idle["spec"]["stage"] = json!("Cordon");
    assert!(about(&idle, &scene([]), &facts()).is_empty());
}

#[test]
fn nothing_in_the_way_is_never_true_while_a_pod_stays() {
    let active = evacuation("web-1", json!({"activeEvacuatorClass": "a.example.com"}));
    let mut waiting = blocker("web-1", "EvacuatorActive", "evacuator a.example.com is in charge");
    waiting["evacuatorClass"] = json!("a.example.com");
    waiting["until"] = json!(at(900 + 1800).to_string());
    let waiting = json!([waiting]);
    let scene = scene([(Kind::Evacuation, active)]);
    let wrong = condition("Blocked", "False", "NotBlocked", "Nothing is in the way");
    assert_eq!(about(&maintenance(waiting.clone(), json!([wrong])), &scene, &facts()), ["in the way"]);
    let right = condition("Blocked", "False", "EvacuatorActive", "1 pod waits for its evacuator");
    assert!(about(&maintenance(waiting, json!([right])), &scene, &facts()).is_empty());
}

#[test]
fn drained_means_empty_and_cordoned() {
    let m = maintenance(json!([]), json!([condition("Drained", "True", "Complete", "")]));
    assert_eq!(about(&m, &scene([]), &facts()), ["drained"]);
    assert_eq!(about(&m, &world([(Kind::Node, node("n1", false))]), &facts()), ["drained"]);
    let not = maintenance(json!([]), json!([condition("Drained", "False", "Evacuating", "")]));
    assert_eq!(about(&not, &world([(Kind::Node, node("n1", true))]), &facts()), ["not drained"]);
    assert_eq!(about(&not, &world([(Kind::Node, node("n1", false))]), &facts()), ["open n1"]);
}

#[test]
fn every_pod_that_is_due_has_to_be_explained() {
    let mut later = pod("api-1", "api");
    later["spec"]["priority"] = json!(2_000_000_000);
    let more =
        [(Kind::Budget, budget("web", "web", 0)), (Kind::Pod, pod("web-2", "web")), (Kind::Pod, later)];
    let scene = scene(more);
    let said = "PodDisruptionBudget web allows 0 disruptions";
    let one = maintenance(json!([blocker("web-1", "DisruptionBudgetExhausted", said)]), json!([]));
    assert_eq!(about(&one, &scene, &facts()), ["unexplained shop/web-2"]);
    // Where somebody else drains the same node, it may be that one who holds the pod.
    let mut other = one.clone();
    other["metadata"]["name"] = json!("m2");
    let mut shared = scene.clone();
    shared.put(Kind::Maintenance, Arc::new(other));
    assert!(about(&one, &shared, &facts()).is_empty());
    // What is said of the whole node explains all of its pods.
    let refused = json!([blocker("web-1", "DisruptionBudgetExhausted", said), {"node": "n1", "reason": "VolumesAttached", "message": ""}]);
    assert!(
        !about(&maintenance(refused, json!([])), &scene, &facts()).contains(&"unexplained shop/web-2".into())
    );
}

#[test]
fn pods_that_are_named_exist_on_their_node() {
    let message = "PodDisruptionBudget web allows 0 disruptions";
    let budgets = || [(Kind::Budget, budget("web", "web", 0))];
    let m = |node: &str, pod: &str| {
        let mut entry = blocker(pod, "DisruptionBudgetExhausted", message);
        entry["node"] = json!(node);
        maintenance(json!([entry]), json!([]))
    };
    let untrue = |node: &str, pod: &str, world: &World| {
        let found = complaints(&m(node, pod), world, &facts());
        found
            .into_iter()
            .find(|complaint| complaint.about.starts_with("untrue"))
            .map(|complaint| complaint.text)
    };
    assert_eq!(untrue("n1", "web-1", &scene(budgets())), None);
    assert!(untrue("n1", "web-9", &scene(budgets())).unwrap().contains("does not exist"));
    assert!(untrue("n9", "web-1", &scene(budgets())).unwrap().contains("node n9 does not exist"));
    let mut moved = pod("web-1", "web");
    moved["spec"]["nodeName"] = json!("n2");
    let elsewhere = scene(budgets().into_iter().chain([(Kind::Pod, moved)]));
    assert!(untrue("n1", "web-1", &elsewhere).unwrap().contains("the pod is on node \"n2\""));
    let mut ending = pod("web-1", "web");
    ending["metadata"]["deletionTimestamp"] = json!(at(NOW).to_string());
    let ending = scene(budgets().into_iter().chain([(Kind::Pod, ending)]));
    assert!(untrue("n1", "web-1", &ending).unwrap().contains("terminating already"));
}

#[test]
fn an_exhausted_budget_covers_the_pod_and_allows_nothing() {
    let reason = "DisruptionBudgetExhausted";
    let message = "PodDisruptionBudget web allows 0 disruptions: 1 of 2 pods are healthy and 1 have to be.";
    let with = |budgets: &[Value]| scene(budgets.iter().map(|budget| (Kind::Budget, budget.clone())));
    let tight = budget("web", "web", 0);
    assert_eq!(check(reason, message, &with(std::slice::from_ref(&tight)), &facts()), Ok(()));
    is_untrue(reason, message, &with(&[]), &facts(), "no PodDisruptionBudget covers the pod");
    is_untrue(reason, message, &with(&[budget("web", "web", 1)]), &facts(), "allows 1 disruptions");
    is_untrue(reason, message, &with(&[budget("web", "db", 0)]), &facts(), "no PodDisruptionBudget covers");
    is_untrue(reason, message, &with(&[budget("new", "web", 0)]), &facts(), "web does not exist");
    let stale = json!({"generation": 2, "name": "web", "namespace": "shop"});
    let mut changed = budget("web", "web", 1);
    changed["metadata"] = stale;
    assert_eq!(check(reason, message, &with(&[changed]), &facts()), Ok(()));
    // With two of them the pod cannot leave either.
    assert_eq!(check(reason, message, &with(&[tight, budget("more", "web", 1)]), &facts()), Ok(()));
}

#[test]
fn several_budgets_are_several_and_a_stale_one_is_stale() {
    let one = scene([(Kind::Budget, budget("web", "web", 0))]);
    let two = scene([(Kind::Budget, budget("web", "web", 0)), (Kind::Budget, budget("more", "web", 0))]);
    let reason = "SeveralDisruptionBudgets";
    assert_eq!(check(reason, "The pod is covered by more, web.", &two, &facts()), Ok(()));
    is_untrue(reason, "The pod is covered by more, web.", &one, &facts(), "1 PodDisruptionBudgets cover");
    let message = "The PodDisruptionBudget has changed and is being looked at anew.";
    is_untrue("DisruptionBudgetStale", message, &one, &facts(), "no PodDisruptionBudget of the pod is stale");
}

#[test]
fn an_active_evacuator_is_at_work_and_has_time() {
    let status = |completed: bool, progress: i64| {
        json!({
            "activeEvacuatorClass": "a.example.com", "activeEvacuatorCompleted": completed,
            "evacuationProgressTimestamp": at(progress).to_string(),
        })
    };
    let with = |status: Value| scene([(Kind::Evacuation, evacuation("web-1", status))]);
    let said = |class: &str, until: i64, world: &World, facts: &Facts| {
        let mut entry = blocker("web-1", "EvacuatorActive", "it works");
        entry["evacuatorClass"] = json!(class);
        entry["until"] = json!(at(until).to_string());
        let mut m = maintenance(json!([]), json!([]));
        m["status"]["drainStatus"]["waitingFor"] = json!([entry]);
        truth::check(&super::claims::claims(&m)[0], &m, world, facts).err().unwrap_or_default()
    };
    let (class, until, now) = ("a.example.com", 950 + 1800, facts());
    assert_eq!(said(class, until, &with(status(false, 950)), &now), "");
    // It may be rounded up to the minute.
    assert_eq!(said(class, until + 59, &with(status(false, 950)), &now), "");
    let ahead = Facts { ahead: SignedDuration::from_hours(1), ..facts() };
    // A new leader lets evacuators report first.
    let new = Facts { led_since: Some(at(NOW - 20)), ..ahead.clone() };
    assert_eq!(said(class, until, &with(status(false, 950)), &new), "");
    for (said, why) in [
        (said(class, until, &scene([]), &now), "has no Evacuation"),
        (said(class, until, &with(json!({})), &now), "no evacuator is active"),
        (said(class, until, &with(status(true, 950)), &now), "has completed"),
        (said(class, until, &with(status(false, -1000)), &now), "its time was up"),
        (said(class, until, &with(status(false, 700)), &now), "does not say that the evacuator has time"),
        (said("b.example.com", until, &with(status(false, 950)), &now), "is a.example.com"),
        // The controllers' clocks may be ahead.
        (said(class, until, &with(status(false, 950)), &ahead), "its time was up"),
    ] {
        assert!(said.contains(why), "{said}");
    }
}

#[test]
fn what_is_about_to_happen_happens_soon() {
    let with = |change: fn(&mut Value)| {
        let mut pod = pod("web-1", "web");
        change(&mut pod);
        scene([(Kind::Pod, pod)])
    };
    let ending = with(|pod| pod["metadata"]["deletionTimestamp"] = json!(at(NOW - 5).to_string()));
    assert_eq!(check("TerminationGracePeriod", "", &ending, &facts()), Ok(()));
    let late = with(|pod| pod["metadata"]["deletionTimestamp"] = json!(at(NOW - 80).to_string()));
    is_untrue("TerminationGracePeriod", "", &late, &facts(), "should have ended");
    is_untrue("TerminationGracePeriod", "", &scene([]), &facts(), "not terminating");
    let new = with(|pod| pod["metadata"]["creationTimestamp"] = json!(at(NOW - 5).to_string()));
    assert_eq!(check("EvacuationPending", "", &new, &facts()), Ok(()));
    is_untrue("EvacuationPending", "", &scene([]), &facts(), "has had time");
    let open = scene([(Kind::Node, node("n1", false))]);
    assert_eq!(check("WaitingForNode", "", &open, &facts()), Ok(()));
    is_untrue("WaitingForNode", "", &scene([(Kind::Node, node("n1", true))]), &facts(), "is cordoned");
    let asked = scene([(Kind::Evacuation, evacuation("web-1", json!({})))]);
    is_untrue("EvacuationPending", "", &asked, &facts(), "has an Evacuation");
    is_untrue("EvacuationRequested", "", &asked, &facts(), "has had time");
    is_untrue("EvacuationRequested", "", &scene([]), &facts(), "has no Evacuation");
    let soon = Facts { now: at(905), ..facts() };
    assert_eq!(check("EvacuationRequested", "", &asked, &soon), Ok(()));
}

#[test]
fn a_refused_write_is_refused_or_tried_again_soon() {
    let refused = |until: Option<i64>| {
        let resources = vec!["nodes".to_owned()];
        let refusal = Refusal { name: "p".into(), resources, from: at(0), until: until.map(at) };
        Facts { refusals: vec![refusal], ..facts() }
    };
    let words = "denied request: not during the sale";
    assert_eq!(check("NodeUpdateRefused", words, &scene([]), &refused(None)), Ok(()));
    assert_eq!(check("NodeUpdateRefused", words, &scene([]), &refused(Some(NOW - 30))), Ok(()));
    is_untrue("NodeUpdateRefused", words, &scene([]), &refused(Some(NOW - 100)), "could be written since");
    is_untrue("NodeUpdateRefused", "no", &scene([]), &refused(None), "does not have the API server's words");
    is_untrue("EvacuationRefused", words, &scene([]), &refused(None), "nothing has ever refused evacuations");
}

#[test]
fn nodes_that_are_missing_or_fought_over_are() {
    is_untrue("NodeMissing", "", &scene([]), &facts(), "node n1 exists");
    assert_eq!(check("NodeMissing", "", &World::default(), &facts()), Ok(()));
    is_untrue("CordonRace", "", &scene([]), &facts(), "the node is cordoned");
    assert_eq!(check("CordonRace", "", &world([(Kind::Node, node("n1", false))]), &facts()), Ok(()));
}

#[test]
fn an_absent_controller_is_named_and_is_absent() {
    let reason = "EvacuationControllerUnavailable";
    let away = |since: i64| Facts { absent_since: Some(at(since)), ..facts() };
    assert_eq!(check(reason, "", &scene([]), &away(NOW - 80)), Ok(()));
    is_untrue(reason, "", &scene([]), &facts(), "the evacuation controller leads");
    is_untrue(reason, "", &scene([]), &away(NOW - 20), "only since");
    // And a status that says something else is not enough.
    let budgets = scene([(Kind::Budget, budget("web", "web", 0))]);
    let m = maintenance(json!([blocker("web-1", "DisruptionBudgetExhausted", "")]), json!([]));
    assert_eq!(about(&m, &budgets, &facts()), Vec::<String>::new());
    assert_eq!(about(&m, &budgets, &away(NOW - 80)), ["absent"]);
    // Nobody can correct what an Evacuation says meanwhile.
    let said = "PodDisruptionBudget web allows 0 disruptions";
    let blocked = json!({"conditions": [condition("Blocked", "True", "DisruptionBudgetExhausted", said)]});
    let freed = scene([(Kind::Evacuation, evacuation("web-1", blocked))]);
    assert_eq!(check("DisruptionBudgetExhausted", said, &freed, &away(NOW - 80)), Ok(()));
    is_untrue("DisruptionBudgetExhausted", said, &freed, &facts(), "no PodDisruptionBudget covers the pod");
    is_untrue("DisruptionBudgetExhausted", "else", &freed, &away(NOW - 80), "no PodDisruptionBudget covers");
}

#[test]
fn refused_eviction_claim_is_checked() {
    let reason = "EvictionForbidden";
    let status = |last: i64, failed: i64| json!({"failedEvictionCounter": failed, "lastFailedEvictionTime": at(last).to_string()});
    let with = |status: Value| scene([(Kind::Evacuation, evacuation("web-1", status))]);
    let refused = |until: Option<i64>| {
        let resources = vec!["pods/eviction".to_owned()];
        let refusal = Refusal { name: "p".into(), resources, from: at(0), until: until.map(at) };
        Facts { refusals: vec![refusal], ..facts() }
    };
    assert_eq!(check(reason, "", &with(status(NOW - 500, 1)), &refused(None)), Ok(()));
    is_untrue(reason, "", &with(status(NOW - 5, 1)), &facts(), "nothing has ever refused");
    // Refused five times, the last time 20 seconds ago: the next attempt comes after 80.
    assert_eq!(check(reason, "", &with(status(NOW - 20, 5)), &refused(Some(NOW - 15))), Ok(()));
    is_untrue(reason, "", &with(status(NOW - 100, 5)), &refused(Some(NOW - 90)), "was not made");
    is_untrue(reason, "", &with(status(NOW - 20, 5)), &refused(Some(NOW - 60)), "one has failed at");
}

#[test]
fn a_busy_server_has_been_busy_a_moment_ago() {
    let answered = |code: i64, ago: i64| {
        let answer = Answer { at: at(NOW - ago), code };
        Facts { evictions: [("shop/web-1".to_owned(), answer)].into(), ..facts() }
    };
    assert_eq!(check("ServerBusy", "", &scene([]), &answered(429, 3)), Ok(()));
    assert_eq!(check("ServerBusy", "", &scene([]), &answered(503, 3)), Ok(()));
    is_untrue("ServerBusy", "", &scene([]), &answered(429, 30), "not busy any more");
    is_untrue("ServerBusy", "", &scene([]), &answered(201, 3), "answered with 201");
    is_untrue("ServerBusy", "", &scene([]), &facts(), "nobody has tried");
    let jam =
        Refusal { name: "jam".into(), resources: vec!["jam pods/eviction".into()], from: at(0), until: None };
    let jammed = Facts { refusals: vec![jam], ..answered(429, 30) };
    assert_eq!(check("ServerBusy", "", &scene([]), &jammed), Ok(()));
    assert_eq!(check("HandledElsewhere", "", &scene([]), &answered(429, 30)), Ok(()));
    is_untrue("HandledElsewhere", "", &scene([]), &answered(500, 3), "answered with 500");
}

#[test]
fn a_pod_that_returns_is_new_and_had_a_way_to_the_node() {
    let returned = |tolerations: Value, created: i64| {
        let mut pod = pod("web-1", "web");
        pod["spec"]["tolerations"] = tolerations;
        pod["metadata"]["creationTimestamp"] = json!(at(created).to_string());
        scene([(Kind::Pod, pod)])
    };
    let tolerates = json!([{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]);
    assert_eq!(check("ReturnsToNode", "", &returned(tolerates.clone(), 600), &facts()), Ok(()));
    is_untrue("ReturnsToNode", "", &returned(tolerates.clone(), 400), &facts(), "the drain began");
    is_untrue("ReturnsToNode", "", &returned(json!([]), 600), &facts(), "tolerates the cordon: false");
    let said = "the node was uncordoned during the drain";
    is_untrue("ReturnsToNode", said, &returned(tolerates, 600), &facts(), "tolerates the cordon: true");
    is_untrue("ReturnsToNode", said, &returned(json!([]), 600), &facts(), "nobody has uncordoned");
    let mut world = returned(json!([]), 600);
    let mut reverted = node("n1", true);
    let before = json!({"unschedulable": false, "reverts": {"times": 1, "last": at(590).to_string()}});
    reverted["metadata"]["annotations"] =
        json!({"nodemaintenance.k8s.io/before-maintenance": before.to_string()});
    world.put(Kind::Node, Arc::new(reverted));
    assert_eq!(check("ReturnsToNode", said, &world, &facts()), Ok(()));
}

#[test]
fn a_terminating_pod_is_late_and_one_waited_for_is_labelled() {
    let with = |change: fn(&mut Value)| {
        let mut pod = pod("web-1", "web");
        change(&mut pod);
        scene([(Kind::Pod, pod)])
    };
    let late = with(|pod| pod["metadata"]["deletionTimestamp"] = json!(at(NOW - 70).to_string()));
    assert_eq!(check("Terminating", "", &late, &facts()), Ok(()));
    let fresh = with(|pod| pod["metadata"]["deletionTimestamp"] = json!(at(NOW - 5).to_string()));
    is_untrue("Terminating", "", &fresh, &facts(), "only been due since");
    is_untrue("Terminating", "", &scene([]), &facts(), "not terminating");
    let waits = with(|pod| pod["metadata"]["labels"]["cluster.x-k8s.io/drain"] = json!("wait-completed"));
    assert_eq!(check("WaitingForCompletion", "", &waits, &facts()), Ok(()));
    is_untrue("WaitingForCompletion", "", &scene([]), &facts(), "the label of the pod says None");
}

#[test]
fn who_waits_for_a_maintenance_waits_for_one_that_drains() {
    let waits = condition("Drained", "False", "WaitingForMaintenance", "Waiting for m2");
    let m = maintenance(json!([]), json!([waits]));
    let mut other = maintenance(json!([]), json!([]));
    other["metadata"]["name"] = json!("m2");
    let about = |other: &Value| about(&m, &scene([(Kind::Maintenance, other.clone())]), &facts());
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
    let with = |evacuation: &Value| scene([(Kind::Evacuation, evacuation.clone())]);
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
    let with = |status: Value| scene([(Kind::Evacuation, evacuation("web-1", status))]);
    assert_eq!(check("Other", "", &with(blocked), &facts()), Ok(()));
    is_untrue("Other", "", &with(json!({})), &facts(), "is not blocked");
    is_untrue("BadLuck", "", &scene([]), &facts(), "nobody knows how to check");
}

/// A reason that users may read has a check.
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
        let said = check(&reason, "", &scene([]), &facts()).err().unwrap_or_default();
        assert!(!said.contains("nobody knows"), "{said}");
    }
}

/// Everything that happened: revision, kind, object, and whether it is there.
fn history(changes: &[(u64, Kind, &Value, bool)], requests: &[Request]) -> History {
    let change = |(revision, kind, object, exists): &(u64, Kind, &Value, bool)| Change {
        revision: *revision,
        // One revision a second, so that tests can tell what is long ago.
        at: at(i64::try_from(*revision).unwrap()),
        kind: *kind,
        key: object.key(),
        object: exists.then(|| Arc::new((*object).clone())),
    };
    History { changes: changes.iter().map(change).collect(), requests: requests.to_vec(), gaps: Vec::new() }
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
fn an_eviction_below_a_budget_is_a_violation() {
    let (one, two, three) = (pod("web-1", "web"), pod("web-2", "web"), pod("web-3", "web"));
    let (web, ending_1, ending_2) = (budget("web", "web", 1), terminating("web-1"), terminating("web-2"));
    let mut changes = vec![
        (1, Kind::Pod, &one, true),
        (2, Kind::Pod, &two, true),
        (3, Kind::Pod, &three, true),
        (4, Kind::Budget, &web, true),
        (30, Kind::Pod, &ending_1, true),
    ];
    // Two of three have to be healthy: the first may go.
    assert!(history(&changes, &[evicted("web-1", 30)]).violations().is_empty());
    changes.push((50, Kind::Pod, &ending_2, true));
    let both = [evicted("web-1", 30), evicted("web-2", 50)];
    let found = history(&changes, &both).violations();
    assert_eq!(
        found,
        ["we evicted pod shop/web-2, and PodDisruptionBudget shop/web has 1 healthy pods of 2"]
    );
    // The order in which watches tell does not matter.
    let mut shuffled = changes.clone();
    shuffled.reverse();
    assert_eq!(history(&shuffled, &both).violations(), found);
    // What somebody else deletes is not our fault, nor is what we evict right after that.
    assert!(history(&changes, &[evicted("web-1", 30)]).violations().is_empty());
    changes[5].0 = 33;
    assert!(history(&changes, &[evicted("web-2", 33)]).violations().is_empty());
    // A budget that has just been made may not have counted yet.
    let mut new = changes.clone();
    new[3].0 = 29;
    assert!(history(&new, &[evicted("web-1", 30), evicted("web-2", 33)]).violations().is_empty());
    // With two budgets the Eviction API should have refused.
    let more = budget("more", "web", 1);
    let doubled =
        [changes[0], changes[1], changes[2], changes[3], (5, Kind::Budget, &more, true), changes[4]];
    assert_eq!(history(&doubled, &[evicted("web-1", 30)]).violations().len(), 2);
}

#[test]
fn pods_are_evicted_and_never_deleted() {
    let deleted = asked("maintenance-controller", "delete", "pods", "shop/web-1", 200, 5);
    let refused = asked("maintenance-controller", "delete", "pods", "shop/web-2", 403, 5);
    let found = history(&[], &[deleted, refused]).violations();
    assert_eq!(found, ["maintenance-controller deleted pod shop/web-1"]);
}

#[test]
fn evacuations_are_made_only_while_somebody_drains() {
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
    // It may have been decided before.
    assert_eq!(when(12, Some(&over), false), 0);
    for (end, gone) in [(&over, false), (&deleted, false), (&drains, true)] {
        assert_eq!(when(20, Some(end), gone), 1);
    }
}

#[test]
fn pods_that_come_back_are_not_evicted_over_and_over() {
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
fn a_maintenance_is_quiet_when_nothing_moves_on_its_nodes() {
    let (m, mut motion) = (maintenance(json!([]), json!([])), Motion::default());
    let (mut world, running, ending) = (scene([]), pod("web-1", "web"), terminating("web-1"));
    motion.apply(Kind::Maintenance, None, Some(&m), at(1));
    motion.apply(Kind::Pod, None, Some(&running), at(2));
    assert_eq!(motion.quiet_since(&m, &world, at(NOW)), Some(at(1)));
    // Progress, a new class and the end of a pod are movement; a change of its labels is not.
    let (before, after) =
        (evacuation("web-1", json!({})), evacuation("web-1", json!({"activeEvacuatorClass": "a"})));
    motion.apply(Kind::Evacuation, None, Some(&before), at(3));
    assert_eq!(motion.quiet_since(&m, &world, at(NOW)), Some(at(1)));
    motion.apply(Kind::Evacuation, Some(&before), Some(&after), at(4));
    assert_eq!(motion.quiet_since(&m, &world, at(NOW)), Some(at(4)));
    let progress = json!({"activeEvacuatorClass": "a", "evacuationProgressTimestamp": at(5).to_string()});
    motion.apply(Kind::Evacuation, Some(&after), Some(&evacuation("web-1", progress)), at(5));
    assert_eq!(motion.quiet_since(&m, &world, at(NOW)), Some(at(5)));
    motion.apply(Kind::Pod, Some(&running), Some(&pod("web-1", "other")), at(6));
    assert_eq!(motion.quiet_since(&m, &world, at(NOW)), Some(at(5)));
    motion.apply(Kind::Pod, Some(&running), Some(&ending), at(7));
    world.put(Kind::Pod, Arc::new(ending));
    // While a pod is on its way out it is not quiet, unless the pod is late.
    assert_eq!(motion.quiet_since(&m, &world, at(10)), None);
    assert_eq!(motion.quiet_since(&m, &world, at(70)), Some(at(7)));
}

#[test]
fn who_leads_is_read_from_the_lease() {
    let lease = |holder: &str, renewed: i64| {
        json!({
            "metadata": {"name": "l"},
            "spec": {"holderIdentity": holder, "renewTime": at(renewed).to_string(), "leaseDurationSeconds": 2},
        })
    };
    let mut motion = Motion::default();
    assert_eq!(motion.leads("l", at(0)), Leads::Nobody(Timestamp::MIN));
    motion.apply(Kind::Lease, None, Some(&lease("one", 1)), at(1));
    motion.apply(Kind::Lease, None, Some(&lease("one", 3)), at(3));
    assert_eq!(motion.leads("l", at(4)), Leads::Since(at(1)));
    assert_eq!(motion.leads("l", at(20)), Leads::Nobody(at(3)));
    // The same one after a gap, and another one, begin anew.
    motion.apply(Kind::Lease, None, Some(&lease("one", 30)), at(30));
    assert_eq!(motion.leads("l", at(30)), Leads::Since(at(30)));
    motion.apply(Kind::Lease, None, Some(&lease("two", 31)), at(31));
    assert_eq!(motion.leads("l", at(31)), Leads::Since(at(31)));
    motion.apply(Kind::Lease, None, Some(&lease("", 32)), at(32));
    assert_eq!(motion.leads("l", at(32)), Leads::Nobody(at(32)));
}

#[test]
fn leftovers_are_found() {
    let expected =
        |cordoned: bool| BTreeMap::from([("n1".into(), Expected { cordoned, ..Expected::default() })]);
    let clean = world([(Kind::Node, node("n1", false))]);
    assert!(leftovers(&clean, &expected(false)).is_empty());
    assert_eq!(leftovers(&clean, &expected(true)), ["node n1 is not cordoned any more"]);
    let cordoned = world([(Kind::Node, node("n1", true))]);
    assert!(leftovers(&cordoned, &expected(true)).is_empty());
    assert_eq!(leftovers(&cordoned, &expected(false)), ["node n1 is still cordoned"]);
    let mut marked = node("n1", false);
    let annotations = json!({"nodemaintenance.k8s.io/before-maintenance": "{}", "karpenter.sh/do-not-disrupt": "true", "mine": "x"});
    marked["metadata"]["annotations"] = annotations;
    marked["status"]["conditions"] =
        json!([condition("Ready", "True", "", ""), condition("Drained", "True", "", "")]);
    assert_eq!(leftovers(&world([(Kind::Node, marked.clone())]), &expected(false)).len(), 3);
    let mut kept = expected(false);
    kept.get_mut("n1").unwrap().annotations.insert("karpenter.sh/do-not-disrupt".into(), "true".into());
    assert_eq!(leftovers(&world([(Kind::Node, marked)]), &kept).len(), 2);
    assert_eq!(
        leftovers(&clean, &kept),
        ["node n1 has lost the annotation karpenter.sh/do-not-disrupt: \"true\""]
    );
    assert_eq!(leftovers(&World::default(), &expected(false)), ["node n1 is gone"]);
    let left = world([
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
fn a_timeline_shows_its_end_and_counts_repetitions() {
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

/// What the observer is for depends on it.
#[test]
fn the_observer_uses_none_of_our_code() {
    let folder = crate::repository().join("e2e/src/soak/interfere");
    let mut files = vec![folder.join("observer.rs")];
    let inside = std::fs::read_dir(folder.join("observer")).unwrap();
    files.extend(inside.map(|file| file.unwrap().path()));
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

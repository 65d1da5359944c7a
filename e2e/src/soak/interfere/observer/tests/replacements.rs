//! Tests of the checks of pods that are replaced before they are evicted.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::super::intents::Intents;
use super::super::owners::{costs, orphans};
use super::*;

const FORMER_OWNER: &str = "evacuation.coordination.k8s.io/former-owner";
const COST: &str = "controller.kubernetes.io/pod-deletion-cost";

fn owned(mut object: Value, kind: &str, owner: &str) -> Value {
    object["metadata"]["ownerReferences"] =
        json!([{"kind": kind, "name": owner, "uid": owner, "controller": true}]);
    object
}

fn deployment(name: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "shop", "uid": name, "generation": 3},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "web"}}},
    })
}

fn set(name: &str, cost: Option<&str>) -> Value {
    let template = json!({"metadata": {"annotations": {COST: cost}}});
    let set = json!({
        "metadata": {"name": name, "namespace": "shop", "uid": name},
        "spec": {"template": template},
    });
    owned(set, "Deployment", "web")
}

fn of_set(name: &str) -> Value {
    owned(pod(name, "web"), "ReplicaSet", "web-5d")
}

fn moved(name: &str) -> Value {
    owned(pod(name, "web"), "Deployment", "web")
}

fn starting(name: &str) -> Value {
    let mut pod = of_set(name);
    pod["status"]["conditions"] = json!([]);
    pod
}

fn annotated(mut pod: Value, key: &str, value: &str) -> Value {
    pod["metadata"]["annotations"][key] = json!(value);
    pod
}

/// A cordoned node, Deployment `web` with a ReplicaSet, and these pods.
fn cluster(pods: impl IntoIterator<Item = Value>) -> ClusterView {
    let owners = [
        (Kind::Node, node("n1", true)),
        (Kind::Deployment, deployment("web")),
        (Kind::ReplicaSet, set("web-5d", None)),
    ];
    view(owners.into_iter().chain(pods.into_iter().map(|pod| (Kind::Pod, pod))))
}

fn with(mut view: ClusterView, kind: Kind, object: Value) -> ClusterView {
    view.put(kind, Arc::new(object));
    view
}

#[test]
fn pods_that_belong_to_no_replica_set_are_orphans() {
    assert!(orphans(&cluster([of_set("web-1")])).is_empty());
    let only = |pod: Value| {
        let found = orphans(&cluster([pod]));
        assert_eq!(found.len(), 1, "{found:?}");
        found.into_iter().next().unwrap()
    };
    assert!(only(moved("web-1")).contains("still belongs directly to its Deployment"));
    assert!(
        only(pod("web-1", "web")).contains("belongs to \"\", not to a ReplicaSet of Deployment shop/web")
    );
    let other = owned(pod("web-1", "web"), "ReplicaSet", "web-gone");
    assert!(only(other).contains("belongs to \"ReplicaSet web-gone\""));
    assert!(only(annotated(of_set("web-1"), FORMER_OWNER, "{}")).contains("still has the annotation"));
    // Nobody adopts the pods of a Deployment that is gone or is being deleted.
    let mut deleted = deployment("web");
    deleted["metadata"]["deletionTimestamp"] = json!(at(0).to_string());
    assert!(orphans(&with(cluster([pod("web-1", "web")]), Kind::Deployment, deleted)).is_empty());
    assert!(orphans(&view([(Kind::Pod, of_set("web-1"))])).is_empty());
    assert_eq!(orphans(&view([(Kind::Pod, moved("web-1"))])).len(), 1);
}

#[test]
fn deletion_costs_are_those_of_the_template() {
    let with_cost = |cost: Option<&str>, of_template: Option<&str>, intents: &Intents| {
        let pod = cost.map_or(of_set("web-1"), |cost| annotated(of_set("web-1"), COST, cost));
        costs(&with(cluster([pod]), Kind::ReplicaSet, set("web-5d", of_template)), intents)
    };
    let none = Intents::default();
    assert!(with_cost(None, None, &none).is_empty());
    assert!(with_cost(Some("7"), Some("7"), &none).is_empty());
    for (cost, template) in [(Some("-2147483648"), None), (None, Some("7")), (Some("8"), Some("7"))] {
        assert_eq!(with_cost(cost, template, &none).len(), 1, "{cost:?} {template:?}");
    }
    let mut removed = none;
    removed.without_cost.insert("uid-of-web-1".to_owned());
    assert!(with_cost(Some("8"), Some("7"), &removed).is_empty());
}

#[test]
fn changes_that_people_did_not_make_are_found() {
    let metadata = |name: &str, generation| ObjectMeta {
        name: Some(name.into()),
        uid: Some(name.into()),
        generation: Some(generation),
        ..ObjectMeta::default()
    };
    let mut intents = Intents::default();
    intents.wrote("Deployment", &metadata("web", 3));
    intents.wrote("PodDisruptionBudget", &metadata("web", 1));
    let objects =
        |deployment: Value| view([(Kind::Deployment, deployment), (Kind::Budget, budget("web", "web", 1))]);
    let same = objects(deployment("web"));
    assert!(intents.changed(&same).is_empty());
    let mut scaled = deployment("web");
    scaled["metadata"]["generation"] = json!(4);
    let found = intents.changed(&objects(scaled));
    assert_eq!(found, ["Deployment shop/web was changed: people wrote generation 3, and it is 4"]);
    let mut other = deployment("web");
    other["metadata"]["uid"] = json!("other");
    assert_eq!(intents.changed(&objects(other)), ["Deployment shop/web was recreated"]);
    let foreign = with(same.clone(), Kind::Budget, budget("more", "web", 1));
    assert_eq!(intents.changed(&foreign), ["PodDisruptionBudget shop/more was created by somebody else"]);
    let mut gone = same;
    gone.remove(Kind::Budget, "shop/web");
    assert_eq!(intents.changed(&gone), ["PodDisruptionBudget web was deleted by somebody else"]);
    intents.removed_all("PodDisruptionBudget");
    assert!(intents.changed(&gone).is_empty());
}

/// A pod that leaves, and its replacement that becomes ready before or after that.
#[test]
fn moment_without_a_ready_pod_is_an_outage() {
    let (old, ending) = (moved("web-1"), terminating("web-1"));
    let (new, ready) = (starting("web-2"), of_set("web-2"));
    let outages = |order: [u64; 4], undisturbed: &str, gap: Option<i64>, end: Option<i64>| {
        let [a, b, c, d] = order;
        let changes = [
            (a, Kind::Pod, &old, true),
            (b, Kind::Pod, &new, true),
            (c, Kind::Pod, &ready, true),
            (d, Kind::Pod, &ending, true),
        ];
        let mut history = history(&changes, &[evicted("web-1", i64::try_from(d).unwrap())]);
        history.undisturbed.insert(undisturbed.to_owned());
        history.gaps.extend(gap.map(at));
        history.deadlines_pass = end.map(at);
        history.violations()
    };
    assert!(outages([1, 10, 20, 30], "web", None, None).is_empty());
    let found = outages([1, 10, 30, 20], "web", None, None);
    assert!(
        matches!(found.as_slice(), [one] if one.contains("Deployment web had no ready pod when shop/web-1 left")),
        "{found:?}"
    );
    assert!(outages([1, 10, 30, 20], "api", None, None).is_empty(), "people interfere");
    assert!(outages([1, 10, 30, 20], "web", Some(25), None).is_empty(), "changes are missing");
    assert!(
        outages([1, 10, 30, 20], "web", None, Some(19)).is_empty(),
        "evacuators have missed their deadlines"
    );
    assert_eq!(outages([1, 10, 30, 20], "web", None, Some(20)).len(), 1);
}

#[test]
fn writes_to_objects_of_people_are_violations() {
    let asked = |service, verb, resource, code| {
        history(&[], &[asked(service, verb, resource, "shop/web", code, 5)]).violations()
    };
    for (resource, code) in [
        ("deployments", 403),
        ("deployments/scale", 200),
        ("poddisruptionbudgets", 200),
        ("replicasets", 200),
    ] {
        assert_eq!(asked("workload-evacuator", "patch", resource, code).len(), 1, "{resource}");
    }
    assert_eq!(asked("workload-evacuator", "create", "pods/eviction", 403).len(), 1);
    assert!(asked("evacuation-controller", "create", "pods/eviction", 201).is_empty());
    assert!(asked("workload-evacuator", "patch", "pods", 200).is_empty());
}

#[test]
fn only_moved_pods_get_evacuations_from_the_workload_evacuator() {
    let made = evacuation("web-1", json!({}));
    let create = |service| asked(service, "create", "evacuations", &made.key(), 201, 10);
    let found = |pod: &Value, service| {
        let changes = [(5, Kind::Pod, pod, true), (10, Kind::Evacuation, &made, true)];
        history(&changes, &[create(service)]).violations()
    };
    assert!(found(&moved("web-1"), "workload-evacuator").is_empty());
    assert!(found(&of_set("web-1"), "taint-manager").is_empty());
    let wrong = found(&of_set("web-1"), "workload-evacuator");
    assert!(matches!(wrong.as_slice(), [one] if one.contains("its pod was not moved")), "{wrong:?}");
}

/// What is wrong with the status of a maintenance while the workload evacuator has the turn for `web-1`.
fn turn(message: &str, pods: impl IntoIterator<Item = Value>, facts: &Facts) -> String {
    let status = json!({"activeEvacuatorClass": "deployment.apps.k8s.io", "message": message});
    let view = with(cluster(pods), Kind::Evacuation, evacuation("web-1", status));
    let mut entry = blocker("web-1", "EvacuatorActive", message);
    entry["evacuatorClass"] = json!("deployment.apps.k8s.io");
    entry["until"] = json!(at(900 + 1800).to_string());
    let mut m = maintenance(json!([]), json!([]));
    m["status"]["drainStatus"]["waitingFor"] = json!([entry]);
    truth::check(&super::super::claims::claims(&m)[0], &m, &view, facts).err().unwrap_or_default()
}

#[test]
fn what_the_workload_evacuator_waits_for_is_checked() {
    let starts = "Waiting until the replacement is available: pod web-2 is starting.";
    let none = "Waiting until Deployment web has a replacement for the pod.";
    let queue = "In the queue of Deployment web, place 1: 1 at once are replaced (maxSurge), now web-3.";
    let now = facts();
    assert_eq!(turn(starts, [moved("web-1"), starting("web-2")], &now), "");
    assert_eq!(turn(none, [moved("web-1")], &now), "");
    assert_eq!(turn(queue, [of_set("web-1"), moved("web-3")], &now), "");
    let both = "Waiting until the replacement is available: pod web-2 is starting, pod web-3 is starting.";
    assert_eq!(turn(both, [moved("web-1"), of_set("web-2"), starting("web-3")], &now), "");
    for (said, why) in [
        (turn("", [moved("web-1")], &now), "does not say what"),
        (turn(starts, [of_set("web-1"), starting("web-2")], &now), "still belongs to its ReplicaSet"),
        (turn("", [moved("web-1"), starting("web-2")], &now), "does not say what"),
        (turn("We will see.", [moved("web-1"), starting("web-2")], &now), "does not say what"),
        (turn(starts, [moved("web-1"), of_set("web-2")], &now), "that is not ready"),
        (turn(starts, [moved("web-1"), starting("web-9")], &now), "names no pod"),
        (turn(none, [moved("web-1"), of_set("web-2")], &now), "it has 1 of 1 replicas"),
        (
            turn(queue, [of_set("web-1"), of_set("web-3")], &now),
            "no other pod of the Deployment is being replaced",
        ),
        (turn(starts, [pod("web-1", "web")], &now), "belongs to no Deployment"),
    ] {
        assert!(said.contains(why), "{said}");
    }
}

#[test]
fn turn_of_a_service_without_a_leader_ends() {
    let starts = "Waiting until the replacement is available: pod web-2 is starting.";
    let pods = || [moved("web-1"), starting("web-2")];
    let away =
        |since: i64, led: i64| Facts { unserved_since: Some(at(since)), led_since: Some(at(led)), ..facts() };
    assert_eq!(turn(starts, pods(), &away(NOW - 70, 0)), "");
    assert_eq!(turn(starts, pods(), &away(NOW - 300, NOW - 70)), "", "a new leader has to detect it");
    assert!(turn(starts, pods(), &away(NOW - 80, 0)).contains("should have been passed over"));
}

#[test]
fn lack_of_room_claim_is_checked() {
    let reason = "NoRoomForReplacement";
    let message =
        "Replacement web-2 is pending: 0/1 nodes are available: 1 node(s) were unschedulable. Add nodes.";
    let blocked = json!({"conditions": [condition("Blocked", "True", reason, message)]});
    let pending = |why: &str| {
        let mut pod = of_set("web-2");
        pod["status"]["conditions"] = json!([condition("PodScheduled", "False", "Unschedulable", why)]);
        pod["spec"]["nodeName"] = json!(null);
        pod
    };
    let why = "0/1 nodes are available: 1 node(s) were unschedulable. preemption: none.";
    let with_pods =
        |pods: [Value; 2]| with(cluster(pods), Kind::Evacuation, evacuation("web-1", blocked.clone()));
    let good = with_pods([moved("web-1"), pending(why)]);
    assert_eq!(check(reason, message, &good, &facts()), Ok(()));
    let untrue = |view: &ClusterView, facts: &Facts, why: &str| is_untrue(reason, message, view, facts, why);
    untrue(&with_pods([moved("web-1"), of_set("web-2")]), &facts(), "has a node");
    untrue(
        &with_pods([moved("web-1"), pending("0/1 nodes are available: 1 Insufficient cpu.")]),
        &facts(),
        "the scheduler says",
    );
    untrue(&with_pods([moved("web-1"), of_set("web-3")]), &facts(), "names no pod");
    untrue(&with_pods([of_set("web-1"), pending(why)]), &facts(), "still belongs to its ReplicaSet");
    untrue(&with(good.clone(), Kind::Evacuation, evacuation("web-1", json!({}))), &facts(), "is not blocked");
    untrue(&with(good.clone(), Kind::Node, node("n2", false)), &facts(), "1 nodes are schedulable");
    let away = Facts { unserved_since: Some(at(0)), ..facts() };
    untrue(&good, &away, "no workload evacuator leads");
}

#[test]
fn budget_never_blocks_a_deployment_that_nobody_disturbs() {
    let reason = "DisruptionBudgetExhausted";
    let view = with(cluster([moved("web-1")]), Kind::Budget, budget("web", "web", 0));
    let undisturbed = |name: &str| Facts { undisturbed: BTreeSet::from([name.to_owned()]), ..facts() };
    assert_eq!(check(reason, "", &view, &undisturbed("api")), Ok(()));
    is_untrue(reason, "", &view, &undisturbed("web"), "should have got a replacement");
    assert_eq!(check(reason, "", &view, &Facts { was_unserved: true, ..undisturbed("web") }), Ok(()));
    let ahead = Facts { ahead: SignedDuration::from_mins(16), ..undisturbed("web") };
    assert_eq!(check(reason, "", &view, &ahead), Ok(()));
}

#[test]
fn finalizer_of_the_workload_evacuator_does_not_hold_for_long() {
    let finalizer = "evacuation.coordination.k8s.io/instigator_deployment.apps.k8s.io";
    let mut held = evacuation("web-1", json!({}));
    held["metadata"]["finalizers"] = json!([finalizer]);
    held["metadata"]["deletionTimestamp"] = json!(at(900).to_string());
    let view = node_with_pod([(Kind::Evacuation, held)]);
    let message = format!("held by {finalizer}");
    is_untrue("EvacuationHeld", &message, &view, &facts(), "does not remove its finalizer");
    let away = Facts { unserved_since: Some(at(0)), ..facts() };
    assert_eq!(check("EvacuationHeld", &message, &view, &away), Ok(()));
}

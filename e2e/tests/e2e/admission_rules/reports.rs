//! What the policies of the chart reject, also while the webhook is down: reports of users without the right to report for
//! the active evacuator, and owners through which garbage collection would delete an Evacuation. And the webhook's own
//! rule for kubelets.

use haulout_api_types::Evacuation;
use haulout_api_types::evacuators::evacuation_name;
use haulout_e2e::{objects, wait};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::evacuations::evacuation;
use super::{CaseRunner, Expected, LIMIT, NAMESPACE};

const A: &str = "a.example.com";
const OWNERS_BINDING: [&str; 2] =
    ["validatingadmissionpolicybinding", "haulout-system.haulout-evacuation-owners"];

/// A pod with two evacuators on node n1, and the name of its Evacuation.
async fn placed(runner: &CaseRunner<'_>, name: &str) -> (Value, String) {
    let pods: Api<Pod> = Api::namespaced(runner.client.clone(), NAMESPACE);
    let prefix = "evacuation.coordination.k8s.io/priority_";
    let pod = objects::pod(name).namespace(NAMESPACE).node("n1");
    let pod = pod.annotation(&format!("{prefix}a.example.com"), "9");
    let pod = pod.annotation(&format!("{prefix}b.example.com"), "5").build();
    let uid = pods.create(&PostParams::default(), &pod).await.unwrap().metadata.uid.unwrap();
    (evacuation(name, &uid, json!({})), evacuation_name(&uid, name))
}

pub async fn table(runner: &mut CaseRunner<'_>) {
    let (object, name) = placed(runner, "db").await;
    kubelets(runner, &object, &name).await;
    until_enforced(runner, &name).await;
    reports(runner, &name).await;
    owners(runner).await;
    for policy in ["reports", "owners"] {
        let policy = format!("haulout-system.haulout-evacuation-{policy}");
        let checked = wait::eventually("kube-controller-manager has checked the types", LIMIT, async || {
            let status = runner.json(&["validatingadmissionpolicy", &policy]).await["status"].clone();
            Ok(status["observedGeneration"].is_number().then_some(status))
        });
        assert_eq!(checked.await.unwrap()["typeChecking"], json!({}), "{policy}");
    }
}

/// New policies apply a little later.
async fn until_enforced(runner: &CaseRunner<'_>, name: &str) {
    let change = r#"{"status":{"message":"x"}}"#;
    let patch =
        ["patch", "evacuation", name, "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p", change];
    wait::eventually("the policy is enforced", LIMIT, async || {
        let output = runner.kubectl("nils", &[patch.as_slice(), &["--dry-run=server"]].concat(), None).await;
        Ok(output.stderr.contains("denied request").then_some(()))
    })
    .await
    .unwrap();
}

async fn kubelets(runner: &mut CaseRunner<'_>, object: &Value, name: &str) {
    let says = |what: &str| {
        format!(
            "user \"system:node:n2\" may not {what} the Evacuation of pod db in namespace shop: a kubelet may do so only \
             for existing pods of its own node, n2"
        )
    };
    let create = says("create");
    let what = "an Evacuation by the kubelet of another node";
    runner.create(what, "system:node:n2", object, Expected::Rejected(&[&create])).await;
    runner.create("an Evacuation by the pod's kubelet", "system:node:n1", object, Expected::Accepted).await;
    let (update, delete) = (says("update"), says("delete"));
    let change = ["label", "evacuation", name, "-n", NAMESPACE, "note=x"];
    let what = "a change by the kubelet of another node";
    runner.check(what, "system:node:n2", &change, None, Expected::Rejected(&[&update])).await;
    runner.check("a change by the pod's kubelet", "system:node:n1", &change, None, Expected::Accepted).await;
    let change = ["delete", "evacuation", name, "-n", NAMESPACE];
    let what = "a deletion by the kubelet of another node";
    runner.check(what, "system:node:n2", &change, None, Expected::Rejected(&[&delete])).await;
}

async fn reports(runner: &mut CaseRunner<'_>, name: &str) {
    let message = json!({"message": "halfway"});
    let nothing = &["status: no evacuator is active, so there is nothing to report; wait until"];
    let what = "a report before an evacuator is active";
    runner.report(what, "rita", name, &message, Expected::Rejected(nothing)).await;
    runner.write_as_controller(name, json!({"activeEvacuatorClass": A, "failedEvictionCounter": 1})).await;

    // kubectl would fail to read the status first.
    let viewer: Api<Evacuation> = Api::namespaced(runner.cluster.user("vera", &[]).await.unwrap(), NAMESPACE);
    let report = Patch::Merge(json!({ "status": message }));
    let rejected = viewer.patch_status(name, &PatchParams::default(), &report).await;
    let Err(kube::Error::Api(rejected)) = rejected else { panic!("a report by a viewer: {rejected:?}") };
    let reason = "User \"vera\" cannot patch resource \"evacuations/status\"";
    assert!(rejected.code == 403 && rejected.message.contains(reason), "{rejected:?}");
    let may_not = |user: &str| {
        format!(
            "denied request: status: user \"{user}\" may not report for evacuator a.example.com, which is the active one: \
             this requires permission to report for it in namespace shop (verb report on \
             evacuators.evacuation.coordination.k8s.io, name a.example.com); for any other class, wait until it is active"
        )
    };
    let complete = json!({"activeEvacuatorCompleted": true});
    for (what, user) in [
        ("completion of an evacuator that is not one's own", "nils"),
        ("a report for one's own evacuator, which is not active", "rob"),
        ("a report by somebody who may evict the pod", "grace"),
    ] {
        runner
            .report(what, user, name, &complete, Expected::Rejected(&["(Forbidden)", &may_not(user)]))
            .await;
    }
    let only = |field: &str| format!("status.{field}: only the evacuation controller may change it");
    for (what, field, value) in [
        ("another active class", "activeEvacuatorClass", json!("b.example.com")),
        ("no active class", "activeEvacuatorClass", Value::Null),
        ("a counted eviction", "failedEvictionCounter", json!(2)),
        ("the time of an eviction", "lastFailedEvictionTime", json!("2026-01-01T00:00:00Z")),
    ] {
        let expected = &["(Forbidden)", &only(field)];
        runner.report(what, "rita", name, &json!({field: value}), Expected::Rejected(expected)).await;
    }
    let only_grows = Expected::Rejected(&["status.failedEvictionCounter can only grow"]);
    runner.report("no status", "rita", name, &Value::Null, only_grows).await;
    let ahead = |seconds: i64| (Timestamp::now() + SignedDuration::from_secs(seconds)).to_string();
    for (what, change) in [
        (
            "a report",
            json!({"message": "halfway", "evacuationCancellationPolicy": "Forbid", "activeEvacuatorCompleted": false,
                   "evacuationProgressTimestamp": ahead(5), "expectedEvacuationFinishTime": ahead(7200)}),
        ),
        (
            "progress in the future, which the controller corrects",
            json!({"evacuationProgressTimestamp": ahead(86_400)}),
        ),
        ("cancellation is possible again", json!({"evacuationCancellationPolicy": "Allow"})),
        ("the end of the turn", complete),
        ("a report after it", json!({"message": "done"})),
    ] {
        runner.report(what, "rita", name, &change, Expected::Accepted).await;
    }
    let forbid = json!({"evacuationCancellationPolicy": "Forbid"});
    let late = &[
        "denied request: status.evacuationCancellationPolicy: evacuator a.example.com has completed, so it cannot set \
         Forbid any more; set it before or together with status.activeEvacuatorCompleted",
    ];
    runner.report("Forbid after completion", "rita", name, &forbid, Expected::Rejected(late)).await;
    let again = json!({"activeEvacuatorCompleted": false});
    let over = &[
        "denied request: status.activeEvacuatorCompleted: must stay true until another evacuator becomes active",
    ];
    runner.report("its turn again", "rita", name, &again, Expected::Rejected(over)).await;
    runner
        .write_as_controller(
            name,
            json!({"activeEvacuatorClass": "b.example.com", "activeEvacuatorCompleted": false}),
        )
        .await;
    runner.report("a report for the next evacuator", "rob", name, &forbid, Expected::Accepted).await;
    let last = json!({"activeEvacuatorCompleted": true});
    runner.report("completion of one that cannot be cancelled", "rob", name, &last, Expected::Accepted).await;
    runner.report("a report after the last turn", "rob", name, &message, Expected::Accepted).await;
}

async fn owners(runner: &mut CaseRunner<'_>) {
    let maps: Api<ConfigMap> = Api::namespaced(runner.client.clone(), NAMESPACE);
    let map = json!({"metadata": {"name": "lever"}});
    let map = maps.create(&PostParams::default(), &serde_json::from_value(map).unwrap()).await.unwrap();
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "lever", "uid": map.metadata.uid});
    let (object, name) = placed(runner, "owned").await;
    let uid = object["spec"]["podRef"]["uid"].as_str().unwrap().to_owned();
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "name": "owned", "uid": uid});
    let with = |owners: Value| {
        let mut object = object.clone();
        object["metadata"]["ownerReferences"] = owners;
        object
    };
    let rejected = format!(
        "denied request: metadata.ownerReferences: only pod owned with UID {uid} may own this Evacuation, because \
         garbage collection deletes it with its owner: remove all other owners"
    );
    let rejected = &[rejected.as_str()];
    let what = "a ConfigMap as owner of a new Evacuation";
    runner.create(what, "", &with(json!([map])), Expected::Rejected(rejected)).await;
    let mut blocking = pod.clone();
    blocking["blockOwnerDeletion"] = json!(true);
    let what = "its pod as owner that waits for it";
    runner.create(what, "", &with(json!([blocking])), Expected::Rejected(rejected)).await;

    // One from before the policy.
    let binding =
        runner.kubectl("", &[&["get", "-o", "json"], OWNERS_BINDING.as_slice()].concat(), None).await;
    let mut binding: Value = serde_json::from_str(&binding.success().unwrap()).unwrap();
    for field in ["uid", "resourceVersion", "creationTimestamp", "managedFields"] {
        binding["metadata"].as_object_mut().unwrap().remove(field);
    }
    runner.kubectl("", &[&["delete"], OWNERS_BINDING.as_slice()].concat(), None).await.success().unwrap();
    let create = ["create", "-f", "-"];
    let old = with(json!([map, pod]));
    wait::eventually("the policy is not enforced", LIMIT, async || {
        Ok(runner.kubectl("", &create, Some(&old)).await.status.success().then_some(()))
    })
    .await
    .unwrap();
    runner.kubectl("", &create, Some(&binding)).await.success().unwrap();
    let patch =
        |owners: Value| json!({"metadata": {"labels": {"note": "x"}, "ownerReferences": owners}}).to_string();
    let args = |patch: &str| {
        ["patch", "evacuation", &name, "-n", NAMESPACE, "--type=merge", "-p", patch]
            .map(str::to_owned)
            .to_vec()
    };
    let mut renamed = pod.clone();
    renamed["name"] = json!("gone");
    let bad = args(&patch(json!([map, renamed])));
    wait::eventually("the policy is enforced again", LIMIT, async || {
        let args: Vec<_> = bad.iter().map(String::as_str).chain(["--dry-run=server"]).collect();
        Ok(runner.kubectl("", &args, None).await.stderr.contains("denied request").then_some(()))
    })
    .await
    .unwrap();
    let mut blocking = map.clone();
    blocking["blockOwnerDeletion"] = json!(false);
    for (what, owners, accepted) in [
        ("another name of its pod", json!([map, renamed]), false),
        (
            "one more owner",
            json!([map, pod, {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "y"}]),
            false,
        ),
        ("the same owners", json!([map, pod]), true),
        ("a change by the garbage collector", json!([blocking, pod]), true),
        ("only its pod", json!([pod]), true),
        ("the removed owner", json!([map, pod]), false),
        ("no owner", Value::Null, true),
        ("its pod", json!([pod]), true),
    ] {
        let args = args(&patch(owners));
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let expected = if accepted { Expected::Accepted } else { Expected::Rejected(rejected) };
        runner.check(what, "", &args, None, expected).await;
    }
}

/// No replica of the webhook runs.
pub async fn table_without_webhook(runner: &mut CaseRunner<'_>) {
    let all = runner.json(&["evacuations", "-n", NAMESPACE]).await;
    let of = |pod: &str| {
        let mut items = all["items"].as_array().unwrap().iter();
        let found = items.find(|evacuation| evacuation["spec"]["podRef"]["name"] == pod).unwrap();
        found["metadata"]["name"].as_str().unwrap().to_owned()
    };
    let change = ["label", "evacuation", &of("owned"), "-n", NAMESPACE, "more=x"];
    let down = &["failed calling webhook"];
    runner.check("a change while the webhook is down", "", &change, None, Expected::Rejected(down)).await;

    let message = json!({"message": "while the webhook is down"});
    let rejected =
        &["(Forbidden)", "user \"nils\" may not report for evacuator b.example.com, which is the active one"];
    runner
        .report("a report without the right", "nils", &of("db"), &message, Expected::Rejected(rejected))
        .await;
    runner.report("a report with the right", "rob", &of("db"), &message, Expected::Accepted).await;
    let owner = json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "lever", "uid": "x"}]);
    let patch = json!({"metadata": {"ownerReferences": owner}}).to_string();
    let args = ["patch", "evacuation", &of("owned"), "-n", NAMESPACE, "--type=merge", "-p", &patch];
    let rejected = &["denied request: metadata.ownerReferences: only pod owned with UID"];
    runner.check("a ConfigMap as owner", "", &args, None, Expected::Rejected(rejected)).await;
}

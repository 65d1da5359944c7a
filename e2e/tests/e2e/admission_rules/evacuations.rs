//! Evacuations: defaults, who may write them, and what is immutable.

use haulout_api_types::evacuators::evacuation_name;
use haulout_api_types::{Evacuation, instigators};
use haulout_e2e::objects;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};

use super::node_maintenances::{maintenance, named};
use super::{CaseRunner, Expected, LIMIT, NAMESPACE, USER_GRACE};

const OTHER_UID: &str = "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11";

pub fn evacuation(pod: &str, uid: &str, rest: Value) -> Value {
    let mut object = json!({
        "apiVersion": "evacuation.coordination.k8s.io/v1alpha1", "kind": "Evacuation",
        "metadata": {"name": evacuation_name(uid, pod), "namespace": NAMESPACE},
        "spec": {"podRef": {"name": pod, "uid": uid}}
    });
    merge(&mut object, rest);
    object
}

fn merge(object: &mut Value, patch: Value) {
    match (object, patch) {
        (Value::Object(object), Value::Object(patch)) => {
            for (key, value) in patch {
                match value {
                    Value::Null => drop(object.remove(&key)),
                    value => merge(object.entry(key).or_insert(Value::Null), value),
                }
            }
        }
        (object, patch) => *object = patch,
    }
}

pub async fn table(runner: &mut CaseRunner<'_>) {
    let uid = async |pod: &str| runner.pod(pod).await.metadata.uid.unwrap();
    let (web_1, web_2, old) = (uid("web-1").await, uid("web-2").await, uid("old").await);
    creation(runner, &web_1, &old).await;
    evacuation_of_a_new_pod(runner).await;
    permissions(runner, &web_2).await;
    let of_web_1 = evacuation_name(&web_1, "web-1");
    runner.write_as_controller(&of_web_1, json!({"activeEvacuatorClass": "a.example.com"})).await;
    let forbid = json!({"evacuationCancellationPolicy": "Forbid"});
    runner.report("an evacuator that cannot stop", "rita", &of_web_1, &forbid, Expected::Accepted).await;
    deletion_warnings(runner).await;
    deletion(runner, &evacuation_name(&web_1, "web-1"), &evacuation_name(&web_2, "web-2")).await;
}

async fn creation(runner: &mut CaseRunner<'_>, web_1: &str, old: &str) {
    let web = |rest: Value| evacuation("web-1", web_1, rest);
    let wrong_name = format!("{web_1}-web");
    let name = evacuation_name(web_1, "web-1");
    let foreign = json!({"spec": {"evacuators": [{"evacuatorClass": "z.example.com", "priority": 9}]}});
    for (what, object, message) in [
        (
            "an Evacuation of a missing pod",
            evacuation("gone", OTHER_UID, json!({})),
            "spec.podRef.name: there is no pod gone in namespace shop",
        ),
        (
            "an Evacuation of an earlier pod",
            evacuation("web-1", OTHER_UID, json!({})),
            "spec.podRef.uid: pod web-1 in namespace shop has another UID",
        ),
        (
            "a generated name",
            web(json!({"metadata": {"name": null, "generateName": format!("{web_1}-web-")}})),
            "metadata.generateName is not supported",
        ),
        (
            "another name",
            web(json!({"metadata": {"name": wrong_name}})),
            "metadata.name must be <spec.podRef.uid>-",
        ),
        (
            "an active class from the beginning",
            web(json!({"status": {"activeEvacuatorClass": "a.example.com"}})),
            "status.activeEvacuatorClass: must be empty in a new Evacuation",
        ),
        (
            "Forbid from the beginning",
            web(json!({"status": {"evacuationCancellationPolicy": "Forbid"}})),
            "status.evacuationCancellationPolicy: must be Allow or absent in a new Evacuation",
        ),
        (
            "evacuators that are not the pod's",
            web(foreign),
            "spec.evacuators: must match the evacuators of pod web-1: expected a.example.com (5), got z.example.com \
             (9)",
        ),
    ] {
        runner.create(what, "", &object, Expected::Rejected(&[message])).await;
    }
    let mine = web(json!({"metadata": {"labels": {"app": "mine", "team": "red"}, "finalizers": [
        "evacuation.coordination.k8s.io/instigator_test.example.com"]}}));
    runner.create("a good Evacuation", "", &mine, Expected::Accepted).await;
    let made = runner.json(&["evacuation", &name, "-n", NAMESPACE]).await;
    assert_eq!(
        made["metadata"]["labels"],
        json!({"app": "web", "team": "red"}),
        "labels merged, the pod's win"
    );
    assert_eq!(
        made["metadata"]["annotations"],
        json!({"argocd.argoproj.io/compare-options": "IgnoreExtraneous", "argocd.argoproj.io/sync-options": "Prune=false"})
    );
    assert_eq!(made["spec"]["evacuators"], json!([{"evacuatorClass": "a.example.com", "priority": 5}]));
    assert_eq!(made["spec"]["progressDeadlineSeconds"], 1800);

    let ignored = "annotation evacuation.coordination.k8s.io/priority_a.example.com: the priority must be a whole number";
    let of_old = evacuation("old", old, json!({}));
    runner.create("a pod with a bad annotation", "", &of_old, Expected::Warned(ignored)).await;
    let made = runner.json(&["evacuation", &evacuation_name(old, "old"), "-n", NAMESPACE]).await;
    assert_eq!(made["spec"]["evacuators"], json!([{"evacuatorClass": "b.example.com", "priority": 7}]));
}

/// The webhook's watch lags a little, so it reads the pod from the API server.
async fn evacuation_of_a_new_pod(runner: &CaseRunner<'_>) {
    let pods: Api<Pod> = Api::namespaced(runner.client.clone(), NAMESPACE);
    let evacuations: Api<Evacuation> = Api::namespaced(runner.client.clone(), NAMESPACE);
    let params = PostParams::default();
    for number in 0..20 {
        let name = format!("young-{number}");
        let pod = objects::pod(&name).namespace(NAMESPACE).label("app", "young").build();
        let pod = pods.create(&params, &pod).await.unwrap();
        let new = evacuation(&name, pod.metadata.uid.as_deref().unwrap(), json!({}));
        let made = evacuations.create(&params, &serde_json::from_value(new).unwrap()).await.unwrap();
        assert_eq!(json!(made.metadata.labels), json!({"app": "young"}), "{name}");
    }
}

async fn permissions(runner: &mut CaseRunner<'_>, web_2: &str) {
    let new = evacuation("web-2", web_2, json!({}));
    let name = evacuation_name(web_2, "web-2");
    for (user, message) in [
        ("nils", "user \"nils\" may not create the Evacuation of pod web-2 in namespace shop"),
        ("evi", "user \"evi\" may not create the Evacuation of pod web-2 in namespace shop"),
    ] {
        let what = "an Evacuation of a pod one may not remove";
        runner.create(what, user, &new, Expected::Rejected(&[message])).await;
    }
    let elsewhere = evacuation("web-2", web_2, json!({"metadata": {"namespace": "default"}}));
    runner
        .create(
            "an Evacuation in a namespace where one may do nothing",
            "dora",
            &elsewhere,
            Expected::Rejected(&[
                "user \"dora\" may not create the Evacuation of pod web-2 in namespace default",
            ]),
        )
        .await;
    runner.create("an Evacuation of a pod one may delete", "dora", &new, Expected::Accepted).await;

    let label = ["label", "evacuation", &name, "-n", NAMESPACE, "--overwrite", "note=x"];
    let rejected =
        &["user \"nils\" may not update the Evacuation of pod web-2", "permission to delete the pod"];
    runner
        .check("a change by somebody without permission", "nils", &label, None, Expected::Rejected(rejected))
        .await;
    for user in ["dora", USER_GRACE] {
        runner.check("a change by somebody with permission", user, &label, None, Expected::Accepted).await;
    }
}

/// Deleting an Evacuation does not cancel it while instigators remain: the warning lists them.
async fn deletion_warnings(runner: &mut CaseRunner<'_>) {
    let drain = maintenance("placed-drain", "Drain", named(&["n3"]));
    runner.create("a maintenance", "", &drain, Expected::Accepted).await;
    let pods: Api<Pod> = Api::namespaced(runner.client.clone(), NAMESPACE);
    let pod = objects::pod("placed").namespace(NAMESPACE).node("n3").build();
    let uid = pods.create(&PostParams::default(), &pod).await.unwrap().metadata.uid.unwrap();
    let finalizers = ["nodemaintenance.k8s.io", "descheduler.example.com"].map(instigators::finalizer);
    let new = evacuation("placed", &uid, json!({"metadata": {"finalizers": finalizers}}));
    runner.create("an Evacuation with two instigators", "", &new, Expected::Accepted).await;
    let name = evacuation_name(&uid, "placed");
    let delete = ["delete", "evacuation", "-n", NAMESPACE, "--wait=false", &name];
    runner.until_warned(&delete, None, "complete or delete NodeMaintenance placed-drain").await;
    for part in [
        "instigator nodemaintenance.k8s.io still requests the evacuation of pod placed, so it continues; to cancel \
         it, complete or delete NodeMaintenance placed-drain, or label the pod cluster.x-k8s.io/drain=skip",
        "instigator descheduler.example.com still requests the evacuation of pod placed, so it continues; to cancel \
         it, remove the finalizer evacuation.coordination.k8s.io/instigator_descheduler.example.com",
    ] {
        runner.check("a deletion of one that is wanted", "", &delete, None, Expected::Warned(part)).await;
    }
    let delete = ["delete", "nodemaintenance", "placed-drain"];
    runner.check("the end of the maintenance", "", &delete, None, Expected::Accepted).await;
}

async fn deletion(runner: &mut CaseRunner<'_>, web_1: &str, web_2: &str) {
    let strip = |finalizers: Value| json!({"metadata": {"finalizers": finalizers}}).to_string();
    let patch = |patch: String| {
        ["patch", "evacuation", web_1, "-n", NAMESPACE, "--type=merge", "-p", &patch].map(str::to_owned)
    };
    for (what, finalizers, expected) in [
        (
            "the last instigator of one that cannot be cancelled",
            json!(null),
            Expected::Rejected(
                &[
                    "Forbid, so its last instigator finalizer cannot be removed while pod web-1 exists",
                    "ask the owner of evacuator a.example.com",
                ][..],
            ),
        ),
        (
            "another instigator in its place",
            json!([instigators::finalizer("other.example.com")]),
            Expected::Accepted,
        ),
    ] {
        let args = patch(strip(finalizers));
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        runner.check(what, "", &args, None, expected).await;
    }
    let [web_1, web_2] =
        [web_1, web_2].map(|name| ["delete", "evacuation", "-n", NAMESPACE, "--wait=false", name]);
    let rejected =
        &["user \"nils\" may not delete the Evacuation of pod web-2", "permission to delete the pod"];
    runner.check("a deletion without permission", "nils", &web_2, None, Expected::Rejected(rejected)).await;
    runner.check("a deletion with permission", "dora", &web_2, None, Expected::Accepted).await;

    let forbidden = &[
        "Forbid, so it cannot be deleted while pod web-1 exists",
        "ask the owner of evacuator a.example.com",
    ];
    runner.check("a deletion that is forbidden", "", &web_1, None, Expected::Rejected(forbidden)).await;
    let pod = ["delete", "pod", "web-1", "-n", NAMESPACE, "--grace-period=0", "--force", "--wait=false"];
    runner.kubectl("", &pod, None).await.success().unwrap();
    let pods: Api<Pod> = Api::namespaced(runner.client.clone(), NAMESPACE);
    haulout_e2e::wait::gone(pods, "web-1", LIMIT).await.unwrap();
    runner.check("a deletion after the pod has gone", "evi", &web_1, None, Expected::Accepted).await;
}

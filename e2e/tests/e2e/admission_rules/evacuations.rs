//! Evacuations: what they are given, who may write them, and what stays.

use haulout_api_types::evacuators::evacuation_name;
use haulout_api_types::{Evacuation, instigators};
use haulout_e2e::{objects, service};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::node_maintenances::{maintenance, named};
use super::{Bench, Expected, GRACE, LIMIT, NAMESPACE};

const OTHER_UID: &str = "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11";

fn evacuation(pod: &str, uid: &str, rest: Value) -> Value {
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

pub async fn table(bench: &mut Bench<'_>) {
    let uid = async |pod: &str| bench.pod(pod).await.metadata.uid.unwrap();
    let (web_1, web_2, old) = (uid("web-1").await, uid("web-2").await, uid("old").await);
    creation(bench, &web_1, &old).await;
    of_a_moments_old_pod(bench).await;
    rights(bench, &web_2).await;
    status(bench, &evacuation_name(&web_1, "web-1")).await;
    still_wanted(bench).await;
    removal(bench, &evacuation_name(&web_1, "web-1"), &evacuation_name(&web_2, "web-2")).await;
}

async fn creation(bench: &mut Bench<'_>, web_1: &str, old: &str) {
    let web = |rest: Value| evacuation("web-1", web_1, rest);
    let wrong_name = format!("{web_1}-web");
    let name = evacuation_name(web_1, "web-1");
    let foreign = json!({"spec": {"evacuators": [{"evacuatorClass": "z.example.com", "priority": 9}]}});
    for (what, object, message) in [
        (
            "an Evacuation of no pod",
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
            "spec.evacuators: must be those of pod web-1, which are a.example.com (5), and not z.example.com (9)",
        ),
    ] {
        bench.create(what, "", &object, Expected::Refused(&[message])).await;
    }
    let mine = web(json!({"metadata": {"labels": {"app": "mine", "team": "red"}, "finalizers": [
        "evacuation.coordination.k8s.io/instigator_test.example.com"]}}));
    bench.create("a good Evacuation", "", &mine, Expected::Fine).await;
    let made = bench.json(&["evacuation", &name, "-n", NAMESPACE]).await;
    assert_eq!(
        made["metadata"]["labels"],
        json!({"app": "web", "team": "red"}),
        "labels merged, the pod's win"
    );
    assert_eq!(made["spec"]["evacuators"], json!([{"evacuatorClass": "a.example.com", "priority": 5}]));
    assert_eq!(made["spec"]["progressDeadlineSeconds"], 1800);

    let ignored = "annotation evacuation.coordination.k8s.io/priority_a.example.com: the priority must be a whole number";
    let of_old = evacuation("old", old, json!({}));
    bench.create("a pod with a bad annotation", "", &of_old, Expected::Warned(ignored)).await;
    let made = bench.json(&["evacuation", &evacuation_name(old, "old"), "-n", NAMESPACE]).await;
    assert_eq!(made["spec"]["evacuators"], json!([{"evacuatorClass": "b.example.com", "priority": 7}]));
}

/// The webhook's watch is some moments behind, and the pod is looked up past it.
async fn of_a_moments_old_pod(bench: &Bench<'_>) {
    let pods: Api<Pod> = Api::namespaced(bench.client.clone(), NAMESPACE);
    let evacuations: Api<Evacuation> = Api::namespaced(bench.client.clone(), NAMESPACE);
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

async fn rights(bench: &mut Bench<'_>, web_2: &str) {
    let new = evacuation("web-2", web_2, json!({}));
    let name = evacuation_name(web_2, "web-2");
    for (user, message) in [
        ("nils", "user \"nils\" may neither delete pod web-2 in namespace shop nor evict it"),
        ("evi", "user \"evi\" may neither delete pod web-2 in namespace shop nor evict it"),
    ] {
        let what = "an Evacuation of a pod one may not remove";
        bench.create(what, user, &new, Expected::Refused(&[message])).await;
    }
    let elsewhere = evacuation("web-2", web_2, json!({"metadata": {"namespace": "default"}}));
    bench
        .create(
            "an Evacuation in a namespace where one may do nothing",
            "dora",
            &elsewhere,
            Expected::Refused(&[
                "user \"dora\" may neither delete pod web-2 in namespace default nor evict it",
            ]),
        )
        .await;
    bench.create("an Evacuation of a pod one may delete", "dora", &new, Expected::Fine).await;

    let label = ["label", "evacuation", &name, "-n", NAMESPACE, "--overwrite", "note=x"];
    let refused = &["user \"nils\" may neither delete pod web-2", "may therefore not update its Evacuation"];
    bench
        .check("a change by somebody without rights", "nils", &label, None, Expected::Refused(refused))
        .await;
    for user in ["dora", GRACE] {
        bench.check("a change by somebody with rights", user, &label, None, Expected::Fine).await;
    }
}

async fn status(bench: &mut Bench<'_>, name: &str) {
    let patch = |status: Value| json!({ "status": status }).to_string();
    let ahead = |seconds: i64| (Timestamp::now() + SignedDuration::from_secs(seconds)).to_string();
    for (what, change, expected) in [
        (
            "another active class",
            json!({"activeEvacuatorClass": "a.example.com"}),
            Expected::Refused(&["status.activeEvacuatorClass: only the evacuation controller may change it"]),
        ),
        (
            "a counted eviction",
            json!({"failedEvictionCounter": 1}),
            Expected::Refused(&[
                "status.failedEvictionCounter: only the evacuation controller may change it",
            ]),
        ),
        (
            "both at once",
            json!({"failedEvictionCounter": 1, "activeEvacuatorClass": "a.example.com"}),
            Expected::Refused(&["status.failedEvictionCounter: only", "status.activeEvacuatorClass: only"]),
        ),
        (
            "progress in the future",
            json!({"evacuationProgressTimestamp": ahead(86_400)}),
            Expected::Refused(&[
                "status.evacuationProgressTimestamp: ",
                "in the future, and at most 30 s are allowed",
            ]),
        ),
        (
            "progress on a clock that is a little ahead",
            json!({"evacuationProgressTimestamp": ahead(5)}),
            Expected::Fine,
        ),
        (
            "what an evacuator has to say",
            json!({"message": "halfway", "evacuationCancellationPolicy": "Forbid", "activeEvacuatorCompleted": false,
                   "expectedEvacuationFinishTime": ahead(7200)}),
            Expected::Fine,
        ),
    ] {
        let patch = patch(change);
        let args = [
            "patch",
            "evacuation",
            name,
            "-n",
            NAMESPACE,
            "--subresource=status",
            "--type=merge",
            "-p",
            &patch,
        ];
        // No right on the pod is needed for it.
        bench.check(what, "nils", &args, None, expected).await;
    }
    let account =
        bench.cluster.service_account_kubeconfig(service::NAMESPACE, "haulout-evacuation-controller");
    let controller = bench.cluster.client_from(&account.await.unwrap(), "controller").await.unwrap();
    let own = json!({"status": {"activeEvacuatorClass": "a.example.com", "failedEvictionCounter": 1}});
    Api::<Evacuation>::namespaced(controller, NAMESPACE)
        .patch_status(name, &PatchParams::default(), &Patch::Merge(own))
        .await
        .expect("the evacuation controller may write what is its own");
}

/// Deleting cancels nothing while somebody wants it: who deletes is told who that is.
async fn still_wanted(bench: &mut Bench<'_>) {
    let drain = maintenance("placed-drain", "Drain", named(&["n3"]));
    bench.create("a maintenance", "", &drain, Expected::Fine).await;
    let pods: Api<Pod> = Api::namespaced(bench.client.clone(), NAMESPACE);
    let pod = objects::pod("placed").namespace(NAMESPACE).node("n3").build();
    let uid = pods.create(&PostParams::default(), &pod).await.unwrap().metadata.uid.unwrap();
    let finalizers = ["nodemaintenance.k8s.io", "descheduler.example.com"].map(instigators::finalizer);
    let new = evacuation("placed", &uid, json!({"metadata": {"finalizers": finalizers}}));
    bench.create("an Evacuation with two instigators", "", &new, Expected::Fine).await;
    let name = evacuation_name(&uid, "placed");
    let delete = ["delete", "evacuation", "-n", NAMESPACE, "--wait=false", &name];
    bench.until_warned(&delete, None, "complete or delete NodeMaintenance placed-drain").await;
    for part in [
        "nodemaintenance.k8s.io still wants pod placed to leave, so the evacuation goes on; to cancel it, complete or delete NodeMaintenance placed-drain, or label the pod cluster.x-k8s.io/drain=skip",
        "descheduler.example.com still wants pod placed to leave, so the evacuation goes on; to cancel it, remove the finalizer evacuation.coordination.k8s.io/instigator_descheduler.example.com",
    ] {
        bench.check("a removal of one that is wanted", "", &delete, None, Expected::Warned(part)).await;
    }
    let delete = ["delete", "nodemaintenance", "placed-drain"];
    bench.check("the end of the maintenance", "", &delete, None, Expected::Fine).await;
}

async fn removal(bench: &mut Bench<'_>, web_1: &str, web_2: &str) {
    let strip = |finalizers: Value| json!({"metadata": {"finalizers": finalizers}}).to_string();
    let patch = |patch: String| {
        ["patch", "evacuation", web_1, "-n", NAMESPACE, "--type=merge", "-p", &patch].map(str::to_owned)
    };
    for (what, finalizers, expected) in [
        (
            "the last instigator of one that cannot be cancelled",
            json!(null),
            Expected::Refused(
                &[
                    "Forbid, so the finalizer of its last instigator cannot be removed while pod web-1 exists",
                    "ask a.example.com otherwise",
                ][..],
            ),
        ),
        (
            "another instigator in its place",
            json!([instigators::finalizer("other.example.com")]),
            Expected::Fine,
        ),
    ] {
        let args = patch(strip(finalizers));
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        bench.check(what, "", &args, None, expected).await;
    }
    let [web_1, web_2] =
        [web_1, web_2].map(|name| ["delete", "evacuation", "-n", NAMESPACE, "--wait=false", name]);
    let refused = &["user \"nils\" may neither delete pod web-2", "may therefore not delete its Evacuation"];
    bench.check("a removal without rights", "nils", &web_2, None, Expected::Refused(refused)).await;
    bench.check("a removal with rights", "dora", &web_2, None, Expected::Fine).await;

    let forbidden =
        &["Forbid, so it cannot be deleted while pod web-1 exists", "ask a.example.com otherwise"];
    bench.check("a removal that is forbidden", "", &web_1, None, Expected::Refused(forbidden)).await;
    let pod = ["delete", "pod", "web-1", "-n", NAMESPACE, "--grace-period=0", "--force", "--wait=false"];
    bench.kubectl("", &pod, None).await.success().unwrap();
    let pods: Api<Pod> = Api::namespaced(bench.client.clone(), NAMESPACE);
    haulout_e2e::wait::gone(pods, "web-1", LIMIT).await.unwrap();
    bench.check("a removal after the pod has gone", "evi", &web_1, None, Expected::Fine).await;
}

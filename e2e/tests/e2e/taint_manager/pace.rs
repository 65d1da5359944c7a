//! How fast pods leave, and that one node's thousands do not hold up another's few; and tolerations that compare numbers.

use std::time::Duration;

use haulout_e2e::etcd::Etcd;
use haulout_e2e::{Mark, Requests, objects, wait};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod, Toleration};
use kube::Api;
use kube::api::PostParams;
use serde_json::json;

use super::world::{HOLD, NAMESPACE, SOON, World, at_least, pod, taint};

const DELETIONS: &str = "taint_eviction_controller_pod_deletions_total";
/// How many pods the large node has.
const MANY: usize = 2_000;
/// How many pods may leave in a second.
const RATE: u32 = 5;

impl World {
    /// The deletions of pods with such names that the taint manager has asked for.
    fn deletions(&self, since: Mark, names: &[&str]) -> Requests {
        let all = self.cluster.requests_since(since).unwrap().by_user_agent("haulout-taint-manager/");
        let meant = |name: &str| names.iter().any(|start| name.starts_with(start));
        all.resource("pods", "").verb("delete").only(|request| meant(&request.name))
    }
}

pub async fn no_more_pods_leave_in_a_second_than_the_limit_allows(world: &World) {
    let service = world.serve(&["--max-per-second", &RATE.to_string()]).await;
    world.node("paced").await;
    let names: Vec<_> = (0..4 * RATE).map(|n| format!("paced-{n}")).collect();
    futures::future::join_all(names.iter().map(|name| world.run(pod(name, "paced").finalizer(HOLD)))).await;
    let mark = world.cluster.requests_mark().unwrap();
    let begun = Timestamp::now();
    world.taint("paced", taint("k")).await;
    for name in &names {
        world.leaves(name).await;
    }
    // A second's worth goes at once, and the others one by one: nobody is early, however late the machine is.
    let mut asked: Vec<_> =
        world.deletions(mark, &["paced-"]).iter().map(|request| request.received).collect();
    asked.sort_unstable();
    assert_eq!(asked.len(), names.len());
    for (n, at) in (0..).zip(asked) {
        let earliest = Duration::from_secs(1) * u32::saturating_sub(n + 1, RATE) / RATE;
        let earliest = begun.saturating_add(earliest).unwrap();
        assert!(at >= earliest, "deletion {n} was asked for at {at} and not after {earliest}");
    }
    service.stop(SOON).unwrap();
}

pub async fn tolerations_may_compare_numbers(world: &World) {
    let service = world.serve(&[]).await;
    world.node("rated").await;
    let cases = [
        ("above", "Gt", "400", true),
        ("not-above", "Gt", "500", false),
        ("below", "Lt", "600", true),
        ("not-below", "Lt", "400", false),
    ];
    for (name, operator, value, _) in cases {
        world.run(pod(name, "rated").toleration(rating(operator, value)).finalizer(HOLD)).await;
    }
    world.taint("rated", json!([{"key": "rating", "value": "500", "effect": "NoExecute"}])).await;
    for (name, ..) in cases.iter().filter(|(.., stays)| !stays) {
        world.leaves(name).await;
    }
    at_least(&service, DELETIONS, 2.0).await;
    for (name, ..) in cases.iter().filter(|(.., stays)| *stays) {
        world.stays(name).await;
    }
    service.stop(SOON).unwrap();
}

/// Where the API server accepts no such toleration, there is nothing for the taint manager to do.
pub async fn tolerations_that_compare_numbers_are_rejected(world: &World) {
    for operator in ["Gt", "Lt"] {
        let pod = pod("rated", "rated").namespace(NAMESPACE).toleration(rating(operator, "400")).build();
        let error = world.pods().create(&PostParams::default(), &pod).await.unwrap_err();
        let kube::Error::Api(status) = error else { panic!("{error}") };
        assert_eq!((status.code, status.reason.as_str()), (422, "Invalid"), "{status:?}");
        let causes = status.details.unwrap().causes;
        assert!(causes.iter().any(|cause| cause.field == "spec.tolerations[0].operator"), "{causes:?}");
    }
}

fn rating(operator: &str, value: &str) -> Toleration {
    Toleration {
        key: Some("rating".into()),
        operator: Some(operator.into()),
        value: Some(value.into()),
        effect: Some("NoExecute".into()),
        toleration_seconds: None,
    }
}

pub async fn a_node_with_thousands_of_pods_does_not_delay_another(world: &World) {
    let nodes: Api<Node> = Api::all(world.client.clone());
    nodes.create(&PostParams::default(), &objects::node("large").unmanaged().build()).await.unwrap();
    world.node("small").await;
    world.run(pod("lone", "small").finalizer(HOLD)).await;
    // Copies of it, without its finalizer.
    let template = world.pods().get("lone").await.unwrap();
    let copies = (0..MANY).map(|n| {
        let mut copy: Pod = template.clone();
        let name = format!("many-{n}");
        copy.metadata.uid = Some(format!("{n:08x}-0000-4000-8000-000000000000"));
        copy.metadata.name = Some(name.clone());
        (copy.metadata.resource_version, copy.metadata.finalizers) = (None, None);
        copy.spec.as_mut().unwrap().node_name = Some("large".into());
        (Etcd::pod_key(NAMESPACE, &name), serde_json::to_vec(&copy).unwrap())
    });
    world.cluster.etcd().unwrap().put(copies.collect()).await.unwrap();
    let service = world.serve(&[]).await;
    let mark = world.cluster.requests_mark().unwrap();
    world.taint("large", taint("k")).await;
    at_least(&service, DELETIONS, 1.0).await;
    world.taint("small", taint("k")).await;
    let tainted = Timestamp::now();
    world.leaves("lone").await;
    // By what the service counts, each after its answer: to read the audit log again and again would slow it down.
    let all = f64::from(u32::try_from(MANY + 1).unwrap());
    wait::eventually("all have been asked to end", 5 * SOON, async || {
        Ok((service.metric(DELETIONS).await? >= all).then_some(()))
    })
    .await
    .unwrap();
    let asked = world.deletions(mark, &["many-", "lone"]);
    assert!(asked.count() > MANY, "{}", asked.count());
    let lone = asked.iter().find(|request| request.name == "lone").unwrap().received;
    let left = asked.only(|request| request.received > tainted);
    let before = left.only(|request| request.received < lone).count();
    println!("{before} of {} left before the one of the other node", left.count());
    assert!(left.count() > MANY / 2, "the large node was empty too soon to tell: {} were left", left.count());
    assert!(before < left.count() / 4, "{before} of {} were asked before", left.count());
    service.stop(SOON).unwrap();
}

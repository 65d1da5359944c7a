//! The deletion rate, that a large node does not delay a small one, and tolerations that compare numbers.

use std::time::Duration;

use haulout_e2e::etcd::Etcd;
use haulout_e2e::{Mark, Requests, objects, wait};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod, Toleration};
use kube::Api;
use kube::api::PostParams;
use serde_json::json;

use super::test_env::{HOLD, NAMESPACE, SOON, TestEnv, at_least, pod, taint};

const DELETIONS: &str = "taint_eviction_controller_pod_deletions_total";
/// Number of pods on the large node.
const MANY: usize = 2_000;
/// Maximum number of pods that leave per second.
const RATE: u32 = 5;

impl TestEnv {
    /// The taint manager's deletions of pods with such names.
    fn deletions(&self, since: Mark, names: &[&str]) -> Requests {
        let all = self.cluster.requests_since(since).unwrap().by_user_agent("haulout-taint-manager/");
        let meant = |name: &str| names.iter().any(|start| name.starts_with(start));
        all.resource("pods", "").verb("delete").only(|request| meant(&request.name))
    }
}

pub async fn deletion_rate_limit_is_enforced(env: &TestEnv) {
    let service = env.serve(&["--max-per-second", &RATE.to_string()]).await;
    env.node("paced").await;
    let names: Vec<_> = (0..4 * RATE).map(|n| format!("paced-{n}")).collect();
    futures::future::join_all(names.iter().map(|name| env.run(pod(name, "paced").finalizer(HOLD)))).await;
    let mark = env.cluster.requests_mark().unwrap();
    let begun = Timestamp::now();
    env.taint("paced", taint("k")).await;
    for name in &names {
        env.leaves(name).await;
    }
    // One second's worth is deleted at once, and the others one by one. No deletion is early, however slow the
    // machine is.
    let mut asked: Vec<_> = env.deletions(mark, &["paced-"]).iter().map(|request| request.received).collect();
    asked.sort_unstable();
    assert_eq!(asked.len(), names.len());
    for (n, at) in (0..).zip(asked) {
        let earliest = Duration::from_secs(1) * u32::saturating_sub(n + 1, RATE) / RATE;
        let earliest = begun.saturating_add(earliest).unwrap();
        assert!(at >= earliest, "deletion {n} was at {at}, before {earliest}");
    }
    service.stop(SOON).unwrap();
}

pub async fn numeric_tolerations_are_evaluated(env: &TestEnv) {
    let service = env.serve(&[]).await;
    env.node("rated").await;
    let cases = [
        ("above", "Gt", "400", true),
        ("not-above", "Gt", "500", false),
        ("below", "Lt", "600", true),
        ("not-below", "Lt", "400", false),
    ];
    for (name, operator, value, _) in cases {
        env.run(pod(name, "rated").toleration(rating(operator, value)).finalizer(HOLD)).await;
    }
    env.taint("rated", json!([{"key": "rating", "value": "500", "effect": "NoExecute"}])).await;
    for (name, ..) in cases.iter().filter(|(.., stays)| !stays) {
        env.leaves(name).await;
    }
    at_least(&service, DELETIONS, 2.0).await;
    for (name, ..) in cases.iter().filter(|(.., stays)| *stays) {
        env.stays(name).await;
    }
    service.stop(SOON).unwrap();
}

/// If the API server rejects such tolerations, the taint manager never receives them.
pub async fn numeric_tolerations_are_rejected_by_the_api_server(env: &TestEnv) {
    for operator in ["Gt", "Lt"] {
        let pod = pod("rated", "rated").namespace(NAMESPACE).toleration(rating(operator, "400")).build();
        let error = env.pods().create(&PostParams::default(), &pod).await.unwrap_err();
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

pub async fn large_node_does_not_delay_another_node(env: &TestEnv) {
    let nodes: Api<Node> = Api::all(env.client.clone());
    nodes.create(&PostParams::default(), &objects::node("large").unmanaged().build()).await.unwrap();
    env.node("small").await;
    env.run(pod("lone", "small").finalizer(HOLD)).await;
    // Copies of it, without its finalizer.
    let template = env.pods().get("lone").await.unwrap();
    let copies = (0..MANY).map(|n| {
        let mut copy: Pod = template.clone();
        let name = format!("many-{n}");
        copy.metadata.uid = Some(format!("{n:08x}-0000-4000-8000-000000000000"));
        copy.metadata.name = Some(name.clone());
        (copy.metadata.resource_version, copy.metadata.finalizers) = (None, None);
        copy.spec.as_mut().unwrap().node_name = Some("large".into());
        (Etcd::pod_key(NAMESPACE, &name), serde_json::to_vec(&copy).unwrap())
    });
    env.cluster.etcd().unwrap().put(copies.collect()).await.unwrap();
    let service = env.serve(&[]).await;
    let mark = env.cluster.requests_mark().unwrap();
    env.taint("large", taint("k")).await;
    at_least(&service, DELETIONS, 1.0).await;
    env.taint("small", taint("k")).await;
    let tainted = Timestamp::now();
    env.leaves("lone").await;
    // From the service's metrics, which count each answer: reading the audit log repeatedly would slow the machine
    // down.
    let all = f64::from(u32::try_from(MANY + 1).unwrap());
    wait::eventually("all pods are deleted", 5 * SOON, async || {
        Ok((service.metric(DELETIONS).await? >= all).then_some(()))
    })
    .await
    .unwrap();
    let asked = env.deletions(mark, &["many-", "lone"]);
    assert!(asked.count() > MANY, "{}", asked.count());
    let lone = asked.iter().find(|request| request.name == "lone").unwrap().received;
    let left = asked.only(|request| request.received > tainted);
    let before = left.only(|request| request.received < lone).count();
    println!("{before} of {} were deleted before the pod of the other node", left.count());
    assert!(left.count() > MANY / 2, "the large node was empty too soon: {} pods were left", left.count());
    assert!(before < left.count() / 4, "{before} of {} were deleted before", left.count());
    service.stop(SOON).unwrap();
}

//! The taint manager during faults: nodes that stop reporting, replicas that die, rejected deletions, and outages of
//! the API server.

use std::time::Duration;

use haulout_e2e::{Cluster, Component, Service, objects, wait};
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use rustix::process::Signal;
use serde_json::json;

use super::test_env::{HOLD, NAMESPACE, SOON, TestEnv, at_least, pod, taint};

const NOT_READY: &str = "node.kubernetes.io/not-ready";
const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
const PENDING_PODS: &str = "haulout_taint_manager_pending_pods";

impl TestEnv {
    /// Waits until the node lifecycle controller has set this taint on the node, with its time.
    async fn tainted(&self, node: &str, key: &str) {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let tainted = |node: &Node| {
            let mut taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
            taints.any(|one| one.key == key && one.effect == "NoExecute" && one.time_added.is_some())
        };
        wait::present(nodes, node, key, 2 * SOON, tainted).await.unwrap();
    }
}

#[tokio::test]
async fn pods_on_unreachable_nodes_are_deleted_stuck_ones_by_force() {
    // A heartbeat every four seconds, with a grace period of three of them.
    let monitor = ["--node-monitor-grace-period=12s", "--node-monitor-period=1s"];
    let cluster = Cluster::builder().name("taint-silence").taint_eviction(false);
    let cluster = cluster.extra_args(Component::KwokNodes, ["--node-lease-duration-seconds=16"]);
    let env = TestEnv::boot(cluster.extra_args(Component::ControllerManager, monitor)).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yaml");
    let rules = format!("rules:\n- {{key: {UNREACHABLE}, action: Delete, forceDeleteAfter: 120s}}\n");
    std::fs::write(&file, rules).unwrap();
    let service = env.serve(&["--policy", &file.display().to_string()]).await;
    env.node("silent").await;
    // If no node at all is healthy, the node lifecycle controller assumes its own fault and taints none.
    env.node("healthy").await;
    env.run(pod("impatient", "silent").tolerates(UNREACHABLE, "NoExecute", Some(60)).grace(1)).await;
    // The API server adds a toleration of 300 seconds.
    env.run(pod("usual", "silent")).await;
    env.run(pod("loyal", "silent").tolerates_everything()).await;
    env.cluster.silence_node("silent").await.unwrap();

    // In the meantime, a kubelet reports that its node is not ready.
    let nodes: Api<Node> = Api::all(env.client.clone());
    nodes.create(&PostParams::default(), &objects::node("unready").unmanaged().build()).await.unwrap();
    let now = jiff::Timestamp::now().to_string();
    let condition = json!([{
        "type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": "no network",
        "lastHeartbeatTime": now, "lastTransitionTime": now,
    }]);
    let patch = Patch::Merge(json!({"status": {"conditions": condition}}));
    nodes.patch_status("unready", &PatchParams::default(), &patch).await.unwrap();
    env.tainted("unready", NOT_READY).await;
    let hasty = pod("hasty", "unready").namespace(NAMESPACE).tolerates(NOT_READY, "NoExecute", Some(0));
    env.pods().create(&PostParams::default(), &hasty.finalizer(HOLD).build()).await.unwrap();
    env.leaves("hasty").await;

    env.tainted("silent", UNREACHABLE).await;
    at_least(&service, PENDING_PODS, 2.0).await;
    env.stays("impatient").await;
    service.shift_clock(Duration::from_secs(65)).await.unwrap();
    env.leaves("impatient").await;
    env.stays("usual").await;
    // Nothing on the node terminates it. Two minutes after its grace period, by the API server's clock:
    service.shift_clock(Duration::from_secs(130)).await.unwrap();
    wait::gone(env.pods(), "impatient", SOON).await.unwrap();
    env.event("ForcedDeletion", "Force-deleting Pod shop/impatient").await;
    env.stays("usual").await;

    env.cluster.revive_node("silent").await.unwrap();
    env.event("TaintManagerEviction", "Cancelling deletion of Pod shop/usual").await;
    service.shift_clock(Duration::from_secs(2000)).await.unwrap();
    env.stays("usual").await;

    // Again, up to the deletion.
    service.shift_clock(Duration::ZERO).await.unwrap();
    env.cluster.silence_node("silent").await.unwrap();
    env.tainted("silent", UNREACHABLE).await;
    at_least(&service, PENDING_PODS, 1.0).await;
    env.stays("usual").await;
    service.shift_clock(Duration::from_secs(310)).await.unwrap();
    env.leaves("usual").await;
    env.stays("loyal").await;
    env.cluster.shutdown().await;
}

#[tokio::test]
async fn deadlines_survive_restarts_and_outages() {
    let env = TestEnv::boot(Cluster::builder().name("taint-faults").taint_eviction(false)).await;
    for node in ["one", "two", "three"] {
        env.node(node).await;
    }
    taint_times_from_before_a_shutdown_are_ignored(&env).await;
    let second = new_leader_keeps_deadlines(&env).await;
    rejected_deletion_is_retried(&env, &second).await;
    deletion_is_retried_after_an_outage(&env, &second).await;
    second.signal(Signal::TERM).unwrap();
    second.exited().await;
    nodes_get_time_to_report_after_an_outage(&env).await;
    env.cluster.shutdown().await;
}

/// The taint is removed and set again while no taint manager runs; the clock of the next one is 290 s ahead.
async fn taint_times_from_before_a_shutdown_are_ignored(env: &TestEnv) {
    env.node("off").await;
    for (name, seconds) in [("first-off", 200), ("whole", 300)] {
        env.run(pod(name, "off").tolerates("k", "NoExecute", Some(seconds)).finalizer(HOLD)).await;
    }
    let first = env.serve(&[]).await;
    let second = env.replica(&["--watch-gap-grace-seconds", "0"]).await;
    second.ready().await.unwrap();
    second.shift_clock(Duration::from_secs(290)).await.unwrap();
    env.taint("off", taint("k")).await;
    let before = env.recorded_taint_times("off").await;
    second.pause().unwrap();
    first.stop(SOON).unwrap();
    env.next_second().await;
    env.taint("off", json!([])).await;
    env.taint("off", taint("k")).await;
    second.resume().unwrap();
    second.leads().await.unwrap();
    at_least(&second, PENDING_PODS, 2.0).await;
    env.first_seen("off", "has a new recorded time", |text| text.is_some_and(|text| *text != before)).await;
    // 500 s after the first taint, and 210 s after the second one was recorded.
    second.shift_clock(Duration::from_secs(500)).await.unwrap();
    env.leaves("first-off").await;
    env.stays("whole").await;
    second.shift_clock(Duration::from_secs(900)).await.unwrap();
    env.leaves("whole").await;
    second.stop(SOON).unwrap();
}

/// Clocks are ahead of the API server's, so a deadline counts from when the first replica recorded the taint. Another
/// taint in the meantime does not change it.
async fn new_leader_keeps_deadlines(env: &TestEnv) -> Service {
    // A short Lease, because a dead leader does not release it.
    let replica = async || env.replica_with_lease("5", &["--watch-gap-grace-seconds", "0"]).await;
    let first = replica().await;
    first.leads().await.unwrap();
    let second = replica().await;
    second.ready().await.unwrap();
    for (name, seconds) in [("soon", 300), ("later", 900)] {
        env.run(pod(name, "one").tolerates("k", "NoExecute", Some(seconds)).finalizer(HOLD)).await;
    }
    env.run(pod("forever", "one").tolerates("k", "NoExecute", None)).await;
    first.shift_clock(Duration::from_secs(10_000)).await.unwrap();
    env.taint("one", taint("k")).await;
    let kept = env.recorded_taint_times("one").await;
    at_least(&first, PENDING_PODS, 2.0).await;
    env.next_second().await;
    let both = json!([{"key": "k", "effect": "NoExecute"}, {"key": "other", "effect": "NoSchedule"}]);
    env.taint("one", both).await;
    env.first_seen("one", "has the other taint recorded", |text| text.is_some_and(|text| *text != kept))
        .await;

    second.shift_clock(Duration::from_secs(10_150)).await.unwrap();
    first.signal(Signal::KILL).unwrap();
    second.leads().await.unwrap();
    at_least(&second, PENDING_PODS, 2.0).await;
    env.stays("soon").await;
    // By then, 300 s have passed since the taint, but not since the second replica leads.
    second.shift_clock(Duration::from_secs(10_310)).await.unwrap();
    env.leaves("soon").await;
    env.stays("later").await;
    env.stays("forever").await;
    second
}

async fn rejected_deletion_is_retried(env: &TestEnv, service: &Service) {
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(env.client.clone());
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(env.client.clone());
    let policy = json!({
        "metadata": {"name": "precious"},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["DELETE"], "resources": ["pods"]},
            ]},
            "matchConditions": [{"name": "name", "expression": "request.name == 'precious'"}],
            "validations": [{"expression": "false", "message": "not this one"}],
        },
    });
    let binding = json!({
        "metadata": {"name": "precious"},
        "spec": {"policyName": "precious", "validationActions": ["Deny"]},
    });
    policies.create(&PostParams::default(), &serde_json::from_value(policy).unwrap()).await.unwrap();
    bindings.create(&PostParams::default(), &serde_json::from_value(binding).unwrap()).await.unwrap();
    env.run(pod("precious", "two").finalizer(HOLD)).await;
    wait::eventually("deletions are rejected", SOON, async || {
        Ok(env.pods().delete("precious", &DeleteParams::default().dry_run()).await.err().map(drop))
    })
    .await
    .unwrap();

    env.taint("two", taint("k")).await;
    env.event("TaintEvictionFailed", "not this one").await;
    at_least(service, "haulout_taint_manager_failures_total", 3.0).await;
    env.event_repeated("TaintEvictionFailed", "not this one").await;
    env.stays("precious").await;
    bindings.delete("precious", &DeleteParams::default()).await.unwrap();
    wait::eventually("deletions are allowed", SOON, async || {
        Ok(env.pods().delete("precious", &DeleteParams::default().dry_run()).await.ok().map(drop))
    })
    .await
    .unwrap();
    // The next attempt is at most a minute away.
    service.shift_clock(Duration::from_secs(10_380)).await.unwrap();
    env.leaves("precious").await;
}

async fn deletion_is_retried_after_an_outage(env: &TestEnv, service: &Service) {
    env.run(pod("patient", "three").tolerates("k", "NoExecute", Some(600)).finalizer(HOLD)).await;
    env.taint("three", taint("k")).await;
    env.first_seen("three", "has a recorded taint", |text| text.is_some()).await;
    env.cluster.kill(Component::ApiServer).await.unwrap();
    service.shift_clock(Duration::from_secs(11_000)).await.unwrap();
    // The outage is longer than the Lease.
    wait::eventually("its Lease has expired", SOON, async || {
        Ok((service.metric("leader_election_master_status").await? < 0.5).then_some(()))
    })
    .await
    .unwrap();
    env.cluster.start(Component::ApiServer).await.unwrap();
    env.leaves("patient").await;
    env.leaves("later").await;
    env.stays("forever").await;
}

/// The leader keeps its Lease, and by its clock all tolerations expired in the meantime.
async fn nodes_get_time_to_report_after_an_outage(env: &TestEnv) {
    let args = ["--watch-gap-grace-seconds", "3600", "--lease-seconds", "120"];
    let service = Service::start(&env.cluster, "taint-manager", &args).await.unwrap();
    service.leads().await.unwrap();
    for node in ["alive", "dead"] {
        env.node(node).await;
        let pod = pod(&format!("on-{node}"), node).tolerates("k", "NoExecute", Some(300)).finalizer(HOLD);
        env.run(pod).await;
    }
    // After the grace period of the start, so that only the one of the outage is left.
    service.shift_clock(Duration::from_secs(10_000)).await.unwrap();
    env.taint("alive", taint("k")).await;
    env.taint("dead", taint("k")).await;
    at_least(&service, PENDING_PODS, 2.0).await;
    let synced = "all watches synced";
    let before = service.text().matches(synced).count();

    env.cluster.kill(Component::ApiServer).await.unwrap();
    wait::eventually("the outage is detected", SOON, async || {
        let failed = |line: &str| line.contains("watch failed") && line.contains("\"nodes\"");
        Ok(service.text().lines().any(failed).then_some(()))
    })
    .await
    .unwrap();
    service.shift_clock(Duration::from_secs(11_000)).await.unwrap();
    env.cluster.start(Component::ApiServer).await.unwrap();
    wait::eventually(synced, SOON, async || {
        Ok((service.text().matches(synced).count() > before).then_some(()))
    })
    .await
    .unwrap();
    assert!(service.metric("leader_election_master_status").await.unwrap() > 0.0, "it led the whole time");
    at_least(&service, PENDING_PODS, 2.0).await;
    env.stays("on-alive").await;
    env.stays("on-dead").await;

    env.taint("alive", json!([])).await;
    env.event("TaintManagerEviction", "Cancelling deletion of Pod shop/on-alive").await;
    service.shift_clock(Duration::from_secs(15_000)).await.unwrap();
    env.leaves("on-dead").await;
    env.stays("on-alive").await;
}

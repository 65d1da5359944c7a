//! The taint manager when things go wrong: nodes fall silent, replicas die, deletions are refused, the API
//! server is away.

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

use super::world::{HOLD, NAMESPACE, SOON, World, at_least, pod, taint};

const NOT_READY: &str = "node.kubernetes.io/not-ready";
const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
const CONCERNED: &str = "taint_manager_concerned_pods";

impl World {
    /// Waits until the node lifecycle controller has put this taint on the node, with its time.
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
async fn unreachable_nodes_lose_pods_and_stuck_ones_by_force() {
    // A heartbeat every four seconds, and three of them.
    let monitor = ["--node-monitor-grace-period=12s", "--node-monitor-period=1s"];
    let cluster = Cluster::builder().name("taint-silence").taint_eviction(false);
    let cluster = cluster.extra_args(Component::KwokNodes, ["--node-lease-duration-seconds=16"]);
    let world = World::boot(cluster.extra_args(Component::ControllerManager, monitor)).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yaml");
    let rules = format!("rules:\n- {{key: {UNREACHABLE}, action: Delete, forceDeleteAfter: 120s}}\n");
    std::fs::write(&file, rules).unwrap();
    let service = world.serve(&["--policy", &file.display().to_string()]).await;
    world.node("silent").await;
    // Where no node at all is healthy, the node lifecycle controller takes it for its own fault and taints none.
    world.node("healthy").await;
    world.run(pod("impatient", "silent").tolerates(UNREACHABLE, "NoExecute", Some(60)).grace(1)).await;
    // The API server gives it 300 seconds.
    world.run(pod("usual", "silent")).await;
    world.run(pod("loyal", "silent").tolerates_everything()).await;
    world.cluster.silence_node("silent").await.unwrap();

    // Meanwhile: a kubelet says that its node is not ready.
    let nodes: Api<Node> = Api::all(world.client.clone());
    nodes.create(&PostParams::default(), &objects::node("unready").unmanaged().build()).await.unwrap();
    let now = jiff::Timestamp::now().to_string();
    let condition = json!([{
        "type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": "no network",
        "lastHeartbeatTime": now, "lastTransitionTime": now,
    }]);
    let patch = Patch::Merge(json!({"status": {"conditions": condition}}));
    nodes.patch_status("unready", &PatchParams::default(), &patch).await.unwrap();
    world.tainted("unready", NOT_READY).await;
    let hasty = pod("hasty", "unready").namespace(NAMESPACE).tolerates(NOT_READY, "NoExecute", Some(0));
    world.pods().create(&PostParams::default(), &hasty.finalizer(HOLD).build()).await.unwrap();
    world.leaves("hasty").await;

    world.tainted("silent", UNREACHABLE).await;
    at_least(&service, CONCERNED, 2.0).await;
    world.stays("impatient").await;
    service.shift_clock(Duration::from_secs(65)).await.unwrap();
    world.leaves("impatient").await;
    world.stays("usual").await;
    // Nobody on the node ends it. Two minutes after its grace period, which the API server's clock gave it:
    service.shift_clock(Duration::from_secs(130)).await.unwrap();
    wait::gone(world.pods(), "impatient", SOON).await.unwrap();
    world.event("ForcedDeletion", "Deleting Pod shop/impatient by force").await;
    world.stays("usual").await;

    world.cluster.revive_node("silent").await.unwrap();
    world.event("TaintManagerEviction", "Cancelling deletion of Pod shop/usual").await;
    service.shift_clock(Duration::from_secs(2000)).await.unwrap();
    world.stays("usual").await;

    // Once more, to the end.
    service.shift_clock(Duration::ZERO).await.unwrap();
    world.cluster.silence_node("silent").await.unwrap();
    world.tainted("silent", UNREACHABLE).await;
    at_least(&service, CONCERNED, 1.0).await;
    world.stays("usual").await;
    service.shift_clock(Duration::from_secs(310)).await.unwrap();
    world.leaves("usual").await;
    world.stays("loyal").await;
    world.cluster.shutdown().await;
}

#[tokio::test]
async fn deadlines_survive_restarts_and_outages() {
    let world = World::boot(Cluster::builder().name("taint-trouble").taint_eviction(false)).await;
    for node in ["one", "two", "three"] {
        world.node(node).await;
    }
    a_time_from_before_it_was_off_does_not_count(&world).await;
    let second = a_replica_that_takes_over_knows_the_deadlines(&world).await;
    what_is_refused_happens_in_the_end(&world, &second).await;
    what_the_api_server_could_not_do_happens_in_the_end(&world, &second).await;
    second.signal(Signal::TERM).unwrap();
    second.exited().await;
    after_an_outage_nodes_report_first(&world).await;
    world.cluster.shutdown().await;
}

/// The taint is removed and set again while nobody watches; who comes next is 290 s ahead.
async fn a_time_from_before_it_was_off_does_not_count(world: &World) {
    world.node("off").await;
    for (name, seconds) in [("first-off", 200), ("whole", 300)] {
        world.run(pod(name, "off").tolerates("k", "NoExecute", Some(seconds)).finalizer(HOLD)).await;
    }
    let first = world.serve(&[]).await;
    let second = world.replica(&["--settle-seconds", "0"]).await;
    second.ready().await.unwrap();
    second.shift_clock(Duration::from_secs(290)).await.unwrap();
    world.taint("off", taint("k")).await;
    let before = world.kept("off").await;
    second.pause().unwrap();
    first.stop(SOON).unwrap();
    world.next_second().await;
    world.taint("off", json!([])).await;
    world.taint("off", taint("k")).await;
    second.resume().unwrap();
    second.leads().await.unwrap();
    at_least(&second, CONCERNED, 2.0).await;
    world.first_seen("off", "is dated anew", |text| text.is_some_and(|text| *text != before)).await;
    // 500 s after the first taint, and 210 after the second one was seen.
    second.shift_clock(Duration::from_secs(500)).await.unwrap();
    world.leaves("first-off").await;
    world.stays("whole").await;
    second.shift_clock(Duration::from_secs(900)).await.unwrap();
    world.leaves("whole").await;
    second.stop(SOON).unwrap();
}

/// Clocks are ahead of the API server's, so that a deadline counts from when the first replica saw the taint. That
/// another taint comes meanwhile changes nothing about it.
async fn a_replica_that_takes_over_knows_the_deadlines(world: &World) -> Service {
    // A lease that is soon over, because a dead leader does not give it back.
    let replica = async || world.replica_with_lease("5", &["--settle-seconds", "0"]).await;
    let first = replica().await;
    first.leads().await.unwrap();
    let second = replica().await;
    second.ready().await.unwrap();
    for (name, seconds) in [("soon", 300), ("later", 900)] {
        world.run(pod(name, "one").tolerates("k", "NoExecute", Some(seconds)).finalizer(HOLD)).await;
    }
    world.run(pod("forever", "one").tolerates("k", "NoExecute", None)).await;
    first.shift_clock(Duration::from_secs(10_000)).await.unwrap();
    world.taint("one", taint("k")).await;
    let kept = world.kept("one").await;
    at_least(&first, CONCERNED, 2.0).await;
    world.next_second().await;
    let both = json!([{"key": "k", "effect": "NoExecute"}, {"key": "other", "effect": "NoSchedule"}]);
    world.taint("one", both).await;
    world.first_seen("one", "knows of the other taint", |text| text.is_some_and(|text| *text != kept)).await;

    second.shift_clock(Duration::from_secs(10_150)).await.unwrap();
    first.signal(Signal::KILL).unwrap();
    second.leads().await.unwrap();
    at_least(&second, CONCERNED, 2.0).await;
    world.stays("soon").await;
    // 300 s since the taint are over then, and since the second replica leads they are not.
    second.shift_clock(Duration::from_secs(10_310)).await.unwrap();
    world.leaves("soon").await;
    world.stays("later").await;
    world.stays("forever").await;
    second
}

async fn what_is_refused_happens_in_the_end(world: &World, service: &Service) {
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(world.client.clone());
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(world.client.clone());
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
    world.run(pod("precious", "two").finalizer(HOLD)).await;
    wait::eventually("deletions are refused", SOON, async || {
        Ok(world.pods().delete("precious", &DeleteParams::default().dry_run()).await.err().map(drop))
    })
    .await
    .unwrap();

    world.taint("two", taint("k")).await;
    world.event("TaintEvictionFailed", "not this one").await;
    at_least(service, "taint_manager_failures_total", 3.0).await;
    world.event_repeated("TaintEvictionFailed", "not this one").await;
    world.stays("precious").await;
    bindings.delete("precious", &DeleteParams::default()).await.unwrap();
    wait::eventually("deletions are allowed", SOON, async || {
        Ok(world.pods().delete("precious", &DeleteParams::default().dry_run()).await.ok().map(drop))
    })
    .await
    .unwrap();
    // The next try is at most a minute away.
    service.shift_clock(Duration::from_secs(10_380)).await.unwrap();
    world.leaves("precious").await;
}

async fn what_the_api_server_could_not_do_happens_in_the_end(world: &World, service: &Service) {
    world.run(pod("patient", "three").tolerates("k", "NoExecute", Some(600)).finalizer(HOLD)).await;
    world.taint("three", taint("k")).await;
    world.first_seen("three", "remembers its taint", |text| text.is_some()).await;
    world.cluster.kill(Component::ApiServer).await.unwrap();
    service.shift_clock(Duration::from_secs(11_000)).await.unwrap();
    // It is away for longer than the lease.
    wait::eventually("its lease is over", SOON, async || {
        Ok((service.metric("leader_election_master_status").await? < 0.5).then_some(()))
    })
    .await
    .unwrap();
    world.cluster.start(Component::ApiServer).await.unwrap();
    world.leaves("patient").await;
    world.leaves("later").await;
    world.stays("forever").await;
}

/// The leader keeps its lease, and its clock says that all tolerations ran out meanwhile.
async fn after_an_outage_nodes_report_first(world: &World) {
    let args = ["--settle-seconds", "3600", "--lease-seconds", "120"];
    let service = Service::start(&world.cluster, "taint-manager", &args).await.unwrap();
    service.leads().await.unwrap();
    for node in ["alive", "dead"] {
        world.node(node).await;
        let pod = pod(&format!("on-{node}"), node).tolerates("k", "NoExecute", Some(300)).finalizer(HOLD);
        world.run(pod).await;
    }
    // Past the settle time of the start, so that only the outage's is left.
    service.shift_clock(Duration::from_secs(10_000)).await.unwrap();
    world.taint("alive", taint("k")).await;
    world.taint("dead", taint("k")).await;
    at_least(&service, CONCERNED, 2.0).await;
    let sight = "all watches work";
    let before = service.text().matches(sight).count();

    world.cluster.kill(Component::ApiServer).await.unwrap();
    wait::eventually("the outage is noticed", SOON, async || {
        let failed = |line: &str| line.contains("watch failed") && line.contains("\"nodes\"");
        Ok(service.text().lines().any(failed).then_some(()))
    })
    .await
    .unwrap();
    service.shift_clock(Duration::from_secs(11_000)).await.unwrap();
    world.cluster.start(Component::ApiServer).await.unwrap();
    wait::eventually(
        sight,
        SOON,
        async || Ok((service.text().matches(sight).count() > before).then_some(())),
    )
    .await
    .unwrap();
    assert!(service.metric("leader_election_master_status").await.unwrap() > 0.0, "it led all the time");
    at_least(&service, CONCERNED, 2.0).await;
    world.stays("on-alive").await;
    world.stays("on-dead").await;

    world.taint("alive", json!([])).await;
    world.event("TaintManagerEviction", "Cancelling deletion of Pod shop/on-alive").await;
    service.shift_clock(Duration::from_secs(15_000)).await.unwrap();
    world.leaves("on-dead").await;
    world.stays("on-alive").await;
}

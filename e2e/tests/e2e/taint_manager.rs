//! The taint manager as a replacement for kube-controller-manager's own taint eviction.

mod faults;
mod rate_limit;
mod test_env;

use std::time::Duration;

use haulout_api_types::Evacuation;
use haulout_api_types::evacuators::evacuation_name;
use haulout_api_types::names::TAINTS_FIRST_SEEN_ANNOTATION;
use haulout_e2e::{Cluster, Component, Kubernetes, Service, objects, wait};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, ResourceExt as _};
use serde_json::json;

use crate::support::{one_by_one, scenarios, xtask};

use self::test_env::{HOLD, NAMESPACE, SOON, TestEnv, at_least, pod, taint};

/// One after the other: each scenario has its own taint manager and nodes.
#[tokio::test]
async fn pods_leave_as_upstream_and_by_policy() {
    let mut cluster = Cluster::builder().name("taints").taint_eviction(false).audit(true);
    // Tolerations that compare numbers were added in Kubernetes 1.35, disabled by default.
    let numbers_compare = Kubernetes::chosen().unwrap().is_at_least(1, 35);
    if numbers_compare {
        let operators = ["--feature-gates=TaintTolerationComparisonOperators=true"];
        cluster = cluster.extra_args(Component::ApiServer, operators);
    }
    let env = TestEnv::boot(cluster).await;
    let mut scenarios = scenarios![&env;
        pods_leave_a_tainted_node_when_tolerations_end,
        policy_decides_how_pods_leave,
        evacuators_run_before_a_pod_leaves,
        rate_limit::deletion_rate_limit_is_enforced,
    ];
    scenarios.extend(if numbers_compare {
        scenarios![&env; rate_limit::numeric_tolerations_are_evaluated]
    } else {
        scenarios![&env; rate_limit::numeric_tolerations_are_rejected_by_the_api_server]
    });
    scenarios.extend(scenarios![&env; rate_limit::large_node_does_not_delay_another_node]);
    one_by_one(scenarios).await;
    env.cluster.shutdown().await;
}

async fn pods_leave_a_tainted_node_when_tolerations_end(env: &TestEnv) {
    for node in ["one", "two", "odd"] {
        env.node(node).await;
    }
    // The API server accepts a timestamp that few libraries can parse. Other nodes are handled all the same.
    env.run(pod("held", "odd").finalizer(HOLD)).await;
    let odd = json!([{"key": "k", "effect": "NoExecute", "timeAdded": "9999-12-31T23:59:59Z"}]);
    env.taint("odd", odd).await;
    let service = env.serve(&[]).await;
    env.run(pod("now", "one").finalizer(HOLD)).await;
    env.run(pod("later", "one").tolerates("k", "NoExecute", Some(600)).finalizer(HOLD)).await;
    env.run(pod("latest", "one").tolerates("k", "NoExecute", Some(900)).finalizer(HOLD)).await;
    env.run(pod("never", "one").tolerates("k", "NoExecute", None)).await;
    env.run(pod("spared", "two").tolerates("k", "NoExecute", Some(600))).await;

    env.taint("one", taint("k")).await;
    env.taint("two", taint("k")).await;
    let left = env.leaves("now").await;
    let conditions = left.status.unwrap().conditions.unwrap();
    let target = conditions.iter().find(|condition| condition.type_ == "DisruptionTarget").unwrap();
    assert_eq!(
        (target.status.as_str(), target.reason.as_deref(), target.message.as_deref()),
        ("True", Some("DeletionByTaintManager"), Some("Taint manager: deleting due to NoExecute taint"))
    );
    env.event("TaintManagerEviction", "Marking for deletion Pod shop/now").await;
    env.first_seen("one", "has a recorded taint", |text| text.is_some()).await;
    at_least(&service, "haulout_taint_manager_pending_pods", 3.0).await;

    at_least(&service, "haulout_taint_manager_unreadable_nodes", 1.0).await;
    let node_events = watcher::Config::default().fields("reason=Unreadable,regarding.name=odd");
    let events: Api<Event> = Api::namespaced(env.client.clone(), "default");
    wait::all(events, node_events, "report it", SOON, |events| !events.is_empty()).await.unwrap();
    env.stays("held").await;
    env.taint("odd", taint("k")).await;
    env.leaves("held").await;

    env.taint("two", json!([])).await;
    env.event("TaintManagerEviction", "Cancelling deletion of Pod shop/spared").await;
    env.first_seen("two", "has no recorded taint", |text| text.is_none()).await;

    env.stays("later").await;
    service.shift_clock(Duration::from_secs(700)).await.unwrap();
    env.leaves("later").await;
    env.stays("latest").await;
    service.shift_clock(Duration::from_secs(1000)).await.unwrap();
    env.leaves("latest").await;
    env.stays("never").await;
    env.stays("spared").await;
    assert!(service.metric("taint_eviction_controller_pod_deletions_total").await.unwrap() >= 3.0);
    assert!(service.metric("haulout_taint_manager_conflicting_evictions_total").await.unwrap() < 1.0);

    // The `timeAdded` of a taint counts for the next leader, too.
    service.stop(SOON).unwrap();
    let long_ago = Timestamp::now().saturating_sub(Duration::from_secs(290)).unwrap();
    let dated = json!([{"key": "dated", "effect": "NoExecute", "timeAdded": long_ago.to_string()}]);
    for (name, seconds) in [("dated-soon", 400), ("dated-late", 900)] {
        env.run(pod(name, "two").tolerates("dated", "NoExecute", Some(seconds)).finalizer(HOLD)).await;
        let before = long_ago.saturating_sub(Duration::from_secs(60)).unwrap().to_string();
        let scheduled = json!({"type": "PodScheduled", "status": "True", "lastTransitionTime": before});
        let patch = Patch::Strategic(json!({"status": {"conditions": [scheduled]}}));
        env.pods().patch_status(name, &PatchParams::default(), &patch).await.unwrap();
    }
    env.taint("two", dated).await;
    let next = env.serve(&[]).await;
    at_least(&next, "haulout_taint_manager_pending_pods", 2.0).await;
    env.stays("dated-soon").await;
    // By then, 400 s have passed since the taint, but not since the start.
    next.shift_clock(Duration::from_secs(200)).await.unwrap();
    env.leaves("dated-soon").await;
    env.stays("dated-late").await;
    next.stop(SOON).unwrap();
    for node in ["one", "two", "odd"] {
        env.taint(node, json!([])).await;
    }
}

async fn policy_decides_how_pods_leave(env: &TestEnv) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yaml");
    let rules = "rules:\n- {key: evict, action: Evict}\n- {key: evacuate, action: Evacuate}\n\
                 - {key: ignore, action: Ignore}\n\
                 - {key: node.kubernetes.io/out-of-service, action: Delete, forceDeleteAfter: 0s}\n";
    std::fs::write(&file, rules).unwrap();
    let path = file.display().to_string();
    let service = env.serve(&["--policy", &path]).await;
    for node in ["evict", "evacuate", "ignore", "chosen"] {
        env.node(node).await;
    }

    // Evict: the budget blocks, and the eviction is retried.
    env.run(pod("web", "evict").label("app", "web")).await;
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(env.client.clone(), NAMESPACE);
    let budget = objects::pdb("web").namespace(NAMESPACE).min_available("1").selects("app", "web").build();
    budgets.create(&PostParams::default(), &budget).await.unwrap();
    let observed =
        |budget: &PodDisruptionBudget| budget.status.as_ref().is_some_and(|status| status.expected_pods == 1);
    wait::present(budgets.clone(), "web", "covers the pod", SOON, observed).await.unwrap();
    env.taint("evict", taint("evict")).await;
    env.event("TaintEvictionFailed", "Failed to evict Pod shop/web, retrying").await;
    env.stays("web").await;
    budgets.delete("web", &DeleteParams::default()).await.unwrap();
    wait::gone(env.pods(), "web", SOON).await.unwrap();
    latency(&service, "Evict").await;

    // Evacuate: requested, and withdrawn when the taint is removed.
    env.run(pod("db", "evacuate")).await;
    env.taint("evacuate", taint("evacuate")).await;
    let evacuations: Api<Evacuation> = Api::namespaced(env.client.clone(), NAMESPACE);
    let ours = |all: &[Evacuation]| {
        all.len() == 1 && all[0].spec.pod_ref.name == "db" && all[0].instigators().count() == 1
    };
    let asked = wait::all(evacuations.clone(), watcher::Config::default(), "has one of ours", SOON, ours);
    let asked = asked.await.unwrap().remove(0);
    assert!(asked.has_instigator("taint-manager.nodemaintenance.k8s.io"));
    env.stays("db").await;
    latency(&service, "Evacuate").await;

    // A new leader keeps it, in whatever order it receives objects and whether or not nodes have reported.
    service.stop(SOON).unwrap();
    let waiting = env.replica(&["--policy", &path, "--watch-gap-grace-seconds", "3600"]).await;
    waiting.leads().await.unwrap();
    at_least(&waiting, "haulout_taint_manager_pending_pods", 1.0).await;
    waiting.stop(SOON).unwrap();
    let service = env.serve(&["--policy", &path]).await;
    at_least(&service, "haulout_taint_manager_pending_pods", 1.0).await;
    let name = asked.metadata.name.unwrap();
    let kept = evacuations.get(&name).await.unwrap();
    assert_eq!(kept.metadata.uid, asked.metadata.uid);
    assert!(kept.has_instigator("taint-manager.nodemaintenance.k8s.io"));

    // Somebody deletes it, and its evacuator forbids cancellation: our finalizer stays even without the taint.
    // No evacuation controller runs here that activates the evacuator, so it could not report: the controller's account does.
    let account = env.cluster.service_account_kubeconfig("haulout-system", "haulout-evacuation-controller");
    let controller = env.cluster.client_from(&account.await.unwrap(), "evacuator").await.unwrap();
    let reports: Api<Evacuation> = Api::namespaced(controller, NAMESPACE);
    let policy = async |policy: &str| {
        let change = Patch::Merge(json!({"status": {"evacuationCancellationPolicy": policy}}));
        reports.patch_status(&name, &PatchParams::default(), &change).await.unwrap();
    };
    policy("Forbid").await;
    evacuations.delete(&name, &DeleteParams::default()).await.unwrap();
    env.taint("evacuate", json!([])).await;
    env.event("TaintManagerEviction", "Cancelling deletion of Pod shop/db").await;
    wait::eventually("the taint manager has tried to cancel it", SOON, async || {
        Ok(service.text().contains("cannot be cancelled: the evacuator forbids it").then_some(()))
    })
    .await
    .unwrap();
    let kept = evacuations.get(&name).await.unwrap();
    assert!(kept.has_instigator("taint-manager.nodemaintenance.k8s.io"));
    policy("Allow").await;
    wait::gone(evacuations, &name, SOON).await.unwrap();
    env.stays("db").await;

    // Ignore, until the policy changes. An invalid policy changes nothing.
    env.run(pod("kept", "ignore").finalizer(HOLD)).await;
    env.taint("ignore", taint("ignore")).await;
    std::fs::write(&file, "rules:\n- {key: ignore, action: Remove}\n").unwrap();
    at_least(&service, "haulout_taint_manager_policy_rejected", 1.0).await;
    env.stays("kept").await;
    std::fs::write(&file, rules.replace("Ignore", "Delete")).unwrap();
    env.leaves("kept").await;

    // A pod chooses a more careful action.
    env.run(pod("gentle", "chosen").label("nodemaintenance.k8s.io/taint-action", "Evict")).await;
    env.taint("chosen", taint("hard")).await;
    env.event("TaintManagerEviction", "Marking for eviction Pod shop/gentle").await;
    wait::gone(env.pods(), "gentle", SOON).await.unwrap();

    // Stuck: a node that nobody runs.
    let nodes: Api<Node> = Api::all(env.client.clone());
    nodes.create(&PostParams::default(), &objects::node("dead").unmanaged().build()).await.unwrap();
    let stuck = pod("stuck", "dead").namespace(NAMESPACE).grace(3600).tolerates_everything().build();
    env.pods().create(&PostParams::default(), &stuck).await.unwrap();
    env.pods().delete("stuck", &DeleteParams::default()).await.unwrap();
    env.taint("dead", taint("node.kubernetes.io/out-of-service")).await;
    wait::gone(env.pods(), "stuck", SOON).await.unwrap();
    env.event("ForcedDeletion", "Force-deleting Pod shop/stuck").await;
    service.stop(SOON).unwrap();
}

/// Waits until the latency of a pod with this action is counted.
async fn latency(service: &Service, how: &str) {
    let metric = "haulout_taint_manager_removal_delay_seconds_count";
    let how = format!("action=\"{how}\"");
    wait::eventually("the latency is counted", SOON, async || {
        Ok((service.metric_where(metric, &how).await? >= 1.0).then_some(()))
    })
    .await
    .unwrap();
}

/// User stories 1 and 3 of KEP-3902: a pod with data stays on a tainted node until its evacuator reports that the
/// data is safe. How the evacuator does that is its own business.
async fn evacuators_run_before_a_pod_leaves(env: &TestEnv) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yaml");
    std::fs::write(&file, "rules:\n- {key: evacuate, action: Evacuate}\n").unwrap();
    let args = ["--lease-seconds", "30"];
    let evacuations = Service::start(&env.cluster, "evacuation-controller", &args).await.unwrap();
    evacuations.leads().await.unwrap();
    let log = env.cluster.logs.join("example-evacuator.log");
    let evacuator =
        ["--namespace", NAMESPACE, "--selector", "app=data", "--steps", "2", "--step-seconds", "2"];
    let command = env.cluster.command(&xtask().with_file_name("example-evacuator")).args(evacuator);
    let _evacuator = command.log(&log).spawn("example-evacuator").unwrap();
    let registered = async |name: &str, node: &str| {
        env.node(node).await;
        env.run(pod(name, node).label("app", "data")).await;
        let registered = |pod: &Pod| {
            pod.annotations().contains_key("evacuation.coordination.k8s.io/priority_copier.example.com")
        };
        let pod = wait::present(env.pods(), name, "has its evacuator", SOON, registered).await.unwrap();
        evacuation_name(&pod.uid().unwrap(), name)
    };
    // Before the taint manager starts: its pod watch may lag behind its node watch, and then it would not know the
    // evacuators yet.
    let leaving = registered("data-0", "disks").await;
    let recovering = registered("data-1", "more-disks").await;
    let service = env.serve(&["--policy", &file.display().to_string()]).await;
    let all: Api<Evacuation> = Api::namespaced(env.client.clone(), NAMESPACE);
    let says = async |evacuation: &str, text: &str| {
        let says = |e: &Evacuation| e.status.as_ref().is_some_and(|status| status.message == text);
        wait::present(all.clone(), evacuation, text, SOON, says).await.unwrap()
    };

    env.taint("disks", taint("evacuate")).await;
    let evacuation = leaving;
    let working = says(&evacuation, "copied 1 of 2 parts").await;
    assert!(working.has_instigator("taint-manager.nodemaintenance.k8s.io"));
    env.stays("data-0").await;
    wait::gone(env.pods(), "data-0", SOON).await.unwrap();
    wait::gone(all.clone(), &evacuation, SOON).await.unwrap();
    let expected = format!("{evacuation}: done");
    assert!(
        std::fs::read_to_string(&log).unwrap().lines().any(|line| line == expected),
        "the pod left too early"
    );

    // The node recovers while the evacuator is active: the pod stays.
    env.taint("more-disks", taint("evacuate")).await;
    let evacuation = recovering;
    says(&evacuation, "copied 0 of 2 parts").await;
    env.taint("more-disks", json!([])).await;
    wait::gone(all.clone(), &evacuation, SOON).await.unwrap();
    let expected = format!("{evacuation}: no longer active, aborted");
    wait::eventually("the evacuator stops", SOON, async || {
        Ok(std::fs::read_to_string(&log)?.lines().any(|line| line == expected).then_some(()))
    })
    .await
    .unwrap();
    env.stays("data-1").await;
    evacuations.stop(SOON).unwrap();
    service.stop(SOON).unwrap();
}

#[tokio::test]
async fn invalid_policy_is_rejected_at_start() {
    let env = TestEnv::boot(Cluster::builder().name("taint-bad-policy").taint_eviction(true)).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yaml");
    std::fs::write(&file, "rules:\n- key: k\n  action: Remove\n").unwrap();
    let path = file.display().to_string();
    let rejected = Service::start(&env.cluster, "taint-manager", &["--policy", &path]).await.unwrap();
    let status = tokio::time::timeout(SOON, rejected.exited()).await.expect("it exits");
    assert_eq!(status.code(), Some(1), "{}", rejected.text());
    assert!(
        rejected.text().contains("policy.yaml: line 3, column 11: unknown variant `Remove`"),
        "{}",
        rejected.text()
    );

    // In this cluster, kube-controller-manager's own taint eviction is enabled, which is reported.
    let service = env.serve(&["--dry-run"]).await;
    env.node("one").await;
    env.run(pod("web", "one").finalizer(HOLD)).await;
    env.taint("one", taint("k")).await;
    env.leaves("web").await;
    at_least(&service, "haulout_taint_manager_conflicting_evictions_total", 1.0).await;
    assert!(service.text().contains("taint-eviction-controller"), "{}", service.text());
    assert!(
        service.metric("taint_eviction_controller_pod_deletions_total").await.unwrap() < 1.0,
        "a dry run"
    );

    // A dry run logs what it would do, and changes nothing else. Pending writes are flushed at the end.
    let announced = |line: &str| line.contains("dry run: would remove pod") && line.contains("\"web\"");
    assert!(service.text().lines().any(announced), "{}", service.text());
    service.stop(SOON).unwrap();
    let events: Api<Event> = Api::all(env.client.clone());
    let events = events.list(&ListParams::default()).await.unwrap().items;
    let ours = |event: &&Event| event.reporting_controller.as_deref() == Some("haulout-taint-manager");
    assert_eq!(events.iter().filter(ours).collect::<Vec<_>>(), [] as [&Event; 0]);
    let nodes: Api<Node> = Api::all(env.client.clone());
    let node = nodes.get("one").await.unwrap();
    assert!(!node.annotations().contains_key(TAINTS_FIRST_SEEN_ANNOTATION));
}

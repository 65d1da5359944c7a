//! The taint manager in the place of kube-controller-manager's own taint eviction.

mod pace;
mod trouble;
mod world;

use std::time::Duration;

use haulout_api_types::Evacuation;
use haulout_api_types::names::TAINTS_FIRST_SEEN_ANNOTATION;
use haulout_e2e::{Cluster, Component, Service, objects, wait};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use serde_json::json;

use self::world::{HOLD, NAMESPACE, SOON, World, at_least, pod, taint};

/// One after the other: each has a taint manager of its own, and nodes of its own.
#[tokio::test]
async fn pods_leave_as_upstream_by_policy_and_at_their_pace() {
    // Tolerations that compare numbers are off by default.
    let operators = ["--feature-gates=TaintTolerationComparisonOperators=true"];
    let cluster = Cluster::builder().name("taints").taint_eviction(false).audit(true);
    let world = World::boot(cluster.extra_args(Component::ApiServer, operators)).await;
    pods_leave_a_tainted_node_now_later_or_never(&world).await;
    the_policy_says_how_pods_leave(&world).await;
    pace::no_more_pods_leave_in_a_second_than_the_limit_allows(&world).await;
    pace::tolerations_may_compare_numbers(&world).await;
    pace::a_node_with_thousands_of_pods_does_not_delay_another(&world).await;
    world.cluster.shutdown().await;
}

async fn pods_leave_a_tainted_node_now_later_or_never(world: &World) {
    let service = world.serve(&[]).await;
    for node in ["one", "two", "three"] {
        world.node(node).await;
    }
    world.run(pod("now", "one").finalizer(HOLD)).await;
    world.run(pod("later", "one").tolerates("k", "NoExecute", Some(600)).finalizer(HOLD)).await;
    world.run(pod("latest", "one").tolerates("k", "NoExecute", Some(900)).finalizer(HOLD)).await;
    world.run(pod("never", "one").tolerates("k", "NoExecute", None)).await;
    world.run(pod("spared", "two").tolerates("k", "NoExecute", Some(600))).await;

    world.taint("one", taint("k")).await;
    world.taint("two", taint("k")).await;
    let left = world.leaves("now").await;
    let conditions = left.status.unwrap().conditions.unwrap();
    let target = conditions.iter().find(|condition| condition.type_ == "DisruptionTarget").unwrap();
    assert_eq!(
        (target.status.as_str(), target.reason.as_deref(), target.message.as_deref()),
        ("True", Some("DeletionByTaintManager"), Some("Taint manager: deleting due to NoExecute taint"))
    );
    world.event("TaintManagerEviction", "Marking for deletion Pod shop/now").await;
    world.first_seen("one", "remembers its taint", |text| text.is_some()).await;
    at_least(&service, "taint_manager_concerned_pods", 3.0).await;

    world.taint("two", json!([])).await;
    world.event("TaintManagerEviction", "Cancelling deletion of Pod shop/spared").await;
    world.first_seen("two", "has forgotten its taint", |text| text.is_none()).await;

    world.stays("later").await;
    service.shift_clock(Duration::from_secs(700)).await.unwrap();
    world.leaves("later").await;
    world.stays("latest").await;
    service.shift_clock(Duration::from_secs(1000)).await.unwrap();
    world.leaves("latest").await;
    world.stays("never").await;
    world.stays("spared").await;
    assert!(service.metric("taint_eviction_controller_pod_deletions_total").await.unwrap() >= 3.0);
    assert!(service.metric("taint_manager_rival_evictions_total").await.unwrap() < 1.0);

    // What is stored counts for whoever comes next: one taint has the time in itself, one on its node.
    service.stop(SOON).unwrap();
    let long_ago = Timestamp::now().saturating_sub(Duration::from_secs(290)).unwrap();
    let dated = json!([{"key": "dated", "effect": "NoExecute", "timeAdded": long_ago.to_string()}]);
    for (name, node, key, seconds) in [
        ("dated-soon", "two", "dated", 400),
        ("dated-late", "two", "dated", 900),
        ("kept-soon", "three", "kept", 400),
        ("kept-late", "three", "kept", 900),
    ] {
        world.run(pod(name, node).tolerates(key, "NoExecute", Some(seconds)).finalizer(HOLD)).await;
        let before = long_ago.saturating_sub(Duration::from_secs(60)).unwrap().to_string();
        let scheduled = json!({"type": "PodScheduled", "status": "True", "lastTransitionTime": before});
        let patch = Patch::Strategic(json!({"status": {"conditions": [scheduled]}}));
        world.pods().patch_status(name, &PatchParams::default(), &patch).await.unwrap();
    }
    world.taint("two", dated).await;
    world.taint("three", taint("kept")).await;
    let nodes: Api<Node> = Api::all(world.client.clone());
    let stored = json!({"kept": long_ago.to_string()}).to_string();
    let patch = Patch::Merge(json!({"metadata": {"annotations": {TAINTS_FIRST_SEEN_ANNOTATION: stored}}}));
    nodes.patch("three", &PatchParams::default(), &patch).await.unwrap();
    let next = world.serve(&[]).await;
    at_least(&next, "taint_manager_concerned_pods", 4.0).await;
    world.stays("dated-soon").await;
    world.stays("kept-soon").await;
    // 400 s since the taint are over then, and since the start they are not.
    next.shift_clock(Duration::from_secs(200)).await.unwrap();
    world.leaves("dated-soon").await;
    world.leaves("kept-soon").await;
    world.stays("dated-late").await;
    world.stays("kept-late").await;
    world.first_seen("three", "is as it was", |text| text == Some(&stored)).await;
    next.stop(SOON).unwrap();
    for node in ["one", "two", "three"] {
        world.taint(node, json!([])).await;
    }
}

async fn the_policy_says_how_pods_leave(world: &World) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yaml");
    let rules = "rules:\n- {key: evict, action: Evict}\n- {key: evacuate, action: Evacuate}\n\
                 - {key: ignore, action: Ignore}\n\
                 - {key: node.kubernetes.io/out-of-service, action: Delete, forceDeleteAfter: 0s}\n";
    std::fs::write(&file, rules).unwrap();
    let path = file.display().to_string();
    let service = world.serve(&["--policy", &path]).await;
    for node in ["evict", "evacuate", "ignore", "chosen"] {
        world.node(node).await;
    }

    // Evict: the budget holds, and is asked again.
    world.run(pod("web", "evict").label("app", "web")).await;
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(world.client.clone(), NAMESPACE);
    let budget = objects::pdb("web").namespace(NAMESPACE).min_available("1").selects("app", "web").build();
    budgets.create(&PostParams::default(), &budget).await.unwrap();
    let observed =
        |budget: &PodDisruptionBudget| budget.status.as_ref().is_some_and(|status| status.expected_pods == 1);
    wait::present(budgets.clone(), "web", "covers the pod", SOON, observed).await.unwrap();
    world.taint("evict", taint("evict")).await;
    world.event("TaintEvictionFailed", "Pod shop/web could not be evicted and will be tried again").await;
    world.stays("web").await;
    budgets.delete("web", &DeleteParams::default()).await.unwrap();
    wait::gone(world.pods(), "web", SOON).await.unwrap();

    // Evacuate: asked for, and taken back with the taint.
    world.run(pod("db", "evacuate")).await;
    world.taint("evacuate", taint("evacuate")).await;
    let evacuations: Api<Evacuation> = Api::namespaced(world.client.clone(), NAMESPACE);
    let ours = |all: &[Evacuation]| {
        all.len() == 1 && all[0].spec.pod_ref.name == "db" && all[0].instigators().count() == 1
    };
    let asked = wait::all(evacuations.clone(), watcher::Config::default(), "has one of ours", SOON, ours);
    let asked = asked.await.unwrap().remove(0);
    assert!(asked.is_wanted_by("taint-manager.nodemaintenance.k8s.io"));
    world.stays("db").await;

    // A new leader lets it go on, whatever it sees first and whether or not nodes have reported.
    service.stop(SOON).unwrap();
    let waiting = world.replica(&["--policy", &path, "--settle-seconds", "3600"]).await;
    waiting.leads().await.unwrap();
    at_least(&waiting, "taint_manager_concerned_pods", 1.0).await;
    waiting.stop(SOON).unwrap();
    let service = world.serve(&["--policy", &path]).await;
    at_least(&service, "taint_manager_concerned_pods", 1.0).await;
    let name = asked.metadata.name.unwrap();
    let kept = evacuations.get(&name).await.unwrap();
    assert_eq!(kept.metadata.uid, asked.metadata.uid);
    assert!(kept.is_wanted_by("taint-manager.nodemaintenance.k8s.io"));
    world.taint("evacuate", json!([])).await;
    let unwanted = |all: &[Evacuation]| all.iter().all(|one| one.instigators().count() == 0);
    wait::all(evacuations, watcher::Config::default(), "has none of ours", SOON, unwanted).await.unwrap();

    // Ignore, until the policy changes; a bad one changes nothing.
    world.run(pod("kept", "ignore").finalizer(HOLD)).await;
    world.taint("ignore", taint("ignore")).await;
    std::fs::write(&file, "rules:\n- {key: ignore, action: Remove}\n").unwrap();
    at_least(&service, "taint_manager_policy_refused", 1.0).await;
    world.stays("kept").await;
    std::fs::write(&file, rules.replace("Ignore", "Delete")).unwrap();
    world.leaves("kept").await;

    // A pod chooses what is gentler.
    world.run(pod("gentle", "chosen").label("nodemaintenance.k8s.io/taint-action", "Evict")).await;
    world.taint("chosen", taint("hard")).await;
    world.event("TaintManagerEviction", "Marking for eviction Pod shop/gentle").await;
    wait::gone(world.pods(), "gentle", SOON).await.unwrap();

    // Stuck: a node that nobody runs.
    let nodes: Api<Node> = Api::all(world.client.clone());
    nodes.create(&PostParams::default(), &objects::node("dead").unmanaged().build()).await.unwrap();
    let stuck = pod("stuck", "dead").namespace(NAMESPACE).grace(3600).tolerates_everything().build();
    world.pods().create(&PostParams::default(), &stuck).await.unwrap();
    world.pods().delete("stuck", &DeleteParams::default()).await.unwrap();
    world.taint("dead", taint("node.kubernetes.io/out-of-service")).await;
    wait::gone(world.pods(), "stuck", SOON).await.unwrap();
    world.event("ForcedDeletion", "Deleting Pod shop/stuck by force").await;
    service.stop(SOON).unwrap();
}

#[tokio::test]
async fn a_bad_policy_is_refused_at_the_start_with_its_line() {
    let world = World::boot(Cluster::builder().name("taint-bad-policy").taint_eviction(true)).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yaml");
    std::fs::write(&file, "rules:\n- key: k\n  action: Remove\n").unwrap();
    let path = file.display().to_string();
    let refused = Service::start(&world.cluster, "taint-manager", &["--policy", &path]).await.unwrap();
    let status = tokio::time::timeout(SOON, refused.exited()).await.expect("it ends by itself");
    assert_eq!(status.code(), Some(1), "{}", refused.text());
    assert!(
        refused.text().contains("policy.yaml: line 3, column 11: unknown variant `Remove`"),
        "{}",
        refused.text()
    );

    // In this cluster kube-controller-manager's own taint eviction is at work, which does not go unnoticed.
    let service = world.serve(&["--dry-run"]).await;
    world.node("one").await;
    world.run(pod("web", "one").finalizer(HOLD)).await;
    world.taint("one", taint("k")).await;
    world.leaves("web").await;
    at_least(&service, "taint_manager_rival_evictions_total", 1.0).await;
    assert!(service.text().contains("taint-eviction-controller"), "{}", service.text());
    assert!(
        service.metric("taint_eviction_controller_pod_deletions_total").await.unwrap() < 1.0,
        "a dry run"
    );
}

//! The taint manager in the place of kube-controller-manager's own taint eviction.

mod pace;
mod trouble;
mod world;

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

use self::world::{HOLD, NAMESPACE, SOON, World, at_least, pod, taint};

/// One after the other: each has a taint manager of its own, and nodes of its own.
#[tokio::test]
async fn pods_leave_as_upstream_and_by_policy() {
    let mut cluster = Cluster::builder().name("taints").taint_eviction(false).audit(true);
    // Tolerations that compare numbers came with Kubernetes 1.35, and are off by default.
    let numbers_compare = Kubernetes::chosen().unwrap().is_at_least(1, 35);
    if numbers_compare {
        let operators = ["--feature-gates=TaintTolerationComparisonOperators=true"];
        cluster = cluster.extra_args(Component::ApiServer, operators);
    }
    let world = World::boot(cluster).await;
    let mut scenarios = scenarios![&world;
        pods_leave_a_tainted_node_now_later_or_never,
        the_policy_says_how_pods_leave,
        evacuators_have_their_say_before_a_pod_leaves,
        pace::no_more_pods_leave_in_a_second_than_the_limit_allows,
    ];
    scenarios.extend(if numbers_compare {
        scenarios![&world; pace::tolerations_may_compare_numbers]
    } else {
        scenarios![&world; pace::tolerations_that_compare_numbers_are_rejected]
    });
    scenarios.extend(scenarios![&world; pace::a_node_with_thousands_of_pods_does_not_delay_another]);
    one_by_one(scenarios).await;
    world.cluster.shutdown().await;
}

async fn pods_leave_a_tainted_node_now_later_or_never(world: &World) {
    for node in ["one", "two", "odd"] {
        world.node(node).await;
    }
    // The API server takes a time that few libraries can read. The other nodes are followed all the same.
    world.run(pod("held", "odd").finalizer(HOLD)).await;
    let odd = json!([{"key": "k", "effect": "NoExecute", "timeAdded": "9999-12-31T23:59:59Z"}]);
    world.taint("odd", odd).await;
    let service = world.serve(&[]).await;
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

    at_least(&service, "taint_manager_unreadable_nodes", 1.0).await;
    let node_events = watcher::Config::default().fields("reason=NotFollowed,regarding.name=odd");
    let events: Api<Event> = Api::namespaced(world.client.clone(), "default");
    wait::all(events, node_events, "tell of it", SOON, |events| !events.is_empty()).await.unwrap();
    world.stays("held").await;
    world.taint("odd", taint("k")).await;
    world.leaves("held").await;

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

    // What a taint says itself counts for whoever comes next.
    service.stop(SOON).unwrap();
    let long_ago = Timestamp::now().saturating_sub(Duration::from_secs(290)).unwrap();
    let dated = json!([{"key": "dated", "effect": "NoExecute", "timeAdded": long_ago.to_string()}]);
    for (name, seconds) in [("dated-soon", 400), ("dated-late", 900)] {
        world.run(pod(name, "two").tolerates("dated", "NoExecute", Some(seconds)).finalizer(HOLD)).await;
        let before = long_ago.saturating_sub(Duration::from_secs(60)).unwrap().to_string();
        let scheduled = json!({"type": "PodScheduled", "status": "True", "lastTransitionTime": before});
        let patch = Patch::Strategic(json!({"status": {"conditions": [scheduled]}}));
        world.pods().patch_status(name, &PatchParams::default(), &patch).await.unwrap();
    }
    world.taint("two", dated).await;
    let next = world.serve(&[]).await;
    at_least(&next, "taint_manager_concerned_pods", 2.0).await;
    world.stays("dated-soon").await;
    // 400 s since the taint are over then, and since the start they are not.
    next.shift_clock(Duration::from_secs(200)).await.unwrap();
    world.leaves("dated-soon").await;
    world.stays("dated-late").await;
    next.stop(SOON).unwrap();
    for node in ["one", "two", "odd"] {
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
    latency(&service, "Evict").await;

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
    latency(&service, "Evacuate").await;

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

    // Somebody deletes it, and its evacuator forbids to cancel it: our finalizer stays even without the taint.
    let policy = async |policy: &str| {
        let change = Patch::Merge(json!({"status": {"evacuationCancellationPolicy": policy}}));
        evacuations.patch_status(&name, &PatchParams::default(), &change).await.unwrap();
    };
    policy("Forbid").await;
    evacuations.delete(&name, &DeleteParams::default()).await.unwrap();
    world.taint("evacuate", json!([])).await;
    world.event("TaintManagerEviction", "Cancelling deletion of Pod shop/db").await;
    wait::eventually("the taint manager has tried to cancel it", SOON, async || {
        Ok(service.text().contains("cannot be cancelled: its evacuator forbids it").then_some(()))
    })
    .await
    .unwrap();
    let kept = evacuations.get(&name).await.unwrap();
    assert!(kept.is_wanted_by("taint-manager.nodemaintenance.k8s.io"));
    policy("Allow").await;
    wait::gone(evacuations, &name, SOON).await.unwrap();
    world.stays("db").await;

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

/// Waits until it is counted how late a pod was made to leave in this way.
async fn latency(service: &Service, how: &str) {
    let metric = "taint_manager_departure_duration_seconds_count";
    let how = format!("how=\"{how}\"");
    wait::eventually("the latency is counted", SOON, async || {
        Ok((service.metric_where(metric, &how).await? >= 1.0).then_some(()))
    })
    .await
    .unwrap();
}

/// Stories 1 and 3 of KEP-3902: a pod with data stays on a tainted node until its evacuator says that the data is
/// safe, and it is the evacuator's business whom it asks for that.
async fn evacuators_have_their_say_before_a_pod_leaves(world: &World) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.yaml");
    std::fs::write(&file, "rules:\n- {key: evacuate, action: Evacuate}\n").unwrap();
    let args = ["--lease-seconds", "30"];
    let evacuations = Service::start(&world.cluster, "evacuation-controller", &args).await.unwrap();
    evacuations.leads().await.unwrap();
    let log = world.cluster.logs.join("example-evacuator.log");
    let evacuator =
        ["--namespace", NAMESPACE, "--selector", "app=data", "--steps", "2", "--step-seconds", "2"];
    let command = world.cluster.command(&xtask().with_file_name("example-evacuator")).args(evacuator);
    let _evacuator = command.log(&log).spawn("example-evacuator").unwrap();
    let registered = async |name: &str, node: &str| {
        world.node(node).await;
        world.run(pod(name, node).label("app", "data")).await;
        let registered = |pod: &Pod| {
            pod.annotations().contains_key("evacuation.coordination.k8s.io/priority_copier.example.com")
        };
        let pod = wait::present(world.pods(), name, "has its evacuator", SOON, registered).await.unwrap();
        evacuation_name(&pod.uid().unwrap(), name)
    };
    // Before the taint manager starts: its watch of pods may be behind that of nodes, and then it would not know yet
    // who the evacuators are.
    let leaving = registered("data-0", "disks").await;
    let recovering = registered("data-1", "more-disks").await;
    let service = world.serve(&["--policy", &file.display().to_string()]).await;
    let all: Api<Evacuation> = Api::namespaced(world.client.clone(), NAMESPACE);
    let says = async |evacuation: &str, text: &str| {
        let says = |e: &Evacuation| e.status.as_ref().is_some_and(|status| status.message == text);
        wait::present(all.clone(), evacuation, text, SOON, says).await.unwrap()
    };

    world.taint("disks", taint("evacuate")).await;
    let evacuation = leaving;
    let working = says(&evacuation, "copied 1 of 2 parts").await;
    assert!(working.is_wanted_by("taint-manager.nodemaintenance.k8s.io"));
    world.stays("data-0").await;
    wait::gone(world.pods(), "data-0", SOON).await.unwrap();
    wait::gone(all.clone(), &evacuation, SOON).await.unwrap();
    let told = format!("{evacuation}: done");
    assert!(std::fs::read_to_string(&log).unwrap().lines().any(|line| line == told), "it was not waited for");

    // The node recovers while the evacuator is at work: the pod stays.
    world.taint("more-disks", taint("evacuate")).await;
    let evacuation = recovering;
    says(&evacuation, "copied 0 of 2 parts").await;
    world.taint("more-disks", json!([])).await;
    wait::gone(all.clone(), &evacuation, SOON).await.unwrap();
    let told = format!("{evacuation}: no longer active, aborted");
    wait::eventually("the evacuator stops", SOON, async || {
        Ok(std::fs::read_to_string(&log)?.lines().any(|line| line == told).then_some(()))
    })
    .await
    .unwrap();
    world.stays("data-1").await;
    evacuations.stop(SOON).unwrap();
    service.stop(SOON).unwrap();
}

#[tokio::test]
async fn invalid_policy_is_rejected_at_start() {
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

    // A dry run says in its log what it would do, and nobody else finds anything of it. What is to be written, is
    // written at the end.
    let announced = |line: &str| line.contains("would act") && line.contains("\"web\"");
    assert!(service.text().lines().any(announced), "{}", service.text());
    service.stop(SOON).unwrap();
    let events: Api<Event> = Api::all(world.client.clone());
    let events = events.list(&ListParams::default()).await.unwrap().items;
    let ours = |event: &&Event| event.reporting_controller.as_deref() == Some("haulout-taint-manager");
    assert_eq!(events.iter().filter(ours).collect::<Vec<_>>(), [] as [&Event; 0]);
    let nodes: Api<Node> = Api::all(world.client.clone());
    let node = nodes.get("one").await.unwrap();
    assert!(!node.annotations().contains_key(TAINTS_FIRST_SEEN_ANNOTATION));
}

//! A whole installation: tested, upgraded during a drain, and uninstalled during a drain. Its services are local
//! processes with the permissions of the chart's ServiceAccounts, as in all these tests. Helm hooks are local
//! processes too, with the arguments of the hook.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use haulout_api_types::former_owner::FormerOwner;
use haulout_api_types::node_maintenance::Stage;
use haulout_api_types::{Evacuation, names};
use haulout_e2e::nodes::NodeState;
use haulout_e2e::process::Output;
use haulout_e2e::service::{NAMESPACE as OURS, SKIPPED};
use haulout_e2e::{Cluster, Handle, Service, Webhook, objects, wait};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use serde_json::json;

use crate::chart::helm;
use crate::maintenance::scenario::{SHORT_LEASE, SOON, Scenario, TestEnv, slow};

/// A node with a pod whose evacuator is slow, and one that may only leave after it.
async fn partly_drained_node(scenario: &Scenario<'_>) -> (Node, String) {
    let node = scenario.node("n1", "blue").await;
    let first = objects::pod("first").label("app", "first").annotation(&slow(), "100");
    let first = scenario.pod_from(first, "n1").await;
    scenario.pod("later", "n1").await;
    let plan = json!([{"podSelector": {"matchLabels": {"app": "first"}}, "podPriority": 1000, "podType": "Default"}]);
    scenario.maintain_with("blue", "blue", Stage::Drain, plan).await;
    let evacuation = scenario.until_evacuator_active(&first).await;
    scenario.until_cordoned("n1").await;
    (node, evacuation)
}

/// The last commit whose chart had no clean-up, checks or network policies.
const EARLIER: &str = "7accca5824611351d9e022fd70f8e94598a51d44";

/// The chart of an earlier commit, if the git history is available.
fn earlier_chart(folder: &Path) -> Option<PathBuf> {
    let script =
        "git archive --output \"$1/chart.tar\" \"$2\" charts/haulout && tar -xf \"$1/chart.tar\" -C \"$1\"";
    let mut command = std::process::Command::new("sh");
    command.args(["-c", script, "sh"]).arg(folder).arg(EARLIER);
    let got = command.current_dir(haulout_e2e::repository()).status().unwrap();
    got.success().then(|| folder.join("charts/haulout"))
}

/// The webhook of an earlier version created its Secret itself, under this name and without labels.
async fn create_earlier_certificate(env: &TestEnv) {
    let name = "haulout-admission-webhook-certificate";
    let create = ["create", "secret", "generic", name, "--from-literal=tls.crt=x", "-n", OURS];
    env.cluster.kubectl(&create).await.unwrap().success().unwrap();
}

const NEWER_PERMISSIONS: &str = "newer-permissions";

/// The services are the current ones: the earlier chart does not grant permissions that were added later.
async fn grant_newer_permissions(cluster: &Cluster) {
    let rules = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": NEWER_PERMISSIONS},
        "rules": [
            {"apiGroups": [names::NODE_MAINTENANCE_GROUP], "resources": ["nodemaintenances"], "verbs": ["delete"]},
            {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["list", "watch"]},
        ],
    });
    cluster.kubectl_with(&["create", "-f", "-"], &rules.to_string()).await.unwrap().success().unwrap();
    let (role, account) = (
        format!("--clusterrole={NEWER_PERMISSIONS}"),
        format!("--serviceaccount={OURS}:haulout-maintenance-controller"),
    );
    let bind = ["create", "clusterrolebinding", NEWER_PERMISSIONS, &role, &account];
    cluster.kubectl(&bind).await.unwrap().success().unwrap();
}

#[tokio::test]
async fn upgrade_and_rollback_during_a_drain() {
    let folder = tempfile::tempdir().unwrap();
    let Some(earlier) = earlier_chart(folder.path()) else {
        println!("{SKIPPED}the git history is missing: git fetch --unshallow");
        return;
    };
    let cluster = Cluster::builder().name("upgrade").scheduler(false).boot().await.unwrap();
    cluster.install_chart_from(&earlier, &[]).await.unwrap();
    grant_newer_permissions(&cluster).await;
    let env = TestEnv::on(cluster, None, SHORT_LEASE, &[]).await;
    let scenario = env.scenario("shop").await;
    let (before, evacuation) = partly_drained_node(&scenario).await;
    create_earlier_certificate(&env).await;

    let values = [("maintenanceController.resources.requests.cpu", "20m")];
    let webhook = Webhook::install(&env.cluster, &values).await.unwrap();
    let replica = webhook.start(&env.cluster, &[]).await.unwrap();
    Webhook::reachable(&env.cluster).await.unwrap();
    let withdraw = ["delete", "clusterrolebinding", NEWER_PERMISSIONS];
    env.cluster.kubectl(&withdraw).await.unwrap().success().unwrap();
    env.rollout_restart().await;

    // And back, including the CRDs, with existing objects.
    helm(&env.cluster, &["rollback", "haulout", "1", "-n", OURS]).await;
    drop((webhook, replica));
    let first = scenario.maintenances().get(&scenario.of("blue")).await.unwrap();
    assert_eq!(first.spec.stage, Stage::Drain);
    complete_evacuator(&scenario, &evacuation).await;
    scenario.until_pod_gone("first").await;
    scenario.until_pod_gone("later").await;
    scenario.until_drained("blue").await;
    scenario.set_stage("blue", Stage::Complete).await;
    scenario.until_completed("blue").await;
    scenario.until_restored(&before).await;
}

/// Pods stay pending: KWOK nodes would finish those of a Job at once, and Helm would remove their permissions while
/// they are used.
const UNSCHEDULABLE_HOOKS: (&str, &str) = ("nodeSelector.real", "yes");

/// Runs a Helm command that has a hook, and does what the pod of the hook would do.
async fn hook(env: &TestEnv, account: &str, command: &[&str]) {
    let (done, helm, said) = try_hook(env, account, command).await;
    assert!(done, "{said}");
    helm.success().unwrap();
}

/// The same. Returns whether the hook succeeded, the result of Helm, and the output of the hook.
async fn try_hook(env: &TestEnv, account: &str, command: &[&str]) -> (bool, Output, String) {
    let cluster = env.cluster.handle().clone();
    let command: Vec<_> = command.iter().map(ToString::to_string).collect();
    let helm = tokio::spawn(async move {
        let args: Vec<_> = command.iter().map(String::as_str).chain(["--timeout", "3m"]).collect();
        cluster.helm(&args).await.unwrap()
    });
    let pods: Api<Pod> = Api::namespaced(env.client.clone(), OURS);
    let component = account.trim_start_matches("haulout-");
    let selector = watcher::Config::default().labels(&format!("app.kubernetes.io/component={component}"));
    let made =
        wait::all(pods.clone(), selector, "are created by the hook", SOON, |pods| !pods.is_empty()).await;
    let pod = made.unwrap().remove(0);
    let container = &pod.spec.as_ref().unwrap().containers[0];
    let args: Vec<_> = container.args.iter().flatten().map(String::as_str).collect();
    // An image has the name of its binary.
    let image = container.image.as_deref().unwrap();
    let program = image.rsplit('/').next().and_then(|name| name.split(':').next()).unwrap();
    let kubeconfig = env.cluster.service_account_kubeconfig(OURS, account).await.unwrap();
    let task = Service::start_as(&env.cluster, program, &kubeconfig, &args).unwrap();
    let done = task.exited().await.success();
    if !done {
        // A Job would retry it three times.
        let jobs: Api<Job> = Api::namespaced(env.client.clone(), OURS);
        let once = Patch::Merge(json!({"spec": {"backoffLimit": 0}}));
        jobs.patch(account, &PatchParams::default(), &once).await.unwrap();
    }
    // No node runs the pod. This patch reports that it has ended.
    let phase = if done { "Succeeded" } else { "Failed" };
    let ended = Patch::Merge(json!({"status": {"phase": phase}}));
    pods.patch_status(&pod.name_any(), &PatchParams::default(), &ended).await.unwrap();
    (done, helm.await.unwrap(), task.text())
}

async fn uninstall(env: &TestEnv) {
    hook(env, "haulout-cleanup", &["uninstall", "haulout", "-n", OURS, "--wait"]).await;
}

/// Removes objects of failed hooks, as docs/upgrade.md describes.
async fn delete_hook_objects(env: &TestEnv) {
    let kinds = "jobs,pods,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings";
    let hooks =
        "app.kubernetes.io/instance=haulout,app.kubernetes.io/component in (cleanup, check, withdraw)";
    let delete = ["delete", kinds, "--namespace", OURS, "--selector", hooks];
    env.cluster.kubectl(&delete).await.unwrap().success().unwrap();
}

/// Reports as an evacuator that cannot stop.
async fn forbid_cancellation(scenario: &Scenario<'_>, evacuation: &str) {
    let forbid = Patch::Merge(json!({"status": {"evacuationCancellationPolicy": "Forbid"}}));
    scenario.evacuations().patch_status(evacuation, &PatchParams::default(), &forbid).await.unwrap();
}

async fn complete_evacuator(scenario: &Scenario<'_>, evacuation: &str) {
    let completed = Patch::Merge(json!({"status": {"activeEvacuatorCompleted": true}}));
    scenario.evacuations().patch_status(evacuation, &PatchParams::default(), &completed).await.unwrap();
}

/// The command that changes these values of the release.
fn upgrade(values: &str) -> Vec<String> {
    let chart = crate::chart::chart().display().to_string();
    let args = ["upgrade", "haulout", &chart, "-n", OURS, "--reuse-values", "--set", values];
    args.map(Into::into).into()
}

/// A Deployment whose only pod belongs to it directly, as while the workload evacuator waits for the replacement.
async fn moved_pod(scenario: &Scenario<'_>, name: &str) -> Pod {
    let here = json!({"pool": scenario.of("pool")});
    let deployment = objects::deployment(name).namespace(scenario.name).pods(|pod| {
        pod.with(|spec| spec.node_selector = serde_json::from_value(here).unwrap())
            .annotation(names::POD_DELETION_COST_ANNOTATION, "7")
    });
    let deployment =
        scenario.deployments().create(&PostParams::default(), &deployment.build()).await.unwrap();
    let pod = pods_of(scenario, name, 1).await.remove(0);
    let owner = (deployment.name_any(), deployment.uid().unwrap());
    let patch = FormerOwner::move_patch(&pod.metadata, (&owner.0, &owner.1), 1, 0).unwrap();
    let params = PatchParams::default();
    scenario.pods().patch(&pod.name_any(), &params, &Patch::Merge(patch)).await.unwrap();
    pods_of(scenario, name, 2).await;
    pod
}

/// Waits until the Deployment has so many pods that run.
async fn pods_of(scenario: &Scenario<'_>, name: &str, count: usize) -> Vec<Pod> {
    let selector = watcher::Config::default().labels(&format!("app={name}"));
    let runs = |pod: &Pod| pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running");
    let found = wait::all(scenario.pods(), selector, "run", SOON, |pods| {
        pods.len() == count && pods.iter().all(runs)
    });
    scenario.explained(found.await)
}

/// The pod is the only one, and is as before.
async fn is_given_back(scenario: &Scenario<'_>, name: &str, before: &Pod) {
    let pod = pods_of(scenario, name, 1).await.remove(0);
    assert_eq!(pod.uid(), before.uid(), "the replacement goes");
    assert_eq!(pod.owner_references(), before.owner_references());
    assert_eq!(pod.annotations(), before.annotations());
}

/// A node from which the taint manager evacuates two pods. The taint manager and the workload evacuator are disabled. One of the two evacuators
/// cannot stop, so its Evacuation remains.
async fn disable_services(scenario: &Scenario<'_>) -> String {
    scenario.node("n4", "violet").await;
    let (cancelled, bound) =
        (scenario.slow_pod("cancelled", "n4").await, scenario.slow_pod("bound", "n4").await);
    scenario.patch_node("n4", json!({"spec": {"taints": [{"key": "gentle", "effect": "NoExecute"}]}})).await;
    let (withdrawn, kept) =
        (scenario.until_evacuator_active(&cancelled).await, scenario.until_evacuator_active(&bound).await);
    forbid_cancellation(scenario, &kept).await;

    let upgrade = upgrade("taintManager.enabled=false,workloadEvacuator.enabled=false");
    let upgrade: Vec<_> = upgrade.iter().map(String::as_str).collect();
    hook(scenario.env, "haulout-withdraw", &upgrade).await;
    scenario.explained(wait::gone(scenario.evacuations(), &withdrawn, SOON).await);
    let pod = scenario.pods().get("cancelled").await.unwrap();
    assert_eq!((pod.uid(), pod.metadata.deletion_timestamp), (cancelled.uid(), None), "it stays");
    let left = scenario.evacuations().get(&kept).await.unwrap();
    assert!(
        left.has_instigator(names::instigator::TAINT_MANAGER) && left.metadata.deletion_timestamp.is_none()
    );
    kept
}

/// While an evacuator cannot stop, an uninstall changes nothing and reports the reason.
async fn uninstall_is_rejected_while_an_evacuation_runs(scenario: &Scenario<'_>, bound: &str) {
    let look = async || {
        let kubectl =
            async |args: &[&str]| scenario.env.cluster.kubectl(args).await.unwrap().success().unwrap();
        let bindings = [
            "get",
            "clusterrolebindings,rolebindings,leases,secrets",
            "-A",
            "-l",
            "app.kubernetes.io/name=haulout",
        ];
        let bindings = kubectl(&[bindings.as_slice(), &["-o", "name"]].concat()).await;
        // Except for objects of the hook.
        let bindings: Vec<_> =
            bindings.lines().filter(|line| !line.ends_with("-cleanup")).map(String::from).collect();
        let evacuations = scenario.evacuations().list(&ListParams::default()).await.unwrap().items;
        let evacuations: Vec<_> =
            evacuations.iter().map(|e| (e.name_any(), e.finalizers().to_vec())).collect();
        let nodes = scenario.nodes().list(&ListParams::default()).await.unwrap().items;
        let nodes: Vec<_> = nodes.iter().map(|node| format!("{:?}", NodeState::of(node))).collect();
        (bindings, evacuations, nodes)
    };
    let before = look().await;
    let uninstall = ["uninstall", "haulout", "-n", OURS];
    let (done, helm, said) = try_hook(scenario.env, "haulout-cleanup", &uninstall).await;
    assert!(!done && !helm.status.success(), "{said}");
    let named = format!("their pods still exist: {}/{bound}; nothing was changed", scenario.name);
    assert!(said.contains(&named) && said.contains("--force (chart value cleanup.force=true)"), "{said}");
    assert_eq!(look().await, before);
    delete_hook_objects(scenario.env).await;
}

/// Everything in the release's namespace and, by label, elsewhere.
async fn left(cluster: &Handle) -> BTreeSet<String> {
    let kubectl = async |args: &[&str]| cluster.kubectl(args).await.unwrap().success().unwrap();
    let kinds = async |namespaced: &str| {
        let kinds = kubectl(&["api-resources", "--verbs=list", "-o", "name", namespaced]).await;
        kinds.lines().filter(|kind| !kind.starts_with("events")).collect::<Vec<_>>().join(",")
    };
    let (inside, outside) = (kinds("--namespaced=true").await, kinds("--namespaced=false").await);
    let labels = "app.kubernetes.io/name=haulout";
    let mut found = kubectl(&["get", &inside, "-n", OURS, "-o", "name"]).await;
    found += &kubectl(&["get", &inside, "-A", "-l", labels, "-o", "name"]).await;
    found += &kubectl(&["get", &outside, "-l", labels, "-o", "name"]).await;
    // Objects that every namespace has.
    let own = ["configmap/kube-root-ca.crt", "serviceaccount/default"];
    found.lines().filter(|object| !own.contains(object)).map(Into::into).collect()
}

/// Waits until only these objects of ours exist. Garbage collection takes a moment.
async fn until_only(cluster: &Handle, expected: &BTreeSet<String>) {
    let mut found = BTreeSet::new();
    let same = wait::eventually("only the expected objects are left", SOON, async || {
        found = left(cluster).await;
        Ok((found == *expected).then_some(()))
    });
    let same = same.await;
    assert_eq!(found, *expected);
    same.unwrap();
}

/// After a reinstallation, the maintenance continues, and the evacuator of this Evacuation is active again.
async fn reinstall_and_continue(scenario: &Scenario<'_>, keep: &str, first: &str) {
    // The hook uses force only if the CRDs are removed. In the other case, `--force` is tested by hand.
    let force = if keep == "true" { "false" } else { "true" };
    let values =
        [("cleanup.enabled", "true"), UNSCHEDULABLE_HOOKS, ("crds.keep", keep), ("cleanup.force", force)];
    scenario.env.cluster.install_chart(&values).await.unwrap();
    scenario.env.restart_all().await;
    scenario.until_cordoned("n1").await;
    let continues = |first: &Evacuation| {
        let active = first.status.as_ref().is_some_and(|status| status.active_evacuator_class.is_some());
        active && first.has_instigator(names::instigator::NODE_MAINTENANCE)
    };
    let first = wait::present(scenario.evacuations(), first, "continues", SOON, continues).await;
    scenario.explained(first);
}

#[tokio::test]
async fn uninstall_during_a_drain_leaves_nothing() {
    let cluster = Cluster::builder().name("removal").audit(true).taint_eviction(false).boot().await.unwrap();
    cluster.install_chart(&[]).await.unwrap();
    let env = TestEnv::on(cluster, None, SHORT_LEASE, &[]).await;
    let scenario = env.scenario("shop").await;
    let values = [("cleanup.enabled", "true"), UNSCHEDULABLE_HOOKS, ("taintManager.enabled", "true")];
    let webhook = Webhook::install(&env.cluster, &values).await.unwrap();
    let _replica = webhook.start(&env.cluster, &[]).await.unwrap();
    Webhook::reachable(&env.cluster).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.yaml");
    std::fs::write(&policy, "rules:\n- {key: gentle, action: Evacuate}\n").unwrap();
    let args = ["--watch-gap-grace-seconds", "0", "--policy", &policy.display().to_string()];
    let taints = Service::start(&env.cluster, "taint-manager", &args).await.unwrap();
    taints.leads().await.unwrap();
    let replacing = Service::start(&env.cluster, "workload-evacuator", &[]).await.unwrap();
    replacing.leads().await.unwrap();
    let (before, first) = partly_drained_node(&scenario).await;
    create_earlier_certificate(&env).await;
    let tainted = scenario.node("n2", "green").await;
    scenario.patch_node("n2", json!({"spec": {"taints": [{"key": "mine", "effect": "NoExecute"}]}})).await;
    let timed = |node: &Node| node.annotations().contains_key(names::TAINTS_FIRST_SEEN_ANNOTATION);
    scenario.until_node("n2", "has the recorded taint time", timed).await;
    // An Evacuation of another instigator, which only the evacuation controller would delete.
    scenario.node("n3", "red").await;
    let pod = scenario.slow_pod("theirs", "n3").await;
    scenario.evacuation_by_others(&pod).await;
    scenario.until_evacuator_active(&pod).await;

    hook(&env, "haulout-check", &["test", "haulout", "-n", OURS]).await;
    // Nobody else gives the moved pods back.
    drop(replacing);
    let others = env.scenario("moved").await;
    others.node("n5", "pool").await;
    let pod = moved_pod(&others, "disabled").await;
    let bound = Box::pin(disable_services(&scenario)).await;
    is_given_back(&others, "disabled", &pod).await;
    let enable = upgrade("workloadEvacuator.enabled=true");
    helm(&env.cluster, &enable.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let pod = moved_pod(&others, "uninstalled").await;
    uninstall_is_rejected_while_an_evacuation_runs(&scenario, &bound).await;
    complete_evacuator(&scenario, &bound).await;
    scenario.until_pod_gone("bound").await;
    scenario.explained(wait::gone(scenario.evacuations(), &bound, SOON).await);
    // The services keep running: without permissions they can do no harm.
    uninstall(&env).await;
    let definitions: BTreeSet<_> = haulout_api_types::crds()
        .iter()
        .map(|crd| format!("customresourcedefinition.apiextensions.k8s.io/{}", crd.name_any()))
        .collect();
    // As the chart's notes say.
    until_only(&env.cluster, &definitions).await;
    scenario.until_restored(&before).await;
    is_given_back(&others, "uninstalled", &pod).await;
    assert!(!timed(&scenario.nodes().get(&scenario.of("n2")).await.unwrap()));
    assert_eq!(tainted.labels(), scenario.nodes().get(&scenario.of("n2")).await.unwrap().labels());
    assert_eq!(scenario.pods_with_evacuation().await, BTreeSet::new());
    assert_eq!(
        scenario.pods().list(&ListParams::default()).await.unwrap().items.len(),
        4,
        "pods stay where they are"
    );
    let kept = scenario.maintenances().get(&scenario.of("blue")).await.unwrap();
    assert_eq!((kept.spec.stage, kept.finalizers()), (Stage::Drain, &[] as &[String]));
    // Nothing blocks other requests.
    scenario.maintain("green", "green", Stage::Drain).await;
    let green = scenario.of("green");
    scenario.maintenances().delete(&green, &DeleteParams::default()).await.unwrap();
    assert!(scenario.maintenances().get_opt(&green).await.unwrap().is_none());

    // The same without hooks, for clusters that cannot run the Job, as docs/upgrade.md describes.
    reinstall_and_continue(&scenario, "true", &first).await;
    let fails = ["uninstall", "haulout", "-n", OURS, "--timeout", "5s"];
    assert!(!env.cluster.helm(&fails).await.unwrap().status.success(), "nothing runs the Job");
    helm(&env.cluster, &["uninstall", "haulout", "-n", OURS, "--no-hooks", "--wait"]).await;
    forbid_cancellation(&scenario, &first).await;
    let release = format!("{OURS}.haulout");
    let by_hand = async |insist: &[&str]| {
        let args = [["cleanup", "--release", &release].as_slice(), insist].concat();
        let admin = &env.cluster.kubeconfig;
        let task = Service::start_as(&env.cluster, "chart-hooks", admin, &args).unwrap();
        (task.exited().await.success(), task.text())
    };
    let (done, said) = by_hand(&[]).await;
    assert!(!done && said.contains(&format!("shop/{first}; nothing was changed")), "{said}");
    let (done, said) = by_hand(&["--force"]).await;
    assert!(done, "{said}");
    delete_hook_objects(&env).await;
    until_only(&env.cluster, &definitions).await;
    scenario.until_restored(&before).await;
    assert_eq!(scenario.pods_with_evacuation().await, BTreeSet::new());

    // Now the CRDs are removed as well.
    reinstall_and_continue(&scenario, "false", &first).await;
    forbid_cancellation(&scenario, &first).await;
    uninstall(&env).await;
    let crds: Api<CustomResourceDefinition> = Api::all(env.client.clone());
    for crd in haulout_api_types::crds() {
        scenario.explained(wait::gone(crds.clone(), &crd.name_any(), SOON).await);
    }
    scenario.until_restored(&before).await;
    until_only(&env.cluster, &BTreeSet::new()).await;
    let namespace = ["delete", "namespace", "shop", "--timeout=60s"];
    env.cluster.kubectl(&namespace).await.unwrap().success().unwrap();
}

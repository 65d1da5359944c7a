//! An installation as a whole: tested, upgraded halfway through a drain, and removed halfway through one. Its
//! programs are local processes with the rights of the chart's ServiceAccounts, as everywhere in these tests; what
//! Helm starts in hooks is started here as well, with the arguments of the hook.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use haulout_api_types::node_maintenance::Stage;
use haulout_api_types::{Evacuation, names};
use haulout_e2e::nodes::Look;
use haulout_e2e::process::Output;
use haulout_e2e::service::{NAMESPACE as OURS, SKIPPED};
use haulout_e2e::{Cluster, Handle, Service, Webhook, objects, wait};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use kube::runtime::watcher;
use serde_json::json;

use crate::chart::helm;
use crate::maintenance::scene::{SHORT_LEASE, SOON, Scene, World, slow};

/// A node with a pod whose evacuator takes its time and one that may only leave after it.
async fn halfway(scene: &Scene<'_>) -> (Node, String) {
    let node = scene.node("n1", "blue").await;
    let first = objects::pod("first").label("app", "first").annotation(&slow(), "100");
    let first = scene.pod_from(first, "n1").await;
    scene.pod("later", "n1").await;
    let plan = json!([{"podSelector": {"matchLabels": {"app": "first"}}, "podPriority": 1000, "podType": "Default"}]);
    scene.maintain_with("blue", "blue", Stage::Drain, plan).await;
    let evacuation = scene.in_charge(&first).await;
    scene.until_cordoned("n1").await;
    (node, evacuation)
}

/// The last commit whose chart had no clean-up, checks or network policies.
const EARLIER: &str = "7accca5824611351d9e022fd70f8e94598a51d44";

/// The chart of an earlier commit, where there is a history.
fn earlier_chart(folder: &Path) -> Option<PathBuf> {
    let script =
        "git archive --output \"$1/chart.tar\" \"$2\" charts/haulout && tar -xf \"$1/chart.tar\" -C \"$1\"";
    let mut command = std::process::Command::new("sh");
    command.args(["-c", script, "sh"]).arg(folder).arg(EARLIER);
    let got = command.current_dir(haulout_e2e::repository()).status().unwrap();
    got.success().then(|| folder.join("charts/haulout"))
}

const LATER_RIGHTS: &str = "later-rights";

/// The programs are the present ones: under the earlier chart they lack the rights that they have needed since.
async fn grant_later_rights(cluster: &Cluster) {
    let rules = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": LATER_RIGHTS},
        "rules": [
            {"apiGroups": [names::NODE_MAINTENANCE_GROUP], "resources": ["nodemaintenances"], "verbs": ["delete"]},
            {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["list", "watch"]},
        ],
    });
    cluster.kubectl_with(&["create", "-f", "-"], &rules.to_string()).await.unwrap().success().unwrap();
    let (role, account) = (
        format!("--clusterrole={LATER_RIGHTS}"),
        format!("--serviceaccount={OURS}:haulout-maintenance-controller"),
    );
    let bind = ["create", "clusterrolebinding", LATER_RIGHTS, &role, &account];
    cluster.kubectl(&bind).await.unwrap().success().unwrap();
}

#[tokio::test]
async fn upgrade_and_rollback_during_a_drain() {
    let folder = tempfile::tempdir().unwrap();
    let Some(earlier) = earlier_chart(folder.path()) else {
        println!("{SKIPPED}the history is not here: git fetch --unshallow");
        return;
    };
    let cluster = Cluster::builder().name("upgrade").scheduler(false).boot().await.unwrap();
    cluster.install_chart_from(&earlier, &[]).await.unwrap();
    grant_later_rights(&cluster).await;
    let world = World::on(cluster, None, SHORT_LEASE, &[]).await;
    let scene = world.scene("shop").await;
    let (before, evacuation) = halfway(&scene).await;

    world.cluster.install_chart(&[("maintenanceController.resources.requests.cpu", "20m")]).await.unwrap();
    let withdraw = ["delete", "clusterrolebinding", LATER_RIGHTS];
    world.cluster.kubectl(&withdraw).await.unwrap().success().unwrap();
    world.roll().await;

    // And back: the definitions too, with the objects in place.
    helm(&world.cluster, &["rollback", "haulout", "1", "-n", OURS]).await;
    let first = scene.maintenances().get(&scene.of("blue")).await.unwrap();
    assert_eq!(first.spec.stage, Stage::Drain);
    complete_evacuator(&scene, &evacuation).await;
    scene.until_pod_gone("first").await;
    scene.until_pod_gone("later").await;
    scene.until_drained("blue").await;
    scene.set_stage("blue", Stage::Complete).await;
    scene.until_completed("blue").await;
    scene.until_as_before(&before).await;
}

/// Pods stay pending: KWOK's nodes would end those of a Job at once, and Helm take their rights away while they are used.
const NOWHERE: (&str, &str) = ("nodeSelector.real", "yes");

/// Runs a command of Helm that has a hook, and does itself what the pod of the hook would do.
async fn hook(world: &World, account: &str, command: &[&str]) {
    let (done, helm, said) = try_hook(world, account, command).await;
    assert!(done, "{said}");
    helm.success().unwrap();
}

/// The same: whether the hook has done its work, what Helm made of it, and what the hook said.
async fn try_hook(world: &World, account: &str, command: &[&str]) -> (bool, Output, String) {
    let cluster = world.cluster.handle().clone();
    let command: Vec<_> = command.iter().map(ToString::to_string).collect();
    let helm = tokio::spawn(async move {
        let args: Vec<_> = command.iter().map(String::as_str).chain(["--timeout", "3m"]).collect();
        cluster.helm(&args).await.unwrap()
    });
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), OURS);
    let component = account.trim_start_matches("haulout-");
    let selector = watcher::Config::default().labels(&format!("app.kubernetes.io/component={component}"));
    let made = wait::all(pods.clone(), selector, "are made by the hook", SOON, |pods| !pods.is_empty()).await;
    let pod = made.unwrap().remove(0);
    let container = &pod.spec.as_ref().unwrap().containers[0];
    let args: Vec<_> = container.args.iter().flatten().map(String::as_str).collect();
    // An image has the name of its program.
    let image = container.image.as_deref().unwrap();
    let program = image.rsplit('/').next().and_then(|name| name.split(':').next()).unwrap();
    let kubeconfig = world.cluster.service_account_kubeconfig(OURS, account).await.unwrap();
    let task = Service::start_as(&world.cluster, program, &kubeconfig, &args).unwrap();
    let done = task.exited().await.success();
    if !done {
        // It would be tried again three times.
        let jobs: Api<Job> = Api::namespaced(world.client.clone(), OURS);
        let once = Patch::Merge(json!({"spec": {"backoffLimit": 0}}));
        jobs.patch(account, &PatchParams::default(), &once).await.unwrap();
    }
    // No node runs the pod; this is how one would say that it has ended.
    let phase = if done { "Succeeded" } else { "Failed" };
    let ended = Patch::Merge(json!({"status": {"phase": phase}}));
    pods.patch_status(&pod.name_any(), &PatchParams::default(), &ended).await.unwrap();
    (done, helm.await.unwrap(), task.text())
}

async fn uninstall(world: &World) {
    hook(world, "haulout-cleanup", &["uninstall", "haulout", "-n", OURS, "--wait"]).await;
}

/// Removes what is left of hooks that failed, as docs/upgrade.md has it.
async fn remove_hooks(world: &World) {
    let kinds = "jobs,pods,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings";
    let hooks =
        "app.kubernetes.io/instance=haulout,app.kubernetes.io/component in (cleanup, check, withdraw)";
    let delete = ["delete", kinds, "--namespace", OURS, "--selector", hooks];
    world.cluster.kubectl(&delete).await.unwrap().success().unwrap();
}

/// As an evacuator says that it cannot stop half-way.
async fn forbid_cancellation(scene: &Scene<'_>, evacuation: &str) {
    let forbid = Patch::Merge(json!({"status": {"evacuationCancellationPolicy": "Forbid"}}));
    scene.evacuations().patch_status(evacuation, &PatchParams::default(), &forbid).await.unwrap();
}

async fn complete_evacuator(scene: &Scene<'_>, evacuation: &str) {
    let completed = Patch::Merge(json!({"status": {"activeEvacuatorCompleted": true}}));
    scene.evacuations().patch_status(evacuation, &PatchParams::default(), &completed).await.unwrap();
}

/// A node from which the taint manager has two pods evacuated. It is switched off; one of the two evacuators cannot
/// stop half-way, and its Evacuation is what is left.
async fn switch_the_taint_manager_off(scene: &Scene<'_>) -> String {
    scene.node("n4", "violet").await;
    let (cancelled, bound) = (scene.slow_pod("cancelled", "n4").await, scene.slow_pod("bound", "n4").await);
    scene.patch_node("n4", json!({"spec": {"taints": [{"key": "gentle", "effect": "NoExecute"}]}})).await;
    let (withdrawn, kept) = (scene.in_charge(&cancelled).await, scene.in_charge(&bound).await);
    forbid_cancellation(scene, &kept).await;

    let chart = crate::chart::chart().display().to_string();
    let off = ["--reuse-values", "--set", "taintManager.enabled=false"];
    let upgrade = [["upgrade", "haulout", &chart, "-n", OURS].as_slice(), &off].concat();
    hook(scene.world, "haulout-withdraw", &upgrade).await;
    scene.explained(wait::gone(scene.evacuations(), &withdrawn, SOON).await);
    let pod = scene.pods().get("cancelled").await.unwrap();
    assert_eq!((pod.uid(), pod.metadata.deletion_timestamp), (cancelled.uid(), None), "it stays");
    let left = scene.evacuations().get(&kept).await.unwrap();
    assert!(
        left.is_wanted_by(names::instigator::TAINT_MANAGER) && left.metadata.deletion_timestamp.is_none()
    );
    kept
}

/// An uninstall while an evacuator cannot stop half-way changes nothing, and says why.
async fn uninstall_is_refused(scene: &Scene<'_>, bound: &str) {
    let look = async || {
        let kubectl =
            async |args: &[&str]| scene.world.cluster.kubectl(args).await.unwrap().success().unwrap();
        let bindings = [
            "get",
            "clusterrolebindings,rolebindings,leases,secrets",
            "-A",
            "-l",
            "app.kubernetes.io/name=haulout",
        ];
        let bindings = kubectl(&[bindings.as_slice(), &["-o", "name"]].concat()).await;
        // But for those of the hook.
        let bindings: Vec<_> =
            bindings.lines().filter(|line| !line.ends_with("-cleanup")).map(String::from).collect();
        let evacuations = scene.evacuations().list(&ListParams::default()).await.unwrap().items;
        let evacuations: Vec<_> =
            evacuations.iter().map(|e| (e.name_any(), e.finalizers().to_vec())).collect();
        let nodes = scene.nodes().list(&ListParams::default()).await.unwrap().items;
        let nodes: Vec<_> = nodes.iter().map(|node| format!("{:?}", Look::of(node))).collect();
        (bindings, evacuations, nodes)
    };
    let before = look().await;
    let uninstall = ["uninstall", "haulout", "-n", OURS];
    let (done, helm, said) = try_hook(scene.world, "haulout-cleanup", &uninstall).await;
    assert!(!done && !helm.status.success(), "{said}");
    let named = format!("the pods are still there: {}/{bound}; nothing has been changed", scene.name);
    assert!(said.contains(&named) && said.contains("--force (chart value cleanup.force=true)"), "{said}");
    assert_eq!(look().await, before);
    remove_hooks(scene.world).await;
}

/// Everything in the release's namespace and, by its labels, elsewhere.
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
    // What every namespace has.
    let own = ["configmap/kube-root-ca.crt", "serviceaccount/default"];
    found.lines().filter(|object| !own.contains(object)).map(Into::into).collect()
}

/// Waits until nothing else of ours is there; garbage is collected some moments later.
async fn until_only(cluster: &Handle, expected: &BTreeSet<String>) {
    let mut found = BTreeSet::new();
    let same = wait::eventually("only that is left", SOON, async || {
        found = left(cluster).await;
        Ok((found == *expected).then_some(()))
    });
    let same = same.await;
    assert_eq!(found, *expected);
    same.unwrap();
}

/// Installed again, the maintenance goes on where it was.
async fn install_again(scene: &Scene<'_>, keep: &str) {
    // What insists in a hook is not what insists by hand.
    let force = if keep == "true" { "false" } else { "true" };
    let values = [("cleanup.enabled", "true"), NOWHERE, ("crds.keep", keep), ("cleanup.force", force)];
    scene.world.cluster.install_chart(&values).await.unwrap();
    scene.world.start_again().await;
    scene.until_cordoned("n1").await;
    let drains = |all: &[Evacuation]| all.iter().any(|e| e.is_wanted_by(names::instigator::NODE_MAINTENANCE));
    let evacuations = wait::all(scene.evacuations(), watcher::Config::default(), "go on", SOON, drains).await;
    scene.explained(evacuations);
}

#[tokio::test]
async fn uninstall_during_a_drain_leaves_nothing() {
    let cluster = Cluster::builder().name("removal").audit(true).taint_eviction(false).boot().await.unwrap();
    cluster.install_chart(&[]).await.unwrap();
    let world = World::on(cluster, None, SHORT_LEASE, &[]).await;
    let scene = world.scene("shop").await;
    let values = [("cleanup.enabled", "true"), NOWHERE, ("taintManager.enabled", "true")];
    let webhook = Webhook::install(&world.cluster, &values).await.unwrap();
    let _replica = webhook.start(&world.cluster, &[]).await.unwrap();
    Webhook::reachable(&world.cluster).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.yaml");
    std::fs::write(&policy, "rules:\n- {key: gentle, action: Evacuate}\n").unwrap();
    let args = ["--settle-seconds", "0", "--policy", &policy.display().to_string()];
    let taints = Service::start(&world.cluster, "taint-manager", &args).await.unwrap();
    taints.leads().await.unwrap();
    let (before, first) = halfway(&scene).await;
    let tainted = scene.node("n2", "green").await;
    scene.patch_node("n2", json!({"spec": {"taints": [{"key": "mine", "effect": "NoExecute"}]}})).await;
    let timed = |node: &Node| node.annotations().contains_key(names::TAINTS_FIRST_SEEN_ANNOTATION);
    scene.until_node("n2", "has the taint's time", timed).await;
    // Somebody else's wish, which only the evacuation controller would ever end.
    scene.node("n3", "red").await;
    let pod = scene.slow_pod("theirs", "n3").await;
    scene.evacuation_by_others(&pod).await;
    scene.in_charge(&pod).await;

    hook(&world, "haulout-check", &["test", "haulout", "-n", OURS]).await;
    let bound = Box::pin(switch_the_taint_manager_off(&scene)).await;
    uninstall_is_refused(&scene, &bound).await;
    complete_evacuator(&scene, &bound).await;
    scene.until_pod_gone("bound").await;
    scene.explained(wait::gone(scene.evacuations(), &bound, SOON).await);
    // The services go on running: without their rights they can do no harm.
    uninstall(&world).await;
    let definitions: BTreeSet<_> = haulout_api_types::crds()
        .iter()
        .map(|crd| format!("customresourcedefinition.apiextensions.k8s.io/{}", crd.name_any()))
        .collect();
    // As the chart says.
    until_only(&world.cluster, &definitions).await;
    scene.until_as_before(&before).await;
    assert!(!timed(&scene.nodes().get(&scene.of("n2")).await.unwrap()));
    assert_eq!(tainted.labels(), scene.nodes().get(&scene.of("n2")).await.unwrap().labels());
    assert_eq!(scene.evacuated().await, BTreeSet::new());
    assert_eq!(
        scene.pods().list(&ListParams::default()).await.unwrap().items.len(),
        4,
        "pods stay where they are"
    );
    let kept = scene.maintenances().get(&scene.of("blue")).await.unwrap();
    assert_eq!((kept.spec.stage, kept.finalizers()), (Stage::Drain, &[] as &[String]));
    // Nobody stands in the way of anything.
    scene.maintain("green", "green", Stage::Drain).await;
    let green = scene.of("green");
    scene.maintenances().delete(&green, &DeleteParams::default()).await.unwrap();
    assert!(scene.maintenances().get_opt(&green).await.unwrap().is_none());

    // The same where no Job can run: without hooks, and with what docs/upgrade.md has for it.
    install_again(&scene, "true").await;
    let fails = ["uninstall", "haulout", "-n", OURS, "--timeout", "5s"];
    assert!(!world.cluster.helm(&fails).await.unwrap().status.success(), "nobody runs the Job");
    helm(&world.cluster, &["uninstall", "haulout", "-n", OURS, "--no-hooks", "--wait"]).await;
    forbid_cancellation(&scene, &first).await;
    let release = format!("{OURS}.haulout");
    let by_hand = async |insist: &[&str]| {
        let args = [["cleanup", "--release", &release].as_slice(), insist].concat();
        let admin = &world.cluster.kubeconfig;
        let task = Service::start_as(&world.cluster, "chart-hooks", admin, &args).unwrap();
        (task.exited().await.success(), task.text())
    };
    let (done, said) = by_hand(&[]).await;
    assert!(!done && said.contains(&format!("shop/{first}; nothing has been changed")), "{said}");
    let (done, said) = by_hand(&["--force"]).await;
    assert!(done, "{said}");
    remove_hooks(&world).await;
    until_only(&world.cluster, &definitions).await;
    scene.until_as_before(&before).await;
    assert_eq!(scene.evacuated().await, BTreeSet::new());

    // Now the definitions are to go as well.
    install_again(&scene, "false").await;
    forbid_cancellation(&scene, &first).await;
    uninstall(&world).await;
    let crds: Api<CustomResourceDefinition> = Api::all(world.client.clone());
    for crd in haulout_api_types::crds() {
        scene.explained(wait::gone(crds.clone(), &crd.name_any(), SOON).await);
    }
    scene.until_as_before(&before).await;
    until_only(&world.cluster, &BTreeSet::new()).await;
    let namespace = ["delete", "namespace", "shop", "--timeout=60s"];
    world.cluster.kubectl(&namespace).await.unwrap().success().unwrap();
}

//! An installation as a whole: tested, upgraded halfway through a drain, and removed halfway through one. Its
//! programs are local processes with the rights of the chart's ServiceAccounts, as everywhere in these tests; what
//! Helm starts in hooks is started here as well, with the arguments of the hook.

mod world;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use haulout_api_types::node_maintenance::Stage;
use haulout_api_types::{Evacuation, names};
use haulout_e2e::service::{NAMESPACE as OURS, SKIPPED};
use haulout_e2e::{Cluster, Handle, Service, Webhook, objects, wait};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use serde_json::json;

use self::world::{NAMESPACE, SOON, World, slow};
use crate::chart::helm;

const CONTROLLERS: [&str; 2] = ["maintenance-controller", "evacuation-controller"];

async fn start(cluster: &Handle, name: &str) -> Service {
    let service = Service::start(cluster, name, &["--lease-seconds", "3"]).await.unwrap();
    service.ready().await.unwrap();
    service
}

/// A node with a pod whose evacuator takes its time and one that may only leave after it.
async fn halfway(world: &World, name: &str) -> (Node, String) {
    let node = world.node("n1", name).await;
    let first = objects::pod("first").label("app", "first").annotation(&slow(), "100");
    let first = world.pod_from(first, "n1").await;
    world.pod("later", "n1").await;
    let plan = json!([{"podSelector": {"matchLabels": {"app": "first"}}, "podPriority": 1000, "podType": "Default"}]);
    world.maintain_with(name, name, Stage::Drain, plan).await;
    let evacuation = world.in_charge(&first).await;
    world.until_cordoned("n1").await;
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
    let got = command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()).status().unwrap();
    got.success().then(|| folder.join("charts/haulout"))
}

#[tokio::test]
async fn an_upgrade_and_a_rollback_halfway_through_a_drain_change_nothing_about_it() {
    let folder = tempfile::tempdir().unwrap();
    let Some(earlier) = earlier_chart(folder.path()) else {
        println!("{SKIPPED}the history is not here: git fetch --unshallow");
        return;
    };
    let cluster = Cluster::builder().name("upgrade").scheduler(false).boot().await.unwrap();
    cluster.install_chart_from(&earlier, &[]).await.unwrap();
    let mut world = World::on(cluster).await;
    let (before, evacuation) = halfway(&world, "blue").await;

    // The new version beside the old one, as a Deployment rolls.
    world.cluster.install_chart(&[("maintenanceController.resources.requests.cpu", "20m")]).await.unwrap();
    for (old, name) in [&mut world.controller, &mut world.evacuation_controller].into_iter().zip(CONTROLLERS)
    {
        let new = start(&world.cluster, name).await;
        let old = std::mem::replace(old, new);
        old.signal(rustix::process::Signal::TERM).unwrap();
        assert!(old.exited().await.success());
    }
    world.controller.leads().await.unwrap();
    world.evacuation_controller.leads().await.unwrap();

    // And back: the definitions too, with the objects in place.
    helm(&world.cluster, &["rollback", "haulout", "1", "-n", OURS]).await;
    let first = world.maintenances().get("blue").await.unwrap();
    assert_eq!(first.spec.stage, Stage::Drain);
    let completed = Patch::Merge(json!({"status": {"activeEvacuatorCompleted": true}}));
    world.evacuations().patch_status(&evacuation, &PatchParams::default(), &completed).await.unwrap();
    world.until_pod_gone("first").await;
    world.until_pod_gone("later").await;
    world.until_drained("blue").await;
    world.set_stage("blue", Stage::Complete).await;
    world.until_completed("blue").await;
    world.until_as_before(&before).await;
}

/// Runs a command of Helm that has a hook, and does itself what the pod of the hook would do.
async fn hook(world: &World, account: &str, command: &[&str]) {
    let cluster = world.cluster.handle().clone();
    let command: Vec<_> = command.iter().map(ToString::to_string).collect();
    let helm = tokio::spawn(async move {
        let args: Vec<_> = command.iter().map(String::as_str).chain(["--timeout", "3m"]).collect();
        cluster.helm(&args).await.unwrap().success().unwrap()
    });
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), OURS);
    let component = account.trim_start_matches("haulout-");
    let selector = watcher::Config::default().labels(&format!("app.kubernetes.io/component={component}"));
    let made = wait::all(pods.clone(), selector, "are made by the hook", SOON, |pods| !pods.is_empty()).await;
    let pod = made.unwrap().remove(0);
    let args = pod.spec.as_ref().unwrap().containers[0].args.clone().unwrap();
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    let kubeconfig = world.cluster.service_account_kubeconfig(OURS, account).await.unwrap();
    let task = Service::start_as(&world.cluster, "maintenance-controller", &kubeconfig, &args).unwrap();
    assert!(task.exited().await.success(), "{}", task.text());
    // No node runs the pod; this is how one would say that it has ended.
    let ended = Patch::Merge(json!({"status": {"phase": "Succeeded"}}));
    pods.patch_status(&pod.name_any(), &PatchParams::default(), &ended).await.unwrap();
    helm.await.unwrap();
}

async fn uninstall(world: &World) {
    hook(world, "haulout-cleanup", &["uninstall", "haulout", "-n", OURS, "--wait"]).await;
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

#[tokio::test]
async fn an_uninstall_halfway_through_a_drain_leaves_nothing_and_hangs_nothing() {
    let mut world = World::new("removal").await;
    let values = [("cleanup.enabled", "true"), ("taintManager.enabled", "true")];
    let webhook = Webhook::install(&world.cluster, &values).await.unwrap();
    let _replica = webhook.start(&world.cluster, &[]).await.unwrap();
    Webhook::reachable(&world.cluster).await.unwrap();
    let _taints = start(&world.cluster, "taint-manager").await;
    let (before, _) = halfway(&world, "blue").await;
    let tainted = world.node("n2", "green").await;
    let taint = Patch::Merge(json!({"spec": {"taints": [{"key": "mine", "effect": "NoExecute"}]}}));
    world.nodes().patch("n2", &PatchParams::default(), &taint).await.unwrap();
    let timed = |node: &Node| node.annotations().contains_key(names::TAINTS_FIRST_SEEN_ANNOTATION);
    world.until_node("n2", "has the taint's time", timed).await;
    // Somebody else's wish, which only the evacuation controller would ever end.
    world.node("n3", "red").await;
    let pod = world.slow_pod("theirs", "n3").await;
    let (theirs, _) = haulout_api_types::evacuators::evacuation_for(
        &pod.metadata,
        "descheduler.example.com",
        &BTreeSet::new(),
    )
    .unwrap();
    world.evacuations().create(&PostParams::default(), &theirs).await.unwrap();
    world.in_charge(&pod).await;

    hook(&world, "haulout-check", &["test", "haulout", "-n", OURS]).await;
    // The services go on running: without their rights they can do no harm.
    uninstall(&world).await;
    let definitions: BTreeSet<_> = haulout_api_types::crds()
        .iter()
        .map(|crd| format!("customresourcedefinition.apiextensions.k8s.io/{}", crd.name_any()))
        .collect();
    // As the chart says.
    until_only(&world.cluster, &definitions).await;
    world.until_as_before(&before).await;
    assert!(!timed(&world.nodes().get("n2").await.unwrap()));
    assert_eq!(tainted.labels(), world.nodes().get("n2").await.unwrap().labels());
    assert_eq!(world.evacuated().await, BTreeSet::new());
    assert_eq!(
        world.pods().list(&ListParams::default()).await.unwrap().items.len(),
        3,
        "pods stay where they are"
    );
    let kept = world.maintenances().get("blue").await.unwrap();
    assert_eq!((kept.spec.stage, kept.finalizers()), (Stage::Drain, &[] as &[String]));
    // Nobody stands in the way of anything.
    world.maintain("green", "green", Stage::Drain).await;
    world.maintenances().delete("green", &DeleteParams::default()).await.unwrap();
    assert!(world.maintenances().get_opt("green").await.unwrap().is_none());

    // Installed again, the maintenance goes on where it was, and now the definitions are to go as well.
    world.cluster.install_chart(&[("cleanup.enabled", "true"), ("crds.keep", "false")]).await.unwrap();
    world.controller = start(&world.cluster, "maintenance-controller").await;
    world.evacuation_controller = start(&world.cluster, "evacuation-controller").await;
    world.until_cordoned("n1").await;
    let drains = |all: &[Evacuation]| all.iter().any(|e| e.is_wanted_by(names::instigator::NODE_MAINTENANCE));
    let evacuations = wait::all(world.evacuations(), watcher::Config::default(), "go on", SOON, drains).await;
    world.explained(evacuations);
    uninstall(&world).await;
    let crds: Api<CustomResourceDefinition> = Api::all(world.client.clone());
    for crd in haulout_api_types::crds() {
        world.explained(wait::gone(crds.clone(), &crd.name_any(), SOON).await);
    }
    world.until_as_before(&before).await;
    until_only(&world.cluster, &BTreeSet::new()).await;
    let namespace = ["delete", "namespace", NAMESPACE, "--timeout=60s"];
    world.cluster.kubectl(&namespace).await.unwrap().success().unwrap();
}

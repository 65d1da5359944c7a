//! Runs every `sh` block in the README and `docs/`, page by page and from top to bottom, in a cluster with the chart,
//! its webhook and its controllers. The blocks can use
//!
//! - `kubectl`, and `helm`, whose upgrades use the values of these tests, because the services are local processes;
//! - `cargo xtask`, which only validates command and arguments;
//! - our binaries, `charts`, `examples`, and the YAML of the page under the file names in their first lines;
//! - nodes `node-1` to `node-4` and a workload.
//!
//! Nothing else is available, so that a page with another command fails, unless its block is marked `no-test`. Inline
//! read-only commands (`kubectl get`, `kubectl explain`) run too.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::StreamExt as _;
use haulout_e2e::service::{NAMESPACE as OURS, SERVED_CLASSES};
use haulout_e2e::{Cluster, Handle, Service, Webhook, objects, wait, webhook};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use serde_json::json;
use tokio::task::JoinSet;

use super::pages::{self, Page};
use super::root;
use crate::support::xtask;

/// Untested blocks are for commands that no test can run. Each one is an unchecked promise.
const MAX_UNTESTED: usize = 2;

struct Sandbox {
    _hooks: JoinSet<()>,
    _services: Vec<Service>,
    webhook: Webhook,
    /// The folder with the available commands.
    programs: PathBuf,
    /// The log of called commands, one line each.
    called: PathBuf,
    cluster: Cluster,
}

impl Sandbox {
    async fn new() -> Self {
        let cluster = Cluster::builder().name("documentation").boot().await.unwrap();
        let nodes: Api<Node> = Api::all(cluster.client().await.unwrap());
        for (name, zone, pool) in [
            ("node-1", "zone-a", "web"),
            ("node-2", "zone-a", "build"),
            ("node-3", "zone-b", "web"),
            ("node-4", "zone-b", "build"),
        ] {
            let node = objects::node(name).label("topology.kubernetes.io/zone", zone).label("pool", pool);
            nodes.create(&PostParams::default(), &node.build()).await.unwrap();
        }
        let webhook = Webhook::install(&cluster, &[]).await.unwrap();
        let mut services = vec![webhook.start(&cluster, &[]).await.unwrap()];
        for (name, served) in [
            ("maintenance-controller", &[SERVED_CLASSES] as &[_]),
            ("evacuation-controller", &[SERVED_CLASSES]),
            ("workload-evacuator", &[]),
        ] {
            let args = [&["--lease-seconds", "3"], served].concat();
            let service = Service::start(&cluster, name, &args).await.unwrap();
            service.leads().await.unwrap();
            services.push(service);
        }
        Webhook::reachable(&cluster).await.unwrap();
        let programs = cluster.root.join("programs");
        let called = cluster.root.join("called");
        let mut hooks = JoinSet::new();
        hooks.spawn(run_tests_of_helm(cluster.handle().clone()));
        let sandbox = Self { _hooks: hooks, _services: services, webhook, programs, called, cluster };
        sandbox.write_programs().await;
        let workload = "kubectl apply --filename examples/sample-workload.yaml";
        sandbox.run(&root(), workload, "starting a workload").await;
        sandbox
    }

    async fn write_programs(&self) {
        fs::create_dir(&self.programs).unwrap();
        let values = self.cluster.root.join("values.yaml");
        let given = ["get", "values", "haulout", "-n", OURS, "--output", "yaml"];
        fs::write(&values, self.cluster.helm(&given).await.unwrap().success().unwrap()).unwrap();
        let tools = &self.cluster.tools;
        let (helm, values) = (tools.helm().display().to_string(), values.display().to_string());
        let installs = format!("case $1 in upgrade|install) set -- \"$@\" --values {values};; esac\n");
        self.write_program("kubectl", "", &format!("{} \"$@\"", tools.kubectl().display()));
        self.write_program("helm", &installs, &format!("{helm} \"$@\""));
        let known = format!("{} \"$@\" --help", xtask().display());
        self.write_program("cargo", "[ \"$1\" = xtask ] || exit 64\nshift\n", &known);
        let name = "chart-hooks";
        self.write_program(name, "", &format!("{} \"$@\"", xtask().with_file_name(name).display()));
    }

    fn write_program(&self, name: &str, before: &str, command: &str) {
        let called = self.called.display();
        let script = format!("#!/bin/sh\nprintf '%s\\n' \"{name} $*\" >> {called}\n{before}exec {command}\n");
        let path = self.programs.join(name);
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Runs a script and stops at the first failure.
    async fn run(&self, folder: &Path, script: &str, what: &str) {
        let shell = self.cluster.command(Path::new("/bin/sh")).args(["-eu", "-c", script]);
        let shell =
            shell.current_dir(folder).env("PATH", &self.programs).env("HAULOUT_LISTEN", "127.0.0.1:0");
        let output = shell.output(what).await.unwrap();
        let (said, complained) = (&output.stdout, &output.stderr);
        assert!(output.status.success(), "{what}:\n{script}\n{said}{complained}");
    }

    /// Restores the cluster for the next page: none of our objects, and a running workload that can be evicted.
    async fn tidy(&self) {
        Webhook::reachable(&self.cluster).await.unwrap();
        let script = "kubectl delete nodemaintenances,drainrules --all --timeout=60s
            kubectl delete deployment,poddisruptionbudget database --namespace shop --ignore-not-found
            kubectl rollout status deployment/web --namespace shop --timeout=60s";
        self.run(&root(), script, "tidying up").await;
    }

    /// Installs the chart if it is missing.
    async fn install(&self) {
        let there = self.cluster.helm(&["status", "haulout", "-n", OURS]).await.unwrap();
        if !there.status.success() {
            let url = webhook::url(&self.webhook.forwarder);
            let values = [("admissionWebhook.enabled", "true"), ("admissionWebhook.url", &url)];
            self.cluster.install_chart(&values).await.unwrap();
        }
    }

    /// Number of called commands.
    fn count(&self) -> usize {
        fs::read_to_string(&self.called).unwrap().lines().count()
    }

    async fn follow(&self, page: &Page) {
        let folder = tempfile::tempdir().unwrap();
        for name in ["charts", "examples"] {
            symlink(root().join(name), folder.path().join(name)).unwrap();
        }
        for block in page.blocks().into_iter().filter(|block| block.language == "yaml") {
            let title =
                block.text.lines().next().and_then(|line| line.strip_prefix("# ")?.strip_suffix(".yaml"));
            if let Some(name) = title.filter(|title| !title.contains(' ')) {
                fs::write(folder.path().join(format!("{name}.yaml")), &block.text).unwrap();
            }
        }
        for script in scripts(page) {
            if script.contains("helm uninstall") {
                self.install().await;
            }
            let before = self.count();
            self.run(folder.path(), &script, &page.name).await;
            assert!(self.count() > before, "{}: no command was called by\n{script}", page.name);
        }
    }
}

/// The blocks of a page, and its inline read-only commands.
fn scripts(page: &Page) -> Vec<String> {
    let blocks = page.blocks().into_iter().filter(|block| block.language == "sh" && !block.untested);
    let reads =
        |span: &String| ["kubectl get ", "kubectl explain "].iter().any(|read| span.starts_with(read));
    let mut scripts: Vec<_> = page.spans().into_iter().filter(reads).collect();
    scripts.extend(blocks.map(|block| block.text));
    scripts
}

/// Does what the pod of `helm test` would do: KWOK nodes only simulate pods.
async fn run_tests_of_helm(cluster: Handle) {
    let pods: Api<Pod> = Api::namespaced(cluster.client().await.unwrap(), OURS);
    let selector = watcher::Config::default().labels("app.kubernetes.io/component=check");
    let mut started = std::pin::pin!(watcher(pods.clone(), selector).default_backoff().applied_objects());
    let mut last = None;
    while let Some(pod) = started.next().await {
        let Ok(pod) = pod else { continue };
        if last == pod.uid() {
            continue;
        }
        last = pod.uid();
        let args = pod.spec.as_ref().unwrap().containers[0].args.clone().unwrap();
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let kubeconfig = cluster.service_account_kubeconfig(OURS, "haulout-check").await.unwrap();
        let check = Service::start_as(&cluster, "chart-hooks", &kubeconfig, &args).unwrap();
        let phase = if check.exited().await.success() { "Succeeded" } else { "Failed" };
        let ended = Patch::Merge(json!({"status": {"phase": phase}}));
        pods.patch_status(&pod.name_any(), &PatchParams::default(), &ended).await.unwrap();
    }
}

#[tokio::test]
async fn every_documented_command_works() {
    let mut pages = pages::for_users();
    let untested = pages.iter().flat_map(Page::blocks).filter(|block| block.untested).count();
    assert!(untested <= MAX_UNTESTED, "{untested} blocks are not tested, at most {MAX_UNTESTED} may be");
    // A stable sort: pages that remove everything come last.
    pages.sort_by_key(|page| page.text.contains("helm uninstall"));
    let sandbox = Sandbox::new().await;
    let ready = |node: &Node| {
        let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
        conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True")
    };
    let nodes: Api<Node> = Api::all(sandbox.cluster.client().await.unwrap());
    let all = |nodes: &[Node]| nodes.len() == 4 && nodes.iter().all(ready);
    wait::all(nodes, watcher::Config::default(), "are ready", Duration::from_secs(60), all).await.unwrap();
    for page in pages.iter().filter(|page| !scripts(page).is_empty()) {
        let begun = std::time::Instant::now();
        sandbox.tidy().await;
        sandbox.follow(page).await;
        println!("{} ({:.1} s)", page.name, begun.elapsed().as_secs_f64());
    }
    let called = fs::read_to_string(&sandbox.called).unwrap();
    for command in ["kubectl apply ", "kubectl wait ", "helm upgrade ", "helm test ", "cargo xtask "] {
        assert!(called.contains(command), "no page has {command}");
    }
}

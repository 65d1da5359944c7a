//! Haulout with running pods on real nodes: as users run it, from the chart and the images of `cargo xtask dist`, and what
//! the clients of an application observe. These tests take minutes, and are skipped on machines that cannot run a node.

mod client;
mod installation;
mod requests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use haulout_api_types::node_maintenance::Stage;
use haulout_api_types::{NodeMaintenance, names};
use haulout_e2e::service::{BINARIES, NAMESPACE, SKIPPED};
use haulout_e2e::{Cluster, RealNode, objects, real_node, wait};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, PodSpec};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Client, ResourceExt as _};
use serde_json::json;

use crate::support::xtask;

/// Long enough for a busy machine with real containers.
const SOON: Duration = Duration::from_secs(180);
/// A taint that keeps pods without a toleration away from simulated nodes.
const SIMULATED: &str = "haulout.test/simulated";

/// The output of `cargo xtask dist`, in its own folder.
struct Distribution {
    folder: tempfile::TempDir,
}

impl Distribution {
    fn make() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let made = Command::new(xtask()).args(["dist", "--output"]).arg(folder.path()).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Self { folder }
    }

    fn files(&self, suffix: &str) -> Vec<PathBuf> {
        let paths = std::fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> = paths.filter(|path| path.display().to_string().ends_with(suffix)).collect();
        files.sort();
        files
    }
}

/// Whether this machine can run a node. Prints a line if not, so that skipped tests can be counted.
fn can_run_nodes() -> bool {
    let missing = real_node::missing();
    if let Some(reason) = &missing {
        println!("{SKIPPED}{reason}");
    }
    missing.is_none()
}

/// Two real nodes.
struct TestEnv {
    client: Client,
    cluster: Cluster,
}

impl TestEnv {
    async fn boot(images: Vec<PathBuf>) -> Self {
        let builder = Cluster::builder().name("real").taint_eviction(false).real_nodes(2).images(images);
        let cluster = builder.boot().await.unwrap();
        let client = cluster.client().await.unwrap();
        Self { client, cluster }
    }

    async fn add_simulated_nodes(&self) {
        for name in ["simulated-1", "simulated-2"] {
            let node = objects::node(name).taint(SIMULATED, "", "NoSchedule").build();
            self.nodes().create(&PostParams::default(), &node).await.unwrap();
        }
    }

    fn nodes(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    fn maintenances(&self) -> Api<NodeMaintenance> {
        Api::all(self.client.clone())
    }

    async fn helm(&self, args: &[&str]) -> String {
        let output = self.cluster.helm(args).await.unwrap();
        match output.success() {
            Ok(text) => text,
            Err(error) => panic!("helm {}: {error:#}\n{}", args.join(" "), self.diagnostics().await),
        }
    }

    /// Installs the packaged chart into a namespace that accepts only restricted pods.
    async fn install(&self, chart: &Path) {
        let mut namespace = objects::namespace(NAMESPACE);
        let enforce = ("pod-security.kubernetes.io/enforce".to_owned(), "restricted".to_owned());
        namespace.metadata.labels = Some([enforce].into());
        Api::<Namespace>::all(self.client.clone()).create(&PostParams::default(), &namespace).await.unwrap();
        let chart = chart.display().to_string();
        let install = ["install", "haulout", &chart, "--namespace", NAMESPACE, "--wait", "--timeout", "4m"];
        let values = ["--set", "taintManager.enabled=true,crds.keep=false"];
        self.helm(&[install.as_slice(), &values].concat()).await;
    }

    /// The state of the cluster, to debug why something does not start.
    async fn diagnostics(&self) -> String {
        let mut story = String::new();
        for args in [
            ["get", "pods,nodes,events", "--all-namespaces", "--output=wide"].as_slice(),
            &[
                "logs",
                "--namespace",
                NAMESPACE,
                "--selector=app.kubernetes.io/name=haulout",
                "--tail=8",
                "--prefix",
            ],
        ] {
            let output = self.cluster.kubectl(args).await.unwrap();
            story.extend([output.stdout, output.stderr]);
        }
        story
    }

    async fn explained<T>(&self, result: anyhow::Result<T>) -> T {
        match result {
            Ok(value) => value,
            Err(error) => panic!("{error:#}\n{}", self.diagnostics().await),
        }
    }

    async fn maintain(&self, name: &str, node: &str) {
        let maintenance = serde_json::from_value(json!({
            "apiVersion": "nodemaintenance.k8s.io/v1alpha1",
            "kind": "NodeMaintenance",
            "metadata": {"name": name},
            "spec": {"stage": "Drain", "nodeSelector": {"nodeSelectorTerms": [
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]},
            ]}},
        }));
        self.maintenances().create(&PostParams::default(), &maintenance.unwrap()).await.unwrap();
    }

    async fn until_drained(&self, name: &str) {
        let drained = |m: &NodeMaintenance| {
            let mut conditions = m.status.iter().flat_map(|status| &status.conditions);
            conditions.any(|one| one.type_ == names::condition::DRAINED && one.status == "True")
        };
        self.explained(wait::present(self.maintenances(), name, "is drained", SOON, drained).await).await;
    }

    async fn complete(&self, name: &str) {
        let patch = Patch::Merge(json!({"spec": {"stage": Stage::Complete}}));
        self.maintenances().patch(name, &PatchParams::default(), &patch).await.unwrap();
        let done = |m: &NodeMaintenance| m.finalizers().is_empty();
        self.explained(wait::present(self.maintenances(), name, "lets go", SOON, done).await).await;
        self.maintenances().delete(name, &DeleteParams::default()).await.unwrap();
    }

    /// Waits until all Deployments of a namespace are available, and no old pod is left.
    async fn until_available(&self, namespace: &str) -> Vec<Deployment> {
        let available = |deployments: &[Deployment]| {
            deployments.iter().all(|deployment| {
                let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas);
                let status = deployment.status.as_ref();
                wanted == status.and_then(|status| status.available_replicas)
                    && wanted == status.and_then(|status| status.updated_replicas)
            })
        };
        let deployments = Api::namespaced(self.client.clone(), namespace);
        let all = watcher::Config::default();
        self.explained(wait::all(deployments, all, "are available", SOON, available).await).await
    }

    /// The nodes of a namespace's pods, without pods that have finished.
    async fn nodes_with_pods(&self, namespace: &str) -> BTreeSet<String> {
        let pods = self.pods(namespace).list(&unfinished()).await.unwrap();
        pods.items.into_iter().filter_map(|pod| pod.spec?.node_name).collect()
    }
}

/// All pods but those that have finished. The kubelet reports that a pod has finished before it deletes the pod.
fn unfinished() -> ListParams {
    ListParams::default().fields("status.phase!=Succeeded,status.phase!=Failed")
}

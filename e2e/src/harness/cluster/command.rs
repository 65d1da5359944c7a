//! The arguments of each program of the control plane.

use std::path::{Path, PathBuf};

use super::Component;
use super::ports::Ports;
use crate::handle::Handle;
use crate::nodes::{MANAGED, MANAGED_LABEL};
use crate::process::Command;

/// Settings that differ between clusters.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) ports: Ports,
    pub(super) taint_eviction: bool,
    pub(super) controller_manager_qps: Option<u32>,
    /// The network namespace of all programs, if it is not that of this machine.
    pub(super) network: Option<PathBuf>,
    /// Appended to the component's own arguments, so that they override them.
    pub(super) extra_args: Vec<(Component, String)>,
}

/// A kubelet's default. A Lease is renewed after a quarter of it.
const LEASE_SECONDS: u32 = 40;

/// All requests are recorded, without bodies. Readers filter them.
pub(super) const AUDIT_POLICY: &str = "\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Metadata
";

/// The command for a component of this cluster.
pub(super) fn command(component: Component, handle: &Handle, settings: &Settings) -> Command {
    let root = handle.root.as_path();
    let args = match component {
        Component::Etcd => etcd(root, settings.ports),
        Component::ApiServer => api_server(handle, settings.ports),
        Component::ControllerManager => controller_manager(root, settings),
        Component::Scheduler => scheduler(root),
        Component::KwokNodes => kwok(root, component, "nodes.yaml", LEASE_SECONDS),
        // Without Leases. Otherwise it would ignore pods on nodes whose Lease it does not hold.
        Component::Kwok => kwok(root, component, "pods.yaml", 0),
    };
    let extra = settings.extra_args.iter().filter(|(of, _)| *of == component).map(|(_, arg)| arg);
    let program = handle.tools.path(component.program());
    let command = match &settings.network {
        Some(network) => {
            Command::new("nsenter").arg(format!("--net={}", network.display())).arg("--").arg(program)
        }
        None => Command::new(program),
    };
    command
        .args(args)
        .args(extra)
        .current_dir(root)
        // The user's environment must not have an effect.
        .env_remove("KUBECONFIG")
        .env("KWOK_WORKDIR", root.join("data/kwok"))
        // Processors are scarcer than memory here.
        .env("GOGC", "400")
        .env("GOMEMLIMIT", "3GiB")
}

/// The name of the kubeconfig that a component uses.
pub(super) fn kubeconfig(component: Component) -> String {
    format!("{component}.kubeconfig")
}

fn etcd(root: &Path, ports: Ports) -> Vec<String> {
    let clients = format!("http://127.0.0.1:{}", ports.etcd);
    let peers = format!("http://127.0.0.1:{}", ports.etcd_peers);
    vec![
        "--name=default".to_owned(),
        format!("--data-dir={}", root.join("data/etcd").display()),
        format!("--listen-client-urls={clients}"),
        format!("--advertise-client-urls={clients}"),
        format!("--listen-peer-urls={peers}"),
        format!("--initial-advertise-peer-urls={peers}"),
        format!("--initial-cluster=default={peers}"),
        // The data is removed with the cluster.
        "--unsafe-no-fsync".to_owned(),
        // A single member does not have to wait for others. These are the shortest times until it becomes leader.
        "--heartbeat-interval=10".to_owned(),
        "--election-timeout=100".to_owned(),
        "--log-level=warn".to_owned(),
    ]
}

fn api_server(handle: &Handle, ports: Ports) -> Vec<String> {
    let file = |name: &str| handle.root.join("pki").join(name).display().to_string();
    let mut args = vec![
        format!("--etcd-servers=http://127.0.0.1:{}", ports.etcd),
        format!("--secure-port={}", ports.api_server),
        "--bind-address=127.0.0.1".to_owned(),
        "--advertise-address=127.0.0.1".to_owned(),
        // Endpoints may not be on loopback, and nothing here uses the `kubernetes` Service.
        "--endpoint-reconciler-type=none".to_owned(),
        format!("--cert-dir={}", handle.root.join("data").display()),
        format!("--client-ca-file={}", file("ca.crt")),
        format!("--tls-cert-file={}", file("apiserver.crt")),
        format!("--tls-private-key-file={}", file("apiserver.key")),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        format!("--service-account-key-file={}", file("sa.pub")),
        format!("--service-account-signing-key-file={}", file("sa.key")),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
        "--allow-privileged=true".to_owned(),
        "--profiling=false".to_owned(),
        // On SIGTERM, it closes its watches after this time. Otherwise it waits a minute for them.
        "--shutdown-watch-termination-grace-period=1s".to_owned(),
    ];
    if let Some(audit_log) = &handle.audit_log {
        args.extend([
            format!("--audit-policy-file={}", handle.root.join("audit-policy.yaml").display()),
            format!("--audit-log-path={}", audit_log.display()),
            // Written before the request is answered: see the `requests` module.
            "--audit-log-mode=blocking".to_owned(),
            // In MB. Rotation would invalidate marks.
            "--audit-log-maxsize=1000000".to_owned(),
        ]);
    }
    args
}

fn controller_manager(root: &Path, settings: &Settings) -> Vec<String> {
    let file = |name: &str| root.join("pki").join(name).display().to_string();
    let mut args = vec![
        format!("--kubeconfig={}", root.join(kubeconfig(Component::ControllerManager)).display()),
        "--leader-elect=false".to_owned(),
        "--secure-port=0".to_owned(),
        "--use-service-account-credentials".to_owned(),
        format!("--service-account-private-key-file={}", file("sa.key")),
        format!("--root-ca-file={}", file("ca.crt")),
    ];
    if let Some(qps) = settings.controller_manager_qps {
        args.extend([format!("--kube-api-qps={qps}"), format!("--kube-api-burst={}", qps.saturating_mul(2))]);
    }
    if !settings.taint_eviction {
        args.push("--controllers=*,-taint-eviction-controller".to_owned());
    }
    args
}

fn scheduler(root: &Path) -> Vec<String> {
    vec![
        format!("--kubeconfig={}", root.join(kubeconfig(Component::Scheduler)).display()),
        "--leader-elect=false".to_owned(),
        "--secure-port=0".to_owned(),
        "--kube-api-qps=1000".to_owned(),
        "--kube-api-burst=2000".to_owned(),
    ]
}

fn kwok(root: &Path, component: Component, stages: &str, lease_seconds: u32) -> Vec<String> {
    vec![
        format!("--kubeconfig={}", root.join(kubeconfig(component)).display()),
        format!("--config={}", crate::repository().join("e2e/kwok").join(stages).display()),
        // Other nodes are ignored, because a cluster can have real nodes. A label instead of KWOK's usual annotation,
        // because KWOK does not react to the removal of the annotation.
        format!("--manage-nodes-with-label-selector={MANAGED_LABEL}={MANAGED}"),
        format!("--node-lease-duration-seconds={lease_seconds}"),
        // The default range has 254 addresses.
        "--cidr=10.128.0.0/9".to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use serde::Deserialize as _;
    use serde_json::Value;

    #[test]
    fn stages_are_valid_and_cover_nodes_and_pods() {
        let text =
            [include_str!("../../../kwok/nodes.yaml"), include_str!("../../../kwok/pods.yaml")].join("---\n");
        let documents: Vec<Value> = serde_yaml::Deserializer::from_str(&text)
            .map(|document| Value::deserialize(document).unwrap())
            .collect();
        let stages: Vec<_> = documents.iter().filter(|document| document["kind"] == "Stage").collect();
        for kind in ["Node", "Pod"] {
            assert!(
                stages.iter().any(|stage| stage["spec"]["resourceRef"]["kind"] == kind),
                "no stage for {kind}"
            );
        }
        for stage in stages {
            assert_eq!(stage["apiVersion"], "kwok.x-k8s.io/v1alpha1");
            assert!(stage["spec"]["selector"].is_object(), "{stage} selects nothing");
            assert!(stage["spec"]["steps"].is_array(), "{stage} does nothing");
        }
    }
}

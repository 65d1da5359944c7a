//! Configuration files of a node's programs. JSON is valid YAML.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::json;

use super::{RealNode, SLEEPER, text};

/// The address range of all pods. Each node has a part of it.
const ALL_PODS: &str = "172.31.0.0/16";

/// The configuration of one node.
pub(super) struct Files<'a> {
    node: &'a RealNode,
}

impl<'a> Files<'a> {
    pub(super) fn new(node: &'a RealNode) -> Self {
        Self { node }
    }

    pub(super) fn containerd(&self) -> PathBuf {
        self.path("containerd.toml")
    }

    pub(super) fn kubelet(&self) -> PathBuf {
        self.path("kubelet.json")
    }

    pub(super) fn kubelet_kubeconfig(&self) -> PathBuf {
        self.path("kubelet.kubeconfig")
    }

    pub(super) fn proxy(&self) -> PathBuf {
        self.path("kube-proxy.json")
    }

    pub(super) fn proxy_kubeconfig(&self) -> PathBuf {
        self.path("kube-proxy.kubeconfig")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.node.folder.join(name)
    }

    pub(super) fn write(&self, authority: &Path) -> Result<()> {
        let network = self.path("network");
        let manifests = self.path("manifests");
        for folder in [&network, &manifests] {
            fs::create_dir_all(folder).with_context(|| format!("failed to create {}", folder.display()))?;
        }
        let files = [
            (self.containerd(), self.containerd_text(&network)),
            (self.kubelet(), self.kubelet_text(&manifests, authority)),
            (self.proxy(), self.proxy_text()),
            (network.join("pods.conflist"), self.network_text()),
        ];
        for (path, contents) in files {
            fs::write(&path, contents).with_context(|| format!("failed to write {}", path.display()))?;
        }
        Ok(())
    }

    fn containerd_text(&self, network: &Path) -> String {
        format!(
            r#"version = 2
root = "{root}"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs"]
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{SLEEPER}"
# To lower it takes CAP_SYS_RESOURCE, which we may not have.
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{network}"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"#,
            root = text(&self.path("containerd")),
            plugins = text(&self.node.tools.network_plugins()),
            network = text(network),
        )
    }

    fn network_text(&self) -> String {
        let addresses = json!({
            "type": "host-local",
            "dataDir": self.path("addresses"),
            "ranges": [[{ "subnet": self.node.pods() }]],
            "routes": [{ "dst": "0.0.0.0/0" }],
        });
        let bridge = json!({"type": "bridge", "bridge": "pods", "isGateway": true, "hairpinMode": true,
            "ipMasq": false, "ipam": addresses});
        json!({ "cniVersion": "1.0.0", "name": "pods", "plugins": [bridge] }).to_string()
    }

    fn kubelet_text(&self, manifests: &Path, authority: &Path) -> String {
        json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": false,
            "failSwapOn": false,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": format!("/{}", self.node.cgroup.name),
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "staticPodPath": manifests,
            "podLogsDir": "/var/log/pods",
            "volumePluginDir": self.path("volume-plugins"),
            "resolvConf": "",
            "authentication": { "anonymous": { "enabled": false }, "webhook": { "enabled": true },
                "x509": { "clientCAFile": authority } },
            "authorization": { "mode": "Webhook" },
            // The disk belongs to the machine, so the kubelet must not manage its usage.
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "evictionHard": { "memory.available": "50Mi", "nodefs.available": "0%", "imagefs.available": "0%",
                "nodefs.inodesFree": "0%", "imagefs.inodesFree": "0%" },
            "nodeStatusUpdateFrequency": "5s",
        })
        .to_string()
    }

    fn proxy_text(&self) -> String {
        json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clientConnection": { "kubeconfig": self.proxy_kubeconfig() },
            "clusterCIDR": ALL_PODS,
            "hostnameOverride": self.node.name,
            "conntrack": { "maxPerCore": 0 },
        })
        .to_string()
    }
}

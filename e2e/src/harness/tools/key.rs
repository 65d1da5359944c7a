//! Sources and settings of a build, and its name in the cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

/// Prefixes of the names of builds.
pub(super) const CONTROL_PLANE: &str = "control-plane-";
pub(super) const KUBERNETES: &str = "kubernetes-";
pub(super) const NODE: &str = "real-node-";
/// The programs of a node. They take minutes to build and few tests need them, so they are a separate build.
const NODE_TOOLS: [&str; 2] = ["kube-proxy", "kubelet"];

/// A Go module and the values that are read from it.
pub(super) struct Source {
    /// The folder of the module.
    pub(super) module: PathBuf,
    go_mod: String,
    go_sum: String,
    /// The version of `k8s.io/kubernetes`, with its `v`.
    pub(super) kubernetes_version: String,
    /// The import paths on the `tool` lines, except a node's programs.
    pub(super) tools: Vec<String>,
    /// The import paths of a node's programs.
    pub(super) node_tools: Vec<String>,
}

impl Source {
    pub(super) fn read(module: &Path) -> Result<Self> {
        let read = |name: &str| {
            let path = module.join(name);
            fs::read_to_string(&path).with_context(|| format!("failed to read {}", path.display()))
        };
        Self::new(module.to_owned(), read("go.mod")?, read("go.sum")?)
            .with_context(|| format!("failed to read the Go module {}", module.display()))
    }

    fn new(module: PathBuf, go_mod: String, go_sum: String) -> Result<Self> {
        let kubernetes_version = go_mod
            .lines()
            .find_map(|line| {
                line.trim().strip_prefix("require ").unwrap_or(line.trim()).strip_prefix("k8s.io/kubernetes ")
            })
            .and_then(|rest| rest.split_whitespace().next())
            .context("go.mod does not require k8s.io/kubernetes")?
            .to_owned();
        let all = go_mod
            .lines()
            .skip_while(|line| line.trim() != "tool (")
            .skip(1)
            .take_while(|line| line.trim() != ")")
            .map(|line| line.trim().to_owned());
        let of_node = |import: &String| NODE_TOOLS.iter().any(|tool| import.ends_with(tool));
        let (node_tools, tools): (Vec<_>, Vec<_>) = all.partition(of_node);
        if tools.is_empty() {
            bail!("go.mod has no block of tool lines");
        }
        Ok(Self { module, go_mod, go_sum, kubernetes_version, tools, node_tools })
    }

    /// The value for `-ldflags`. Without the versions the API server would call itself v0.0.0, and Helm
    /// would render charts for Kubernetes v1.20.
    pub(super) fn linker_flags(&self) -> String {
        let version = self.kubernetes_version.as_str();
        let mut numbers = version.trim_start_matches('v').split('.');
        let (major, minor) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
        let kubernetes = [("gitVersion", version), ("gitMajor", major), ("gitMinor", minor)];
        let helm = [("k8sVersionMajor", major), ("k8sVersionMinor", minor)];
        let packages = [
            ("k8s.io/component-base/version", kubernetes.as_slice()),
            ("k8s.io/client-go/pkg/version", kubernetes.as_slice()),
            ("helm.sh/helm/v3/pkg/chartutil", helm.as_slice()),
            ("helm.sh/helm/v3/pkg/lint/rules", helm.as_slice()),
        ];
        let mut flags = "-s -w".to_owned();
        for (package, variables) in packages {
            for (name, value) in variables {
                flags.extend([" -X ", package, ".", name, "=", value]);
            }
        }
        flags
    }

    /// The minimum Go version, such as `1.26`.
    fn minimal_go(&self) -> &str {
        let version =
            self.go_mod.lines().find_map(|line| line.strip_prefix("go ")).unwrap_or_default().trim();
        version.strip_suffix(".0").unwrap_or(version)
    }

    /// The folder name of this kind of build, without the part for the Go version.
    pub(super) fn folder_prefix(&self, kind: &str) -> String {
        let target = format!("{}/{}", std::env::consts::OS, std::env::consts::ARCH);
        format!("{kind}{}-", digest(&[&self.go_mod, &self.go_sum, &self.linker_flags(), &target]))
    }

    /// The folder name for a build of this kind by this Go version, with `others` as additional inputs.
    pub(super) fn folder(&self, kind: &str, go_version: &str, others: &[&str]) -> String {
        self.folder_prefix(kind) + &digest(&[&[go_version], others].concat())
    }

    /// The output of `go version` in the module's folder, where Go may choose a newer toolchain.
    pub(super) fn go_version(&self) -> Result<String> {
        let advice = format!(
            "building the control plane requires Go {} or newer: install it from https://go.dev/dl and put its bin \
             folder on your PATH",
            self.minimal_go()
        );
        let output = Command::new("go").arg("version").current_dir(&self.module).output();
        let Ok(output) = output else { bail!(advice) };
        if !output.status.success() {
            bail!("{advice} (`go version` said: {})", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }
}

/// The first 12 hex digits of a hash over the parts. Each part is preceded by its length, so that the concatenation is
/// unambiguous.
fn digest(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    format!("{:x}", hash.finalize()).chars().take(12).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GO_MOD: &str = "module m\n\ngo 1.26.0\n\ntool (\n\texample.org/a/server/v3\n\texample.org/b/cmd/b\n)\n\nrequire (\n\tk8s.io/kubernetes v1.36.3\n)\n";

    fn source(go_mod: &str) -> Source {
        Source::new(PathBuf::new(), go_mod.to_owned(), "sums".to_owned()).unwrap()
    }

    #[test]
    fn version_tools_and_minimal_go_come_from_go_mod() {
        let source = source(GO_MOD);
        assert_eq!(source.kubernetes_version, "v1.36.3");
        assert_eq!(source.tools, ["example.org/a/server/v3", "example.org/b/cmd/b"]);
        assert_eq!(source.minimal_go(), "1.26");
        assert!(source.linker_flags().contains("-X k8s.io/client-go/pkg/version.gitMinor=36"));
    }

    #[test]
    fn key_changes_only_with_sources_and_go() {
        let folder_of = |go_mod: &str, go: &str| source(go_mod).folder(CONTROL_PLANE, go, &[]);
        let folder = folder_of(GO_MOD, "go version go1.26.8 linux/amd64");
        assert_eq!(folder, folder_of(GO_MOD, "go version go1.26.8 linux/amd64"));
        assert_ne!(folder, folder_of(GO_MOD, "go version go1.26.9 linux/amd64"));
        let newer = GO_MOD.replace("v1.36.3", "v1.36.4");
        assert_ne!(folder, folder_of(&newer, "go version go1.26.8 linux/amd64"));
        assert!(folder.starts_with(&source(GO_MOD).folder_prefix(CONTROL_PLANE)));
    }

    #[test]
    fn real_module_is_readable() {
        let source = Source::read(&crate::tools::kubernetes::main_module()).unwrap();
        assert_eq!(source.tools.len(), 7);
        assert_eq!(source.node_tools.len(), NODE_TOOLS.len());
    }

    #[test]
    fn module_without_kubernetes_is_rejected() {
        assert!(Source::new(PathBuf::new(), "module m\n".to_owned(), String::new()).is_err());
    }
}

//! The control plane's programs, built once from the Go modules in `control-plane*/` into a cache outside the clone.
//! `kubernetes` has the Kubernetes versions, `key` the names in the cache, `build` the builds, and `node` the
//! additional programs of a real node.

mod build;
mod cargo;
mod key;
mod kubernetes;
mod more;
mod node;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

pub use self::cargo::{CARGO_DENY, CargoTool, TYPOS, ensure_cargo_tool};
use self::key::Source;
pub use self::kubernetes::Kubernetes;
pub use self::more::{MoreTools, ensure_more};
pub use self::node::{NodeTools, ensure_node};

/// The built programs.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Tools {
    /// The folder with etcd, Helm and KWOK.
    dir: PathBuf,
    /// The folder with Kubernetes' own programs. For the main version, it is the same folder.
    kubernetes_dir: PathBuf,
    /// The version of Kubernetes' own programs, with its `v`.
    pub kubernetes_version: String,
}

/// Kubernetes' own programs, which are built per version.
const KUBERNETES_TOOLS: [&str; 4] =
    ["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"];

impl Tools {
    /// The path of one of them: `etcd`, `helm`, `kube-apiserver`, `kube-controller-manager`,
    /// `kube-scheduler`, `kubectl` or `kwok`.
    pub fn path(&self, tool: &str) -> PathBuf {
        let dir = if KUBERNETES_TOOLS.contains(&tool) { &self.kubernetes_dir } else { &self.dir };
        dir.join(tool)
    }

    /// Whether Kubernetes' own programs have the main version.
    pub fn is_main_version(&self) -> bool {
        self.kubernetes_dir == self.dir
    }

    /// The folders for a `PATH` with all of them.
    pub fn search_path(&self) -> Vec<&Path> {
        let mut folders = vec![self.kubernetes_dir.as_path(), &self.dir];
        folders.dedup();
        folders
    }

    /// The path of kubectl.
    pub fn kubectl(&self) -> PathBuf {
        self.path("kubectl")
    }

    /// The path of helm.
    pub fn helm(&self) -> PathBuf {
        self.path("helm")
    }
}

/// Finds the programs of the [chosen](Kubernetes::chosen) version in the cache or builds them, and reports to
/// `progress` line by line. A build with empty caches takes about 12 minutes on 2 cores. Cached programs are found
/// instantly and without Go.
pub fn ensure(progress: impl Fn(&str)) -> Result<Tools> {
    ensure_version(&Kubernetes::chosen()?, progress)
}

/// The same for this version. etcd, Helm and KWOK are the same for all versions.
pub fn ensure_version(kubernetes: &Kubernetes, progress: impl Fn(&str)) -> Result<Tools> {
    let build = |module: &Path, kind: &str| {
        let source = Source::read(module)?;
        find_or_build(&source, kind, &source.tools, &[], &progress, |_| Ok(()))
    };
    let dir = build(&kubernetes::main_module(), key::CONTROL_PLANE)?;
    let kubernetes_dir =
        if kubernetes.is_main() { dir.clone() } else { build(kubernetes.module(), key::KUBERNETES)? };
    Ok(Tools { dir, kubernetes_dir, kubernetes_version: kubernetes.to_string() })
}

/// The folder of a build: from the cache, or a new build of these imports and `others`. `key` must contain everything
/// that goes into it.
fn find_or_build(
    source: &Source,
    kind: &str,
    imports: &[String],
    key: &[&str],
    progress: &dyn Fn(&str),
    others: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let cache = cache_dir()?;
    let dir = match &source.go_version() {
        Ok(version) => cache.join(source.folder(kind, version, key)),
        // Without Go, a build of these sources by any version of Go is used.
        Err(missing) => match newest_build(&cache, &source.folder_prefix(kind)) {
            Some(dir) => dir,
            None => anyhow::bail!("{missing:#}"),
        },
    };
    if !dir.exists() {
        fs::create_dir_all(&cache)
            .with_context(|| format!("failed to create the cache {}", cache.display()))?;
        build::build(source, imports, &dir, progress, others)?;
        sweep(&cache, &dir);
    }
    Ok(dir)
}

fn cache_dir() -> Result<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let dir = set("HAULOUT_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|dir| dir.join("haulout")))
        .or_else(|| set("HOME").map(|dir| dir.join(".cache/haulout")))
        .context("no cache folder for the built control plane: set HAULOUT_CACHE to a folder")?;
    std::path::absolute(&dir).with_context(|| format!("failed to find the cache {}", dir.display()))
}

fn newest_build(cache: &Path, prefix: &str) -> Option<PathBuf> {
    builds(cache)
        .filter(|(path, _)| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)))
        .max_by_key(|(_, modified)| *modified)
        .map(|(path, _)| path)
}

/// The finished builds in the cache and their creation times.
fn builds(cache: &Path) -> impl Iterator<Item = (PathBuf, SystemTime)> {
    let entries = fs::read_dir(cache).into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        let finished =
            [key::CONTROL_PLANE, key::KUBERNETES, key::NODE].iter().any(|kind| name.starts_with(kind));
        let modified = entry.metadata().and_then(|metadata| metadata.modified()).ok()?;
        finished.then(|| (entry.path(), modified))
    })
}

/// Removes other builds that are more than a month old.
fn sweep(cache: &Path, keep: &Path) {
    const MONTH: Duration = Duration::from_secs(30 * 24 * 60 * 60);
    for (path, modified) in builds(cache) {
        if path != keep && modified.elapsed().is_ok_and(|age| age > MONTH) {
            // A folder that cannot be removed only uses disk space.
            let _ = fs::remove_dir_all(path);
        }
    }
}

//! The control plane's programs, built once from the Go module in `control-plane/` into a cache
//! outside the clone. What is cached under which name is decided in `key`; building is in `build`; what a real node
//! needs on top is in `node`.

mod build;
mod deny;
mod key;
mod more;
mod node;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

pub use self::deny::ensure_cargo_deny;
use self::key::Source;
pub use self::more::{MoreTools, ensure_more};
pub use self::node::{NodeTools, ensure_node};

/// The built programs.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Tools {
    /// The folder that holds them.
    pub dir: PathBuf,
    /// The Kubernetes version in `control-plane/go.mod`, with its `v`.
    pub kubernetes_version: String,
}

impl Tools {
    /// The path of one of them: `etcd`, `helm`, `kube-apiserver`, `kube-controller-manager`,
    /// `kube-scheduler`, `kubectl` or `kwok`.
    pub fn path(&self, tool: &str) -> PathBuf {
        self.dir.join(tool)
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

/// Finds the programs in the cache or builds them, telling `progress` one line at a time. Takes
/// about 12 minutes on 2 cores when Go has nothing cached either; instant, and without Go, when it
/// has been done before.
pub fn ensure(progress: impl Fn(&str)) -> Result<Tools> {
    let source = Source::read(&module())?;
    let imports = source.tools.as_slice();
    let dir = find_or_build(&source, key::CONTROL_PLANE, imports, &[], &progress, |_| Ok(()))?;
    Ok(Tools { dir, kubernetes_version: source.kubernetes_version })
}

/// The Go module that pins everything.
fn module() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("control-plane")
}

/// The folder of a build: one that is in the cache, or else a new one of these imports and `others`, of which `key`
/// has to tell all.
fn find_or_build(
    source: &Source,
    kind: &str,
    imports: &[String],
    key: &[&str],
    progress: &dyn Fn(&str),
    others: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let module = module();
    let cache = cache_dir()?;
    let dir = match &key::go_version(&module) {
        Ok(version) => cache.join(source.folder(kind, version, key)),
        // Any Go's build of these sources will do when there is no Go to build another.
        Err(missing) => match newest_build(&cache, &source.folder_prefix(kind)) {
            Some(dir) => dir,
            None => anyhow::bail!("{missing:#}"),
        },
    };
    if !dir.exists() {
        fs::create_dir_all(&cache).with_context(|| format!("creating the cache {}", cache.display()))?;
        build::build(&module, source, imports, &dir, progress, others)?;
        sweep(&cache, &dir);
    }
    Ok(dir)
}

fn cache_dir() -> Result<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let dir = set("HAULOUT_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|dir| dir.join("haulout")))
        .or_else(|| set("HOME").map(|dir| dir.join(".cache/haulout")))
        .context("there is nowhere to keep the built control plane: set HAULOUT_CACHE to a folder")?;
    std::path::absolute(&dir).with_context(|| format!("finding the cache {}", dir.display()))
}

fn newest_build(cache: &Path, prefix: &str) -> Option<PathBuf> {
    builds(cache)
        .filter(|(path, _)| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)))
        .max_by_key(|(_, modified)| *modified)
        .map(|(path, _)| path)
}

/// The finished builds in the cache with the time they were made.
fn builds(cache: &Path) -> impl Iterator<Item = (PathBuf, SystemTime)> {
    let entries = fs::read_dir(cache).into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        let finished = [key::CONTROL_PLANE, key::NODE].iter().any(|kind| name.starts_with(kind));
        let modified = entry.metadata().and_then(|metadata| metadata.modified()).ok()?;
        finished.then(|| (entry.path(), modified))
    })
}

/// Removes other builds that are more than a month old.
fn sweep(cache: &Path, keep: &Path) {
    const MONTH: Duration = Duration::from_secs(30 * 24 * 60 * 60);
    for (path, modified) in builds(cache) {
        if path != keep && modified.elapsed().is_ok_and(|age| age > MONTH) {
            // A folder that cannot be removed costs disk space and nothing else.
            let _ = fs::remove_dir_all(path);
        }
    }
}

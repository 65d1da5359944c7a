//! Additional tools for tests, built once from the Go module in `more-tools/` into the same cache.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest as _, Sha256};

/// The built programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoreTools {
    dir: PathBuf,
}

impl MoreTools {
    /// The path of one of them: `actionlint`, `helm` (version 4) or `starlark`.
    pub fn path(&self, tool: &str) -> PathBuf {
        self.dir.join(tool)
    }
}

/// Finds them in the cache or builds them. A build with empty caches takes some minutes.
pub fn ensure_more(progress: impl Fn(&str)) -> Result<MoreTools> {
    let module = crate::repository().join("e2e/more-tools");
    let dir = once("more-tools", &key(&module)?, |unfinished| {
        progress("building helm 4, actionlint and starlark");
        let mut go = Command::new("go");
        go.args(["build", "-trimpath", "-ldflags=-s -w", "-o"]).arg(unfinished).arg("tool");
        let status =
            go.env("CGO_ENABLED", "0").current_dir(&module).status().context("failed to run go build")?;
        if !status.success() {
            bail!("go build of {} failed: see above", module.display());
        }
        Ok(())
    })?;
    Ok(MoreTools { dir })
}

/// The folder in the cache with this name and key. One process creates it, and the others wait.
pub(super) fn once(name: &str, key: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let cache = super::cache_dir()?;
    let dir = cache.join(format!("{name}-{key}"));
    if dir.exists() {
        return Ok(dir);
    }
    fs::create_dir_all(&cache).with_context(|| format!("failed to create the cache {}", cache.display()))?;
    let lock = File::create(cache.join(format!("{name}.lock")))
        .context("failed to create the lock of the tool cache")?;
    flock(&lock, FlockOperation::LockExclusive).context("failed to lock the tool cache")?;
    if !dir.exists() {
        // In the same parent folder, so that the final rename is atomic.
        let unfinished = tempfile::tempdir_in(&cache).context("failed to create a folder for the build")?;
        make(unfinished.path())?;
        let built = unfinished.keep();
        fs::rename(&built, &dir).with_context(|| format!("failed to move the tools to {}", dir.display()))?;
    }
    Ok(dir)
}

/// A hash of all inputs except Go itself: any version can build them, and none is needed afterwards.
fn key(module: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    for name in ["go.mod", "go.sum"] {
        let path = module.join(name);
        hash.update(fs::read(&path).with_context(|| format!("failed to read {}", path.display()))?);
    }
    hash.update(format!("{}/{}", std::env::consts::OS, std::env::consts::ARCH));
    Ok(format!("{:x}", hash.finalize()).chars().take(12).collect())
}

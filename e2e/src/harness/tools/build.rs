//! Builds the Go tools one after the other and moves them into the cache atomically.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, IsTerminal as _, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::fs::{FlockOperation, flock, statvfs};

use super::key::Source;
use crate::process;

/// Disk space that a build with empty caches needs in Go's caches and for the tools.
const GO_CACHE_GIB: u64 = 8;
const TOOLS_GIB: u64 = 1;

/// Builds these imports and `others` into `dir`, unless another process builds them at the same time.
pub(super) fn build(
    source: &Source,
    imports: &[String],
    dir: &Path,
    progress: &dyn Fn(&str),
    others: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let cache = dir.parent().context("the cache folder has no parent")?;
    let lock =
        File::create(cache.join("build.lock")).context("failed to create the lock of the tool cache")?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        progress("waiting for another process that builds the same");
        flock(&lock, FlockOperation::LockExclusive).context("failed to lock the tool cache")?;
    }
    if dir.exists() {
        return Ok(());
    }
    check_disk(&source.module, cache)?;

    let begun = Instant::now();
    // In the same parent folder, so that the final rename is atomic. An interrupted build leaves only this folder, and
    // the next one removes it.
    let unfinished = cache.join("unfinished");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished)
            .with_context(|| format!("failed to remove {}", unfinished.display()))?;
    }
    fs::create_dir_all(&unfinished).with_context(|| format!("failed to create {}", unfinished.display()))?;
    for (index, import) in imports.iter().enumerate() {
        let name = binary_name(import);
        let position = format!("({} of {})", index + 1, imports.len());
        progress(&format!("building {name} {position}"));
        let started = Instant::now();
        go_build(source, import, &unfinished.join(name))
            .with_context(|| format!("failed to build {name} from {import}"))?;
        progress(&format!("built {name} {position} in {}", seconds(started.elapsed())));
    }
    others(&unfinished)?;
    fs::rename(&unfinished, dir).with_context(|| format!("failed to move the tools to {}", dir.display()))?;
    progress(&format!("built everything in {}", seconds(begun.elapsed())));
    Ok(())
}

/// etcd's main package is called `server`. The others have the name of their program.
fn binary_name(import: &str) -> &str {
    if import.starts_with("go.etcd.io/etcd/server/") {
        return "etcd";
    }
    import.rsplit('/').next().unwrap_or(import)
}

fn go_build(source: &Source, import: &str, output: &Path) -> Result<()> {
    let log = output.with_extension("log");
    let go = process::Command::new("go")
        .args(["build", "-v", "-trimpath", "-ldflags"])
        .arg(source.linker_flags())
        .arg("-o")
        .arg(output)
        .arg(import)
        .env("CGO_ENABLED", "0")
        .current_dir(&source.module)
        .log(&log)
        .spawn("go build")?;
    let status = if std::io::stderr().is_terminal() {
        loop {
            if let Some(status) = go.wait_timeout(Duration::from_millis(500)) {
                eprint!("\r\x1b[K");
                break status;
            }
            eprint!("\r\x1b[K  {} packages compiled", count_lines(&log));
            // Only the output format depends on it.
            let _ = std::io::stderr().flush();
        }
    } else {
        go.wait()
    };
    if !status.success() {
        bail!("go build failed with {status}:\n{}", tail(&log));
    }
    fs::remove_file(&log).context("failed to remove the build's log")
}

fn count_lines(path: &Path) -> usize {
    File::open(path).map_or(0, |file| BufReader::new(file).lines().count())
}

/// The end of a build log, which has the error.
fn tail(path: &Path) -> String {
    let mut text = String::new();
    if let Ok(mut file) = File::open(path) {
        // If the log cannot be read, the error has no details.
        let _ = file.read_to_string(&mut text);
    }
    let lines: Vec<_> = text.lines().collect();
    lines.iter().skip(lines.len().saturating_sub(20)).copied().collect::<Vec<_>>().join("\n")
}

fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

fn check_disk(module: &Path, cache: &Path) -> Result<()> {
    let output = Command::new("go")
        .args(["env", "GOCACHE"])
        .current_dir(module)
        .output()
        .context("failed to find Go's build cache (`go env GOCACHE`)")?;
    let go_cache = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    for (path, needed) in [(go_cache.as_path(), GO_CACHE_GIB), (cache, TOOLS_GIB)] {
        // Go creates its cache on first use.
        let Some(existing) = path.ancestors().find(|path| path.exists()) else {
            continue;
        };
        let disk = statvfs(existing)
            .with_context(|| format!("failed to read the free space at {}", existing.display()))?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize) >> 30;
        if free < needed {
            bail!(
                "building the control plane requires {needed} GiB, but {} has only {free} GiB free: free some space, \
                 or set HAULOUT_CACHE and GOCACHE to a larger disk",
                existing.display()
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etcd_binary_is_renamed() {
        assert_eq!(binary_name("go.etcd.io/etcd/server/v3"), "etcd");
        assert_eq!(binary_name("helm.sh/helm/v3/cmd/helm"), "helm");
        assert_eq!(binary_name("k8s.io/kubernetes/cmd/kube-apiserver"), "kube-apiserver");
    }
}

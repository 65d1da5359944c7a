//! Builds the Go tools one after the other and puts them into the cache in one step.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, IsTerminal as _, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::fs::{FlockOperation, flock, statvfs};

use super::key::Source;
use crate::process;

/// What a build with nothing cached writes into Go's caches, and what the tools themselves take.
const GO_CACHE_GIB: u64 = 8;
const TOOLS_GIB: u64 = 1;

/// Builds these imports into `dir` and has `others` put into it, unless another process does so while we wait for it.
pub(super) fn build(
    source: &Source,
    imports: &[String],
    dir: &Path,
    progress: &dyn Fn(&str),
    others: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let cache = dir.parent().context("the cache folder has no parent")?;
    let lock = File::create(cache.join("build.lock")).context("creating the lock of the tool cache")?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        progress("waiting for another process that is building");
        flock(&lock, FlockOperation::LockExclusive).context("locking the tool cache")?;
    }
    if dir.exists() {
        return Ok(());
    }
    check_disk(&source.module, cache)?;

    let begun = Instant::now();
    // Beside its final place, so that the rename at the end is atomic; an interrupted build leaves
    // only this, and the next one clears it away.
    let unfinished = cache.join("unfinished");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).with_context(|| format!("removing {}", unfinished.display()))?;
    }
    fs::create_dir_all(&unfinished).with_context(|| format!("creating {}", unfinished.display()))?;
    for (index, import) in imports.iter().enumerate() {
        let name = binary_name(import);
        let position = format!("({} of {})", index + 1, imports.len());
        progress(&format!("building {name} {position}"));
        let started = Instant::now();
        go_build(source, import, &unfinished.join(name))
            .with_context(|| format!("building {name} from {import}"))?;
        progress(&format!("built {name} {position} in {}", seconds(started.elapsed())));
    }
    others(&unfinished)?;
    fs::rename(&unfinished, dir).with_context(|| format!("moving the tools to {}", dir.display()))?;
    progress(&format!("built everything in {}", seconds(begun.elapsed())));
    Ok(())
}

/// etcd's main package is called `server`; the others are called like their program.
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
            // Nothing but the look depends on it.
            let _ = std::io::stderr().flush();
        }
    } else {
        go.wait()
    };
    if !status.success() {
        bail!("go build ended with {status}:\n{}", tail(&log));
    }
    fs::remove_file(&log).context("removing the build's log")
}

fn count_lines(path: &Path) -> usize {
    File::open(path).map_or(0, |file| BufReader::new(file).lines().count())
}

/// The end of a build log: the error is there.
fn tail(path: &Path) -> String {
    let mut text = String::new();
    if let Ok(mut file) = File::open(path) {
        // A log that cannot be read leaves the message short; the error itself is told.
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
        .context("asking Go where its build cache is (`go env GOCACHE`)")?;
    let go_cache = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    for (path, needed) in [(go_cache.as_path(), GO_CACHE_GIB), (cache, TOOLS_GIB)] {
        // Go makes its cache on first use.
        let Some(existing) = path.ancestors().find(|path| path.exists()) else {
            continue;
        };
        let disk =
            statvfs(existing).with_context(|| format!("reading the free space at {}", existing.display()))?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize) >> 30;
        if free < needed {
            bail!(
                "building the control plane needs {needed} GiB and {} has {free} GiB free: make room, or set \
                 HAULOUT_CACHE and GOCACHE to a larger disk",
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
    fn etcd_is_not_called_server() {
        assert_eq!(binary_name("go.etcd.io/etcd/server/v3"), "etcd");
        assert_eq!(binary_name("helm.sh/helm/v3/cmd/helm"), "helm");
        assert_eq!(binary_name("k8s.io/kubernetes/cmd/kube-apiserver"), "kube-apiserver");
    }
}

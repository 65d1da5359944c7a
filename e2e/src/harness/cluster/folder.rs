//! The temporary folder of one cluster: created, locked while its owner runs, and removed afterwards.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result};
use rustix::fs::{FlockOperation, flock};

const PREFIX: &str = "haulout-";
const LOCK: &str = "lock";
const DATA: &str = "data";
const LOGS: &str = "logs";

/// A cluster's folder. Dropping it removes everything, or everything but the logs.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    name: String,
    keep_logs: AtomicBool,
    /// Held while this process runs, so that others know that the folder is in use.
    _lock: File,
}

impl Folder {
    /// Creates a folder in the temporary folder of the system, after removing those of dead owners.
    pub(super) fn create(name: &str) -> Result<Self> {
        Self::create_in(&std::env::temp_dir(), name)
    }

    fn create_in(parent: &Path, name: &str) -> Result<Self> {
        sweep(parent);
        let path = tempfile::Builder::new()
            .prefix(&format!("{PREFIX}{name}-"))
            .tempdir_in(parent)
            .with_context(|| format!("failed to create a folder for cluster {name} in {}", parent.display()))?
            .keep();
        let what = || format!("failed to prepare {}", path.display());
        let lock = File::create(path.join(LOCK)).with_context(what)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).with_context(what)?;
        // After the lock, because a folder without data is never removed.
        for folder in [LOGS, DATA] {
            fs::create_dir(path.join(folder)).with_context(what)?;
        }
        Ok(Self { path, name: name.to_owned(), keep_logs: AtomicBool::new(false), _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn logs(&self) -> PathBuf {
        self.path.join(LOGS)
    }

    pub(super) fn keep_logs(&self) {
        self.keep_logs.store(true, Ordering::Relaxed);
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // The rest is left to the next sweep or to the system's clean-up.
        if self.keep_logs.load(Ordering::Relaxed) || std::thread::panicking() {
            for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
                if entry.file_name() != LOGS {
                    let _ = if entry.path().is_dir() {
                        fs::remove_dir_all(entry.path())
                    } else {
                        fs::remove_file(entry.path())
                    };
                }
            }
            eprintln!("the logs of cluster {} are in {}", self.name, self.logs().display());
        } else {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Removes folders whose owner was killed. Kept logs stay, because they have no data folder.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let path = entry.path();
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX) && path.join(DATA).is_dir();
        if !ours {
            continue;
        }
        if let Ok(lock) = File::open(path.join(LOCK))
            && flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok()
        {
            // A folder of another user cannot be removed, and should not be.
            let _ = fs::remove_dir_all(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_is_removed_with_its_owner() {
        let parent = tempfile::tempdir().unwrap();
        let folder = Folder::create_in(parent.path(), "a").unwrap();
        let path = folder.path().to_owned();
        assert!(path.join("logs").is_dir());
        drop(folder);
        assert!(!path.exists());
    }

    #[test]
    fn only_kept_logs_survive_the_sweep() {
        let parent = tempfile::tempdir().unwrap();
        let folder = Folder::create_in(parent.path(), "a").unwrap();
        folder.keep_logs();
        fs::write(folder.logs().join("etcd.log"), "hello").unwrap();
        fs::write(folder.path().join("admin.kubeconfig"), "secret").unwrap();
        let path = folder.path().to_owned();
        drop(folder);
        sweep(parent.path());
        let left: Vec<_> = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["logs"]);
        assert_eq!(fs::read_to_string(path.join("logs/etcd.log")).unwrap(), "hello");
    }

    #[test]
    fn only_folders_of_dead_owners_are_swept() {
        let parent = tempfile::tempdir().unwrap();
        let dead = parent.path().join("haulout-dead-1");
        fs::create_dir_all(dead.join("data")).unwrap();
        fs::write(dead.join("lock"), "").unwrap();
        let stranger = parent.path().join("haulout-without-a-lock");
        fs::create_dir_all(stranger.join("data")).unwrap();
        let alive = Folder::create_in(parent.path(), "alive").unwrap();
        sweep(parent.path());
        assert!(!dead.exists());
        assert!(stranger.exists());
        assert!(alive.path().exists());
    }
}

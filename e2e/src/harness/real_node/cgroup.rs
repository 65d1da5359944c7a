//! The cgroups of a kubelet's pods: one with the same name in every hierarchy of cgroup v1. They are all that a node
//! leaves behind on the machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

const HIERARCHIES: &str = "/sys/fs/cgroup";
const PREFIX: &str = "haulout-e2e-";

/// Dropping it removes the cgroups. Their processes must have exited.
#[derive(Debug)]
pub(super) struct Cgroup {
    pub(super) name: String,
}

impl Cgroup {
    /// Creates cgroups for this node, after removing those of dead owners.
    pub(super) fn create(node: &str) -> Result<Self> {
        sweep();
        let cgroup = Self { name: format!("{PREFIX}{}-{node}", std::process::id()) };
        for hierarchy in hierarchies() {
            let folder = hierarchy.join(&cgroup.name);
            fs::create_dir_all(&folder).with_context(|| format!("failed to create {}", folder.display()))?;
            // A new cpuset is empty, and nothing can run in it.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let Ok(all) = fs::read(hierarchy.join(file)) else { continue };
                fs::write(folder.join(file), all)
                    .with_context(|| format!("failed to fill {}", folder.display()))?;
            }
        }
        Ok(cgroup)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The kernel frees them some moments after their last process.
        let deadline = Instant::now() + Duration::from_secs(60);
        while hierarchies().any(|hierarchy| !remove(&hierarchy.join(&self.name))) && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn hierarchies() -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(HIERARCHIES).into_iter().flatten().flatten();
    // Some are links to others.
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path()).filter(|path| path.join("cgroup.procs").exists())
}

/// Removes cgroups whose owner was killed. Their names contain its process ID.
fn sweep() {
    for hierarchy in hierarchies() {
        for entry in fs::read_dir(&hierarchy).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
            if owner.is_some_and(|owner| !Path::new("/proc").join(owner).exists()) {
                remove(&entry.path());
            }
        }
    }
}

/// Removes a cgroup and its children, and returns whether it is gone. Their files cannot be removed and need not be.
fn remove(folder: &Path) -> bool {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&entry.path());
        }
    }
    fs::remove_dir(folder).is_ok() || !folder.exists()
}

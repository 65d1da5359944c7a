//! Requirements of real nodes on the machine.

use std::path::Path;

use crate::tools::Kubernetes;

/// Programs that must be installed.
const PROGRAMS: [&str; 7] = ["apt-get", "dpkg-deb", "ip", "mount", "nsenter", "sh", "unshare"];

/// Why no real node can run on this machine or with the chosen version of Kubernetes. `None` if one can.
pub fn missing() -> Option<String> {
    match Kubernetes::chosen() {
        Ok(chosen) if chosen.is_main() => {}
        Ok(chosen) => {
            return Some(format!(
                "kubelets are only built for the main version of Kubernetes, not for {chosen}"
            ));
        }
        Err(error) => return Some(format!("{error:#}")),
    }
    if !rustix::process::geteuid().is_root() {
        return Some("a real node requires root".to_owned());
    }
    let file_systems = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if !file_systems.lines().any(|line| line.ends_with("\toverlay")) {
        return Some(
            "a real node requires the file system overlay, which this kernel does not have".to_owned(),
        );
    }
    if !Path::new("/sys/fs/cgroup/memory/cgroup.procs").exists() {
        return Some(
            "a real node is only supported with cgroup v1, which this machine does not have".to_owned(),
        );
    }
    let missing: Vec<_> = PROGRAMS.into_iter().filter(|program| !is_installed(program)).collect();
    (!missing.is_empty()).then(|| format!("a real node requires {}", missing.join(", ")))
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

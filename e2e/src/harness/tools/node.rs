//! The programs of a real node: kubelet and kube-proxy from Go modules, the rest from Debian. Packages are unpacked
//! into the cache and not installed: no service starts, and the machine's package lists do not change.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::key::{self, Source};

/// Debian packages: the programs, and the libraries that a minimal system may lack.
const PACKAGES: [&str; 16] = [
    "busybox-static",
    "containerd",
    "containernetworking-plugins",
    "libbsd0",
    "libedit2",
    "libgmp10",
    "libjansson4",
    "libmd0",
    "libmnl0",
    "libnftables1",
    "libnftnl11",
    "libseccomp2",
    "libtinfo6",
    "libxtables12",
    "nftables",
    "runc",
];

/// The programs of a real node.
#[derive(Clone, Debug)]
pub struct NodeTools {
    dir: PathBuf,
}

impl NodeTools {
    /// The network plugins (CNI).
    pub fn network_plugins(&self) -> PathBuf {
        self.dir.join("usr/lib/cni")
    }

    /// A statically linked busybox.
    pub fn busybox(&self) -> PathBuf {
        self.dir.join("bin/busybox")
    }

    /// The `PATH`, with these programs first.
    pub fn search_path(&self) -> OsString {
        let ours = ["", "usr/bin", "usr/sbin"].map(|folder| self.dir.join(folder));
        let theirs = std::env::var_os("PATH").unwrap_or_default();
        let all = ours.into_iter().chain(std::env::split_paths(&theirs));
        std::env::join_paths(all).unwrap_or(theirs)
    }

    /// The library path.
    pub fn libraries(&self) -> OsString {
        let triplet = format!("{}-linux-gnu", std::env::consts::ARCH);
        let folders = ["usr/lib", "lib"].map(|folder| self.dir.join(folder).join(&triplet));
        std::env::join_paths(folders).unwrap_or_default()
    }
}

/// Finds a node's programs in the cache or builds and downloads them, and reports to `progress` line by line. Takes
/// about 6 minutes on 2 cores if only the control plane is cached.
pub fn ensure_node(progress: impl Fn(&str)) -> Result<NodeTools> {
    let source = Source::read(&super::kubernetes::main_module())?;
    let others = |dir: &Path| {
        progress("downloading Debian's packages for a node");
        unpack(dir).context("failed to get the node's programs from Debian")
    };
    let imports = source.node_tools.as_slice();
    let dir = super::find_or_build(&source, key::NODE, imports, &PACKAGES, &progress, others)?;
    Ok(NodeTools { dir })
}

fn unpack(dir: &Path) -> Result<()> {
    let downloads = tempfile::tempdir().context("failed to create a folder for downloads")?;
    let folder = downloads.path();
    for place in ["state/lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(folder.join(place)).context("failed to create a folder for downloads")?;
    }
    let apt = || {
        let mut command = Command::new("apt-get");
        for (option, place) in [("Dir::State", "state"), ("Dir::Cache", "cache")] {
            command.arg(format!("--option={option}={}", folder.join(place).display()));
        }
        // Its unprivileged user could not write to a folder of root.
        command.args(["--option=APT::Sandbox::User=root", "--quiet=2"]).current_dir(folder);
        command
    };
    run(apt().arg("update"))?;
    run(apt().arg("download").args(PACKAGES))?;
    for entry in fs::read_dir(folder).context("failed to list the downloads")? {
        let path = entry.context("failed to list the downloads")?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            run(Command::new("dpkg-deb").arg("--extract").arg(&path).arg(dir))?;
        }
    }
    Ok(())
}

fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().display().to_string();
    let output = command.output().with_context(|| format!("failed to run {program}"))?;
    if !output.status.success() {
        bail!("{program} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

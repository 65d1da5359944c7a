//! Real nodes: each is a kubelet, containerd and kube-proxy in its own namespaces on this machine. They run the pods
//! that are scheduled to them, which KWOK nodes only simulate.
//!
//! The control plane of such a cluster is in the network of its first node: it reaches Services and pods, and they
//! reach it. A tunnel leads in from outside. The network of the machine is not changed.

mod cgroup;
mod configuration;
mod needs;
mod network;
mod program;
mod tunnel;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Node;
use kube::Api;

use self::cgroup::Cgroup;
use self::configuration::Files;
pub use self::needs::missing;
pub use self::program::run_program;
pub(crate) use self::tunnel::Tunnel;
use crate::handle::Handle;
use crate::image::Image;
use crate::kubeconfig::{self, Identity};
use crate::process::{Command, Output, Process};
use crate::tools::{self, NodeTools};
use crate::wait;

/// The address of the API server for nodes, that of the first node. Networks are private, so all clusters use the same.
pub(crate) const API_SERVER: &str = "172.30.0.1";
/// An image that sleeps until it is stopped. It is also the pause image of pods.
pub const SLEEPER: &str = "localhost/sleeper:1";
/// How long a part of a node may take to start.
const LIMIT: Duration = Duration::from_secs(120);

/// PID 1 of a node: private mounts for what a node writes, and an init process that reaps.
const INIT: &str = r#"
mount --make-rshared /
mount -t tmpfs tmpfs /run
for dir in /var/lib /var/log; do
  mkdir -p /run/over$dir/upper /run/over$dir/work
  mount -t overlay overlay -o lowerdir=$dir,upperdir=/run/over$dir/upper,workdir=/run/over$dir/work $dir
done
echo "$1" > /proc/sys/kernel/hostname
echo 1 > /proc/sys/net/ipv4/ip_forward
ip link set lo up
trap '' CHLD
touch "$2"
exec sleep infinity
"#;

/// A node whose namespaces exist. Dropping it kills everything in it and waits.
#[derive(Debug)]
pub struct RealNode {
    /// Its name in the cluster.
    pub name: String,
    number: usize,
    folder: PathBuf,
    /// The process ID of its PID 1 in the namespace of this process.
    pid: u32,
    tools: NodeTools,
    /// Killed in this order: its processes, then its PID 1 and with it everything else, then its cgroups.
    programs: Vec<Process>,
    _init: Process,
    cgroup: Cgroup,
}

impl RealNode {
    /// Creates the namespaces of node `number`, counted from 1, without any process in them.
    pub(crate) async fn create(cluster: &Path, logs: &Path, number: usize) -> Result<Self> {
        let tools = tokio::task::spawn_blocking(|| tools::ensure_node(|line| eprintln!("{line}")))
            .await
            .context("failed to build the node's programs")??;
        let name = format!("real-{number}");
        let folder = cluster.join("data").join(&name);
        fs::create_dir_all(&folder).with_context(|| format!("failed to create {}", folder.display()))?;
        let cgroup = Cgroup::create(&name)?;
        let ready = folder.join("ready");
        let init = Command::new("unshare")
            .args(["--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"])
            .args(["--propagation", "private", "--", "sh", "-euc", INIT, "init", &name])
            .arg(&ready)
            .log(logs.join(format!("{name}-init.log")))
            .spawn("the node's init")?;
        wait::eventually("the node's namespaces exist", LIMIT, async || {
            anyhow::ensure!(init.try_wait().is_none(), "init exited: see its log in {}", logs.display());
            Ok(ready.exists().then_some(()))
        })
        .await?;
        let unshare = init.pid();
        let children = fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children"));
        let children = children.context("failed to find the node's PID 1")?;
        let pid = children.trim().parse().with_context(|| format!("invalid process ID {children:?}"))?;
        Ok(Self { name, number, folder, pid, tools, programs: Vec::new(), _init: init, cgroup })
    }

    /// Its network namespace.
    pub(crate) fn network(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.pid).into()
    }

    /// Runs a future on a separate thread in the node's network, where kube-proxy's rules apply.
    pub fn run_in_network<F>(&self, work: impl FnOnce() -> F + Send + 'static) -> Result<()>
    where
        F: Future<Output = ()>,
    {
        network::run_in(&self.network(), work)
    }

    /// Its address.
    pub fn address(&self) -> String {
        format!("172.30.0.{}", self.number)
    }

    /// A command that runs in the node as root.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let libraries = self.tools.libraries();
        Command::new("nsenter")
            .args(["--target", &self.pid.to_string()])
            .args(["--mount", "--net", "--pid", "--uts", "--ipc", "--wdns=/", "--"])
            .arg(program)
            .env("PATH", self.tools.search_path())
            .env("LD_LIBRARY_PATH", libraries)
            .env_remove("KUBECONFIG")
    }

    /// Runs a program in the node until it exits.
    pub async fn run(&self, program: &str, args: &[&str]) -> Result<Output> {
        self.command(program).args(args).output(program).await
    }

    /// Connects the node to the bridge in the first node.
    pub(crate) async fn connect(&self, first: &RealNode) -> Result<()> {
        let ip = async |node: &RealNode, args: &str| {
            let args: Vec<_> = args.split_whitespace().collect();
            node.run("ip", &args).await?.success().with_context(|| format!("ip {}", args.join(" ")))
        };
        if self.number == 1 {
            ip(self, "link add nodes type bridge").await?;
            ip(self, &format!("addr add {API_SERVER}/24 dev nodes")).await?;
            ip(self, "link set nodes up").await?;
            // kube-proxy rewrites Service addresses after the route has been chosen, so there must be a route.
            ip(self, "route add default dev nodes").await?;
            return Ok(());
        }
        let plug = format!("node{}", self.number);
        // Only the network namespace is entered, because the process ID is that of this machine.
        let link = ["link", "add", &plug, "type", "veth", "peer", "name", "eth0", "netns"];
        Command::new("nsenter")
            .arg(format!("--net={}", first.network().display()))
            .args(["--", "ip"])
            .args(link)
            .arg(self.pid.to_string())
            .output("ip link add")
            .await?
            .success()
            .context("failed to connect the node to the bridge")?;
        ip(first, &format!("link set {plug} master nodes up")).await?;
        ip(first, &format!("route add {} via {}", self.pods(), self.address())).await?;
        ip(self, &format!("addr add {}/24 dev eth0", self.address())).await?;
        ip(self, "link set eth0 up").await?;
        ip(self, &format!("route add default via {API_SERVER}")).await?;
        Ok(())
    }

    /// The addresses of its pods.
    fn pods(&self) -> String {
        format!("172.31.{}.0/24", self.number)
    }

    /// Starts its programs, imports these image archives and waits until the node is ready.
    pub(crate) async fn start(&mut self, cluster: &Handle, images: &[PathBuf]) -> Result<()> {
        let files = Files::new(self);
        files
            .write(&cluster.pki().ca_certificate_file())
            .context("failed to write the node's configuration")?;
        let port = cluster.server.rsplit(':').next().unwrap_or_default();
        let server = format!("https://{API_SERVER}:{port}");
        let pki = cluster.pki();
        for (file, user, groups) in [
            (files.kubelet_kubeconfig(), format!("system:node:{}", self.name), ["system:nodes"].as_slice()),
            (files.proxy_kubeconfig(), "system:kube-proxy".to_owned(), &[]),
        ] {
            let identity = Identity::Certificate(pki.client(&user, groups)?);
            kubeconfig::write(&file, &server, &pki, "default", &identity)?;
        }
        let containerd = self.spawn(cluster, "containerd", &["--config", &text(&files.containerd())])?;
        wait::eventually("containerd answers", LIMIT, async || {
            Ok(self.run("ctr", &["version"]).await?.status.success().then_some(()))
        })
        .await?;
        let sleeper = self.folder.join("sleeper.tar");
        let program = fs::read(self.tools.busybox()).context("failed to read busybox")?;
        Image { name: SLEEPER, path: "/busybox", program: &program, args: &["sleep", "infinity"] }
            .write(crate::image::architecture(), &sleeper)?;
        for image in images.iter().chain([&sleeper]) {
            let args = ["--namespace", "k8s.io", "images", "import", &text(image)];
            let imported = self.run("ctr", &args).await?.success();
            imported.with_context(|| format!("failed to import {}", image.display()))?;
        }
        let root = text(&self.folder.join("kubelet"));
        let (config, kubeconfig) = (text(&files.kubelet()), text(&files.kubelet_kubeconfig()));
        let kubelet = [
            ("--config", config.as_str()),
            ("--kubeconfig", &kubeconfig),
            ("--hostname-override", &self.name),
            ("--node-ip", &self.address()),
            ("--root-dir", &root),
        ]
        .map(|(flag, value)| format!("{flag}={value}"));
        let kubelet = self.spawn(cluster, "kubelet", &kubelet)?;
        let proxy = self.spawn(cluster, "kube-proxy", &[format!("--config={}", text(&files.proxy()))])?;
        self.programs = vec![proxy, kubelet, containerd];
        let nodes: Api<Node> = Api::all(cluster.client().await?);
        let ready = |node: &Node| {
            let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
            conditions.into_iter().flatten().any(|one| one.type_ == "Ready" && one.status == "True")
        };
        wait::present(nodes, &self.name, "is ready", LIMIT, ready).await?;
        Ok(())
    }

    fn spawn<S: AsRef<OsStr>>(&self, cluster: &Handle, program: &str, args: &[S]) -> Result<Process> {
        let log = cluster.logs.join(format!("{}-{program}.log", self.name));
        self.command(program).args(args).log(log).spawn(program)
    }
}

/// A path as an argument. The temporary folder is assumed to have a UTF-8 name.
fn text(path: &Path) -> String {
    path.display().to_string()
}

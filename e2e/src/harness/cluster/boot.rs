//! Boots a cluster from its settings until it is ready.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::GetParams;
use kube::core::Request;
use kube::{Api, Client};
use tokio::sync::watch;

use super::command::{AUDIT_POLICY, Settings, kubeconfig as kubeconfig_of};
use super::folder::Folder;
use super::ports::Ports;
use super::{Cluster, Component};
use crate::handle::Handle;
use crate::kubeconfig::{self, Identity};
use crate::pki::{Pki, write_private};
use crate::real_node::{self, RealNode, Tunnel};
use crate::tools::{self, Tools};
use crate::wait;

/// Long enough for a machine that was suspended and has to load its memory. Usually a fraction of it is enough.
const READY_LIMIT: Duration = Duration::from_secs(300);
/// How often a boot is attempted if another process takes a port between its choice and its use.
const ATTEMPTS: usize = 3;

type Progress = Arc<dyn Fn(&str) + Send + Sync>;

/// Settings for a new cluster.
#[derive(Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own, set by name")]
pub struct Builder {
    name: String,
    tools: Option<Tools>,
    taint_eviction: bool,
    controller_manager_qps: Option<u32>,
    scheduler: bool,
    kwok: bool,
    audit: bool,
    real_nodes: usize,
    images: Vec<PathBuf>,
    extra_args: Vec<(Component, String)>,
    progress: Progress,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            name: "cluster".to_owned(),
            tools: None,
            taint_eviction: true,
            controller_manager_qps: Some(500),
            scheduler: true,
            kwok: true,
            audit: true,
            real_nodes: 0,
            images: Vec::new(),
            extra_args: Vec::new(),
            progress: Arc::new(|_| {}),
        }
    }
}

impl Builder {
    /// A name for the folder and for messages.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Programs that are already built. Otherwise they are found or built at boot.
    #[must_use]
    pub fn tools(mut self, tools: Tools) -> Self {
        self.tools = Some(tools);
        self
    }

    /// Whether the controller manager's own taint eviction runs. Default: yes.
    #[must_use]
    pub fn taint_eviction(mut self, enabled: bool) -> Self {
        self.taint_eviction = enabled;
        self
    }

    /// Maximum requests per second of the controller manager. Default: 500. `None` is Kubernetes' default of 20, for
    /// benchmarks that compare with it.
    #[must_use]
    pub fn controller_manager_qps(mut self, qps: Option<u32>) -> Self {
        self.controller_manager_qps = qps;
        self
    }

    /// Whether the scheduler runs. Default: yes.
    #[must_use]
    pub fn scheduler(mut self, enabled: bool) -> Self {
        self.scheduler = enabled;
        self
    }

    /// Whether KWOK runs. Default: yes.
    #[must_use]
    pub fn kwok(mut self, enabled: bool) -> Self {
        self.kwok = enabled;
        self
    }

    /// Whether requests are recorded for [`crate::requests`]. Default: yes.
    #[must_use]
    pub fn audit(mut self, enabled: bool) -> Self {
        self.audit = enabled;
        self
    }

    /// Number of real nodes, called `real-1` and so on, in addition to KWOK nodes. Default: none.
    /// [`crate::real_node::missing`] returns whether they are possible.
    #[must_use]
    pub fn real_nodes(mut self, count: usize) -> Self {
        self.real_nodes = count;
        self
    }

    /// Archives of images that the real nodes import at the start.
    #[must_use]
    pub fn images(mut self, archives: impl IntoIterator<Item = PathBuf>) -> Self {
        self.images.extend(archives);
        self
    }

    /// Adds arguments to a component. They override the default ones.
    #[must_use]
    pub fn extra_args<S: Into<String>>(
        mut self,
        component: Component,
        args: impl IntoIterator<Item = S>,
    ) -> Self {
        self.extra_args.extend(args.into_iter().map(|arg| (component, arg.into())));
        self
    }

    /// Callback for progress, line by line.
    #[must_use]
    pub fn progress(mut self, progress: impl Fn(&str) + Send + Sync + 'static) -> Self {
        self.progress = Arc::new(progress);
        self
    }

    /// Boots the cluster. It is ready when pods can be created in the namespace `default`.
    pub async fn boot(mut self) -> Result<Cluster> {
        if self.tools.is_none() {
            let progress = Arc::clone(&self.progress);
            let built = tokio::task::spawn_blocking(move || tools::ensure(|line| progress(line)));
            self.tools = Some(built.await.context("failed to build the control plane")??);
        }
        let mut attempt = 1;
        loop {
            let mut cluster = self.prepare()?;
            let begun = Instant::now();
            match self.start(&mut cluster).await {
                Ok(()) => {
                    let seconds = begun.elapsed().as_secs_f64();
                    (self.progress)(&format!("cluster {} is ready after {seconds:.1} s", self.name));
                    return Ok(cluster);
                }
                Err(_) if attempt < ATTEMPTS && port_was_taken(&cluster.logs) => {
                    attempt += 1;
                    (self.progress)("another process took a port: booting again with other ports");
                    drop(cluster);
                }
                Err(error) => {
                    cluster.keep_logs();
                    return Err(error.context(format!("failed to boot cluster {}", self.name)));
                }
            }
        }
    }

    /// Creates all files, without starting anything.
    fn prepare(&self) -> Result<Cluster> {
        let folder = Folder::create(&self.name)?;
        let root = folder.path();
        let ports = Ports::find()?;
        let handle = Handle {
            name: self.name.clone(),
            root: root.to_owned(),
            logs: folder.logs(),
            server: format!("https://127.0.0.1:{}", ports.api_server),
            kubeconfig: root.join("admin.kubeconfig"),
            audit_log: self.audit.then(|| folder.logs().join("audit.log")),
            tools: self.tools.clone().context("the control plane is not built")?,
        };
        let pki = Pki::create(&root.join("pki"))?;
        let masters: &[&str] = &["system:masters"];
        for (file, user, groups) in [
            ("admin.kubeconfig".to_owned(), "admin", masters),
            (kubeconfig_of(Component::ControllerManager), "system:kube-controller-manager", &[]),
            (kubeconfig_of(Component::Scheduler), "system:kube-scheduler", &[]),
            (kubeconfig_of(Component::KwokNodes), "kwok-nodes", masters),
            (kubeconfig_of(Component::Kwok), "kwok", masters),
        ] {
            let identity = Identity::Certificate(pki.client(user, groups)?);
            kubeconfig::write(&root.join(file), &handle.server, &pki, "default", &identity)?;
        }
        if self.audit {
            fs::write(root.join("audit-policy.yaml"), AUDIT_POLICY)
                .context("failed to write the audit policy")?;
        }
        handle.write_description()?;
        let settings = Settings {
            ports,
            taint_eviction: self.taint_eviction,
            controller_manager_qps: self.controller_manager_qps,
            network: None,
            extra_args: self.extra_args.clone(),
        };
        let (running, changed) = (Mutex::default(), watch::Sender::new(()));
        let (real_nodes, tunnel) = (Vec::new(), None);
        Ok(Cluster { handle, settings, running, changed, tunnel, real_nodes, folder })
    }

    async fn start(&self, cluster: &mut Cluster) -> Result<()> {
        (self.progress)(&format!("booting cluster {}", self.name));
        if self.real_nodes > 0 {
            cluster
                .create_real_nodes(self.real_nodes)
                .await
                .context("failed to create the real nodes' namespaces")?;
        }
        let mut real_nodes = std::mem::take(&mut cluster.real_nodes);
        let started = self.start_in(cluster, &mut real_nodes).await;
        cluster.real_nodes = real_nodes;
        started
    }

    async fn start_in(&self, cluster: &Cluster, real_nodes: &mut [RealNode]) -> Result<()> {
        let ready = async {
            // The API server itself waits for etcd.
            cluster.spawn(Component::Etcd)?;
            cluster.spawn(Component::ApiServer)?;
            cluster.wait_for_api_server().await?;
            let others = [
                (true, Component::ControllerManager),
                (self.scheduler, Component::Scheduler),
                (self.kwok, Component::KwokNodes),
                (self.kwok, Component::Kwok),
            ];
            for (wanted, component) in others {
                if wanted {
                    cluster.spawn(component)?;
                }
            }
            wait_for_service_account(cluster.client().await?).await?;
            let started = real_nodes.iter_mut().map(|node| node.start(&cluster.handle, &self.images));
            try_join_all(started).await.context("failed to start the real nodes")?;
            Ok(())
        };
        tokio::select! {
            result = ready => result,
            exit = cluster.wait_for_exit() => bail!("{exit}\n{}", last_lines(&exit.log)),
        }
    }
}

impl Cluster {
    /// Creates the namespaces of the real nodes, with the control plane in the network of the first.
    async fn create_real_nodes(&mut self, nodes: usize) -> Result<()> {
        for number in 1..=nodes {
            let node = RealNode::create(&self.handle.root, &self.handle.logs, number).await?;
            node.connect(self.real_nodes.first().unwrap_or(&node)).await?;
            self.real_nodes.push(node);
        }
        let first = self.real_nodes.first().context("there is no first node")?;
        self.tunnel = Some(Tunnel::open(self.settings.ports.api_server, &first.network())?);
        self.settings.network = Some(first.network());
        let pki = self.handle.pki();
        let credentials = pki.client("kube-apiserver", &["system:masters"])?;
        let (certificate, key) = (pki.file("kubelet-client.crt"), pki.file("kubelet-client.key"));
        write_private(&certificate, credentials.certificate.as_bytes())?;
        write_private(&key, credentials.key.as_bytes())?;
        let arguments = [
            "--bind-address=0.0.0.0".to_owned(),
            format!("--advertise-address={}", real_node::API_SERVER),
            "--endpoint-reconciler-type=lease".to_owned(),
            format!("--kubelet-client-certificate={}", certificate.display()),
            format!("--kubelet-client-key={}", key.display()),
            "--kubelet-preferred-address-types=InternalIP".to_owned(),
        ];
        // Before the arguments of the test, which override them.
        let arguments = arguments.map(|argument| (Component::ApiServer, argument));
        self.settings.extra_args.splice(0..0, arguments);
        Ok(())
    }

    /// Waits until the API server is ready.
    pub(super) async fn wait_for_api_server(&self) -> Result<()> {
        let client = self.handle.client().await?;
        wait::eventually("the API server is ready", READY_LIMIT, async || {
            let request =
                Request::new("").get("readyz", &GetParams::default()).map_err(|error| anyhow!(error))?;
            // Refused connections and errors are expected until it is ready.
            Ok(client.request_text(request).await.ok().map(|_| ()))
        })
        .await
        .with_context(|| format!("see {}", self.component_log(Component::ApiServer).display()))
    }
}

/// Waits for the default ServiceAccount, which pods require. The controller manager creates it.
async fn wait_for_service_account(client: Client) -> Result<()> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client, "default");
    wait::until(accounts, "default", "exists", READY_LIMIT, |account| account.is_some()).await?;
    Ok(())
}

fn port_was_taken(logs: &Path) -> bool {
    [Component::Etcd, Component::ApiServer].into_iter().any(|component| {
        let log = logs.join(format!("{component}.log"));
        fs::read_to_string(log).is_ok_and(|text| text.contains("address already in use"))
    })
}

fn last_lines(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines.iter().skip(lines.len().saturating_sub(10)).copied().collect::<Vec<_>>().join("\n")
}

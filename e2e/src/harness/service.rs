//! A Haulout service as a local process with a token of its ServiceAccount from the chart, so that it has the same
//! permissions as in a cluster.

use std::ffi::OsString;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::apps::v1::Deployment;
use kube::Api;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::handle::Handle;
use crate::process::Process;
use crate::wait;

/// The namespace that [`Handle::install_chart`] installs into.
pub const NAMESPACE: &str = "haulout-system";
/// The binaries of a release: the services and the chart's hooks. Their packages have the prefix `haulout-`.
pub const BINARIES: [&str; 7] = [
    "admission-webhook",
    "certificate-manager",
    "chart-hooks",
    "evacuation-controller",
    "maintenance-controller",
    "taint-manager",
    "workload-evacuator",
];
/// The flag of the chart's services that use evacuators: the built-in classes that an installation with default values serves.
pub const SERVED_CLASSES: &str = "--served-evacuator-classes=deployment.apps.k8s.io";
/// Environment variable with the path of xtask. The services are next to it.
pub const XTASK_ENV: &str = "HAULOUT_XTASK";
/// Prefix of the line with which a test reports that it cannot run on this machine. Such a test passes and is reported
/// as skipped.
pub const SKIPPED: &str = "skipped on this machine: ";
/// Names of the services in the values of every version of the chart. Each is a Deployment.
pub(crate) const VALUES: &[&str] =
    &["admissionWebhook", "evacuationController", "maintenanceController", "taintManager"];
/// How long a service may take to start or to respond.
const LIMIT: Duration = Duration::from_secs(60);

/// A running service. Dropping it kills it.
#[derive(Debug)]
pub struct Service {
    process: Process,
    log: PathBuf,
}

impl Deref for Service {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

impl Service {
    /// Starts one replica of a service, such as `evacuation-controller`, with additional arguments. Does not wait: see
    /// [`Service::ready`].
    pub async fn start(cluster: &Handle, name: &str, args: &[&str]) -> Result<Self> {
        let kubeconfig = cluster.service_account_kubeconfig(NAMESPACE, &format!("haulout-{name}")).await?;
        Self::start_as(cluster, name, &kubeconfig, args)
    }

    /// The same with the arguments of the chart's Deployment.
    pub async fn start_installed(cluster: &Handle, name: &str) -> Result<Self> {
        let args = chart_args(cluster, name).await?;
        let args = args.with_context(|| format!("the chart does not install the {name}"))?;
        Self::start(cluster, name, &args.iter().map(String::as_str).collect::<Vec<_>>()).await
    }

    /// The same as [`Service::start`] with any kubeconfig.
    pub fn start_as(cluster: &Handle, name: &str, kubeconfig: &Path, args: &[&str]) -> Result<Self> {
        static REPLICAS: AtomicU32 = AtomicU32::new(0);
        let number = REPLICAS.fetch_add(1, Ordering::Relaxed);
        // Tests that share a cluster run in different processes.
        let instance = format!("{name}-{}-{number}", std::process::id());
        let log = cluster.logs.join(format!("{instance}.log"));
        let process = cluster
            .command(&program(name)?)
            .args(["--listen", "127.0.0.1:0", "--namespace", NAMESPACE, "--instance", &instance])
            .args(args)
            .env("KUBECONFIG", kubeconfig)
            .log(&log)
            .spawn(name)?;
        Ok(Self { process, log })
    }

    /// Its log so far.
    pub fn text(&self) -> String {
        // Without a file, nothing has been logged yet.
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until `/readyz` reports that it is ready.
    pub async fn ready(&self) -> Result<()> {
        let ready = wait::eventually("the service is ready", LIMIT, async || {
            Ok(self.get("/readyz").await?.starts_with("HTTP/1.1 200 ").then_some(()))
        });
        self.explain(ready.await)
    }

    /// Waits until this replica is the leader.
    pub async fn leads(&self) -> Result<()> {
        let leads = wait::eventually("the service is the leader", LIMIT, async || {
            Ok((self.metric("leader_election_master_status").await? > 0.0).then_some(()))
        });
        self.explain(leads.await)
    }

    /// The sum of the samples of this metric, over all its labels.
    pub async fn metric(&self, name: &str) -> Result<f64> {
        self.metric_where(name, "").await
    }

    /// The sum of the samples of this metric whose labels contain this text, such as `reason="Gone"`.
    pub async fn metric_where(&self, name: &str, label: &str) -> Result<f64> {
        let text = self.get("/metrics").await?;
        let samples = text.lines().filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let labels = series.strip_prefix(name)?;
            let whole = labels.is_empty() || labels.starts_with('{');
            (whole && labels.contains(label)).then(|| value.parse::<f64>().ok())?
        });
        Ok(samples.sum())
    }

    /// Shifts its clock ahead by this much in total.
    pub async fn shift_clock(&self, by: Duration) -> Result<()> {
        let answer = self.request("POST", "/shift-clock", &by.as_secs().to_string()).await?;
        if !answer.starts_with("HTTP/1.1 200 ") {
            bail!("failed to shift the clock: {answer}");
        }
        Ok(())
    }

    /// Sends a GET request and returns the whole response, head and body.
    pub async fn get(&self, path: &str) -> Result<String> {
        self.request("GET", path, "").await
    }

    async fn request(&self, method: &str, path: &str, body: &str) -> Result<String> {
        let address = self.address().await?;
        let mut stream =
            TcpStream::connect(&address).await.with_context(|| format!("failed to connect to {address}"))?;
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: {address}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).await.context("failed to send a request to the service")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.context("failed to read the service's answer")?;
        Ok(answer)
    }

    /// The address of its probes and metrics, from its log.
    pub async fn address(&self) -> Result<String> {
        let address = wait::eventually("the service logs its address", LIMIT, async || {
            if let Some(status) = self.try_wait() {
                bail!("the service exited with {status}");
            }
            let text = self.text();
            let mut lines =
                text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
            Ok(lines.find_map(|line| line.get("listening")?.as_str().map(String::from)))
        });
        self.explain(address.await)
    }

    /// Adds the last lines of its log to an error.
    fn explain<T>(&self, result: Result<T>) -> Result<T> {
        result.with_context(|| {
            let text = self.text();
            let lines: Vec<_> = text.lines().collect();
            let last = lines.get(lines.len().saturating_sub(10)..).unwrap_or_default().join("\n");
            format!("{}; last lines of its log:\n{last}", self.name())
        })
    }
}

/// The arguments from the chart's Deployment of a service, if it has one.
pub async fn chart_args(cluster: &Handle, name: &str) -> Result<Option<Vec<String>>> {
    let deployments: Api<Deployment> = Api::namespaced(cluster.client().await?, NAMESPACE);
    let deployment = deployments.get_opt(&format!("haulout-{name}")).await;
    let Some(deployment) =
        deployment.with_context(|| format!("failed to read the Deployment of the {name}"))?
    else {
        return Ok(None);
    };
    let pod = deployment.spec.and_then(|spec| spec.template.spec).unwrap_or_default();
    Ok(Some(pod.containers.into_iter().filter_map(|one| one.args).flatten().collect()))
}

/// A program of the workspace, such as a service. It is next to xtask, which builds it.
pub fn program(name: &str) -> Result<PathBuf> {
    let xtask =
        std::env::var_os(XTASK_ENV).map_or_else(std::env::current_exe, |path: OsString| Ok(path.into()));
    let program = xtask.context("failed to find the running program")?.with_file_name(name);
    if !program.is_file() {
        bail!("{} does not exist: run this with `cargo xtask`, which builds it", program.display());
    }
    Ok(program)
}

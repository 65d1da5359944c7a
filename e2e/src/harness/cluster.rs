//! Boots, controls and shuts down one control plane. `command` has the arguments of each program, `folder` the folder
//! of the cluster, and `boot` the steps until it is ready.

mod boot;
mod command;
mod folder;
mod ports;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::FutureExt as _;
use futures::future::select_all;
use tokio::sync::watch;

pub use self::boot::Builder;
use self::command::Settings;
use self::folder::Folder;
use crate::etcd::Etcd;
use crate::handle::Handle;
use crate::process::Process;
use crate::real_node::{RealNode, Tunnel};
use crate::rights;

/// How long a component may take to stop before it is killed.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// A program of the control plane. The order is the start order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Component {
    /// etcd.
    Etcd,
    /// kube-apiserver.
    ApiServer,
    /// kube-controller-manager.
    ControllerManager,
    /// kube-scheduler.
    Scheduler,
    /// A KWOK process that keeps nodes ready and renews their Leases, as kubelets do.
    KwokNodes,
    /// A KWOK process that simulates the pods on these nodes. A single process for both would lose pods that it
    /// receives before it holds the Lease of their node.
    Kwok,
}

impl Component {
    /// All components, in start order.
    pub const ALL: [Self; 6] =
        [Self::Etcd, Self::ApiServer, Self::ControllerManager, Self::Scheduler, Self::KwokNodes, Self::Kwok];

    /// Its name in messages. With `.log`, the name of its log.
    pub fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::ApiServer => "kube-apiserver",
            Self::ControllerManager => "kube-controller-manager",
            Self::Scheduler => "kube-scheduler",
            Self::KwokNodes => "kwok-nodes",
            Self::Kwok => "kwok",
        }
    }

    /// The program that it runs.
    pub fn program(self) -> &'static str {
        match self {
            Self::KwokNodes => Self::Kwok.name(),
            other => other.name(),
        }
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A component that exited unexpectedly.
#[derive(Clone, Debug)]
pub struct Exit {
    /// The component.
    pub component: Component,
    /// Its exit status.
    pub status: ExitStatus,
    /// Its log.
    pub log: PathBuf,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ended with {}: see {}", self.component, self.status, self.log.display())
    }
}

/// A running control plane. Dropping it kills its processes, waits for them and removes its folder. The logs of a
/// panicking test are kept.
#[derive(Debug)]
pub struct Cluster {
    handle: Handle,
    settings: Settings,
    /// The components that should be running. Stopped ones are not included.
    running: Mutex<BTreeMap<Component, Arc<Process>>>,
    /// Notifies [`Cluster::wait_for_exit`] that `running` has changed.
    changed: watch::Sender<()>,
    /// The tunnel to an API server in the network of a real node.
    tunnel: Option<Tunnel>,
    real_nodes: Vec<RealNode>,
    folder: Folder,
}

impl Deref for Cluster {
    type Target = Handle;

    fn deref(&self) -> &Handle {
        &self.handle
    }
}

impl Cluster {
    /// Settings for a new cluster.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Its real nodes. The control plane runs in the network of the first one.
    pub fn real_nodes(&self) -> &[RealNode] {
        &self.real_nodes
    }

    /// The handle with which other processes can use this cluster.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Its storage, available while etcd runs.
    pub fn etcd(&self) -> Result<Etcd> {
        Etcd::new(&format!("http://127.0.0.1:{}", self.settings.ports.etcd))
    }

    /// Stops a component gracefully and waits for it. Does nothing if it is not running.
    pub async fn stop(&self, component: Component) -> Result<()> {
        self.end(component, |process| process.stop(STOP_LIMIT)).await
    }

    /// Kills a component and waits until it is gone. Does nothing if it is not running.
    pub async fn kill(&self, component: Component) -> Result<()> {
        self.end(component, Process::kill).await
    }

    async fn end(
        &self,
        component: Component,
        how: impl FnOnce(&Process) -> Result<ExitStatus> + Send + 'static,
    ) -> Result<()> {
        let process = self.running().remove(&component);
        self.changed.send_replace(());
        let Some(process) = process else { return Ok(()) };
        tokio::task::spawn_blocking(move || how(&process))
            .await
            .context("failed to wait for a process to end")??;
        Ok(())
    }

    /// Freezes a component: it keeps its connections and does not respond.
    pub fn pause(&self, component: Component) -> Result<()> {
        self.process(component)?.pause()
    }

    /// Resumes a frozen component.
    pub fn resume(&self, component: Component) -> Result<()> {
        self.process(component)?.resume()
    }

    /// Starts a component that was stopped or has exited, with the same ports and data. After etcd or the API server,
    /// waits until the API server is ready, unless the other one is not running.
    pub async fn start(&self, component: Component) -> Result<()> {
        if self.is_running(component) {
            return Ok(());
        }
        if component == Component::KwokNodes {
            // Otherwise the new process would wait until the Leases of its nodes expire.
            self.handle.release_nodes().await?;
        }
        self.spawn(component)?;
        let storage = [Component::Etcd, Component::ApiServer];
        if storage.contains(&component) && storage.into_iter().all(|needed| self.is_running(needed)) {
            self.wait_for_api_server().await?;
        }
        Ok(())
    }

    /// Starts an additional controller manager with only the node lifecycle and taint eviction controllers, with this
    /// many requests per second or, for `None`, with Kubernetes' default of 20. Dropping it kills it.
    pub fn taint_eviction(&self, qps: Option<u32>) -> Result<Process> {
        // It looks up the pods of a node in an index that the other controller creates.
        let controllers = "--controllers=node-lifecycle-controller,taint-eviction-controller".to_owned();
        let settings = Settings {
            taint_eviction: true,
            controller_manager_qps: qps,
            extra_args: vec![(Component::ControllerManager, controllers)],
            ..self.settings.clone()
        };
        let log = self.handle.logs.join("taint-eviction.log");
        command::command(Component::ControllerManager, &self.handle, &settings)
            .log(log)
            .spawn("taint eviction")
    }

    /// Stops and starts a component.
    pub async fn restart(&self, component: Component) -> Result<()> {
        self.stop(component).await?;
        self.start(component).await
    }

    /// Whether the component is running. A paused one is.
    pub fn is_running(&self, component: Component) -> bool {
        self.running().get(&component).is_some_and(|process| process.try_wait().is_none())
    }

    /// The process IDs of the running components.
    pub fn pids(&self) -> BTreeMap<Component, u32> {
        let running = self.running();
        let alive = running.iter().filter(|(_, process)| process.try_wait().is_none());
        alive.map(|(component, process)| (*component, process.pid())).collect()
    }

    /// Resolves when a component exits that was not stopped or killed through this cluster.
    pub async fn wait_for_exit(&self) -> Exit {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            let exits: Vec<_> = self
                .running()
                .iter()
                .map(|(component, process)| {
                    let component = *component;
                    process.exited().map(move |status| (component, status)).boxed()
                })
                .collect();
            if exits.is_empty() {
                // The sender is in `self`, so this cannot fail.
                let _ = changed.changed().await;
                continue;
            }
            tokio::select! {
                ((component, status), _, _) = select_all(exits) => {
                    // A component that is being stopped is removed from `running` before it exits.
                    let unwanted = self.running().get(&component).is_some_and(|p| p.try_wait() == Some(status));
                    if unwanted {
                        return Exit { component, status, log: self.component_log(component) };
                    }
                }
                _ = changed.changed() => {}
            }
        }
    }

    /// Keeps the logs when the cluster is removed, and prints where they are.
    pub fn keep_logs(&self) {
        self.folder.keep_logs();
    }

    /// Shuts the cluster down. Dropping it does the same.
    pub async fn shutdown(self) {
        // A blocking task that panics has already printed its message.
        let _ = tokio::task::spawn_blocking(move || drop(self)).await;
    }

    /// The log of a component.
    pub fn component_log(&self, component: Component) -> PathBuf {
        self.handle.logs.join(format!("{component}.log"))
    }

    fn spawn(&self, component: Component) -> Result<()> {
        let log = self.component_log(component);
        let process =
            command::command(component, &self.handle, &self.settings).log(log).spawn(component.name())?;
        self.running().insert(component, Arc::new(process));
        self.changed.send_replace(());
        Ok(())
    }

    fn process(&self, component: Component) -> Result<Arc<Process>> {
        let process = self.running().get(&component).cloned();
        process.with_context(|| format!("{component} is not running in cluster {}", self.handle.name))
    }

    fn running(&self) -> MutexGuard<'_, BTreeMap<Component, Arc<Process>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = rights::record(&self.handle) {
            eprintln!("failed to record the permissions used in cluster {}: {error:#}", self.handle.name);
        }
        // The processes are killed instead of stopped: the data is removed anyway, and stopping an API server with open
        // watches takes long. They are killed in reverse order, so that none logs the loss of its dependency.
        let mut running = std::mem::take(&mut *self.running());
        while let Some((_, process)) = running.pop_last() {
            // Killing a child process cannot fail, and the error could not be reported here.
            let _ = process.kill();
        }
    }
}

//! Boots, controls and tears down one control plane. How each program is called is in `command`,
//! the folder that everything lives in is in `folder`, and the way to "ready" is in `boot`.

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
use crate::real_node::{Door, RealNode};
use crate::rights;

/// How long a component gets to end by itself before it is killed.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// One program of the control plane, in the order in which they start.
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
    /// A KWOK that keeps the nodes ready and renews their leases, as kubelets do.
    KwokNodes,
    /// A KWOK that pretends to run the pods on these nodes. It is another process because one that
    /// does both forgets pods which it sees before it holds their node's lease.
    Kwok,
}

impl Component {
    /// All components, in the order of starting them.
    pub const ALL: [Self; 6] =
        [Self::Etcd, Self::ApiServer, Self::ControllerManager, Self::Scheduler, Self::KwokNodes, Self::Kwok];

    /// Its name in messages and, with `.log`, that of its log.
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

/// A component that died although nobody stopped it.
#[derive(Clone, Debug)]
pub struct Exit {
    /// Which one.
    pub component: Component,
    /// How it ended.
    pub status: ExitStatus,
    /// Its log.
    pub log: PathBuf,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ended with {}: see {}", self.component, self.status, self.log.display())
    }
}

/// A running control plane. Dropping it kills its processes, waits for them and removes its folder,
/// apart from the logs of a panicking test.
#[derive(Debug)]
pub struct Cluster {
    handle: Handle,
    settings: Settings,
    /// The components that should be running; one that was stopped is not in here.
    running: Mutex<BTreeMap<Component, Arc<Process>>>,
    /// Tells [`Cluster::wait_for_exit`] to look at `running` again.
    changed: watch::Sender<()>,
    /// The way to an API server in the network of a real node.
    door: Option<Door>,
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
    /// Settings for a cluster that has yet to boot.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Its real nodes, the first of which is the control plane's machine.
    pub fn real_nodes(&self) -> &[RealNode] {
        &self.real_nodes
    }

    /// What other processes need to use this cluster.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Its storage, which is there for as long as etcd runs.
    pub fn etcd(&self) -> Result<Etcd> {
        Etcd::new(&format!("http://127.0.0.1:{}", self.settings.ports.etcd))
    }

    /// Ends a component in good order and waits for it. Nothing happens when it is not running.
    pub async fn stop(&self, component: Component) -> Result<()> {
        self.end(component, |process| process.stop(STOP_LIMIT)).await
    }

    /// Kills a component and waits until it is gone. Nothing happens when it is not running.
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
            .context("waiting for a process to end")??;
        Ok(())
    }

    /// Freezes a component: it keeps its connections and answers nothing.
    pub fn pause(&self, component: Component) -> Result<()> {
        self.process(component)?.pause()
    }

    /// Lets a frozen component go on.
    pub fn resume(&self, component: Component) -> Result<()> {
        self.process(component)?.resume()
    }

    /// Starts a component that was stopped or has died, with the same ports and data. After etcd or
    /// the API server, the API server is ready when this returns, unless the other one is missing.
    pub async fn start(&self, component: Component) -> Result<()> {
        if self.is_running(component) {
            return Ok(());
        }
        if component == Component::KwokNodes {
            // Its successor would wait until the leases of its nodes have run out.
            self.handle.release_nodes().await?;
        }
        self.spawn(component)?;
        let storage = [Component::Etcd, Component::ApiServer];
        if storage.contains(&component) && storage.into_iter().all(|needed| self.is_running(needed)) {
            self.wait_for_api_server().await?;
        }
        Ok(())
    }

    /// A further controller manager that does nothing but look after nodes and make pods leave tainted ones, with
    /// this many requests a second or, for `None`, with Kubernetes' own default of 20. Dropping it kills it.
    pub fn taint_eviction(&self, qps: Option<u32>) -> Result<Process> {
        // It finds the pods of a node by an index that the other one makes.
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

    /// Whether the component runs at this moment; a paused one does.
    pub fn is_running(&self, component: Component) -> bool {
        self.running().get(&component).is_some_and(|process| process.try_wait().is_none())
    }

    /// The process ids of what runs.
    pub fn pids(&self) -> BTreeMap<Component, u32> {
        let running = self.running();
        let alive = running.iter().filter(|(_, process)| process.try_wait().is_none());
        alive.map(|(component, process)| (*component, process.pid())).collect()
    }

    /// Resolves when a component has died that nobody stopped or killed through this cluster.
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
                // The sender lives in `self`, so that this cannot fail.
                let _ = changed.changed().await;
                continue;
            }
            tokio::select! {
                ((component, status), _, _) = select_all(exits) => {
                    // One that is being stopped has been taken out of `running` before it ends.
                    let unwanted = self.running().get(&component).is_some_and(|p| p.try_wait() == Some(status));
                    if unwanted {
                        return Exit { component, status, log: self.component_log(component) };
                    }
                }
                _ = changed.changed() => {}
            }
        }
    }

    /// Keeps the logs when the cluster goes, and prints where they are.
    pub fn keep_logs(&self) {
        self.folder.keep_logs();
    }

    /// Ends the cluster; dropping it does the same.
    pub async fn shutdown(self) {
        // A blocking task that panics has printed its story.
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
        if let Err(error) = rights::note(&self.handle) {
            eprintln!("what was done in cluster {} is not noted: {error:#}", self.handle.name);
        }
        // Killed and not asked to end: the data go too, and an API server asked to end while
        // others hold watches takes its time. In reverse order, so that nobody logs the loss of
        // what it depends on.
        let mut running = std::mem::take(&mut *self.running());
        while let Some((_, process)) = running.pop_last() {
            // Our own child can always be killed, and there is nobody to tell.
            let _ = process.kill();
        }
    }
}

//! The probe service in tests: its processes, their output and their writes.

use std::fs;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::{Duration, Instant};

use futures::TryStreamExt as _;
use haulout_e2e::{Handle, Process, objects, wait};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::watcher::Event;
use kube::runtime::{WatchStreamExt as _, watcher};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::support::xtask;

/// The name of the ConfigMap in which probes count.
const COUNT: &str = "probe";
/// The name of the probes' Lease.
pub const LEASE: &str = "haulout-probe";

/// Long enough for a busy machine.
pub const SOON: Duration = Duration::from_secs(30);

/// One successful write of a probe.
#[derive(Clone, Debug)]
pub struct Write {
    pub sequence: u64,
    pub identity: String,
    /// When the test received it.
    pub at: Instant,
    /// Whether the watch restarted because of an outage: writes before this one may be missing.
    after_gap: bool,
}

/// A namespace in which probes run, and everything that they wrote there.
pub struct Probes {
    handle: Handle,
    pub namespace: String,
    history: watch::Receiver<Vec<Write>>,
    watching: JoinHandle<()>,
}

impl Probes {
    pub async fn new(handle: &Handle, namespace: &str) -> Self {
        let client = handle.client().await.unwrap();
        let namespaces: Api<Namespace> = Api::all(client.clone());
        namespaces.create(&PostParams::default(), &objects::namespace(namespace)).await.unwrap();
        let (sender, history) = watch::channel(Vec::new());
        let watching = tokio::spawn(record(Api::namespaced(client, namespace), sender));
        Self { handle: handle.clone(), namespace: namespace.to_owned(), history, watching }
    }

    /// Starts a probe. Its identity, which is also in its user agent, is unique in this namespace.
    pub fn start(&self, name: &str, lease_seconds: u64) -> Probe {
        self.start_with(&self.handle.kubeconfig, name, lease_seconds)
    }

    /// Starts a probe with its own permissions.
    pub fn start_with(&self, kubeconfig: &Path, name: &str, lease_seconds: u64) -> Probe {
        let identity = format!("{}-{name}", self.namespace);
        let log = self.handle.logs.join(format!("{identity}.log"));
        let process = self
            .handle
            .command(&xtask().with_file_name("probe"))
            .args(["--count", "--listen", "127.0.0.1:0", "--lease-seconds", &lease_seconds.to_string()])
            .args(["--namespace", &self.namespace, "--instance", &identity])
            .env("KUBECONFIG", kubeconfig)
            .log(&log)
            .spawn(&identity)
            .unwrap();
        Probe { process, identity, log }
    }

    /// All writes so far. None is missing, except during outages.
    pub fn history(&self) -> Vec<Write> {
        let history = self.history.borrow().clone();
        let mut before = 0;
        for write in &history {
            let next = if write.after_gap { before + 1..=u64::MAX } else { before + 1..=before + 1 };
            assert!(next.contains(&write.sequence), "{write:?} does not follow {before}");
            before = write.sequence;
        }
        history
    }

    /// Waits until the writes meet a condition.
    pub async fn until(&self, what: &str, mut condition: impl FnMut(&[Write]) -> bool) -> Vec<Write> {
        let mut history = self.history.clone();
        let met = tokio::time::timeout(SOON, history.wait_for(|history| condition(history))).await;
        assert!(met.is_ok(), "waited until {what}; the last writes are {:?}", self.last(5));
        drop(met);
        self.history()
    }

    /// Waits for this many more writes, by any probe.
    pub async fn more(&self, count: usize) -> Vec<Write> {
        let enough = self.history.borrow().len() + count;
        self.until(&format!("there are {count} more writes"), |history| history.len() >= enough).await
    }

    /// Waits for the first write of this probe after this many writes.
    pub async fn first_of(&self, probe: &Probe, after: usize) -> Vec<Write> {
        let what = format!("{} writes", probe.identity);
        self.until(&what, |history| history.iter().skip(after).any(|write| write.identity == probe.identity))
            .await
    }

    fn last(&self, count: usize) -> Vec<Write> {
        let history = self.history.borrow();
        history.iter().skip(history.len().saturating_sub(count)).cloned().collect()
    }

    /// Removes the namespace.
    pub async fn remove(self) {
        let namespaces: Api<Namespace> = Api::all(self.handle.client().await.unwrap());
        namespaces.delete(&self.namespace, &DeleteParams::default()).await.unwrap();
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

async fn record(maps: Api<ConfigMap>, history: watch::Sender<Vec<Write>>) {
    let only = watcher::Config::default().fields(&format!("metadata.name={COUNT}"));
    let mut events = pin!(watcher(maps, only).default_backoff());
    loop {
        let (map, after_gap) = match events.try_next().await {
            Ok(Some(Event::Apply(map))) => (map, false),
            Ok(Some(Event::InitApply(map))) => (map, true),
            // The test may have caused an outage of the API server.
            _ => continue,
        };
        let (data, at) = (map.data.unwrap_or_default(), Instant::now());
        let (sequence, identity) = (data["sequence"].parse().unwrap(), data["identity"].clone());
        history.send_modify(|history| {
            // A restarted watch delivers the current state again.
            if history.last().is_none_or(|last| last.sequence != sequence) {
                history.push(Write { sequence, identity, at, after_gap });
            }
        });
    }
}

/// A running probe.
pub struct Probe {
    pub process: Process,
    pub identity: String,
    log: PathBuf,
}

impl Probe {
    /// The lines that it printed.
    pub fn lines(&self) -> Vec<String> {
        fs::read_to_string(&self.log).unwrap().lines().map(Into::into).collect()
    }

    /// How many of its lines contain this text.
    pub fn said(&self, text: &str) -> usize {
        self.lines().iter().filter(|line| line.contains(text)).count()
    }

    /// The prefix of its user agent.
    pub fn agent(&self) -> String {
        format!("haulout-probe/{}", self.identity)
    }

    /// How many times it has started to lead.
    pub fn terms(&self) -> usize {
        self.lines().iter().filter(|line| *line == "probe: started leading").count()
    }

    /// How many times it has tried to write, successfully or not.
    pub fn acts(&self) -> usize {
        self.said("wrote ") + self.said("failed: ")
    }

    /// The numbers whose writes were confirmed.
    pub fn wrote(&self) -> Vec<u64> {
        self.lines().iter().filter_map(|line| line.strip_prefix("wrote ")?.parse().ok()).collect()
    }

    /// Waits until it has printed this text this many times.
    pub async fn until_said(&self, text: &str, count: usize) {
        let what = format!("{} has said {text:?} {count} times", self.identity);
        wait::eventually(&what, SOON, async || Ok((self.said(text) >= count).then_some(()))).await.unwrap();
    }
}

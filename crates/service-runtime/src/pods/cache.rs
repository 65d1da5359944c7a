//! The shared cache of all pods: read access, subscriptions, and whether the cache is up to date.

use std::collections::HashSet;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1 as core;
use kube::Client;
use kube::api::GetParams;
use kube::core::Request;
use parking_lot::{RwLock, RwLockReadGuard};
use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use super::Uid;
use super::index::{Change, PodIndex};
use super::intern::Interner;
use super::pod::Pod;
use super::read::InvalidPod;
use super::subscription::ChangeBuffer;
use super::wire;
use crate::metrics::Metrics;
use crate::watch::{self as watches, PAGE_SIZE, Reflector, Sink, Source};

/// Whether the cache is up to date. During a watch gap it may not be: the watch is broken, or could not be resumed, so that
/// all pods have to be listed again. Short gaps count too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Continuity {
    /// Whether all pods have been listed once.
    pub ready: bool,
    /// Number of gaps since then.
    pub gaps: u64,
    /// Start of the current gap, if any.
    pub gap_since: Option<Instant>,
    /// Start of the current or last gap.
    pub last_gap_began: Option<Instant>,
    /// End of the last gap. The cache then processes the events of the gap.
    pub last_gap_ended: Option<Instant>,
}

/// All pods of the cluster. Clones share one cache. Its watch ends when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct PodCache {
    shared: Arc<Shared>,
    _watch: Arc<AbortOnDropHandle<()>>,
}

impl PodCache {
    /// Starts the watch. The client must not retry by itself, because that would hide watch gaps.
    pub fn start(client: Client, metrics: Metrics) -> Self {
        Self::with_page_size(client, metrics, PAGE_SIZE)
    }

    /// Like [`PodCache::start`], with this number of pods per page of a list.
    pub fn with_page_size(client: Client, metrics: Metrics, page_size: u32) -> Self {
        let shared = Arc::new(Shared::default());
        let sink = PodSink { shared: Arc::clone(&shared), interner: Interner::default() };
        let source = Source::<core::Pod>::all("pods").page_size(page_size);
        let reflector = Reflector::new(client, source, sink, metrics, CancellationToken::new());
        let task = tokio::spawn(async move { match reflector.run().await {} });
        Self { shared, _watch: Arc::new(AbortOnDropHandle::new(task)) }
    }

    /// Waits until all pods have been listed once.
    pub async fn ready(&self) {
        // This cannot fail: the sender lives as long as `self`.
        let _ = self.shared.continuity.subscribe().wait_for(|continuity| continuity.ready).await;
    }

    /// The current pods. The guard blocks updates of the cache, so drop it soon.
    pub fn read(&self) -> impl Deref<Target = PodIndex> {
        RwLockReadGuard::map(self.shared.state.read(), |state| &state.index)
    }

    /// Subscribes to changes. The first changes are all existing pods, as new ones.
    pub fn subscribe(&self) -> Subscription {
        let buffer = self.shared.subscribe();
        Subscription { buffer, cache: self.clone() }
    }

    /// Whether the cache is up to date.
    pub fn continuity(&self) -> Continuity {
        *self.shared.continuity.borrow()
    }

    /// A receiver for changes of [`PodCache::continuity`].
    pub fn watch_continuity(&self) -> watch::Receiver<Continuity> {
        self.shared.continuity.subscribe()
    }

    /// Number of relists after the first list.
    pub fn relists(&self) -> u64 {
        self.shared.relists.load(Ordering::Relaxed)
    }
}

/// Why a pod could not be read from the API server.
#[derive(Debug, Error)]
pub enum FetchError {
    /// The request failed.
    #[error(transparent)]
    Request(#[from] watches::Error),
    /// The answer is not a pod.
    #[error(transparent)]
    InvalidPod(#[from] InvalidPod),
}

/// Reads a pod from the API server, not from the cache. `None` if it does not exist.
pub async fn fetch(client: &Client, namespace: &str, name: &str) -> Result<Option<Pod>, FetchError> {
    let pods = Request::new(format!("/api/v1/namespaces/{namespace}/pods"));
    let mut body = match watches::open(client, pods.get(name, &GetParams::default())).await {
        Ok(body) => body,
        Err(watches::Error::Rejected { code: 404, .. }) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut json = Vec::new();
    watches::read(&mut body, &mut json).await?;
    Ok(Some(Pod::from_json(&json)?))
}

/// The changes for one subscriber, in order. Changes of the same pod are merged, so that at most one change per pod is
/// pending.
#[derive(Debug)]
pub struct Subscription {
    buffer: Arc<ChangeBuffer>,
    /// Keeps the cache alive.
    cache: PodCache,
}

impl Subscription {
    /// The changes since the last call. Waits until there is one. No change is lost if the future is dropped.
    pub async fn changes(&mut self) -> Vec<Change> {
        self.buffer.drain().await
    }

    /// The cache that the changes come from.
    pub fn cache(&self) -> &PodCache {
        &self.cache
    }
}

/// The state that the watch writes and all clones read.
#[derive(Debug, Default)]
pub(super) struct Shared {
    state: RwLock<State>,
    continuity: watch::Sender<Continuity>,
    relists: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    index: PodIndex,
    /// Weak, because subscriptions can be dropped at any time.
    subscribers: Vec<Weak<ChangeBuffer>>,
}

/// Applies watch events to the cache.
struct PodSink {
    shared: Arc<Shared>,
    interner: Interner,
}

impl Sink for PodSink {
    type Object<'a> = wire::Object<'a>;
    type Key = Uid;

    fn apply(&mut self, _: Uid, object: wire::Object<'_>) {
        match Pod::read(&object, &mut self.interner) {
            Ok(pod) => self.shared.change(|index| index.apply(pod)),
            Err(problem) => warn!(%problem, "ignoring pod that cannot be parsed"),
        }
    }

    fn delete(&mut self, uid: Uid) {
        self.shared.change(|index| index.delete(uid));
        self.interner.changed();
    }

    fn reset(&mut self, listed: &HashSet<Uid>) {
        self.shared.change(|index| {
            let gone = index.retain(listed);
            for _ in &gone {
                self.interner.changed();
            }
            gone
        });
        self.shared.relists.fetch_add(1, Ordering::Relaxed);
    }

    fn interrupted(&mut self, ago: Duration) {
        self.shared.continuity.send_modify(|continuity| {
            let now = Instant::now();
            continuity.gaps += 1;
            continuity.gap_since = Some(now.checked_sub(ago).unwrap_or(now));
            continuity.last_gap_began = continuity.gap_since;
        });
    }

    fn resumed(&mut self) {
        self.shared.continuity.send_modify(|continuity| {
            continuity.ready = true;
            if continuity.gap_since.take().is_some() {
                continuity.last_gap_ended = Some(Instant::now());
            }
        });
    }
}

impl Shared {
    fn change<C: IntoIterator<Item = Change>>(&self, change: impl FnOnce(&mut PodIndex) -> C) {
        let mut state = self.state.write();
        for change in change(&mut state.index) {
            for buffer in state.subscribers.iter().filter_map(Weak::upgrade) {
                buffer.push(change.clone());
            }
        }
    }

    fn subscribe(&self) -> Arc<ChangeBuffer> {
        let buffer = Arc::new(ChangeBuffer::default());
        let mut state = self.state.write();
        for pod in state.index.iter() {
            buffer.push(Change { old: None, new: Some(Arc::clone(pod)) });
        }
        state.subscribers.retain(|buffer| buffer.strong_count() > 0);
        state.subscribers.push(Arc::downgrade(&buffer));
        buffer
    }
}

/// Receives changes of pods; see [`Term::subscribe`](crate::term::Term::subscribe).
pub trait Subscriber: Send + Sync + 'static {
    /// Pods have changed.
    fn apply(&self, changes: Vec<Change>);

    /// A watch gap starts. `ago` is not zero if the watch was half-open: the gap then started that long ago.
    fn interrupted(&self, _ago: Duration) {}

    /// All pods have been listed, or a gap has ended.
    fn resumed(&self) {}
}

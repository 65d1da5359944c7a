//! One cache of all pods for everybody in the process: who reads it, who is told of changes, and whether
//! it shows the present.

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
use super::feed::Feed;
use super::index::{Change, PodIndex};
use super::intern::Interner;
use super::pod::Pod;
use super::read::NotAPod;
use super::wire;
use crate::metrics::Metrics;
use crate::watch::{self as watches, PAGE_SIZE, Reflector, Sink, Source};

/// Whether the cache shows the present. A gap is a time in which it may not have: a watch that was broken,
/// or that could not be resumed, so that all pods had to be listed anew. Short gaps are counted too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Continuity {
    /// Whether all pods have been listed once.
    pub ready: bool,
    /// How many gaps have begun since then.
    pub gaps: u64,
    /// Since when there is a gap, if there is one now.
    pub gap_since: Option<Instant>,
    /// When the present or last gap began.
    pub last_gap_began: Option<Instant>,
    /// When the last gap ended. What happened in it is being caught up with from then on.
    pub last_gap_ended: Option<Instant>,
}

/// All pods of the cluster, kept up to date. Clones share one cache; its watch ends with the last of them.
#[derive(Clone, Debug)]
pub struct PodCache {
    shared: Arc<Shared>,
    _watch: Arc<AbortOnDropHandle<()>>,
}

impl PodCache {
    /// Starts watching. The client should not retry by itself: that would hide a gap while it lasts.
    pub fn start(client: Client, metrics: Metrics) -> Self {
        Self::with_page_size(client, metrics, PAGE_SIZE)
    }

    /// The same, with this many pods in each page of a list.
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
        // The sender lives as long as we do, so that it cannot fail.
        let _ = self.shared.continuity.subscribe().wait_for(|continuity| continuity.ready).await;
    }

    /// The pods as they are known now. The cache stands still meanwhile: look, and let go.
    pub fn read(&self) -> impl Deref<Target = PodIndex> {
        RwLockReadGuard::map(self.shared.state.read(), |state| &state.index)
    }

    /// A feed of changes that begins with all pods that are known now as new ones.
    pub fn subscribe(&self) -> Subscription {
        let feed = self.shared.subscribe();
        Subscription { feed, cache: self.clone() }
    }

    /// Whether the cache shows the present.
    pub fn continuity(&self) -> Continuity {
        *self.shared.continuity.borrow()
    }

    /// Tells when [`PodCache::continuity`] changes.
    pub fn watch_continuity(&self) -> watch::Receiver<Continuity> {
        self.shared.continuity.subscribe()
    }

    /// How many times all pods have been listed since the first time.
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
    /// The answer is no pod.
    #[error(transparent)]
    NotAPod(#[from] NotAPod),
}

/// Gets one pod from the API server, past every cache; `None` if there is no pod with this name.
pub async fn fetch(client: &Client, namespace: &str, name: &str) -> Result<Option<Pod>, FetchError> {
    let pods = Request::new(format!("/api/v1/namespaces/{namespace}/pods"));
    let mut body = match watches::open(client, pods.get(name, &GetParams::default())).await {
        Ok(body) => body,
        Err(watches::Error::Refused { code: 404, .. }) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut json = Vec::new();
    watches::read(&mut body, &mut json).await?;
    Ok(Some(Pod::from_json(&json)?))
}

/// Changes for one subscriber, in order, from the first state that it does not know to the last of each
/// pod. However long it does not ask, it costs at most one change for each pod.
#[derive(Debug)]
pub struct Subscription {
    feed: Arc<Feed>,
    /// The cache lives as long as somebody listens.
    cache: PodCache,
}

impl Subscription {
    /// The changes since it was asked last; waits until there is one. Nothing is lost when the future is
    /// dropped.
    pub async fn changes(&mut self) -> Vec<Change> {
        self.feed.drain().await
    }

    /// The cache that the changes come from.
    pub fn cache(&self) -> &PodCache {
        &self.cache
    }
}

/// What the watch writes and everybody reads.
#[derive(Debug, Default)]
pub(super) struct Shared {
    state: RwLock<State>,
    continuity: watch::Sender<Continuity>,
    relists: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    index: PodIndex,
    /// Subscribers may have gone.
    feeds: Vec<Weak<Feed>>,
}

/// Applies what the API server tells to the cache.
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
            Err(problem) => warn!(%problem, "ignoring a pod that cannot be read"),
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
            for feed in state.feeds.iter().filter_map(Weak::upgrade) {
                feed.push(change.clone());
            }
        }
    }

    fn subscribe(&self) -> Arc<Feed> {
        let feed = Arc::new(Feed::default());
        let mut state = self.state.write();
        for pod in state.index.iter() {
            feed.push(Change { old: None, new: Some(Arc::clone(pod)) });
        }
        state.feeds.retain(|feed| feed.strong_count() > 0);
        state.feeds.push(Arc::downgrade(&feed));
        feed
    }
}

/// Who is told of changes of pods; see [`Term::subscribe`](crate::term::Term::subscribe).
pub trait Subscriber: Send + Sync + 'static {
    /// These pods have changed.
    fn apply(&self, changes: Vec<Change>);

    /// A gap begins: changes may be missed from now on, or since so long ago if the watch turned out to be half-open.
    fn interrupted(&self, _ago: Duration) {}

    /// All pods are known, or a gap has ended.
    fn resumed(&self) {}
}

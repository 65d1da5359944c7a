//! One cache of all pods for everybody in the process: who reads it, who is told of changes, and whether
//! it shows the present.

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::Instant;

use kube::Client;
use kube::api::GetParams;
use kube::core::Request;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::feed::Feed;
use super::index::{Change, PodIndex};
use super::pod::{Pod, Uid};
use super::request::{self, Error};
use super::watch::Reflector;

/// How pods are watched.
#[derive(Clone)]
pub struct Options {
    /// How many pods are listed at a time. More of them need more memory for a moment, fewer of them more
    /// requests.
    pub page_size: u32,
    /// Called each time a watch has ended, for whatever reason.
    pub on_watch_restart: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl Default for Options {
    fn default() -> Self {
        Self { page_size: 500, on_watch_restart: None }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options").field("page_size", &self.page_size).finish_non_exhaustive()
    }
}

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
    pub fn start(client: Client, options: Options) -> Self {
        let shared = Arc::new(Shared::default());
        let reflector = Reflector::new(client, Arc::clone(&shared), options);
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
        Reading(self.shared.state.read().unwrap_or_else(PoisonError::into_inner))
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

    /// How many watches have ended, for whatever reason. Each API server ends one every few minutes.
    pub fn watch_restarts(&self) -> u64 {
        self.shared.restarts.load(Ordering::Relaxed)
    }

    /// How many times all pods have been listed since the first time.
    pub fn relists(&self) -> u64 {
        self.shared.relists.load(Ordering::Relaxed)
    }
}

struct Reading<'a>(RwLockReadGuard<'a, State>);

impl Deref for Reading<'_> {
    type Target = PodIndex;

    fn deref(&self) -> &PodIndex {
        &self.0.index
    }
}

/// Gets one pod from the API server, past every cache; `None` if there is no pod with this name.
pub async fn fetch(client: &Client, namespace: &str, name: &str) -> Result<Option<Pod>, Error> {
    let pods = Request::new(format!("/api/v1/namespaces/{namespace}/pods"));
    let mut body = match request::open(client, pods.get(name, &GetParams::default())).await {
        Ok(body) => body,
        Err(Error::Refused { code: 404, .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut json = Vec::new();
    request::read(&mut body, &mut json).await?;
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
    restarts: AtomicU64,
    relists: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    index: PodIndex,
    /// Subscribers may have gone.
    feeds: Vec<Weak<Feed>>,
}

impl State {
    fn tell(&self, changes: impl IntoIterator<Item = Change>) {
        for change in changes {
            for feed in self.feeds.iter().filter_map(Weak::upgrade) {
                feed.push(change.clone());
            }
        }
    }
}

impl Shared {
    pub(super) fn apply(&self, pod: Pod) {
        let mut state = self.write();
        let changes = state.index.apply(pod);
        state.tell(changes);
    }

    pub(super) fn delete(&self, uid: Uid) {
        let mut state = self.write();
        let change = state.index.delete(uid);
        state.tell(change);
    }

    pub(super) fn begin_relist(&self) {
        self.begin_gap();
        self.write().index.begin_relist();
    }

    /// Returns how many pods had gone.
    pub(super) fn end_relist(&self) -> usize {
        let mut state = self.write();
        let gone = state.index.end_relist();
        let count = gone.len();
        state.tell(gone);
        drop(state);
        if self.continuity.borrow().ready {
            self.relists.fetch_add(1, Ordering::Relaxed);
        }
        self.continuity.send_if_modified(|continuity| !std::mem::replace(&mut continuity.ready, true));
        count
    }

    /// Before the first list there is nothing that could have a gap.
    pub(super) fn begin_gap(&self) {
        self.continuity.send_if_modified(|continuity| {
            let begins = continuity.ready && continuity.gap_since.is_none();
            if begins {
                continuity.gaps += 1;
                continuity.gap_since = Some(Instant::now());
            }
            begins
        });
    }

    pub(super) fn end_gap(&self) {
        self.continuity.send_if_modified(|continuity| {
            let ends = continuity.gap_since.take().is_some();
            if ends {
                continuity.last_gap_ended = Some(Instant::now());
            }
            ends
        });
    }

    pub(super) fn watch_ended(&self) {
        self.restarts.fetch_add(1, Ordering::Relaxed);
    }

    fn subscribe(&self) -> Arc<Feed> {
        let feed = Arc::new(Feed::default());
        let mut state = self.write();
        for pod in state.index.iter() {
            feed.push(Change { old: None, new: Some(Arc::clone(pod)) });
        }
        state.feeds.retain(|feed| feed.strong_count() > 0);
        state.feeds.push(Arc::downgrade(&feed));
        feed
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

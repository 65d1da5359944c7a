//! Lists and watches the objects of one kind, for as long as it is polled, and applies what it learns to a store: one
//! implementation for every kind and every service.
//!
//! kube-runtime's `watcher` does not say when a broken watch works again or was resumed, and its `Controller` is keyed by one
//! kind and has no lanes; our controllers need both. Requests, selectors and `Resource` are kube's.
//!
//! - Lists come in pages, watches ask for bookmarks and go on from the last version. What was deleted in a gap is found by
//!   comparing with the next list ([`Handler::delete`]).
//! - A gap begins when a watch breaks or its version has expired, and ends when a watch works again ([`Handler::interrupted`],
//!   [`Handler::resumed`]). Deadlines that pass in a gap are not missed at once.
//! - A half-open connection is noticed within 90 seconds: the API server sends a bookmark every minute, and where it has sent
//!   none yet, watches are short.
//! - An object that cannot be read is reported by name ([`Handler::unreadable`]), and all others go on.

mod object;
mod request;
mod store;

use std::collections::HashSet;
use std::convert::Infallible;
use std::hash::Hash;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use kube::api::{ListParams, WatchParams};
use kube::core::Request;
use kube::{Client, Resource};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::object::{Event, Parsed, Status};
pub(crate) use self::object::{Identified, Page};
pub use self::object::{Identity, Unreadable};
pub use self::request::Error;
use self::request::Lines;
pub(crate) use self::request::{open, read};
pub use self::store::Store;
use crate::access::Permission;
use crate::metrics::Metrics;
use crate::pods::Uid;
use crate::queue::Backoff;

/// How many objects are listed at a time. More of them need more memory for a moment, fewer of them more requests.
pub const PAGE_SIZE: u32 = 500;
/// The API server closes a watch after so many seconds: not all watches at once.
const WATCH_SECONDS: std::ops::Range<u32> = 230..290;
/// The same while no bookmark has come, so that a half-open watch is noticed soon.
const SHORT_WATCH_SECONDS: std::ops::Range<u32> = 60..75;
/// How much later than announced a watch may be closed before it is taken for half-open.
const MARGIN: Duration = Duration::from_secs(10);
/// An API server that sends bookmarks sends one every minute: after this long the watch is half-open.
const SILENCE: Duration = Duration::from_secs(85);
/// A watch that has lasted this long has worked, even if nothing has happened.
const WORKED: Duration = Duration::from_secs(5);
/// An API server that cannot go on from our version accepts the watch all the same and says so in its first
/// event. Only after this long a gap is over, and what happened in it has come too unless there was a lot.
const ACCEPTED: Duration = Duration::from_secs(1);
/// The pauses between attempts.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), most: Duration::from_secs(10) };

/// What an object is known by.
pub trait Key: Clone + Eq + Hash + Send + 'static {
    /// The key of an object; `None` if the object is ignored.
    fn of(identity: Identity<'_>) -> Option<Self>;
}

/// The name: enough for cluster-scoped kinds and within one namespace.
impl Key for Arc<str> {
    fn of(identity: Identity<'_>) -> Option<Self> {
        (!identity.name.is_empty()).then(|| identity.name.into())
    }
}

/// Namespace and name.
impl Key for (Arc<str>, Arc<str>) {
    fn of(identity: Identity<'_>) -> Option<Self> {
        Some((identity.namespace.into(), identity.name.into()))
    }
}

impl Key for Uid {
    fn of(identity: Identity<'_>) -> Option<Self> {
        identity.uid.parse().ok()
    }
}

/// The pod of an Evacuation, which is in its name: so it is known even of one that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EvacuatedPod(pub Uid);

impl Key for EvacuatedPod {
    fn of(identity: Identity<'_>) -> Option<Self> {
        identity.name.get(..36)?.parse().ok().map(Self)
    }
}

/// All objects of a kind are the same to the handler.
impl Key for () {
    fn of(_: Identity<'_>) -> Option<Self> {
        Some(())
    }
}

/// Keeps what is known of the objects of one kind. One controller has one implementation for each kind that it watches.
pub trait Handler<K>: Send + Sync + 'static {
    /// What an object is known by.
    type Key: Key;

    /// An object was added or has changed.
    fn apply(&self, key: Self::Key, object: K);

    /// An object was added or has changed and cannot be read. By default what is known of it stays.
    fn unreadable(&self, _key: Self::Key, _problem: Unreadable) {}

    /// An object was deleted, now or in a gap.
    fn delete(&self, key: Self::Key);

    /// A gap begins: changes may be missed from now on, or since so long ago if the watch turned out to be half-open.
    fn interrupted(&self, _ago: Duration) {}

    /// All objects have been listed for the first time, or a gap has ended.
    fn resumed(&self) {}
}

/// The objects of a kind that are watched.
#[derive(Clone)]
pub struct Source<K> {
    path: String,
    resource: &'static str,
    params: ListParams,
    metadata_only: bool,
    kind: PhantomData<fn() -> K>,
}

impl<K: Resource<DynamicType = ()>> Source<K> {
    /// All objects of the kind; `resource` is its plural name.
    pub fn all(resource: &'static str) -> Self {
        Self::at(resource, K::url_path(&(), None))
    }

    /// The objects in this namespace.
    pub fn in_namespace(resource: &'static str, namespace: &str) -> Self {
        Self::at(resource, K::url_path(&(), Some(namespace)))
    }

    fn at(resource: &'static str, path: String) -> Self {
        let params = ListParams::default().limit(PAGE_SIZE);
        Self { path, resource, params, metadata_only: false, kind: PhantomData }
    }

    /// Only those that this label selector selects.
    #[must_use]
    pub fn labels(self, labels: &str) -> Self {
        Self { params: self.params.labels(labels), ..self }
    }

    /// Only those that this field selector selects.
    #[must_use]
    pub fn fields(self, fields: &str) -> Self {
        Self { params: self.params.fields(fields), ..self }
    }

    /// This many in each page of a list.
    #[must_use]
    pub fn page_size(self, page_size: u32) -> Self {
        Self { params: self.params.limit(page_size), ..self }
    }

    /// Only their metadata, for kinds that are a `PartialObjectMeta`.
    #[must_use]
    pub fn metadata_only(self) -> Self {
        Self { metadata_only: true, ..self }
    }
}

impl<K> Source<K> {
    fn list(&self, more: Option<String>) -> request::Request {
        let params = ListParams { continue_token: more, ..self.params.clone() };
        let request = Request::new(&self.path);
        if self.metadata_only { request.list_metadata(&params) } else { request.list(&params) }
    }

    fn watch(&self, seconds: u32, version: &str) -> request::Request {
        let params = WatchParams {
            label_selector: self.params.label_selector.clone(),
            field_selector: self.params.field_selector.clone(),
            timeout: Some(seconds),
            bookmarks: true,
            ..WatchParams::default()
        };
        let request = Request::new(&self.path);
        if self.metadata_only {
            request.watch_metadata(&params, version)
        } else {
            request.watch(&params, version)
        }
    }
}

/// What watching all objects of a resource takes.
pub const fn permissions(group: &'static str, resource: &'static str) -> [Permission; 2] {
    [Permission::cluster("list", group, resource), Permission::cluster("watch", group, resource)]
}

/// What a [`Reflector`] applies objects to, as they are read.
pub(crate) trait Sink: Send + 'static {
    /// What the JSON of an object is read into.
    type Object<'a>: Deserialize<'a> + Identified;
    /// What an object is known by.
    type Key: Key;

    fn apply(&mut self, key: Self::Key, object: Self::Object<'_>);
    fn delete(&mut self, key: Self::Key);
    fn reset(&mut self, listed: &HashSet<Self::Key>);
    fn interrupted(&mut self, ago: Duration);
    fn resumed(&mut self);
}

/// Passes typed objects to a [`Handler`].
struct Typed<K, H: Handler<K>> {
    handler: Arc<H>,
    resource: &'static str,
    /// The objects that the handler knows.
    known: HashSet<H::Key>,
}

impl<K, H> Sink for Typed<K, H>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Send + 'static,
    H: Handler<K>,
{
    type Object<'a> = Parsed<K>;
    type Key = H::Key;

    fn apply(&mut self, key: Self::Key, Parsed(object): Parsed<K>) {
        self.known.insert(key.clone());
        match object {
            Ok(object) => self.handler.apply(key, object),
            Err(problem) => {
                let (resource, error) = (self.resource, &problem.error);
                let (namespace, name) = (&problem.metadata.namespace, &problem.metadata.name);
                warn!(resource, ?namespace, ?name, error, "failed to read object");
                self.handler.unreadable(key, problem);
            }
        }
    }

    fn delete(&mut self, key: Self::Key) {
        self.known.remove(&key);
        self.handler.delete(key);
    }

    fn reset(&mut self, listed: &HashSet<Self::Key>) {
        for key in self.known.extract_if(|key| !listed.contains(key)) {
            self.handler.delete(key);
        }
    }

    fn interrupted(&mut self, ago: Duration) {
        self.handler.interrupted(ago);
    }

    fn resumed(&mut self) {
        self.handler.resumed();
    }
}

/// Lists and watches the objects, for as long as it is polled; cancels `synced` when all have been listed once. The client
/// should not retry by itself: that would hide a gap while it lasts.
pub async fn run<K, H>(
    client: Client,
    source: Source<K>,
    handler: Arc<H>,
    metrics: Metrics,
    synced: CancellationToken,
) where
    K: Resource<DynamicType = ()> + DeserializeOwned + Send + 'static,
    H: Handler<K>,
{
    let sink = Typed { handler, resource: source.resource, known: HashSet::new() };
    match Reflector::new(client, source, sink, metrics, synced).run().await {}
}

/// Keeps a sink equal to what the API server has.
pub(crate) struct Reflector<K, S> {
    client: Client,
    source: Source<K>,
    sink: S,
    metrics: Metrics,
    /// Cancelled when all objects have been listed once.
    synced: CancellationToken,
    failures: u32,
    /// Whether there is a gap now.
    interrupted: bool,
    /// Whether the last version expired and no watch has brought anything since.
    expired: bool,
    /// Whether bookmarks have come lately. An API server that has just begun may send none until the first object
    /// changes.
    bookmarks: bool,
}

impl<K, S: Sink> Reflector<K, S> {
    pub(crate) fn new(
        client: Client,
        source: Source<K>,
        sink: S,
        metrics: Metrics,
        synced: CancellationToken,
    ) -> Self {
        Self {
            client,
            source,
            sink,
            metrics,
            synced,
            failures: 0,
            interrupted: false,
            expired: false,
            bookmarks: false,
        }
    }

    pub(crate) async fn run(mut self) -> Infallible {
        loop {
            let mut version = loop {
                match self.list().await {
                    Ok(version) => break version,
                    Err(error) => self.recover(error).await,
                }
            };
            while self.follow(&mut version).await {}
        }
    }

    /// Lists all objects page by page, and returns the version that a watch can go on from.
    ///
    /// Not as a stream (`sendInitialEvents`): for 50,000 pods that took the API server twice as long, and
    /// older ones have none.
    async fn list(&mut self) -> Result<String, Error> {
        // The first list has nothing to compare with.
        let mut listed = self.synced.is_cancelled().then(HashSet::new);
        let mut more = None;
        // One for all pages, and given back before the watch begins.
        let mut buffer = Vec::new();
        loop {
            let mut body = request::open(&self.client, self.source.list(more)).await?;
            buffer.clear();
            request::read(&mut body, &mut buffer).await?;
            let page: Page<'_, S::Object<'_>> = serde_json::from_slice(&buffer)?;
            for object in page.items.0 {
                if let Some(listed) = &mut listed {
                    listed.extend(Key::of(object.identity()));
                }
                self.apply(object);
            }
            if let Some(token) = page.metadata.more.get() {
                more = Some(token.to_owned());
                continue;
            }
            let version = page.metadata.resource_version.get().ok_or(Error::NoVersion)?.to_owned();
            if let Some(listed) = listed {
                self.sink.reset(&listed);
            } else {
                self.interrupted = false;
                self.sink.resumed();
                self.synced.cancel();
            }
            return Ok(version);
        }
    }

    /// Watches until the watch ends. Returns whether another can go on from the version reached.
    async fn follow(&mut self, version: &mut String) -> bool {
        let begun = Instant::now();
        let before = version.clone();
        let end = self.watch(version).await;
        let worked = *version != before || begun.elapsed() >= WORKED;
        if worked {
            self.failures = 0;
            self.expired = false;
        }
        self.metrics.watch_restarted(self.source.resource);
        match end {
            // As announced, or because the API server ends: another one goes on.
            Ok(()) if worked => true,
            Ok(()) => {
                self.recover(Error::Closed).await;
                true
            }
            Err(error @ (Error::Expired(_) | Error::Json(_))) => {
                if std::mem::replace(&mut self.expired, true) {
                    self.recover(error).await;
                } else {
                    info!(resource = self.source.resource, %error, "watch expired, listing again");
                    self.interrupt(Duration::ZERO);
                }
                false
            }
            Err(error) => {
                self.recover(error).await;
                true
            }
        }
    }

    async fn watch(&mut self, version: &mut String) -> Result<(), Error> {
        let seconds = fastrand::u32(if self.bookmarks { WATCH_SECONDS } else { SHORT_WATCH_SECONDS });
        let mut body = request::open(&self.client, self.source.watch(seconds, version)).await?;
        let mut lines = Lines::default();
        let closed = Instant::now() + Duration::from_secs(seconds.into()) + MARGIN;
        let mut accepted = Some(Instant::now() + ACCEPTED);
        let mut heard = Instant::now();
        loop {
            let silent = heard + SILENCE;
            let until = accepted.unwrap_or(if self.bookmarks { silent } else { silent.min(closed) });
            match timeout_at(until, request::data(&mut body)).await {
                Ok(Some(data)) => {
                    heard = Instant::now();
                    lines.push(&data?);
                }
                Ok(None) => return Ok(()),
                Err(_) if accepted.is_some() => {}
                Err(_) => {
                    self.bookmarks = false;
                    return Err(Error::Silent(heard.elapsed()));
                }
            }
            if accepted.is_some_and(|accepted| Instant::now() >= accepted) {
                accepted = None;
                if std::mem::take(&mut self.interrupted) {
                    self.sink.resumed();
                }
            }
            while let Some(line) = lines.next() {
                self.event(line, version)?;
            }
        }
    }

    /// Applies one event of a watch.
    fn event(&mut self, line: &[u8], version: &mut String) -> Result<(), Error> {
        let event: Event<'_> = serde_json::from_slice(line)?;
        let text = event.object.get();
        let kind = event.kind.get();
        if kind == Some("ERROR") {
            let Status { code, message, .. } = serde_json::from_str(text)?;
            let code = code.0.and_then(|code| code.try_into().ok()).unwrap_or_default();
            return Err(Error::refused(code, message.get()));
        }
        let object: S::Object<'_> = serde_json::from_str(text)?;
        if let Some(reached) = object.identity().version {
            reached.clone_into(version);
        }
        match kind {
            Some("ADDED" | "MODIFIED") => self.apply(object),
            Some("DELETED") => {
                if let Some(key) = Key::of(object.identity()) {
                    self.sink.delete(key);
                }
            }
            Some("BOOKMARK") => self.bookmarks = true,
            kind => {
                warn!(resource = self.source.resource, ?kind, "ignoring a watch event of an unknown type");
            }
        }
        Ok(())
    }

    fn apply(&mut self, object: S::Object<'_>) {
        if let Some(key) = Key::of(object.identity()) {
            return self.sink.apply(key, object);
        }
        let (resource, Identity { namespace, name, uid, .. }) = (self.source.resource, object.identity());
        warn!(resource, namespace, name, uid, "ignoring an object that cannot be identified");
    }

    fn interrupt(&mut self, ago: Duration) {
        // Before the first list there is nothing that could have a gap.
        if self.synced.is_cancelled() && !std::mem::replace(&mut self.interrupted, true) {
            self.sink.interrupted(ago);
        }
    }

    /// Waits a while before the next attempt.
    async fn recover(&mut self, error: Error) {
        let ago = if let Error::Silent(ago) = &error { *ago } else { Duration::ZERO };
        self.interrupt(ago);
        self.failures = self.failures.saturating_add(1);
        let pause = BACKOFF.delay(self.failures, fastrand::f64());
        warn!(resource = self.source.resource, %error, ?pause, "watch failed, retrying");
        sleep(pause).await;
    }
}

#[cfg(test)]
mod tests;

//! Lists and watches the objects of one kind, and passes changes to a [`Handler`]. All kinds and services use it.
//!
//! kube-runtime's `watcher` does not report when a broken watch works again, and its `Controller` supports keys of only
//! one kind and no lanes. Our controllers need all of this. Requests, selectors and `Resource` are kube's.
//!
//! - Lists are paged. Watches request bookmarks and continue from the last version. Objects that were deleted in a gap
//!   are found by comparison with the next list ([`Handler::delete`]).
//! - A watch gap starts when a watch breaks or its version expires, and ends when a watch works again
//!   ([`Handler::interrupted`], [`Handler::resumed`]). Controllers do not treat deadlines that pass in a gap as missed
//!   at once.
//! - A half-open connection is detected within 90 seconds: the API server sends a bookmark every minute. Until the first
//!   bookmark, watches are short.
//! - An unreadable object is reported by name ([`Handler::unreadable`]). It does not affect other objects.

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

/// Number of objects per page of a list. Larger pages need more memory, smaller pages more requests.
pub const PAGE_SIZE: u32 = 500;
/// Timeout of a watch, in seconds. It is random, so that not all watches end at once.
const WATCH_SECONDS: std::ops::Range<u32> = 230..290;
/// Timeout of a watch before the first bookmark, so that a half-open watch is detected soon.
const SHORT_WATCH_SECONDS: std::ops::Range<u32> = 60..75;
/// How long after its timeout a watch that is not closed counts as half-open.
const CLOSE_MARGIN: Duration = Duration::from_secs(10);
/// After this time without data, a watch with bookmarks counts as half-open. The API server sends a bookmark every minute.
const IDLE_TIMEOUT: Duration = Duration::from_secs(85);
/// A watch that is open for this long works, even without events.
const HEALTHY_AFTER: Duration = Duration::from_secs(5);
/// A gap ends when a watch is open for this long. If the version has expired, the API server accepts the watch and
/// reports this in the first event. By then, most events of the gap have arrived too.
const ACCEPTED_AFTER: Duration = Duration::from_secs(1);
/// Backoff between attempts.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), max: Duration::from_secs(10) };

/// The key of an object.
pub trait Key: Clone + Eq + Hash + Send + 'static {
    /// The key of an object. `None` if the object is ignored.
    fn of(identity: Identity<'_>) -> Option<Self>;
}

/// The name, for cluster-scoped kinds and for a single namespace.
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

/// The UID of an Evacuation's pod, from the Evacuation's name, so that it is known for unreadable Evacuations too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EvacuatedPod(pub Uid);

impl Key for EvacuatedPod {
    fn of(identity: Identity<'_>) -> Option<Self> {
        identity.name.get(..36)?.parse().ok().map(Self)
    }
}

/// For handlers that do not distinguish objects.
impl Key for () {
    fn of(_: Identity<'_>) -> Option<Self> {
        Some(())
    }
}

/// Receives the changes of objects of one kind. A controller has one implementation per watched kind.
pub trait Handler<K>: Send + Sync + 'static {
    /// The key of an object.
    type Key: Key;

    /// An object was added or modified.
    fn apply(&self, key: Self::Key, object: K);

    /// An object was added or modified and is unreadable. By default, nothing changes.
    fn unreadable(&self, _key: Self::Key, _problem: Unreadable) {}

    /// An object was deleted, possibly during a gap.
    fn delete(&self, key: Self::Key);

    /// A watch gap starts. `ago` is not zero if the watch was half-open: the gap then started that long ago.
    fn interrupted(&self, _ago: Duration) {}

    /// All objects have been listed for the first time, or a gap has ended.
    fn resumed(&self) {}
}

/// The objects to watch.
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

    /// Restricts the watch to a label selector.
    #[must_use]
    pub fn labels(self, labels: &str) -> Self {
        Self { params: self.params.labels(labels), ..self }
    }

    /// Restricts the watch to a field selector.
    #[must_use]
    pub fn fields(self, fields: &str) -> Self {
        Self { params: self.params.fields(fields), ..self }
    }

    /// Restricts the watch to the object with this name. Roles can permit this without permitting other objects.
    #[must_use]
    pub fn named(self, name: &str) -> Self {
        self.fields(&format!("metadata.name={name}"))
    }

    /// Sets the number of objects per page of a list.
    #[must_use]
    pub fn page_size(self, page_size: u32) -> Self {
        Self { params: self.params.limit(page_size), ..self }
    }

    /// Requests only metadata, for `PartialObjectMeta` kinds.
    #[must_use]
    pub fn metadata_only(self) -> Self {
        Self { metadata_only: true, ..self }
    }
}

impl<K> Source<K> {
    fn list(&self, continue_token: Option<String>) -> request::Request {
        let params = ListParams { continue_token, ..self.params.clone() };
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

/// The permissions for watching all objects of a resource.
pub const fn permissions(group: &'static str, resource: &'static str) -> [Permission; 2] {
    [Permission::cluster("list", group, resource), Permission::cluster("watch", group, resource)]
}

/// Receives parsed objects from a [`Reflector`].
pub(crate) trait Sink: Send + 'static {
    /// The type into which the JSON of an object is parsed.
    type Object<'a>: Deserialize<'a> + Identified;
    /// The key of an object.
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
    /// The keys of existing objects.
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
                warn!(resource, ?namespace, ?name, error, "failed to parse object");
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

/// Lists and watches the objects until the future is dropped. Cancels `synced` after the first list. The client must
/// not retry by itself, because that would hide watch gaps.
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

/// Keeps a sink up to date with the API server.
pub(crate) struct Reflector<K, S> {
    client: Client,
    source: Source<K>,
    sink: S,
    metrics: Metrics,
    /// Cancelled after the first list.
    synced: CancellationToken,
    failures: u32,
    /// Whether there is a gap.
    interrupted: bool,
    /// Whether the version has expired and no watch has worked since.
    expired: bool,
    /// Whether the API server sends bookmarks. After its start, it may send none until the first object changes.
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
            while self.watch_until_closed(&mut version).await {}
        }
    }

    /// Lists all objects page by page, and returns the version from which a watch continues.
    ///
    /// It does not use `sendInitialEvents`: for 50,000 pods this takes twice as long, and older API servers do not
    /// support it.
    async fn list(&mut self) -> Result<String, Error> {
        // The first list has no earlier objects to compare with.
        let mut listed = self.synced.is_cancelled().then(HashSet::new);
        let mut continue_token = None;
        // Reused for all pages, and freed before the watch starts.
        let mut buffer = Vec::new();
        loop {
            let mut body = request::open(&self.client, self.source.list(continue_token)).await?;
            buffer.clear();
            request::read(&mut body, &mut buffer).await?;
            let page: Page<'_, S::Object<'_>> = serde_json::from_slice(&buffer)?;
            for object in page.items.0 {
                if let Some(listed) = &mut listed {
                    listed.extend(Key::of(object.identity()));
                }
                self.apply(object);
            }
            if let Some(token) = page.metadata.continue_token.get() {
                continue_token = Some(token.to_owned());
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

    /// Watches until the watch ends. Returns whether another watch can continue from the last version.
    async fn watch_until_closed(&mut self, version: &mut String) -> bool {
        let started = Instant::now();
        let before = version.clone();
        let end = self.watch(version).await;
        let worked = *version != before || started.elapsed() >= HEALTHY_AFTER;
        if worked {
            self.failures = 0;
            self.expired = false;
        }
        self.metrics.watch_restarted(self.source.resource);
        match end {
            // The timeout has passed, or the API server shuts down: another watch continues.
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
        let closed = Instant::now() + Duration::from_secs(seconds.into()) + CLOSE_MARGIN;
        let mut accepted = Some(Instant::now() + ACCEPTED_AFTER);
        let mut last_data = Instant::now();
        loop {
            let silent = last_data + IDLE_TIMEOUT;
            let until = accepted.unwrap_or(if self.bookmarks { silent } else { silent.min(closed) });
            match timeout_at(until, request::data(&mut body)).await {
                Ok(Some(data)) => {
                    last_data = Instant::now();
                    lines.push(&data?);
                }
                Ok(None) => return Ok(()),
                Err(_) if accepted.is_some() => {}
                Err(_) => {
                    self.bookmarks = false;
                    return Err(Error::TimedOut(last_data.elapsed()));
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

    /// Applies one watch event.
    fn event(&mut self, line: &[u8], version: &mut String) -> Result<(), Error> {
        let event: Event<'_> = serde_json::from_slice(line)?;
        let text = event.object.get();
        let kind = event.kind.get();
        if kind == Some("ERROR") {
            let Status { code, message, .. } = serde_json::from_str(text)?;
            let code = code.0.and_then(|code| code.try_into().ok()).unwrap_or_default();
            return Err(Error::rejected(code, message.get()));
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
                warn!(resource = self.source.resource, ?kind, "ignoring watch event of unknown type");
            }
        }
        Ok(())
    }

    fn apply(&mut self, object: S::Object<'_>) {
        if let Some(key) = Key::of(object.identity()) {
            return self.sink.apply(key, object);
        }
        let (resource, Identity { namespace, name, uid, .. }) = (self.source.resource, object.identity());
        warn!(resource, namespace, name, uid, "ignoring object without namespace, name or UID");
    }

    fn interrupt(&mut self, ago: Duration) {
        // There is no gap before the first list.
        if self.synced.is_cancelled() && !std::mem::replace(&mut self.interrupted, true) {
            self.sink.interrupted(ago);
        }
    }

    /// Records a failure, and waits before the next attempt.
    async fn recover(&mut self, error: Error) {
        let ago = if let Error::TimedOut(ago) = &error { *ago } else { Duration::ZERO };
        self.interrupt(ago);
        self.failures = self.failures.saturating_add(1);
        let pause = BACKOFF.delay(self.failures, fastrand::f64());
        warn!(resource = self.source.resource, %error, ?pause, "watch failed, retrying");
        sleep(pause).await;
    }
}

#[cfg(test)]
mod tests;

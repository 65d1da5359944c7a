//! Lists and watches all pods for as long as it is polled, and feeds the cache with what it learns.
//!
//! kube's own watcher does the same, but says neither when a broken watch works again nor that it was
//! resumed: the ends of gaps, which controllers settle after, could not be told.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use kube::api::{ListParams, WatchParams};
use kube::core::Request;
use tokio::time::{Instant, sleep, timeout_at};

use super::cache::{Options, Shared};
use super::intern::Interner;
use super::pod::Pod;
use super::request::{self, Error, Lines};
use super::wire;

const PODS: &str = "/api/v1/pods";
/// The API server closes a watch after so many seconds, give or take: not all watches at once.
const WATCH_SECONDS: std::ops::Range<u32> = 230..290;
/// How much later than announced a watch may be closed before we take it for dead.
const MARGIN: Duration = Duration::from_secs(10);
/// An API server that sends bookmarks sends one every minute: after this long it is not there any more.
const SILENCE: Duration = Duration::from_secs(90);
/// A watch that has lasted this long has worked, even if nothing has happened.
const WORKED: Duration = Duration::from_secs(5);
/// An API server that cannot go on from our version accepts the watch all the same and says so in its first
/// event. Only after this long a gap is over, and what happened in it has come too unless there was a lot.
const ACCEPTED: Duration = Duration::from_secs(1);

/// Keeps the cache equal to the API.
pub(super) struct Reflector {
    client: Client,
    shared: Arc<Shared>,
    options: Options,
    interner: Interner,
    backoff: Backoff,
    /// Whether the last version expired and no watch has brought anything since.
    expired: bool,
    /// Whether bookmarks have come lately. An API server that has just begun may send none until the first pod
    /// changes.
    bookmarks: bool,
}

impl Reflector {
    pub(super) fn new(client: Client, shared: Arc<Shared>, options: Options) -> Self {
        let (interner, backoff) = (Interner::default(), Backoff::default());
        Self { client, shared, options, interner, backoff, expired: false, bookmarks: false }
    }

    pub(super) async fn run(mut self) -> Infallible {
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

    /// Lists all pods page by page, and returns the version that a watch can go on from.
    ///
    /// Not as a stream (`sendInitialEvents`): for 50,000 pods that took the API server twice as long, and
    /// older ones have none.
    async fn list(&mut self) -> Result<String, Error> {
        self.shared.begin_relist();
        let mut params = ListParams::default().limit(self.options.page_size);
        // One for all pages, and given back before the watch begins.
        let mut buffer = Vec::new();
        loop {
            let mut body = request::open(&self.client, Request::new(PODS).list(&params)).await?;
            buffer.clear();
            request::read(&mut body, &mut buffer).await?;
            let page: wire::Page<'_> = serde_json::from_slice(&buffer)?;
            for object in &page.items.0 {
                self.apply(object);
            }
            if let Some(token) = page.metadata.more.get() {
                params.continue_token = Some(token.to_owned());
                continue;
            }
            let version = page.metadata.resource_version.get().ok_or(Error::NoVersion)?.to_owned();
            let gone = self.shared.end_relist();
            (0..gone).for_each(|_| self.interner.changed());
            return Ok(version);
        }
    }

    /// Watches until the watch ends. Returns whether another can go on from the version reached.
    async fn follow(&mut self, version: &mut String) -> bool {
        let begun = Instant::now();
        let seen = version.clone();
        let end = self.watch(version).await;
        let worked = *version != seen || begun.elapsed() >= WORKED;
        if worked {
            self.backoff.reset();
            self.expired = false;
        }
        self.shared.watch_ended();
        if let Some(tell) = &self.options.on_watch_restart {
            tell();
        }
        match end {
            // As announced, or because the API server ends: another will tell.
            Ok(()) if worked => true,
            Ok(()) => {
                self.recover(Error::Closed).await;
                true
            }
            Err(error @ (Error::Expired(_) | Error::Json(_))) => {
                if std::mem::replace(&mut self.expired, true) {
                    self.recover(error).await;
                } else {
                    tracing::info!(%error, "listing all pods anew");
                    self.shared.begin_gap();
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
        let seconds = fastrand::u32(WATCH_SECONDS);
        let params = WatchParams { bookmarks: true, timeout: Some(seconds), ..WatchParams::default() };
        let mut body = request::open(&self.client, Request::new(PODS).watch(&params, version)).await?;
        let mut lines = Lines::default();
        let until_closed = Duration::from_secs(seconds.into()) + MARGIN;
        let mut accepted = Some(Instant::now() + ACCEPTED);
        loop {
            let patience = if self.bookmarks { SILENCE } else { until_closed };
            let until = accepted.unwrap_or_else(|| Instant::now() + patience);
            match timeout_at(until, request::data(&mut body)).await {
                Ok(Some(data)) => lines.push(&data?),
                Ok(None) => return Ok(()),
                Err(_) if accepted.is_some() => {}
                Err(_) => {
                    self.bookmarks = false;
                    return Err(Error::Silent(patience));
                }
            }
            if accepted.is_some_and(|accepted| Instant::now() >= accepted) {
                accepted = None;
                self.shared.end_gap();
            }
            while let Some(line) = lines.next() {
                self.bookmarks |= self.event(line, version)? == Seen::Bookmark;
            }
        }
    }

    /// Takes in one event of a watch.
    fn event(&mut self, line: &[u8], version: &mut String) -> Result<Seen, Error> {
        let event: wire::Event<'_> = serde_json::from_slice(line)?;
        let object = &event.object;
        let seen = match event.kind.get() {
            Some("ADDED" | "MODIFIED") => {
                self.apply(object);
                Seen::Pod
            }
            Some("DELETED") => {
                self.delete(object);
                Seen::Pod
            }
            Some("BOOKMARK") => Seen::Bookmark,
            Some("ERROR") => {
                let code = object.code.0.and_then(|code| code.try_into().ok()).unwrap_or_default();
                return Err(Error::refused(code, object.message.get()));
            }
            kind => {
                tracing::warn!(?kind, "a watch event of an unknown type is left out");
                Seen::Nothing
            }
        };
        if let Some(reached) = object.metadata.resource_version.get() {
            reached.clone_into(version);
        }
        Ok(seen)
    }

    fn apply(&mut self, object: &wire::Object<'_>) {
        match Pod::read(object, &mut self.interner) {
            Ok(pod) => self.shared.apply(pod),
            Err(problem) => tracing::warn!(%problem, "a pod that cannot be read is left out"),
        }
    }

    fn delete(&mut self, object: &wire::Object<'_>) {
        // A UID that cannot be read was not read before either.
        if let Ok(uid) = object.metadata.uid.get().unwrap_or_default().parse() {
            self.shared.delete(uid);
            self.interner.changed();
        }
    }

    /// Tells of the gap and waits a while.
    async fn recover(&mut self, error: Error) {
        self.shared.begin_gap();
        let pause = self.backoff.next();
        tracing::warn!(%error, ?pause, "pods cannot be watched; trying again");
        sleep(pause).await;
    }
}

/// What a line of a watch was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Pod,
    Bookmark,
    Nothing,
}

/// Pauses between attempts: twice as long each time up to a limit, and shortened at random by up to a
/// half, so that many who have lost the same API server do not all come back at once.
#[derive(Debug, Default)]
struct Backoff {
    failures: u32,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(250);
    const LONGEST: Duration = Duration::from_secs(10);

    fn next(&mut self) -> Duration {
        let longest = Self::FIRST.saturating_mul(2_u32.saturating_pow(self.failures)).min(Self::LONGEST);
        self.failures = self.failures.saturating_add(1);
        longest.mul_f64(1.0 - fastrand::f64() / 2.0)
    }

    fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests;

//! Events (events.k8s.io), few and telling. Nobody waits for one: they are handed over, and a task of their
//! own writes them. What is written when is decided in `aggregate`, without a client or a clock.
//!
//! ```no_run
//! use haulout_service_runtime::events::{News, Severity, reference};
//! use haulout_service_runtime::service::Context;
//! use k8s_openapi::api::core::v1::Node;
//!
//! fn tell(context: &Context, node: &Node) {
//!     context.events.publish(News {
//!         regarding: reference(node),
//!         severity: Severity::Warning,
//!         reason: "NotEmptied", // a constant of haulout_api_types::names::event
//!         action: "Drain",
//!         note: "pod shop/web-1 stays because it tolerates the cordon".into(),
//!     });
//! }
//! ```
//!
//! The same news on the same object again become one event with a count, written at growing intervals, so
//! publish whenever it happens; but keep what always differs (times, counters) out of the note, or each is an
//! event of its own. When very many objects have news of one reason at once, some get an event and one tells
//! of the rest. What cannot be written is dropped and counted in `events_dropped_total`. A service needs
//! `create` and `patch` on events in `events.k8s.io`.

mod aggregate;

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};
/// Whether an event is good or bad news: all is as it should be, or somebody may have to do something.
pub use kube::runtime::events::EventType as Severity;
use kube::{Client, Resource};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use self::aggregate::{Aggregator, Write};
use crate::causes::chain;
use crate::clock::Clock;
use crate::metrics::Metrics;

/// How many events may wait to be written; more than that are dropped and counted.
const WAITING: usize = 4096;
/// What the API server takes at most, in bytes.
const MAX_NOTE: usize = 1024;
const MAX_INSTANCE: usize = 128;
/// How long one event may hold up the others.
const WRITE_LIMIT: Duration = Duration::from_secs(10);

/// Something that people should see on an object.
#[derive(Clone, Debug, PartialEq)]
pub struct News {
    /// The object.
    pub regarding: ObjectReference,
    /// Good or bad.
    pub severity: Severity,
    /// One of [`haulout_api_types::names::event`].
    pub reason: &'static str,
    /// What was being done, one word in the imperative, such as `Evict`.
    pub action: &'static str,
    /// A sentence for people.
    pub note: String,
}

/// A reference to an object, for [`News::regarding`].
pub fn reference<K: Resource<DynamicType = ()>>(object: &K) -> ObjectReference {
    object.object_ref(&())
}

/// Takes events. Clones are the same recorder.
#[derive(Clone, Debug)]
pub struct Events {
    sender: mpsc::Sender<(News, Timestamp)>,
    clock: Clock,
    metrics: Metrics,
}

impl Events {
    /// A recorder, and the task that writes: it has to be run.
    pub fn new(
        client: Client,
        controller: String,
        mut instance: String,
        clock: Clock,
        metrics: Metrics,
    ) -> (Self, Writer) {
        let (sender, news) = mpsc::channel(WAITING);
        shorten(&mut instance, MAX_INSTANCE);
        let writer = Writer {
            client,
            controller,
            instance,
            clock: clock.clone(),
            metrics: metrics.clone(),
            news,
            aggregator: Aggregator::default(),
        };
        (Self { sender, clock, metrics }, writer)
    }

    /// Hands an event over. Never blocks and never fails: events are for people, the work goes on without.
    pub fn publish(&self, mut news: News) {
        shorten(&mut news.note, MAX_NOTE);
        if self.sender.try_send((news, self.clock.now())).is_err() {
            self.metrics.event_dropped();
        }
    }
}

/// Writes what recorders hand over.
pub struct Writer {
    client: Client,
    controller: String,
    instance: String,
    clock: Clock,
    metrics: Metrics,
    news: mpsc::Receiver<(News, Timestamp)>,
    aggregator: Aggregator,
}

impl Writer {
    /// Writes until the order to stop, and then what is waiting.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                Some((news, seen)) = self.news.recv() => self.aggregator.observe(news, seen),
                () = self.clock.sleep_until(self.aggregator.next_due()) => {}
            }
            self.take_in();
            let writes = self.aggregator.due(self.clock.now());
            self.write(writes).await;
        }
        self.take_in();
        let writes = self.aggregator.rest(self.clock.now());
        self.write(writes).await;
    }

    fn take_in(&mut self) {
        while let Ok((news, seen)) = self.news.try_recv() {
            self.aggregator.observe(news, seen);
        }
    }

    async fn write(&mut self, writes: Vec<Write>) {
        for write in writes {
            let (name, regarding) = match &write {
                Write::Create { name, news, .. } => (name, &news.regarding),
                Write::Repeat { name, regarding, .. } => (name, regarding),
            };
            let namespace = namespace_of(regarding);
            let api: Api<Event> = Api::namespaced(self.client.clone(), namespace);
            let request = async {
                match &write {
                    Write::Create { news, first, .. } => {
                        let event = self.event(name, namespace, news, *first);
                        api.create(&PostParams::default(), &event).await
                    }
                    Write::Repeat { count, last, .. } => {
                        let series = EventSeries { count: *count, last_observed_time: MicroTime(*last) };
                        let patch = Patch::Merge(json!({"series": series}));
                        api.patch(name, &PatchParams::default(), &patch).await
                    }
                }
            };
            // There is no such event, or somebody has deleted it: the next of its kind is a new one.
            let mut missing = matches!(write, Write::Create { .. });
            match timeout(WRITE_LIMIT, request).await {
                Ok(Ok(_)) => {
                    debug!(name, namespace, "event written");
                    continue;
                }
                // The object's namespace is going away, and its events with it.
                Ok(Err(kube::Error::Api(status))) if matches!(status.code, 403 | 404) => {
                    missing |= status.code == 404;
                    debug!(name, namespace, %status, "event not written");
                }
                Ok(Err(error)) => warn!(name, namespace, error = chain(&error), "event not written"),
                Err(_) => warn!(name, namespace, "event not written: the API server was silent"),
            }
            if missing {
                self.aggregator.forget(name);
            }
            self.metrics.event_dropped();
        }
    }

    fn event(&self, name: &str, namespace: &str, news: &News, first: Timestamp) -> Event {
        let type_ = match news.severity {
            Severity::Normal => "Normal",
            Severity::Warning => "Warning",
        };
        Event {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                namespace: Some(namespace.to_owned()),
                ..ObjectMeta::default()
            },
            action: Some(news.action.into()),
            event_time: Some(MicroTime(first)),
            note: Some(news.note.clone()),
            reason: Some(news.reason.into()),
            regarding: Some(news.regarding.clone()),
            reporting_controller: Some(self.controller.clone()),
            reporting_instance: Some(self.instance.clone()),
            type_: Some(type_.into()),
            ..Event::default()
        }
    }
}

/// Events on cluster-scoped objects live in `default`.
fn namespace_of(regarding: &ObjectReference) -> &str {
    regarding.namespace.as_deref().filter(|namespace| !namespace.is_empty()).unwrap_or("default")
}

/// Cuts a text that has too many bytes, and shows that it was cut.
fn shorten(text: &mut String, most: usize) {
    if text.len() > most {
        let mut cut = most.saturating_sub('…'.len_utf8());
        while !text.is_char_boundary(cut) {
            cut -= 1;
        }
        text.truncate(cut);
        text.push('…');
    }
}

#[cfg(test)]
mod tests;

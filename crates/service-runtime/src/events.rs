//! Publishes events (events.k8s.io). Publishing does not block: a background task writes the events. `aggregate`
//! decides which events are written and when, without a client and without a clock.
//!
//! ```no_run
//! use haulout_service_runtime::events::{NewEvent, Severity, reference};
//! use haulout_service_runtime::service::Context;
//! use k8s_openapi::api::core::v1::Node;
//!
//! fn report(context: &Context, node: &Node) {
//!     context.events.publish(NewEvent {
//!         regarding: reference(node),
//!         severity: Severity::Warning,
//!         reason: "NotEmptied", // a constant of haulout_api_types::names::event
//!         action: "Drain",
//!         note: "pod shop/web-1 stays because it tolerates the cordon".into(),
//!     });
//! }
//! ```
//!
//! Equal events on the same object become one event with a count, which is updated at growing intervals. Publish
//! whenever something happens, but do not include times or counters in the note, because events with different notes
//! are different events. If very many objects have events with the same reason, some get their own event, and one event
//! summarizes the rest. Events that cannot be written are dropped and counted in `haulout_events_dropped_total`. A
//! service needs `create` and `patch` on events in `events.k8s.io`.

mod aggregate;

use std::time::Duration;

use haulout_api_types::bounded;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};
/// The type of an event: Normal, or Warning if somebody may have to act.
pub use kube::runtime::events::EventType as Severity;
use kube::{Client, Resource};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use self::aggregate::{Aggregator, Write};
use crate::clock::Clock;
use crate::error_chain::error_chain;
use crate::metrics::Metrics;

/// Maximum number of events that wait to be written. Further events are dropped and counted.
const QUEUE_CAPACITY: usize = 4096;
/// Limits of the API server.
const MAX_NOTE_BYTES: usize = 1024;
const MAX_INSTANCE_BYTES: usize = 128;
/// Timeout for writing one event.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// An event to publish.
#[derive(Clone, Debug, PartialEq)]
pub struct NewEvent {
    /// The object.
    pub regarding: ObjectReference,
    /// Normal or Warning.
    pub severity: Severity,
    /// One of [`haulout_api_types::names::event`].
    pub reason: &'static str,
    /// The action, as one word in the imperative, such as `Evict`.
    pub action: &'static str,
    /// The text for people.
    pub note: String,
}

/// A reference to an object, for [`NewEvent::regarding`].
pub fn reference<K: Resource<DynamicType = ()>>(object: &K) -> ObjectReference {
    object.object_ref(&())
}

/// Publishes events. Clones share one writer.
#[derive(Clone, Debug)]
pub struct Events {
    sender: mpsc::Sender<(NewEvent, Timestamp)>,
    clock: Clock,
    metrics: Metrics,
}

impl Events {
    /// A publisher and its writer, which the caller has to run.
    pub fn new(
        client: Client,
        controller: String,
        instance: String,
        clock: Clock,
        metrics: Metrics,
    ) -> (Self, Writer) {
        let (sender, receiver) = mpsc::channel(QUEUE_CAPACITY);
        let writer = Writer {
            client,
            controller,
            instance: bounded::cut(&instance, MAX_INSTANCE_BYTES).into_owned(),
            clock: clock.clone(),
            metrics: metrics.clone(),
            receiver,
            aggregator: Aggregator::default(),
        };
        (Self { sender, clock, metrics }, writer)
    }

    /// Publishes an event. It never blocks and never fails, because events are only informative.
    pub fn publish(&self, mut event: NewEvent) {
        event.note = bounded::cut(&event.note, MAX_NOTE_BYTES).into_owned();
        if self.sender.try_send((event, self.clock.now())).is_err() {
            self.metrics.event_dropped();
        }
    }
}

/// Writes published events.
pub struct Writer {
    client: Client,
    controller: String,
    instance: String,
    clock: Clock,
    metrics: Metrics,
    receiver: mpsc::Receiver<(NewEvent, Timestamp)>,
    aggregator: Aggregator,
}

impl Writer {
    /// Writes events until `stop` is cancelled, and then the pending ones.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                Some((event, time)) = self.receiver.recv() => self.aggregator.observe(event, time),
                () = self.clock.sleep_until(self.aggregator.next_due()) => {}
            }
            self.drain();
            let writes = self.aggregator.due(self.clock.now());
            self.write(writes).await;
        }
        self.drain();
        let writes = self.aggregator.flush(self.clock.now());
        self.write(writes).await;
    }

    fn drain(&mut self) {
        while let Ok((event, time)) = self.receiver.try_recv() {
            self.aggregator.observe(event, time);
        }
    }

    async fn write(&mut self, writes: Vec<Write>) {
        for write in writes {
            let (name, regarding) = match &write {
                Write::Create { name, event, .. } => (name, &event.regarding),
                Write::Repeat { name, regarding, .. } => (name, regarding),
            };
            let namespace = namespace_of(regarding);
            let api: Api<Event> = Api::namespaced(self.client.clone(), namespace);
            let request = async {
                match &write {
                    Write::Create { event, first, .. } => {
                        let object = self.to_object(name, namespace, event, *first);
                        api.create(&PostParams::default(), &object).await
                    }
                    Write::Repeat { count, last, .. } => {
                        let series = EventSeries { count: *count, last_observed_time: MicroTime(*last) };
                        let patch = Patch::Merge(json!({"series": series}));
                        api.patch(name, &PatchParams::default(), &patch).await
                    }
                }
            };
            // The event does not exist, so the next equal event has to create it.
            let mut missing = matches!(write, Write::Create { .. });
            match timeout(WRITE_TIMEOUT, request).await {
                Ok(Ok(_)) => {
                    debug!(name, namespace, "event written");
                    continue;
                }
                // The namespace of the object is being deleted, together with its events.
                Ok(Err(kube::Error::Api(status))) if matches!(status.code, 403 | 404) => {
                    missing |= status.code == 404;
                    debug!(name, namespace, %status, "failed to write event");
                }
                Ok(Err(error)) => {
                    warn!(name, namespace, error = error_chain(&error), "failed to write event");
                }
                Err(_) => warn!(name, namespace, "failed to write event: no answer from the API server"),
            }
            if missing {
                self.aggregator.forget(name);
            }
            self.metrics.event_dropped();
        }
    }

    fn to_object(&self, name: &str, namespace: &str, event: &NewEvent, first: Timestamp) -> Event {
        let type_ = match event.severity {
            Severity::Normal => "Normal",
            Severity::Warning => "Warning",
        };
        Event {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                namespace: Some(namespace.to_owned()),
                ..ObjectMeta::default()
            },
            action: Some(event.action.into()),
            event_time: Some(MicroTime(first)),
            note: Some(event.note.clone()),
            reason: Some(event.reason.into()),
            regarding: Some(event.regarding.clone()),
            reporting_controller: Some(self.controller.clone()),
            reporting_instance: Some(self.instance.clone()),
            type_: Some(type_.into()),
            ..Event::default()
        }
    }
}

/// Events of cluster-scoped objects are in the namespace `default`.
fn namespace_of(regarding: &ObjectReference) -> &str {
    regarding.namespace.as_deref().filter(|namespace| !namespace.is_empty()).unwrap_or("default")
}

#[cfg(test)]
mod tests;

//! Events (events.k8s.io), few and telling. Nobody waits for one: they are handed over, and a task of their
//! own writes them. What is written when is decided in `aggregate`, without a client or a clock.

mod aggregate;

use std::fmt;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Client, Resource};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use self::aggregate::{Aggregator, Write};
use crate::clock::Clock;
use crate::metrics::Metrics;

/// How many events may wait to be written; more than that are dropped and counted.
const WAITING: usize = 4096;
/// What the API server takes at most.
const MAX_NOTE: usize = 1024;

/// Whether an event is good or bad news.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Severity {
    /// As it should be.
    Normal,
    /// Somebody may have to do something.
    Warning,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        })
    }
}

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
    sender: mpsc::Sender<News>,
    metrics: Metrics,
}

impl Events {
    /// A recorder, and the task that writes: it has to be run.
    pub fn new(
        client: Client,
        controller: String,
        instance: String,
        clock: Clock,
        metrics: Metrics,
    ) -> (Self, Writer) {
        let (sender, news) = mpsc::channel(WAITING);
        let writer = Writer {
            client,
            controller,
            instance,
            clock,
            metrics: metrics.clone(),
            news,
            aggregator: Aggregator::default(),
        };
        (Self { sender, metrics }, writer)
    }

    /// Hands an event over. Never blocks and never fails: events are for people, the work goes on without.
    pub fn publish(&self, news: News) {
        if self.sender.try_send(news).is_err() {
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
    news: mpsc::Receiver<News>,
    aggregator: Aggregator,
}

impl Writer {
    /// Writes until the order to stop, and then what is waiting.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            let now = self.clock.now();
            let nap =
                self.aggregator.next_due().map(|due| due.duration_since(now).try_into().unwrap_or_default());
            tokio::select! {
                () = stop.cancelled() => break,
                Some(news) = self.news.recv() => self.aggregator.observe(news, now),
                () = sleep(nap) => {}
            }
            while let Ok(news) = self.news.try_recv() {
                self.aggregator.observe(news, now);
            }
            self.write(now).await;
        }
        let now = self.clock.now();
        while let Ok(news) = self.news.try_recv() {
            self.aggregator.observe(news, now);
        }
        self.write(now).await;
    }

    async fn write(&mut self, now: Timestamp) {
        for write in self.aggregator.due(now) {
            let (name, namespace, result) = match write {
                Write::Create { name, news, first } => {
                    let namespace = namespace_of(&news.regarding);
                    let event = self.event(&name, &namespace, news, first);
                    let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
                    let result = api.create(&PostParams::default(), &event).await;
                    (name, namespace, result)
                }
                Write::Repeat { name, regarding, count, last } => {
                    let namespace = namespace_of(&regarding);
                    let series = EventSeries { count, last_observed_time: MicroTime(last) };
                    let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
                    let patch = Patch::Merge(json!({"series": series}));
                    let result = api.patch(&name, &PatchParams::default(), &patch).await;
                    (name, namespace, result)
                }
            };
            match result {
                Ok(_) => debug!(name, namespace, "event written"),
                // The object's namespace is going away, and its events with it.
                Err(kube::Error::Api(status)) if matches!(status.code, 403 | 404) => {
                    debug!(name, namespace, %status, "event not written");
                    self.metrics.event_dropped();
                }
                Err(error) => {
                    warn!(name, namespace, %error, "event not written");
                    self.metrics.event_dropped();
                }
            }
        }
    }

    fn event(&self, name: &str, namespace: &str, news: News, first: Timestamp) -> Event {
        let note = match news.note.char_indices().nth(MAX_NOTE - 1) {
            Some((cut, _)) => format!("{}…", news.note.get(..cut.min(MAX_NOTE - 3)).unwrap_or_default()),
            None => news.note,
        };
        Event {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                namespace: Some(namespace.to_owned()),
                ..ObjectMeta::default()
            },
            action: Some(news.action.into()),
            event_time: Some(MicroTime(first)),
            note: Some(note),
            reason: Some(news.reason.into()),
            regarding: Some(news.regarding),
            reporting_controller: Some(self.controller.clone()),
            reporting_instance: Some(self.instance.clone()),
            type_: Some(news.severity.to_string()),
            ..Event::default()
        }
    }
}

/// Events on cluster-scoped objects live in `default`.
fn namespace_of(regarding: &ObjectReference) -> String {
    regarding
        .namespace
        .clone()
        .filter(|namespace| !namespace.is_empty())
        .unwrap_or_else(|| "default".to_owned())
}

async fn sleep(nap: Option<std::time::Duration>) {
    match nap {
        Some(nap) => tokio::time::sleep(nap).await,
        None => std::future::pending().await,
    }
}

//! A leader at work: takes one Evacuation after the other, asks what to do about it, and does it. What has been
//! done is known at once, without waiting for the watch, so that nothing is done twice.

use std::sync::Arc;

use haulout_api_types::Evacuation;
use haulout_api_types::names::reason;
use haulout_service_runtime::api::{RequestError, Writer, Written};
use haulout_service_runtime::clients::Clients;
use haulout_service_runtime::clock::Clock;
use haulout_service_runtime::events::{Events, News};
use haulout_service_runtime::eviction::{self, Answer, Failure};
use haulout_service_runtime::pods::{self, Phase, Pod, PodCache, PodIndex};
use haulout_service_runtime::queue::Outcome;
use haulout_service_runtime::workers::{WorkQueue, reconciling};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::core::DeserializeGuard;
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use tracing::{debug, info, warn};

use crate::backoff::{self, after};
use crate::decide::{Action, Before, End, Known, Moment, Why, after_pod, decide};
use crate::metrics::Metrics;
use crate::record::Record;
use crate::state::{Key, Queued, State, View};
use crate::{events, status};

/// Who writes, as `kubectl get --show-managed-fields` shows.
pub const MANAGER: &str = "haulout-evacuation-controller";
/// More steps than any Evacuation ever needs at one go.
const MOST_STEPS: usize = 10;

/// What a leader works with.
pub struct Controller {
    pub(crate) clients: Clients,
    pub(crate) writer: Writer,
    pub(crate) clock: Clock,
    pub(crate) events: Events,
    pub(crate) state: Arc<Mutex<State>>,
    pub(crate) metrics: Metrics,
    pub(crate) pods: PodCache,
    pub(crate) queue: WorkQueue<Queued>,
    /// Since when we have seen everything.
    pub(crate) resumed: Mutex<Timestamp>,
}

/// What came of what a step wrote. One that writes nothing is done.
type Stepped = Result<Written<()>, StepError>;

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StepError {
    #[error(transparent)]
    Api(#[from] RequestError),
    #[error(transparent)]
    Pod(#[from] pods::FetchError),
}

impl Controller {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Changes the state, with the pods at hand, and has those looked at whom this concerns. The two locks are always taken
    /// in this order.
    pub(crate) fn update(&self, change: impl FnOnce(&mut State, &PodIndex) -> Vec<Key>) {
        let keys = change(&mut self.state(), &self.pods.read());
        self.enqueue(keys);
    }

    /// A watch has synced or works again after a gap: from now on deadlines that passed meanwhile get their grace.
    pub(crate) fn resumed(&self) {
        *self.resumed.lock() = self.clock.now();
        let keys = self.state().keys();
        self.enqueue(keys);
    }

    /// Has these looked at.
    pub(crate) fn enqueue(&self, keys: Vec<Key>) {
        for key in keys {
            let queued = self.state().queued(key);
            if let Some(queued) = queued {
                self.queue.add(queued);
            }
        }
    }

    /// Works on one Evacuation until there is nothing more to do for now.
    pub(crate) async fn handle(self: Arc<Self>, Queued { key, .. }: Queued) -> Result<Outcome, StepError> {
        let mut admitted = false;
        let outcome = self.work(key, &mut admitted).await;
        // Whatever kept it from using the room that its budget had for it: others may have it.
        if admitted {
            let failed = !matches!(outcome, Ok(Outcome::Done | Outcome::Until(_)));
            self.update(|state, pods| state.give_back(key, failed, pods));
        }
        outcome
    }

    /// What came of it. `admitted` is whether the last decision was made for one that a budget has admitted.
    async fn work(&self, key: Key, admitted: &mut bool) -> Result<Outcome, StepError> {
        // A pod that the cache does not know, from the API server.
        let mut looked_up = None;
        for _ in 0..MOST_STEPS {
            let view = self.state().view(key, &self.pods.read());
            let Some(View { record, pod: cached, pod_gone, live }) = view else { return Ok(Outcome::Done) };
            reconciling(&record.namespace, &record.name);
            *admitted = live.admitted;
            let pod = cached.clone().or_else(|| looked_up.clone());
            let known = match &pod {
                _ if pod_gone => Known::Gone,
                Some(pod) => Known::Present(pod),
                None => Known::Nothing,
            };
            let is_leaving = pod_gone || pod.as_ref().is_some_and(|pod| pod.terminating);
            let action = decide(&record, known, &live, self.moment());
            debug!(namespace = %record.namespace, name = %record.name, ?action, "decided");
            let written = match (&action, live.unwritten.as_deref()) {
                // It left all the same.
                (_, Some(_)) if is_leaving => {
                    self.state().forget_failure(key);
                    continue;
                }
                (_, Some(failure)) => self.write_failure(&record, failure).await?,
                (Action::Wait { until }, None) => {
                    let unwatched = cached.is_none() && looked_up.is_some();
                    let again =
                        unwatched.then(|| after(self.clock.now(), backoff::unwatched(live.unwatched)));
                    let wake = until.iter().copied().chain(again).min();
                    return Ok(wake.map_or(Outcome::Done, Outcome::Until));
                }
                (Action::LookUp, None) => {
                    looked_up = self.look_up(&record).await?.map(Arc::new);
                    if looked_up.is_some() {
                        let look_ups = self.state().pod_is_unwatched(key);
                        let Record { namespace, pod_name, .. } = &*record;
                        info!(%namespace, pod = %pod_name, look_ups, "pod is not in the cache yet");
                    }
                    continue;
                }
                (action, None) => self.step(&record, pod.as_deref(), action).await?,
            };
            match written {
                Written::Done(()) => {}
                Written::Gone => return Ok(Outcome::Done),
                Written::Outdated => return Ok(Outcome::Failed),
            }
        }
        warn!(%key, "Evacuation is not at rest after {MOST_STEPS} steps, retrying");
        Ok(Outcome::Failed)
    }

    fn moment(&self) -> Moment {
        Moment {
            now: self.clock.now(),
            resumed: *self.resumed.lock(),
            gap: self.pods.continuity().gap_since.is_some(),
        }
    }

    /// The pod as the API server has it; notes that it is gone if it is.
    async fn look_up(&self, record: &Record) -> Result<Option<Pod>, pods::FetchError> {
        let found = pods::fetch(&self.clients.direct, &record.namespace, &record.pod_name).await?;
        let found = found.filter(|pod| pod.uid == record.pod_uid);
        if found.is_none() {
            self.state().pod_is_gone(record.uid);
        }
        Ok(found)
    }

    async fn step(&self, record: &Record, pod: Option<&Pod>, action: &Action) -> Stepped {
        let now = self.clock.now();
        match action {
            Action::Wait { .. } | Action::LookUp => Ok(Written::Done(())),
            Action::Activate { class, stamp } => {
                let message = status::activated(class);
                let mut status = json!({
                    "activeEvacuatorClass": class,
                    "activeEvacuatorCompleted": false,
                    "message": message,
                });
                if let (true, Some(status)) = (*stamp, status.as_object_mut()) {
                    status.insert("evacuationProgressTimestamp".into(), json!(Time(now)));
                }
                self.write_and_publish(record, status, events::activated(record, &message)).await
            }
            Action::Switch { from, to, why } => {
                let message = status::switched(from, to, *why, record.progress_deadline);
                let mut status = json!({
                    "activeEvacuatorClass": to,
                    "activeEvacuatorCompleted": false,
                    "evacuationProgressTimestamp": Time(now),
                    "expectedEvacuationFinishTime": null,
                    "message": message,
                });
                if let (Some(_), Some(status)) = (record.blocked_by(), status.as_object_mut()) {
                    status.append(&mut status::unblocked(record, reason::NOT_BLOCKED, &message, now));
                }
                self.write_and_publish(record, status, events::switched(record, *why, &message)).await
            }
            Action::Clamp => {
                let Record { namespace, name, active, progress, .. } = record;
                warn!(%namespace, %name, class = ?active, ?progress, "progress time is in the future, set to now");
                self.write(record, json!({"evacuationProgressTimestamp": Time(now)})).await
            }
            Action::Evict { why, before } => match pod {
                Some(pod) => self.evict(record, pod, *why, *before).await,
                None => Ok(Written::Outdated),
            },
            Action::Block { reason, message } => {
                let status = status::blocked(record, reason, message, now);
                self.write_and_publish(record, status, events::blocked(record, message)).await
            }
            Action::Unblock { reason, message } => {
                let status = status::unblocked(record, reason, message, now);
                self.write_and_publish(record, status, events::unblocked(record)).await
            }
            Action::Hold { end, message } => {
                let status = status::blocked(record, reason::EVACUATION_HELD, message, now);
                let written = self.write(record, status).await?;
                let is_first = record.blocked_by() != Some(reason::EVACUATION_HELD);
                if is_first && written == Written::Done(()) {
                    self.ended(record, *end);
                    self.events.publish(events::held(record, message));
                }
                Ok(written)
            }
            Action::Release { keep } => {
                let patch = json!({"metadata": {"finalizers": keep}});
                Ok(self.take(self.writer.patch(&record.object(), patch).await?))
            }
            Action::Delete { end } => {
                let written = self.writer.delete::<Evacuation>(&record.object()).await?;
                if written == Written::Done(()) {
                    self.state().deleted(record.uid, *end);
                }
                Ok(written)
            }
        }
    }

    async fn evict(&self, record: &Record, pod: &Pod, why: Why, before: Before) -> Stepped {
        let status = match before {
            Before::Nothing => None,
            Before::Announce => Some(json!({"message": status::evicting(record, why)})),
            Before::Confirm => Some(json!({})),
        };
        if let Some(status) = status {
            match self.write(record, status).await? {
                Written::Done(()) => {}
                other => return Ok(other),
            }
        }
        let covered = !self.state().budgets.covering(pod).is_empty();
        if compare_first(pod, covered, self.moment().gap) && self.look_up(record).await?.is_none() {
            info!(namespace = %pod.namespace, pod = %pod.name, "pod is gone, and the cache is behind");
            return Ok(Written::Done(()));
        }
        self.state().eviction_begins(record.uid, pod);
        let answer = eviction::evict(&self.clients.direct, pod).await;
        self.metrics.eviction(&answer);
        let now = self.clock.now();
        match answer {
            Answer::Evicted => {
                self.state().evicted(record.uid, now);
                self.events.publish(events::evicting(record, why));
            }
            Answer::Gone => {
                info!(namespace = %pod.namespace, pod = %pod.name, "pod is gone, and the cache is behind");
                self.state().pod_is_gone(record.uid);
            }
            Answer::Failed(failure) => {
                let (namespace, pod_name) = (&pod.namespace, &pod.name);
                info!(%namespace, pod = %pod_name, reason = failure.reason, message = failure.message, "eviction failed");
                self.update(|state, pods| {
                    let failure = state.explain(failure, pod, pods);
                    state.eviction_failed(record.uid, failure, now, pods)
                });
            }
        }
        Ok(Written::Done(()))
    }

    async fn write_failure(&self, record: &Record, failure: &Failure) -> Stepped {
        let status = status::failed(record, failure, self.clock.now());
        let news = events::blocked(record, &failure.message);
        let written = self.write_and_publish(record, status, news).await?;
        if written != Written::Outdated {
            self.update(|state, pods| state.failure_written(record.uid, pods));
        }
        Ok(written)
    }

    /// Writes the status and, if that took effect, publishes an event about it.
    async fn write_and_publish(&self, record: &Record, status: impl Into<Value>, news: News) -> Stepped {
        let written = self.write(record, status).await?;
        if written == Written::Done(()) {
            self.events.publish(news);
        }
        Ok(written)
    }

    /// Changes fields of the status. With none, nothing is written, and the answer still tells whether the record is up to
    /// date.
    async fn write(&self, record: &Record, status: impl Into<Value>) -> Stepped {
        Ok(self.take(self.writer.patch_status(&record.object(), status.into()).await?))
    }

    /// Takes in what the API server answered to a write.
    fn take(&self, written: Written<DeserializeGuard<Evacuation>>) -> Written<()> {
        match written {
            Written::Done(DeserializeGuard(Ok(evacuation))) => {
                let mut state = self.state();
                if let Ok(record) = Record::read(evacuation, |text| state.share(text)) {
                    state.refresh(record);
                }
                Written::Done(())
            }
            // The watch will tell.
            Written::Done(_) | Written::Outdated => Written::Outdated,
            Written::Gone => Written::Gone,
        }
    }

    /// An Evacuation is gone.
    pub(crate) fn removed(&self, key: Key) {
        let Some(View { record, live, pod, pod_gone }) = self.forget(key) else { return };
        let end = match live.deleted {
            // That it ended was told when it turned out that somebody holds it.
            _ if record.blocked_by() == Some(reason::EVACUATION_HELD) => return,
            Some(end) => end,
            None if pod_gone || pod.is_none() => after_pod(&record, &live, self.moment()),
            None if live.evicted.is_some() => End::Evicted,
            None => End::Cancelled,
        };
        self.ended(&record, end);
    }

    /// Nothing is to be known of an Evacuation any longer. What was known of it.
    pub(crate) fn forget(&self, key: Key) -> Option<View> {
        let (removed, woken) = self.state().remove(key, &self.pods.read());
        self.enqueue(woken);
        removed
    }

    /// Told once of each Evacuation, whichever replica leads.
    fn ended(&self, record: &Record, end: End) {
        let now = self.clock.now();
        self.metrics.ended(record, end, now);
        self.events.publish(events::ended(record, end));
    }
}

/// Whether the pod's UID has to be compared on the API server first: see [`eviction::has_unique_name`]. The cache is
/// compared always, and its watch is some milliseconds behind, which is enough for names that are never used again.
fn compare_first(pod: &Pod, covered: bool, gap: bool) -> bool {
    (covered || pod.phase == Phase::Pending) && (gap || !eviction::has_unique_name(pod))
}

#[cfg(test)]
mod tests;

//! Reconciles one Evacuation at a time: decides the next action and executes it. The responses to our writes update the
//! state at once, without waiting for the watch, so that no action is executed twice.

use std::sync::Arc;

use haulout_api_types::Evacuation;
use haulout_api_types::evacuation::CancellationPolicy;
use haulout_api_types::names::reason;
use haulout_service_runtime::api::{RequestError, Writer, Written};
use haulout_service_runtime::clients::Clients;
use haulout_service_runtime::clock::Clock;
use haulout_service_runtime::events::{Events, NewEvent};
use haulout_service_runtime::eviction::{self, Answer, Failure};
use haulout_service_runtime::pods::{self, Phase, Pod, PodCache, PodIndex};
use haulout_service_runtime::queue::Outcome;
use haulout_service_runtime::workers::{WorkQueue, record_object};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::core::DeserializeGuard;
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use tracing::{debug, info, warn};

use crate::backoff::{self, after};
use crate::decide::{Action, BeforeEviction, End, EvictionCause, Moment, PodState, decide, end_after_pod};
use crate::metrics::Metrics;
use crate::record::Record;
use crate::state::{Key, Queued, State, View};
use crate::{events, status};

/// The field manager of our writes.
pub const MANAGER: &str = "haulout-evacuation-controller";
/// The maximum number of steps in one reconcile. No Evacuation needs that many.
const MAX_STEPS: usize = 10;

/// The clients, caches and queues of a leader.
pub struct Controller {
    pub(crate) clients: Clients,
    pub(crate) writer: Writer,
    pub(crate) clock: Clock,
    pub(crate) events: Events,
    pub(crate) state: Arc<Mutex<State>>,
    pub(crate) metrics: Metrics,
    pub(crate) pods: PodCache,
    pub(crate) queue: WorkQueue<Queued>,
    /// When the watches last synced: at the start, or at the end of the last gap.
    pub(crate) resumed: Mutex<Timestamp>,
}

/// The result of the write of one step. A step without a write is `Done`.
type StepResult = Result<Written<()>, StepError>;

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

    /// Changes the state, with access to the pod cache, and enqueues the Evacuations to reconcile. The two locks are
    /// always taken in this order.
    pub(crate) fn update(&self, change: impl FnOnce(&mut State, &PodIndex) -> Vec<Key>) {
        let keys = change(&mut self.state(), &self.pods.read());
        self.enqueue(keys);
    }

    /// A watch has synced, at the start or after a gap. The grace period for deadlines that passed meanwhile starts
    /// now.
    pub(crate) fn resumed(&self) {
        *self.resumed.lock() = self.clock.now();
        let keys = self.state().keys();
        self.enqueue(keys);
    }

    /// Enqueues Evacuations.
    pub(crate) fn enqueue(&self, keys: Vec<Key>) {
        for key in keys {
            let queued = self.state().queued(key);
            if let Some(queued) = queued {
                self.queue.add(queued);
            }
        }
    }

    /// Reconciles one Evacuation until no action is left for now.
    pub(crate) async fn handle(self: Arc<Self>, Queued { key, .. }: Queued) -> Result<Outcome, StepError> {
        let mut admitted = false;
        let outcome = self.run_steps(key, &mut admitted).await;
        // The admission was not used, so others may have it.
        if admitted {
            let failed = !matches!(outcome, Ok(Outcome::Done | Outcome::Until(_)));
            self.update(|state, pods| state.return_admission(key, failed, pods));
        }
        outcome
    }

    /// Executes one action after the other. `admitted` is set to whether the Evacuation was admitted at the last
    /// decision.
    async fn run_steps(&self, key: Key, admitted: &mut bool) -> Result<Outcome, StepError> {
        // A pod that is missing from the cache, as the API server returned it.
        let mut looked_up = None;
        for _ in 0..MAX_STEPS {
            let view = self.state().view(key, &self.pods.read());
            let Some(View { record, pod: cached, pod_gone, local, unserved }) = view else {
                return Ok(Outcome::Done);
            };
            record_object(&record.namespace, &record.name);
            *admitted = local.admitted;
            let pod = cached.clone().or_else(|| looked_up.clone());
            let pod_state = match &pod {
                _ if pod_gone => PodState::Gone,
                Some(pod) => PodState::Present(pod),
                None => PodState::Unknown,
            };
            let is_leaving = pod_gone || pod.as_ref().is_some_and(|pod| pod.terminating);
            let action = decide(&record, pod_state, &local, self.moment(unserved));
            debug!(namespace = %record.namespace, name = %record.name, ?action, "decided");
            let written = match (&action, local.pending_failure.as_deref()) {
                // The pod leaves in spite of the failure.
                (_, Some(_)) if is_leaving => {
                    self.state().clear_pending_failure(key);
                    continue;
                }
                (_, Some(failure)) => self.write_failure(&record, failure).await?,
                (Action::Wait { until }, None) => {
                    let is_uncached = cached.is_none() && looked_up.is_some();
                    let next_look_up = is_uncached
                        .then(|| after(self.clock.now(), backoff::cache_miss_delay(local.cache_misses)));
                    let wake = until.iter().copied().chain(next_look_up).min();
                    return Ok(wake.map_or(Outcome::Done, Outcome::Until));
                }
                (Action::LookUp, None) => {
                    looked_up = self.look_up(&record).await?.map(Arc::new);
                    if looked_up.is_some() {
                        let look_ups = self.state().count_cache_miss(key);
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
                Written::Conflict => return Ok(Outcome::Failed),
            }
        }
        warn!(%key, "Evacuation still changing after {MAX_STEPS} steps, retrying");
        Ok(Outcome::Failed)
    }

    fn moment(&self, unserved: Option<Timestamp>) -> Moment {
        Moment { now: self.clock.now(), resumed: *self.resumed.lock(), gap: self.is_gap(), unserved }
    }

    fn is_gap(&self) -> bool {
        self.pods.continuity().gap_since.is_some()
    }

    /// Gets the pod from the API server. If it is gone, records that in the state.
    async fn look_up(&self, record: &Record) -> Result<Option<Pod>, pods::FetchError> {
        let found = pods::fetch(&self.clients.direct, &record.namespace, &record.pod_name).await?;
        let found = found.filter(|pod| pod.uid == record.pod_uid);
        if found.is_none() {
            self.state().set_pod_gone(record.uid);
        }
        Ok(found)
    }

    async fn step(&self, record: &Record, pod: Option<&Pod>, action: &Action) -> StepResult {
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
            Action::Switch { from, to, eviction_cause } => {
                let message = status::switched(from, to, *eviction_cause, record.progress_deadline);
                let mut status = json!({
                    "activeEvacuatorClass": to,
                    "activeEvacuatorCompleted": false,
                    "evacuationProgressTimestamp": Time(now),
                    "expectedEvacuationFinishTime": null,
                    "message": message,
                });
                // An evacuator that does not report must not forbid cancellation for ever.
                let unanswered = eviction_cause.is_unanswered();
                if let (true, Some(status)) = (unanswered, status.as_object_mut()) {
                    status.insert("evacuationCancellationPolicy".into(), json!(CancellationPolicy::Allow));
                }
                if let (Some(_), Some(status)) = (record.blocked_by(), status.as_object_mut()) {
                    status.append(&mut status::unblocked(record, reason::NOT_BLOCKED, &message, now));
                }
                self.write_and_publish(record, status, events::switched(record, *eviction_cause, &message))
                    .await
            }
            Action::Clamp => {
                let Record { namespace, name, active, progress, .. } = record;
                warn!(%namespace, %name, class = ?active, ?progress, "progress time is in the future, set to now");
                self.write(record, json!({"evacuationProgressTimestamp": Time(now)})).await
            }
            Action::AllowCancellation => {
                let Record { namespace, name, active, .. } = record;
                info!(%namespace, %name, class = ?active, "evacuator missed its deadline, allowing cancellation");
                let status = json!({"evacuationCancellationPolicy": CancellationPolicy::Allow});
                let written = self.write(record, status).await?;
                if written == Written::Done(()) {
                    self.state().policy_reset(record.uid, now);
                }
                Ok(written)
            }
            Action::Evict { eviction_cause, before } => match pod {
                Some(pod) => self.evict(record, pod, *eviction_cause, *before).await,
                None => Ok(Written::Conflict),
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
                Ok(self.apply_written(self.writer.patch(&record.object(), patch).await?))
            }
            Action::Delete { end } => {
                let written = self.writer.delete::<Evacuation>(&record.object()).await?;
                if written == Written::Done(()) {
                    self.state().set_deleted(record.uid, *end);
                }
                Ok(written)
            }
        }
    }

    async fn evict(
        &self,
        record: &Record,
        pod: &Pod,
        eviction_cause: EvictionCause,
        before: BeforeEviction,
    ) -> StepResult {
        let status = match before {
            BeforeEviction::Nothing => None,
            BeforeEviction::WriteMessage => {
                Some(json!({"message": status::evicting(record, eviction_cause)}))
            }
            BeforeEviction::CheckVersion => Some(json!({})),
        };
        if let Some(status) = status {
            match self.write(record, status).await? {
                Written::Done(()) => {}
                other => return Ok(other),
            }
        }
        let covered = !self.state().budgets.covering(pod).is_empty();
        if must_compare_uid(pod, covered, self.is_gap()) && self.look_up(record).await?.is_none() {
            info!(namespace = %pod.namespace, pod = %pod.name, "pod is gone, cache is stale");
            return Ok(Written::Done(()));
        }
        self.state().eviction_started(record.uid, pod);
        let answer = eviction::evict(&self.clients.direct, pod).await;
        self.metrics.eviction(&answer);
        let now = self.clock.now();
        match answer {
            Answer::Evicted => {
                self.state().evicted(record.uid, now);
                self.events.publish(events::evicting(record, eviction_cause));
            }
            Answer::Gone => {
                info!(namespace = %pod.namespace, pod = %pod.name, "pod is gone, cache is stale");
                self.state().set_pod_gone(record.uid);
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

    async fn write_failure(&self, record: &Record, failure: &Failure) -> StepResult {
        let status = status::failed(record, failure, self.clock.now());
        let event = events::blocked(record, &failure.message);
        let written = self.write_and_publish(record, status, event).await?;
        if written != Written::Conflict {
            self.update(|state, pods| state.failure_written(record.uid, pods));
        }
        Ok(written)
    }

    /// Writes the status and, if the write succeeded, publishes an event.
    async fn write_and_publish(
        &self,
        record: &Record,
        status: impl Into<Value>,
        event: NewEvent,
    ) -> StepResult {
        let written = self.write(record, status).await?;
        if written == Written::Done(()) {
            self.events.publish(event);
        }
        Ok(written)
    }

    /// Patches the status. An empty patch changes nothing, and the response still shows whether the record is up to
    /// date.
    async fn write(&self, record: &Record, status: impl Into<Value>) -> StepResult {
        Ok(self.apply_written(self.writer.patch_status(&record.object(), status.into()).await?))
    }

    /// Applies the API server's response to a write.
    fn apply_written(&self, written: Written<DeserializeGuard<Evacuation>>) -> Written<()> {
        match written {
            Written::Done(DeserializeGuard(Ok(evacuation))) => {
                let mut state = self.state();
                if let Ok(record) = Record::read(evacuation, |text| state.share(text)) {
                    state.apply_written(record);
                }
                Written::Done(())
            }
            // The watch delivers the object later.
            Written::Done(_) | Written::Conflict => Written::Conflict,
            Written::Gone => Written::Gone,
        }
    }

    /// An Evacuation was deleted: reports how it ended.
    pub(crate) fn evacuation_deleted(&self, key: Key) {
        let Some(View { record, local, pod, pod_gone, unserved }) = self.delete_evacuation(key) else {
            return;
        };
        let end = match local.deleted {
            // The end was reported when finalizers were found to hold the Evacuation.
            _ if record.blocked_by() == Some(reason::EVACUATION_HELD) => return,
            Some(end) => end,
            None if pod_gone || pod.is_none() => end_after_pod(&record, &local, self.moment(unserved)),
            None if local.evicted.is_some() => End::Evicted,
            None => End::Cancelled,
        };
        self.ended(&record, end);
    }

    /// Removes an Evacuation from the state. Returns its last view.
    pub(crate) fn delete_evacuation(&self, key: Key) -> Option<View> {
        let (deleted, admitted) = self.state().delete(key, &self.pods.read());
        self.enqueue(admitted);
        deleted
    }

    /// Counts and publishes the end of an evacuation. Called once per Evacuation.
    fn ended(&self, record: &Record, end: End) {
        let now = self.clock.now();
        let unserved = self.state().unserved(record);
        self.metrics.ended(record, unserved, end, now);
        self.events.publish(events::ended(record, end));
    }
}

/// Whether the pod's UID has to be compared with the API server first: see [`eviction::has_unique_name`]. The UID in
/// the cache is always compared. The cache is some milliseconds old, which is good enough for names that are never
/// reused.
fn must_compare_uid(pod: &Pod, covered: bool, gap: bool) -> bool {
    (covered || pod.phase == Phase::Pending) && (gap || !eviction::has_unique_name(pod))
}

#[cfg(test)]
mod tests;

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
use haulout_service_runtime::pods::{self, Phase, Pod, PodCache};
use haulout_service_runtime::queue::Outcome;
use haulout_service_runtime::workers::{WorkQueue, reconciling};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::core::DeserializeGuard;
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use tracing::{debug, info, warn};

use crate::api::{self, Answer as WriteAnswer};
use crate::backoff::{self, after};
use crate::budget::Cover;
use crate::decide::{Action, Before, End, Known, Moment, Plan, Why, after_pod, decide};
use crate::metrics::Metrics;
use crate::record::Record;
use crate::state::{Key, Queued, Removed, State, View};
use crate::{events, status};

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

/// What comes after a step.
enum Next {
    /// Another one.
    Again,
    /// Nothing, because there is no such Evacuation any more.
    Nothing,
    /// The same once more, a little later: what we know is old, or nobody answered.
    Retry,
}

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

    /// A watch has synced or works again after a gap: from now on deadlines that passed meanwhile get their grace.
    pub(crate) fn resumed(&self) {
        *self.resumed.lock() = self.clock.now();
        let keys = self.state().keys();
        self.enqueue(keys);
    }

    /// Has these looked at.
    pub(crate) fn enqueue(&self, keys: Vec<Key>) {
        let queued: Vec<_> = {
            let state = self.state();
            keys.into_iter().filter_map(|key| state.queued(key)).collect()
        };
        for queued in queued {
            self.queue.add(queued);
        }
    }

    /// Works on one Evacuation until there is nothing more to do for now.
    pub(crate) async fn handle(self: Arc<Self>, Queued { key, .. }: Queued) -> Result<Outcome, StepError> {
        let (outcome, admitted) = self.work(key).await;
        // Whatever kept it from using the room that its budget had for it: others may have it.
        if admitted {
            let failed = !matches!(outcome, Ok(Outcome::Done | Outcome::Until(_)));
            let others = self.state().give_back(key, failed, &self.pods.read());
            self.enqueue(others);
        }
        outcome
    }

    /// What came of it, and whether the last decision was made for one that a budget has admitted.
    async fn work(&self, key: Key) -> (Result<Outcome, StepError>, bool) {
        // A pod that the cache does not know, from the API server.
        let mut looked_up = None;
        let mut admitted = false;
        for _ in 0..MOST_STEPS {
            let view = self.state().view(key, &self.pods.read());
            let Some(view) = view else { return (Ok(Outcome::Done), false) };
            reconciling(&view.record.namespace, &view.record.name);
            admitted = view.live.admitted;
            let pod = view.pod.clone().or_else(|| looked_up.clone());
            let known = match &pod {
                _ if view.pod_gone => Known::Gone,
                Some(pod) => Known::Present(pod),
                None => Known::Nothing,
            };
            let is_leaving = view.pod_gone || pod.as_ref().is_some_and(|pod| pod.terminating);
            let plan = decide(&view.record, known, &view.live, self.moment());
            debug!(namespace = %view.record.namespace, name = %view.record.name, ?plan, "decided");
            let done = match (&plan.action, view.unwritten.as_deref()) {
                // It left all the same.
                (_, Some(_)) if is_leaving => {
                    self.state().forget_failure(key);
                    Ok(Next::Again)
                }
                (_, Some(failure)) => self.write_failure(&view.record, failure).await,
                (Action::Wait, None) => {
                    let unwatched = view.pod.is_none() && looked_up.is_some();
                    let again =
                        unwatched.then(|| after(self.clock.now(), backoff::unwatched(view.live.unwatched)));
                    return (Ok(sleep(&plan, again)), admitted);
                }
                (Action::LookUp, None) => match self.look_up(&view.record).await {
                    Ok(found) => {
                        if found.is_some() {
                            let look_ups = self.state().pod_is_unwatched(key);
                            let Record { namespace, pod_name, .. } = &*view.record;
                            info!(%namespace, pod = %pod_name, look_ups, "pod is not in the cache yet");
                        }
                        looked_up = found.map(Arc::new);
                        Ok(Next::Again)
                    }
                    Err(error) => Err(error.into()),
                },
                (action, None) => self.step(&view, pod.as_deref(), action).await,
            };
            match done {
                Ok(Next::Again) => {}
                Ok(Next::Nothing) => return (Ok(Outcome::Done), admitted),
                Ok(Next::Retry) => return (Ok(Outcome::Failed), admitted),
                Err(error) => return (Err(error), admitted),
            }
        }
        warn!(%key, "Evacuation is not at rest after {MOST_STEPS} steps, retrying");
        (Ok(Outcome::Failed), admitted)
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

    async fn step(&self, view: &View, pod: Option<&Pod>, action: &Action) -> Result<Next, StepError> {
        let record = &*view.record;
        let now = self.clock.now();
        match action {
            Action::Wait | Action::LookUp => Ok(Next::Again),
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
                let next = self.write(record, status).await?;
                self.tell(&next, || events::activated(record, &message));
                Ok(next)
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
                let next = self.write(record, status).await?;
                self.tell(&next, || events::switched(record, *why, &message));
                Ok(next)
            }
            Action::Clamp => {
                let Record { namespace, name, active, progress, .. } = record;
                warn!(%namespace, %name, class = ?active, ?progress, "progress time is in the future, set to now");
                self.write(record, json!({"evacuationProgressTimestamp": Time(now)})).await
            }
            Action::Evict { why, before } => match pod {
                Some(pod) => self.evict(record, pod, *why, *before).await,
                None => Ok(Next::Retry),
            },
            Action::Block { reason, message } => {
                let next = self.write(record, status::blocked(record, reason, message, now).into()).await?;
                self.tell(&next, || events::blocked(record, message));
                Ok(next)
            }
            Action::Unblock { reason, message } => {
                let next = self.write(record, status::unblocked(record, reason, message, now).into()).await?;
                self.tell(&next, || events::unblocked(record));
                Ok(next)
            }
            Action::Hold { end, message } => {
                let status = status::blocked(record, reason::EVACUATION_HELD, message, now);
                let next = self.write(record, status.into()).await?;
                let is_first = record.blocked_by() != Some(reason::EVACUATION_HELD);
                if is_first && matches!(next, Next::Again) {
                    self.ended(record, view.live.deleted.unwrap_or(*end));
                    self.events.publish(events::held(record, message));
                }
                Ok(next)
            }
            Action::Release { keep } => {
                Ok(self.take(api::write_finalizers(&self.writer, record, keep).await?))
            }
            Action::Delete { end } => Ok(match api::delete(&self.writer, record).await? {
                Written::Done(()) => {
                    self.state().deleted(record.uid, *end);
                    Next::Again
                }
                Written::Outdated => Next::Retry,
                Written::Gone => Next::Nothing,
            }),
        }
    }

    async fn evict(&self, record: &Record, pod: &Pod, why: Why, before: Before) -> Result<Next, StepError> {
        let status = match before {
            Before::Nothing => None,
            Before::Announce => Some(json!({"message": status::evicting(record, why)})),
            Before::Confirm => Some(json!({})),
        };
        if let Some(status) = status {
            match self.write(record, status).await? {
                Next::Again => {}
                other => return Ok(other),
            }
        }
        let covered = !matches!(self.state().budgets().covering(pod), Cover::None);
        if compare_first(pod, covered, self.moment().gap) && self.look_up(record).await?.is_none() {
            info!(namespace = %pod.namespace, pod = %pod.name, "pod is gone, and the cache is behind");
            return Ok(Next::Again);
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
                let woken = {
                    let mut state = self.state();
                    let pods = self.pods.read();
                    let failure = state.explain(failure, pod, &pods);
                    state.eviction_failed(record.uid, failure, now, &pods)
                };
                self.enqueue(woken);
            }
        }
        Ok(Next::Again)
    }

    async fn write_failure(&self, record: &Record, failure: &Failure) -> Result<Next, StepError> {
        let status = status::failed(record, failure, self.clock.now());
        let next = self.write(record, status.into()).await?;
        self.tell(&next, || events::blocked(record, &failure.message));
        if !matches!(next, Next::Retry) {
            let admitted = self.state().failure_written(record.uid, &self.pods.read());
            self.enqueue(admitted);
        }
        Ok(next)
    }

    async fn write(&self, record: &Record, status: Value) -> Result<Next, StepError> {
        let written = api::write_status(&self.writer, record, status).await?;
        Ok(self.take(written))
    }

    /// Takes in what the API server answered to a write.
    fn take(&self, written: Written<WriteAnswer>) -> Next {
        match written {
            Written::Done(DeserializeGuard(Ok(evacuation))) => {
                self.refresh(evacuation);
                Next::Again
            }
            // The watch will tell.
            Written::Done(_) | Written::Outdated => Next::Retry,
            Written::Gone => Next::Nothing,
        }
    }

    fn refresh(&self, evacuation: Evacuation) {
        let mut state = self.state();
        if let Ok(record) = Record::read(evacuation, |text| state.share(text)) {
            state.refresh(record);
        }
    }

    fn tell(&self, next: &Next, news: impl FnOnce() -> News) {
        if matches!(next, Next::Again) {
            self.events.publish(news());
        }
    }

    /// An Evacuation is gone.
    pub(crate) fn removed(&self, key: Key) {
        let Some(Removed { record, live, pod_gone }) = self.forget(key) else { return };
        let end = match live.deleted {
            // That it ended was told when it turned out that somebody holds it.
            _ if record.blocked_by() == Some(reason::EVACUATION_HELD) => return,
            Some(end) => end,
            None if pod_gone => after_pod(&record, &live, self.moment()),
            None if live.evicted.is_some() => End::Evicted,
            None => End::Cancelled,
        };
        self.ended(&record, end);
    }

    /// Nothing is to be known of an Evacuation any longer. What was known of it.
    pub(crate) fn forget(&self, key: Key) -> Option<Removed> {
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

fn sleep(plan: &Plan, latest: Option<Timestamp>) -> Outcome {
    match plan.wake.into_iter().chain(latest).min() {
        Some(wake) => Outcome::Until(wake),
        None => Outcome::Done,
    }
}

#[cfg(test)]
mod tests;

//! A leader at work: takes one Evacuation after the other, asks what to do about it, and does it. What has been
//! done is known at once, without waiting for the watch, so that nothing is done twice.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use haulout_api_types::Evacuation;
use haulout_service_runtime::clients::Clients;
use haulout_service_runtime::clock::Clock;
use haulout_service_runtime::events::Events;
use haulout_service_runtime::pods::{self, Pod, PodCache};
use haulout_service_runtime::queue::Outcome;
use haulout_service_runtime::workers::WorkQueue;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};
use tracing::{debug, warn};

use crate::act::{self, Written};
use crate::backoff::after;
use crate::budget::Cover;
use crate::decide::{Action, End, Known, Moment, Plan, Why, decide};
use crate::eviction::{self, Refusal, Verdict};
use crate::index::{Index, Key, View};
use crate::metrics::Metrics;
use crate::record::Record;
use crate::{events, messages};

/// More steps than any Evacuation ever needs at one go.
const MOST_STEPS: usize = 10;
/// A pod whose watch event has not come is looked up again: its end could have been missed too.
const UNWATCHED: std::time::Duration = std::time::Duration::from_secs(5);

/// What a leader works with.
pub struct Controller {
    pub(crate) clients: Clients,
    pub(crate) clock: Clock,
    pub(crate) events: Events,
    pub(crate) index: Arc<Mutex<Index>>,
    pub(crate) metrics: Metrics,
    pub(crate) pods: PodCache,
    pub(crate) queue: WorkQueue<Key>,
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
enum StepError {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Pod(#[from] pods::Error),
}

impl Controller {
    pub(crate) fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn saw_again(&self) {
        *self.resumed.lock().unwrap_or_else(PoisonError::into_inner) = self.clock.now();
    }

    /// Has these looked at.
    pub(crate) fn enqueue(&self, keys: Vec<Key>) {
        for key in keys {
            self.queue.add(key);
        }
    }

    /// Works on one Evacuation until there is nothing more to do for now.
    pub(crate) async fn handle(self: Arc<Self>, key: Key) -> Outcome {
        let outcome = self.work(key).await;
        if outcome != Outcome::Failed {
            let others = self.index().give_back(key, &self.pods.read());
            self.enqueue(others);
        }
        outcome
    }

    async fn work(&self, key: Key) -> Outcome {
        // A pod that the cache does not know, from the API server.
        let mut looked_up = None;
        for _ in 0..MOST_STEPS {
            let view = self.index().view(key, &self.pods.read());
            let Some(view) = view else { return Outcome::Done };
            let pod = view.pod.clone().or_else(|| looked_up.clone());
            let known = match &pod {
                _ if view.pod_gone => Known::Gone,
                Some(pod) => Known::Present(pod),
                None => Known::Nothing,
            };
            let plan = decide(&view.record, known, &view.live, self.moment());
            debug!(namespace = %view.record.namespace, name = %view.record.name, ?plan, "decided");
            let done = match (&plan.action, view.unwritten.as_deref()) {
                (_, Some(refusal)) => self.write_refusal(&view.record, refusal).await,
                (Action::Wait, None) => {
                    let unwatched = view.pod.is_none() && looked_up.is_some();
                    return sleep(&plan, unwatched.then(|| after(self.clock.now(), UNWATCHED)));
                }
                (Action::LookUp, None) => match self.look_up(&view.record).await {
                    Ok(found) => {
                        looked_up = found.map(Arc::new);
                        Ok(Next::Again)
                    }
                    Err(error) => Err(error.into()),
                },
                (action, None) => self.step(&view, pod.as_deref(), action).await,
            };
            match done {
                Ok(Next::Again) => {}
                Ok(Next::Nothing) => return Outcome::Done,
                Ok(Next::Retry) => return Outcome::Failed,
                Err(error) => {
                    let Record { namespace, name, .. } = &*view.record;
                    warn!(%namespace, %name, action = ?plan.action, %error, "a step failed and will be repeated");
                    return Outcome::Failed;
                }
            }
        }
        Outcome::Failed
    }

    fn moment(&self) -> Moment {
        Moment {
            now: self.clock.now(),
            resumed: *self.resumed.lock().unwrap_or_else(PoisonError::into_inner),
            gap: self.pods.continuity().gap_since.is_some(),
        }
    }

    /// The pod as the API server has it; notes that it is gone if it is.
    async fn look_up(&self, record: &Record) -> Result<Option<Pod>, pods::Error> {
        let found = pods::fetch(&self.clients.direct, &record.namespace, &record.pod_name).await?;
        let found = found.filter(|pod| pod.uid == record.pod_uid);
        if found.is_none() {
            self.index().pod_is_gone(record.uid);
        }
        Ok(found)
    }

    async fn step(&self, view: &View, pod: Option<&Pod>, action: &Action) -> Result<Next, StepError> {
        let record = &*view.record;
        let now = self.clock.now();
        match action {
            Action::Wait | Action::LookUp => Ok(Next::Again),
            Action::Activate { class, stamp } => {
                let message = messages::activated(class);
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
                let message = messages::switched(from, to, *why, record.progress_deadline);
                let mut status = json!({
                    "activeEvacuatorClass": to,
                    "activeEvacuatorCompleted": false,
                    "evacuationProgressTimestamp": Time(now),
                    "expectedEvacuationFinishTime": null,
                    "message": message,
                });
                if let (Some(_), Some(status)) = (&record.blocked, status.as_object_mut()) {
                    status.insert("conditions".into(), act::conditions(record, None));
                }
                let next = self.write(record, status).await?;
                self.tell(&next, || events::switched(record, *why, &message));
                Ok(next)
            }
            Action::Evict { why, announce } => match pod {
                Some(pod) => self.evict(record, pod, *why, *announce).await,
                None => Ok(Next::Retry),
            },
            Action::Block { reason, message } => {
                let next = self.write(record, act::blocked(record, reason, message, now).into()).await?;
                self.tell(&next, || events::blocked(record, message));
                Ok(next)
            }
            Action::Unblock => {
                let next = self.write(record, json!({"conditions": act::conditions(record, None)})).await?;
                self.tell(&next, || events::unblocked(record));
                Ok(next)
            }
            Action::Release { keep } => {
                let written = act::write_finalizers(&self.clients.retrying, record, keep).await?;
                // One that was being deleted goes with its last finalizer.
                if let (Written::Done(_), true) = (&written, record.deleting) {
                    self.ended(record, End::Evacuated);
                    if keep.is_empty() {
                        self.index().deleted(record.uid);
                    }
                }
                Ok(self.take(written))
            }
            Action::Delete { end } => match act::delete(&self.clients.retrying, record).await? {
                Written::Done(_) => {
                    self.index().deleted(record.uid);
                    self.ended(record, *end);
                    Ok(Next::Again)
                }
                other => Ok(self.take(other)),
            },
        }
    }

    async fn evict(&self, record: &Record, pod: &Pod, why: Why, announce: bool) -> Result<Next, StepError> {
        if announce {
            let message = messages::evicting(record, why);
            match self.write(record, json!({"message": message})).await? {
                Next::Again => {}
                other => return Ok(other),
            }
        }
        let covered = !matches!(self.index().budgets().covering(pod), Cover::None);
        if eviction::compare_first(pod, covered, self.moment().gap) && self.look_up(record).await?.is_none() {
            return Ok(Next::Again);
        }
        self.index().eviction_begins(record.uid, pod);
        let answer = act::evict(&self.clients.direct, pod).await;
        let mut index = self.index();
        let verdict = eviction::judge(answer, || index.describe_budgets(pod, &self.pods.read()));
        index.eviction_ends(record.uid, (verdict == Verdict::Evicted).then(|| self.clock.now()));
        self.metrics.eviction(&verdict);
        Ok(match verdict {
            Verdict::Evicted => {
                drop(index);
                self.events.publish(events::evicting(record, why));
                Next::Again
            }
            Verdict::Gone => {
                index.pod_is_gone(record.uid);
                Next::Again
            }
            Verdict::Refused(refusal) => {
                self.events.publish(events::refused(record, &refusal));
                index.keep_unwritten(record.uid, refusal);
                Next::Again
            }
            Verdict::Conflict => Next::Retry,
            Verdict::Unanswered(error) => {
                warn!(namespace = %pod.namespace, pod = %pod.name, error, "no answer to an eviction");
                Next::Retry
            }
        })
    }

    async fn write_refusal(&self, record: &Record, refusal: &Refusal) -> Result<Next, StepError> {
        let next = self.write(record, act::refused(record, refusal, self.clock.now())).await?;
        if !matches!(next, Next::Retry) {
            let admitted = self.index().refusal_written(record.uid, &self.pods.read());
            self.enqueue(admitted);
        }
        Ok(next)
    }

    async fn write(&self, record: &Record, status: Value) -> Result<Next, StepError> {
        let written = act::write_status(&self.clients.retrying, record, status).await?;
        Ok(self.take(written))
    }

    /// Takes in what the API server answered to a write.
    fn take(&self, written: Written) -> Next {
        match written {
            Written::Done(Some(evacuation)) => {
                self.refresh(*evacuation);
                Next::Again
            }
            // The watch will tell.
            Written::Done(None) | Written::Outdated => Next::Retry,
            Written::Gone => Next::Nothing,
        }
    }

    fn refresh(&self, evacuation: Evacuation) {
        let mut index = self.index();
        if let Ok(record) = Record::read(evacuation, |text| index.share(text)) {
            index.refresh(record);
        }
    }

    fn tell(&self, next: &Next, news: impl FnOnce() -> haulout_service_runtime::events::News) {
        if matches!(next, Next::Again) {
            self.events.publish(news());
        }
    }

    fn ended(&self, record: &Record, end: End) {
        let took = self.clock.now().duration_since(record.created).try_into().unwrap_or_default();
        self.metrics.ended(record, end, took);
        self.events.publish(events::ended(record, end));
    }
}

fn sleep(plan: &Plan, latest: Option<Timestamp>) -> Outcome {
    match plan.wake.into_iter().chain(latest).min() {
        Some(wake) => Outcome::Until(wake),
        None => Outcome::Done,
    }
}

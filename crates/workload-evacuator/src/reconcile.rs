//! Reconciles one Deployment at a time: decides what to do for its pods, and does it. The responses to our writes update the
//! state at once, without waiting for the watch.

use std::collections::BTreeSet;
use std::sync::Arc;

use haulout_api_types::Evacuation;
use haulout_api_types::names::class;
use haulout_service_runtime::api::{RequestError, Written};
use haulout_service_runtime::clock::Clock;
use haulout_service_runtime::events::Events;
use haulout_service_runtime::pods::Uid;
use haulout_service_runtime::queue::Outcome;
use haulout_service_runtime::workers::{WorkQueue, record_object};
use jiff::SignedDuration;
use parking_lot::{Mutex, MutexGuard};
use tracing::{debug, info, warn};

use crate::api::{Api, PodWrite};
use crate::decide::{self, Action, Local, Plan, Report};
use crate::events;
use crate::metrics::Metrics;
use crate::objects::{Deployment, Evac, Pod, SlimPod};
use crate::state::{State, Work};
use crate::status;

/// The maximum number of decisions in one reconcile. No pod needs that many.
const MAX_STEPS: usize = 10;

/// The clients, caches and queues of a leader.
pub struct Controller {
    pub(crate) api: Api,
    pub(crate) clock: Clock,
    pub(crate) events: Events,
    pub(crate) state: Arc<Mutex<State>>,
    pub(crate) metrics: Metrics,
    pub(crate) queue: WorkQueue<Work>,
    pub(crate) wait_for_room: SignedDuration,
}

/// The pod of an action, with its Deployment and Evacuation.
struct Target {
    pod: Arc<Pod>,
    evac: Option<Arc<Evac>>,
    deployment: Option<Deployment>,
}

impl Controller {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Changes the state, and enqueues what has to be reconciled.
    pub(crate) fn update(&self, change: impl FnOnce(&mut State) -> Vec<Work>) {
        let work = change(&mut self.state());
        for work in work {
            self.queue.add(work);
        }
    }

    /// A pod was added or modified.
    pub(crate) fn apply_pod(&self, pod: Pod) {
        let (work, outage) = self.state().apply_pod(pod, self.clock.now());
        self.metrics.outage_ended(outage);
        if let Some(work) = work {
            self.queue.add(work);
        }
    }

    /// A pod was deleted.
    pub(crate) fn delete_pod(&self, uid: Uid) {
        let (work, outage) = self.state().delete_pod(uid, self.clock.now());
        self.metrics.outage_ended(outage);
        if let Some(work) = work {
            self.queue.add(work);
        }
    }

    /// Reconciles a Deployment, or a pod without one, until nothing is left to do for now.
    pub(crate) async fn handle(self: Arc<Self>, work: Work) -> Result<Outcome, RequestError> {
        for _ in 0..MAX_STEPS {
            // Everything is reconciled when the watches work again.
            if self.state().is_gap() {
                return Ok(Outcome::Done);
            }
            let Plan { actions, wake } = self.plan(work);
            if actions.is_empty() {
                return Ok(wake.map_or(Outcome::Done, Outcome::Until));
            }
            let (mut conflict, mut problem) = (false, None);
            for (pod, action) in actions {
                match self.act(work, pod, action).await {
                    Ok(Written::Done(())) => {}
                    Ok(Written::Conflict | Written::Gone) => conflict = true,
                    // The other pods do not wait for this one.
                    Err(error) => problem = problem.or(Some(error)),
                }
            }
            if let Some(problem) = problem {
                return Err(problem);
            }
            if conflict {
                // The watch delivers the new state.
                return Ok(Outcome::Failed);
            }
        }
        warn!(?work, "Deployment still changing after {MAX_STEPS} steps, retrying");
        Ok(Outcome::Failed)
    }

    fn plan(&self, work: Work) -> Plan {
        let now = self.clock.now();
        let state = self.state();
        match work {
            Work::Deployment(uid) => {
                let Some(view) = state.view(uid) else { return Plan::default() };
                drop(state);
                record_object(&view.deployment.namespace, &view.deployment.name);
                decide::decide(&view, self.wait_for_room, now)
            }
            Work::Pod(uid) => {
                let Some(lone) = state.lone_pod(uid) else { return Plan::default() };
                drop(state);
                let (action, wake) = decide::decide_lone(&lone, now);
                Plan { actions: action.map(|action| (uid, action)).into_iter().collect(), wake }
            }
        }
    }

    async fn act(&self, work: Work, uid: Uid, action: Action) -> Result<Written<()>, RequestError> {
        debug!(%uid, ?action, "decided");
        let ((pod, evac), deployment) = {
            let state = self.state();
            let deployment =
                if let Work::Deployment(uid) = work { state.deployment(uid).cloned() } else { None };
            (state.pod_with_evac(uid), deployment)
        };
        // The Evacuation of a pod that we do not know.
        let Some(pod) = pod else {
            let Some(evac) = evac else { return Ok(Written::Done(())) };
            return Ok(match action {
                Action::Release => self.write_evac(uid, self.api.set_finalizer(&evac, false).await?),
                Action::Complete { outcome, message } => {
                    self.metrics.completed(outcome);
                    self.write_evac(uid, self.api.complete(&evac, &message).await?)
                }
                _ => Written::Done(()),
            });
        };
        self.act_on(Target { pod, evac, deployment }, action).await
    }

    async fn act_on(&self, target: Target, action: Action) -> Result<Written<()>, RequestError> {
        let Target { pod, evac, deployment } = &target;
        let (namespace, name) = (&pod.namespace, &pod.name);
        let now = self.clock.now();
        match (action, evac) {
            (Action::CheckVolumes, _) => {
                let volumes = self.api.check_volumes(pod).await?;
                self.update_local(pod.uid, |local| local.volumes = Some(volumes));
                Ok(Written::Done(()))
            }
            (Action::Hold, Some(evac)) => match self.api.set_finalizer(evac, true).await {
                Err(error) if is_rejection(&error) => {
                    warn!(%namespace, pod = %name, %error, "failed to add our finalizer, continuing without it");
                    self.update_local(pod.uid, |local| local.finalizer_rejected = true);
                    Ok(Written::Done(()))
                }
                written => Ok(self.write_evac(pod.uid, written?)),
            },
            (Action::Release, Some(evac)) => {
                Ok(self.write_evac(pod.uid, self.api.set_finalizer(evac, false).await?))
            }
            (Action::Report(report), Some(evac)) => {
                Ok(self.write_evac(pod.uid, self.api.report(evac, &report, now).await?))
            }
            (Action::Complete { outcome, message }, Some(evac)) => {
                let written = self.api.complete(evac, &message).await?;
                if matches!(written, Written::Done(_)) {
                    info!(%namespace, pod = %name, outcome = outcome.as_str(), message, "completed");
                    self.metrics.completed(outcome);
                    let event = deployment
                        .as_ref()
                        .map(|deployment| events::completed(deployment, pod, outcome, &message));
                    if let Some(event) = event {
                        self.events.publish(event);
                    }
                }
                Ok(self.write_evac(pod.uid, written))
            }
            (Action::Prefer, _) => self.write_pod(&target, PodWrite::Prefer { since: now }).await,
            (Action::Move { available }, _) => {
                let Some(deployment) = deployment else { return Ok(Written::Done(())) };
                let owner = (deployment.name.as_ref(), deployment.uid.to_string());
                self.write_pod(&target, PodWrite::Move { owner, available, since: now }).await
            }
            (Action::GiveBack, _) => {
                let written = self.write_pod(&target, PodWrite::GiveBack).await?;
                if written == Written::Done(()) && !pod.leaving {
                    info!(%namespace, pod = %name, "pod was given back to its ReplicaSet");
                    self.metrics.cancelled();
                    if let Some(deployment) = deployment {
                        self.events.publish(events::cancelled(deployment, pod));
                    }
                }
                Ok(written)
            }
            (Action::Restore, _) => self.write_pod(&target, PodWrite::Restore).await,
            (Action::Evacuate, _) => {
                let served = BTreeSet::from([class::DEPLOYMENT.to_owned()]);
                info!(%namespace, pod = %name, "no ReplicaSet can take the pod back, requesting its evacuation");
                self.api.evacuate(pod, &served).await
            }
            (Action::Hold | Action::Release | Action::Report(_) | Action::Complete { .. }, None) => {
                Ok(Written::Done(()))
            }
        }
    }

    /// Writes the metadata of a pod. If the API server rejects that before the pod was moved, the pod is evicted without a
    /// replacement.
    async fn write_pod(
        &self,
        Target { pod, evac, .. }: &Target,
        write: PodWrite<'_>,
    ) -> Result<Written<()>, RequestError> {
        let may_be_rejected = matches!(write, PodWrite::Move { .. } | PodWrite::Prefer { .. });
        match self.api.write_pod(pod, write).await {
            Ok(Written::Done(Some(slim))) => {
                self.applied(slim);
                Ok(Written::Done(()))
            }
            Ok(Written::Done(None) | Written::Conflict) => Ok(Written::Conflict),
            Ok(Written::Gone) => Ok(Written::Gone),
            Err(error) if may_be_rejected && is_rejection(&error) => {
                let problem = rejection(&error);
                warn!(namespace = %pod.namespace, pod = %pod.name, problem, "the API server rejects the change of a pod");
                self.update_local(pod.uid, |local| local.rejected = Some(problem.into()));
                Ok(Written::Done(()))
            }
            Err(error) => {
                if let Some(evac) = evac.as_deref().filter(|evac| may_be_rejected && evac.is_active()) {
                    self.report_failure(pod, evac, &error).await;
                }
                Err(error)
            }
        }
    }

    /// Reports why the change of a pod fails. It is retried.
    async fn report_failure(&self, pod: &Pod, evac: &Evac, error: &RequestError) {
        // Without an answer, there is an outage, and this request would fail, too.
        if !matches!(error.source.as_ref(), kube::Error::Api(_)) {
            return;
        }
        let message = status::failing(pod, &rejection(error));
        if *evac.message == *message {
            return;
        }
        let report = Report { message, progress: false, expected_end: None, no_room: false };
        match self.api.report(evac, &report, self.clock.now()).await {
            Ok(written) => drop(self.write_evac(pod.uid, written)),
            Err(error) => debug!(namespace = %pod.namespace, pod = %pod.name, %error, "failed to report"),
        }
    }

    fn applied(&self, pod: SlimPod) {
        if let Some(pod) = Pod::read(pod) {
            self.apply_pod(pod);
        }
    }

    /// Applies the answer to a write of an Evacuation.
    fn write_evac(&self, pod: Uid, written: Written<Evacuation>) -> Written<()> {
        written.map(|evacuation| {
            self.update(|state| state.apply_evac(pod, Evac::read(evacuation)).into_iter().collect());
        })
    }

    fn update_local(&self, pod: Uid, change: impl FnOnce(&mut Local)) {
        self.state().update_local(pod, change);
    }
}

/// Whether the API server will reject the request again: a policy, a webhook, a quota or RBAC forbids it.
fn is_rejection(error: &RequestError) -> bool {
    matches!(error.source.as_ref(), kube::Error::Api(status) if matches!(status.code, 400 | 403 | 422))
}

fn rejection(error: &RequestError) -> String {
    let text = match error.source.as_ref() {
        kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    };
    haulout_api_types::bounded::text(&text)
}

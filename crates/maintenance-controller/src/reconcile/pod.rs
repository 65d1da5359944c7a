//! The Evacuation of one pod: made, shared or given up.

use std::collections::BTreeSet;

use haulout_api_types::evacuators::evacuation_for;
use haulout_api_types::names::{MAINTENANCES_ANNOTATION, instigator};
use haulout_drain_planner::Desired;
use haulout_drain_planner::facts::EvacuationOf;
use haulout_service_runtime::api::{RequestError, Written};
use haulout_service_runtime::pods::{Pod, Uid};
use haulout_service_runtime::queue::Outcome;
use haulout_service_runtime::workers::reconciling;
use jiff::Timestamp;
use tracing::warn;

use super::{Controller, Next};
use crate::api;
use crate::seen::EvacuationSeen;
use crate::writes::Failure;

impl Controller {
    pub(super) async fn pod(&self, uid: Uid) -> Result<Next, RequestError> {
        let now = self.clock.now();
        let Some(pod) = self.pods.read().get(uid).cloned() else { return Ok(Next::Rest(Outcome::Done)) };
        reconciling(&pod.namespace, &pod.name);
        let view = self.update(|state, pods| state.pod(&pod, pods, now));
        let Ok((desired, evacuation)) = view else { return Ok(self.later()) };
        let Some(task) = task(desired, evacuation) else {
            self.tell(|state| state.pod_succeeded(&pod));
            return Ok(Next::Rest(Outcome::Done));
        };
        let paused = self.state().pod_pause(uid, now);
        if let Some(retry) = paused {
            return Ok(Next::Rest(Outcome::Until(retry)));
        }
        match task {
            Task::Create { why } => self.create(&pod, why, now).await,
            Task::Write { seen, why } => self.write_finalizer(&pod, &seen, why.as_deref()).await,
        }
    }

    async fn create(&self, pod: &Pod, why: String, now: Timestamp) -> Result<Next, RequestError> {
        if let Err(until) = self.state().begin_create(pod.uid, now) {
            return Ok(Next::Rest(Outcome::Until(until)));
        }
        let made = evacuation_for(&pod.metadata(), instigator::NODE_MAINTENANCE, &BTreeSet::new());
        let (mut evacuation, violations) = match made {
            Ok(made) => made,
            Err(error) => return Ok(self.failed(pod, Failure::impossible(&error))),
        };
        for violation in violations {
            warn!(namespace = %pod.namespace, pod = %pod.name, %violation, "an annotation is ignored");
        }
        evacuation.metadata.annotations = Some([(MAINTENANCES_ANNOTATION.to_owned(), why)].into());
        match api::create_evacuation(&self.clients.direct, &evacuation).await {
            Ok(()) => {
                self.tell(|state| state.pod_succeeded(pod));
                Ok(Next::Rest(Outcome::Done))
            }
            // There may be one that we have not seen yet, or its namespace is gone, and the pod with it.
            Err(error) => Ok(self.failed(pod, Failure::from(error.source.as_ref()))),
        }
    }

    async fn write_finalizer(
        &self,
        pod: &Pod,
        seen: &EvacuationSeen,
        why: Option<&str>,
    ) -> Result<Next, RequestError> {
        match api::write_finalizer(&self.writer, seen, why).await {
            Ok(Written::Done(evacuation)) => {
                let seen = EvacuationSeen::new(evacuation);
                self.update(|state, pods| {
                    state.refresh_evacuation(pod.uid, seen, pods);
                    state.pod_succeeded(pod);
                });
                Ok(Next::Rest(Outcome::Done))
            }
            Ok(Written::Outdated) => Ok(Next::Rest(Outcome::Failed)),
            Ok(Written::Gone) => Ok(Next::Rest(Outcome::Done)),
            Err(error) => Ok(self.failed(pod, Failure::from(error.source.as_ref()))),
        }
    }

    /// Takes note of a write that failed, for the status to tell and for the next attempt to wait.
    fn failed(&self, pod: &Pod, failure: Failure) -> Next {
        warn!(namespace = %pod.namespace, pod = %pod.name, ?failure, "failed to write an Evacuation");
        let now = self.clock.now();
        let retry = self.tell(|state| state.pod_failed(pod, failure, now, fastrand::f64()));
        Next::Rest(Outcome::Until(retry))
    }
}

/// What is to be done about the Evacuation of a pod.
enum Task {
    Create {
        why: String,
    },
    /// Puts our finalizer on it with why we want it, or takes both off.
    Write {
        seen: EvacuationSeen,
        why: Option<String>,
    },
}

fn task(desired: Option<Desired>, evacuation: Option<EvacuationSeen>) -> Option<Task> {
    let is_ours = |seen: &EvacuationSeen| seen.of() == EvacuationOf::Us;
    match (desired, evacuation) {
        (Some(Desired::Evacuate { why }), None) => Some(Task::Create { why }),
        // One that is being deleted takes no new finalizers: when it is gone, there will be another.
        (Some(Desired::Evacuate { why }), Some(seen)) if !is_ours(&seen) && !seen.deleting => {
            Some(Task::Write { seen, why: Some(why) })
        }
        // Without our finalizer, an Evacuation that somebody has deleted would vanish under its evacuator.
        (Some(Desired::Withdraw), Some(seen)) if seen.forbids_cancellation => None,
        (Some(Desired::Withdraw), Some(seen)) if is_ours(&seen) => Some(Task::Write { seen, why: None }),
        _ => None,
    }
}

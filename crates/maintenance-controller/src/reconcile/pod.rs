//! Reconciles the Evacuation of one pod: creates it, adds our finalizer, or withdraws.

use haulout_api_types::evacuators::evacuation_for;
use haulout_api_types::names::{MAINTENANCES_ANNOTATION, instigator};
use haulout_drain_planner::Desired;
use haulout_service_runtime::api::{RequestError, Written};
use haulout_service_runtime::pods::{Pod, Uid};
use haulout_service_runtime::queue::Outcome;
use haulout_service_runtime::workers::record_object;
use jiff::Timestamp;
use tracing::warn;

use super::{Controller, Next};
use crate::api;
use crate::observed::ObservedEvacuation;
use crate::writes::Failure;

impl Controller {
    pub(super) async fn pod(&self, uid: Uid) -> Result<Next, RequestError> {
        let now = self.clock.now();
        let Some(pod) = self.pods.read().get(uid).cloned() else { return Ok(Next::Finish(Outcome::Done)) };
        record_object(&pod.namespace, &pod.name);
        let view = self.update_with_pods(|state, pods| state.pod(&pod, pods, now));
        let Ok((desired, evacuation)) = view else { return Ok(self.wait_for_planner()) };
        let Some(task) = task(desired, evacuation) else {
            self.update(|state| state.pod_succeeded(&pod));
            return Ok(Next::Finish(Outcome::Done));
        };
        let backoff_until = self.state().pod_backoff_until(uid, now);
        if let Some(retry) = backoff_until {
            return Ok(Next::Finish(Outcome::Until(retry)));
        }
        match task {
            Task::Create { on_behalf_of } => self.create(&pod, on_behalf_of, now).await,
            Task::Write { observed, on_behalf_of } => {
                self.write_finalizer(&pod, &observed, on_behalf_of.as_deref()).await
            }
        }
    }

    async fn create(&self, pod: &Pod, on_behalf_of: String, now: Timestamp) -> Result<Next, RequestError> {
        if let Err(until) = self.state().begin_create(pod.uid, now) {
            return Ok(Next::Finish(Outcome::Until(until)));
        }
        let built = evacuation_for(&pod.metadata(), instigator::NODE_MAINTENANCE, &self.served);
        let (mut evacuation, violations) = match built {
            Ok(built) => built,
            Err(error) => return Ok(self.failed(pod, Failure::permanent(&error))),
        };
        for violation in violations {
            warn!(namespace = %pod.namespace, pod = %pod.name, %violation, "ignoring invalid annotation of pod");
        }
        let annotations = evacuation.metadata.annotations.get_or_insert_default();
        annotations.insert(MAINTENANCES_ANNOTATION.to_owned(), on_behalf_of);
        match api::create_evacuation(&self.clients.direct, &evacuation).await {
            Ok(()) => {
                self.update(|state| state.pod_succeeded(pod));
                Ok(Next::Finish(Outcome::Done))
            }
            // There may be an Evacuation that is not observed yet, or the namespace may be gone.
            Err(error) => Ok(self.failed(pod, Failure::from(error.source.as_ref()))),
        }
    }

    async fn write_finalizer(
        &self,
        pod: &Pod,
        observed: &ObservedEvacuation,
        on_behalf_of: Option<&str>,
    ) -> Result<Next, RequestError> {
        match api::write_finalizer(&self.writer, observed, on_behalf_of).await {
            Ok(Written::Done(evacuation)) => {
                let observed = ObservedEvacuation::new(evacuation);
                self.update_with_pods(|state, pods| {
                    state.refresh_evacuation(pod.uid, observed, pods);
                    state.pod_succeeded(pod);
                });
                Ok(Next::Finish(Outcome::Done))
            }
            Ok(Written::Conflict) => Ok(Next::Finish(Outcome::Failed)),
            Ok(Written::Gone) => Ok(Next::Finish(Outcome::Done)),
            Err(error) => Ok(self.failed(pod, Failure::from(error.source.as_ref()))),
        }
    }

    /// Records a failed write, for the status and for the backoff.
    fn failed(&self, pod: &Pod, failure: Failure) -> Next {
        warn!(namespace = %pod.namespace, pod = %pod.name, ?failure, "failed to write Evacuation");
        let now = self.clock.now();
        let retry =
            self.update_with_pods(|state, pods| state.pod_failed(pod, failure, pods, now, fastrand::f64()));
        Next::Finish(Outcome::Until(retry))
    }
}

/// The write that brings the Evacuation of a pod to its desired state.
enum Task {
    Create {
        on_behalf_of: String,
    },
    /// Add our finalizer and the annotation, or remove both.
    Write {
        observed: ObservedEvacuation,
        on_behalf_of: Option<String>,
    },
}

fn task(desired: Option<Desired>, evacuation: Option<ObservedEvacuation>) -> Option<Task> {
    match (desired, evacuation) {
        (Some(Desired::Evacuate { on_behalf_of }), None) => Some(Task::Create { on_behalf_of }),
        // An Evacuation that is being deleted accepts no new finalizer. When it is gone, a new one is created.
        (Some(Desired::Evacuate { on_behalf_of }), Some(observed))
            if !observed.is_ours() && !observed.deleting =>
        {
            Some(Task::Write { observed, on_behalf_of: Some(on_behalf_of) })
        }
        // Without our finalizer, a deleted Evacuation would be removed although its evacuator cannot stop.
        (Some(Desired::Withdraw), Some(observed)) if observed.forbids_cancellation => None,
        (Some(Desired::Withdraw), Some(observed)) if observed.is_ours() => {
            Some(Task::Write { observed, on_behalf_of: None })
        }
        _ => None,
    }
}

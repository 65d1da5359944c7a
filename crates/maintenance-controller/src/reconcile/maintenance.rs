//! Reconciles the lifecycle and status of one maintenance.

use std::sync::Arc;

use haulout_api_types::NodeMaintenance;
use haulout_api_types::node_maintenance::{NodeMaintenanceStatus, Stage};
use haulout_drain_planner::MaintenancePlan;
use haulout_service_runtime::api::{Object, RequestError, Written};
use haulout_service_runtime::queue::Outcome;
use jiff::Timestamp;
use kube::core::DeserializeGuard;
use serde_json::json;
use tracing::{debug, warn};

use super::{Controller, Next};
use crate::api;
use crate::observed::ObservedMaintenance;
use crate::stage::{self, Step};
use crate::state::{NotConverged, UnreadableMaintenance};
use crate::writes::Failure;
use crate::{events, status};

/// Evacuators may change their message every second. Writes with only such changes have a longer minimum interval.
const MESSAGE_INTERVAL_FACTOR: i32 = 5;

impl Controller {
    pub(super) async fn maintenance(&self, name: &Arc<str>) -> Result<Next, RequestError> {
        let unreadable = self.state().unreadable.get(name).cloned();
        if let Some(UnreadableMaintenance { object, error, .. }) = unreadable {
            return self.report_unreadable(object, &error).await;
        }
        let now = self.clock.now();
        let view = self.update_with_pods(|state, pods| state.maintenance(name, pods, now));
        let (observed, plan) = match view {
            Ok(Some(view)) => view,
            Ok(None) => return Ok(Next::Finish(Outcome::Done)),
            Err(NotConverged) => return Ok(self.wait_for_planner()),
        };
        let lifecycle = observed.lifecycle(plan.nodes_unreleased);
        let backoff_until = self.state().maintenance_writes.backoff_until(name, self.clock.now());
        let step = stage::next_step(lifecycle);
        debug!(%name, ?step, ?backoff_until, "reconciling NodeMaintenance");
        let patch = match step {
            Some(Step::AddFinalizer) => {
                json!({"metadata": {"finalizers": observed.finalizers_with_ours(true)}})
            }
            Some(Step::RemoveFinalizer) => {
                json!({"metadata": {"finalizers": observed.finalizers_with_ours(false)}})
            }
            Some(Step::SetStage(stage)) => json!({"spec": {"stage": stage}}),
            Some(Step::Start(stage)) => return self.start_stage(&observed, stage).await,
            None => {
                let next = self.write_status(name, &observed, &plan, stage::active_stage(lifecycle)).await?;
                let expiry = stage::expiry(lifecycle, observed.object.spec.ttl_seconds_after_complete);
                return match expiry.filter(|_| matches!(next, Next::Finish(Outcome::Done))) {
                    Some(when) => self.expire(&observed, when).await,
                    None => Ok(next),
                };
            }
        };
        if let Some(retry) = backoff_until {
            let next = self.write_status(name, &observed, &plan, stage::active_stage(lifecycle)).await?;
            return Ok(if matches!(next, Next::Finish(Outcome::Done)) {
                Next::Finish(Outcome::Until(retry))
            } else {
                next
            });
        }
        let written = match self.writer.patch(&Object::of(&observed.object.metadata), patch).await {
            Ok(written) => written,
            Err(error) => {
                warn!(%name, %error, ?step, "failed to write NodeMaintenance");
                let now = self.clock.now();
                let failure = Failure::from(error.source.as_ref());
                self.update(|state| state.maintenance_failed(name, failure, now, fastrand::f64()));
                return Ok(Next::Continue);
            }
        };
        self.state().maintenance_writes.succeeded(name);
        if lifecycle.deleting && step == Some(Step::RemoveFinalizer) && matches!(written, Written::Done(_)) {
            // Without other finalizers, the object is gone. Otherwise, the watch delivers the change.
            return Ok(Next::Finish(Outcome::Done));
        }
        Ok(self.apply_answer(written))
    }

    /// Deletes a maintenance when it expires.
    async fn expire(&self, observed: &ObservedMaintenance, when: Timestamp) -> Result<Next, RequestError> {
        if self.clock.now() < when {
            return Ok(Next::Finish(Outcome::Until(when)));
        }
        let object = Object::of(&observed.object.metadata);
        let written = self.writer.delete::<NodeMaintenance>(&object).await?;
        // The watch delivers the deletion or the change.
        Ok(Next::Finish(if matches!(written, Written::Conflict) { Outcome::Failed } else { Outcome::Done }))
    }

    async fn start_stage(&self, observed: &ObservedMaintenance, stage: Stage) -> Result<Next, RequestError> {
        let old = observed.object.status.clone().unwrap_or_default();
        let new = status::with_stage_started(&old, stage, self.clock.now());
        let written = api::write_status(&self.writer, &observed.object, json!(new)).await?;
        if matches!(written, Written::Done(_)) {
            for event in status::transition_events(&old, &new) {
                self.events.publish(events::for_maintenance(&observed.object, event));
            }
        }
        Ok(self.apply_answer(written))
    }

    /// Reports in its status that a maintenance is unreadable, if the object can be deserialized.
    async fn report_unreadable(
        &self,
        object: Option<Arc<NodeMaintenance>>,
        error: &str,
    ) -> Result<Next, RequestError> {
        let Some(object) = object else { return Ok(Next::Finish(Outcome::Done)) };
        let old = object.status.clone().unwrap_or_default();
        let new = status::unreadable(&old, object.metadata.generation, error, self.clock.now());
        if new != old {
            // The watch delivers the result.
            api::write_status(&self.writer, &object, json!(new)).await?;
        }
        Ok(Next::Finish(Outcome::Done))
    }

    async fn write_status(
        &self,
        name: &Arc<str>,
        observed: &ObservedMaintenance,
        plan: &MaintenancePlan,
        stage: Stage,
    ) -> Result<Next, RequestError> {
        let (now, none) = (self.clock.now(), NodeMaintenanceStatus::default());
        let old = observed.object.status.as_ref().unwrap_or(&none);
        let generation = observed.object.metadata.generation;
        let new = status::status(status::Context { old, generation, stage, now }, plan);
        if new == *old {
            return Ok(Next::Finish(Outcome::Done));
        }
        let interval_factor =
            if status::only_messages_differ(old, &new) { MESSAGE_INTERVAL_FACTOR } else { 1 };
        let allowed = self.state().maintenance_writes.try_acquire(name.clone(), interval_factor, now);
        if let Err(when) = allowed {
            return Ok(Next::Finish(Outcome::Until(when)));
        }
        let written = api::write_status(&self.writer, &observed.object, json!(new)).await?;
        if matches!(written, Written::Done(_)) {
            self.metrics.status_written(old, &new, now);
            let forwarded = {
                let mut known = self.state();
                status::fast_forwarded(plan, known.forwarded.entry(name.clone()).or_default())
            };
            for event in status::transition_events(old, &new).into_iter().chain(forwarded) {
                self.events.publish(events::for_maintenance(&observed.object, event));
            }
        }
        Ok(self.apply_answer(written))
    }

    /// Applies the API server's answer to a write.
    fn apply_answer(&self, written: Written<api::Answer>) -> Next {
        match written {
            Written::Done(DeserializeGuard(Ok(maintenance))) => {
                self.update(|state| state.refresh_maintenance(maintenance));
                Next::Continue
            }
            // The watch delivers the change.
            Written::Done(_) | Written::Gone => Next::Finish(Outcome::Done),
            Written::Conflict => Next::Finish(Outcome::Failed),
        }
    }
}

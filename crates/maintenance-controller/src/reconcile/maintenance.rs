//! The life and status of one maintenance.

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
use crate::seen::MaintenanceSeen;
use crate::stage::{self, Step};
use crate::state::{Unfollowed, Unsettled};
use crate::writes::Failure;
use crate::{events, status};

/// An evacuator may say something new every second. So many times less often than anything else is that written.
const WORDS: i32 = 5;

impl Controller {
    pub(super) async fn maintenance(&self, name: &Arc<str>) -> Result<Next, RequestError> {
        let unfollowed = self.state().unfollowed.get(name).cloned();
        if let Some(Unfollowed { object, why, .. }) = unfollowed {
            return self.tell_not_followed(object, &why).await;
        }
        let now = self.clock.now();
        let view = self.update(|state, pods| state.maintenance(name, pods, now));
        let (seen, plan) = match view {
            Ok(Some(view)) => view,
            Ok(None) => return Ok(Next::Rest(Outcome::Done)),
            Err(Unsettled) => return Ok(self.later()),
        };
        let life = seen.life(plan.nodes_unreleased);
        let paused = self.state().maintenance_writes.pause(name, self.clock.now());
        let step = stage::next(life);
        debug!(%name, ?step, ?paused, "looked at a maintenance");
        let patch = match step {
            Some(Step::AddFinalizer) => json!({"metadata": {"finalizers": seen.finalizers_with_ours(true)}}),
            Some(Step::RemoveFinalizer) => {
                json!({"metadata": {"finalizers": seen.finalizers_with_ours(false)}})
            }
            Some(Step::SetStage(stage)) => json!({"spec": {"stage": stage}}),
            Some(Step::Begin(stage)) => return self.begin(&seen, stage).await,
            None => {
                let next = self.write_status(name, &seen, &plan, stage::planned(life)).await?;
                let expires = stage::expires(life, seen.object.spec.ttl_seconds_after_complete);
                return match expires.filter(|_| matches!(next, Next::Rest(Outcome::Done))) {
                    Some(when) => self.expire(&seen, when).await,
                    None => Ok(next),
                };
            }
        };
        if let Some(retry) = paused {
            let next = self.write_status(name, &seen, &plan, stage::planned(life)).await?;
            return Ok(if matches!(next, Next::Rest(Outcome::Done)) {
                Next::Rest(Outcome::Until(retry))
            } else {
                next
            });
        }
        let written = match self.writer.patch(&Object::of(&seen.object.metadata), patch).await {
            Ok(written) => written,
            Err(error) => {
                warn!(%name, %error, ?step, "failed to write a NodeMaintenance");
                let now = self.clock.now();
                let failure = Failure::from(error.source.as_ref());
                self.tell(|state| {
                    state.maintenance_writes.failed(name.clone(), failure, now, fastrand::f64())
                });
                return Ok(Next::Again);
            }
        };
        self.state().maintenance_writes.succeeded(name);
        if life.deleting && step == Some(Step::RemoveFinalizer) && matches!(written, Written::Done(_)) {
            // With the last finalizer it is gone; if somebody else has one, the watch will tell.
            return Ok(Next::Rest(Outcome::Done));
        }
        Ok(self.take(written))
    }

    /// Deletes a maintenance whose time has come.
    async fn expire(&self, seen: &MaintenanceSeen, when: Timestamp) -> Result<Next, RequestError> {
        if self.clock.now() < when {
            return Ok(Next::Rest(Outcome::Until(when)));
        }
        let object = Object::of(&seen.object.metadata);
        let written = self.writer.delete::<NodeMaintenance>(&object).await?;
        // The watch tells that it is gone, or what is new about it.
        Ok(Next::Rest(if matches!(written, Written::Outdated) { Outcome::Failed } else { Outcome::Done }))
    }

    async fn begin(&self, seen: &MaintenanceSeen, stage: Stage) -> Result<Next, RequestError> {
        let old = seen.object.status.clone().unwrap_or_default();
        let new = status::begun(&old, stage, self.clock.now());
        let written = api::write_status(&self.writer, &seen.object, json!(new)).await?;
        if matches!(written, Written::Done(_)) {
            for notice in status::notices(&old, &new) {
                self.events.publish(events::of(&seen.object, notice));
            }
        }
        Ok(self.take(written))
    }

    /// Says in its status that a maintenance is not followed, if at least the object can be read.
    async fn tell_not_followed(
        &self,
        object: Option<Arc<NodeMaintenance>>,
        why: &str,
    ) -> Result<Next, RequestError> {
        let Some(object) = object else { return Ok(Next::Rest(Outcome::Done)) };
        let old = object.status.clone().unwrap_or_default();
        let new = status::not_followed(&old, object.metadata.generation, why, self.clock.now());
        if new != old {
            // What comes of it, the watch will tell.
            api::write_status(&self.writer, &object, json!(new)).await?;
        }
        Ok(Next::Rest(Outcome::Done))
    }

    async fn write_status(
        &self,
        name: &Arc<str>,
        seen: &MaintenanceSeen,
        plan: &MaintenancePlan,
        stage: Stage,
    ) -> Result<Next, RequestError> {
        let (now, none) = (self.clock.now(), NodeMaintenanceStatus::default());
        let old = seen.object.status.as_ref().unwrap_or(&none);
        let generation = seen.object.metadata.generation;
        let new = status::status(status::Context { old, generation, stage, now }, plan);
        if new == *old {
            return Ok(Next::Rest(Outcome::Done));
        }
        let seldom = if status::differs_in_words_alone(old, &new) { WORDS } else { 1 };
        let allowed = self.state().maintenance_writes.ask(name.clone(), seldom, now);
        if let Err(when) = allowed {
            return Ok(Next::Rest(Outcome::Until(when)));
        }
        let written = api::write_status(&self.writer, &seen.object, json!(new)).await?;
        if matches!(written, Written::Done(_)) {
            self.metrics.status_written(old, &new, now);
            let forwarded = {
                let mut known = self.state();
                status::fast_forwarded(plan, known.forwarded.entry(name.clone()).or_default())
            };
            for notice in status::notices(old, &new).into_iter().chain(forwarded) {
                self.events.publish(events::of(&seen.object, notice));
            }
        }
        Ok(self.take(written))
    }

    /// Takes in what the API server answered to a write.
    fn take(&self, written: Written<api::Answer>) -> Next {
        match written {
            Written::Done(DeserializeGuard(Ok(maintenance))) => {
                self.tell(|state| state.refresh_maintenance(maintenance));
                Next::Again
            }
            // The watch will tell.
            Written::Done(_) | Written::Gone => Next::Rest(Outcome::Done),
            Written::Outdated => Next::Rest(Outcome::Failed),
        }
    }
}

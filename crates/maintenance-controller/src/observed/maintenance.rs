//! A NodeMaintenance, as observed, with its parsed selector and plan.

use std::sync::Arc;

use haulout_api_types::names::COMPLETION_FINALIZER;
use haulout_api_types::node_maintenance::{DrainStatus, Stage, StageStatus};
use haulout_api_types::selector::{NodeMatcher, SelectorError};
use haulout_api_types::{NodeMaintenance, bounded};
use haulout_drain_planner::facts::{MAX_REASON, MaintenanceFacts};
use haulout_drain_planner::plan::{Plan, ServedPodTypes};
use jiff::{SignedDuration, Timestamp};

use super::Version;
use crate::stage::{self, Lifecycle};

/// A NodeMaintenance, as last observed.
#[derive(Clone, Debug)]
pub struct ObservedMaintenance {
    /// The version of this state.
    pub version: Version,
    /// The object.
    pub object: Arc<NodeMaintenance>,
    nodes: NodeMatcher,
    plan: Arc<Plan>,
}

impl ObservedMaintenance {
    /// Parses selector and plan.
    pub fn new(object: NodeMaintenance, served: ServedPodTypes) -> Result<Self, SelectorError> {
        let nodes = NodeMatcher::new(&object.spec.node_selector)
            .map_err(|error| SelectorError { path: format!("spec.nodeSelector.{}", error.path), ..error })?;
        let plan = Arc::new(Plan::parse(&object.spec.drain_plan, served)?);
        Ok(Self { version: Version::of(&object.metadata), object: Arc::new(object), nodes, plan })
    }

    /// What decides about its lifecycle. `nodes_unreleased` is the planner's count.
    pub fn lifecycle(&self, nodes_unreleased: u32) -> Lifecycle<'_> {
        let metadata = &self.object.metadata;
        Lifecycle {
            stage: self.object.spec.stage,
            deleting: metadata.deletion_timestamp.is_some(),
            has_finalizer: metadata.finalizers.iter().flatten().any(|f| f == COMPLETION_FINALIZER),
            started_stages: self.started_stages(),
            nodes_unreleased,
        }
    }

    /// The stages that have started.
    pub fn started_stages(&self) -> &[StageStatus] {
        self.object.status.as_ref().map(|status| status.stage_statuses.as_slice()).unwrap_or_default()
    }

    /// Its finalizers, with or without ours.
    pub fn finalizers_with_ours(&self, ours: bool) -> Vec<String> {
        let known = self.object.metadata.finalizers.iter().flatten();
        let others = known.filter(|known| *known != COMPLETION_FINALIZER).cloned();
        others.chain(ours.then(|| COMPLETION_FINALIZER.to_owned())).collect()
    }

    /// The planner's input.
    pub fn facts(&self, name: &Arc<str>) -> MaintenanceFacts {
        let spec = &self.object.spec;
        let none = DrainStatus::default();
        let status = self.object.status.as_ref();
        let drain = status.and_then(|status| status.drain_status.as_ref()).unwrap_or(&none);
        let number = |pods: i32| pods.try_into().unwrap_or_default();
        let drain_started = self.started_stages().iter().find(|started| started.name == Stage::Drain);
        let lifecycle = self.lifecycle(0);
        MaintenanceFacts {
            name: name.clone(),
            uid: (*self.version.uid).into(),
            created: self.object.metadata.creation_timestamp.as_ref().map_or(Timestamp::MIN, |time| time.0),
            stage: stage::active_stage(lifecycle),
            uncordons: stage::uncordons(lifecycle),
            reason: bounded::line(&spec.reason, MAX_REASON).into(),
            holds_autoscalers: spec.hold_autoscalers.unwrap_or(true),
            nodes: self.nodes.clone(),
            volume_timeout: spec.volume_detach_timeout_seconds.map(|s| SignedDuration::from_secs(s.into())),
            plan: self.plan.clone(),
            evacuated: number(drain.pods_evacuated),
            remaining_in_status: number(drain.pods_pending_evacuation.saturating_add(drain.pods_evacuating)),
            staying_in_status: number(drain.pods_unsupported.saturating_add(drain.pods_skipped)),
            drained_nodes: drain.drained_nodes.iter().map(|name| name.as_str().into()).collect(),
            drained_and_deleted: number(drain.nodes_drained_and_deleted),
            drain_started: drain_started.map(|started| started.start_timestamp.0),
        }
    }
}

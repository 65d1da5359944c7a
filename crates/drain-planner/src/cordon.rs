//! Decides what a maintenance changes on a node and restores afterwards: the cordon, annotations and conditions. Previous
//! values are stored in an annotation of the node, so that any replica can restore them.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::names::{
    BEFORE_MAINTENANCE_ANNOTATION, DO_NOT_DISRUPT_ANNOTATION, EXCLUDE_VOLUME_DETACH_ANNOTATION,
    MAINTENANCE_STATUS_ANNOTATION, SCALE_DOWN_DISABLED_ANNOTATION, condition, reason,
};
use haulout_api_types::node_maintenance::{
    BeforeMaintenance, CordonReverts, MaintenanceOnNode, MaintenanceStatus, VolumeWait,
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::NodeCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Map, Value, json};

use crate::backoff;
use crate::report::{NodePlan, NodeState};

/// The annotations that keep autoscalers from removing a node under maintenance.
const AUTOSCALER_ANNOTATIONS: [&str; 2] = [SCALE_DOWN_DISABLED_ANNOTATION, DO_NOT_DISRUPT_ANNOTATION];
/// The conditions that we write.
const CONDITIONS: [&str; 3] =
    [condition::MAINTENANCE_IN_PROGRESS, condition::DRAIN_IN_PROGRESS, condition::DRAINED];

/// Maximum number of maintenances in a node's annotation. All annotations of a node share a limit of 256 KiB.
const MAX_LISTED: usize = 100;

/// The parts of a node that a maintenance changes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeMarkers {
    /// Whether it is unschedulable.
    pub unschedulable: bool,
    /// The annotations that we read or write.
    pub annotations: BTreeMap<String, String>,
    /// The conditions that we write.
    pub conditions: Vec<NodeCondition>,
}

impl NodeMarkers {
    /// Selects the markers from all annotations and conditions of a node.
    pub fn new(
        unschedulable: bool,
        annotations: impl IntoIterator<Item = (String, String)>,
        conditions: impl IntoIterator<Item = NodeCondition>,
    ) -> Self {
        let known = |key: &str| {
            AUTOSCALER_ANNOTATIONS.contains(&key)
                || [
                    BEFORE_MAINTENANCE_ANNOTATION,
                    MAINTENANCE_STATUS_ANNOTATION,
                    EXCLUDE_VOLUME_DETACH_ANNOTATION,
                ]
                .contains(&key)
        };
        Self {
            unschedulable,
            annotations: annotations.into_iter().filter(|(key, _)| known(key)).collect(),
            conditions: conditions.into_iter().filter(|c| CONDITIONS.contains(&c.type_.as_str())).collect(),
        }
    }

    /// Whether a maintenance has changed anything on the node.
    pub fn has_markers(&self) -> bool {
        self.annotations.contains_key(BEFORE_MAINTENANCE_ANNOTATION) || self.has_public_markers()
    }

    /// Whether it has the markers that other programs read.
    fn has_public_markers(&self) -> bool {
        self.annotations.contains_key(MAINTENANCE_STATUS_ANNOTATION) || !self.conditions.is_empty()
    }

    /// The content of the annotation `maintenance-status`, if it can be parsed.
    pub fn status(&self) -> Option<MaintenanceStatus> {
        serde_json::from_str(self.annotations.get(MAINTENANCE_STATUS_ANNOTATION)?).ok()
    }

    /// Whether an annotation says that drains do not wait for volumes.
    pub fn ignores_volumes(&self) -> bool {
        self.annotations.get(EXCLUDE_VOLUME_DETACH_ANNOTATION).is_some_and(|value| value != "false")
    }

    /// Since when the node is under maintenance.
    pub fn held_since(&self) -> Option<Timestamp> {
        let is = |known: &&NodeCondition| {
            known.type_ == condition::MAINTENANCE_IN_PROGRESS && known.status == "True"
        };
        self.conditions.iter().find(is)?.last_transition_time.as_ref().map(|time| time.0)
    }

    /// When the cordon may be restored, if somebody has uncordoned the node more than once.
    pub fn cordon_due(&self) -> Option<Timestamp> {
        let reverts = self.before().filter(|_| !self.unschedulable)?.reverts?;
        Some(reverts.last.0.saturating_add(backoff::delay(reverts.times)).unwrap_or(Timestamp::MAX))
    }

    /// Whether somebody has uncordoned the node during the maintenance.
    pub fn was_uncordoned(&self) -> bool {
        self.before().is_some_and(|before| !self.unschedulable || before.reverts.is_some())
    }

    /// The state before the maintenance. An annotation that cannot be parsed counts as empty.
    fn before(&self) -> Option<BeforeMaintenance> {
        let text = self.annotations.get(BEFORE_MAINTENANCE_ANNOTATION)?;
        Some(serde_json::from_str(text).unwrap_or_default())
    }
}

/// The drain targets in a node's annotation; none if they cannot be parsed.
pub fn reached(status: &MaintenanceStatus) -> DrainTargets {
    DrainTargets::read(&status.drain_targets).unwrap_or_default()
}

/// A change of a node's cordon that is reported as an event of its maintenances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CordonEvent {
    /// Somebody uncordons the node repeatedly, and it was cordoned again.
    Reverted,
    /// The node stays cordoned, because somebody had cordoned it before.
    LeftCordoned,
}

/// Changes to be written to a node. Equal to its default if there are none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeChanges {
    /// The new value of `spec.unschedulable`.
    pub unschedulable: Option<bool>,
    /// Annotations to set; `None` means to remove the annotation.
    pub annotations: BTreeMap<String, Option<String>>,
    /// Conditions to set.
    pub set_conditions: Vec<NodeCondition>,
    /// Conditions to remove.
    pub remove_conditions: Vec<&'static str>,
    /// The event to publish after the write.
    pub event: Option<CordonEvent>,
    /// Whether pods wait for this write: it cordons the node, or adds drain targets to its annotation.
    pub urgent: bool,
    /// When to reconcile the node again, because time alone changes the result.
    pub requeue_at: Option<Timestamp>,
}

impl NodeChanges {
    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.node_patch().is_none() && self.status_patch().is_none()
    }

    /// A hash of the content to be written. Equal changes have equal fingerprints, independent of time.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.unschedulable, &self.annotations, &self.remove_conditions).hash(&mut hasher);
        for set in &self.set_conditions {
            (&set.type_, &set.status, &set.reason, &set.message).hash(&mut hasher);
        }
        hasher.finish()
    }

    fn annotate(&mut self, markers: &NodeMarkers, key: &str, value: String) {
        if markers.annotations.get(key) != Some(&value) {
            self.annotations.insert(key.into(), Some(value));
        }
    }

    /// A JSON merge patch of the node. It is valid only for the observed resourceVersion, because it stores the values to
    /// restore later.
    pub fn node_patch(&self) -> Option<Value> {
        let mut patch = Map::new();
        if !self.annotations.is_empty() {
            patch.insert("metadata".into(), json!({"annotations": self.annotations}));
        }
        if let Some(unschedulable) = self.unschedulable {
            patch.insert("spec".into(), json!({"unschedulable": unschedulable}));
        }
        (!patch.is_empty()).then(|| patch.into())
    }

    /// A strategic merge patch of the node's status.
    pub fn status_patch(&self) -> Option<Value> {
        let set = self.set_conditions.iter().map(|condition| json!(condition));
        let remove = self.remove_conditions.iter().map(|name| json!({"type": name, "$patch": "delete"}));
        let conditions: Vec<Value> = set.chain(remove).collect();
        (!conditions.is_empty()).then(|| json!({"conditions": conditions}))
    }
}

/// Decides what to change on a node. `hold_autoscalers` says whether this installation keeps autoscalers from removing nodes
/// under maintenance.
pub fn decide(markers: &NodeMarkers, plan: &NodePlan, hold_autoscalers: bool, now: Timestamp) -> NodeChanges {
    match () {
        () if !plan.holders.is_empty() => hold(markers, plan, hold_autoscalers, now),
        () if plan.held_back => NodeChanges::default(),
        () => release(markers, plan.uncordon),
    }
}

/// Decides how to restore a node that no maintenance holds anymore.
pub fn restore(markers: &NodeMarkers) -> NodeChanges {
    release(markers, false)
}

fn hold(markers: &NodeMarkers, plan: &NodePlan, hold_autoscalers: bool, now: Timestamp) -> NodeChanges {
    let mut changes = NodeChanges::default();
    let known = markers.before();
    let mut before = known.clone().unwrap_or_else(|| BeforeMaintenance {
        // If only this annotation was lost, the cordon is ours.
        unschedulable: markers.unschedulable && !markers.has_public_markers(),
        ..BeforeMaintenance::default()
    });
    if hold_autoscalers && plan.hold_autoscalers {
        for key in AUTOSCALER_ANNOTATIONS {
            let value = markers.annotations.get(key);
            before.annotations.entry(key.into()).or_insert_with(|| value.cloned());
            changes.annotate(markers, key, "true".into());
        }
    } else if !plan.held_back {
        // An unreadable maintenance might need them.
        restore_annotations(markers, std::mem::take(&mut before.annotations), &mut changes);
    }
    if !markers.unschedulable && known.is_some() {
        revert_uncordon(markers, &mut before, &mut changes, now);
    } else if !markers.unschedulable {
        changes.unschedulable = Some(true);
    }
    changes.urgent = changes.unschedulable.is_some();
    if known.as_ref() != Some(&before) {
        changes.annotate(markers, BEFORE_MAINTENANCE_ANNOTATION, json!(before).to_string());
    }
    let status = markers.status().unwrap_or_default();
    let wait = volume_wait(markers, status.volume_wait.clone(), plan, now, &mut changes);
    // After a crash, the next leader has to know which maintenances hold the node.
    changes.urgent |= status.maintenances != listed(plan);
    if plan.draining {
        let targets = DrainTargets::read(&plan.targets).unwrap_or_default();
        changes.urgent |= !reached(&status).includes(&targets);
    }
    changes.annotate(markers, MAINTENANCE_STATUS_ANNOTATION, status_annotation(status, plan, wait));
    set_conditions(markers, plan, now, &mut changes);
    changes
}

/// Restores a cordon that somebody has removed; if that happens repeatedly, after a growing delay.
fn revert_uncordon(
    markers: &NodeMarkers,
    before: &mut BeforeMaintenance,
    changes: &mut NodeChanges,
    now: Timestamp,
) {
    // A time in the future, after a clock was set back, does not count.
    let recent = before.reverts.as_ref().filter(|reverts| {
        (SignedDuration::ZERO..backoff::RESET_AFTER).contains(&now.duration_since(reverts.last.0))
    });
    let times = recent.map_or(0, |reverts| reverts.times);
    if let Some(due) = markers.cordon_due().filter(|due| times > 0 && now < *due) {
        changes.requeue_at = Some(due);
        return;
    }
    changes.unschedulable = Some(true);
    changes.event = (times > 0).then_some(CordonEvent::Reverted);
    // An earlier cordon by somebody else has ended with the uncordon.
    before.unschedulable = false;
    before.reverts = Some(CordonReverts { times: times.saturating_add(1), last: Time(now) });
}

/// How long the drain has waited for volumes after the pods have left, if the wait has a timeout. It is stored in the node's
/// annotation, so that it survives restarts.
fn volume_wait(
    markers: &NodeMarkers,
    known: Option<VolumeWait>,
    plan: &NodePlan,
    now: Timestamp,
    changes: &mut NodeChanges,
) -> Option<VolumeWait> {
    let timeout = plan.volume_timeout.filter(|_| !markers.ignores_volumes())?;
    if plan.counts.volumes == 0 && plan.counts.volumes_ignored == 0 {
        return None;
    }
    let known = known.filter(|known| known.since.0 <= now);
    let mut wait = known.unwrap_or(VolumeWait { since: Time(now), over: false });
    let end = wait.since.0.saturating_add(timeout).unwrap_or(Timestamp::MAX);
    wait.over = end <= now;
    if !wait.over {
        changes.requeue_at = changes.requeue_at.into_iter().chain([end]).min();
    }
    Some(wait)
}

/// The maintenances in the annotation. If there are too many, it lists none, and any unreadable maintenance may hold the node.
fn listed(plan: &NodePlan) -> Option<Vec<MaintenanceOnNode>> {
    (plan.maintenances.len() <= MAX_LISTED).then(|| plan.maintenances.clone())
}

fn status_annotation(known: MaintenanceStatus, plan: &NodePlan, volume_wait: Option<VolumeWait>) -> String {
    let mut status = MaintenanceStatus { maintenances: listed(plan), volume_wait, ..Default::default() };
    if plan.draining {
        status.drain_targets.clone_from(&plan.targets);
        status.drain_message.clone_from(&plan.message);
    } else if plan.held_back {
        // The drain belongs to an unreadable maintenance.
        status.drain_targets = known.drain_targets;
        status.drain_message = known.drain_message;
    }
    json!(status).to_string()
}

fn set_conditions(markers: &NodeMarkers, plan: &NodePlan, now: Timestamp, changes: &mut NodeChanges) {
    let drained = plan.state == NodeState::Drained;
    let held = format!("Under maintenance by {}", plan.held_by());
    let mut wanted = vec![(
        condition::MAINTENANCE_IN_PROGRESS,
        true,
        if plan.draining { "Drain" } else { "Cordon" },
        held.as_str(),
    )];
    if plan.draining {
        let (why, text) = match plan.state {
            NodeState::Drained => (reason::COMPLETE, "Every pod that has to leave has left"),
            NodeState::Cordoning => (reason::CORDONING, "The node is not cordoned yet"),
            _ => (reason::EVACUATING, "Pods are being evacuated"),
        };
        wanted.push((condition::DRAIN_IN_PROGRESS, !drained, why, text));
        wanted.push((condition::DRAINED, drained, why, text));
    }
    for (type_, status, reason, message) in &wanted {
        let status = if *status { "True" } else { "False" };
        let known = markers.conditions.iter().find(|known| known.type_ == *type_);
        let same = known.is_some_and(|known| {
            known.status == status
                && known.reason.as_deref() == Some(reason)
                && known.message.as_deref() == Some(message)
        });
        if !same {
            let since = known
                .filter(|known| known.status == status)
                .and_then(|known| known.last_transition_time.clone());
            changes.set_conditions.push(NodeCondition {
                type_: (*type_).into(),
                status: status.into(),
                reason: Some((*reason).into()),
                message: Some((*message).into()),
                last_transition_time: Some(since.unwrap_or(Time(now))),
                last_heartbeat_time: Some(Time(now)),
            });
        }
    }
    let unwanted = |name: &&str| {
        !wanted.iter().any(|(type_, ..)| type_ == name)
            && markers.conditions.iter().any(|c| c.type_ == **name)
    };
    changes.remove_conditions = CONDITIONS.into_iter().filter(unwanted).collect();
}

/// Restores the annotations for autoscalers.
fn restore_annotations(
    markers: &NodeMarkers,
    before: BTreeMap<String, Option<String>>,
    changes: &mut NodeChanges,
) {
    for (key, earlier) in before {
        let now = markers.annotations.get(&key);
        // A value that somebody has changed since stays. Only the annotations for autoscalers are ours.
        let ours = AUTOSCALER_ANNOTATIONS.contains(&key.as_str()) && now.is_none_or(|now| now == "true");
        if ours && earlier.as_ref() != now {
            changes.annotations.insert(key, earlier);
        }
    }
}

fn release(markers: &NodeMarkers, uncordon: bool) -> NodeChanges {
    let mut changes = NodeChanges::default();
    let before = markers.before();
    let cordoned_by_others = match &before {
        // Without our markers, the cordon is not ours.
        None => !markers.has_public_markers(),
        Some(before) => before.unschedulable,
    };
    // A release never cordons: if somebody has removed the cordon meanwhile, the node stays schedulable.
    if markers.unschedulable && (uncordon || !cordoned_by_others) {
        changes.unschedulable = Some(false);
        changes.urgent = true;
    }
    if let Some(before) = before {
        if markers.unschedulable && changes.unschedulable.is_none() {
            changes.event = Some(CordonEvent::LeftCordoned);
        }
        restore_annotations(markers, before.annotations, &mut changes);
    }
    for key in [BEFORE_MAINTENANCE_ANNOTATION, MAINTENANCE_STATUS_ANNOTATION] {
        if markers.annotations.contains_key(key) {
            changes.annotations.insert(key.into(), None);
        }
    }
    let ours = |name: &&str| markers.conditions.iter().any(|known| known.type_ == **name);
    changes.remove_conditions = CONDITIONS.into_iter().filter(ours).collect();
    changes
}

#[cfg(test)]
mod tests;

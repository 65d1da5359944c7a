//! What a maintenance changes on a node and puts back afterwards: the cordon, annotations and conditions. Whatever
//! was there before is kept in an annotation of the node, so that any replica can put it back.

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

use crate::pause;
use crate::report::{NodePlan, NodeState};

/// The annotations that keep autoscalers away from a node under maintenance.
const PROTECTIVE: [&str; 2] = [SCALE_DOWN_DISABLED_ANNOTATION, DO_NOT_DISRUPT_ANNOTATION];
/// The conditions that are ours.
const CONDITIONS: [&str; 3] =
    [condition::MAINTENANCE_IN_PROGRESS, condition::DRAIN_IN_PROGRESS, condition::DRAINED];

/// As many maintenances as this are named on a node. All annotations of a node together may have 256 KiB.
const MAX_NAMED: usize = 100;

/// What a node shows of a maintenance.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeMarks {
    /// Whether it is unschedulable.
    pub unschedulable: bool,
    /// Its annotations, as far as they are of interest here.
    pub annotations: BTreeMap<String, String>,
    /// Its conditions, as far as they are ours.
    pub conditions: Vec<NodeCondition>,
}

impl NodeMarks {
    /// Picks what is of interest from all annotations and conditions of a node.
    pub fn new(
        unschedulable: bool,
        annotations: impl IntoIterator<Item = (String, String)>,
        conditions: impl IntoIterator<Item = NodeCondition>,
    ) -> Self {
        let known = |key: &str| {
            PROTECTIVE.contains(&key)
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

    /// Whether a maintenance has left anything here.
    pub fn is_marked(&self) -> bool {
        self.annotations.contains_key(BEFORE_MAINTENANCE_ANNOTATION) || self.is_labelled()
    }

    /// The marks that are there for others to see.
    fn is_labelled(&self) -> bool {
        self.annotations.contains_key(MAINTENANCE_STATUS_ANNOTATION) || !self.conditions.is_empty()
    }

    /// What the annotation says of drain targets and message, if it can be read.
    pub fn status(&self) -> Option<MaintenanceStatus> {
        serde_json::from_str(self.annotations.get(MAINTENANCE_STATUS_ANNOTATION)?).ok()
    }

    /// Whether its admin does not want volumes to be waited for.
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

    /// When the cordon may be put back that somebody has taken off more than once.
    pub fn cordon_due(&self) -> Option<Timestamp> {
        let reverts = self.before().filter(|_| !self.unschedulable)?.reverts?;
        Some(reverts.last.0.saturating_add(pause::after(reverts.times)).unwrap_or(Timestamp::MAX))
    }

    /// Whether somebody has uncordoned the node during the maintenance.
    pub fn was_uncordoned(&self) -> bool {
        self.before().is_some_and(|before| !self.unschedulable || before.reverts.is_some())
    }

    /// How the node was before; somebody's scribbling in the annotation counts as nothing.
    fn before(&self) -> Option<BeforeMaintenance> {
        let text = self.annotations.get(BEFORE_MAINTENANCE_ANNOTATION)?;
        Some(serde_json::from_str(text).unwrap_or_default())
    }
}

/// The targets that a node says it has reached; what cannot be read is reached again.
pub fn reached(status: &MaintenanceStatus) -> DrainTargets {
    DrainTargets::read(&status.drain_targets).unwrap_or_default()
}

/// Something about a node that its maintenances should tell as an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CordonNotice {
    /// Somebody makes it schedulable again and again, and that was reverted.
    Reverted,
    /// It stays cordoned, because somebody had cordoned it before.
    LeftCordoned,
}

/// What is to be changed on a node. Equal to its default when nothing is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeChanges {
    /// The new value of `spec.unschedulable`.
    pub unschedulable: Option<bool>,
    /// Annotations to set, and to remove where there is `None`.
    pub annotations: BTreeMap<String, Option<String>>,
    /// Conditions to set.
    pub set_conditions: Vec<NodeCondition>,
    /// Conditions to remove.
    pub remove_conditions: Vec<&'static str>,
    /// What is to be told.
    pub notice: Option<CordonNotice>,
    /// Whether pods wait for this to be written: it cordons the node, or announces that they are to leave.
    pub urgent: bool,
    /// When to look again, because time alone changes something.
    pub again: Option<Timestamp>,
}

impl NodeChanges {
    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.node_patch().is_none() && self.status_patch().is_none()
    }

    /// Stands for what is written: equal for equal changes, whenever they are decided.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.unschedulable, &self.annotations, &self.remove_conditions).hash(&mut hasher);
        for set in &self.set_conditions {
            (&set.type_, &set.status, &set.reason, &set.message).hash(&mut hasher);
        }
        hasher.finish()
    }

    fn annotate(&mut self, marks: &NodeMarks, key: &str, value: String) {
        if marks.annotations.get(key) != Some(&value) {
            self.annotations.insert(key.into(), Some(value));
        }
    }

    /// A JSON merge patch of the node. What is put back later depends on how the node was when this was decided, so it is
    /// for that state alone.
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

/// What is to be changed on a node. `protect` says whether this installation keeps autoscalers away from nodes whose
/// maintenances want that.
pub fn decide(marks: &NodeMarks, plan: &NodePlan, protect: bool, now: Timestamp) -> NodeChanges {
    match () {
        () if !plan.holders.is_empty() => hold(marks, plan, protect, now),
        () if plan.held_back => NodeChanges::default(),
        () => release(marks, plan.uncordon),
    }
}

/// What puts a node back that no maintenance holds any more, whoever is left to say so.
pub fn restore(marks: &NodeMarks) -> NodeChanges {
    release(marks, false)
}

fn hold(marks: &NodeMarks, plan: &NodePlan, protect: bool, now: Timestamp) -> NodeChanges {
    let mut changes = NodeChanges::default();
    let known = marks.before();
    let mut before = known.clone().unwrap_or_else(|| BeforeMaintenance {
        // If only this one annotation has been lost, the cordon is ours.
        unschedulable: marks.unschedulable && !marks.is_labelled(),
        ..BeforeMaintenance::default()
    });
    if protect && plan.hold_autoscalers {
        for key in PROTECTIVE {
            let value = marks.annotations.get(key);
            before.annotations.entry(key.into()).or_insert_with(|| value.cloned());
            changes.annotate(marks, key, "true".into());
        }
    } else if !plan.held_back {
        // A maintenance that cannot be followed might want them to stay.
        put_annotations_back(marks, std::mem::take(&mut before.annotations), &mut changes);
    }
    if !marks.unschedulable && known.is_some() {
        revert_uncordon(marks, &mut before, &mut changes, now);
    } else if !marks.unschedulable {
        changes.unschedulable = Some(true);
    }
    changes.urgent = changes.unschedulable.is_some();
    if known.as_ref() != Some(&before) {
        changes.annotate(marks, BEFORE_MAINTENANCE_ANNOTATION, json!(before).to_string());
    }
    let status = marks.status().unwrap_or_default();
    let wait = volume_wait(marks, status.volume_wait.clone(), plan, now, &mut changes);
    // Whoever comes after a crash has to know whose the node is, and whose its targets are.
    changes.urgent |= status.maintenances != named(plan);
    if plan.draining {
        let targets = DrainTargets::read(&plan.targets).unwrap_or_default();
        changes.urgent |= !reached(&status).includes(&targets);
    }
    changes.annotate(marks, MAINTENANCE_STATUS_ANNOTATION, status_annotation(status, plan, wait));
    set_conditions(marks, plan, now, &mut changes);
    changes
}

/// Puts back the cordon that somebody has taken off; if that happens again and again, after a growing pause.
fn revert_uncordon(
    marks: &NodeMarks,
    before: &mut BeforeMaintenance,
    changes: &mut NodeChanges,
    now: Timestamp,
) {
    // A clock that was put back must not hold it up for as long as it was wrong.
    let lately = before
        .reverts
        .as_ref()
        .filter(|reverts| (SignedDuration::ZERO..pause::QUIET).contains(&now.duration_since(reverts.last.0)));
    let times = lately.map_or(0, |reverts| reverts.times);
    if let Some(due) = marks.cordon_due().filter(|due| times > 0 && now < *due) {
        changes.again = Some(due);
        return;
    }
    changes.unschedulable = Some(true);
    changes.notice = (times > 0).then_some(CordonNotice::Reverted);
    // Whoever had cordoned it does not want that any longer.
    before.unschedulable = false;
    before.reverts = Some(CordonReverts { times: times.saturating_add(1), last: Time(now) });
}

/// How long volumes have been waited for whose pods have left, if that is limited. The node keeps it, so that a restart
/// does not begin anew.
fn volume_wait(
    marks: &NodeMarks,
    known: Option<VolumeWait>,
    plan: &NodePlan,
    now: Timestamp,
    changes: &mut NodeChanges,
) -> Option<VolumeWait> {
    let most = plan.volume_timeout.filter(|_| !marks.ignores_volumes())?;
    if plan.counts.volumes == 0 && plan.counts.volumes_ignored == 0 {
        return None;
    }
    let known = known.filter(|known| known.since.0 <= now);
    let mut wait = known.unwrap_or(VolumeWait { since: Time(now), over: false });
    let end = wait.since.0.saturating_add(most).unwrap_or(Timestamp::MAX);
    wait.over = end <= now;
    if !wait.over {
        changes.again = changes.again.into_iter().chain([end]).min();
    }
    Some(wait)
}

/// The maintenances that the annotation names. Where they are too many it names none, and then any that cannot be read may
/// hold the node.
fn named(plan: &NodePlan) -> Option<Vec<MaintenanceOnNode>> {
    (plan.maintenances.len() <= MAX_NAMED).then(|| plan.maintenances.clone())
}

fn status_annotation(known: MaintenanceStatus, plan: &NodePlan, volume_wait: Option<VolumeWait>) -> String {
    let mut status = MaintenanceStatus { maintenances: named(plan), volume_wait, ..Default::default() };
    if plan.draining {
        status.drain_targets.clone_from(&plan.targets);
        status.drain_message.clone_from(&plan.message);
    } else if plan.held_back {
        // Its drain is that of a maintenance that cannot be followed.
        status.drain_targets = known.drain_targets;
        status.drain_message = known.drain_message;
    }
    json!(status).to_string()
}

fn set_conditions(marks: &NodeMarks, plan: &NodePlan, now: Timestamp, changes: &mut NodeChanges) {
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
        let known = marks.conditions.iter().find(|known| known.type_ == *type_);
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
        !wanted.iter().any(|(type_, ..)| type_ == name) && marks.conditions.iter().any(|c| c.type_ == **name)
    };
    changes.remove_conditions = CONDITIONS.into_iter().filter(unwanted).collect();
}

/// Lets autoscalers have the node again as far as they had it before.
fn put_annotations_back(
    marks: &NodeMarks,
    before: BTreeMap<String, Option<String>>,
    changes: &mut NodeChanges,
) {
    for (key, earlier) in before {
        let now = marks.annotations.get(&key);
        // What somebody has changed since is no longer ours to put back, and no scribbling makes others so.
        let ours = PROTECTIVE.contains(&key.as_str()) && now.is_none_or(|now| now == "true");
        if ours && earlier.as_ref() != now {
            changes.annotations.insert(key, earlier);
        }
    }
}

fn release(marks: &NodeMarks, uncordon: bool) -> NodeChanges {
    let mut changes = NodeChanges::default();
    let before = marks.before();
    let somebody_elses = match &before {
        // Without our marks a cordon is somebody else's.
        None => !marks.is_labelled(),
        Some(before) => before.unschedulable,
    };
    // A cordon is never put back: whoever took it off meanwhile wants the node to be schedulable.
    if marks.unschedulable && (uncordon || !somebody_elses) {
        changes.unschedulable = Some(false);
        changes.urgent = true;
    }
    if let Some(before) = before {
        if marks.unschedulable && changes.unschedulable.is_none() {
            changes.notice = Some(CordonNotice::LeftCordoned);
        }
        put_annotations_back(marks, before.annotations, &mut changes);
    }
    for key in [BEFORE_MAINTENANCE_ANNOTATION, MAINTENANCE_STATUS_ANNOTATION] {
        if marks.annotations.contains_key(key) {
            changes.annotations.insert(key.into(), None);
        }
    }
    let ours = |name: &&str| marks.conditions.iter().any(|known| known.type_ == **name);
    changes.remove_conditions = CONDITIONS.into_iter().filter(ours).collect();
    changes
}

#[cfg(test)]
mod tests;

//! The status of a maintenance, and the events that follow from its changes.

use std::collections::BTreeSet;
use std::sync::Arc;

use haulout_api_types::names::{EXCLUDE_VOLUME_DETACH_ANNOTATION, condition, event, reason};
use haulout_api_types::node_maintenance::{
    Blocker, DrainStatus, MAX_BLOCKERS, MAX_WAITING_FOR, NodeMaintenanceStatus, Stage, StageStatus,
    WaitingFor,
};
use haulout_api_types::{bounded, conditions};
use haulout_drain_planner::cordon::CordonEvent;
use haulout_drain_planner::facts::Turn;
use haulout_drain_planner::report::DRAINED;
use haulout_drain_planner::{MaintenancePlan, WaitReason, WaitingPod, list};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// The message of a drain that was completed before it had finished.
const NOT_DRAINED: &str = "Completed before the drain had finished";

/// The input of a status besides the plan.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The current status.
    pub old: &'a NodeMaintenanceStatus,
    /// The generation of the spec.
    pub generation: Option<i64>,
    /// The active stage. The status records its start if it is new.
    pub stage: Stage,
    /// The current time.
    pub now: Timestamp,
}

/// The desired status. Equal to the current one if there is nothing to write.
pub fn status(context: Context<'_>, plan: &MaintenancePlan) -> NodeMaintenanceStatus {
    let Context { old, generation, stage, now } = context;
    let mut next = old.clone();
    next.observed_generation = generation;
    record_start(&mut next.stage_statuses, stage, now);
    next.nodes_selected = number(plan.nodes_selected);
    next.drain_status = match stage {
        Stage::Idle | Stage::Cordon => None,
        Stage::Drain => {
            let none = DrainStatus::default();
            Some(drain_status(plan, old.drain_status.as_ref().unwrap_or(&none), now))
        }
        Stage::Complete => old.drain_status.clone().map(|drain| completed(drain, plan, now)),
    };
    let had_nodes = had_nodes(old) || plan.nodes_selected + plan.nodes_drained_and_deleted > 0;
    let mut all = conditions_in(stage, plan, had_nodes);
    if stage != Stage::Drain {
        // Once set, the condition stays, so that clients can wait until it is False.
        let known = next.conditions.iter().any(|known| known.type_ == condition::BLOCKED);
        let unblocked =
            || desired(condition::BLOCKED, false, reason::NOT_BLOCKED, "No drain is in progress".into());
        all.extend(failed_writes(plan).or_else(|| known.then(unblocked)));
    }
    let was_drained = next.conditions.iter().find(|known| known.type_ == condition::DRAINED);
    if let Some(was_drained) = was_drained.filter(|_| stage == Stage::Complete) {
        // The result of the drain stays.
        let drained = was_drained.status == "True";
        let (reason, message) = if drained {
            (was_drained.reason.as_str(), was_drained.message.clone())
        } else {
            (reason::RELEASED, NOT_DRAINED.into())
        };
        all.push(desired(condition::DRAINED, drained, reason, message));
    }
    for type_ in [condition::CORDONED, condition::DRAINED, condition::BLOCKED] {
        match all.iter().find(|desired| desired.type_ == type_) {
            Some(desired) => set(&mut next.conditions, desired, generation, now),
            None => next.conditions.retain(|known| known.type_ != type_),
        }
    }
    next
}

/// Whether only messages of evacuators differ, which may change frequently.
pub fn only_messages_differ(old: &NodeMaintenanceStatus, new: &NodeMaintenanceStatus) -> bool {
    let without_messages = |status: &NodeMaintenanceStatus| {
        let mut status = status.clone();
        for waiting in status.drain_status.iter_mut().flat_map(|drain| &mut drain.waiting_for) {
            waiting.message.clear();
        }
        status
    };
    without_messages(old) == without_messages(new)
}

/// The status of a maintenance whose stage has just started. Progress is only known later.
pub fn with_stage_started(
    old: &NodeMaintenanceStatus,
    stage: Stage,
    now: Timestamp,
) -> NodeMaintenanceStatus {
    let mut next = old.clone();
    record_start(&mut next.stage_statuses, stage, now);
    next
}

/// Records the start of a stage. Drain includes Cordon.
fn record_start(started: &mut Vec<StageStatus>, stage: Stage, now: Timestamp) {
    let cordons = (stage == Stage::Drain).then_some(Stage::Cordon);
    for name in cordons.into_iter().chain([stage]) {
        if !started.iter().any(|known| known.name == name) {
            started.push(StageStatus { name, start_timestamp: Time(now) });
        }
    }
}

/// The drain status after completion. It keeps its numbers; the only blockers are rejected writes.
fn completed(drain: DrainStatus, plan: &MaintenancePlan, now: Timestamp) -> DrainStatus {
    let message = if drain.drain_message == DRAINED { DRAINED } else { NOT_DRAINED };
    DrainStatus {
        drain_message: message.into(),
        pods_evacuated: drain.pods_evacuated.max(number(plan.evacuated)),
        blockers: blockers(plan, &drain.blockers, now),
        waiting_for: Vec::new(),
        ..drain
    }
}

/// The message of an unreadable object. Most of a NodeMaintenance is immutable, so users can rarely correct it.
pub fn unreadable_message(kind: &str, error: &str) -> String {
    let fix = match kind {
        "NodeMaintenance" => "upgrade the controller, or delete the NodeMaintenance and remove its finalizer",
        _ => "correct or delete it, or upgrade the controller",
    };
    format!("The {kind} is unreadable: {error}; {fix}")
}

/// The status of an unreadable maintenance.
pub fn unreadable(
    old: &NodeMaintenanceStatus,
    generation: Option<i64>,
    error: &str,
    now: Timestamp,
) -> NodeMaintenanceStatus {
    let mut next = old.clone();
    let message = unreadable_message("NodeMaintenance", error);
    let blocked = desired(condition::BLOCKED, true, reason::UNREADABLE, message);
    set(&mut next.conditions, &blocked, generation, now);
    next
}

fn drain_status(plan: &MaintenancePlan, known: &DrainStatus, now: Timestamp) -> DrainStatus {
    let counts = &plan.counts;
    DrainStatus {
        reached_drain_targets: plan.reached.clone(),
        drain_message: bounded::message(plan.message.clone()),
        pods_left: number(counts.pending.saturating_add(counts.evacuating)),
        pods_pending_evacuation: number(counts.pending),
        pods_evacuating: number(counts.evacuating),
        pods_evacuated: number(plan.evacuated),
        pods_unsupported: number(counts.unsupported),
        pods_skipped: number(counts.skipped),
        nodes_selected: number(plan.nodes_selected),
        nodes_drained: number(plan.nodes_drained),
        nodes_drained_and_deleted: number(plan.nodes_drained_and_deleted),
        drained_nodes: plan.drained_nodes.iter().map(ToString::to_string).collect(),
        blockers: blockers(plan, &known.blockers, now),
        waiting_for: waiting_for(plan, &known.waiting_for, now),
    }
}

fn number(count: impl TryInto<i32>) -> i32 {
    count.try_into().unwrap_or(i32::MAX)
}

/// The first blockers, sorted by node, namespace, pod and reason. Known blockers keep their start time.
fn blockers(plan: &MaintenancePlan, known: &[Blocker], now: Timestamp) -> Vec<Blocker> {
    let mut all: Vec<Blocker> = plan
        .blockers
        .iter()
        .map(|(node, found)| {
            let mut blocker = Blocker {
                node: node.as_ref().map(ToString::to_string),
                namespace: found.pod.as_ref().map(|pod| pod.namespace.to_string()),
                pod: found.pod.as_ref().map(|pod| pod.name.to_string()),
                reason: found.reason.to_string(),
                message: bounded::text(&found.message),
                since: Time(now),
            };
            let earlier = known.iter().find(|earlier| key(earlier) == key(&blocker));
            blocker.since =
                found.since.map(Time).or(earlier.map(|earlier| earlier.since.clone())).unwrap_or(Time(now));
            blocker
        })
        .collect();
    all.sort_by(|a, b| key(a).cmp(&key(b)));
    all.truncate(MAX_BLOCKERS);
    all
}

fn key(blocker: &Blocker) -> (Option<&str>, Option<&str>, Option<&str>, &str) {
    (blocker.node.as_deref(), blocker.namespace.as_deref(), blocker.pod.as_deref(), &blocker.reason)
}

/// The first pods that are leaving. Known pods keep their start time.
fn waiting_for(plan: &MaintenancePlan, known: &[WaitingFor], now: Timestamp) -> Vec<WaitingFor> {
    let one = |(node, found): &(Arc<str>, WaitingPod)| {
        let turn = found.turn.as_deref();
        let until = turn.map(|turn| turn.until).or(found.deadline);
        let mut one = WaitingFor {
            node: node.to_string(),
            namespace: found.pod.namespace.to_string(),
            pod: found.pod.name.to_string(),
            reason: found.reason.as_str().into(),
            evacuator_class: turn.map(|turn| turn.class.to_string()),
            message: wait_message(found.reason, turn),
            since: Time(turn.and_then(|turn| turn.since).unwrap_or(now)),
            until: until.map(Time),
            expected_finish_time: turn.and_then(|turn| turn.expected).map(Time),
        };
        if let Some(earlier) = known.iter().find(|earlier| is_same_wait(earlier, &one)) {
            one.since = earlier.since.clone();
        }
        one
    };
    plan.waiting_for.iter().take(MAX_WAITING_FOR).map(one).collect()
}

fn is_same_wait(a: &WaitingFor, b: &WaitingFor) -> bool {
    (&a.node, &a.namespace, &a.pod) == (&b.node, &b.namespace, &b.pod)
        && (&a.reason, &a.evacuator_class) == (&b.reason, &b.evacuator_class)
}

fn wait_message(reason: WaitReason, turn: Option<&Turn>) -> String {
    match (reason, turn) {
        (_, Some(turn)) if turn.message.is_empty() => {
            bounded::text(&format!("evacuator {} is active", turn.class))
        }
        (_, Some(turn)) => bounded::text(&format!("evacuator {} is active: {}", turn.class, turn.message)),
        (WaitReason::EvacuatorActive, None) => "an evacuator is active".into(),
        (WaitReason::GracePeriod, None) => "the pod is terminating within its grace period".into(),
        (WaitReason::Requested, None) => {
            "the evacuation controller has not activated an evacuator or evicted the pod yet".into()
        }
        (WaitReason::Node, None) => {
            "the node is not cordoned yet or does not list the target of the pod in its annotation yet".into()
        }
        (WaitReason::Pending, None) => "the Evacuation of the pod is about to be created".into(),
        (WaitReason::Order, None) => "a DrainRule orders other pods on the node before this pod".into(),
    }
}

struct DesiredCondition {
    type_: &'static str,
    status: bool,
    reason: String,
    message: String,
}

fn desired(type_: &'static str, status: bool, reason: &str, message: String) -> DesiredCondition {
    DesiredCondition { type_, status, reason: reason.into(), message: bounded::message(message) }
}

/// Whether a node has ever been selected according to a status: otherwise, the condition has the reason `NoNodes`.
fn had_nodes(status: &NodeMaintenanceStatus) -> bool {
    let cordoned = conditions::find(&status.conditions, condition::CORDONED);
    cordoned.is_some_and(|cordoned| cordoned.reason != reason::NO_NODES)
}

/// The conditions in a stage. `had_nodes` says whether a node has ever been selected.
fn conditions_in(stage: Stage, plan: &MaintenancePlan, had_nodes: bool) -> Vec<DesiredCondition> {
    match stage {
        Stage::Idle => Vec::new(),
        Stage::Cordon => vec![cordoned(plan, had_nodes)],
        Stage::Drain => vec![cordoned(plan, had_nodes), drained(plan, had_nodes), blocked(plan)],
        Stage::Complete => {
            let message = match plan.nodes_unreleased {
                0 => "The nodes are released".into(),
                nodes if plan.nodes_held_back > 0 => format!(
                    "{nodes} nodes are not released yet; {} of them are held by an unreadable NodeMaintenance, which has the event {}",
                    plan.nodes_held_back,
                    event::UNREADABLE
                ),
                nodes => format!("{nodes} nodes are not released yet"),
            };
            vec![desired(condition::CORDONED, false, reason::RELEASED, message)]
        }
    }
}

fn cordoned(plan: &MaintenancePlan, had_nodes: bool) -> DesiredCondition {
    let (selected, cordoned) = (plan.nodes_selected, plan.nodes_cordoned);
    let (status, reason, message) = if let Some((reason, message)) = without_nodes(plan, had_nodes) {
        (false, reason, message)
    } else if cordoned < selected {
        let message = format!("{cordoned} of {selected} nodes are cordoned");
        match &plan.cordon_due {
            None => (false, reason::CORDONING, message),
            Some((node, due)) => (
                false,
                reason::CORDON_RACE,
                format!("{message}; {node} is uncordoned repeatedly and is cordoned again at {due:.0}"),
            ),
        }
    } else if plan.nodes_missing > 0 {
        (false, reason::NODE_MISSING, missing(plan))
    } else {
        (true, reason::CORDONED, format!("Every selected node is cordoned{}", deleted(plan)))
    };
    desired(condition::CORDONED, status, reason, message)
}

/// Reason and message if there is no node to maintain, and none has been drained.
fn without_nodes(plan: &MaintenancePlan, had_nodes: bool) -> Option<(&'static str, String)> {
    if plan.nodes_selected + plan.nodes_drained_and_deleted > 0 {
        return None;
    }
    let (reason, message) = if had_nodes {
        (
            reason::NO_NODES_LEFT,
            "No selected node is left: each was deleted or relabelled before it was drained",
        )
    } else {
        (reason::NO_NODES, "The selector has not matched any node so far")
    };
    let names = if plan.nodes_missing > 0 { format!("; {}", missing(plan)) } else { String::new() };
    Some((reason, format!("{message}{names}")))
}

fn missing(plan: &MaintenancePlan) -> String {
    let nodes = match plan.nodes_missing {
        1 => "1 node that the selector names does not exist".into(),
        number => format!("{number} nodes that the selector names do not exist"),
    };
    format!("{nodes}: {}", list(&plan.missing_nodes, plan.nodes_missing))
}

fn deleted(plan: &MaintenancePlan) -> String {
    match plan.nodes_drained_and_deleted {
        0 => String::new(),
        1 => "; 1 node was deleted after it had been drained".into(),
        nodes => format!("; {nodes} nodes were deleted after they had been drained"),
    }
}

fn drained(plan: &MaintenancePlan, had_nodes: bool) -> DesiredCondition {
    let counts = &plan.counts;
    let unsupported = match counts.unsupported {
        0 => String::new(),
        1 => "; 1 pod stays, because this installation does not evacuate its type (Unsupported)".into(),
        pods => {
            format!(
                "; {pods} pods stay, because this installation does not evacuate their type (Unsupported)"
            )
        }
    };
    if let Some((reason, message)) = without_nodes(plan, had_nodes) {
        return desired(condition::DRAINED, false, reason, message);
    }
    let plan_message = || plan.message.trim_end_matches('.').to_owned();
    let (status, reason, message) = match () {
        () if plan.drained => {
            (true, reason::COMPLETE, format!("Every pod that has to leave has left{}", deleted(plan)))
        }
        () if counts.remaining == 0 && plan.nodes_cordoned < plan.nodes_selected => {
            (false, reason::CORDONING, plan_message())
        }
        () if counts.remaining == 0 => (false, reason::NODE_MISSING, missing(plan)),
        () if plan.waiting => (false, reason::WAITING_FOR_MAINTENANCE, plan_message()),
        () if counts.targeted == 0 && counts.volumes > 0 => (false, reason::VOLUMES_ATTACHED, plan_message()),
        () if counts.targeted == 0 && counts.completing > 0 => {
            (false, reason::WAITING_FOR_COMPLETION, plan_message())
        }
        () => {
            let left = counts.pending.saturating_add(counts.evacuating);
            let pods = if left == 1 { "1 pod still has".into() } else { format!("{left} pods still have") };
            (false, reason::EVACUATING, format!("{pods} to leave"))
        }
    };
    desired(condition::DRAINED, status, reason, message + &unsupported + &skipped(plan))
}

/// The number and the first names of skipped pods.
fn skipped(plan: &MaintenancePlan) -> String {
    let number = plan.counts.skipped;
    let what = match number {
        0 => return String::new(),
        1 => "1 pod stays, because a DrainRule or its label says skip".into(),
        number => format!("{number} pods stay, because a DrainRule or their label says skip"),
    };
    let names = plan.skipped.iter().map(|pod| format!("{}/{}", pod.namespace, pod.name).into());
    let names: Vec<Arc<str>> = names.collect();
    format!("; {what}: {}", list(&names, number as usize))
}

/// The condition `Blocked`. If it is False, the message says what the drain waits for.
fn blocked(plan: &MaintenancePlan) -> DesiredCondition {
    if let Some((reason, listed)) = reasons(plan) {
        return desired(condition::BLOCKED, true, reason, format!("Blockers: {listed}"));
    }
    let waits = plan.counts.waiting;
    let (reason, message) = match () {
        () if plan.drained => (reason::NOT_BLOCKED, "Nothing is left to evacuate".into()),
        () if plan.nodes_selected == 0 => (reason::NO_NODES, "No node is selected".into()),
        () if plan.waiting => (reason::WAITING_FOR_MAINTENANCE, "Waiting for another maintenance".into()),
        () if waits.total() > 0 => {
            let listed: Vec<_> =
                waits.iter().map(|(reason, number)| format!("{number} {}", reason.as_str())).collect();
            let pods = if waits.total() == 1 { "1 pod".into() } else { format!("{} pods", waits.total()) };
            let active = waits.of(WaitReason::EvacuatorActive) > 0;
            let reason = if active { reason::EVACUATOR_ACTIVE } else { reason::NOT_BLOCKED };
            (reason, format!("Waiting for {pods} to leave: {}", listed.join(", ")))
        }
        () => (reason::NOT_BLOCKED, plan.message.trim_end_matches('.').into()),
    };
    desired(condition::BLOCKED, false, reason, message)
}

/// The most frequent reason (if there are several, the first in alphabetical order), and the number of blockers by reason.
fn reasons(plan: &MaintenancePlan) -> Option<(&str, String)> {
    let all = plan.blockers_by_reason.iter();
    let (first, _) = all.clone().max_by(|a, b| a.1.cmp(b.1).then(b.0.cmp(a.0)))?;
    let listed: Vec<String> = all.map(|(reason, number)| format!("{number} {reason}")).collect();
    Some((first, listed.join(", ")))
}

/// The condition `Blocked` outside of stage Drain: failed writes, if there are any.
fn failed_writes(plan: &MaintenancePlan) -> Option<DesiredCondition> {
    let (reason, listed) = reasons(plan)?;
    let first = plan.blockers.first().map(|(node, blocker)| {
        let node = node.as_ref().map(|node| format!("node {node}: ")).unwrap_or_default();
        let pod = blocker.pod.as_ref().map(|pod| format!("pod {}/{}: ", pod.namespace, pod.name));
        format!("; {node}{}{}", pod.unwrap_or_default(), bounded::text(&blocker.message))
    });
    let message = format!("Failed writes: {listed}{}", first.unwrap_or_default());
    Some(desired(condition::BLOCKED, true, reason, message))
}

fn set(
    all: &mut Vec<Condition>,
    desired: &DesiredCondition,
    observed_generation: Option<i64>,
    now: Timestamp,
) {
    let DesiredCondition { type_, status, reason, message } = desired;
    let condition = conditions::condition(type_, *status, reason, message, now);
    conditions::set(all, Condition { observed_generation, ..condition });
}

/// An event of a maintenance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaintenanceEvent {
    /// One of `names::event`.
    pub reason: &'static str,
    /// Whether it is a warning.
    pub warning: bool,
    /// The message for users.
    pub message: String,
}

/// The events after a status has been written.
pub fn transition_events(old: &NodeMaintenanceStatus, new: &NodeMaintenanceStatus) -> Vec<MaintenanceEvent> {
    let mut events = Vec::new();
    let mut add = |reason, warning, message| events.push(MaintenanceEvent { reason, warning, message });
    for started in &new.stage_statuses {
        if !old.stage_statuses.iter().any(|known| known.name == started.name) {
            add(event::STAGE_STARTED, false, format!("Stage {} started", started.name.as_str()));
        }
    }
    let is = |status: &NodeMaintenanceStatus, type_: &str| conditions::is_true(&status.conditions, type_);
    let message = |type_: &str| {
        conditions::find(&new.conditions, type_).map(|known| known.message.clone()).unwrap_or_default()
    };
    if is(new, condition::DRAINED) && !is(old, condition::DRAINED) {
        add(event::DRAINED, false, message(condition::DRAINED));
    }
    match (is(old, condition::BLOCKED), is(new, condition::BLOCKED)) {
        (false, true) => add(event::BLOCKED, true, message(condition::BLOCKED)),
        (true, false) => add(event::UNBLOCKED, false, "Nothing blocks the drain any longer".into()),
        _ => {}
    }
    events
}

/// The event when other maintenances are ahead of a maintenance. `known` are those that were reported before.
pub fn fast_forwarded(plan: &MaintenancePlan, known: &mut BTreeSet<Arc<str>>) -> Option<MaintenanceEvent> {
    let new = plan.forwarded_by.iter().filter(|name| !known.contains(*name));
    let new: Vec<&str> = new.take(MAX_BLOCKERS).map(AsRef::as_ref).collect();
    if new.is_empty() {
        return None;
    }
    let message = format!(
        "Fast-forwarded: on nodes that are or were shared with {}, pods leave earlier than in the drain plan of this maintenance",
        new.join(", ")
    );
    known.extend(plan.forwarded_by.iter().cloned());
    Some(MaintenanceEvent { reason: event::FAST_FORWARDED, warning: true, message })
}

/// The event when the drain of a node continues although volumes are attached, because of an annotation or a timeout.
pub fn volumes_ignored(node: &str, volumes: u32, by_annotation: bool) -> MaintenanceEvent {
    let why = if by_annotation {
        format!("the node has the annotation {EXCLUDE_VOLUME_DETACH_ANNOTATION}")
    } else {
        "spec.volumeDetachTimeoutSeconds has passed".into()
    };
    let what = if volumes == 1 { "1 volume is".into() } else { format!("{volumes} volumes are") };
    let message =
        format!("{what} still attached to node {node}; the drain continues without waiting, because {why}");
    MaintenanceEvent { reason: event::VOLUMES_IGNORED, warning: true, message }
}

/// The event of a node's cordon. The text is the same each time, so that repetitions become one event with a count.
pub fn cordon_event(node: &str, event: CordonEvent) -> MaintenanceEvent {
    match event {
        CordonEvent::Reverted => MaintenanceEvent {
            reason: event::CORDON_RACE,
            warning: true,
            message: format!(
                "Node {node} was uncordoned during the maintenance and is cordoned again, each time after a longer delay; stop whatever uncordons the node, or complete the maintenance"
            ),
        },
        CordonEvent::LeftCordoned => MaintenanceEvent {
            reason: event::LEFT_CORDONED,
            warning: false,
            message: format!("Node {node} stays cordoned, because it was cordoned before the maintenance"),
        },
    }
}

#[cfg(test)]
mod tests;

//! What a maintenance's status says, and what is told as events when it changes.

use std::collections::BTreeSet;
use std::sync::Arc;

use haulout_api_types::conditions;
use haulout_api_types::names::{EXCLUDE_VOLUME_DETACH_ANNOTATION, condition, event, reason};
use haulout_api_types::node_maintenance::{
    Blocker, DrainStatus, MAX_BLOCKERS, MAX_WAITING_FOR, NodeMaintenanceStatus, Stage, StageStatus,
    WaitingFor,
};
use haulout_drain_planner::cordon::CordonNotice;
use haulout_drain_planner::facts::Turn;
use haulout_drain_planner::report::DRAINED;
use haulout_drain_planner::{Awaited, MaintenancePlan, Waiting, list};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::bounded;

/// What is said of a drain that was completed before it was over.
const NOT_DRAINED: &str = "Completed before everything had left";

/// What has to be known besides what the planner says.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The status as it is.
    pub old: &'a NodeMaintenanceStatus,
    /// The generation of the spec.
    pub generation: Option<i64>,
    /// The stage that is acted on, and that has begun with this status if it had not before.
    pub stage: Stage,
    /// What time it is.
    pub now: Timestamp,
}

/// The status as it should be. Equal to the old one if there is nothing to write.
pub fn status(context: Context<'_>, plan: &MaintenancePlan) -> NodeMaintenanceStatus {
    let Context { old, generation, stage, now } = context;
    let mut next = old.clone();
    next.observed_generation = generation;
    begin(&mut next.stage_statuses, stage, now);
    next.nodes_selected = number(plan.nodes_selected);
    next.drain_status = match stage {
        Stage::Idle | Stage::Cordon => None,
        Stage::Drain => {
            let none = DrainStatus::default();
            Some(drain_status(plan, old.drain_status.as_ref().unwrap_or(&none), now))
        }
        Stage::Complete => old.drain_status.clone().map(|drain| ended(drain, plan, now)),
    };
    let had_nodes = had_nodes(old) || plan.nodes_selected + plan.nodes_drained_and_deleted > 0;
    let mut all = wanted_in(stage, plan, had_nodes);
    if stage != Stage::Drain {
        // Once it is there, it stays: who waits for it to become false must see that.
        let known = next.conditions.iter().any(|known| known.type_ == condition::BLOCKED);
        let unblocked =
            || wanted(condition::BLOCKED, false, reason::NOT_BLOCKED, "Nothing is evacuated now".into());
        all.extend(refused(plan).or_else(|| known.then(unblocked)));
    }
    let was_drained = next.conditions.iter().find(|known| known.type_ == condition::DRAINED);
    if let Some(was_drained) = was_drained.filter(|_| stage == Stage::Complete) {
        // What was reached stays readable.
        let drained = was_drained.status == "True";
        let (reason, message) = if drained {
            (was_drained.reason.as_str(), was_drained.message.clone())
        } else {
            (reason::RELEASED, NOT_DRAINED.into())
        };
        all.push(wanted(condition::DRAINED, drained, reason, message));
    }
    for type_ in [condition::CORDONED, condition::DRAINED, condition::BLOCKED] {
        match all.iter().find(|wanted| wanted.type_ == type_) {
            Some(wanted) => set(&mut next.conditions, wanted, generation, now),
            None => next.conditions.retain(|known| known.type_ != type_),
        }
    }
    next
}

/// Whether only words of evacuators differ, which may change at every moment.
pub fn differs_in_words_alone(old: &NodeMaintenanceStatus, new: &NodeMaintenanceStatus) -> bool {
    let without_words = |status: &NodeMaintenanceStatus| {
        let mut status = status.clone();
        for awaited in status.drain_status.iter_mut().flat_map(|drain| &mut drain.waiting_for) {
            awaited.message.clear();
        }
        status
    };
    without_words(old) == without_words(new)
}

/// The status of a maintenance whose stage has just begun. How far it has come is only known once it is acted on.
pub fn begun(old: &NodeMaintenanceStatus, stage: Stage, now: Timestamp) -> NodeMaintenanceStatus {
    let mut next = old.clone();
    begin(&mut next.stage_statuses, stage, now);
    next
}

/// Records that a stage begins. Who drains at once cordons, too.
fn begin(begun: &mut Vec<StageStatus>, stage: Stage, now: Timestamp) {
    let cordons = (stage == Stage::Drain).then_some(Stage::Cordon);
    for name in cordons.into_iter().chain([stage]) {
        if !begun.iter().any(|known| known.name == name) {
            begun.push(StageStatus { name, start_timestamp: Time(now) });
        }
    }
}

/// How far a drain had come when it was completed. What blocks now is only what cannot be put back.
fn ended(drain: DrainStatus, plan: &MaintenancePlan, now: Timestamp) -> DrainStatus {
    let message = if drain.drain_message == DRAINED { DRAINED } else { NOT_DRAINED };
    DrainStatus {
        drain_message: message.into(),
        pods_evacuated: drain.pods_evacuated.max(number(plan.evacuated)),
        blockers: blockers(plan, &drain.blockers, now),
        waiting_for: Vec::new(),
        ..drain
    }
}

/// The status of a maintenance that cannot be followed.
pub fn not_followed(
    old: &NodeMaintenanceStatus,
    generation: Option<i64>,
    why: &str,
    now: Timestamp,
) -> NodeMaintenanceStatus {
    let mut next = old.clone();
    let message = format!("It cannot be followed: {why}");
    let blocked = wanted(condition::BLOCKED, true, reason::NOT_FOLLOWED, message);
    set(&mut next.conditions, &blocked, generation, now);
    next
}

fn drain_status(plan: &MaintenancePlan, known: &DrainStatus, now: Timestamp) -> DrainStatus {
    let counts = &plan.counts;
    DrainStatus {
        reached_drain_targets: plan.reached.clone(),
        drain_message: plan.message.clone(),
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

/// The first blockers, sorted by node, namespace, pod and reason. Those that were known keep their time.
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

/// The first pods that leave. Those that were known keep their time.
fn waiting_for(plan: &MaintenancePlan, known: &[WaitingFor], now: Timestamp) -> Vec<WaitingFor> {
    let one = |(node, found): &(Arc<str>, Awaited)| {
        let turn = found.turn.as_deref();
        let until = turn.map(|turn| turn.until).or(found.deadline);
        let mut one = WaitingFor {
            node: node.to_string(),
            namespace: found.pod.namespace.to_string(),
            pod: found.pod.name.to_string(),
            reason: found.waiting.reason().into(),
            evacuator_class: turn.map(|turn| turn.class.to_string()),
            message: awaited(found.waiting, turn),
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

fn awaited(waiting: Waiting, turn: Option<&Turn>) -> String {
    match (waiting, turn) {
        (_, Some(turn)) if turn.message.is_empty() => format!("evacuator {} is in charge", turn.class),
        (_, Some(turn)) => bounded::text(&format!("evacuator {} is in charge: {}", turn.class, turn.message)),
        (Waiting::EvacuatorActive, None) => "an evacuator is in charge".into(),
        (Waiting::GracePeriod, None) => "it is terminating, and its grace period is not over".into(),
        (Waiting::Requested, None) => {
            "it has an Evacuation; the evacuation controller has yet to choose an evacuator or to evict it"
                .into()
        }
        (Waiting::Node, None) => "its node has to be cordoned and to announce that it leaves first".into(),
        (Waiting::Pending, None) => "it is about to get an Evacuation".into(),
        (Waiting::Order, None) => "a DrainRule has other pods leave this node before it".into(),
    }
}

struct Wanted {
    type_: &'static str,
    status: bool,
    reason: String,
    message: String,
}

fn wanted(type_: &'static str, status: bool, reason: &str, message: String) -> Wanted {
    Wanted { type_, status, reason: reason.into(), message }
}

/// Whether a status says that a node was selected once: the condition that tells otherwise has a reason of its own.
fn had_nodes(status: &NodeMaintenanceStatus) -> bool {
    let cordoned = conditions::find(&status.conditions, condition::CORDONED);
    cordoned.is_some_and(|cordoned| cordoned.reason != reason::NO_NODES)
}

/// The conditions in a stage. `had_nodes` says whether any node has been selected so far.
fn wanted_in(stage: Stage, plan: &MaintenancePlan, had_nodes: bool) -> Vec<Wanted> {
    match stage {
        Stage::Idle => Vec::new(),
        Stage::Cordon => vec![cordoned(plan, had_nodes)],
        Stage::Drain => vec![cordoned(plan, had_nodes), drained(plan, had_nodes), blocked(plan)],
        Stage::Complete => {
            let message = match plan.nodes_unreleased {
                0 => "The nodes are released".into(),
                nodes if plan.nodes_held_back > 0 => format!(
                    "{nodes} nodes are yet to be released; {} of them are held by a NodeMaintenance that cannot be followed: look for the event {}",
                    plan.nodes_held_back,
                    event::NOT_FOLLOWED
                ),
                nodes => format!("{nodes} nodes are yet to be released"),
            };
            vec![wanted(condition::CORDONED, false, reason::RELEASED, message)]
        }
    }
}

fn cordoned(plan: &MaintenancePlan, had_nodes: bool) -> Wanted {
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
                format!(
                    "{message}; somebody makes {node} schedulable again and again, and it is cordoned again at {due:.0}"
                ),
            ),
        }
    } else if plan.nodes_missing > 0 {
        (false, reason::NODE_MISSING, missing(plan))
    } else {
        (true, reason::CORDONED, format!("Every selected node is cordoned{}", deleted(plan)))
    };
    wanted(condition::CORDONED, status, reason, message)
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
    let which = match plan.nodes_missing {
        1 => "1 node that the selector names does not exist".into(),
        number => format!("{number} nodes that the selector names do not exist"),
    };
    format!("{which}: {}", list(&plan.missing_nodes, plan.nodes_missing))
}

fn deleted(plan: &MaintenancePlan) -> String {
    match plan.nodes_drained_and_deleted {
        0 => String::new(),
        1 => "; 1 node was deleted after it had been drained".into(),
        nodes => format!("; {nodes} nodes were deleted after they had been drained"),
    }
}

fn drained(plan: &MaintenancePlan, had_nodes: bool) -> Wanted {
    let counts = &plan.counts;
    let left_alone = match counts.unsupported {
        0 => String::new(),
        1 => "; 1 pod is left alone, because nothing here evacuates its type (Unsupported)".into(),
        pods => {
            format!("; {pods} pods are left alone, because nothing here evacuates their type (Unsupported)")
        }
    };
    if let Some((reason, message)) = without_nodes(plan, had_nodes) {
        return wanted(condition::DRAINED, false, reason, message);
    }
    let said = || plan.message.trim_end_matches('.').to_owned();
    let (status, reason, message) = match () {
        () if plan.drained => {
            (true, reason::COMPLETE, format!("Every pod that has to leave has left{}", deleted(plan)))
        }
        () if counts.left == 0 && plan.nodes_cordoned < plan.nodes_selected => {
            (false, reason::CORDONING, said())
        }
        () if counts.left == 0 => (false, reason::NODE_MISSING, missing(plan)),
        () if plan.waiting => (false, reason::WAITING_FOR_MAINTENANCE, said()),
        () if counts.targeted == 0 && counts.volumes > 0 => (false, reason::VOLUMES_ATTACHED, said()),
        () if counts.targeted == 0 && counts.completing > 0 => {
            (false, reason::WAITING_FOR_COMPLETION, said())
        }
        () => {
            let left = counts.pending.saturating_add(counts.evacuating);
            let pods = if left == 1 { "1 pod has".into() } else { format!("{left} pods have") };
            (false, reason::EVACUATING, format!("{pods} yet to leave"))
        }
    };
    wanted(condition::DRAINED, status, reason, message + &left_alone + &skipped(plan))
}

/// How many pods stay because a rule or label says so, and which.
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

/// Whether something keeps pods from leaving. Where nothing does, what is waited for.
fn blocked(plan: &MaintenancePlan) -> Wanted {
    if let Some((reason, listed)) = reasons(plan) {
        return wanted(condition::BLOCKED, true, reason, format!("Not leaving: {listed}"));
    }
    let waits = plan.counts.waiting;
    let (reason, message) = match () {
        () if plan.drained => (reason::NOT_BLOCKED, "Nothing is left to evacuate".into()),
        () if plan.nodes_selected == 0 => (reason::NO_NODES, "No node is selected".into()),
        () if plan.waiting => (reason::WAITING_FOR_MAINTENANCE, "It waits for another maintenance".into()),
        () if waits.total() > 0 => {
            let listed: Vec<_> =
                waits.iter().map(|(waiting, number)| format!("{number} {}", waiting.reason())).collect();
            let pods = if waits.total() == 1 { "1 pod".into() } else { format!("{} pods", waits.total()) };
            let active = waits.of(Waiting::EvacuatorActive) > 0;
            let reason = if active { reason::EVACUATOR_ACTIVE } else { reason::NOT_BLOCKED };
            (reason, format!("Waiting for {pods} to leave: {}", listed.join(", ")))
        }
        () => (reason::NOT_BLOCKED, plan.message.trim_end_matches('.').into()),
    };
    wanted(condition::BLOCKED, false, reason, message)
}

/// The most frequent reason, of several the first in the alphabet, and all of them with how often they occur.
fn reasons(plan: &MaintenancePlan) -> Option<(&str, String)> {
    let all = plan.blockers_by_reason.iter();
    let (first, _) = all.clone().max_by(|a, b| a.1.cmp(b.1).then(b.0.cmp(a.0)))?;
    let listed: Vec<String> = all.map(|(reason, number)| format!("{number} {reason}")).collect();
    Some((first, listed.join(", ")))
}

/// Outside of stage Drain: what cannot be written, if anything; there is no list for it.
fn refused(plan: &MaintenancePlan) -> Option<Wanted> {
    let (reason, listed) = reasons(plan)?;
    let first = plan.blockers.first().map(|(node, blocker)| {
        let node = node.as_ref().map(|node| format!("node {node}: ")).unwrap_or_default();
        let pod = blocker.pod.as_ref().map(|pod| format!("pod {}/{}: ", pod.namespace, pod.name));
        format!("; {node}{}{}", pod.unwrap_or_default(), bounded::text(&blocker.message))
    });
    let message = format!("Not written: {listed}{}", first.unwrap_or_default());
    Some(wanted(condition::BLOCKED, true, reason, message))
}

fn set(all: &mut Vec<Condition>, wanted: &Wanted, observed_generation: Option<i64>, now: Timestamp) {
    let Wanted { type_, status, reason, message } = wanted;
    let condition = conditions::condition(type_, *status, reason, message, now);
    conditions::set(all, Condition { observed_generation, ..condition });
}

/// Something to be told as an event of a maintenance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// One of `names::event`.
    pub reason: &'static str,
    /// Whether it is a warning.
    pub warning: bool,
    /// For people.
    pub message: String,
}

/// What is to be told when a status has been written.
pub fn notices(old: &NodeMaintenanceStatus, new: &NodeMaintenanceStatus) -> Vec<Notice> {
    let mut notices = Vec::new();
    let mut tell = |reason, warning, message| notices.push(Notice { reason, warning, message });
    for begun in &new.stage_statuses {
        if !old.stage_statuses.iter().any(|known| known.name == begun.name) {
            tell(event::STAGE_STARTED, false, format!("Stage {} has begun", begun.name.as_str()));
        }
    }
    let is = |status: &NodeMaintenanceStatus, type_: &str| conditions::is_true(&status.conditions, type_);
    let message = |type_: &str| {
        conditions::find(&new.conditions, type_).map(|known| known.message.clone()).unwrap_or_default()
    };
    if is(new, condition::DRAINED) && !is(old, condition::DRAINED) {
        tell(event::DRAINED, false, message(condition::DRAINED));
    }
    match (is(old, condition::BLOCKED), is(new, condition::BLOCKED)) {
        (false, true) => tell(event::BLOCKED, true, message(condition::BLOCKED)),
        (true, false) => tell(event::UNBLOCKED, false, "No pod is blocked any longer".into()),
        _ => {}
    }
    notices
}

/// What is to be told when others are ahead of a maintenance. `known` are those that it has been told of before.
pub fn fast_forwarded(plan: &MaintenancePlan, known: &mut BTreeSet<Arc<str>>) -> Option<Notice> {
    let new = plan.forwarded_by.iter().filter(|name| !known.contains(*name));
    let new: Vec<&str> = new.take(MAX_BLOCKERS).map(AsRef::as_ref).collect();
    if new.is_empty() {
        return None;
    }
    let message = format!(
        "Fast-forwarded: on nodes that it shares or has shared with {}, pods are evacuated that its own plan would have left for later",
        new.join(", ")
    );
    known.extend(plan.forwarded_by.iter().cloned());
    Some(Notice { reason: event::FAST_FORWARDED, warning: true, message })
}

/// What is to be told of a node whose volumes are not waited for: its admin does not want it, or its maintenances have
/// waited as long as they want.
pub fn volumes_ignored(node: &str, volumes: u32, by_annotation: bool) -> Notice {
    let why = if by_annotation {
        format!("the node has the annotation {EXCLUDE_VOLUME_DETACH_ANNOTATION}")
    } else {
        "it has waited for spec.volumeDetachTimeoutSeconds".into()
    };
    let what = if volumes == 1 { "1 volume is".into() } else { format!("{volumes} volumes are") };
    let message =
        format!("{what} still attached to node {node}, and the drain goes on without waiting, because {why}");
    Notice { reason: event::VOLUMES_IGNORED, warning: true, message }
}

/// What is to be told of a node's cordon. It is the same text each time, so that it becomes one event with a count.
pub fn cordon_notice(node: &str, notice: CordonNotice) -> Notice {
    match notice {
        CordonNotice::Reverted => Notice {
            reason: event::CORDON_RACE,
            warning: true,
            message: format!(
                "Node {node} was made schedulable by somebody else, and is cordoned again; each time after a longer pause: stop what uncordons the node, or complete the maintenance"
            ),
        },
        CordonNotice::LeftCordoned => Notice {
            reason: event::LEFT_CORDONED,
            warning: false,
            message: format!("Node {node} stays cordoned, as it was before the maintenance"),
        },
    }
}

#[cfg(test)]
mod tests;

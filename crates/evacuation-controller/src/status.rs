//! The status of an Evacuation: `status.message`, which people read, and the condition `Blocked`.

use std::time::Duration;

use haulout_api_types::names::condition;
use haulout_api_types::{conditions, instigators};
use haulout_service_runtime::eviction::Failure;
use haulout_service_runtime::pods::Pod;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Map, Value, json};

use crate::decide::EvictionCause;
use crate::events::describe_turn_end;
use crate::record::Record;

/// The status after a failed eviction.
pub fn failed(record: &Record, failure: &Failure, now: Timestamp) -> Map<String, Value> {
    let mut status = blocked(record, failure.reason, &failure.message, now);
    status.insert("failedEvictionCounter".into(), record.failed.saturating_add(1).into());
    status.insert("lastFailedEvictionTime".into(), json!(Time(now)));
    status
}

/// The status while the pod is blocked.
pub fn blocked(record: &Record, reason: &str, message: &str, now: Timestamp) -> Map<String, Value> {
    let mut status = Map::new();
    status.insert("conditions".into(), with_blocked(record, true, reason, message, now));
    status.insert("message".into(), message.into());
    status
}

/// The status when the pod is no longer blocked. A newer message of an evacuator stays.
pub fn unblocked(record: &Record, reason: &str, message: &str, now: Timestamp) -> Map<String, Value> {
    let mut status = Map::new();
    status.insert("conditions".into(), with_blocked(record, false, reason, message, now));
    if record.message_repeats_blocked {
        status.insert("message".into(), message.into());
    }
    status
}

/// All conditions: ours, and those that other programs set.
fn with_blocked(record: &Record, is_true: bool, reason: &str, message: &str, now: Timestamp) -> Value {
    let since = record.blocked.as_ref().filter(|blocked| blocked.is_true == is_true);
    let since = since.map_or(now, |blocked| blocked.since);
    let ours = conditions::condition(condition::BLOCKED, is_true, reason, message, since);
    json!(record.other_conditions.iter().cloned().chain([ours]).collect::<Vec<_>>())
}

/// The message when the first evacuator becomes active.
pub fn activated(class: &str) -> String {
    format!("Evacuator {class} has been asked to evacuate the pod.")
}

/// The message when the next evacuator becomes active.
pub fn switched(from: &str, to: &str, eviction_cause: EvictionCause, deadline: Duration) -> String {
    let what = match eviction_cause {
        EvictionCause::TimedOut => format!("has reported no progress for {} s", deadline.as_secs()),
        EvictionCause::NoEvacuator | EvictionCause::Completed => {
            "has completed, but the pod still exists".to_owned()
        }
    };
    format!("Evacuator {from} {what}: evacuator {to} is active now.")
}

/// The message before the Eviction API is called.
pub fn evicting(record: &Record, eviction_cause: EvictionCause) -> String {
    format!("The pod is being evicted: {}.", describe_turn_end(record, eviction_cause))
}

/// The message when an evacuator reports progress after its deadline has passed.
pub fn progress_resumed(record: &Record) -> String {
    let class = record.active.as_deref().unwrap_or_default();
    format!("Evacuator {class} reports progress again: the pod is not evicted.")
}

/// The message while the pod terminates.
pub fn terminating(pod: &Pod) -> String {
    match pod.deletion_timestamp() {
        Some(end) => format!("Pod {} is terminating. Its grace period ends at {end}.", pod.name),
        None => format!("Pod {} is terminating.", pod.name),
    }
}

/// The number of finalizers that a message names.
const MAX_NAMED: usize = 5;

/// The message when the evacuation has ended and finalizers hold the Evacuation.
pub fn held(record: &Record, ended: &str) -> String {
    let describe = |finalizer: &str| match instigators::subdomain(finalizer) {
        Some(class) => format!("{finalizer} (evacuator {class} has to clean up)"),
        None => finalizer.to_owned(),
    };
    let mut named: Vec<_> = record.finalizers.iter().take(MAX_NAMED).map(|f| describe(f)).collect();
    if let Some(more) = record.finalizers.len().checked_sub(MAX_NAMED).filter(|more| *more > 0) {
        named.push(format!("and {more} more"));
    }
    format!(
        "{ended}, but finalizers keep the Evacuation from being removed: {}. Their owners have to remove them.",
        named.join(", ")
    )
}

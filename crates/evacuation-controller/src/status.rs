//! What the status of an Evacuation says: `status.message` for people, and the condition `Blocked`.

use std::time::Duration;

use haulout_api_types::names::condition;
use haulout_api_types::{conditions, instigators};
use haulout_service_runtime::eviction::Failure;
use haulout_service_runtime::pods::Pod;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Map, Value, json};

use crate::decide::Why;
use crate::events::because;
use crate::record::Record;

/// The status after an attempt to evict has failed.
pub fn failed(record: &Record, failure: &Failure, now: Timestamp) -> Map<String, Value> {
    let mut status = blocked(record, failure.reason, &failure.message, now);
    status.insert("failedEvictionCounter".into(), record.failed.saturating_add(1).into());
    status.insert("lastFailedEvictionTime".into(), json!(Time(now)));
    status
}

/// The status when something keeps the pod from leaving.
pub fn blocked(record: &Record, reason: &str, message: &str, now: Timestamp) -> Map<String, Value> {
    let mut status = Map::new();
    status.insert("conditions".into(), with_ours(record, true, reason, message, now));
    status.insert("message".into(), message.into());
    status
}

/// The status when nothing keeps the pod from leaving any more. A message that an evacuator has written since stays.
pub fn unblocked(record: &Record, reason: &str, message: &str, now: Timestamp) -> Map<String, Value> {
    let mut status = Map::new();
    status.insert("conditions".into(), with_ours(record, false, reason, message, now));
    if record.message_repeats_blocked {
        status.insert("message".into(), message.into());
    }
    status
}

/// All conditions: those of others, and ours.
fn with_ours(record: &Record, is_true: bool, reason: &str, message: &str, now: Timestamp) -> Value {
    let since = record.blocked.as_ref().filter(|blocked| blocked.is_true == is_true);
    let since = since.map_or(now, |blocked| blocked.since);
    let ours = conditions::condition(condition::BLOCKED, is_true, reason, message, since);
    json!(record.other_conditions.iter().cloned().chain([ours]).collect::<Vec<_>>())
}

/// The first evacuator has been given control.
pub fn activated(class: &str) -> String {
    format!("Evacuator {class} has been asked to evacuate the pod.")
}

/// Control has passed on.
pub fn switched(from: &str, to: &str, why: Why, deadline: Duration) -> String {
    let what = match why {
        Why::Silent => format!("has reported no progress for {} s", deadline.as_secs()),
        Why::None | Why::Completed => "has done its part and the pod is still there".to_owned(),
    };
    format!("Evacuator {from} {what}: evacuator {to} takes over.")
}

/// The Eviction API is about to be asked.
pub fn evicting(record: &Record, why: Why) -> String {
    format!("The pod is being evicted: {}.", because(record, why))
}

/// An evacuator whose time was up reports again.
pub fn at_work(record: &Record) -> String {
    let class = record.active.as_deref().unwrap_or_default();
    format!("Evacuator {class} reports progress again: the pod is not evicted.")
}

/// The pod has been asked to end.
pub fn terminating(pod: &Pod) -> String {
    match pod.deletion_timestamp() {
        Some(end) => format!("Pod {} is terminating. Its grace period ends at {end}.", pod.name),
        None => format!("Pod {} is terminating.", pod.name),
    }
}

/// How many finalizers a message names.
const NAMED: usize = 5;

/// The evacuation has ended, and these finalizers keep the Evacuation.
pub fn held(record: &Record, ended: &str) -> String {
    let describe = |finalizer: &str| match instigators::subdomain(finalizer) {
        Some(class) => format!("{finalizer} (evacuator {class} has to clean up)"),
        None => finalizer.to_owned(),
    };
    let mut named: Vec<_> = record.finalizers.iter().take(NAMED).map(|f| describe(f)).collect();
    if let Some(more) = record.finalizers.len().checked_sub(NAMED).filter(|more| *more > 0) {
        named.push(format!("and {more} more"));
    }
    format!(
        "{ended}, but finalizers keep the Evacuation from being removed: {}. Their owners have to remove them.",
        named.join(", ")
    )
}

//! The Kubernetes events of an Evacuation.

use haulout_api_types::Evacuation;
use haulout_api_types::names::event;
use haulout_service_runtime::events::{NewEvent, Severity};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource as _;

use crate::decide::{End, EvictionCause};
use crate::record::Record;

/// The first evacuator is active.
pub fn activated(record: &Record, message: &str) -> NewEvent {
    new_event(record, Severity::Normal, event::EVACUATOR_ACTIVATED, "Activate", message.to_owned())
}

/// The next evacuator is active.
pub fn switched(record: &Record, eviction_cause: EvictionCause, message: &str) -> NewEvent {
    let severity = if eviction_cause.is_unanswered() { Severity::Warning } else { Severity::Normal };
    new_event(record, severity, event::EVACUATOR_SWITCHED, "Switch", message.to_owned())
}

/// The Eviction API has accepted the eviction.
pub fn evicting(record: &Record, eviction_cause: EvictionCause) -> NewEvent {
    let note =
        format!("Pod {} is being evicted: {}.", record.pod_name, describe_turn_end(record, eviction_cause));
    new_event(record, Severity::Normal, event::EVICTING, "Evict", note)
}

/// The pod is blocked.
pub fn blocked(record: &Record, message: &str) -> NewEvent {
    let note = format!("Pod {} cannot leave: {message}", record.pod_name);
    new_event(record, Severity::Warning, event::BLOCKED, "Evict", note)
}

/// The pod is no longer blocked.
pub fn unblocked(record: &Record) -> NewEvent {
    let note = format!("Pod {} is no longer blocked.", record.pod_name);
    new_event(record, Severity::Normal, event::UNBLOCKED, "Evict", note)
}

/// Finalizers hold an Evacuation that has ended.
pub fn held(record: &Record, message: &str) -> NewEvent {
    new_event(record, Severity::Warning, event::BLOCKED, "Delete", message.to_owned())
}

/// The evacuation has ended.
pub fn ended(record: &Record, end: End) -> NewEvent {
    let pod = &record.pod_name;
    let (reason, action, note) = match end {
        End::Evicted | End::Evacuated => (event::EVACUATED, "Release", format!("Pod {pod} has left.")),
        End::Cancelled => (
            event::CANCELLED,
            "Cancel",
            format!("Evacuation of pod {pod} cancelled: all instigators withdrew."),
        ),
    };
    new_event(record, Severity::Normal, reason, action, note)
}

/// Why the pod is evicted now.
pub fn describe_turn_end(record: &Record, eviction_cause: EvictionCause) -> String {
    let active = record.active.as_deref().unwrap_or("of the pod");
    match eviction_cause {
        EvictionCause::NoEvacuator => "it has no evacuator".to_owned(),
        EvictionCause::Completed => {
            format!("evacuator {active} has completed and no other evacuator is left")
        }
        EvictionCause::TimedOut => {
            let seconds = record.progress_deadline.as_secs();
            format!(
                "evacuator {active} has reported no progress for {seconds} s and no other evacuator is left"
            )
        }
        EvictionCause::Unserved(since) => {
            format!(
                "the service of evacuator {active} has had no leader since {since} and no other evacuator is left"
            )
        }
    }
}

fn new_event(
    record: &Record,
    severity: Severity,
    reason: &'static str,
    action: &'static str,
    note: String,
) -> NewEvent {
    let regarding = ObjectReference {
        api_version: Some(Evacuation::api_version(&()).into_owned()),
        kind: Some(Evacuation::kind(&()).into_owned()),
        namespace: Some(record.namespace.to_string()),
        name: Some(record.name.to_string()),
        uid: Some(record.uid.to_string()),
        ..ObjectReference::default()
    };
    NewEvent { regarding, severity, reason, action, note }
}

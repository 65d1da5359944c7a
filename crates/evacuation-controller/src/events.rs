//! The events that people see on an Evacuation.

use haulout_api_types::Evacuation;
use haulout_api_types::names::event;
use haulout_service_runtime::events::{News, Severity};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource as _;

use crate::decide::{End, Why};
use crate::record::Record;

/// An evacuator has been given control for the first time.
pub fn activated(record: &Record, message: &str) -> News {
    news(record, Severity::Normal, event::EVACUATOR_ACTIVATED, "Activate", message.to_owned())
}

/// Control has passed on.
pub fn switched(record: &Record, why: Why, message: &str) -> News {
    let severity = if why == Why::Silent { Severity::Warning } else { Severity::Normal };
    news(record, severity, event::EVACUATOR_SWITCHED, "Switch", message.to_owned())
}

/// The Eviction API has taken the pod.
pub fn evicting(record: &Record, why: Why) -> News {
    let note = format!("Pod {} is being evicted: {}.", record.pod_name, because(record, why));
    news(record, Severity::Normal, event::EVICTING, "Evict", note)
}

/// Something keeps the pod from leaving.
pub fn blocked(record: &Record, message: &str) -> News {
    let note = format!("Pod {} cannot leave: {message}", record.pod_name);
    news(record, Severity::Warning, event::BLOCKED, "Evict", note)
}

/// Nothing keeps the pod from leaving any more.
pub fn unblocked(record: &Record) -> News {
    let note = format!("Nothing keeps pod {} from leaving any more.", record.pod_name);
    news(record, Severity::Normal, event::UNBLOCKED, "Evict", note)
}

/// Finalizers keep an Evacuation that should be gone.
pub fn held(record: &Record, message: &str) -> News {
    news(record, Severity::Warning, event::BLOCKED, "Delete", message.to_owned())
}

/// The evacuation has ended.
pub fn ended(record: &Record, end: End) -> News {
    let pod = &record.pod_name;
    let (reason, action, note) = match end {
        End::Evicted | End::Evacuated => (event::EVACUATED, "Release", format!("Pod {pod} has left.")),
        End::Cancelled => {
            (event::CANCELLED, "Cancel", format!("Nobody wants pod {pod} to leave any longer."))
        }
    };
    news(record, Severity::Normal, reason, action, note)
}

/// Why no evacuator is asked.
pub fn because(record: &Record, why: Why) -> String {
    let active = record.active.as_deref().unwrap_or("of the pod");
    match why {
        Why::None => "it has no evacuator".to_owned(),
        Why::Completed => format!("evacuator {active} has done its part and no other is left"),
        Why::Silent => {
            let seconds = record.progress_deadline.as_secs();
            format!("evacuator {active} has reported no progress for {seconds} s and no other is left")
        }
    }
}

fn news(
    record: &Record,
    severity: Severity,
    reason: &'static str,
    action: &'static str,
    note: String,
) -> News {
    let regarding = ObjectReference {
        api_version: Some(Evacuation::api_version(&()).into_owned()),
        kind: Some(Evacuation::kind(&()).into_owned()),
        namespace: Some(record.namespace.to_string()),
        name: Some(record.name.to_string()),
        uid: Some(record.uid.to_string()),
        ..ObjectReference::default()
    };
    News { regarding, severity, reason, action, note }
}

//! What `status.message` says.

use std::time::Duration;

use haulout_api_types::instigators;
use haulout_service_runtime::pods::Pod;

use crate::decide::Why;
use crate::events::because;
use crate::record::Record;

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

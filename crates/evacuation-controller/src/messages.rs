//! What `status.message` says.

use std::time::Duration;

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

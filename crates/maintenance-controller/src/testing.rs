//! Builders for tests.

use haulout_api_types::node_maintenance::{DrainPlanEntry, PodType};
use jiff::Timestamp;
use serde_json::json;

pub(crate) fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + second).unwrap()
}

/// An entry of a plan, for all pods or those of an application.
pub(crate) fn entry(pod_type: PodType, pod_priority: i32, app: Option<&str>) -> DrainPlanEntry {
    let pod_selector = app.map(|app| serde_json::from_value(json!({"matchLabels": {"app": app}})).unwrap());
    DrainPlanEntry { pod_selector, pod_priority, pod_type }
}

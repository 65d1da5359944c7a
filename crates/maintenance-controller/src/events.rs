//! The events that people see on maintenances and nodes.

use haulout_api_types::NodeMaintenance;
use haulout_api_types::names::event;
use haulout_service_runtime::events::{News, Severity, reference};
use k8s_openapi::api::core::v1::ObjectReference;

use crate::status::Notice;

/// That an object is not followed, and why.
pub fn not_followed(regarding: ObjectReference, why: &str) -> News {
    let message = format!("It cannot be followed: {why}");
    news(regarding, Notice { reason: event::NOT_FOLLOWED, warning: true, message })
}

/// Something to be told of a maintenance.
pub fn of(maintenance: &NodeMaintenance, notice: Notice) -> News {
    news(reference(maintenance), notice)
}

/// Something to be told of a node whose maintenance nobody remembers. The kubelet's events name a node by its
/// name alone, too.
pub fn of_node(name: &str, notice: Notice) -> News {
    let regarding = ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Node".into()),
        name: Some(name.into()),
        uid: Some(name.into()),
        ..ObjectReference::default()
    };
    news(regarding, notice)
}

fn news(regarding: ObjectReference, notice: Notice) -> News {
    let Notice { reason, warning, message } = notice;
    let severity = if warning { Severity::Warning } else { Severity::Normal };
    let action = match reason {
        event::CORDON_RACE => "Cordon",
        event::LEFT_CORDONED => "Complete",
        event::STAGE_STARTED => "Begin",
        event::NOT_FOLLOWED => "Read",
        _ => "Drain",
    };
    News { regarding, severity, reason, action, note: message }
}

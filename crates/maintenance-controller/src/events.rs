//! Events on NodeMaintenances, DrainRules and nodes.

use haulout_api_types::NodeMaintenance;
use haulout_api_types::names::event;
use haulout_service_runtime::events::{NewEvent, Severity, reference};
use k8s_openapi::api::core::v1::ObjectReference;

use crate::status::{MaintenanceEvent, unreadable_message};

/// The event of an unreadable object.
pub fn unreadable(regarding: ObjectReference, error: &str) -> NewEvent {
    let kind = regarding.kind.as_deref().unwrap_or("object");
    let message = unreadable_message(kind, error);
    new_event(regarding, MaintenanceEvent { reason: event::UNREADABLE, warning: true, message })
}

/// An event of a maintenance.
pub fn for_maintenance(maintenance: &NodeMaintenance, event: MaintenanceEvent) -> NewEvent {
    new_event(reference(maintenance), event)
}

/// An event of a node whose maintenance is not known anymore. As in events of the kubelet, the node's name is also used as its
/// UID.
pub fn for_node(name: &str, event: MaintenanceEvent) -> NewEvent {
    let regarding = ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Node".into()),
        name: Some(name.into()),
        uid: Some(name.into()),
        ..ObjectReference::default()
    };
    new_event(regarding, event)
}

fn new_event(regarding: ObjectReference, event: MaintenanceEvent) -> NewEvent {
    let MaintenanceEvent { reason, warning, message } = event;
    let severity = if warning { Severity::Warning } else { Severity::Normal };
    let action = match reason {
        event::CORDON_RACE => "Cordon",
        event::LEFT_CORDONED => "Complete",
        event::STAGE_STARTED => "Start",
        event::UNREADABLE => "Read",
        _ => "Drain",
    };
    NewEvent { regarding, severity, reason, action, note: message }
}

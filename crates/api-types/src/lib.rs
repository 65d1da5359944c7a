//! Haulout's Kubernetes API: types, names, and pure functions for parsing, defaulting, ordering and selection. This crate has
//! no client, clock or async code. Controllers, the admission webhook and other evacuators share it, so that they interpret
//! objects in the same way.
//!
//! | question | module |
//! |---|---|
//! | what does the object look like? | [`node_maintenance`], [`evacuation`], [`drain_rule`] |
//! | what is that annotation, finalizer, condition or reason called? | [`names`] |
//! | who may evacuate this pod, and what does its Evacuation look like? | [`evacuators`], [`instigators`] |
//! | how does an evacuator report? | [`reports`] |
//! | where does a pod belong whose replacement starts? | [`former_owner`] |
//! | how are conditions written? | [`conditions`] |
//! | how long may text of other programs be? | [`bounded`] |
//! | which pods leave when? | [`drain_plan`], [`drain_targets`], [`drain_rules`], [`pod`] |
//! | does this selector match? does this pod tolerate that taint? | [`selector`], [`tolerations`] |
//! | which pod is it? | [`uid`] |
//!
//! Objects can be newer than their reader and have unknown enum values. Read lists and watches through kube's
//! `DeserializeGuard`, so that one unreadable object does not make the whole list unreadable.

pub mod bounded;
pub mod conditions;
pub mod drain_plan;
pub mod drain_rule;
pub mod drain_rules;
pub mod drain_targets;
pub mod evacuation;
pub mod evacuators;
pub mod former_owner;
pub mod instigators;
pub mod names;
pub mod node_maintenance;
pub mod pod;
pub mod reports;
mod schema;
pub mod selector;
pub mod tolerations;
pub mod uid;

pub use drain_rule::{DrainRule, DrainRuleSpec};
pub use evacuation::{Evacuation, EvacuationSpec, EvacuationStatus};
pub use node_maintenance::{NodeMaintenance, NodeMaintenanceSpec, NodeMaintenanceStatus};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

/// All custom resource definitions of this API.
pub fn crds() -> [CustomResourceDefinition; 3] {
    [NodeMaintenance::crd(), Evacuation::crd(), DrainRule::crd()].map(schema::finish)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crds_use_groups_and_versions_of_names() {
        let found =
            crds().map(|crd| (crd.spec.group, crd.spec.versions[0].name.clone(), crd.spec.names.kind));
        let expected = [
            (names::NODE_MAINTENANCE_GROUP, "NodeMaintenance"),
            (names::EVACUATION_GROUP, "Evacuation"),
            (names::NODE_MAINTENANCE_GROUP, "DrainRule"),
        ];
        assert_eq!(found, expected.map(|(group, kind)| (group.into(), names::VERSION.into(), kind.into())));
    }

    #[test]
    fn every_field_has_a_description_and_rejects_null() {
        fn walk(path: &str, schema: &serde_json::Value) {
            let map_value = path.ends_with("matchLabels[]");
            assert!(map_value || schema.get("nullable").is_none(), "{path} is nullable");
            let children = schema["properties"].as_object().into_iter().flatten();
            for (name, property) in children {
                let path = format!("{path}.{name}");
                let own = !matches!(path.as_str(), ".metadata" | ".apiVersion" | ".kind");
                assert!(!own || property["description"].is_string(), "{path} has no description");
                walk(&path, property);
            }
            for nested in ["items", "additionalProperties"] {
                if let Some(nested) = schema.get(nested) {
                    walk(&format!("{path}[]"), nested);
                }
            }
        }
        for crd in crds() {
            let schema = crd.spec.versions[0].schema.as_ref().unwrap().open_api_v3_schema.as_ref().unwrap();
            walk("", &serde_json::to_value(schema).unwrap());
        }
    }
}

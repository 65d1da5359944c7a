//! Haulout's Kubernetes API and the pure rules on it: types, names, parsing, defaulting, ordering,
//! selection. There is no client, clock or async code in here, so that controllers, the admission
//! webhook and third-party evacuators all judge an object in the same way.
//!
//! | question | module |
//! |---|---|
//! | what does the object look like? | [`node_maintenance`], [`evacuation`], [`drain_rule`] |
//! | what is that annotation, finalizer, condition or reason called? | [`names`] |
//! | who may evacuate this pod, and what does its Evacuation look like? | [`evacuators`], [`instigators`] |
//! | how does an evacuator report? | [`reports`] |
//! | how are conditions written? | [`conditions`] |
//! | which pods leave when? | [`drain_plan`], [`drain_targets`], [`drain_rules`], [`pod`] |
//! | does this selector match? does this pod tolerate that taint? | [`selector`], [`tolerations`] |
//! | which pod is it? | [`uid`] |
//!
//! A reader may be older than the objects it reads: an enum may have grown. Read lists and watches through
//! kube's `DeserializeGuard`, so that one object that cannot be read does not hide all the others.

pub mod conditions;
pub mod drain_plan;
pub mod drain_rule;
pub mod drain_rules;
pub mod drain_targets;
pub mod evacuation;
pub mod evacuators;
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

/// All custom resource definitions of this API, in the order in which people read about them.
pub fn crds() -> [CustomResourceDefinition; 3] {
    [NodeMaintenance::crd(), Evacuation::crd(), DrainRule::crd()].map(schema::finish)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_versions_are_those_of_the_names_module() {
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
    fn no_field_takes_null_for_a_value_and_every_field_is_explained() {
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

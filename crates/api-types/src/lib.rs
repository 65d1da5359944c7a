//! Haulout's Kubernetes API and the pure rules on it: types, names, parsing, defaulting, ordering,
//! selection. There is no client, clock or async code in here, so that controllers, the admission
//! webhook and third-party evacuators all judge an object in the same way.
//!
//! | question | module |
//! |---|---|
//! | what does the object look like? | [`node_maintenance`], [`evacuation`], [`drain_rule`] |
//! | what is that annotation, finalizer, condition or reason called? | [`names`] |
//! | who may evacuate this pod, and what does its Evacuation look like? | [`evacuators`], [`instigators`] |
//! | which pods leave when? | [`drain_plan`], [`drain_rules`], [`pod`] |
//! | does this selector match? | [`selector`] |

pub mod drain_plan;
pub mod drain_rule;
pub mod drain_rules;
pub mod evacuation;
pub mod evacuators;
pub mod instigators;
pub mod names;
pub mod node_maintenance;
pub mod pod;
mod schema;
pub mod selector;

pub use drain_rule::{DrainRule, DrainRuleSpec};
pub use evacuation::{Evacuation, EvacuationSpec, EvacuationStatus};
pub use node_maintenance::{NodeMaintenance, NodeMaintenanceSpec, NodeMaintenanceStatus};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

/// All custom resource definitions of this API, in the order in which people read about them.
pub fn crds() -> [CustomResourceDefinition; 3] {
    [NodeMaintenance::crd(), Evacuation::crd(), DrainRule::crd()].map(schema::forbid_nulls)
}
#[cfg(test)]
mod tests { #[test] fn dump() { for c in super::crds() { println!("---\n{}", serde_json::to_string(&c).unwrap()); } } }

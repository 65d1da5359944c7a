//! Manual cordons and uncordons: allowed, with a warning if a maintenance holds the node.

use std::collections::BTreeMap;

use haulout_api_types::names::BEFORE_MAINTENANCE_ANNOTATION;
use haulout_api_types::node_maintenance::{BeforeMaintenance, NodeMaintenance, Stage};
use haulout_api_types::selector::{Labels, NodeMatcher};
use serde::Deserialize;

use super::Verdict;

/// The fields of a node that the rules read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Node {
    metadata: Metadata,
    spec: Spec,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Metadata {
    name: String,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Spec {
    unschedulable: Option<bool>,
}

impl Node {
    fn is_cordoned(&self) -> bool {
        self.spec.unschedulable == Some(true)
    }

    /// Whether the maintenance controller has recorded the node as schedulable and will uncordon it at the end. A node
    /// that it has not reached yet is recorded as it is at that time.
    fn will_be_uncordoned(&self) -> bool {
        let before =
            self.metadata.annotations.as_ref().and_then(|all| all.get(BEFORE_MAINTENANCE_ANNOTATION));
        let before = before.and_then(|text| serde_json::from_str::<BeforeMaintenance>(text).ok());
        before.is_some_and(|before| !before.unschedulable)
    }
}

/// Validates a change of a node, given all maintenances.
pub fn validate<'a>(
    old: &Node,
    new: &Node,
    maintenances: impl IntoIterator<Item = &'a NodeMaintenance>,
) -> Verdict {
    let mut verdict = Verdict::default();
    if old.is_cordoned() == new.is_cordoned() {
        return verdict;
    }
    let name = &new.metadata.name;
    let mut holders: Vec<_> = maintenances
        .into_iter()
        .filter(|maintenance| {
            let cordoned_at = [Stage::Cordon, Stage::Drain];
            is_at(maintenance, &cordoned_at, name, &new.metadata.labels)
        })
        .map(|maintenance| {
            let name = maintenance.metadata.name.as_deref().unwrap_or_default();
            format!("{name} (stage {})", maintenance.spec.stage.as_str())
        })
        .collect();
    holders.sort();
    let kind = match holders.len() {
        0 => return verdict,
        1 => "NodeMaintenance",
        _ => "NodeMaintenances",
    };
    let holders = holders.join(", ");
    let outlook = match (new.is_cordoned(), new.will_be_uncordoned()) {
        (false, _) => format!(
            "it will be cordoned again; to return it to service, set the stage to Complete or delete the {kind}"
        ),
        (true, true) => "it stays cordoned during the maintenance and is uncordoned afterwards".into(),
        (true, false) => "it stays cordoned during the maintenance and afterwards".into(),
    };
    verdict.warn(format!("node {name} is under maintenance by {kind} {holders}: {outlook}"));
    verdict
}

/// The names of the maintenances that drain this node, in alphabetical order.
pub fn drained_by<'a>(
    name: &str,
    labels: &impl Labels,
    maintenances: impl IntoIterator<Item = &'a NodeMaintenance>,
) -> Vec<String> {
    let draining = maintenances.into_iter().filter(|m| is_at(m, &[Stage::Drain], name, labels));
    let mut names: Vec<_> = draining.filter_map(|m| m.metadata.name.clone()).collect();
    names.sort();
    names
}

/// Whether the maintenance is in one of these stages and selects the node. A maintenance that is being deleted counts
/// as completed.
fn is_at(maintenance: &NodeMaintenance, stages: &[Stage], name: &str, labels: &impl Labels) -> bool {
    let active =
        stages.contains(&maintenance.spec.stage) && maintenance.metadata.deletion_timestamp.is_none();
    let matcher = active.then(|| NodeMatcher::new(&maintenance.spec.node_selector));
    matcher.and_then(Result::ok).is_some_and(|matcher| matcher.matches(name, labels))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn node(unschedulable: Value) -> Node {
        serde_json::from_value(json!({
            "metadata": {"name": "n1", "labels": {"zone": "a"}}, "spec": {"unschedulable": unschedulable}
        }))
        .unwrap()
    }

    fn maintenance(name: &str, stage: &str, zone: &str) -> NodeMaintenance {
        serde_json::from_value(json!({
            "apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "NodeMaintenance", "metadata": {"name": name},
            "spec": {"stage": stage, "nodeSelector": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]}]}}
        }))
        .unwrap()
    }

    #[test]
    fn manual_cordon_under_maintenance_warns() {
        let [cordoned, free, never] = [json!(true), json!(false), Value::Null].map(node);
        let drain = maintenance("m-2", "Drain", "a");
        let others = [
            maintenance("idle", "Idle", "a"),
            maintenance("over", "Complete", "a"),
            maintenance("elsewhere", "Drain", "b"),
        ];
        let mut all = others.to_vec();
        all.extend([drain.clone(), maintenance("m-1", "Cordon", "a")]);
        let warnings = |old: &Node, new: &Node, all: &[NodeMaintenance]| validate(old, new, all).warnings;

        assert_eq!(
            warnings(&cordoned, &never, std::slice::from_ref(&drain)),
            [
                "node n1 is under maintenance by NodeMaintenance m-2 (stage Drain): it will be cordoned again; to \
                 return it to service, set the stage to Complete or delete the NodeMaintenance"
            ]
        );
        let reached = |before: &str| {
            let mut node = cordoned.clone();
            let annotation = (BEFORE_MAINTENANCE_ANNOTATION.to_owned(), before.to_owned());
            node.metadata.annotations = Some(BTreeMap::from([annotation]));
            node
        };
        for (new, end) in [
            (cordoned.clone(), "afterwards"),
            (reached(r#"{"unschedulable": true}"#), "afterwards"),
            (reached("{}"), "is uncordoned afterwards"),
        ] {
            assert_eq!(
                warnings(&free, &new, &all),
                [format!(
                    "node n1 is under maintenance by NodeMaintenances m-1 (stage Cordon), m-2 (stage Drain): it stays \
                     cordoned during the maintenance and {end}"
                )]
            );
        }
        let labels = &cordoned.metadata.labels;
        assert_eq!(drained_by("n1", labels, &all), ["m-2"], "the other one only keeps it cordoned");
        assert_eq!(warnings(&cordoned, &free, &others), [""; 0]);
        assert_eq!(warnings(&free, &never, &all), [""; 0], "nothing changes");
        let mut going = drain;
        going.metadata.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH));
        assert_eq!(warnings(&cordoned, &free, &[going]), [""; 0]);
    }
}

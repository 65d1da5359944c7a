//! Sets the default drain plan entries of NodeMaintenances, determines the required permissions on nodes, and warns
//! about risky selectors. CEL rules in the CRD check immutability and stages before the webhook is called.

use std::collections::BTreeSet;

use haulout_api_types::drain_plan::{self, EntryMatcher};
use haulout_api_types::node_maintenance::{NodeMaintenance, Stage};
use haulout_api_types::selector::{Labels, NodeMatcher};
use k8s_openapi::api::core::v1::NodeSelector;
use serde_json::{Value, json};

use super::{Cause, Verdict, listed};

/// How many nodes a user can name who may not delete all nodes. Each needs an access review.
pub const MAX_NAMED_NODES: usize = 100;

/// How many nodes a warning names at most.
const MAX_LISTED_NODES: usize = 10;
const CONTROL_PLANE_LABEL: &str = "node-role.kubernetes.io/control-plane";

/// Appends the missing default entries to the plan. The user's entries keep their order, because the CRD compares the
/// plan with its old version. The controller sorts it.
pub fn set_defaults(old: Option<&NodeMaintenance>, new: &NodeMaintenance) -> Verdict {
    let mut verdict = Verdict::default();
    let given = &new.spec.drain_plan;
    // The warning is given here, because later the user's order is lost, and only on creation, because the plan is
    // immutable.
    if old.is_none() && !given.is_sorted_by(|a, b| drain_plan::compare(a, b).is_le()) {
        verdict.warn(
            "spec.drainPlan is processed in a different order than written: Default before DaemonSet before Static \
             pods, then ascending podPriority, entries with a podSelector first",
        );
    }
    let missing: Vec<_> = drain_plan::default_entries().filter(|entry| !given.contains(entry)).collect();
    if given.is_empty() {
        verdict.set(["spec", "drainPlan"], json!(missing));
    } else {
        for entry in missing {
            let entry = serde_json::to_value(entry).unwrap_or(Value::Null);
            verdict.set(["spec", "drainPlan", "-"], entry);
        }
    }
    verdict
}

/// The nodes that a user must have permission to delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequiredPermission {
    /// These nodes.
    Named(BTreeSet<String>),
    /// All nodes, for this reason.
    All(&'static str),
}

/// The permission that a selector requires. It covers nodes that match later.
pub fn required_permission(selector: &NodeSelector) -> RequiredPermission {
    let matcher = NodeMatcher::new(selector);
    match matcher.as_ref().ok().and_then(NodeMatcher::named_nodes) {
        Some(names) if names.len() <= MAX_NAMED_NODES => {
            RequiredPermission::Named(names.into_iter().map(Into::into).collect())
        }
        Some(_) => RequiredPermission::All("it names more than 100 nodes"),
        None => RequiredPermission::All("it can also match nodes that are added or labelled later"),
    }
}

/// Validates a new or changed maintenance, given all nodes.
pub fn validate<'a, L: Labels + 'a>(
    old: Option<&NodeMaintenance>,
    new: &NodeMaintenance,
    nodes: impl IntoIterator<Item = (&'a str, L)>,
) -> Verdict {
    let mut verdict = Verdict::default();
    for (index, entry) in new.spec.drain_plan.iter().enumerate() {
        if let Err(error) = EntryMatcher::new(entry) {
            verdict.deny(Cause::Selector, format!("spec.drainPlan[{index}].podSelector.{error}"));
        }
    }
    match NodeMatcher::new(&new.spec.node_selector) {
        Err(error) => verdict.deny(Cause::Selector, format!("spec.nodeSelector.{error}")),
        Ok(matcher) => {
            let stage_changes = old.is_none_or(|old| old.spec.stage != new.spec.stage);
            if stage_changes && new.spec.stage != Stage::Complete {
                verdict.warnings.extend(selector_warnings(&matcher, nodes));
            }
        }
    }
    verdict
}

fn selector_warnings<'a, L: Labels + 'a>(
    selector: &NodeMatcher,
    nodes: impl IntoIterator<Item = (&'a str, L)>,
) -> Vec<String> {
    let (mut all, mut matched, mut control_plane, mut control_plane_matched) = (0, 0, 0, 0);
    let mut absent = selector.named_nodes().unwrap_or_default();
    for (name, labels) in nodes {
        let selected = selector.matches(name, &labels);
        all += 1;
        matched += usize::from(selected);
        absent.remove(name);
        if labels.label(CONTROL_PLANE_LABEL).is_some() {
            control_plane += 1;
            control_plane_matched += usize::from(selected);
        }
    }
    if matched == 0 {
        let text = "spec.nodeSelector matches no node now; nodes that match later will be maintained: compare it with \
                    `kubectl get nodes --show-labels`";
        return vec![text.into()];
    }
    let mut selector_warnings = Vec::new();
    let risk = "draining all of them can leave the cluster degraded beyond recovery";
    if matched == all {
        selector_warnings.push(format!("spec.nodeSelector matches all nodes of the cluster ({all}): {risk}"));
    } else if control_plane > 0 && control_plane_matched == control_plane {
        selector_warnings
            .push(format!("spec.nodeSelector matches all control plane nodes ({control_plane}): {risk}"));
    }
    if !absent.is_empty() {
        let absent = listed(&absent.into_iter().collect::<Vec<_>>(), MAX_LISTED_NODES);
        selector_warnings.push(format!("spec.nodeSelector names nodes that do not exist: {absent}"));
    }
    selector_warnings
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn maintenance(stage: &str, terms: Value, plan: Value) -> NodeMaintenance {
        serde_json::from_value(json!({
            "apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "NodeMaintenance", "metadata": {"name": "m"},
            "spec": {"nodeSelector": {"nodeSelectorTerms": terms}, "stage": stage, "drainPlan": plan}
        }))
        .unwrap()
    }

    fn named(names: &[String]) -> Value {
        json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": names}]}])
    }

    fn labelled(key: &str) -> Value {
        json!([{"matchExpressions": [{"key": key, "operator": "Exists"}]}])
    }

    /// The plan after the patch.
    fn prepared(plan: &Value) -> Value {
        let new = maintenance("Idle", labelled("x"), plan.clone());
        let verdict = set_defaults(None, &new);
        assert_eq!(verdict.violations, []);
        let mut object = json!({"spec": {"drainPlan": plan}});
        json_patch::patch(&mut object, &verdict.patch).unwrap();
        object["spec"]["drainPlan"].clone()
    }

    #[test]
    fn missing_default_entries_are_appended() {
        let defaults: Vec<Value> =
            drain_plan::default_entries().map(|entry| serde_json::to_value(entry).unwrap()).collect();
        assert_eq!(prepared(&json!([])), json!(defaults));
        assert_eq!(prepared(&json!(defaults)), json!(defaults), "nothing is missing");

        let late = json!({"podPriority": 5000, "podType": "Default"});
        let early =
            json!({"podPriority": 1, "podType": "Default", "podSelector": {"matchLabels": {"app": "x"}}});
        let given = [late, defaults[11].clone(), early];
        let expected: Vec<_> = given.iter().chain(&defaults[..11]).cloned().collect();
        let once = prepared(&json!(given));
        assert_eq!(once, json!(expected), "the user's order is kept");
        assert_eq!(prepared(&once), once, "and nothing is added twice");
    }

    #[test]
    fn unsorted_plan_warns_on_creation_only() {
        let first = json!({"podPriority": 1, "podSelector": {"matchLabels": {"app": "x"}}});
        let (low, high) = (json!({"podPriority": 1}), json!({"podPriority": 2}));
        let daemon = json!({"podPriority": 0, "podType": "DaemonSet"});
        let cases = [
            (json!([]), false),
            (json!([first, low, high, daemon]), false),
            (json!([high, low]), true),
            (json!([low, first]), true),
            (json!([daemon, low]), true),
        ];
        for (plan, expected) in cases {
            let new = maintenance("Idle", labelled("x"), plan.clone());
            assert_eq!(!set_defaults(None, &new).warnings.is_empty(), expected, "{plan}");
            assert_eq!(set_defaults(Some(&new), &new).warnings, [] as [String; 0], "{plan}");
        }
    }

    #[test]
    fn missing_plan_is_created_by_the_patch() {
        let new = maintenance("Idle", labelled("x"), json!([]));
        let mut object = json!({"spec": {}});
        json_patch::patch(&mut object, &set_defaults(None, &new).patch).unwrap();
        assert_eq!(object["spec"]["drainPlan"].as_array().unwrap().len(), 12);
    }

    #[test]
    fn permissions_cover_named_nodes_or_all_nodes() {
        let names = |count: usize| (0..count).map(|i| format!("n{i:03}")).collect::<Vec<_>>();
        let needed =
            |terms: Value| required_permission(&maintenance("Idle", terms, json!([])).spec.node_selector);
        assert_eq!(needed(named(&names(2))), RequiredPermission::Named(names(2).into_iter().collect()));
        assert_eq!(needed(named(&names(100))), RequiredPermission::Named(names(100).into_iter().collect()));
        assert_eq!(
            needed(json!([{}])),
            RequiredPermission::Named(BTreeSet::new()),
            "it never matches anything"
        );
        let unreadable = json!([{"matchExpressions": [{"key": "a", "operator": "Nonsense"}]}]);
        for all in [named(&names(101)), labelled("absent"), unreadable] {
            assert!(matches!(needed(all.clone()), RequiredPermission::All(_)), "{all}");
        }
    }

    #[test]
    fn selectors_of_all_or_no_nodes_warn() {
        let label = |key: &str| BTreeMap::from([(key.to_owned(), String::new())]);
        let nodes = [
            ("c1", label(CONTROL_PLANE_LABEL)),
            ("c2", label(CONTROL_PLANE_LABEL)),
            ("w1", label("worker")),
            ("w2", label("worker")),
        ];
        let nodes = || nodes.iter().map(|(name, labels)| (*name, labels));
        let warning = |stage: &str, terms: Value| {
            let verdict = validate(None, &maintenance(stage, terms, json!([])), nodes());
            assert_eq!(verdict.violations, []);
            verdict.warnings.first().cloned().unwrap_or_default()
        };
        let everything =
            json!([{"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["x"]}]}]);
        let cases = [
            (labelled("gpu"), "matches no node now"),
            (everything.clone(), "matches all nodes of the cluster (4)"),
            (labelled(CONTROL_PLANE_LABEL), "matches all control plane nodes (2)"),
        ];
        for (terms, part) in cases {
            for stage in ["Idle", "Cordon", "Drain"] {
                assert!(warning(stage, terms.clone()).contains(part), "{terms}");
            }
            assert_eq!(warning("Complete", terms), "");
        }
        for fine in [labelled("worker"), named(&["c1".into(), "w1".into()])] {
            assert_eq!(warning("Drain", fine), "");
        }

        let absent =
            |count: usize| (0..count).map(|i| format!("x{i:02}")).chain(["w1".into()]).collect::<Vec<_>>();
        let partly = |count: usize| warning("Drain", named(&absent(count)));
        assert_eq!(partly(2), "spec.nodeSelector names nodes that do not exist: x00, x01");
        assert!(partly(12).ends_with("x08, x09 and 2 more"), "{}", partly(12));

        let old = maintenance("Cordon", everything.clone(), json!([]));
        let warned = |stage: &str| {
            !validate(Some(&old), &maintenance(stage, everything.clone(), json!([])), nodes())
                .warnings
                .is_empty()
        };
        assert!(warned("Drain"), "every new stage repeats the warning");
        assert!(!warned("Cordon") && !warned("Complete"));
    }

    #[test]
    fn all_invalid_selectors_are_listed() {
        let bad = |operator: &str| json!({"matchExpressions": [{"key": "a", "operator": operator}]});
        let plan = json!([{"podPriority": 1, "podSelector": bad("Exists")}, {"podPriority": 2, "podSelector": bad("is")}]);
        let verdict =
            validate::<BTreeMap<String, String>>(None, &maintenance("Idle", json!([bad("In")]), plan), []);
        let messages: Vec<_> =
            verdict.violations.iter().map(|violation| violation.message.as_str()).collect();
        assert_eq!(
            messages,
            [
                "spec.drainPlan[1].podSelector.matchExpressions[0]: operator \"is\" is not known",
                "spec.nodeSelector.nodeSelectorTerms[0].matchExpressions[0]: operator In needs at least one value",
            ]
        );
    }
}

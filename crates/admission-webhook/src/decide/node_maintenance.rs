//! NodeMaintenances: the entries that every drain plan has, which rights on nodes one needs, and what should make
//! its author look twice. Immutability and stages are judged by the definition's CEL rules before us.

use std::collections::BTreeSet;

use haulout_api_types::drain_plan::{self, EntryMatcher};
use haulout_api_types::node_maintenance::{NodeMaintenance, Stage};
use haulout_api_types::selector::{Labels, NodeMatcher};
use k8s_openapi::api::core::v1::NodeSelector;
use serde_json::{Value, json};

use super::{Cause, Verdict, listed};

/// How many nodes can be named by somebody who may not delete all of them: each is a question.
pub const MAX_NAMED: usize = 100;

/// How many names a warning has.
const SHOWN: usize = 10;
const CONTROL_PLANE_LABEL: &str = "node-role.kubernetes.io/control-plane";

/// Adds the default entries that the plan lacks, after those that are there: a plan is compared with its earlier
/// self in the order in which the user wrote it. The controller reads it in its own order.
pub fn prepare(old: Option<&NodeMaintenance>, new: &NodeMaintenance) -> Verdict {
    let mut verdict = Verdict::default();
    let given = &new.spec.drain_plan;
    // Here, because afterwards nobody knows what the user wrote; and only once, because the plan never changes.
    if old.is_none() && !given.is_sorted_by(|a, b| drain_plan::compare(a, b).is_le()) {
        verdict.warn(
            "spec.drainPlan is carried out in another order than it is written: Default before DaemonSet before Static \
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

/// What a user must be allowed to delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rights {
    /// These nodes.
    Named(BTreeSet<String>),
    /// All nodes, for this reason.
    All(&'static str),
}

/// The rights that a selector needs. Nodes that come to match later count as well.
pub fn rights(selector: &NodeSelector) -> Rights {
    let matcher = NodeMatcher::new(selector);
    match matcher.as_ref().ok().and_then(NodeMatcher::named_nodes) {
        Some(names) if names.len() <= MAX_NAMED => Rights::Named(names.into_iter().map(Into::into).collect()),
        Some(_) => Rights::All("it names more than 100 nodes"),
        None => Rights::All("it can also match nodes that come or are labelled later"),
    }
}

/// Judges a new or changed maintenance in a cluster with these nodes.
pub fn judge<'a, L: Labels + 'a>(
    old: Option<&NodeMaintenance>,
    new: &NodeMaintenance,
    nodes: impl IntoIterator<Item = (&'a str, L)>,
) -> Verdict {
    let mut verdict = Verdict::default();
    for (index, entry) in new.spec.drain_plan.iter().enumerate() {
        if let Err(error) = EntryMatcher::new(entry) {
            verdict.refuse(Cause::Selector, format!("spec.drainPlan[{index}].podSelector.{error}"));
        }
    }
    match NodeMatcher::new(&new.spec.node_selector) {
        Err(error) => verdict.refuse(Cause::Selector, format!("spec.nodeSelector.{error}")),
        Ok(matcher) => {
            let begins = old.is_none_or(|old| old.spec.stage != new.spec.stage);
            if begins && new.spec.stage != Stage::Complete {
                verdict.warnings.extend(doubts(&matcher, nodes));
            }
        }
    }
    verdict
}

fn doubts<'a, L: Labels + 'a>(
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
        let text = "spec.nodeSelector matches no node now, and a node that comes to match later will be maintained: \
                    compare it with `kubectl get nodes --show-labels`";
        return vec![text.into()];
    }
    let mut doubts = Vec::new();
    let risk = "with all of them drained the cluster may be degraded beyond recovery";
    if matched == all {
        doubts.push(format!("spec.nodeSelector matches all nodes of the cluster ({all}): {risk}"));
    } else if control_plane > 0 && control_plane_matched == control_plane {
        doubts.push(format!("spec.nodeSelector matches all control plane nodes ({control_plane}): {risk}"));
    }
    if !absent.is_empty() {
        let absent = listed(&absent.into_iter().collect::<Vec<_>>(), SHOWN);
        doubts.push(format!("spec.nodeSelector names nodes that are not there now: {absent}"));
    }
    doubts
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
        let verdict = prepare(None, &new);
        assert_eq!(verdict.violations, []);
        let mut object = json!({"spec": {"drainPlan": plan}});
        json_patch::patch(&mut object, &verdict.patch).unwrap();
        object["spec"]["drainPlan"].clone()
    }

    #[test]
    fn missing_default_entries_come_after_what_the_user_wrote() {
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
    fn a_plan_in_another_order_than_it_runs_is_warned_about_once() {
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
            assert_eq!(!prepare(None, &new).warnings.is_empty(), expected, "{plan}");
            assert_eq!(prepare(Some(&new), &new).warnings, [] as [String; 0], "{plan}");
        }
    }

    #[test]
    fn a_patch_makes_the_plan_where_there_is_none() {
        let new = maintenance("Idle", labelled("x"), json!([]));
        let mut object = json!({"spec": {}});
        json_patch::patch(&mut object, &prepare(None, &new).patch).unwrap();
        assert_eq!(object["spec"]["drainPlan"].as_array().unwrap().len(), 12);
    }

    #[test]
    fn rights_are_needed_on_the_nodes_that_are_named_or_on_all() {
        let names = |count: usize| (0..count).map(|i| format!("n{i:03}")).collect::<Vec<_>>();
        let needed = |terms: Value| rights(&maintenance("Idle", terms, json!([])).spec.node_selector);
        assert_eq!(needed(named(&names(2))), Rights::Named(names(2).into_iter().collect()));
        assert_eq!(needed(named(&names(100))), Rights::Named(names(100).into_iter().collect()));
        assert_eq!(needed(json!([{}])), Rights::Named(BTreeSet::new()), "it never matches anything");
        let unreadable = json!([{"matchExpressions": [{"key": "a", "operator": "Nonsense"}]}]);
        for all in [named(&names(101)), labelled("absent"), unreadable] {
            assert!(matches!(needed(all.clone()), Rights::All(_)), "{all}");
        }
    }

    #[test]
    fn selectors_of_all_control_plane_and_no_nodes_are_warned_about() {
        let label = |key: &str| BTreeMap::from([(key.to_owned(), String::new())]);
        let nodes = [
            ("c1", label(CONTROL_PLANE_LABEL)),
            ("c2", label(CONTROL_PLANE_LABEL)),
            ("w1", label("worker")),
            ("w2", label("worker")),
        ];
        let nodes = || nodes.iter().map(|(name, labels)| (*name, labels));
        let warning = |stage: &str, terms: Value| {
            let verdict = judge(None, &maintenance(stage, terms, json!([])), nodes());
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
        assert_eq!(partly(2), "spec.nodeSelector names nodes that are not there now: x00, x01");
        assert!(partly(12).ends_with("x08, x09 and 2 more"), "{}", partly(12));

        let old = maintenance("Cordon", everything.clone(), json!([]));
        let warned = |stage: &str| {
            !judge(Some(&old), &maintenance(stage, everything.clone(), json!([])), nodes())
                .warnings
                .is_empty()
        };
        assert!(warned("Drain"), "each stage is a new chance to look");
        assert!(!warned("Cordon") && !warned("Complete"));
    }

    #[test]
    fn selectors_that_cannot_be_read_are_all_named() {
        let bad = |operator: &str| json!({"matchExpressions": [{"key": "a", "operator": operator}]});
        let plan = json!([{"podPriority": 1, "podSelector": bad("Exists")}, {"podPriority": 2, "podSelector": bad("is")}]);
        let verdict =
            judge::<BTreeMap<String, String>>(None, &maintenance("Idle", json!([bad("In")]), plan), []);
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

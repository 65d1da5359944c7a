//! Validates DrainRules: selectors, and an order only with behavior Drain. Warns if another rule shadows the new one,
//! or if it waits for pods that a drain never waits for.

use haulout_api_types::drain_rule::{DrainBehavior, DrainRule};
use haulout_api_types::drain_rules::DrainRules;
use haulout_api_types::node_maintenance::PodType;
use haulout_api_types::selector::LabelMatcher;

use super::{Cause, Verdict};

/// Validates a new or changed rule, given the existing rules.
pub fn validate<'a>(new: &'a DrainRule, rules: impl IntoIterator<Item = &'a DrainRule>) -> Verdict {
    let mut verdict = Verdict::default();
    let spec = &new.spec;
    if spec.drain.order.is_some() && spec.drain.behavior != DrainBehavior::Drain {
        verdict.deny(
            Cause::Order,
            "spec.drain.order: can only be set with behavior Drain: remove it or change the behavior",
        );
    }
    let nodes = spec.nodes.iter().enumerate();
    let nodes = nodes.map(|(i, nodes)| (format!("spec.nodes[{i}].selector"), Some(&nodes.selector)));
    let pods = spec.pods.iter().enumerate().flat_map(|(i, pods)| {
        [("selector", &pods.selector), ("namespaceSelector", &pods.namespace_selector)]
            .map(|(field, selector)| (format!("spec.pods[{i}].{field}"), selector.as_ref()))
    });
    for (path, selector) in nodes.chain(pods) {
        if let Err(error) = LabelMatcher::from_optional(selector) {
            verdict.deny(Cause::Selector, format!("{path}.{error}"));
        }
    }
    if spec.drain.behavior == DrainBehavior::WaitCompleted {
        for (i, pods) in spec.pods.iter().enumerate() {
            if pods.pod_types.iter().any(|pod_type| *pod_type != PodType::Default) {
                verdict.warn(format!(
                    "spec.pods[{i}].podTypes: WaitCompleted applies to pods of type Default only; others are drained as \
                     if this rule did not exist: remove the other types, or use behavior Skip or Drain for them"
                ));
            }
        }
    }
    let name = new.metadata.name.as_deref().unwrap_or_default();
    let others = rules.into_iter().filter(|rule| rule.metadata.name.as_deref() != Some(name));
    let (all, _) = DrainRules::new(others.chain([new]));
    if let Some(earlier) = all.shadowing(name) {
        verdict.warn(format!(
            "DrainRule {name} never applies: {earlier} comes before it in alphabetical order and matches every pod \
             that it matches; give it a name that sorts before {earlier}, or make {earlier} match fewer pods"
        ));
    }
    verdict
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn rule(name: &str, spec: Value) -> DrainRule {
        serde_json::from_value(json!({
            "apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "DrainRule",
            "metadata": {"name": name}, "spec": spec
        }))
        .unwrap()
    }

    #[test]
    fn all_violations_of_a_rule_are_listed() {
        let bad = |operator: &str| json!({"matchExpressions": [{"key": "a", "operator": operator}]});
        let new = rule(
            "r",
            json!({
                "drain": {"behavior": "Skip", "order": 3},
                "nodes": [{"selector": {}}, {"selector": bad("In")}],
                "pods": [{"selector": bad("is"), "namespaceSelector": bad("NotIn")}]
            }),
        );
        let verdict = validate(&new, []);
        let messages: Vec<_> =
            verdict.violations.iter().map(|violation| violation.message.as_str()).collect();
        assert_eq!(
            messages,
            [
                "spec.drain.order: can only be set with behavior Drain: remove it or change the behavior",
                "spec.nodes[1].selector.matchExpressions[0]: operator In needs at least one value",
                "spec.pods[0].selector.matchExpressions[0]: operator \"is\" is not known",
                "spec.pods[0].namespaceSelector.matchExpressions[0]: operator NotIn needs at least one value",
            ]
        );
        let good =
            rule("r", json!({"drain": {"behavior": "Drain", "order": 3}, "nodes": [{"selector": {}}]}));
        assert_eq!(validate(&good, []), Verdict::default());
    }

    #[test]
    fn wait_completed_for_other_pod_types_warns() {
        let warned = |behavior: &str, types: &[&str]| {
            let spec =
                json!({"drain": {"behavior": behavior}, "pods": [{"selector": {}}, {"podTypes": types}]});
            validate(&rule("r", spec), []).warnings
        };
        for types in [&["DaemonSet"][..], &["Default", "Static"]] {
            let warnings = warned("WaitCompleted", types);
            assert!(warnings[0].starts_with("spec.pods[1].podTypes: WaitCompleted applies"), "{warnings:?}");
            assert_eq!(warned("Skip", types), [""; 0]);
        }
        assert_eq!(warned("WaitCompleted", &["Default"]), [""; 0]);
    }

    #[test]
    fn shadowed_rule_warns() {
        let web =
            json!({"drain": {"behavior": "Skip"}, "pods": [{"selector": {"matchLabels": {"app": "web"}}}]});
        let all = json!({"drain": {"behavior": "Drain"}});
        let there = [rule("b-all", all.clone()), rule("c-web", web.clone())];
        let warned = |name: &str, spec: &Value| validate(&rule(name, spec.clone()), &there).warnings;
        let warnings = warned("c-web", &web);
        assert!(
            warnings[0].starts_with("DrainRule c-web never applies: b-all comes before it"),
            "{warnings:?}"
        );
        assert_eq!(warned("a-web", &web), [""; 0]);
        assert_eq!(warned("b-all", &web), [""; 0], "its own old version is ignored");
    }
}

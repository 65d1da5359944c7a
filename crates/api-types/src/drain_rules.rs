//! Evaluates DrainRules: how a drain handles one pod, and which rule or label decides this.

use crate::drain_rule::{DrainBehavior, DrainRule, DrainRuleDrain};
use crate::names::DRAIN_LABEL;
use crate::node_maintenance::PodType;
use crate::selector::{LabelMatcher, Labels, SelectorError};

/// All DrainRules of a cluster, parsed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrainRules(Vec<Rule>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    name: String,
    /// `None` if the rule is unreadable. It might then apply to any pod.
    drain: Option<(DrainBehavior, i32)>,
    nodes: Vec<LabelMatcher>,
    /// ORed. If empty, the rule matches no pod.
    pods: Vec<PodMatcher>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct PodMatcher {
    pod: LabelMatcher,
    namespace: LabelMatcher,
    types: Vec<PodType>,
}

/// How a drain handles a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evaluation<'a> {
    /// Whether the pod is evacuated, stays, or is waited for.
    pub behavior: DrainBehavior,
    /// Order in which the pod leaves. Lower is earlier.
    pub order: i32,
    /// Which rule or label decides.
    pub source: Source<'a>,
}

/// What an evaluation is based on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source<'a> {
    /// The pod's label `cluster.x-k8s.io/drain`.
    PodLabel,
    /// The DrainRule with this name.
    Rule(&'a str),
    /// The DrainRule with this name is unreadable and might exclude the pod, so the drain waits.
    Unreadable(&'a str),
    /// The DrainRule with this name might exclude the pod, depending on the labels of its namespace, which are not
    /// known yet. The drain waits.
    NamespaceUnknown(&'a str),
    /// No rule and no label applies.
    Default,
}

impl DrainRules {
    /// Parses rules. Invalid rules are returned with their errors. They hold every pod that no earlier rule matches,
    /// because they might exclude it.
    pub fn new<'a>(rules: impl IntoIterator<Item = &'a DrainRule>) -> (Self, Vec<(String, SelectorError)>) {
        let mut read = Vec::new();
        let mut invalid = Vec::new();
        for rule in rules {
            let name = rule.metadata.name.clone().unwrap_or_default();
            match Rule::new(&name, rule) {
                Ok(rule) => read.push(rule),
                Err(error) => {
                    read.push(Rule::unreadable(name.clone()));
                    invalid.push((name, error));
                }
            }
        }
        read.sort_by(|a, b| a.name.cmp(&b.name));
        (Self(read), invalid)
    }

    /// Adds unreadable rules, of which only the names are known.
    #[must_use]
    pub fn with_unreadable<'a>(mut self, names: impl IntoIterator<Item = &'a str>) -> Self {
        self.0.extend(names.into_iter().map(|name| Rule::unreadable(name.into())));
        self.0.sort_by(|a, b| a.name.cmp(&b.name));
        self
    }

    /// How a drain handles a pod with these labels on a node with these labels. The pod's own label overrides all
    /// rules. Otherwise the first matching rule in alphabetical order applies. Only Default pods are waited for.
    /// `namespace` is `None` while the labels of the pod's namespace are not known.
    pub fn evaluate(
        &self,
        node: &impl Labels,
        namespace: Option<&impl Labels>,
        pod: &impl Labels,
        pod_type: PodType,
    ) -> Evaluation<'_> {
        let evaluation = |behavior, order, source| Evaluation { behavior, order, source };
        let applies = |behavior: &DrainBehavior| {
            *behavior != DrainBehavior::WaitCompleted || pod_type == PodType::Default
        };
        if let Some(behavior) = pod.label(DRAIN_LABEL).and_then(behavior_of_label).filter(applies) {
            return evaluation(behavior, 0, Source::PodLabel);
        }
        for rule in &self.0 {
            let source = match (rule.matches(node, namespace, pod, pod_type), &rule.drain) {
                (Some(false), _) => continue,
                (Some(true), Some((behavior, order))) => {
                    return evaluation(*behavior, *order, Source::Rule(&rule.name));
                }
                (Some(true), None) => Source::Unreadable(&rule.name),
                (None, _) => Source::NamespaceUnknown(&rule.name),
            };
            return evaluation(DrainBehavior::WaitCompleted, 0, source);
        }
        evaluation(DrainBehavior::Drain, 0, Source::Default)
    }

    /// Whether any rule depends on the labels of namespaces.
    pub fn use_namespaces(&self) -> bool {
        self.0.iter().flat_map(|rule| &rule.pods).any(|pods| !pods.namespace.matches_everything())
    }

    /// The first earlier rule that matches every pod of the rule with this name, so that the latter never applies.
    /// Shadowing by a combination of several rules is not detected.
    pub fn shadowing(&self, name: &str) -> Option<&str> {
        let shadowed = self.0.iter().find(|rule| rule.name == name)?;
        let earlier = self.0.iter().take_while(|rule| rule.name.as_str() < name);
        let mut readable = earlier.filter(|rule| rule.drain.is_some());
        readable.find(|rule| rule.covers(shadowed)).map(|rule| rule.name.as_str())
    }
}

fn behavior_of_label(value: &str) -> Option<DrainBehavior> {
    match value.to_ascii_lowercase().as_str() {
        "skip" => Some(DrainBehavior::Skip),
        "wait-completed" => Some(DrainBehavior::WaitCompleted),
        _ => None,
    }
}

impl Rule {
    fn new(name: &str, rule: &DrainRule) -> Result<Self, SelectorError> {
        let at = |path: String| {
            move |error: SelectorError| SelectorError { path: format!("{path}.{}", error.path), ..error }
        };
        let nodes = rule.spec.nodes.iter().enumerate().map(|(i, nodes)| {
            LabelMatcher::new(&nodes.selector).map_err(at(format!("spec.nodes[{i}].selector")))
        });
        let pods = rule.spec.pods.iter().enumerate().map(|(i, pods)| {
            Ok(PodMatcher {
                pod: LabelMatcher::from_optional(pods.selector.as_ref())
                    .map_err(at(format!("spec.pods[{i}].selector")))?,
                namespace: LabelMatcher::from_optional(pods.namespace_selector.as_ref())
                    .map_err(at(format!("spec.pods[{i}].namespaceSelector")))?,
                types: pods.pod_types.clone(),
            })
        });
        let nodes = nodes.collect::<Result<_, _>>()?;
        let mut pods: Vec<PodMatcher> = pods.collect::<Result<_, _>>()?;
        if pods.is_empty() {
            pods.push(PodMatcher::default());
        }
        let DrainRuleDrain { behavior, order } = &rule.spec.drain;
        if *behavior == DrainBehavior::WaitCompleted {
            pods.retain(|pods| pods.includes_type(PodType::Default));
            for pods in &mut pods {
                pods.types = vec![PodType::Default];
            }
        }
        Ok(Self { name: name.into(), drain: Some((*behavior, order.unwrap_or_default())), nodes, pods })
    }

    fn unreadable(name: String) -> Self {
        Self { name, drain: None, nodes: Vec::new(), pods: vec![PodMatcher::default()] }
    }

    /// Whether the rule matches. `None` if this depends on the unknown labels of the namespace.
    fn matches(
        &self,
        node: &impl Labels,
        namespace: Option<&impl Labels>,
        pod: &impl Labels,
        pod_type: PodType,
    ) -> Option<bool> {
        if !self.nodes.is_empty() && !self.nodes.iter().any(|nodes| nodes.matches(node)) {
            return Some(false);
        }
        let matching = self.pods.iter().filter(|pods| pods.includes_type(pod_type) && pods.pod.matches(pod));
        let mut unknown = false;
        for pods in matching {
            match namespace {
                _ if pods.namespace.matches_everything() => return Some(true),
                Some(namespace) if pods.namespace.matches(namespace) => return Some(true),
                Some(_) => {}
                None => unknown = true,
            }
        }
        (!unknown).then_some(false)
    }

    /// Whether this rule matches everything that the other rule matches.
    fn covers(&self, other: &Self) -> bool {
        // An empty list is equivalent to one entry that matches everything.
        let all_nodes = [LabelMatcher::default()];
        let nodes = if other.nodes.is_empty() { &all_nodes[..] } else { &other.nodes };
        (self.nodes.is_empty()
            || nodes.iter().all(|narrow| self.nodes.iter().any(|wide| narrow.implies(wide))))
            && other.pods.iter().all(|narrow| self.pods.iter().any(|wide| narrow.implies(wide)))
    }
}

impl PodMatcher {
    fn includes_type(&self, pod_type: PodType) -> bool {
        self.types.is_empty() || self.types.contains(&pod_type)
    }

    fn implies(&self, other: &Self) -> bool {
        PodType::ALL
            .into_iter()
            .all(|pod_type| !self.includes_type(pod_type) || other.includes_type(pod_type))
            && self.pod.implies(&other.pod)
            && self.namespace.implies(&other.namespace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use std::collections::BTreeMap;

    type Map = BTreeMap<String, String>;

    fn labels(of: &[(&str, &str)]) -> Map {
        of.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
    }

    fn rules(of: &[(&str, Value)]) -> DrainRules {
        let all: Vec<DrainRule> = of
            .iter()
            .map(|(name, spec)| {
                serde_json::from_value(json!({
                    "apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "DrainRule",
                    "metadata": {"name": name}, "spec": spec
                }))
                .unwrap()
            })
            .collect();
        let (rules, invalid) = DrainRules::new(&all);
        assert_eq!(invalid, []);
        rules
    }

    fn skip(rest: Value) -> Value {
        let mut spec = json!({"drain": {"behavior": "Skip"}});
        spec.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        spec
    }

    /// The samples of the MachineDrainRules proposal.
    #[test]
    fn rules_select_by_labels_and_namespace() {
        let rules = rules(&[
            (
                "skip-pods",
                skip(json!({"nodes": [{"selector": {}}], "pods": [
                    {"selector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["one", "two"]}]},
                     "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "shop"}}},
                    {"selector": {"matchLabels": {"app": "monitoring"}}}
                ]})),
            ),
            (
                "portworx",
                json!({"drain": {"behavior": "Drain", "order": 100}, "nodes": [{"selector": {}}],
                       "pods": [{"selector": {"matchLabels": {"app": "portworx"}}}]}),
            ),
        ]);
        let node = labels(&[]);
        let namespace = |name: &str| labels(&[("kubernetes.io/metadata.name", name)]);
        let cases = [
            ("shop", "one", DrainBehavior::Skip, 0, Source::Rule("skip-pods")),
            ("shop", "three", DrainBehavior::Drain, 0, Source::Default),
            ("other", "one", DrainBehavior::Drain, 0, Source::Default),
            ("other", "monitoring", DrainBehavior::Skip, 0, Source::Rule("skip-pods")),
            ("shop", "portworx", DrainBehavior::Drain, 100, Source::Rule("portworx")),
        ];
        for (ns, app, behavior, order, source) in cases {
            let evaluation =
                rules.evaluate(&node, Some(&namespace(ns)), &labels(&[("app", app)]), PodType::Default);
            assert_eq!(evaluation, Evaluation { behavior, order, source }, "{ns}/{app}");
        }
    }

    #[test]
    fn first_rule_by_name_applies_and_the_label_overrides_it() {
        let rules = rules(&[
            ("b", skip(json!({}))),
            ("a", json!({"drain": {"behavior": "Drain", "order": -3}})),
            ("c", json!({"drain": {"behavior": "WaitCompleted"}})),
        ]);
        let none = labels(&[]);
        let evaluate = |pod: &Map| {
            let evaluation = rules.evaluate(&none, Some(&none), pod, PodType::Default);
            (evaluation.behavior, evaluation.order, evaluation.source)
        };
        assert_eq!(evaluate(&none), (DrainBehavior::Drain, -3, Source::Rule("a")));
        for (value, behavior) in [
            ("skip", DrainBehavior::Skip),
            ("Skip", DrainBehavior::Skip),
            ("wait-completed", DrainBehavior::WaitCompleted),
        ] {
            assert_eq!(
                evaluate(&labels(&[(DRAIN_LABEL, value)])),
                (behavior, 0, Source::PodLabel),
                "{value}"
            );
        }
        assert_eq!(
            evaluate(&labels(&[(DRAIN_LABEL, "later")])).2,
            Source::Rule("a"),
            "an unknown value counts for nothing"
        );
    }

    #[test]
    fn nodes_and_pod_types_restrict_a_rule() {
        let rules = rules(&[(
            "a",
            skip(json!({
                "nodes": [{"selector": {"matchLabels": {"zone": "a"}}}, {"selector": {"matchLabels": {"zone": "b"}}}],
                "pods": [{"podTypes": ["DaemonSet", "Static"]}]
            })),
        )]);
        let none = labels(&[]);
        for (zone, pod_type, matched) in [
            ("a", PodType::DaemonSet, true),
            ("b", PodType::Static, true),
            ("c", PodType::Static, false),
            ("a", PodType::Default, false),
        ] {
            let source = rules.evaluate(&labels(&[("zone", zone)]), Some(&none), &none, pod_type).source;
            assert_eq!(source != Source::Default, matched, "{zone} {pod_type:?}");
        }
    }

    #[test]
    fn only_default_pods_are_waited_for() {
        let wait = |pods: Value| json!({"drain": {"behavior": "WaitCompleted"}, "pods": pods});
        let rules = rules(&[
            ("a", wait(json!([]))),
            ("b", wait(json!([{"podTypes": ["DaemonSet", "Static"]}]))),
            ("c", skip(json!({"pods": [{"podTypes": ["Static"]}]}))),
        ]);
        let none = labels(&[]);
        let own = labels(&[(DRAIN_LABEL, "wait-completed")]);
        let own_skip = labels(&[(DRAIN_LABEL, "skip")]);
        let cases = [
            (&none, PodType::Default, Source::Rule("a")),
            (&own, PodType::Default, Source::PodLabel),
            (&none, PodType::DaemonSet, Source::Default),
            (&own, PodType::DaemonSet, Source::Default),
            (&own, PodType::Static, Source::Rule("c")),
            (&own_skip, PodType::DaemonSet, Source::PodLabel),
        ];
        for (pod, pod_type, source) in cases {
            assert_eq!(
                rules.evaluate(&none, Some(&none), pod, pod_type).source,
                source,
                "{pod:?} {pod_type:?}"
            );
        }
        assert_eq!(rules.shadowing("c"), None, "the first rule matches no Static pod");
    }

    #[test]
    fn unknown_namespace_holds_pods_that_a_rule_may_match() {
        let in_shop = json!({"matchLabels": {"kubernetes.io/metadata.name": "shop"}});
        let web = json!({"matchLabels": {"app": "web"}});
        let rules = rules(&[
            (
                "a",
                json!({"drain": {"behavior": "Drain", "order": 1}, "pods": [{"selector": {"matchLabels": {"app": "first"}}}]}),
            ),
            ("b", skip(json!({"pods": [{"selector": web, "namespaceSelector": in_shop}]}))),
            (
                "c",
                skip(
                    json!({"nodes": [{"selector": {"matchLabels": {"zone": "z"}}}], "pods": [{"namespaceSelector": in_shop}]}),
                ),
            ),
        ]);
        let none = labels(&[]);
        let app = |app: &str| labels(&[("app", app)]);
        let skipped = labels(&[("app", "web"), (DRAIN_LABEL, "skip")]);
        let cases = [
            (app("web"), Source::NamespaceUnknown("b")),
            (app("first"), Source::Rule("a")),
            (app("other"), Source::Default),
            (skipped, Source::PodLabel),
        ];
        for (pod, source) in cases {
            let evaluation = rules.evaluate(&none, None::<&Map>, &pod, PodType::Default);
            assert_eq!(evaluation.source, source, "{pod:?}");
            let waits = evaluation.behavior == DrainBehavior::WaitCompleted;
            assert_eq!(waits, matches!(source, Source::NamespaceUnknown(_)));
        }
        assert_eq!(rules.evaluate(&none, Some(&none), &app("web"), PodType::Default).source, Source::Default);
    }

    #[test]
    fn unreadable_rule_holds_pods_that_no_earlier_rule_matches() {
        let rule = |name: &str, operator: &str| -> DrainRule {
            serde_json::from_value(json!({
                "apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "DrainRule", "metadata": {"name": name},
                "spec": skip(json!({"pods": [{"namespaceSelector": {"matchExpressions": [{"key": "x", "operator": operator}]}}]}))
            }))
            .unwrap()
        };
        let (rules, invalid) =
            DrainRules::new(&[rule("b", "in"), rule("a", "Exists"), rule("c", "DoesNotExist")]);
        let none = labels(&[]);
        let x = labels(&[("x", "")]);
        let evaluate = |rules: &DrainRules, namespace: &Map| {
            let Evaluation { behavior, source, .. } =
                rules.evaluate(&none, Some(namespace), &none, PodType::Default);
            (behavior, format!("{source:?}"))
        };
        assert_eq!(evaluate(&rules, &x), (DrainBehavior::Skip, r#"Rule("a")"#.into()));
        assert_eq!(evaluate(&rules, &none), (DrainBehavior::WaitCompleted, r#"Unreadable("b")"#.into()));
        assert_eq!(rules.shadowing("c"), None, "it may match nothing");
        let rules = rules.with_unreadable(["A"]);
        assert_eq!(evaluate(&rules, &x), (DrainBehavior::WaitCompleted, r#"Unreadable("A")"#.into()));
        assert_eq!(invalid[0].0, "b");
        assert_eq!(
            invalid[0].1.to_string(),
            "spec.pods[0].namespaceSelector.matchExpressions[0]: operator \"in\" is not known"
        );
    }

    #[test]
    fn rule_is_shadowed_by_an_earlier_broader_rule() {
        let web = json!({"matchLabels": {"app": "web"}});
        let zone = |zone: &str| json!({"selector": {"matchLabels": {"zone": zone}}});
        let all = json!({});
        let cases = [
            (all.clone(), all.clone(), true),
            (all.clone(), json!({"nodes": [zone("a")], "pods": [{"selector": web}]}), true),
            (json!({"pods": [{"selector": web}]}), all.clone(), false),
            (json!({"pods": [{"selector": web}]}), json!({"pods": [{"selector": web}]}), true),
            (json!({"pods": [{"selector": {}}]}), all.clone(), true),
            (json!({"nodes": [{"selector": {}}]}), all.clone(), true),
            (json!({"nodes": [zone("a")]}), json!({"nodes": [zone("b")]}), false),
            (json!({"nodes": [zone("a"), zone("b")]}), json!({"nodes": [zone("b")]}), true),
            (json!({"nodes": [zone("b")]}), json!({"nodes": [zone("a"), zone("b")]}), false),
            (
                json!({"pods": [{"podTypes": ["Default", "Static"]}]}),
                json!({"pods": [{"podTypes": ["Static"]}]}),
                true,
            ),
            (json!({"pods": [{"podTypes": ["Static"]}]}), json!({"pods": [{"selector": web}]}), false),
            (
                json!({"pods": [{"podTypes": ["Static", "Default", "DaemonSet"]}]}),
                json!({"pods": [{"selector": web}]}),
                true,
            ),
            (json!({"pods": [{"namespaceSelector": web}]}), json!({"pods": [{"selector": web}]}), false),
            (
                json!({"pods": [{"selector": web}, {"podTypes": ["Static"]}]}),
                json!({"pods": [{"podTypes": ["Static"], "selector": web}]}),
                true,
            ),
        ];
        for (earlier, later, expected) in cases {
            let rules = rules(&[("a", skip(earlier.clone())), ("b", skip(later.clone()))]);
            assert_eq!(rules.shadowing("b"), expected.then_some("a"), "{earlier} over {later}");
            assert_eq!(rules.shadowing("a"), None, "nothing comes before it");
            assert_eq!(rules.shadowing("c"), None, "there is none");
        }
    }

    proptest! {
        /// The order in which rules are listed or arrive does not matter.
        #[test]
        fn result_depends_only_on_rule_names(
            names in proptest::collection::btree_set("[a-e]{1,2}", 1..6).prop_map(|names| names.into_iter().collect::<Vec<_>>()).prop_shuffle(),
            app in "[a-e]",
        ) {
            let spec = |name: &str| skip(json!({"pods": [{"selector": {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": [&name[..1]]}]}}]}));
            let all: Vec<_> = names.iter().map(|name| (name.as_str(), spec(name))).collect();
            let none = labels(&[]);
            let rules = rules(&all);
            let first = names.iter().filter(|name| name[..1] != app).min();
            let source = rules.evaluate(&none, Some(&none), &labels(&[("app", &app)]), PodType::Default).source;
            prop_assert_eq!(source, first.map_or(Source::Default, |name| Source::Rule(name)));
        }
    }
}

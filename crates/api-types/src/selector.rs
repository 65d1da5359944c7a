//! Selectors, read once and matched often: Kubernetes' label selectors and node selectors with all
//! their operators. A selector that the schema would have refused is an error here, never a match.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use thiserror::Error;

/// A set of labels, however it is stored.
pub trait Labels {
    /// The value of the label with this key.
    fn label(&self, key: &str) -> Option<&str>;
}

impl Labels for BTreeMap<String, String> {
    fn label(&self, key: &str) -> Option<&str> {
        self.get(key).map(String::as_str)
    }
}

impl<L: Labels> Labels for Option<L> {
    fn label(&self, key: &str) -> Option<&str> {
        self.as_ref().and_then(|labels| labels.label(key))
    }
}

impl<L: Labels + ?Sized> Labels for &L {
    fn label(&self, key: &str) -> Option<&str> {
        (**self).label(key)
    }
}

/// A selector that cannot be read: where, and what is wrong with it.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{path}: {problem}")]
pub struct SelectorError {
    /// The field, relative to the selector.
    pub path: String,
    /// What is wrong, and what would be right.
    pub problem: String,
}

/// A label selector, ready to match. An empty one matches everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelMatcher(Vec<Requirement>);

impl LabelMatcher {
    /// Reads a selector.
    pub fn new(selector: &LabelSelector) -> Result<Self, SelectorError> {
        let equalities = selector.match_labels.iter().flatten().map(|(key, value)| {
            Ok(Requirement { key: key.clone(), test: Test::In(BTreeSet::from([value.clone()])) })
        });
        let expressions =
            selector.match_expressions.iter().flatten().enumerate().map(|(index, expression)| {
                let path = format!("matchExpressions[{index}]");
                let values = expression.values.as_deref().unwrap_or_default();
                match expression.operator.as_str() {
                    operator @ ("Gt" | "Lt") => Err(unknown_operator(path, operator)),
                    operator => Requirement::new(path, &expression.key, operator, values),
                }
            });
        equalities.chain(expressions).collect::<Result<_, _>>().map(Self)
    }

    /// Reads a selector that may be absent; an absent one matches everything, as an empty one does.
    pub fn from_optional(selector: Option<&LabelSelector>) -> Result<Self, SelectorError> {
        selector.map_or_else(|| Ok(Self::default()), Self::new)
    }

    /// Whether an object with these labels is selected.
    pub fn matches(&self, labels: &impl Labels) -> bool {
        self.0.iter().all(|requirement| requirement.matches(labels.label(&requirement.key)))
    }

    /// Whether it matches every object.
    pub fn matches_everything(&self) -> bool {
        self.0.is_empty()
    }
}

/// A node selector, ready to match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeMatcher(Vec<Term>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Term {
    labels: Vec<Requirement>,
    /// All of them are about `metadata.name`.
    names: Vec<Requirement>,
}

impl NodeMatcher {
    /// Reads a selector.
    pub fn new(selector: &NodeSelector) -> Result<Self, SelectorError> {
        let terms = selector.node_selector_terms.iter().enumerate().map(|(index, term)| {
            let path = |field: &str, i: usize| format!("nodeSelectorTerms[{index}].{field}[{i}]");
            let read = |path: String, requirement: &NodeSelectorRequirement| {
                let values = requirement.values.as_deref().unwrap_or_default();
                Requirement::new(path, &requirement.key, &requirement.operator, values)
            };
            let labels = term.match_expressions.iter().flatten().enumerate();
            let fields = term.match_fields.iter().flatten().enumerate();
            Ok(Term {
                labels: labels
                    .map(|(i, requirement)| read(path("matchExpressions", i), requirement))
                    .collect::<Result<_, _>>()?,
                names: fields
                    .map(|(i, requirement)| {
                        let path = path("matchFields", i);
                        match (requirement.key.as_str(), requirement.operator.as_str()) {
                            ("metadata.name", "In" | "NotIn") => read(path, requirement),
                            ("metadata.name", operator) => Err(SelectorError {
                                path,
                                problem: format!("operator {operator} is not supported: use In or NotIn"),
                            }),
                            (key, _) => Err(SelectorError {
                                path,
                                problem: format!("field {key} is not supported: use metadata.name"),
                            }),
                        }
                    })
                    .collect::<Result<_, _>>()?,
            })
        });
        terms.collect::<Result<_, _>>().map(Self)
    }

    /// Whether the node with this name and these labels is selected.
    pub fn matches(&self, name: &str, labels: &impl Labels) -> bool {
        self.0.iter().any(|term| {
            !(term.labels.is_empty() && term.names.is_empty())
                && term.names.iter().all(|requirement| requirement.matches(Some(name)))
                && term.labels.iter().all(|requirement| requirement.matches(labels.label(&requirement.key)))
        })
    }

    /// The only nodes that it can ever match, if it names them; `None` if a node that is made or
    /// labelled later could match too.
    pub fn named_nodes(&self) -> Option<BTreeSet<&str>> {
        let mut all = BTreeSet::new();
        for term in &self.0 {
            if term.labels.is_empty() && term.names.is_empty() {
                continue;
            }
            let names = term.names.iter().find_map(|requirement| match &requirement.test {
                Test::In(names) => Some(names),
                _ => None,
            })?;
            let possible = |name: &&String| term.names.iter().all(|other| other.matches(Some(name)));
            all.extend(names.iter().filter(possible).map(String::as_str));
        }
        Some(all)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    In(BTreeSet<String>),
    NotIn(BTreeSet<String>),
    Exists,
    DoesNotExist,
    Gt(i64),
    Lt(i64),
}

impl Requirement {
    fn new(path: String, key: &str, operator: &str, values: &[String]) -> Result<Self, SelectorError> {
        let test = match (operator, values) {
            ("In" | "NotIn", []) => Err(format!("operator {operator} needs at least one value")),
            ("In", values) => Ok(Test::In(values.iter().cloned().collect())),
            ("NotIn", values) => Ok(Test::NotIn(values.iter().cloned().collect())),
            ("Exists", []) => Ok(Test::Exists),
            ("DoesNotExist", []) => Ok(Test::DoesNotExist),
            ("Exists" | "DoesNotExist", _) => Err(format!("operator {operator} takes no values")),
            ("Gt" | "Lt", [value]) => match (value.parse(), operator) {
                (Ok(bound), "Gt") => Ok(Test::Gt(bound)),
                (Ok(bound), _) => Ok(Test::Lt(bound)),
                (Err(_), _) => Err(format!("operator {operator} needs a whole number, not {value:?}")),
            },
            ("Gt" | "Lt", _) => Err(format!("operator {operator} needs exactly one value")),
            (unknown, _) => return Err(unknown_operator(path, unknown)),
        };
        match test {
            Ok(test) => Ok(Self { key: key.into(), test }),
            Err(problem) => Err(SelectorError { path, problem }),
        }
    }

    fn matches(&self, value: Option<&str>) -> bool {
        // As in Kubernetes, a label that is absent or no number compares with nothing.
        let number = || value.and_then(|value| value.parse::<i64>().ok());
        match &self.test {
            Test::In(values) => value.is_some_and(|value| values.contains(value)),
            Test::NotIn(values) => !value.is_some_and(|value| values.contains(value)),
            Test::Exists => value.is_some(),
            Test::DoesNotExist => value.is_none(),
            Test::Gt(bound) => number().is_some_and(|number| number > *bound),
            Test::Lt(bound) => number().is_some_and(|number| number < *bound),
        }
    }
}

fn unknown_operator(path: String, operator: &str) -> SelectorError {
    SelectorError { path, problem: format!("operator {operator:?} is not known") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn labels(of: &[(&str, &str)]) -> BTreeMap<String, String> {
        of.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
    }

    fn label_matcher(selector: Value) -> Result<LabelMatcher, SelectorError> {
        LabelMatcher::new(&serde_json::from_value(selector).unwrap())
    }

    fn node_matcher(terms: Value) -> Result<NodeMatcher, SelectorError> {
        NodeMatcher::new(&serde_json::from_value(json!({"nodeSelectorTerms": terms})).unwrap())
    }

    fn one(key: &str, operator: &str, values: &[&str]) -> Value {
        json!({"key": key, "operator": operator, "values": values})
    }

    #[test]
    fn every_operator_of_a_node_selector() {
        let node = labels(&[("zone", "a"), ("cpus", "16"), ("os", "linux")]);
        let cases = [
            (one("zone", "In", &["a", "b"]), true),
            (one("zone", "In", &["b"]), false),
            (one("gpu", "In", &["a"]), false),
            (one("zone", "NotIn", &["a", "b"]), false),
            (one("zone", "NotIn", &["b"]), true),
            (one("gpu", "NotIn", &["a"]), true),
            (one("zone", "Exists", &[]), true),
            (one("gpu", "Exists", &[]), false),
            (one("zone", "DoesNotExist", &[]), false),
            (one("gpu", "DoesNotExist", &[]), true),
            (one("cpus", "Gt", &["15"]), true),
            (one("cpus", "Gt", &["16"]), false),
            (one("cpus", "Lt", &["17"]), true),
            (one("cpus", "Lt", &["16"]), false),
            (one("os", "Gt", &["1"]), false),
            (one("os", "Lt", &["1"]), false),
            (one("gpu", "Lt", &["1"]), false),
            (one("cpus", "Gt", &["-3"]), true),
        ];
        for (requirement, expected) in cases {
            let matcher = node_matcher(json!([{"matchExpressions": [requirement]}])).unwrap();
            assert_eq!(matcher.matches("n1", &node), expected, "{requirement}");
        }
    }

    #[test]
    fn terms_are_ored_requirements_anded_and_an_empty_term_matches_nothing() {
        let node = labels(&[("zone", "a"), ("os", "linux")]);
        let zone_a = one("zone", "In", &["a"]);
        let zone_b = one("zone", "In", &["b"]);
        let linux = one("os", "In", &["linux"]);
        let named = |names: &[&str]| json!({"matchFields": [one("metadata.name", "In", names)]});
        let cases = [
            (json!([]), false),
            (json!([{}]), false),
            (json!([{}, {"matchExpressions": [zone_a]}]), true),
            (json!([{"matchExpressions": [zone_a, linux]}]), true),
            (json!([{"matchExpressions": [zone_b, linux]}]), false),
            (json!([{"matchExpressions": [zone_b]}, {"matchExpressions": [linux]}]), true),
            (json!([named(&["n1"])]), true),
            (json!([named(&["n2"])]), false),
            (json!([named(&["n2", "n1"])]), true),
            (json!([{"matchFields": [one("metadata.name", "NotIn", &["n1"])]}]), false),
            (
                json!([{"matchFields": [one("metadata.name", "In", &["n1"])], "matchExpressions": [zone_b]}]),
                false,
            ),
        ];
        for (terms, expected) in cases {
            assert_eq!(node_matcher(terms.clone()).unwrap().matches("n1", &node), expected, "{terms}");
        }
    }

    #[test]
    fn a_selector_names_its_nodes_only_if_no_other_node_could_ever_match() {
        let by_name = |operator: &str, names: &[&str]| one("metadata.name", operator, names);
        let zone = one("zone", "In", &["a"]);
        let cases: [(Value, Option<&[&str]>); 10] = [
            (json!([{"matchFields": [by_name("In", &["a", "b"])]}]), Some(&["a", "b"])),
            (
                json!([{"matchFields": [by_name("In", &["a"])]}, {"matchFields": [by_name("In", &["b"])]}]),
                Some(&["a", "b"]),
            ),
            (json!([{"matchFields": [by_name("In", &["a"])], "matchExpressions": [zone]}]), Some(&["a"])),
            (
                json!([{"matchFields": [by_name("In", &["a", "b"]), by_name("In", &["b", "c"])]}]),
                Some(&["b"]),
            ),
            (json!([{"matchFields": [by_name("In", &["a"])]}, {"matchExpressions": [zone]}]), None),
            (json!([{"matchFields": [by_name("NotIn", &["a"])]}]), None),
            (json!([{"matchExpressions": [zone]}]), None),
            (json!([{"matchFields": [by_name("NotIn", &["a"]), by_name("In", &["a", "b"])]}]), Some(&["b"])),
            (json!([{}]), Some(&[])),
            (json!([]), Some(&[])),
        ];
        for (terms, expected) in cases {
            let matcher = node_matcher(terms.clone()).unwrap();
            let expected = expected.map(|names| names.iter().copied().collect::<BTreeSet<_>>());
            assert_eq!(matcher.named_nodes(), expected, "{terms}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let fields =
            |requirement: Value| node_matcher(json!([{}, {"matchFields": [requirement]}])).map(|_| ());
        let node =
            |requirement: Value| node_matcher(json!([{"matchExpressions": [requirement]}])).map(|_| ());
        let label =
            |requirement: Value| label_matcher(json!({"matchExpressions": [requirement]})).map(|_| ());
        let cases = [
            (label(one("a", "In", &[])), "matchExpressions[0]: operator In needs at least one value"),
            (label(one("a", "Gt", &["1"])), "matchExpressions[0]: operator \"Gt\" is not known"),
            (label(one("a", "Exists", &["1"])), "matchExpressions[0]: operator Exists takes no values"),
            (label(one("a", "in", &["1"])), "matchExpressions[0]: operator \"in\" is not known"),
            (
                node(one("a", "Gt", &["x"])),
                "nodeSelectorTerms[0].matchExpressions[0]: operator Gt needs a whole number, not \"x\"",
            ),
            (
                node(one("a", "Lt", &["1", "2"])),
                "nodeSelectorTerms[0].matchExpressions[0]: operator Lt needs exactly one value",
            ),
            (
                fields(one("metadata.uid", "In", &["x"])),
                "nodeSelectorTerms[1].matchFields[0]: field metadata.uid is not supported: use metadata.name",
            ),
            (
                fields(one("metadata.name", "Exists", &[])),
                "nodeSelectorTerms[1].matchFields[0]: operator Exists is not supported: use In or NotIn",
            ),
        ];
        for (result, expected) in cases {
            assert_eq!(result.unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn label_selectors_and_their_parts_and_absent_ones_match_all() {
        let both = label_matcher(json!({
            "matchLabels": {"app": "web"},
            "matchExpressions": [one("tier", "NotIn", &["db"])]
        }))
        .unwrap();
        assert!(both.matches(&labels(&[("app", "web")])));
        assert!(!both.matches(&labels(&[("app", "web"), ("tier", "db")])));
        assert!(!both.matches(&labels(&[("tier", "x")])));
        for all in [label_matcher(json!({})).unwrap(), LabelMatcher::from_optional(None).unwrap()] {
            assert!(all.matches_everything() && all.matches(&labels(&[])));
        }
    }

    proptest! {
        /// For every label selector, `NotIn` and `DoesNotExist` are the negations of `In` and `Exists`.
        #[test]
        fn negations_negate(key in "[a-c]", value in "[x-z]", labels in proptest::collection::btree_map("[a-c]", "[x-z]", 0..4)) {
            for (operator, negation, values) in [("In", "NotIn", vec![value.as_str()]), ("Exists", "DoesNotExist", vec![])] {
                let is = label_matcher(json!({"matchExpressions": [one(&key, operator, &values)]})).unwrap();
                let is_not = label_matcher(json!({"matchExpressions": [one(&key, negation, &values)]})).unwrap();
                prop_assert_ne!(is.matches(&labels), is_not.matches(&labels));
            }
        }

        /// A node that a naming selector matches is one that it names.
        #[test]
        fn only_named_nodes_match(
            terms in proptest::collection::vec(proptest::collection::vec((prop_oneof!["In", "NotIn"], proptest::collection::vec("[a-d]", 1..3)), 0..3), 0..4),
            node in "[a-d]",
        ) {
            let terms: Vec<Value> = terms.iter().map(|names| json!({"matchFields": names.iter().map(|(operator, names)| {
                json!({"key": "metadata.name", "operator": operator, "values": names})
            }).collect::<Vec<_>>()})).collect();
            let matcher = node_matcher(json!(terms)).unwrap();
            if let (Some(names), true) = (matcher.named_nodes(), matcher.matches(&node, &labels(&[]))) {
                prop_assert!(names.contains(node.as_str()));
            }
        }
    }
}

//! Parsed label selectors and node selectors, with all operators of Kubernetes. A selector that the schema would reject is an
//! error here and never matches.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use thiserror::Error;

mod implies;

/// A set of labels.
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

/// An invalid selector.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{path}: {problem}")]
pub struct SelectorError {
    /// The field, relative to the selector.
    pub path: String,
    /// What is wrong, and how to fix it.
    pub problem: String,
}

/// A parsed label selector. An empty selector matches everything.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LabelMatcher(Vec<Requirement>);

impl LabelMatcher {
    /// A selector that matches every object.
    pub const fn everything() -> Self {
        Self(Vec::new())
    }

    /// Parses a selector.
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
        equalities.chain(expressions).collect::<Result<_, _>>().map(Self::canonical)
    }

    /// Sorts and deduplicates requirements, so that equivalent selectors are equal.
    fn canonical(mut requirements: Vec<Requirement>) -> Self {
        requirements.sort();
        requirements.dedup();
        Self(requirements)
    }

    /// Parses an optional selector. An absent selector matches everything, like an empty one.
    pub fn from_optional(selector: Option<&LabelSelector>) -> Result<Self, SelectorError> {
        selector.map_or_else(|| Ok(Self::default()), Self::new)
    }

    /// Whether the selector matches an object with these labels.
    pub fn matches(&self, labels: &impl Labels) -> bool {
        self.0.iter().all(|requirement| requirement.matches(labels.label(&requirement.key)))
    }

    /// Whether the selector matches every object.
    pub fn matches_everything(&self) -> bool {
        self.0.is_empty()
    }

    /// The number of requirements.
    pub fn requirements(&self) -> usize {
        self.0.len()
    }

    /// Whether this selector has all requirements of `other`, so that it cannot match more.
    pub fn is_subset_of(&self, other: &Self) -> bool {
        other.0.iter().all(|requirement| self.0.binary_search(requirement).is_ok())
    }

    /// A selector that matches what both match.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self::canonical(self.0.iter().chain(&other.0).cloned().collect())
    }

    /// A selector that matches what either matches, if they differ only in the values of one label.
    pub fn or(&self, other: &Self) -> Option<Self> {
        let common: BTreeSet<&Requirement> = self.0.iter().filter(|r| other.0.contains(r)).collect();
        let differs = |of: &'_ Self| -> Option<Requirement> {
            let mut rest = of.0.iter().filter(|r| !common.contains(r));
            rest.next().filter(|_| rest.next().is_none()).cloned()
        };
        let (mine, others) = (differs(self)?, differs(other)?);
        let values = match (&mine.test, &others.test) {
            (Test::In(mine), Test::In(others)) => mine.union(others).cloned().collect(),
            _ => return None,
        };
        (mine.key == others.key).then(|| {
            let either = Requirement { key: mine.key, test: Test::In(values) };
            Self::canonical(common.into_iter().cloned().chain([either]).collect())
        })
    }

    /// Converts the selector to the API type. `None` if it matches everything.
    pub fn to_selector(&self) -> Option<LabelSelector> {
        let mut selector = LabelSelector::default();
        for Requirement { key, test } in &self.0 {
            let (operator, values) = match test {
                Test::In(values) if values.len() == 1 => {
                    let labels = selector.match_labels.get_or_insert_default();
                    if let (false, Some(value)) = (labels.contains_key(key), values.first()) {
                        labels.insert(key.clone(), value.clone());
                        continue;
                    }
                    ("In", Some(values))
                }
                Test::In(values) => ("In", Some(values)),
                Test::NotIn(values) => ("NotIn", Some(values)),
                Test::DoesNotExist => ("DoesNotExist", None),
                // Label selectors have no comparisons, and parsing rejects them.
                Test::Exists | Test::Gt(_) | Test::Lt(_) => ("Exists", None),
            };
            selector.match_expressions.get_or_insert_default().push(LabelSelectorRequirement {
                key: key.clone(),
                operator: operator.into(),
                values: values.map(|values| values.iter().cloned().collect()),
            });
        }
        (!self.matches_everything()).then_some(selector)
    }
}

/// A parsed node selector.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeMatcher(Vec<Term>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Term {
    labels: Vec<Requirement>,
    /// Requirements on `metadata.name`.
    names: Vec<Requirement>,
}

impl NodeMatcher {
    /// Parses a selector.
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

    /// Whether the selector matches the node with this name and these labels.
    pub fn matches(&self, name: &str, labels: &impl Labels) -> bool {
        self.0.iter().any(|term| {
            !term.is_empty()
                && term.allows_name(name)
                && term.labels.iter().all(|requirement| requirement.matches(labels.label(&requirement.key)))
        })
    }

    /// The names of all nodes that the selector can ever match. `None` if it could also match nodes that are created or
    /// labelled later.
    pub fn named_nodes(&self) -> Option<BTreeSet<&str>> {
        let mut all = BTreeSet::new();
        for term in self.0.iter().filter(|term| !term.is_empty()) {
            all.extend(term.named()?);
        }
        Some(all)
    }

    /// All nodes that any term names.
    pub fn names(&self) -> BTreeSet<&str> {
        self.0.iter().filter_map(Term::named).flatten().collect()
    }

    /// Whether any term names this node.
    pub fn names_node(&self, name: &str) -> bool {
        self.0.iter().any(|term| {
            let named = |requirement: &Requirement| matches!(requirement.test, Test::In(_));
            term.names.iter().any(named) && term.allows_name(name)
        })
    }
}

impl Term {
    fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.names.is_empty()
    }

    fn allows_name(&self, name: &str) -> bool {
        self.names.iter().all(|requirement| requirement.matches(Some(name)))
    }

    /// The names of all nodes that the term can match, if it is limited to names.
    fn named(&self) -> Option<impl Iterator<Item = &str>> {
        let names = self.names.iter().find_map(|requirement| match &requirement.test {
            Test::In(names) => Some(names),
            _ => None,
        })?;
        Some(names.iter().map(String::as_str).filter(|name| self.allows_name(name)))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
        // As in Kubernetes, comparisons never match a label that is absent or not a number.
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
mod tests;

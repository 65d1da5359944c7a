//! Parses a policy from YAML. An error has the line and column. A policy with any mistake is rejected as a whole,
//! because half a policy could delete pods that the other half protects.

use std::collections::BTreeMap;

use haulout_api_types::selector::{LabelMatcher, SelectorError};
use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use serde::Deserialize;
use serde_saphyr::{DefaultMessageFormatter, Location, MessageFormatter, Spanned};
use thiserror::Error;

use super::{Action, Glob, Policy, Removal, Rule};
use crate::taint::{OUT_OF_SERVICE, UNREACHABLE};

/// An empty file must not be taken for a policy that deletes everything.
const EMPTY: &str = "there are no rules: use \"rules: []\" to delete every pod that has to leave";

/// A mistake in a policy.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("line {line}, column {column}: {problem}")]
pub struct PolicyError {
    /// The line, from 1.
    pub line: u64,
    /// The column, from 1.
    pub column: u64,
    /// What is wrong, and how to fix it.
    pub problem: String,
}

impl PolicyError {
    fn new(at: Location, problem: impl Into<String>) -> Self {
        Self { line: at.line().max(1), column: at.column().max(1), problem: problem.into() }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPolicy {
    rules: Spanned<Option<Vec<Spanned<RawRule>>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct RawRule {
    key: Spanned<String>,
    value: Option<String>,
    pod_selector: Option<Spanned<RawSelector>>,
    namespace_selector: Option<Spanned<RawSelector>>,
    action: Option<Action>,
    force_delete_after: Option<Spanned<String>>,
}

/// A label selector that rejects unknown fields, because a misspelt field would select everything.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct RawSelector {
    match_labels: Option<BTreeMap<String, String>>,
    match_expressions: Option<Vec<RawExpression>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawExpression {
    key: String,
    operator: String,
    values: Option<Vec<String>>,
}

impl Policy {
    /// Parses a policy.
    pub fn from_yaml(yaml: &str) -> Result<Self, PolicyError> {
        if yaml.lines().map(str::trim).all(|line| line.is_empty() || line.starts_with('#')) {
            return Err(PolicyError::new(Location::UNKNOWN, EMPTY));
        }
        let written: RawPolicy = serde_saphyr::from_str(yaml).map_err(|error| {
            let problem = DefaultMessageFormatter.format_message(error.without_snippet()).replace('\n', " ");
            PolicyError::new(error.location().unwrap_or(Location::UNKNOWN), problem)
        })?;
        let Spanned { value: rules, referenced: at, .. } = written.rules;
        let rules = rules.ok_or_else(|| PolicyError::new(at, EMPTY))?;
        Ok(Self { rules: rules.into_iter().map(Rule::read).collect::<Result<_, _>>()? })
    }
}

impl Rule {
    fn read(written: Spanned<RawRule>) -> Result<Self, PolicyError> {
        let Spanned { value: rule, referenced: at, .. } = written;
        let key =
            Glob::new(rule.key.value).map_err(|problem| PolicyError::new(rule.key.referenced, problem))?;
        let force = |after: Spanned<String>| {
            force_delete_after(&key, &after.value)
                .map_err(|problem| PolicyError::new(after.referenced, problem))
        };
        let force_delete_after = rule.force_delete_after.map(force).transpose()?;
        let missing = || PolicyError::new(at, "action is missing: set Delete, Evict, Evacuate or Ignore");
        Ok(Self {
            key,
            value: rule.value,
            pods: matcher("podSelector", rule.pod_selector)?,
            namespaces: matcher("namespaceSelector", rule.namespace_selector)?,
            removal: Removal { action: rule.action.ok_or_else(missing)?, force_delete_after },
        })
    }
}

fn force_delete_after(key: &Glob, text: &str) -> Result<SignedDuration, String> {
    if !key.allows_force_delete() {
        return Err(format!(
            "forceDeleteAfter is only allowed for {OUT_OF_SERVICE} and {UNREACHABLE}, and the key {:?} matches neither: remove it",
            key.0
        ));
    }
    let duration = text.parse::<SignedDuration>().ok().filter(|duration| !duration.is_negative());
    duration.ok_or_else(|| format!("{text:?} is not a duration: use for example 0s, 90s, 10m or 1h30m"))
}

fn matcher(field: &str, selector: Option<Spanned<RawSelector>>) -> Result<LabelMatcher, PolicyError> {
    let Some(Spanned { value: written, referenced: at, .. }) = selector else {
        return Ok(LabelMatcher::default());
    };
    let requirement = |written: RawExpression| LabelSelectorRequirement {
        key: written.key,
        operator: written.operator,
        values: written.values,
    };
    let selector = LabelSelector {
        match_labels: written.match_labels,
        match_expressions: written.match_expressions.map(|all| all.into_iter().map(requirement).collect()),
    };
    LabelMatcher::new(&selector)
        .map_err(|SelectorError { path, problem }| PolicyError::new(at, format!("{field}.{path}: {problem}")))
}

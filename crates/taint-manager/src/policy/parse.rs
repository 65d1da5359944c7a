//! Reads a policy from YAML, as people write it. An error names its line, and a policy with
//! anything wrong in it is refused whole: half a policy would delete what the other half was to protect.

use std::collections::BTreeMap;

use haulout_api_types::selector::{LabelMatcher, SelectorError};
use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use serde::Deserialize;
use serde_saphyr::{DefaultMessageFormatter, Location, MessageFormatter, Spanned};
use thiserror::Error;

use super::{Action, Glob, Policy, Removal, Rule};
use crate::taint::{OUT_OF_SERVICE, UNREACHABLE};

/// A policy that was lost on the way must not pass for one that deletes everything.
const EMPTY: &str = "there are no rules: write \"rules: []\" if every pod that has to leave is to be deleted";

/// A policy that cannot be used: where, and what is wrong.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("line {line}, column {column}: {problem}")]
pub struct PolicyError {
    /// The line, from 1.
    pub line: u64,
    /// The column, from 1.
    pub column: u64,
    /// What is wrong, and what would be right.
    pub problem: String,
}

impl PolicyError {
    fn new(at: Location, problem: impl Into<String>) -> Self {
        Self { line: at.line().max(1), column: at.column().max(1), problem: problem.into() }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenPolicy {
    rules: Spanned<Option<Vec<Spanned<WrittenRule>>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct WrittenRule {
    key: Spanned<String>,
    value: Option<String>,
    pod_selector: Option<Spanned<WrittenSelector>>,
    namespace_selector: Option<Spanned<WrittenSelector>>,
    action: Option<Action>,
    force_delete_after: Option<Spanned<String>>,
}

/// A label selector that refuses unknown fields: one that is misspelt would select everything.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct WrittenSelector {
    match_labels: Option<BTreeMap<String, String>>,
    match_expressions: Option<Vec<WrittenExpression>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenExpression {
    key: String,
    operator: String,
    values: Option<Vec<String>>,
}

impl Policy {
    /// Reads a policy.
    pub fn from_yaml(yaml: &str) -> Result<Self, PolicyError> {
        if yaml.lines().map(str::trim).all(|line| line.is_empty() || line.starts_with('#')) {
            return Err(PolicyError::new(Location::UNKNOWN, EMPTY));
        }
        let written: WrittenPolicy = serde_saphyr::from_str(yaml).map_err(|error| {
            let problem = DefaultMessageFormatter.format_message(error.without_snippet()).replace('\n', " ");
            PolicyError::new(error.location().unwrap_or(Location::UNKNOWN), problem)
        })?;
        let Spanned { value: rules, referenced: at, .. } = written.rules;
        let rules = rules.ok_or_else(|| PolicyError::new(at, EMPTY))?;
        Ok(Self { rules: rules.into_iter().map(Rule::read).collect::<Result<_, _>>()? })
    }
}

impl Rule {
    fn read(written: Spanned<WrittenRule>) -> Result<Self, PolicyError> {
        let Spanned { value: rule, referenced: at, .. } = written;
        let key =
            Glob::new(rule.key.value).map_err(|problem| PolicyError::new(rule.key.referenced, problem))?;
        let force = |after: Spanned<String>| {
            force_delete_after(&key, &after.value)
                .map_err(|problem| PolicyError::new(after.referenced, problem))
        };
        let force_delete_after = rule.force_delete_after.map(force).transpose()?;
        let missing = || PolicyError::new(at, "action is missing: say Delete, Evict, Evacuate or Ignore");
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
    if !key.can_force() {
        return Err(format!(
            "forceDeleteAfter is for {OUT_OF_SERVICE} and {UNREACHABLE}, and the key {:?} matches neither: leave it out",
            key.0
        ));
    }
    let duration = text.parse::<SignedDuration>().ok().filter(|duration| !duration.is_negative());
    duration.ok_or_else(|| format!("{text:?} is no duration: write one such as 0s, 90s, 10m or 1h30m"))
}

fn matcher(field: &str, selector: Option<Spanned<WrittenSelector>>) -> Result<LabelMatcher, PolicyError> {
    let Some(Spanned { value: written, referenced: at, .. }) = selector else {
        return Ok(LabelMatcher::default());
    };
    let requirement = |written: WrittenExpression| LabelSelectorRequirement {
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

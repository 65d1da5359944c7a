//! The policy: an ordered list of rules that select an action by taint, pod and namespace. The first rule that matches
//! applies.

pub mod file;
mod parse;

use haulout_api_types::names::TAINT_ACTION_LABEL;
use haulout_api_types::selector::{LabelMatcher, Labels};
use jiff::SignedDuration;
use serde::Deserialize;

use crate::taint::{OUT_OF_SERVICE, Taint, UNREACHABLE};

/// What happens to a pod that has to leave, from harsh to gentle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
pub enum Action {
    /// The pod is deleted, as kube-controller-manager does.
    #[default]
    Delete,
    /// The pod is evicted through the Eviction API, which enforces PodDisruptionBudgets.
    Evict,
    /// An Evacuation is requested, so that evacuators can move the pod.
    Evacuate,
    /// The pod stays.
    Ignore,
}

impl Action {
    /// The action that the pod's label requests. A pod cannot request to stay.
    fn requested_by(pod: &impl Labels) -> Self {
        match pod.label(TAINT_ACTION_LABEL) {
            Some("Evict") => Self::Evict,
            Some("Evacuate") => Self::Evacuate,
            _ => Self::Delete,
        }
    }
}

/// An ordered list of rules. If no rule matches, a pod that has to leave is deleted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    rules: Vec<Rule>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    key: Glob,
    value: Option<String>,
    pods: LabelMatcher,
    namespaces: LabelMatcher,
    removal: Removal,
}

/// What the policy says about one pod and one taint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removal {
    /// The action.
    pub action: Action,
    /// After how long a pod that is stuck in termination is force-deleted, on a node that is out of service or
    /// unreachable; `None` if never.
    pub force_delete_after: Option<SignedDuration>,
}

impl Policy {
    /// Whether any rule selects by namespace labels.
    pub fn needs_namespaces(&self) -> bool {
        self.rules.iter().any(|rule| !rule.namespaces.matches_everything())
    }

    /// The removal of a pod with these labels because of this taint. The pod's own label can request a gentler action.
    pub fn removal(&self, taint: &Taint, pod: &impl Labels, namespace: &impl Labels) -> Removal {
        let rule = self.rules.iter().find(|rule| {
            rule.key.matches(&taint.key)
                && rule.value.as_deref().is_none_or(|value| value == &*taint.value)
                && rule.pods.matches(pod)
                && rule.namespaces.matches(namespace)
        });
        let removal = rule.map(|rule| rule.removal).unwrap_or_default();
        Removal { action: removal.action.max(Action::requested_by(pod)), ..removal }
    }
}

/// A pattern for taint keys. `*` matches any number of characters.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Glob(String);

impl Glob {
    fn new(pattern: String) -> Result<Self, String> {
        let invalid = |c: &char| !(c.is_ascii_alphanumeric() || "-_./*".contains(*c));
        match pattern.chars().find(invalid) {
            _ if pattern.is_empty() => {
                Err("an empty key matches no taint: use \"*\" to match all taints".into())
            }
            Some(invalid) => Err(format!(
                "{pattern:?} matches no taint: {invalid:?} is not allowed in a key; use letters, digits, '-', '_', '.', '/', and '*' for any number of them"
            )),
            None => Ok(Self(pattern)),
        }
    }

    fn matches(&self, key: &str) -> bool {
        let Some((first, rest)) = self.0.split_once('*') else { return self.0 == key };
        let Some(mut key) = key.strip_prefix(first) else { return false };
        let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
        // The leftmost match is always sufficient, because it leaves the longest rest.
        for part in middle.split('*') {
            match key.find(part).and_then(|place| key.get(place + part.len()..)) {
                Some(after) => key = after,
                None => return false,
            }
        }
        key.ends_with(last)
    }

    /// Whether it matches a taint for which force deletion is allowed.
    fn allows_force_delete(&self) -> bool {
        self.matches(OUT_OF_SERVICE) || self.matches(UNREACHABLE)
    }
}

#[cfg(test)]
mod tests;

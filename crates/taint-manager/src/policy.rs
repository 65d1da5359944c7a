//! What is done with a pod that has to leave, by taint, pod and namespace: an ordered list of rules of which
//! the first that matches counts.

pub mod file;
mod parse;

use haulout_api_types::names::TAINT_ACTION_LABEL;
use haulout_api_types::selector::{LabelMatcher, Labels};
use jiff::SignedDuration;
use serde::Deserialize;

use crate::taint::{OUT_OF_SERVICE, Taint, UNREACHABLE};

/// How a pod leaves; later ones are gentler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
pub enum Action {
    /// It is deleted, as kube-controller-manager does it.
    #[default]
    Delete,
    /// It is evicted through the Eviction API, so that disruption budgets are respected.
    Evict,
    /// An Evacuation is asked for, so that evacuators can bring it to safety first.
    Evacuate,
    /// It stays.
    Ignore,
}

impl Action {
    /// What the pod's label asks for. It cannot ask to stay.
    fn asked_for(pod: &impl Labels) -> Self {
        match pod.label(TAINT_ACTION_LABEL) {
            Some("Evict") => Self::Evict,
            Some("Evacuate") => Self::Evacuate,
            _ => Self::Delete,
        }
    }
}

/// An ordered list of rules. Without any, every pod that has to leave is deleted.
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

/// How the policy removes one pod because of one taint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removal {
    /// How the pod leaves.
    pub action: Action,
    /// How long after the end of its grace period a pod that hangs in termination is deleted by force, on a
    /// node that is out of service or unreachable; `None` if never.
    pub force_delete_after: Option<SignedDuration>,
}

impl Policy {
    /// Whether rules depend on labels of namespaces, so that these have to be known.
    pub fn needs_namespaces(&self) -> bool {
        self.rules.iter().any(|rule| !rule.namespaces.matches_everything())
    }

    /// How a pod of these labels is removed because of this taint. The pod's own label can make it gentler.
    pub fn removal(&self, taint: &Taint, pod: &impl Labels, namespace: &impl Labels) -> Removal {
        let rule = self.rules.iter().find(|rule| {
            rule.key.matches(&taint.key)
                && rule.value.as_deref().is_none_or(|value| value == &*taint.value)
                && rule.pods.matches(pod)
                && rule.namespaces.matches(namespace)
        });
        let removal = rule.map(|rule| rule.removal).unwrap_or_default();
        Removal { action: removal.action.max(Action::asked_for(pod)), ..removal }
    }
}

/// A pattern for keys of taints: an asterisk stands for any number of characters.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Glob(String);

impl Glob {
    fn new(pattern: String) -> Result<Self, String> {
        let odd = |c: &char| !(c.is_ascii_alphanumeric() || "-_./*".contains(*c));
        match pattern.chars().find(odd) {
            _ if pattern.is_empty() => Err("an empty key matches no taint: write \"*\" for all".into()),
            Some(odd) => Err(format!(
                "{pattern:?} matches no taint: a key has letters, digits, '-', '_', '.', '/', and '*' stands for any of these, but {odd:?} is none"
            )),
            None => Ok(Self(pattern)),
        }
    }

    fn matches(&self, key: &str) -> bool {
        let Some((first, rest)) = self.0.split_once('*') else { return self.0 == key };
        let Some(mut key) = key.strip_prefix(first) else { return false };
        let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
        // Leftmost is as good as any: what follows only gets more room.
        for part in middle.split('*') {
            match key.find(part).and_then(|place| key.get(place + part.len()..)) {
                Some(after) => key = after,
                None => return false,
            }
        }
        key.ends_with(last)
    }

    /// Whether it matches a taint on which pods can be taken by force.
    fn can_force(&self) -> bool {
        self.matches(OUT_OF_SERVICE) || self.matches(UNREACHABLE)
    }
}

#[cfg(test)]
mod tests;

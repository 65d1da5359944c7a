//! Decides where one of Haulout's own pods can run. The scheduler decides only after the pod has left, and by then a drain
//! that has evicted its own controller can neither continue nor report why.

use std::collections::BTreeMap;
use std::sync::Arc;

use haulout_api_types::selector::{Labels, NodeMatcher};
use haulout_api_types::tolerations::Toleration;

/// A taint that keeps new pods away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taint {
    /// Its key.
    pub key: Box<str>,
    /// Its value; empty if it has none.
    pub value: Box<str>,
    /// Its effect.
    pub effect: Box<str>,
}

/// The nodes that a pod selects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSelection {
    /// Its `nodeSelector`.
    pub labels: BTreeMap<String, String>,
    /// Its required node affinity.
    pub required: Option<NodeMatcher>,
}

/// What decides whether a pod can run on a node. Free capacity is not checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The nodes that it selects.
    pub selection: Arc<NodeSelection>,
    /// The taints that it tolerates.
    pub tolerations: Arc<[Toleration]>,
}

impl Placement {
    /// Whether it can run on a node with this name, these labels and these taints.
    pub fn fits(&self, name: &str, labels: &impl Labels, taints: &[Taint]) -> bool {
        let NodeSelection { labels: wanted, required } = &*self.selection;
        let tolerated = |taint: &Taint| {
            self.tolerations.iter().any(|own| own.matches(&taint.key, &taint.value, &taint.effect))
        };
        wanted.iter().all(|(key, value)| labels.label(key) == Some(value))
            && required.as_ref().is_none_or(|required| required.matches(name, labels))
            && taints.iter().all(tolerated)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{labels, named};

    #[test]
    fn placement_follows_labels_affinity_and_taints() {
        let infra = labels(&[("pool", "infra")]);
        let taint = |key: &str| Taint { key: key.into(), value: "".into(), effect: "NoSchedule".into() };
        let placement = |labels, required: Option<&[&str]>, tolerated: Option<&str>| Placement {
            selection: Arc::new(NodeSelection { labels, required: required.map(named) }),
            tolerations: tolerated
                .map(|key| Toleration {
                    key: Some(key.into()),
                    operator: Some("Exists".into()),
                    ..Toleration::default()
                })
                .into_iter()
                .collect(),
        };
        let anywhere = || placement(labels(&[]), None, None);
        let cases = [
            (anywhere(), vec![], true),
            (placement(infra.clone(), None, None), vec![], true),
            (placement(labels(&[("pool", "other")]), None, None), vec![], false),
            (placement(labels(&[]), Some(&["n"]), None), vec![], true),
            (placement(labels(&[]), Some(&["m"]), None), vec![], false),
            (anywhere(), vec![taint("gpu")], false),
            (placement(infra.clone(), Some(&["n"]), Some("gpu")), vec![taint("gpu")], true),
            (placement(infra.clone(), None, Some("gpu")), vec![taint("gpu"), taint("other")], false),
        ];
        for (placement, taints, expected) in cases {
            assert_eq!(placement.fits("n", &infra, &taints), expected, "{placement:?} {taints:?}");
        }
    }
}

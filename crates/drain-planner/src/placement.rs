//! Where a pod of Haulout itself can run. The scheduler knows better, but it is asked only once the pod is gone, and a
//! drain that has evicted the last of its own controllers goes no further and tells nobody.

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

/// The nodes that a pod asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeChoice {
    /// Its `nodeSelector`.
    pub labels: BTreeMap<String, String>,
    /// Its required node affinity.
    pub required: Option<NodeMatcher>,
}

/// What decides whether a pod can run on a node, apart from room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The nodes that it asks for.
    pub choice: Arc<NodeChoice>,
    /// The taints that it tolerates.
    pub tolerations: Arc<[Toleration]>,
}

impl Placement {
    /// Whether it can run on a node with this name, these labels and these taints.
    pub fn fits(&self, name: &str, labels: &impl Labels, taints: &[Taint]) -> bool {
        let NodeChoice { labels: wanted, required } = &*self.choice;
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
    fn labels_affinity_and_taints_decide_where_a_pod_can_run() {
        let infra = labels(&[("pool", "infra")]);
        let taint = |key: &str| Taint { key: key.into(), value: "".into(), effect: "NoSchedule".into() };
        let placement = |labels, required: Option<&[&str]>, tolerated: Option<&str>| Placement {
            choice: Arc::new(NodeChoice { labels, required: required.map(named) }),
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

//! Finds out whether Haulout's own pods could run on another node: one that is schedulable and not under maintenance.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use haulout_api_types::selector::Labels;
use haulout_api_types::uid::Uid;

use crate::facts::PodFacts;
use crate::node::NodeRecord;
use crate::placement::Placement;
use crate::planner::Planner;

#[derive(Default)]
pub(crate) struct OwnPods {
    /// The nodes that accept new pods.
    open_nodes: BTreeSet<Arc<str>>,
    /// Haulout's own pods on nodes that are being drained. There are few of them.
    pods: BTreeMap<Uid, OwnPod>,
}

struct OwnPod {
    /// The node that the pod is on.
    node: Arc<str>,
    placement: Arc<Placement>,
    /// Another node that accepts the pod.
    alternative: Option<Arc<str>>,
}

impl OwnPods {
    /// Whether this is one of Haulout's own pods and no other node accepts it.
    pub fn has_no_alternative(&self, pod: Uid) -> bool {
        self.pods.get(&pod).is_some_and(|pod| pod.alternative.is_none())
    }

    /// Forgets the pods on a node.
    pub fn forget_node(&mut self, node: &Arc<str>) {
        self.pods.retain(|_, pod| pod.node != *node);
    }
}

impl<L: Labels + Clone + PartialEq> Planner<L> {
    /// Looks for an alternative node for each of Haulout's own pods on a node.
    pub(crate) fn find_alternatives(&mut self, node: &Arc<str>, pods: &[PodFacts<L>]) {
        let own = |pod: &PodFacts<L>| Some((pod.key.uid, pod.placement.clone()?));
        let own: Vec<_> = pods.iter().filter_map(own).collect();
        if own.is_empty() && self.own_pods.pods.is_empty() {
            return;
        }
        self.own_pods.forget_node(node);
        for (uid, placement) in own {
            let alternative = self.alternative_for(&placement);
            self.own_pods.pods.insert(uid, OwnPod { node: node.clone(), placement, alternative });
        }
    }

    fn alternative_for(&self, placement: &Placement) -> Option<Arc<str>> {
        self.own_pods.open_nodes.iter().find(|name| self.fits(placement, name)).cloned()
    }

    fn fits(&self, placement: &Placement, name: &Arc<str>) -> bool {
        let facts = self.nodes.get(name).map(|record| &record.facts);
        facts.is_some_and(|facts| placement.fits(name, &facts.labels, &facts.taints))
    }

    /// Records whether a node accepts new pods.
    pub(crate) fn update_open_node(&mut self, name: &Arc<str>) {
        let open = self.nodes.get(name).is_some_and(NodeRecord::is_open);
        let open_nodes = &mut self.own_pods.open_nodes;
        let changed = if open { open_nodes.insert(name.clone()) } else { open_nodes.remove(name) };
        if changed {
            self.reassess_own_pods(name);
        }
    }

    /// Reassesses the nodes of those own pods for which this node has become, or is no longer, an alternative.
    pub(crate) fn reassess_own_pods(&mut self, name: &Arc<str>) {
        let open = self.own_pods.open_nodes.contains(name);
        let is_affected = |pod: &&OwnPod| match &pod.alternative {
            None => open && self.fits(&pod.placement, name),
            Some(alternative) => alternative == name && !(open && self.fits(&pod.placement, name)),
        };
        let nodes: Vec<_> =
            self.own_pods.pods.values().filter(is_affected).map(|pod| pod.node.clone()).collect();
        self.stale.extend(nodes);
    }
}

//! Whether the pods of Haulout itself could run elsewhere: on a node that is schedulable and that no maintenance wants.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use haulout_api_types::selector::Labels;
use haulout_api_types::uid::Uid;

use crate::facts::PodFacts;
use crate::node::NodeRecord;
use crate::placement::Placement;
use crate::planner::Planner;

#[derive(Default)]
pub(crate) struct Places {
    /// The nodes to which new pods can come.
    open: BTreeSet<Arc<str>>,
    /// The pods of Haulout itself on nodes that are drained. There are few of them.
    pods: BTreeMap<Uid, Place>,
}

struct Place {
    /// The node that the pod is on.
    on: Arc<str>,
    placement: Arc<Placement>,
    /// A node that would take it.
    other: Option<Arc<str>>,
}

impl Places {
    /// Whether this is a pod of Haulout itself that no other node would take.
    pub fn is_placeless(&self, pod: Uid) -> bool {
        self.pods.get(&pod).is_some_and(|place| place.other.is_none())
    }

    /// Forgets the pods on a node.
    pub fn forget_node(&mut self, node: &Arc<str>) {
        self.pods.retain(|_, place| place.on != *node);
    }
}

impl<L: Labels + Clone + PartialEq> Planner<L> {
    /// Looks for other nodes for those pods of a node that are of Haulout itself.
    pub(crate) fn find_places(&mut self, node: &Arc<str>, pods: &[PodFacts<L>]) {
        let own = |pod: &PodFacts<L>| Some((pod.key.uid, pod.placement.clone()?));
        let own: Vec<_> = pods.iter().filter_map(own).collect();
        if own.is_empty() && self.places.pods.is_empty() {
            return;
        }
        self.places.forget_node(node);
        for (uid, placement) in own {
            let other = self.place_for(&placement);
            self.places.pods.insert(uid, Place { on: node.clone(), placement, other });
        }
    }

    fn place_for(&self, placement: &Placement) -> Option<Arc<str>> {
        self.places.open.iter().find(|name| self.fits(placement, name)).cloned()
    }

    fn fits(&self, placement: &Placement, name: &Arc<str>) -> bool {
        let facts = self.nodes.get(name).map(|record| &record.facts);
        facts.is_some_and(|facts| placement.fits(name, &facts.labels, &facts.taints))
    }

    /// Takes note of whether new pods can come to a node.
    pub(crate) fn note_openness(&mut self, name: &Arc<str>) {
        let open = self.nodes.get(name).is_some_and(NodeRecord::is_open);
        let changed =
            if open { self.places.open.insert(name.clone()) } else { self.places.open.remove(name) };
        if changed {
            self.place_changed(name);
        }
    }

    /// Has pods looked at again to which a node matters that has become another place for them.
    pub(crate) fn place_changed(&mut self, name: &Arc<str>) {
        let open = self.places.open.contains(name);
        let concerned = |place: &&Place| match &place.other {
            None => open && self.fits(&place.placement, name),
            Some(other) => other == name && !(open && self.fits(&place.placement, name)),
        };
        let nodes: Vec<_> =
            self.places.pods.values().filter(concerned).map(|place| place.on.clone()).collect();
        self.stale.extend(nodes);
    }
}

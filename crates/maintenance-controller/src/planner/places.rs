//! Whether the pods of Haulout itself could run elsewhere: on a node that is schedulable and that no maintenance wants.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use haulout_api_types::selector::Labels;

use super::Planner;
use super::node::NodeRecord;
use crate::facts::{PodFacts, PodKey};
use crate::placement::Placement;

#[derive(Default)]
pub(super) struct Places {
    /// The nodes to which new pods can come.
    open: BTreeSet<Arc<str>>,
    /// The pods of Haulout itself, and for each a node that would take it. There are few of them.
    pods: BTreeMap<PodKey, Place>,
}

struct Place {
    placement: Arc<Placement>,
    node: Option<Arc<str>>,
}

impl Places {
    pub fn forget(&mut self, pod: &PodKey) {
        self.pods.remove(pod);
    }

    /// Whether it is a pod of Haulout itself that no other node would take.
    pub fn is_placeless(&self, pod: &PodKey) -> bool {
        self.pods.get(pod).is_some_and(|place| place.node.is_none())
    }
}

impl<L: Labels + Clone + PartialEq> Planner<L> {
    /// Looks for another node for a pod, if it is of Haulout itself.
    pub(super) fn find_place(&mut self, facts: &PodFacts<L>) {
        let Some(placement) = &facts.placement else {
            self.places.forget(&facts.key);
            return;
        };
        let node = self.place_for(placement);
        self.places.pods.insert(facts.key.clone(), Place { placement: placement.clone(), node });
    }

    fn place_for(&self, placement: &Placement) -> Option<Arc<str>> {
        self.places.open.iter().find(|name| self.fits(placement, name)).cloned()
    }

    fn fits(&self, placement: &Placement, name: &Arc<str>) -> bool {
        let facts = self.nodes.get(name).and_then(|record| record.facts.as_ref());
        facts.is_some_and(|facts| placement.fits(name, &facts.labels, &facts.taints))
    }

    /// Takes note of whether new pods can come to a node.
    pub(super) fn note_openness(&mut self, name: &Arc<str>) {
        let open = self.nodes.get(name).is_some_and(NodeRecord::is_open);
        let changed =
            if open { self.places.open.insert(name.clone()) } else { self.places.open.remove(name) };
        if changed {
            self.place_changed(name);
        }
    }

    /// Looks anew where pods can run, after a node has become another place for them.
    pub(super) fn place_changed(&mut self, name: &Arc<str>) {
        let open = self.places.open.contains(name);
        let mut found = Vec::new();
        for (pod, place) in &self.places.pods {
            let fits = open && self.fits(&place.placement, name);
            match &place.node {
                None if fits => found.push((pod.clone(), Some(name.clone()))),
                Some(node) if node == name && !fits => {
                    found.push((pod.clone(), self.place_for(&place.placement)));
                }
                _ => {}
            }
        }
        for (key, node) in found {
            let placeless = node.is_none();
            if let Some(place) = self.places.pods.get_mut(&key) {
                place.node = node;
            }
            let Some(of) = self.node_of_pod.get(&key).cloned() else { continue };
            let pod = self.nodes.get_mut(&of).and_then(|record| record.pods.get_mut(&key));
            if let Some(pod) = pod.filter(|pod| pod.placeless != placeless) {
                pod.placeless = placeless;
                self.count(&of);
            }
        }
    }
}

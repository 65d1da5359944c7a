//! A world around one pod, for tables of decisions.

use super::*;
use crate::taint::OUT_OF_SERVICE;
use crate::testing::{Json, at, clear_since, taint};

/// A world around one pod, in which all has been in sight for ever and nothing else is special.
pub(super) struct World {
    pub(super) node: NodeFacts,
    policy: Policy,
    pub(super) sight: Sight,
    evacuation: bool,
}

pub(super) fn on(taints: &[(&str, i64)]) -> World {
    let taints = taints.iter().map(|(text, since)| taint(text, *since)).collect();
    let node = NodeFacts { taints, ..NodeFacts::default() };
    World { node, policy: Policy::default(), sight: clear_since(-1000), evacuation: false }
}

impl World {
    pub(super) fn under(mut self, rules: &str) -> Self {
        self.policy = Policy::from_yaml(&format!("rules: [{rules}]")).unwrap();
        self
    }

    pub(super) fn seen(mut self, sight: Sight) -> Self {
        self.sight = sight;
        self
    }

    pub(super) fn evacuating(mut self) -> Self {
        self.evacuation = true;
        self
    }

    pub(super) fn out_of_service(mut self, since: i64, ready: bool) -> Self {
        self.node.out_of_service = Some(taint(OUT_OF_SERVICE, since));
        self.node.ready = ready;
        self
    }

    /// The verdict, the reason's word, and whether our Evacuation is released.
    pub(super) fn decide(&self, pod: &Json, now: i64) -> (Verdict, &'static str, bool) {
        let (pod, none) = (pod.read(), BTreeMap::new());
        let view = View {
            pod: &pod,
            node: Some(&self.node),
            namespace: Some(&none),
            evacuation: self.evacuation,
            policy: &self.policy,
            sight: self.sight,
        };
        let decision = decide(&view, at(now));
        (decision.verdict, decision.reason.word(), decision.release)
    }

    pub(super) fn verdict(&self, pod: &Json, now: i64) -> Verdict {
        self.decide(pod, now).0
    }
}

pub(super) fn delete(due: i64) -> Verdict {
    Verdict::Act { how: How::Delete, due: at(due), again: None }
}

pub(super) fn act(how: How, due: i64) -> Verdict {
    Verdict::Act { how, due: at(due), again: None }
}

pub(super) fn wait(until: i64) -> Verdict {
    Verdict::Wait { until: at(until) }
}

//! What decides about pods besides the pods themselves: their Evacuations, volumes, owners that put them back, and what
//! could not be written. Makes of each pod what the planner has to know.

use std::collections::HashMap;
use std::sync::Arc;

use haulout_api_types::names::reason;
use haulout_drain_planner::Which;
use haulout_drain_planner::facts::{PodFacts, PodKey};
use haulout_drain_planner::placement::{NodeChoice, Placement};
use haulout_service_runtime::pods::{LabelSet, Pod, Uid};
use jiff::Timestamp;

use super::returns::Returns;
use super::volumes::Volumes;
use crate::seen::{EvacuationSeen, NodeSeen};
use crate::writes::WriteLog;

pub(super) struct Pods {
    /// By the UID of the pod.
    pub evacuations: HashMap<Uid, EvacuationSeen>,
    /// Writes to their Evacuations.
    pub writes: WriteLog<Uid>,
    pub volumes: Volumes,
    /// The pods of Haulout itself by name, with the nodes that they ask for.
    pub own: HashMap<Arc<str>, (Uid, Arc<NodeChoice>)>,
    pub returns: Returns,
}

impl Pods {
    pub fn new(now: Timestamp) -> Self {
        Self {
            evacuations: HashMap::new(),
            writes: WriteLog::new(reason::EVACUATION_REFUSED, "its Evacuation"),
            volumes: Volumes::default(),
            own: HashMap::new(),
            returns: Returns::new(now),
        }
    }

    /// A pod is gone.
    pub fn remove(&mut self, pod: &Pod, now: Timestamp) {
        self.returns.remove(pod, now);
        self.writes.forget(&pod.uid);
        self.volumes.forget_claims(pod);
    }

    /// A pod of Haulout itself asks for these nodes; `None` if it is gone. The pods that this concerns.
    pub fn put_own(&mut self, name: Arc<str>, seen: Option<(Uid, NodeChoice)>) -> Vec<Uid> {
        let new = seen.as_ref().map(|(uid, _)| *uid);
        let old = match seen {
            Some((uid, choice)) => self.own.insert(name, (uid, Arc::new(choice))),
            None => self.own.remove(&name),
        };
        old.map(|(uid, _)| uid).into_iter().chain(new).collect()
    }

    /// What the planner has to know of the pods of a node.
    pub fn facts(
        &mut self,
        name: &Arc<str>,
        which: Which,
        node: &NodeSeen,
        pods: &[Arc<Pod>],
        now: Timestamp,
    ) -> Vec<PodFacts<LabelSet>> {
        match which {
            Which::All(drain_began) => {
                pods.iter().map(|pod| self.fact(name, drain_began, node, pod, now)).collect()
            }
            Which::WithEvacuation => {
                // Whoever comes back to the next drain begins at the beginning.
                self.returns.forget(name);
                let evacuated: Vec<_> =
                    pods.iter().filter(|pod| self.evacuations.contains_key(&pod.uid)).collect();
                evacuated.into_iter().map(|pod| self.fact(name, None, node, pod, now)).collect()
            }
        }
    }

    fn fact(
        &mut self,
        name: &Arc<str>,
        drain_began: Option<Timestamp>,
        node: &NodeSeen,
        pod: &Pod,
        now: Timestamp,
    ) -> PodFacts<LabelSet> {
        let uncordoned = node.marks.was_uncordoned();
        let returned = drain_began.and_then(|began| self.returns.observe(pod, false, began, uncordoned, now));
        let evacuation = self.evacuations.get(&pod.uid);
        let held = || evacuation.and_then(EvacuationSeen::held);
        let blocked = || evacuation.and_then(|seen| seen.blocked.clone());
        PodFacts {
            key: PodKey { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid },
            node: name.clone(),
            labels: pod.labels.clone(),
            pod_type: pod.pod_type,
            priority: pod.priority,
            finished: pod.is_finished(),
            terminating: pod.terminating,
            deadline: pod.deletion_timestamp(),
            evacuation: evacuation.map(EvacuationSeen::planned).unwrap_or_default(),
            volumes: self.volumes.of_pod(pod),
            returned: returned.map(Box::new),
            placement: self.placement(pod),
            blocked: self.writes.blocked(&pod.uid).or_else(held).or_else(blocked),
            turn: evacuation.and_then(|seen| seen.turn.clone()),
        }
    }

    /// Where else a pod of Haulout itself can run.
    fn placement(&self, pod: &Pod) -> Option<Arc<Placement>> {
        let (uid, choice) = self.own.get(&pod.name)?;
        let tolerations = pod.tolerations.clone();
        (*uid == pod.uid).then(|| Arc::new(Placement { choice: choice.clone(), tolerations }))
    }
}

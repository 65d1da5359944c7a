//! Everything about pods that is not in the pod cache: Evacuations, volumes, returning pods and failed writes. Builds the
//! planner's input for each pod.

use std::collections::HashMap;
use std::sync::Arc;

use haulout_api_types::names::reason;
use haulout_drain_planner::PodScope;
use haulout_drain_planner::facts::{PodFacts, PodKey};
use haulout_drain_planner::placement::{NodeSelection, Placement};
use haulout_service_runtime::pods::{LabelSet, Pod, Uid};
use jiff::Timestamp;

use super::returns::Returns;
use super::volumes::Volumes;
use crate::observed::{ObservedEvacuation, ObservedNode, ObservedOwnPod};
use crate::writes::WriteLog;

pub(super) struct PodState {
    /// Evacuations by the UID of the pod.
    pub evacuations: HashMap<Uid, ObservedEvacuation>,
    /// Writes to Evacuations.
    pub writes: WriteLog<Uid>,
    pub volumes: Volumes,
    /// Haulout's own pods by name, with the nodes that they select.
    pub own: HashMap<Arc<str>, (Uid, Arc<NodeSelection>)>,
    pub returns: Returns,
}

impl PodState {
    pub fn new(now: Timestamp) -> Self {
        Self {
            evacuations: HashMap::new(),
            writes: WriteLog::new(reason::EVACUATION_REJECTED, "the pod's Evacuation"),
            volumes: Volumes::default(),
            own: HashMap::new(),
            returns: Returns::new(now),
        }
    }

    /// Deletes a pod.
    pub fn delete(&mut self, pod: &Pod, now: Timestamp) {
        self.returns.delete(pod, now);
        self.writes.forget(&pod.uid);
        self.volumes.forget_claims(pod);
    }

    /// Applies one of Haulout's own pods; `None` if it was deleted. Returns the affected pods.
    pub fn apply_own_pod(&mut self, name: Arc<str>, observed: Option<ObservedOwnPod>) -> Vec<Uid> {
        let new = observed.as_ref().map(|pod| pod.uid);
        let old = match observed {
            Some(pod) => self.own.insert(name, (pod.uid, Arc::new(pod.selection))),
            None => self.own.remove(&name),
        };
        old.map(|(uid, _)| uid).into_iter().chain(new).collect()
    }

    /// The planner's input for the pods of a node.
    pub fn facts(
        &mut self,
        name: &Arc<str>,
        scope: PodScope,
        node: &ObservedNode,
        pods: &[Arc<Pod>],
        now: Timestamp,
    ) -> Vec<PodFacts<LabelSet>> {
        match scope {
            PodScope::All(drain_started) => {
                pods.iter().map(|pod| self.pod_facts(name, drain_started, node, pod, now)).collect()
            }
            PodScope::WithEvacuation => {
                // The next drain of the node starts without backoff.
                self.returns.forget(name);
                let evacuated: Vec<_> =
                    pods.iter().filter(|pod| self.evacuations.contains_key(&pod.uid)).collect();
                evacuated.into_iter().map(|pod| self.pod_facts(name, None, node, pod, now)).collect()
            }
        }
    }

    fn pod_facts(
        &mut self,
        name: &Arc<str>,
        drain_started: Option<Timestamp>,
        node: &ObservedNode,
        pod: &Pod,
        now: Timestamp,
    ) -> PodFacts<LabelSet> {
        let uncordoned = node.markers.was_uncordoned();
        let returned = drain_started
            .and_then(|drain_started| self.returns.observe(pod, false, drain_started, uncordoned, now));
        let evacuation = self.evacuations.get(&pod.uid);
        let held = || evacuation.and_then(ObservedEvacuation::held);
        let blocked = || evacuation.and_then(|observed| observed.blocked.clone());
        let failed_write = self.writes.blocked(&pod.uid);
        PodFacts {
            key: PodKey { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid },
            node: name.clone(),
            labels: pod.labels.clone(),
            pod_type: pod.pod_type,
            priority: pod.priority,
            finished: pod.is_finished(),
            terminating: pod.terminating,
            deadline: pod.deletion_timestamp(),
            evacuation: evacuation.map(ObservedEvacuation::instigator).unwrap_or_default(),
            volumes: self.volumes.of_pod(pod),
            returned: returned.map(Box::new),
            placement: self.placement(pod),
            failed_write: failed_write.is_some(),
            blocked: failed_write.or_else(held).or_else(blocked),
            turn: evacuation.and_then(|observed| observed.turn.clone()),
        }
    }

    /// Where one of Haulout's own pods can run.
    fn placement(&self, pod: &Pod) -> Option<Arc<Placement>> {
        let (uid, selection) = self.own.get(&pod.name)?;
        let tolerations = pod.tolerations.clone();
        (*uid == pod.uid).then(|| Arc::new(Placement { selection: selection.clone(), tolerations }))
    }
}

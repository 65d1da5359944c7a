//! Taking in what happens: keeps what is to be kept of each object and tells the planner.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Arc;

use haulout_api_types::drain_rules::DrainRules;
use haulout_api_types::selector::SelectorError;
use haulout_api_types::{DrainRule, NodeMaintenance};
use haulout_service_runtime::pods::{LabelSet, Pod, PodIndex, Uid};
use jiff::Timestamp;
use kube::ResourceExt as _;

use super::{Claim, State, Unfollowed, Work};
use crate::facts::{Blocked, MaintenanceFacts, NodeFacts, PodFacts, PodKey, Wait};
use crate::placement::{NodeChoice, Placement};
use crate::planner::Change;
use crate::refusals::Failure;
use crate::seen::{AttachmentSeen, EvacuationSeen, MaintenanceSeen, NodeSeen};

impl State {
    /// Takes in a pod, with its Evacuation if it has one; when to look again, if time alone changes something.
    pub fn put_pod(&mut self, pod: &Pod, now: Timestamp) -> Option<Timestamp> {
        let node = pod.node.clone()?;
        let evacuation = self.evacuations.get(&pod.uid);
        let (blocked, wait, wake) = match pod.deletion_timestamp() {
            Some(deadline) if pod.terminating => match Blocked::overdue(deadline, now) {
                Ok(blocked) => (Some(blocked), None, None),
                Err(when) => (None, Some(Arc::new(Wait::GracePeriod(deadline))), Some(when)),
            },
            _ => {
                let refused = self.refused_pods.blocked(&pod.uid);
                let held = || evacuation.and_then(EvacuationSeen::held);
                let blocked = || evacuation.and_then(|seen| seen.blocked.clone());
                let turn = evacuation.and_then(|seen| seen.turn.clone());
                (refused.or_else(held).or_else(blocked), turn, None)
            }
        };
        let is_new = !self.planner.knows_pod(&key(pod));
        let returned =
            self.returns.put(pod, is_new, self.drain_began(&node), self.was_uncordoned(&node), now);
        let until = returned.as_ref().and_then(|returned| returned.until);
        let wake = wake.into_iter().chain(until).min();
        let facts = PodFacts {
            key: key(pod),
            node,
            labels: pod.labels.clone(),
            pod_type: pod.pod_type,
            priority: pod.priority,
            finished: pod.is_finished(),
            terminating: pod.terminating,
            evacuation: evacuation.map(EvacuationSeen::planned).unwrap_or_default(),
            volumes: self.volumes.of_pod(pod),
            returned: returned.map(Box::new),
            placement: self.placement(pod),
            blocked,
            wait,
        };
        self.planner.apply(Change::Pod(facts));
        wake
    }

    /// Where else a pod of Haulout itself can run.
    fn placement(&self, pod: &Pod) -> Option<Arc<Placement>> {
        let (uid, choice) = self.own_pods.get(&*pod.name)?;
        let tolerations = pod.tolerations.clone();
        (*uid == pod.uid).then(|| Arc::new(Placement { choice: choice.clone(), tolerations }))
    }

    /// Takes in a pod of Haulout itself, with the nodes that it asks for; `None` if it is gone.
    pub fn put_own_pod(
        &mut self,
        name: Arc<str>,
        seen: Option<(Uid, NodeChoice)>,
        pods: &PodIndex,
        now: Timestamp,
    ) {
        let Some((uid, choice)) = seen else {
            if let Some((uid, _)) = self.own_pods.remove(&name) {
                self.put_again(uid, pods, now);
            }
            return;
        };
        self.own_pods.insert(name, (uid, Arc::new(choice)));
        self.put_again(uid, pods, now);
    }

    /// When the drain of a node began, or the node came under maintenance, whichever was later.
    fn drain_began(&self, node: &str) -> Option<Timestamp> {
        let began = self.planner.drain_began(node)?;
        let joined = self.nodes.get(node).and_then(|seen| seen.marks.held_since());
        Some(joined.map_or(began, |joined| joined.max(began)))
    }

    fn was_uncordoned(&self, node: &str) -> bool {
        self.nodes.get(node).is_some_and(|seen| seen.marks.was_uncordoned())
    }

    /// A pod is gone.
    pub fn remove_pod(&mut self, pod: &Pod, now: Timestamp) {
        self.planner.apply(Change::PodGone(key(pod)));
        self.returns.remove(pod, now);
        self.made.remove(&pod.uid);
        self.refused_pods.forget(&pod.uid);
        self.volumes.forget_claims(pod);
    }

    /// The Evacuation of a pod could not be written; when to try again.
    pub fn pod_failed(&mut self, pod: &Pod, failure: Failure, now: Timestamp, chance: f64) -> Timestamp {
        self.made.remove(&pod.uid);
        let retry = self.refused_pods.failed(pod.uid, failure, now, chance);
        let wake = self.put_pod(pod, now);
        wake.map_or(retry, |wake| wake.min(retry))
    }

    /// The Evacuation of a pod was written, or does not have to be.
    pub fn pod_succeeded(&mut self, pod: &Pod, now: Timestamp) {
        if self.refused_pods.forget(&pod.uid) {
            // Whoever told of the pod itself has planned when to look again.
            let _ = self.put_pod(pod, now);
        }
    }

    /// A node could not be written; when to try again.
    pub fn node_failed(
        &mut self,
        name: &Arc<str>,
        failure: Failure,
        now: Timestamp,
        chance: f64,
    ) -> Timestamp {
        let retry = self.refused_nodes.failed(name.clone(), failure, now, chance);
        self.tell_node(name);
        retry
    }

    /// What is to be written to a node was undone each time so far, and waits.
    pub fn node_undone(&mut self, name: &Arc<str>, failure: Failure, now: Timestamp, until: Timestamp) {
        self.refused_nodes.wait(name.clone(), failure, now, until);
        self.tell_node(name);
    }

    /// A node was written, or does not have to be.
    pub fn node_succeeded(&mut self, name: &Arc<str>) {
        if self.refused_nodes.forget(name) {
            self.tell_node(name);
        }
    }

    /// Takes in since when no evacuation controller has led, if none does.
    pub fn put_evacuation_controller(&mut self, absent_since: Option<Timestamp>) {
        if std::mem::replace(&mut self.leaderless, absent_since) != absent_since {
            self.waiting.extend(self.maintenances.keys().cloned().map(Work::Maintenance));
        }
    }

    /// The volume of a claim of a pod on this node has been looked up.
    pub fn learn_claim(&mut self, claim: Claim, volume: Option<Arc<str>>, pods: &[Arc<Pod>], now: Timestamp) {
        let names = |pod: &&Arc<Pod>| pod.namespace == claim.0 && pod.claims.contains(&claim.1);
        let concerned: Vec<_> = pods.iter().filter(names).collect();
        // Those who named it may have gone meanwhile, and nobody would forget it.
        if !concerned.is_empty() {
            self.volumes.learn_claim(claim.clone(), volume, now);
            for pod in concerned {
                self.put_pod(pod, now);
            }
        }
    }

    /// The name has been looked up that a volume has in `volumesAttached`; empty if it has none there.
    pub fn learn_handle(
        &mut self,
        volume: Arc<str>,
        handle: Option<String>,
        node: &str,
        pods: &[Arc<Pod>],
        now: Timestamp,
    ) {
        self.volumes.learn_handle(volume, handle.map(Into::into));
        for pod in pods.iter().filter(|pod| !pod.claims.is_empty()) {
            self.put_pod(pod, now);
        }
        self.tell_node(&node.into());
    }

    /// Takes in an Evacuation of a pod.
    pub fn put_evacuation(&mut self, pod: Uid, seen: EvacuationSeen, pods: &PodIndex, now: Timestamp) {
        self.made.remove(&pod);
        let known = self.evacuations.get(&pod);
        if known.is_some_and(|known| known.version.makes_old(&seen.version)) {
            return;
        }
        self.evacuations.insert(pod, seen);
        self.put_again(pod, pods, now);
    }

    /// Takes in what a write answered, if the object is still there.
    pub fn refresh_evacuation(&mut self, pod: Uid, seen: EvacuationSeen, pods: &PodIndex, now: Timestamp) {
        if self.evacuations.get(&pod).is_some_and(|known| known.version.is_followed_by(&seen.version)) {
            self.put_evacuation(pod, seen, pods, now);
        }
    }

    /// An Evacuation is gone.
    pub fn remove_evacuation(&mut self, pod: Uid, pods: &PodIndex, now: Timestamp) {
        self.made.remove(&pod);
        if self.evacuations.remove(&pod).is_some() {
            self.put_again(pod, pods, now);
        }
    }

    fn put_again(&mut self, pod: Uid, pods: &PodIndex, now: Timestamp) {
        if let Some(pod) = pods.get(pod) {
            // Whoever told of the pod itself has planned when to look again.
            let _ = self.put_pod(pod, now);
        }
    }

    /// Takes in a node.
    pub fn put_node(&mut self, name: Arc<str>, seen: NodeSeen) {
        let known = self.nodes.get(&name);
        if known.is_some_and(|known| known.version.makes_old(&seen.version)) {
            return;
        }
        let held = |seen: &NodeSeen| (seen.marks.held_since(), seen.labels.clone());
        let held_anew = known.is_some_and(|known| held(known) != held(&seen));
        self.nodes.insert(name.clone(), seen);
        self.tell_node(&name);
        if held_anew {
            self.look_at_returned();
        }
    }

    /// Takes in what a write answered, if the node is still there.
    pub fn refresh_node(&mut self, name: &Arc<str>, seen: NodeSeen) {
        if self.nodes.get(name).is_some_and(|known| known.version.is_followed_by(&seen.version)) {
            self.put_node(name.clone(), seen);
        }
    }

    fn tell_node(&mut self, name: &Arc<str>) {
        let Some(seen) = self.nodes.get(name) else { return };
        self.planner.apply(Change::Node(NodeFacts {
            name: name.clone(),
            labels: seen.labels.clone(),
            cordoned: seen.marks.unschedulable,
            cordon_due: seen.marks.cordon_due(),
            marked: seen.marks.is_marked(),
            taints: seen.taints.clone(),
            volumes: Arc::new(self.volumes.attached_to(name, &seen.volumes)),
            refused: self.refused_nodes.blocked(name),
            ignores_volumes: seen.marks.ignores_volumes(),
            volume_wait: seen.marks.status().and_then(|status| status.volume_wait),
            reached: seen.marks.reached(),
            maintenances: seen.marks.maintenances().map(Into::into),
        }));
    }

    /// A node is gone.
    pub fn remove_node(&mut self, name: &Arc<str>) {
        self.nodes.remove(name);
        self.refused_nodes.forget(name);
        self.holders.remove(name);
        self.returns.forget(name);
        self.rewrites.forget(name);
        self.volumes_ignored.remove(name);
        self.throttle.forget(&Work::Node(name.clone()));
        self.planner.apply(Change::NodeGone(name.clone()));
    }

    /// Takes in a maintenance; tells what is wrong with one that cannot be followed.
    pub fn put_maintenance(&mut self, object: NodeMaintenance) -> Result<(), SelectorError> {
        let name: Arc<str> = object.name_any().into();
        // What is not the planner's concern, such as a finalizer, has to be looked at too.
        self.waiting.insert(Work::Maintenance(name.clone()));
        let seen = match MaintenanceSeen::new(object.clone(), self.served) {
            Ok(seen) => seen,
            Err(error) => {
                let uid = object.metadata.uid.clone().unwrap_or_default();
                self.do_not_follow(name, &uid, Some(object), error.to_string());
                return Err(error);
            }
        };
        let known = self.maintenances.get(&name);
        if known.is_some_and(|known| known.version.makes_old(&seen.version)) {
            return Ok(());
        }
        let facts = seen.facts(&name);
        let drain = |facts: &MaintenanceFacts| (facts.stage, facts.drain_began);
        let redrained = known.is_none_or(|known| drain(&known.facts(&name)) != drain(&facts));
        self.planner.apply(Change::Maintenance(facts));
        self.maintenances.insert(name.clone(), seen);
        if redrained {
            self.look_at_returned();
        }
        self.follow(&name);
        Ok(())
    }

    /// Takes note of a maintenance that cannot be followed. What is known of it from before goes on, and nodes whose
    /// annotation names it keep what they have.
    pub fn do_not_follow(&mut self, name: Arc<str>, uid: &str, object: Option<NodeMaintenance>, why: String) {
        self.unfollowed.insert(name, Unfollowed { uid: uid.into(), object: object.map(Arc::new), why });
        self.tell_unfollowed();
    }

    fn follow(&mut self, name: &str) {
        if self.unfollowed.remove(name).is_some() {
            self.tell_unfollowed();
        }
    }

    fn tell_unfollowed(&mut self) {
        let uids = self.unfollowed.values().map(|unfollowed| unfollowed.uid.clone()).collect();
        self.planner.apply(Change::Unreadable(uids));
    }

    /// Takes in what a write answered, if the maintenance is still there.
    pub fn refresh_maintenance(&mut self, object: NodeMaintenance) {
        let known = self.maintenances.get(object.name_any().as_str());
        if known.is_some_and(|known| object.metadata.uid.as_deref() == Some(&*known.version.uid)) {
            // Whoever told of it before has said what is wrong with it.
            let _ = self.put_maintenance(object);
        }
    }

    /// A maintenance is gone.
    pub fn remove_maintenance(&mut self, name: &Arc<str>) {
        self.maintenances.remove(name);
        self.refused_maintenances.forget(name);
        self.forwarded.remove(name);
        self.throttle.forget(&Work::Maintenance(name.clone()));
        self.planner.apply(Change::MaintenanceGone(name.clone()));
        self.follow(name);
        self.look_at_returned();
    }

    /// The drain of a node may have ended or another begun: whether a pod has come back is to be found out again.
    fn look_at_returned(&mut self) {
        self.waiting.extend(self.returns.pods().map(Work::Pod));
    }

    /// Takes in the labels of a namespace; `None` if it is gone.
    pub fn put_namespace(&mut self, name: Arc<str>, labels: Option<LabelSet>) {
        self.planner.apply(Change::Namespace(name, labels));
    }

    /// All nodes have been listed: others are gone.
    pub fn retain_nodes(&mut self, listed: &HashSet<Arc<str>>) {
        for name in missing(self.nodes.keys(), listed) {
            self.remove_node(&name);
        }
    }

    /// All maintenances have been listed: others are gone.
    pub fn retain_maintenances(&mut self, listed: &HashSet<Arc<str>>) {
        for name in missing(self.maintenances.keys().chain(self.unfollowed.keys()), listed) {
            self.remove_maintenance(&name);
        }
    }

    /// All drain rules have been listed: others are gone.
    pub fn retain_rules(&mut self, listed: &HashSet<Arc<str>>) {
        let gone: Vec<_> =
            self.rules.keys().filter(|name| !listed.contains(name.as_str())).cloned().collect();
        for name in gone {
            self.remove_rule(&name);
        }
    }

    /// All Evacuations have been listed: those of other pods are gone.
    pub fn retain_evacuations(&mut self, listed: &HashSet<Uid>, pods: &PodIndex, now: Timestamp) {
        for pod in missing(self.evacuations.keys(), listed) {
            self.remove_evacuation(pod, pods, now);
        }
    }

    /// All attachments have been listed: others are gone.
    pub fn retain_attachments(&mut self, listed: &HashSet<Arc<str>>) {
        for name in missing(self.volumes.attachments(), listed) {
            self.put_attachment(name, None);
        }
    }

    /// All namespaces have been listed: others are gone.
    pub fn retain_namespaces(&mut self, listed: &HashSet<Arc<str>>) {
        for name in missing(self.planner.namespaces(), listed) {
            self.put_namespace(name, None);
        }
    }

    /// All pods of Haulout itself have been listed: others are gone.
    pub fn retain_own_pods(&mut self, listed: &HashSet<Arc<str>>, pods: &PodIndex, now: Timestamp) {
        for name in missing(self.own_pods.keys(), listed) {
            self.put_own_pod(name, None, pods, now);
        }
    }

    /// Takes in a drain rule, which cannot be read if it is `None`; tells what is wrong with its selectors.
    pub fn put_rule(&mut self, name: String, rule: Option<DrainRule>) -> Result<(), SelectorError> {
        let same = |known: &Option<DrainRule>| {
            known.as_ref().map(|known| &known.spec) == rule.as_ref().map(|rule| &rule.spec)
        };
        if self.rules.get(&name).is_some_and(same) {
            return Ok(());
        }
        self.rules.insert(name.clone(), rule);
        let invalid = self.tell_rules();
        invalid.into_iter().find(|(of, _)| *of == name).map_or(Ok(()), |(_, error)| Err(error))
    }

    /// A drain rule is gone.
    pub fn remove_rule(&mut self, name: &str) {
        if self.rules.remove(name).is_some() {
            self.tell_rules();
        }
    }

    fn tell_rules(&mut self) -> Vec<(String, SelectorError)> {
        let unreadable = self.rules.iter().filter(|(_, rule)| rule.is_none()).map(|(name, _)| name.as_str());
        let (rules, invalid) = DrainRules::new(self.rules.values().flatten());
        self.planner.apply(Change::Rules(rules.with_unreadable(unreadable)));
        invalid
    }

    /// Takes in an attachment of a volume; `None` if it is gone.
    pub fn put_attachment(&mut self, name: Arc<str>, seen: Option<AttachmentSeen>) {
        for node in self.volumes.put_attachment(name, seen) {
            self.tell_node(&node);
        }
    }
}

/// What is known and not listed.
fn missing<'a, K: Clone + Eq + Hash + 'a>(known: impl Iterator<Item = &'a K>, listed: &HashSet<K>) -> Vec<K> {
    known.filter(|key| !listed.contains(*key)).cloned().collect()
}

fn key(pod: &Pod) -> PodKey {
    PodKey { namespace: pod.namespace.clone(), name: (*pod.name).into(), uid: pod.uid.to_string().into() }
}

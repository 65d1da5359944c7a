//! The watched Deployments, ReplicaSets, pods and Evacuations. Methods return what has to be reconciled: only Deployments with
//! pods that have to leave, or that carry our annotation.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use haulout_service_runtime::api::is_later;
use haulout_service_runtime::pods::Uid;
use jiff::{SignedDuration, Timestamp};

use crate::decide::{Local, LonePod, PodView, View};
use crate::objects::{Deployment, Evac, Owner, Pod, ReplicaSet};

/// What is reconciled at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Work {
    /// A Deployment with all its pods.
    Deployment(Uid),
    /// A pod that belongs to no Deployment.
    Pod(Uid),
}

/// All watched objects.
#[derive(Debug, Default)]
pub struct State {
    deployments: HashMap<Uid, Deployment>,
    sets: HashMap<Uid, ReplicaSet>,
    sets_of: Groups,
    pods: HashMap<Uid, Arc<Pod>>,
    pods_of: Groups,
    /// Evacuations by the UID of their pod.
    evacs: HashMap<Uid, Arc<Evac>>,
    /// Namespaces that ask for evictions without a replacement.
    opted_out: HashSet<Arc<str>>,
    locals: HashMap<Uid, Local>,
    /// The pods with an Evacuation or our annotation, with the Deployment that is reconciled for them.
    concerned: HashMap<Uid, Option<Uid>>,
    /// The number of these pods by Deployment.
    concerned_of: HashMap<Uid, u32>,
    /// Deployments with a pod that we are moving and no ready pod, and since when.
    outages: HashMap<Uid, Timestamp>,
    /// The watches that are interrupted.
    gaps: BTreeSet<&'static str>,
}

/// Objects by the UID of their owner.
#[derive(Debug, Default)]
struct Groups(HashMap<Uid, HashSet<Uid>>);

impl Groups {
    fn insert(&mut self, owner: Option<Uid>, member: Uid) {
        if let Some(owner) = owner {
            self.0.entry(owner).or_default().insert(member);
        }
    }

    fn remove(&mut self, owner: Option<Uid>, member: Uid) {
        let Some(owner) = owner else { return };
        if let Some(members) = self.0.get_mut(&owner) {
            members.remove(&member);
            if members.is_empty() {
                self.0.remove(&owner);
            }
        }
    }

    fn get(&self, owner: Uid) -> impl Iterator<Item = Uid> {
        self.0.get(&owner).into_iter().flatten().copied()
    }
}

/// The owner in the index.
fn owner_of(pod: &Pod) -> Option<Uid> {
    match pod.owner? {
        Owner::ReplicaSet(uid) | Owner::Deployment(uid) => Some(uid),
    }
}

/// A time without a ready pod of a Deployment while we moved one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outage(pub SignedDuration);

impl State {
    /// Adds or updates a pod.
    pub fn apply_pod(&mut self, pod: Pod, now: Timestamp) -> (Option<Work>, Option<Outage>) {
        let uid = pod.uid;
        let before = self.pods.get(&uid).cloned();
        // The watch may deliver what was before our own write.
        if before.as_ref().is_some_and(|before| before.version >= pod.version && pod.version != 0) {
            return (None, None);
        }
        let work_before = self.work_of(uid);
        self.pods_of.remove(before.as_deref().and_then(owner_of), uid);
        self.pods_of.insert(owner_of(&pod), uid);
        self.pods.insert(uid, Arc::new(pod));
        self.count(uid);
        let outage = self.deployment_of(uid).and_then(|deployment| self.measure(deployment, now));
        (self.relevant(uid).or(work_before.filter(|_| self.concerned.contains_key(&uid))), outage)
    }

    /// Deletes a pod.
    pub fn delete_pod(&mut self, uid: Uid, now: Timestamp) -> (Option<Work>, Option<Outage>) {
        let Some(pod) = self.pods.get(&uid).cloned() else { return (None, None) };
        let work = self.relevant(uid);
        let deployment = self.deployment_of(uid);
        self.pods_of.remove(owner_of(&pod), uid);
        self.pods.remove(&uid);
        self.locals.remove(&uid);
        let outage = deployment.and_then(|deployment| self.measure(deployment, now));
        self.count(uid);
        (work, outage)
    }

    /// Adds or updates a ReplicaSet.
    pub fn apply_set(&mut self, uid: Uid, set: ReplicaSet) -> Vec<Work> {
        let before = self.sets.get(&uid);
        if before == Some(&set) {
            return Vec::new();
        }
        let (is_new, old) = (before.is_none(), before.and_then(|set| set.deployment));
        let deployment = set.deployment;
        self.sets_of.remove(old, uid);
        self.sets_of.insert(deployment, uid);
        self.sets.insert(uid, set);
        if is_new || old != deployment {
            return self.owner_changed(uid);
        }
        deployment
            .filter(|deployment| self.concerned_of.contains_key(deployment))
            .map(Work::Deployment)
            .into_iter()
            .collect()
    }

    /// Deletes a ReplicaSet.
    pub fn delete_set(&mut self, uid: Uid) -> Vec<Work> {
        let Some(set) = self.sets.remove(&uid) else { return Vec::new() };
        self.sets_of.remove(set.deployment, uid);
        let deployment = set.deployment.filter(|deployment| self.concerned_of.contains_key(deployment));
        let mut work = self.owner_changed(uid);
        work.extend(deployment.map(Work::Deployment));
        work
    }

    /// Adds or updates a Deployment.
    pub fn apply_deployment(&mut self, deployment: Deployment) -> Vec<Work> {
        let uid = deployment.uid;
        let before = self.deployments.get(&uid);
        let (is_new, same) = (before.is_none(), before == Some(&deployment));
        self.deployments.insert(uid, deployment);
        if is_new {
            return self.deployment_changed(uid);
        }
        let concerned = !same && self.concerned_of.contains_key(&uid);
        concerned.then_some(Work::Deployment(uid)).into_iter().collect()
    }

    /// Deletes a Deployment.
    pub fn delete_deployment(&mut self, uid: Uid) -> Vec<Work> {
        self.outages.remove(&uid);
        if self.deployments.remove(&uid).is_none() {
            return Vec::new();
        }
        self.deployment_changed(uid)
    }

    /// Adds or updates an Evacuation; `None` if it has been deleted, or is none of ours.
    pub fn apply_evac(&mut self, pod: Uid, evac: Option<Evac>) -> Option<Work> {
        let before = self.evacs.get(&pod);
        let is_old = |before: &Arc<Evac>, evac: &Evac| {
            before.uid == evac.uid && !is_later(&evac.version, &before.version)
        };
        if before.zip(evac.as_ref()).is_some_and(|(before, evac)| is_old(before, evac)) {
            return None;
        }
        let work_before = self.relevant(pod);
        let is_other = |before: &Arc<Evac>| evac.as_ref().is_none_or(|evac| evac.uid != before.uid);
        if before.is_some_and(is_other) {
            // What was rejected for the last evacuation may be allowed for the next one.
            self.locals.remove(&pod);
        }
        match evac {
            Some(evac) => {
                self.evacs.insert(pod, Arc::new(evac));
            }
            None => {
                self.evacs.remove(&pod);
            }
        }
        self.count(pod);
        self.relevant(pod).or(work_before)
    }

    /// Sets whether a namespace asks for evictions without a replacement.
    pub fn apply_namespace(&mut self, name: Arc<str>, opted_out: bool) -> Vec<Work> {
        let changed =
            if opted_out { self.opted_out.insert(Arc::clone(&name)) } else { self.opted_out.remove(&name) };
        if !changed {
            return Vec::new();
        }
        let in_namespace =
            |uid: &&Uid| self.deployments.get(*uid).is_some_and(|deployment| deployment.namespace == name);
        self.concerned_of.keys().filter(in_namespace).copied().map(Work::Deployment).collect()
    }

    /// A watch is interrupted, or works again.
    pub fn set_gap(&mut self, watch: &'static str, is_gap: bool) -> Vec<Work> {
        if is_gap {
            self.gaps.insert(watch);
        } else {
            self.gaps.remove(watch);
        }
        if self.is_gap() { Vec::new() } else { self.all_work() }
    }

    /// Whether a watch is interrupted, so that pods may have changed without our knowledge.
    pub fn is_gap(&self) -> bool {
        !self.gaps.is_empty()
    }

    /// Everything that has to be reconciled.
    pub fn all_work(&self) -> Vec<Work> {
        let pods = self.concerned.iter().filter(|(_, deployment)| deployment.is_none());
        let pods = pods.map(|(pod, _)| Work::Pod(*pod));
        self.concerned_of.keys().copied().map(Work::Deployment).chain(pods).collect()
    }

    /// The Deployment with this UID.
    pub fn deployment(&self, uid: Uid) -> Option<&Deployment> {
        self.deployments.get(&uid)
    }

    /// The Deployment with all its pods.
    pub fn view(&self, uid: Uid) -> Option<View> {
        let deployment = self.deployments.get(&uid)?.clone();
        let mut pods: Vec<_> = self.pods_of_deployment(uid).map(|pod| self.pod_view(pod)).collect();
        pods.sort_by_key(|view| view.pod.uid);
        let sets = self.sets_of.get(uid).filter_map(|set| Some((set, self.sets.get(&set)?.clone())));
        let namespace_opted_out = self.opted_out.contains(&deployment.namespace);
        Some(View { deployment, namespace_opted_out, sets: sets.collect(), pods })
    }

    /// A pod that belongs to no Deployment. `None` if a Deployment is known by now: while watches sync, a pod and its Evacuation
    /// may arrive before their Deployment.
    pub fn lone_pod(&self, uid: Uid) -> Option<LonePod> {
        if matches!(self.work_of(uid), Some(Work::Deployment(_))) {
            return None;
        }
        let (pod, evac) = self.pod_with_evac(uid);
        let set = match pod.as_ref().and_then(|pod| pod.owner) {
            Some(Owner::ReplicaSet(set)) => self.sets.get(&set).cloned(),
            _ => None,
        };
        Some(LonePod { pod, set, evac })
    }

    /// A pod and its Evacuation, as far as they are known.
    pub fn pod_with_evac(&self, uid: Uid) -> (Option<Arc<Pod>>, Option<Arc<Evac>>) {
        (self.pods.get(&uid).cloned(), self.evacs.get(&uid).cloned())
    }

    fn pod_view(&self, pod: &Arc<Pod>) -> PodView {
        PodView {
            pod: Arc::clone(pod),
            evac: self.evacs.get(&pod.uid).cloned(),
            local: self.locals.get(&pod.uid).cloned().unwrap_or_default(),
        }
    }

    /// Records what a request has shown about a pod.
    pub fn update_local(&mut self, pod: Uid, change: impl FnOnce(&mut Local)) {
        if self.pods.contains_key(&pod) {
            change(self.locals.entry(pod).or_default());
        }
    }

    /// The pods that are moved now, the Evacuations that are ours, and the Deployments without a ready pod.
    pub fn counts(&self) -> [usize; 3] {
        let moved = self.concerned.keys().filter_map(|pod| self.pods.get(pod)).filter(|pod| pod.is_moved());
        let active = self.evacs.values().filter(|evac| evac.is_active());
        [moved.count(), active.count(), self.outages.len()]
    }

    /// What is reconciled for this pod.
    fn work_of(&self, pod: Uid) -> Option<Work> {
        self.concerned.get(&pod).map(|deployment| deployment.map_or(Work::Pod(pod), Work::Deployment))
    }

    /// What is reconciled when this pod changes, if anything.
    fn relevant(&self, pod: Uid) -> Option<Work> {
        self.work_of(pod).or_else(|| {
            let deployment = self.deployment_of(pod)?;
            self.concerned_of.contains_key(&deployment).then_some(Work::Deployment(deployment))
        })
    }

    /// The known Deployment to which a pod belongs, directly or through a ReplicaSet.
    fn deployment_of(&self, pod: Uid) -> Option<Uid> {
        let uid = match self.pods.get(&pod)?.owner? {
            Owner::Deployment(uid) => uid,
            Owner::ReplicaSet(set) => self.sets.get(&set)?.deployment?,
        };
        self.deployments.contains_key(&uid).then_some(uid)
    }

    fn pods_of_deployment(&self, uid: Uid) -> impl Iterator<Item = &Arc<Pod>> {
        let owners = self.sets_of.get(uid).chain([uid]);
        owners.flat_map(|owner| self.pods_of.get(owner)).filter_map(|pod| self.pods.get(&pod))
    }

    /// The owner of these pods has changed.
    fn owner_changed(&mut self, owner: Uid) -> Vec<Work> {
        let pods: Vec<_> = self.pods_of.get(owner).collect();
        for pod in &pods {
            self.count(*pod);
        }
        let work: HashSet<_> = pods.into_iter().filter_map(|pod| self.relevant(pod)).collect();
        work.into_iter().collect()
    }

    fn deployment_changed(&mut self, uid: Uid) -> Vec<Work> {
        let owners: Vec<_> = self.sets_of.get(uid).chain([uid]).collect();
        let work: HashSet<_> = owners.into_iter().flat_map(|owner| self.owner_changed(owner)).collect();
        work.into_iter().collect()
    }

    /// Updates whether a pod has to be looked after, and for which Deployment.
    fn count(&mut self, pod: Uid) {
        let marked = |pod: &Arc<Pod>| pod.former.exists() || pod.is_moved();
        let is_concerned = self.evacs.contains_key(&pod) || self.pods.get(&pod).is_some_and(marked);
        let after = is_concerned.then(|| self.deployment_of(pod));
        let before = match after {
            Some(deployment) => self.concerned.insert(pod, deployment),
            None => self.concerned.remove(&pod),
        };
        if before == after {
            return;
        }
        if let Some(deployment) = after.flatten() {
            *self.concerned_of.entry(deployment).or_default() += 1;
        }
        if let Some(deployment) = before.flatten()
            && let Some(count) = self.concerned_of.get_mut(&deployment)
        {
            *count -= 1;
            if *count == 0 {
                self.concerned_of.remove(&deployment);
            }
        }
    }

    /// Measures how long a Deployment has no ready pod. An outage starts while we move a pod, and ends with a ready one.
    fn measure(&mut self, uid: Uid, now: Timestamp) -> Option<Outage> {
        let known = self.outages.get(&uid).copied();
        if known.is_none() && !self.concerned_of.contains_key(&uid) {
            return None;
        }
        let is_wanted = self.deployments.get(&uid).is_some_and(|deployment| deployment.replicas > 0);
        let serves = self.pods_of_deployment(uid).any(|pod| pod.ready.is_some() && !pod.leaving);
        if serves || !is_wanted {
            self.outages.remove(&uid);
            return known.filter(|_| serves).map(|since| Outage(now.duration_since(since)));
        }
        let is_moving = self.pods_of_deployment(uid).any(|pod| pod.is_moved());
        if known.is_none() && is_moving {
            self.outages.insert(uid, now);
        }
        None
    }
}

#[cfg(test)]
mod tests;

//! PodDisruptionBudgets, and which evictions to attempt when one allows disruptions again: the oldest first, and never
//! more than the budget allows, including evictions in flight.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use haulout_api_types::bounded;
use haulout_api_types::selector::LabelMatcher;
use haulout_service_runtime::pods::{Phase, Pod, Uid};
use jiff::Timestamp;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;

use crate::backoff::after;
use crate::record::fingerprint;

/// The number of pods that a message names.
const MAX_NAMED: usize = 3;
/// How long a budget counts a pod as disrupted after the API server has accepted its eviction and the pod does not
/// leave:
/// <https://github.com/kubernetes/kubernetes/blob/v1.36.3/pkg/controller/disruption/disruption.go#L70>.
const DISRUPTION_TIMEOUT: Duration = Duration::from_secs(120);

/// All budgets, by namespace.
#[derive(Debug, Default)]
pub struct Budgets {
    namespaces: HashMap<Arc<str>, Vec<Budget>>,
    /// The number of budget changes so far.
    changes: u32,
}

/// The last observed state of one budget, and the evictions that its status does not count yet.
#[derive(Clone, Debug)]
pub struct Budget {
    name: Box<str>,
    /// `None` selects nothing.
    selector: Option<LabelMatcher>,
    /// Whether the status is computed from the current spec.
    status_is_current: bool,
    allowed: i32,
    healthy: i32,
    desired: i32,
    expected: i32,
    /// `unhealthyPodEvictionPolicy: AlwaysAllow`.
    always_allow_unhealthy: bool,
    /// `status.disruptedPods`: pods whose eviction the API server has accepted and already counts, and when.
    disrupted: BTreeMap<Box<str>, Timestamp>,
    /// The names of pods whose eviction is in flight, by Evacuation UID.
    in_flight: BTreeMap<Uid, Arc<str>>,
    /// The number of its last change.
    change: u32,
}

/// Identifies the state of the budgets that cover a pod, to detect later changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coverage {
    /// The fingerprint of their names.
    pub names: u32,
    /// The number of their last change; 0 if there is no budget.
    change: u32,
}

impl Budget {
    /// Reads a budget. [`Budgets`] stores its namespace.
    fn read(budget: PodDisruptionBudget) -> Self {
        let spec = budget.spec.unwrap_or_default();
        let status = budget.status.unwrap_or_default();
        let generation = budget.metadata.generation.unwrap_or_default();
        Self {
            name: budget.metadata.name.unwrap_or_default().into(),
            // The API server cannot evaluate an invalid selector either.
            selector: spec.selector.and_then(|selector| LabelMatcher::new(&selector).ok()),
            status_is_current: status.observed_generation.unwrap_or_default() >= generation,
            allowed: status.disruptions_allowed,
            healthy: status.current_healthy,
            desired: status.desired_healthy,
            expected: status.expected_pods,
            always_allow_unhealthy: spec.unhealthy_pod_eviction_policy.as_deref() == Some("AlwaysAllow"),
            disrupted: status
                .disrupted_pods
                .into_iter()
                .flatten()
                .map(|(name, time)| (name.into(), time.0))
                .collect(),
            in_flight: BTreeMap::new(),
            change: 0,
        }
    }

    fn covers(&self, pod: &Pod) -> bool {
        self.selector.as_ref().is_some_and(|selector| selector.matches(&pod.labels))
    }

    /// How many more evictions may be attempted.
    fn remaining(&self) -> usize {
        let allowed =
            if self.status_is_current { usize::try_from(self.allowed).unwrap_or_default() } else { 0 };
        allowed.saturating_sub(self.in_flight.len())
    }

    /// Whether the eviction of this pod does not count against the budget, by the rules of the API server.
    fn exempts(&self, pod: &Pod) -> bool {
        let enough = self.desired > 0 && self.healthy >= self.desired;
        pod.is_finished()
            || pod.phase == Phase::Pending
            || (!pod.ready && self.status_is_current && (self.always_allow_unhealthy || enough))
    }

    /// The numbers of the budget, and the pods that explain them.
    fn describe<'a>(&self, unhealthy: impl IntoIterator<Item = &'a Pod>) -> String {
        let Self { name, allowed, healthy, desired, expected, .. } = self;
        let unhealthy_pods = if healthy < expected { self.unhealthy_pods(unhealthy) } else { String::new() };
        let disrupted_pods = self.disrupted_pods();
        format!(
            "PodDisruptionBudget {name} allows {allowed} disruptions: {healthy} of {expected} pods are healthy, {desired} required{unhealthy_pods}{disrupted_pods}."
        )
    }

    /// The first few pods that count as disrupted although they do not leave: they were replaced by a pod with the same
    /// name, or their eviction was interrupted.
    fn disrupted_pods(&self) -> String {
        let until = |since: &Timestamp| after(*since, DISRUPTION_TIMEOUT);
        let describe = |(pod, since)| format!("pod {pod} counts as disrupted until {}", until(since));
        first_few(self.disrupted.iter().map(describe), ", and others")
    }

    /// The first few covered pods that are not healthy.
    fn unhealthy_pods<'a>(&self, unhealthy: impl IntoIterator<Item = &'a Pod>) -> String {
        let state = |pod: &Pod| if pod.terminating { "terminating" } else { "not ready" };
        let covered = unhealthy.into_iter().filter(|pod| self.covers(pod));
        first_few(covered.map(|pod| format!("pod {} is {}", pod.name, state(pod))), ", and others")
    }
}

/// The first few of these texts, as the end of a message. `others` is appended if there are more.
fn first_few(all: impl Iterator<Item = String>, others: &str) -> String {
    let mut named: Vec<_> = all.take(MAX_NAMED + 1).collect();
    let others = if named.len() > MAX_NAMED { others } else { "" };
    named.truncate(MAX_NAMED);
    named.sort_unstable();
    if named.is_empty() { String::new() } else { format!("; {}{others}", named.join(", ")) }
}

impl Budgets {
    /// Stores a budget that was added or has changed.
    pub fn apply(&mut self, namespace: &Arc<str>, budget: PodDisruptionBudget) {
        let mut budget = Budget::read(budget);
        self.changes = self.changes.wrapping_add(1);
        budget.change = self.changes;
        let all = self.namespaces.entry(Arc::clone(namespace)).or_default();
        let Some(old) = all.iter_mut().find(|old| old.name == budget.name) else {
            all.push(budget);
            return;
        };
        budget.in_flight = std::mem::take(&mut old.in_flight);
        // The status counts these evictions now.
        budget.in_flight.retain(|_, pod| !budget.disrupted.contains_key(&**pod));
        *old = budget;
    }

    /// Removes a deleted budget.
    pub fn delete(&mut self, namespace: &str, name: &str) {
        if let Some(all) = self.namespaces.get_mut(namespace) {
            all.retain(|budget| budget.name.as_ref() != name);
            if all.is_empty() {
                self.namespaces.remove(namespace);
            }
        }
    }

    /// The budgets that cover this pod. Without a budget, evictions are not limited. With several, the Eviction API
    /// rejects the eviction.
    pub fn covering(&self, pod: &Pod) -> Vec<&Budget> {
        let all = self.namespaces.get(&pod.namespace).into_iter().flatten();
        all.filter(|budget| budget.covers(pod)).collect()
    }

    /// The state of the budgets that cover this pod.
    pub fn coverage(&self, pod: &Pod) -> Coverage {
        let covering = self.covering(pod);
        let mut names: Vec<_> = covering.iter().map(|budget| &budget.name).collect();
        names.sort_unstable();
        let change = covering.iter().map(|budget| budget.change).max().unwrap_or_default();
        Coverage { names: fingerprint(names), change }
    }

    /// Whether exactly one budget covers this pod, and its current status allows no disruptions.
    pub fn is_exhausted(&self, pod: &Pod) -> bool {
        matches!(*self.covering(pod), [budget] if budget.status_is_current && budget.allowed <= 0)
    }

    /// Describes the budgets of this pod for a message. `unhealthy` are the pods of its namespace that no budget counts
    /// as healthy.
    pub fn describe<'a>(&self, pod: &Pod, unhealthy: impl IntoIterator<Item = &'a Pod>) -> String {
        match &*self.covering(pod) {
            [] => "The pod is no longer covered by a PodDisruptionBudget.".to_owned(),
            [budget] => bounded::message(budget.describe(unhealthy)),
            several => {
                let names: Vec<_> = several.iter().map(|budget| &*budget.name).collect();
                format!("The pod is covered by {}.", bounded::list(&names, MAX_NAMED))
            }
        }
    }

    /// Selects the Evacuations that may attempt an eviction now, in the given order. They count as in flight from now
    /// on.
    pub fn admit<'a>(
        &mut self,
        namespace: &str,
        waiting: impl IntoIterator<Item = (Uid, &'a Pod)>,
    ) -> Vec<Uid> {
        let all = self.in_namespace(namespace);
        let may_evict = |(key, pod): &(Uid, &Pod)| {
            let mut covering = all.iter_mut().filter(|budget| budget.covers(pod));
            match (covering.next(), covering.next()) {
                (None, _) => true,
                // Its eviction does not count.
                (Some(budget), None) if budget.exempts(pod) => true,
                (Some(budget), None) if budget.remaining() > 0 && !budget.in_flight.contains_key(key) => {
                    budget.in_flight.insert(*key, pod.name.clone());
                    true
                }
                _ => false,
            }
        };
        waiting.into_iter().filter(may_evict).map(|(key, _)| key).collect()
    }

    /// Counts the eviction of this pod as in flight, whether or not it was admitted.
    pub fn start_eviction(&mut self, key: Uid, pod: &Pod) {
        let budget = self.in_namespace(&pod.namespace).iter_mut().find(|budget| budget.covers(pod));
        if let Some(budget) = budget.filter(|budget| !budget.exempts(pod)) {
            budget.in_flight.insert(key, pod.name.clone());
        }
    }

    /// The eviction failed, or the watch reports that the pod leaves. Returns whether the eviction was in flight.
    pub fn end_eviction(&mut self, namespace: &str, key: Uid) -> bool {
        let removed = self.in_namespace(namespace).iter_mut().map(|budget| budget.in_flight.remove(&key));
        removed.flatten().count() > 0
    }

    fn in_namespace(&mut self, namespace: &str) -> &mut [Budget] {
        self.namespaces.get_mut(namespace).map(Vec::as_mut_slice).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;

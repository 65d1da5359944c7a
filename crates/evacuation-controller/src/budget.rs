//! PodDisruptionBudgets, and who may try when one of them frees up: the oldest first, and never more at once
//! than it allows besides those that are on their way already.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use haulout_api_types::selector::LabelMatcher;
use haulout_service_runtime::pods::{Phase, Pod, Uid};
use jiff::Timestamp;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;

use crate::backoff::after;
use crate::record::fingerprint;

/// How many pods a message names.
const NAMED: usize = 3;
/// For how long a budget counts a pod as disrupted that the API server has let go and that is not seen to leave:
/// <https://github.com/kubernetes/kubernetes/blob/v1.36.3/pkg/controller/disruption/disruption.go#L70>.
const DISRUPTED_FOR: Duration = Duration::from_secs(120);

/// All budgets, by namespace.
#[derive(Debug, Default)]
pub struct Budgets {
    namespaces: HashMap<Arc<str>, Vec<Budget>>,
    /// How many changes have been seen.
    changes: u32,
}

/// One budget as it was last seen, and the evictions that its numbers do not show yet.
#[derive(Clone, Debug)]
pub struct Budget {
    name: Box<str>,
    /// `None` selects nothing.
    selector: Option<LabelMatcher>,
    /// Whether the status belongs to the spec.
    current: bool,
    allowed: i32,
    healthy: i32,
    desired: i32,
    expected: i32,
    /// `unhealthyPodEvictionPolicy: AlwaysAllow`.
    unhealthy_always: bool,
    /// Names of pods that the API server has let go and the numbers already leave out, and when it did.
    disrupted: BTreeMap<Box<str>, Timestamp>,
    /// The names of pods whose eviction is on its way, by their Evacuation.
    in_flight: BTreeMap<Uid, Arc<str>>,
    /// The number of the change that made it so.
    change: u32,
}

/// What is known of the budgets that cover a pod, to see later whether it has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Covered {
    /// Stands for their names.
    pub by: u32,
    /// The number of their last change; 0 without any.
    change: u32,
}

impl Budget {
    /// Reads a budget; its namespace is kept by [`Budgets`].
    fn read(budget: PodDisruptionBudget) -> Self {
        let spec = budget.spec.unwrap_or_default();
        let status = budget.status.unwrap_or_default();
        let generation = budget.metadata.generation.unwrap_or_default();
        Self {
            name: budget.metadata.name.unwrap_or_default().into(),
            // One that cannot be read cannot be judged by the API server either.
            selector: spec.selector.and_then(|selector| LabelMatcher::new(&selector).ok()),
            current: status.observed_generation.unwrap_or_default() >= generation,
            allowed: status.disruptions_allowed,
            healthy: status.current_healthy,
            desired: status.desired_healthy,
            expected: status.expected_pods,
            unhealthy_always: spec.unhealthy_pod_eviction_policy.as_deref() == Some("AlwaysAllow"),
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

    /// How many more may try.
    fn room(&self) -> usize {
        let allowed = if self.current { usize::try_from(self.allowed).unwrap_or_default() } else { 0 };
        allowed.saturating_sub(self.in_flight.len())
    }

    /// Whether the budget does not count this pod at all, as the API server sees it.
    fn exempts(&self, pod: &Pod) -> bool {
        let enough = self.desired > 0 && self.healthy >= self.desired;
        pod.is_finished()
            || pod.phase == Phase::Pending
            || (!pod.ready && self.current && (self.unhealthy_always || enough))
    }

    /// Its numbers, and who of `unhealthy` makes them so.
    fn describe<'a>(&self, unhealthy: impl IntoIterator<Item = &'a Pod>) -> String {
        let Self { name, allowed, healthy, desired, expected, .. } = self;
        let lacking = if healthy < expected { self.lacking(unhealthy) } else { String::new() };
        let taken = self.taken();
        format!(
            "PodDisruptionBudget {name} allows {allowed} disruptions: {healthy} of {expected} pods are healthy and {desired} have to be{lacking}{taken}."
        )
    }

    /// The first few pods that take its room although they do not leave: they were replaced under the same name, or the
    /// eviction was cut short.
    fn taken(&self) -> String {
        let until = |since: &Timestamp| after(*since, DISRUPTED_FOR);
        let said = |(pod, since)| format!("pod {pod} counts as disrupted until {}", until(since));
        first_few(self.disrupted.iter().map(said), ", and so do others")
    }

    /// The first few pods that it counts as missing.
    fn lacking<'a>(&self, unhealthy: impl IntoIterator<Item = &'a Pod>) -> String {
        let state = |pod: &Pod| if pod.terminating { "terminating" } else { "not ready" };
        let covered = unhealthy.into_iter().filter(|pod| self.covers(pod));
        first_few(covered.map(|pod| format!("pod {} is {}", pod.name, state(pod))), ", and so are others")
    }
}

/// What a message appends of these: the first few, and that there are others.
fn first_few(all: impl Iterator<Item = String>, others: &str) -> String {
    let mut named: Vec<_> = all.take(NAMED + 1).collect();
    let others = if named.len() > NAMED { others } else { "" };
    named.truncate(NAMED);
    named.sort_unstable();
    if named.is_empty() { String::new() } else { format!("; {}{others}", named.join(", ")) }
}

impl Budgets {
    /// A budget is there, in this state.
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
        // What the numbers show is not on its way any more.
        budget.in_flight.retain(|_, pod| !budget.disrupted.contains_key(&**pod));
        *old = budget;
    }

    /// The budget with this name is gone.
    pub fn delete(&mut self, namespace: &str, name: &str) {
        if let Some(all) = self.namespaces.get_mut(namespace) {
            all.retain(|budget| budget.name.as_ref() != name);
            if all.is_empty() {
                self.namespaces.remove(namespace);
            }
        }
    }

    /// The budgets that cover this pod: without any, nothing limits its eviction, and with several the Eviction API does not
    /// cope.
    pub fn covering(&self, pod: &Pod) -> Vec<&Budget> {
        let all = self.namespaces.get(&pod.namespace).into_iter().flatten();
        all.filter(|budget| budget.covers(pod)).collect()
    }

    /// What is known of the budgets that cover this pod.
    pub fn covered(&self, pod: &Pod) -> Covered {
        let covering = self.covering(pod);
        let mut names: Vec<_> = covering.iter().map(|budget| &budget.name).collect();
        names.sort_unstable();
        let change = covering.iter().map(|budget| budget.change).max().unwrap_or_default();
        Covered { by: fingerprint(names), change }
    }

    /// Whether one budget covers this pod, and its numbers say that it has no room.
    pub fn is_exhausted(&self, pod: &Pod) -> bool {
        matches!(*self.covering(pod), [budget] if budget.current && budget.allowed <= 0)
    }

    /// What people should know of the budgets of this pod. `unhealthy` are the pods of its namespace that no budget
    /// counts as healthy.
    pub fn describe<'a>(&self, pod: &Pod, unhealthy: impl IntoIterator<Item = &'a Pod>) -> String {
        match &*self.covering(pod) {
            [] => "No PodDisruptionBudget is known to cover the pod any more.".to_owned(),
            [budget] => budget.describe(unhealthy),
            several => {
                let names: Vec<_> = several.iter().map(|budget| &*budget.name).collect();
                format!("The pod is covered by {}.", names.join(", "))
            }
        }
    }

    /// Who of these, first come, first served, may try now. They count as on their way from now on.
    pub fn admit<'a>(
        &mut self,
        namespace: &str,
        waiting: impl IntoIterator<Item = (Uid, &'a Pod)>,
    ) -> Vec<Uid> {
        let all = self.in_namespace(namespace);
        let may_try = |(key, pod): &(Uid, &Pod)| {
            let mut covering = all.iter_mut().filter(|budget| budget.covers(pod));
            match (covering.next(), covering.next()) {
                (None, _) => true,
                // It takes no room.
                (Some(budget), None) if budget.exempts(pod) => true,
                (Some(budget), None) if budget.room() > 0 && !budget.in_flight.contains_key(key) => {
                    budget.in_flight.insert(*key, pod.name.clone());
                    true
                }
                _ => false,
            }
        };
        waiting.into_iter().filter(may_try).map(|(key, _)| key).collect()
    }

    /// The eviction of this pod is on its way, admitted or not.
    pub fn begin(&mut self, key: Uid, pod: &Pod) {
        let budget = self.in_namespace(&pod.namespace).iter_mut().find(|budget| budget.covers(pod));
        if let Some(budget) = budget.filter(|budget| !budget.exempts(pod)) {
            budget.in_flight.insert(key, pod.name.clone());
        }
    }

    /// The eviction did not take place, or its pod is seen to leave. Whether it took room.
    pub fn end(&mut self, namespace: &str, key: Uid) -> bool {
        let removed = self.in_namespace(namespace).iter_mut().map(|budget| budget.in_flight.remove(&key));
        removed.flatten().count() > 0
    }

    fn in_namespace(&mut self, namespace: &str) -> &mut [Budget] {
        self.namespaces.get_mut(namespace).map(Vec::as_mut_slice).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;

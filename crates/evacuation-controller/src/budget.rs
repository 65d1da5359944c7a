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
    in_flight: Vec<InFlight>,
    /// The number of the change that made it so.
    change: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct InFlight {
    /// The Evacuation.
    key: Uid,
    pod: Arc<str>,
}

/// What is known of the budgets that cover a pod, to see later whether it has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Covered {
    /// Stands for their names.
    pub by: u32,
    /// The number of their last change; 0 without any.
    change: u32,
}

/// The budgets that cover a pod.
#[derive(Debug)]
pub enum Cover<'a> {
    /// None: nothing limits its eviction.
    None,
    /// One.
    One(&'a Budget),
    /// Several, with which the Eviction API does not cope.
    Several(Vec<&'a str>),
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
            in_flight: Vec::new(),
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

    fn has_in_flight(&self, key: Uid) -> bool {
        self.in_flight.iter().any(|flight| flight.key == key)
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
        let mut said = Vec::new();
        for (pod, since) in self.disrupted.iter().take(NAMED) {
            said.push(format!("pod {pod} counts as disrupted until {}", after(*since, DISRUPTED_FOR)));
        }
        let said = said.join(", ");
        let more = if self.disrupted.len() > NAMED { ", and so do others" } else { "" };
        if said.is_empty() { said } else { format!("; {said}{more}") }
    }

    /// The first few pods that it counts as missing.
    fn lacking<'a>(&self, unhealthy: impl IntoIterator<Item = &'a Pod>) -> String {
        let mut covered: Vec<_> =
            unhealthy.into_iter().filter(|pod| self.covers(pod)).take(NAMED + 1).collect();
        let more = if covered.len() > NAMED { ", and so are others" } else { "" };
        covered.truncate(NAMED);
        covered.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        let say = |pod: &&Pod| {
            let state = if pod.terminating { "terminating" } else { "not ready" };
            format!("pod {} is {state}", pod.name)
        };
        let said = covered.iter().map(say).collect::<Vec<_>>().join(", ");
        if said.is_empty() { said } else { format!("; {said}{more}") }
    }
}

impl Budgets {
    /// A budget is there, in this state. Whether more pods than before may be covered by no budget, or by
    /// another one.
    pub fn apply(&mut self, namespace: &Arc<str>, budget: PodDisruptionBudget) -> bool {
        let mut budget = Budget::read(budget);
        self.changes = self.changes.wrapping_add(1);
        budget.change = self.changes;
        let all = self.namespaces.entry(Arc::clone(namespace)).or_default();
        let Some(old) = all.iter_mut().find(|old| old.name == budget.name) else {
            all.push(budget);
            return true;
        };
        budget.in_flight = std::mem::take(&mut old.in_flight);
        // What the numbers show is not on its way any more.
        let disrupted = &budget.disrupted;
        budget.in_flight.retain(|flight| !disrupted.contains_key(&*flight.pod));
        let selects_others = old.selector != budget.selector;
        *old = budget;
        selects_others
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

    /// The budgets that cover this pod.
    pub fn covering(&self, pod: &Pod) -> Cover<'_> {
        let all = self.namespaces.get(&pod.namespace).map(Vec::as_slice).unwrap_or_default();
        let mut covering = all.iter().filter(|budget| budget.covers(pod));
        match (covering.next(), covering.next()) {
            (None, _) => Cover::None,
            (Some(one), None) => Cover::One(one),
            (Some(one), Some(other)) => Cover::Several(
                [one, other].into_iter().chain(covering).map(|budget| budget.name.as_ref()).collect(),
            ),
        }
    }

    /// What is known of the budgets that cover this pod.
    pub fn covered(&self, pod: &Pod) -> Covered {
        let all = self.namespaces.get(&pod.namespace).into_iter().flatten();
        let covering: Vec<_> = all.filter(|budget| budget.covers(pod)).collect();
        let mut names: Vec<_> = covering.iter().map(|budget| &budget.name).collect();
        names.sort_unstable();
        let change = covering.iter().map(|budget| budget.change).max().unwrap_or_default();
        Covered { by: fingerprint(names), change }
    }

    /// Whether one budget covers this pod, and its numbers say that it has no room.
    pub fn is_exhausted(&self, pod: &Pod) -> bool {
        matches!(self.covering(pod), Cover::One(budget) if budget.current && budget.allowed <= 0)
    }

    /// What people should know of the budgets of this pod. `unhealthy` are the pods of its namespace that no budget
    /// counts as healthy.
    pub fn describe<'a>(&self, pod: &Pod, unhealthy: impl IntoIterator<Item = &'a Pod>) -> String {
        match self.covering(pod) {
            Cover::None => "No PodDisruptionBudget is known to cover the pod any more.".to_owned(),
            Cover::One(budget) => budget.describe(unhealthy),
            Cover::Several(names) => format!("The pod is covered by {}.", names.join(", ")),
        }
    }

    /// Who of these, first come, first served, may try now. They count as on their way from now on.
    pub fn admit<'a>(
        &mut self,
        namespace: &str,
        waiting: impl IntoIterator<Item = (Uid, &'a Pod)>,
    ) -> Vec<Uid> {
        let mut admitted = Vec::new();
        for (key, pod) in waiting {
            let all = self.namespaces.get_mut(namespace).map(Vec::as_mut_slice).unwrap_or_default();
            let mut covering = all.iter_mut().filter(|budget| budget.covers(pod));
            match (covering.next(), covering.next()) {
                (None, _) => admitted.push(key),
                // It takes no room.
                (Some(budget), None) if budget.exempts(pod) => admitted.push(key),
                (Some(budget), None) => {
                    if !budget.has_in_flight(key) && budget.room() > 0 {
                        budget.in_flight.push(InFlight { key, pod: pod.name.clone() });
                        admitted.push(key);
                    }
                }
                (Some(_), Some(_)) => {}
            }
        }
        admitted
    }

    /// The eviction of this pod is on its way, admitted or not.
    pub fn begin(&mut self, key: Uid, pod: &Pod) {
        let all = self.namespaces.get_mut(&pod.namespace).map(Vec::as_mut_slice).unwrap_or_default();
        if let Some(budget) = all.iter_mut().find(|budget| budget.covers(pod))
            && !budget.has_in_flight(key)
            && !budget.exempts(pod)
        {
            budget.in_flight.push(InFlight { key, pod: pod.name.clone() });
        }
    }

    /// The eviction did not take place, or its pod is seen to leave. Whether it took room.
    pub fn end(&mut self, namespace: &str, key: Uid) -> bool {
        let mut took = false;
        for budget in self.namespaces.get_mut(namespace).map(Vec::as_mut_slice).unwrap_or_default() {
            let before = budget.in_flight.len();
            budget.in_flight.retain(|flight| flight.key != key);
            took |= budget.in_flight.len() < before;
        }
        took
    }
}

#[cfg(test)]
mod tests;

//! The steps of a drain: the entries of a plan for the pod types that are served, with the wait for volumes
//! between Default pods and all others.

use haulout_api_types::drain_plan::{EntryMatcher, normalise};
use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::{DrainPlanEntry, PodType};
use haulout_api_types::selector::{LabelMatcher, Labels, SelectorError};

/// The pod types that somebody evacuates in this installation. Pods of others are left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served([bool; 3]);

impl Served {
    /// Only Default pods, as `kubectl drain --ignore-daemonsets` does.
    pub const DEFAULT: Self = Self([true, false, false]);
    /// All types.
    pub const ALL: Self = Self([true; 3]);

    /// These types.
    pub fn new(types: impl IntoIterator<Item = PodType>) -> Self {
        let mut served = Self([false; 3]);
        for pod_type in types {
            if let Some(flag) = served.0.get_mut(pod_type as usize) {
                *flag = true;
            }
        }
        served
    }

    /// Whether pods of this type are evacuated.
    pub fn serves(self, pod_type: PodType) -> bool {
        self.0.get(pod_type as usize).copied().unwrap_or_default()
    }
}

/// The number of a step in a plan.
pub type StepNumber = u16;

/// A maintenance's drain plan, ready to be followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The pods that each step selects; `None` for the step in which volumes are waited for.
    steps: Vec<Option<EntryMatcher>>,
    /// The distinct types and selectors in it, in order.
    slots: Vec<(PodType, LabelMatcher)>,
}

impl Plan {
    /// Reads the plan of a maintenance, with the entries that every plan has.
    pub fn read(entries: &[DrainPlanEntry], served: Served) -> Result<Self, SelectorError> {
        Self::as_given(&normalise(entries), served)
    }

    /// Takes the entries as they are. Pods that none of them selects come after the last.
    pub fn as_given(entries: &[DrainPlanEntry], served: Served) -> Result<Self, SelectorError> {
        let mut steps = Vec::new();
        let mut slots: Vec<(PodType, LabelMatcher)> = Vec::new();
        for (index, entry) in entries.iter().enumerate().filter(|(_, entry)| served.serves(entry.pod_type)) {
            let entry = EntryMatcher::new(entry).map_err(|error| SelectorError {
                path: format!("spec.drainPlan[{index}].podSelector.{}", error.path),
                ..error
            })?;
            let slot = (entry.pod_type, entry.selector.clone());
            if !slots.contains(&slot) {
                slots.push(slot);
            }
            steps.push(Some(entry));
        }
        let defaults = steps.iter().flatten().take_while(|entry| entry.pod_type == PodType::Default).count();
        steps.insert(defaults, None);
        Ok(Self { steps, slots })
    }

    /// How many steps it has; at least one, the wait for volumes.
    pub fn steps(&self) -> usize {
        self.steps.len()
    }

    /// The last step.
    #[cfg(test)]
    pub fn last(&self) -> StepNumber {
        StepNumber::try_from(self.steps.len().saturating_sub(1)).unwrap_or(StepNumber::MAX)
    }

    /// The first step that selects a pod; one after the last if none does. A pod of negative order is in the first entry
    /// of its type, one of positive order in the last.
    pub fn first_step(
        &self,
        pod_type: PodType,
        priority: i32,
        order: i32,
        labels: &impl Labels,
    ) -> StepNumber {
        let of_type =
            |step: &Option<EntryMatcher>| step.as_ref().is_some_and(|entry| entry.pod_type == pod_type);
        let selects = |entry: &EntryMatcher| entry.selects(pod_type, priority, labels);
        let found = match order {
            ..0 => self.steps.iter().position(of_type),
            0 => self.steps.iter().position(|step| step.as_ref().is_some_and(selects)),
            1.. => self.steps.iter().rposition(of_type),
        };
        StepNumber::try_from(found.unwrap_or(self.steps.len())).unwrap_or(StepNumber::MAX)
    }

    /// The entry that a step works off; `None` for the wait for volumes, and after the last.
    pub fn entry(&self, step: StepNumber) -> Option<&EntryMatcher> {
        self.steps.get(usize::from(step))?.as_ref()
    }

    /// The step in which volumes are waited for.
    pub fn volume_step(&self) -> StepNumber {
        let found = self.steps.iter().position(Option::is_none);
        StepNumber::try_from(found.unwrap_or_default()).unwrap_or(StepNumber::MAX)
    }

    /// The last step for Default pods.
    pub fn last_default_step(&self) -> StepNumber {
        self.volume_step().saturating_sub(1)
    }

    /// The pods that are selected up to and including a step.
    pub fn targets(&self, up_to: StepNumber) -> DrainTargets {
        // From the widest to the narrowest, so that few are taken in and thrown out again.
        self.steps.iter().take(usize::from(up_to) + 1).rev().flatten().cloned().collect()
    }

    /// The distinct types and selectors in it.
    pub fn slots(&self) -> impl Iterator<Item = (PodType, &LabelMatcher)> {
        self.slots.iter().map(|(pod_type, selector)| (*pod_type, selector))
    }
}

/// Whether targets include a pod. One of negative order is there once its type is reached, one of positive
/// order once its type is reached as a whole.
pub fn is_targeted(
    targets: &DrainTargets,
    pod_type: PodType,
    priority: i32,
    order: i32,
    labels: &impl Labels,
) -> bool {
    match order {
        ..0 => targets.has_type(pod_type),
        0 => targets.selects(pod_type, priority, labels),
        1.. => targets.reach(pod_type, &LabelMatcher::everything()) == Some(i32::MAX),
    }
}

//! The steps of a drain: the plan's entries for the served pod types, with the wait for volumes between Default pods and all
//! other types.

use haulout_api_types::drain_plan::{EntryMatcher, normalise};
use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::{DrainPlanEntry, PodType};
use haulout_api_types::selector::{LabelMatcher, Labels, SelectorError};

/// The pod types that this installation evacuates. Pods of other types stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServedPodTypes([bool; 3]);

impl ServedPodTypes {
    /// Only Default pods, as with `kubectl drain --ignore-daemonsets`.
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

/// A parsed drain plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The pods that each step selects; `None` for the step that waits for volumes.
    steps: Vec<Option<EntryMatcher>>,
    /// The distinct pairs of pod type and selector, in order.
    slots: Vec<(PodType, LabelMatcher)>,
}

impl Plan {
    /// Parses the plan of a maintenance and adds the entries that every plan has.
    pub fn parse(entries: &[DrainPlanEntry], served: ServedPodTypes) -> Result<Self, SelectorError> {
        Self::parse_entries(&normalise(entries), served)
    }

    /// Parses the entries as they are. Pods that no entry selects come after the last step.
    pub fn parse_entries(entries: &[DrainPlanEntry], served: ServedPodTypes) -> Result<Self, SelectorError> {
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

    /// Number of steps; at least one, the wait for volumes.
    pub fn steps(&self) -> usize {
        self.steps.len()
    }

    /// The last step.
    #[cfg(test)]
    pub fn last(&self) -> StepNumber {
        StepNumber::try_from(self.steps.len().saturating_sub(1)).unwrap_or(StepNumber::MAX)
    }

    /// The first step that selects a pod; one after the last if none does. A pod with a negative order is in the first entry
    /// of its type, a pod with a positive order in the last.
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

    /// The entry of a step; `None` for the wait for volumes, and after the last step.
    pub fn entry(&self, step: StepNumber) -> Option<&EntryMatcher> {
        self.steps.get(usize::from(step))?.as_ref()
    }

    /// The step that waits for volumes.
    pub fn volume_step(&self) -> StepNumber {
        let found = self.steps.iter().position(Option::is_none);
        StepNumber::try_from(found.unwrap_or_default()).unwrap_or(StepNumber::MAX)
    }

    /// The last step for Default pods.
    pub fn last_default_step(&self) -> StepNumber {
        self.volume_step().saturating_sub(1)
    }

    /// The targets up to and including a step.
    pub fn targets(&self, up_to: StepNumber) -> DrainTargets {
        // From the widest to the narrowest: later entries are often included already.
        self.steps.iter().take(usize::from(up_to) + 1).rev().flatten().cloned().collect()
    }

    /// The distinct pairs of pod type and selector.
    pub fn slots(&self) -> impl Iterator<Item = (PodType, &LabelMatcher)> {
        self.slots.iter().map(|(pod_type, selector)| (*pod_type, selector))
    }
}

/// Whether targets include a pod. A pod with a negative order is included once its type is reached, a pod with a positive
/// order once all pods of its type are reached.
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

//! What happens in a round, and when. The seed alone determines it. Which objects are affected depends on the state
//! at that moment, so a repeated round is similar, not identical.

use std::time::Duration;

use anyhow::{Context as _, Result};

/// Something that people, tenants, other controllers or faults do to a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Action {
    DeleteEvacuation,
    StripFinalizers,
    HoldEvacuation,
    RelabelEvacuation,
    RewriteConditions,
    UncordonNode,
    RelabelNode,
    RecreateNode,
    DeleteBudget,
    CreateBudget,
    DoubleBudget,
    TightenBudget,
    LoosenBudget,
    DeletePod,
    CompleteMaintenance,
    DeleteMaintenance,
    OverlapMaintenance,
    CompleteUnled,
    RejectEvacuations,
    RejectNodes,
    RejectEvictions,
    OverloadEvictions,
    StopEvacuationController,
    KillEvacuationLeader,
    KillMaintenanceLeader,
    ScaleDeployment,
    RollOutDeployment,
    PauseDeployment,
    DeleteDeployment,
    StripFormerOwner,
    StripEvacuatorFinalizer,
    DeleteReplacement,
    BreakReplacement,
    CancelEvacuation,
    CordonSpare,
    StopWorkloadEvacuator,
    KillWorkloadLeader,
}

/// How long the effect of an action lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lasts {
    /// It has no lasting effect.
    Not,
    /// At least this many seconds, and fewer than this many.
    Seconds(u64, u64),
    /// Until well after the quiet period.
    ThroughQuiet,
}

impl Action {
    pub(super) const ALL: [Self; 37] = [
        Self::DeleteEvacuation,
        Self::StripFinalizers,
        Self::HoldEvacuation,
        Self::RelabelEvacuation,
        Self::RewriteConditions,
        Self::UncordonNode,
        Self::RelabelNode,
        Self::RecreateNode,
        Self::DeleteBudget,
        Self::CreateBudget,
        Self::DoubleBudget,
        Self::TightenBudget,
        Self::LoosenBudget,
        Self::DeletePod,
        Self::CompleteMaintenance,
        Self::DeleteMaintenance,
        Self::OverlapMaintenance,
        Self::CompleteUnled,
        Self::RejectEvacuations,
        Self::RejectNodes,
        Self::RejectEvictions,
        Self::OverloadEvictions,
        Self::StopEvacuationController,
        Self::KillEvacuationLeader,
        Self::KillMaintenanceLeader,
        Self::ScaleDeployment,
        Self::RollOutDeployment,
        Self::PauseDeployment,
        Self::DeleteDeployment,
        Self::StripFormerOwner,
        Self::StripEvacuatorFinalizer,
        Self::DeleteReplacement,
        Self::BreakReplacement,
        Self::CancelEvacuation,
        Self::CordonSpare,
        Self::StopWorkloadEvacuator,
        Self::KillWorkloadLeader,
    ];

    /// The name in timelines and for `--only`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::DeleteEvacuation => "delete-evacuation",
            Self::StripFinalizers => "strip-finalizers",
            Self::HoldEvacuation => "hold-evacuation",
            Self::RelabelEvacuation => "relabel-evacuation",
            Self::RewriteConditions => "rewrite-conditions",
            Self::UncordonNode => "uncordon-node",
            Self::RelabelNode => "relabel-node",
            Self::RecreateNode => "recreate-node",
            Self::DeleteBudget => "delete-budget",
            Self::CreateBudget => "create-budget",
            Self::DoubleBudget => "double-budget",
            Self::TightenBudget => "tighten-budget",
            Self::LoosenBudget => "loosen-budget",
            Self::DeletePod => "delete-pod",
            Self::CompleteMaintenance => "complete-maintenance",
            Self::DeleteMaintenance => "delete-maintenance",
            Self::OverlapMaintenance => "overlap-maintenance",
            Self::CompleteUnled => "complete-unled",
            Self::RejectEvacuations => "reject-evacuations",
            Self::RejectNodes => "reject-nodes",
            Self::RejectEvictions => "reject-evictions",
            Self::OverloadEvictions => "overload-evictions",
            Self::StopEvacuationController => "stop-evacuation-controller",
            Self::KillEvacuationLeader => "kill-evacuation-leader",
            Self::KillMaintenanceLeader => "kill-maintenance-leader",
            Self::ScaleDeployment => "scale-deployment",
            Self::RollOutDeployment => "roll-out-deployment",
            Self::PauseDeployment => "pause-deployment",
            Self::DeleteDeployment => "delete-deployment",
            Self::StripFormerOwner => "strip-former-owner",
            Self::StripEvacuatorFinalizer => "strip-evacuator-finalizer",
            Self::DeleteReplacement => "delete-replacement",
            Self::BreakReplacement => "break-replacement",
            Self::CancelEvacuation => "cancel-evacuation",
            Self::CordonSpare => "cordon-spare",
            Self::StopWorkloadEvacuator => "stop-workload-evacuator",
            Self::KillWorkloadLeader => "kill-workload-leader",
        }
    }

    fn lasts(self) -> Lasts {
        match self {
            Self::HoldEvacuation
            | Self::DoubleBudget
            | Self::RejectEvacuations
            | Self::RejectNodes
            | Self::RejectEvictions
            | Self::RollOutDeployment
            | Self::PauseDeployment
            | Self::BreakReplacement
            | Self::CordonSpare => Lasts::ThroughQuiet,
            Self::RelabelNode | Self::DeleteDeployment | Self::ScaleDeployment => Lasts::Seconds(3, 9),
            Self::OverloadEvictions => Lasts::Seconds(4, 7),
            Self::StopEvacuationController | Self::StopWorkloadEvacuator => Lasts::Seconds(4, 12),
            _ => Lasts::Not,
        }
    }

    /// Whether its effect can last until a status has to report it.
    fn can_be_long(self) -> bool {
        matches!(self, Self::StopEvacuationController | Self::StopWorkloadEvacuator)
    }

    /// Whether the action is most useful late in the round, when the drain has been blocked for a while, or would end
    /// it too early.
    fn is_late(self) -> bool {
        matches!(
            self,
            Self::RewriteConditions
                | Self::OverloadEvictions
                | Self::CompleteMaintenance
                | Self::DeleteMaintenance
                | Self::CompleteUnled
        )
    }

    /// Whether the action concerns Deployments whose pods are being replaced.
    fn is_about_replacements(self) -> bool {
        matches!(
            self,
            Self::ScaleDeployment
                | Self::RollOutDeployment
                | Self::PauseDeployment
                | Self::DeleteDeployment
                | Self::StripFormerOwner
                | Self::StripEvacuatorFinalizer
                | Self::DeleteReplacement
                | Self::BreakReplacement
                | Self::CancelEvacuation
                | Self::CordonSpare
                | Self::StopWorkloadEvacuator
                | Self::KillWorkloadLeader
        )
    }
}

/// One action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// When, after the start of the drain.
    pub(super) at: Duration,
    pub(super) action: Action,
    /// For how long, if the effect ends.
    pub(super) lasts: Duration,
    /// The seed of its random choices.
    pub(super) seed: u64,
}

/// All actions of a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Script {
    pub(super) steps: Vec<Step>,
    /// When the second half begins, after the quiet period.
    pub(super) second: Duration,
    /// When interference ends.
    pub(super) end: Duration,
    /// Whether silent evacuators miss their deadline instead of completing at the end.
    pub(super) time_passes: bool,
}

/// The drain has started by then.
const FIRST: Duration = Duration::from_secs(2);
/// How long people interfere before and after the quiet period.
const BUSY: Duration = Duration::from_secs(11);
/// Long enough for a status to be checked: ten seconds without activity, and some for a problem to persist.
const QUIET: Duration = Duration::from_secs(18);
/// The same for rounds in which a controller is stopped long enough that a status has to report it.
const LONG_QUIET: Duration = Duration::from_secs(92);
/// The same after an overload at the end: rejected evictions have had time for a retry, and do not wait for a long
/// backoff.
const AFTER_OVERLOAD: Duration = Duration::from_secs(25);
/// One round in this many has such a long outage.
const LONG_ONCE_IN: u64 = 6;

impl Script {
    /// The script of a round. If action names are given, it has only these.
    pub(super) fn new(seed: u64, only: &[String]) -> Result<Self> {
        let mut random = fastrand::Rng::with_seed(seed);
        let only: Vec<Action> = only.iter().map(|name| named(name)).collect::<Result<_>>()?;
        let outage =
            if random.bool() { Action::StopEvacuationController } else { Action::StopWorkloadEvacuator };
        let long = if only.is_empty() {
            (random.u64(..LONG_ONCE_IN) == 0).then_some(outage)
        } else {
            only.first().copied().filter(|action| only.len() == 1 && action.can_be_long())
        };
        let quiet = if long.is_some() { LONG_QUIET } else { QUIET };
        let second = FIRST + BUSY + quiet;
        let (mut early, mut late) = if only.is_empty() {
            choose(&mut random, long)
        } else {
            (only.iter().copied().cycle().take(3).collect(), only.clone())
        };
        if let Some(long) = long {
            early.retain(|action| *action != long);
            early.insert(0, long);
        }
        random.shuffle(&mut late);
        let after = if late.contains(&Action::OverloadEvictions) { AFTER_OVERLOAD } else { Duration::ZERO };
        let mut steps = Vec::new();
        for (begin, actions) in [(FIRST, early), (second, late)] {
            let count = u32::try_from(actions.len()).unwrap_or(1).max(1);
            for (place, action) in (0..).zip(actions) {
                let at = begin + BUSY * place / count + Duration::from_millis(random.u64(..500));
                let seconds = match action.lasts() {
                    Lasts::Not => 0,
                    Lasts::Seconds(..) if long == Some(action) && begin == FIRST => {
                        second.saturating_sub(at).as_secs() + 1
                    }
                    Lasts::Seconds(least, most) => random.u64(least..most),
                    Lasts::ThroughQuiet if begin == FIRST => {
                        second.saturating_sub(at).as_secs() + random.u64(..4)
                    }
                    Lasts::ThroughQuiet => random.u64(4..9),
                };
                let lasts = Duration::from_secs(seconds);
                steps.push(Step { at, action, lasts, seed: random.u64(..) });
            }
        }
        Ok(Self { steps, second, end: second + BUSY + after, time_passes: random.u8(..4) == 0 })
    }
}

/// The actions before and after the quiet period, without the one that goes on all that time.
fn choose(random: &mut fastrand::Rng, long: Option<Action>) -> (Vec<Action>, Vec<Action>) {
    let mut all: Vec<_> = Action::ALL.into_iter().filter(|action| Some(*action) != long).collect();
    random.shuffle(&mut all);
    let (replacements, all): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|action| action.is_about_replacements());
    let (late, early): (Vec<_>, Vec<_>) = all.into_iter().partition(|action| action.is_late());
    let (mut replacements, mut early) = (replacements.into_iter(), early.into_iter());
    let mut first: Vec<_> = early.by_ref().take(random.usize(4..7)).collect();
    first.extend(replacements.by_ref().take(random.usize(2..4)));
    random.shuffle(&mut first);
    let last = late.into_iter().take(2).chain(early.take(random.usize(1..3)));
    (first, last.chain(replacements.take(random.usize(1..4))).collect())
}

fn named(name: &str) -> Result<Action> {
    let found = Action::ALL.into_iter().find(|action| action.name() == name);
    found.with_context(|| {
        let names = Action::ALL.map(Action::name).join(", ");
        format!("there is no action {name:?}; there are: {names}")
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn same_seed_gives_the_same_script() {
        for seed in 0..50 {
            assert_eq!(Script::new(seed, &[]).unwrap(), Script::new(seed, &[]).unwrap());
        }
        assert_ne!(Script::new(1, &[]).unwrap(), Script::new(2, &[]).unwrap());
    }

    #[test]
    fn thirty_rounds_cover_all_actions() {
        let done: BTreeSet<_> =
            (0..30).flat_map(|seed| Script::new(seed, &[]).unwrap().steps).map(|step| step.action).collect();
        assert_eq!(done, Action::ALL.into_iter().collect());
    }

    #[test]
    fn steps_are_ordered_with_a_quiet_period() {
        for seed in 0..50 {
            let script = Script::new(seed, &[]).unwrap();
            let times: Vec<_> = script.steps.iter().map(|step| step.at).collect();
            assert!(times.is_sorted(), "{times:?}");
            let widest = times.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).max().unwrap();
            assert!(widest >= Duration::from_secs(16), "{times:?}");
            assert!(times.last().unwrap() < &script.end);
        }
    }

    #[test]
    fn only_selected_actions_run() {
        let script = Script::new(3, &["reject-nodes".into()]).unwrap();
        assert!(script.steps.iter().all(|step| step.action == Action::RejectNodes));
        assert!(!script.steps.is_empty());
        let error = Script::new(3, &["be-nice".into()]).unwrap_err().to_string();
        assert!(error.contains("be-nice") && error.contains("reject-nodes"), "{error}");
    }
}

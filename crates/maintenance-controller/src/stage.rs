//! The lifecycle of a maintenance: its finalizer, when its stages start, and when it is done.

use haulout_api_types::node_maintenance::{Stage, StageStatus};
use jiff::{SignedDuration, Timestamp};

/// What decides about the next step in the lifecycle of a maintenance.
#[derive(Clone, Copy, Debug)]
pub struct Lifecycle<'a> {
    /// The stage in its spec.
    pub stage: Stage,
    /// Whether it is being deleted.
    pub deleting: bool,
    /// Whether it has our finalizer.
    pub has_finalizer: bool,
    /// The stages that have started.
    pub started_stages: &'a [StageStatus],
    /// Number of nodes that are not released yet, as counted by the planner.
    pub nodes_unreleased: u32,
}

/// A step in the lifecycle of a maintenance. If several are due, the first is executed and the others are decided again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Add our finalizer, before anything else is changed.
    AddFinalizer,
    /// Remove our finalizer: the maintenance is done.
    RemoveFinalizer,
    /// Change the stage in its spec, because it is being deleted.
    SetStage(Stage),
    /// Record in its status that a stage has started.
    Start(Stage),
}

/// The effective stage: a maintenance that is being deleted is completed first, unless it is Idle.
pub fn effective_stage(stage: Stage, deleting: bool) -> Stage {
    if deleting && stage != Stage::Idle { Stage::Complete } else { stage }
}

fn has_started(started_stages: &[StageStatus], stage: Stage) -> bool {
    started_stages.iter().any(|status| status.name == stage)
}

/// Whether a maintenance makes its nodes schedulable no matter who cordoned them: it went to Complete without Cordon or Drain,
/// and is not done yet.
pub fn uncordons(lifecycle: Lifecycle<'_>) -> bool {
    effective_stage(lifecycle.stage, lifecycle.deleting) == Stage::Complete
        && lifecycle.has_finalizer
        && !has_started(lifecycle.started_stages, Stage::Cordon)
        && !has_started(lifecycle.started_stages, Stage::Drain)
}

/// The stage that the planner acts on: the last that has started. A stage starts only after the finalizer was added, so that
/// the nodes are released however the object is deleted. Complete needs no such record, because it only releases: a leader
/// that cannot write the status releases the nodes too.
pub fn active_stage(lifecycle: Lifecycle<'_>) -> Stage {
    let effective = effective_stage(lifecycle.stage, lifecycle.deleting);
    if effective == Stage::Complete {
        return effective;
    }
    let started = lifecycle.started_stages.iter().map(|status| status.name);
    started.filter(|stage| *stage <= effective).max().unwrap_or_default()
}

/// When a maintenance that is done expires: this many seconds after its completion started; `None` if it does not expire.
pub fn expiry(lifecycle: Lifecycle<'_>, ttl_seconds: Option<i32>) -> Option<Timestamp> {
    let ttl = SignedDuration::from_secs(ttl_seconds?.into());
    let done = lifecycle.stage == Stage::Complete && !lifecycle.deleting && !lifecycle.has_finalizer;
    let completion =
        lifecycle.started_stages.iter().find(|started| started.name == Stage::Complete).filter(|_| done)?;
    Some(completion.start_timestamp.0.saturating_add(ttl).unwrap_or(Timestamp::MAX))
}

/// The next step, if there is one.
pub fn next_step(lifecycle: Lifecycle<'_>) -> Option<Step> {
    let stage = effective_stage(lifecycle.stage, lifecycle.deleting);
    let started = has_started(lifecycle.started_stages, stage);
    match (stage, lifecycle.has_finalizer) {
        (Stage::Idle, true) => Some(Step::RemoveFinalizer),
        (Stage::Idle, false) => (!started).then_some(Step::Start(Stage::Idle)),
        // It is done, or it is being deleted and never had our finalizer.
        (Stage::Complete, false) if started || lifecycle.deleting => None,
        (_, false) if lifecycle.deleting => None,
        (_, false) => Some(Step::AddFinalizer),
        (_, true) if lifecycle.stage != stage => Some(Step::SetStage(stage)),
        (_, true) if !started => Some(Step::Start(stage)),
        (Stage::Complete, true) if lifecycle.nodes_unreleased == 0 => Some(Step::RemoveFinalizer),
        (_, true) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::at;
    use haulout_api_types::node_maintenance::Stage::{Complete, Cordon, Drain, Idle};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    /// Executes steps until there is none left. Nodes are released one after the other.
    fn run_lifecycle(
        mut stage: Stage,
        deleting: bool,
        started_stages: &[Stage],
        mut finalizer: bool,
        mut nodes: u32,
    ) -> Vec<Step> {
        let mut started_stages: Vec<_> = started_stages
            .iter()
            .map(|name| StageStatus { name: *name, start_timestamp: Time(at(0)) })
            .collect();
        let mut steps = Vec::new();
        while steps.len() < 20 {
            let lifecycle = Lifecycle {
                stage,
                deleting,
                has_finalizer: finalizer,
                started_stages: &started_stages,
                nodes_unreleased: nodes,
            };
            match next_step(lifecycle) {
                Some(step) => {
                    steps.push(step);
                    match step {
                        Step::AddFinalizer => finalizer = true,
                        Step::RemoveFinalizer => finalizer = false,
                        Step::SetStage(to) => stage = to,
                        Step::Start(name) => {
                            started_stages.push(StageStatus { name, start_timestamp: Time(at(0)) });
                        }
                    }
                }
                None if nodes > 0 && active_stage(lifecycle) == Complete && finalizer => nodes -= 1,
                None => return steps,
            }
        }
        panic!("it never ends: {steps:?}");
    }

    #[test]
    fn lifecycle_steps_from_each_state() {
        use Step::{AddFinalizer, RemoveFinalizer, SetStage, Start};
        type Case<'a> = (&'a str, Stage, bool, &'a [Stage], bool, &'a [Step]);
        let cases: [Case; 11] = [
            ("planned", Idle, false, &[], false, &[Start(Idle)]),
            ("planned and deleted", Idle, true, &[Idle], false, &[]),
            ("drained at once", Drain, false, &[], false, &[AddFinalizer, Start(Drain)]),
            ("cordoned after planning", Cordon, false, &[Idle], false, &[AddFinalizer, Start(Cordon)]),
            ("drained after cordoning", Drain, false, &[Cordon], true, &[Start(Drain)]),
            ("being drained", Drain, false, &[Drain], true, &[]),
            ("completed", Complete, false, &[Drain], true, &[Start(Complete), RemoveFinalizer]),
            ("completed long ago", Complete, false, &[Drain, Complete], false, &[]),
            (
                "deleted halfway",
                Drain,
                true,
                &[Drain],
                true,
                &[SetStage(Complete), Start(Complete), RemoveFinalizer],
            ),
            ("deleted when completed", Complete, true, &[Drain, Complete], true, &[RemoveFinalizer]),
            (
                "completed without a start",
                Complete,
                false,
                &[Idle],
                false,
                &[AddFinalizer, Start(Complete), RemoveFinalizer],
            ),
        ];
        for (what, stage, deleting, started_stages, finalizer, expected) in cases {
            assert_eq!(run_lifecycle(stage, deleting, started_stages, finalizer, 2), expected, "{what}");
        }
    }

    #[test]
    fn stage_is_active_once_started_and_complete_at_once() {
        let cases: [(Stage, bool, &[Stage], Stage); 8] = [
            (Drain, false, &[], Idle),
            (Drain, false, &[Idle, Cordon], Cordon),
            (Drain, false, &[Cordon, Drain], Drain),
            (Drain, true, &[Drain], Complete),
            (Complete, false, &[Drain], Complete),
            (Complete, false, &[], Complete),
            (Complete, true, &[Drain, Complete], Complete),
            (Idle, true, &[Idle], Idle),
        ];
        for (stage, deleting, started_stages, expected) in cases {
            let started_stages: Vec<_> = started_stages
                .iter()
                .map(|name| StageStatus { name: *name, start_timestamp: Time(at(0)) })
                .collect();
            let lifecycle = Lifecycle {
                stage,
                deleting,
                has_finalizer: true,
                started_stages: &started_stages,
                nodes_unreleased: 0,
            };
            assert_eq!(active_stage(lifecycle), expected, "{stage:?} {started_stages:?}");
        }
    }

    #[test]
    fn only_completed_maintenance_expires() {
        let started_stages = [StageStatus { name: Complete, start_timestamp: Time(at(10)) }];
        let lifecycle = Lifecycle {
            stage: Complete,
            deleting: false,
            has_finalizer: false,
            started_stages: &started_stages,
            nodes_unreleased: 0,
        };
        assert_eq!(expiry(lifecycle, Some(5)), Some(at(15)));
        assert_eq!(expiry(lifecycle, Some(0)), Some(at(10)));
        assert_eq!(expiry(lifecycle, None), None);
        assert_eq!(
            expiry(Lifecycle { has_finalizer: true, ..lifecycle }, Some(5)),
            None,
            "nodes are not released yet"
        );
        assert_eq!(expiry(Lifecycle { deleting: true, ..lifecycle }, Some(5)), None);
        assert_eq!(expiry(Lifecycle { started_stages: &[], ..lifecycle }, Some(5)), None);
        assert_eq!(expiry(Lifecycle { stage: Drain, ..lifecycle }, Some(5)), None);
    }

    #[test]
    fn only_direct_completion_removes_foreign_cordons() {
        let status = |name: &Stage| StageStatus { name: *name, start_timestamp: Time(at(0)) };
        let cases: [(Stage, &[Stage], bool, bool); 5] = [
            (Complete, &[Idle, Complete], true, true),
            (Complete, &[Idle, Complete], false, false),
            (Complete, &[Cordon, Complete], true, false),
            (Complete, &[Drain], true, false),
            (Idle, &[Idle], false, false),
        ];
        for (stage, started_stages, has_finalizer, expected) in cases {
            let started_stages: Vec<_> = started_stages.iter().map(status).collect();
            let lifecycle = Lifecycle {
                stage,
                deleting: false,
                has_finalizer,
                started_stages: &started_stages,
                nodes_unreleased: 0,
            };
            assert_eq!(uncordons(lifecycle), expected, "{stage:?} {started_stages:?}");
        }
    }
}

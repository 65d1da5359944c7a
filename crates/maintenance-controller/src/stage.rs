//! The life of a maintenance: its finalizer, when its stages begin, and when it is done.

use haulout_api_types::node_maintenance::{Stage, StageStatus};
use jiff::{SignedDuration, Timestamp};

/// What has to be known of a maintenance to decide what its life needs next.
#[derive(Clone, Copy, Debug)]
pub struct Life<'a> {
    /// Its stage, as its spec says.
    pub stage: Stage,
    /// Whether somebody has deleted it.
    pub deleting: bool,
    /// Whether it has our finalizer.
    pub has_finalizer: bool,
    /// The stages that have begun.
    pub begun: &'a [StageStatus],
    /// How many nodes still carry something of ours that nobody wants any longer, as the planner counts.
    pub nodes_unreleased: u32,
}

/// A step in the life of a maintenance. Where several are due, the first is done and the rest decided anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Put our finalizer on it, before anything else is touched.
    AddFinalizer,
    /// Take our finalizer off it: it is done.
    RemoveFinalizer,
    /// Change the stage in its spec, as the deletion demands.
    SetStage(Stage),
    /// Note in its status that a stage has begun.
    Begin(Stage),
}

/// The stage that a maintenance is in for everybody: one that is being deleted is completed first, unless it
/// never left Idle.
pub fn effective(stage: Stage, deleting: bool) -> Stage {
    if deleting && stage != Stage::Idle { Stage::Complete } else { stage }
}

fn has_begun(begun: &[StageStatus], stage: Stage) -> bool {
    begun.iter().any(|status| status.name == stage)
}

/// Whether a maintenance makes its nodes schedulable whoever cordoned them: it went to Complete without having
/// been in Cordon or Drain, and is not done yet.
pub fn uncordons(life: Life<'_>) -> bool {
    effective(life.stage, life.deleting) == Stage::Complete
        && life.has_finalizer
        && !has_begun(life.begun, Stage::Cordon)
        && !has_begun(life.begun, Stage::Drain)
}

/// The stage that the planner is to act on: the last that has begun, because a stage begins behind the finalizer, so
/// that nothing is left over however the object goes. Complete takes nothing new, so it needs no such record: a leader
/// that cannot write the status, or has just been elected, releases the nodes all the same.
pub fn planned(life: Life<'_>) -> Stage {
    let effective = effective(life.stage, life.deleting);
    if effective == Stage::Complete {
        return effective;
    }
    let begun = life.begun.iter().map(|status| status.name);
    begun.filter(|stage| *stage <= effective).max().unwrap_or_default()
}

/// When a maintenance that is done is to be deleted, if it is: so many seconds after its completion began.
pub fn expires(life: Life<'_>, ttl_seconds: Option<i32>) -> Option<Timestamp> {
    let ttl = SignedDuration::from_secs(ttl_seconds?.into());
    let done = life.stage == Stage::Complete && !life.deleting && !life.has_finalizer;
    let began = life.begun.iter().find(|begun| begun.name == Stage::Complete).filter(|_| done)?;
    Some(began.start_timestamp.0.saturating_add(ttl).unwrap_or(Timestamp::MAX))
}

/// What comes next, if anything.
pub fn next(life: Life<'_>) -> Option<Step> {
    let stage = effective(life.stage, life.deleting);
    let begun = has_begun(life.begun, stage);
    match (stage, life.has_finalizer) {
        (Stage::Idle, true) => Some(Step::RemoveFinalizer),
        (Stage::Idle, false) => (!begun).then_some(Step::Begin(Stage::Idle)),
        // Done already, or on its way out without having been ours.
        (Stage::Complete, false) if begun || life.deleting => None,
        (_, false) if life.deleting => None,
        (_, false) => Some(Step::AddFinalizer),
        (_, true) if life.stage != stage => Some(Step::SetStage(stage)),
        (_, true) if !begun => Some(Step::Begin(stage)),
        (Stage::Complete, true) if life.nodes_unreleased == 0 => Some(Step::RemoveFinalizer),
        (_, true) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::at;
    use haulout_api_types::node_maintenance::Stage::{Complete, Cordon, Drain, Idle};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    /// Carries out what comes next until nothing does, with nodes released one after the other.
    fn live(
        mut stage: Stage,
        deleting: bool,
        begun: &[Stage],
        mut finalizer: bool,
        mut nodes: u32,
    ) -> Vec<Step> {
        let mut begun: Vec<_> =
            begun.iter().map(|name| StageStatus { name: *name, start_timestamp: Time(at(0)) }).collect();
        let mut steps = Vec::new();
        while steps.len() < 20 {
            let life =
                Life { stage, deleting, has_finalizer: finalizer, begun: &begun, nodes_unreleased: nodes };
            match next(life) {
                Some(step) => {
                    steps.push(step);
                    match step {
                        Step::AddFinalizer => finalizer = true,
                        Step::RemoveFinalizer => finalizer = false,
                        Step::SetStage(to) => stage = to,
                        Step::Begin(name) => begun.push(StageStatus { name, start_timestamp: Time(at(0)) }),
                    }
                }
                None if nodes > 0 && planned(life) == Complete && finalizer => nodes -= 1,
                None => return steps,
            }
        }
        panic!("it never comes to rest: {steps:?}");
    }

    #[test]
    fn lives_from_where_they_stand_to_where_they_rest() {
        use Step::{AddFinalizer, Begin, RemoveFinalizer, SetStage};
        type Case<'a> = (&'a str, Stage, bool, &'a [Stage], bool, &'a [Step]);
        let cases: [Case; 11] = [
            ("planned", Idle, false, &[], false, &[Begin(Idle)]),
            ("planned and deleted", Idle, true, &[Idle], false, &[]),
            ("drained at once", Drain, false, &[], false, &[AddFinalizer, Begin(Drain)]),
            ("cordoned after planning", Cordon, false, &[Idle], false, &[AddFinalizer, Begin(Cordon)]),
            ("drained after cordoning", Drain, false, &[Cordon], true, &[Begin(Drain)]),
            ("being drained", Drain, false, &[Drain], true, &[]),
            ("completed", Complete, false, &[Drain], true, &[Begin(Complete), RemoveFinalizer]),
            ("completed long ago", Complete, false, &[Drain, Complete], false, &[]),
            (
                "deleted halfway",
                Drain,
                true,
                &[Drain],
                true,
                &[SetStage(Complete), Begin(Complete), RemoveFinalizer],
            ),
            ("deleted when completed", Complete, true, &[Drain, Complete], true, &[RemoveFinalizer]),
            (
                "completed without a start",
                Complete,
                false,
                &[Idle],
                false,
                &[AddFinalizer, Begin(Complete), RemoveFinalizer],
            ),
        ];
        for (what, stage, deleting, begun, finalizer, expected) in cases {
            assert_eq!(live(stage, deleting, begun, finalizer, 2), expected, "{what}");
        }
    }

    #[test]
    fn stages_are_acted_on_once_begun_and_complete_at_once() {
        let cases: [(Stage, bool, &[Stage], Stage); 8] = [
            (Drain, false, &[], Idle),
            (Drain, false, &[Idle, Cordon], Cordon),
            (Drain, false, &[Cordon, Drain], Drain),
            // Nothing is asked for behind a stage that was taken back before it was recorded.
            (Drain, true, &[Drain], Complete),
            (Complete, false, &[Drain], Complete),
            (Complete, false, &[], Complete),
            (Complete, true, &[Drain, Complete], Complete),
            (Idle, true, &[Idle], Idle),
        ];
        for (stage, deleting, begun, expected) in cases {
            let begun: Vec<_> =
                begun.iter().map(|name| StageStatus { name: *name, start_timestamp: Time(at(0)) }).collect();
            let life = Life { stage, deleting, has_finalizer: true, begun: &begun, nodes_unreleased: 0 };
            assert_eq!(planned(life), expected, "{stage:?} {begun:?}");
        }
    }

    #[test]
    fn only_what_is_done_expires() {
        let begun = [StageStatus { name: Complete, start_timestamp: Time(at(10)) }];
        let life = Life {
            stage: Complete,
            deleting: false,
            has_finalizer: false,
            begun: &begun,
            nodes_unreleased: 0,
        };
        assert_eq!(expires(life, Some(5)), Some(at(15)));
        assert_eq!(expires(life, Some(0)), Some(at(10)));
        assert_eq!(expires(life, None), None);
        assert_eq!(
            expires(Life { has_finalizer: true, ..life }, Some(5)),
            None,
            "nodes are yet to be released"
        );
        assert_eq!(expires(Life { deleting: true, ..life }, Some(5)), None);
        assert_eq!(expires(Life { begun: &[], ..life }, Some(5)), None);
        assert_eq!(expires(Life { stage: Drain, ..life }, Some(5)), None);
    }

    #[test]
    fn only_completing_without_a_start_uncordons_what_others_cordoned() {
        let status = |name: &Stage| StageStatus { name: *name, start_timestamp: Time(at(0)) };
        let cases: [(Stage, &[Stage], bool, bool); 5] = [
            (Complete, &[Idle, Complete], true, true),
            (Complete, &[Idle, Complete], false, false),
            (Complete, &[Cordon, Complete], true, false),
            (Complete, &[Drain], true, false),
            (Idle, &[Idle], false, false),
        ];
        for (stage, begun, has_finalizer, expected) in cases {
            let begun: Vec<_> = begun.iter().map(status).collect();
            let life = Life { stage, deleting: false, has_finalizer, begun: &begun, nodes_unreleased: 0 };
            assert_eq!(uncordons(life), expected, "{stage:?} {begun:?}");
        }
    }
}

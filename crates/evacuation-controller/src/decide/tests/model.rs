//! Properties of whole evacuations: plans are carried out on a model of the API, evacuators and budgets do as
//! they like, and the controller may be replaced by a new one at any moment.

use proptest::prelude::*;

use super::*;

/// What others do.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Time passes.
    Pass(u16),
    /// The evacuator in charge reports progress.
    Report,
    /// The evacuator in charge has done its part.
    Complete,
    /// The Eviction API will refuse, or not.
    Budget(bool),
    /// The controller is replaced by a new one.
    Restart,
    /// The budget's watch tells that there is room.
    Freed,
    /// The API server will be too busy to evict, or not.
    Busy(bool),
    /// Somebody deletes the Evacuation.
    Delete,
    /// The instigator withdraws.
    Withdraw,
    /// The evacuator forbids cancellation, or allows it.
    Forbid(bool),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..700u16).prop_map(Step::Pass),
        2 => Just(Step::Report),
        1 => Just(Step::Complete),
        2 => any::<bool>().prop_map(Step::Budget),
        1 => Just(Step::Restart),
        1 => Just(Step::Freed),
        1 => any::<bool>().prop_map(Step::Busy),
        1 => Just(Step::Delete),
        1 => prop_oneof![4 => any::<bool>().prop_map(Step::Forbid), 1 => Just(Step::Withdraw)],
    ];
    proptest::collection::vec(step, 1..60)
}

/// An Evacuation as the API stores it, and the world around it.
struct Model {
    record: Record,
    live: Live,
    now: i64,
    resumed: i64,
    exhausted: bool,
    busy: bool,
    evictions: u32,
    /// It is not stored any more.
    removed: bool,
}

impl Model {
    fn moment(&self) -> Moment {
        Moment { now: at(self.now), resumed: at(self.resumed), gap: false }
    }

    fn plan(&self) -> Action {
        decide(&self.record, Known::Present(&pod(1)), &self.live, self.moment())
    }

    /// Carries out plans until there is nothing to do; what was done.
    fn settle(&mut self) -> Vec<Action> {
        let mut done = Vec::new();
        for _ in 0..20 {
            let action = self.plan();
            match &action {
                _ if self.removed => return done,
                Action::Wait { .. } => return done,
                Action::Activate { class, stamp } => {
                    self.record.active = Some(class.as_str().into());
                    if *stamp {
                        self.record.progress = Some(at(self.now));
                    }
                }
                Action::Switch { to, .. } => {
                    self.record.active = Some(to.as_str().into());
                    self.record.completed = false;
                    self.record.progress = Some(at(self.now));
                    self.unblock(reason::NOT_BLOCKED);
                }
                Action::Evict { .. } => {
                    self.live.admitted = false;
                    if self.busy {
                        let failures = self.live.soon.as_ref().map_or(0, |soon| soon.failures) + 1;
                        let due = after(at(self.now), backoff::soon(failures, self.record.uid));
                        self.live.soon = Some(Box::new(Soon { failures, due }));
                        self.fail(reason::SERVER_BUSY);
                    } else if self.exhausted {
                        self.live.soon = None;
                        self.fail(reason::BUDGET_EXHAUSTED);
                    } else {
                        self.evictions += 1;
                        self.live.evicted = Some(at(self.now));
                    }
                }
                Action::Unblock { reason, .. } => self.unblock(reason),
                Action::Delete { end } => {
                    assert_eq!(*end, End::Cancelled);
                    assert!(self.record.is_cancelled());
                    self.removed = true;
                }
                other => panic!("{other:?} is not for a pod that stays"),
            }
            done.push(action);
        }
        panic!("it never comes to rest: {done:?}");
    }

    fn fail(&mut self, reason: &str) {
        self.record.failed += 1;
        self.record.last_failed = Some(at(self.now));
        self.record.blocked = Some(blocked(reason));
    }

    fn unblock(&mut self, reason: &str) {
        if let Some(blocked) = &mut self.record.blocked {
            *blocked = Blocked { is_true: false, reason: reason.into(), ..blocked.clone() };
        }
    }

    fn rank(&self) -> Option<usize> {
        let active = self.record.active.as_deref()?;
        self.record.evacuators.iter().position(|e| e.evacuator_class == active)
    }
}

proptest! {
    #[test]
    fn classes_never_go_back_counters_never_decrease_and_nothing_is_evicted_twice(
        classes in 0..4usize,
        steps in steps(),
    ) {
        let names = ["a", "b", "c"];
        let evacuators = evacuators(&names[..classes.min(3)]);
        let record = Record { evacuators, ..record(1) };
        let live = Live::default();
        let mut model =
            Model { record, live, now: 0, resumed: 0, exhausted: true, busy: false, evictions: 0, removed: false };
        for step in steps {
            let (rank, failed) = (model.rank(), model.record.failed);
            let was_blocked = model.record.blocked.is_some();
            match step {
                Step::Pass(seconds) => model.now += i64::from(seconds),
                Step::Report if model.record.active.is_some() => model.record.progress = Some(at(model.now)),
                Step::Complete if model.record.active.is_some() => model.record.completed = true,
                Step::Budget(exhausted) => model.exhausted = exhausted,
                // The pod that was evicted before is seen to terminate by every new controller.
                Step::Restart if model.evictions == 0 => {
                    let before = model.plan();
                    model.live = Live::default();
                    let waits = matches!(before, Action::Wait { until } if until.is_none_or(|until| until > at(model.now)));
                    if waits && model.record.last_failed.is_none() {
                        prop_assert_eq!(&model.plan(), &before, "what is stored says it all");
                    }
                    model.resumed = model.now;
                }
                Step::Freed if model.record.blocked_by().is_some() => model.live.admitted = true,
                Step::Busy(busy) => model.busy = busy,
                Step::Delete => model.record.deleted = Some(at(model.now)),
                Step::Withdraw => model.record.finalizers = Box::new([]),
                Step::Forbid(true) => model.record.policy = CancellationPolicy::Forbid,
                Step::Forbid(false) => model.record.policy = CancellationPolicy::Allow,
                Step::Report | Step::Complete | Step::Restart | Step::Freed => {}
            }
            // Whether it was deleted plays no part while somebody wants it.
            if !model.record.is_cancelled() {
                let kept = Record { deleted: None, ..model.record.clone() };
                let pod = pod(1);
                let plan = decide(&kept, Known::Present(&pod), &model.live, model.moment());
                prop_assert_eq!(&plan, &model.plan());
            }
            let done = model.settle();
            if model.removed {
                prop_assert!(model.record.deleted.is_none(), "nobody deletes it twice");
                return Ok(());
            }
            // With its last finalizer it goes by itself.
            if model.record.is_cancelled() {
                prop_assert!(model.record.deleted.is_some() && done.is_empty(), "{done:?}");
                return Ok(());
            }
            prop_assert!(!was_blocked || model.record.blocked.is_some(), "Blocked is never removed");
            prop_assert!(model.rank() >= rank, "{rank:?} became {:?}", model.rank());
            prop_assert!(model.record.failed >= failed);
            let evictions = done.iter().filter(|action| matches!(action, Action::Evict { .. })).count();
            prop_assert!(evictions <= 1, "{done:?}");
            if model.evictions > 0 {
                // From here on the pod's own watch event counts.
                prop_assert_eq!(model.evictions, 1);
                return Ok(());
            }
            // Whatever waits is woken by the clock, and rests until then.
            let plan = model.plan();
            let Action::Wait { until } = plan else { panic!("{plan:?}") };
            if let Some(until) = until {
                prop_assert!(until > at(model.now));
            }
            // What passes by itself is not waited for any longer than a minute.
            if model.record.blocked_by() == Some(reason::SERVER_BUSY) && model.now > model.resumed + 30 {
                prop_assert!(until.is_some_and(|until| until <= at(model.now + 60)), "{until:?}");
            }
        }
    }

    /// A new controller that has never seen the Evacuation makes the same plan as the old one at every
    /// moment at which nothing was overdue when it began.
    #[test]
    fn a_new_controller_makes_the_same_plan_from_what_is_stored(
        failed in 0..20i32,
        last in 0..2000i64,
        progress in proptest::option::of(0..2000i64),
        completed: bool,
        active in 0..3usize,
        begun in 0..2000i64,
        later in 0..5000i64,
    ) {
        let record = Record {
            evacuators: evacuators(&["a", "b"]),
            active: ["a", "b"].get(active).map(|class| (*class).into()),
            completed,
            progress: progress.map(at),
            failed,
            last_failed: (failed > 0).then(|| at(last)),
            blocked: if failed > 0 { Some(blocked(reason::BUDGET_EXHAUSTED)) } else { None },
            ..record(1)
        };
        let now = last.max(begun).max(progress.unwrap_or_default()) + later;
        let plan = |resumed: i64| {
            let moment = Moment { now: at(now), resumed: at(resumed), gap: false };
            decide(&record, Known::Present(&pod(1)), &Live::default(), moment)
        };
        let (old, new) = (plan(-100_000), plan(begun));
        let was_due = |seconds: i64| seconds <= begun + 30;
        let deadline = progress.unwrap_or_default() + 600;
        let retry = last + 900;
        if !was_due(deadline) && (failed == 0 || !was_due(retry - 900)) {
            prop_assert_eq!(old, new);
        } else {
            // What was overdue waits a little, and is then done all the same.
            let waits = |action: &Action| matches!(action, Action::Wait { .. });
            let soon = matches!(new, Action::Wait { until: Some(until) } if until <= at(begun + 930));
            prop_assert!(new == old || (waits(&new) && waits(&old)) || soon);
        }
    }
}

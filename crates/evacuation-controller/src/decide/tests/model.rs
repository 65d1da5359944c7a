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
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..700u16).prop_map(Step::Pass),
        2 => Just(Step::Report),
        1 => Just(Step::Complete),
        2 => any::<bool>().prop_map(Step::Budget),
        1 => Just(Step::Restart),
        1 => Just(Step::Freed),
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
    evictions: u32,
}

impl Model {
    fn moment(&self) -> Moment {
        Moment { now: at(self.now), resumed: at(self.resumed), gap: false }
    }

    fn plan(&self) -> Plan {
        decide(&self.record, Known::Present(&pod(1)), &self.live, self.moment())
    }

    /// Carries out plans until there is nothing to do; what was done.
    fn settle(&mut self) -> Vec<Action> {
        let mut done = Vec::new();
        for _ in 0..20 {
            let Plan { action, .. } = self.plan();
            match &action {
                Action::Wait => return done,
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
                    self.record.blocked = None;
                }
                Action::Evict { .. } => {
                    self.live.admitted = false;
                    if self.exhausted {
                        self.record.failed += 1;
                        self.record.last_failed = Some(at(self.now));
                        self.record.blocked = Some(blocked(reason::BUDGET_EXHAUSTED));
                    } else {
                        self.evictions += 1;
                        self.live.evicted = Some(at(self.now));
                    }
                }
                Action::Unblock => self.record.blocked = None,
                other => panic!("{other:?} is not for a pod that stays"),
            }
            done.push(action);
        }
        panic!("it never comes to rest: {done:?}");
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
        let mut model = Model { record, live: Live::default(), now: 0, resumed: 0, exhausted: true, evictions: 0 };
        for step in steps {
            let (rank, failed) = (model.rank(), model.record.failed);
            match step {
                Step::Pass(seconds) => model.now += i64::from(seconds),
                Step::Report if model.record.active.is_some() => model.record.progress = Some(at(model.now)),
                Step::Complete if model.record.active.is_some() => model.record.completed = true,
                Step::Budget(exhausted) => model.exhausted = exhausted,
                // The pod that was evicted before is seen to terminate by every new controller.
                Step::Restart if model.evictions == 0 => {
                    let before = model.plan();
                    model.live = Live::default();
                    let waits = before.action == Action::Wait && before.wake.is_none_or(|wake| wake > at(model.now));
                    if waits && model.record.last_failed.is_none() {
                        prop_assert_eq!(&model.plan(), &before, "what is stored says it all");
                    }
                    model.resumed = model.now;
                }
                Step::Freed if model.record.blocked.is_some() => model.live.admitted = true,
                Step::Report | Step::Complete | Step::Restart | Step::Freed => {}
            }
            let done = model.settle();
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
            prop_assert!(plan.action == Action::Wait);
            if let Some(wake) = plan.wake {
                prop_assert!(wake > at(model.now));
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
            prop_assert!(new.action == old.action || new.wake.is_some_and(|wake| wake <= at(begun + 930)));
        }
    }
}

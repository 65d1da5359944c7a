//! Properties of whole evacuations. Actions are executed on a model of the API server, evacuators and budgets behave
//! randomly, and the controller restarts at random times.

use proptest::prelude::*;

use super::*;

/// An event outside of the controller.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Time passes.
    Pass(u16),
    /// The active evacuator reports progress.
    Report,
    /// The active evacuator completes.
    Complete,
    /// The budget is exhausted from now on, or not.
    Budget(bool),
    /// The controller restarts.
    Restart,
    /// The budget admits the Evacuation.
    Admit,
    /// The API server is too busy to evict from now on, or not.
    Busy(bool),
    /// The Evacuation is deleted.
    Delete,
    /// The instigator withdraws.
    Withdraw,
    /// The evacuator forbids cancellation, or allows it.
    Forbid(bool),
    /// The service behind the active evacuator has no leader, or has one again.
    Unserved(bool),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..700u16).prop_map(Step::Pass),
        2 => Just(Step::Report),
        1 => Just(Step::Complete),
        2 => any::<bool>().prop_map(Step::Budget),
        1 => Just(Step::Restart),
        1 => Just(Step::Admit),
        1 => any::<bool>().prop_map(Step::Busy),
        1 => Just(Step::Delete),
        1 => prop_oneof![4 => any::<bool>().prop_map(Step::Forbid), 1 => Just(Step::Withdraw)],
        1 => any::<bool>().prop_map(Step::Unserved),
    ];
    proptest::collection::vec(step, 1..60)
}

/// The stored Evacuation, and the state of the API server and the controller.
struct Model {
    record: Record,
    local: LocalState,
    now: i64,
    resumed: i64,
    exhausted: bool,
    busy: bool,
    unserved: Option<Timestamp>,
    evictions: u32,
    /// Whether the Evacuation has been removed.
    removed: bool,
}

impl Model {
    fn moment(&self) -> Moment {
        Moment { now: at(self.now), resumed: at(self.resumed), gap: false, unserved: self.unserved }
    }

    fn plan(&self) -> Action {
        decide(&self.record, PodState::Present(&pod(1)), &self.local, self.moment())
    }

    /// Executes actions until none is left. Returns them.
    fn run_until_idle(&mut self) -> Vec<Action> {
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
                Action::Switch { to, eviction_cause, .. } => {
                    if eviction_cause.is_unanswered() {
                        self.record.policy = CancellationPolicy::Allow;
                    }
                    self.record.active = Some(to.as_str().into());
                    self.record.completed = false;
                    self.record.progress = Some(at(self.now));
                    self.unblock(reason::NOT_BLOCKED);
                }
                Action::AllowCancellation => {
                    self.record.policy = CancellationPolicy::Allow;
                    let resets = self.local.policy_resets.get_or_insert_default();
                    resets.count += 1;
                    resets.due = after(at(self.now), backoff::transient_delay(resets.count, self.record.uid));
                }
                Action::Evict { .. } => {
                    self.local.admitted = false;
                    if self.busy {
                        let failures = self.local.retry.as_ref().map_or(0, |retry| retry.failures) + 1;
                        let due = after(at(self.now), backoff::transient_delay(failures, self.record.uid));
                        self.local.retry = Some(Box::new(Retry { failures, due }));
                        self.fail(reason::SERVER_BUSY);
                    } else if self.exhausted {
                        self.local.retry = None;
                        self.fail(reason::BUDGET_EXHAUSTED);
                    } else {
                        self.evictions += 1;
                        self.local.evicted = Some(at(self.now));
                    }
                }
                Action::Unblock { reason, .. } => self.unblock(reason),
                Action::Delete { end } => {
                    assert_eq!(*end, End::Cancelled);
                    assert!(self.record.is_cancelled());
                    self.removed = true;
                }
                other => panic!("{other:?} is wrong for a pod that exists"),
            }
            done.push(action);
        }
        panic!("it never becomes idle: {done:?}");
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
    fn classes_and_counters_only_advance_and_pod_is_evicted_once(
        classes in 0..4usize,
        steps in steps(),
    ) {
        let names = ["a", "b", "c"];
        let evacuators = evacuators(&names[..classes.min(3)]);
        let record = Record { evacuators, ..record(1) };
        let local = LocalState::default();
        let mut model =
            Model { record, local, now: 0, resumed: 0, exhausted: true, busy: false, unserved: None, evictions: 0, removed: false };
        for step in steps {
            let (rank, failed) = (model.rank(), model.record.failed);
            let was_blocked = model.record.blocked.is_some();
            match step {
                Step::Pass(seconds) => model.now += i64::from(seconds),
                Step::Report if model.record.active.is_some() => model.record.progress = Some(at(model.now)),
                Step::Complete if model.record.active.is_some() => model.record.completed = true,
                Step::Budget(exhausted) => model.exhausted = exhausted,
                // After an eviction, a new controller finds the pod terminating.
                Step::Restart if model.evictions == 0 => {
                    let before = model.plan();
                    model.local = LocalState::default();
                    let waits = matches!(before, Action::Wait { until } if until.is_none_or(|until| until > at(model.now)));
                    if waits && model.record.last_failed.is_none() {
                        prop_assert_eq!(&model.plan(), &before, "the decision depends on stored state only");
                    }
                    model.resumed = model.now;
                }
                Step::Admit if model.record.blocked_by().is_some() => model.local.admitted = true,
                Step::Busy(busy) => model.busy = busy,
                Step::Delete => model.record.deleted = Some(at(model.now)),
                Step::Withdraw => model.record.finalizers = Box::new([]),
                Step::Unserved(absent) => model.unserved = absent.then(|| at(model.now - 60)),
                Step::Forbid(true) => model.record.policy = CancellationPolicy::Forbid,
                Step::Forbid(false) => model.record.policy = CancellationPolicy::Allow,
                Step::Report | Step::Complete | Step::Restart | Step::Admit => {}
            }
            // Deletion has no effect while an instigator remains.
            if !model.record.is_cancelled() {
                let kept = Record { deleted: None, ..model.record.clone() };
                let pod = pod(1);
                let plan = decide(&kept, PodState::Present(&pod), &model.local, model.moment());
                prop_assert_eq!(&plan, &model.plan());
            }
            let was_cancelled = model.record.is_cancelled();
            let done = model.run_until_idle();
            if model.removed {
                prop_assert!(model.record.deleted.is_none(), "it is deleted once");
                return Ok(());
            }
            // A deleted Evacuation without finalizers is removed by the API server.
            if model.record.is_cancelled() {
                prop_assert!(model.record.deleted.is_some() && (!was_cancelled || done.is_empty()), "{done:?}");
                prop_assert!(model.evictions == 0, "{done:?}");
                return Ok(());
            }
            prop_assert!(!was_blocked || model.record.blocked.is_some(), "Blocked is never removed");
            prop_assert!(model.rank() >= rank, "{rank:?} became {:?}", model.rank());
            prop_assert!(model.record.failed >= failed);
            let evictions = done.iter().filter(|action| matches!(action, Action::Evict { .. })).count();
            prop_assert!(evictions <= 1, "{done:?}");
            if model.evictions > 0 {
                // From here on, the watch event of the pod matters.
                prop_assert_eq!(model.evictions, 1);
                return Ok(());
            }
            // An evacuator that has missed its deadline forbids cancellation for a minute at most.
            let timed_out = matches!(
                turns::turn(&model.record, model.moment()),
                TurnDecision::Evict(EvictionCause::TimedOut | EvictionCause::Unserved(_))
            );
            if timed_out && model.record.policy == CancellationPolicy::Forbid {
                let due = model.local.policy_resets.as_ref().map(|resets| resets.due);
                prop_assert!(due.is_some_and(|due| due > at(model.now) && due <= at(model.now + 60)), "{due:?}");
            }
            // A wait ends in the future.
            let plan = model.plan();
            let Action::Wait { until } = plan else { panic!("{plan:?}") };
            if let Some(until) = until {
                prop_assert!(until > at(model.now));
            }
            // A transient failure is retried within a minute.
            if model.record.blocked_by() == Some(reason::SERVER_BUSY) && model.now > model.resumed + 30 {
                prop_assert!(until.is_some_and(|until| until <= at(model.now + 60)), "{until:?}");
            }
        }
    }

    /// A new controller makes the same decision as the old one, unless something was overdue when it started.
    #[test]
    fn new_controller_makes_the_same_decision(
        failed in 0..20i32,
        last in 0..2000i64,
        progress in proptest::option::of(0..2000i64),
        completed: bool,
        active in 0..3usize,
        started in 0..2000i64,
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
        let now = last.max(started).max(progress.unwrap_or_default()) + later;
        let plan = |resumed: i64| {
            let moment = Moment { now: at(now), resumed: at(resumed), gap: false, unserved: None };
            decide(&record, PodState::Present(&pod(1)), &LocalState::default(), moment)
        };
        let (old, new) = (plan(-100_000), plan(started));
        let was_due = |seconds: i64| seconds <= started + 30;
        let deadline = progress.unwrap_or_default() + 600;
        let retry = last + 900;
        if !was_due(deadline) && (failed == 0 || !was_due(retry - 900)) {
            prop_assert_eq!(old, new);
        } else {
            // Overdue actions are executed after the grace period.
            let waits = |action: &Action| matches!(action, Action::Wait { .. });
            let waits_briefly = matches!(new, Action::Wait { until: Some(until) } if until <= at(started + 930));
            prop_assert!(new == old || (waits(&new) && waits(&old)) || waits_briefly);
        }
    }
}

//! Decisions for the pods of one Deployment, as tables.

use super::*;
use crate::objects::{Problem, Strategy};
use crate::testing::*;

const ROOM: SignedDuration = SignedDuration::from_secs(300);

/// The actions by number of the pod, and when to decide again.
fn plan(view: &View, now: i64) -> (Vec<(Uid, Action)>, Option<i64>) {
    let Plan { actions, wake } = decide(view, ROOM, at(now));
    (actions, wake.map(|wake| wake.as_second() - at(0).as_second()))
}

/// The only action.
fn action(view: &View, now: i64) -> Option<Action> {
    let (actions, _) = plan(view, now);
    assert!(actions.len() <= 1, "{actions:?}");
    actions.into_iter().next().map(|(_, action)| action)
}

fn outcome(action: Option<Action>) -> (Outcome, String) {
    let Some(Action::Complete { outcome, message }) = action else { panic!("{action:?}") };
    (outcome, message)
}

fn single(pods: Vec<(Pod, Option<Evac>)>) -> View {
    view(deployment(1, 1), set(1), pods)
}

#[test]
fn single_replica_is_moved_and_completed_when_its_replacement_is_available() {
    let unheld = Evac { finalizers: Box::new([]), ..evac(1) };
    assert_eq!(action(&single(vec![(pod(1), Some(unheld.clone()))]), 0), Some(Action::Hold));
    assert_eq!(action(&single(vec![(pod(1), Some(evac(1)))]), 0), Some(Action::Move { available: 1 }));
    // No finalizer can be added.
    let deleted = Evac { deleted: true, ..unheld.clone() };
    assert_eq!(action(&single(vec![(pod(1), Some(deleted))]), 0), Some(Action::Move { available: 1 }));
    let mut rejected = single(vec![(pod(1), Some(unheld))]);
    rejected.pods[0].local.finalizer_rejected = true;
    assert_eq!(action(&rejected, 0), Some(Action::Move { available: 1 }));

    let moved = (moved(1, 1), Some(evac(1)));
    assert_eq!(plan(&single(vec![moved.clone()]), 1), (vec![], Some(2)), "most replacements need no report");
    let waits = action(&single(vec![moved.clone()]), 2);
    assert!(
        matches!(waits, Some(Action::Report(Report { progress: true, no_room: false, .. }))),
        "{waits:?}"
    );
    let starts = single(vec![moved.clone(), (starting(2, None), None)]);
    let Some(Action::Report(report)) = action(&starts, 3) else { panic!() };
    assert_eq!(report.message, "Waiting until the replacement is available: pod web-2 is starting.");
    let ready = single(vec![moved, (Pod { created: at(1), ready: Some(at(5)), ..pod(2) }, None)]);
    let (outcome, message) = outcome(action(&ready, 5));
    assert_eq!(outcome, Outcome::Replaced);
    assert!(message.contains("1 of 1 pods available"), "{message}");
}

#[test]
fn pod_that_is_ready_counts_only_after_min_ready_seconds() {
    let mut view = single(vec![
        (moved(1, 1), Some(evac(1))),
        (Pod { created: at(1), ready: Some(at(5)), ..pod(2) }, None),
    ]);
    view.deployment.min_ready = SignedDuration::from_secs(10);
    let (actions, wake) = plan(&view, 14);
    assert!(matches!(actions[0].1, Action::Report(_)) && wake == Some(15), "{actions:?} {wake:?}");
    assert_eq!(outcome(action(&view, 15)).0, Outcome::Replaced);
}

/// Its ReplicaSet may be deleting this very pod.
#[test]
fn pod_is_not_moved_while_its_replica_set_has_to_act() {
    let cases = [
        ("it has not observed its specification", ReplicaSet { current: false, ..set(1) }, 1),
        ("it reports too many pods", ReplicaSet { reported: 2, ..set(1) }, 1),
        ("it has too many pods", set(1), 2),
    ];
    for (name, set, pods) in cases {
        let pods = (1..=pods)
            .map(|n| (pod(n), (n == 1).then(|| Evac { progress: Some(at(0)), ..evac(1) })))
            .collect();
        assert_eq!(action(&view(deployment(1, 1), set, pods), 0), None, "{name}");
    }
}

#[test]
fn at_most_max_surge_pods_are_moved_oldest_first() {
    let pods = || (1..=4).map(|n| (pod(n), Some(evac(n)))).collect::<Vec<_>>();
    let (actions, _) = plan(&view(deployment(4, 2), set(4), pods()), 0);
    let moves = Action::Move { available: 4 };
    let expected =
        vec![(uid(1), moves.clone()), (uid(2), moves), (uid(3), Action::Prefer), (uid(4), Action::Prefer)];
    assert_eq!(actions, expected, "evacuation 1 is the oldest");

    // The first one is moved. Terminating pods do not count.
    let mut two = pods();
    two[0].0 = moved(1, 4);
    two[1].0 = Pod { leaving: true, ..moved(2, 4) };
    two[1].1 = Some(over(2));
    let (actions, _) = plan(&view(deployment(4, 2), set(4), two), 1);
    let moves = Action::Move { available: 3 };
    assert_eq!(actions, [(uid(2), Action::GiveBack), (uid(3), moves), (uid(4), Action::Prefer)]);
}

/// For example because kube-controller-manager does not run.
#[test]
fn pod_whose_replica_set_does_not_act_reports_that() {
    let view = |evac| {
        let stale = ReplicaSet { current: false, ..set(1) };
        view(deployment(1, 1), stale, vec![(pod(1), Some(evac))])
    };
    let evac = Evac { progress: Some(at(0)), ..evac(1) };
    assert_eq!(plan(&view(evac.clone()), 9), (vec![], Some(10)), "most need a moment only");
    let Some(Action::Report(report)) = action(&view(evac.clone()), 10) else { panic!() };
    assert!(report.message.contains("ReplicaSet of the pod is up to date") && !report.progress);
    let reported = Evac { message: report.message.into(), ..evac };
    assert_eq!(action(&view(reported), 20), None);
}

#[test]
fn waiting_pods_report_when_the_queue_moves() {
    let queue = |evac: Evac, changed: i64| {
        let waiting = Pod { former: returned(2).former, ..pod(2) };
        let new = Pod { created: at(changed), ..starting(3, None) };
        let surge = Evac { message: "m".into(), ..self::evac(1) };
        view(deployment(2, 1), set(2), vec![(moved(1, 2), Some(surge)), (waiting, Some(evac)), (new, None)])
    };
    let report = |view: &View, now| {
        let (actions, _) = plan(view, now);
        actions.into_iter().find(|(pod, _)| *pod == uid(2)).map(|(_, action)| action)
    };
    let Some(Action::Report(first)) = report(&queue(evac(2), 1), 1) else { panic!() };
    let expected = "In the queue of Deployment web, place 1: at most 1 (maxSurge) can be replaced at the same time, now web-1.";
    assert_eq!((first.message.as_str(), first.progress), (expected, true));
    let reported = Evac { message: expected.into(), progress: Some(at(1)), ..evac(2) };
    assert_eq!(report(&queue(reported.clone(), 1), 600), None, "nothing has moved on");
    assert_eq!(report(&queue(reported.clone(), 100), 180), None, "a tenth of the deadline has not passed");
    assert!(report(&queue(reported, 100), 181).is_some());
}

#[test]
fn cancelled_pod_is_given_back_and_restored() {
    let back = |pods| action(&single(pods), 10);
    let new = (starting(2, None), None);
    assert_eq!(back(vec![(moved(1, 1), Some(cancelled(1))), new.clone()]), Some(Action::GiveBack));
    assert_eq!(
        back(vec![(moved(1, 1), None), new.clone()]),
        Some(Action::GiveBack),
        "its Evacuation is gone"
    );
    assert_eq!(back(vec![(returned(1), Some(cancelled(1))), new]), None, "the replacement has to go first");
    assert_eq!(back(vec![(returned(1), Some(cancelled(1)))]), Some(Action::Restore));
    assert_eq!(back(vec![(pod(1), Some(cancelled(1)))]), Some(Action::Release));
    let released = Evac { finalizers: Box::new([]), ..cancelled(1) };
    assert_eq!(back(vec![(pod(1), Some(released))]), None);
    // Another evacuation follows.
    assert_eq!(back(vec![(returned(1), Some(evac(1)))]), Some(Action::Move { available: 1 }));
}

#[test]
fn pod_that_no_replica_set_can_take_back_is_evacuated() {
    let case = |replicas: i32, set: ReplicaSet, evac: Option<Evac>| {
        action(&view(deployment(replicas, 1), set, vec![(moved(1, 1), evac)]), 10)
    };
    let scaled_down = || ReplicaSet { wanted: 0, ..set(0) };
    assert_eq!(case(1, scaled_down(), Some(cancelled(1))), Some(Action::Release));
    assert_eq!(case(1, scaled_down(), None), Some(Action::Evacuate), "it would be deleted past its budget");
    assert_eq!(case(1, ReplicaSet { deleted: true, ..set(1) }, None), Some(Action::Evacuate));
    assert_eq!(case(0, scaled_down(), None), Some(Action::GiveBack), "nobody wants it");
    let mut deleted = single(vec![(moved(1, 1), None)]);
    deleted.deployment.deleted = true;
    deleted.sets.clear();
    assert_eq!(action(&deleted, 10), None, "the garbage collector deletes it");
}

#[test]
fn scaled_down_deployment_does_not_wait_for_a_replacement() {
    let both = |replicas| {
        vec![(moved(1, 2), Some(evac(1))), (pod(2), None)]
            .into_iter()
            .take(1 + usize::from(replicas > 0))
            .collect()
    };
    let one = view(deployment(1, 1), set(1), both(1));
    assert_eq!(outcome(action(&one, 10)).0, Outcome::Replaced);
    let zero = view(deployment(0, 1), set(0), both(0));
    assert_eq!(
        action(&zero, 10),
        Some(Action::GiveBack),
        "the ReplicaSet deletes it, without regard to its budget"
    );
}

#[test]
fn replica_set_observes_the_deletion_of_a_moved_pod() {
    let leaving = |evac| action(&single(vec![(Pod { leaving: true, ..moved(1, 1) }, evac)]), 10);
    assert_eq!(leaving(Some(evac(1))), Some(Action::GiveBack), "somebody else deletes it");
    let evicted = leaving(Some(over(1)));
    assert_eq!(evicted, Some(Action::GiveBack), "its ReplicaSet may have deleted it first");
    assert_eq!(leaving(None), Some(Action::GiveBack));
}

/// Its ReplicaSet does not count it, and nobody deletes it soon.
#[test]
fn finished_pod_is_not_replaced_and_keeps_no_annotation() {
    let finished = |pod: Pod| Pod { leaving: true, finished: true, ready: None, ..pod };
    let case = |pod, evac| action(&single(vec![(finished(pod), evac)]), 10);
    for pod in [pod(1), moved(1, 1), returned(1)] {
        let (outcome, message) = outcome(case(pod, Some(evac(1))));
        assert_eq!(outcome, Outcome::NotReady);
        assert!(message.contains("web-1 has finished"), "{message}");
    }
    for evac in [None, Some(cancelled(1))] {
        assert_eq!(case(moved(1, 1), evac.clone()), Some(Action::GiveBack));
        assert_eq!(case(returned(1), evac), Some(Action::Restore));
    }
    assert_eq!(case(pod(1), Some(cancelled(1))), Some(Action::Release));
    let orphan = Pod { owner: None, ..finished(returned(1)) };
    let orphan = LonePod { pod: Some(Arc::new(orphan)), set: None, evac: None };
    assert_eq!(decide_lone(&orphan, at(0)).0, Some(Action::Restore));
}

#[test]
fn unavailable_replica_is_not_waited_for() {
    // One of three is broken, since before the move.
    let broken = Pod { ready: None, ..pod(3) };
    let before = vec![(pod(1), Some(evac(1))), (pod(2), None), (broken.clone(), None)];
    assert_eq!(action(&view(deployment(3, 1), set(3), before), 0), Some(Action::Move { available: 2 }));
    let new = Pod { created: at(1), ready: Some(at(4)), ..pod(4) };
    let after = vec![(moved(1, 2), Some(evac(1))), (pod(2), None), (broken.clone(), None), (new, None)];
    assert_eq!(outcome(action(&view(deployment(3, 1), set(3), after), 4)).0, Outcome::Replaced);
    let itself = view(deployment(3, 1), set(3), vec![(Pod { uid: uid(1), ..broken }, Some(evac(1)))]);
    assert_eq!(outcome(action(&itself, 0)).0, Outcome::NotReady);
}

/// The replacement is on a node that is drained, too, and was not ready when its own evacuation began.
#[test]
fn replacement_that_leaves_too_does_not_count() {
    let ready = || Pod { created: at(1), ready: Some(at(5)), ..pod(2) };
    let with = |evac_of_replacement, more: Vec<(Pod, Option<Evac>)>| {
        let pods = vec![(moved(1, 1), Some(evac(1))), (ready(), evac_of_replacement)];
        plan(&single(pods.into_iter().chain(more).collect()), 6).0
    };
    assert!(matches!(with(None, vec![])[..], [(_, Action::Complete { .. })]));
    let waits = with(Some(over(2)), vec![]);
    assert!(
        matches!(&waits[..], [(_, Action::Report(report))] if report.message.contains("has a replacement")),
        "{waits:?}"
    );
    let next = (Pod { created: at(5), ready: Some(at(6)), ..pod(3) }, None);
    assert!(
        matches!(&with(Some(over(2)), vec![next])[..], [(pod, Action::Complete { .. })] if *pod == uid(1))
    );
    // It stays if its evacuation is cancelled.
    let completes =
        |(pod, action): &(Uid, Action)| *pod == uid(1) && matches!(action, Action::Complete { .. });
    assert!(with(Some(cancelled(2)), vec![]).iter().any(completes));
    // Nor does it count for a pod that is moved later.
    let pods = vec![(pod(1), Some(evac(1))), (pod(2), Some(over(2)))];
    assert_eq!(action(&view(deployment(2, 1), set(2), pods), 6), Some(Action::Move { available: 1 }));
}

#[test]
fn several_moved_pods_wait_for_as_many_replacements() {
    let moved = |n| (moved(n, 3), Some(evac(n)));
    let completed = |more: Vec<(Pod, Option<Evac>)>| {
        let pods = [moved(1), moved(2), (pod(3), None)].into_iter().chain(more).collect();
        let (actions, _) = plan(&view(deployment(3, 2), set(3), pods), 1);
        actions
            .into_iter()
            .filter(|(_, a)| matches!(a, Action::Complete { .. }))
            .map(|(pod, _)| pod)
            .collect::<Vec<_>>()
    };
    let ready = |n| (Pod { created: at(1), ready: Some(at(1)), ..pod(n) }, None);
    assert_eq!(completed(vec![]), []);
    assert_eq!(completed(vec![ready(4)]), [uid(1)], "the oldest first");
    assert_eq!(completed(vec![ready(4), ready(5)]), [uid(1), uid(2)]);
}

#[test]
fn obstacles_end_the_turn_and_lack_of_room_is_waited_for() {
    let with = |problem, now| {
        let view = single(vec![(moved(1, 1), Some(evac(1))), (starting(2, problem), None)]);
        plan(&view, now)
    };
    let image = Some(Problem::Waiting("ImagePullBackOff".into()));
    let (actions, _) = with(image, 1);
    let (result, message) = outcome(Some(actions[0].1.clone()));
    assert_eq!(
        (result, message.as_str()),
        (
            Outcome::Obstructed,
            "Deployment web cannot replace the pod: pod web-2 cannot start: ImagePullBackOff. The pod is evicted without a replacement."
        )
    );

    let room = || Some(unschedulable("0/3 nodes are available: 3 Insufficient cpu. preemption: none."));
    let (actions, wake) = with(room(), 1);
    let Action::Report(report) = &actions[0].1 else { panic!("{actions:?}") };
    assert!(
        report.no_room
            && report.message.contains("web-2 is pending: 0/3 nodes are available: 3 Insufficient cpu.")
    );
    assert_eq!(wake, Some(301));
    assert_eq!(outcome(Some(with(room(), 301).0[0].1.clone())).0, Outcome::NoRoom);

    // The replacement of a pod that has left waits since second 1, too: those after it do not wait as long again.
    let moved_later = Pod { former: former_since(1, 301), ..moved(3, 1) };
    let later = Problem::Unschedulable("0/3 nodes are available: 3 Insufficient cpu.".into(), at(301));
    let new = Pod { created: at(301), ..starting(4, Some(later)) };
    let pods = vec![(starting(2, room()), None), (moved_later, Some(evac(3))), (new, None)];
    assert_eq!(outcome(action(&view(deployment(2, 1), set(2), pods), 302)).0, Outcome::NoRoom);

    let crashes = || Some(Problem::Waiting("CrashLoopBackOff".into()));
    assert!(matches!(with(crashes(), 599).0[0].1, Action::Report(_)));
    let (result, message) = outcome(Some(with(crashes(), 600).0[0].1.clone()));
    assert!(
        result == Outcome::TimedOut && message.contains("pod web-2 waits (CrashLoopBackOff)"),
        "{message}"
    );
}

/// Its controller may be about to delete pods.
#[test]
fn changed_deployment_is_observed_before_the_pod_is_evicted() {
    let mut view = single(vec![
        (moved(1, 1), Some(evac(1))),
        (Pod { created: at(1), ready: Some(at(5)), ..pod(2) }, None),
    ]);
    view.deployment.current = false;
    let Some(Action::Report(report)) = action(&view, 5) else { panic!() };
    assert!(report.message.contains("has observed the change of Deployment web"), "{}", report.message);
    assert_eq!(outcome(action(&view, 600)).0, Outcome::Replaced, "not for ever");
    view.deployment.current = true;
    assert_eq!(outcome(action(&view, 5)).0, Outcome::Replaced);
}

/// A webhook that does not answer may answer later.
#[test]
fn failure_that_may_pass_is_reported_and_waited_for() {
    let failure = "Internal error occurred: failed calling webhook: deadline exceeded";
    let failing = ReplicaSet { failure: Some(failure.into()), reported: 0, ..set(1) };
    let view = view(deployment(1, 1), failing, vec![(moved(1, 1), Some(evac(1)))]);
    let Some(Action::Report(report)) = action(&view, 3) else { panic!() };
    assert!(report.message.ends_with(failure), "{}", report.message);
    let (result, message) = outcome(action(&view, 600));
    assert!(result == Outcome::TimedOut && message.contains(failure), "{message}");
}

#[test]
fn same_report_is_not_repeated() {
    let view = |evac| single(vec![(moved(1, 1), Some(evac)), (starting(2, None), None)]);
    let Some(Action::Report(report)) = action(&view(evac(1)), 3) else { panic!() };
    let reported = Evac { message: report.message.into(), progress: Some(at(3)), ..evac(1) };
    assert_eq!(plan(&view(reported), 500), (vec![], Some(600)));
}

#[test]
fn deployments_without_support_complete_at_once() {
    let base = || single(vec![(pod(1), Some(evac(1)))]);
    let mut cases: Vec<(View, &str)> = Vec::new();
    let mut add = |why, change: fn(&mut View)| {
        let mut view = base();
        change(&mut view);
        cases.push((view, why));
    };
    add("strategy Recreate", |view| {
        (view.deployment.strategy, view.deployment.max_surge) = (Strategy::Recreate, 0);
    });
    add("maxSurge 0", |view| view.deployment.max_surge = 0);
    add("is being deleted", |view| view.deployment.deleted = true);
    add("Deployment web has the annotation", |view| view.deployment.opted_out = true);
    add("Namespace shop has the annotation", |view| view.namespace_opted_out = true);
    add("scaled to 0", |view| view.deployment.replicas = 0);
    add("policy says no", |view| view.pods[0].local.rejected = Some("policy says no".into()));
    add("one node only", |view| view.pods[0].local.volumes = Some(Err("one node only".into())));
    for (view, why) in cases {
        let (_, message) = outcome(action(&view, 0));
        assert!(message.contains(why), "{message}");
    }
    let mut claims = base();
    claims.pods[0].pod = Arc::new(Pod { claims: Box::new(["data".into()]), ..pod(1) });
    assert_eq!(action(&claims, 0), Some(Action::CheckVolumes));
    claims.pods[0].local.volumes = Some(Ok(()));
    assert_eq!(action(&claims, 0), Some(Action::Move { available: 1 }));
}

#[test]
fn pods_without_a_deployment_complete() {
    let lone = |set: Option<ReplicaSet>, evac: Evac| LonePod {
        pod: Some(Arc::new(pod(1))),
        set,
        evac: Some(evac.into()),
    };
    let owned = ReplicaSet { deployment: None, other_owner: Some("Rollout web".into()), ..set(1) };
    let (done, _) = decide_lone(&lone(Some(owned), evac(1)), at(0));
    assert!(outcome(done).1.contains("belongs to Rollout web"));
    let fresh = Evac { created: at(0), ..evac(1) };
    assert_eq!(decide_lone(&lone(None, fresh.clone()), at(9)), (None, Some(at(10))), "the watch may lag");
    assert_eq!(outcome(decide_lone(&lone(None, fresh), at(10)).0).0, Outcome::Unsupported);
    assert_eq!(decide_lone(&lone(None, cancelled(1)), at(0)).0, Some(Action::Release));
    let orphan = LonePod { pod: Some(Arc::new(Pod { owner: None, ..returned(1) })), set: None, evac: None };
    assert_eq!(decide_lone(&orphan, at(0)).0, Some(Action::Restore));
}

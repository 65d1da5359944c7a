//! What has to be reconciled when objects arrive in any order.

use super::*;
use crate::decide::decide_lone;
use crate::testing::*;

/// Watches are independent: at the start, a pod and its Evacuation may arrive long before their owners.
#[test]
fn pod_is_not_lone_once_its_deployment_has_arrived() {
    for pod in [pod(1), moved(1, 1)] {
        let mut state = State::default();
        state.apply_evac(uid(1), Some(evac(1)));
        let (queued, _) = state.apply_pod(pod, at(0));
        assert_eq!(queued, Some(Work::Pod(uid(1))), "its owners are unknown");
        state.apply_set(uid(SET), set(1));
        let work = state.apply_deployment(deployment(1, 1));
        assert_eq!(work, [Work::Deployment(uid(DEPLOYMENT))]);
        assert!(state.lone_pod(uid(1)).is_none(), "the queue still contains {queued:?}");
    }
}

#[test]
fn rejections_apply_to_one_evacuation_only() {
    let next = Evac { uid: "next".into(), ..evac(1) };
    for (evac, is_known) in
        [(Some(Evac { version: "2".into(), ..evac(1) }), true), (None, false), (Some(next), false)]
    {
        let mut state = State::default();
        state.apply_deployment(deployment(1, 1));
        state.apply_set(uid(SET), set(1));
        state.apply_pod(pod(1), at(0));
        state.apply_evac(uid(1), Some(self::evac(1)));
        state.update_local(uid(1), |local| local.rejected = Some("policy".into()));
        state.apply_evac(uid(1), evac);
        let view = state.view(uid(DEPLOYMENT)).unwrap();
        assert_eq!(view.pods[0].local.rejected.is_some(), is_known);
    }
}

#[test]
fn pod_is_lone_again_when_its_deployment_is_gone() {
    let mut state = State::default();
    state.apply_deployment(deployment(1, 1));
    state.apply_set(uid(SET), set(1));
    state.apply_pod(pod(1), at(0));
    assert_eq!(state.apply_evac(uid(1), Some(evac(1))), Some(Work::Deployment(uid(DEPLOYMENT))));
    assert_eq!(state.delete_deployment(uid(DEPLOYMENT)), [Work::Pod(uid(1))]);
    state.apply_set(uid(SET), ReplicaSet { deployment: None, ..set(1) });
    let (action, _) = decide_lone(&state.lone_pod(uid(1)).unwrap(), at(0));
    assert!(action.is_some(), "it leaves without a replacement");
}

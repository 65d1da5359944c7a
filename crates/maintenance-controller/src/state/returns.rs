//! Pods that come back to a node that is being drained. Each time, the next one of the same owner may stay longer before
//! it is asked to leave, so that no pod is killed in a loop.
//!
//! Where nothing is remembered, as after a restart, how often a pod has come back is estimated from when the drain began
//! and when the pod was created: as if it had come back at once each time.

use std::collections::HashMap;
use std::sync::Arc;

use haulout_drain_planner::facts::{Return, Returned};
use haulout_drain_planner::pause;
use haulout_service_runtime::pods::{Pod, Uid};
use jiff::Timestamp;

use crate::seen::tolerates_cordon;

/// The owner of a pod, by its UID; for a pod without one, the pod's namespace and name.
type Owner = Box<str>;

pub(super) struct Returns {
    /// Since when pods are observed.
    started: Timestamp,
    /// Of each node, whose pods have come back and left again.
    nodes: HashMap<Arc<str>, HashMap<Owner, Left>>,
    /// Which time it is that a pod of its owner has come back, for pods created after the drain began.
    times: HashMap<Uid, u32>,
}

/// A pod that had come back has left.
#[derive(Clone, Copy)]
struct Left {
    times: u32,
    at: Timestamp,
}

impl Returns {
    pub fn new(started: Timestamp) -> Self {
        Self { started, nodes: HashMap::new(), times: HashMap::new() }
    }

    /// Takes in a pod on a node whose drain began at this time; says whether the pod has come back.
    /// `is_new` says that the pod was not there before, `was_uncordoned` that somebody uncordoned the node meanwhile.
    pub fn observe(
        &mut self,
        pod: &Pod,
        is_new: bool,
        began: Timestamp,
        was_uncordoned: bool,
        now: Timestamp,
    ) -> Option<Returned> {
        let (node, created) = (pod.node.as_ref()?, pod.created_at()?);
        let known = self.times.get(&pod.uid).copied();
        // Creation times are whole seconds: within the second in which the drain began, what is new came later.
        let new = known.is_some() || (is_new && created >= whole_second(self.started));
        if !(created > began || (new && created >= whole_second(began))) {
            self.times.remove(&pod.uid);
            return None;
        }
        let times = known.unwrap_or_else(|| self.times(pod, node, began, created, now));
        self.times.insert(pod.uid, times);
        if pod.terminating || pod.is_finished() {
            self.left(pod, times, now);
        }
        let how = match tolerates_cordon(&pod.tolerations) {
            true => Return::ToleratesCordon,
            false if was_uncordoned => Return::Uncordoned,
            false => Return::BypassesScheduler,
        };
        let leaves = created.saturating_add(pause::after(times.saturating_sub(1))).unwrap_or(Timestamp::MAX);
        // The first time it may have been scheduled right before the cordon.
        (how == Return::ToleratesCordon || times > 1).then_some(Returned {
            how,
            since: created,
            until: leaves,
        })
    }

    fn times(&self, pod: &Pod, node: &str, began: Timestamp, created: Timestamp, now: Timestamp) -> u32 {
        let left = self.nodes.get(node).and_then(|owners| owners.get(&owner(pod)));
        match left {
            Some(left) if now.duration_since(left.at) < pause::QUIET => left.times.saturating_add(1),
            None if created < self.started => {
                pause::times_within(created.duration_since(began)).saturating_add(1)
            }
            _ => 1,
        }
    }

    fn left(&mut self, pod: &Pod, times: u32, now: Timestamp) {
        let Some(node) = &pod.node else { return };
        let owners = self.nodes.entry(node.clone()).or_default();
        owners.retain(|_, left| now.duration_since(left.at) < pause::QUIET);
        let left = owners.entry(owner(pod)).or_insert(Left { times, at: now });
        *left = Left { times: left.times.max(times), at: now };
    }

    /// A pod is gone.
    pub fn remove(&mut self, pod: &Pod, now: Timestamp) {
        if let Some(times) = self.times.remove(&pod.uid) {
            self.left(pod, times, now);
        }
    }

    /// A node is gone, or nobody drains it any more.
    pub fn forget(&mut self, node: &str) {
        self.nodes.remove(node);
    }
}

fn whole_second(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

fn owner(pod: &Pod) -> Owner {
    match &pod.controller {
        Some(owner) => owner.uid.clone(),
        None => format!("{}/{}", pod.namespace, pod.name).into(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::at;

    /// Pod number `n` of an owner, created at second `created`.
    fn pod(n: u8, created: i64, owner: Option<&str>, tolerates: bool, terminating: bool) -> Pod {
        let owner = owner.map(|uid| json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": uid, "controller": true}));
        let name = if owner.is_some() { format!("web-{n}") } else { "web".into() };
        let mut object = json!({
            "metadata": {
                "namespace": "shop", "name": name, "uid": format!("1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e{n:02x}"),
                "resourceVersion": "1", "creationTimestamp": at(created).to_string(),
                "ownerReferences": owner.into_iter().collect::<Vec<_>>(),
            },
            "spec": {"nodeName": "n1", "tolerations": if tolerates { json!([{"operator": "Exists"}]) } else { json!([]) }},
            "status": {"phase": "Running"},
        });
        if terminating {
            object["metadata"]["deletionTimestamp"] = json!(at(created).to_string());
        }
        Pod::from_json(object.to_string().as_bytes()).unwrap()
    }

    /// Lets a pod come back at once each time it is asked to leave, which begins at second 0; the seconds at which
    /// it is asked.
    fn asked(returns: &mut Returns, owner: Option<&str>, tolerates: bool, until: i64) -> Vec<i64> {
        let (mut now, mut asked) = (1, Vec::new());
        for n in 0.. {
            let returned =
                returns.observe(&pod(n, now, owner, tolerates, false), true, at(0), false, at(now));
            let created = now;
            if let Some(until) = returned.map(|returned| returned.until) {
                now = now.max(until.as_second() - at(0).as_second());
            }
            if now > until {
                break;
            }
            asked.push(now);
            // A ReplicaSet makes another as soon as this one is asked; without one, when it is gone.
            if owner.is_some() {
                returns.observe(&pod(n, created, owner, tolerates, true), false, at(0), false, at(now));
            } else {
                returns.remove(&pod(n, created, owner, tolerates, false), at(now));
            }
        }
        asked
    }

    #[test]
    fn a_pod_that_comes_back_stays_longer_each_time() {
        let expected = [1, 11, 31, 71, 151, 311, 631, 1271, 2171, 3071];
        for (owner, tolerates) in [(Some("u1"), true), (Some("u1"), false), (None, true)] {
            let mut returns = Returns::new(at(-100));
            assert_eq!(asked(&mut returns, owner, tolerates, 3600), expected, "{owner:?} {tolerates}");
        }
    }

    #[test]
    fn a_restart_does_not_start_the_loop_again() {
        for (created, expected) in [(5, at(15)), (40, at(80)), (400, at(720)), (9000, at(9900))] {
            let mut returns = Returns::new(at(created + 1));
            let returned = returns.observe(
                &pod(1, created, Some("u1"), true, false),
                true,
                at(0),
                false,
                at(created + 1),
            );
            assert_eq!(returned.unwrap().until, expected, "created at {created}");
        }
    }

    #[test]
    fn only_pods_that_came_after_the_drain_began_are_held() {
        let mut returns = Returns::new(at(-100));
        let put = |returns: &mut Returns, n, created, tolerates, began| {
            let pod = pod(n, created, Some("u1"), tolerates, false);
            returns.observe(&pod, false, began, false, at(created)).map(|r| r.until)
        };
        assert_eq!(put(&mut returns, 1, -5, true, at(0)), None, "it was there before");
        assert_eq!(put(&mut returns, 3, 5, false, at(0)), None, "scheduled right before the cordon");
        assert_eq!(put(&mut returns, 4, 5, true, at(0)), Some(at(5)), "the first one leaves at once");
    }

    #[test]
    fn pods_created_in_the_second_the_drain_began_have_returned() {
        let began = at(5).saturating_add(jiff::SignedDuration::from_millis(300)).unwrap();
        let put = |returns: &mut Returns, n, is_new| {
            let returned = returns.observe(&pod(n, 5, Some("u1"), true, false), is_new, began, false, began);
            let leaving = returned.is_some();
            returns.observe(&pod(n, 5, Some("u1"), true, true), false, began, false, began);
            (leaving, returned.map(|returned| returned.until))
        };
        let mut returns = Returns::new(at(-100));
        assert_eq!(put(&mut returns, 1, false), (false, None), "it was there before");
        assert_eq!(put(&mut returns, 2, true), (true, Some(at(5))), "it leaves at once");
        assert_eq!(put(&mut returns, 3, true), (true, Some(at(15))));
        let mut returns = Returns::new(at(9));
        assert_eq!(put(&mut returns, 4, true), (false, None), "after a restart everything is new");
    }

    #[test]
    fn owners_and_nodes_are_counted_apart_and_forgotten_when_quiet() {
        let mut returns = Returns::new(at(-100));
        assert_eq!(asked(&mut returns, Some("u1"), true, 20), [1, 11]);
        let fresh = |returns: &mut Returns, n, owner: &str, now: i64| {
            let returned =
                returns.observe(&pod(n, now, Some(owner), true, false), true, at(0), false, at(now));
            returned.unwrap().until <= at(now)
        };
        assert!(fresh(&mut returns, 100, "u2", 12), "another owner");
        assert!(!fresh(&mut returns, 101, "u1", 13));
        assert!(fresh(&mut returns, 102, "u1", 13 + 30 * 60), "after a quiet time");
        asked(&mut returns, Some("u1"), true, 20);
        returns.forget("n1");
        assert!(fresh(&mut returns, 103, "u1", 25), "the node was deleted");
    }
}

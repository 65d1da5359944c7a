//! Pods that return to a node that is being drained. With each return, the next pod of the same owner may stay longer before
//! it is asked to leave, so that pods are not evacuated in a loop.
//!
//! After a restart, the number of returns is estimated from the start of the drain and the creation of the pod, as if the pod
//! had returned immediately each time.

use std::collections::HashMap;
use std::sync::Arc;

use haulout_api_types::names::POD_TEMPLATE_HASH_LABEL;
use haulout_drain_planner::backoff;
use haulout_drain_planner::facts::{ReturnCause, Returned};
use haulout_service_runtime::pods::{Pod, Uid};
use jiff::Timestamp;

use crate::observed::tolerates_cordon;

/// The owner of a pod: its Deployment by name, any other by its UID; for a pod without one, the pod's namespace and name.
type Owner = Box<str>;

pub(super) struct Returns {
    /// When this replica started to observe pods.
    started: Timestamp,
    /// For each node, the owners whose pods have returned and left again.
    nodes: HashMap<Arc<str>, HashMap<Owner, Departure>>,
    /// For pods created after the drain started, how often a pod of the owner has returned.
    counts: HashMap<Uid, u32>,
}

/// The last departure of a pod that had returned.
#[derive(Clone, Copy)]
struct Departure {
    returns: u32,
    at: Timestamp,
}

impl Returns {
    pub fn new(started: Timestamp) -> Self {
        Self { started, nodes: HashMap::new(), counts: HashMap::new() }
    }

    /// Applies a pod on a node whose drain started at `drain_started`. Returns whether the pod has returned.
    /// `is_new` says that the pod was not on the node before, `was_uncordoned` that somebody has uncordoned the node meanwhile.
    pub fn observe(
        &mut self,
        pod: &Pod,
        is_new: bool,
        drain_started: Timestamp,
        was_uncordoned: bool,
        now: Timestamp,
    ) -> Option<Returned> {
        let (node, created) = (pod.node.as_ref()?, pod.created_at()?);
        let known = self.counts.get(&pod.uid).copied();
        // Creation times are whole seconds: a new pod with the same second as the start of the drain was created later.
        let new = known.is_some() || (is_new && created >= whole_second(self.started));
        if !(created > drain_started || (new && created >= whole_second(drain_started))) {
            self.counts.remove(&pod.uid);
            return None;
        }
        let returns = known.unwrap_or_else(|| self.count_returns(pod, node, drain_started, created, now));
        self.counts.insert(pod.uid, returns);
        // Its replacement exists before a pod leaves that belongs to its Deployment directly.
        if pod.terminating || pod.is_finished() || is_of(pod, "Deployment") {
            self.record_departure(pod, returns, now);
        }
        let cause = match tolerates_cordon(&pod.tolerations) {
            true => ReturnCause::ToleratesCordon,
            false if was_uncordoned => ReturnCause::Uncordoned,
            false => ReturnCause::BypassesScheduler,
        };
        let delay = backoff::delay(returns.saturating_sub(1));
        let until = created.saturating_add(delay).unwrap_or(Timestamp::MAX);
        // The first pod may have been scheduled right before the cordon.
        (cause == ReturnCause::ToleratesCordon || returns > 1).then_some(Returned {
            cause,
            since: created,
            until,
        })
    }

    fn count_returns(
        &self,
        pod: &Pod,
        node: &str,
        drain_started: Timestamp,
        created: Timestamp,
        now: Timestamp,
    ) -> u32 {
        let last = self.nodes.get(node).and_then(|owners| owners.get(&owner(pod)));
        match last {
            Some(last) if now.duration_since(last.at) < backoff::RESET_AFTER => {
                last.returns.saturating_add(1)
            }
            None if created < self.started => {
                backoff::repetitions_within(created.duration_since(drain_started)).saturating_add(1)
            }
            _ => 1,
        }
    }

    fn record_departure(&mut self, pod: &Pod, returns: u32, now: Timestamp) {
        let Some(node) = &pod.node else { return };
        let owners = self.nodes.entry(node.clone()).or_default();
        owners.retain(|_, last| now.duration_since(last.at) < backoff::RESET_AFTER);
        let last = owners.entry(owner(pod)).or_insert(Departure { returns, at: now });
        *last = Departure { returns: last.returns.max(returns), at: now };
    }

    /// Deletes a pod.
    pub fn delete(&mut self, pod: &Pod, now: Timestamp) {
        if let Some(returns) = self.counts.remove(&pod.uid) {
            self.record_departure(pod, returns, now);
        }
    }

    /// Forgets a node that was deleted or is no longer drained.
    pub fn forget(&mut self, node: &str) {
        self.nodes.remove(node);
    }
}

fn whole_second(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

fn owner(pod: &Pod) -> Owner {
    let namespace = &pod.namespace;
    match (&pod.controller, deployment(pod)) {
        (Some(_), Some(name)) => format!("Deployment {namespace}/{name}").into(),
        (Some(owner), None) => owner.uid.clone(),
        (None, _) => format!("{namespace}/{}", pod.name).into(),
    }
}

fn is_of(pod: &Pod, kind: &str) -> bool {
    let controller = pod.controller.as_ref();
    controller.is_some_and(|owner| &*owner.kind == kind && owner.api_version.starts_with("apps/"))
}

/// The Deployment of a pod, directly or through a ReplicaSet, whose name is that of the Deployment and the hash of the template.
fn deployment(pod: &Pod) -> Option<&str> {
    let name = &pod.controller.as_ref()?.name;
    if is_of(pod, "Deployment") {
        return Some(name);
    }
    let hash = pod.labels.iter().find(|(key, _)| *key == POD_TEMPLATE_HASH_LABEL).map(|(_, hash)| hash)?;
    name.strip_suffix(hash)?.strip_suffix('-').filter(|_| is_of(pod, "ReplicaSet"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::at;

    /// Pod number `n` of an owner, created at second `created`.
    fn pod(n: u8, created: i64, owner: Option<&str>, tolerates: bool, terminating: bool) -> Pod {
        let object = object(n, created, owner, tolerates, terminating);
        Pod::from_json(object.to_string().as_bytes()).unwrap()
    }

    fn object(n: u8, created: i64, owner: Option<&str>, tolerates: bool, terminating: bool) -> Value {
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
        object
    }

    /// Simulates a pod that returns immediately each time it is evacuated. The drain starts at second 0. Returns the seconds at
    /// which it is evacuated.
    fn evacuation_times(returns: &mut Returns, owner: Option<&str>, tolerates: bool, until: i64) -> Vec<i64> {
        let (mut now, mut times) = (1, Vec::new());
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
            times.push(now);
            // A ReplicaSet creates the next pod when this one terminates. Without a ReplicaSet, it is created when this one is gone.
            if owner.is_some() {
                returns.observe(&pod(n, created, owner, tolerates, true), false, at(0), false, at(now));
            } else {
                returns.delete(&pod(n, created, owner, tolerates, false), at(now));
            }
        }
        times
    }

    #[test]
    fn returning_pod_stays_longer_each_time() {
        let expected = [1, 11, 31, 71, 151, 311, 631, 1271, 2171, 3071];
        for (owner, tolerates) in [(Some("u1"), true), (Some("u1"), false), (None, true)] {
            let mut returns = Returns::new(at(-100));
            assert_eq!(
                evacuation_times(&mut returns, owner, tolerates, 3600),
                expected,
                "{owner:?} {tolerates}"
            );
        }
    }

    /// The replacement is created before the pod leaves, and the pod belongs to the Deployment by then.
    #[test]
    fn replaced_pod_that_returns_stays_longer_each_time() {
        let of = |n: u8, created: i64, kind: &str, name: &str| {
            let mut pod = object(n, created, Some("u"), true, false);
            pod["metadata"]["labels"] = json!({"pod-template-hash": "5d"});
            pod["metadata"]["ownerReferences"][0]["kind"] = json!(kind);
            pod["metadata"]["ownerReferences"][0]["name"] = json!(name);
            pod["metadata"]["ownerReferences"][0]["uid"] = json!(format!("{kind} {name}"));
            Pod::from_json(pod.to_string().as_bytes()).unwrap()
        };
        let (mut returns, mut now, mut times) = (Returns::new(at(-100)), 1, Vec::new());
        for n in 0..6 {
            let created = now;
            let set = if n < 4 { "web-5d" } else { "web-5d-5d" };
            let returned = returns.observe(&of(n, created, "ReplicaSet", set), true, at(0), false, at(now));
            now = returned.unwrap().until.as_second() - at(0).as_second();
            times.push(now);
            returns.observe(&of(n, created, "Deployment", "web"), false, at(0), false, at(now));
        }
        assert_eq!(times, [1, 11, 31, 71, 71, 71], "web-5d-5d belongs to another Deployment");
    }

    #[test]
    fn backoff_survives_a_restart() {
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
    fn only_pods_created_during_the_drain_are_delayed() {
        let mut returns = Returns::new(at(-100));
        let put = |returns: &mut Returns, n, created, tolerates, drain_started| {
            let pod = pod(n, created, Some("u1"), tolerates, false);
            returns.observe(&pod, false, drain_started, false, at(created)).map(|r| r.until)
        };
        assert_eq!(put(&mut returns, 1, -5, true, at(0)), None, "it existed before");
        assert_eq!(put(&mut returns, 3, 5, false, at(0)), None, "scheduled right before the cordon");
        assert_eq!(put(&mut returns, 4, 5, true, at(0)), Some(at(5)), "the first pod leaves at once");
    }

    #[test]
    fn pods_created_in_the_second_the_drain_began_have_returned() {
        let drain_started = at(5).saturating_add(jiff::SignedDuration::from_millis(300)).unwrap();
        let put = |returns: &mut Returns, n, is_new| {
            let returned = returns.observe(
                &pod(n, 5, Some("u1"), true, false),
                is_new,
                drain_started,
                false,
                drain_started,
            );
            let leaving = returned.is_some();
            returns.observe(&pod(n, 5, Some("u1"), true, true), false, drain_started, false, drain_started);
            (leaving, returned.map(|returned| returned.until))
        };
        let mut returns = Returns::new(at(-100));
        assert_eq!(put(&mut returns, 1, false), (false, None), "it existed before");
        assert_eq!(put(&mut returns, 2, true), (true, Some(at(5))), "it leaves at once");
        assert_eq!(put(&mut returns, 3, true), (true, Some(at(15))));
        let mut returns = Returns::new(at(9));
        assert_eq!(put(&mut returns, 4, true), (false, None), "after a restart everything is new");
    }

    #[test]
    fn returns_are_counted_per_owner_and_node() {
        let mut returns = Returns::new(at(-100));
        assert_eq!(evacuation_times(&mut returns, Some("u1"), true, 20), [1, 11]);
        let fresh = |returns: &mut Returns, n, owner: &str, now: i64| {
            let returned =
                returns.observe(&pod(n, now, Some(owner), true, false), true, at(0), false, at(now));
            returned.unwrap().until <= at(now)
        };
        assert!(fresh(&mut returns, 100, "u2", 12), "another owner");
        assert!(!fresh(&mut returns, 101, "u1", 13));
        assert!(fresh(&mut returns, 102, "u1", 13 + 30 * 60), "after the reset time");
        evacuation_times(&mut returns, Some("u1"), true, 20);
        returns.forget("n1");
        assert!(fresh(&mut returns, 103, "u1", 25), "the node was deleted");
    }
}

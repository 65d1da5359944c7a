//! Builders for unit tests.

use std::collections::BTreeMap;

use haulout_service_runtime::pods::{Pod, Toleration, Uid};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::state::watch_gap::Synced;
use crate::taint::Taint;

/// A time, in seconds.
pub(crate) fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

/// The taint `key=value` or `key`, added at this second.
pub(crate) fn taint(text: &str, since: i64) -> Taint {
    let (key, value) = text.split_once('=').unwrap_or((text, ""));
    Taint { key: key.into(), value: value.into(), since: at(since) }
}

/// Tolerations as the pod cache parses them.
pub(crate) fn tolerations(of_pod: Value) -> Vec<Toleration> {
    pod(1).with("/spec/tolerations", of_pod).read().tolerations.to_vec()
}

/// The UID of pod number `n`.
pub(crate) fn uid(n: u32) -> Uid {
    uid_text(n).parse().unwrap()
}

fn uid_text(n: u32) -> String {
    format!("00000000-0000-4000-8000-{n:012x}")
}

/// A pod as the API server returns it, as JSON.
#[derive(Clone, Debug)]
pub(crate) struct Json(Value);

/// Pod number `n`, named `pod-n`, in the namespace `default`, on the node `node`, scheduled at second 0.
pub(crate) fn pod(n: u32) -> Json {
    Json(json!({
        "metadata": {"name": format!("pod-{n}"), "namespace": "default", "uid": uid_text(n), "resourceVersion": "1"},
        "spec": {"nodeName": "node"},
        "status": {"phase": "Running"},
    }))
    .scheduled(0)
}

impl Json {
    /// Sets the field at this JSON pointer. Its parent must exist.
    pub(crate) fn with(mut self, pointer: &str, value: impl Into<Value>) -> Self {
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        self.0.pointer_mut(parent).unwrap()[field] = value.into();
        self
    }

    /// Scheduled at this second.
    pub(crate) fn scheduled(self, second: i64) -> Self {
        let condition =
            json!({"type": "PodScheduled", "status": "True", "lastTransitionTime": at(second).to_string()});
        self.with("/status/conditions", json!([condition]))
    }

    /// Appends a toleration of this key, for this many seconds or forever.
    pub(crate) fn tolerating(mut self, key: &str, seconds: impl Into<Option<i64>>) -> Self {
        let mut toleration = json!({"key": key, "operator": "Exists", "effect": "NoExecute"});
        if let Some(seconds) = seconds.into() {
            toleration["tolerationSeconds"] = seconds.into();
        }
        let all = &mut self.0["spec"]["tolerations"];
        match all.as_array_mut() {
            Some(all) => all.push(toleration),
            None => *all = json!([toleration]),
        }
        self
    }

    /// Terminating, with a grace period that ends at this second.
    pub(crate) fn terminating(self, until: i64, grace: i64) -> Self {
        self.with("/metadata/deletionTimestamp", at(until).to_string())
            .with("/metadata/deletionGracePeriodSeconds", grace)
    }

    /// The pod as the cache parses it.
    pub(crate) fn read(&self) -> Pod {
        Pod::from_json(self.0.to_string().as_bytes()).unwrap()
    }
}

/// All watches have been synced since this second. The grace period is one minute.
pub(crate) fn synced_since(second: i64) -> Synced {
    Synced { since: at(second), grace_ends: at(second + 60) }
}

/// The input of a decision about one pod, for tables.
pub(crate) mod scenario {
    use super::*;
    use crate::decide::{NodeFacts, RemovalAction, Verdict, View, decide};
    use crate::policy::Policy;
    use crate::taint::OUT_OF_SERVICE;

    /// The input of a decision about one pod. By default all watches are synced.
    pub(crate) struct Scenario {
        pub(crate) node: NodeFacts,
        policy: Policy,
        pub(crate) synced: Option<Synced>,
        evacuation: bool,
    }

    pub(crate) fn on(taints: &[(&str, i64)]) -> Scenario {
        let taints = taints.iter().map(|(text, since)| taint(text, *since)).collect();
        let node = NodeFacts { taints, ..NodeFacts::default() };
        Scenario { node, policy: Policy::default(), synced: Some(synced_since(-1000)), evacuation: false }
    }

    impl Scenario {
        pub(crate) fn under(mut self, rules: &str) -> Self {
            self.policy = Policy::from_yaml(&format!("rules: [{rules}]")).unwrap();
            self
        }

        pub(crate) fn synced(mut self, synced: impl Into<Option<Synced>>) -> Self {
            self.synced = synced.into();
            self
        }

        pub(crate) fn evacuating(mut self) -> Self {
            self.evacuation = true;
            self
        }

        pub(crate) fn out_of_service(mut self, since: i64, ready: bool) -> Self {
            self.node.out_of_service = Some(taint(OUT_OF_SERVICE, since));
            self.node.ready = ready;
            self
        }

        /// The verdict, the name of the reason, and whether our Evacuation is released.
        pub(crate) fn decide(&self, pod: &Json, now: i64) -> (Verdict, String, bool) {
            let (pod, none) = (pod.read(), BTreeMap::new());
            let view = View {
                pod: &pod,
                node: Some(&self.node),
                namespace: Some(&none),
                evacuation: self.evacuation,
                policy: &self.policy,
                synced: self.synced,
            };
            let decision = decide(&view, at(now));
            let reason = format!("{:?}", decision.reason);
            let name = reason.split([' ', '(']).next().unwrap_or_default();
            (decision.verdict, name.to_owned(), decision.release)
        }

        pub(crate) fn verdict(&self, pod: &Json, now: i64) -> Verdict {
            self.decide(pod, now).0
        }
    }

    pub(crate) fn delete(due: i64) -> Verdict {
        Verdict::Act { how: RemovalAction::Delete, due: at(due), requeue_at: None }
    }

    pub(crate) fn act(how: RemovalAction, due: i64) -> Verdict {
        Verdict::Act { how, due: at(due), requeue_at: None }
    }

    pub(crate) fn wait(until: i64) -> Verdict {
        Verdict::Wait { until: at(until) }
    }
}

//! Builders for the unit tests of this crate.

use haulout_service_runtime::pods::{Pod, Toleration, Uid};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::sight::Sight;
use crate::taint::Taint;

/// A time, in seconds.
pub(crate) fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

/// The taint `key=value` or `key`, there since this second.
pub(crate) fn taint(text: &str, since: i64) -> Taint {
    let (key, value) = text.split_once('=').unwrap_or((text, ""));
    Taint { key: key.into(), value: value.into(), since: at(since) }
}

/// Tolerations as the cache reads them.
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

/// A pod as the API server would give it out, with changes.
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
    /// Sets the field at this JSON pointer, whose parent must be there.
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

    /// Tolerates everything with this key, for so many seconds or for ever; after those it has already.
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

    /// Asked to end, with a grace period that ends at this second.
    pub(crate) fn terminating(self, until: i64, grace: i64) -> Self {
        self.with("/metadata/deletionTimestamp", at(until).to_string())
            .with("/metadata/deletionGracePeriodSeconds", grace)
    }

    /// As the cache reads it.
    pub(crate) fn read(&self) -> Pod {
        Pod::from_json(self.0.to_string().as_bytes()).unwrap()
    }
}

/// All has been in sight since this second, and nodes have a minute to report.
pub(crate) fn clear_since(second: i64) -> Sight {
    Sight::Clear { regained: at(second), settled: at(second + 60) }
}

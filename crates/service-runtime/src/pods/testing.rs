//! Builders of pods for unit tests.

use serde_json::{Value, json};

use super::Uid;
use super::pod::Pod;

/// The UID of pod number `n`.
pub(crate) fn uid(n: u32) -> Uid {
    uid_text(n).parse().unwrap()
}

fn uid_text(n: u32) -> String {
    format!("00000000-0000-4000-8000-{n:012x}")
}

/// The JSON of a pod.
#[derive(Clone, Debug)]
pub(crate) struct Json(pub(crate) Value);

/// Pod number `n`, named `pod-n`, in the namespace `default`.
pub(crate) fn pod(n: u32) -> Json {
    Json(json!({
        "metadata": {"name": format!("pod-{n}"), "namespace": "default", "uid": uid_text(n), "resourceVersion": "1"},
        "spec": {},
        "status": {"phase": "Running"},
    }))
}

impl Json {
    /// Sets the field at this JSON pointer. Its parent must exist.
    pub(crate) fn with(mut self, pointer: &str, value: impl Into<Value>) -> Self {
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        self.0.pointer_mut(parent).unwrap()[field] = value.into();
        self
    }

    /// Parses it like the cache.
    pub(crate) fn read(&self) -> Pod {
        Pod::from_json(self.0.to_string().as_bytes()).unwrap()
    }
}

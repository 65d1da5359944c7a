//! Builders for unit tests. Objects are identified by numbers.

use std::sync::Arc;
use std::time::Duration;

use haulout_api_types::evacuation::{CancellationPolicy, Evacuator};
use haulout_api_types::{instigators, names};
use haulout_service_runtime::pods::{Pod, Uid};
use jiff::Timestamp;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use serde_json::{Value, json};

use crate::record::{Blocked, Record, fingerprint};

/// The time this many seconds into a test.
pub fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + seconds).unwrap()
}

/// UID number `n` of a pod.
pub fn uid(n: u32) -> Uid {
    format!("00000000-0000-0000-0000-0000{n:08x}").parse().unwrap()
}

/// UID number `n` of an Evacuation.
pub fn key(n: u32) -> Uid {
    format!("eeeeeeee-0000-0000-0000-0000{n:08x}").parse().unwrap()
}

/// The Evacuation of pod number `n`, requested by the maintenance controller, without evacuators.
pub fn record(n: u32) -> Record {
    Record {
        namespace: Arc::from("test"),
        name: format!("{}-pod-{n}", uid(n)).into(),
        uid: key(n),
        version: "1".into(),
        created: at(0),
        deleted: None,
        finalizers: Box::new([instigators::finalizer(names::instigator::NODE_MAINTENANCE).into()]),
        pod_name: format!("pod-{n}").into(),
        pod_uid: uid(n),
        evacuators: Box::new([]),
        progress_deadline: Duration::from_secs(600),
        active: None,
        completed: false,
        progress: None,
        policy: CancellationPolicy::Allow,
        failed: 0,
        last_failed: None,
        blocked: None,
        message_repeats_blocked: false,
        other_conditions: Box::new([]),
    }
}

/// The condition `Blocked` with this reason, true since the test began.
pub fn blocked(reason: &str) -> Blocked {
    Blocked { is_true: true, reason: reason.into(), since: at(0), message: fingerprint("") }
}

/// Evacuators of these classes, the first with the highest priority.
pub fn evacuators(classes: &[&str]) -> Box<[Evacuator]> {
    let priorities = (1..=i32::try_from(classes.len()).unwrap()).rev();
    let evacuator = |(class, priority): (&&str, i32)| Evacuator {
        evacuator_class: (*class).to_owned(),
        priority,
        role: None,
    };
    classes.iter().zip(priorities).map(evacuator).collect()
}

/// Pod number `n`, ready and with the label `app=web`, with these changes.
pub fn pod_with(n: u32, changes: &[(&str, Value)]) -> Pod {
    let mut json = json!({
        "metadata": {
            "name": format!("pod-{n}"), "namespace": "test", "uid": uid(n).to_string(), "resourceVersion": "1",
            "labels": {"app": "web"},
            "creationTimestamp": "2023-01-01T00:00:00Z",
        },
        "spec": {"nodeName": "node"},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    });
    for (path, value) in changes {
        let (parent, field) = path.rsplit_once('/').unwrap();
        json.pointer_mut(parent).unwrap()[field] = value.clone();
    }
    Pod::from_json(&serde_json::to_vec(&json).unwrap()).unwrap()
}

/// Pod number `n`, ready and with the label `app=web`.
pub fn pod(n: u32) -> Pod {
    pod_with(n, &[])
}

/// A budget for `app=web` that allows this many disruptions, with these disrupted pods.
pub fn budget(name: &str, allowed: i32, disrupted: &[&str]) -> PodDisruptionBudget {
    let disrupted: serde_json::Map<_, _> =
        disrupted.iter().map(|pod| ((*pod).to_owned(), json!("2023-01-01T00:00:00Z"))).collect();
    serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": "test", "generation": 1},
        "spec": {"selector": {"matchLabels": {"app": "web"}}},
        "status": {
            "observedGeneration": 1, "disruptionsAllowed": allowed, "currentHealthy": allowed + 2,
            "desiredHealthy": 2, "expectedPods": 3, "disruptedPods": disrupted,
        },
    }))
    .unwrap()
}

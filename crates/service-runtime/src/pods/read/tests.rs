use haulout_api_types::selector::Labels as _;
use serde_json::{Value, json};

use super::*;
use crate::pods::testing::pod;

/// A pod with all fields that the cache reads, and some others.
fn full() -> Value {
    json!({
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": "web-1",
            "generateName": "web-",
            "namespace": "shop",
            "uid": "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11",
            "resourceVersion": "4711",
            "creationTimestamp": "2026-11-03T10:00:00Z",
            "deletionTimestamp": "2026-11-03T10:10:00Z",
            "deletionGracePeriodSeconds": 30,
            "labels": {"pod-template-hash": "5b8f6d", "app": "w\u{e9}b \"quoted\""},
            "annotations": {
                "evacuation.coordination.k8s.io/priority_b.example.com": "5",
                "evacuation.coordination.k8s.io/priority_a.example.com": "10000/controller",
                "kubectl.kubernetes.io/last-applied-configuration": "{\"a\": \"b\"}",
            },
            "ownerReferences": [
                {"apiVersion": "example.com/v1", "kind": "Other", "name": "o", "uid": "x"},
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-5b8f6d", "uid": "y", "controller": true},
            ],
            "finalizers": ["example.com/wait"],
            "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
        },
        "spec": {
            "nodeName": "node-7",
            "priority": -5,
            "terminationGracePeriodSeconds": 45,
            "containers": [{"name": "main", "env": [{"name": "A", "value": "b"}]}],
            "tolerations": [
                {"operator": "Exists"},
                {"key": "k", "operator": "Equal", "value": "v", "effect": "NoExecute", "tolerationSeconds": 300},
            ],
            "volumes": [
                {"name": "data", "persistentVolumeClaim": {"claimName": "data-web-1"}},
                {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}},
                {"name": "config", "configMap": {"name": "config"}},
            ],
        },
        "status": {
            "phase": "Running",
            "conditions": [
                {"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-03T10:00:09Z"},
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-03T10:00:01Z"},
            ],
            "containerStatuses": [{"name": "main", "ready": true}],
        },
    })
}

fn read(json: &Value) -> Pod {
    Pod::from_json(json.to_string().as_bytes()).unwrap()
}

fn time(text: &str) -> Timestamp {
    text.parse().unwrap()
}

#[test]
fn every_needed_field_is_read() {
    let pod = read(&full());
    assert_eq!((pod.namespace.as_ref(), pod.name.as_ref()), ("shop", "web-1"));
    assert_eq!(pod.uid.to_string(), "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11");
    assert_eq!(pod.resource_version().as_deref(), Some("4711"));
    assert_eq!(
        pod.labels.iter().collect::<Vec<_>>(),
        [("app", "w\u{e9}b \"quoted\""), ("pod-template-hash", "5b8f6d")]
    );
    assert_eq!(pod.labels.label("pod-template-hash"), Some("5b8f6d"));
    assert_eq!(pod.node.as_deref(), Some("node-7"));
    let owner = pod.controller.as_deref().unwrap();
    assert_eq!(
        [&*owner.api_version, &*owner.kind, &*owner.name, &*owner.uid],
        ["apps/v1", "ReplicaSet", "web-5b8f6d", "y"]
    );
    let [all, one] = &*pod.tolerations else { panic!("{:?}", pod.tolerations) };
    assert_eq!(*all, Toleration { operator: Some("Exists".into()), ..Toleration::default() });
    let texts =
        [&one.key, &one.operator, &one.value, &one.effect].map(|text| text.as_deref().unwrap_or_default());
    assert_eq!((texts, one.seconds), (["k", "Equal", "v", "NoExecute"], Some(300)));
    assert_eq!(pod.claims.iter().map(AsRef::as_ref).collect::<Vec<&str>>(), ["data-web-1", "web-1-scratch"]);
    let annotations = pod.evacuator_annotations.as_deref().unwrap();
    let (evacuators, violations) = haulout_api_types::evacuators::read(annotations);
    assert_eq!(evacuators.iter().map(|e| e.priority).collect::<Vec<_>>(), [10_000, 5]);
    assert_eq!(violations, []);
    assert_eq!((pod.pod_type, pod.phase, pod.ready), (PodType::Default, Phase::Running, true));
    assert!(pod.terminating && pod.has_finalizers && !pod.is_finished());
    assert_eq!(pod.priority, -5);
    assert_eq!(pod.created_at(), Some(time("2026-11-03T10:00:00Z")));
    assert_eq!(pod.scheduled_at(), Some(time("2026-11-03T10:00:01Z")));
    assert_eq!(pod.deletion_timestamp(), Some(time("2026-11-03T10:10:00Z")));
    assert_eq!(pod.deletion_grace_period_seconds(), Some(30));
    assert_eq!(pod.termination_grace_period_seconds(), Some(45));
}

#[test]
fn metadata_equals_the_api_object() {
    let pod = read(&full());
    let (ours, mut theirs): (_, k8s_openapi::api::core::v1::Pod) =
        (pod.metadata(), serde_json::from_value(full()).unwrap());
    let meta = &mut theirs.metadata;
    meta.generate_name = None;
    meta.managed_fields = None;
    meta.finalizers = None;
    meta.annotations.as_mut().unwrap().retain(|key, _| key.contains("priority_"));
    meta.owner_references.as_mut().unwrap().remove(0);
    assert_eq!(ours, theirs.metadata);
    let mirror = json!({"kubernetes.io/config.mirror": "hash"});
    let mirror = crate::pods::testing::pod(1).with("/metadata/annotations", mirror).read();
    assert_eq!((mirror.pod_type, PodType::of(&mirror.metadata())), (PodType::Static, PodType::Static));
}

#[test]
fn minimal_pod_has_defaults() {
    let pod = read(&json!({"metadata": {"name": "a", "namespace": "b", "uid": full()["metadata"]["uid"]}}));
    assert_eq!(
        (
            pod.resource_version(),
            pod.node.as_deref(),
            pod.controller.as_deref(),
            pod.evacuator_annotations.as_deref()
        ),
        (None, None, None, None)
    );
    assert!(pod.labels.0.is_empty() && pod.tolerations.is_empty() && pod.claims.is_empty());
    assert_eq!((pod.phase, pod.ready, pod.terminating, pod.priority), (Phase::Unknown, false, false, 0));
    assert_eq!((pod.created_at(), pod.scheduled_at(), pod.deletion_timestamp()), (None, None, None));
    assert_eq!((pod.termination_grace_period_seconds(), pod.deletion_grace_period_seconds()), (None, None));
}

#[test]
fn phases_types_and_conditions_are_read() {
    let phases = [
        ("Pending", Phase::Pending, false),
        ("Running", Phase::Running, false),
        ("Succeeded", Phase::Succeeded, true),
        ("Failed", Phase::Failed, true),
        ("Unknown", Phase::Unknown, false),
        ("Sleeping", Phase::Unknown, false),
    ];
    for (text, phase, finished) in phases {
        let pod = pod(1).with("/status/phase", text).read();
        assert_eq!((pod.phase, pod.is_finished()), (phase, finished), "{text}");
    }
    let daemon =
        json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u", "controller": true}]);
    assert_eq!(pod(1).with("/metadata/ownerReferences", daemon).read().pod_type, PodType::DaemonSet);
    let conditions = json!([
        {"type": "Ready", "status": "False"},
        {"type": "PodScheduled", "status": "False", "lastTransitionTime": "2026-11-03T10:00:01Z"},
    ]);
    let waiting = pod(1).with("/status/conditions", conditions).read();
    assert_eq!((waiting.ready, waiting.scheduled_at()), (false, None));
}

/// With an invalid value in any field, all other fields are read, in this pod and in the others of the list.
#[test]
fn invalid_field_affects_only_itself() {
    let invalid = [
        json!(null),
        json!(true),
        json!(-7.5),
        json!(u64::MAX),
        json!("invalid"),
        json!(["a", null]),
        json!({"a": [1]}),
    ];
    for pointer in pointers(&full(), "") {
        if ["/metadata", "/metadata/name", "/metadata/namespace", "/metadata/uid"].contains(&pointer.as_str())
        {
            continue;
        }
        for value in &invalid {
            let mut json = full();
            *json.pointer_mut(&pointer).unwrap() = value.clone();
            let list = json!({"metadata": {"resourceVersion": "9"}, "items": [json, full()]}).to_string();
            let page: Page<'_, wire::Object<'_>> = serde_json::from_str(&list).unwrap();
            let mut shared = Interner::default();
            let pods: Vec<_> =
                page.items.0.iter().map(|object| Pod::read(object, &mut shared).unwrap()).collect();
            let [first, second] = pods.as_slice() else { panic!("{pointer} = {value}") };
            assert_eq!(*second, read(&full()), "{pointer} = {value}");
            assert_eq!(first.uid, second.uid);
            if !pointer.starts_with("/spec") {
                assert_eq!(
                    (&first.node, &first.claims),
                    (&second.node, &second.claims),
                    "{pointer} = {value}"
                );
            }
            if !pointer.starts_with("/metadata") {
                assert_eq!((&first.labels, &first.controller), (&second.labels, &second.controller));
            }
        }
    }
}

/// The JSON pointers of all values inside this one.
fn pointers(value: &Value, at: &str) -> Vec<String> {
    let inside: Vec<(String, &Value)> = match value {
        Value::Object(fields) => fields.iter().map(|(key, value)| (key.replace('/', "~1"), value)).collect(),
        Value::Array(items) => items.iter().enumerate().map(|(i, value)| (i.to_string(), value)).collect(),
        _ => Vec::new(),
    };
    let mut found = Vec::new();
    for (key, value) in inside {
        let pointer = format!("{at}/{key}");
        found.extend(pointers(value, &pointer));
        found.push(pointer);
    }
    found
}

#[test]
fn invalid_values_of_the_right_type_are_ignored() {
    let cases = [
        ("/metadata/creationTimestamp", json!("yesterday")),
        ("/metadata/resourceVersion", json!("v12")),
        ("/metadata/resourceVersion", json!("007")),
        ("/metadata/labels", json!({"a=b": "c", "d": "e\nf=g"})),
        ("/spec/priority", json!(1_i64 << 40)),
    ];
    for (pointer, value) in cases {
        let mut expected = pod(1).read();
        if pointer.ends_with("resourceVersion") {
            expected.version = 0;
        }
        assert_eq!(pod(1).with(pointer, value.clone()).read(), expected, "{pointer} = {value}");
    }
    let terminating = pod(1).with("/metadata/deletionTimestamp", "soon").read();
    assert!(terminating.terminating, "it is terminating, even if its time is invalid");
    assert_eq!(terminating.deletion_timestamp(), None);
}

#[test]
fn object_without_identity_is_not_a_pod() {
    let cases = [
        (json!({}), "pod has no namespace"),
        (json!({"metadata": {"namespace": "n"}}), "pod has no name"),
        (
            json!({"metadata": {"namespace": "n", "name": "p", "uid": "invalid"}}),
            "pod n/p: \"invalid\" is not a UID",
        ),
        (json!("invalid"), "pod has no namespace"),
    ];
    for (json, expected) in cases {
        let problem = Pod::from_json(json.to_string().as_bytes()).unwrap_err().to_string();
        assert!(problem.starts_with(expected), "{problem}");
    }
    assert!(Pod::from_json(b"{").unwrap_err().to_string().starts_with("failed to parse pod: EOF"));
}

#[test]
fn equal_parts_of_pods_are_shared() {
    let mut shared = Interner::default();
    let mut made = |n: u32| {
        let mut json = full();
        json["metadata"]["name"] = json!(format!("web-{n}"));
        let json = json.to_string();
        Pod::read(&serde_json::from_str(&json).unwrap(), &mut shared).unwrap()
    };
    let (a, b) = (made(1), made(2));
    assert!(Arc::ptr_eq(&a.namespace, &b.namespace));
    assert!(Arc::ptr_eq(&a.labels.0, &b.labels.0));
    assert!(Arc::ptr_eq(&a.tolerations, &b.tolerations));
    assert!(Arc::ptr_eq(a.node.as_ref().unwrap(), b.node.as_ref().unwrap()));
    assert!(Arc::ptr_eq(a.controller.as_ref().unwrap(), b.controller.as_ref().unwrap()));
    assert!(Arc::ptr_eq(
        a.evacuator_annotations.as_ref().unwrap(),
        b.evacuator_annotations.as_ref().unwrap()
    ));
    drop((a, b));
    shared.sweep();
    assert_eq!(shared.len(), 0, "unused values are removed");
}

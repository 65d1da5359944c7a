use std::collections::HashSet;

use serde_json::Value;

use super::*;
use crate::decide::Cause;

fn create() -> Value {
    json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "requestKind": {"group": "", "version": "v1", "kind": "Pod"},
            "name": "web-1",
            "namespace": "shop",
            "operation": "CREATE",
            "userInfo": {"username": "alice", "groups": ["devs"], "extra": {"scopes": ["a", "b"]}},
            "object": {"metadata": {"name": "web-1"}},
            "oldObject": null,
            "dryRun": true,
            "options": {"kind": "CreateOptions"}
        }
    })
}

fn read(body: &Value) -> Result<Request, InvalidReview> {
    super::read(body.to_string().as_bytes())
}

#[test]
fn review_is_parsed() {
    let request = read(&create()).unwrap();
    assert_eq!(request.uid, "705ab4f5");
    assert_eq!(request.resource.resource, "pods");
    assert_eq!(request.namespace.as_deref(), Some("shop"));
    assert_eq!(request.operation, Operation::Create);
    assert_eq!(request.user.username.as_deref(), Some("alice"));
    assert_eq!(request.user.extra.unwrap()["scopes"], ["a", "b"]);
    assert_eq!(request.object.unwrap().get(), r#"{"metadata":{"name":"web-1"}}"#);
    assert!(request.old_object.is_none(), "null means absent");
    assert!(request.subresource.is_none());
}

#[test]
fn invalid_review_error_has_the_uid_if_readable() {
    let with = |path: &str, value: Value| {
        let mut body = create();
        *body.pointer_mut(path).unwrap() = value;
        body
    };
    for (body, uid, word) in [
        (json!([]), None, "not an AdmissionReview"),
        (json!({}), None, "with a request"),
        (with("/request", json!(null)), None, "with a request"),
        (with("/request", json!("uid")), None, "with a request"),
        (with("/request", json!(["uid"])), None, "with a request"),
        (json!(["admission.k8s.io/v1", "AdmissionReview", create()["request"]]), None, "not a JSON object"),
        (json!({"request": {"uid": ""}}), None, "is supported"),
        (with("/kind", json!("Pod")), Some("705ab4f5"), "\"Pod\""),
        (with("/apiVersion", json!("admission.k8s.io/v1beta1")), Some("705ab4f5"), "v1beta1"),
        (with("/request/uid", json!("")), None, "uid is empty"),
        (with("/request/uid", json!(7)), None, "request: invalid type"),
        (with("/request/operation", json!("ADOPT")), Some("705ab4f5"), "ADOPT"),
        (with("/request/userInfo", json!("alice")), Some("705ab4f5"), "request: invalid type"),
        (with("/request/resource", json!({})), Some("705ab4f5"), "missing field"),
    ] {
        let invalid = read(&body).unwrap_err();
        assert_eq!(invalid.uid.as_deref(), uid, "{body}");
        assert!(invalid.problem.contains(word), "{invalid:?} lacks {word}");
    }
}

#[test]
fn responses_match_the_api_servers_format() {
    let patch = serde_json::from_value(json!([{"op": "add", "path": "/spec/a", "value": 1}])).unwrap();
    let reply = |verdict: &Verdict| -> Value {
        serde_json::from_slice(&super::answer("u", verdict).unwrap()).unwrap()
    };
    let allowed = Verdict { warnings: vec!["mind the gap".into()], patch, ..Verdict::default() };
    assert_eq!(
        reply(&allowed),
        json!({
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "response": {
                "uid": "u",
                "allowed": true,
                "status": {"status": "Success", "code": 200},
                "patch": "W3sib3AiOiJhZGQiLCJwYXRoIjoiL3NwZWMvYSIsInZhbHVlIjoxfV0=",
                "patchType": "JSONPatch",
                "warnings": ["mind the gap"]
            }
        })
    );
    let denied = Verdict::denied(Cause::Unauthorized, "alice may not delete node n1");
    assert_eq!(
        reply(&denied)["response"],
        json!({
            "uid": "u",
            "allowed": false,
            "status": {
                "status": "Failure", "code": 403, "reason": "Forbidden",
                "message": "alice may not delete node n1"
            }
        })
    );
    assert!(reply(&Verdict::default())["response"].get("patch").is_none(), "an empty patch is omitted");
}

#[test]
fn every_hook_has_its_own_path() {
    let paths: std::collections::BTreeSet<_> = Hook::ALL.iter().map(|hook| hook.path()).collect();
    assert_eq!(paths.len(), Hook::ALL.len());
    for hook in Hook::ALL {
        assert!(hook.path().ends_with(hook.resource()), "{hook:?}");
    }
}

/// The configurations are written by `cargo xtask generate`.
#[test]
fn every_hook_is_registered_once_under_its_path() {
    let mut found = Vec::new();
    for (file, mutates) in [("mutating", true), ("validating", false)] {
        let path = format!("{}/../../webhooks/{file}.yaml", std::env::var("CARGO_MANIFEST_DIR").unwrap());
        let text = std::fs::read_to_string(path).unwrap();
        let configuration: Value = serde_yaml::from_str(&text).unwrap();
        for webhook in configuration["webhooks"].as_array().unwrap() {
            let path = webhook["clientConfig"]["service"]["path"].as_str().unwrap();
            let hook = Hook::ALL.into_iter().find(|hook| hook.path() == path).expect(path);
            assert_eq!(hook.mutates(), mutates, "{path}");
            for rule in webhook["rules"].as_array().unwrap() {
                let resource = rule["resources"][0].as_str().unwrap().split('/').next().unwrap();
                assert_eq!((&rule["apiGroups"], resource), (&json!([hook.group()]), hook.resource()));
            }
            found.push(hook);
        }
    }
    assert_eq!(found.len(), Hook::ALL.len());
    assert_eq!(found.into_iter().collect::<HashSet<_>>(), HashSet::from(Hook::ALL));
}

//! Checks JSON against the schemas of our custom resource definitions, as the API server does, and measures its size in etcd.

use serde_json::Value;

/// What the schema rejects in the status of an object of this kind. Patterns and CEL rules are not evaluated.
///
/// # Panics
///
/// If there is no such kind.
#[allow(clippy::panic, reason = "only tests call it")]
pub fn status_violations(kind: &str, status: &Value) -> Vec<String> {
    let crds = haulout_api_types::crds();
    let crd = crds.iter().find(|crd| crd.spec.names.kind == kind);
    let schema = crd.and_then(|crd| crd.spec.versions.first()?.schema.as_ref()?.open_api_v3_schema.as_ref());
    let Some(schema) = schema else { panic!("no schema of {kind}") };
    let schema = serde_json::to_value(schema).unwrap_or_default();
    let mut found = Vec::new();
    let Some(of_status) = schema.pointer("/properties/status") else { panic!("{kind} has no status") };
    check("status", of_status, status, &mut found);
    found
}

fn check(path: &str, schema: &Value, value: &Value, found: &mut Vec<String>) {
    let mut fail = |what: String| found.push(format!("{path}: {what}"));
    let limit = |name: &str| schema[name].as_u64().and_then(|limit| usize::try_from(limit).ok());
    let is_type = match schema["type"].as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("integer") => value.is_i64(),
        Some("boolean") => value.is_boolean(),
        _ => true,
    };
    if !is_type {
        fail(format!("not of type {}", schema["type"]));
    }
    match value {
        Value::String(text) => {
            let characters = text.chars().count();
            if limit("maxLength").is_some_and(|max| characters > max)
                || limit("minLength").is_some_and(|min| characters < min)
            {
                fail(format!("has {characters} characters"));
            }
            if schema["enum"].as_array().is_some_and(|allowed| !allowed.contains(value)) {
                fail(format!("{text:?} is not one of {}", schema["enum"]));
            }
        }
        Value::Number(number) => {
            let number = number.as_f64();
            if schema["minimum"].as_f64().is_some_and(|min| number < Some(min))
                || schema["maximum"].as_f64().is_some_and(|max| number > Some(max))
            {
                fail(format!("{value} is out of range"));
            }
        }
        Value::Array(items) => {
            if limit("maxItems").is_some_and(|max| items.len() > max) {
                fail(format!("has {} items", items.len()));
            }
            for (index, item) in items.iter().enumerate() {
                check(&format!("{path}[{index}]"), &schema["items"], item, found);
            }
        }
        Value::Object(fields) => {
            for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
                if !fields.contains_key(name) {
                    found.push(format!("{path}: {name} is missing"));
                }
            }
            for (name, field) in fields {
                match schema["properties"].get(name).or_else(|| schema.get("additionalProperties")) {
                    Some(schema) => check(&format!("{path}.{name}"), schema, field, found),
                    None => found.push(format!("{path}.{name}: unknown field")),
                }
            }
        }
        Value::Null | Value::Bool(_) => {}
    }
}

/// The size of an object in etcd. Go's JSON encoder escapes more characters than ours.
pub fn stored_bytes(object: &Value) -> usize {
    let text = object.to_string();
    let escaped = |c: char| match c {
        '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => "\\u003c".len(),
        c => c.len_utf8(),
    };
    text.chars().map(escaped).sum()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn violations_of_the_schema_are_found() {
        let condition = json!({"type": "Blocked", "status": "True", "reason": "R", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let with = |field: &str, value: Value| {
            let mut condition = condition.clone();
            condition[field] = value;
            json!({"conditions": [condition]})
        };
        let cases = [
            (with("message", json!("ü".repeat(8192))), None),
            (with("message", json!("ü".repeat(8193))), Some("status.conditions[0].message: has 8193")),
            (with("reason", json!("")), Some("status.conditions[0].reason: has 0")),
            (with("status", json!("Maybe")), Some("status.conditions[0].status: \"Maybe\" is not one of")),
            (with("other", json!("x")), Some("status.conditions[0].other: unknown field")),
            (json!({"conditions": vec![&condition; 65]}), Some("status.conditions: has 65 items")),
            (json!({"nodesSelected": -1}), Some("status.nodesSelected: -1 is out of range")),
            (json!({"nodesSelected": "1"}), Some("status.nodesSelected: not of type")),
            (
                json!({"stageStatuses": [{"name": "Idle"}]}),
                Some("status.stageStatuses[0]: startTimestamp is missing"),
            ),
        ];
        for (status, expected) in cases {
            let found = status_violations("NodeMaintenance", &status);
            assert_eq!(found.len(), usize::from(expected.is_some()), "{found:?}");
            assert!(expected.is_none_or(|expected| found[0].starts_with(expected)), "{found:?}");
        }
        assert_eq!(stored_bytes(&json!("a<ü")), 2 + 1 + 6 + 2);
    }
}

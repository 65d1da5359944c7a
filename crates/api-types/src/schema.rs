//! JSON schemas for the Kubernetes types that we embed, with the limits that their own schemas leave
//! out: CEL's cost budget needs a bound on everything that a rule walks over, and without the webhook
//! nobody else would refuse a selector that can never match.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::core::Rule;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

/// The syntax of a label key: an optional DNS prefix and a name.
const LABEL_KEY: &str = "^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?\
                         [A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$";
/// The syntax of a label value, the empty one included.
const LABEL_VALUE: &str = "^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$";
/// A label value, or a number for Gt and Lt to compare with.
const LABEL_VALUE_OR_NUMBER: &str = "^(-?[0-9]{1,18}|[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$";
/// RFC 1123 subdomain; its length is limited apart from it.
pub(crate) const DNS_SUBDOMAIN: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
/// A UID as the API server makes them.
pub(crate) const UID: &str = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$";
/// A time that every client can read. The API server's own check of `date-time` lets through what none
/// can, and one such value in a status would break every list and watch of its kind.
const TIME: &str = "^[12][0-9]{3}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}([.][0-9]{1,9})?\
                    (Z|[+-](0[0-9]|1[0-4]):[0-5][0-9])$";

/// A rule that the required `field` of the object it stands on never changes.
pub(crate) fn immutable(field: &str, way_out: &str) -> Rule {
    Rule::new(format!("self.{field} == oldSelf.{field}"))
        .message(format!("{field} is immutable: {way_out}").as_str())
        .field_path(format!(".{field}"))
}

/// As [`immutable`], for a list that may be absent: removing it and setting it again is a change too.
/// Only elements `e` that meet the condition are compared; absent and empty are equal.
pub(crate) fn immutable_list(field: &str, condition: &str, way_out: &str) -> Rule {
    let list = |of: &str| format!("(has({of}.{field}) ? {of}.{field}.filter(e, {condition}) : [])");
    // A field path to a list that is absent now would be refused, so the message alone names it.
    Rule::new(format!("{} == {}", list("self"), list("oldSelf")))
        .message(format!("{field} is immutable: {way_out}").as_str())
}

/// `metav1.LabelSelector`.
pub(crate) fn label_selector(_: &mut SchemaGenerator) -> Schema {
    let values =
        json!({"maxItems": 100, "items": {"type": "string", "maxLength": 63, "pattern": LABEL_VALUE}});
    let operators = ["In", "NotIn", "Exists", "DoesNotExist"];
    json_schema!({
        "type": "object",
        "description": "A label query. matchLabels and matchExpressions are ANDed; an empty selector matches everything.",
        "properties": {
            "matchLabels": {
                "type": "object",
                "description": "Label keys and the values that they must have.",
                "maxProperties": 16,
                // A forgotten value is null. It has to arrive to be refused: dropped, as null is elsewhere,
                // it would leave a selector that matches everything.
                "additionalProperties": {"type": "string", "nullable": true, "maxLength": 63, "pattern": LABEL_VALUE},
                "x-kubernetes-validations": [
                    {
                        "rule": "self.all(key, dyn(self[key]) != null)",
                        "message": "every label in matchLabels needs a value; an empty one is written \"\""
                    },
                    {
                        "rule": format!("self.all(key, size(key) <= 317 && key.matches('{LABEL_KEY}'))"),
                        "message": "every key of matchLabels must be a label key, such as app or example.com/app"
                    }
                ]
            },
            "matchExpressions": requirements(&requirement(&operators, &label_key(), &values, &[]), "Requirements on single labels, ANDed.")
        },
        "x-kubernetes-map-type": "atomic"
    })
}

/// `v1.NodeSelector`. Unlike a pod's node affinity, `matchFields` takes several names at once.
pub(crate) fn node_selector(_: &mut SchemaGenerator) -> Schema {
    let by_label = requirement(
        &["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"],
        &label_key(),
        &json!({"maxItems": 100, "items": {"type": "string", "maxLength": 63, "pattern": LABEL_VALUE_OR_NUMBER}}),
        &[json!({
            "rule": "!(self.operator in ['Gt', 'Lt']) || (has(self.values) && size(self.values) == 1 && \
                     self.values[0].matches('^-?[0-9]{1,18}$'))",
            "message": "operators Gt and Lt need exactly one value, a whole number"
        })],
    );
    let by_name = requirement(
        &["In", "NotIn"],
        &json!({"type": "string", "enum": ["metadata.name"],
                "description": "The field that the requirement is about; only metadata.name is supported."}),
        &json!({"maxItems": 1000, "items": {"type": "string", "maxLength": 253, "pattern": DNS_SUBDOMAIN}}),
        &[],
    );
    json_schema!({
        "type": "object",
        "properties": {
            "nodeSelectorTerms": {
                "type": "array",
                "description": "Terms, ORed: a node is selected when one of them matches it.",
                "minItems": 1,
                "maxItems": 100,
                "x-kubernetes-list-type": "atomic",
                "items": {
                    "type": "object",
                    "description": "Requirements, ANDed. A term without any matches no node.",
                    "properties": {
                        "matchExpressions": requirements(&by_label, "Requirements on the node's labels."),
                        "matchFields": requirements(&by_name, "Requirements on the node's fields.")
                    },
                    "x-kubernetes-map-type": "atomic"
                }
            }
        },
        "required": ["nodeSelectorTerms"],
        "x-kubernetes-map-type": "atomic"
    })
}

fn label_key() -> Value {
    json!({"type": "string", "maxLength": 317, "pattern": LABEL_KEY,
           "description": "The label key that the requirement is about."})
}

fn requirements(items: &Value, description: &str) -> Value {
    json!({
        "type": "array",
        "description": description,
        "maxItems": 16,
        "x-kubernetes-list-type": "atomic",
        "items": items
    })
}

fn requirement(operators: &[&str], key: &Value, values: &Value, more_rules: &[Value]) -> Value {
    let mut rules = vec![
        json!({
            "rule": "!(self.operator in ['In', 'NotIn']) || (has(self.values) && size(self.values) > 0)",
            "message": "operators In and NotIn need at least one value"
        }),
        json!({
            "rule": "!(self.operator in ['Exists', 'DoesNotExist']) || !has(self.values) || size(self.values) == 0",
            "message": "operators Exists and DoesNotExist take no values"
        }),
    ];
    rules.extend_from_slice(more_rules);
    json!({
        "type": "object",
        "properties": {
            "key": key,
            "operator": {
                "type": "string",
                "enum": operators,
                "description": "How the key relates to the values."
            },
            "values": {
                "type": "array",
                "description": "The values that the operator compares with.",
                "maxItems": values["maxItems"],
                "x-kubernetes-list-type": "atomic",
                "items": values["items"]
            }
        },
        "required": ["key", "operator"],
        "x-kubernetes-validations": rules
    })
}

/// A list of `metav1.Condition`, one of each type, with the limits that the Go type documents.
pub(crate) fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 64,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "properties": {
                "type": {"type": "string", "maxLength": 316, "pattern": LABEL_KEY, "description": "What the condition is about."},
                "status": {"type": "string", "enum": ["True", "False", "Unknown"], "description": "Whether it holds."},
                "reason": {
                    "type": "string", "minLength": 1, "maxLength": 1024,
                    "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
                    "description": "Why, in one word for machines."
                },
                "message": {"type": "string", "maxLength": 32768, "description": "Why, for people. May be empty."},
                "lastTransitionTime": {"type": "string", "format": "date-time", "description": "When the status last changed."},
                "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0, "description": "The generation of the spec that the condition describes."}
            },
            "required": ["type", "status", "reason", "message", "lastTransitionTime"]
        }
    })
}

/// What the derive cannot say:
/// - `null` means "absent" everywhere. Schemars marks every optional field as nullable, and for a nullable
///   field the API server keeps a `null`, which CEL's `has()` then takes for a value. (Only the values of
///   maps stay as they are.)
/// - A time is one that every client can read.
/// - A comment's line breaks are not the reader's, so a paragraph becomes a line.
/// - The API server refuses definitions in `*.k8s.io` without a word on their approval. (The derive's own
///   `annotation` would put it onto every object that is made with `new`, too.)
pub(crate) fn finish(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    let approval = "unapproved, out-of-tree implementation of KEP-4212 and KEP-4563";
    let annotations = crd.metadata.annotations.get_or_insert_default();
    annotations.insert("api-approved.kubernetes.io".into(), approval.into());
    for version in &mut crd.spec.versions {
        if let Some(root) = version.schema.as_mut().and_then(|s| s.open_api_v3_schema.as_mut()) {
            tidy(root);
        }
    }
    crd
}

fn tidy(schema: &mut JSONSchemaProps) {
    schema.nullable = None;
    if schema.format.as_deref() == Some("date-time") {
        schema.pattern = Some(TIME.into());
    }
    if let Some(text) = &mut schema.description {
        let paragraphs: Vec<_> = text.split("\n\n").map(|paragraph| paragraph.replace('\n', " ")).collect();
        *text = paragraphs.join("\n\n");
    }
    for property in schema.properties.iter_mut().flat_map(|p| p.values_mut()) {
        tidy(property);
    }
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        tidy(items);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        let nullable = values.nullable;
        tidy(values);
        values.nullable = nullable;
    }
}

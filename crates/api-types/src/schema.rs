//! JSON schemas for embedded Kubernetes types, with limits that their own schemas lack. CEL's cost budget needs a bound on
//! everything that a rule iterates over. Without the webhook, only the schema rejects invalid selectors.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::core::Rule;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

/// The syntax of a label key: an optional DNS prefix and a name.
const LABEL_KEY: &str = "^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?\
                         [A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$";
/// The syntax of a label value, including the empty value.
const LABEL_VALUE: &str = "^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$";
/// A label value, or a number for Gt and Lt to compare with.
const LABEL_VALUE_OR_NUMBER: &str = "^(-?[0-9]{1,18}|[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$";
/// RFC 1123 subdomain. Its length is limited separately.
pub(crate) const DNS_SUBDOMAIN: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
/// A UID that the API server assigns.
pub(crate) const UID: &str = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$";
/// A time that every client can parse. The API server's own check of `date-time` accepts values that no client can parse, and
/// one such value would break every list and watch of its kind.
const TIME: &str = "^[12][0-9]{3}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}([.][0-9]{1,9})?\
                    (Z|[+-](0[0-9]|1[0-4]):[0-5][0-9])$";

/// A rule that makes a required field of the object immutable.
pub(crate) fn immutable(field: &str, hint: &str) -> Rule {
    Rule::new(format!("self.{field} == oldSelf.{field}"))
        .message(format!("{field} is immutable: {hint}").as_str())
        .field_path(format!(".{field}"))
}

/// Like [`immutable`], for an optional list. Only elements `e` that meet the condition are compared. Absent and empty are
/// equal.
pub(crate) fn immutable_list(field: &str, condition: &str, hint: &str) -> Rule {
    let list = |of: &str| format!("(has({of}.{field}) ? {of}.{field}.filter(e, {condition}) : [])");
    // The API server rejects a field path to an absent list, so only the message names the field.
    Rule::new(format!("{} == {}", list("self"), list("oldSelf")))
        .message(format!("{field} is immutable: {hint}").as_str())
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
                // A missing value is null. It is nullable here so that the rule can reject it. If it were dropped, as null is
                // elsewhere, the selector would match everything.
                "additionalProperties": {"type": "string", "nullable": true, "maxLength": 63, "pattern": LABEL_VALUE},
                "x-kubernetes-validations": [
                    {
                        "rule": "self.all(key, dyn(self[key]) != null)",
                        "message": "every label in matchLabels needs a value; use \"\" for an empty one"
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
                "description": "The field to match. Only metadata.name is supported."}),
        &json!({"maxItems": 1000, "items": {"type": "string", "maxLength": 253, "pattern": DNS_SUBDOMAIN}}),
        &[],
    );
    json_schema!({
        "type": "object",
        "properties": {
            "nodeSelectorTerms": {
                "type": "array",
                "description": "Terms, ORed: a node is selected if one of them matches.",
                "minItems": 1,
                "maxItems": 100,
                "x-kubernetes-list-type": "atomic",
                "items": {
                    "type": "object",
                    "description": "Requirements, ANDed. A term without requirements matches no node.",
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
           "description": "Label key to match."})
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
                "description": "Relation between the key and the values."
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

/// A list of `metav1.Condition`, one of each type. The Go type allows longer messages and any number of conditions: with
/// them, an evacuator could fill an object up to etcd's limit, and all later writes of its status would fail.
pub(crate) fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 16,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "properties": {
                "type": {"type": "string", "maxLength": 316, "pattern": LABEL_KEY, "description": "Type of the condition."},
                "status": {"type": "string", "enum": ["True", "False", "Unknown"], "description": "Status of the condition."},
                "reason": {
                    "type": "string", "minLength": 1, "maxLength": 1024,
                    "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
                    "description": "Machine-readable reason."
                },
                "message": {"type": "string", "maxLength": 8192, "description": "Text for people. May be empty."},
                "lastTransitionTime": {"type": "string", "format": "date-time", "description": "When the status last changed."},
                "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0, "description": "The generation of the spec that the condition describes."}
            },
            "required": ["type", "status", "reason", "message", "lastTransitionTime"]
        }
    })
}

/// Like [`conditions`], with a place for the condition of the evacuation controller, whatever evacuators add.
pub(crate) fn evacuation_conditions(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = conditions(generator);
    let rule = json!([{
        "rule": "self.filter(c, c.type != 'Blocked').size() <= 15",
        "message": "at most 15 conditions besides Blocked are allowed"
    }]);
    schema.insert("x-kubernetes-validations".into(), rule);
    schema
}

/// Adjusts the derived CRD:
/// - `null` means "absent" everywhere. Schemars marks every optional field as nullable. For a nullable field, the API server
///   keeps a `null`, which CEL's `has()` then treats as a value. Values of maps stay as they are.
/// - Times have a pattern that every client can parse.
/// - Line breaks of comments are removed, so that a paragraph is one line.
/// - The annotation for API approval is added. The API server rejects definitions in `*.k8s.io` without it. The derive's own
///   `annotation` would also add it to every object that is created with `new`.
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

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
const LABEL_KEY: &str =
    "^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$";
/// The syntax of a label value, the empty one included.
const LABEL_VALUE: &str = "^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$";
/// RFC 1123 subdomain; its length is limited apart from it.
pub(crate) const DNS_SUBDOMAIN: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
/// A UID as the API server makes them.
pub(crate) const UID: &str = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$";

/// A rule that `field` of the object it stands on never changes; absent and empty lists count as equal.
pub(crate) fn immutable(field: &str, way_out: &str) -> Rule {
    Rule::new(format!("self.{field} == oldSelf.{field}"))
        .message(format!("{field} is immutable: {way_out}").as_str())
        .field_path(format!(".{field}"))
}

/// As [`immutable`], for a list that may be absent: removing it and setting it again is a change too.
pub(crate) fn immutable_list(field: &str, way_out: &str) -> Rule {
    let list = |of: &str| format!("(has({of}.{field}) ? {of}.{field} : [])");
    // A field path to a list that is absent now would be refused, so the message alone names it.
    Rule::new(format!("{} == {}", list("self"), list("oldSelf")))
        .message(format!("{field} is immutable: {way_out}").as_str())
}

/// `metav1.LabelSelector`.
pub(crate) fn label_selector(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "description": "A label query. matchLabels and matchExpressions are ANDed; an empty selector matches everything.",
        "properties": {
            "matchLabels": {
                "type": "object",
                "description": "Label keys and the values that they must have.",
                "maxProperties": 16,
                "additionalProperties": {"type": "string", "maxLength": 63, "pattern": LABEL_VALUE},
                "x-kubernetes-validations": [{
                    "rule": format!("self.all(key, size(key) <= 317 && key.matches('{LABEL_KEY}'))"),
                    "message": "every key of matchLabels must be a label key, such as app or example.com/app"
                }]
            },
            "matchExpressions": {
                "type": "array",
                "description": "Requirements on single labels, ANDed.",
                "maxItems": 16,
                "x-kubernetes-list-type": "atomic",
                "items": requirement(
                    &["In", "NotIn", "Exists", "DoesNotExist"],
                    &json!({"type": "string", "maxLength": 317, "pattern": LABEL_KEY,
                            "description": "The label key that the requirement is about."}),
                    &[]
                )
            }
        },
        "x-kubernetes-map-type": "atomic"
    })
}

/// `v1.NodeSelector`. Unlike a pod's node affinity, `matchFields` takes several names at once.
pub(crate) fn node_selector(_: &mut SchemaGenerator) -> Schema {
    let by_label = requirement(
        &["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"],
        &json!({"type": "string", "maxLength": 317, "pattern": LABEL_KEY,
                "description": "The label key that the requirement is about."}),
        &[json!({
            "rule": "!(self.operator in ['Gt', 'Lt']) || (has(self.values) && size(self.values) == 1 && \
                     self.values[0].matches('^-?[0-9]{1,18}$'))",
            "message": "operators Gt and Lt need exactly one value, a whole number"
        })],
    );
    let by_field = requirement(
        &["In", "NotIn"],
        &json!({"type": "string", "enum": ["metadata.name"],
                "description": "The field that the requirement is about; only metadata.name is supported."}),
        &[],
    );
    let requirements = |items: Value, description: &str| {
        json!({
            "type": "array",
            "description": description,
            "maxItems": 16,
            "x-kubernetes-list-type": "atomic",
            "items": items
        })
    };
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
                        "matchExpressions": requirements(by_label, "Requirements on the node's labels."),
                        "matchFields": requirements(by_field, "Requirements on the node's fields.")
                    },
                    "x-kubernetes-map-type": "atomic"
                }
            }
        },
        "required": ["nodeSelectorTerms"],
        "x-kubernetes-map-type": "atomic"
    })
}

fn requirement(operators: &[&str], key: &Value, more_rules: &[Value]) -> Value {
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
                "maxItems": 100,
                "x-kubernetes-list-type": "atomic",
                "items": {"type": "string", "maxLength": 253}
            }
        },
        "required": ["key", "operator"],
        "x-kubernetes-validations": rules
    })
}

/// What the derive cannot say:
/// - `null` means "absent" everywhere. Schemars marks every optional field as nullable, and for a nullable
///   field the API server keeps a `null`, which CEL's `has()` then takes for a value.
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
    if let Some(JSONSchemaPropsOrBool::Schema(additional)) = &mut schema.additional_properties {
        tidy(additional);
    }
}

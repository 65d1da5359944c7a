//! Tests of operators, of the combination of terms, and of errors.

use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

fn labels(of: &[(&str, &str)]) -> BTreeMap<String, String> {
    of.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
}

fn label_matcher(selector: Value) -> Result<LabelMatcher, SelectorError> {
    LabelMatcher::new(&serde_json::from_value(selector).unwrap())
}

fn node_matcher(terms: Value) -> Result<NodeMatcher, SelectorError> {
    NodeMatcher::new(&serde_json::from_value(json!({"nodeSelectorTerms": terms})).unwrap())
}

fn one(key: &str, operator: &str, values: &[&str]) -> Value {
    json!({"key": key, "operator": operator, "values": values})
}

#[test]
fn node_selector_operators_match() {
    let node = labels(&[("zone", "a"), ("cpus", "16"), ("os", "linux")]);
    let cases = [
        (one("zone", "In", &["a", "b"]), true),
        (one("zone", "In", &["b"]), false),
        (one("gpu", "In", &["a"]), false),
        (one("zone", "NotIn", &["a", "b"]), false),
        (one("zone", "NotIn", &["b"]), true),
        (one("gpu", "NotIn", &["a"]), true),
        (one("zone", "Exists", &[]), true),
        (one("gpu", "Exists", &[]), false),
        (one("zone", "DoesNotExist", &[]), false),
        (one("gpu", "DoesNotExist", &[]), true),
        (one("cpus", "Gt", &["15"]), true),
        (one("cpus", "Gt", &["16"]), false),
        (one("cpus", "Lt", &["17"]), true),
        (one("cpus", "Lt", &["16"]), false),
        (one("os", "Gt", &["1"]), false),
        (one("os", "Lt", &["1"]), false),
        (one("gpu", "Lt", &["1"]), false),
        (one("cpus", "Gt", &["-3"]), true),
    ];
    for (requirement, expected) in cases {
        let matcher = node_matcher(json!([{"matchExpressions": [requirement]}])).unwrap();
        assert_eq!(matcher.matches("n1", &node), expected, "{requirement}");
    }
}

#[test]
fn terms_are_ored_and_requirements_anded() {
    let node = labels(&[("zone", "a"), ("os", "linux")]);
    let zone_a = one("zone", "In", &["a"]);
    let zone_b = one("zone", "In", &["b"]);
    let linux = one("os", "In", &["linux"]);
    let named = |names: &[&str]| json!({"matchFields": [one("metadata.name", "In", names)]});
    let cases = [
        (json!([]), false),
        (json!([{}]), false),
        (json!([{}, {"matchExpressions": [zone_a]}]), true),
        (json!([{"matchExpressions": [zone_a, linux]}]), true),
        (json!([{"matchExpressions": [zone_b, linux]}]), false),
        (json!([{"matchExpressions": [zone_b]}, {"matchExpressions": [linux]}]), true),
        (json!([named(&["n1"])]), true),
        (json!([named(&["n2"])]), false),
        (json!([named(&["n2", "n1"])]), true),
        (json!([{"matchFields": [one("metadata.name", "NotIn", &["n1"])]}]), false),
        (
            json!([{"matchFields": [one("metadata.name", "In", &["n1"])], "matchExpressions": [zone_b]}]),
            false,
        ),
    ];
    for (terms, expected) in cases {
        assert_eq!(node_matcher(terms.clone()).unwrap().matches("n1", &node), expected, "{terms}");
    }
}

#[test]
fn named_nodes_are_known_only_if_no_other_can_match() {
    let by_name = |operator: &str, names: &[&str]| one("metadata.name", operator, names);
    let zone = one("zone", "In", &["a"]);
    let cases: [(Value, Option<&[&str]>); 10] = [
        (json!([{"matchFields": [by_name("In", &["a", "b"])]}]), Some(&["a", "b"])),
        (
            json!([{"matchFields": [by_name("In", &["a"])]}, {"matchFields": [by_name("In", &["b"])]}]),
            Some(&["a", "b"]),
        ),
        (json!([{"matchFields": [by_name("In", &["a"])], "matchExpressions": [zone]}]), Some(&["a"])),
        (json!([{"matchFields": [by_name("In", &["a", "b"]), by_name("In", &["b", "c"])]}]), Some(&["b"])),
        (json!([{"matchFields": [by_name("In", &["a"])]}, {"matchExpressions": [zone]}]), None),
        (json!([{"matchFields": [by_name("NotIn", &["a"])]}]), None),
        (json!([{"matchExpressions": [zone]}]), None),
        (json!([{"matchFields": [by_name("NotIn", &["a"]), by_name("In", &["a", "b"])]}]), Some(&["b"])),
        (json!([{}]), Some(&[])),
        (json!([]), Some(&[])),
    ];
    for (terms, expected) in cases {
        let matcher = node_matcher(terms.clone()).unwrap();
        let expected = expected.map(|names| names.iter().copied().collect::<BTreeSet<_>>());
        assert_eq!(matcher.named_nodes(), expected, "{terms}");
    }
}

#[test]
fn selector_errors_name_the_field() {
    let fields = |requirement: Value| node_matcher(json!([{}, {"matchFields": [requirement]}])).map(|_| ());
    let node = |requirement: Value| node_matcher(json!([{"matchExpressions": [requirement]}])).map(|_| ());
    let label = |requirement: Value| label_matcher(json!({"matchExpressions": [requirement]})).map(|_| ());
    let cases = [
        (label(one("a", "In", &[])), "matchExpressions[0]: operator In needs at least one value"),
        (label(one("a", "Gt", &["1"])), "matchExpressions[0]: operator \"Gt\" is not known"),
        (label(one("a", "Exists", &["1"])), "matchExpressions[0]: operator Exists takes no values"),
        (label(one("a", "in", &["1"])), "matchExpressions[0]: operator \"in\" is not known"),
        (
            node(one("a", "Gt", &["x"])),
            "nodeSelectorTerms[0].matchExpressions[0]: operator Gt needs a whole number, not \"x\"",
        ),
        (
            node(one("a", "Lt", &["1", "2"])),
            "nodeSelectorTerms[0].matchExpressions[0]: operator Lt needs exactly one value",
        ),
        (
            fields(one("metadata.uid", "In", &["x"])),
            "nodeSelectorTerms[1].matchFields[0]: field metadata.uid is not supported: use metadata.name",
        ),
        (
            fields(one("metadata.name", "Exists", &[])),
            "nodeSelectorTerms[1].matchFields[0]: operator Exists is not supported: use In or NotIn",
        ),
    ];
    for (result, expected) in cases {
        assert_eq!(result.unwrap_err().to_string(), expected);
    }
}

#[test]
fn label_selector_parts_are_anded_and_empty_matches_all() {
    let both = label_matcher(json!({
        "matchLabels": {"app": "web"},
        "matchExpressions": [one("tier", "NotIn", &["db"])]
    }))
    .unwrap();
    assert!(both.matches(&labels(&[("app", "web")])));
    assert!(!both.matches(&labels(&[("app", "web"), ("tier", "db")])));
    assert!(!both.matches(&labels(&[("tier", "x")])));
    for all in [label_matcher(json!({})).unwrap(), LabelMatcher::from_optional(None).unwrap()] {
        assert!(all.matches_everything() && all.matches(&labels(&[])));
    }
}

fn any_selector() -> impl Strategy<Value = LabelMatcher> {
    let requirement =
        ("[a-c]", 0..4, proptest::collection::vec("[x-z]", 1..3)).prop_map(|(key, operator, values)| {
            let values: Vec<_> = values.iter().map(String::as_str).collect();
            match operator {
                0 => one(&key, "In", &values),
                1 => one(&key, "NotIn", &values),
                2 => one(&key, "Exists", &[]),
                _ => one(&key, "DoesNotExist", &[]),
            }
        });
    proptest::collection::vec(requirement, 0..4)
        .prop_map(|requirements| label_matcher(json!({"matchExpressions": requirements})).unwrap())
}

proptest! {
    /// For every label selector, `NotIn` and `DoesNotExist` are the negations of `In` and `Exists`.
    #[test]
    fn negated_operators_are_complements(key in "[a-c]", value in "[x-z]", labels in proptest::collection::btree_map("[a-c]", "[x-z]", 0..4)) {
        for (operator, negation, values) in [("In", "NotIn", vec![value.as_str()]), ("Exists", "DoesNotExist", vec![])] {
            let is = label_matcher(json!({"matchExpressions": [one(&key, operator, &values)]})).unwrap();
            let is_not = label_matcher(json!({"matchExpressions": [one(&key, negation, &values)]})).unwrap();
            prop_assert_ne!(is.matches(&labels), is_not.matches(&labels));
        }
    }

    /// `and` matches what both match and is_subset_of both, and the result round-trips through the API type.
    #[test]
    fn conjunction_matches_what_both_match(a in any_selector(), b in any_selector(), labels in proptest::collection::btree_map("[a-c]", "[x-z]", 0..4)) {
        let both = a.and(&b);
        prop_assert_eq!(both.matches(&labels), a.matches(&labels) && b.matches(&labels));
        prop_assert!(both.is_subset_of(&a) && both.is_subset_of(&b));
        prop_assert_eq!(&a.and(&b), &b.and(&a));
        prop_assert!(!a.is_subset_of(&b) || !a.matches(&labels) || b.matches(&labels));
        prop_assert_eq!(LabelMatcher::from_optional(both.to_selector().as_ref()).unwrap(), both);
    }

    /// A selector with named nodes matches only these nodes.
    #[test]
    fn only_named_nodes_match(
        terms in proptest::collection::vec(proptest::collection::vec((prop_oneof!["In", "NotIn"], proptest::collection::vec("[a-d]", 1..3)), 0..3), 0..4),
        node in "[a-d]",
    ) {
        let terms: Vec<Value> = terms.iter().map(|names| json!({"matchFields": names.iter().map(|(operator, names)| {
            json!({"key": "metadata.name", "operator": operator, "values": names})
        }).collect::<Vec<_>>()})).collect();
        let matcher = node_matcher(json!(terms)).unwrap();
        if let (Some(names), true) = (matcher.named_nodes(), matcher.matches(&node, &labels(&[]))) {
            prop_assert!(names.contains(node.as_str()));
        }
        prop_assert_eq!(matcher.names_node(&node), matcher.names().contains(node.as_str()));
        if let Some(named) = matcher.named_nodes() {
            prop_assert_eq!(named, matcher.names());
        }
    }
}

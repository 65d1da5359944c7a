//! Whether one label selector selects nothing that another would not: how a rule is found that another
//! one hides.

use std::collections::BTreeSet;

use super::{LabelMatcher, Requirement, Test};

impl LabelMatcher {
    /// Whether every object that this selects is selected by `other` too. A `true` is certain; a `false`
    /// may only mean that it could not be seen from single labels.
    pub fn implies(&self, other: &Self) -> bool {
        other.0.iter().all(|wanted| self.known_of(&wanted.key).implies(wanted))
    }

    fn known_of(&self, key: &str) -> Known<'_> {
        let mut known = Known::default();
        for requirement in self.0.iter().filter(|requirement| requirement.key == key) {
            match &requirement.test {
                Test::In(values) => match &mut known.values {
                    Some(possible) => possible.retain(|value| values.contains(*value)),
                    None => known.values = Some(values.iter().map(String::as_str).collect()),
                },
                Test::NotIn(values) => known.never.extend(values.iter().map(String::as_str)),
                Test::DoesNotExist => known.absent = true,
                Test::Exists | Test::Gt(_) | Test::Lt(_) => known.present = true,
            }
        }
        if let Some(possible) = &mut known.values {
            possible.retain(|value| !known.never.contains(value));
        }
        known
    }
}

/// What a selector makes certain of the label with one key.
#[derive(Default)]
struct Known<'a> {
    /// It is there, with one of these values.
    values: Option<BTreeSet<&'a str>>,
    never: BTreeSet<&'a str>,
    present: bool,
    absent: bool,
}

impl Known<'_> {
    fn implies(&self, wanted: &Requirement) -> bool {
        if let Some(values) = &self.values {
            return values.iter().all(|value| wanted.matches(Some(value)));
        }
        match &wanted.test {
            Test::NotIn(values) => {
                self.absent || values.iter().all(|value| self.never.contains(value.as_str()))
            }
            Test::Exists => self.present,
            Test::DoesNotExist => self.absent,
            Test::In(_) | Test::Gt(_) | Test::Lt(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn matcher(expressions: &Value) -> LabelMatcher {
        LabelMatcher::new(&serde_json::from_value(json!({"matchExpressions": expressions})).unwrap()).unwrap()
    }

    fn one(key: &str, operator: &str, values: &[&str]) -> Value {
        json!({"key": key, "operator": operator, "values": values})
    }

    #[test]
    fn what_is_seen_from_single_labels() {
        let cases = [
            (json!([]), json!([]), true),
            (json!([one("a", "Exists", &[])]), json!([]), true),
            (json!([]), json!([one("a", "Exists", &[])]), false),
            (json!([one("a", "In", &["x"])]), json!([one("a", "In", &["x", "y"])]), true),
            (json!([one("a", "In", &["x", "y"])]), json!([one("a", "In", &["x"])]), false),
            (json!([one("a", "In", &["x"])]), json!([one("a", "Exists", &[])]), true),
            (json!([one("a", "In", &["x"])]), json!([one("a", "NotIn", &["y"])]), true),
            (json!([one("a", "In", &["x"])]), json!([one("b", "In", &["x"])]), false),
            (
                json!([one("a", "In", &["x", "y"]), one("a", "NotIn", &["y"])]),
                json!([one("a", "In", &["x"])]),
                true,
            ),
            (json!([one("a", "NotIn", &["x", "y"])]), json!([one("a", "NotIn", &["x"])]), true),
            (json!([one("a", "NotIn", &["x"])]), json!([one("a", "NotIn", &["x", "y"])]), false),
            (json!([one("a", "DoesNotExist", &[])]), json!([one("a", "NotIn", &["x"])]), true),
            (json!([one("a", "DoesNotExist", &[])]), json!([one("a", "DoesNotExist", &[])]), true),
            (json!([one("a", "Exists", &[])]), json!([one("a", "Exists", &[])]), true),
            (json!([one("a", "Exists", &[])]), json!([one("a", "In", &["x"])]), false),
        ];
        for (narrow, wide, expected) in cases {
            assert_eq!(matcher(&narrow).implies(&matcher(&wide)), expected, "{narrow} implies {wide}");
        }
    }

    fn any_matcher() -> impl Strategy<Value = LabelMatcher> {
        let values = proptest::collection::vec(proptest::sample::select(vec!["x", "y", "z"]), 1..3);
        let expression = ("[ab]", 0usize..4, values).prop_map(|(key, operator, values)| match operator {
            0 => one(&key, "In", &values),
            1 => one(&key, "NotIn", &values),
            2 => one(&key, "Exists", &[]),
            _ => one(&key, "DoesNotExist", &[]),
        });
        proptest::collection::vec(expression, 0..4).prop_map(|all| matcher(&json!(all)))
    }

    proptest! {
        #[test]
        fn what_is_claimed_holds_for_every_object(
            narrow in any_matcher(),
            wide in any_matcher(),
            objects in proptest::collection::vec(proptest::collection::btree_map("[ab]", "[xyz]", 0..3), 20),
        ) {
            let objects: Vec<BTreeMap<String, String>> = objects;
            if narrow.implies(&wide) {
                prop_assert!(objects.iter().filter(|labels| narrow.matches(*labels)).all(|labels| wide.matches(labels)));
            }
            prop_assert!(narrow.implies(&narrow) || !objects.iter().any(|labels| narrow.matches(labels)));
        }
    }
}

//! Implication between label selectors: whether everything that one selects is also selected by another. It is used to find
//! shadowed DrainRules.

use std::collections::BTreeSet;

use super::{LabelMatcher, Requirement, Test};

impl LabelMatcher {
    /// Whether `other` selects every object that this selector selects. `true` is certain. `false` can be wrong, because each
    /// label is compared on its own.
    pub fn implies(&self, other: &Self) -> bool {
        other.0.iter().all(|wanted| self.facts_about(&wanted.key).implies(wanted))
    }

    fn facts_about(&self, key: &str) -> LabelFacts<'_> {
        let mut facts = LabelFacts::default();
        for requirement in self.0.iter().filter(|requirement| requirement.key == key) {
            match &requirement.test {
                Test::In(values) => match &mut facts.values {
                    Some(possible) => possible.retain(|value| values.contains(*value)),
                    None => facts.values = Some(values.iter().map(String::as_str).collect()),
                },
                Test::NotIn(values) => facts.excluded.extend(values.iter().map(String::as_str)),
                Test::DoesNotExist => facts.absent = true,
                Test::Exists | Test::Gt(_) | Test::Lt(_) => facts.present = true,
            }
        }
        if let Some(possible) = &mut facts.values {
            possible.retain(|value| !facts.excluded.contains(value));
        }
        facts
    }
}

/// What a selector guarantees about one label key.
#[derive(Default)]
struct LabelFacts<'a> {
    /// The label is present with one of these values.
    values: Option<BTreeSet<&'a str>>,
    excluded: BTreeSet<&'a str>,
    present: bool,
    absent: bool,
}

impl LabelFacts<'_> {
    fn implies(&self, wanted: &Requirement) -> bool {
        if let Some(values) = &self.values {
            return values.iter().all(|value| wanted.matches(Some(value)));
        }
        match &wanted.test {
            Test::NotIn(values) => {
                self.absent || values.iter().all(|value| self.excluded.contains(value.as_str()))
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
    fn selectors_imply_by_single_labels() {
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
        fn implied_selectors_match_the_same_objects(
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

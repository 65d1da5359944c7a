//! Validates the evacuator annotations of pods. An update is rejected only for annotations that it makes invalid. A pod
//! that got invalid annotations while the webhook was unavailable can still be updated.

use std::collections::BTreeMap;

use haulout_api_types::evacuators;
use serde::Deserialize;

use super::{Cause, Verdict};

/// The fields of a pod that the rules read.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Pod {
    #[serde(default)]
    metadata: Metadata,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Metadata {
    annotations: Option<BTreeMap<String, String>>,
}

impl Pod {
    fn annotations(&self) -> &BTreeMap<String, String> {
        static NONE: BTreeMap<String, String> = BTreeMap::new();
        self.metadata.annotations.as_ref().unwrap_or(&NONE)
    }
}

/// Validates a new or changed pod.
pub fn validate(old: Option<&Pod>, new: &Pod) -> Verdict {
    let mut verdict = Verdict::default();
    let (_, before) = old.map(|old| evacuators::read(old.annotations())).unwrap_or_default();
    let (_, violations) = evacuators::read(new.annotations());
    for violation in violations {
        let value = |pod: &Pod| pod.annotations().get(&violation.annotation).cloned();
        let untouched = old.is_some_and(|old| value(old) == value(new));
        if !(untouched && before.contains(&violation)) {
            verdict.deny(Cause::Annotation, violation.to_string());
        }
    }
    verdict
}

#[cfg(test)]
mod tests {
    use super::*;
    use haulout_api_types::names::EVACUATOR_ANNOTATION_PREFIX;
    use proptest::prelude::*;
    use serde_json::json;

    fn pod(annotations: &[(&str, &str)]) -> Pod {
        let annotations: BTreeMap<_, _> = annotations
            .iter()
            .map(|(class, value)| (format!("{EVACUATOR_ANNOTATION_PREFIX}{class}"), *value))
            .collect();
        serde_json::from_value(json!({"metadata": {"annotations": annotations}})).unwrap()
    }

    /// The classes whose annotations are rejected.
    fn denied(old: Option<&Pod>, new: &Pod) -> Vec<String> {
        let verdict = validate(old, new);
        let class = |message: &str| {
            let rest = message.split_once(EVACUATOR_ANNOTATION_PREFIX).unwrap().1;
            rest.split_once(": ").unwrap().0.to_owned()
        };
        verdict.violations.iter().map(|violation| class(&violation.message)).collect()
    }

    #[test]
    fn every_invalid_annotation_of_a_new_pod_is_listed() {
        let bad = pod(&[
            ("a.example.com", "high"),
            ("b.example.com", "100001"),
            ("c.example.com", "10000"),
            ("d.example.com", "9/controller"),
            ("E_x", "1"),
            ("f.example.com", "10000/controller"),
            ("g.example.com", "10000/controller"),
            ("h.example.com", "5/x"),
        ]);
        let expected =
            ["E_x", "a.example.com", "b.example.com", "c.example.com", "d.example.com", "g.example.com"];
        assert_eq!(denied(None, &bad), expected);
        assert_eq!(
            validate(None, &pod(&[("a.example.com", "1"), ("b.example.com", "10000/controller")])),
            Verdict::default()
        );
        assert_eq!(validate(None, &serde_json::from_value(json!({})).unwrap()), Verdict::default());
    }

    #[test]
    fn update_rejects_only_newly_invalid_annotations() {
        type Annotations<'a> = &'a [(&'a str, &'a str)];
        let bad: Annotations = &[("a.example.com", "high"), ("c.example.com", "10000/controller")];
        let with = |more: &[(&str, &str)]| pod(&[bad, more].concat());
        let cases: [(Annotations, &[&str]); 7] = [
            (&[], &[]),
            (&[("x.example.com", "1")], &[]),
            (&[("x.example.com", "low")], &["x.example.com"]),
            (&[("d.example.com", "10000/controller")], &["d.example.com"]),
            // The existing one is now the second in alphabetical order.
            (&[("b.example.com", "10000/controller")], &["c.example.com"]),
            (&[("a.example.com", "higher")], &["a.example.com"]),
            (&[("a.example.com", "5")], &[]),
        ];
        for (more, expected) in cases {
            assert_eq!(denied(Some(&pod(bad)), &with(more)), expected, "{more:?}");
        }
        assert_eq!(denied(Some(&pod(bad)), &pod(&[])), [""; 0], "annotations can always be removed");
    }

    #[test]
    fn at_most_one_hundred_evacuators_are_accepted() {
        let names: Vec<_> = (0..100).map(|i| format!("e{i:02}.example.com")).collect();
        let many = |count: usize| {
            let mut all: Vec<_> = names.iter().take(count).map(|name| (name.as_str(), "5")).collect();
            all.push(("z.example.com", "10000/controller"));
            pod(&all)
        };
        assert_eq!(denied(None, &many(99)), [""; 0]);
        assert_eq!(denied(None, &many(100)), ["e99.example.com"]);
        assert_eq!(denied(Some(&many(100)), &many(100)), [""; 0]);
    }

    proptest! {
        #[test]
        fn unchanged_pod_is_never_rejected(
            annotations in proptest::collection::btree_map("[a-c._A]{0,4}", "(1|10000|x)?(/(controller|r))?", 0..6),
        ) {
            let annotations: Vec<_> = annotations.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
            let pod = pod(&annotations);
            prop_assert_eq!(validate(Some(&pod), &pod), Verdict::default());
        }
    }
}

//! Tables and properties of policies: what matches, and what is rejected with which line.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::testing::taint;

type Given = &'static [(&'static str, &'static str)];

fn labels(of: &[(&str, &str)]) -> BTreeMap<String, String> {
    of.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
}

fn policy(yaml: &str) -> Policy {
    Policy::from_yaml(yaml).unwrap()
}

const DATABASES_FIRST: &str = "
rules:
- key: node.kubernetes.io/*
  podSelector: {matchLabels: {app: db}}
  namespaceSelector:
    matchExpressions:
    - {key: tier, operator: In, values: [prod, staging]}
  action: Evacuate
- key: example.com/repair
  value: later
  action: Ignore
- key: '*'
  podSelector: {matchExpressions: [{key: app, operator: Exists}]}
  action: Evict
- key: node.kubernetes.io/unreachable
  action: Delete
  forceDeleteAfter: 10m
";

#[test]
fn first_matching_rule_applies_and_default_is_delete() {
    let policy = policy(DATABASES_FIRST);
    let cases: [(&str, Given, Given, Action); 7] = [
        ("node.kubernetes.io/unreachable", &[("app", "db")], &[("tier", "prod")], Action::Evacuate),
        ("node.kubernetes.io/not-ready", &[("app", "db")], &[("tier", "test")], Action::Evict),
        ("example.com/repair=later", &[("app", "db")], &[], Action::Ignore),
        ("example.com/repair=now", &[("app", "db")], &[("tier", "prod")], Action::Evict),
        ("example.com/repair", &[], &[], Action::Delete),
        ("node.kubernetes.io/unreachable", &[], &[], Action::Delete),
        ("k", &[("app", "")], &[], Action::Evict),
    ];
    for (on_node, pod, namespace, expected) in cases {
        let found = policy.removal(&taint(on_node, 0), &labels(pod), &labels(namespace)).action;
        assert_eq!(found, expected, "{on_node} {pod:?} {namespace:?}");
    }
    assert!(policy.needs_namespaces());
}

#[test]
fn force_delete_after_is_that_of_the_matching_rule() {
    let policy = policy(DATABASES_FIRST);
    let force = |on_node, pod: &[(&str, &str)]| {
        policy.removal(&taint(on_node, 0), &labels(pod), &labels(&[])).force_delete_after
    };
    assert_eq!(force("node.kubernetes.io/unreachable", &[]), Some(SignedDuration::from_mins(10)));
    assert_eq!(force("node.kubernetes.io/unreachable", &[("app", "x")]), None);
    assert_eq!(force("node.kubernetes.io/out-of-service", &[]), None);
}

#[test]
fn without_rules_pods_are_deleted() {
    for policy in [Policy::default(), policy("rules: []")] {
        assert_eq!(policy.removal(&taint("k", 0), &labels(&[]), &labels(&[])), Removal::default());
        assert!(!policy.needs_namespaces());
    }
}

#[test]
fn pod_can_request_a_gentler_action_but_not_to_stay() {
    let all = [Action::Delete, Action::Evict, Action::Evacuate, Action::Ignore];
    let cases = [
        ("Delete", all),
        ("Evict", [Action::Evict, Action::Evict, Action::Evacuate, Action::Ignore]),
        ("Evacuate", [Action::Evacuate, Action::Evacuate, Action::Evacuate, Action::Ignore]),
        ("Ignore", all),
        ("evict", all),
        ("", all),
    ];
    for (asked, expected) in cases {
        let found = all.map(|action| {
            let policy = policy(&format!("rules: [{{key: '*', action: {action:?}}}]"));
            policy.removal(&taint("k", 0), &labels(&[(TAINT_ACTION_LABEL, asked)]), &labels(&[])).action
        });
        assert_eq!(found, expected, "{asked}");
    }
}

#[test]
fn invalid_policy_is_rejected_with_line_and_advice() {
    let cases = [
        ("", "line 1, column 1: there are no rules: use \"rules: []\""),
        ("# only\n\n  # comments\n", "line 1, column 1: there are no rules"),
        ("rules", "line 1"),
        ("rule: []", "line 1, column 1: unknown field `rule`"),
        ("{}", "missing field `rules`"),
        ("rules:\n- key: k\n  action: Drain\n", "line 3, column 11: unknown variant `Drain`"),
        ("rules:\n- key: k\n  action: Evict\n  colour: red\n", "line 4, column 3: unknown field `colour`"),
        ("rules:\n- key: k\n  action: Evict\n  action: Delete\n", "line 4, column 3: duplicate"),
        ("rules:\n- key: k\n  action: Evict\n- value: v\n", "line 4, column 3: missing field `key`"),
        ("rules:\n\n- key: k\n  value: v\n", "line 3, column 3: action is missing: set Delete"),
        ("rules:\n- key: ''\n  action: Evict\n", "line 2, column 8: an empty key matches no taint"),
        ("rules:\n- key: 'a b'\n  action: Evict\n", "line 2, column 8: \"a b\" matches no taint"),
        (
            "rules:\n- key: k\n  action: Evict\n  forceDeleteAfter: 1m\n",
            "line 4, column 21: forceDeleteAfter is only allowed for",
        ),
        (
            "rules:\n- key: '*'\n  action: Evict\n  forceDeleteAfter: 60\n",
            "line 4, column 21: \"60\" is not a duration",
        ),
        (
            "rules:\n- key: '*'\n  action: Evict\n  forceDeleteAfter: -1m\n",
            "line 4, column 21: \"-1m\" is not a duration",
        ),
        (
            "rules:\n- key: k\n  action: Evict\n  podSelector:\n    matchExpressions:\n    - {key: a, operator: In}\n",
            "line 5, column 5: podSelector.matchExpressions[0]: operator In needs at least one value",
        ),
        (
            "rules:\n- key: k\n  action: Evict\n  namespaceSelector: {matchLabel: {a: b}}\n",
            "line 4, column 23: unknown field `matchLabel`",
        ),
        ("rules:\n  - key: k\n action: x\n", "line 3"),
        ("rules: [{key: k, action: Evict}]\n---\nrules: []\n", "line 3, column 1: multiple"),
        ("rules: null\n", "line 1, column 8: there are no rules"),
        ("\nrules:\n# - key: k\n", "line 2, column 6: there are no rules"),
    ];
    for (yaml, expected) in cases {
        let problem =
            Policy::from_yaml(yaml).map_or_else(|error| error.to_string(), |read| format!("{read:?}"));
        assert!(problem.contains(expected), "{yaml:?} gave {problem:?}, not {expected:?}");
        assert!(!problem.contains('\n'), "{problem:?}");
    }
}

#[test]
fn durations_have_units() {
    for (text, seconds) in [("0s", 0), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("2h", 7200)] {
        let yaml = format!("rules: [{{key: '*', action: Delete, forceDeleteAfter: {text}}}]");
        let found = policy(&yaml).rules[0].removal.force_delete_after;
        assert_eq!(found, Some(SignedDuration::from_secs(seconds)), "{text}");
    }
}

#[test]
fn asterisk_matches_any_number_of_characters() {
    let cases = [
        ("*", "", true),
        ("*", "a/b", true),
        ("a", "a", true),
        ("a", "ab", false),
        ("a*", "a", true),
        ("a*", "ba", false),
        ("*a", "ba", true),
        ("*a", "ab", false),
        ("a*b", "ab", true),
        ("a*a", "a", false),
        ("a*b*c", "a-b-b-c", true),
        ("a*b*c", "a-c-b", false),
        ("*b*", "abc", true),
        ("**", "x", true),
        ("a**b", "ab", true),
        ("*ab*ab", "ab", false),
        ("node.kubernetes.io/*", "node.kubernetes.io/unreachable", true),
        ("node.kubernetes.io/*", "nodeXkubernetes.io/unreachable", false),
    ];
    for (pattern, key, expected) in cases {
        assert_eq!(Glob::new(pattern.into()).unwrap().matches(key), expected, "{pattern} {key}");
    }
}

proptest! {
    /// Compares with a simple recursive definition.
    #[test]
    fn globs_match_as_defined(pattern in "[ab*]{1,8}", key in "[ab]{0,8}") {
        fn defined(pattern: &[u8], key: &[u8]) -> bool {
            match pattern.split_first() {
                None => key.is_empty(),
                Some((b'*', rest)) => (0..=key.len()).any(|skipped| defined(rest, &key[skipped..])),
                Some((c, rest)) => key.first() == Some(c) && defined(rest, &key[1..]),
            }
        }
        let expected = defined(pattern.as_bytes(), key.as_bytes());
        prop_assert_eq!(Glob::new(pattern).unwrap().matches(&key), expected);
    }

    #[test]
    fn parsing_never_panics_and_errors_have_a_line(yaml in "(rules:\n)?[-a-z:{}\\[\\]*&!'\" \n]{0,60}") {
        if let Err(error) = Policy::from_yaml(&yaml) {
            prop_assert!(error.line >= 1 && error.column >= 1);
        }
    }
}

#[test]
fn documented_policy_works_as_described() {
    let package = std::env::var("CARGO_MANIFEST_DIR").unwrap();
    let page = std::fs::read_to_string(format!("{package}/../../docs/taint-manager.md")).unwrap();
    let yaml = page.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let policy = policy(yaml);
    let database = labels(&[("app.kubernetes.io/component", "database")]);
    let (production, none) = (labels(&[("tier", "production")]), labels(&[]));
    let cases = [
        ("node.kubernetes.io/unreachable", &database, &production, Action::Evacuate, None),
        ("node.kubernetes.io/unreachable", &database, &none, Action::Delete, None),
        ("node.kubernetes.io/out-of-service", &none, &none, Action::Delete, Some(SignedDuration::ZERO)),
        ("example.com/repair=in-place", &none, &none, Action::Ignore, None),
        ("example.com/repair=swap", &none, &none, Action::Evict, None),
    ];
    for (on_node, pod, namespace, action, force_delete_after) in cases {
        let found = policy.removal(&taint(on_node, 0), pod, namespace);
        assert_eq!(found, Removal { action, force_delete_after }, "{on_node}");
    }
}

//! How long a pod tolerates a `NoExecute` taint, by the rules of the API server and the scheduler.

use haulout_service_runtime::pods::Toleration;

use crate::taint::{NO_EXECUTE, Taint};

/// For how long a taint is tolerated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tolerance {
    /// Not at all.
    None,
    /// For this many seconds, of which there is at least one.
    Seconds(i64),
    /// For ever.
    Forever,
}

/// How long these tolerations tolerate the taint. Where several match, the first one counts, as it does in
/// kube-controller-manager: that is how a pod says both "this taint for ever" and "any other for a minute".
pub fn tolerance(tolerations: &[Toleration], taint: &Taint) -> Tolerance {
    let matches = |toleration: &&Toleration| toleration.matches(&taint.key, &taint.value, NO_EXECUTE);
    match tolerations.iter().find(matches).map(|used| used.seconds) {
        Some(None) => Tolerance::Forever,
        Some(Some(seconds)) if seconds > 0 => Tolerance::Seconds(seconds),
        Some(Some(_)) | None => Tolerance::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{taint, tolerations};
    use serde_json::{Value, json};

    fn judge(of_pod: Value, taint_text: &str) -> Tolerance {
        tolerance(&tolerations(of_pod), &taint(taint_text, 0))
    }

    #[test]
    fn key_value_operator_and_effect_decide_whether_a_toleration_matches() {
        let cases = [
            ("k=v", json!({"key": "k", "operator": "Equal", "value": "v", "effect": "NoExecute"}), true),
            ("k=v", json!({"key": "k", "value": "v"}), true),
            ("k=v", json!({"key": "k", "value": "w"}), false),
            ("k=v", json!({"key": "k"}), false),
            ("k", json!({"key": "k"}), true),
            ("k", json!({"key": "k", "operator": "Equal", "value": ""}), true),
            ("k=v", json!({"key": "l", "value": "v"}), false),
            ("k=v", json!({"key": "k", "operator": "Exists"}), true),
            ("k=v", json!({"key": "l", "operator": "Exists"}), false),
            ("k=v", json!({"operator": "Exists"}), true),
            ("k=v", json!({"operator": "Exists", "effect": "NoExecute"}), true),
            ("k=v", json!({"operator": "Exists", "effect": "NoSchedule"}), false),
            ("k=v", json!({"key": "k", "value": "v", "effect": "PreferNoSchedule"}), false),
            ("k=v", json!({"key": "k", "value": "v", "effect": ""}), true),
            ("k=v", json!({"key": "k", "operator": "", "value": "v"}), true),
            ("k=v", json!({"key": "k", "operator": "exists"}), false),
            ("k=v", json!({"key": "k", "operator": "In", "value": "v"}), false),
            ("k=v", json!({}), false),
            ("k", json!({}), true),
        ];
        for (on_node, toleration, expected) in cases {
            let expected = if expected { Tolerance::Forever } else { Tolerance::None };
            assert_eq!(judge(json!([toleration.clone()]), on_node), expected, "{on_node} {toleration}");
        }
    }

    #[test]
    fn numbers_are_compared_only_if_both_are_written_as_people_write_them() {
        let cases = [
            ("Gt", "5", "6", true),
            ("Gt", "5", "5", false),
            ("Gt", "5", "4", false),
            ("Lt", "5", "4", true),
            ("Lt", "5", "5", false),
            ("Lt", "5", "6", false),
            ("Lt", "0", "-3", true),
            ("Gt", "-10", "-3", true),
            ("Gt", "9223372036854775806", "9223372036854775807", true),
            ("Gt", "5", "9223372036854775808", false),
            ("Gt", "5", "06", false),
            ("Gt", "05", "6", false),
            ("Gt", "5", "+6", false),
            ("Gt", "-1", "-0", false),
            ("Gt", "5", "6.0", false),
            ("Gt", "5", "", false),
            ("Gt", "", "6", false),
            ("Gt", "five", "6", false),
            ("Gt", "5", " 6", false),
        ];
        for (operator, bound, value, expected) in cases {
            let toleration = json!({"key": "k", "operator": operator, "value": bound});
            let expected = if expected { Tolerance::Forever } else { Tolerance::None };
            assert_eq!(
                judge(json!([toleration]), &format!("k={value}")),
                expected,
                "{value} {operator} {bound}"
            );
        }
    }

    #[test]
    fn the_first_toleration_that_matches_says_for_how_long() {
        let seconds = |seconds: i64| json!({"key": "k", "operator": "Exists", "tolerationSeconds": seconds});
        let forever = json!({"operator": "Exists"});
        let other = json!({"key": "other", "operator": "Exists", "tolerationSeconds": 1});
        let cases = [
            (json!([]), Tolerance::None),
            (json!([other]), Tolerance::None),
            (json!([seconds(300)]), Tolerance::Seconds(300)),
            (json!([seconds(1)]), Tolerance::Seconds(1)),
            (json!([seconds(0)]), Tolerance::None),
            (json!([seconds(-5)]), Tolerance::None),
            (json!([other, forever]), Tolerance::Forever),
            (json!([forever, seconds(5)]), Tolerance::Forever),
            (json!([seconds(5), forever]), Tolerance::Seconds(5)),
            (json!([seconds(-1), forever]), Tolerance::None),
            (json!([seconds(i64::MAX)]), Tolerance::Seconds(i64::MAX)),
        ];
        for (of_pod, expected) in cases {
            assert_eq!(judge(of_pod.clone(), "k=v"), expected, "{of_pod}");
        }
    }
}

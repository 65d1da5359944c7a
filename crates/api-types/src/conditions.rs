//! Conditions in a status, as every Kubernetes controller writes them, and when a terminating pod is worth one.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// How long a pod may take longer than its grace period before that is reported: kubelets need a moment, too.
pub const TERMINATION_PATIENCE: SignedDuration = SignedDuration::from_mins(1);

/// When a pod that has to have ended by `deadline` is overdue.
pub fn overdue(deadline: Timestamp) -> Timestamp {
    deadline.saturating_add(TERMINATION_PATIENCE).unwrap_or(Timestamp::MAX)
}

/// A condition that has had this status since then.
pub fn condition(type_: &str, is_true: bool, reason: &str, message: &str, since: Timestamp) -> Condition {
    Condition {
        type_: type_.into(),
        status: if is_true { "True" } else { "False" }.into(),
        reason: reason.into(),
        message: message.into(),
        last_transition_time: Time(since),
        observed_generation: None,
    }
}

/// The condition of this type.
pub fn find<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|known| known.type_ == type_)
}

/// Whether there is a condition of this type that is true.
pub fn is_true(conditions: &[Condition], type_: &str) -> bool {
    find(conditions, type_).is_some_and(|known| known.status == "True")
}

/// Adds a condition or replaces the one of its type, which keeps its transition time unless its status changes. They stay
/// sorted by type, so that equal conditions are equal bytes.
pub fn set(conditions: &mut Vec<Condition>, mut condition: Condition) {
    if let Some(known) = conditions.iter_mut().find(|known| known.type_ == condition.type_) {
        if known.status == condition.status {
            condition.last_transition_time = known.last_transition_time.clone();
        }
        *known = condition;
    } else {
        conditions.push(condition);
        conditions.sort_by(|a, b| a.type_.cmp(&b.type_));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transition_time_changes_with_the_status_alone() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let mut all = vec![condition("Z", true, "R", "m", at(1))];
        for (type_, status, now, expected) in [("Z", true, 2, 1), ("Z", false, 3, 3), ("A", true, 4, 4)] {
            set(&mut all, condition(type_, status, "R", &format!("at {now}"), at(now)));
            let known = find(&all, type_).unwrap();
            assert_eq!(
                (known.last_transition_time.0, known.message.as_str()),
                (at(expected), &*format!("at {now}"))
            );
            assert_eq!(is_true(&all, type_), status);
        }
        assert_eq!(all.iter().map(|c| c.type_.as_str()).collect::<Vec<_>>(), ["A", "Z"]);
        assert!(!is_true(&all, "B"));
    }
}

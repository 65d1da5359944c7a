//! Status conditions, and when a terminating pod is overdue.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// How long after its grace period a pod is reported as overdue. Kubelets need some time, too.
pub const TERMINATION_MARGIN: SignedDuration = SignedDuration::from_mins(1);

/// When a pod is overdue that should have terminated by `deadline`.
pub fn overdue(deadline: Timestamp) -> Timestamp {
    deadline.saturating_add(TERMINATION_MARGIN).unwrap_or(Timestamp::MAX)
}

/// A condition with this status since this time.
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

/// Finds the condition of this type.
pub fn find<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|known| known.type_ == type_)
}

/// Whether the condition of this type is true.
pub fn is_true(conditions: &[Condition], type_: &str) -> bool {
    find(conditions, type_).is_some_and(|known| known.status == "True")
}

/// Adds or replaces a condition. The transition time changes only with the status. Conditions are sorted by type, so that
/// equal conditions are equal bytes.
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
    fn transition_time_changes_only_with_the_status() {
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

//! Whether a pod tolerates a taint.

/// A toleration. Empty fields are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Toleration {
    /// The taint's key. Absent, with the operator `Exists`: every key.
    pub key: Option<Box<str>>,
    /// How the value is compared with the taint's value. Absent: `Equal`.
    pub operator: Option<Box<str>>,
    /// The value to compare with the taint's value.
    pub value: Option<Box<str>>,
    /// The taint's effect. Absent: every effect.
    pub effect: Option<Box<str>>,
    /// How long the pod tolerates the taint, in seconds. Absent: forever.
    pub seconds: Option<i64>,
}

impl Toleration {
    /// Whether the toleration matches a taint, by the rules of the API server and the scheduler.
    pub fn matches(&self, key: &str, value: &str, effect: &str) -> bool {
        if self.effect.as_deref().is_some_and(|own| own != effect)
            || self.key.as_deref().is_some_and(|own| own != key)
        {
            return false;
        }
        let own = self.value.as_deref().unwrap_or_default();
        match self.operator.as_deref() {
            None | Some("Equal") => own == value,
            Some("Exists") => true,
            // API servers without these two operators reject pods that use them.
            Some("Lt") => compare(own, value, |bound, value| value < bound),
            Some("Gt") => compare(own, value, |bound, value| value > bound),
            Some(_) => false,
        }
    }
}

fn compare(bound: &str, value: &str, holds: impl Fn(i64, i64) -> bool) -> bool {
    integer(bound).zip(integer(value)).is_some_and(|(bound, value)| holds(bound, value))
}

/// An integer in canonical form: `-7`, `0`, `42`, but not `+42`, `042` or `-0`.
fn integer(text: &str) -> Option<i64> {
    text.parse().ok().filter(|number: &i64| number.to_string() == text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn only_canonical_integers_are_numbers(number: i64, zeros in 0usize..3, plus: bool) {
            let text = format!("{}{}{number}", if plus { "+" } else { "" }, "0".repeat(zeros));
            prop_assert_eq!(integer(&text), (zeros == 0 && !plus).then_some(number));
        }
    }
}

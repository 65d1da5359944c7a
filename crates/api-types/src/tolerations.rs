//! Whether a pod tolerates a taint.

/// A toleration as the API has it; an empty field is an absent one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Toleration {
    /// The taint's key; absent, with the operator `Exists`, it is every key.
    pub key: Option<Box<str>>,
    /// How value and taint are compared; absent it is `Equal`.
    pub operator: Option<Box<str>>,
    /// What the taint's value is compared with.
    pub value: Option<Box<str>>,
    /// The taint's effect; absent it is every effect.
    pub effect: Option<Box<str>>,
    /// For how long it holds; absent it is for ever.
    pub seconds: Option<i64>,
}

impl Toleration {
    /// Whether it matches a taint, by the rules of the API server and the scheduler.
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
            // An API server that does not have these two operators takes no pod that uses them.
            Some("Lt") => compare(own, value, |bound, value| value < bound),
            Some("Gt") => compare(own, value, |bound, value| value > bound),
            Some(_) => false,
        }
    }
}

fn compare(bound: &str, value: &str, holds: impl Fn(i64, i64) -> bool) -> bool {
    integer(bound).zip(integer(value)).is_some_and(|(bound, value)| holds(bound, value))
}

/// A number as people write it: `-7`, `0`, `42`, but not `+42`, `042` or `-0`.
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

//! Backoff for actions that somebody keeps reverting: evacuating pods that return to a node, restoring a cordon, writing
//! an annotation that is removed again.

use jiff::SignedDuration;

/// The delay before the second repetition. It doubles from there.
const INITIAL_DELAY: SignedDuration = SignedDuration::from_secs(10);
/// The longest delay.
const MAX_DELAY: SignedDuration = SignedDuration::from_mins(15);
/// The backoff starts again after this long without a repetition. Longer than the longest delay.
pub const RESET_AFTER: SignedDuration = SignedDuration::from_mins(30);

/// The delay before an action that has been repeated this often is repeated once more. The first repetition is immediate.
pub fn delay(repetitions: u32) -> SignedDuration {
    match repetitions {
        0 => SignedDuration::ZERO,
        repetitions => {
            let factor = 2_i32.saturating_pow(repetitions - 1);
            INITIAL_DELAY.checked_mul(factor).unwrap_or(MAX_DELAY).min(MAX_DELAY)
        }
    }
}

/// How often an action was repeated within this time, if it was reverted immediately each time.
pub fn repetitions_within(elapsed: SignedDuration) -> u32 {
    // The delays were 0 s, 10 s, 20 s, …: 10 s × (2^n - 1) for the n delays that were not 0.
    let delays = elapsed.as_secs().max(0) / INITIAL_DELAY.as_secs();
    1 + delays.saturating_add(1).ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_from_ten_seconds_to_fifteen_minutes() {
        let delays: Vec<_> = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, u32::MAX].map(|n| delay(n).as_secs()).into();
        assert_eq!(delays, [0, 10, 20, 40, 80, 160, 320, 640, 900, 900, 900]);
        assert!(RESET_AFTER > MAX_DELAY);
    }

    #[test]
    fn repetitions_follow_from_elapsed_time() {
        let mut elapsed = SignedDuration::ZERO;
        for repetitions in 0..8 {
            elapsed += delay(repetitions);
            assert_eq!(repetitions_within(elapsed), repetitions + 1, "after {elapsed:?}");
        }
        assert_eq!(repetitions_within(SignedDuration::from_secs(-5)), 1);
    }
}

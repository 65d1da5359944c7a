//! How long to wait before something is done again that somebody keeps undoing: pods that come back to a node, a
//! cordon or an annotation that is taken off.

use jiff::SignedDuration;

/// The wait before the second time. It doubles from then on.
const FIRST: SignedDuration = SignedDuration::from_secs(10);
/// The longest wait.
const MOST: SignedDuration = SignedDuration::from_mins(15);
/// After this long without being undone, it starts from the beginning. Longer than the longest wait.
pub const QUIET: SignedDuration = SignedDuration::from_mins(30);

/// The wait before it is done again, by how often it has been done again before: none the first time.
pub fn after(times: u32) -> SignedDuration {
    match times {
        0 => SignedDuration::ZERO,
        times => FIRST.checked_mul(2_i32.saturating_pow(times - 1)).unwrap_or(MOST).min(MOST),
    }
}

/// How often something must have been done again that has been undone at once each time for this long.
pub fn times_within(elapsed: SignedDuration) -> u32 {
    // The waits before were 0 s, 10 s, 20 s, …: 10 s × (2^n - 1) for n of them that were not 0.
    let waits = elapsed.as_secs().max(0) / FIRST.as_secs();
    1 + waits.saturating_add(1).ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_from_ten_seconds_to_fifteen_minutes() {
        let waits: Vec<_> = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, u32::MAX].map(|n| after(n).as_secs()).into();
        assert_eq!(waits, [0, 10, 20, 40, 80, 160, 320, 640, 900, 900, 900]);
        assert!(QUIET > MOST);
    }

    #[test]
    fn how_often_follows_from_how_long() {
        let mut elapsed = SignedDuration::ZERO;
        for times in 0..8 {
            elapsed += after(times);
            assert_eq!(times_within(elapsed), times + 1, "after {elapsed:?}");
        }
        assert_eq!(times_within(SignedDuration::from_secs(-5)), 1);
    }
}

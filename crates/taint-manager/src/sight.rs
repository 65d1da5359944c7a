//! Whether what we see is the present. While the API server was away, nodes could not report and taints could
//! not be taken back; so after such a gap, and after our own start, nobody has to leave because of old news
//! until nodes have had time to report.

use jiff::{SignedDuration, Timestamp};

use crate::taint::Taint;

/// A gap that is shorter than this cost no node a heartbeat: kubelets send one every ten seconds.
const HARMLESS: SignedDuration = SignedDuration::from_secs(10);

/// What we can see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// Nothing: this is the past.
    Blind,
    /// The present.
    Clear {
        /// When the last gap ended that was long enough to matter.
        regained: Timestamp,
        /// When nodes have had time to report since then.
        settled: Timestamp,
    },
}

impl Sight {
    /// When a deadline because of this taint can be held against a pod. A taint that came after the gap is
    /// news, except for those that tell of missing heartbeats, which may be the gap's own doing.
    pub fn settle(&self, taint: &Taint, due: Timestamp) -> Timestamp {
        match *self {
            Self::Clear { regained, settled } => {
                let doubtful_until = if taint.is_about_heartbeats() { settled } else { regained };
                if taint.since <= doubtful_until { due.max(settled) } else { due }
            }
            Self::Blind => due,
        }
    }
}

/// Keeps account of gaps.
#[derive(Clone, Debug)]
pub struct Gaps {
    settle: SignedDuration,
    gap: Gap,
    regained: Timestamp,
}

#[derive(Clone, Copy, Debug)]
enum Gap {
    None,
    Since(Timestamp),
    /// Nobody knows since when.
    SinceEver,
}

impl Gaps {
    /// At the start nothing has been seen yet, and nobody knows for how long.
    pub fn at_start(settle: SignedDuration) -> Self {
        Self { settle, gap: Gap::SinceEver, regained: Timestamp::MIN }
    }

    /// What we see may be the past from now on.
    pub fn begin(&mut self, now: Timestamp) {
        if matches!(self.gap, Gap::None) {
            self.gap = Gap::Since(now);
        }
    }

    /// We see the present again.
    pub fn end(&mut self, now: Timestamp) {
        match std::mem::replace(&mut self.gap, Gap::None) {
            Gap::Since(began) if now.duration_since(began) >= HARMLESS => self.regained = now,
            Gap::SinceEver => self.regained = now,
            Gap::None | Gap::Since(_) => {}
        }
    }

    /// What we can see now.
    pub fn sight(&self) -> Sight {
        let Gap::None = self.gap else { return Sight::Blind };
        let settled = self.regained.saturating_add(self.settle).unwrap_or(Timestamp::MAX);
        Sight::Clear { regained: self.regained, settled }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{at, taint};

    fn gaps() -> Gaps {
        Gaps::at_start(SignedDuration::from_secs(60))
    }

    fn clear(regained: i64) -> Sight {
        Sight::Clear { regained: at(regained), settled: at(regained + 60) }
    }

    #[test]
    fn the_start_is_a_gap_and_so_is_an_outage_but_a_hiccup_is_not() {
        let mut gaps = gaps();
        assert_eq!(gaps.sight(), Sight::Blind);
        gaps.end(at(100));
        assert_eq!(gaps.sight(), clear(100));
        gaps.begin(at(200));
        gaps.begin(at(208));
        assert_eq!(gaps.sight(), Sight::Blind);
        gaps.end(at(209));
        assert_eq!(gaps.sight(), clear(100), "nine seconds");
        gaps.begin(at(300));
        gaps.begin(at(308));
        gaps.end(at(310));
        assert_eq!(gaps.sight(), clear(310), "ten seconds");
        gaps.end(at(400));
        assert_eq!(gaps.sight(), clear(310), "there was no gap");
    }

    #[test]
    fn old_news_settle_and_new_ones_do_not_unless_they_are_about_heartbeats() {
        let sight = clear(100);
        let cases = [
            ("k", 50, 90, 160),
            ("k", 50, 150, 160),
            ("k", 50, 170, 170),
            ("k", 100, 100, 160),
            ("k", 101, 101, 101),
            ("node.kubernetes.io/unreachable", 101, 101, 160),
            ("node.kubernetes.io/not-ready", 160, 160, 160),
            ("node.kubernetes.io/unreachable", 161, 161, 161),
            ("node.kubernetes.io/unreachable", 120, 420, 420),
        ];
        for (key, since, due, expected) in cases {
            assert_eq!(sight.settle(&taint(key, since), at(due)), at(expected), "{key} {since} {due}");
        }
    }
}

//! Gaps of our watches. During an outage of the API server, nodes could not report, and taints could not be removed.
//! After a gap and after our start, old taints therefore apply only after a grace period in which nodes can report.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};

use crate::taint::Taint;

/// Shorter gaps are ignored, because they do not delay heartbeats: kubelets send one every ten seconds.
const MIN_GAP: SignedDuration = SignedDuration::from_secs(10);

/// The watches that have to be synced before any pod is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Watch {
    /// Of Evacuations.
    Evacuations,
    /// Of Namespaces.
    Namespaces,
    /// Of Nodes.
    Nodes,
    /// Of Pods.
    Pods,
}

/// All watches.
pub const WATCHES: [Watch; 4] = [Watch::Evacuations, Watch::Namespaces, Watch::Nodes, Watch::Pods];

/// All watches are synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Synced {
    /// When the last gap ended that was long enough to matter.
    pub since: Timestamp,
    /// When the grace period for nodes to report ends.
    pub grace_ends: Timestamp,
}

impl Synced {
    /// When a deadline of this taint takes effect. Taints from before or during the gap apply only after the grace
    /// period. Taints that were added after the gap apply at once, except those about missing heartbeats, which the gap
    /// itself may have caused.
    pub fn effective_deadline(&self, taint: &Taint, due: Timestamp) -> Timestamp {
        let uncertain_until = if taint.is_heartbeat_taint() { self.grace_ends } else { self.since };
        if taint.since <= uncertain_until { due.max(self.grace_ends) } else { due }
    }
}

/// Which watches are interrupted, and since when.
#[derive(Clone, Debug)]
pub struct WatchGaps {
    grace: SignedDuration,
    interrupted: BTreeSet<Watch>,
    /// Since when at least one watch is interrupted.
    gap_since: Option<Timestamp>,
    synced_since: Timestamp,
}

impl WatchGaps {
    /// At the start, no watch is synced, and the length of the gap is unknown. `grace` is the grace period after a gap.
    pub fn new(grace: SignedDuration) -> Self {
        let (gap_since, synced_since) = (Some(Timestamp::MIN), Timestamp::MIN);
        Self { grace, interrupted: WATCHES.into(), gap_since, synced_since }
    }

    /// A watch has been interrupted since this time.
    pub fn begin(&mut self, watch: Watch, since: Timestamp) {
        self.interrupted.insert(watch);
        self.gap_since.get_or_insert(since);
    }

    /// A watch has synced. Returns whether all watches are synced.
    pub fn end(&mut self, watch: Watch, now: Timestamp) -> bool {
        self.interrupted.remove(&watch);
        if !self.interrupted.is_empty() {
            return false;
        }
        if let Some(started) = self.gap_since.take()
            && now.duration_since(started) >= MIN_GAP
        {
            self.synced_since = now;
        }
        true
    }

    /// Since when all watches are synced; `None` during a gap.
    pub fn synced(&self) -> Option<Synced> {
        let since = self.synced_since;
        let grace_ends = since.saturating_add(self.grace).unwrap_or(Timestamp::MAX);
        self.interrupted.is_empty().then_some(Synced { since, grace_ends })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{at, synced_since, taint};

    #[test]
    fn gaps_under_ten_seconds_are_ignored() {
        let mut gaps = WatchGaps::new(SignedDuration::from_secs(60));
        assert_eq!(gaps.synced(), None);
        assert_eq!(WATCHES.map(|watch| gaps.end(watch, at(100))), [false, false, false, true]);
        assert_eq!(gaps.synced(), Some(synced_since(100)));
        gaps.begin(Watch::Nodes, at(200));
        gaps.begin(Watch::Pods, at(208));
        assert_eq!(gaps.synced(), None);
        assert!(!gaps.end(Watch::Nodes, at(208)), "pods are missing");
        assert!(gaps.end(Watch::Pods, at(209)));
        assert_eq!(gaps.synced(), Some(synced_since(100)), "nine seconds");
        gaps.begin(Watch::Nodes, at(300));
        gaps.begin(Watch::Nodes, at(308));
        gaps.end(Watch::Nodes, at(310));
        assert_eq!(gaps.synced(), Some(synced_since(310)), "ten seconds");
        assert!(gaps.end(Watch::Nodes, at(400)));
        assert_eq!(gaps.synced(), Some(synced_since(310)), "there was no gap");
    }

    #[test]
    fn grace_period_is_for_old_and_heartbeat_taints() {
        let synced = synced_since(100);
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
            assert_eq!(
                synced.effective_deadline(&taint(key, since), at(due)),
                at(expected),
                "{key} {since} {due}"
            );
        }
    }
}

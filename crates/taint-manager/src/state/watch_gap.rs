//! Gaps in our watches. While the API server was away, nodes could not report and taints could not be removed. So after a
//! gap, and after our own start, no pod has to leave because of an old taint until nodes have had time to report.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};

use crate::taint::Taint;

/// A gap that is shorter than this cost no node a heartbeat: kubelets send one every ten seconds.
const HARMLESS: SignedDuration = SignedDuration::from_secs(10);

/// The watches that have to be synced before any pod has to leave.
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

/// All of them.
pub const WATCHES: [Watch; 4] = [Watch::Evacuations, Watch::Namespaces, Watch::Nodes, Watch::Pods];

/// All watches are synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Synced {
    /// When the last gap ended that was long enough to matter.
    pub since: Timestamp,
    /// When nodes have had time to report since then.
    pub settled: Timestamp,
}

impl Synced {
    /// When a pod may have to leave because of a deadline by this taint. A taint that was added after the gap counts at
    /// once, except for those about missing heartbeats: the gap itself may be the cause.
    pub fn settle(&self, taint: &Taint, due: Timestamp) -> Timestamp {
        let doubtful_until = if taint.is_about_heartbeats() { self.settled } else { self.since };
        if taint.since <= doubtful_until { due.max(self.settled) } else { due }
    }
}

/// Which watches are interrupted, and since when.
#[derive(Clone, Debug)]
pub struct WatchGaps {
    settle: SignedDuration,
    interrupted: BTreeSet<Watch>,
    /// Since when some of them are.
    gap_since: Option<Timestamp>,
    synced_since: Timestamp,
}

impl WatchGaps {
    /// At the start nothing is synced, and nobody knows for how long nobody watched. `settle` is how long nodes have to
    /// report after a gap.
    pub fn new(settle: SignedDuration) -> Self {
        let (gap_since, synced_since) = (Some(Timestamp::MIN), Timestamp::MIN);
        Self { settle, interrupted: WATCHES.into(), gap_since, synced_since }
    }

    /// A watch is interrupted since this time.
    pub fn begin(&mut self, watch: Watch, since: Timestamp) {
        self.interrupted.insert(watch);
        self.gap_since.get_or_insert(since);
    }

    /// A watch is synced. Returns whether all are.
    pub fn end(&mut self, watch: Watch, now: Timestamp) -> bool {
        self.interrupted.remove(&watch);
        if !self.interrupted.is_empty() {
            return false;
        }
        if let Some(began) = self.gap_since.take()
            && now.duration_since(began) >= HARMLESS
        {
            self.synced_since = now;
        }
        true
    }

    /// Since when all watches are synced; `None` in a gap.
    pub fn synced(&self) -> Option<Synced> {
        let since = self.synced_since;
        let settled = since.saturating_add(self.settle).unwrap_or(Timestamp::MAX);
        self.interrupted.is_empty().then_some(Synced { since, settled })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{at, synced_since, taint};

    #[test]
    fn start_and_outage_are_gaps_and_a_hiccup_is_not() {
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
    fn only_old_taints_and_those_about_heartbeats_settle() {
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
            assert_eq!(synced.settle(&taint(key, since), at(due)), at(expected), "{key} {since} {due}");
        }
    }
}

//! The pending changes of one subscriber. They are merged per pod, so that a slow subscriber neither blocks the cache nor
//! needs memory for more than one change per pod.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Uid;
use super::index::Change;

/// The changes that a subscriber has not fetched yet.
#[derive(Debug, Default)]
pub(super) struct ChangeBuffer {
    pending: Mutex<Pending>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct Pending {
    /// Changes with their sequence number. A pod keeps the number of its first pending change.
    changes: HashMap<Uid, (u64, Change)>,
    next: u64,
}

impl ChangeBuffer {
    /// Appends a change, or merges it with the pending change of the same pod.
    pub(super) fn push(&self, change: Change) {
        let Some(uid) = change.pod().map(|pod| pod.uid) else { return };
        let mut pending = self.pending.lock();
        let number = pending.next;
        pending.next += 1;
        match pending.changes.entry(uid) {
            Entry::Vacant(entry) => {
                entry.insert((number, change));
            }
            Entry::Occupied(mut entry) => {
                let waiting = &mut entry.get_mut().1;
                waiting.new = change.new;
                if waiting.old.is_none() && waiting.new.is_none() {
                    // The pod was created and deleted before the subscriber fetched it.
                    entry.remove();
                }
            }
        }
        drop(pending);
        self.wake.notify_one();
    }

    /// Takes all pending changes, in the order in which the pods first changed. Waits until there is one. No change is lost
    /// if the future is dropped.
    pub(super) async fn drain(&self) -> Vec<Change> {
        loop {
            let waiting = std::mem::take(&mut *self.pending.lock()).changes;
            if !waiting.is_empty() {
                let mut waiting: Vec<_> = waiting.into_values().collect();
                waiting.sort_unstable_by_key(|(number, _)| *number);
                return waiting.into_iter().map(|(_, change)| change).collect();
            }
            self.wake.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::FutureExt as _;

    use super::*;
    use crate::pods::testing::{pod, uid};

    /// Changes of pod number `n` from one phase to another.
    fn change(n: u32, old: Option<&str>, new: Option<&str>) -> Change {
        let pod = |phase: &str| Arc::new(pod(n).with("/status/phase", phase).read());
        Change { old: old.map(pod), new: new.map(pod) }
    }

    #[test]
    fn changes_of_one_pod_are_merged_in_order() {
        let cases: [(&str, Vec<Change>, Vec<Change>); 5] = [
            ("nothing", vec![], vec![]),
            (
                "in order",
                vec![change(2, None, Some("Pending")), change(1, None, Some("Pending"))],
                vec![change(2, None, Some("Pending")), change(1, None, Some("Pending"))],
            ),
            (
                "merged from the first state to the last",
                vec![
                    change(1, Some("Pending"), Some("Running")),
                    change(2, None, Some("Pending")),
                    change(1, Some("Running"), Some("Failed")),
                ],
                vec![change(1, Some("Pending"), Some("Failed")), change(2, None, Some("Pending"))],
            ),
            (
                "came and went",
                vec![change(1, None, Some("Pending")), change(1, Some("Pending"), None)],
                vec![],
            ),
            (
                "gone",
                vec![change(1, Some("Pending"), Some("Running")), change(1, Some("Running"), None)],
                vec![change(1, Some("Pending"), None)],
            ),
        ];
        for (name, pushed, expected) in cases {
            let buffer = ChangeBuffer::default();
            for change in pushed {
                buffer.push(change);
            }
            assert_eq!(buffer.drain().now_or_never().unwrap_or_default(), expected, "{name}");
            assert_eq!(buffer.drain().now_or_never(), None, "{name}: no change is returned twice");
        }
    }

    #[test]
    fn slow_subscriber_holds_at_most_one_change_per_pod() {
        let buffer = ChangeBuffer::default();
        buffer.push(change(0, Some("Pending"), None));
        for n in 1..1000 {
            buffer.push(change(n, None, Some("Pending")));
            buffer.push(change(n, Some("Pending"), Some("Running")));
            buffer.push(change(n, Some("Running"), None));
        }
        let waiting = buffer.drain().now_or_never().unwrap();
        assert_eq!(waiting.iter().filter_map(|c| c.pod()).map(|p| p.uid).collect::<Vec<_>>(), [uid(0)]);
    }
}

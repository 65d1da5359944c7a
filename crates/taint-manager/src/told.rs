//! What people have been told about pods, so that each is told once: that it has to leave, and that it does
//! not have to any longer.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use haulout_service_runtime::events::News;
use haulout_service_runtime::pods::{Pod, Uid};

use crate::decide::{Decision, How, Reason, Verdict};
use crate::events;

/// The pods that wait for a deadline or are being made to leave.
#[derive(Debug, Default)]
pub struct Told(HashMap<Uid, Standing>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Waiting,
    Leaving(How),
}

impl Told {
    /// What people have to be told about a pod that this was decided about; nothing if they know.
    pub fn tell(&mut self, pod: &Pod, decision: &Decision<'_>) -> Option<News> {
        let standing = match decision.verdict {
            Verdict::Hold => return None,
            Verdict::Keep => {
                let stood = self.0.remove(&pod.uid).is_some();
                let stays = !pod.terminating && !pod.is_finished();
                return (stood && stays).then(|| events::cancelled(pod));
            }
            // Nothing was taken back: the same step comes again when nodes have reported.
            Verdict::Wait { .. }
                if matches!(decision.reason, Reason::Settling { .. }) && self.0.contains_key(&pod.uid) =>
            {
                return None;
            }
            Verdict::Wait { .. } => Standing::Waiting,
            Verdict::Leaving { .. } => Standing::Leaving(How::Evacuate),
            Verdict::Act { how, .. } => Standing::Leaving(how),
        };
        let before = match self.0.entry(pod.uid) {
            Entry::Occupied(mut entry) => Some(entry.insert(standing)),
            Entry::Vacant(entry) => {
                entry.insert(standing);
                None
            }
        };
        match (before, decision.verdict) {
            (Some(before), _) if before == standing => None,
            (_, Verdict::Act { how, .. }) => Some(events::leaving(pod, how, decision.reason)),
            // Its toleration was made longer while it was leaving.
            (Some(Standing::Leaving(_)), Verdict::Wait { .. }) => Some(events::cancelled(pod)),
            _ => None,
        }
    }

    /// The pod waits for its turn: nothing to tell.
    pub fn waits(&mut self, pod: Uid) {
        self.0.entry(pod).or_insert(Standing::Waiting);
    }

    /// The pod is gone.
    pub fn forget(&mut self, pod: Uid) {
        self.0.remove(&pod);
    }

    /// How many pods wait for a deadline or are being made to leave.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{at, pod, taint};

    fn wait() -> Verdict {
        Verdict::Wait { until: at(9) }
    }

    fn act(how: How) -> Verdict {
        Verdict::Act { how, due: at(1), again: None }
    }

    fn tell(told: &mut Told, pod: &Pod, verdict: Verdict) -> Option<(&'static str, String)> {
        let reason = Reason::StuckUnreachable;
        let news = told.tell(pod, &Decision { verdict, reason, release: false })?;
        Some((news.reason, news.note))
    }

    #[test]
    fn each_turn_is_told_once() {
        let (mut told, pod) = (Told::default(), pod(1).read());
        let marking = Some(("TaintManagerEviction", "Marking for deletion Pod default/pod-1".to_owned()));
        let cancelling =
            Some(("TaintManagerEviction", "Cancelling deletion of Pod default/pod-1".to_owned()));
        let evicting = Some(("TaintManagerEviction", "Marking for eviction Pod default/pod-1".to_owned()));
        let leaving = Verdict::Leaving { again: None };
        let asking = Some(("TaintManagerEviction", "Asking for evacuation of Pod default/pod-1".to_owned()));
        let steps = [
            (Verdict::Keep, None, 0),
            (wait(), None, 1),
            (wait(), None, 1),
            (Verdict::Hold, None, 1),
            (Verdict::Keep, cancelling.clone(), 0),
            (Verdict::Keep, None, 0),
            (wait(), None, 1),
            (act(How::Evacuate), asking, 1),
            (leaving, None, 1),
            (act(How::Evict), evicting, 1),
            (act(How::Delete), marking, 1),
            (act(How::Delete), None, 1),
            (wait(), cancelling.clone(), 1),
            (Verdict::Keep, cancelling.clone(), 0),
            (leaving, None, 1),
            (Verdict::Keep, cancelling, 0),
        ];
        for (step, (verdict, expected, count)) in steps.into_iter().enumerate() {
            assert_eq!(tell(&mut told, &pod, verdict), expected, "step {step}: {verdict:?}");
            assert_eq!(told.len(), count, "step {step}: {verdict:?}");
        }
    }

    #[test]
    fn waiting_for_nodes_to_report_takes_nothing_back() {
        let (mut told, pod, on_node) = (Told::default(), pod(1).read(), taint("k", 0));
        let settling =
            Decision { verdict: wait(), reason: Reason::Settling { taint: &on_node }, release: false };
        assert_eq!(told.tell(&pod, &settling), None);
        assert_eq!(told.len(), 1, "it waits");
        assert!(tell(&mut told, &pod, act(How::Delete)).is_some());
        assert_eq!(told.tell(&pod, &settling), None);
        assert_eq!(tell(&mut told, &pod, act(How::Delete)), None, "it was told before");
    }

    #[test]
    fn a_pod_that_left_or_finished_was_not_cancelled() {
        for pod in [pod(1).terminating(30, 30), pod(1).with("/status/phase", "Succeeded")] {
            let (mut told, pod) = (Told::default(), pod.read());
            told.waits(pod.uid);
            assert_eq!(tell(&mut told, &pod, Verdict::Keep), None);
            assert_eq!(told.len(), 0);
        }
    }

    #[test]
    fn each_deletion_by_force_is_a_warning_that_says_why() {
        let (mut told, pod) = (Told::default(), pod(1).terminating(30, 30).read());
        let note = "Deleting Pod default/pod-1 by force: it hangs in termination on an unreachable node";
        assert_eq!(tell(&mut told, &pod, act(How::ForceDelete)), Some(("ForcedDeletion", note.into())));
    }
}

//! The Kubernetes events of the taint manager, each published once. Messages are those of kube-controller-manager where
//! it has one, so that dashboards keep working.

use std::collections::HashMap;

use haulout_api_types::names::event;
use haulout_service_runtime::events::{NewEvent, Severity, reference};
use haulout_service_runtime::pods::{Pod, Uid};
use k8s_openapi::api::core::v1::{self as core, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::PartialObjectMetaExt as _;

use crate::decide::{Reason, RemovalAction, Verdict};

/// The reason of kube-controller-manager's events.
pub const EVICTION: &str = event::TAINT_MANAGER_EVICTION;
/// The source of our events.
pub const SOURCE: &str = "haulout-taint-manager";
/// The reason of the condition `DisruptionTarget` that a pod gets right before it is deleted.
pub const CONDITION_REASON: &str = "DeletionByTaintManager";
/// The message of that condition.
pub const CONDITION_MESSAGE: &str = "Taint manager: deleting due to NoExecute taint";

/// The pods that wait for a deadline or are being removed. An event is published only when this changes.
#[derive(Debug, Default)]
pub struct PublishedEvents(HashMap<Uid, PodEvent>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PodEvent {
    Waiting,
    Leaving(RemovalAction),
}

impl PublishedEvents {
    /// Records a decision about a pod, and returns the event to publish, if any.
    pub fn record(&mut self, pod: &Pod, verdict: Verdict, reason: &Reason) -> Option<NewEvent> {
        let event = match verdict {
            Verdict::Hold => return None,
            Verdict::Keep => {
                let was_leaving = self.0.remove(&pod.uid).is_some();
                let stays = !pod.terminating && !pod.is_finished();
                return (was_leaving && stays).then(|| cancelled(pod));
            }
            // The removal is not cancelled: it may be repeated after the grace period.
            Verdict::Wait { .. }
                if matches!(reason, Reason::WatchGapGrace(_)) && self.0.contains_key(&pod.uid) =>
            {
                return None;
            }
            Verdict::Wait { .. } => PodEvent::Waiting,
            Verdict::Leaving { .. } => PodEvent::Leaving(RemovalAction::Evacuate),
            Verdict::Act { how, .. } => PodEvent::Leaving(how),
        };
        match (self.0.insert(pod.uid, event), verdict) {
            (Some(before), _) if before == event => None,
            (_, Verdict::Act { how, .. }) => Some(leaving(pod, how, reason)),
            // Its toleration was extended while it was leaving.
            (Some(PodEvent::Leaving(_)), Verdict::Wait { .. }) => Some(cancelled(pod)),
            _ => None,
        }
    }

    /// The pod waits for the rate limit. This publishes no event.
    pub fn rate_limited(&mut self, pod: Uid) {
        self.0.entry(pod).or_insert(PodEvent::Waiting);
    }

    /// The pod is gone.
    pub fn delete(&mut self, pod: Uid) {
        self.0.remove(&pod);
    }

    /// The number of pods that wait for a deadline or are being removed.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// A pod is being removed.
fn leaving(pod: &Pod, how: RemovalAction, reason: &Reason) -> NewEvent {
    let name = name(pod);
    let note = match how {
        RemovalAction::Delete => format!("Marking for deletion Pod {name}"),
        RemovalAction::Evict => format!("Marking for eviction Pod {name}"),
        RemovalAction::Evacuate => format!("Requesting evacuation of Pod {name}"),
        RemovalAction::ForceDelete => {
            let note = format!("Force-deleting Pod {name}: {reason}");
            return warning(regarding(pod), event::FORCED_DELETION, how.as_str(), note);
        }
    };
    normal(pod, how.as_str(), note)
}

/// A removal is cancelled: the pod stays.
fn cancelled(pod: &Pod) -> NewEvent {
    normal(pod, "Cancel", format!("Cancelling deletion of Pod {}", name(pod)))
}

/// The removal of a pod has failed and is retried.
pub fn failed(pod: &Pod, how: RemovalAction, problem: &str) -> NewEvent {
    let action = match how {
        RemovalAction::Delete => "delete",
        RemovalAction::Evict => "evict",
        RemovalAction::Evacuate => "request evacuation of",
        RemovalAction::ForceDelete => "force-delete",
    };
    let note = format!("Failed to {action} Pod {}, retrying: {problem}", name(pod));
    warning(regarding(pod), event::TAINT_EVICTION_FAILED, how.as_str(), note)
}

/// How to resolve a conflict.
pub const CONFLICT_ADVICE: &str = "run kube-controller-manager with --controllers=*,-taint-eviction-controller, or uninstall the taint manager";

/// Another controller removes pods from tainted nodes too.
pub fn conflict(own: &ObjectReference, source: &str) -> NewEvent {
    let note =
        format!("{source} also removes pods from tainted nodes and bypasses the policy: {CONFLICT_ADVICE}");
    warning(own.clone(), event::CONFLICTING_TAINT_EVICTION, "Watch", note)
}

/// A Node cannot be parsed.
pub fn unreadable(metadata: &ObjectMeta, problem: &str) -> NewEvent {
    let node = reference(&metadata.clone().into_response_partial::<core::Node>());
    let problem = format!(
        "The taint manager cannot parse this Node, so its pods stay: {problem}; upgrade the taint manager or correct the taints"
    );
    warning(node, event::UNREADABLE, "Read", problem)
}

/// A changed policy is invalid.
pub fn policy_rejected(own: &ObjectReference, file: &str, problem: &str) -> NewEvent {
    let note = format!("Policy {file} rejected, keeping the previous policy: {problem}");
    warning(own.clone(), event::POLICY_REJECTED, "Reload", note)
}

fn name(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace, pod.name)
}

fn regarding(pod: &Pod) -> ObjectReference {
    reference(&pod.metadata().into_response_partial::<core::Pod>())
}

fn normal(pod: &Pod, action: &'static str, note: String) -> NewEvent {
    NewEvent { regarding: regarding(pod), severity: Severity::Normal, reason: EVICTION, action, note }
}

fn warning(regarding: ObjectReference, reason: &'static str, action: &'static str, note: String) -> NewEvent {
    NewEvent { regarding, severity: Severity::Warning, reason, action, note }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{at, pod, taint, uid};

    fn wait() -> Verdict {
        Verdict::Wait { until: at(9) }
    }

    fn act(how: RemovalAction) -> Verdict {
        Verdict::Act { how, due: at(1), requeue_at: None }
    }

    fn record(
        published: &mut PublishedEvents,
        pod: &Pod,
        verdict: Verdict,
    ) -> Option<(&'static str, String)> {
        let event = published.record(pod, verdict, &Reason::StuckUnreachable)?;
        Some((event.reason, event.note))
    }

    #[test]
    fn each_change_is_one_event() {
        let (mut published, pod) = (PublishedEvents::default(), pod(1).read());
        let marking = Some(("TaintManagerEviction", "Marking for deletion Pod default/pod-1".to_owned()));
        let cancelling =
            Some(("TaintManagerEviction", "Cancelling deletion of Pod default/pod-1".to_owned()));
        let evicting = Some(("TaintManagerEviction", "Marking for eviction Pod default/pod-1".to_owned()));
        let leaving = Verdict::Leaving { requeue_at: None };
        let requesting =
            Some(("TaintManagerEviction", "Requesting evacuation of Pod default/pod-1".to_owned()));
        let steps = [
            (Verdict::Keep, None, 0),
            (wait(), None, 1),
            (wait(), None, 1),
            (Verdict::Hold, None, 1),
            (Verdict::Keep, cancelling.clone(), 0),
            (Verdict::Keep, None, 0),
            (wait(), None, 1),
            (act(RemovalAction::Evacuate), requesting, 1),
            (leaving, None, 1),
            (act(RemovalAction::Evict), evicting, 1),
            (act(RemovalAction::Delete), marking, 1),
            (act(RemovalAction::Delete), None, 1),
            (wait(), cancelling.clone(), 1),
            (Verdict::Keep, cancelling.clone(), 0),
            (leaving, None, 1),
            (Verdict::Keep, cancelling, 0),
        ];
        for (step, (verdict, expected, count)) in steps.into_iter().enumerate() {
            assert_eq!(record(&mut published, &pod, verdict), expected, "step {step}: {verdict:?}");
            assert_eq!(published.len(), count, "step {step}: {verdict:?}");
        }
    }

    #[test]
    fn watch_gap_grace_period_cancels_nothing() {
        let (mut published, pod, on_node) = (PublishedEvents::default(), pod(1).read(), taint("k", 0));
        let in_grace = Reason::WatchGapGrace(on_node);
        assert_eq!(published.record(&pod, wait(), &in_grace), None);
        assert_eq!(published.len(), 1, "it waits");
        assert!(record(&mut published, &pod, act(RemovalAction::Delete)).is_some());
        assert_eq!(published.record(&pod, wait(), &in_grace), None);
        assert_eq!(
            record(&mut published, &pod, act(RemovalAction::Delete)),
            None,
            "the event was published before"
        );
    }

    #[test]
    fn pod_that_left_or_finished_is_not_cancelled() {
        for pod in [pod(1).terminating(30, 30), pod(1).with("/status/phase", "Succeeded")] {
            let (mut published, pod) = (PublishedEvents::default(), pod.read());
            published.rate_limited(pod.uid);
            assert_eq!(record(&mut published, &pod, Verdict::Keep), None);
            assert_eq!(published.len(), 0);
        }
    }

    #[test]
    fn forced_deletion_is_a_warning_with_its_reason() {
        let (mut published, pod) = (PublishedEvents::default(), pod(1).terminating(30, 30).read());
        let note = "Force-deleting Pod default/pod-1: it is stuck in termination on an unreachable node";
        assert_eq!(
            record(&mut published, &pod, act(RemovalAction::ForceDelete)),
            Some(("ForcedDeletion", note.into()))
        );
    }

    #[test]
    fn events_reference_their_object() {
        let kind =
            |event: NewEvent| (event.regarding.api_version, event.regarding.kind, event.regarding.name);
        let named = |kind: &str, name: &str| (Some("v1".into()), Some(kind.into()), Some(name.into()));
        let node = ObjectMeta { name: Some("node".into()), ..ObjectMeta::default() };
        assert_eq!(kind(unreadable(&node, "x")), named("Node", "node"));
        let pod_event = failed(&pod(1).read(), RemovalAction::Evict, "x");
        assert_eq!(pod_event.regarding.namespace.as_deref(), Some("default"));
        assert_eq!(pod_event.regarding.uid, Some(uid(1).to_string()));
        assert_eq!(kind(pod_event), named("Pod", "pod-1"));
    }
}

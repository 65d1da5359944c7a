//! What keeps a replacement from starting. Structural obstacles do not go away while the old pod stays; lack of room may.

use std::sync::Arc;

use jiff::Timestamp;

use crate::objects::{Pod, Problem, ReplicaSet};

/// What keeps replacements from starting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// It does not go away by waiting.
    Structural(String),
    /// No node has room, or is schedulable.
    Room {
        /// What is missing.
        text: String,
        /// Since when.
        since: Timestamp,
    },
}

/// Finds what keeps all of these pods from starting. `None` if one of them may still become available.
pub fn find(starting: &[&Arc<Pod>], set: Option<&ReplicaSet>) -> Option<Obstacle> {
    if starting.is_empty() {
        let failure = set.and_then(|set| set.failure.as_deref())?;
        return is_rejection(failure)
            .then(|| Obstacle::Structural(format!("no pod can be created: {failure}")));
    }
    let all: Option<Vec<_>> = starting.iter().map(|pod| of_pod(pod)).collect();
    let all = all?;
    let room = all.iter().filter_map(|obstacle| match obstacle {
        Obstacle::Room { since, .. } => Some((*since, obstacle)),
        Obstacle::Structural(_) => None,
    });
    room.min_by_key(|(since, _)| *since)
        .map(|(_, obstacle)| obstacle.clone())
        .or_else(|| all.into_iter().next())
}

fn of_pod(pod: &Pod) -> Option<Obstacle> {
    match pod.problem.as_deref()? {
        Problem::Unschedulable(message, since) => {
            let text = summary(message);
            let structural = is_structural(text);
            let text = text.to_owned();
            Some(if structural {
                Obstacle::Structural(format!("no node can run pod {}: {text}", pod.name))
            } else {
                Obstacle::Room { text, since: *since }
            })
        }
        // These are reported only after the first attempt.
        Problem::Waiting(reason) => {
            matches!(reason.as_ref(), "ImagePullBackOff" | "InvalidImageName" | "ErrImageNeverPull")
                .then(|| Obstacle::Structural(format!("pod {} cannot start: {reason}", pod.name)))
        }
    }
}

/// Whether the API server rejects the pods. Other failures pass.
fn is_rejection(failure: &str) -> bool {
    ["exceeded quota", "forbidden", "denied", "is invalid"].iter().any(|part| failure.contains(part))
}

/// The part of the scheduler's message about why no node fits, without the part about preemption.
pub fn summary(message: &str) -> &str {
    let end = message.find(" preemption:").unwrap_or(message.len());
    message.get(..end).unwrap_or(message).trim_end_matches(['.', ' '])
}

/// Whether no node can run the pod, even if there were more room. The scheduler names the number of nodes for each reason:
/// `0/3 nodes are available: 1 Insufficient memory, 2 node(s) didn't match pod anti-affinity rules`.
fn is_structural(message: &str) -> bool {
    let (_, reasons) = message.split_once("nodes are available: ").unwrap_or(("", message));
    let is = |reason: &str, words: &[&str]| words.iter().any(|word| reason.contains(word));
    let reasons = || reasons.split(", ");
    let room = reasons().any(|reason| is(reason, &["Insufficient ", "Too many pods"]));
    let structural = [
        "anti-affinity",
        "free ports",
        "topology spread constraints",
        "volume node affinity conflict",
        "ReadWriteOncePod",
        "unbound immediate PersistentVolumeClaims",
        "persistentvolumeclaim",
    ];
    !room && reasons().any(|reason| is(reason, &structural))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scheduler_messages_are_classified() {
        let cases = [
            ("0/3 nodes are available: 1 Insufficient memory, 2 node(s) were unschedulable.", false),
            ("0/3 nodes are available: 3 node(s) were unschedulable.", false),
            (
                "0/3 nodes are available: 1 Too many pods, 2 node(s) didn't match pod anti-affinity rules.",
                false,
            ),
            (
                "0/3 nodes are available: 1 node(s) were unschedulable, 2 node(s) didn't match pod anti-affinity rules.",
                true,
            ),
            ("0/2 nodes are available: 2 node(s) didn't have free ports for the requested pod ports.", true),
            ("0/2 nodes are available: 2 node(s) didn't match pod topology spread constraints.", true),
            ("0/2 nodes are available: 2 node(s) had volume node affinity conflict.", true),
            (
                "0/2 nodes are available: 1 node(s) had untolerated taint {a: b}, 1 node(s) didn't match Pod's node affinity/selector.",
                false,
            ),
            ("persistentvolumeclaim \"data\" not found", true),
            ("", false),
        ];
        for (message, expected) in cases {
            assert_eq!(is_structural(summary(message)), expected, "{message}");
        }
    }

    #[test]
    fn summary_leaves_out_preemption() {
        let message = "0/3 nodes are available: 3 Insufficient cpu. preemption: 0/3 nodes are available: 3 No victims found.";
        assert_eq!(summary(message), "0/3 nodes are available: 3 Insufficient cpu");
        assert_eq!(summary("x. "), "x");
    }

    #[test]
    fn only_rejections_of_pods_are_obstacles() {
        let failing = |failure: &str| ReplicaSet { failure: Some(failure.into()), ..crate::testing::set(1) };
        let quota = failing("pods \"web-1\" is forbidden: exceeded quota: pods");
        assert!(
            matches!(find(&[], Some(&quota)), Some(Obstacle::Structural(text)) if text.contains("exceeded quota"))
        );
        assert_eq!(find(&[], Some(&failing("etcdserver: request timed out"))), None);
        assert_eq!(find(&[], None), None);
    }
}

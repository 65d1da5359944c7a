//! Pods that are stuck in termination because their node is down or unreachable. A force-deleted pod may still be
//! running, so pods are force-deleted only if the policy says so, and never on a node that is ready.

use haulout_service_runtime::pods::Pod;
use jiff::{SignedDuration, Timestamp};

use super::{NodeFacts, Reason, RemovalAction, Verdict, View, after};
use crate::taint::UNREACHABLE;

/// Decides about a terminating pod.
pub(super) fn evaluate(view: &View<'_>, node: &NodeFacts, now: Timestamp) -> (Verdict, Reason) {
    let unreachable = node.taints.iter().find(|taint| &*taint.key == UNREACHABLE);
    let candidates = [
        node.out_of_service.as_ref().map(|taint| (taint, Reason::StuckOutOfService)),
        unreachable.map(|taint| (taint, Reason::StuckUnreachable)),
    ];
    let forced = candidates.into_iter().flatten().filter_map(|(taint, reason)| {
        let wait = view.policy.removal(taint, &view.pod.labels, &view.namespace).force_delete_after?;
        let due = after(stuck_since(view.pod, &reason)?.max(taint.since), wait);
        Some((view.effective_deadline(taint, due), due, reason))
    });
    match forced.min_by_key(|(effective, ..)| *effective) {
        None => (Verdict::Keep, Reason::Terminating),
        Some((_, _, Reason::StuckOutOfService)) if node.ready => (Verdict::Keep, Reason::InService),
        Some(_) if node.ready => (Verdict::Keep, Reason::Terminating),
        // The API server removes a pod with grace period 0 at once, unless a finalizer holds it.
        Some(_) if view.pod.deletion_grace_period_seconds() == Some(0) => {
            (Verdict::Keep, Reason::HeldByFinalizer)
        }
        Some((effective, _, reason)) if effective > now => (Verdict::Wait { until: effective }, reason),
        Some(_) if view.synced.is_none() => (Verdict::Hold, Reason::WatchGap),
        Some((_, due, reason)) => {
            (Verdict::Act { how: RemovalAction::ForceDelete, due, requeue_at: None }, reason)
        }
    }
}

/// Since when a pod is stuck. A node that is out of service is down, so the termination grace period does not apply
/// there. On an unreachable node, it applies.
fn stuck_since(pod: &Pod, reason: &Reason) -> Option<Timestamp> {
    let end = pod.deletion_timestamp()?;
    let is_down = *reason == Reason::StuckOutOfService;
    let grace = pod.deletion_grace_period_seconds().filter(|_| is_down).unwrap_or_default();
    Some(end.saturating_sub(SignedDuration::from_secs(grace)).unwrap_or(end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::scenario::{act, on, wait};
    use crate::testing::{pod, synced_since};

    #[test]
    fn stuck_pods_are_force_deleted_only_by_policy() {
        let stuck = pod(1).terminating(100, 30);
        let unreachable = || on(&[(UNREACHABLE, 40)]);
        let forced = "{key: 'node.kubernetes.io/*', action: Delete, forceDeleteAfter: 50s}";
        let gone = "{key: 'node.kubernetes.io/out-of-service', action: Delete, forceDeleteAfter: 0s}";
        let held = pod(1).terminating(100, 0);
        let force = |due| act(RemovalAction::ForceDelete, due);
        let cases = [
            ("no policy", unreachable(), "", &stuck, 500, Verdict::Keep, "Terminating"),
            ("before the deadline", unreachable(), forced, &stuck, 149, wait(150), "StuckUnreachable"),
            ("after the deadline", unreachable(), forced, &stuck, 150, force(150), "StuckUnreachable"),
            (
                "unreachable late",
                on(&[(UNREACHABLE, 120)]),
                forced,
                &stuck,
                150,
                wait(170),
                "StuckUnreachable",
            ),
            (
                "only not ready",
                on(&[("node.kubernetes.io/not-ready", 0)]),
                forced,
                &stuck,
                500,
                Verdict::Keep,
                "Terminating",
            ),
            (
                "in the grace period",
                unreachable().synced(synced_since(140)),
                forced,
                &stuck,
                160,
                wait(200),
                "StuckUnreachable",
            ),
            ("in a gap", unreachable().synced(None), forced, &stuck, 160, Verdict::Hold, "WatchGap"),
            ("held", unreachable(), forced, &held, 500, Verdict::Keep, "HeldByFinalizer"),
            (
                "out of service",
                on(&[]).out_of_service(40, false),
                gone,
                &stuck,
                75,
                force(70),
                "StuckOutOfService",
            ),
            (
                "out of service late",
                on(&[]).out_of_service(80, false),
                gone,
                &stuck,
                85,
                force(80),
                "StuckOutOfService",
            ),
            (
                "out of service, no policy",
                on(&[]).out_of_service(40, false),
                "",
                &stuck,
                500,
                Verdict::Keep,
                "Terminating",
            ),
            (
                "out of service, yet ready",
                on(&[]).out_of_service(40, true),
                gone,
                &stuck,
                75,
                Verdict::Keep,
                "InService",
            ),
            (
                "both",
                unreachable().out_of_service(40, false),
                forced,
                &stuck,
                125,
                force(120),
                "StuckOutOfService",
            ),
            (
                "not terminating",
                on(&[]).out_of_service(40, false),
                gone,
                &pod(1),
                500,
                Verdict::Keep,
                "NotTainted",
            ),
        ];
        for (name, scenario, rules, pod, now, verdict, reason) in cases {
            assert_eq!(scenario.under(rules).decide(pod, now), (verdict, reason.to_owned(), false), "{name}");
        }
        let mut reporting = unreachable();
        reporting.node.ready = true;
        assert_eq!(reporting.under(forced).verdict(&stuck, 500), Verdict::Keep, "its node is back");
        let finished = pod(1).terminating(100, 30).with("/status/phase", "Succeeded");
        assert_eq!(
            unreachable().under(forced).verdict(&finished, 150),
            force(150),
            "its node does not clean up"
        );
    }
}

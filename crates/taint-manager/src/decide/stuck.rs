//! Pods that hang in termination because their node cannot be asked. Taking one by force means that it may
//! still be running somewhere, so it happens only where the policy says so, and never on a node that is ready.

use jiff::{SignedDuration, Timestamp};

use super::{How, NodeFacts, Reason, Verdict, View, after};
use crate::sight::Sight;
use crate::taint::UNREACHABLE;

/// What happens to a terminating pod.
pub(super) fn judge<'a>(view: &View<'a>, node: &NodeFacts, now: Timestamp) -> (Verdict, Reason<'a>) {
    let unreachable = node.taints.iter().find(|taint| &*taint.key == UNREACHABLE);
    let candidates = [
        node.out_of_service.as_ref().map(|taint| (taint, Reason::StuckOutOfService)),
        unreachable.map(|taint| (taint, Reason::StuckUnreachable)),
    ];
    let mut chosen: Option<(Timestamp, Timestamp, Reason<'a>)> = None;
    for (taint, reason) in candidates.into_iter().flatten() {
        let wait = view.policy.removal(taint, &view.pod.labels, &view.namespace).force_delete_after;
        let Some((wait, from)) = wait.zip(counted_from(view, reason)) else { continue };
        let due = after(from.max(taint.since), wait);
        let settled = view.sight.settle(taint, due);
        if chosen.is_none_or(|(best, ..)| settled < best) {
            chosen = Some((settled, due, reason));
        }
    }
    match chosen {
        None => (Verdict::Keep, Reason::Terminating),
        Some((_, _, Reason::StuckOutOfService)) if node.ready => (Verdict::Keep, Reason::InService),
        Some(_) if node.ready => (Verdict::Keep, Reason::Terminating),
        // The API server removes a pod without grace at once, unless somebody holds it.
        Some(_) if view.pod.deletion_grace_period_seconds() == Some(0) => {
            (Verdict::Keep, Reason::HeldByFinalizer)
        }
        Some((settled, _, reason)) if settled > now => (Verdict::Wait { until: settled }, reason),
        Some(_) if view.sight == Sight::Blind => (Verdict::Hold, Reason::Blind),
        Some((_, due, reason)) => (Verdict::Act { how: How::ForceDelete, due, again: None }, reason),
    }
}

/// From when on a pod hangs. A node that is out of service is known to be down, so that the grace period has
/// no meaning there; an unreachable one may still be using it.
fn counted_from(view: &View<'_>, reason: Reason<'_>) -> Option<Timestamp> {
    let end = view.pod.deletion_timestamp()?;
    match reason {
        Reason::StuckOutOfService => {
            let grace = view.pod.deletion_grace_period_seconds().unwrap_or_default();
            Some(end.saturating_sub(SignedDuration::from_secs(grace)).unwrap_or(end))
        }
        _ => Some(end),
    }
}

#[cfg(test)]
mod tests {
    use super::super::world::{act, on, wait};
    use super::*;
    use crate::testing::{clear_since, pod};

    #[test]
    fn stuck_pods_are_taken_by_force_only_where_the_policy_says_so() {
        let stuck = pod(1).terminating(100, 30);
        let unreachable = || on(&[(UNREACHABLE, 40)]);
        let forced = "{key: 'node.kubernetes.io/*', action: Delete, forceDeleteAfter: 50s}";
        let gone = "{key: 'node.kubernetes.io/out-of-service', action: Delete, forceDeleteAfter: 0s}";
        let held = pod(1).terminating(100, 0);
        let force = |due| act(How::ForceDelete, due);
        let cases = [
            ("no policy", unreachable(), "", &stuck, 500, Verdict::Keep, "Terminating"),
            ("within its time", unreachable(), forced, &stuck, 149, wait(150), "StuckUnreachable"),
            ("past its time", unreachable(), forced, &stuck, 150, force(150), "StuckUnreachable"),
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
                "settling",
                unreachable().seen(clear_since(140)),
                forced,
                &stuck,
                160,
                wait(200),
                "StuckUnreachable",
            ),
            ("blind", unreachable().seen(Sight::Blind), forced, &stuck, 160, Verdict::Hold, "Blind"),
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
                "not even asked to leave",
                on(&[]).out_of_service(40, false),
                gone,
                &pod(1),
                500,
                Verdict::Keep,
                "NotTainted",
            ),
        ];
        for (name, world, rules, pod, now, verdict, reason) in cases {
            assert_eq!(world.under(rules).decide(pod, now), (verdict, reason, false), "{name}");
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

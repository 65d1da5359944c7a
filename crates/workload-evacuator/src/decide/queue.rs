//! The queue of pods that have to leave. At most `maxSurge` pods of a Deployment are replaced at once, the one with the oldest
//! Evacuation first.

use jiff::Timestamp;

use super::{
    Action, CACHE_GRACE, Counts, Outcome, Plan, PodView, Report, View, after, last_report, report_if_changed,
};
use crate::objects::{Evac, Owner};
use crate::status;

/// Moves pods while there is room, and reports for the others. `waiting` is sorted.
pub(super) fn decide(
    view: &View,
    counts: &Counts,
    waiting: &[(&PodView, &Evac)],
    now: Timestamp,
    plan: &mut Plan,
) {
    let mut free = view.deployment.max_surge.saturating_sub(counts.moved);
    let mut place = 0_usize;
    for (pod, evac) in waiting {
        if let Some((outcome, message)) = unsupported(view, pod) {
            plan.act(pod, Action::Complete { outcome, message });
            continue;
        }
        if pod.local.volumes.is_none() && !pod.pod.claims.is_empty() {
            plan.act(pod, Action::CheckVolumes);
            continue;
        }
        if free > 0 && has_converged(view, counts, pod) {
            free -= 1;
            let takes_finalizer = !evac.deleted && !pod.local.finalizer_rejected;
            let action = if takes_finalizer && !evac.is_held() {
                Action::Hold
            } else {
                Action::Move { available: available(view, counts) }
            };
            plan.act(pod, action);
            continue;
        }
        place += 1;
        if free > 0 {
            wait_for_set((pod, evac), now, plan);
            continue;
        }
        if !pod.pod.former.exists() && pod.local.rejected.is_none() {
            plan.act(pod, Action::Prefer);
            continue;
        }
        report(view, (pod, evac), place, counts, now, plan);
    }
}

/// The ReplicaSet of the pod is about to create or delete pods, which takes it a moment. If it takes longer, we say so.
fn wait_for_set((pod, evac): (&PodView, &Evac), now: Timestamp, plan: &mut Plan) {
    let due = after(last_report(evac), CACHE_GRACE);
    if now < due {
        plan.wake_at(due);
        return;
    }
    let message = status::not_up_to_date();
    let report = Report { message, progress: false, expected_end: None, no_room: false };
    report_if_changed(evac, report, now, plan, pod);
}

/// The number of pods that serve now, and that are wanted.
fn available(view: &View, counts: &Counts) -> i32 {
    // A pod that is ready serves, even if it is not available yet.
    let serves = |pod: &&PodView| {
        let is_leaving = pod.pod.leaving || pod.pod.ready.is_none();
        !is_leaving && !pod.evac.as_ref().is_some_and(|evac| evac.lets_pod_leave())
    };
    let ready = i32::try_from(view.pods.iter().filter(serves).count()).unwrap_or(i32::MAX);
    ready.max(counts.available).min(view.deployment.replicas)
}

fn has_converged(view: &View, counts: &Counts, pod: &PodView) -> bool {
    let Some(Owner::ReplicaSet(uid)) = pod.pod.owner else { return false };
    view.sets.get(&uid).is_some_and(|set| counts.has_converged(uid, set))
}

/// Why the pod leaves without a replacement.
fn unsupported(view: &View, pod: &PodView) -> Option<(Outcome, String)> {
    let deployment = &view.deployment;
    let no = |message| Some((Outcome::Unsupported, message));
    if deployment.deleted {
        return no(status::deleted(deployment));
    }
    if deployment.opted_out || view.namespace_opted_out {
        return no(status::opted_out(deployment, view.namespace_opted_out));
    }
    if deployment.max_surge == 0 || deployment.replicas == 0 {
        return no(status::unsupported(deployment));
    }
    if pod.pod.ready.is_none() {
        return Some((Outcome::NotReady, status::not_ready(&pod.pod)));
    }
    let set = view.set(pod);
    if set.is_some_and(|set| set.deleted) {
        return no(status::deleted(deployment));
    }
    let obstacle = match (&pod.local.rejected, &pod.local.volumes) {
        (Some(rejected), _) => Some(status::rejected(&pod.pod, rejected)),
        (None, Some(Err(volume))) => Some(volume.to_string()),
        _ => None,
    };
    obstacle.map(|text| (Outcome::Obstructed, status::obstructed(deployment, &text)))
}

/// Reports the place in the queue. When the queue moves, the place is reported at most ten times per deadline.
fn report(
    view: &View,
    (pod, evac): (&PodView, &Evac),
    place: usize,
    counts: &Counts,
    now: Timestamp,
    plan: &mut Plan,
) {
    let progress = counts.changed > last_report(evac);
    let due = after(last_report(evac), evac.deadline / 10);
    let is_first = !evac.message.starts_with(status::IN_QUEUE);
    if !is_first && progress && now < due {
        plan.wake_at(due);
    }
    if is_first || (progress && now >= due) {
        let message = status::queued(view, place);
        plan.act(pod, Action::Report(Report { message, progress: true, expected_end: None, no_room: false }));
    }
}

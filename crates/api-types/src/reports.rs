//! Reports of evacuators: whether an evacuator is active, how often it reports, and the merge patches that it sends.
//! Each patch has the resourceVersion of the Evacuation that was read, so that the API server rejects a report that
//! comes after another evacuator became active. The sender needs the verb `report` on the resource `evacuators` of
//! [`EVACUATION_GROUP`](crate::names::EVACUATION_GROUP), with the active class as name.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};

use crate::evacuation::{CancellationPolicy, Evacuation};

/// Maximum time by which a progress timestamp may be ahead of the reader's clock. A later timestamp counts as now.
pub const MAX_AHEAD: SignedDuration = SignedDuration::from_secs(30);

impl Evacuation {
    /// Whether the evacuator of this class is active and has not completed. If not, it has to stop. It also has to stop
    /// when the evacuation [is cancelled](Evacuation::is_cancelled).
    pub fn is_active(&self, class: &str) -> bool {
        self.status.as_ref().is_some_and(|status| {
            status.active_evacuator_class.as_deref() == Some(class) && !status.active_evacuator_completed
        })
    }
}

/// How often to report progress: ten times within `spec.progressDeadlineSeconds`, so that a few lost reports do no harm.
pub fn interval(evacuation: &Evacuation) -> SignedDuration {
    SignedDuration::from_secs(evacuation.spec.progress_deadline_seconds.into()) / 10
}

/// Reports progress, and whether the evacuation can be cancelled now. Report only real progress.
pub fn progress(
    evacuation: &Evacuation,
    now: Timestamp,
    message: &str,
    expected_finish: Option<Timestamp>,
    cancellation: CancellationPolicy,
) -> Value {
    report(
        evacuation,
        json!({
            "evacuationCancellationPolicy": cancellation,
            "evacuationProgressTimestamp": Time(now),
            "expectedEvacuationFinishTime": expected_finish.map(Time),
            "message": message,
        }),
    )
}

/// Reports that the evacuator has completed, or has nothing to do. The next evacuator becomes active; after the last
/// one the pod is evicted.
pub fn completed(evacuation: &Evacuation, message: &str) -> Value {
    report(evacuation, json!({"activeEvacuatorCompleted": true, "message": message}))
}

fn report(evacuation: &Evacuation, status: Value) -> Value {
    json!({"metadata": {"resourceVersion": evacuation.metadata.resource_version}, "status": status})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evacuation::EvacuationStatus;

    fn evacuation(active: Option<&str>, completed: bool) -> Evacuation {
        let mut evacuation = Evacuation::default();
        evacuation.metadata.resource_version = Some("7".into());
        evacuation.status = Some(EvacuationStatus {
            active_evacuator_class: active.map(Into::into),
            active_evacuator_completed: completed,
            ..EvacuationStatus::default()
        });
        evacuation
    }

    #[test]
    fn class_is_active_until_it_completes() {
        let cases = [
            (None, false, false),
            (Some("a"), false, true),
            (Some("a"), true, false),
            (Some("b"), false, false),
        ];
        for (active, completed, expected) in cases {
            assert_eq!(evacuation(active, completed).is_active("a"), expected, "{active:?} {completed}");
        }
        assert!(!Evacuation::default().is_active("a"));
    }

    #[test]
    fn reports_patch_own_fields_with_the_resource_version() {
        let evacuation = evacuation(Some("a"), false);
        let now = Timestamp::from_second(1_700_000_000).unwrap();
        assert_eq!(
            progress(&evacuation, now, "half", None, CancellationPolicy::Forbid),
            json!({
                "metadata": {"resourceVersion": "7"},
                "status": {
                    "evacuationCancellationPolicy": "Forbid",
                    "evacuationProgressTimestamp": "2023-11-14T22:13:20Z",
                    "expectedEvacuationFinishTime": null,
                    "message": "half",
                },
            })
        );
        assert_eq!(
            completed(&evacuation, "done"),
            json!({
                "metadata": {"resourceVersion": "7"},
                "status": {"activeEvacuatorCompleted": true, "message": "done"},
            })
        );
    }

    #[test]
    fn interval_is_a_tenth_of_the_deadline() {
        let mut evacuation = Evacuation::default();
        evacuation.spec.progress_deadline_seconds = 1800;
        assert_eq!(interval(&evacuation), SignedDuration::from_secs(180));
    }
}

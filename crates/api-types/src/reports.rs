//! What an evacuator writes: how it sees that it is in charge, and the merge patches with which it reports. Each
//! patch carries the resourceVersion of the Evacuation that was looked at, so that a report which comes after
//! somebody else was given control is refused with a conflict instead of taken for theirs.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};

use crate::evacuation::Evacuation;

/// How far a progress time may be ahead of who reads it: clocks differ. One that is further ahead counts as now.
pub const MAX_AHEAD: SignedDuration = SignedDuration::from_secs(30);

impl Evacuation {
    /// Whether the evacuator of this class is in charge and has not done its part yet. If not, it has to stop. It has to
    /// stop as well when the evacuation [is cancelled](Evacuation::is_cancelled).
    pub fn is_active(&self, class: &str) -> bool {
        self.status.as_ref().is_some_and(|status| {
            status.active_evacuator_class.as_deref() == Some(class) && !status.active_evacuator_completed
        })
    }
}

/// Progress has been made. Report it well before `spec.progressDeadlineSeconds` have passed, and only if it is
/// true: a tenth of that time is a good pace.
pub fn progress(
    evacuation: &Evacuation,
    now: Timestamp,
    message: &str,
    expected_finish: Option<Timestamp>,
) -> Value {
    report(
        evacuation,
        json!({
            "evacuationProgressTimestamp": Time(now),
            "expectedEvacuationFinishTime": expected_finish.map(Time),
            "message": message,
        }),
    )
}

/// The evacuator has done its part, or has nothing to do. The next one is given control; after the last one the
/// pod is evicted.
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
    fn only_the_class_in_charge_is_active_and_only_until_it_has_done_its_part() {
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
    fn reports_touch_only_the_evacuators_own_fields_and_name_the_version_they_are_about() {
        let evacuation = evacuation(Some("a"), false);
        let now = Timestamp::from_second(1_700_000_000).unwrap();
        assert_eq!(
            progress(&evacuation, now, "half", None),
            json!({
                "metadata": {"resourceVersion": "7"},
                "status": {
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
}

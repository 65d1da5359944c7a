//! An Evacuation, as observed.

use std::sync::Arc;

use haulout_api_types::evacuation::DEFAULT_PROGRESS_DEADLINE_SECONDS;
use haulout_api_types::names::{condition, instigator, reason};
use haulout_api_types::{Evacuation, bounded, instigators};
use haulout_drain_planner::facts::{Blocked, EvacuationOwnership, Turn};
use jiff::{RoundMode, SignedDuration, Timestamp, TimestampRound, Unit};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use kube::Resource;
use serde::{Deserialize, Serialize};

use super::Version;

/// The fields of an Evacuation that are deserialized.
#[derive(Resource, Clone, Debug, Deserialize, Serialize)]
#[resource(inherit = Evacuation)]
pub struct SlimEvacuation {
    /// The metadata.
    pub metadata: ObjectMeta,
    #[serde(default)]
    spec: SlimEvacuationSpec,
    #[serde(default)]
    status: SlimEvacuationStatus,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimEvacuationSpec {
    progress_deadline_seconds: Option<i32>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimEvacuationStatus {
    active_evacuator_class: Option<String>,
    active_evacuator_completed: bool,
    evacuation_progress_timestamp: Option<Time>,
    expected_evacuation_finish_time: Option<Time>,
    message: String,
    conditions: Vec<Condition>,
    // A string, so that an unknown policy of a later version does not make the Evacuation unreadable.
    evacuation_cancellation_policy: Option<String>,
}

/// An Evacuation, as last observed.
#[derive(Clone, Debug, PartialEq)]
pub struct ObservedEvacuation {
    /// The version of this state.
    pub version: Version,
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Box<str>,
    /// All its finalizers.
    pub finalizers: Box<[Box<str>]>,
    /// Whether it is being deleted. It then accepts no new finalizer.
    pub deleting: bool,
    /// Whether it cannot be cancelled while its pod exists.
    pub forbids_cancellation: bool,
    /// Why the pod cannot leave, according to the condition `Blocked`.
    pub blocked: Option<Blocked>,
    /// The turn of the active evacuator.
    pub turn: Option<Arc<Turn>>,
}

impl ObservedEvacuation {
    /// Keeps what is needed of an Evacuation.
    pub fn new(evacuation: SlimEvacuation) -> Self {
        let SlimEvacuation { metadata, spec, status } = evacuation;
        let version = Version::of(&metadata);
        let turn = turn(&metadata, &spec, &status).map(Arc::new);
        let policy = status.evacuation_cancellation_policy;
        let blocked =
            status.conditions.into_iter().find(|c| c.type_ == condition::BLOCKED && c.status == "True");
        Self {
            version,
            namespace: metadata.namespace.unwrap_or_default().into(),
            name: metadata.name.unwrap_or_default().into(),
            finalizers: metadata.finalizers.into_iter().flatten().map(Into::into).collect(),
            deleting: metadata.deletion_timestamp.is_some(),
            forbids_cancellation: policy.is_some_and(|policy| policy != "Allow"),
            blocked: blocked.map(|c| blocked_by(&c)),
            turn,
        }
    }

    /// The blocker if it is being deleted and is not ours. It accepts no new finalizer, and the pod gets a new Evacuation only
    /// when this one is gone.
    pub fn held(&self) -> Option<Blocked> {
        if !self.deleting || self.is_ours() {
            return None;
        }
        let message = format!(
            "the pod's Evacuation {} is being deleted and held by {}; ask the owner of each finalizer to remove it, then a new Evacuation is created",
            self.name,
            bounded::list(&self.finalizers, 5)
        );
        Some(Blocked { reason: reason::EVACUATION_HELD.into(), message: message.into(), since: None })
    }

    /// Whether it has our instigator finalizer.
    pub fn is_ours(&self) -> bool {
        self.finalizers.iter().any(|known| **known == *our_finalizer())
    }

    /// The instigator, for the planner.
    pub fn instigator(&self) -> EvacuationOwnership {
        match self.is_ours() {
            true if self.forbids_cancellation => EvacuationOwnership::OursUncancellable,
            true => EvacuationOwnership::Ours,
            false => EvacuationOwnership::Foreign,
        }
    }

    /// Its finalizers, with or without ours.
    pub fn finalizers_with_ours(&self, ours: bool) -> Vec<String> {
        let finalizer = our_finalizer();
        let others = self.finalizers.iter().map(ToString::to_string).filter(|known| *known != finalizer);
        others.chain(ours.then(our_finalizer)).collect()
    }
}

/// The blocker that a condition describes. Other programs may set unknown reasons and long messages.
fn blocked_by(condition: &Condition) -> Blocked {
    let reason = reason::known(&condition.reason);
    let message = if reason == reason::OTHER {
        bounded::text(&format!("{}: {}", condition.reason, condition.message))
    } else {
        bounded::text(&condition.message)
    };
    let since = Some(condition.last_transition_time.0);
    Blocked { reason: reason.into(), message: message.into(), since }
}

/// The turn of the active evacuator, if there is one. Its deadline counts from the last progress report, or from the creation
/// of the Evacuation if there was none, as in the evacuation controller.
fn turn(metadata: &ObjectMeta, spec: &SlimEvacuationSpec, status: &SlimEvacuationStatus) -> Option<Turn> {
    let class = status.active_evacuator_class.as_deref().filter(|_| !status.active_evacuator_completed)?;
    let created = metadata.creation_timestamp.as_ref().map(|time| time.0);
    let reported = status.evacuation_progress_timestamp.as_ref().map(|time| time.0);
    let deadline = spec.progress_deadline_seconds.unwrap_or(DEFAULT_PROGRESS_DEADLINE_SECONDS);
    let deadline = SignedDuration::from_secs(deadline.into());
    let until = reported.or(created)?.saturating_add(deadline).unwrap_or(Timestamp::MAX);
    Some(Turn {
        class: bounded::text(class).into(),
        message: bounded::text(&status.message).into(),
        since: created.filter(|_| reported.is_none()),
        until: round_up_to_minute(until),
        expected: status.expected_evacuation_finish_time.as_ref().map(|time| round_up_to_minute(time.0)),
    })
}

fn round_up_to_minute(time: Timestamp) -> Timestamp {
    time.round(TimestampRound::new().smallest(Unit::Minute).mode(RoundMode::Ceil)).unwrap_or(time)
}

fn our_finalizer() -> String {
    instigators::finalizer(instigator::NODE_MAINTENANCE)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn evacuation_has_instigator_and_blocker() {
        let observed = |finalizers: &[&str]| {
            let object = json!({
                "metadata": {"name": "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11-web-1", "finalizers": finalizers},
                "status": {"conditions": [
                    {"type": "Other", "status": "True", "reason": "X", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"},
                    {"type": "Blocked", "status": "True", "reason": "ServerBusy", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"},
                ]},
            });
            ObservedEvacuation::new(serde_json::from_value(object).unwrap())
        };
        let ours = our_finalizer();
        let (with, without) = (observed(&["x", &ours]), observed(&["x"]));
        let instigators = (with.instigator(), without.instigator());
        assert_eq!(instigators, (EvacuationOwnership::Ours, EvacuationOwnership::Foreign));
        assert_eq!(with.finalizers_with_ours(false), ["x"]);
        assert_eq!(without.finalizers_with_ours(true), ["x", &ours]);
        assert_eq!(with.blocked.as_ref().map(|blocked| &*blocked.reason), Some("ServerBusy"));
        assert!(!with.forbids_cancellation);
        let forbids = json!({"metadata": {}, "status": {"evacuationCancellationPolicy": "Forbid"}});
        assert!(ObservedEvacuation::new(serde_json::from_value(forbids).unwrap()).forbids_cancellation);
    }

    #[test]
    fn active_evacuator_has_a_turn_until_its_deadline() {
        let observed = |spec: Value, status: Value| {
            let object = json!({
                "metadata": {"name": "x", "creationTimestamp": "2026-01-01T00:00:10Z"}, "spec": spec, "status": status,
            });
            let turn = ObservedEvacuation::new(serde_json::from_value(object).unwrap()).turn;
            turn.map(|turn| {
                let text = |time: Option<Timestamp>| time.map_or("-".into(), |time| time.to_string());
                let Turn { class, message, since, until, expected } = &*turn;
                format!("{class} {message:?} {} {until} {}", text(*since), text(*expected))
            })
        };
        let spec = json!({"progressDeadlineSeconds": 600});
        let active = |more: Value| {
            let mut status = json!({"activeEvacuatorClass": "a.example.com", "message": "copying"});
            status.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            status
        };
        assert_eq!(observed(spec.clone(), json!({})), None);
        assert_eq!(observed(spec.clone(), active(json!({"activeEvacuatorCompleted": true}))), None);
        assert_eq!(
            observed(spec.clone(), active(json!({}))).unwrap(),
            r#"a.example.com "copying" 2026-01-01T00:00:10Z 2026-01-01T00:11:00Z -"#,
            "without a report, the deadline counts from the creation"
        );
        let reported = |second: u32| {
            let time = format!("2026-01-01T01:00:{second:02}.5Z");
            observed(spec.clone(), active(json!({"evacuationProgressTimestamp": time})))
        };
        assert_eq!(reported(1).unwrap(), r#"a.example.com "copying" - 2026-01-01T01:11:00Z -"#);
        assert_eq!(reported(1), reported(59), "progress reports every second change the turn every minute");
        let expected = active(json!({"expectedEvacuationFinishTime": "2026-01-01T02:00:00Z"}));
        assert_eq!(
            observed(json!({}), expected).unwrap(),
            r#"a.example.com "copying" 2026-01-01T00:00:10Z 2026-01-01T00:31:00Z 2026-01-01T02:00:00Z"#
        );
    }

    #[test]
    fn long_messages_of_others_are_shortened() {
        let object = json!({
            "metadata": {"name": "x"},
            "status": {
                "activeEvacuatorClass": "a.example.com", "message": "m".repeat(32_768),
                "evacuationProgressTimestamp": "2026-01-01T00:00:00Z",
                "conditions": [{"type": "Blocked", "status": "True", "reason": "R".repeat(1_001),
                    "message": "m".repeat(32_768), "lastTransitionTime": "2026-01-01T00:00:00Z"}],
            },
        });
        let observed = ObservedEvacuation::new(serde_json::from_value(object).unwrap());
        let blocked = observed.blocked.unwrap();
        assert_eq!(&*blocked.reason, "Other");
        assert!(blocked.message.starts_with("RRR") && blocked.message.len() <= bounded::MAX_TEXT);
        assert!(observed.turn.unwrap().message.len() <= bounded::MAX_TEXT);
    }

    #[test]
    fn deleted_evacuation_of_others_names_its_finalizers() {
        let held = |deleting: bool, finalizers: &[&str]| {
            let mut object = json!({"metadata": {"name": "x", "finalizers": finalizers}});
            if deleting {
                object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            }
            ObservedEvacuation::new(serde_json::from_value(object).unwrap()).held()
        };
        let blocked = held(true, &["a/b", "c/d"]).unwrap();
        assert_eq!(&*blocked.reason, "EvacuationHeld");
        assert!(blocked.message.contains("held by a/b, c/d;"), "{}", blocked.message);
        assert_eq!(held(false, &["a/b"]), None);
        assert_eq!(held(true, &["a/b", &our_finalizer()]), None, "ours continues");
    }
}

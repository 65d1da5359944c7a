//! The status of an Evacuation: `status.message`, which people read, and the condition `Blocked`.

use std::time::Duration;

use haulout_api_types::names::condition;
use haulout_api_types::{bounded, conditions, instigators};
use haulout_service_runtime::eviction::Failure;
use haulout_service_runtime::pods::Pod;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Map, Value, json};

use crate::decide::EvictionCause;
use crate::events::describe_turn_end;
use crate::record::Record;

/// The status after a failed eviction.
pub fn failed(record: &Record, failure: &Failure, now: Timestamp) -> Map<String, Value> {
    let mut status = blocked(record, failure.reason, &failure.message, now);
    status.insert("failedEvictionCounter".into(), record.failed.saturating_add(1).into());
    status.insert("lastFailedEvictionTime".into(), json!(Time(now)));
    status
}

/// The status while the pod is blocked.
pub fn blocked(record: &Record, reason: &str, message: &str, now: Timestamp) -> Map<String, Value> {
    let mut status = Map::new();
    status.insert("conditions".into(), with_blocked(record, true, reason, message, now));
    status.insert("message".into(), message.into());
    status
}

/// The status when the pod is no longer blocked. A newer message of an evacuator stays.
pub fn unblocked(record: &Record, reason: &str, message: &str, now: Timestamp) -> Map<String, Value> {
    let mut status = Map::new();
    status.insert("conditions".into(), with_blocked(record, false, reason, message, now));
    if record.message_repeats_blocked {
        status.insert("message".into(), message.into());
    }
    status
}

/// All conditions: ours, and those that other programs set.
fn with_blocked(record: &Record, is_true: bool, reason: &str, message: &str, now: Timestamp) -> Value {
    let since = record.blocked.as_ref().filter(|blocked| blocked.is_true == is_true);
    let since = since.map_or(now, |blocked| blocked.since);
    let ours = conditions::condition(condition::BLOCKED, is_true, reason, message, since);
    json!(record.other_conditions.iter().cloned().chain([ours]).collect::<Vec<_>>())
}

/// The message when the first evacuator becomes active.
pub fn activated(class: &str) -> String {
    format!("Evacuator {class} has been asked to evacuate the pod.")
}

/// The message when the next evacuator becomes active.
pub fn switched(from: &str, to: &str, eviction_cause: EvictionCause, deadline: Duration) -> String {
    let what = match eviction_cause {
        EvictionCause::TimedOut => format!("has reported no progress for {} s", deadline.as_secs()),
        EvictionCause::Unserved(since) => {
            format!("cannot act, because its service has had no leader since {since}")
        }
        EvictionCause::NoEvacuator | EvictionCause::Completed => {
            "has completed, but the pod still exists".to_owned()
        }
    };
    format!("Evacuator {from} {what}: evacuator {to} is active now.")
}

/// The message before the Eviction API is called.
pub fn evicting(record: &Record, eviction_cause: EvictionCause) -> String {
    format!("The pod is being evicted: {}.", describe_turn_end(record, eviction_cause))
}

/// The message when an evacuator reports progress after its deadline has passed, or when its service has a leader again.
pub fn progress_resumed(record: &Record) -> String {
    let class = record.active.as_deref().unwrap_or_default();
    format!("Evacuator {class} is active again: the pod is not evicted.")
}

/// The message while the pod terminates.
pub fn terminating(pod: &Pod) -> String {
    match pod.deletion_timestamp() {
        Some(end) => format!("Pod {} is terminating. Its grace period ends at {end}.", pod.name),
        None => format!("Pod {} is terminating.", pod.name),
    }
}

/// The number of finalizers that a message names.
const MAX_NAMED: usize = 5;

/// The message when the evacuation has ended and finalizers hold the Evacuation.
pub fn held(record: &Record, ended: &str) -> String {
    let describe = |finalizer: &str| match instigators::subdomain(finalizer) {
        Some(class) => format!("{finalizer} (evacuator {class} has to clean up)"),
        None => finalizer.to_owned(),
    };
    let named: Vec<_> = record.finalizers.iter().map(|finalizer| describe(finalizer)).collect();
    format!(
        "{ended}, but finalizers keep the Evacuation from being removed: {}. Their owners have to remove them.",
        bounded::list(&named, MAX_NAMED)
    )
}

#[cfg(test)]
mod tests {
    use haulout_api_types::names::reason;
    use haulout_service_runtime::testing::{status_violations, stored_bytes};
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{at, blocked as blocked_by, record};

    const CHARACTERS: [char; 6] = ['a', '<', '"', '\u{1b}', '…', '😀'];

    /// Reads an Evacuation with these conditions of other programs.
    fn with_conditions(conditions: &[Value]) -> Record {
        let evacuation = json!({
            "metadata": {"namespace": "shop", "name": "x", "uid": "eeeeeeee-0000-0000-0000-000000000001",
                "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"podRef": {"name": "web-1", "uid": "00000000-0000-0000-0000-000000000001"}},
            "status": {"conditions": conditions},
        });
        Record::read(serde_json::from_value(evacuation).unwrap(), |text| text.into()).unwrap()
    }

    fn condition(number: usize, reason: &str, message: &str) -> Value {
        json!({"type": format!("{}{number}", "T".repeat(313)), "status": "True", "reason": reason,
            "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"})
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// The conditions are those that the schema allows, and a few more.
        #[test]
        fn status_is_valid_with_any_text_of_others(
            number in 0usize..70,
            character in proptest::sample::select(&CHARACTERS),
            length in prop_oneof![0usize..2000, Just(32_768), Just(100_000)],
        ) {
            let text: String = std::iter::repeat_n(character, length).collect();
            let conditions: Vec<_> = (0..number).map(|n| condition(n, &"R".repeat(1024), &text)).collect();
            let record = with_conditions(&conditions);
            let failure = Failure { reason: reason::SERVER_BUSY, message: bounded::line(&text, 1100) };
            for status in [
                failed(&record, &failure, at(1)),
                blocked(&record, reason::EVACUATION_HELD, &held(&record, "The pod has left"), at(1)),
                unblocked(&record, reason::NOT_BLOCKED, &progress_resumed(&record), at(1)),
            ] {
                let status = Value::from(status);
                prop_assert_eq!(status_violations("Evacuation", &status), Vec::<String>::new());
                prop_assert!(stored_bytes(&status) < 768 * 1024, "{}", stored_bytes(&status));
            }
        }
    }

    #[test]
    fn conditions_of_others_are_kept_with_short_messages() {
        let record =
            with_conditions(&[condition(1, "Mine", "short"), condition(2, "Mine", &"ü".repeat(32_768))]);
        let status = blocked(&record, reason::SERVER_BUSY, "m", at(1));
        let conditions = status["conditions"].as_array().unwrap();
        assert_eq!((conditions.len(), &conditions[0]["message"]), (3, &json!("short")));
        let message = conditions[1]["message"].as_str().unwrap();
        assert!(message.ends_with("ü…") && message.len() <= bounded::MAX_TEXT, "{}", message.len());
    }

    #[test]
    fn held_evacuation_names_the_first_finalizers() {
        let finalizers = (0..10_000).map(|n| format!("{}/{n}", "x".repeat(253)).into()).collect();
        let record = Record { finalizers, blocked: Some(blocked_by("ServerBusy")), ..record(1) };
        let message = held(&record, "The pod has left");
        assert!(message.contains("/4 and 9995 more") && message.len() < 2000, "{message}");
    }
}

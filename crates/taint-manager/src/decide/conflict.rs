//! Detects that another controller, such as kube-controller-manager's taint eviction, removes pods because of the same
//! taints. Such a controller bypasses the policy and the grace period.
//!
//! kube-controller-manager writes an event before it deletes a pod, even if we were faster. A watch of events with that
//! reason and another source therefore always detects it, costs nothing if there is no conflict, and needs no access to
//! the configuration of the other controller. Events from before our start are ignored: they exist for an hour, and the
//! other controller may have been switched off since.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;

use crate::events::{EVICTION, SOURCE};

/// The field selector of the watch, for the core API: its field `source` matches events of both event APIs.
pub fn field_selector() -> String {
    format!("reason={EVICTION},source!={SOURCE}")
}

/// The name of another controller that removes pods from tainted nodes, if this event is from one.
pub fn conflicting_source(event: &Event, started: Timestamp) -> Option<&str> {
    let component = event.source.as_ref().and_then(|source| source.component.as_deref());
    let source = component.or(event.reporting_component.as_deref()).filter(|source| !source.is_empty())?;
    let times = [
        event.series.as_ref().and_then(|series| series.last_observed_time.as_ref()).map(|time| time.0),
        event.last_timestamp.as_ref().map(|time| time.0),
        event.event_time.as_ref().map(|time| time.0),
    ];
    let latest = times.into_iter().flatten().max()?;
    // kube-controller-manager's times have whole seconds, so an event of the second of our start may be new.
    let fresh = latest.as_second() >= started.as_second();
    let counts = event.reason.as_deref() == Some(EVICTION) && source != SOURCE && fresh;
    counts.then_some(source)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::at;
    use serde_json::{Value, json};

    #[test]
    fn only_fresh_evictions_by_others_count() {
        let event = |reason: &str, source: Value, last: i64| {
            let mut event = json!({
                "metadata": {}, "involvedObject": {}, "reason": reason, "lastTimestamp": at(last).to_string(),
            });
            event.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
            event
        };
        let upstream =
            json!({"source": {"component": "taint-eviction-controller"}, "reportingComponent": ""});
        let older = json!({"source": {"component": "taint-controller"}});
        let modern = json!({"source": {}, "reportingComponent": "example.com/evictor"});
        let ours = json!({"reportingComponent": SOURCE});
        let cases = [
            (event(EVICTION, upstream.clone(), 101), Some("taint-eviction-controller")),
            (event(EVICTION, upstream.clone(), 100), Some("taint-eviction-controller")),
            (event(EVICTION, upstream.clone(), 99), None),
            (event("Killing", upstream, 101), None),
            (event(EVICTION, older, 200), Some("taint-controller")),
            (event(EVICTION, modern, 200), Some("example.com/evictor")),
            (event(EVICTION, ours, 200), None),
            (event(EVICTION, json!({}), 200), None),
        ];
        for (json, expected) in cases {
            let event: Event = serde_json::from_value(json.clone()).unwrap();
            let started = Timestamp::from_millisecond(100_999).unwrap();
            assert_eq!(conflicting_source(&event, started), expected, "{json}");
        }
    }

    #[test]
    fn repeated_event_counts_by_its_last_time() {
        let event = json!({
            "metadata": {}, "involvedObject": {}, "reason": EVICTION,
            "source": {"component": "taint-eviction-controller"},
            "eventTime": "1970-01-01T00:00:50.000000Z",
            "series": {"count": 2, "lastObservedTime": "1970-01-01T00:01:50.000000Z"},
        });
        let event: Event = serde_json::from_value(event).unwrap();
        assert_eq!(conflicting_source(&event, at(100)), Some("taint-eviction-controller"));
        assert_eq!(conflicting_source(&event, at(111)), None);
    }
}

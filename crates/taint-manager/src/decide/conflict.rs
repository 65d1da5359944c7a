//! Detects that another controller, such as the cluster's own taint eviction, makes pods leave too, which would make every
//! policy and every settle time pointless.
//!
//! kube-controller-manager writes an event before it deletes a pod, even if we were faster. So a watch on events with that
//! reason and another source shows it for sure, costs nothing where all is well, and needs no access to anybody's
//! configuration. Events from before we began to watch do not count: they live for an hour, and the other controller may
//! have been switched off since.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;

use crate::events::{EVICTION, SOURCE};

/// Selects the events to watch, of the core API: there the field `source` finds those of both event APIs.
pub fn field_selector() -> String {
    format!("reason={EVICTION},source!={SOURCE}")
}

/// The controller that makes pods leave tainted nodes beside us, if this event says so.
pub fn conflicting_source(event: &Event, began: Timestamp) -> Option<&str> {
    let component = event.source.as_ref().and_then(|source| source.component.as_deref());
    let source = component.or(event.reporting_component.as_deref()).filter(|source| !source.is_empty())?;
    let times = [
        event.series.as_ref().and_then(|series| series.last_observed_time.as_ref()).map(|time| time.0),
        event.last_timestamp.as_ref().map(|time| time.0),
        event.event_time.as_ref().map(|time| time.0),
    ];
    let latest = times.into_iter().flatten().max()?;
    // kube-controller-manager's times have no fractions: one of the second in which we began may be news.
    let fresh = latest.as_second() >= began.as_second();
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
            let began = Timestamp::from_millisecond(100_999).unwrap();
            assert_eq!(conflicting_source(&event, began), expected, "{json}");
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

//! A node's `NoExecute` taints, and when each was added. If the taint has no `timeAdded`, the time at which we first
//! observed it is stored in a Node annotation, so that deadlines survive restarts and changes of the leader.
//!
//! While no taint manager is running, a taint can be removed and added again. The annotation therefore also stores when
//! the node's taints last changed, according to `managedFields`. If they have changed since, the stored times are
//! ignored.

use std::collections::BTreeMap;
use std::fmt;

use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta, Time};

/// The taint effect that removes pods.
pub const NO_EXECUTE: &str = "NoExecute";
/// Set by an admin on a node that is shut down. Pods may be force-deleted from it.
pub const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";
/// Set by the node lifecycle controller on a node that sends no heartbeats.
pub const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
/// Set by the node lifecycle controller on a node whose kubelet reports that it is not ready.
pub const NOT_READY: &str = "node.kubernetes.io/not-ready";

/// A taint on a node, with the effect `NoExecute` unless documented otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taint {
    /// Its key.
    pub key: Box<str>,
    /// Its value; empty if it has none.
    pub value: Box<str>,
    /// When it was added, or first observed.
    pub since: Timestamp,
}

impl Taint {
    /// Whether it is about missing heartbeats, which an API server outage may cause.
    pub fn is_heartbeat_taint(&self) -> bool {
        matches!(&*self.key, UNREACHABLE | NOT_READY)
    }
}

impl fmt::Display for Taint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&identity(&self.key, &self.value))
    }
}

/// Identifies a taint among those with the same effect on a node. A taint with a new value is a new taint. Neither keys
/// nor values can contain an equals sign.
fn identity(key: &str, value: &str) -> String {
    if value.is_empty() { key.to_owned() } else { format!("{key}={value}") }
}

/// The entry of the annotation that is not a taint. Taint keys cannot contain a space.
const CHANGED: &str = "taints changed";

/// When a node's taints last changed, according to `managedFields`, in whole seconds. The time also changes when the
/// client that owns the taints writes other fields. `None` if the entry is missing.
pub fn taints_changed(node: &ObjectMeta) -> Option<Timestamp> {
    let owns_taints = |entry: &&ManagedFieldsEntry| {
        let fields = entry.fields_v1.as_ref().and_then(|fields| fields.0.pointer("/f:spec/f:taints"));
        fields.is_some()
    };
    let entries = node.managed_fields.iter().flatten().filter(owns_taints);
    entries.filter_map(|entry| entry.time.as_ref()).map(|Time(time)| *time).max()
}

/// When taints without `timeAdded` were first observed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FirstSeen {
    /// By `key=value` or `key`.
    times: BTreeMap<String, Timestamp>,
    /// When the node's taints had last changed when these times were stored.
    changed: Option<Timestamp>,
}

impl FirstSeen {
    /// Parses the Node annotation. Invalid entries are ignored, and written again later.
    pub fn read(annotation: Option<&str>) -> Self {
        let entries: BTreeMap<String, serde_json::Value> =
            annotation.and_then(|json| serde_json::from_str(json).ok()).unwrap_or_default();
        let time = |value: serde_json::Value| value.as_str().and_then(|text| text.parse().ok());
        let mut times: BTreeMap<_, _> =
            entries.into_iter().filter_map(|(taint, value)| Some((taint, time(value)?))).collect();
        let changed = times.remove(CHANGED);
        Self { times, changed }
    }

    /// The times that still apply to a node that may have been unwatched, and whose taints last changed at this time.
    /// If the taints have changed since the times were stored, every taint may be new, and no time applies.
    #[must_use]
    pub fn unless_changed(mut self, changed: Option<Timestamp>) -> Self {
        match (self.changed, changed) {
            (Some(known), Some(changed)) if known == changed => self,
            // An earlier version of Haulout did not store the change time.
            (None, Some(changed)) => {
                self.times.retain(|_, first_seen| *first_seen >= changed);
                self
            }
            _ => Self::default(),
        }
    }

    /// The value of the annotation; `None` if there is nothing to store.
    pub fn annotation(&self) -> Option<String> {
        let times = self.times.iter().map(|(taint, time)| (taint.as_str(), time));
        let all = times.chain(self.changed.iter().map(|changed| (CHANGED, changed)));
        let all: BTreeMap<_, _> = all.map(|(taint, time)| (taint, time.to_string())).collect();
        (!self.times.is_empty()).then(|| serde_json::json!(all).to_string())
    }

    /// Determines when each relevant taint of the node was added, and which times to store. Times in the future are
    /// ignored. The time of a removed taint is dropped, so that it starts again if the taint is added again.
    pub fn observe(&self, taints: &[core::Taint], changed: Option<Timestamp>, now: Timestamp) -> Observed {
        let now = Timestamp::from_millisecond(now.as_millisecond()).unwrap_or(now);
        let mut observed = Observed::default();
        observed.kept.changed = changed;
        for taint in taints {
            let (evicts, is_out_of_service) = (taint.effect == NO_EXECUTE, taint.key == OUT_OF_SERVICE);
            if !evicts && !is_out_of_service {
                continue;
            }
            let value = taint.value.as_deref().unwrap_or_default();
            let added = taint.time_added.as_ref().map(|Time(added)| *added).filter(|added| *added <= now);
            let since = added.unwrap_or_else(|| {
                let identity = identity(&taint.key, value);
                let first_seen =
                    self.times.get(&identity).copied().filter(|first_seen| *first_seen <= now).unwrap_or(now);
                observed.kept.times.insert(identity, first_seen);
                first_seen
            });
            let taint = Taint { key: taint.key.as_str().into(), value: value.into(), since };
            if is_out_of_service {
                observed.out_of_service = Some(taint.clone());
            }
            if evicts {
                observed.no_execute.push(taint);
            }
        }
        observed
    }
}

/// The relevant taints of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Its taints with the effect `NoExecute`.
    pub no_execute: Vec<Taint>,
    /// Its taint `node.kubernetes.io/out-of-service`, with any effect.
    pub out_of_service: Option<Taint>,
    /// The times to store of taints without `timeAdded`.
    pub kept: FirstSeen,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{at, taint};
    use proptest::prelude::*;
    use serde_json::json;

    fn taints(of_node: serde_json::Value) -> Vec<core::Taint> {
        serde_json::from_value(of_node).unwrap()
    }

    fn first_seen(entries: &[(&str, i64)]) -> FirstSeen {
        let times = entries.iter().map(|(taint, time)| ((*taint).to_owned(), at(*time))).collect();
        FirstSeen { times, changed: None }
    }

    #[test]
    fn taint_counts_from_time_added_or_first_observation() {
        let one = json!([{"key": "k", "value": "v", "effect": "NoExecute"}]);
        let added =
            |second: i64| json!([{"key": "k", "effect": "NoExecute", "timeAdded": at(second).to_string()}]);
        let cases = [
            ("new", one.clone(), first_seen(&[]), 100, first_seen(&[("k=v", 100)])),
            ("observed before", one.clone(), first_seen(&[("k=v", 40)]), 40, first_seen(&[("k=v", 40)])),
            ("another value", one.clone(), first_seen(&[("k=w", 40)]), 100, first_seen(&[("k=v", 100)])),
            ("no value", one.clone(), first_seen(&[("k", 40)]), 100, first_seen(&[("k=v", 100)])),
            ("observed in the future", one, first_seen(&[("k=v", 101)]), 100, first_seen(&[("k=v", 100)])),
            ("has timeAdded", added(30), first_seen(&[]), 30, first_seen(&[])),
            ("has timeAdded in the future", added(900), first_seen(&[]), 100, first_seen(&[("k", 100)])),
            ("has timeAdded, observed before", added(90), first_seen(&[("k", 60)]), 90, first_seen(&[])),
        ];
        for (name, on_node, stored, expected, kept) in cases {
            let observed = stored.observe(&taints(on_node), None, at(100));
            let times: Vec<_> = observed.no_execute.iter().map(|taint| taint.since).collect();
            assert_eq!(times, [at(expected)], "{name}");
            assert_eq!(observed.kept, kept, "{name}");
        }
    }

    #[test]
    fn other_effects_are_ignored_and_removed_taints_dropped() {
        let stored = first_seen(&[("gone", 1), ("soft", 2), ("kept", 3)]);
        let on_node = taints(json!([
            {"key": "soft", "effect": "NoSchedule"},
            {"key": "kept", "effect": "NoExecute"},
            {"key": "new", "effect": "NoExecute"},
        ]));
        let observed = stored.observe(&on_node, None, at(9));
        assert_eq!(observed.no_execute, [taint("kept", 3), taint("new", 9)]);
        assert_eq!(observed.out_of_service, None);
        assert_eq!(observed.kept, first_seen(&[("kept", 3), ("new", 9)]));
        assert_eq!(observed.kept.observe(&[], Some(at(10)), at(10)).kept.annotation(), None);
    }

    #[test]
    fn out_of_service_counts_with_any_effect() {
        let (none, key) = (FirstSeen::default(), OUT_OF_SERVICE);
        for (effect, evicts) in [("NoExecute", true), ("NoSchedule", false)] {
            let on_node = taints(json!([{"key": key, "value": "nodeshutdown", "effect": effect}]));
            let observed = none.observe(&on_node, None, at(9));
            let expected = taint("node.kubernetes.io/out-of-service=nodeshutdown", 9);
            assert_eq!(observed.out_of_service, Some(expected), "{effect}");
            assert_eq!(!observed.no_execute.is_empty(), evicts, "{effect}");
        }
    }

    #[test]
    fn invalid_annotation_is_ignored() {
        for broken in ["", "x", "[]", "{\"k\": 7}", "{\"k\": \"yesterday\"}", "null", "{"] {
            assert_eq!(FirstSeen::read(Some(broken)), FirstSeen::default(), "{broken}");
        }
        let half = r#"{"bad": "x", "good": "1970-01-01T00:00:07Z"}"#;
        assert_eq!(FirstSeen::read(Some(half)), first_seen(&[("good", 7)]));
        assert_eq!(FirstSeen::read(None), FirstSeen::default());
    }

    #[test]
    fn times_apply_only_while_taints_are_unchanged() {
        let stored = |changed: Option<i64>| FirstSeen {
            changed: changed.map(at),
            ..first_seen(&[("a", 40), ("b", 60)])
        };
        let all: &[_] = &["a", "b"];
        for (name, known, changed, expected) in [
            ("unchanged", Some(60), Some(60), all),
            ("changed since", Some(60), Some(61), &[]),
            ("restored from a backup", Some(60), Some(59), &[]),
            ("time of change unknown", Some(60), None, &[]),
            ("of an earlier version, unchanged", None, Some(40), all),
            ("of an earlier version, one observed after the change", None, Some(41), &["b"]),
            ("of an earlier version, changed since", None, Some(61), &[]),
            ("of an earlier version, time of change unknown", None, None, &[]),
        ] {
            let applicable = stored(known).unless_changed(changed.map(at));
            assert_eq!(applicable.times.keys().collect::<Vec<_>>(), expected, "{name}");
        }
    }

    #[test]
    fn last_change_of_taints_is_that_of_their_owner() {
        let entry = |fields: serde_json::Value, second: i64| {
            json!({"manager": "m", "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1",
                "time": at(second).to_string(), "fieldsV1": fields})
        };
        let taints = json!({"f:spec": {"f:taints": {}, "f:unschedulable": {}}});
        for (entries, expected) in [
            (json!([]), None),
            (
                json!([entry(json!({"f:metadata": {}}), 9), entry(json!({"f:spec": {"f:podCIDR": {}}}), 8)]),
                None,
            ),
            (json!([entry(taints.clone(), 5), entry(json!({"f:status": {}}), 7)]), Some(5)),
            (json!([entry(taints.clone(), 5), entry(taints, 6)]), Some(6)),
        ] {
            let meta: ObjectMeta = serde_json::from_value(json!({"managedFields": entries})).unwrap();
            assert_eq!(taints_changed(&meta), expected.map(at), "{entries}");
        }
        assert_eq!(taints_changed(&ObjectMeta::default()), None);
    }

    proptest! {
        /// Times that are stored, parsed and observed again at any later time do not change.
        #[test]
        fn restart_at_any_time_finds_the_same_times(
            on_node in proptest::collection::vec(("[ab]", "[xy]?", proptest::option::of(0i64..200)), 0..4),
            first in 0i64..2_000_000,
            later in 0i64..2_000_000,
        ) {
            let on_node: Vec<_> = on_node.into_iter().map(|(key, value, added)| core::Taint {
                key, value: Some(value), effect: NO_EXECUTE.into(), time_added: added.map(|added| Time(at(added))),
            }).collect();
            let first = Timestamp::from_microsecond(200_000_000 + first).unwrap();
            let later = Timestamp::from_microsecond(first.as_microsecond() + later).unwrap();
            let (none, changed) = (FirstSeen::default(), Some(at(150)));
            let observed = none.observe(&on_node, changed, first);
            let read = FirstSeen::read(observed.kept.annotation().as_deref()).unless_changed(changed);
            prop_assert_eq!(&read.times, &observed.kept.times);
            prop_assert_eq!(read.observe(&on_node, changed, later), observed);
        }
    }
}

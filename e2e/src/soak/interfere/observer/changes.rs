//! The part of a change that is interesting for the timeline.

use serde_json::Value;

use super::stall::status_summary;
use super::view::{Kind, Read as _, controller};

/// Who did what, if it is interesting.
pub fn described(
    kind: Kind,
    old: Option<&Value>,
    new: Option<&Value>,
    key: &str,
) -> Option<(&'static str, String)> {
    match kind {
        Kind::Maintenance => {
            let text = |of: &Value| {
                let deleted = if of.is_terminating() { ", being deleted" } else { "" };
                format!("{}{deleted}: {}", of.text("/spec/stage"), status_summary(of))
            };
            let (old, new) = (old.map(text), new.map(text));
            (old != new).then(|| ("status", format!("{key}: {}", new.unwrap_or("is gone".into()))))
        }
        Kind::Evacuation => {
            let text = |of: &Value| {
                let blocked =
                    of.condition("Blocked").map(|(status, reason, _)| format!(" Blocked={status} {reason}"));
                let deleted = if of.is_terminating() { " being deleted," } else { "" };
                let completed = if of.flag("/status/activeEvacuatorCompleted") { " completed" } else { "" };
                let policy = of.text("/status/evacuationCancellationPolicy").replace("Allow", "");
                let finalizers: Vec<_> =
                    of.finalizers().iter().filter_map(|f| f.rsplit(['/', '_']).next()).collect();
                format!("{deleted}{}{completed} {policy} held by {finalizers:?}", blocked.unwrap_or_default())
            };
            let pod = new.or(old).map(|of| of.text("/spec/podRef/name").to_owned()).unwrap_or_default();
            let (old, new) = (old.map(text), new.map(text));
            let text = format!("evacuation of {pod}:{}", new.clone().unwrap_or(" is gone".into()));
            (old != new).then_some(("observer", text))
        }
        Kind::Budget => {
            let text = |of: &Value| {
                let of = |field: &str| of.number(&format!("/status/{field}"));
                let (allowed, healthy) = (of("disruptionsAllowed"), of("currentHealthy"));
                format!("allows {allowed}: {healthy} healthy of {}", of("desiredHealthy"))
            };
            let (old, new) = (old.map(text), new.map(text));
            (old != new).then(|| ("observer", format!("budget {key} {}", new.unwrap_or("is gone".into()))))
        }
        Kind::Node => {
            let text = |of: &Value| {
                let cordoned = if of.flag("/spec/unschedulable") { "cordoned" } else { "open" };
                format!("{cordoned}, pool {:?}", of.label("pool").unwrap_or_default())
            };
            let (old, new) = (old.map(text), new.map(text));
            (old != new).then(|| ("observer", format!("node {key} is {}", new.unwrap_or("gone".into()))))
        }
        Kind::Pod => {
            let text = |of: &Value| {
                let owner = controller(of).map_or("", |owner| owner.text("/kind"));
                let moved = if of.annotation(super::FORMER_OWNER).is_some() { ", marked" } else { "" };
                let cost = of.annotation(super::DELETION_COST).map(|cost| format!(", costs {cost}"));
                let ready = if of.is_true("Ready") { "ready" } else { "not ready" };
                let node = of.text("/spec/nodeName");
                format!("on {node:?}, of a {owner}, {ready}{moved}{}", cost.unwrap_or_default())
            };
            let (old, new) = (old.map(text), new.map(text));
            // Its end is reported as activity.
            (old != new).then(|| Some(("observer", format!("pod {key} is {}", new?)))).flatten()
        }
        Kind::Deployment => {
            let text = |of: &Value| {
                let paused = if of.flag("/spec/paused") { ", paused" } else { "" };
                let deleted = if of.is_terminating() { ", being deleted" } else { "" };
                let (replicas, generation) = (of.number("/spec/replicas"), of.number("/metadata/generation"));
                format!("has {replicas} replicas{paused}{deleted}, generation {generation}")
            };
            let (old, new) = (old.map(text), new.map(text));
            (old != new)
                .then(|| ("observer", format!("deployment {key} {}", new.unwrap_or("is gone".into()))))
        }
        _ => None,
    }
}

//! Whether Deployments with which nobody interferes had a ready pod at every moment.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};

use super::history::Change;
use super::view::{Kind, Read as _, is_healthy};

/// For how long changes may be missing around the restart of a watch.
const AROUND: SignedDuration = SignedDuration::from_secs(10);

/// The moments without a ready pod, from the first ready one until `end`. `changes` are in the order of the API server.
pub fn outages(
    undisturbed: &BTreeSet<String>,
    changes: &[&Change],
    gaps: &[Timestamp],
    end: Option<Timestamp>,
) -> Vec<String> {
    let mut found = Vec::new();
    let mut ready: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for Change { at, kind, key, object, .. } in changes {
        if *kind != Kind::Pod || end.is_some_and(|end| *at > end) {
            continue;
        }
        let healthy = object.as_deref().filter(|pod| is_healthy(pod));
        if let Some(app) = healthy.and_then(|pod| pod.label("app")).filter(|app| undisturbed.contains(*app)) {
            ready.entry(app).or_default().insert(key);
            continue;
        }
        for (app, pods) in &mut ready {
            let is_last = pods.remove(key.as_str()) && pods.is_empty();
            if is_last && !gaps.iter().any(|gap| at.duration_since(*gap).abs() < AROUND) {
                found.push(format!("Deployment {app} had no ready pod when {key} left at {at}"));
            }
        }
    }
    found
}

//! The drain targets in a node's annotation. A target is listed there before its first pod is asked to leave, because a new
//! leader and other programs read the targets from the annotation.

use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::{DrainPlanEntry, PodType};
use haulout_api_types::selector::LabelMatcher;

/// Maximum size of the targets. All annotations of a node share a limit of 256 KiB.
pub const MAX_BYTES: usize = 48 * 1024;

/// Up to this many targets, a description in the plans' own entries is complete.
const MAX_DESCRIBED: usize = 100;

/// The targets as entries of the plans, if they fit; otherwise merged; otherwise as many as fit, and at least those that were
/// announced before.
pub fn entries<'a>(
    targets: &'a DrainTargets,
    slots: impl IntoIterator<Item = (PodType, &'a LabelMatcher)>,
    announced: &DrainTargets,
) -> Vec<DrainPlanEntry> {
    let described = targets.describe(slots);
    if targets.iter().count() <= MAX_DESCRIBED && fits(&described) {
        return described;
    }
    let whole = merged_entries(targets);
    if fits(&whole) {
        return whole;
    }
    let mut part = announced.clone();
    for entry in targets.merged().iter() {
        let mut more = part.clone();
        more.insert(entry.clone());
        if fits(&merged_entries(&more)) {
            part = more;
        }
    }
    merged_entries(&part)
}

/// Whether all targets can be announced.
pub fn fit(targets: &DrainTargets) -> bool {
    fits(&merged_entries(targets))
}

fn merged_entries(targets: &DrainTargets) -> Vec<DrainPlanEntry> {
    targets.merged().iter().map(haulout_api_types::drain_plan::EntryMatcher::to_entry).collect()
}

fn fits(entries: &[DrainPlanEntry]) -> bool {
    serde_json::to_vec(entries).is_ok_and(|text| text.len() <= MAX_BYTES)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;

    /// Targets with one entry per label value.
    fn by_label(key: &str, values: usize, length: usize) -> DrainTargets {
        let value = |i: usize| format!("{i:0length$}");
        let entries = (0..values).map(|i| DrainPlanEntry {
            pod_selector: serde_json::from_value(json!({"matchLabels": {key: value(i)}})).unwrap(),
            pod_priority: 5,
            pod_type: PodType::Default,
        });
        DrainTargets::read(&entries.collect::<Vec<_>>()).unwrap()
    }

    fn selects(targets: &DrainTargets, key: &str, value: String) -> bool {
        targets.selects(PodType::Default, 5, &BTreeMap::from([(key.to_owned(), value)]))
    }

    #[test]
    fn many_targets_are_merged_and_select_the_same_pods() {
        let targets = by_label("app", 500, 60);
        let slots: Vec<_> = targets.iter().map(|entry| (entry.pod_type, &entry.selector)).collect();
        let entries = entries(&targets, slots, &DrainTargets::default());
        assert!(fits(&entries) && fit(&targets));
        assert_eq!(entries.len(), 1, "one requirement with all values");
        let read = DrainTargets::read(&entries).unwrap();
        assert!((0..500).all(|i| selects(&read, "app", format!("{i:060}"))));
        assert!(!selects(&read, "app", format!("{:060}", 500)));
    }

    #[test]
    fn targets_that_do_not_fit_are_omitted() {
        let targets = by_label("app", 2000, 63);
        let announced = by_label("app", 3, 63);
        assert!(!fit(&targets));
        let entries = entries(&targets, [], &announced);
        let read = DrainTargets::read(&entries).unwrap();
        assert!(fits(&entries));
        assert!((0..3).all(|i| selects(&read, "app", format!("{i:063}"))), "targets never shrink");
        assert!(!selects(&read, "app", format!("{:063}", 5000)), "and never select other pods");
    }
}

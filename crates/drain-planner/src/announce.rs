//! What a node's annotation says of its drain targets. It has to say all of them before a pod may be asked to leave: a
//! new leader, and whoever acts on targets, read them there.

use haulout_api_types::drain_targets::DrainTargets;
use haulout_api_types::node_maintenance::{DrainPlanEntry, PodType};
use haulout_api_types::selector::LabelMatcher;

/// How much the targets may take. All annotations of a node together may have 256 KiB, and others want some too.
pub const MAX_BYTES: usize = 48 * 1024;

/// As long as there are no more than this, a description in the words of the plans has them all.
const MAX_DESCRIBED: usize = 100;

/// The targets in the words of the plans, if that fits; else with fewer words; else as much as fits, and at least
/// what has been announced before.
pub fn entries<'a>(
    targets: &'a DrainTargets,
    slots: impl IntoIterator<Item = (PodType, &'a LabelMatcher)>,
    announced: &DrainTargets,
) -> Vec<DrainPlanEntry> {
    let described = targets.describe(slots);
    if targets.iter().count() <= MAX_DESCRIBED && fits(&described) {
        return described;
    }
    let whole = written(targets);
    if fits(&whole) {
        return whole;
    }
    let mut part = announced.clone();
    for entry in targets.merged().iter() {
        let mut more = part.clone();
        more.insert(entry.clone());
        if fits(&written(&more)) {
            part = more;
        }
    }
    written(&part)
}

/// Whether all targets can be announced.
pub fn fit(targets: &DrainTargets) -> bool {
    fits(&written(targets))
}

fn written(targets: &DrainTargets) -> Vec<DrainPlanEntry> {
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

    /// Targets that select pods by the value of one label, each value in an entry of its own.
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
    fn what_does_not_fit_is_left_out_and_what_was_announced_stays() {
        let targets = by_label("app", 2000, 63);
        let announced = by_label("app", 3, 63);
        assert!(!fit(&targets));
        let entries = entries(&targets, [], &announced);
        let read = DrainTargets::read(&entries).unwrap();
        assert!(fits(&entries));
        assert!((0..3).all(|i| selects(&read, "app", format!("{i:063}"))), "targets never go back");
        assert!(!selects(&read, "app", format!("{:063}", 5000)), "and never select what is not in them");
    }
}

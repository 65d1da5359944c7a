//! Drain plans: the default entries, the order of entries, and which pods an entry selects.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use crate::node_maintenance::{DrainPlanEntry, PodType};
use crate::selector::{LabelMatcher, Labels, SelectorError};

/// The priorities of the default entries, for every pod type: the highest user-defined priority, `system-cluster-critical`,
/// `system-node-critical`, and the maximum.
pub const DEFAULT_PRIORITIES: [i32; 4] = [1_000_000_000, 2_000_000_000, 2_000_001_000, i32::MAX];

/// The twelve default entries of every plan.
pub fn default_entries() -> impl Iterator<Item = DrainPlanEntry> {
    PodType::ALL.into_iter().flat_map(|pod_type| {
        DEFAULT_PRIORITIES.map(|pod_priority| DrainPlanEntry { pod_selector: None, pod_priority, pod_type })
    })
}

/// The effective plan: with the default entries, sorted, without duplicates. Entries of the same type and priority with
/// different selectors keep the order in the user's plan.
pub fn normalise(plan: &[DrainPlanEntry]) -> Vec<DrainPlanEntry> {
    let mut entries: Vec<DrainPlanEntry> = Vec::with_capacity(plan.len() + 12);
    for mut entry in plan.iter().cloned().chain(default_entries()) {
        // An empty selector is equivalent to no selector.
        entry.pod_selector = entry.pod_selector.filter(|selector| !is_empty(selector));
        if !entries.contains(&entry) {
            entries.push(entry);
        }
    }
    entries.sort_by(compare);
    entries
}

/// Compares entries by pod type, then priority. Entries with a selector come before those without. Entries that differ
/// only in their selectors are equal.
pub fn compare(a: &DrainPlanEntry, b: &DrainPlanEntry) -> Ordering {
    let key = |entry: &DrainPlanEntry| {
        (entry.pod_type, entry.pod_priority, entry.pod_selector.as_ref().is_none_or(is_empty))
    };
    key(a).cmp(&key(b))
}

fn is_empty(selector: &LabelSelector) -> bool {
    selector.match_labels.as_ref().is_none_or(BTreeMap::is_empty)
        && selector.match_expressions.as_ref().is_none_or(Vec::is_empty)
}

/// A parsed entry of a drain plan.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EntryMatcher {
    /// The pod type that the entry selects.
    pub pod_type: PodType,
    /// The highest priority that the entry selects.
    pub pod_priority: i32,
    /// The labels that the entry selects.
    pub selector: LabelMatcher,
}

impl EntryMatcher {
    /// Parses an entry.
    pub fn new(entry: &DrainPlanEntry) -> Result<Self, SelectorError> {
        Ok(Self {
            pod_type: entry.pod_type,
            pod_priority: entry.pod_priority,
            selector: LabelMatcher::from_optional(entry.pod_selector.as_ref())?,
        })
    }

    /// Whether the entry selects a pod of this type and priority with these labels.
    pub fn selects(&self, pod_type: PodType, priority: i32, labels: &impl Labels) -> bool {
        self.pod_type == pod_type && priority <= self.pod_priority && self.selector.matches(labels)
    }

    /// Whether the entry selects everything that `other` selects. False negatives are possible.
    pub fn includes(&self, other: &Self) -> bool {
        self.pod_type == other.pod_type
            && other.pod_priority <= self.pod_priority
            && other.selector.is_subset_of(&self.selector)
    }

    /// An entry that selects what both select. `None` if their types differ.
    pub fn and(&self, other: &Self) -> Option<Self> {
        (self.pod_type == other.pod_type).then(|| Self {
            pod_type: self.pod_type,
            pod_priority: self.pod_priority.min(other.pod_priority),
            selector: self.selector.and(&other.selector),
        })
    }

    /// Converts the entry to the API type.
    pub fn to_entry(&self) -> DrainPlanEntry {
        DrainPlanEntry {
            pod_selector: self.selector.to_selector(),
            pod_priority: self.pod_priority,
            pod_type: self.pod_type,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn entry(pod_type: PodType, pod_priority: i32, app: Option<&str>) -> DrainPlanEntry {
        let pod_selector =
            app.map(|app| serde_json::from_value(json!({"matchLabels": {"app": app}})).unwrap());
        DrainPlanEntry { pod_selector, pod_priority, pod_type }
    }

    /// `Default<=1000 app=x` and the like, one a line.
    fn show(plan: &[DrainPlanEntry]) -> Vec<String> {
        let app = |entry: &DrainPlanEntry| {
            let labels = entry.pod_selector.as_ref()?.match_labels.as_ref()?;
            Some(format!(" app={}", labels.get("app")?))
        };
        plan.iter()
            .map(|e| format!("{:?}<={}{}", e.pod_type, e.pod_priority, app(e).unwrap_or_default()))
            .collect()
    }

    #[test]
    fn empty_plan_has_the_twelve_entries_of_the_kep() {
        assert_eq!(
            show(&normalise(&[])),
            [
                "Default<=1000000000",
                "Default<=2000000000",
                "Default<=2000001000",
                "Default<=2147483647",
                "DaemonSet<=1000000000",
                "DaemonSet<=2000000000",
                "DaemonSet<=2000001000",
                "DaemonSet<=2147483647",
                "Static<=1000000000",
                "Static<=2000000000",
                "Static<=2000001000",
                "Static<=2147483647",
            ]
        );
    }

    #[test]
    fn entries_are_sorted_by_type_priority_and_selector() {
        use PodType::{DaemonSet, Default, Static};
        let mut empty_selector = entry(Default, 2000, None);
        empty_selector.pod_selector = Some(LabelSelector::default());
        let plan = normalise(&[
            entry(Static, i32::MAX, None),
            entry(Default, 2000, None),
            entry(Default, 2000, Some("postgres")),
            empty_selector,
            entry(Default, 2000, Some("kafka")),
            entry(DaemonSet, 1000, None),
            entry(Default, -5, None),
            entry(Default, 2000, Some("postgres")),
        ]);
        assert_eq!(
            show(&plan)[..6],
            [
                "Default<=-5",
                "Default<=2000 app=postgres",
                "Default<=2000 app=kafka",
                "Default<=2000",
                "Default<=1000000000",
                "Default<=2000000000",
            ]
        );
        assert_eq!(show(&plan)[8], "DaemonSet<=1000");
        assert_eq!(plan.len(), 12 + 5);
    }

    #[test]
    fn entry_selects_by_type_priority_and_labels() {
        let web = BTreeMap::from([("app".to_string(), "web".to_string())]);
        let bare = BTreeMap::new();
        let matcher = |e: DrainPlanEntry| EntryMatcher::new(&e).unwrap();
        let plain = matcher(entry(PodType::Default, 1000, None));
        let only_web = matcher(entry(PodType::Default, 1000, Some("web")));
        let cases = [
            (&plain, PodType::Default, 1000, &bare, true),
            (&plain, PodType::Default, -1, &bare, true),
            (&plain, PodType::Default, 1001, &bare, false),
            (&plain, PodType::DaemonSet, 1, &bare, false),
            (&plain, PodType::Static, 1, &bare, false),
            (&only_web, PodType::Default, 1000, &web, true),
            (&only_web, PodType::Default, 1000, &bare, false),
            (&only_web, PodType::Default, 1001, &web, false),
        ];
        for (matcher, pod_type, priority, labels, expected) in cases {
            assert_eq!(
                matcher.selects(pod_type, priority, labels),
                expected,
                "{matcher:?} {pod_type:?} {priority}"
            );
        }
    }

    fn any_plan() -> impl Strategy<Value = Vec<DrainPlanEntry>> {
        let pod_type = proptest::sample::select(PodType::ALL.to_vec());
        let priority = prop_oneof![Just(1000), Just(2_000_000_000), any::<i32>()];
        let app = proptest::option::of(proptest::sample::select(vec!["x", "y"]));
        proptest::collection::vec((pod_type, priority, app).prop_map(|(t, p, a)| entry(t, p, a)), 0..20)
    }

    proptest! {
        #[test]
        fn normalised_plan_is_sorted_complete_and_unique(plan in any_plan()) {
            let normal = normalise(&plan);
            prop_assert!(normal.is_sorted_by(|a, b| compare(a, b) != Ordering::Greater));
            prop_assert!(plan.iter().chain(&default_entries().collect::<Vec<_>>()).all(|e| normal.contains(e)));
            prop_assert!(normal.iter().enumerate().all(|(i, e)| !normal[..i].contains(e)));
            prop_assert_eq!(&normalise(&normal), &normal);
        }

        /// A drain reaches every pod in the end, with any plan.
        #[test]
        fn every_pod_is_selected_by_some_entry(plan in any_plan(), priority: i32, kind in 0usize..3) {
            let pod_type = PodType::ALL[kind];
            let selected = normalise(&plan).iter().any(|e| {
                EntryMatcher::new(e).unwrap().selects(pod_type, priority, &BTreeMap::new())
            });
            prop_assert!(selected);
        }
    }
}

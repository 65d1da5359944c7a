//! Drain targets: the set of pods that a drain has reached. The set only grows, can be intersected with other sets, and is
//! stored as drain plan entries.

use std::cmp::Reverse;

use crate::drain_plan::EntryMatcher;
use crate::node_maintenance::{DrainPlanEntry, PodType};
use crate::selector::{LabelMatcher, Labels, SelectorError};

/// Maximum number of entries of an intersection. The number of combinations grows with the number of selectors. Beyond the
/// maximum, the narrowest entries are omitted, which makes the set smaller, never larger.
const MAX_INTERSECTION_ENTRIES: usize = 64;

/// Maximum number of stored entries, as in the schema of the status.
const MAX_STORED_ENTRIES: usize = 112;

/// A set of pods: the union of what its entries select. No entry includes another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrainTargets(Vec<EntryMatcher>);

impl FromIterator<EntryMatcher> for DrainTargets {
    fn from_iter<I: IntoIterator<Item = EntryMatcher>>(entries: I) -> Self {
        let mut targets = Self::default();
        for entry in entries {
            targets.insert(entry);
        }
        targets
    }
}

impl DrainTargets {
    /// Parses stored entries. If one entry is invalid, the result is an error, because a part of the targets would be a
    /// smaller set.
    pub fn read(entries: &[DrainPlanEntry]) -> Result<Self, SelectorError> {
        entries.iter().map(EntryMatcher::new).collect()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The entries, in order.
    pub fn iter(&self) -> impl Iterator<Item = &EntryMatcher> {
        self.0.iter()
    }

    /// Adds what an entry selects. Returns whether the set has grown.
    pub fn insert(&mut self, entry: EntryMatcher) -> bool {
        if self.includes_entry(&entry) {
            return false;
        }
        self.0.retain(|existing| !entry.includes(existing));
        let place = self.0.binary_search(&entry).unwrap_or_else(|place| place);
        self.0.insert(place, entry);
        true
    }

    /// Adds all of `other`. Returns whether the set has grown.
    pub fn extend(&mut self, other: &Self) -> bool {
        let mut grown = false;
        for entry in &other.0 {
            if !self.includes_entry(entry) {
                grown |= self.insert(entry.clone());
            }
        }
        grown
    }

    /// The intersection of both sets. A pod type that both have reached stays reached, even if no pod can be in both.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        if other.includes(self) {
            return self.clone();
        }
        if self.includes(other) {
            return other.clone();
        }
        let pairs = self.0.iter().flat_map(|a| other.0.iter().filter_map(|b| a.and(b)));
        let mut both: Self = pairs.collect();
        if both.0.len() > MAX_INTERSECTION_ENTRIES {
            let width = |entry: &EntryMatcher| {
                (
                    entry.selector.requirements(),
                    Reverse(entry.pod_priority),
                    entry.pod_type,
                    entry.selector.clone(),
                )
            };
            both.0.sort_by_cached_key(width);
            both.0.truncate(MAX_INTERSECTION_ENTRIES);
            both.0.sort();
        }
        both
    }

    /// Whether the set includes all of `other`. False negatives are possible.
    pub fn includes(&self, other: &Self) -> bool {
        other.0.iter().all(|entry| self.includes_entry(entry))
    }

    /// Whether the set includes everything that the entry selects. False negatives are possible.
    pub fn includes_entry(&self, entry: &EntryMatcher) -> bool {
        self.0.iter().any(|existing| existing.includes(entry))
    }

    /// Whether the set contains a pod of this type and priority with these labels.
    pub fn selects(&self, pod_type: PodType, priority: i32, labels: &impl Labels) -> bool {
        self.0.iter().any(|entry| entry.selects(pod_type, priority, labels))
    }

    /// Whether the drain has reached pods of this type.
    pub fn has_type(&self, pod_type: PodType) -> bool {
        self.0.iter().any(|entry| entry.pod_type == pod_type)
    }

    /// The priority up to which all pods of this type and selector are reached.
    pub fn reach(&self, pod_type: PodType, selector: &LabelMatcher) -> Option<i32> {
        let covering = self
            .0
            .iter()
            .filter(|entry| entry.pod_type == pod_type && selector.is_subset_of(&entry.selector));
        covering.map(|entry| entry.pod_priority).max()
    }

    /// The same set with fewer entries: values of the same label are combined.
    #[must_use]
    pub fn merged(&self) -> Self {
        let mut merged: Vec<EntryMatcher> = Vec::new();
        for entry in &self.0 {
            let same = |known: &&mut EntryMatcher| {
                (known.pod_type, known.pod_priority) == (entry.pod_type, entry.pod_priority)
            };
            let union = merged.iter_mut().filter(same).find_map(|known| {
                let selector = known.selector.or(&entry.selector)?;
                Some((known, selector))
            });
            match union {
                Some((known, selector)) => known.selector = selector,
                None => merged.push(entry.clone()),
            }
        }
        merged.sort();
        Self(merged)
    }

    /// Converts the set to entries for storage. For every pod type that is reached, there is an entry without a
    /// selector, one for each selector of the plans (`slots`), and the remaining entries of the set.
    pub fn describe<'a>(
        &'a self,
        slots: impl IntoIterator<Item = (PodType, &'a LabelMatcher)>,
    ) -> Vec<DrainPlanEntry> {
        static EVERYTHING: LabelMatcher = LabelMatcher::everything();
        let own = self.0.iter().map(|entry| (entry.pod_type, &entry.selector));
        let plain = PodType::ALL.map(|pod_type| (pod_type, &EVERYTHING));
        let mut listed: Vec<(PodType, &LabelMatcher)> = Vec::new();
        for slot in plain.into_iter().chain(slots).chain(own.clone()) {
            if !listed.contains(&slot) {
                listed.push(slot);
            }
        }
        if listed.len() > MAX_STORED_ENTRIES {
            listed = own.collect();
        }
        listed.sort_by_key(|(pod_type, _)| *pod_type);
        let written = listed.into_iter().filter_map(|(pod_type, selector)| {
            let pod_priority = self.reach(pod_type, selector)?;
            Some(EntryMatcher { pod_type, pod_priority, selector: selector.clone() }.to_entry())
        });
        written.take(MAX_STORED_ENTRIES).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;
    use std::collections::BTreeMap;

    fn entry(pod_type: PodType, pod_priority: i32, app: Option<&str>) -> EntryMatcher {
        let pod_selector =
            app.map(|app| serde_json::from_value(json!({"matchLabels": {"app": app}})).unwrap());
        EntryMatcher::new(&DrainPlanEntry { pod_selector, pod_priority, pod_type }).unwrap()
    }

    fn any_targets() -> impl Strategy<Value = DrainTargets> {
        let pod_type = proptest::sample::select(PodType::ALL.to_vec());
        let app = proptest::option::of(proptest::sample::select(vec!["x", "y"]));
        let one = (pod_type, 0..5, app).prop_map(|(pod_type, priority, app)| entry(pod_type, priority, app));
        proptest::collection::vec(one, 0..6).prop_map(|entries| entries.into_iter().collect())
    }

    #[test]
    fn selector_is_listed_with_the_priority_it_has_reached() {
        let postgres = entry(PodType::Default, 2000, Some("postgres"));
        let slots = [(PodType::Default, &postgres.selector)];
        let show = |targets: &DrainTargets| -> Vec<(i32, bool)> {
            targets.describe(slots).iter().map(|e| (e.pod_priority, e.pod_selector.is_some())).collect()
        };
        let mut targets: DrainTargets = [entry(PodType::Default, 1000, None)].into_iter().collect();
        assert_eq!(show(&targets), [(1000, false), (1000, true)]);
        targets.insert(postgres.clone());
        assert_eq!(show(&targets), [(1000, false), (2000, true)]);
        targets.insert(entry(PodType::Default, i32::MAX, None));
        assert_eq!(show(&targets), [(i32::MAX, false), (i32::MAX, true)]);
    }

    #[test]
    fn large_intersection_is_truncated_and_keeps_its_types() {
        let many = |key: &str| -> DrainTargets {
            (0..20)
                .map(|i| {
                    let pod_selector =
                        serde_json::from_value(json!({"matchLabels": {key: i.to_string()}})).unwrap();
                    let entry = DrainPlanEntry { pod_selector, pod_priority: i, pod_type: PodType::Default };
                    EntryMatcher::new(&entry).unwrap()
                })
                .collect()
        };
        let both = many("a").intersection(&many("b"));
        assert_eq!(both.iter().count(), MAX_INTERSECTION_ENTRIES);
        assert!(both.has_type(PodType::Default));
        assert!(both.iter().all(|e| e.pod_priority > 10), "those of high priority select most");
    }

    proptest! {
        #[test]
        fn sets_behave_as_sets(a in any_targets(), b in any_targets(), priority in 0..6, kind in 0usize..3, app in "[xyz]") {
            let (pod_type, labels) = (PodType::ALL[kind], BTreeMap::from([("app".to_string(), app)]));
            let has = |targets: &DrainTargets| targets.selects(pod_type, priority, &labels);
            let both = a.intersection(&b);
            let mut either = a.clone();
            let grown = either.extend(&b);
            prop_assert_eq!(has(&both), has(&a) && has(&b));
            prop_assert_eq!(has(&either), has(&a) || has(&b));
            prop_assert!(either.includes(&a) && either.includes(&b) && a.includes(&both) && b.includes(&both));
            prop_assert_eq!(grown, !a.includes(&b));
            prop_assert!(!a.includes(&b) || !has(&b) || has(&a));
            prop_assert_eq!(both.has_type(pod_type), a.has_type(pod_type) && b.has_type(pod_type));
        }

        #[test]
        fn merging_selects_the_same_pods(a in any_targets(), priority in 0..6, kind in 0usize..3, app in "[xyz]") {
            let (pod_type, labels) = (PodType::ALL[kind], BTreeMap::from([("app".to_string(), app)]));
            let has = |targets: &DrainTargets| targets.selects(pod_type, priority, &labels);
            prop_assert_eq!(has(&a.merged()), has(&a));
            prop_assert!(a.merged().iter().count() <= a.iter().count());
        }

        #[test]
        fn targets_round_trip_through_entries(a in any_targets(), b in any_targets()) {
            let slots: Vec<_> = b.iter().map(|e| (e.pod_type, &e.selector)).collect();
            prop_assert_eq!(DrainTargets::read(&a.describe(slots)).unwrap(), a);
        }
    }
}

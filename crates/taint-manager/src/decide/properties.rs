//! What holds for all pods, taints and times: decisions follow from stored facts alone, and nothing that
//! makes a pod's life easier brings its end nearer.

use proptest::prelude::*;

use super::*;
use crate::testing::{Json, at, pod, synced_since, taint};

#[derive(Clone, Debug)]
struct Case {
    taints: Vec<Taint>,
    /// Key and seconds.
    tolerations: Vec<(String, Option<i64>)>,
    scheduled: i64,
    rules: String,
}

fn toleration() -> impl Strategy<Value = (String, Option<i64>)> {
    ("[abc]", proptest::option::of(-5i64..200))
}

fn case() -> impl Strategy<Value = Case> {
    let taints = proptest::collection::vec(("[abc]", 0i64..200), 0..4);
    let tolerations = proptest::collection::vec(toleration(), 0..4);
    let action = proptest::sample::select(vec!["Delete", "Evict", "Evacuate", "Ignore"]);
    let rules = proptest::collection::vec(("[abc*]", action), 0..3);
    (taints, tolerations, 0i64..200, rules).prop_map(|(taints, tolerations, scheduled, rules)| Case {
        taints: taints.into_iter().map(|(key, since)| taint(&key, since)).collect(),
        tolerations,
        scheduled,
        rules: rules
            .into_iter()
            .map(|(key, action)| format!("{{key: '{key}', action: {action}}}"))
            .collect::<Vec<_>>()
            .join(", "),
    })
}

impl Case {
    fn pod(&self) -> Json {
        let start = pod(1).scheduled(self.scheduled);
        self.tolerations.iter().fold(start, |pod, (key, seconds)| pod.tolerating(key, *seconds))
    }

    fn verdict(&self, synced: Synced, now: i64) -> Verdict {
        let (pod, none) = (self.pod().read(), BTreeMap::new());
        let facts = NodeFacts { taints: self.taints.clone(), ..NodeFacts::default() };
        let policy = Policy::from_yaml(&format!("rules: [{}]", self.rules)).unwrap();
        let view = View {
            pod: &pod,
            node: Some(&facts),
            namespace: Some(&none),
            evacuation: false,
            policy: &policy,
            synced: Some(synced),
        };
        decide(&view, at(now)).verdict
    }

    /// When the pod has to leave first: what is found by deciding at the beginning of time and whenever it is due.
    fn end(&self, synced: Synced) -> Option<Timestamp> {
        let mut now = -1;
        loop {
            match self.verdict(synced, now) {
                Verdict::Wait { until } => now = until.as_second(),
                Verdict::Act { .. } => return Some(at(now)),
                Verdict::Keep => return None,
                other => panic!("{other:?}"),
            }
        }
    }
}

/// A pod that stays for ever stays longest.
fn late(end: Option<Timestamp>) -> Timestamp {
    end.unwrap_or(Timestamp::MAX)
}

proptest! {
    /// Whenever one begins to look, and however often, the pod leaves at the same time.
    #[test]
    fn it_does_not_matter_when_or_how_often_one_looks(case in case(), looks in proptest::collection::vec(0i64..500, 0..6)) {
        let synced = synced_since(-1000);
        let end = case.end(synced);
        for now in looks {
            let expected = case.verdict(synced, now);
            match (end, expected) {
                (None, verdict) => prop_assert_eq!(verdict, Verdict::Keep),
                (Some(end), Verdict::Wait { until }) => {
                    prop_assert_eq!(until, end);
                    prop_assert!(at(now) < end);
                }
                (Some(end), Verdict::Act { due, .. }) => prop_assert!(due <= at(now) && at(now) >= end),
                (end, verdict) => prop_assert!(false, "{end:?} {verdict:?}"),
            }
        }
    }

    #[test]
    fn a_further_toleration_never_brings_the_end_nearer(mut case in case(), further in toleration()) {
        let before = late(case.end(synced_since(-1000)));
        // One that does not tolerate at all is no help, but no harm either.
        case.tolerations.push(further);
        prop_assert!(late(case.end(synced_since(-1000))) >= before);
    }

    #[test]
    fn a_taint_less_never_brings_the_end_nearer(mut case in case(), which: prop::sample::Index) {
        prop_assume!(!case.taints.is_empty());
        let before = late(case.end(synced_since(-1000)));
        case.taints.remove(which.index(case.taints.len()));
        prop_assert!(late(case.end(synced_since(-1000))) >= before);
    }

    #[test]
    fn a_longer_toleration_never_brings_the_end_nearer(mut case in case(), which: prop::sample::Index, more in 0i64..300) {
        prop_assume!(!case.tolerations.is_empty());
        let before = late(case.end(synced_since(-1000)));
        let chosen = which.index(case.tolerations.len());
        case.tolerations[chosen].1 = case.tolerations[chosen].1.map(|seconds| seconds + more);
        prop_assert!(late(case.end(synced_since(-1000))) >= before);
    }

    #[test]
    fn a_pod_that_came_later_never_leaves_earlier(mut case in case(), later in 0i64..300) {
        let before = late(case.end(synced_since(-1000)));
        case.scheduled += later;
        prop_assert!(late(case.end(synced_since(-1000))) >= before);
    }

    /// A gap only ever delays, and never beyond the settle time.
    #[test]
    fn a_gap_delays_by_no_more_than_it_has_to(case in case(), gap in 0i64..400) {
        let (calm, shaken) = (case.end(synced_since(-1000)), case.end(synced_since(gap)));
        let settled = at(gap + 60);
        prop_assert_eq!(calm.is_some(), shaken.is_some());
        prop_assert!(late(shaken) >= late(calm));
        prop_assert!(late(shaken) <= late(calm).max(settled));
    }

    /// Tolerating everything for ever is being safe, whatever the policy.
    #[test]
    fn who_tolerates_everything_stays(mut case in case()) {
        case.tolerations = ["a", "b", "c"].map(|key| (key.to_owned(), None)).to_vec();
        prop_assert_eq!(case.end(synced_since(-1000)), None);
    }
}

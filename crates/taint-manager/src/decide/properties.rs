//! Properties for all pods, taints and times: decisions depend on stored state only, and more tolerations or fewer
//! taints never make a pod leave earlier.

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

    /// When the pod has to leave: decides at the start and at every requeue time.
    fn leave_time(&self, synced: Synced) -> Option<Timestamp> {
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

/// The time to compare. A pod that never leaves has the latest one.
fn time_or_never(leave_time: Option<Timestamp>) -> Timestamp {
    leave_time.unwrap_or(Timestamp::MAX)
}

proptest! {
    /// The pod leaves at the same time, no matter when and how often the decision is made.
    #[test]
    fn leave_time_does_not_depend_on_when_it_is_computed(case in case(), times in proptest::collection::vec(0i64..500, 0..6)) {
        let synced = synced_since(-1000);
        let leave_time = case.leave_time(synced);
        for now in times {
            let expected = case.verdict(synced, now);
            match (leave_time, expected) {
                (None, verdict) => prop_assert_eq!(verdict, Verdict::Keep),
                (Some(leave_time), Verdict::Wait { until }) => {
                    prop_assert_eq!(until, leave_time);
                    prop_assert!(at(now) < leave_time);
                }
                (Some(leave_time), Verdict::Act { due, .. }) => prop_assert!(due <= at(now) && at(now) >= leave_time),
                (leave_time, verdict) => prop_assert!(false, "{leave_time:?} {verdict:?}"),
            }
        }
    }

    #[test]
    fn more_tolerations_never_make_a_pod_leave_earlier(mut case in case(), further in toleration()) {
        let before = time_or_never(case.leave_time(synced_since(-1000)));
        // A toleration of zero seconds does not help, and does not harm either.
        case.tolerations.push(further);
        prop_assert!(time_or_never(case.leave_time(synced_since(-1000))) >= before);
    }

    #[test]
    fn fewer_taints_never_make_a_pod_leave_earlier(mut case in case(), which: prop::sample::Index) {
        prop_assume!(!case.taints.is_empty());
        let before = time_or_never(case.leave_time(synced_since(-1000)));
        case.taints.remove(which.index(case.taints.len()));
        prop_assert!(time_or_never(case.leave_time(synced_since(-1000))) >= before);
    }

    #[test]
    fn longer_toleration_never_makes_a_pod_leave_earlier(mut case in case(), which: prop::sample::Index, more in 0i64..300) {
        prop_assume!(!case.tolerations.is_empty());
        let before = time_or_never(case.leave_time(synced_since(-1000)));
        let chosen = which.index(case.tolerations.len());
        case.tolerations[chosen].1 = case.tolerations[chosen].1.map(|seconds| seconds + more);
        prop_assert!(time_or_never(case.leave_time(synced_since(-1000))) >= before);
    }

    #[test]
    fn pod_scheduled_later_never_leaves_earlier(mut case in case(), later in 0i64..300) {
        let before = time_or_never(case.leave_time(synced_since(-1000)));
        case.scheduled += later;
        prop_assert!(time_or_never(case.leave_time(synced_since(-1000))) >= before);
    }

    /// A watch gap only delays, and never beyond the grace period.
    #[test]
    fn watch_gap_delays_by_at_most_the_grace_period(case in case(), gap in 0i64..400) {
        let (without_gap, with_gap) = (case.leave_time(synced_since(-1000)), case.leave_time(synced_since(gap)));
        let grace_ends = at(gap + 60);
        prop_assert_eq!(without_gap.is_some(), with_gap.is_some());
        prop_assert!(time_or_never(with_gap) >= time_or_never(without_gap));
        prop_assert!(time_or_never(with_gap) <= time_or_never(without_gap).max(grace_ends));
    }

    /// A pod that tolerates everything forever stays, with any policy.
    #[test]
    fn pod_that_tolerates_everything_stays(mut case in case()) {
        case.tolerations = ["a", "b", "c"].map(|key| (key.to_owned(), None)).to_vec();
        prop_assert_eq!(case.leave_time(synced_since(-1000)), None);
    }
}

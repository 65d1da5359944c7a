//! Whom events concern, in whatever order they come, and what is kept on Nodes.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::decide::Verdict;
use crate::testing::{Json, at, clear_since, pod, uid};

fn pods(all: &[Json]) -> PodIndex {
    let mut index = PodIndex::default();
    for pod in all {
        index.apply(pod.read());
    }
    index
}

/// A node whose taints were last changed at second 1.
fn meta(name: &str, annotation: Option<&str>) -> ObjectMeta {
    meta_changed(name, annotation, 1)
}

/// A node whose taints were last changed at this second.
fn meta_changed(name: &str, annotation: Option<&str>, changed: i64) -> ObjectMeta {
    let annotations = annotation.map(|json| BTreeMap::from([(TAINTS_FIRST_SEEN_ANNOTATION, json)]));
    let entry = json!({"manager": "kubectl-taint", "operation": "Update", "time": at(changed).to_string(),
        "fieldsV1": {"f:spec": {"f:taints": {}}}});
    serde_json::from_value(json!({"name": name, "annotations": annotations, "managedFields": [entry]}))
        .unwrap()
}

/// What is written of a taint `k` that was first seen at this second.
fn written(k: i64, changed: i64) -> String {
    json!({"k": at(k).to_string(), "taints changed": at(changed).to_string()}).to_string()
}

fn taints(of_node: Value) -> Vec<core::Taint> {
    serde_json::from_value(of_node).unwrap()
}

fn one(key: &str) -> Vec<core::Taint> {
    taints(json!([{"key": key, "effect": "NoExecute"}]))
}

fn uids(keys: &[Key]) -> Vec<Uid> {
    keys.iter().map(|key| key.uid).collect()
}

fn change(pod: &Json) -> Change {
    Change { old: None, new: Some(Arc::new(pod.read())) }
}

impl Index {
    fn taint(&mut self, node: &str, taints: &[core::Taint], pods: &PodIndex, now: i64) -> NodeNews {
        self.apply_node(&meta(node, None), taints, true, pods, at(now))
    }

    fn verdict(&self, pod: &Json, now: i64) -> Verdict {
        self.decide(&pod.read(), clear_since(-1000), at(now)).verdict
    }
}

fn index() -> Index {
    Index::new(Policy::default())
}

#[test]
fn a_taint_concerns_the_pods_of_its_node_when_it_comes_and_when_it_goes() {
    let pods = pods(&[pod(1), pod(2), pod(3).with("/spec/nodeName", "other")]);
    let mut index = index();
    assert_eq!(index.taint("node", &[], &pods, 0), NodeNews::default(), "no taint");
    let soft = taints(json!([{"key": "k", "effect": "NoSchedule"}]));
    assert_eq!(index.taint("node", &soft, &pods, 0), NodeNews::default(), "a taint that concerns nobody");
    assert_eq!(uids(&index.taint("node", &one("k"), &pods, 5).pods), [uid(1), uid(2)]);
    assert_eq!(index.taint("node", &one("k"), &pods, 6).pods, [], "nothing new");
    assert_eq!(uids(&index.taint("node", &one("l"), &pods, 7).pods), [uid(1), uid(2)]);
    assert_eq!((index.tainted_nodes(), index.everybody(&pods).len()), (1, 2));
    assert_eq!(uids(&index.taint("node", &[], &pods, 8).pods), [uid(1), uid(2)]);
    assert_eq!((index.tainted_nodes(), index.everybody(&pods).len()), (0, 0));
}

#[test]
fn a_node_that_goes_releases_its_pods() {
    let pods = pods(&[pod(1)]);
    let mut index = index();
    assert_eq!(index.delete_node("node", &pods), []);
    index.taint("node", &one("k"), &pods, 0);
    assert_eq!(uids(&index.delete_node("node", &pods)), [uid(1)]);
    assert_eq!(index.verdict(&pod(1), 9), Verdict::Keep);
}

#[test]
fn pods_are_found_whether_they_come_before_or_after_the_taint() {
    let late = pod(1).scheduled(50).tolerating("k", 10);
    let unscheduled = pod(1).with("/spec/nodeName", Value::Null);
    let mut index = index();
    assert_eq!(index.apply_pod(&change(&late)), None, "its node has not been seen");
    assert_eq!(uids(&index.taint("node", &one("k"), &pods(std::slice::from_ref(&late)), 40).pods), [uid(1)]);
    assert_eq!(index.apply_pod(&change(&unscheduled)), None, "it is nowhere");
    assert_eq!(index.apply_pod(&change(&late)).map(|key| key.uid), Some(uid(1)), "it has been scheduled");
    assert_eq!(index.verdict(&late, 55), Verdict::Wait { until: at(60) });
    let gone = Change { old: change(&late).new, new: None };
    assert_eq!(index.apply_pod(&gone), None);
}

#[test]
fn a_taint_without_a_time_is_dated_once_on_its_node() {
    let (pods, mut index) = (pods(&[]), index());
    let kept = written(5, 1);
    assert_eq!(index.taint("node", &one("k"), &pods, 5).annotation, Some(Some(kept.clone())));
    assert_eq!(
        index.taint("node", &one("k"), &pods, 6).annotation,
        Some(Some(kept.clone())),
        "not yet written"
    );
    let dated_once = meta("node", Some(&kept));
    assert_eq!(index.apply_node(&dated_once, &one("k"), true, &pods, at(7)).annotation, None);
    assert_eq!(
        index.apply_node(&dated_once, &[], true, &pods, at(8)).annotation,
        Some(None),
        "the taint is gone"
    );
    let later = written(9, 1);
    let back = index.apply_node(&dated_once, &one("k"), true, &pods, at(9)).annotation;
    assert_eq!(back, Some(Some(later.clone())), "it is back before the old time was removed");
    assert_eq!(
        index.apply_node(&meta("node", Some(&later)), &[], true, &pods, at(10)).annotation,
        Some(None)
    );
    assert_eq!(index.taint("node", &[], &pods, 11), NodeNews::default());
    assert!(index.nodes.is_empty());
    let dated = taints(json!([{"key": "k", "effect": "NoExecute", "timeAdded": at(3).to_string()}]));
    assert_eq!(index.taint("other", &dated, &pods, 5).annotation, None, "it says so itself");
}

#[test]
fn only_what_concerns_pods_counts_as_news_of_a_node() {
    let pods = pods(&[pod(1)]);
    let mut index = index();
    index.taint("node", &one("k"), &pods, 5);
    let written = meta("node", Some(&written(5, 1)));
    assert_eq!(index.apply_node(&written, &one("k"), true, &pods, at(7)).pods, [], "our own writing");
    assert_eq!(uids(&index.apply_node(&written, &one("k"), false, &pods, at(8)).pods), [uid(1)], "not ready");
}

#[test]
fn times_count_for_the_next_leader_unless_taints_changed() {
    let tolerating = pod(1).tolerating("k", 300);
    let pods = pods(std::slice::from_ref(&tolerating));
    let both = taints(json!([{"key": "k", "effect": "NoExecute"}, {"key": "soft", "effect": "NoSchedule"}]));
    let mut first = index();
    let stored = first.apply_node(&meta_changed("node", None, 4), &one("k"), true, &pods, at(5)).annotation;
    assert_eq!(stored, Some(Some(written(5, 4))));
    // Another taint comes while somebody watches: the first one has been there all the time.
    let again = meta_changed("node", Some(&written(5, 4)), 100);
    let stored = first.apply_node(&again, &both, true, &pods, at(101)).annotation;
    assert_eq!(stored, Some(Some(written(5, 100))));
    let stored = written(5, 100);

    let mut next = index();
    let found = next.apply_node(&meta_changed("node", Some(&stored), 100), &both, true, &pods, at(200));
    assert_eq!(found.annotation, None, "nothing is written anew");
    assert_eq!(next.verdict(&tolerating, 200), Verdict::Wait { until: at(305) });

    let mut next = index();
    let found = next.apply_node(&meta_changed("node", Some(&stored), 180), &one("k"), true, &pods, at(200));
    assert_eq!(found.annotation, Some(Some(written(200, 180))), "it may have been removed and set again");
    assert_eq!(next.verdict(&tolerating, 200), Verdict::Wait { until: at(500) });
}

#[test]
fn an_unreadable_node_holds_its_own_pods_and_no_others() {
    let elsewhere = pod(2).with("/spec/nodeName", "other");
    let pods = pods(&[pod(1), elsewhere.clone()]);
    let mut index = index();
    let concerned = index.apply_unreadable_node("node", &pods);
    assert_eq!(concerned.map(|keys| uids(&keys)), Some(vec![uid(1)]));
    assert_eq!(index.apply_unreadable_node("node", &pods), None, "it was so before");
    index.taint("other", &one("k"), &pods, 5);
    assert_eq!((index.unreadable_nodes(), index.tainted_nodes()), (1, 1));
    index.apply_evacuation(uid(1), true, &pods);
    let held = pod(1).read();
    let decision = index.decide(&held, clear_since(-1000), at(9));
    assert_eq!((decision.verdict, decision.release), (Verdict::Hold, false), "it may have to leave");
    assert!(matches!(index.verdict(&elsewhere, 9), Verdict::Act { .. }));

    // What was written before counts as for a new leader.
    let readable = meta_changed("node", Some(&written(5, 4)), 4);
    assert_eq!(uids(&index.apply_node(&readable, &one("k"), true, &pods, at(20)).pods), [uid(1)]);
    assert_eq!(index.verdict(&pod(1).tolerating("k", 30), 20), Verdict::Wait { until: at(35) });
    assert_eq!(index.unreadable_nodes(), 0);
}

#[test]
fn namespaces_and_evacuations_concern_their_pods_on_tainted_nodes() {
    let elsewhere = pod(2).with("/metadata/namespace", "shop");
    let untainted = pod(3).with("/spec/nodeName", "other");
    let pods = pods(&[pod(1), elsewhere.clone(), untainted]);
    let policy = "rules: [{key: '*', namespaceSelector: {matchLabels: {gentle: 'yes'}}, action: Evacuate}]";
    let mut index = Index::new(Policy::from_yaml(policy).unwrap());
    index.taint("node", &one("k"), &pods, 0);
    assert_eq!(index.verdict(&pod(1), 9), Verdict::Hold);
    let gentle = BTreeMap::from([("gentle".to_owned(), "yes".to_owned())]);
    assert_eq!(uids(&index.apply_namespace("shop", gentle.clone(), &pods)), [uid(2)]);
    assert_eq!(index.apply_namespace("shop", gentle, &pods), []);
    assert!(matches!(index.verdict(&elsewhere, 9), Verdict::Act { how: crate::decide::How::Evacuate, .. }));
    assert_eq!(index.apply_evacuation(uid(2), true, &pods).map(|key| key.uid), Some(uid(2)));
    assert_eq!(index.apply_evacuation(uid(2), true, &pods), None);
    assert_eq!(index.verdict(&elsewhere, 9), Verdict::Leaving { again: None });
    index.taint("node", &[], &pods, 10);
    assert!(index.decide(&elsewhere.read(), clear_since(0), at(11)).release);
    assert!(index.apply_pod(&change(&elsewhere)).is_some(), "its Evacuation has to be released");
    assert_eq!(uids(&index.everybody(&pods)), [uid(2)], "it may have to be released");
    index.evacuation_past_recall(uid(2));
    assert!(index.apply_evacuation(uid(2), true, &pods).is_some(), "its evacuator may allow it now");
    assert_eq!(index.apply_evacuation(uid(2), true, &pods), None);
    assert!(index.apply_evacuation(uid(2), false, &pods).is_some());
    assert!(index.apply_pod(&change(&elsewhere)).is_none());
    index.delete_namespace("shop");
    assert_eq!(index.apply_evacuation(uid(9), true, &pods), None, "its pod has not been seen");
}

#[test]
fn a_new_policy_concerns_everybody_on_tainted_nodes() {
    let pods = pods(&[pod(1), pod(2).with("/spec/nodeName", "other")]);
    let mut index = index();
    index.taint("node", &one("k"), &pods, 0);
    let ignore = Policy::from_yaml("rules: [{key: '*', action: Ignore}]").unwrap();
    assert_eq!(uids(&index.set_policy(ignore, &pods)), [uid(1)]);
    assert_eq!(index.verdict(&pod(1), 9), Verdict::Keep);
}

proptest! {
    /// A process that starts at any time with nothing but what is stored decides as one that was always there.
    #[test]
    fn a_restart_at_any_instant_changes_no_decision(
        added in proptest::collection::vec(("[ab]", proptest::option::of(0i64..100)), 1..3),
        seconds in proptest::collection::vec(proptest::option::of(0i64..300), 2),
        scheduled in 0i64..200,
        seen in 100i64..200,
        restart in 0i64..400,
        asked in 0i64..400,
    ) {
        let on_node: Vec<_> = added.into_iter().map(|(key, added)| {
            let mut taint = json!({"key": key, "effect": "NoExecute"});
            if let Some(added) = added {
                taint["timeAdded"] = at(added).to_string().into();
            }
            taint
        }).collect();
        let on_node = taints(json!(on_node));
        let judged = pod(1).scheduled(scheduled).tolerating("a", seconds[0]).tolerating("b", seconds[1]);
        let pods = pods(std::slice::from_ref(&judged));
        let mut always = index();
        let stored = always.taint("node", &on_node, &pods, seen).annotation.flatten();
        let (restart, asked) = (seen + restart, seen + restart + asked);
        let mut restarted = index();
        let news = restarted.apply_node(&meta("node", stored.as_deref()), &on_node, true, &pods, at(restart));
        prop_assert_eq!(news.annotation, None, "nothing is written anew");
        prop_assert_eq!(restarted.verdict(&judged, asked), always.verdict(&judged, asked));
    }
}

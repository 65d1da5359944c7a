//! Which pods an event affects, in any order of events, what is written to Nodes, and the next step for a pod.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::watch_gap::WATCHES;
use super::*;
use crate::testing::{Json, at, pod, uid};

fn pods(all: &[Json]) -> PodIndex {
    let mut pods = PodIndex::default();
    for pod in all {
        pods.apply(pod.read());
    }
    pods
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
    serde_json::from_value(
        json!({"name": name, "uid": "uid of node", "annotations": annotations, "managedFields": [entry]}),
    )
    .unwrap()
}

/// The annotation for a taint `k` that was first observed at this second.
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

/// The result of a change of a node.
#[derive(Debug, Default, PartialEq)]
struct Applied {
    pods: Vec<Key>,
    /// The new value of the annotation; the inner `None` removes it.
    #[allow(clippy::option_option, reason = "a change of something that may be absent")]
    annotation: Option<Option<String>>,
}

impl State {
    fn node(
        &mut self,
        meta: &ObjectMeta,
        taints: &[core::Taint],
        ready: bool,
        pods: &PodIndex,
        now: Timestamp,
    ) -> Applied {
        let name = meta.name.as_deref().unwrap();
        let pods = self.apply_node(name, meta, taints, ready, pods, now);
        Applied { pods, annotation: self.unwritten_annotation(name).map(|to_write| to_write.value.clone()) }
    }

    fn taint(&mut self, node: &str, taints: &[core::Taint], pods: &PodIndex, now: i64) -> Applied {
        self.node(&meta(node, None), taints, true, pods, at(now))
    }

    fn verdict(&self, pod: &Json, now: i64) -> Verdict {
        self.decide(&pod.read(), at(now)).verdict
    }
}

/// A state whose watches have been synced for long.
fn with_policy(rules: &str, rate: Option<f64>) -> State {
    let policy = Policy::from_yaml(&format!("rules: [{rules}]")).unwrap();
    let mut state = State::new(policy, SignedDuration::from_secs(60), rate);
    for watch in WATCHES {
        state.gaps.end(watch, at(-1000));
    }
    state
}

fn state() -> State {
    with_policy("", None)
}

/// It may have been created and deleted in a watch gap, so that the watch never delivers it.
#[test]
fn evacuation_that_is_never_delivered_is_requested_again() {
    let (pod, pods) = (pod(1).read(), pods(&[pod(1)]));
    let mut state = with_policy("{key: k, action: Evacuate}", None);
    state.taint("node", &one("k"), &pods, 0);
    let acts = |state: &mut State, now: i64| {
        let step = state.next(&pod, at(now));
        (step.act.map(|(how, _)| how), step.requeue_at)
    };
    assert_eq!(acts(&mut state, 0).0, Some(RemovalAction::Evacuate));
    assert_eq!(state.evacuation_created(&pod, at(1)).map(|key| key.uid), Some(uid(1)));
    assert_eq!(acts(&mut state, 1), (None, Some(at(11))), "the watch may deliver it");
    assert_eq!(acts(&mut state, 11).0, Some(RemovalAction::Evacuate));
    state.evacuation_created(&pod, at(11));
    state.apply_evacuation(uid(1), true, &pods);
    assert_eq!(acts(&mut state, 12), (None, None), "the watch has delivered it");
    state.evacuation_created(&pod, at(13));
    assert_eq!(acts(&mut state, 14), (None, None), "the answer comes after the watch");
}

#[test]
fn taint_affects_pods_of_its_node_when_added_and_removed() {
    let pods = pods(&[pod(1), pod(2), pod(3).with("/spec/nodeName", "other")]);
    let mut state = state();
    assert_eq!(state.taint("node", &[], &pods, 0), Applied::default(), "no taint");
    let soft = taints(json!([{"key": "k", "effect": "NoSchedule"}]));
    assert_eq!(state.taint("node", &soft, &pods, 0), Applied::default(), "a taint without effect on pods");
    assert_eq!(uids(&state.taint("node", &one("k"), &pods, 5).pods), [uid(1), uid(2)]);
    assert_eq!(state.taint("node", &one("k"), &pods, 6).pods, [], "nothing new");
    assert_eq!(uids(&state.taint("node", &one("l"), &pods, 7).pods), [uid(1), uid(2)]);
    assert_eq!((state.tainted_nodes(), state.all_keys(&pods).len()), (1, 2));
    assert_eq!(uids(&state.taint("node", &[], &pods, 8).pods), [uid(1), uid(2)]);
    assert_eq!((state.tainted_nodes(), state.all_keys(&pods).len()), (0, 0));
}

#[test]
fn deleted_node_releases_its_pods() {
    let pods = pods(&[pod(1)]);
    let mut state = state();
    assert_eq!(state.delete_node("node", &pods), []);
    state.taint("node", &one("k"), &pods, 0);
    assert_eq!(uids(&state.delete_node("node", &pods)), [uid(1)]);
    assert_eq!(state.verdict(&pod(1), 9), Verdict::Keep);
}

#[test]
fn pod_and_taint_may_arrive_in_any_order() {
    let late = pod(1).scheduled(50).tolerating("k", 10);
    let unscheduled = pod(1).with("/spec/nodeName", Value::Null);
    let mut state = state();
    assert_eq!(state.apply_pod(&change(&late)), None, "its node is unknown");
    assert_eq!(uids(&state.taint("node", &one("k"), &pods(std::slice::from_ref(&late)), 40).pods), [uid(1)]);
    assert_eq!(state.apply_pod(&change(&unscheduled)), None, "it has no node");
    assert_eq!(state.apply_pod(&change(&late)).map(|key| key.uid), Some(uid(1)), "it has been scheduled");
    assert_eq!(state.verdict(&late, 55), Verdict::Wait { until: at(60) });
    let gone = Change { old: change(&late).new, new: None };
    assert_eq!(state.apply_pod(&gone), None);
}

#[test]
fn taint_without_time_added_is_recorded_once() {
    let (pods, mut state) = (pods(&[]), state());
    let kept = written(5, 1);
    assert_eq!(state.taint("node", &one("k"), &pods, 5).annotation, Some(Some(kept.clone())));
    assert_eq!(
        state.taint("node", &one("k"), &pods, 6).annotation,
        Some(Some(kept.clone())),
        "not yet written"
    );
    let dated_once = meta("node", Some(&kept));
    assert_eq!(state.node(&dated_once, &one("k"), true, &pods, at(7)).annotation, None);
    assert_eq!(state.node(&dated_once, &[], true, &pods, at(8)).annotation, Some(None), "the taint is gone");
    let later = written(9, 1);
    let back = state.node(&dated_once, &one("k"), true, &pods, at(9)).annotation;
    assert_eq!(back, Some(Some(later.clone())), "it is back before the old time was removed");
    assert_eq!(state.node(&meta("node", Some(&later)), &[], true, &pods, at(10)).annotation, Some(None));
    assert_eq!(state.taint("node", &[], &pods, 11), Applied::default());
    assert!(state.nodes.is_empty());
    let dated = taints(json!([{"key": "k", "effect": "NoExecute", "timeAdded": at(3).to_string()}]));
    assert_eq!(state.taint("other", &dated, &pods, 5).annotation, None, "it has timeAdded");
}

#[test]
fn only_relevant_node_changes_enqueue_pods() {
    let pods = pods(&[pod(1)]);
    let mut state = state();
    state.taint("node", &one("k"), &pods, 5);
    let written = meta("node", Some(&written(5, 1)));
    assert_eq!(state.node(&written, &one("k"), true, &pods, at(7)).pods, [], "our own write");
    assert_eq!(uids(&state.node(&written, &one("k"), false, &pods, at(8)).pods), [uid(1)], "not ready");
}

#[test]
fn new_leader_uses_times_unless_taints_changed() {
    let tolerating = pod(1).tolerating("k", 300);
    let pods = pods(std::slice::from_ref(&tolerating));
    let both = taints(json!([{"key": "k", "effect": "NoExecute"}, {"key": "soft", "effect": "NoSchedule"}]));
    let mut first = state();
    let stored = first.node(&meta_changed("node", None, 4), &one("k"), true, &pods, at(5)).annotation;
    assert_eq!(stored, Some(Some(written(5, 4))));
    // Another taint is added while we watch, so the first one was not removed.
    let requeue_at = meta_changed("node", Some(&written(5, 4)), 100);
    let stored = first.node(&requeue_at, &both, true, &pods, at(101)).annotation;
    assert_eq!(stored, Some(Some(written(5, 100))));
    let stored = written(5, 100);

    let mut next = state();
    let found = next.node(&meta_changed("node", Some(&stored), 100), &both, true, &pods, at(200));
    assert_eq!(found.annotation, None, "nothing is written again");
    assert_eq!(next.verdict(&tolerating, 200), Verdict::Wait { until: at(305) });

    let mut next = state();
    let found = next.node(&meta_changed("node", Some(&stored), 180), &one("k"), true, &pods, at(200));
    assert_eq!(found.annotation, Some(Some(written(200, 180))), "it may have been removed and set again");
    assert_eq!(next.verdict(&tolerating, 200), Verdict::Wait { until: at(500) });
}

#[test]
fn unreadable_node_affects_only_its_own_pods() {
    let elsewhere = pod(2).with("/spec/nodeName", "other");
    let pods = pods(&[pod(1), elsewhere.clone()]);
    let mut state = state();
    let affected = state.apply_unreadable_node("node", &pods);
    assert_eq!(affected.map(|keys| uids(&keys)), Some(vec![uid(1)]));
    assert_eq!(state.apply_unreadable_node("node", &pods), None, "it was unreadable before");
    state.taint("other", &one("k"), &pods, 5);
    assert_eq!((state.unreadable_nodes(), state.tainted_nodes()), (1, 1));
    state.apply_evacuation(uid(1), true, &pods);
    let held = pod(1).read();
    let decision = state.decide(&held, at(9));
    assert_eq!((decision.verdict, decision.release), (Verdict::Hold, false), "it may have to leave");
    assert!(matches!(state.verdict(&elsewhere, 9), Verdict::Act { .. }));

    // The stored annotation counts, as for a new leader.
    let readable = meta_changed("node", Some(&written(5, 4)), 4);
    assert_eq!(uids(&state.node(&readable, &one("k"), true, &pods, at(20)).pods), [uid(1)]);
    assert_eq!(state.verdict(&pod(1).tolerating("k", 30), 20), Verdict::Wait { until: at(35) });
    assert_eq!(state.unreadable_nodes(), 0);
}

#[test]
fn namespaces_and_evacuations_affect_their_pods() {
    let elsewhere = pod(2).with("/metadata/namespace", "shop");
    let untainted = pod(3).with("/spec/nodeName", "other");
    let pods = pods(&[pod(1), elsewhere.clone(), untainted]);
    let rule = "{key: '*', namespaceSelector: {matchLabels: {gentle: 'yes'}}, action: Evacuate}";
    let mut state = with_policy(rule, None);
    state.taint("node", &one("k"), &pods, 0);
    assert_eq!(state.verdict(&pod(1), 9), Verdict::Hold);
    let gentle = BTreeMap::from([("gentle".to_owned(), "yes".to_owned())]);
    assert_eq!(uids(&state.apply_namespace("shop", gentle.clone(), &pods)), [uid(2)]);
    assert_eq!(state.apply_namespace("shop", gentle, &pods), []);
    assert!(matches!(state.verdict(&elsewhere, 9), Verdict::Act { how: RemovalAction::Evacuate, .. }));
    assert_eq!(state.apply_evacuation(uid(2), true, &pods).map(|key| key.uid), Some(uid(2)));
    assert_eq!(state.apply_evacuation(uid(2), true, &pods), None);
    assert_eq!(state.verdict(&elsewhere, 9), Verdict::Leaving { requeue_at: None });
    state.taint("node", &[], &pods, 10);
    assert!(state.decide(&elsewhere.read(), at(11)).release);
    assert!(state.apply_pod(&change(&elsewhere)).is_some(), "its Evacuation has to be released");
    assert_eq!(uids(&state.all_keys(&pods)), [uid(2)], "it may have to be released");
    state.set_uncancellable(uid(2));
    assert!(state.apply_evacuation(uid(2), true, &pods).is_some(), "its evacuator may allow it now");
    assert_eq!(state.apply_evacuation(uid(2), true, &pods), None);
    assert!(state.apply_evacuation(uid(2), false, &pods).is_some());
    assert!(state.apply_pod(&change(&elsewhere)).is_none());
    state.delete_namespace("shop");
    assert_eq!(state.apply_evacuation(uid(9), true, &pods), None, "its pod is unknown");
}

#[test]
fn new_policy_affects_all_pods_on_tainted_nodes() {
    let pods = pods(&[pod(1), pod(2).with("/spec/nodeName", "other")]);
    let mut state = state();
    state.taint("node", &one("k"), &pods, 0);
    let ignore = Policy::from_yaml("rules: [{key: '*', action: Ignore}]").unwrap();
    assert_eq!(uids(&state.set_policy(ignore, &pods)), [uid(1)]);
    assert_eq!(state.verdict(&pod(1), 9), Verdict::Keep);
}

fn step(
    state: &mut State,
    pod: &Json,
    now: i64,
) -> (Option<RemovalAction>, Option<Timestamp>, Option<String>) {
    let step = state.next(&pod.read(), at(now));
    (step.act.map(|(how, _)| how), step.requeue_at, step.event.map(|event| event.note))
}

#[test]
fn pod_waits_is_cancelled_waits_again_and_leaves() {
    let mut state = with_policy("", None);
    let pod = pod(1).tolerating("k", 10);
    state.taint("node", &one("k"), &PodIndex::default(), 100);
    assert_eq!(step(&mut state, &pod, 101), (None, Some(at(110)), None));
    state.taint("node", &[], &PodIndex::default(), 105);
    let cancelled = Some("Cancelling deletion of Pod default/pod-1".to_owned());
    assert_eq!(step(&mut state, &pod, 105), (None, None, cancelled));
    state.taint("node", &one("k"), &PodIndex::default(), 107);
    assert_eq!(step(&mut state, &pod, 110), (None, Some(at(117)), None), "its time starts again");
    let marked = Some("Marking for deletion Pod default/pod-1".to_owned());
    assert_eq!(step(&mut state, &pod, 117), (Some(RemovalAction::Delete), None, marked));
    assert_eq!(
        step(&mut state, &pod, 118),
        (Some(RemovalAction::Delete), None, None),
        "a retry is no new event"
    );
    let leaving = pod.terminating(148, 30);
    assert_eq!(step(&mut state, &leaving, 119), (None, None, None));
    assert_eq!(state.pending_pods(), 0);
}

#[test]
fn pod_that_stays_releases_its_rate_limit_slot() {
    let mut state = with_policy("{key: soft, action: Evacuate}", Some(1.0));
    state.taint("node", &one("k"), &PodIndex::default(), 100);
    let marked = |n: u32| Some(format!("Marking for deletion Pod default/pod-{n}"));
    assert_eq!(step(&mut state, &pod(1), 100), (Some(RemovalAction::Delete), None, marked(1)));
    assert_eq!(step(&mut state, &pod(2), 100), (None, Some(at(101)), None));
    assert_eq!(step(&mut state, &pod(3), 100), (None, Some(at(102)), None));
    let keep_reason = pod(2).tolerating("k", None);
    let cancelled = Some("Cancelling deletion of Pod default/pod-2".to_owned());
    assert_eq!(step(&mut state, &keep_reason, 100), (None, None, cancelled));
    assert_eq!(step(&mut state, &pod(3), 102), (Some(RemovalAction::Delete), None, marked(3)));
    assert_eq!(step(&mut state, &pod(2), 102), (None, Some(at(103)), None), "it gets a new time");
    state.taint("node", &one("soft"), &PodIndex::default(), 102);
    assert_eq!(
        step(&mut state, &pod(4), 102).0,
        Some(RemovalAction::Evacuate),
        "evacuations are not rate limited"
    );
}

#[test]
fn deleted_pod_is_removed() {
    let mut state = with_policy("", Some(1.0));
    state.taint("node", &one("k"), &PodIndex::default(), 100);
    step(&mut state, &pod(1), 100);
    step(&mut state, &pod(2), 100);
    assert_eq!(state.pending_pods(), 2);
    for n in [1, 2] {
        state.apply_pod(&Change { old: Some(Arc::new(pod(n).read())), new: None });
    }
    assert_eq!(state.pending_pods(), 0);
}

#[test]
fn new_leader_waits_for_the_grace_period() {
    let mut state = State::new(Policy::default(), SignedDuration::from_secs(60), None);
    state.taint("node", &one("k"), &PodIndex::default(), 100);
    assert_eq!(step(&mut state, &pod(1), 100), (None, None, None), "watches are not synced");
    for watch in WATCHES {
        state.gaps.end(watch, at(101));
    }
    assert_eq!(step(&mut state, &pod(1), 101), (None, Some(at(161)), None));
    assert_eq!(step(&mut state, &pod(1), 161).0, Some(RemovalAction::Delete));
}

proptest! {
    /// A process that starts at any time, with only stored state, makes the same decisions as one that always ran.
    #[test]
    fn restart_at_any_time_changes_no_decision(
        added in proptest::collection::vec(("[ab]", proptest::option::of(0i64..100)), 1..3),
        seconds in proptest::collection::vec(proptest::option::of(0i64..300), 2),
        scheduled in 0i64..200,
        observed in 100i64..200,
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
        let pod_json = pod(1).scheduled(scheduled).tolerating("a", seconds[0]).tolerating("b", seconds[1]);
        let pods = pods(std::slice::from_ref(&pod_json));
        let mut always = state();
        let stored = always.taint("node", &on_node, &pods, observed).annotation.flatten();
        let (restart, asked) = (observed + restart, observed + restart + asked);
        let mut restarted = state();
        let applied = restarted.node(&meta("node", stored.as_deref()), &on_node, true, &pods, at(restart));
        prop_assert_eq!(applied.annotation, None, "nothing is written again");
        prop_assert_eq!(restarted.verdict(&pod_json, asked), always.verdict(&pod_json, asked));
    }
}

#[test]
fn conflicts_are_reported_once_and_in_bounded_number() {
    let mut state = State::new(Policy::default(), SignedDuration::ZERO, None);
    let reported = (0..1_000).filter(|n| state.apply_conflict(&format!("{n}{}", "x".repeat(10_000)))).count();
    assert_eq!(reported, MAX_CONFLICTS);
    assert!(state.apply_conflict("taint-eviction-controller"), "others cannot hide it");
    assert!(!state.apply_conflict("taint-eviction-controller"));
    assert!(state.conflicts.iter().all(|source| source.len() <= bounded::MAX_TEXT));
}

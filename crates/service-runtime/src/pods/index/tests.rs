use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::pods::testing::{Json, pod, uid};

fn on(node: &str, pod: Json) -> Pod {
    pod.with("/spec/nodeName", node).read()
}

/// The nodes that have pods.
fn nodes(index: &PodIndex) -> impl Iterator<Item = &str> {
    index.by_node.keys().map(AsRef::as_ref)
}

/// The changes as UIDs and versions.
fn summary(changes: &[Change]) -> Vec<(Uid, Option<u64>, Option<u64>)> {
    let version = |pod: &Option<Arc<Pod>>| pod.as_ref().map(|pod| pod.version);
    changes.iter().map(|c| (c.pod().unwrap().uid, version(&c.old), version(&c.new))).collect()
}

#[test]
fn pod_is_found_by_uid_name_and_node_until_deleted() {
    let mut index = PodIndex::default();
    index.apply(pod(1).read());
    assert!(index.get(uid(1)).is_some() && index.find("default", "pod-1").is_some());
    assert_eq!((nodes(&index).count(), index.len()), (0, 1));
    index.apply(on("a", pod(1)));
    index.apply(on("a", pod(2)));
    index.apply(on("b", pod(3)));
    assert_eq!(index.on_node("a").iter().map(|pod| pod.uid).collect::<Vec<_>>(), [uid(1), uid(2)]);
    assert_eq!(index.find("other", "pod-1"), None);
    assert!(index.delete(uid(1)).is_some());
    assert!(index.delete(uid(1)).is_none(), "it cannot go twice");
    assert_eq!((index.get(uid(1)), index.find("default", "pod-1")), (None, None));
    index.delete(uid(2));
    assert!(index.on_node("a").is_empty());
    assert_eq!(nodes(&index).collect::<Vec<_>>(), ["b"], "nodes without pods leave nothing behind");
    index.delete(uid(3));
    assert!(index.is_empty() && index.by_namespace.is_empty() && index.by_node.is_empty());
}

#[test]
fn change_has_both_states_and_new_version_alone_is_none() {
    let mut index = PodIndex::default();
    let version = |version: &str| pod(1).with("/metadata/resourceVersion", version);
    assert_eq!(summary(&index.apply(version("1").read())), [(uid(1), None, Some(1))]);
    assert_eq!(summary(&index.apply(version("2").read())), []);
    assert_eq!(index.get(uid(1)).unwrap().version, 2, "the version is new all the same");
    assert_eq!(
        summary(&index.apply(version("3").with("/status/phase", "Failed").read())),
        [(uid(1), Some(2), Some(3))]
    );
    assert_eq!(summary(index.delete(uid(1)).as_slice()), [(uid(1), Some(3), None)]);
}

#[test]
fn recreated_pod_is_another_pod() {
    let mut index = PodIndex::default();
    let named = |n: u32| pod(n).with("/metadata/name", "web-0");
    index.apply(on("a", named(1)));
    assert_eq!(summary(&index.apply(on("b", named(2)))), [(uid(1), Some(1), None), (uid(2), None, Some(1))]);
    assert!(index.on_node("a").is_empty());
    assert!(index.delete(uid(1)).is_none(), "a late word of the old one does no harm");
    assert_eq!(index.find("default", "web-0").map(|pod| pod.uid), Some(uid(2)));
}

#[test]
fn pods_missing_from_a_new_list_are_deleted() {
    let mut index = PodIndex::default();
    (1..=4).for_each(|n| assert_eq!(index.apply(pod(n).read()).len(), 1));
    let mut gone = summary(&index.retain(&[uid(3), uid(4), uid(5)].into()));
    gone.sort();
    assert_eq!(gone, [(uid(1), Some(1), None), (uid(2), Some(1), None)]);
    assert_eq!(index.len(), 2);
}

/// An event. There are only a few pods, names and nodes, so that they often coincide.
#[derive(Clone, Debug)]
enum Event {
    Apply(PodState),
    Delete(u32),
    /// An incomplete list, followed by a complete one.
    Relist(Vec<PodState>, Vec<PodState>),
}

#[derive(Clone, Debug)]
struct PodState {
    uid: u32,
    node: Option<u8>,
    phase: &'static str,
    version: u32,
}

impl PodState {
    /// A pod never changes its name. Several pods have the same name, one after the other.
    fn json(&self) -> Json {
        let node = self.node.map_or(json!(null), |node| json!(format!("node-{node}")));
        pod(self.uid)
            .with("/metadata/name", format!("pod-{}", self.uid % 5))
            .with("/metadata/resourceVersion", self.version.to_string())
            .with("/spec/nodeName", node)
            .with("/status/phase", self.phase)
    }
}

fn any_pod() -> impl Strategy<Value = PodState> {
    (0..15_u32, proptest::option::of(0..3_u8), proptest::sample::select(vec!["Pending", "Running"]), 1..9_u32)
        .prop_map(|(uid, node, phase, version)| PodState { uid, node, phase, version })
}

fn event() -> impl Strategy<Value = Event> {
    let list = || proptest::collection::vec(any_pod(), 0..8);
    prop_oneof![
        6 => any_pod().prop_map(Event::Apply),
        3 => (0..15_u32).prop_map(Event::Delete),
        1 => (list(), list()).prop_map(|(broken, whole)| Event::Relist(broken, whole)),
    ]
}

/// A naive model: all pods by name.
#[derive(Default)]
struct Model(BTreeMap<String, Pod>);

impl Model {
    fn apply(&mut self, pod: &Pod) {
        self.0.insert(pod.name.to_string(), pod.clone());
    }
}

/// Applies the changes like a subscriber.
#[derive(Default)]
struct Subscriber(BTreeMap<Uid, Arc<Pod>>);

impl Subscriber {
    fn apply(&mut self, changes: Vec<Change>) {
        for change in changes {
            let before = change.old.as_ref().map(|pod| pod.uid);
            let uid = change.pod().unwrap().uid;
            assert_eq!(
                self.0.remove(&uid).map(|pod| pod.uid),
                before,
                "the old state is the last reported one"
            );
            self.0.extend(change.new.map(|pod| (uid, pod)));
        }
    }
}

proptest! {
    #[test]
    fn index_and_subscriber_equal_a_naive_model(
        events in proptest::collection::vec(event(), 0..60),
    ) {
        let (mut index, mut model, mut subscriber) = (PodIndex::default(), Model::default(), Subscriber::default());
        for event in events {
            match event {
                Event::Apply(state) => {
                    let pod = state.json().read();
                    model.apply(&pod);
                    subscriber.apply(index.apply(pod));
                }
                Event::Delete(n) => {
                    model.0.retain(|_, pod| pod.uid != uid(n));
                    subscriber.apply(index.delete(uid(n)).into_iter().collect());
                }
                Event::Relist(broken, whole) => {
                    for state in &broken {
                        subscriber.apply(index.apply(state.json().read()));
                    }
                    model.0.clear();
                    let mut listed = HashSet::new();
                    for state in &whole {
                        let pod = state.json().read();
                        model.apply(&pod);
                        listed.insert(pod.uid);
                        subscriber.apply(index.apply(pod));
                    }
                    subscriber.apply(index.retain(&listed));
                }
            }
            check(&index, &model, &subscriber)?;
        }
    }
}

fn check(index: &PodIndex, model: &Model, subscriber: &Subscriber) -> Result<(), TestCaseError> {
    let by_uid: BTreeMap<_, _> = model.0.values().map(|pod| (pod.uid, pod.clone())).collect();
    let indexed: BTreeMap<_, _> = index.iter().map(|pod| (pod.uid, (**pod).clone())).collect();
    prop_assert_eq!(&indexed, &by_uid);
    prop_assert_eq!(index.len(), by_uid.len());
    prop_assert_eq!(index.by_namespace.values().map(HashSet::len).sum::<usize>(), by_uid.len());
    for pod in by_uid.values() {
        prop_assert_eq!(index.get(pod.uid).map(AsRef::as_ref), Some(pod));
        prop_assert_eq!(index.find(&pod.namespace, &pod.name).map(AsRef::as_ref), Some(pod));
    }
    let mut by_node: BTreeMap<&str, Vec<Uid>> = BTreeMap::new();
    for pod in by_uid.values() {
        if let Some(node) = pod.node.as_deref() {
            by_node.entry(node).or_default().push(pod.uid);
        }
    }
    let indexed: BTreeMap<_, Vec<_>> =
        nodes(index).map(|node| (node, index.on_node(node).iter().map(|pod| pod.uid).collect())).collect();
    prop_assert_eq!(indexed, by_node);
    let unversioned = |pod: &Pod| Pod { version: 0, ..pod.clone() };
    let reported: Vec<_> = subscriber.0.values().map(|pod| unversioned(pod)).collect();
    prop_assert_eq!(reported, by_uid.values().map(unversioned).collect::<Vec<_>>());
    Ok(())
}

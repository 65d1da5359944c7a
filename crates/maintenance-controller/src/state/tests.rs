//! What follows from what is told, without a cluster.

use serde_json::{Value, json};

use super::returns::Returns;
use super::*;
use crate::seen::{SlimEvacuation, SlimNode};
use crate::testing::at;

const POD: &str = "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11";

struct World {
    state: State,
    pods: PodIndex,
    version: u32,
    now: Timestamp,
}

impl World {
    /// A pod on a node under a maintenance that drains; everything is told in the order given.
    fn new(order: &[&str]) -> Self {
        let mut world = Self {
            state: State::new(Served::DEFAULT, at(0)),
            pods: PodIndex::default(),
            version: 0,
            now: at(0),
        };
        for thing in order {
            match *thing {
                "node" => world.node(true),
                "pod" => world.pod(json!({})),
                "maintenance" => world.maintenance("Drain", &["Drain"]),
                other => panic!("{other}"),
            }
        }
        world.settle();
        world
    }

    fn settle(&mut self) -> BTreeSet<Work> {
        while !self.state.settle(&self.pods, self.now) {}
        self.state.take_changed()
    }

    fn meta(&mut self, name: &str, more: Value) -> Value {
        self.version += 1;
        let mut meta = json!({"name": name, "uid": format!("uid of {name}"), "resourceVersion": self.version.to_string()});
        meta.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        meta
    }

    fn node(&mut self, cordoned: bool) {
        self.node_that_reports(cordoned, &[]);
    }

    fn node_that_reports(&mut self, cordoned: bool, volumes: &[&str]) {
        self.node_with(cordoned, volumes, &[json!({"podPriority": i32::MAX})]);
    }

    /// A node whose annotation names these maintenances, which have reached all Default pods.
    fn node_of(&mut self, cordoned: bool, maintenances: &Value) {
        let targets = [json!({"podPriority": i32::MAX})];
        self.node_from(cordoned, &[], &json!({"drainTargets": targets, "maintenances": maintenances}));
    }

    fn node_with(&mut self, cordoned: bool, volumes: &[&str], targets: &[Value]) {
        self.node_from(cordoned, volumes, &json!({"drainTargets": targets}));
    }

    fn node_from(&mut self, cordoned: bool, volumes: &[&str], status: &Value) {
        let status = status.to_string();
        let annotations = json!({"nodemaintenance.k8s.io/maintenance-status": status});
        let metadata = self.meta("n1", json!({"labels": {"pool": "blue"}, "annotations": annotations}));
        let volumes: Vec<_> = volumes.iter().map(|name| json!({"name": name, "devicePath": "x"})).collect();
        let node = json!({
            "metadata": metadata,
            "spec": {"unschedulable": cordoned},
            "status": {"volumesAttached": volumes},
        });
        let node: SlimNode = serde_json::from_value(node).unwrap();
        self.state.apply_node("n1".into(), NodeSeen::new(node));
    }

    fn pod(&mut self, more: Value) {
        self.pod_with(more, json!([]));
    }

    fn pod_with(&mut self, more: Value, tolerations: Value) {
        let metadata = self.meta("web-1", json!({"namespace": "shop", "uid": POD}));
        let mut pod = json!({
            "metadata": metadata,
            "spec": {
                "nodeName": "n1",
                "tolerations": tolerations,
                "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
            },
            "status": {"phase": "Running"},
        });
        pod["metadata"].as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let pod = Pod::from_json(pod.to_string().as_bytes()).unwrap();
        for change in self.pods.apply(pod) {
            self.state.apply_pod(&change, self.now);
        }
    }

    fn maintenance(&mut self, stage: &str, begun: &[&str]) {
        self.maintenance_since(stage, begun, "2026-01-01T00:00:00Z");
    }

    fn maintenance_since(&mut self, stage: &str, begun: &[&str], since: &str) {
        let metadata =
            self.meta("m", json!({"finalizers": ["nodemaintenance.k8s.io/maintenance-completion"]}));
        let begun: Vec<_> = begun.iter().map(|name| json!({"name": name, "startTimestamp": since})).collect();
        let object = json!({
            "metadata": metadata,
            "spec": {
                "stage": stage,
                "nodeSelector": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "Exists"}]}]},
            },
            "status": {"stageStatuses": begun},
        });
        self.state.apply_maintenance(serde_json::from_value(object).unwrap()).unwrap();
    }

    fn evacuation(&mut self, finalizers: &[&str]) {
        self.evacuation_with(json!({"finalizers": finalizers}), json!({}));
    }

    fn evacuation_with(&mut self, metadata: Value, status: Value) {
        let mut metadata = metadata;
        metadata["namespace"] = json!("shop");
        let metadata = self.meta(&format!("{POD}-web-1"), metadata);
        let evacuation = json!({"metadata": metadata, "status": status});
        let evacuation: SlimEvacuation = serde_json::from_value(evacuation).unwrap();
        self.state.apply_evacuation(uid(), EvacuationSeen::new(evacuation), &self.pods);
    }

    fn attach(&mut self, name: &str, volume: Option<&str>) {
        self.attach_with(name, volume, json!({"attached": true}));
    }

    fn attach_with(&mut self, name: &str, volume: Option<&str>, status: Value) {
        let metadata = self.meta(name, json!({}));
        let seen = volume.and_then(|volume| {
            let object = json!({"metadata": metadata, "status": status,
                "spec": {"nodeName": "n1", "source": {"persistentVolumeName": volume}}});
            AttachmentSeen::new(serde_json::from_value(object).unwrap())
        });
        self.state.apply_attachment(name.into(), seen);
    }

    fn desired(&mut self) -> Option<Desired> {
        self.settle();
        let pod = self.pods.get(uid()).unwrap().clone();
        self.state.pod(&pod, &self.pods, self.now).unwrap().0
    }

    fn plan(&mut self) -> NodePlan {
        self.settle();
        self.state.node(&"n1".into(), &self.pods, self.now).unwrap().unwrap().1
    }

    /// What is said of the maintenance: its blockers, and what it waits for.
    fn said(&mut self) -> (Vec<String>, Vec<&'static str>) {
        self.settle();
        let (_, plan) = self.state.maintenance(&"m".into(), &self.pods, self.now).unwrap().unwrap();
        let blocker = |(node, blocker): &(Option<Arc<str>>, haulout_drain_planner::Blocker)| {
            let pod = blocker.pod.as_ref().map_or("-", |pod| &*pod.name);
            format!("{} {pod} {}", node.as_deref().unwrap_or("-"), blocker.reason)
        };
        let waiting = plan.waiting_for.iter().map(|(_, awaited)| awaited.waiting.reason());
        (plan.blockers.iter().map(blocker).collect(), waiting.collect())
    }

    fn undone(&mut self) -> usize {
        self.settle();
        self.state.pods_to_reconcile("n1", &self.pods, self.now).len()
    }

    /// The pod is gone.
    fn pod_gone(&mut self) {
        let change = self.pods.delete(uid()).unwrap();
        self.state.apply_pod(&change, self.now);
    }
}

fn uid() -> Uid {
    POD.parse().unwrap()
}

fn evacuate() -> Desired {
    Desired::Evacuate { why: "m".into() }
}

fn ours() -> String {
    haulout_api_types::instigators::finalizer("nodemaintenance.k8s.io")
}

#[test]
fn a_pod_is_wanted_gone_in_whatever_order_things_are_told() {
    for order in [
        ["node", "pod", "maintenance"],
        ["pod", "node", "maintenance"],
        ["maintenance", "pod", "node"],
        ["maintenance", "node", "pod"],
    ] {
        let mut world = World::new(&order);
        assert_eq!((world.desired(), world.undone()), (Some(evacuate()), 1), "{order:?}");
    }
}

#[test]
fn nobody_is_asked_to_leave_before_the_node_is_cordoned() {
    let mut world = World::new(&["node", "pod", "maintenance"]);
    world.node(false);
    assert_eq!(world.desired(), None);
    world.node(true);
    assert_eq!(world.desired(), Some(evacuate()));
}

#[test]
fn nobody_is_asked_to_leave_before_the_node_announces_it() {
    let mut world = World::new(&["node", "pod", "maintenance"]);
    for (targets, announced) in [
        (vec![], false),
        (vec![json!({"podPriority": i32::MAX, "podType": "DaemonSet"})], false),
        (vec![json!({"podPriority": 0, "podSelector": {"matchLabels": {"app": "other"}}})], false),
        (vec![json!({"podPriority": 1000})], true),
    ] {
        world.node_with(true, &[], &targets);
        let desired = announced.then(evacuate);
        assert_eq!((world.desired(), world.undone()), (desired, usize::from(announced)), "{targets:?}");
    }
}

#[test]
fn returned_pod_is_asked_to_leave_when_its_pause_is_over() {
    let time = |text: &str| -> Timestamp { text.parse().unwrap() };
    let mut world = World::new(&["node", "maintenance"]);
    // An hour into the drain. As far as this replica knows, it comes back all the time.
    world.state.pods.returns = Returns::new(time("2026-01-01T01:00:05Z"));
    world.now = time("2026-01-01T01:00:06Z");
    world.pod_with(json!({"creationTimestamp": "2026-01-01T01:00:00Z"}), json!([{"operator": "Exists"}]));
    assert_eq!((world.desired(), world.plan().blockers.len()), (None, 1));
    let due = time("2026-01-01T01:15:00Z");
    assert_eq!(world.plan().wake, Some(due));
    world.now = due;
    assert_eq!(world.plan().blockers.len(), 1);
    assert_eq!(world.desired(), Some(evacuate()));
    assert_eq!(world.plan().wake, None);
}

/// Found by the campaign: the next drain of the node held a pod back that had come back to the one before.
#[test]
fn returned_pod_is_looked_at_again_when_the_drain_ends() {
    let mut world = World::new(&["node", "maintenance"]);
    let created = json!({"creationTimestamp": "2026-01-01T00:00:10Z"});
    world.state.pods.returns = Returns::new("2026-01-01T00:00:11Z".parse().unwrap());
    world.pod_with(created, json!([{"operator": "Exists"}]));
    assert_eq!(world.plan().blockers.len(), 1);
    world.state.delete_maintenance(&"m".into());
    assert_eq!(world.plan().blockers.len(), 0);
    world.maintenance_since("Drain", &["Drain"], "2026-01-01T00:01:00Z");
    assert_eq!(world.plan().blockers.len(), 0, "it was there before this drain began");
    world.state.delete_maintenance(&"m".into());
    world.maintenance("Drain", &["Drain"]);
    assert_eq!(world.plan().blockers.len(), 1);
}

#[test]
fn an_evacuation_is_wanted_until_the_maintenance_is_completed() {
    let mut world = World::new(&["node", "pod", "maintenance"]);
    world.evacuation(&["x"]);
    assert_eq!((world.desired(), world.undone()), (Some(evacuate()), 1), "it is not ours yet");
    world.evacuation(&["x", &ours()]);
    assert_eq!((world.desired(), world.undone()), (Some(evacuate()), 0), "it is");
    world.maintenance("Complete", &["Drain", "Complete"]);
    assert_eq!((world.desired(), world.undone()), (Some(Desired::Withdraw), 1));
    world.evacuation(&["x"]);
    assert_eq!((world.desired(), world.undone()), (None, 0));
    world.state.delete_evacuation(uid(), &world.pods);
    assert_eq!((world.desired(), world.undone()), (None, 0));
}

#[test]
fn an_evacuation_is_made_once_until_it_is_seen_or_long_missing() {
    let mut world = World::new(&["node", "pod", "maintenance"]);
    assert_eq!(world.state.begin_create(uid(), at(0)), Ok(()));
    assert_eq!(world.state.begin_create(uid(), at(9)), Err(at(10)));
    assert_eq!(world.state.begin_create(uid(), at(10)), Ok(()));
    let pod = world.pods.get(uid()).unwrap().clone();
    world.state.pod_failed(&pod, Failure::impossible(&"x"), at(10), 1.0);
    assert_eq!(world.state.begin_create(uid(), at(11)), Ok(()), "it was not made");
    world.evacuation(&[&ours()]);
    world.state.delete_evacuation(uid(), &world.pods);
    assert_eq!(world.state.begin_create(uid(), at(12)), Ok(()), "that one has been seen, and is gone");
}

#[test]
fn what_came_before_what_is_known_changes_nothing() {
    let mut world = World::new(&["node", "pod", "maintenance"]);
    let version = std::mem::replace(&mut world.version, 0);
    world.node(false);
    assert_eq!(world.desired(), Some(evacuate()), "an old state of the node");
    world.maintenance("Complete", &["Complete"]);
    assert_eq!(world.desired(), Some(evacuate()), "an old state of the maintenance");
    world.version = version;
    world.maintenance("Complete", &["Drain", "Complete"]);
    assert_eq!(world.desired(), None);
}

#[test]
fn an_attached_volume_is_waited_for_unless_it_belongs_to_a_pod_that_stays() {
    let mut world = World::new(&["node", "pod", "maintenance"]);
    world.attach("a1", Some("pv-1"));
    world.attach("a2", Some("pv-1"));
    assert_eq!(world.plan().counts.volumes, 0, "not before the pods have left");
    world.pod(json!({"labels": {"cluster.x-k8s.io/drain": "skip"}}));
    assert_eq!(world.plan().counts.volumes, 1);
    let on_node: Vec<_> = world.pods.on_node("n1").to_vec();
    let claims = world.state.unknown_claims(&on_node, at(0));
    assert_eq!(claims, BTreeSet::from([("shop".into(), "data".into())]));
    for claim in claims {
        world.state.learn_claim(claim, Some("pv-1".into()), "n1", &on_node, at(0));
    }
    assert_eq!(world.plan().counts.volumes, 0, "it is the skipped pod's");
    assert_eq!(world.state.unknown_claims(&on_node, at(0)), BTreeSet::new());
    world.pod_gone();
    assert_eq!(world.plan().counts.volumes, 1, "nobody's");
    world.attach("a1", None);
    assert_eq!(world.plan().counts.volumes, 1, "the other attachment is still there");
    world.attach("a2", None);
    assert_eq!(world.plan().counts.volumes, 0);
}

#[test]
fn pod_that_does_not_end_is_reported_after_a_minute() {
    let mut world = World::new(&["node", "pod", "maintenance"]);
    world.now = "2026-01-01T00:00:00Z".parse().unwrap();
    world.pod(json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 0}));
    assert_eq!(world.plan().blockers, []);
    let minute = world.now + SignedDuration::from_mins(1);
    assert_eq!(world.plan().wake, Some(minute));
    world.now = minute;
    assert_eq!(world.plan().blockers.len(), 1);
}

#[test]
fn an_attachment_counts_once_the_volume_is_attached() {
    let mut world = World::new(&["node", "maintenance"]);
    let error = json!({"message": "no answer from the driver"});
    for (status, attached) in [
        (json!({"attached": false}), false),
        (json!({"attached": true}), true),
        (json!({"attached": true, "detachError": error}), true),
        (json!({"attached": false, "detachError": error}), true),
        (json!({"attached": false, "attachError": error}), true),
        (json!({"attached": false}), false),
    ] {
        world.attach_with("a1", Some("pv-1"), status.clone());
        assert_eq!(world.plan().counts.volumes, u32::from(attached), "{status}");
    }
}

#[test]
fn a_claim_without_a_volume_is_asked_for_again() {
    let mut world = World::new(&["node", "pod", "maintenance"]);
    let on_node: Vec<_> = world.pods.on_node("n1").to_vec();
    let claim: Claim = ("shop".into(), "data".into());
    let mut asked = Vec::new();
    let mut now = 0;
    while asked.len() < 11 {
        assert_eq!(world.state.unknown_claims(&on_node, at(now)).len(), 1);
        world.state.learn_claim(claim.clone(), None, "n1", &on_node, at(now));
        assert_eq!(world.state.unknown_claims(&on_node, at(now)), BTreeSet::new());
        let next = world.state.next_claim(&on_node).unwrap().as_second() - at(0).as_second();
        asked.push(next - now);
        now = next;
    }
    assert_eq!(asked, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
    world.state.learn_claim(claim, Some("pv-1".into()), "n1", &on_node, at(now));
    assert_eq!(
        (world.state.next_claim(&on_node), world.state.unknown_claims(&on_node, at(i32::MAX.into())).len()),
        (None, 0)
    );
}

#[test]
fn a_volume_that_the_node_reports_counts_once_and_not_if_it_belongs_to_a_pod_that_stays() {
    let mut world = World::new(&["node", "pod", "maintenance"]);
    let handle = |volume: &str| format!("kubernetes.io/csi/d^{volume}");
    world.pod(json!({"labels": {"cluster.x-k8s.io/drain": "skip"}}));
    world.attach("a1", Some("pv-1"));
    world.attach("a2", Some("pv-2"));
    let on_node: Vec<_> = world.pods.on_node("n1").to_vec();
    assert_eq!(world.state.unknown_handles("n1", &on_node), BTreeSet::new(), "it reports nothing");
    world.node_that_reports(true, &[&handle("1"), &handle("2"), "kubernetes.io/iscsi/disk"]);
    assert_eq!(world.plan().counts.volumes, 5, "nobody knows yet which is which");
    world.state.learn_claim(("shop".into(), "data".into()), Some("pv-1".into()), "n1", &on_node, at(0));
    let unknown = world.state.unknown_handles("n1", &on_node);
    assert_eq!(unknown, BTreeSet::from(["pv-1".into(), "pv-2".into()]));
    for (volume, number) in unknown.into_iter().zip(["1", "2"]) {
        world.state.learn_handle(volume, Some(handle(number)), "n1");
    }
    assert_eq!(world.plan().counts.volumes, 2, "the second one, and the one that only the node tells of");
    world.attach("a1", None);
    world.attach("a2", None);
    world.node_that_reports(true, &[]);
    assert_eq!(world.plan().counts.volumes, 0);
}

#[test]
fn only_nodes_that_name_an_unreadable_maintenance_are_held_back() {
    let on = |uid: &str| json!({"uid": uid, "name": "newer", "stage": "Drain"});
    for (maintenances, held_back) in [
        (json!([on("newer-uid")]), true),
        (json!([{"uid": "newer-uid", "name": "newer", "stage": "Complete"}]), false),
        (json!([on("uid of m")]), false),
        (Value::Null, true),
    ] {
        let mut world = World::new(&["pod", "maintenance"]);
        world.node_of(true, &maintenances);
        world.evacuation(&[&ours()]);
        world.state.do_not_follow("newer".into(), "newer-uid", None, "it is of a later version".into());
        assert_eq!(world.desired(), Some(evacuate()), "what is known goes on");
        world.maintenance("Complete", &["Drain", "Complete"]);
        let desired = (!held_back).then_some(Desired::Withdraw);
        assert_eq!((world.desired(), world.plan().held_back), (desired, held_back), "{maintenances}");
        let (_, plan) = world.state.maintenance(&"m".into(), &world.pods, at(0)).unwrap().unwrap();
        let held = u32::from(held_back);
        assert_eq!((plan.nodes_held_back, plan.nodes_unreleased), (held, 1), "{maintenances}");
        world.settle();
        world.state.delete_maintenance(&"newer".into());
        let changed = world.settle();
        assert!(changed.contains(&Work::Node("n1".into())), "{changed:?}");
        assert_eq!(world.desired(), Some(Desired::Withdraw));
    }
}

#[test]
fn targets_of_an_ended_maintenance_do_not_count_for_the_next() {
    for (uid, stage, counts) in [
        ("uid of earlier", "Drain", false),
        ("uid of earlier", "Complete", false),
        ("uid of m", "Drain", true),
        ("uid of m", "Cordon", false),
    ] {
        let mut world = World::new(&["pod"]);
        world.node_of(true, &json!([{"uid": uid, "name": "x", "stage": stage}]));
        world.maintenance("Drain", &["Drain"]);
        let targets = world.plan().targets;
        // By itself it begins with pods of users' priorities.
        let all = targets.iter().any(|target| target.pod_priority == i32::MAX);
        assert_eq!(all, counts, "{uid} {stage}: {targets:?}");
    }
}

#[test]
fn a_maintenance_that_cannot_be_followed_is_told_with_the_place_of_the_fault() {
    let mut world = World::new(&["node", "pod"]);
    let metadata = world.meta("m", json!({}));
    let terms = json!([{"matchExpressions": [{"key": "pool", "operator": "Like", "values": ["b*"]}]}]);
    let object = json!({"metadata": metadata, "spec": {"stage": "Drain", "nodeSelector": {"nodeSelectorTerms": terms}}});
    let error = world.state.apply_maintenance(serde_json::from_value(object).unwrap()).unwrap_err();
    assert!(error.to_string().starts_with("spec.nodeSelector.nodeSelectorTerms[0]"), "{error}");
    assert!(world.plan().held_back);
    assert!(world.state.unfollowed.get("m").is_some_and(|unfollowed| unfollowed.object.is_some()));
    world.maintenance("Drain", &["Drain"]);
    assert!(!world.plan().held_back);
}

#[test]
fn a_refused_evacuation_is_a_blocker_until_it_is_written() {
    let mut world = World::new(&["node", "pod", "maintenance"]);
    assert_eq!(world.said(), (vec![], vec!["EvacuationPending"]));
    let pod = world.pods.get(uid()).unwrap().clone();
    let retry = world.state.pod_failed(&pod, Failure::impossible(&"no"), at(0), 1.0);
    assert_eq!(world.said(), (vec!["n1 web-1 EvacuationRefused".into()], vec![]));
    let to_reconcile = |world: &World, now| world.state.pods_to_reconcile("n1", &world.pods, now);
    assert_eq!(to_reconcile(&world, at(0)), [], "not at every event");
    assert_eq!(to_reconcile(&world, retry).iter().map(|pod| pod.uid).collect::<Vec<_>>(), [uid()]);
    world.state.pod_succeeded(&pod);
    world.evacuation(&[&ours()]);
    assert_eq!(world.said(), (vec![], vec!["EvacuationRequested"]));

    // The same when it cannot be withdrawn, though nobody drains any more.
    world.maintenance("Complete", &["Drain"]);
    assert_eq!(world.said(), (vec![], vec![]));
    world.state.pod_failed(&pod, Failure::impossible(&"no"), at(2), 1.0);
    assert_eq!(world.said(), (vec!["n1 web-1 EvacuationRefused".into()], vec![]));
    world.evacuation(&["x"]);
    assert_eq!(world.said(), (vec![], vec![]));
}

#[test]
fn a_refused_node_is_a_blocker_of_its_maintenances_in_any_stage() {
    let mut world = World::new(&["node", "maintenance"]);
    let refused = (vec!["n1 - NodeUpdateRefused".into()], vec![]);
    world.state.node_failed(&"n1".into(), Failure::impossible(&"no"), at(0), 1.0);
    assert_eq!(world.said(), refused);
    world.maintenance("Complete", &["Drain", "Complete"]);
    assert_eq!(world.said(), refused);
    assert_eq!(world.state.summary().blockers, BTreeMap::from([("NodeUpdateRefused".into(), 1)]));
    world.state.node_succeeded(&"n1".into());
    assert_eq!(world.said(), (vec![], vec![]));
}

#[test]
fn a_deleted_evacuation_that_others_hold_is_a_blocker() {
    let mut world = World::new(&["node", "pod", "maintenance"]);
    world.evacuation_with(
        json!({"finalizers": ["x/y"], "deletionTimestamp": "2026-01-01T00:00:00Z"}),
        json!({}),
    );
    assert_eq!(world.said().0, ["n1 web-1 EvacuationHeld"]);
    world.state.delete_evacuation(uid(), &world.pods);
    assert_eq!(world.said(), (vec![], vec!["EvacuationPending"]));
}

#[test]
fn the_words_of_an_evacuator_are_news_for_the_status_alone() {
    let mut world = World::new(&["node", "pod", "maintenance"]);
    let finalizers = json!({"finalizers": [ours()], "creationTimestamp": "2026-01-01T00:00:00Z"});
    let status = |message: &str, second: u32| {
        let time = format!("2026-01-01T00:01:{second:02}Z");
        json!({"activeEvacuatorClass": "x.example.com", "message": message, "evacuationProgressTimestamp": time})
    };
    world.evacuation_with(finalizers.clone(), status("copying", 1));
    assert_eq!(world.said(), (vec![], vec!["EvacuatorActive"]));
    world.evacuation_with(finalizers.clone(), status("copying", 59));
    assert_eq!(world.settle(), BTreeSet::new(), "it says nothing new, only later");
    world.evacuation_with(finalizers, status("half done", 59));
    assert!(world.settle().contains(&Work::Maintenance("m".into())));
}

#[test]
fn maintenance_is_blocked_without_an_evacuation_controller() {
    let mut world = World::new(&["node", "pod", "maintenance"]);
    world.evacuation(&[&ours()]);
    world.settle();
    world.state.apply_evacuation_controller(Some(at(0)));
    assert!(world.settle().contains(&Work::Maintenance("m".into())));
    let lost = "- - EvacuationControllerUnavailable";
    assert_eq!(world.said(), (vec![lost.into()], vec!["EvacuationRequested"]));
    world.pod(json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 0}));
    assert_eq!(world.said().0, [""; 0], "nobody needs it for a pod that ends");
    world.state.apply_evacuation_controller(None);
    assert!(world.settle().contains(&Work::Maintenance("m".into())));
    assert_eq!(world.said().0, [""; 0]);
}

#[test]
fn a_withdrawal_is_tried_again_when_its_evacuator_allows_it() {
    let mut world = World::new(&["node", "pod", "maintenance"]);
    let policy = |policy: &str| json!({"evacuationCancellationPolicy": policy});
    let metadata = || json!({"finalizers": [ours()]});
    world.evacuation_with(metadata(), policy("Forbid"));
    assert_eq!(world.desired(), Some(evacuate()));
    assert_eq!(world.said(), (vec![], vec!["EvacuationRequested"]));
    world.maintenance("Complete", &["Drain", "Complete"]);
    assert_eq!((world.desired(), world.undone()), (None, 0), "nothing waits for it");
    world.evacuation_with(metadata(), policy("Allow"));
    assert!(world.settle().contains(&Work::Node("n1".into())));
    assert_eq!((world.desired(), world.undone()), (Some(Desired::Withdraw), 1));
}

#[test]
fn an_evacuation_says_for_which_maintenances_and_why() {
    let mut world = World::new(&["node", "pod", "maintenance"]);
    let mut changed = world.state.maintenances.get("m").unwrap().object.as_ref().clone();
    changed.spec.reason = format!("new\nkernel {}", "x".repeat(1000));
    changed.metadata.resource_version = Some("100".into());
    world.state.apply_maintenance(changed).unwrap();
    assert!(world.settle().contains(&Work::Node("n1".into())), "the node shows it too");
    let Some(Desired::Evacuate { why }) = world.desired() else { panic!("it is to leave") };
    assert!(why.starts_with("m (new kernel xxx") && why.ends_with("x…)"), "{why}");
    assert_eq!(why.chars().count(), "m ()".len() + haulout_drain_planner::facts::MAX_REASON);
}

#[test]
fn an_unreadable_maintenance_that_cordons_keeps_no_evacuation() {
    let mut world = World::new(&["pod", "maintenance"]);
    world.node_of(
        true,
        &json!([
            {"uid": "uid of m", "name": "m", "stage": "Drain"},
            {"uid": "newer-uid", "name": "newer", "stage": "Cordon"},
        ]),
    );
    world.evacuation(&[&ours()]);
    world.state.do_not_follow("newer".into(), "newer-uid", None, "it is of a later version".into());
    world.maintenance("Complete", &["Drain", "Complete"]);
    assert_eq!(world.desired(), Some(Desired::Withdraw), "nobody drains");
}

/// After a downgrade: the node's annotation names a stage that this version does not know.
#[test]
fn a_stage_of_a_later_version_does_not_lose_the_holder() {
    let mut world = World::new(&["maintenance"]);
    world.node_of(true, &json!([{"uid": "newer-uid", "name": "newer", "stage": "Hibernate"}]));
    world.state.do_not_follow("newer".into(), "newer-uid", None, "it is of a later version".into());
    world.settle();
    let plan = world.plan();
    // What is about to be written replaces the only record that `newer` holds the node.
    let uids: Vec<_> = plan.maintenances.iter().map(|m| m.uid.as_str()).collect();
    assert!(uids.contains(&"newer-uid"), "{uids:?}");
}

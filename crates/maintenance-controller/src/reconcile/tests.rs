//! Writes to the API server: their order, their preconditions, and the reaction to answers.

use haulout_api_types::NodeMaintenance;
use haulout_drain_planner::plan::ServedPodTypes;
use haulout_service_runtime::testing::{Call, Writes, recorded, rejection};
use haulout_service_runtime::watch::{EvacuatedPod, Handler};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::observed::{SlimEvacuation, SlimNode};
use crate::state::PodRef;

const POD: &str = "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11";
const NODE: &str = "/api/v1/nodes/n1";
const NODE_STATUS: &str = "/api/v1/nodes/n1/status";
const EVACUATIONS: &str = "/apis/evacuation.coordination.k8s.io/v1alpha1/namespaces/shop/evacuations";
const MAINTENANCE: &str = "/apis/nodemaintenance.k8s.io/v1alpha1/nodemaintenances/m";

/// A leader with one node, one pod on it, and one maintenance.
struct Scenario {
    controller: Arc<Controller>,
    writes: Writes,
    /// The maintenance in the API server.
    maintenance: Arc<Mutex<Value>>,
}

impl Scenario {
    /// The API server answers writes with the result of `reject`, or else with the patched object.
    async fn new(reject: impl Fn(&Call) -> Option<(u16, Value)> + Clone + Send + Sync + 'static) -> Self {
        Self::with_pod(pod(), reject).await
    }

    async fn with_pod(
        pod: Value,
        reject: impl Fn(&Call) -> Option<(u16, Value)> + Clone + Send + Sync + 'static,
    ) -> Self {
        let stored: Arc<Mutex<Value>> = Arc::default();
        let maintenance = Arc::clone(&stored);
        let answer = move |call: &Call| match call.path.as_str() {
            "/api/v1/pods" if !call.query.contains("watch=true") => {
                Some((200, json!({"metadata": {"resourceVersion": "7"}, "items": [pod]})))
            }
            _ if call.method == http::Method::GET => None,
            _ => reject(call).or_else(|| Some((200, apply_write(call, &stored)))),
        };
        let (context, writes) = recorded(answer);
        let metrics = Metrics::new(&context.metrics);
        let queue = WorkQueue::new(context.clock.clone(), crate::BACKOFF, context.metrics.queue("test"));
        let state = Arc::new(Mutex::new(State::new(ServedPodTypes::DEFAULT, context.clock.now())));
        let controller = Arc::new(Controller {
            writer: Writer::new(context.clients.direct.clone(), api::MANAGER),
            clients: context.clients.clone(),
            clock: context.clock.clone(),
            events: context.events.clone(),
            state,
            metrics,
            pods: context.pod_cache(),
            hold_autoscalers: false,
            served: BTreeSet::from(["deployment.apps.k8s.io".to_owned()]),
            queue,
            plan_changed: Notify::new(),
        });
        controller.pods.ready().await;
        Self { controller, writes, maintenance }
    }

    fn node(&self, node: Value) {
        Handler::<SlimNode>::apply(&*self.controller, "n1".into(), serde_json::from_value(node).unwrap());
    }

    fn maintenance(&self, maintenance: Value) {
        *self.maintenance.lock() = maintenance.clone();
        let maintenance = serde_json::from_value(maintenance).unwrap();
        Handler::<NodeMaintenance>::apply(&*self.controller, "m".into(), maintenance);
    }

    fn evacuation(&self, finalizers: &[&str]) {
        let name = format!("{POD}-web-1");
        let metadata = json!({
            "name": name, "namespace": "shop", "uid": "uid of evacuation", "resourceVersion": "40",
            "finalizers": finalizers,
        });
        let evacuation = serde_json::from_value(json!({"metadata": metadata})).unwrap();
        Handler::<SlimEvacuation>::apply(&*self.controller, EvacuatedPod(POD.parse().unwrap()), evacuation);
    }

    async fn handle(&self, work: Work) -> Outcome {
        Arc::clone(&self.controller).handle(work).await.unwrap()
    }

    async fn handle_node(&self) -> Outcome {
        self.handle(Work::Node("n1".into())).await
    }

    async fn handle_pod(&self) -> Outcome {
        let pod = self.controller.pods.read().get(POD.parse().unwrap()).cloned().unwrap();
        self.handle(Work::Pod(PodRef::of(&pod))).await
    }

    /// Removes all keys from the queue and returns the pods among them.
    async fn queued_pods(&self) -> Vec<String> {
        let last = Work::Maintenance("last".into());
        self.controller.queue.add(last.clone());
        let (stop, pods) = (CancellationToken::new(), Arc::<Mutex<Vec<String>>>::default());
        let handle = |work: Work| {
            match &work {
                Work::Pod(pod) => pods.lock().push(pod.uid.to_string()),
                work if *work == last => stop.cancel(),
                _ => {}
            }
            std::future::ready(Ok::<_, RequestError>(Outcome::Done))
        };
        self.controller.queue.run(1, stop.clone(), handle).await;
        let pods = pods.lock();
        pods.clone()
    }

    /// The reasons of the maintenance's blockers.
    fn blockers(&self) -> Vec<String> {
        let now = self.controller.clock.now();
        let view = self.controller.update_with_pods(|state, pods| state.maintenance(&"m".into(), pods, now));
        let (_, plan) = view.unwrap().unwrap();
        plan.blockers.iter().map(|(_, blocker)| blocker.reason.to_string()).collect()
    }
}

fn pod() -> Value {
    json!({
        "metadata": {"name": "web-1", "namespace": "shop", "uid": POD, "resourceVersion": "5"},
        "spec": {"nodeName": "n1"},
        "status": {"phase": "Running"},
    })
}

fn terminating(deadline: Timestamp) -> Value {
    let mut pod = pod();
    pod["metadata"]["deletionTimestamp"] = json!(format!("{deadline:.0}"));
    pod["metadata"]["deletionGracePeriodSeconds"] = json!(600);
    pod
}

fn node(unschedulable: bool, annotations: Value) -> Value {
    json!({
        "metadata": {"name": "n1", "uid": "uid of n1", "resourceVersion": "20", "annotations": annotations},
        "spec": {"unschedulable": unschedulable},
        "status": {},
    })
}

/// A node that is cordoned for the maintenance and lists all Default pods as targets, without conditions.
fn announced() -> Value {
    let status = json!({
        "maintenances": [{"uid": "uid of m", "name": "m", "stage": "Drain"}],
        "drainTargets": [{"podPriority": i32::MAX, "podType": "Default"}],
        "drainMessage": "Evacuating",
    });
    node(
        true,
        json!({
            "nodemaintenance.k8s.io/maintenance-status": status.to_string(),
            "nodemaintenance.k8s.io/before-maintenance": "{}",
        }),
    )
}

fn maintenance(stage: &str, begun: &[&str], finalizers: &[&str]) -> Value {
    let begun: Vec<_> =
        begun.iter().map(|name| json!({"name": name, "startTimestamp": "2026-01-01T00:00:00Z"})).collect();
    let term = json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]});
    json!({
        "apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "NodeMaintenance",
        "metadata": {"name": "m", "uid": "uid of m", "resourceVersion": "30", "generation": 1, "finalizers": finalizers},
        "spec": {"stage": stage, "nodeSelector": {"nodeSelectorTerms": [term]}},
        "status": {"stageStatuses": begun},
    })
}

fn draining() -> Value {
    maintenance("Drain", &["Cordon", "Drain"], &[haulout_api_types::names::COMPLETION_FINALIZER])
}

/// The object after a write, with a later version.
fn apply_write(call: &Call, maintenance: &Mutex<Value>) -> Value {
    if call.path.starts_with(MAINTENANCE) {
        let mut stored = maintenance.lock();
        let version: u32 = stored["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
        merge(&mut stored, &call.body);
        stored["metadata"]["resourceVersion"] = json!((version + 1).to_string());
        return stored.clone();
    }
    let evacuation = || {
        let name = format!("{POD}-web-1");
        json!({"metadata": {"name": name, "namespace": "shop", "uid": "uid of evacuation"}})
    };
    let (mut object, version) = match call.path.as_str() {
        NODE => (node(false, json!({})), "21"),
        NODE_STATUS => (announced(), "22"),
        _ => (evacuation(), "41"),
    };
    merge(&mut object, &call.body);
    object["metadata"]["resourceVersion"] = json!(version);
    object
}

fn merge(object: &mut Value, patch: &Value) {
    match (object.as_object_mut(), patch.as_object()) {
        (Some(object), Some(patch)) => {
            for (key, value) in patch {
                merge(object.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        _ => *object = patch.clone(),
    }
}

#[tokio::test]
async fn node_lists_targets_before_a_pod_is_evacuated() {
    let scenario = Scenario::new(|_| None).await;
    scenario.node(node(false, json!({})));
    scenario.maintenance(draining());
    scenario.handle_pod().await;
    assert_eq!(scenario.writes.take_names(), [""; 0], "not yet");
    scenario.handle_node().await;
    let writes = scenario.writes.take();
    let names: Vec<_> = writes.iter().map(ToString::to_string).collect();
    assert_eq!(names, [format!("PATCH {NODE}"), format!("PATCH {NODE_STATUS}")]);
    let metadata = &writes[0].body["metadata"];
    assert_eq!((&metadata["uid"], &metadata["resourceVersion"]), (&json!("uid of n1"), &json!("20")));
    assert_eq!(writes[0].body["spec"]["unschedulable"], true);
    assert!(metadata["annotations"]["nodemaintenance.k8s.io/maintenance-status"].is_string());
    assert_eq!(writes[1].body["metadata"]["uid"], "uid of n1");
    scenario.handle_pod().await;
    let writes = scenario.writes.take();
    assert_eq!(writes.iter().map(ToString::to_string).collect::<Vec<_>>(), [format!("POST {EVACUATIONS}")]);
    let metadata = &writes[0].body["metadata"];
    assert_eq!(metadata["name"], format!("{POD}-web-1"));
    assert_eq!(
        metadata["finalizers"],
        json!([haulout_api_types::instigators::finalizer("nodemaintenance.k8s.io")])
    );
    scenario.handle_pod().await;
    assert_eq!(
        scenario.writes.take_names(),
        [""; 0],
        "it was created, but the watch has not delivered it yet"
    );
}

#[tokio::test]
async fn node_write_conflict_is_retried() {
    let scenario =
        Scenario::new(|call| (call.path == NODE).then(|| rejection(409, "conflict")).flatten()).await;
    scenario.node(node(false, json!({})));
    scenario.maintenance(draining());
    assert_eq!(scenario.handle_node().await, Outcome::Failed);
    assert_eq!(scenario.writes.take_names(), [format!("PATCH {NODE}")], "nothing after the conflict");
    assert_eq!(scenario.blockers(), [""; 0], "a conflict is not a blocker");
}

#[tokio::test]
async fn rejected_node_write_blocks_the_drain() {
    let scenario = Scenario::new(|call| (call.path == NODE).then(|| rejection(403, "no")).flatten()).await;
    scenario.node(node(false, json!({})));
    scenario.maintenance(draining());
    assert!(matches!(scenario.handle_node().await, Outcome::Until(_)));
    scenario.handle_pod().await;
    assert_eq!(scenario.writes.take_names(), [format!("PATCH {NODE}")]);
    assert_eq!(scenario.blockers(), ["NodeUpdateRejected"]);
    assert!(matches!(scenario.handle_node().await, Outcome::Until(_)));
    assert_eq!(scenario.writes.take_names(), [""; 0], "not before its backoff has ended");
}

#[tokio::test]
async fn announced_pods_leave_while_node_writes_are_rejected() {
    let scenario =
        Scenario::new(|call| call.path.starts_with(NODE).then(|| rejection(403, "no")).flatten()).await;
    // Its conditions are missing.
    scenario.node(announced());
    scenario.maintenance(draining());
    for attempt in ["the write fails", "the write is in backoff"] {
        assert!(matches!(scenario.handle_node().await, Outcome::Until(_)));
        assert_eq!(scenario.blockers(), ["NodeUpdateRejected"]);
        assert_eq!(scenario.queued_pods().await, [POD], "{attempt}");
    }
    scenario.writes.take();
    scenario.handle_pod().await;
    assert_eq!(scenario.writes.take_names(), [format!("POST {EVACUATIONS}")]);
}

#[tokio::test]
async fn dropped_annotation_is_not_written_in_a_loop() {
    // Only the cordon of the patch is applied.
    let scenario = Scenario::new(|call| {
        call.path.starts_with(NODE).then(|| {
            let mut node = node(true, json!({}));
            node["metadata"]["resourceVersion"] = json!("21");
            (200, node)
        })
    })
    .await;
    scenario.node(node(false, json!({})));
    scenario.maintenance(draining());
    assert!(matches!(scenario.handle_node().await, Outcome::Until(_)));
    assert_eq!(scenario.writes.take_names().len(), 2);
    assert_eq!(scenario.blockers(), ["NodeUpdateRejected"]);
}

#[tokio::test]
async fn rejected_evacuation_is_a_blocker_with_backoff() {
    let scenario =
        Scenario::new(|call| (call.path == EVACUATIONS).then(|| rejection(403, "policy")).flatten()).await;
    scenario.node(announced());
    scenario.maintenance(draining());
    assert!(matches!(scenario.handle_pod().await, Outcome::Until(_)));
    assert_eq!(scenario.writes.take_names(), [format!("POST {EVACUATIONS}")]);
    assert_eq!(scenario.blockers(), ["EvacuationRejected"]);
    assert!(matches!(scenario.handle_pod().await, Outcome::Until(_)));
    assert_eq!(scenario.writes.take_names(), [""; 0]);
}

#[tokio::test]
async fn evacuation_of_others_gets_our_finalizer() {
    let scenario = Scenario::new(|_| None).await;
    let ours = haulout_api_types::instigators::finalizer("nodemaintenance.k8s.io");
    scenario.node(announced());
    scenario.maintenance(draining());
    scenario.evacuation(&["x/y"]);
    scenario.handle_pod().await;
    let evacuation = format!("PATCH {EVACUATIONS}/{POD}-web-1");
    let writes = scenario.writes.take();
    assert_eq!(writes.iter().map(ToString::to_string).collect::<Vec<_>>(), [evacuation.as_str()]);
    let metadata = &writes[0].body["metadata"];
    assert_eq!(metadata["finalizers"], json!(["x/y", ours]));
    assert_eq!((&metadata["uid"], &metadata["resourceVersion"]), (&json!("uid of evacuation"), &json!("40")));

    let mut complete =
        maintenance("Complete", &["Drain", "Complete"], &[haulout_api_types::names::COMPLETION_FINALIZER]);
    complete["metadata"]["resourceVersion"] = json!("32");
    scenario.maintenance(complete);
    scenario.handle_pod().await;
    let writes = scenario.writes.take();
    assert_eq!(writes.iter().map(ToString::to_string).collect::<Vec<_>>(), [evacuation]);
    let metadata = &writes[0].body["metadata"];
    assert_eq!(metadata["finalizers"], json!(["x/y"]));
    assert_eq!(metadata["annotations"]["nodemaintenance.k8s.io/maintenances"], Value::Null);
}

#[tokio::test]
async fn finalizer_is_added_before_the_stage_starts() {
    let scenario = Scenario::new(|_| None).await;
    scenario.node(node(false, json!({})));
    scenario.maintenance(maintenance("Drain", &[], &[]));
    scenario.handle_node().await;
    assert_eq!(scenario.writes.take_names(), [""; 0], "the node is not changed before");
    scenario.handle(Work::Maintenance("m".into())).await;
    let writes = scenario.writes.take();
    let names: Vec<_> = writes.iter().map(ToString::to_string).collect();
    assert_eq!(names[..2], [format!("PATCH {MAINTENANCE}"), format!("PATCH {MAINTENANCE}/status")]);
    let metadata = &writes[0].body["metadata"];
    assert_eq!(metadata["finalizers"], json!([haulout_api_types::names::COMPLETION_FINALIZER]));
    assert_eq!((&metadata["uid"], &metadata["resourceVersion"]), (&json!("uid of m"), &json!("30")));
    let begun = &writes[1].body["status"]["stageStatuses"];
    assert_eq!((&begun[0]["name"], &begun[1]["name"]), (&json!("Cordon"), &json!("Drain")));
}

#[tokio::test]
async fn completed_maintenance_is_released_after_its_nodes() {
    let scenario = Scenario::new(|_| None).await;
    let complete =
        maintenance("Complete", &["Drain", "Complete"], &[haulout_api_types::names::COMPLETION_FINALIZER]);
    scenario.node(announced());
    scenario.maintenance(complete);
    scenario.handle(Work::Maintenance("m".into())).await;
    let names = scenario.writes.take_names();
    assert!(!names.contains(&format!("PATCH {MAINTENANCE}")), "the node is not released yet: {names:?}");
    scenario.node({
        let mut released = node(false, json!({}));
        released["metadata"]["resourceVersion"] = json!("25");
        released
    });
    scenario.handle(Work::Maintenance("m".into())).await;
    let writes = scenario.writes.take();
    assert_eq!(writes[0].to_string(), format!("PATCH {MAINTENANCE}"));
    assert_eq!(writes[0].body["metadata"]["finalizers"], json!([]));
}

#[tokio::test]
async fn node_is_requeued_when_a_terminating_pod_is_overdue() {
    let soon = Timestamp::now() + jiff::SignedDuration::from_secs(600);
    let scenario = Scenario::with_pod(terminating(soon), |_| None).await;
    scenario.node(announced());
    scenario.maintenance(draining());
    let overdue =
        Timestamp::from_second(soon.as_second()).unwrap() + haulout_api_types::conditions::TERMINATION_MARGIN;
    assert_eq!(scenario.handle_node().await, Outcome::Until(overdue));
    assert_eq!(scenario.handle_node().await, Outcome::Until(overdue), "each time");
    assert_eq!(scenario.blockers(), [""; 0]);
}

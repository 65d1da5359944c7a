//! The status of a maintenance, and what is written to its node, while users choose every text that they can choose.

use haulout_api_types::bounded::{MAX_MESSAGE, MAX_TEXT};
use haulout_api_types::names::reason;
use haulout_api_types::node_maintenance::{NodeMaintenanceStatus, Stage};
use haulout_drain_planner::cordon;
use haulout_service_runtime::testing::{status_violations, stored_bytes};
use kube::core::Status;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

use super::*;
use crate::observed::{SlimEvacuation, SlimNode};
use crate::status;
use crate::testing::at;

/// Half of what is safe for an object in etcd.
const MAX_STATUS_BYTES: usize = 512 * 1024;

/// Texts of users: some words, then one character many times. Go's JSON encoder escapes some of them.
fn texts() -> impl Strategy<Value = Vec<String>> {
    let character = select(&['R', 'ü', '…', '😀', '<', '"', '\\', '\n', '\0', '\u{1b}', '\u{2028}']);
    let length = prop_oneof![Just(0), Just(1001), Just(32_768), Just(100_000), 0usize..3000];
    let text = ("\\PC{0,20}", character, length)
        .prop_map(|(words, character, length)| words + &character.to_string().repeat(length));
    proptest::collection::vec(text, 1..6)
}

/// What keeps a pod from leaving, or who is moving it.
#[derive(Clone, Copy, Debug)]
enum Case {
    Blocked,
    ActiveEvacuator,
    DeletedWithFinalizers,
    RejectedWrite,
    Terminating,
}

struct Fixture {
    state: State,
    pods: PodIndex,
}

fn object<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

impl Fixture {
    /// A node under a maintenance, with pods that have the longest possible names.
    fn new(pods: usize, cases: &[Case], texts: &[String]) -> Self {
        let mut fixture =
            Self { state: State::new(ServedPodTypes::DEFAULT, at(0)), pods: PodIndex::default() };
        let long = "n".repeat(250);
        let status = json!({"drainTargets": [{"podPriority": i32::MAX}]}).to_string();
        let node: SlimNode = object(json!({
            "metadata": {"name": long, "uid": "node", "resourceVersion": "1",
                "annotations": {"nodemaintenance.k8s.io/maintenance-status": status}},
            "spec": {"unschedulable": true},
        }));
        fixture.state.apply_node(long.as_str().into(), ObservedNode::new(node));
        let started = json!([{"name": "Drain", "startTimestamp": "2026-01-01T00:00:00Z"}]);
        let maintenance = object(json!({
            "metadata": {"name": "m", "uid": "m", "resourceVersion": "1"},
            "spec": {"stage": "Drain", "reason": texts[0],
                "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
                    {"key": "metadata.name", "operator": "In", "values": [long]}]}]}},
            "status": {"stageStatuses": started},
        }));
        fixture.state.apply_maintenance(maintenance).unwrap();
        for number in 0..pods {
            let text = |offset: usize| texts[(number + offset) % texts.len()].as_str();
            fixture.pod(number, &long, cases[number % cases.len()], text(0), text(1));
        }
        while !fixture.state.converge(&fixture.pods, at(0)) {}
        fixture
    }

    fn pod(&mut self, number: usize, node: &str, case: Case, one: &str, other: &str) {
        let name = format!("{}{number:05}", "p".repeat(248));
        let uid = format!("00000000-0000-0000-0000-0000{number:08x}");
        let mut metadata =
            json!({"name": name, "namespace": "s".repeat(63), "uid": uid, "resourceVersion": "1"});
        if matches!(case, Case::Terminating) {
            metadata["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            metadata["finalizers"] = json!([format!("example.com/{}", "f".repeat(63))]);
        }
        let pod = json!({"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": "Running"}});
        let pod = Pod::from_json(pod.to_string().as_bytes()).unwrap();
        for change in self.pods.apply(pod.clone()) {
            self.state.apply_pod(&change, at(0));
        }
        let finalizers = [haulout_api_types::instigators::finalizer("nodemaintenance.k8s.io")];
        let mut metadata =
            json!({"name": "e", "namespace": "s", "resourceVersion": "1", "finalizers": finalizers});
        let status = match case {
            Case::Blocked => json!({"message": one, "conditions": [{"type": "Blocked", "status": "True",
                "reason": one, "message": other, "lastTransitionTime": "2026-01-01T00:00:00Z"}]}),
            Case::ActiveEvacuator => json!({"activeEvacuatorClass": one, "message": other,
                "evacuationProgressTimestamp": "2026-01-01T00:00:00Z"}),
            Case::DeletedWithFinalizers => {
                metadata["finalizers"] = json!([one, other]);
                metadata["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
                json!({})
            }
            Case::RejectedWrite | Case::Terminating => {
                let answer = Status { code: 403, message: one.into(), ..Status::default() };
                let failure = Failure::from(&kube::Error::Api(answer.boxed()));
                self.state.pod_failed(&pod, failure, &self.pods, at(0), 0.5);
                return;
            }
        };
        let evacuation: SlimEvacuation = object(json!({"metadata": metadata, "status": status}));
        self.state.apply_evacuation(pod.uid, ObservedEvacuation::new(evacuation), &self.pods);
    }

    fn status(&mut self, stage: Stage) -> (NodeMaintenanceStatus, NodePlan) {
        let (_, plan) = self.state.maintenance(&"m".into(), &self.pods, at(9)).unwrap().unwrap();
        let name = self.state.nodes.keys().next().unwrap().clone();
        let (_, node) = self.state.node(&name, &self.pods, at(9)).unwrap().unwrap();
        let old = NodeMaintenanceStatus::default();
        (status::status(status::Context { old: &old, generation: Some(1), stage, now: at(9) }, &plan), node)
    }
}

fn check(fixture: &mut Fixture, stage: Stage) -> Result<(), TestCaseError> {
    let (status, node) = fixture.status(stage);
    let value = json!(status);
    prop_assert_eq!(status_violations("NodeMaintenance", &value), Vec::<String>::new());
    prop_assert!(stored_bytes(&value) < MAX_STATUS_BYTES, "{}", stored_bytes(&value));
    for condition in &status.conditions {
        prop_assert!(reason::ALL.contains(&condition.reason.as_str()), "{}", condition.reason);
        prop_assert!(condition.message.len() <= MAX_MESSAGE);
    }
    let drain = status.drain_status.unwrap_or_default();
    for blocker in &drain.blockers {
        prop_assert!(reason::ALL.contains(&blocker.reason.as_str()), "{}", blocker.reason);
        prop_assert!(blocker.message.len() <= MAX_TEXT);
    }
    for waiting in &drain.waiting_for {
        prop_assert!(waiting.message.len() <= MAX_TEXT);
    }
    for reason in fixture.state.summary().blockers.keys() {
        prop_assert!(reason::ALL.contains(&&**reason), "{reason}");
    }
    let changes = cordon::decide(&cordon::NodeMarkers::default(), &node, true, at(9));
    let written = [changes.node_patch(), changes.status_patch()].map(|patch| json!(patch));
    prop_assert!(stored_bytes(&json!(written)) < 128 * 1024);
    Ok(())
}

const CASES: [Case; 5] = [
    Case::Blocked,
    Case::ActiveEvacuator,
    Case::DeletedWithFinalizers,
    Case::RejectedWrite,
    Case::Terminating,
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn status_is_valid_with_any_text_of_users(
        texts in texts(),
        cases in proptest::collection::vec(select(&CASES), 1..6),
        pods in 0usize..64,
    ) {
        let mut fixture = Fixture::new(pods, &cases, &texts);
        check(&mut fixture, Stage::Drain)?;
        check(&mut fixture, Stage::Cordon)?;
    }
}

#[test]
fn status_is_valid_with_5000_hostile_pods() {
    for text in ["R".repeat(1001), "😀".repeat(25_000), "<".repeat(100_000)] {
        let mut fixture = Fixture::new(5000, &CASES, &[text]);
        check(&mut fixture, Stage::Drain).unwrap();
    }
}

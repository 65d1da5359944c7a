//! A drain that makes no progress reports why: rejected writes, what it waits for, and until when.

use std::time::Duration;

use futures::StreamExt as _;
use haulout_api_types::evacuators::evacuation_for;
use haulout_api_types::node_maintenance::WaitingFor;
use haulout_e2e::service::NAMESPACE;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use kube::Client;

use super::*;

const ACCOUNT: &str = "haulout-maintenance-controller";

/// What the API server rejects for the maintenance controller: a resource, an operation, and an expression that is
/// true for the affected objects.
struct Rejection<'a> {
    group: &'a str,
    resource: &'a str,
    operation: &'a str,
    concerned: String,
}

impl Scenario<'_> {
    /// Makes the API server reject something with this message, until the returned binding is deleted. `attempt` runs
    /// as the maintenance controller, to detect when the policy applies.
    async fn reject(
        &self,
        name: &str,
        what: Rejection<'_>,
        words: &str,
        attempt: impl AsyncFn(Client) -> kube::Result<()>,
    ) -> String {
        let name = self.of(name);
        let Rejection { group, resource, operation, concerned } = what;
        let account = format!("system:serviceaccount:{NAMESPACE}:{ACCOUNT}");
        let unless = format!("request.userInfo.username != '{account}' || !({concerned})");
        let policy = json!({
            "metadata": {"name": name},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [
                    {"apiGroups": [group], "apiVersions": ["*"], "operations": [operation], "resources": [resource]},
                ]},
                "validations": [{"expression": unless, "message": words}],
            },
        });
        let binding = json!({
            "metadata": {"name": name},
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        });
        let policies: Api<ValidatingAdmissionPolicy> = Api::all(self.env.client.clone());
        policies.create(&PostParams::default(), &serde_json::from_value(policy).unwrap()).await.unwrap();
        let binding = serde_json::from_value(binding).unwrap();
        self.bindings().create(&PostParams::default(), &binding).await.unwrap();
        let account = self.env.cluster.service_account_kubeconfig(NAMESPACE, ACCOUNT).await.unwrap();
        let client = self.env.cluster.client_from(&account, "attempt").await.unwrap();
        let in_force = wait::eventually("writes are rejected", SOON, async || {
            let answer = attempt(client.clone()).await;
            Ok(matches!(answer, Err(kube::Error::Api(status)) if status.message.contains(words))
                .then_some(()))
        });
        self.explained(in_force.await);
        name
    }

    /// Rejects writes to a NodeMaintenance, or to its status only.
    pub(super) async fn reject_maintenance(&self, maintenance: &str, resource: &str) -> String {
        let name = self.of(maintenance);
        let what = Rejection {
            group: names::NODE_MAINTENANCE_GROUP,
            resource,
            operation: "UPDATE",
            concerned: format!("object.metadata.name == '{name}'"),
        };
        let patch = Patch::Merge(json!({"metadata": {"annotations": {"a": "b"}}}));
        self.reject(maintenance, what, "this one is mine", async |client| {
            let api: Api<NodeMaintenance> = Api::all(client);
            let answer = if resource.ends_with("/status") {
                api.patch_status(&name, &dry(), &patch).await
            } else {
                api.patch(&name, &dry(), &patch).await
            };
            answer.map(drop)
        })
        .await
    }

    pub(super) async fn lift(&self, binding: &str) {
        self.bindings().delete(binding, &DeleteParams::default()).await.unwrap();
    }

    fn bindings(&self) -> Api<ValidatingAdmissionPolicyBinding> {
        Api::all(self.env.client.clone())
    }

    /// Waits until the condition `Blocked` has this status and reason. Returns its message.
    pub(super) async fn until_condition(&self, maintenance: &str, status: &str, reason: &str) -> String {
        let found = |m: &NodeMaintenance| {
            let mut conditions = m.status.iter().flat_map(|status| &status.conditions);
            let blocked = conditions.find(|c| c.type_ == names::condition::BLOCKED)?;
            (blocked.status == status && blocked.reason == reason).then(|| blocked.message.clone())
        };
        let what = format!("is Blocked={status} with {reason}");
        found(&self.until(maintenance, &what, |m| found(m).is_some()).await).unwrap()
    }

    /// Waits until exactly one pod is waited for and meets the condition, and nothing is blocked.
    async fn until_waiting(
        &self,
        maintenance: &str,
        what: &str,
        is_like_this: impl Fn(&WaitingFor) -> bool,
    ) -> WaitingFor {
        let waits = |m: &NodeMaintenance| {
            let waiting_for = drain(m).waiting_for;
            waiting_for.len() == 1 && waiting_for.iter().all(&is_like_this)
        };
        let found = self.until(maintenance, &format!("waits for {what}"), waits).await;
        assert!(!is(&found, names::condition::BLOCKED), "{:?}", found.status);
        drain(&found).waiting_for.swap_remove(0)
    }
}

fn dry() -> PatchParams {
    PatchParams { dry_run: true, ..PatchParams::default() }
}

pub async fn rejected_writes_are_blockers_with_the_api_answer(env: &TestEnv) {
    let scenario = env.scenario("rejected").await;
    let before = scenario.node("n1", "blue").await;
    let pod = scenario.pod("web", "n1").await;
    scenario.maintain("m", "blue", Stage::Idle).await;

    // Not even our finalizer can be set.
    let maintenances = scenario.reject_maintenance("m", "nodemaintenances").await;
    let node = scenario.of("n1");
    let patch = Patch::Merge(json!({"metadata": {"annotations": {"a": "b"}}}));
    let what = Rejection {
        group: "",
        resource: "nodes",
        operation: "UPDATE",
        concerned: format!("object.metadata.name == '{node}'"),
    };
    let nodes = scenario
        .reject("nodes", what, "hands off this node", async |client| {
            Api::<Node>::all(client).patch(&node, &dry(), &patch).await.map(drop)
        })
        .await;
    let (evacuation, _) = evacuation_for(&pod.metadata, "x.example.com", &BTreeSet::new()).unwrap();
    let what = Rejection {
        group: names::EVACUATION_GROUP,
        resource: "evacuations",
        operation: "CREATE",
        concerned: "object.metadata.namespace == 'rejected'".into(),
    };
    let evacuations = scenario
        .reject("evacuations", what, "not during the sale", async |client| {
            let dry = PostParams { dry_run: true, ..PostParams::default() };
            Api::<Evacuation>::namespaced(client, "rejected").create(&dry, &evacuation).await.map(drop)
        })
        .await;

    scenario.set_stage("m", Stage::Drain).await;
    let said = scenario.until_condition("m", "True", names::reason::MAINTENANCE_UPDATE_REJECTED).await;
    assert!(said.ends_with("denied request: this one is mine"), "{said}");
    scenario.lift(&maintenances).await;
    let found = scenario.until_blocked("m", &[(None, names::reason::NODE_UPDATE_REJECTED)]).await;
    let blocker = drain(&found).blockers.swap_remove(0);
    assert!(blocker.message.ends_with("denied request: hands off this node"), "{}", blocker.message);
    assert_eq!(blocker.node.as_deref(), Some("rejected-n1"));
    scenario.lift(&nodes).await;
    let found = scenario.until_blocked("m", &[(Some("web"), names::reason::EVACUATION_REJECTED)]).await;
    let blocker = drain(&found).blockers.swap_remove(0);
    assert!(blocker.message.ends_with("denied request: not during the sale"), "{}", blocker.message);
    assert!(is(&found, names::condition::BLOCKED));
    scenario.lift(&evacuations).await;
    let drained = scenario.until_drained("m").await;
    assert!(!is(&drained, names::condition::BLOCKED) && drain(&drained).blockers.is_empty());
    scenario.set_stage("m", Stage::Complete).await;
    scenario.until_completed("m").await;
    scenario.until_restored(&before).await;
}

pub async fn active_evacuators_and_terminating_pods_are_waited_for(env: &TestEnv) {
    let scenario = env.scenario("waiting").await;
    scenario.node("n1", "blue").await;
    let pod = scenario.pod_from(objects::pod("web").annotation(&slow(), "100").delete_delay(3), "n1").await;
    scenario.maintain("m", "blue", Stage::Drain).await;
    let evacuation = scenario.until_evacuator_active(&pod).await;
    let is_active = |one: &WaitingFor| one.reason == names::reason::EVACUATOR_ACTIVE;
    let waiting = scenario.until_waiting("m", "an evacuator", is_active).await;
    let place = (waiting.node.as_str(), waiting.namespace.as_str(), waiting.pod.as_str());
    assert_eq!(place, ("waiting-n1", "waiting", "web"));
    assert_eq!(waiting.evacuator_class.as_deref(), Some("slow.example.com"));
    let made = scenario.evacuations().get(&evacuation).await.unwrap();
    let created = made.metadata.creation_timestamp.clone().unwrap().0;
    let deadline = SignedDuration::from_secs(made.spec.progress_deadline_seconds.into());
    let until = |waiting: &WaitingFor| waiting.until.clone().unwrap().0;
    let minute = SignedDuration::from_mins(1);
    let late = until(&waiting).duration_since(created + deadline);
    assert!(!late.is_negative() && late < minute, "{waiting:?} of {made:?}");
    assert_eq!(waiting.since.0, created);
    let said = scenario.until_condition("m", "False", names::reason::EVACUATOR_ACTIVE).await;
    assert_eq!(said, "Waiting for 1 pod to leave: 1 EvacuatorActive");

    // The evacuator reports its progress.
    let now = Timestamp::now();
    let status = json!({"status": {
        "evacuationProgressTimestamp": now, "expectedEvacuationFinishTime": now + SignedDuration::from_mins(5),
        "message": "copied 3 of 7 volumes",
    }});
    let params = PatchParams::default();
    scenario.evacuations().patch_status(&evacuation, &params, &Patch::Merge(status)).await.unwrap();
    let says = |one: &WaitingFor| one.message.ends_with(": copied 3 of 7 volumes");
    let waiting = scenario.until_waiting("m", "the evacuator's message", says).await;
    let late = until(&waiting).duration_since(now + deadline);
    assert!(!late.is_negative() && late < minute, "{waiting:?} at {now}");
    let expected = waiting.expected_finish_time.unwrap().0.duration_since(now + SignedDuration::from_mins(5));
    assert!(!expected.is_negative() && expected < minute, "{expected:?}");
    assert_eq!(waiting.since.0, created, "the same evacuator is active");

    let status = json!({"status": {"activeEvacuatorCompleted": true}});
    scenario.evacuations().patch_status(&evacuation, &params, &Patch::Merge(status)).await.unwrap();
    let ends = |one: &WaitingFor| one.reason == names::reason::TERMINATION_GRACE_PERIOD;
    let waiting = scenario.until_waiting("m", "the pod's end", ends).await;
    assert!(waiting.until.is_some() && waiting.evacuator_class.is_none(), "{waiting:?}");
    let drained = scenario.until_drained("m").await;
    assert_eq!(drain(&drained).waiting_for, []);
    let begun: Vec<_> = drained.status.unwrap().stage_statuses.iter().map(|begun| begun.name).collect();
    assert_eq!(begun, [Stage::Cordon, Stage::Drain], "stage Drain includes Cordon");
}

pub async fn held_evacuation_is_a_blocker(env: &TestEnv) {
    let scenario = env.scenario("held").await;
    scenario.node("n1", "blue").await;
    let pod = scenario.slow_pod("web", "n1").await;
    let theirs = scenario.evacuation_by_others(&pod).await.name_any();
    let finalizers = async |finalizers: &[&str]| {
        let patch = Patch::Merge(json!({"metadata": {"finalizers": finalizers}}));
        scenario.evacuations().patch(&theirs, &PatchParams::default(), &patch).await.unwrap()
    };
    let held = finalizers(&["example.com/backup"]).await;
    scenario.evacuations().delete(&theirs, &DeleteParams::default()).await.unwrap();
    scenario.maintain("m", "blue", Stage::Drain).await;
    let blocked = scenario.until_blocked("m", &[(Some("web"), names::reason::EVACUATION_HELD)]).await;
    let message = drain(&blocked).blockers.swap_remove(0).message;
    assert!(message.contains("held by example.com/backup;"), "{message}");
    finalizers(&[]).await;
    let name = scenario.until_evacuator_active(&pod).await;
    assert_ne!(scenario.evacuations().get(&name).await.unwrap().uid(), held.uid(), "it is a new Evacuation");
    scenario.until_blocked("m", &[]).await;
}

pub async fn missing_evacuation_controller_is_a_blocker(env: &TestEnv) {
    let scenario = env.scenario("leaderless").await;
    scenario.node("n1", "blue").await;
    scenario.pod("web", "n1").await;
    env.stop_evacuation_controller().await;
    scenario.maintain("m", "blue", Stage::Drain).await;
    let is_requested = |one: &WaitingFor| one.reason == names::reason::EVACUATION_REQUESTED;
    scenario.until_waiting("m", "the evacuation controller", is_requested).await;
    env.controller().shift_clock(Duration::from_secs(61)).await.unwrap();
    let reason = names::reason::EVACUATION_CONTROLLER_UNAVAILABLE;
    let blocked = scenario.until_blocked("m", &[(None, reason)]).await;
    assert!(is(&blocked, names::condition::BLOCKED));
    assert_eq!(drain(&blocked).blockers[0].node, None);
    env.start_evacuation_controller().await;
    scenario.until_drained("m").await;
    scenario.until_condition("m", "False", names::reason::NOT_BLOCKED).await;
    scenario.delete("m").await;
}

pub async fn removed_annotation_is_restored_with_backoff(env: &TestEnv) {
    let scenario = env.scenario("undone").await;
    let before = scenario.node("n1", "blue").await;
    let pod = scenario.slow_pod("web", "n1").await;
    scenario.maintain("m", "blue", Stage::Drain).await;
    scenario.until_evacuator_active(&pod).await;
    let nodes: Api<Node> = Api::all(env.client.clone());
    let name = scenario.of("n1");
    let is_there = |node: &Node| node.annotations().contains_key(names::MAINTENANCE_STATUS_ANNOTATION);
    let removed = async {
        // As soon as the annotation exists.
        let mut watch = std::pin::pin!(watcher(
            nodes.clone(),
            watcher::Config::default().fields(&format!("metadata.name={name}"))
        ));
        let mut removed = 0;
        while let Some(event) = watch.next().await {
            let (watcher::Event::Apply(node) | watcher::Event::InitApply(node)) = event.unwrap() else {
                continue;
            };
            if !is_there(&node) {
                continue;
            }
            // With the version, so that an event of another change does not count as a second removal.
            let annotations = json!({names::MAINTENANCE_STATUS_ANNOTATION: null});
            let version = node.resource_version();
            let metadata = json!({"resourceVersion": version, "annotations": annotations});
            let remove = Patch::Merge(json!({"metadata": metadata}));
            match nodes.patch(&name, &PatchParams::default(), &remove).await {
                Ok(_) => removed += 1,
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => panic!("{error}"),
            }
            if removed == 3 {
                return removed;
            }
        }
        removed
    };
    let removed = tokio::time::timeout(SOON, removed).await.unwrap();
    assert_eq!(removed, 3);
    let found = scenario.until_blocked("m", &[(None, names::reason::NODE_UPDATE_REJECTED)]).await;
    let blocker = drain(&found).blockers.swap_remove(0);
    assert!(
        blocker.message.contains("another program reverts each change of the node"),
        "{}",
        blocker.message
    );
    assert!(!is_there(&nodes.get(&name).await.unwrap()), "it waits");
    env.controller().shift_clock(Duration::from_secs(60)).await.unwrap();
    scenario.until_blocked("m", &[]).await;
    assert!(is_there(&nodes.get(&name).await.unwrap()));
    scenario.delete("m").await;
    scenario.until_restored(&before).await;
}

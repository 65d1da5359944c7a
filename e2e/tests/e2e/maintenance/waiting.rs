//! A drain that does not go on says why: what is refused, who is waited for, and until when.

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

/// What the API server refuses the maintenance controller: a resource, an operation, and an expression that is true of
/// the objects concerned.
struct Refusal<'a> {
    group: &'a str,
    resource: &'a str,
    operation: &'a str,
    concerned: String,
}

impl Scene<'_> {
    /// Has the API server refuse something with these words, until the binding is deleted that is returned. `attempt` is
    /// made as the maintenance controller, to see whether that is in force.
    async fn refuse(
        &self,
        name: &str,
        what: Refusal<'_>,
        words: &str,
        attempt: impl AsyncFn(Client) -> kube::Result<()>,
    ) -> String {
        let name = self.of(name);
        let Refusal { group, resource, operation, concerned } = what;
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
        let policies: Api<ValidatingAdmissionPolicy> = Api::all(self.world.client.clone());
        policies.create(&PostParams::default(), &serde_json::from_value(policy).unwrap()).await.unwrap();
        let binding = serde_json::from_value(binding).unwrap();
        self.bindings().create(&PostParams::default(), &binding).await.unwrap();
        let account = self.world.cluster.service_account_kubeconfig(NAMESPACE, ACCOUNT).await.unwrap();
        let client = self.world.cluster.client_from(&account, "attempt").await.unwrap();
        let in_force = wait::eventually("writes are refused", SOON, async || {
            let answer = attempt(client.clone()).await;
            Ok(matches!(answer, Err(kube::Error::Api(status)) if status.message.contains(words))
                .then_some(()))
        });
        self.explained(in_force.await);
        name
    }

    /// Refuses what is written to a NodeMaintenance, or to its status alone.
    pub(super) async fn refuse_maintenance(&self, maintenance: &str, resource: &str) -> String {
        let name = self.of(maintenance);
        let what = Refusal {
            group: names::NODE_MAINTENANCE_GROUP,
            resource,
            operation: "UPDATE",
            concerned: format!("object.metadata.name == '{name}'"),
        };
        let patch = Patch::Merge(json!({"metadata": {"annotations": {"a": "b"}}}));
        self.refuse(maintenance, what, "this one is mine", async |client| {
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
        Api::all(self.world.client.clone())
    }

    /// The message of the condition `Blocked`, once it has this status and reason.
    pub(super) async fn until_condition(&self, maintenance: &str, status: &str, reason: &str) -> String {
        let found = |m: &NodeMaintenance| {
            let mut conditions = m.status.iter().flat_map(|status| &status.conditions);
            let blocked = conditions.find(|c| c.type_ == names::condition::BLOCKED)?;
            (blocked.status == status && blocked.reason == reason).then(|| blocked.message.clone())
        };
        let what = format!("is Blocked={status} with {reason}");
        found(&self.until(maintenance, &what, |m| found(m).is_some()).await).unwrap()
    }

    /// The one pod that is waited for, once it is like this; nothing blocks it.
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

pub async fn refused_writes_are_blockers_with_the_api_servers_words(world: &World) {
    let scene = world.scene("refused").await;
    let before = scene.node("n1", "blue").await;
    let pod = scene.pod("web", "n1").await;
    scene.maintain("m", "blue", Stage::Idle).await;

    // Not even our finalizer can be set.
    let maintenances = scene.refuse_maintenance("m", "nodemaintenances").await;
    let node = scene.of("n1");
    let patch = Patch::Merge(json!({"metadata": {"annotations": {"a": "b"}}}));
    let what = Refusal {
        group: "",
        resource: "nodes",
        operation: "UPDATE",
        concerned: format!("object.metadata.name == '{node}'"),
    };
    let nodes = scene
        .refuse("nodes", what, "hands off this node", async |client| {
            Api::<Node>::all(client).patch(&node, &dry(), &patch).await.map(drop)
        })
        .await;
    let (evacuation, _) = evacuation_for(&pod.metadata, "x.example.com", &BTreeSet::new()).unwrap();
    let what = Refusal {
        group: names::EVACUATION_GROUP,
        resource: "evacuations",
        operation: "CREATE",
        concerned: "object.metadata.namespace == 'refused'".into(),
    };
    let evacuations = scene
        .refuse("evacuations", what, "not during the sale", async |client| {
            let dry = PostParams { dry_run: true, ..PostParams::default() };
            Api::<Evacuation>::namespaced(client, "refused").create(&dry, &evacuation).await.map(drop)
        })
        .await;

    scene.set_stage("m", Stage::Drain).await;
    let said = scene.until_condition("m", "True", names::reason::MAINTENANCE_UPDATE_REFUSED).await;
    assert!(said.ends_with("denied request: this one is mine"), "{said}");
    scene.lift(&maintenances).await;
    let found = scene.until_blocked("m", &[(None, names::reason::NODE_UPDATE_REFUSED)]).await;
    let blocker = drain(&found).blockers.swap_remove(0);
    assert!(blocker.message.ends_with("denied request: hands off this node"), "{}", blocker.message);
    assert_eq!(blocker.node.as_deref(), Some("refused-n1"));
    scene.lift(&nodes).await;
    let found = scene.until_blocked("m", &[(Some("web"), names::reason::EVACUATION_REFUSED)]).await;
    let blocker = drain(&found).blockers.swap_remove(0);
    assert!(blocker.message.ends_with("denied request: not during the sale"), "{}", blocker.message);
    assert!(is(&found, names::condition::BLOCKED));
    scene.lift(&evacuations).await;
    let drained = scene.until_drained("m").await;
    assert!(!is(&drained, names::condition::BLOCKED) && drain(&drained).blockers.is_empty());
    scene.set_stage("m", Stage::Complete).await;
    scene.until_completed("m").await;
    scene.until_as_before(&before).await;
}

pub async fn an_evacuator_at_work_and_a_pod_that_ends_are_waited_for(world: &World) {
    let scene = world.scene("waiting").await;
    scene.node("n1", "blue").await;
    let pod = scene.pod_from(objects::pod("web").annotation(&slow(), "100").delete_delay(3), "n1").await;
    scene.maintain("m", "blue", Stage::Drain).await;
    let evacuation = scene.in_charge(&pod).await;
    let is_active = |one: &WaitingFor| one.reason == names::reason::EVACUATOR_ACTIVE;
    let waiting = scene.until_waiting("m", "an evacuator", is_active).await;
    let place = (waiting.node.as_str(), waiting.namespace.as_str(), waiting.pod.as_str());
    assert_eq!(place, ("waiting-n1", "waiting", "web"));
    assert_eq!(waiting.evacuator_class.as_deref(), Some("slow.example.com"));
    let made = scene.evacuations().get(&evacuation).await.unwrap();
    let created = made.metadata.creation_timestamp.clone().unwrap().0;
    let deadline = SignedDuration::from_secs(made.spec.progress_deadline_seconds.into());
    let until = |waiting: &WaitingFor| waiting.until.clone().unwrap().0;
    let minute = SignedDuration::from_mins(1);
    let late = until(&waiting).duration_since(created + deadline);
    assert!(!late.is_negative() && late < minute, "{waiting:?} of {made:?}");
    assert_eq!(waiting.since.0, created);
    let said = scene.until_condition("m", "False", names::reason::EVACUATOR_ACTIVE).await;
    assert_eq!(said, "Waiting for 1 pod to leave: 1 EvacuatorActive");

    // It reports, and says how far it is.
    let now = Timestamp::now();
    let status = json!({"status": {
        "evacuationProgressTimestamp": now, "expectedEvacuationFinishTime": now + SignedDuration::from_mins(5),
        "message": "copied 3 of 7 volumes",
    }});
    let params = PatchParams::default();
    scene.evacuations().patch_status(&evacuation, &params, &Patch::Merge(status)).await.unwrap();
    let says = |one: &WaitingFor| one.message.ends_with(": copied 3 of 7 volumes");
    let waiting = scene.until_waiting("m", "what it says", says).await;
    let late = until(&waiting).duration_since(now + deadline);
    assert!(!late.is_negative() && late < minute, "{waiting:?} at {now}");
    let expected = waiting.expected_finish_time.unwrap().0.duration_since(now + SignedDuration::from_mins(5));
    assert!(!expected.is_negative() && expected < minute, "{expected:?}");
    assert_eq!(waiting.since.0, created, "it is the same turn");

    let status = json!({"status": {"activeEvacuatorCompleted": true}});
    scene.evacuations().patch_status(&evacuation, &params, &Patch::Merge(status)).await.unwrap();
    let ends = |one: &WaitingFor| one.reason == names::reason::TERMINATION_GRACE_PERIOD;
    let waiting = scene.until_waiting("m", "the pod's end", ends).await;
    assert!(waiting.until.is_some() && waiting.evacuator_class.is_none(), "{waiting:?}");
    let drained = scene.until_drained("m").await;
    assert_eq!(drain(&drained).waiting_for, []);
    let begun: Vec<_> = drained.status.unwrap().stage_statuses.iter().map(|begun| begun.name).collect();
    assert_eq!(begun, [Stage::Cordon, Stage::Drain], "who drains at once cordons, too");
}

pub async fn an_evacuation_that_others_hold_is_a_blocker(world: &World) {
    let scene = world.scene("held").await;
    scene.node("n1", "blue").await;
    let pod = scene.slow_pod("web", "n1").await;
    let theirs = scene.evacuation_by_others(&pod).await.name_any();
    let finalizers = async |finalizers: &[&str]| {
        let patch = Patch::Merge(json!({"metadata": {"finalizers": finalizers}}));
        scene.evacuations().patch(&theirs, &PatchParams::default(), &patch).await.unwrap()
    };
    let held = finalizers(&["example.com/backup"]).await;
    scene.evacuations().delete(&theirs, &DeleteParams::default()).await.unwrap();
    scene.maintain("m", "blue", Stage::Drain).await;
    let blocked = scene.until_blocked("m", &[(Some("web"), names::reason::EVACUATION_HELD)]).await;
    let message = drain(&blocked).blockers.swap_remove(0).message;
    assert!(message.contains("held by example.com/backup:"), "{message}");
    finalizers(&[]).await;
    let name = scene.in_charge(&pod).await;
    assert_ne!(scene.evacuations().get(&name).await.unwrap().uid(), held.uid(), "it is another one");
    scene.until_blocked("m", &[]).await;
}

pub async fn an_absent_evacuation_controller_is_a_blocker(world: &World) {
    let scene = world.scene("leaderless").await;
    scene.node("n1", "blue").await;
    scene.pod("web", "n1").await;
    world.stop_evacuations().await;
    scene.maintain("m", "blue", Stage::Drain).await;
    let is_requested = |one: &WaitingFor| one.reason == names::reason::EVACUATION_REQUESTED;
    scene.until_waiting("m", "the evacuation controller", is_requested).await;
    world.controller().shift_clock(Duration::from_secs(61)).await.unwrap();
    let reason = names::reason::EVACUATION_CONTROLLER_UNAVAILABLE;
    let blocked = scene.until_blocked("m", &[(None, reason)]).await;
    assert!(is(&blocked, names::condition::BLOCKED));
    assert_eq!(drain(&blocked).blockers[0].node, None);
    world.start_evacuations().await;
    scene.until_drained("m").await;
    scene.until_condition("m", "False", names::reason::NOT_BLOCKED).await;
    scene.delete("m").await;
}

pub async fn removed_annotation_is_restored_with_backoff(world: &World) {
    let scene = world.scene("undone").await;
    let before = scene.node("n1", "blue").await;
    let pod = scene.slow_pod("web", "n1").await;
    scene.maintain("m", "blue", Stage::Drain).await;
    scene.in_charge(&pod).await;
    let nodes: Api<Node> = Api::all(world.client.clone());
    let name = scene.of("n1");
    let is_there = |node: &Node| node.annotations().contains_key(names::MAINTENANCE_STATUS_ANNOTATION);
    let remove =
        Patch::Merge(json!({"metadata": {"annotations": {names::MAINTENANCE_STATUS_ANNOTATION: null}}}));
    let removed = async {
        // Whenever it is there.
        let mut watch = std::pin::pin!(watcher(
            nodes.clone(),
            watcher::Config::default().fields(&format!("metadata.name={name}"))
        ));
        let mut removed = 0;
        while let Some(event) = watch.next().await {
            let (watcher::Event::Apply(node) | watcher::Event::InitApply(node)) = event.unwrap() else {
                continue;
            };
            if is_there(&node) {
                nodes.patch(&name, &PatchParams::default(), &remove).await.unwrap();
                removed += 1;
            }
            if removed == 3 {
                return removed;
            }
        }
        removed
    };
    let removed = tokio::time::timeout(SOON, removed).await.unwrap();
    assert_eq!(removed, 3);
    let found = scene.until_blocked("m", &[(None, names::reason::NODE_UPDATE_REFUSED)]).await;
    let blocker = drain(&found).blockers.swap_remove(0);
    assert!(blocker.message.contains("somebody undoes it each time"), "{}", blocker.message);
    assert!(!is_there(&nodes.get(&name).await.unwrap()), "it waits");
    world.controller().shift_clock(Duration::from_secs(60)).await.unwrap();
    scene.until_blocked("m", &[]).await;
    assert!(is_there(&nodes.get(&name).await.unwrap()));
    scene.delete("m").await;
    scene.until_as_before(&before).await;
}

//! What the Eviction API refuses, for real: each refusal has its reason and a sentence, and is tried again until
//! it works.

use std::time::Duration;

use haulout_api_types::Evacuation;
use haulout_e2e::service::NAMESPACE;
use haulout_e2e::{Component, objects, wait};
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::flowcontrol::v1::{FlowSchema, PriorityLevelConfiguration};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::core::Status;
use serde_json::json;
use tokio_util::task::AbortOnDropHandle;

use super::{Ground, SOON, World, failed};

impl World {
    /// Waits until the Evacuation is blocked for this reason, and gives the sentence for people.
    async fn refusal(&self, evacuation: &str, reason: &str) -> String {
        let status = self.until_blocked(evacuation, reason).await.status.unwrap();
        assert!(status.failed_eviction_counter > 0 && status.last_failed_eviction_time.is_some());
        let blocked = status.conditions.iter().find(|condition| condition.type_ == "Blocked").unwrap();
        assert_eq!(blocked.message, status.message);
        self.until_event(evacuation, "Blocked").await;
        status.message
    }

    /// Keeps an eviction under way for as long as the task lives, as the controller's own account. With a wrong UID
    /// of a pending pod the API server tries for ten seconds.
    async fn hold_the_only_place(&self) -> AbortOnDropHandle<()> {
        let pending = objects::pod("pending").namespace(&self.namespace).build();
        self.pods().create(&PostParams::default(), &pending).await.unwrap();
        let account = "haulout-evacuation-controller";
        let account = self.cluster.service_account_kubeconfig(NAMESPACE, account).await.unwrap();
        let client = self.cluster.client_from(&account, "somebody-else").await.unwrap();
        let pods: Api<Pod> = Api::namespaced(client, &self.namespace);
        let theirs = pods.clone();
        let holding = AbortOnDropHandle::new(tokio::spawn(async move {
            while evict(&theirs, "pending", "wrong").await.is_err() {}
        }));
        wait::eventually("others are turned away", SOON, async || {
            let refused = evict(&pods, "nobody", "").await.unwrap_err();
            Ok(matches!(refused, kube::Error::Api(status) if status.code == 429).then_some(()))
        })
        .await
        .unwrap();
        holding
    }
}

/// Tries to evict the pod with this name and UID, without doing it.
async fn evict(pods: &Api<Pod>, name: &str, uid: &str) -> kube::Result<()> {
    let uid = Some(uid).filter(|uid| !uid.is_empty());
    let eviction = json!({
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name},
        "deleteOptions": {"preconditions": {"uid": uid}},
    });
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let done: kube::Result<Status> = pods.create_subresource("eviction", name, &dry, &eviction).await;
    done.map(drop)
}

pub async fn the_pods_that_make_a_budget_refuse_are_named(world: World) {
    let pod = world.pod("web-1", &[]).await;
    world.pod_from(objects::pod("web-2").label("app", "web").not_ready(), &[]).await;
    world.pod_from(objects::pod("db-1").label("app", "db").not_ready(), &[]).await;
    world.budget(objects::pdb("web").namespace(&world.namespace).min_available("1").build()).await;
    let evacuation = world.evacuate(&pod).await;
    world.refusal(&evacuation, "DisruptionBudgetExhausted").await;
    let said = "PodDisruptionBudget web allows 0 disruptions: 1 of 2 pods are healthy and 1 have to be; pod web-2 is not ready.";
    // What the controller knows of the budget may be a moment behind; the next attempt tells.
    let named = |e: &Evacuation| e.status.as_ref().is_some_and(|status| status.message == said);
    world.until(&evacuation, said, named).await;
    assert!(world.is_left_alone(&pod).await);
    let ready = Patch::Merge(json!({"metadata": {"annotations": {"haulout.test/ready": null}}}));
    world.pods().patch("web-2", &PatchParams::default(), &ready).await.unwrap();
    world.until_gone(&pod, &evacuation).await;
}

pub async fn an_eviction_that_a_policy_forbids_is_tried_until_it_is_allowed(world: World) {
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(world.client.clone());
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(world.client.clone());
    let policy = json!({
        "metadata": {"name": "stay"},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/eviction"]},
            ]},
            "validations": [{"expression": "false", "message": "not during the sale"}],
        },
    });
    let here = json!({"matchLabels": {"kubernetes.io/metadata.name": world.namespace}});
    let binding = json!({
        "metadata": {"name": "stay"},
        "spec": {"policyName": "stay", "validationActions": ["Deny"], "matchResources": {"namespaceSelector": here}},
    });
    policies.create(&PostParams::default(), &serde_json::from_value(policy).unwrap()).await.unwrap();
    bindings.create(&PostParams::default(), &serde_json::from_value(binding).unwrap()).await.unwrap();
    let pod = world.pod("web-1", &[]).await;
    let refused = wait::eventually("evictions are refused", SOON, async || {
        Ok(evict(&world.pods(), "web-1", "").await.err().map(drop))
    });
    refused.await.unwrap();

    let evacuation = world.evacuate(&pod).await;
    let message = world.refusal(&evacuation, "EvictionForbidden").await;
    assert!(message.starts_with("The eviction was refused by an admission webhook or policy: "), "{message}");
    assert!(message.ends_with("denied request: not during the sale"), "{message}");
    world.until(&evacuation, "was refused again", |e| failed(e) > 1).await;
    assert!(world.is_left_alone(&pod).await);
    bindings.delete("stay", &DeleteParams::default()).await.unwrap();
    world.until_gone(&pod, &evacuation).await;
}

/// In this namespace the API server has room for one eviction at a time, and somebody else takes it.
pub async fn an_eviction_that_the_api_server_is_too_busy_for_is_tried_until_it_is_not(world: World) {
    let levels: Api<PriorityLevelConfiguration> = Api::all(world.client.clone());
    let schemas: Api<FlowSchema> = Api::all(world.client.clone());
    let level = json!({
        "metadata": {"name": "jam"},
        "spec": {"type": "Limited", "limited": {
            "nominalConcurrencyShares": 0, "lendablePercent": 0, "borrowingLimitPercent": 0,
            "limitResponse": {"type": "Reject"},
        }},
    });
    let schema = json!({
        "metadata": {"name": "jam"},
        "spec": {
            "matchingPrecedence": 2,
            "priorityLevelConfiguration": {"name": "jam"},
            "rules": [{
                // The group of administrators is never held up.
                "subjects": [{"kind": "Group", "group": {"name": "system:serviceaccounts"}}],
                "resourceRules": [{
                    "verbs": ["create"], "apiGroups": [""], "resources": ["pods/eviction"],
                    "namespaces": [world.namespace],
                }],
            }],
        },
    });
    levels.create(&PostParams::default(), &serde_json::from_value(level).unwrap()).await.unwrap();
    schemas.create(&PostParams::default(), &serde_json::from_value(schema).unwrap()).await.unwrap();
    let pod = world.pod("web-1", &[]).await;
    let _holding = world.hold_the_only_place().await;
    let evacuation = world.evacuate(&pod).await;
    let message = world.refusal(&evacuation, "ServerBusy").await;
    assert_eq!(message, "The API server asks us to slow down: Too many requests, please try again later.");
    assert!(world.is_left_alone(&pod).await);
    schemas.delete("jam", &DeleteParams::default()).await.unwrap();
    world.until_gone(&pod, &evacuation).await;
}

pub async fn an_eviction_in_a_namespace_that_is_being_deleted_is_refused_until_the_pod_goes_with_it(
    ground: &Ground,
) {
    let world = ground.fresh().await;
    world.budget(objects::pdb("web").namespace(&world.namespace).min_available("1").build()).await;
    let pod = world.pod("web-1", &[]).await;
    let evacuation = world.evacuate(&pod).await;
    world.until_blocked(&evacuation, "DisruptionBudgetExhausted").await;
    // Nobody empties the namespace for now.
    world.cluster.pause(Component::ControllerManager).unwrap();
    let namespaces: Api<Namespace> = Api::all(world.client.clone());
    namespaces.delete(&world.namespace, &DeleteParams::default()).await.unwrap();
    world.controller.shift_clock(Duration::from_secs(6)).await.unwrap();
    let status = world.until_blocked(&evacuation, "NamespaceTerminating").await.status.unwrap();
    assert_eq!(
        status.message,
        "The namespace is being deleted, which forbids evictions: its pods go with it."
    );
    // Refused for another reason than before, and counted on.
    assert_eq!(status.failed_eviction_counter, 2);
    world.controller.shift_clock(Duration::from_secs(20)).await.unwrap();
    world.until(&evacuation, "was refused again", |e| failed(e) >= 3).await;
    assert!(world.is_left_alone(&pod).await);
    world.cluster.resume(Component::ControllerManager).unwrap();
    world.until_gone(&pod, &evacuation).await;
    world.end();
}

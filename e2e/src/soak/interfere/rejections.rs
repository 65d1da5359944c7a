//! Makes the API server reject writes of our services: with a policy, or with 429 for evictions.

use std::time::Duration;

use anyhow::{Context as _, Result};
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::flowcontrol::v1::{FlowSchema, PriorityLevelConfiguration};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::Client;
use kube::api::{Api, DeleteParams, PostParams};
use kube::core::Status;
use serde_json::{Value, json};
use tokio_util::task::AbortOnDropHandle;

use super::env::{NAMESPACE, object};
use super::observer::DENIAL_MESSAGE;
use crate::handle::Handle;
use crate::{objects, wait};

/// The name of the overload and of all its objects.
const OVERLOAD: &str = "overload";
const LIMIT: Duration = Duration::from_secs(30);

fn rule(name: &str) -> Value {
    match name {
        "reject-evacuations" => json!({
            "apiGroups": ["evacuation.coordination.k8s.io"], "apiVersions": ["*"], "operations": ["CREATE"],
            "resources": ["evacuations"],
        }),
        "reject-nodes" => json!({
            "apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"],
            "resources": ["nodes", "nodes/status"],
        }),
        _ => json!({
            "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/eviction"],
        }),
    }
}

/// Makes the API server reject some writes of our services.
pub(super) async fn reject(client: &Client, name: &str) -> Result<()> {
    let ours = "request.userInfo.username.startsWith('system:serviceaccount:haulout-system:')";
    let policy = json!({
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [rule(name)]},
            "matchConditions": [{"name": "ours", "expression": ours}],
            "validations": [{"expression": "false", "message": DENIAL_MESSAGE}],
        },
    });
    let binding =
        json!({"metadata": {"name": name}, "spec": {"policyName": name, "validationActions": ["Deny"]}});
    let (policies, bindings) = apis(client);
    policies.create(&PostParams::default(), &object(policy)?).await.context("creating a policy")?;
    bindings.create(&PostParams::default(), &object(binding)?).await.context("binding a policy")?;
    Ok(())
}

/// Ends the rejection.
pub(super) async fn allow(client: &Client, name: &str) -> Result<()> {
    let (policies, bindings) = apis(client);
    bindings.delete(name, &DeleteParams::default()).await.context("deleting a binding")?;
    policies.delete(name, &DeleteParams::default()).await.context("deleting a policy")?;
    Ok(())
}

fn apis(client: &Client) -> (Api<ValidatingAdmissionPolicy>, Api<ValidatingAdmissionPolicyBinding>) {
    (Api::all(client.clone()), Api::all(client.clone()))
}

/// The API server accepts one eviction at a time, and this task occupies it. Dropping it leaves the objects behind.
pub(super) struct Overload {
    _holding: AbortOnDropHandle<()>,
}

impl Overload {
    /// Evictions are rejected with 429 when this returns.
    pub(super) async fn begin(cluster: &Handle, client: &Client) -> Result<Self> {
        let params = PostParams::default();
        let level = json!({
            "metadata": {"name": OVERLOAD},
            "spec": {"type": "Limited", "limited": {
                "nominalConcurrencyShares": 0, "lendablePercent": 0, "borrowingLimitPercent": 0,
                "limitResponse": {"type": "Reject"},
            }},
        });
        let somebody = json!({"kind": "User", "name": OVERLOAD, "apiGroup": "rbac.authorization.k8s.io"});
        let role = json!({"kind": "ClusterRole", "name": "admin", "apiGroup": "rbac.authorization.k8s.io"});
        let right = json!({"metadata": {"name": OVERLOAD}, "roleRef": role, "subjects": [somebody]});
        // A pod that never starts: the API server retries for ten seconds to evict one with another UID.
        let pending = objects::pod(OVERLOAD).namespace(NAMESPACE).with(|spec| {
            spec.node_selector = Some([("no-such".to_owned(), "label".to_owned())].into());
        });
        let (levels, schemas) = levels(client);
        Api::<ClusterRoleBinding>::all(client.clone()).create(&params, &object(right)?).await?;
        Api::<Pod>::namespaced(client.clone(), NAMESPACE).create(&params, &pending.build()).await?;
        levels.create(&params, &object(level)?).await.context("creating a priority level")?;
        schemas.create(&params, &object(schema())?).await.context("creating a flow schema")?;
        let pods: Api<Pod> = Api::namespaced(cluster.user(OVERLOAD, &[]).await?, NAMESPACE);
        let theirs = pods.clone();
        let holding = AbortOnDropHandle::new(tokio::spawn(async move {
            loop {
                // The answer does not matter.
                let _ = evict(&theirs, OVERLOAD, Some("wrong")).await;
            }
        }));
        wait::eventually("evictions are rejected with 429", LIMIT, async || {
            let answer = evict(&pods, "nobody", None).await;
            Ok(matches!(answer, Err(kube::Error::Api(status)) if status.code == 429).then_some(()))
        })
        .await?;
        Ok(Self { _holding: holding })
    }

    /// Evictions are accepted again.
    pub(super) async fn end(self, client: &Client) -> Result<()> {
        let (params, (levels, schemas)) = (DeleteParams::default(), levels(client));
        schemas.delete(OVERLOAD, &params).await.context("deleting a flow schema")?;
        levels.delete(OVERLOAD, &params).await.context("deleting a priority level")?;
        Api::<ClusterRoleBinding>::all(client.clone()).delete(OVERLOAD, &params).await?;
        let now = params.grace_period(0);
        Api::<Pod>::namespaced(client.clone(), NAMESPACE).delete(OVERLOAD, &now).await?;
        Ok(())
    }
}

fn schema() -> Value {
    // Requests of the group of admins are never limited.
    let services = json!({"kind": "Group", "group": {"name": "system:serviceaccounts"}});
    let somebody = json!({"kind": "User", "user": {"name": OVERLOAD}});
    json!({
        "metadata": {"name": OVERLOAD},
        "spec": {
            "matchingPrecedence": 2,
            "priorityLevelConfiguration": {"name": OVERLOAD},
            "rules": [{
                "subjects": [services, somebody],
                "resourceRules": [{
                    "verbs": ["create"], "apiGroups": [""], "resources": ["pods/eviction"],
                    "namespaces": [NAMESPACE],
                }],
            }],
        },
    })
}

fn levels(client: &Client) -> (Api<PriorityLevelConfiguration>, Api<FlowSchema>) {
    (Api::all(client.clone()), Api::all(client.clone()))
}

/// Dry run of an eviction.
async fn evict(pods: &Api<Pod>, name: &str, uid: Option<&str>) -> kube::Result<Status> {
    let eviction = json!({
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name},
        "deleteOptions": {"preconditions": {"uid": uid}},
    });
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    pods.create_subresource("eviction", name, &dry, &eviction).await
}

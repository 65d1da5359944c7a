//! Makes the API server refuse what our services write: by a policy, or because it has no time for evictions.

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

use super::ground::{NAMESPACE, object};
use super::observer::WORDS;
use crate::handle::Handle;
use crate::{objects, wait};

/// The name of the jam and of all that belongs to it.
const JAM: &str = "jam";
const LIMIT: Duration = Duration::from_secs(30);

fn rule(name: &str) -> Value {
    match name {
        "refuse-evacuations" => json!({
            "apiGroups": ["evacuation.coordination.k8s.io"], "apiVersions": ["*"], "operations": ["CREATE"],
            "resources": ["evacuations"],
        }),
        "refuse-nodes" => json!({
            "apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"],
            "resources": ["nodes", "nodes/status"],
        }),
        _ => json!({
            "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/eviction"],
        }),
    }
}

/// Has the API server refuse some writes of our services.
pub(super) async fn refuse(client: &Client, name: &str) -> Result<()> {
    let ours = "request.userInfo.username.startsWith('system:serviceaccount:haulout-system:')";
    let policy = json!({
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [rule(name)]},
            "matchConditions": [{"name": "ours", "expression": ours}],
            "validations": [{"expression": "false", "message": WORDS}],
        },
    });
    let binding =
        json!({"metadata": {"name": name}, "spec": {"policyName": name, "validationActions": ["Deny"]}});
    let (policies, bindings) = apis(client);
    policies.create(&PostParams::default(), &object(policy)?).await.context("creating a policy")?;
    bindings.create(&PostParams::default(), &object(binding)?).await.context("binding a policy")?;
    Ok(())
}

/// Ends that.
pub(super) async fn allow(client: &Client, name: &str) -> Result<()> {
    let (policies, bindings) = apis(client);
    bindings.delete(name, &DeleteParams::default()).await.context("deleting a binding")?;
    policies.delete(name, &DeleteParams::default()).await.context("deleting a policy")?;
    Ok(())
}

fn apis(client: &Client) -> (Api<ValidatingAdmissionPolicy>, Api<ValidatingAdmissionPolicyBinding>) {
    (Api::all(client.clone()), Api::all(client.clone()))
}

/// The API server has room for one eviction at a time, and somebody takes it. Dropping it leaves the objects behind.
pub(super) struct Jam {
    _holding: AbortOnDropHandle<()>,
}

impl Jam {
    /// Evictions are turned away with 429 when this returns.
    pub(super) async fn begin(cluster: &Handle, client: &Client) -> Result<Self> {
        let params = PostParams::default();
        let level = json!({
            "metadata": {"name": JAM},
            "spec": {"type": "Limited", "limited": {
                "nominalConcurrencyShares": 0, "lendablePercent": 0, "borrowingLimitPercent": 0,
                "limitResponse": {"type": "Reject"},
            }},
        });
        let somebody = json!({"kind": "User", "name": JAM, "apiGroup": "rbac.authorization.k8s.io"});
        let role = json!({"kind": "ClusterRole", "name": "admin", "apiGroup": "rbac.authorization.k8s.io"});
        let right = json!({"metadata": {"name": JAM}, "roleRef": role, "subjects": [somebody]});
        // A pod that never starts: the API server tries for ten seconds to evict one with another UID.
        let pending = objects::pod(JAM).namespace(NAMESPACE).with(|spec| {
            spec.node_selector = Some([("no-such".to_owned(), "label".to_owned())].into());
        });
        let (levels, schemas) = levels(client);
        Api::<ClusterRoleBinding>::all(client.clone()).create(&params, &object(right)?).await?;
        Api::<Pod>::namespaced(client.clone(), NAMESPACE).create(&params, &pending.build()).await?;
        levels.create(&params, &object(level)?).await.context("creating a priority level")?;
        schemas.create(&params, &object(schema())?).await.context("creating a flow schema")?;
        let pods: Api<Pod> = Api::namespaced(cluster.user(JAM, &[]).await?, NAMESPACE);
        let theirs = pods.clone();
        let holding = AbortOnDropHandle::new(tokio::spawn(async move {
            loop {
                // What it is answered does not matter.
                let _ = evict(&theirs, JAM, Some("wrong")).await;
            }
        }));
        wait::eventually("evictions are turned away", LIMIT, async || {
            let answer = evict(&pods, "nobody", None).await;
            Ok(matches!(answer, Err(kube::Error::Api(status)) if status.code == 429).then_some(()))
        })
        .await?;
        Ok(Self { _holding: holding })
    }

    /// Evictions have room again.
    pub(super) async fn end(self, client: &Client) -> Result<()> {
        let (params, (levels, schemas)) = (DeleteParams::default(), levels(client));
        schemas.delete(JAM, &params).await.context("deleting a flow schema")?;
        levels.delete(JAM, &params).await.context("deleting a priority level")?;
        Api::<ClusterRoleBinding>::all(client.clone()).delete(JAM, &params).await?;
        let now = params.grace_period(0);
        Api::<Pod>::namespaced(client.clone(), NAMESPACE).delete(JAM, &now).await?;
        Ok(())
    }
}

fn schema() -> Value {
    // The group of administrators is never held up.
    let services = json!({"kind": "Group", "group": {"name": "system:serviceaccounts"}});
    let somebody = json!({"kind": "User", "user": {"name": JAM}});
    json!({
        "metadata": {"name": JAM},
        "spec": {
            "matchingPrecedence": 2,
            "priorityLevelConfiguration": {"name": JAM},
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

/// Tries to evict a pod, without doing it.
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

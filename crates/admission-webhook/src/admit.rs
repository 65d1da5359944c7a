//! Handles one request: looks up what the rules need, within the time that the API server allows, and calls
//! [`decide`](crate::decide). Nothing here has side effects, so a dry run needs no special handling.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use haulout_api_types::{DrainRule, Evacuation, NodeMaintenance};
use haulout_service_runtime::pods::Pod;
use k8s_openapi::api::authentication::v1::UserInfo;
use k8s_openapi::api::core::v1::NodeSelector;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::api::{AccessReviewError, ApiServer};
use crate::decide::node_maintenance::RequiredPermission;
use crate::decide::{Cause, Verdict, drain_rule, evacuation, node, node_maintenance, pod};
use crate::review::{Admit, Hook, Operation, Request};
use crate::watch::Caches;

/// All admission rules, with the caches and the client that they need.
pub struct AdmissionRules {
    caches: Caches,
    api: ApiServer,
    served: BTreeSet<String>,
}

impl AdmissionRules {
    /// Rules that read from these caches and this API server. `served` are the built-in evacuator classes of this
    /// installation.
    pub fn new(caches: Caches, api: ApiServer, served: BTreeSet<String>) -> Self {
        Self { caches, api, served }
    }

    async fn evaluate(&self, hook: Hook, request: &Request) -> Result<Verdict, Verdict> {
        match (hook, request.operation) {
            (Hook::MutateEvacuations, Operation::Create) => self.default_evacuation(request).await,
            (Hook::ValidateEvacuations, Operation::Create) => self.validate_created_evacuation(request).await,
            (Hook::ValidateEvacuations, Operation::Update) => self.validate_updated_evacuation(request).await,
            (Hook::ValidateEvacuations, Operation::Delete) => self.validate_deleted_evacuation(request).await,
            (Hook::MutateNodeMaintenances, Operation::Create | Operation::Update) => {
                // The schema rejects invalid objects and names the field.
                let set_defaults = |new| node_maintenance::set_defaults(old(request).ok().as_ref(), &new);
                Ok(new(request).map(set_defaults).unwrap_or_default())
            }
            (Hook::ValidateNodeMaintenances, Operation::Create | Operation::Update) => {
                self.validate_maintenance(request).await
            }
            (Hook::ValidateNodeMaintenances, Operation::Delete) => {
                let old: NodeMaintenance = old(request)?;
                self.authorize_nodes(&request.user, &old.spec.node_selector).await?;
                Ok(Verdict::default())
            }
            (Hook::ValidateDrainRules, Operation::Create | Operation::Update) => {
                let new: DrainRule = new(request)?;
                let rules = self.caches.drain_rules.all().await;
                Ok(drain_rule::validate(&new, rules.iter().map(AsRef::as_ref)))
            }
            (Hook::ValidatePods, Operation::Create) => Ok(pod::validate(None, &new(request)?)),
            (Hook::ValidatePods, Operation::Update) => {
                Ok(pod::validate(Some(&old(request)?), &new(request)?))
            }
            (Hook::ValidateNodes, Operation::Update) => {
                let (old, new) = (old(request)?, new(request)?);
                let maintenances = self.caches.maintenances.all().await;
                Ok(node::validate(&old, &new, maintenances.iter().map(AsRef::as_ref)))
            }
            _ => Ok(Verdict::default()),
        }
    }

    async fn default_evacuation(&self, request: &Request) -> Result<Verdict, Verdict> {
        // The schema rejects invalid objects and names the field.
        let Ok(new) = new(request) else { return Ok(Verdict::default()) };
        let pod = self.pod_of(request, &new).await?.map(|pod| pod.metadata());
        Ok(evacuation::set_defaults(&new, pod.as_ref(), &self.served))
    }

    async fn validate_created_evacuation(&self, request: &Request) -> Result<Verdict, Verdict> {
        let new = new(request)?;
        self.authorize_pod(request, &new).await?;
        let validate = |pod: Option<Arc<Pod>>| {
            let pod = pod.map(|pod| pod.metadata());
            evacuation::validate_new(&new, namespace(request), pod.as_ref(), &self.served)
        };
        let verdict = validate(self.pod_of(request, &new).await?);
        if verdict.violations.is_empty() {
            return Ok(verdict);
        }
        // Another replica may have set the defaults from a newer version of the pod than our cache has.
        Ok(validate(self.live_pod_of(request, &new).await?))
    }

    /// A policy of the chart decides about status updates. The configuration of an earlier version sends them too.
    async fn validate_updated_evacuation(&self, request: &Request) -> Result<Verdict, Verdict> {
        if request.subresource.as_deref().is_some_and(|subresource| !subresource.is_empty()) {
            return Ok(Verdict::default());
        }
        let old: Evacuation = old(request)?;
        self.authorize_pod(request, &old).await?;
        if !evacuation::removes_last_instigator(&old, &new(request)?) {
            return Ok(Verdict::default());
        }
        let pod = self.live_pod_of(request, &old).await?.map(|pod| pod.metadata());
        let action = "its last instigator finalizer cannot be removed";
        Ok(evacuation::validate_cancellation(&old, pod.as_ref(), action))
    }

    async fn validate_deleted_evacuation(&self, request: &Request) -> Result<Verdict, Verdict> {
        let old: Evacuation = old(request)?;
        self.authorize_pod(request, &old).await?;
        if evacuation::forbids_cancellation(&old) {
            let pod = self.live_pod_of(request, &old).await?.map(|pod| pod.metadata());
            let verdict = evacuation::validate_cancellation(&old, pod.as_ref(), "it cannot be deleted");
            if !verdict.violations.is_empty() {
                return Ok(verdict);
            }
        }
        // The pod is only needed for warnings, so a failed lookup does not fail the request.
        let pod = self.pod_of(request, &old).await.ok().flatten();
        let metadata = pod.as_ref().map(|pod| pod.metadata());
        if !evacuation::is_referenced_pod(metadata.as_ref(), &old) {
            return Ok(Verdict::default());
        }
        let mut drained_by = Vec::new();
        if let Some(name) = pod.and_then(|pod| pod.node.clone())
            && let Some(node) = self.caches.nodes.get(&name)
        {
            let maintenances = self.caches.maintenances.all().await;
            let maintenances = maintenances.iter().map(AsRef::as_ref);
            drained_by = node::drained_by(&name, &node.metadata.labels, maintenances);
        }
        Ok(evacuation::deletion_warnings(&old, &drained_by))
    }

    /// The pod that currently has the name of the Evacuation's pod. The cache is used only if it has the pod with the
    /// right UID. In every other case it may be outdated.
    async fn pod_of(&self, request: &Request, evacuation: &Evacuation) -> Result<Option<Arc<Pod>>, Verdict> {
        match self.caches.pod(namespace(request), &evacuation.spec.pod_ref) {
            Some(pod) => Ok(Some(pod)),
            None => self.live_pod_of(request, evacuation).await,
        }
    }

    /// The same, without the cache.
    async fn live_pod_of(
        &self,
        request: &Request,
        evacuation: &Evacuation,
    ) -> Result<Option<Arc<Pod>>, Verdict> {
        let name = &evacuation.spec.pod_ref.name;
        self.api.pod(namespace(request), name).await.map_err(|error| {
            let message = format!("failed to look up pod {name}: {error}; try again");
            Verdict::denied(Cause::Unanswered, message)
        })
    }

    async fn validate_maintenance(&self, request: &Request) -> Result<Verdict, Verdict> {
        let new: NodeMaintenance = new(request)?;
        let old = (request.operation == Operation::Update).then(|| old(request)).transpose()?;
        self.authorize_nodes(&request.user, &new.spec.node_selector).await?;
        let nodes = self.caches.nodes.all().await;
        let nodes =
            nodes.iter().filter_map(|node| Some((node.metadata.name.as_deref()?, &node.metadata.labels)));
        Ok(node_maintenance::validate(old.as_ref(), &new, nodes))
    }

    async fn authorize_pod(&self, request: &Request, evacuation: &Evacuation) -> Result<(), Verdict> {
        let (user, namespace, pod) = (&request.user, namespace(request), &evacuation.spec.pod_ref.name);
        let needed = if let Some(node) = kubelet_node(user)
            && !self.is_on_node(request, evacuation, node).await?
        {
            // Access reviews allow a kubelet to remove every pod: only the admission plugin NodeRestriction forbids it.
            format!("a kubelet may do so only for existing pods of its own node, {node}")
        } else if self.api.may_remove_pod(user, namespace, pod).await? {
            return Ok(());
        } else {
            "this requires permission to delete the pod (verb delete on pods) or to evict it (verb create on \
             pods/eviction)"
                .to_owned()
        };
        let message = format!(
            "{} may not {} the Evacuation of pod {pod} in namespace {namespace}: {needed}",
            described(user),
            request.operation.as_str()
        );
        Err(Verdict::denied(Cause::Unauthorized, message))
    }

    /// Whether the Evacuation's pod exists and is bound to this node.
    async fn is_on_node(
        &self,
        request: &Request,
        evacuation: &Evacuation,
        node: &str,
    ) -> Result<bool, Verdict> {
        let wanted = &evacuation.spec.pod_ref;
        let is_there = |pod: &Pod| pod.uid.to_string() == wanted.uid && pod.node.as_deref() == Some(node);
        // The cache may have the pod from before it was bound.
        Ok(self.caches.pod(namespace(request), wanted).is_some_and(|pod| is_there(&pod))
            || self.live_pod_of(request, evacuation).await?.is_some_and(|pod| is_there(&pod)))
    }

    async fn authorize_nodes(&self, user: &UserInfo, selector: &NodeSelector) -> Result<(), Verdict> {
        let message = match node_maintenance::required_permission(selector) {
            RequiredPermission::Named(names) => {
                let nodes = match self.api.undeletable_nodes(user, &names).await?.as_slice() {
                    [] => return Ok(()),
                    [node] => format!("node {node}"),
                    nodes => format!("nodes {}", nodes.join(", ")),
                };
                format!(
                    "spec.nodeSelector: {} needs permission to delete {nodes}: ask for the verb delete on nodes, or \
                     remove the nodes from the selector",
                    described(user)
                )
            }
            RequiredPermission::All(why) => {
                if self.api.may_delete_all_nodes(user).await? {
                    return Ok(());
                }
                format!(
                    "spec.nodeSelector: {} needs permission to delete all nodes, because {why}: name at most {} nodes \
                     with matchFields, key metadata.name and operator In, or ask for the verb delete on nodes",
                    described(user),
                    node_maintenance::MAX_NAMED_NODES
                )
            }
        };
        Err(Verdict::denied(Cause::Unauthorized, message))
    }
}

impl Admit for AdmissionRules {
    async fn admit(&self, hook: Hook, request: Request, budget: Duration) -> Verdict {
        // Our own message is more useful than the API server's generic one about a webhook timeout.
        let ours = budget.mul_f64(0.9);
        match tokio::time::timeout(ours, Box::pin(self.evaluate(hook, &request))).await {
            Ok(verdict) => verdict.unwrap_or_else(|denial| denial),
            // A slow webhook must not block changes to pods and nodes.
            Err(_) if matches!(hook, Hook::ValidatePods | Hook::ValidateNodes) => Verdict::default(),
            Err(_) => {
                let message = format!(
                    "the API server did not answer Haulout's admission webhook within {} ms: try again",
                    ours.as_millis()
                );
                Verdict::denied(Cause::TooSlow, message)
            }
        }
    }
}

impl From<Arc<AccessReviewError>> for Verdict {
    fn from(error: Arc<AccessReviewError>) -> Self {
        Self::denied(Cause::Unanswered, format!("{error}; try again"))
    }
}

/// The object after the request.
fn new<T: DeserializeOwned>(request: &Request) -> Result<T, Verdict> {
    read(request.object.as_deref())
}

/// The object before the request.
fn old<T: DeserializeOwned>(request: &Request) -> Result<T, Verdict> {
    read(request.old_object.as_deref())
}

fn read<T: DeserializeOwned>(object: Option<&RawValue>) -> Result<T, Verdict> {
    let missing = || Verdict::denied(Cause::Unreadable, "the request has no object");
    let object = object.ok_or_else(missing)?;
    serde_json::from_str(object.get()).map_err(|error| {
        let message = format!("failed to parse the object: {error}");
        Verdict::denied(Cause::Unreadable, message)
    })
}

fn namespace(request: &Request) -> &str {
    request.namespace.as_deref().unwrap_or_default()
}

/// The node of a kubelet, identified as by the Node authorizer of the API server.
fn kubelet_node(user: &UserInfo) -> Option<&str> {
    let is_kubelet = user.groups.iter().flatten().any(|group| group == "system:nodes");
    user.username.as_deref()?.strip_prefix("system:node:").filter(|_| is_kubelet)
}

fn described(user: &UserInfo) -> String {
    format!("user {:?}", user.username.as_deref().unwrap_or_default())
}

#[cfg(test)]
mod tests;

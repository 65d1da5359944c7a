//! One request at a time: gathers what a verdict needs to know, within the time that the API server gives us, and asks
//! [`decide`](crate::decide). Nothing here has side effects, so that a dry run is a run like any other.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use haulout_api_types::{DrainRule, Evacuation, NodeMaintenance};
use haulout_service_runtime::clock::Clock;
use haulout_service_runtime::pods::Pod;
use k8s_openapi::api::authentication::v1::UserInfo;
use k8s_openapi::api::core::v1::NodeSelector;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::api::{ApiServer, Unanswered};
use crate::args::RuleArgs;
use crate::decide::node_maintenance::Rights;
use crate::decide::{Cause, Verdict, drain_rule, evacuation, node, node_maintenance, pod};
use crate::review::{Admit, Hook, Operation, Request};
use crate::watch::Caches;

/// All rules, with what they know of the cluster.
pub struct Rules {
    caches: Caches,
    api: ApiServer,
    clock: Clock,
    controller: String,
    served: BTreeSet<String>,
}

impl Rules {
    /// The rules for this cluster.
    pub fn new(caches: Caches, api: ApiServer, clock: Clock, args: &RuleArgs) -> Self {
        let classes = args.served_evacuator_classes.iter();
        let served = classes.filter(|class| !class.is_empty()).cloned().collect();
        Self { caches, api, clock, controller: args.evacuation_controller_user.clone(), served }
    }

    async fn judge(&self, hook: Hook, request: &Request) -> Result<Verdict, Verdict> {
        match (hook, request.operation) {
            (Hook::MutateEvacuations, Operation::Create) => self.prepare_evacuation(request).await,
            (Hook::ValidateEvacuations, Operation::Create) => self.new_evacuation(request).await,
            (Hook::ValidateEvacuations, Operation::Update) => self.changed_evacuation(request).await,
            (Hook::ValidateEvacuations, Operation::Delete) => self.removed_evacuation(request).await,
            (Hook::MutateNodeMaintenances, Operation::Create | Operation::Update) => {
                // The schema refuses what cannot be read, and names the field.
                let prepare = |new| node_maintenance::prepare(old(request).ok().as_ref(), &new);
                Ok(new(request).map(prepare).unwrap_or_default())
            }
            (Hook::ValidateNodeMaintenances, Operation::Create | Operation::Update) => {
                self.maintenance(request).await
            }
            (Hook::ValidateNodeMaintenances, Operation::Delete) => {
                let old: NodeMaintenance = old(request)?;
                self.authorize_nodes(&request.user, &old.spec.node_selector).await?;
                Ok(Verdict::default())
            }
            (Hook::ValidateDrainRules, Operation::Create | Operation::Update) => {
                let new: DrainRule = new(request)?;
                let rules = self.caches.drain_rules.all().await;
                Ok(drain_rule::judge(&new, rules.iter().map(AsRef::as_ref)))
            }
            (Hook::ValidatePods, Operation::Create) => Ok(pod::judge(None, &new(request)?)),
            (Hook::ValidatePods, Operation::Update) => Ok(pod::judge(Some(&old(request)?), &new(request)?)),
            (Hook::ValidateNodes, Operation::Update) => {
                let (old, new) = (old(request)?, new(request)?);
                let maintenances = self.caches.maintenances.all().await;
                Ok(node::judge(&old, &new, maintenances.iter().map(AsRef::as_ref)))
            }
            _ => Ok(Verdict::default()),
        }
    }

    async fn prepare_evacuation(&self, request: &Request) -> Result<Verdict, Verdict> {
        // The schema refuses what cannot be read, and names the field.
        let Ok(new) = new(request) else { return Ok(Verdict::default()) };
        let pod = self.pod_of(request, &new).await?.map(|pod| pod.metadata());
        Ok(evacuation::prepare(&new, pod.as_ref(), &self.served))
    }

    async fn new_evacuation(&self, request: &Request) -> Result<Verdict, Verdict> {
        let new = new(request)?;
        self.authorize_pod(request, &new).await?;
        let judge = |pod: Option<Arc<Pod>>| {
            let pod = pod.map(|pod| pod.metadata());
            evacuation::judge_new(&new, namespace(request), pod.as_ref(), &self.served)
        };
        let verdict = judge(self.pod_of(request, &new).await?);
        if verdict.violations.is_empty() {
            return Ok(verdict);
        }
        // Another replica may have filled it in from a pod that our cache does not know like this yet.
        Ok(judge(self.live_pod_of(request, &new).await?))
    }

    /// The status needs no right on the pod: an evacuator that only does a part must not be able to remove it.
    async fn changed_evacuation(&self, request: &Request) -> Result<Verdict, Verdict> {
        let old: Evacuation = old(request)?;
        match request.subresource.as_deref() {
            None | Some("") => {
                self.authorize_pod(request, &old).await?;
                if !evacuation::takes_last_instigator(&old, &new(request)?) {
                    return Ok(Verdict::default());
                }
                let pod = self.live_pod_of(request, &old).await?.map(|pod| pod.metadata());
                let what = "the finalizer of its last instigator cannot be removed";
                Ok(evacuation::judge_cancellation(&old, pod.as_ref(), what))
            }
            Some("status") => {
                let by_controller =
                    request.user.username.as_ref() == Some(&self.controller) && !self.controller.is_empty();
                Ok(evacuation::judge_status(&old, &new(request)?, by_controller, self.clock.now()))
            }
            Some(_) => Ok(Verdict::default()),
        }
    }

    async fn removed_evacuation(&self, request: &Request) -> Result<Verdict, Verdict> {
        let old: Evacuation = old(request)?;
        self.authorize_pod(request, &old).await?;
        if evacuation::forbids_cancellation(&old) {
            let pod = self.live_pod_of(request, &old).await?.map(|pod| pod.metadata());
            let verdict = evacuation::judge_cancellation(&old, pod.as_ref(), "it cannot be deleted");
            if !verdict.violations.is_empty() {
                return Ok(verdict);
            }
        }
        // Who only wants to know more does not fail because it could not be found out.
        let pod = self.pod_of(request, &old).await.ok().flatten();
        let metadata = pod.as_ref().map(|pod| pod.metadata());
        if !evacuation::is_meant(metadata.as_ref(), &old) {
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
        Ok(evacuation::still_wanted(&old, &drained_by))
    }

    /// The pod that has the name of the Evacuation's pod now. The cache is believed if it has the pod that is meant; it
    /// can be behind in everything else.
    async fn pod_of(&self, request: &Request, evacuation: &Evacuation) -> Result<Option<Arc<Pod>>, Verdict> {
        match self.caches.pod(namespace(request), &evacuation.spec.pod_ref) {
            Some(pod) => Ok(Some(pod)),
            None => self.live_pod_of(request, evacuation).await,
        }
    }

    /// The same, past the cache.
    async fn live_pod_of(
        &self,
        request: &Request,
        evacuation: &Evacuation,
    ) -> Result<Option<Arc<Pod>>, Verdict> {
        let name = &evacuation.spec.pod_ref.name;
        self.api.pod(namespace(request), name).await.map_err(|error| {
            let message = format!("pod {name} could not be looked up: {error}; try again");
            Verdict::refused(Cause::Unanswered, message)
        })
    }

    async fn maintenance(&self, request: &Request) -> Result<Verdict, Verdict> {
        let new: NodeMaintenance = new(request)?;
        let old = (request.operation == Operation::Update).then(|| old(request)).transpose()?;
        self.authorize_nodes(&request.user, &new.spec.node_selector).await?;
        let nodes = self.caches.nodes.all().await;
        let nodes =
            nodes.iter().filter_map(|node| Some((node.metadata.name.as_deref()?, &node.metadata.labels)));
        Ok(node_maintenance::judge(old.as_ref(), &new, nodes))
    }

    async fn authorize_pod(&self, request: &Request, evacuation: &Evacuation) -> Result<(), Verdict> {
        let (user, namespace, pod) = (&request.user, namespace(request), &evacuation.spec.pod_ref.name);
        if self.api.may_remove_pod(user, namespace, pod).await? {
            return Ok(());
        }
        let message = format!(
            "{} may neither delete pod {pod} in namespace {namespace} nor evict it, and may therefore not {} its \
             Evacuation: ask for the verb delete on pods, or create on pods/eviction",
            described(user),
            request.operation.as_str()
        );
        Err(Verdict::refused(Cause::Unauthorized, message))
    }

    async fn authorize_nodes(&self, user: &UserInfo, selector: &NodeSelector) -> Result<(), Verdict> {
        let message = match node_maintenance::rights(selector) {
            Rights::Named(names) => {
                let nodes = match self.api.undeletable_nodes(user, &names).await?.as_slice() {
                    [] => return Ok(()),
                    [node] => format!("node {node}"),
                    nodes => format!("nodes {}", nodes.join(", ")),
                };
                format!(
                    "{} may not delete {nodes}, and may therefore not maintain what spec.nodeSelector names: ask for \
                     the verb delete on nodes, or leave it out",
                    described(user)
                )
            }
            Rights::All(why) => {
                if self.api.may_delete_all_nodes(user).await? {
                    return Ok(());
                }
                format!(
                    "{} may not delete all nodes, which spec.nodeSelector needs because {why}: name at most {} nodes \
                     with matchFields, key metadata.name and operator In, or ask for the verb delete on nodes",
                    described(user),
                    node_maintenance::MAX_NAMED
                )
            }
        };
        Err(Verdict::refused(Cause::Unauthorized, message))
    }
}

impl Admit for Rules {
    async fn admit(&self, hook: Hook, request: Request, budget: Duration) -> Verdict {
        // Better our own sentence than the API server's about a webhook that did not answer.
        let ours = budget.mul_f64(0.9);
        match tokio::time::timeout(ours, Box::pin(self.judge(hook, &request))).await {
            Ok(verdict) => verdict.unwrap_or_else(|refusal| refusal),
            // Pods and nodes must not suffer from us.
            Err(_) if matches!(hook, Hook::ValidatePods | Hook::ValidateNodes) => Verdict::default(),
            Err(_) => {
                let message = format!(
                    "the API server did not answer our questions about this request within {} ms: try again",
                    ours.as_millis()
                );
                Verdict::refused(Cause::TooSlow, message)
            }
        }
    }
}

impl From<Arc<Unanswered>> for Verdict {
    fn from(error: Arc<Unanswered>) -> Self {
        Self::refused(Cause::Unanswered, format!("{error}; try again"))
    }
}

/// The object as it would be.
fn new<T: DeserializeOwned>(request: &Request) -> Result<T, Verdict> {
    read(request.object.as_deref())
}

/// The object as it is.
fn old<T: DeserializeOwned>(request: &Request) -> Result<T, Verdict> {
    read(request.old_object.as_deref())
}

fn read<T: DeserializeOwned>(object: Option<&RawValue>) -> Result<T, Verdict> {
    let missing = || Verdict::refused(Cause::Unreadable, "the request comes without its object");
    let object = object.ok_or_else(missing)?;
    serde_json::from_str(object.get()).map_err(|error| {
        let message = format!("the object cannot be read as what it is said to be: {error}");
        Verdict::refused(Cause::Unreadable, message)
    })
}

fn namespace(request: &Request) -> &str {
    request.namespace.as_deref().unwrap_or_default()
}

fn described(user: &UserInfo) -> String {
    format!("user {:?}", user.username.as_deref().unwrap_or_default())
}

#[cfg(test)]
mod tests;

//! The objects of the cluster at one moment, as JSON from the API server, and how to read them.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams};
use serde_json::{Map, Value};

/// The observed kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Pod,
    Budget,
    Node,
    Namespace,
    Evacuation,
    Maintenance,
    Lease,
    Policy,
    FlowSchema,
    Deployment,
    ReplicaSet,
}

impl Kind {
    pub const ALL: [Self; 11] = [
        Self::Pod,
        Self::Budget,
        Self::Node,
        Self::Namespace,
        Self::Evacuation,
        Self::Maintenance,
        Self::Lease,
        Self::Policy,
        Self::FlowSchema,
        Self::Deployment,
        Self::ReplicaSet,
    ];

    pub fn api(self, client: &Client) -> Api<DynamicObject> {
        let (group, version, kind, plural) = match self {
            Self::Pod => ("", "v1", "Pod", "pods"),
            Self::Budget => ("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets"),
            Self::Node => ("", "v1", "Node", "nodes"),
            Self::Namespace => ("", "v1", "Namespace", "namespaces"),
            Self::Evacuation => ("evacuation.coordination.k8s.io", "v1alpha1", "Evacuation", "evacuations"),
            Self::Maintenance => {
                ("nodemaintenance.k8s.io", "v1alpha1", "NodeMaintenance", "nodemaintenances")
            }
            Self::Lease => ("coordination.k8s.io", "v1", "Lease", "leases"),
            Self::Policy => (
                "admissionregistration.k8s.io",
                "v1",
                "ValidatingAdmissionPolicy",
                "validatingadmissionpolicies",
            ),
            Self::FlowSchema => ("flowcontrol.apiserver.k8s.io", "v1", "FlowSchema", "flowschemas"),
            Self::Deployment => ("apps", "v1", "Deployment", "deployments"),
            Self::ReplicaSet => ("apps", "v1", "ReplicaSet", "replicasets"),
        };
        let kind = GroupVersionKind::gvk(group, version, kind);
        let resource = ApiResource::from_gvk_with_plural(&kind, plural);
        match self {
            // Leases of nodes are renewed all the time.
            Self::Lease => Api::namespaced_with(client.clone(), super::SYSTEM, &resource),
            _ => Api::all_with(client.clone(), &resource),
        }
    }
}

/// Reads fields by JSON pointer. Missing fields are empty.
pub trait Read {
    fn text(&self, pointer: &str) -> &str;
    fn number(&self, pointer: &str) -> i64;
    fn flag(&self, pointer: &str) -> bool;
    fn time(&self, pointer: &str) -> Option<Timestamp>;
    fn list(&self, pointer: &str) -> &[Value];
    /// The entry of a map whose keys may contain slashes.
    fn entry(&self, pointer: &str, key: &str) -> Option<&str>;
    fn map(&self, pointer: &str) -> Option<&Map<String, Value>>;

    fn uid(&self) -> &str {
        self.text("/metadata/uid")
    }
    fn name(&self) -> &str {
        self.text("/metadata/name")
    }
    /// `namespace/name`, or only the name for cluster-scoped objects.
    fn key(&self) -> String {
        match self.text("/metadata/namespace") {
            "" => self.name().to_owned(),
            namespace => format!("{namespace}/{}", self.name()),
        }
    }
    fn label(&self, key: &str) -> Option<&str> {
        self.entry("/metadata/labels", key)
    }
    fn annotation(&self, key: &str) -> Option<&str> {
        self.entry("/metadata/annotations", key)
    }
    fn is_terminating(&self) -> bool {
        !self.text("/metadata/deletionTimestamp").is_empty()
    }
    fn finalizers(&self) -> Vec<&str> {
        self.list("/metadata/finalizers").iter().filter_map(Value::as_str).collect()
    }
    /// Status, reason and message of a condition.
    fn condition(&self, kind: &str) -> Option<(&str, &str, &str)> {
        let found = self.list("/status/conditions").iter().find(|c| c.text("/type") == kind)?;
        Some((found.text("/status"), found.text("/reason"), found.text("/message")))
    }
    fn is_true(&self, kind: &str) -> bool {
        self.condition(kind).is_some_and(|(status, ..)| status == "True")
    }
}

impl Read for Value {
    fn text(&self, pointer: &str) -> &str {
        self.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
    }
    fn number(&self, pointer: &str) -> i64 {
        self.pointer(pointer).and_then(Value::as_i64).unwrap_or_default()
    }
    fn flag(&self, pointer: &str) -> bool {
        self.pointer(pointer).and_then(Value::as_bool).unwrap_or_default()
    }
    fn time(&self, pointer: &str) -> Option<Timestamp> {
        self.text(pointer).parse().ok()
    }
    fn list(&self, pointer: &str) -> &[Value] {
        self.pointer(pointer).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
    }
    fn entry(&self, pointer: &str, key: &str) -> Option<&str> {
        self.map(pointer)?.get(key)?.as_str()
    }
    fn map(&self, pointer: &str) -> Option<&Map<String, Value>> {
        self.pointer(pointer)?.as_object()
    }
}

/// All observed objects.
#[derive(Clone, Debug, Default)]
pub struct ClusterView(BTreeMap<(Kind, String), Arc<Value>>);

impl ClusterView {
    /// Lists everything from the API server.
    pub async fn fetch(client: &Client) -> Result<Self> {
        let mut view = Self::default();
        for kind in Kind::ALL {
            let found = kind.api(client).list(&ListParams::default()).await;
            for object in found.with_context(|| format!("listing {kind:?}s"))? {
                view.put(kind, Arc::new(serde_json::to_value(object)?));
            }
        }
        Ok(view)
    }

    /// Inserts an object. Returns the previous version.
    pub fn put(&mut self, kind: Kind, object: Arc<Value>) -> Option<Arc<Value>> {
        self.0.insert((kind, object.key()), object)
    }

    /// Removes an object. Returns the last version.
    pub fn remove(&mut self, kind: Kind, key: &str) -> Option<Arc<Value>> {
        self.0.remove(&(kind, key.to_owned()))
    }

    pub fn get(&self, kind: Kind, key: &str) -> Option<&Value> {
        self.0.get(&(kind, key.to_owned())).map(AsRef::as_ref)
    }

    pub fn all(&self, kind: Kind) -> impl Iterator<Item = &Value> {
        self.0.iter().filter(move |((of, _), _)| *of == kind).map(|(_, object)| object.as_ref())
    }

    /// The nodes that a maintenance selects.
    pub fn nodes_of(&self, maintenance: &Value) -> Vec<&Value> {
        self.all(Kind::Node).filter(|node| selects_node(maintenance, node)).collect()
    }

    /// The pods on nodes of this maintenance that a drain has to remove, including terminating ones.
    pub fn leaving(&self, maintenance: &Value) -> Vec<&Value> {
        let nodes: Vec<&str> = self.nodes_of(maintenance).into_iter().map(Read::name).collect();
        let here = |pod: &&Value| nodes.contains(&pod.text("/spec/nodeName"));
        self.all(Kind::Pod).filter(here).filter(|pod| has_to_leave(pod)).collect()
    }

    /// The budgets that cover a pod.
    pub fn covering(&self, pod: &Value) -> Vec<&Value> {
        self.all(Kind::Budget).filter(|budget| covers(budget, pod)).collect()
    }

    /// The Deployment to which a pod belongs, directly or through a ReplicaSet.
    pub fn deployment_of(&self, pod: &Value) -> Option<&Value> {
        let owner = controller(pod)?;
        let with_uid = |kind, uid: &str| self.all(kind).find(|object| object.uid() == uid);
        match owner.text("/kind") {
            "Deployment" => with_uid(Kind::Deployment, owner.text("/uid")),
            "ReplicaSet" => {
                let set = with_uid(Kind::ReplicaSet, owner.text("/uid"))?;
                with_uid(Kind::Deployment, controller(set)?.text("/uid"))
            }
            _ => None,
        }
    }

    /// The pods of a Deployment.
    pub fn pods_of_deployment(&self, deployment: &Value) -> Vec<&Value> {
        let belongs = |pod: &&Value| self.deployment_of(pod).is_some_and(|of| of.uid() == deployment.uid());
        self.all(Kind::Pod).filter(belongs).collect()
    }

    /// The Evacuation of the pod with this UID.
    pub fn evacuation_of(&self, pod: &Value) -> Option<&Value> {
        let same = |evacuation: &&Value| evacuation.text("/spec/podRef/uid") == pod.uid();
        self.all(Kind::Evacuation).find(same)
    }
}

/// The owner reference of the controller.
pub fn controller(object: &Value) -> Option<&Value> {
    object.list("/metadata/ownerReferences").iter().find(|owner| owner.flag("/controller"))
}

/// Whether a pod belongs directly to a Deployment, so that its ReplicaSet creates a replacement.
pub fn is_moved(pod: &Value) -> bool {
    controller(pod).is_some_and(|owner| owner.text("/kind") == "Deployment")
}

/// Whether the drain of a node has to remove this pod.
pub fn has_to_leave(pod: &Value) -> bool {
    let finished = matches!(pod.text("/status/phase"), "Succeeded" | "Failed");
    let owned = |kind: &str| controller(pod).is_some_and(|owner| owner.text("/kind") == kind);
    let stays = pod.label("cluster.x-k8s.io/drain") == Some("skip");
    let mirror = pod.annotation("kubernetes.io/config.mirror").is_some();
    !finished && !owned("DaemonSet") && !mirror && !stays
}

/// Whether a budget counts this pod as healthy.
pub fn is_healthy(pod: &Value) -> bool {
    pod.is_true("Ready") && !pod.is_terminating()
}

/// Whether a maintenance selects a node.
pub fn selects_node(maintenance: &Value, node: &Value) -> bool {
    maintenance.list("/spec/nodeSelector/nodeSelectorTerms").iter().any(|term| {
        let (labels, fields) = (term.list("/matchExpressions"), term.list("/matchFields"));
        !(labels.is_empty() && fields.is_empty())
            && labels.iter().all(|wanted| meets(wanted, node.label(wanted.text("/key"))))
            && fields.iter().all(|wanted| meets(wanted, Some(node.name())))
    })
}

/// Whether a budget covers a pod.
pub fn covers(budget: &Value, pod: &Value) -> bool {
    let Some(selector) = budget.pointer("/spec/selector").filter(|selector| !selector.is_null()) else {
        return false;
    };
    let labels = selector.map("/matchLabels").into_iter().flatten();
    budget.text("/metadata/namespace") == pod.text("/metadata/namespace")
        && labels.into_iter().all(|(key, value)| pod.label(key) == value.as_str())
        && selector
            .list("/matchExpressions")
            .iter()
            .all(|wanted| meets(wanted, pod.label(wanted.text("/key"))))
}

fn meets(wanted: &Value, value: Option<&str>) -> bool {
    let listed = value.is_some_and(|value| wanted.list("/values").iter().any(|one| one == value));
    match wanted.text("/operator") {
        "In" => listed,
        "NotIn" => !listed,
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        // The campaign uses no other operators, and guessing would be wrong.
        _ => false,
    }
}

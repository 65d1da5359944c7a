//! Nodes that KWOK keeps alive.

use k8s_openapi::api::core::v1::{Node, NodeSpec, NodeStatus, Taint};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::ObjectMeta;

use super::meta::metadata_methods;
use crate::nodes::{MANAGED, MANAGED_LABEL};

/// A node that KWOK makes Ready.
#[derive(Clone, Debug)]
pub struct NodeBuilder {
    metadata: ObjectMeta,
    spec: NodeSpec,
    status: NodeStatus,
}

/// A node with this name. KWOK makes it ready.
pub fn node(name: &str) -> NodeBuilder {
    let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
    NodeBuilder { metadata, spec: NodeSpec::default(), status: NodeStatus::default() }
        .label(MANAGED_LABEL, MANAGED)
        .label("kubernetes.io/hostname", name)
        .label("kubernetes.io/os", "linux")
        .label("kubernetes.io/arch", "amd64")
}

impl NodeBuilder {
    metadata_methods!();

    /// Adds a taint. An empty value is omitted.
    #[must_use]
    pub fn taint(mut self, key: &str, value: &str, effect: &str) -> Self {
        self.spec.taints.get_or_insert_default().push(Taint {
            key: key.to_owned(),
            value: Some(value.to_owned()).filter(|value| !value.is_empty()),
            effect: effect.to_owned(),
            time_added: None,
        });
        self
    }

    /// Cordons the node.
    #[must_use]
    pub fn unschedulable(mut self) -> Self {
        self.spec.unschedulable = Some(true);
        self
    }

    /// Sets capacity and allocatable of a resource. If used, set all that pods need: `cpu`, `memory` and `pods`.
    #[must_use]
    pub fn capacity(mut self, resource: &str, quantity: &str) -> Self {
        for amounts in [&mut self.status.capacity, &mut self.status.allocatable] {
            amounts.get_or_insert_default().insert(resource.to_owned(), Quantity(quantity.to_owned()));
        }
        self
    }

    /// A node that KWOK does not touch.
    #[must_use]
    pub fn unmanaged(mut self) -> Self {
        if let Some(labels) = &mut self.metadata.labels {
            labels.remove(MANAGED_LABEL);
        }
        self
    }

    /// The node.
    pub fn build(self) -> Node {
        Node { metadata: self.metadata, spec: Some(self.spec), status: Some(self.status) }
    }
}

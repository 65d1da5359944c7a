//! Deployments, PodDisruptionBudgets and namespaces.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, ReplicaSet, ReplicaSetSpec};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::ObjectMeta;

use super::meta::{metadata_methods, namespace_method};
use super::pod::{PodBuilder, pod};

/// A Namespace.
pub fn namespace(name: &str) -> Namespace {
    let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
    Namespace { metadata, ..Namespace::default() }
}

/// A Deployment whose pods carry the label `app` with its name.
#[derive(Clone, Debug)]
pub struct DeploymentBuilder {
    metadata: ObjectMeta,
    replicas: i32,
    template: PodBuilder,
}

/// A Deployment with one replica in the namespace `default`.
pub fn deployment(name: &str) -> DeploymentBuilder {
    DeploymentBuilder { metadata: named(name), replicas: 1, template: pod(name).label("app", name) }
}

impl DeploymentBuilder {
    metadata_methods!();
    namespace_method!();

    /// Sets the number of replicas.
    #[must_use]
    pub fn replicas(mut self, replicas: i32) -> Self {
        self.replicas = replicas;
        self
    }

    /// Changes the pods, as in `.pods(|pod| pod.priority_class("high"))`.
    #[must_use]
    pub fn pods(mut self, change: impl FnOnce(PodBuilder) -> PodBuilder) -> Self {
        self.template = change(self.template);
        self
    }

    /// The Deployment.
    pub fn build(self) -> Deployment {
        let selector = app(self.metadata.name.as_deref().unwrap_or_default());
        let spec = DeploymentSpec {
            replicas: Some(self.replicas),
            selector,
            template: self.template.template(),
            ..DeploymentSpec::default()
        };
        Deployment { metadata: self.metadata, spec: Some(spec), status: None }
    }

    /// A ReplicaSet instead, without an owner.
    pub fn build_replica_set(self) -> ReplicaSet {
        let selector = app(self.metadata.name.as_deref().unwrap_or_default());
        let spec = ReplicaSetSpec {
            replicas: Some(self.replicas),
            selector,
            template: Some(self.template.template()),
            ..ReplicaSetSpec::default()
        };
        ReplicaSet { metadata: self.metadata, spec: Some(spec), status: None }
    }
}

/// A `PodDisruptionBudget`.
#[derive(Clone, Debug)]
pub struct PdbBuilder {
    metadata: ObjectMeta,
    spec: PodDisruptionBudgetSpec,
}

/// A budget for the pods whose label `app` is its name, in the namespace `default`. Its default is that of Kubernetes,
/// minAvailable 1.
pub fn pdb(name: &str) -> PdbBuilder {
    let spec = PodDisruptionBudgetSpec { selector: Some(app(name)), ..PodDisruptionBudgetSpec::default() };
    PdbBuilder { metadata: named(name), spec }
}

impl PdbBuilder {
    metadata_methods!();
    namespace_method!();

    /// How many pods must stay healthy: a number or a percentage.
    #[must_use]
    pub fn min_available(mut self, value: &str) -> Self {
        self.spec.min_available = Some(int_or_string(value));
        self
    }

    /// How many pods may be missing: a number or a percentage.
    #[must_use]
    pub fn max_unavailable(mut self, value: &str) -> Self {
        self.spec.max_unavailable = Some(int_or_string(value));
        self
    }

    /// Covers the pods with this label instead.
    #[must_use]
    pub fn selects(mut self, key: &str, value: &str) -> Self {
        let labels = BTreeMap::from([(key.to_owned(), value.to_owned())]);
        self.spec.selector = Some(LabelSelector { match_labels: Some(labels), ..LabelSelector::default() });
        self
    }

    /// The budget.
    pub fn build(self) -> PodDisruptionBudget {
        PodDisruptionBudget { metadata: self.metadata, spec: Some(self.spec), status: None }
    }
}

fn named(name: &str) -> ObjectMeta {
    ObjectMeta { name: Some(name.to_owned()), namespace: Some("default".to_owned()), ..ObjectMeta::default() }
}

fn app(name: &str) -> LabelSelector {
    let labels = BTreeMap::from([("app".to_owned(), name.to_owned())]);
    LabelSelector { match_labels: Some(labels), ..LabelSelector::default() }
}

fn int_or_string(value: &str) -> IntOrString {
    value.parse().map_or_else(|_| IntOrString::String(value.to_owned()), IntOrString::Int)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deployment_selects_its_own_pods() {
        let built = deployment("web").replicas(3).pods(|pod| pod.grace(5)).build();
        let spec = built.spec.unwrap();
        assert_eq!(spec.replicas, Some(3));
        let template = spec.template.metadata.unwrap();
        assert_eq!(spec.selector.match_labels, template.labels);
        assert_eq!(template.name, None);
    }

    #[test]
    fn budget_accepts_numbers_and_percentages() {
        let spec = pdb("web").min_available("50%").max_unavailable("1").build().spec.unwrap();
        assert_eq!(spec.min_available, Some(IntOrString::String("50%".to_owned())));
        assert_eq!(spec.max_unavailable, Some(IntOrString::Int(1)));
    }
}

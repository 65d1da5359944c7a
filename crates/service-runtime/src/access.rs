//! Checks at startup that the API server responds, serves the required kinds, and grants the required permissions.

use futures::future::try_join_all;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::api::{Api, PostParams};
use kube::{Client, Resource};
use thiserror::Error;

use crate::error_chain::error_chain;

/// A permission that a service needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permission {
    /// Such as `list`.
    pub verb: &'static str,
    /// The API group; empty for the core group.
    pub group: &'static str,
    /// Such as `pods`, or `pods/eviction` for a subresource.
    pub resource: &'static str,
    /// Where the permission is needed.
    pub scope: Scope,
    /// The name of the object. Absent: all objects.
    pub name: Option<String>,
}

/// Where a permission is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// In every namespace, or on a cluster-scoped resource.
    Cluster,
    /// In the service's own namespace.
    OwnNamespace,
}

impl Permission {
    /// A permission in all namespaces, or on a cluster-scoped resource.
    pub const fn cluster(verb: &'static str, group: &'static str, resource: &'static str) -> Self {
        Self { verb, group, resource, scope: Scope::Cluster, name: None }
    }

    /// A permission in the service's own namespace.
    pub const fn own(verb: &'static str, group: &'static str, resource: &'static str) -> Self {
        Self { verb, group, resource, scope: Scope::OwnNamespace, name: None }
    }

    /// Restricts the permission to one object. Not for `create`, because the API server does not know the name when it
    /// authorizes.
    #[must_use]
    pub fn on(self, name: &str) -> Self {
        Self { name: Some(name.into()), ..self }
    }
}

/// The permissions for publishing events.
pub const EVENTS: &[Permission] = &[
    Permission::cluster("create", "events.k8s.io", "events"),
    Permission::cluster("patch", "events.k8s.io", "events"),
];

/// The permissions for leader election. All except `create` are restricted to the service's own Lease.
pub fn election(service: &str) -> Vec<Permission> {
    let verbs = ["list", "watch", "update"];
    let own =
        verbs.map(|verb| Permission::own(verb, "coordination.k8s.io", "leases").on(&lease_name(service)));
    own.into_iter().chain([Permission::own("create", "coordination.k8s.io", "leases")]).collect()
}

/// The name of a service's Lease.
pub fn lease_name(service: &str) -> String {
    format!("haulout-{service}")
}

/// A kind that the API server must serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kind {
    group: String,
    version: String,
    plural: String,
}

impl Kind {
    /// The kind of this type.
    pub fn of<K: Resource<DynamicType = ()>>() -> Self {
        Self { group: K::group(&()).into(), version: K::version(&()).into(), plural: K::plural(&()).into() }
    }
}

/// Why a service cannot start.
#[derive(Debug, Error)]
pub enum AccessError {
    /// The API server is unreachable.
    #[error("failed to reach the API server at {server}: {}", error_chain(.source.as_ref()))]
    Unreachable {
        /// Its address.
        server: String,
        /// The error.
        source: Box<kube::Error>,
    },
    /// A required kind is not served.
    #[error(
        "the API server does not serve {}: install the CRDs, for example with `helm upgrade --install` and crds.install=true",
        .0.join(", ")
    )]
    NotServed(Vec<String>),
    /// Required permissions are missing.
    #[error("missing permissions: {}: grant them in the ClusterRole or Role of this service, as the chart does", .0.join("; "))]
    Forbidden(Vec<String>),
    /// A permission could not be checked.
    #[error("failed to check the permission to {question}: {}", error_chain(.source.as_ref()))]
    Unanswered {
        /// The permission.
        question: String,
        /// The error.
        source: Box<kube::Error>,
    },
}

/// Checks kinds first, then permissions. Returns all missing kinds or all missing permissions.
pub async fn check(
    client: &Client,
    server: &str,
    own_namespace: &str,
    kinds: &[Kind],
    permissions: &[Permission],
) -> Result<(), AccessError> {
    let unreachable =
        |source: kube::Error| AccessError::Unreachable { server: server.into(), source: Box::new(source) };
    let missing = try_join_all(kinds.iter().map(|kind| missing(client, kind))).await.map_err(unreachable)?;
    let missing: Vec<_> = missing.into_iter().flatten().collect();
    if !missing.is_empty() {
        return Err(AccessError::NotServed(missing));
    }
    let denied = permissions.iter().map(|permission| denied(client, own_namespace, permission));
    let denied: Vec<_> = try_join_all(denied).await?.into_iter().flatten().collect();
    if denied.is_empty() { Ok(()) } else { Err(AccessError::Forbidden(denied)) }
}

/// Describes the kind if it is not served.
async fn missing(client: &Client, kind: &Kind) -> kube::Result<Option<String>> {
    let Kind { group, version, plural } = kind;
    let served = match client.list_api_group_resources(&format!("{group}/{version}")).await {
        Ok(found) => found.resources.iter().any(|resource| resource.name == *plural),
        Err(kube::Error::Api(status)) if status.code == 404 => false,
        Err(error) => return Err(error),
    };
    Ok((!served).then(|| format!("{plural}.{group} {version}")))
}

/// Describes the permission if it is missing.
async fn denied(
    client: &Client,
    own_namespace: &str,
    permission: &Permission,
) -> Result<Option<String>, AccessError> {
    let (resource, subresource) = permission.resource.split_once('/').unzip();
    let namespace = (permission.scope == Scope::OwnNamespace).then(|| own_namespace.to_owned());
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                group: Some(permission.group.into()),
                name: permission.name.clone(),
                namespace,
                resource: Some(resource.unwrap_or(permission.resource).into()),
                subresource: subresource.map(Into::into),
                verb: Some(permission.verb.into()),
                ..ResourceAttributes::default()
            }),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    };
    let answer = Api::all(client.clone()).create(&PostParams::default(), &review).await;
    let question = permission.describe(own_namespace);
    match answer {
        Ok(SelfSubjectAccessReview { status: Some(status), .. }) if status.allowed => Ok(None),
        Ok(_) => Ok(Some(question)),
        Err(source) => Err(AccessError::Unanswered { question, source: Box::new(source) }),
    }
}

impl Permission {
    fn describe(&self, own_namespace: &str) -> String {
        let resource = match self.group {
            "" => self.resource.to_owned(),
            group => format!("{} in {group}", self.resource),
        };
        let place = match self.scope {
            Scope::Cluster => String::new(),
            Scope::OwnNamespace => format!(" in namespace {own_namespace}"),
        };
        let name = self.name.as_ref().map(|name| format!(" named {name}")).unwrap_or_default();
        format!("{} {resource}{place}{name}", self.verb)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_permission_names_verb_and_resource() {
        let error = AccessError::Forbidden(
            [
                Permission::cluster("list", "", "pods"),
                Permission::cluster("create", "", "pods/eviction"),
                Permission::own("update", "coordination.k8s.io", "leases").on("haulout-x"),
            ]
            .map(|permission| permission.describe("haulout-system"))
            .to_vec(),
        );
        assert_eq!(
            error.to_string(),
            "missing permissions: list pods; create pods/eviction; update leases in \
             coordination.k8s.io in namespace haulout-system named haulout-x: grant them in the ClusterRole or Role of this service, as the chart does"
        );
    }
}

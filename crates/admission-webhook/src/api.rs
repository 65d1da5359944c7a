//! Requests to the API server while an admission request waits: the pod with a given name, and access reviews of the
//! user. Cluster-wide access reviews come first, because their results cover every pod and node. Results of access reviews
//! are cached for a few seconds.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _, future, stream};
use haulout_service_runtime::pods::{self, Pod};
use k8s_openapi::api::authentication::v1::UserInfo;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use moka::future::Cache;
use thiserror::Error;

use crate::metrics::Metrics;

/// How long an access review is cached. Granted or revoked permissions take effect after this time.
const TIME_TO_LIVE: Duration = Duration::from_secs(5);
/// Maximum size of the cache, in bytes of its keys.
const CAPACITY: u64 = 4 << 20;
/// Maximum number of concurrent access reviews for single nodes per request.
const MAX_CONCURRENT_REVIEWS: usize = 16;

/// An access review failed.
#[derive(Debug, Error)]
#[error("failed to check whether user {user:?} may {what}: {source}")]
pub struct AccessReviewError {
    user: String,
    what: String,
    source: Box<kube::Error>,
}

/// The result of an access review. Concurrent identical reviews share it.
type ReviewResult<T> = Result<T, Arc<AccessReviewError>>;

/// Client for lookups and access reviews.
#[derive(Clone)]
pub struct ApiServer {
    client: Client,
    /// Results of access reviews. The key is the review's spec as JSON.
    reviewed: Cache<String, bool>,
    metrics: Metrics,
}

impl ApiServer {
    /// Uses this client, which should not retry by itself, because a user waits for the answer.
    pub fn new(client: Client, metrics: Metrics) -> Self {
        let weight = |key: &String, _: &bool| u32::try_from(key.len()).unwrap_or(u32::MAX);
        let reviewed =
            Cache::builder().weigher(weight).max_capacity(CAPACITY).time_to_live(TIME_TO_LIVE).build();
        Self { client, reviewed, metrics }
    }

    /// The pod that currently has this name.
    pub async fn pod(&self, namespace: &str, name: &str) -> Result<Option<Arc<Pod>>, pods::FetchError> {
        // Both become parts of a URL, and a mutating webhook receives names before the API server validates them.
        if !is_plain(namespace) || !is_plain(name) {
            return Ok(None);
        }
        self.metrics.pod_lookup("live");
        Ok(Box::pin(pods::fetch(&self.client, namespace, name)).await?.map(Arc::new))
    }

    /// Whether the user may delete this pod, or evict it.
    pub async fn may_remove_pod(&self, user: &UserInfo, namespace: &str, name: &str) -> ReviewResult<bool> {
        for (namespace, name) in [(None, None), (Some(namespace), None), (Some(namespace), Some(name))] {
            let delete = ResourceAttributes {
                namespace: namespace.map(Into::into),
                name: name.map(Into::into),
                ..attributes("delete", "pods")
            };
            let evict = ResourceAttributes {
                verb: Some("create".into()),
                subresource: Some("eviction".into()),
                ..delete.clone()
            };
            let (delete, evict) = tokio::join!(self.may(user, delete), self.may(user, evict));
            if delete? || evict? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether the user may delete all nodes.
    pub async fn may_delete_all_nodes(&self, user: &UserInfo) -> ReviewResult<bool> {
        self.may(user, attributes("delete", "nodes")).await
    }

    /// Returns the nodes that the user may not delete.
    pub async fn undeletable_nodes(
        &self,
        user: &UserInfo,
        nodes: &BTreeSet<String>,
    ) -> ReviewResult<Vec<String>> {
        if nodes.is_empty() || self.may_delete_all_nodes(user).await? {
            return Ok(Vec::new());
        }
        let each = nodes.iter().map(|node| async move {
            let attributes = ResourceAttributes { name: Some(node.clone()), ..attributes("delete", "nodes") };
            self.may(user, attributes).await.map(|may| (!may).then(|| node.clone()))
        });
        let each: Vec<_> = each.collect();
        stream::iter(each).buffered(MAX_CONCURRENT_REVIEWS).try_filter_map(future::ok).try_collect().await
    }

    async fn may(&self, user: &UserInfo, attributes: ResourceAttributes) -> ReviewResult<bool> {
        let failed = |source| AccessReviewError {
            user: user.username.clone().unwrap_or_default(),
            what: described(&attributes),
            source: Box::new(source),
        };
        let spec = SubjectAccessReviewSpec {
            user: user.username.clone(),
            uid: user.uid.clone(),
            groups: user.groups.clone(),
            extra: user.extra.clone(),
            resource_attributes: Some(attributes.clone()),
            ..SubjectAccessReviewSpec::default()
        };
        let key = serde_json::to_string(&spec).map_err(kube::Error::SerdeError).map_err(failed)?;
        let answer = self.reviewed.entry(key).or_try_insert_with(Box::pin(async {
            let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
            let reviews: Api<SubjectAccessReview> = Api::all(self.client.clone());
            let answer = reviews.create(&PostParams::default(), &review).await.map_err(failed)?;
            Ok(answer.status.is_some_and(|status| status.allowed))
        }));
        let answer = answer.await;
        self.metrics.access_review(match &answer {
            Ok(entry) if entry.is_fresh() => "live",
            Ok(_) => "cached",
            Err(_) => "failed",
        });
        answer.map(moka::Entry::into_value)
    }
}

/// Attributes for this verb on all objects of this resource.
fn attributes(verb: &str, resource: &str) -> ResourceAttributes {
    ResourceAttributes {
        verb: Some(verb.into()),
        group: Some(String::new()),
        version: Some("v1".into()),
        resource: Some(resource.into()),
        ..ResourceAttributes::default()
    }
}

/// Such as `create pods/eviction web-1 in namespace shop`.
fn described(attributes: &ResourceAttributes) -> String {
    let parts = [
        ("", &attributes.verb),
        (" ", &attributes.resource),
        ("/", &attributes.subresource),
        (" ", &attributes.name),
        (" in namespace ", &attributes.namespace),
    ];
    let given = parts.into_iter().filter_map(|(before, part)| Some([before, part.as_deref()?]));
    given.flatten().collect()
}

fn is_plain(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(plain)
}

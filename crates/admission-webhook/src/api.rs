//! What the API server is asked while a request waits: which pod has a name now, and whether users may do themselves what
//! an object of ours would do for them. Broad questions about rights come first, because their answers serve every pod and
//! node; all these answers are kept for some seconds.

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

/// How long an answer is believed: a right that is given or taken counts after this.
const TIME_TO_LIVE: Duration = Duration::from_secs(5);
/// How many bytes of questions are remembered.
const CAPACITY: u64 = 4 << 20;
/// How many narrow questions of one request are asked at once.
const AT_ONCE: usize = 16;

/// The API server could not tell whether somebody may do something.
#[derive(Debug, Error)]
#[error("the API server could not tell whether user {user:?} may {what}: {source}")]
pub struct Unanswered {
    user: String,
    what: String,
    source: Box<kube::Error>,
}

/// An answer about rights; those who ask the same at once share it.
type Answer<T> = Result<T, Arc<Unanswered>>;

/// Asks the API server.
#[derive(Clone)]
pub struct ApiServer {
    client: Client,
    /// Whether users may do something, by the question's JSON, which tells it from every other one.
    answers: Cache<String, bool>,
    metrics: Metrics,
}

impl ApiServer {
    /// Asks with this client, which should not retry by itself: the user waits.
    pub fn new(client: Client, metrics: Metrics) -> Self {
        let weight = |question: &String, _: &bool| u32::try_from(question.len()).unwrap_or(u32::MAX);
        let answers =
            Cache::builder().weigher(weight).max_capacity(CAPACITY).time_to_live(TIME_TO_LIVE).build();
        Self { client, answers, metrics }
    }

    /// The pod that has this name now.
    pub async fn pod(&self, namespace: &str, name: &str) -> Result<Option<Arc<Pod>>, pods::FetchError> {
        // Both become parts of a URL, and a mutating webhook sees names before their syntax has been judged.
        if !is_plain(namespace) || !is_plain(name) {
            return Ok(None);
        }
        self.metrics.pod_lookup("live");
        Ok(Box::pin(pods::fetch(&self.client, namespace, name)).await?.map(Arc::new))
    }

    /// Whether the user may delete this pod, or evict it.
    pub async fn may_remove_pod(&self, user: &UserInfo, namespace: &str, name: &str) -> Answer<bool> {
        for (namespace, name) in [(None, None), (Some(namespace), None), (Some(namespace), Some(name))] {
            let delete = ResourceAttributes {
                namespace: namespace.map(Into::into),
                name: name.map(Into::into),
                ..right("delete", "pods")
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
    pub async fn may_delete_all_nodes(&self, user: &UserInfo) -> Answer<bool> {
        self.may(user, right("delete", "nodes")).await
    }

    /// Those of the nodes that the user may not delete.
    pub async fn undeletable_nodes(&self, user: &UserInfo, nodes: &BTreeSet<String>) -> Answer<Vec<String>> {
        if nodes.is_empty() || self.may_delete_all_nodes(user).await? {
            return Ok(Vec::new());
        }
        let each = nodes.iter().map(|node| async move {
            let right = ResourceAttributes { name: Some(node.clone()), ..right("delete", "nodes") };
            self.may(user, right).await.map(|may| (!may).then(|| node.clone()))
        });
        let each: Vec<_> = each.collect();
        stream::iter(each).buffered(AT_ONCE).try_filter_map(future::ok).try_collect().await
    }

    async fn may(&self, user: &UserInfo, right: ResourceAttributes) -> Answer<bool> {
        let unanswered = |source| Unanswered {
            user: user.username.clone().unwrap_or_default(),
            what: described(&right),
            source: Box::new(source),
        };
        let spec = SubjectAccessReviewSpec {
            user: user.username.clone(),
            uid: user.uid.clone(),
            groups: user.groups.clone(),
            extra: user.extra.clone(),
            resource_attributes: Some(right.clone()),
            ..SubjectAccessReviewSpec::default()
        };
        let question = serde_json::to_string(&spec).map_err(kube::Error::SerdeError).map_err(unanswered)?;
        let answer = self.answers.entry(question).or_try_insert_with(Box::pin(async {
            let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
            let reviews: Api<SubjectAccessReview> = Api::all(self.client.clone());
            let answer = reviews.create(&PostParams::default(), &review).await.map_err(unanswered)?;
            Ok(answer.status.is_some_and(|status| status.allowed))
        }));
        let answer = answer.await;
        self.metrics.access_review(match &answer {
            Ok(entry) if entry.is_fresh() => "asked",
            Ok(_) => "cached",
            Err(_) => "failed",
        });
        answer.map(moka::Entry::into_value)
    }
}

/// The right to do this to all pods or nodes.
fn right(verb: &str, resource: &str) -> ResourceAttributes {
    ResourceAttributes {
        verb: Some(verb.into()),
        group: Some(String::new()),
        version: Some("v1".into()),
        resource: Some(resource.into()),
        ..ResourceAttributes::default()
    }
}

/// Such as `create pods/eviction web-1 in namespace shop`.
fn described(right: &ResourceAttributes) -> String {
    let parts = [
        ("", &right.verb),
        (" ", &right.resource),
        ("/", &right.subresource),
        (" ", &right.name),
        (" in namespace ", &right.namespace),
    ];
    let given = parts.into_iter().filter_map(|(before, part)| Some([before, part.as_deref()?]));
    given.flatten().collect()
}

fn is_plain(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(plain)
}

//! Whether users may do themselves what an object of ours would do for them. Broad questions come first, because
//! their answers serve every pod and node; all answers are kept for some seconds.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::authentication::v1::UserInfo;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use moka::future::Cache;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use thiserror::Error;

use haulout_service_runtime::metrics::Metrics;

/// How long an answer is believed: a right that is given or taken counts after this.
const TIME_TO_LIVE: Duration = Duration::from_secs(5);
/// How many bytes of questions are remembered.
const CAPACITY: u64 = 4 << 20;
/// How many narrow questions of one request are asked at once.
const AT_ONCE: usize = 16;

/// A right on pods or nodes.
#[derive(Clone, Copy, Debug, Default)]
struct Right<'a> {
    verb: &'static str,
    resource: &'static str,
    subresource: Option<&'static str>,
    namespace: Option<&'a str>,
    name: Option<&'a str>,
}

/// The API server could not tell whether somebody may do something.
#[derive(Debug, Error)]
#[error("the API server could not tell whether user {user:?} may {what}: {source}")]
pub struct Unanswered {
    user: String,
    what: String,
    source: Box<kube::Error>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

/// Asks who may do what.
#[derive(Clone)]
pub struct Access {
    reviews: Api<SubjectAccessReview>,
    /// By the question's JSON, which tells it from every other one.
    answers: Cache<String, bool>,
    asked: Family<ResultLabel, Counter>,
}

impl Access {
    /// Asks with this client, which should not retry by itself: the user waits.
    pub fn new(client: Client, metrics: &Metrics) -> Self {
        let weight = |question: &String, _: &bool| u32::try_from(question.len()).unwrap_or(u32::MAX);
        let answers =
            Cache::builder().weigher(weight).max_capacity(CAPACITY).time_to_live(TIME_TO_LIVE).build();
        let asked = Family::default();
        metrics.register(|registry| {
            let help = "Questions about users' rights, by where the answer came from";
            registry.register("haulout_admission_access_reviews", help, asked.clone());
        });
        Self { reviews: Api::all(client), answers, asked }
    }

    /// Whether the user may delete this pod, or evict it.
    pub async fn may_remove_pod(
        &self,
        user: &UserInfo,
        namespace: &str,
        name: &str,
    ) -> Result<bool, Arc<Unanswered>> {
        let delete = Right { verb: "delete", resource: "pods", ..Right::default() };
        let evict = Right { verb: "create", subresource: Some("eviction"), ..delete };
        for (namespace, name) in [(None, None), (Some(namespace), None), (Some(namespace), Some(name))] {
            let (delete, evict) = tokio::join!(
                self.may(user, Right { namespace, name, ..delete }),
                self.may(user, Right { namespace, name, ..evict })
            );
            if delete? || evict? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether the user may delete all nodes.
    pub async fn may_delete_all_nodes(&self, user: &UserInfo) -> Result<bool, Arc<Unanswered>> {
        self.may(user, Right { verb: "delete", resource: "nodes", ..Right::default() }).await
    }

    /// Those of the nodes that the user may not delete.
    pub async fn undeletable_nodes(
        &self,
        user: &UserInfo,
        nodes: &BTreeSet<String>,
    ) -> Result<Vec<String>, Arc<Unanswered>> {
        if nodes.is_empty() || self.may_delete_all_nodes(user).await? {
            return Ok(Vec::new());
        }
        let each = nodes.iter().map(|node| async move {
            let right = Right { verb: "delete", resource: "nodes", name: Some(node), ..Right::default() };
            self.may(user, right).await.map(|may| (!may).then(|| node.clone()))
        });
        let each: Vec<_> = each.collect();
        let answers: Vec<_> = stream::iter(each).buffered(AT_ONCE).try_collect().await?;
        Ok(answers.into_iter().flatten().collect())
    }

    async fn may(&self, user: &UserInfo, right: Right<'_>) -> Result<bool, Arc<Unanswered>> {
        let spec = right.asked_of(user);
        let unanswered = |source| Unanswered {
            user: user.username.clone().unwrap_or_default(),
            what: right.to_string(),
            source: Box::new(source),
        };
        let question = serde_json::to_string(&spec).map_err(kube::Error::SerdeError).map_err(unanswered)?;
        let answer = self.answers.entry(question).or_try_insert_with(Box::pin(async {
            let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
            let answer = self.reviews.create(&PostParams::default(), &review).await.map_err(unanswered)?;
            Ok(answer.status.is_some_and(|status| status.allowed))
        }));
        let answer = answer.await;
        let result = match &answer {
            Ok(entry) if entry.is_fresh() => "asked",
            Ok(_) => "cached",
            Err(_) => "failed",
        };
        self.asked.get_or_create(&ResultLabel { result }).inc();
        answer.map(moka::Entry::into_value)
    }
}

impl Right<'_> {
    fn asked_of(&self, user: &UserInfo) -> SubjectAccessReviewSpec {
        SubjectAccessReviewSpec {
            user: user.username.clone(),
            uid: user.uid.clone(),
            groups: user.groups.clone(),
            extra: user.extra.clone(),
            resource_attributes: Some(ResourceAttributes {
                verb: Some(self.verb.into()),
                group: Some(String::new()),
                version: Some("v1".into()),
                resource: Some(self.resource.into()),
                subresource: self.subresource.map(Into::into),
                namespace: self.namespace.map(Into::into),
                name: self.name.map(Into::into),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        }
    }
}

impl std::fmt::Display for Right<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        self.subresource.map_or(Ok(()), |subresource| write!(f, "/{subresource}"))?;
        self.name.map_or(Ok(()), |name| write!(f, " {name}"))?;
        self.namespace.map_or(Ok(()), |namespace| write!(f, " in namespace {namespace}"))
    }
}

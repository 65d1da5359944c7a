//! `AdmissionReview` v1 as it is on the wire, and the interface between the server, which knows bytes and time,
//! and the rules, which know what is right.

use std::time::Duration;

use haulout_api_types::names::{EVACUATION_GROUP, NODE_MAINTENANCE_GROUP};
use k8s_openapi::ByteString;
use k8s_openapi::api::authentication::v1::UserInfo;
use kube::core::Status;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;

use crate::decide::Verdict;

const API_VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";

/// Judges requests. What does not come back within `budget` is cut off by the server, which then leaves the
/// decision to the `failurePolicy` of the webhook configuration.
pub trait Admit: Send + Sync + 'static {
    /// Judges one request.
    fn admit(&self, hook: Hook, request: Request, budget: Duration) -> impl Future<Output = Verdict> + Send;
}

/// The webhooks, each with a path of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hook {
    /// Fills in what a new Evacuation leaves open.
    MutateEvacuations,
    /// Judges Evacuations and their status.
    ValidateEvacuations,
    /// Normalises the drain plan.
    MutateNodeMaintenances,
    /// Judges NodeMaintenances.
    ValidateNodeMaintenances,
    /// Judges DrainRules.
    ValidateDrainRules,
    /// Judges the evacuator annotations of pods.
    ValidatePods,
    /// Warns of cordons by hand.
    ValidateNodes,
}

impl Hook {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::MutateEvacuations,
        Self::ValidateEvacuations,
        Self::MutateNodeMaintenances,
        Self::ValidateNodeMaintenances,
        Self::ValidateDrainRules,
        Self::ValidatePods,
        Self::ValidateNodes,
    ];

    /// Where the API server sends its reviews.
    pub fn path(self) -> String {
        let verb = if self.mutates() { "mutate" } else { "validate" };
        format!("/{verb}/{}", self.resource())
    }

    /// Whether it changes objects and does not judge them.
    pub fn mutates(self) -> bool {
        matches!(self, Self::MutateEvacuations | Self::MutateNodeMaintenances)
    }

    /// The API group of the one kind that it is for.
    pub fn group(self) -> &'static str {
        self.kind().0
    }

    /// The plural of that kind.
    pub fn resource(self) -> &'static str {
        self.kind().1
    }

    fn kind(self) -> (&'static str, &'static str) {
        match self {
            Self::MutateEvacuations | Self::ValidateEvacuations => (EVACUATION_GROUP, "evacuations"),
            Self::MutateNodeMaintenances | Self::ValidateNodeMaintenances => {
                (NODE_MAINTENANCE_GROUP, "nodemaintenances")
            }
            Self::ValidateDrainRules => (NODE_MAINTENANCE_GROUP, "drainrules"),
            Self::ValidatePods => ("", "pods"),
            Self::ValidateNodes => ("", "nodes"),
        }
    }
}

/// What is done to the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Operation {
    /// It is new.
    Create,
    /// It changes.
    Update,
    /// It goes.
    Delete,
    /// Somebody connects to it, as `kubectl exec` does.
    Connect,
}

impl Operation {
    /// In the words of metrics and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Delete => "delete",
            Self::Connect => "connect",
        }
    }
}

/// The kind that is written to.
#[derive(Clone, Debug, Deserialize)]
pub struct Resource {
    /// Empty for the core group.
    #[serde(default)]
    pub group: String,
    /// Such as `pods`.
    pub resource: String,
}

/// What the API server asks about. Objects are left as they came, so that each is parsed once, and into no more
/// than the fields that a rule reads.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    /// Names this request; the answer repeats it.
    pub uid: String,
    /// What is written to.
    pub resource: Resource,
    /// Such as `status`.
    #[serde(rename = "subResource")]
    pub subresource: Option<String>,
    /// The object's namespace, if it has one.
    pub namespace: Option<String>,
    /// What is done.
    pub operation: Operation,
    /// Who does it.
    #[serde(default, rename = "userInfo")]
    pub user: UserInfo,
    /// The object as it would be; not there on DELETE.
    pub object: Option<Box<RawValue>>,
    /// The object as it is; not there on CREATE.
    pub old_object: Option<Box<RawValue>>,
}

/// Why a body could not be taken for a review.
#[derive(Debug)]
pub struct NotAReview {
    /// The uid, where it could be read in spite of it.
    pub uid: Option<String>,
    /// What is wrong with the body.
    pub problem: String,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Envelope<'a> {
    api_version: String,
    kind: String,
    #[serde(borrow)]
    request: Option<&'a RawValue>,
}

/// Reads the request of a review.
pub fn read(body: &[u8]) -> Result<Request, NotAReview> {
    let refused = |uid, problem| NotAReview { uid, problem };
    // Serde would take a list for a struct whose fields come in their order.
    let is_object = |json: &[u8]| json.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
    if !is_object(body) {
        return Err(refused(None, format!("the body is no {KIND}: it is no JSON object")));
    }
    let envelope: Envelope<'_> = serde_json::from_slice(body)
        .map_err(|error| refused(None, format!("the body is no {KIND}: {error}")))?;
    let request = envelope.request.map(RawValue::get).filter(|request| is_object(request.as_bytes()));
    let request = request.ok_or_else(|| refused(None, format!("the body is no {KIND} with a request")))?;
    let uid = || {
        #[derive(Deserialize)]
        struct Uid {
            uid: String,
        }
        serde_json::from_str::<Uid>(request).ok().map(|named| named.uid).filter(|uid| !uid.is_empty())
    };
    if envelope.api_version != API_VERSION || envelope.kind != KIND {
        let (version, kind) = (shortened(&envelope.api_version), shortened(&envelope.kind));
        let problem =
            format!("the body is {version:?} {kind:?}; only {API_VERSION:?} {KIND:?} is understood here");
        return Err(refused(uid(), problem));
    }
    match serde_json::from_str::<Request>(request) {
        Ok(request) if request.uid.is_empty() => Err(refused(None, "request.uid is empty".into())),
        Ok(request) => Ok(request),
        Err(error) => Err(refused(uid(), format!("request: {error}"))),
    }
}

/// Senders of nonsense do not get all of it back.
fn shortened(text: &str) -> String {
    text.chars().take(80).collect()
}

#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Response<'a> {
    uid: &'a str,
    allowed: bool,
    status: Status,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<ByteString>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    warnings: &'a [String],
}

/// The review that answers the request with this uid.
pub fn answer(uid: &str, verdict: &Verdict) -> serde_json::Result<Vec<u8>> {
    let patch = (!verdict.patch.is_empty()).then(|| serde_json::to_vec(&verdict.patch)).transpose()?;
    write(Response {
        uid,
        allowed: verdict.violations.is_empty(),
        status: verdict.status(),
        patch_type: patch.is_some().then_some("JSONPatch"),
        patch: patch.map(ByteString),
        warnings: &verdict.warnings,
    })
}

/// The same where there is no verdict.
pub fn failure(uid: &str, status: &Status) -> serde_json::Result<Vec<u8>> {
    write(Response { uid, status: status.clone(), ..Response::default() })
}

fn write(response: Response<'_>) -> serde_json::Result<Vec<u8>> {
    serde_json::to_vec(&json!({"apiVersion": API_VERSION, "kind": KIND, "response": response}))
}

#[cfg(test)]
mod tests;

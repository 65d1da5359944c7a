//! `AdmissionReview` v1 in its JSON format, and the interface between the server, which handles bytes and timeouts, and
//! the admission rules.

use std::time::Duration;

use haulout_api_types::bounded;
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

/// Decides on requests. If there is no verdict within `budget`, the server returns an error, and the `failurePolicy` of
/// the webhook configuration applies.
pub trait Admit: Send + Sync + 'static {
    /// Decides on one request.
    fn admit(&self, hook: Hook, request: Request, budget: Duration) -> impl Future<Output = Verdict> + Send;
}

/// The webhooks, each with a path of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hook {
    /// Sets the defaults of a new Evacuation.
    MutateEvacuations,
    /// Validates Evacuations.
    ValidateEvacuations,
    /// Adds the default entries to the drain plan.
    MutateNodeMaintenances,
    /// Validates NodeMaintenances.
    ValidateNodeMaintenances,
    /// Validates DrainRules.
    ValidateDrainRules,
    /// Validates the evacuator annotations of pods.
    ValidatePods,
    /// Warns about manual cordons.
    ValidateNodes,
}

impl Hook {
    /// All webhooks.
    pub const ALL: [Self; 7] = [
        Self::MutateEvacuations,
        Self::ValidateEvacuations,
        Self::MutateNodeMaintenances,
        Self::ValidateNodeMaintenances,
        Self::ValidateDrainRules,
        Self::ValidatePods,
        Self::ValidateNodes,
    ];

    /// The URL path.
    pub fn path(self) -> String {
        let verb = if self.mutates() { "mutate" } else { "validate" };
        format!("/{verb}/{}", self.resource())
    }

    /// Whether it is a mutating webhook.
    pub fn mutates(self) -> bool {
        matches!(self, Self::MutateEvacuations | Self::MutateNodeMaintenances)
    }

    /// The API group of its kind.
    pub fn group(self) -> &'static str {
        self.kind().0
    }

    /// The plural name of its kind.
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

/// The operation on the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Operation {
    /// The object is created.
    Create,
    /// The object is updated.
    Update,
    /// The object is deleted.
    Delete,
    /// A user connects to it, as with `kubectl exec`.
    Connect,
}

impl Operation {
    /// The name for metrics and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Delete => "delete",
            Self::Connect => "connect",
        }
    }
}

/// The resource that is written.
#[derive(Clone, Debug, Deserialize)]
pub struct Resource {
    /// Empty for the core group.
    #[serde(default)]
    pub group: String,
    /// Such as `pods`.
    pub resource: String,
}

/// An admission request. Objects stay unparsed, so that each is parsed once, and only the fields that a rule reads.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    /// Identifies this request. The response repeats it.
    pub uid: String,
    /// The resource that is written.
    pub resource: Resource,
    /// Such as `status`.
    #[serde(rename = "subResource")]
    pub subresource: Option<String>,
    /// The object's namespace, if it has one.
    pub namespace: Option<String>,
    /// The operation.
    pub operation: Operation,
    /// The user who sent the request.
    #[serde(default, rename = "userInfo")]
    pub user: UserInfo,
    /// The object after the request. Absent on DELETE.
    pub object: Option<Box<RawValue>>,
    /// The object before the request. Absent on CREATE.
    pub old_object: Option<Box<RawValue>>,
}

/// Why a request body is not a valid review.
#[derive(Debug)]
pub struct InvalidReview {
    /// The UID, if it could be parsed.
    pub uid: Option<String>,
    /// The error message.
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

/// Parses the request of a review.
pub fn read(body: &[u8]) -> Result<Request, InvalidReview> {
    // Errors of the parser repeat and escape the text that they reject, and the answer must not be larger than the body.
    let invalid = |uid, problem: String| InvalidReview { uid, problem: bounded::text(&problem) };
    // Serde would also accept a list with the fields in order.
    let is_object = |json: &[u8]| json.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
    if !is_object(body) {
        return Err(invalid(None, format!("the request body is not an {KIND}: it is not a JSON object")));
    }
    let envelope: Envelope<'_> = serde_json::from_slice(body)
        .map_err(|error| invalid(None, format!("the request body is not an {KIND}: {error}")))?;
    let request = envelope.request.map(RawValue::get).filter(|request| is_object(request.as_bytes()));
    let request =
        request.ok_or_else(|| invalid(None, format!("the request body is not an {KIND} with a request")))?;
    let uid = || {
        #[derive(Deserialize)]
        struct Uid {
            uid: String,
        }
        serde_json::from_str::<Uid>(request).ok().map(|named| named.uid).filter(|uid| !uid.is_empty())
    };
    if envelope.api_version != API_VERSION || envelope.kind != KIND {
        let (version, kind) = (truncated(&envelope.api_version), truncated(&envelope.kind));
        let problem =
            format!("the request body is {version:?} {kind:?}; only {API_VERSION:?} {KIND:?} is supported");
        return Err(invalid(uid(), problem));
    }
    match serde_json::from_str::<Request>(request) {
        Ok(request) if request.uid.is_empty() => Err(invalid(None, "request.uid is empty".into())),
        Ok(request) => Ok(request),
        Err(error) => Err(invalid(uid(), format!("request: {error}"))),
    }
}

/// Limits how much of an invalid request is repeated in the error.
fn truncated(text: &str) -> String {
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

/// The response for the request with this UID.
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

/// The response if there is no verdict.
pub fn failure(uid: &str, status: &Status) -> serde_json::Result<Vec<u8>> {
    write(Response { uid, status: status.clone(), ..Response::default() })
}

fn write(response: Response<'_>) -> serde_json::Result<Vec<u8>> {
    serde_json::to_vec(&json!({"apiVersion": API_VERSION, "kind": KIND, "response": response}))
}

#[cfg(test)]
mod tests;

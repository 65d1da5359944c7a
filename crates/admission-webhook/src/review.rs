//! `AdmissionReview` v1 as it is on the wire, and the interface between the server, which knows bytes and time,
//! and the rules, which know what is right.

use std::time::Duration;

use haulout_api_types::names;
use json_patch::Patch;
use k8s_openapi::ByteString;
use k8s_openapi::api::authentication::v1::UserInfo;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use thiserror::Error;

const API_VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";

/// Judges requests. What does not come back within `budget` is cut off by the server, which then leaves the
/// decision to the `failurePolicy` of the webhook configuration.
pub trait Admit: Send + Sync + 'static {
    /// Judges one request.
    fn admit(&self, hook: Hook, request: Request, budget: Duration) -> impl Future<Output = Answer> + Send;
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
    pub fn path(self) -> &'static str {
        match self {
            Self::MutateEvacuations => "/mutate/evacuations",
            Self::ValidateEvacuations => "/validate/evacuations",
            Self::MutateNodeMaintenances => "/mutate/nodemaintenances",
            Self::ValidateNodeMaintenances => "/validate/nodemaintenances",
            Self::ValidateDrainRules => "/validate/drainrules",
            Self::ValidatePods => "/validate/pods",
            Self::ValidateNodes => "/validate/nodes",
        }
    }

    /// Whether it changes objects and does not judge them.
    pub fn mutates(self) -> bool {
        matches!(self, Self::MutateEvacuations | Self::MutateNodeMaintenances)
    }

    /// The API group of the one kind that it judges.
    pub fn group(self) -> &'static str {
        match self {
            Self::MutateEvacuations | Self::ValidateEvacuations => names::EVACUATION_GROUP,
            Self::MutateNodeMaintenances | Self::ValidateNodeMaintenances | Self::ValidateDrainRules => {
                names::NODE_MAINTENANCE_GROUP
            }
            Self::ValidatePods | Self::ValidateNodes => "",
        }
    }

    /// The plural of that kind.
    pub fn resource(self) -> &'static str {
        match self {
            Self::MutateEvacuations | Self::ValidateEvacuations => "evacuations",
            Self::MutateNodeMaintenances | Self::ValidateNodeMaintenances => "nodemaintenances",
            Self::ValidateDrainRules => "drainrules",
            Self::ValidatePods => "pods",
            Self::ValidateNodes => "nodes",
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
    #[serde(default, rename = "subResource")]
    pub subresource: Option<String>,
    /// The object's namespace, if it has one.
    #[serde(default)]
    pub namespace: Option<String>,
    /// What is done.
    pub operation: Operation,
    /// Who does it.
    #[serde(default, rename = "userInfo")]
    pub user: UserInfo,
    /// The object as it would be; not there on DELETE.
    #[serde(default)]
    pub object: Option<Box<RawValue>>,
    /// The object as it is; not there on CREATE.
    #[serde(default)]
    pub old_object: Option<Box<RawValue>>,
}

/// What the rules say.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Go ahead.
    Allowed {
        /// What the user should know all the same.
        warnings: Vec<String>,
        /// What to change in the object first.
        patch: Option<Patch>,
    },
    /// Not like this.
    Denied {
        /// The HTTP code that the user gets.
        code: u16,
        /// The code in a word, as in a Kubernetes `Status`: `Forbidden`, `Invalid`, `NotFound`, …
        reason: &'static str,
        /// Which rule refused, as a label of metrics: one of a few words.
        cause: &'static str,
        /// What is wrong and what to do about it.
        message: String,
        /// What the user should know besides.
        warnings: Vec<String>,
    },
}

impl Answer {
    /// Allows the request as it is.
    pub fn allowed() -> Self {
        Self::Allowed { warnings: Vec::new(), patch: None }
    }

    /// Denies the request.
    pub fn denied(code: u16, reason: &'static str, cause: &'static str, message: impl Into<String>) -> Self {
        Self::Denied { code, reason, cause, message: message.into(), warnings: Vec::new() }
    }
}

/// Why a body could not be taken for a review.
#[derive(Debug, Error)]
#[error("{problem}")]
pub struct NotAReview {
    /// The uid, where it could be read in spite of it.
    pub uid: Option<String>,
    /// What is wrong with the body.
    pub problem: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope<'a> {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default, borrow)]
    request: Option<&'a RawValue>,
}

/// Reads the request of a review.
pub fn read(body: &[u8]) -> Result<Request, NotAReview> {
    let refused = |uid, problem| Err(NotAReview { uid, problem });
    // Serde would take a list for a struct whose fields come in their order.
    let is_object = |json: &[u8]| json.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
    if !is_object(body) {
        return refused(None, format!("the body is no {KIND}: it is no JSON object"));
    }
    let envelope: Envelope<'_> = match serde_json::from_slice(body) {
        Ok(envelope) => envelope,
        Err(error) => return refused(None, format!("the body is no {KIND}: {error}")),
    };
    let request = envelope.request.map(RawValue::get).filter(|request| is_object(request.as_bytes()));
    let Some(request) = request else {
        return refused(None, format!("the body is no {KIND} with a request"));
    };
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
        return refused(uid(), problem);
    }
    match serde_json::from_str::<Request>(request) {
        Ok(request) if request.uid.is_empty() => refused(None, "request.uid is empty".into()),
        Ok(request) => Ok(request),
        Err(error) => refused(uid(), format!("request: {error}")),
    }
}

/// Senders of nonsense do not get all of it back.
fn shortened(text: &str) -> String {
    text.chars().take(80).collect()
}

/// An answer as it is on the wire.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Reply<'a> {
    api_version: &'static str,
    kind: &'static str,
    response: Response<'a>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Response<'a> {
    uid: &'a str,
    allowed: bool,
    status: Status<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<ByteString>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    warnings: &'a [String],
}

#[derive(Debug, Serialize)]
struct Status<'a> {
    status: &'static str,
    code: u16,
    #[serde(skip_serializing_if = "str::is_empty")]
    reason: &'static str,
    #[serde(skip_serializing_if = "str::is_empty")]
    message: &'a str,
}

impl<'a> Reply<'a> {
    /// The answer to the request with this uid.
    pub fn new(uid: &'a str, answer: &'a Answer) -> serde_json::Result<Self> {
        let response = match answer {
            Answer::Allowed { warnings, patch } => {
                let patch = patch.as_ref().filter(|patch| !patch.0.is_empty());
                let patch = patch.map(serde_json::to_vec).transpose()?.map(ByteString);
                let status = Status { status: "Success", code: 200, reason: "", message: "" };
                let patch_type = patch.is_some().then_some("JSONPatch");
                Response { uid, allowed: true, status, patch, patch_type, warnings }
            }
            Answer::Denied { code, reason, message, warnings, .. } => {
                let status = Status { status: "Failure", code: *code, reason, message };
                Response { uid, allowed: false, status, patch: None, patch_type: None, warnings }
            }
        };
        Ok(Self { api_version: API_VERSION, kind: KIND, response })
    }
}

#[cfg(test)]
mod tests;

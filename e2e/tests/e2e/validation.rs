//! What the API server itself refuses, with no webhook of ours about: every limit of the schema and
//! every CEL rule, each with its good twin. The tables of the kinds are in the files below.
//!
//! Before 1.35 the API server puts the type of the value between `Invalid value: ` and the message of a CEL rule. So
//! [`Case::refused_at`] compares the field and our own words, which the causes of a status hold apart.

mod drain_rule;
mod evacuation;
mod node_maintenance;

use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, Status};
use serde_json::Value;

/// One row: an object, optionally a change to it, and what the API server must say.
struct Case {
    what: &'static str,
    object: Value,
    change: Change,
    /// `None` if it has to be accepted.
    refused: Option<Refusal>,
}

/// What the API server must say against an object.
#[derive(Debug)]
struct Refusal {
    /// The field with the invalid value; `None` if the message names it or it does not matter.
    field: Option<&'static str>,
    /// Part of the message.
    message: &'static str,
}

impl Refusal {
    /// Whether this is the API server's answer.
    fn fits(&self, status: &Status) -> bool {
        let invalid = status.code == 422 && status.reason == "Invalid";
        let message_fits = match self.field {
            None => status.message.contains(self.message),
            Some(field) => {
                let mut causes = status.details.iter().flat_map(|details| &details.causes);
                causes.any(|cause| {
                    cause.reason == "FieldValueInvalid"
                        && cause.field == field
                        && cause.message.contains(self.message)
                })
            }
        };
        invalid && message_fits
    }
}

enum Change {
    None,
    /// A merge patch of the object.
    Object(Value),
    /// Merge patches of the status subresource, one after the other; the last one is judged.
    Status(Vec<Value>),
}

impl Case {
    fn create(what: &'static str, object: Value) -> Self {
        Self { what, object, change: Change::None, refused: None }
    }

    fn update(what: &'static str, object: Value, patch: Value) -> Self {
        Self { what, object, change: Change::Object(patch), refused: None }
    }

    fn status<const N: usize>(what: &'static str, object: Value, patches: [Value; N]) -> Self {
        Self { what, object, change: Change::Status(patches.into()), refused: None }
    }

    fn refused(mut self, message: &'static str) -> Self {
        self.refused = Some(Refusal { field: None, message });
        self
    }

    fn refused_at(mut self, field: &'static str, message: &'static str) -> Self {
        self.refused = Some(Refusal { field: Some(field), message });
        self
    }
}

/// Puts every case before the API server and reports all that came out otherwise. Objects without a name
/// get one with this prefix.
async fn judge(api: &Api<DynamicObject>, resource: &ApiResource, prefix: &str, cases: Vec<Case>) {
    let mut wrong = Vec::new();
    let count = cases.len();
    for (index, case) in cases.into_iter().enumerate() {
        let answer = attempt(api, resource, &format!("{prefix}-{index}"), &case).await;
        let fits = match (&answer, &case.refused) {
            (Ok(()), None) => true,
            (Err(status), Some(refusal)) => refusal.fits(status),
            _ => false,
        };
        if !fits {
            let expected = case.refused.map_or("to be accepted".into(), |refusal| format!("{refusal:?}"));
            let answer: String = format!("{answer:?}").chars().take(4000).collect();
            wrong.push(format!("{}\n  expected {expected}\n  got {answer}", case.what));
        }
    }
    assert!(wrong.is_empty(), "{} of {count} cases:\n{}", wrong.len(), wrong.join("\n"));
}

/// Creates, changes and removes the object; the answer to the request that the case is about.
async fn attempt(
    api: &Api<DynamicObject>,
    resource: &ApiResource,
    name: &str,
    case: &Case,
) -> Result<(), Box<Status>> {
    let mut object: DynamicObject = serde_json::from_value(case.object.clone()).unwrap();
    object.types =
        Some(kube::core::TypeMeta { api_version: resource.api_version.clone(), kind: resource.kind.clone() });
    if object.metadata.name.is_none() && object.metadata.generate_name.is_none() {
        object.metadata.name = Some(name.into());
    }
    let refusal = |error: kube::Error| match error {
        kube::Error::Api(status) => status,
        other => panic!("{}: no answer from the API server: {other}", case.what),
    };
    let created = api.create(&PostParams::default(), &object).await.map_err(refusal);
    let created = match (&case.change, created) {
        (Change::None, Err(refusal)) => return Err(refusal),
        (_, created) => created.unwrap_or_else(|refusal| panic!("{}: creating it: {refusal:?}", case.what)),
    };
    let name = created.metadata.name.as_deref().unwrap();
    let params = PatchParams::default();
    let answer = match &case.change {
        Change::None => Ok(()),
        Change::Object(patch) => {
            api.patch(name, &params, &Patch::Merge(patch)).await.map(|_| ()).map_err(refusal)
        }
        Change::Status(patches) => {
            let (judged, earlier) = patches.split_last().unwrap();
            for patch in earlier {
                api.patch_status(name, &params, &Patch::Merge(patch)).await.unwrap();
            }
            api.patch_status(name, &params, &Patch::Merge(judged)).await.map(|_| ()).map_err(refusal)
        }
    };
    api.delete(name, &DeleteParams::default()).await.unwrap();
    answer
}

//! What the API server itself rejects, without our webhook: every limit of the schema and every CEL rule, each with a
//! valid counterpart. The tables per kind are in the modules.
//!
//! Before 1.35, the API server puts the type of the value between `Invalid value: ` and the message of a CEL rule.
//! Therefore, [`Case::rejected_at`] compares the field and our own message, which are separate in the causes of a
//! status.

mod drain_rule;
mod evacuation;
mod node_maintenance;

use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, Status};
use serde_json::Value;

/// One row: an object, optionally a change to it, and the expected answer of the API server.
struct Case {
    what: &'static str,
    object: Value,
    change: Change,
    /// `None` if it has to be accepted.
    rejected: Option<Rejection>,
}

/// The expected rejection.
#[derive(Debug)]
struct Rejection {
    /// The field with the invalid value; `None` if the message names it or it does not matter.
    field: Option<&'static str>,
    /// Part of the message.
    message: &'static str,
}

impl Rejection {
    /// Whether the answer of the API server matches.
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
    /// Merge patches of the status subresource, one after the other; the last one is checked.
    Status(Vec<Value>),
}

impl Case {
    fn create(what: &'static str, object: Value) -> Self {
        Self { what, object, change: Change::None, rejected: None }
    }

    fn update(what: &'static str, object: Value, patch: Value) -> Self {
        Self { what, object, change: Change::Object(patch), rejected: None }
    }

    fn status<const N: usize>(what: &'static str, object: Value, patches: [Value; N]) -> Self {
        Self { what, object, change: Change::Status(patches.into()), rejected: None }
    }

    fn rejected(mut self, message: &'static str) -> Self {
        self.rejected = Some(Rejection { field: None, message });
        self
    }

    fn rejected_at(mut self, field: &'static str, message: &'static str) -> Self {
        self.rejected = Some(Rejection { field: Some(field), message });
        self
    }
}

/// Sends every case to the API server and reports all unexpected answers. Objects without a name get one with this
/// prefix.
async fn check_cases(api: &Api<DynamicObject>, resource: &ApiResource, prefix: &str, cases: Vec<Case>) {
    check_cases_as([api, api], resource, prefix, cases).await;
}

/// The same, with one client for objects and one for their status.
async fn check_cases_as(
    apis: [&Api<DynamicObject>; 2],
    resource: &ApiResource,
    prefix: &str,
    cases: Vec<Case>,
) {
    let mut wrong = Vec::new();
    let count = cases.len();
    for (index, case) in cases.into_iter().enumerate() {
        let answer = attempt(apis, resource, &format!("{prefix}-{index}"), &case).await;
        let fits = match (&answer, &case.rejected) {
            (Ok(()), None) => true,
            (Err(status), Some(rejection)) => rejection.fits(status),
            _ => false,
        };
        if !fits {
            let expected =
                case.rejected.map_or("to be accepted".into(), |rejection| format!("{rejection:?}"));
            let answer: String = format!("{answer:?}").chars().take(4000).collect();
            wrong.push(format!("{}\n  expected {expected}\n  got {answer}", case.what));
        }
    }
    assert!(wrong.is_empty(), "{} of {count} cases:\n{}", wrong.len(), wrong.join("\n"));
}

/// Creates, changes and deletes the object. Returns the answer to the request under test.
async fn attempt(
    [api, status_api]: [&Api<DynamicObject>; 2],
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
    let rejection = |error: kube::Error| match error {
        kube::Error::Api(status) => status,
        other => panic!("{}: no answer from the API server: {other}", case.what),
    };
    let created = api.create(&PostParams::default(), &object).await.map_err(rejection);
    let created = match (&case.change, created) {
        (Change::None, Err(rejection)) => return Err(rejection),
        (_, created) => {
            created.unwrap_or_else(|rejection| panic!("{}: creating it: {rejection:?}", case.what))
        }
    };
    let name = created.metadata.name.as_deref().unwrap();
    let params = PatchParams::default();
    let answer = match &case.change {
        Change::None => Ok(()),
        Change::Object(patch) => {
            api.patch(name, &params, &Patch::Merge(patch)).await.map(|_| ()).map_err(rejection)
        }
        Change::Status(patches) => {
            let (last, earlier) = patches.split_last().unwrap();
            for patch in earlier {
                status_api.patch_status(name, &params, &Patch::Merge(patch)).await.unwrap();
            }
            status_api.patch_status(name, &params, &Patch::Merge(last)).await.map(|_| ()).map_err(rejection)
        }
    };
    api.delete(name, &DeleteParams::default()).await.unwrap();
    answer
}

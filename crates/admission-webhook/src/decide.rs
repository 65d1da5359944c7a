//! The admission rules: pure functions, one module per kind. A verdict contains all violations at once, each with its
//! field, and the warnings and defaults.

pub mod drain_rule;
pub mod evacuation;
pub mod node;
pub mod node_maintenance;
pub mod pod;

use std::borrow::Borrow;

use haulout_api_types::bounded;
use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, PatchOperation};
use kube::core::Status;
use serde_json::Value;

/// Why a request is denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The object cannot be parsed.
    Unreadable,
    /// The user has no permission on the pod or node.
    Unauthorized,
    /// The pod does not exist or has another UID.
    Pod,
    /// The evacuators differ from the pod's.
    Evacuators,
    /// A status field that cannot be set yet.
    Status,
    /// The evacuation cannot be cancelled.
    CancellationForbidden,
    /// An evacuator annotation breaks a rule.
    Annotation,
    /// A selector is invalid.
    Selector,
    /// A drain rule has an order, but its behavior is not Drain.
    Order,
    /// A lookup or access review failed.
    Unanswered,
    /// The API server did not answer in time.
    TooSlow,
}

impl Cause {
    /// The metric label, and the code and reason of the Kubernetes `Status`.
    fn parts(self) -> (&'static str, u16, &'static str) {
        match self {
            Self::Unreadable => ("unreadable", 400, "BadRequest"),
            Self::Unauthorized => ("unauthorized", 403, "Forbidden"),
            Self::Pod => ("pod", 422, "Invalid"),
            Self::Evacuators => ("evacuators", 422, "Invalid"),
            Self::Status => ("status", 403, "Forbidden"),
            Self::CancellationForbidden => ("cancellation-forbidden", 403, "Forbidden"),
            Self::Annotation => ("annotation", 422, "Invalid"),
            Self::Selector => ("selector", 422, "Invalid"),
            Self::Order => ("order", 422, "Invalid"),
            Self::Unanswered => ("unanswered", 500, "InternalError"),
            Self::TooSlow => ("too-slow", 504, "Timeout"),
        }
    }

    /// The metric label.
    pub fn label(self) -> &'static str {
        self.parts().0
    }
}

/// One violation of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The violated rule.
    pub cause: Cause,
    /// The field or object, the rule, and how to fix it.
    pub message: String,
}

/// The result of all rules for one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Verdict {
    /// Warnings for the user.
    pub warnings: Vec<String>,
    /// Violations. If there are any, the request is denied.
    pub violations: Vec<Violation>,
    /// Defaults that are set.
    pub patch: Vec<PatchOperation>,
}

impl Verdict {
    /// A denial with one violation.
    pub fn denied(cause: Cause, message: impl Into<String>) -> Self {
        let mut verdict = Self::default();
        verdict.deny(cause, message);
        verdict
    }

    /// Adds a violation.
    pub fn deny(&mut self, cause: Cause, message: impl Into<String>) {
        self.violations.push(Violation { cause, message: bounded::message(message.into()) });
    }

    /// Adds a warning.
    pub fn warn(&mut self, message: impl Into<String>) {
        self.warnings.push(bounded::message(message.into()));
    }

    /// Sets a field, whether or not it exists. Its parent must exist.
    pub fn set<'a>(&mut self, path: impl IntoIterator<Item = &'a str>, value: Value) {
        let path = PointerBuf::from_tokens(path);
        self.patch.push(PatchOperation::Add(AddOperation { path, value }));
    }

    /// The status that the user receives. The first violation determines the code.
    pub fn status(&self) -> Status {
        let Some(first) = self.violations.first() else { return Status::success().with_code(200) };
        let (_, code, reason) = first.cause.parts();
        let messages: Vec<_> = self.violations.iter().map(|violation| violation.message.as_str()).collect();
        Status::failure(&bounded::message(messages.join("; ")), reason).with_code(code)
    }
}

/// The first `max` names, and the number of the rest.
fn listed<T: Borrow<str>>(names: &[T], max: usize) -> String {
    match names.split_at_checked(max) {
        Some((first, rest)) if !rest.is_empty() => format!("{} and {} more", first.join(", "), rest.len()),
        _ => names.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn all_violations_are_listed_and_the_first_sets_the_code() {
        let mut verdict = Verdict::denied(Cause::Annotation, "annotation a: x");
        verdict.deny(Cause::Annotation, "annotation b: y");
        verdict.warn("w");
        let expected = Status::failure("annotation a: x; annotation b: y", "Invalid").with_code(422);
        assert_eq!(verdict.status(), expected);
        assert_eq!(verdict.violations[0].cause.label(), "annotation");
        assert_eq!(verdict.warnings, ["w"]);
    }

    #[test]
    fn field_names_are_escaped_in_patches() {
        let mut verdict = Verdict::default();
        verdict.set(["metadata", "labels", "a/b~c"], json!("x"));
        let mut object = json!({"metadata": {"labels": {"a/b~c": "old", "d": "kept"}}});
        json_patch::patch(&mut object, &verdict.patch).unwrap();
        assert_eq!(object, json!({"metadata": {"labels": {"a/b~c": "x", "d": "kept"}}}));
    }
}

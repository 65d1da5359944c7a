//! The rules: pure functions, by kind, from the objects and what is known of the cluster to a verdict. A verdict names all
//! that is wrong with a request at once, each with its field, what the user should know, and what is filled in.

pub mod drain_rule;
pub mod evacuation;
pub mod node;
pub mod node_maintenance;
pub mod pod;

use std::borrow::Borrow;

use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, PatchOperation};
use kube::core::Status;
use serde_json::Value;

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The object is not what its kind says.
    Unreadable,
    /// The user may not do to the pod or node what the object would have us do.
    Unauthorized,
    /// The pod is not there, or is another one.
    Pod,
    /// The evacuators are not those of the pod.
    Evacuators,
    /// A part of the status that belongs to somebody else, or to a later time.
    Status,
    /// A time in the future.
    FutureTime,
    /// The evacuation cannot be called off.
    CancellationForbidden,
    /// An evacuator annotation breaks a rule.
    Annotation,
    /// A selector cannot be read.
    Selector,
    /// A drain rule has an order and does not drain.
    Order,
    /// The API server could not tell us what we need to know.
    Unanswered,
    /// The API server could not tell us in time.
    TooSlow,
}

impl Cause {
    /// Its label in metrics, and the code and reason of the Kubernetes `Status`.
    fn parts(self) -> (&'static str, u16, &'static str) {
        match self {
            Self::Unreadable => ("unreadable", 400, "BadRequest"),
            Self::Unauthorized => ("unauthorized", 403, "Forbidden"),
            Self::Pod => ("pod", 422, "Invalid"),
            Self::Evacuators => ("evacuators", 422, "Invalid"),
            Self::Status => ("status", 403, "Forbidden"),
            Self::FutureTime => ("future-time", 422, "Invalid"),
            Self::CancellationForbidden => ("cancellation-forbidden", 403, "Forbidden"),
            Self::Annotation => ("annotation", 422, "Invalid"),
            Self::Selector => ("selector", 422, "Invalid"),
            Self::Order => ("order", 422, "Invalid"),
            Self::Unanswered => ("unanswered", 500, "InternalError"),
            Self::TooSlow => ("too-slow", 504, "Timeout"),
        }
    }

    /// As a label of metrics.
    pub fn label(self) -> &'static str {
        self.parts().0
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which rule.
    pub cause: Cause,
    /// Where and what: field or object, rule, way out.
    pub message: String,
}

/// What the rules say about one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Verdict {
    /// What the user should know.
    pub warnings: Vec<String>,
    /// What is wrong.
    pub violations: Vec<Violation>,
    /// What is filled in.
    pub patch: Vec<PatchOperation>,
}

impl Verdict {
    /// A refusal for one reason.
    pub fn refused(cause: Cause, message: impl Into<String>) -> Self {
        let mut verdict = Self::default();
        verdict.refuse(cause, message);
        verdict
    }

    /// Adds something that is wrong.
    pub fn refuse(&mut self, cause: Cause, message: impl Into<String>) {
        self.violations.push(Violation { cause, message: message.into() });
    }

    /// Adds something that the user should know.
    pub fn warn(&mut self, message: impl Into<String>) {
        self.warnings.push(message.into());
    }

    /// Sets a field, whether or not it is there; what it is in must be.
    pub fn set<'a>(&mut self, path: impl IntoIterator<Item = &'a str>, value: Value) {
        let path = PointerBuf::from_tokens(path);
        self.patch.push(PatchOperation::Add(AddOperation { path, value }));
    }

    /// What the user is answered. The first thing that is wrong gives the code.
    pub fn status(&self) -> Status {
        let Some(first) = self.violations.first() else { return Status::success().with_code(200) };
        let (_, code, reason) = first.cause.parts();
        let messages: Vec<_> = self.violations.iter().map(|violation| violation.message.as_str()).collect();
        Status::failure(&messages.join("; "), reason).with_code(code)
    }
}

/// The first of these names, and how many more there are.
fn listed<T: Borrow<str>>(names: &[T], most: usize) -> String {
    match names.split_at_checked(most) {
        Some((first, rest)) if !rest.is_empty() => format!("{} and {} more", first.join(", "), rest.len()),
        _ => names.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn all_that_is_wrong_is_told_and_the_first_gives_the_code() {
        let mut verdict = Verdict::refused(Cause::Annotation, "annotation a: x");
        verdict.refuse(Cause::Annotation, "annotation b: y");
        verdict.warn("w");
        let expected = Status::failure("annotation a: x; annotation b: y", "Invalid").with_code(422);
        assert_eq!(verdict.status(), expected);
        assert_eq!(verdict.violations[0].cause.label(), "annotation");
        assert_eq!(verdict.warnings, ["w"]);
    }

    #[test]
    fn a_field_is_set_whatever_characters_its_name_has() {
        let mut verdict = Verdict::default();
        verdict.set(["metadata", "labels", "a/b~c"], json!("x"));
        let mut object = json!({"metadata": {"labels": {"a/b~c": "old", "d": "kept"}}});
        json_patch::patch(&mut object, &verdict.patch).unwrap();
        assert_eq!(object, json!({"metadata": {"labels": {"a/b~c": "x", "d": "kept"}}}));
    }
}

//! The rules: pure functions, by kind, from the objects and what is known of the cluster to a verdict. A verdict names all
//! that is wrong with a request at once, each with its field, what the user should know, and what is filled in.

pub mod drain_rule;
pub mod evacuation;
pub mod node;
pub mod node_maintenance;
pub mod pod;

use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, Patch, PatchOperation};
use serde_json::Value;

use crate::review::Answer;

/// Why a request is refused, as a label of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    fn label(self) -> &'static str {
        match self {
            Self::Unreadable => "unreadable",
            Self::Unauthorized => "unauthorized",
            Self::Pod => "pod",
            Self::Evacuators => "evacuators",
            Self::Status => "status",
            Self::FutureTime => "future-time",
            Self::CancellationForbidden => "cancellation-forbidden",
            Self::Annotation => "annotation",
            Self::Selector => "selector",
            Self::Order => "order",
            Self::Unanswered => "unanswered",
            Self::TooSlow => "too-slow",
        }
    }

    /// The HTTP code and the word for it in a Kubernetes `Status`.
    fn code(self) -> (u16, &'static str) {
        match self {
            Self::Unreadable => (400, "BadRequest"),
            Self::Unauthorized | Self::Status | Self::CancellationForbidden => (403, "Forbidden"),
            Self::Pod
            | Self::Evacuators
            | Self::FutureTime
            | Self::Annotation
            | Self::Selector
            | Self::Order => (422, "Invalid"),
            Self::Unanswered => (500, "InternalError"),
            Self::TooSlow => (504, "Timeout"),
        }
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
}

impl From<Verdict> for Answer {
    fn from(verdict: Verdict) -> Self {
        let Verdict { warnings, violations, patch } = verdict;
        let Some(first) = violations.first() else {
            return Self::Allowed { warnings, patch: (!patch.is_empty()).then_some(Patch(patch)) };
        };
        let (code, reason) = first.cause.code();
        let cause = first.cause.label();
        let messages: Vec<_> = violations.iter().map(|violation| violation.message.as_str()).collect();
        Self::Denied { code, reason, cause, message: messages.join("; "), warnings }
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
        let expected = Answer::Denied {
            code: 422,
            reason: "Invalid",
            cause: "annotation",
            message: "annotation a: x; annotation b: y".into(),
            warnings: vec!["w".into()],
        };
        assert_eq!(Answer::from(verdict), expected);
    }

    #[test]
    fn a_field_is_set_whatever_characters_its_name_has() {
        let mut verdict = Verdict::default();
        verdict.set(["metadata", "labels", "a/b~c"], json!("x"));
        let Answer::Allowed { patch: Some(patch), .. } = verdict.into() else { panic!("not allowed") };
        let mut object = json!({"metadata": {"labels": {"a/b~c": "old", "d": "kept"}}});
        json_patch::patch(&mut object, &patch).unwrap();
        assert_eq!(object, json!({"metadata": {"labels": {"a/b~c": "x", "d": "kept"}}}));
    }
}

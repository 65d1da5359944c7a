//! What came of a request to the API server: one meaning of its answers for all controllers, and errors that say what was
//! being done to which object.

use std::fmt;

use thiserror::Error;

use crate::causes::chain;

/// What came of a write.
#[derive(Debug, PartialEq, Eq)]
pub enum Written<K> {
    /// It took effect; what the API server answered.
    Done(K),
    /// Somebody else wrote before us: what we knew is old, and the watch will tell what is new.
    Outdated,
    /// There is no such object any more.
    Gone,
}

/// What is being done to which object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doing<'a> {
    verb: &'static str,
    kind: &'static str,
    namespace: &'a str,
    name: &'a str,
}

impl<'a> Doing<'a> {
    /// Such as to `create` the `Evacuation` of this name.
    pub fn new(verb: &'static str, kind: &'static str, namespace: &'a str, name: &'a str) -> Self {
        Self { verb, kind, namespace, name }
    }

    /// The answer, or an error that says what was being done.
    pub fn result<K>(&self, answer: kube::Result<K>) -> Result<K, RequestError> {
        answer.map_err(|source| RequestError { doing: self.to_string(), source: Box::new(source) })
    }

    /// What came of a write. Conflicts and objects that are gone are no errors: the watch tells what to do next.
    pub fn written<K>(&self, answer: kube::Result<K>) -> Result<Written<K>, RequestError> {
        match answer {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(Written::Gone),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(Written::Outdated),
            answer => self.result(answer).map(Written::Done),
        }
    }
}

impl fmt::Display for Doing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { verb, kind, namespace, name } = self;
        let slash = if namespace.is_empty() { "" } else { "/" };
        write!(f, "{verb} {kind} {namespace}{slash}{name}")
    }
}

/// A request that failed.
#[derive(Debug, Error)]
#[error("failed to {doing}: {}", chain(.source.as_ref()))]
pub struct RequestError {
    doing: String,
    /// What the API server or the client said.
    pub source: Box<kube::Error>,
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use serde_json::json;

    use super::*;

    fn answer(code: u16) -> kube::Result<()> {
        let status = json!({"code": code, "message": "no", "reason": "x"});
        Err(kube::Error::Api(Box::new(serde_json::from_value::<Status>(status).unwrap())))
    }

    #[test]
    fn answers_to_writes_have_one_meaning() {
        let doing = Doing::new("patch", "Evacuation", "shop", "x");
        assert_eq!(doing.written(Ok(7)).unwrap(), Written::Done(7));
        assert_eq!(doing.written(answer(404)).unwrap(), Written::Gone);
        assert_eq!(doing.written(answer(409)).unwrap(), Written::Outdated);
        let error = doing.written(answer(403)).unwrap_err().to_string();
        assert!(error.starts_with("failed to patch Evacuation shop/x: ") && error.contains("no"), "{error}");
        let error = Doing::new("cordon", "Node", "", "n1").result(answer(404)).unwrap_err().to_string();
        assert!(error.starts_with("failed to cordon Node n1: "), "{error}");
    }
}

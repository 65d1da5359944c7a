//! Writes to the API server, shared by all services. Each write has the UID of the object as a precondition. Writes
//! that depend on the object's state also have its resourceVersion, so that a late write of a frozen process has no
//! effect. Errors name the operation and the object.

use std::borrow::Cow;
use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::core::Request;
use kube::{Client, Resource};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value, json};
use thiserror::Error;

use crate::error_chain::error_chain;
use crate::watch::Identity;

/// The result of a write.
#[derive(Debug, PartialEq, Eq)]
pub enum Written<K> {
    /// The write succeeded, with this answer.
    Done(K),
    /// The object has changed meanwhile. The watch will report its new state.
    Conflict,
    /// The object no longer exists.
    Gone,
}

impl<K> Written<K> {
    /// Maps the answer of a successful write.
    pub fn map<T>(self, map: impl FnOnce(K) -> T) -> Written<T> {
        match self {
            Self::Done(answer) => Written::Done(map(answer)),
            Self::Conflict => Written::Conflict,
            Self::Gone => Written::Gone,
        }
    }
}

/// An object to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object<'a> {
    /// Its namespace; empty if it has none.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
    /// Its UID.
    pub uid: String,
    /// The expected resourceVersion; `None` if the write does not depend on the object's state.
    pub version: Option<&'a str>,
}

impl<'a> Object<'a> {
    /// The object with this metadata, including its resourceVersion.
    pub fn of(metadata: &'a ObjectMeta) -> Self {
        let Identity { namespace, name, uid, version } = Identity::of(metadata);
        Self { namespace, name, uid: uid.into(), version }
    }
}

/// Writes objects for a service.
#[derive(Clone)]
pub struct Writer {
    client: Client,
    manager: &'static str,
}

impl Writer {
    /// A writer with this client, which must not retry by itself. `manager` is the field manager, which
    /// `kubectl get --show-managed-fields` shows.
    pub fn new(client: Client, manager: &'static str) -> Self {
        Self { client, manager }
    }

    /// Patches fields outside the status.
    pub async fn patch<K>(&self, object: &Object<'_>, patch: Value) -> Result<Written<K>, RequestError>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned,
    {
        let (params, patch) = (self.params(), Patch::Merge(with_preconditions(object, patch)));
        let request = request_builder::<K>(object).patch(object.name, &params, &patch);
        self.send::<K, K>("patch", object, request).await
    }

    /// Patches fields of the status.
    pub async fn patch_status<K: Resource<DynamicType = ()> + DeserializeOwned>(
        &self,
        object: &Object<'_>,
        status: Value,
    ) -> Result<Written<K>, RequestError> {
        self.write_status(object, Patch::Merge(with_preconditions(object, json!({"status": status})))).await
    }

    /// Patches the status with a strategic merge patch, which merges lists by key. Only built-in kinds support it.
    pub async fn patch_status_strategic<K: Resource<DynamicType = ()> + DeserializeOwned>(
        &self,
        object: &Object<'_>,
        status: Value,
    ) -> Result<Written<K>, RequestError> {
        self.write_status(object, Patch::Strategic(with_preconditions(object, json!({"status": status}))))
            .await
    }

    async fn write_status<K: Resource<DynamicType = ()> + DeserializeOwned>(
        &self,
        object: &Object<'_>,
        patch: Patch<Value>,
    ) -> Result<Written<K>, RequestError> {
        let request =
            request_builder::<K>(object).patch_subresource("status", object.name, &self.params(), &patch);
        self.send::<K, K>("patch the status of", object, request).await
    }

    /// Deletes the object if its UID and version still match.
    pub async fn delete<K: Resource<DynamicType = ()>>(
        &self,
        object: &Object<'_>,
    ) -> Result<Written<()>, RequestError> {
        let preconditions =
            Preconditions { uid: Some(object.uid.clone()), resource_version: object.version.map(Into::into) };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let request = request_builder::<K>(object).delete(object.name, &params);
        let written = self.send::<K, IgnoredAny>("delete", object, request).await?;
        Ok(written.map(|IgnoredAny| ()))
    }

    fn params(&self) -> PatchParams {
        PatchParams { field_manager: Some(self.manager.into()), ..PatchParams::default() }
    }

    async fn send<K: Resource<DynamicType = ()>, T: DeserializeOwned>(
        &self,
        verb: &'static str,
        object: &Object<'_>,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<Written<T>, RequestError> {
        let answer = match request {
            Ok(request) => self.client.request(request).await,
            Err(error) => Err(kube::Error::BuildRequest(error)),
        };
        Operation::new(verb, K::kind(&()), object.namespace, object.name).written(answer)
    }
}

fn request_builder<K: Resource<DynamicType = ()>>(object: &Object<'_>) -> Request {
    Request::new(K::url_path(&(), Some(object.namespace).filter(|namespace| !namespace.is_empty())))
}

/// Adds the UID and the version of the object to a patch.
fn with_preconditions(object: &Object<'_>, mut patch: Value) -> Value {
    if let Some(root) = patch.as_object_mut() {
        let metadata = root.entry("metadata").or_insert_with(|| json!({}));
        if let Some(metadata) = metadata.as_object_mut() {
            metadata.insert("uid".into(), object.uid.as_str().into());
            metadata.extend(object.version.map(|version| ("resourceVersion".into(), version.into())));
        }
    }
    patch
}

/// Whether a resourceVersion of an object is later than another. Versions that are not numbers cannot be compared; a
/// different one then counts as later.
pub fn is_later(version: &str, than: &str) -> bool {
    match (version.parse::<u64>(), than.parse::<u64>()) {
        (Ok(version), Ok(than)) => version > than,
        _ => version != than,
    }
}

/// An operation on an object, for error messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation<'a> {
    verb: &'static str,
    kind: Cow<'static, str>,
    namespace: &'a str,
    name: &'a str,
}

impl<'a> Operation<'a> {
    /// For example, `create` the `Evacuation` with this name.
    pub fn new(
        verb: &'static str,
        kind: impl Into<Cow<'static, str>>,
        namespace: &'a str,
        name: &'a str,
    ) -> Self {
        Self { verb, kind: kind.into(), namespace, name }
    }

    /// Adds the operation to an error.
    pub fn result<K>(&self, answer: kube::Result<K>) -> Result<K, RequestError> {
        answer.map_err(|source| RequestError { operation: self.to_string(), source: Box::new(source) })
    }

    /// Classifies the answer to a write. Conflicts and missing objects are not errors, because the watch reports the
    /// new state.
    pub fn written<K>(&self, answer: kube::Result<K>) -> Result<Written<K>, RequestError> {
        match answer {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(Written::Gone),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(Written::Conflict),
            answer => self.result(answer).map(Written::Done),
        }
    }
}

impl fmt::Display for Operation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { verb, kind, namespace, name } = self;
        let slash = if namespace.is_empty() { "" } else { "/" };
        let space = if name.is_empty() { "" } else { " " };
        write!(f, "{verb} {kind}{space}{namespace}{slash}{name}")
    }
}

/// A failed request.
#[derive(Debug, Error)]
#[error("failed to {operation}: {}", error_chain(.source.as_ref()))]
pub struct RequestError {
    operation: String,
    /// The error of the API server or the client.
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
    fn versions_are_compared_by_number() {
        for (version, than, expected) in [
            ("8", "7", true),
            ("7", "7", false),
            ("10", "9", true),
            ("7", "8", false),
            ("b", "a", true),
            ("a", "a", false),
        ] {
            assert_eq!(is_later(version, than), expected, "{version} {than}");
        }
    }

    #[test]
    fn answers_to_writes_are_classified() {
        let operation = Operation::new("patch", "Evacuation", "shop", "x");
        assert_eq!(operation.written(Ok(7)).unwrap(), Written::Done(7));
        assert_eq!(operation.written(answer(404)).unwrap(), Written::Gone);
        assert_eq!(operation.written(answer(409)).unwrap(), Written::Conflict);
        let error = operation.written(answer(403)).unwrap_err().to_string();
        assert!(error.starts_with("failed to patch Evacuation shop/x: ") && error.contains("no"), "{error}");
        let error = Operation::new("cordon", "Node", "", "n1").result(answer(404)).unwrap_err().to_string();
        assert!(error.starts_with("failed to cordon Node n1: "), "{error}");
        let error = Operation::new("list", "nodes", "", "").result(answer(404)).unwrap_err().to_string();
        assert!(error.starts_with("failed to list nodes: "), "{error}");
    }
}

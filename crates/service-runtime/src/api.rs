//! Writes to the API server, one way for all services. Each carries the UID of the object that is meant and, where it
//! decides something, the resourceVersion that the decision was made on, so that what a frozen process sends too late changes
//! nothing. Answers have one meaning, and errors say what was being done to which object.

use std::borrow::Cow;
use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::core::Request;
use kube::{Client, Resource};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value, json};
use thiserror::Error;

use crate::causes::chain;
use crate::watch::Identity;

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

impl<K> Written<K> {
    /// The same with something else made of the answer.
    pub fn map<T>(self, map: impl FnOnce(K) -> T) -> Written<T> {
        match self {
            Self::Done(answer) => Written::Done(map(answer)),
            Self::Outdated => Written::Outdated,
            Self::Gone => Written::Gone,
        }
    }
}

/// An object to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object<'a> {
    /// Its namespace; empty if it has none.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
    /// Its UID.
    pub uid: String,
    /// The resourceVersion that the decision was made on; `None` if the write is right in any state.
    pub version: Option<&'a str>,
}

impl<'a> Object<'a> {
    /// The object with this metadata, in this state.
    pub fn of(metadata: &'a ObjectMeta) -> Self {
        let Identity { namespace, name, uid, version } = Identity::of(metadata);
        Self { namespace, name, uid: uid.into(), version }
    }
}

/// Writes objects in the name of a service. Clones are the same.
#[derive(Clone)]
pub struct Writer {
    client: Client,
    manager: &'static str,
}

impl Writer {
    /// Writes through this client, which should not retry by itself; `manager` is what `kubectl get --show-managed-fields`
    /// shows.
    pub fn new(client: Client, manager: &'static str) -> Self {
        Self { client, manager }
    }

    /// Changes fields outside the status.
    pub async fn patch<K>(&self, object: &Object<'_>, patch: Value) -> Result<Written<K>, RequestError>
    where
        K: Resource<DynamicType = ()> + DeserializeOwned,
    {
        let (params, patch) = (self.params(), Patch::Merge(naming(object, patch)));
        let request = requests::<K>(object).patch(object.name, &params, &patch);
        self.send::<K, K>("patch", object, request).await
    }

    /// Changes fields of the status.
    pub async fn patch_status<K: Resource<DynamicType = ()> + DeserializeOwned>(
        &self,
        object: &Object<'_>,
        status: Value,
    ) -> Result<Written<K>, RequestError> {
        self.write_status(object, Patch::Merge(naming(object, json!({"status": status})))).await
    }

    /// The same with a strategic merge patch, which merges lists by their keys; only built-in kinds take it.
    pub async fn patch_status_strategic<K: Resource<DynamicType = ()> + DeserializeOwned>(
        &self,
        object: &Object<'_>,
        status: Value,
    ) -> Result<Written<K>, RequestError> {
        self.write_status(object, Patch::Strategic(naming(object, json!({"status": status})))).await
    }

    async fn write_status<K: Resource<DynamicType = ()> + DeserializeOwned>(
        &self,
        object: &Object<'_>,
        patch: Patch<Value>,
    ) -> Result<Written<K>, RequestError> {
        let request = requests::<K>(object).patch_subresource("status", object.name, &self.params(), &patch);
        self.send::<K, K>("patch the status of", object, request).await
    }

    /// Deletes the object if it is still in this state.
    pub async fn delete<K: Resource<DynamicType = ()>>(
        &self,
        object: &Object<'_>,
    ) -> Result<Written<()>, RequestError> {
        let preconditions =
            Preconditions { uid: Some(object.uid.clone()), resource_version: object.version.map(Into::into) };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let request = requests::<K>(object).delete(object.name, &params);
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
        Doing::new(verb, K::kind(&()), object.namespace, object.name).written(answer)
    }
}

fn requests<K: Resource<DynamicType = ()>>(object: &Object<'_>) -> Request {
    Request::new(K::url_path(&(), Some(object.namespace).filter(|namespace| !namespace.is_empty())))
}

/// Adds to a patch which state of which object it means.
fn naming(object: &Object<'_>, mut patch: Value) -> Value {
    if let Some(root) = patch.as_object_mut() {
        let metadata = root.entry("metadata").or_insert_with(|| json!({}));
        if let Some(metadata) = metadata.as_object_mut() {
            metadata.insert("uid".into(), object.uid.as_str().into());
            metadata.extend(object.version.map(|version| ("resourceVersion".into(), version.into())));
        }
    }
    patch
}

/// Whether a resourceVersion is later than another of the same object. Versions that are no numbers cannot be compared: then
/// what came last is taken for the later.
pub fn is_later(version: &str, than: &str) -> bool {
    match (version.parse::<u64>(), than.parse::<u64>()) {
        (Ok(version), Ok(than)) => version > than,
        _ => version != than,
    }
}

/// What is being done to which object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doing<'a> {
    verb: &'static str,
    kind: Cow<'static, str>,
    namespace: &'a str,
    name: &'a str,
}

impl<'a> Doing<'a> {
    /// Such as to `create` the `Evacuation` of this name.
    pub fn new(
        verb: &'static str,
        kind: impl Into<Cow<'static, str>>,
        namespace: &'a str,
        name: &'a str,
    ) -> Self {
        Self { verb, kind: kind.into(), namespace, name }
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
        let space = if name.is_empty() { "" } else { " " };
        write!(f, "{verb} {kind}{space}{namespace}{slash}{name}")
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
    fn later_versions_are_known_by_number_or_by_order() {
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
    fn answers_to_writes_have_one_meaning() {
        let doing = Doing::new("patch", "Evacuation", "shop", "x");
        assert_eq!(doing.written(Ok(7)).unwrap(), Written::Done(7));
        assert_eq!(doing.written(answer(404)).unwrap(), Written::Gone);
        assert_eq!(doing.written(answer(409)).unwrap(), Written::Outdated);
        let error = doing.written(answer(403)).unwrap_err().to_string();
        assert!(error.starts_with("failed to patch Evacuation shop/x: ") && error.contains("no"), "{error}");
        let error = Doing::new("cordon", "Node", "", "n1").result(answer(404)).unwrap_err().to_string();
        assert!(error.starts_with("failed to cordon Node n1: "), "{error}");
        let error = Doing::new("list", "nodes", "", "").result(answer(404)).unwrap_err().to_string();
        assert!(error.starts_with("failed to list nodes: "), "{error}");
    }
}

//! The parts of the API server's answers that every watch reads, and how a typed object is read: strictly, but so that one
//! that does not fit its type is still known by name.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::de::{Deserialize, DeserializeOwned, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::lenient_json::{List, Number, Text, objects};

/// What tells an object from others of its kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity<'a> {
    /// Its namespace; empty if it has none.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
    /// Its UID.
    pub uid: &'a str,
    /// Its resourceVersion.
    pub version: Option<&'a str>,
}

impl<'a> Identity<'a> {
    /// That of an object with this metadata.
    pub fn of(metadata: &'a ObjectMeta) -> Self {
        Self {
            namespace: metadata.namespace.as_deref().unwrap_or_default(),
            name: metadata.name.as_deref().unwrap_or_default(),
            uid: metadata.uid.as_deref().unwrap_or_default(),
            version: metadata.resource_version.as_deref(),
        }
    }
}

/// What can be told from others of its kind.
pub(crate) trait Identified {
    fn identity(&self) -> Identity<'_>;
}

/// An object that exists and does not fit its type, as may be after a downgrade.
#[derive(Clone, Debug)]
pub struct Unreadable {
    /// Its metadata, as far as they can be read.
    pub metadata: ObjectMeta,
    /// What is wrong with it.
    pub error: String,
}

/// A typed object, or what can be said of one that cannot be read.
pub(crate) struct Parsed<K>(pub(crate) Result<K, Unreadable>);

impl<'de, K: DeserializeOwned> Deserialize<'de> for Parsed<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <&RawValue>::deserialize(deserializer)?.get();
        Ok(Self(serde_json::from_str(text).map_err(|error| Unreadable::new(text, &error))))
    }
}

impl Unreadable {
    fn new(text: &str, error: &serde_json::Error) -> Self {
        #[derive(Default, serde::Deserialize)]
        struct Object {
            metadata: Value,
        }
        let Object { metadata } = serde_json::from_str(text).unwrap_or_default();
        let metadata = ObjectMeta::deserialize(&metadata).unwrap_or_else(|_| names(&metadata));
        Self { metadata, error: error.to_string() }
    }
}

/// What can be read of metadata that do not fit their type.
fn names(metadata: &Value) -> ObjectMeta {
    let text = |field| metadata[field].as_str().filter(|text| !text.is_empty()).map(ToOwned::to_owned);
    ObjectMeta {
        name: text("name"),
        namespace: text("namespace"),
        uid: text("uid"),
        resource_version: text("resourceVersion"),
        ..ObjectMeta::default()
    }
}

impl<K: Resource> Identified for Parsed<K> {
    fn identity(&self) -> Identity<'_> {
        Identity::of(match &self.0 {
            Ok(object) => object.meta(),
            Err(problem) => &problem.metadata,
        })
    }
}

/// One page of a list.
#[derive(serde::Deserialize)]
#[serde(bound(deserialize = "T: serde::Deserialize<'de>"))]
pub(crate) struct Page<'a, T> {
    #[serde(borrow, default)]
    pub(crate) metadata: PageMetadata<'a>,
    #[serde(default)]
    pub(crate) items: List<T>,
}

/// One line of a watch.
#[derive(serde::Deserialize)]
pub(super) struct Event<'a> {
    #[serde(borrow, default, rename = "type")]
    pub(super) kind: Text<'a>,
    #[serde(borrow)]
    pub(super) object: &'a RawValue,
}

objects! {
    PageMetadata {
        "resourceVersion" => resource_version: Text<'a>,
        "continue" => more: Text<'a>,
    }

    /// What an event of type ERROR tells, and the answer to a request that failed.
    Status {
        "code" => code: Number,
        "message" => message: Text<'a>,
    }
}

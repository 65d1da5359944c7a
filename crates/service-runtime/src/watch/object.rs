//! Parses lists and watch events. Typed objects are parsed strictly, but the metadata of an unreadable object is still known.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::de::{Deserialize, DeserializeOwned, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::lenient_json::{List, Number, Text, objects};

/// The identity of an object.
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
    /// The identity in this metadata.
    pub fn of(metadata: &'a ObjectMeta) -> Self {
        Self {
            namespace: metadata.namespace.as_deref().unwrap_or_default(),
            name: metadata.name.as_deref().unwrap_or_default(),
            uid: metadata.uid.as_deref().unwrap_or_default(),
            version: metadata.resource_version.as_deref(),
        }
    }
}

/// Something with an identity.
pub(crate) trait Identified {
    fn identity(&self) -> Identity<'_>;
}

/// An object that cannot be parsed, for example after a downgrade.
#[derive(Clone, Debug)]
pub struct Unreadable {
    /// The readable part of its metadata.
    pub metadata: ObjectMeta,
    /// What is wrong with it.
    pub error: String,
}

/// A typed object, or an unreadable one.
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
        let metadata = ObjectMeta::deserialize(&metadata).unwrap_or_else(|_| partial_metadata(&metadata));
        Self { metadata, error: error.to_string() }
    }
}

/// The readable part of invalid metadata.
fn partial_metadata(metadata: &Value) -> ObjectMeta {
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
        "continue" => continue_token: Text<'a>,
    }

    /// The object of an ERROR event, and the answer to a failed request.
    Status {
        "code" => code: Number,
        "message" => message: Text<'a>,
    }
}

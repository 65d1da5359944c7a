//! Orders the states of an object by its resourceVersion.

use haulout_service_runtime::api::{Object, is_later};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// A state of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// The object's UID.
    pub uid: Box<str>,
    /// Its resourceVersion.
    pub version: Box<str>,
}

impl Version {
    /// The version in an object's metadata.
    pub fn of(metadata: &ObjectMeta) -> Self {
        let text = |text: &Option<String>| text.as_deref().unwrap_or_default().into();
        Self { uid: text(&metadata.uid), version: text(&metadata.resource_version) }
    }

    /// The precondition for a write to this state of the object.
    pub fn object<'a>(&'a self, namespace: &'a str, name: &'a str) -> Object<'a> {
        Object { namespace, name, uid: self.uid.to_string(), version: Some(&self.version) }
    }

    /// Whether the other version is a later state of the same object.
    pub fn is_older_than(&self, other: &Self) -> bool {
        self.uid == other.uid && is_later(&other.version, &self.version)
    }

    /// Whether the other version is the same or an earlier state of the same object.
    pub fn supersedes(&self, other: &Self) -> bool {
        self.uid == other.uid && !self.is_older_than(other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_later_state_of_same_object_is_newer() {
        let version = |uid: &str, version: &str| Version { uid: uid.into(), version: version.into() };
        for (old, new, expected) in [
            (version("a", "9"), version("a", "10"), true),
            (version("a", "10"), version("a", "9"), false),
            (version("a", "10"), version("a", "10"), false),
            (version("a", "9"), version("b", "10"), false),
            (version("a", "x"), version("a", "y"), true),
        ] {
            assert_eq!(old.is_older_than(&new), expected, "{old:?} {new:?}");
        }
    }
}

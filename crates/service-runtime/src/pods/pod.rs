//! A pod in the cache, in a compact representation.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use haulout_api_types::names::MIRROR_POD_ANNOTATION;
use haulout_api_types::node_maintenance::PodType;
use haulout_api_types::selector::Labels;
use haulout_api_types::tolerations::Toleration;
use haulout_api_types::uid::Uid;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};

/// A pod, reduced to the fields that controllers read. Invalid fields are absent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// Its UID. Another pod with the same name has a different UID.
    pub uid: Uid,
    /// Its labels.
    pub labels: LabelSet,
    /// The node to which it is bound.
    pub node: Option<Arc<str>>,
    /// The owner that manages it.
    pub controller: Option<Arc<Owner>>,
    /// Its tolerations, in their order.
    pub tolerations: Arc<[Toleration]>,
    /// The names of the `PersistentVolumeClaim`s that it mounts, those of its ephemeral volumes included.
    pub claims: Box<[Box<str>]>,
    /// Its evacuator annotations, valid or not.
    pub evacuator_annotations: Option<Arc<BTreeMap<String, String>>>,
    /// Its type, as far as a drain is concerned.
    pub pod_type: PodType,
    /// Its phase.
    pub phase: Phase,
    /// Whether its condition `Ready` is true.
    pub ready: bool,
    /// Whether it is terminating, even if its `deletionTimestamp` is unreadable.
    pub terminating: bool,
    /// Whether it has finalizers, which keep the object after the pod has terminated.
    pub has_finalizers: bool,
    /// Its priority; 0 if it has none.
    pub priority: i32,
    pub(super) version: u64,
    pub(super) created: Packed,
    pub(super) deletion: Packed,
    pub(super) scheduled: Packed,
    pub(super) grace: Packed,
    pub(super) deletion_grace: Packed,
}

impl Pod {
    /// The `resourceVersion` of this state. `None` if it is not a number.
    pub fn resource_version(&self) -> Option<String> {
        (self.version != 0).then(|| self.version.to_string())
    }

    /// Whether it has succeeded or failed. A finished pod counts as gone.
    pub fn is_finished(&self) -> bool {
        matches!(self.phase, Phase::Succeeded | Phase::Failed)
    }

    /// When it was created.
    pub fn created_at(&self) -> Option<Timestamp> {
        self.created.timestamp()
    }

    /// When its condition `PodScheduled` became true. A pod that was bound without the scheduler may have no such condition.
    pub fn scheduled_at(&self) -> Option<Timestamp> {
        self.scheduled.timestamp()
    }

    /// The `deletionTimestamp`: the end of the grace period of a terminating pod.
    pub fn deletion_timestamp(&self) -> Option<Timestamp> {
        self.deletion.timestamp()
    }

    /// The grace period of a terminating pod, in seconds.
    pub fn deletion_grace_period_seconds(&self) -> Option<i64> {
        self.deletion_grace.get()
    }

    /// The grace period in its spec, in seconds.
    pub fn termination_grace_period_seconds(&self) -> Option<i64> {
        self.grace.get()
    }

    /// Its metadata as an API type, with the fields that the cache keeps.
    pub fn metadata(&self) -> ObjectMeta {
        let mut annotations = self.evacuator_annotations.as_deref().cloned().unwrap_or_default();
        if self.pod_type == PodType::Static {
            annotations.insert(MIRROR_POD_ANNOTATION.to_owned(), String::new());
        }
        let labels: BTreeMap<_, _> =
            self.labels.iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        ObjectMeta {
            namespace: Some(self.namespace.as_ref().to_owned()),
            name: Some(self.name.as_ref().to_owned()),
            uid: Some(self.uid.to_string()),
            resource_version: self.resource_version(),
            labels: (!labels.is_empty()).then_some(labels),
            annotations: (!annotations.is_empty()).then_some(annotations),
            owner_references: self.controller.as_deref().map(|owner| vec![owner.reference()]),
            creation_timestamp: self.created_at().map(Time),
            deletion_timestamp: self.deletion_timestamp().map(Time),
            deletion_grace_period_seconds: self.deletion_grace_period_seconds(),
            ..ObjectMeta::default()
        }
    }
}

/// A set of labels as one string: sorted lines of `key=value`. This needs few allocations, and equal sets are equal strings.
/// Neither keys nor values contain `=` or line breaks.
#[derive(Clone, PartialEq, Eq)]
pub struct LabelSet(pub(super) Arc<str>);

impl LabelSet {
    /// The labels, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.lines().filter_map(|line| line.split_once('='))
    }
}

/// For labels of other objects, such as nodes.
impl<'a> FromIterator<(&'a str, &'a str)> for LabelSet {
    fn from_iter<I: IntoIterator<Item = (&'a str, &'a str)>>(labels: I) -> Self {
        let sorted: BTreeMap<_, _> = labels.into_iter().collect();
        let mut text = String::new();
        for (key, value) in sorted {
            text.extend([key, "=", value, "\n"]);
        }
        Self(text.into())
    }
}

impl Labels for LabelSet {
    fn label(&self, key: &str) -> Option<&str> {
        self.0.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
    }
}

impl fmt::Debug for LabelSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

/// The owner that manages a pod.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    /// Its API group and version.
    pub api_version: Box<str>,
    /// Its kind.
    pub kind: Box<str>,
    /// Its name.
    pub name: Box<str>,
    /// Its UID in the owner reference, which can be any text.
    pub uid: Box<str>,
}

impl Owner {
    /// The owner reference as an API type.
    pub fn reference(&self) -> OwnerReference {
        OwnerReference {
            api_version: self.api_version.to_string(),
            kind: self.kind.to_string(),
            name: self.name.to_string(),
            uid: self.uid.to_string(),
            controller: Some(true),
            block_owner_deletion: None,
        }
    }
}

/// How far a pod has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Not all of its containers have started.
    Pending,
    /// At least one of its containers runs or starts.
    Running,
    /// All of its containers have succeeded and will not be restarted.
    Succeeded,
    /// All of its containers have terminated, at least one failed, and they will not be restarted.
    Failed,
    /// Its node is unreachable, or the phase is unknown.
    Unknown,
}

/// An optional number in 8 bytes, for times and durations in seconds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Packed(i64);

impl Packed {
    const NONE: i64 = i64::MIN;

    pub(super) fn get(self) -> Option<i64> {
        (self.0 != Self::NONE).then_some(self.0)
    }

    fn timestamp(self) -> Option<Timestamp> {
        self.get().and_then(|seconds| Timestamp::from_second(seconds).ok())
    }
}

impl From<Option<i64>> for Packed {
    fn from(number: Option<i64>) -> Self {
        Self(number.unwrap_or(Self::NONE))
    }
}

impl fmt::Debug for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_found_by_the_full_key() {
        let labels = LabelSet("app=web\napp.kubernetes.io/name=\nversion=1.2\n".into());
        let cases = [
            ("app", Some("web")),
            ("app.kubernetes.io/name", Some("")),
            ("version", Some("1.2")),
            ("app.kubernetes.io", None),
            ("ap", None),
            ("web", None),
            ("", None),
        ];
        for (key, expected) in cases {
            assert_eq!(labels.label(key), expected, "{key}");
        }
        assert_eq!(labels.iter().count(), 3);
        assert_eq!(
            format!("{labels:?}"),
            r#"{"app": "web", "app.kubernetes.io/name": "", "version": "1.2"}"#
        );
    }

    #[test]
    fn label_order_does_not_matter() {
        let labels: LabelSet = [("b", "2"), ("a", "1")].into_iter().collect();
        assert_eq!(labels, LabelSet("a=1\nb=2\n".into()));
    }

    #[test]
    fn pod_is_small() {
        assert!(size_of::<Pod>() <= 208, "{}", size_of::<Pod>());
    }
}

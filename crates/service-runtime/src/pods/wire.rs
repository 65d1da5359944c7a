//! The fields of a pod in the API server's JSON, borrowed from the received bytes. They exist only while an answer is parsed;
//! the cached pod is in `pod`.

use std::borrow::Cow;

use haulout_api_types::names::{EVACUATOR_ANNOTATION_PREFIX, MIRROR_POD_ANNOTATION};
use serde::de::{IgnoredAny, MapAccess};

use crate::lenient_json::{Flag, Key, Lenient, List, Number, Presence, Text, deserialize, objects};
use crate::watch::{Identified, Identity};

objects! {
    /// A pod.
    Object {
        "metadata" => metadata: Metadata<'a>,
        "spec" => spec: Spec<'a>,
        "status" => status: Status<'a>,
    }

    Metadata {
        "name" => name: Text<'a>,
        "namespace" => namespace: Text<'a>,
        "uid" => uid: Text<'a>,
        "resourceVersion" => resource_version: Text<'a>,
        "labels" => labels: Labels<'a>,
        "annotations" => annotations: Annotations<'a>,
        "ownerReferences" => owners: List<OwnerReference<'a>>,
        "finalizers" => finalizers: List<Text<'a>>,
        "creationTimestamp" => created: Text<'a>,
        "deletionTimestamp" => deleted: Text<'a>,
        "deletionGracePeriodSeconds" => deletion_grace: Number,
    }

    OwnerReference {
        "apiVersion" => api_version: Text<'a>,
        "kind" => kind: Text<'a>,
        "name" => name: Text<'a>,
        "uid" => uid: Text<'a>,
        "controller" => controller: Flag,
    }

    Spec {
        "nodeName" => node: Text<'a>,
        "priority" => priority: Number,
        "terminationGracePeriodSeconds" => grace: Number,
        "tolerations" => tolerations: List<Toleration<'a>>,
        "volumes" => volumes: List<Volume<'a>>,
    }

    Toleration {
        "key" => key: Text<'a>,
        "operator" => operator: Text<'a>,
        "value" => value: Text<'a>,
        "effect" => effect: Text<'a>,
        "tolerationSeconds" => seconds: Number,
    }

    Volume {
        "name" => name: Text<'a>,
        "persistentVolumeClaim" => claim: Claim<'a>,
        "ephemeral" => ephemeral: Presence,
    }

    Claim {
        "claimName" => name: Text<'a>,
    }

    Status {
        "phase" => phase: Text<'a>,
        "conditions" => conditions: List<Condition<'a>>,
    }

    Condition {
        "type" => kind: Text<'a>,
        "status" => status: Text<'a>,
        "lastTransitionTime" => since: Text<'a>,
    }
}

impl Identified for Object<'_> {
    fn identity(&self) -> Identity<'_> {
        let Metadata { namespace, name, uid, resource_version, .. } = &self.metadata;
        Identity {
            namespace: namespace.get().unwrap_or_default(),
            name: name.get().unwrap_or_default(),
            uid: uid.get().unwrap_or_default(),
            version: resource_version.get(),
        }
    }
}

/// Labels. Those whose value is not a string are ignored.
#[derive(Debug, Default)]
pub(super) struct Labels<'a>(pub(super) Vec<(Cow<'a, str>, Cow<'a, str>)>);

impl<'de: 'a, 'a> Lenient<'de> for Labels<'a> {
    fn from_object<A: MapAccess<'de>>(mut object: A) -> Result<Self, A::Error> {
        let mut labels = Vec::new();
        while let Some((key, value)) = object.next_entry::<Key, Text>()? {
            labels.extend(value.0.map(|value| (key.0, value)));
        }
        Ok(Self(labels))
    }
}

/// The annotations that the cache reads. Others can be large and are skipped.
#[derive(Debug, Default)]
pub(super) struct Annotations<'a> {
    pub(super) evacuators: Vec<(Cow<'a, str>, Cow<'a, str>)>,
    pub(super) mirror: bool,
}

impl<'de: 'a, 'a> Lenient<'de> for Annotations<'a> {
    fn from_object<A: MapAccess<'de>>(mut object: A) -> Result<Self, A::Error> {
        let mut annotations = Self::default();
        while let Some(Key(key)) = object.next_key::<Key>()? {
            if key.starts_with(EVACUATOR_ANNOTATION_PREFIX) {
                let value = object.next_value::<Text>()?;
                annotations.evacuators.extend(value.0.map(|value| (key, value)));
            } else {
                object.next_value::<IgnoredAny>()?;
                annotations.mirror |= key == MIRROR_POD_ANNOTATION;
            }
        }
        Ok(annotations)
    }
}

deserialize!(Labels<'a>, Annotations<'a>);

//! What is kept of an Evacuation: the facts that decide, as small as they can be. Everything in it comes from
//! the API object, so that a new leader knows as much as the old one did.

use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use haulout_api_types::evacuation::{CancellationPolicy, Evacuator};
use haulout_api_types::names::condition;
use haulout_api_types::{Evacuation, evacuators, instigators};
use haulout_service_runtime::api::Object;
use haulout_service_runtime::pods::{NotAUid, Uid};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

/// An Evacuation, reduced to what decisions need.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Box<str>,
    /// Its UID.
    pub uid: Uid,
    /// Its resourceVersion.
    pub version: Box<str>,
    /// When it was created.
    pub created: Timestamp,
    /// When somebody deleted it, if so. It goes with its last finalizer.
    pub deleted: Option<Timestamp>,
    /// All its finalizers.
    pub finalizers: Box<[Arc<str>]>,
    /// The name of its pod.
    pub pod_name: Box<str>,
    /// The UID of its pod.
    pub pod_uid: Uid,
    /// Those who may act, first to act first.
    pub evacuators: Box<[Evacuator]>,
    /// How long the active evacuator may be silent.
    pub progress_deadline: Duration,
    /// The class that is in charge.
    pub active: Option<Arc<str>>,
    /// Whether that class has done its part.
    pub completed: bool,
    /// When that class last reported progress.
    pub progress: Option<Timestamp>,
    /// Whether it can be called off.
    pub policy: CancellationPolicy,
    /// How many evictions have failed.
    pub failed: i32,
    /// When the last of them did.
    pub last_failed: Option<Timestamp>,
    /// Its condition `Blocked`, once it has been set.
    pub blocked: Option<Blocked>,
    /// Whether its message repeats that condition's.
    pub message_repeats_blocked: bool,
    /// The conditions of others, which a write of ours must keep.
    pub other_conditions: Box<[Condition]>,
}

/// What the condition `Blocked` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocked {
    /// Whether anything keeps the pod from leaving.
    pub is_true: bool,
    /// One of [`haulout_api_types::names::reason`].
    pub reason: Arc<str>,
    /// Since when it has been true or false.
    pub since: Timestamp,
    /// The [`fingerprint`] of its message.
    pub message: u32,
}

/// Tells texts apart without keeping them.
pub fn fingerprint(text: impl Hash) -> u32 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    u32::try_from(hasher.finish() >> 32).unwrap_or_default()
}

/// An Evacuation that we cannot work on.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum NotARecord {
    /// It lacks what every object of the API server has.
    #[error("it has no metadata.{0}")]
    Incomplete(&'static str),
    /// A UID is none.
    #[error("{0}: {1}")]
    Uid(&'static str, NotAUid),
}

impl Record {
    /// Reads an Evacuation; texts that many have are shared by `share`.
    pub fn read(evacuation: Evacuation, mut share: impl FnMut(&str) -> Arc<str>) -> Result<Self, NotARecord> {
        let Evacuation { metadata, spec, status } = evacuation;
        let missing = NotARecord::Incomplete;
        let uid = metadata.uid.ok_or(missing("uid"))?;
        let status = status.unwrap_or_default();
        let mut evacuators = spec.evacuators;
        evacuators::sort(&mut evacuators);
        let is_ours = |c: &Condition| c.type_ == condition::BLOCKED;
        let (ours, others): (Vec<_>, Vec<_>) = status.conditions.into_iter().partition(is_ours);
        let blocked = ours.into_iter().next();
        let repeats = blocked.as_ref().is_some_and(|c| c.message == status.message);
        Ok(Self {
            namespace: share(metadata.namespace.as_deref().ok_or(missing("namespace"))?),
            name: metadata.name.ok_or(missing("name"))?.into(),
            uid: uid.parse().map_err(|error| NotARecord::Uid("metadata.uid", error))?,
            version: metadata.resource_version.ok_or(missing("resourceVersion"))?.into(),
            created: metadata.creation_timestamp.ok_or(missing("creationTimestamp"))?.0,
            deleted: metadata.deletion_timestamp.map(|time| time.0),
            finalizers: metadata.finalizers.iter().flatten().map(|text| share(text)).collect(),
            pod_name: spec.pod_ref.name.into(),
            pod_uid: spec.pod_ref.uid.parse().map_err(|error| NotARecord::Uid("spec.podRef.uid", error))?,
            evacuators: evacuators.into(),
            progress_deadline: Duration::from_secs(
                spec.progress_deadline_seconds.try_into().unwrap_or_default(),
            ),
            active: status.active_evacuator_class.as_deref().map(&mut share),
            completed: status.active_evacuator_completed,
            progress: status.evacuation_progress_timestamp.map(|time| time.0),
            policy: status.evacuation_cancellation_policy,
            failed: status.failed_eviction_counter,
            last_failed: status.last_failed_eviction_time.map(|time| time.0),
            blocked: blocked.map(|c| Blocked {
                is_true: c.status == "True",
                reason: share(&c.reason),
                since: c.last_transition_time.0,
                message: fingerprint(&c.message),
            }),
            message_repeats_blocked: repeats,
            other_conditions: others.into(),
        })
    }

    /// The subdomains of those who want it. An evacuator's own finalizer of that form does not count.
    pub fn instigators(&self) -> impl Iterator<Item = &str> {
        instigators::among(self.finalizers.iter().map(AsRef::as_ref), &self.evacuators)
    }

    /// The finalizers that stay when the pod has gone: those of nobody's instigator form.
    pub fn foreign_finalizers(&self) -> Vec<String> {
        let foreign = self.finalizers.iter().filter(|finalizer| instigators::subdomain(finalizer).is_none());
        foreign.map(ToString::to_string).collect()
    }

    /// Whether it is cancelled.
    pub fn is_cancelled(&self) -> bool {
        let finalizers = self.finalizers.iter().map(AsRef::as_ref);
        instigators::is_cancelled(finalizers, &self.evacuators, self.policy)
    }

    /// Why the pod is blocked, if it is.
    pub fn blocked_by(&self) -> Option<&str> {
        self.blocked.as_ref().filter(|blocked| blocked.is_true).map(|blocked| blocked.reason.as_ref())
    }

    /// Whether the condition `Blocked` says just this.
    pub fn is_blocked_saying(&self, reason: &str, message: &str) -> bool {
        self.blocked_by() == Some(reason)
            && self.blocked.as_ref().is_some_and(|blocked| blocked.message == fingerprint(message))
    }

    /// The object, in this state.
    pub fn object(&self) -> Object<'_> {
        Object {
            namespace: &self.namespace,
            name: &self.name,
            uid: self.uid.to_string(),
            version: Some(&self.version),
        }
    }
}

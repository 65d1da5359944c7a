//! The fields of an Evacuation that decisions need, in a compact form. All of them come from the API object, so that a
//! new leader makes the same decisions.

use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use haulout_api_types::evacuation::{CancellationPolicy, Evacuator};
use haulout_api_types::names::condition;
use haulout_api_types::{Evacuation, bounded, evacuators, instigators};
use haulout_service_runtime::api::Object;
use haulout_service_runtime::pods::{InvalidUid, Uid};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

/// Maximum number of conditions of other programs that our writes keep, like in the schema.
pub const MAX_OTHER_CONDITIONS: usize = 15;

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
    /// When it was deleted, if it was. It is removed with its last finalizer.
    pub deleted: Option<Timestamp>,
    /// All its finalizers.
    pub finalizers: Box<[Arc<str>]>,
    /// The name of its pod.
    pub pod_name: Box<str>,
    /// The UID of its pod.
    pub pod_uid: Uid,
    /// The evacuators, highest priority first.
    pub evacuators: Box<[Evacuator]>,
    /// How long the active evacuator may go without reporting progress.
    pub progress_deadline: Duration,
    /// The active evacuator class.
    pub active: Option<Arc<str>>,
    /// Whether the active evacuator has completed.
    pub completed: bool,
    /// When the active evacuator last reported progress.
    pub progress: Option<Timestamp>,
    /// Whether it can be cancelled.
    pub policy: CancellationPolicy,
    /// The number of failed evictions.
    pub failed: i32,
    /// When the last eviction failed.
    pub last_failed: Option<Timestamp>,
    /// Its condition `Blocked`, if it has ever been set.
    pub blocked: Option<Blocked>,
    /// Whether `status.message` equals the message of that condition.
    pub message_repeats_blocked: bool,
    /// Conditions that other programs set. Our writes must keep them, but shorten their messages: with as many and as long
    /// conditions as the schema allows, no write of the status would fit into a request.
    pub other_conditions: Box<[Condition]>,
}

/// The content of the condition `Blocked`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocked {
    /// Whether the pod is blocked.
    pub is_true: bool,
    /// One of [`haulout_api_types::names::reason`].
    pub reason: Arc<str>,
    /// The last transition time.
    pub since: Timestamp,
    /// The [`fingerprint`] of its message.
    pub message: u32,
}

/// A condition of another program, with a message of bounded length.
fn shortened(condition: Condition) -> Condition {
    Condition { message: bounded::text(&condition.message), ..condition }
}

/// A hash that detects changes of a text without storing it.
pub fn fingerprint(text: impl Hash) -> u32 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    u32::try_from(hasher.finish() >> 32).unwrap_or_default()
}

/// An Evacuation that the controller cannot process.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum InvalidEvacuation {
    /// A metadata field is missing that the API server always sets.
    #[error("metadata.{0} is missing")]
    Incomplete(&'static str),
    /// A UID is invalid.
    #[error("{0}: {1}")]
    Uid(&'static str, InvalidUid),
}

impl Record {
    /// Reads an Evacuation. `share` interns texts that many Evacuations have in common.
    pub fn read(
        evacuation: Evacuation,
        mut share: impl FnMut(&str) -> Arc<str>,
    ) -> Result<Self, InvalidEvacuation> {
        let Evacuation { metadata, spec, status } = evacuation;
        let missing = InvalidEvacuation::Incomplete;
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
            uid: uid.parse().map_err(|error| InvalidEvacuation::Uid("metadata.uid", error))?,
            version: metadata.resource_version.ok_or(missing("resourceVersion"))?.into(),
            created: metadata.creation_timestamp.ok_or(missing("creationTimestamp"))?.0,
            deleted: metadata.deletion_timestamp.map(|time| time.0),
            finalizers: metadata.finalizers.iter().flatten().map(|text| share(text)).collect(),
            pod_name: spec.pod_ref.name.into(),
            pod_uid: spec
                .pod_ref
                .uid
                .parse()
                .map_err(|error| InvalidEvacuation::Uid("spec.podRef.uid", error))?,
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
            other_conditions: others.into_iter().take(MAX_OTHER_CONDITIONS).map(shortened).collect(),
        })
    }

    /// The subdomains of its instigators. An evacuator's own finalizer of that form does not count.
    pub fn instigators(&self) -> impl Iterator<Item = &str> {
        instigators::subdomains(self.finalizers.iter().map(AsRef::as_ref), &self.evacuators)
    }

    /// The finalizers that stay when the pod is gone: those that do not have the instigator form.
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

    /// Whether the condition `Blocked` is true with exactly this reason and message.
    pub fn has_blocked_condition(&self, reason: &str, message: &str) -> bool {
        self.blocked_by() == Some(reason)
            && self.blocked.as_ref().is_some_and(|blocked| blocked.message == fingerprint(message))
    }

    /// A reference to this version of the object, for writes.
    pub fn object(&self) -> Object<'_> {
        Object {
            namespace: &self.namespace,
            name: &self.name,
            uid: self.uid.to_string(),
            version: Some(&self.version),
        }
    }
}

//! Converts the API server's JSON to a cached pod. Invalid fields are ignored.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use haulout_api_types::node_maintenance::PodType;
use jiff::Timestamp;
use thiserror::Error;

use super::intern::Interner;
use super::pod::{LabelSet, Owner, Phase, Pod};
use super::wire;
use super::{InvalidUid, Toleration};
use crate::lenient_json::Text;
use crate::watch::Page;

/// An object that is not a pod, because it has no valid identity.
#[derive(Debug, Error)]
pub enum InvalidPod {
    /// It is not JSON.
    #[error("failed to parse pod: {0}")]
    Json(#[from] serde_json::Error),
    /// It has no name or no namespace.
    #[error("pod has no {0}")]
    MissingField(&'static str),
    /// Its UID is invalid.
    #[error("pod {namespace}/{name}: {problem}")]
    Uid {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// What is wrong with the UID.
        problem: InvalidUid,
    },
}

impl Pod {
    /// Parses one pod, for the answer to a single GET and for tests. Unlike the cache, it shares no values between pods.
    pub fn from_json(json: &[u8]) -> Result<Self, InvalidPod> {
        Self::read(&serde_json::from_slice(json)?, &mut Interner::default())
    }

    pub(super) fn read(object: &wire::Object<'_>, shared: &mut Interner) -> Result<Self, InvalidPod> {
        let (metadata, spec, status) = (&object.metadata, &object.spec, &object.status);
        let namespace = metadata.namespace.get().ok_or(InvalidPod::MissingField("namespace"))?;
        let name = metadata.name.get().ok_or(InvalidPod::MissingField("name"))?;
        let uid = metadata.uid.get().unwrap_or_default().parse().map_err(|problem| InvalidPod::Uid {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            problem,
        })?;
        shared.changed();
        let controller = metadata.owners.0.iter().find(|owner| owner.controller.0).map(|owner| Owner {
            api_version: text(&owner.api_version),
            kind: text(&owner.kind),
            name: text(&owner.name),
            uid: text(&owner.uid),
        });
        let kind = controller.as_ref().map(|owner| owner.kind.as_ref());
        let condition =
            |kind| status.conditions.0.iter().find(|condition| condition.kind.get() == Some(kind));
        let is_true = |condition: &wire::Condition<'_>| condition.status.get() == Some("True");
        Ok(Self {
            pod_type: PodType::classify(metadata.annotations.mirror, kind),
            namespace: shared.texts.share(namespace),
            name: name.into(),
            uid,
            version: metadata.resource_version.get().and_then(read_version).unwrap_or_default(),
            labels: read_labels(&metadata.labels, shared),
            evacuator_annotations: read_annotations(&metadata.annotations, shared),
            controller: controller.map(|owner| shared.owners.share(owner)),
            has_finalizers: !metadata.finalizers.0.is_empty(),
            created: seconds(&metadata.created).into(),
            terminating: metadata.deleted.get().is_some(),
            deletion: seconds(&metadata.deleted).into(),
            deletion_grace: metadata.deletion_grace.0.into(),
            node: spec.node.get().map(|node| shared.texts.share(node)),
            priority: spec.priority.0.and_then(|priority| priority.try_into().ok()).unwrap_or_default(),
            grace: spec.grace.0.into(),
            tolerations: shared
                .tolerations
                .share(spec.tolerations.0.iter().map(read_toleration).collect::<Vec<_>>()),
            claims: read_claims(&spec.volumes.0, name),
            phase: read_phase(status.phase.get()),
            ready: condition("Ready").is_some_and(is_true),
            scheduled: condition("PodScheduled")
                .filter(|condition| is_true(condition))
                .and_then(|condition| seconds(&condition.since))
                .into(),
        })
    }
}

/// Parses one page of a list of pods like the cache, and returns the number of pods. For benchmarks of parsing alone.
#[doc(hidden)]
pub fn decode_page(json: &[u8]) -> Result<usize, serde_json::Error> {
    serde_json::from_slice::<Page<'_, wire::Object<'_>>>(json).map(|page| page.items.0.len())
}

/// The token for the next page of a list of pods.
#[doc(hidden)]
pub fn continue_token(json: &[u8]) -> Result<Option<String>, serde_json::Error> {
    let page: Page<'_, wire::Object<'_>> = serde_json::from_slice(json)?;
    Ok(page.metadata.continue_token.get().map(ToOwned::to_owned))
}

fn text(text: &Text<'_>) -> Box<str> {
    text.get().unwrap_or_default().into()
}

/// Parses a version. Accepts only the canonical form, so that it can be printed unchanged.
fn read_version(text: &str) -> Option<u64> {
    text.parse().ok().filter(|number: &u64| !text.starts_with(['0', '+']) && *number != 0)
}

/// Times in the API have a resolution of one second.
fn seconds(time: &Text<'_>) -> Option<i64> {
    time.get()?.parse::<Timestamp>().ok().map(Timestamp::as_second)
}

fn read_labels(labels: &wire::Labels<'_>, shared: &mut Interner) -> LabelSet {
    let mut labels: Vec<_> = labels
        .0
        .iter()
        .filter(|(key, value)| !key.contains(['=', '\n', '\r']) && !value.contains(['\n', '\r']))
        .collect();
    labels.sort_unstable();
    let mut set = String::with_capacity(labels.iter().map(|(key, value)| key.len() + value.len() + 2).sum());
    for (key, value) in labels {
        set.extend([key, "=", value, "\n"]);
    }
    LabelSet(shared.texts.share(set.as_str()))
}

fn read_annotations(
    annotations: &wire::Annotations<'_>,
    shared: &mut Interner,
) -> Option<Arc<BTreeMap<String, String>>> {
    let owned = |(key, value): &(Cow<'_, str>, Cow<'_, str>)| (key.to_string(), value.to_string());
    let annotations: BTreeMap<_, _> = annotations.evacuators.iter().map(owned).collect();
    (!annotations.is_empty()).then(|| shared.annotations.share(annotations))
}

fn read_toleration(toleration: &wire::Toleration<'_>) -> Toleration {
    let text = |text: &Text<'_>| text.get().map(Into::into);
    Toleration {
        key: text(&toleration.key),
        operator: text(&toleration.operator),
        value: text(&toleration.value),
        effect: text(&toleration.effect),
        seconds: toleration.seconds.0,
    }
}

fn read_claims(volumes: &[wire::Volume<'_>], pod: &str) -> Box<[Box<str>]> {
    let claim = |volume: &wire::Volume<'_>| match (volume.claim.name.get(), volume.name.get()) {
        (Some(claim), _) => Some(claim.into()),
        // The name of the claim that the ephemeral volume controller creates.
        (None, Some(volume_name)) if volume.ephemeral.0 => Some(format!("{pod}-{volume_name}").into()),
        _ => None,
    };
    volumes.iter().filter_map(claim).collect()
}

fn read_phase(phase: Option<&str>) -> Phase {
    match phase {
        Some("Pending") => Phase::Pending,
        Some("Running") => Phase::Running,
        Some("Succeeded") => Phase::Succeeded,
        Some("Failed") => Phase::Failed,
        _ => Phase::Unknown,
    }
}

#[cfg(test)]
mod tests;

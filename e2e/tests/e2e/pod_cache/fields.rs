//! Every field that the cache keeps, from the API and from the cache, in the same JSON form. The API's side is read
//! with the full types and without the cache's code.

use haulout_api_types::node_maintenance::PodType;
use haulout_api_types::pod::{controller_of, is_finished};
use haulout_service_runtime::pods;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};

pub fn of_api(pod: &Pod) -> Value {
    let (meta, spec, status) =
        (&pod.metadata, pod.spec.clone().unwrap(), pod.status.clone().unwrap_or_default());
    let seconds = |time: &Option<Time>| time.as_ref().map(|time| time.0.as_second());
    let conditions = status.conditions.unwrap_or_default();
    let condition = |kind: &str| -> Option<&PodCondition> {
        conditions.iter().find(|condition| condition.type_ == kind && condition.status == "True")
    };
    let evacuators: Vec<_> = meta
        .annotations
        .iter()
        .flatten()
        .filter(|(key, _)| key.starts_with("evacuation.coordination.k8s.io/priority_"))
        .collect();
    let claims: Vec<_> = spec
        .volumes
        .iter()
        .flatten()
        .filter_map(|volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
            (Some(claim), _) => Some(claim.claim_name.clone()),
            (None, Some(_)) => Some(format!("{}-{}", meta.name.as_ref().unwrap(), volume.name)),
            (None, None) => None,
        })
        .collect();
    let some = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let tolerations: Vec<_> = spec
        .tolerations
        .iter()
        .flatten()
        .map(|t| {
            json!([some(&t.key), some(&t.operator), some(&t.value), some(&t.effect), t.toleration_seconds])
        })
        .collect();
    json!({
        "namespace": meta.namespace,
        "name": meta.name,
        "uid": meta.uid,
        "version": meta.resource_version,
        "labels": meta.labels.iter().flatten().collect::<Vec<_>>(),
        "evacuators": evacuators,
        "type": PodType::of(meta),
        "owner": controller_of(meta).map(|owner| [&owner.api_version, &owner.kind, &owner.name, &owner.uid]),
        "finalizers": meta.finalizers.as_ref().is_some_and(|finalizers| !finalizers.is_empty()),
        "created": seconds(&meta.creation_timestamp),
        "terminating": meta.deletion_timestamp.is_some(),
        "deletion": seconds(&meta.deletion_timestamp),
        "deletion_grace": meta.deletion_grace_period_seconds,
        "node": some(&spec.node_name),
        "priority": spec.priority.unwrap_or_default(),
        "grace": spec.termination_grace_period_seconds,
        "tolerations": tolerations,
        "claims": claims,
        "phase": status.phase.as_deref().unwrap_or("Unknown"),
        "finished": is_finished(status.phase.as_deref()),
        "ready": condition("Ready").is_some(),
        "scheduled": condition("PodScheduled").and_then(|condition| seconds(&condition.last_transition_time)),
    })
}

pub fn of_cache(pod: &pods::Pod) -> Value {
    let seconds = |time: Option<jiff::Timestamp>| time.map(jiff::Timestamp::as_second);
    json!({
        "namespace": &*pod.namespace,
        "name": &*pod.name,
        "uid": pod.uid.to_string(),
        "version": pod.resource_version(),
        "labels": pod.labels.iter().collect::<Vec<_>>(),
        "evacuators": pod.evacuator_annotations.iter().flat_map(|all| all.iter()).collect::<Vec<_>>(),
        "type": pod.pod_type,
        "owner": pod.controller.as_deref().map(|o| [&*o.api_version, &*o.kind, &*o.name, &*o.uid]),
        "finalizers": pod.has_finalizers,
        "created": seconds(pod.created_at()),
        "terminating": pod.terminating,
        "deletion": seconds(pod.deletion_timestamp()),
        "deletion_grace": pod.deletion_grace_period_seconds(),
        "node": pod.node.as_deref(),
        "priority": pod.priority,
        "grace": pod.termination_grace_period_seconds(),
        "tolerations": pod.tolerations.iter().map(|t| json!([t.key, t.operator, t.value, t.effect, t.seconds])).collect::<Vec<_>>(),
        "claims": pod.claims,
        "phase": format!("{:?}", pod.phase),
        "finished": pod.is_finished(),
        "ready": pod.ready,
        "scheduled": seconds(pod.scheduled_at()),
    })
}

/// What subscribers receive: a new resource version alone is not delivered.
pub fn without_version(pod: &pods::Pod) -> Value {
    let mut fields = of_cache(pod);
    fields["version"] = Value::Null;
    fields
}

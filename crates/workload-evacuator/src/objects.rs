//! The watched objects, reduced to the fields that decisions need.

use std::sync::Arc;

use haulout_api_types::evacuation::Evacuator;
use haulout_api_types::former_owner::FormerOwner;
use haulout_api_types::names::{self, class, condition};
use haulout_api_types::{Evacuation, bounded, conditions, evacuators, instigators};
use haulout_service_runtime::api::Object;
use haulout_service_runtime::pods::Uid;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1 as apps;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::Deserialize;

/// What is known about why a pod is not available.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// The scheduler finds no node, with its message, since this time.
    Unschedulable(Box<str>, Timestamp),
    /// A container waits for this reason.
    Waiting(Box<str>),
}

/// A pod of a ReplicaSet or a Deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Box<str>,
    /// Its UID.
    pub uid: Uid,
    /// The ReplicaSet or Deployment that manages it.
    pub owner: Option<Owner>,
    /// Where it belonged before, if it was moved to its Deployment and not restored since.
    pub former: Former,
    /// When it was created.
    pub created: Timestamp,
    /// Since when it is ready, if it is.
    pub ready: Option<Timestamp>,
    /// Whether it is terminating or has finished.
    pub leaving: bool,
    /// Whether it has finished without being deleted. Its ReplicaSet does not count it.
    pub finished: bool,
    /// Why it is not available, as far as it is known.
    pub problem: Option<Box<Problem>>,
    /// The PersistentVolumeClaims that it mounts and that other pods may mount, too.
    pub claims: Box<[Box<str>]>,
    /// Its resourceVersion; 0 if it is not a number.
    pub version: u64,
}

/// The annotation about a pod's former owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Former {
    /// There is none.
    #[default]
    None,
    /// Somebody has made it unreadable.
    Unreadable,
    /// Its content.
    Known(Box<FormerOwner>),
}

impl Former {
    /// The former owner, if it is known.
    pub fn known(&self) -> Option<&FormerOwner> {
        if let Self::Known(former) = self { Some(former) } else { None }
    }

    /// Whether there is an annotation.
    pub fn exists(&self) -> bool {
        *self != Self::None
    }
}

/// The controller of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A ReplicaSet.
    ReplicaSet(Uid),
    /// A Deployment: the pod is being replaced.
    Deployment(Uid),
}

impl Pod {
    /// Reads a pod; `None` if it is not a pod of a ReplicaSet or a Deployment, and was not moved by us.
    pub fn read(pod: SlimPod) -> Option<Self> {
        let SlimPod { metadata, spec, status } = pod;
        let annotation = metadata.annotations.as_ref().and_then(|a| a.get(names::FORMER_OWNER_ANNOTATION));
        let former = annotation.map_or(Former::None, |value| {
            FormerOwner::parse(value).map_or(Former::Unreadable, |former| Former::Known(former.into()))
        });
        let owner = haulout_api_types::pod::controller_of(&metadata)
            .filter(|owner| owner.api_version.starts_with("apps/"))
            .and_then(|owner| {
                let uid = owner.uid.parse().ok()?;
                match owner.kind.as_str() {
                    "ReplicaSet" => Some(Owner::ReplicaSet(uid)),
                    "Deployment" => Some(Owner::Deployment(uid)),
                    _ => None,
                }
            });
        if owner.is_none() && !former.exists() {
            return None;
        }
        let finished = haulout_api_types::pod::is_finished(status.phase.as_deref());
        let ready = status.condition("Ready").filter(|c| c.status == "True");
        let since = |condition: &SlimCondition| condition.last_transition_time.as_ref().map(|time| time.0);
        let created = metadata.creation_timestamp.as_ref().map_or(Timestamp::MIN, |time| time.0);
        let version =
            metadata.resource_version.as_deref().and_then(|text| text.parse().ok()).unwrap_or_default();
        Some(Self {
            uid: metadata.uid.as_deref()?.parse().ok()?,
            ready: ready.map(|condition| since(condition).unwrap_or(created)),
            problem: if ready.is_some() { None } else { status.problem(created).map(Box::new) },
            namespace: metadata.namespace.unwrap_or_default().into(),
            name: metadata.name.unwrap_or_default().into(),
            owner,
            former,
            created,
            leaving: metadata.deletion_timestamp.is_some() || finished,
            finished: metadata.deletion_timestamp.is_none() && finished,
            claims: spec.claims(),
            version,
        })
    }

    /// When it is available: ready for this many seconds. `None` if it is not ready.
    pub fn available_at(&self, min_ready: SignedDuration) -> Option<Timestamp> {
        let ready = self.ready.filter(|_| !self.leaving)?;
        Some(ready.saturating_add(min_ready).unwrap_or(Timestamp::MAX))
    }

    /// Since when the scheduler finds no node for it.
    pub fn unschedulable_since(&self) -> Option<Timestamp> {
        if let Some(Problem::Unschedulable(_, since)) = self.problem.as_deref() { Some(*since) } else { None }
    }

    /// Whether it belongs to its Deployment, so that its ReplicaSet creates a replacement.
    pub fn is_moved(&self) -> bool {
        matches!(self.owner, Some(Owner::Deployment(_)))
    }
}

/// The fields of a pod that are parsed.
#[derive(Clone, Debug, Deserialize, kube::Resource)]
#[resource(inherit = core::Pod)]
pub struct SlimPod {
    /// The metadata.
    pub metadata: ObjectMeta,
    #[serde(default)]
    spec: SlimPodSpec,
    #[serde(default)]
    status: SlimPodStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimPodSpec {
    volumes: Option<Vec<SlimVolume>>,
}

impl SlimPodSpec {
    fn claims(&self) -> Box<[Box<str>]> {
        let volumes = self.volumes.iter().flatten();
        volumes
            .filter_map(|volume| Some(volume.persistent_volume_claim.as_ref()?.claim_name.as_str().into()))
            .collect()
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimVolume {
    persistent_volume_claim: Option<SlimClaim>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimClaim {
    claim_name: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimPodStatus {
    phase: Option<String>,
    conditions: Option<Vec<SlimCondition>>,
    init_container_statuses: Option<Vec<SlimContainerStatus>>,
    container_statuses: Option<Vec<SlimContainerStatus>>,
}

impl SlimPodStatus {
    fn condition(&self, type_: &str) -> Option<&SlimCondition> {
        self.conditions.iter().flatten().find(|condition| condition.type_ == type_)
    }

    fn problem(&self, created: Timestamp) -> Option<Problem> {
        let scheduled = self.condition("PodScheduled").filter(|condition| condition.status == "False");
        if let Some(condition) = scheduled {
            let since = condition.last_transition_time.as_ref().map_or(created, |time| time.0);
            let message = condition.message.as_deref().unwrap_or_default();
            let text =
                if message.is_empty() { condition.reason.as_deref().unwrap_or_default() } else { message };
            return Some(Problem::Unschedulable(bounded::text(text).into(), since));
        }
        let all =
            self.init_container_statuses.iter().flatten().chain(self.container_statuses.iter().flatten());
        let reasons = all.filter_map(|status| status.state.as_ref()?.waiting.as_ref()?.reason.as_deref());
        // These are not problems: the first containers start.
        let mut reasons =
            reasons.filter(|reason| !matches!(*reason, "ContainerCreating" | "PodInitializing"));
        reasons.next().map(|reason| Problem::Waiting(bounded::line(reason, 100).into()))
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimCondition {
    #[serde(rename = "type")]
    type_: String,
    status: String,
    reason: Option<String>,
    message: Option<String>,
    last_transition_time: Option<Time>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimContainerStatus {
    state: Option<SlimContainerState>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimContainerState {
    waiting: Option<SlimWaiting>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimWaiting {
    reason: Option<String>,
}

/// A ReplicaSet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaSet {
    /// Its name.
    pub name: Box<str>,
    /// The Deployment that manages it; `None` if there is none.
    pub deployment: Option<Uid>,
    /// The kind and name of its controller if that is not a Deployment.
    pub other_owner: Option<Box<str>>,
    /// The number of pods that it wants.
    pub wanted: i32,
    /// The number of pods that it has, as it reports.
    pub reported: i32,
    /// Whether it has acted on its latest specification.
    pub current: bool,
    /// Why it fails to create pods, if it does.
    pub failure: Option<Box<str>>,
    /// Whether it is being deleted.
    pub deleted: bool,
}

impl ReplicaSet {
    /// Reads a ReplicaSet.
    pub fn read(set: SlimReplicaSet) -> Self {
        let SlimReplicaSet { metadata, spec, status } = set;
        let owner = haulout_api_types::pod::controller_of(&metadata);
        let is_deployment = |owner: &_| matches!(owner, OwnerKind { group: "apps", kind: "Deployment" });
        let kind = owner.map(|owner| OwnerKind {
            group: owner.api_version.split('/').next().unwrap_or_default(),
            kind: &owner.kind,
        });
        let deployment = owner.filter(|_| kind.as_ref().is_some_and(is_deployment));
        let failure =
            status.conditions.iter().flatten().find(|c| c.type_ == "ReplicaFailure" && c.status == "True");
        Self {
            deployment: deployment.and_then(|owner| owner.uid.parse().ok()),
            other_owner: owner
                .filter(|_| deployment.is_none())
                .map(|owner| bounded::line(&format!("{} {}", owner.kind, owner.name), 300).into()),
            wanted: spec.replicas.unwrap_or(1),
            reported: status.replicas.unwrap_or_default(),
            current: status.observed_generation.unwrap_or_default()
                >= metadata.generation.unwrap_or_default(),
            failure: failure.map(|c| bounded::text(c.message.as_deref().unwrap_or_default()).into()),
            deleted: metadata.deletion_timestamp.is_some(),
            name: metadata.name.unwrap_or_default().into(),
        }
    }
}

struct OwnerKind<'a> {
    group: &'a str,
    kind: &'a str,
}

/// The fields of a ReplicaSet that are parsed.
#[derive(Clone, Debug, Deserialize, kube::Resource)]
#[resource(inherit = apps::ReplicaSet)]
pub struct SlimReplicaSet {
    /// The metadata.
    pub metadata: ObjectMeta,
    #[serde(default)]
    spec: SlimReplicas,
    #[serde(default)]
    status: SlimReplicaSetStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct SlimReplicas {
    replicas: Option<i32>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimReplicaSetStatus {
    replicas: Option<i32>,
    observed_generation: Option<i64>,
    conditions: Option<Vec<SlimCondition>>,
}

/// A Deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deployment {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Box<str>,
    /// Its UID.
    pub uid: Uid,
    /// The number of replicas.
    pub replicas: i32,
    /// The maximum number of additional pods in a rolling update; 0 for other strategies.
    pub max_surge: i32,
    /// Its strategy.
    pub strategy: Strategy,
    /// How long a pod has to be ready before it is available.
    pub min_ready: SignedDuration,
    /// How long it may take a pod to become available.
    pub progress_deadline: SignedDuration,
    /// Whether its annotation asks for evictions without a replacement.
    pub opted_out: bool,
    /// Whether its controller has acted on its latest specification.
    pub current: bool,
    /// Whether it is being deleted.
    pub deleted: bool,
}

/// How a Deployment replaces its pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// A few at a time.
    RollingUpdate,
    /// All at once.
    Recreate,
}

/// The default of `spec.progressDeadlineSeconds`.
const PROGRESS_DEADLINE_SECONDS: i32 = 600;

impl Deployment {
    /// Reads a Deployment. `None` if it has no UID.
    pub fn read(deployment: SlimDeployment) -> Option<Self> {
        let SlimDeployment { metadata, spec, status } = deployment;
        let replicas = spec.replicas.unwrap_or(1).max(0);
        let strategy = spec.strategy.unwrap_or_default();
        let kind = match strategy.type_.as_deref() {
            Some("Recreate") => Strategy::Recreate,
            _ => Strategy::RollingUpdate,
        };
        // The API server sets the default, 25%.
        let surge =
            strategy.rolling_update.and_then(|update| update.max_surge).unwrap_or(IntOrString::Int(0));
        let seconds = |seconds: i32| SignedDuration::from_secs(seconds.max(0).into());
        Some(Self {
            uid: metadata.uid.as_deref()?.parse().ok()?,
            max_surge: if kind == Strategy::Recreate { 0 } else { scaled(&surge, replicas) },
            strategy: kind,
            replicas,
            min_ready: seconds(spec.min_ready_seconds.unwrap_or_default()),
            progress_deadline: seconds(spec.progress_deadline_seconds.unwrap_or(PROGRESS_DEADLINE_SECONDS)),
            opted_out: opts_out(&metadata),
            current: status.observed_generation.unwrap_or_default()
                >= metadata.generation.unwrap_or_default(),
            deleted: metadata.deletion_timestamp.is_some(),
            namespace: metadata.namespace.unwrap_or_default().into(),
            name: metadata.name.unwrap_or_default().into(),
        })
    }
}

/// Whether a Deployment or Namespace asks for evictions without a replacement.
pub fn opts_out(metadata: &ObjectMeta) -> bool {
    metadata
        .annotations
        .as_ref()
        .and_then(|all| all.get(names::REPLACE_ANNOTATION))
        .is_some_and(|value| value == "false")
}

/// A number of pods, or a percentage of the replicas, rounded up as for `maxSurge`.
fn scaled(value: &IntOrString, replicas: i32) -> i32 {
    match value {
        IntOrString::Int(number) => (*number).max(0),
        IntOrString::String(text) => {
            let percent: i64 = text.strip_suffix('%').and_then(|n| n.parse().ok()).unwrap_or_default();
            let pods = (percent.max(0).saturating_mul(replicas.into()).saturating_add(99)) / 100;
            i32::try_from(pods).unwrap_or(i32::MAX)
        }
    }
}

/// The fields of a Deployment that are parsed.
#[derive(Clone, Debug, Deserialize, kube::Resource)]
#[resource(inherit = apps::Deployment)]
pub struct SlimDeployment {
    /// The metadata.
    pub metadata: ObjectMeta,
    #[serde(default)]
    spec: SlimDeploymentSpec,
    #[serde(default)]
    status: SlimDeploymentStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimDeploymentStatus {
    observed_generation: Option<i64>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimDeploymentSpec {
    replicas: Option<i32>,
    strategy: Option<SlimStrategy>,
    min_ready_seconds: Option<i32>,
    progress_deadline_seconds: Option<i32>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimStrategy {
    #[serde(rename = "type")]
    type_: Option<String>,
    rolling_update: Option<SlimRollingUpdate>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimRollingUpdate {
    max_surge: Option<IntOrString>,
}

/// An Evacuation with our class among its evacuators.
#[derive(Clone, Debug, PartialEq)]
pub struct Evac {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Box<str>,
    /// Its UID.
    pub uid: Box<str>,
    /// Its resourceVersion.
    pub version: Box<str>,
    /// When it was created.
    pub created: Timestamp,
    /// Its pod.
    pub pod: Uid,
    /// Its finalizers.
    pub finalizers: Box<[Box<str>]>,
    /// Whether it is being deleted. It takes no new finalizers then.
    pub deleted: bool,
    /// Whether it is cancelled: the pod stays.
    pub cancelled: bool,
    /// Whose turn it is.
    pub turn: Turn,
    /// When we last reported progress, or became active.
    pub progress: Option<Timestamp>,
    /// How long we may take to report progress.
    pub deadline: SignedDuration,
    /// When the evacuation is expected to end.
    pub expected_end: Option<Timestamp>,
    /// The message.
    pub message: Box<str>,
    /// The reason of the condition `Blocked`, if it is true.
    pub blocked: Option<Box<str>>,
    /// All conditions.
    pub conditions: Box<[Condition]>,
}

/// Our turn among the evacuators of an Evacuation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Others come first.
    Later,
    /// It is our turn.
    Active,
    /// We have completed, or the active evacuator comes after us.
    Over,
}

impl Turn {
    fn of(evacuation: &Evacuation) -> Self {
        if evacuation.is_active(class::DEPLOYMENT) {
            return Self::Active;
        }
        let mut evacuators = evacuation.spec.evacuators.clone();
        evacuators::sort(&mut evacuators);
        let active = evacuation.status.as_ref().and_then(|status| status.active_evacuator_class.as_deref());
        let mut from_us =
            evacuators.iter().skip_while(|evacuator| evacuator.evacuator_class != class::DEPLOYMENT);
        let is_over = from_us.any(|evacuator| Some(evacuator.evacuator_class.as_str()) == active);
        if is_over { Self::Over } else { Self::Later }
    }
}

impl Evac {
    /// Reads an Evacuation; `None` if we are not one of its evacuators.
    pub fn read(evacuation: Evacuation) -> Option<Self> {
        let is_ours = |evacuator: &Evacuator| evacuator.evacuator_class == class::DEPLOYMENT;
        if !evacuation.spec.evacuators.iter().any(is_ours) {
            return None;
        }
        let (turn, cancelled) = (Turn::of(&evacuation), evacuation.is_cancelled());
        let Evacuation { metadata, spec, status } = evacuation;
        let status = status.unwrap_or_default();
        let blocked = conditions::find(&status.conditions, condition::BLOCKED).filter(|c| c.status == "True");
        let created = metadata.creation_timestamp.map_or(Timestamp::MIN, |time| time.0);
        Some(Self {
            namespace: metadata.namespace?.into(),
            name: metadata.name?.into(),
            uid: metadata.uid?.into(),
            version: metadata.resource_version?.into(),
            created,
            pod: spec.pod_ref.uid.parse().ok()?,
            finalizers: metadata.finalizers.into_iter().flatten().map(Into::into).collect(),
            deleted: metadata.deletion_timestamp.is_some(),
            cancelled,
            turn,
            progress: status.evacuation_progress_timestamp.map(|time| time.0),
            deadline: SignedDuration::from_secs(spec.progress_deadline_seconds.into()),
            expected_end: status.expected_evacuation_finish_time.map(|time| time.0),
            message: status.message.into(),
            blocked: blocked.map(|c| c.reason.as_str().into()),
            conditions: status.conditions.into(),
        })
    }

    /// Whether the pod leaves, without waiting for us any more.
    pub fn lets_pod_leave(&self) -> bool {
        self.turn == Turn::Over && !self.cancelled
    }

    /// Whether the pod is to leave, and waits for us.
    pub fn is_active(&self) -> bool {
        self.turn == Turn::Active && !self.cancelled
    }

    /// Whether it has our finalizer, so that it is not removed before we have cleaned up.
    pub fn is_held(&self) -> bool {
        let ours = instigators::finalizer(class::DEPLOYMENT);
        self.finalizers.iter().any(|finalizer| **finalizer == *ours)
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pod_leaves_when_our_turn_is_over() {
        let read = |active: Option<&str>, completed: bool| {
            let class = |class: &str, priority: i32| json!({"evacuatorClass": class, "priority": priority});
            let evacuation = json!({
                "metadata": {
                    "namespace": "shop", "name": "e", "uid": "e", "resourceVersion": "1",
                    "finalizers": ["evacuation.coordination.k8s.io/instigator_nodemaintenance.k8s.io"],
                },
                "spec": {
                    "podRef": {"name": "web-1", "uid": "00000000-0000-0000-0000-000000000001"},
                    "evacuators": [class("last.example.com", 1), class(class::DEPLOYMENT, 10_000), class("first.example.com", 20_000)],
                },
                "status": {"activeEvacuatorClass": active, "activeEvacuatorCompleted": completed},
            });
            let evac = Evac::read(serde_json::from_value(evacuation).unwrap()).unwrap();
            (evac.is_active(), evac.lets_pod_leave())
        };
        assert_eq!(read(None, false), (false, false));
        assert_eq!(read(Some("first.example.com"), true), (false, false));
        assert_eq!(read(Some(class::DEPLOYMENT), false), (true, false));
        assert_eq!(read(Some(class::DEPLOYMENT), true), (false, true));
        assert_eq!(read(Some("last.example.com"), false), (false, true));
    }
}

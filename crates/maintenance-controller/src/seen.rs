//! What is read of the objects that are watched, and what is kept of them: only what decides, and what a write
//! needs to say which state it means.

use std::sync::Arc;

use haulout_api_types::evacuation::DEFAULT_PROGRESS_DEADLINE_SECONDS;
use haulout_api_types::names::{self, condition, reason};
use haulout_api_types::node_maintenance::{DrainStatus, Stage, StageStatus};
use haulout_api_types::selector::{NodeMatcher, SelectorError};
use haulout_api_types::{Evacuation, NodeMaintenance, instigators};
use haulout_drain_planner::cordon::NodeMarks;
use haulout_drain_planner::facts::{Blocked, EvacuationOf, MAX_REASON, MaintenanceFacts, Turn};
use haulout_drain_planner::placement::{NodeChoice, Taint};
use haulout_drain_planner::plan::{Plan, Served};
use haulout_service_runtime::api::{Object, is_later};
use haulout_service_runtime::pods::{LabelSet, Toleration, Uid};
use jiff::{RoundMode, SignedDuration, Timestamp, TimestampRound, Unit};
use k8s_openapi::api::core::v1::{self as core, Node, NodeCondition};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use kube::Resource;
use serde::{Deserialize, Serialize};

use crate::bounded;
use crate::stage::{self, Life};

/// A Node, as far as it is read.
#[derive(Resource, Clone, Debug, Deserialize, Serialize)]
#[resource(inherit = Node)]
pub struct SlimNode {
    /// Its metadata.
    pub metadata: ObjectMeta,
    #[serde(default)]
    spec: SlimNodeSpec,
    #[serde(default)]
    status: SlimNodeStatus,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct SlimNodeSpec {
    unschedulable: bool,
    taints: Vec<core::Taint>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimNodeStatus {
    conditions: Vec<NodeCondition>,
    volumes_attached: Vec<SlimVolume>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct SlimVolume {
    name: String,
}

/// An Evacuation, as far as it is read.
#[derive(Resource, Clone, Debug, Deserialize, Serialize)]
#[resource(inherit = Evacuation)]
pub struct SlimEvacuation {
    /// Its metadata.
    pub metadata: ObjectMeta,
    #[serde(default)]
    spec: SlimEvacuationSpec,
    #[serde(default)]
    status: SlimEvacuationStatus,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimEvacuationSpec {
    progress_deadline_seconds: Option<i32>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
struct SlimEvacuationStatus {
    active_evacuator_class: Option<String>,
    active_evacuator_completed: bool,
    evacuation_progress_timestamp: Option<Time>,
    expected_evacuation_finish_time: Option<Time>,
    message: String,
    conditions: Vec<Condition>,
    // A text, so that a policy of a later version does not hide the Evacuation.
    evacuation_cancellation_policy: Option<String>,
}

/// Which state of which object something is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// The object's UID.
    pub uid: Box<str>,
    /// Its resourceVersion.
    pub version: Box<str>,
}

impl Version {
    /// That of an object with this metadata.
    pub fn of(metadata: &ObjectMeta) -> Self {
        let text = |text: &Option<String>| text.as_deref().unwrap_or_default().into();
        Self { uid: text(&metadata.uid), version: text(&metadata.resource_version) }
    }

    /// The object with this namespace and name, in this state.
    pub fn object<'a>(&'a self, namespace: &'a str, name: &'a str) -> Object<'a> {
        Object { namespace, name, uid: self.uid.to_string(), version: Some(&self.version) }
    }

    /// Whether the other one is a later state of the same object.
    pub fn is_followed_by(&self, other: &Self) -> bool {
        self.uid == other.uid && is_later(&other.version, &self.version)
    }

    /// Whether the other one is this state of the same object or an earlier one.
    pub fn makes_old(&self, other: &Self) -> bool {
        self.uid == other.uid && !self.is_followed_by(other)
    }
}

/// A node, as it was last seen.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeSeen {
    /// Which state this is.
    pub version: Version,
    /// Its labels.
    pub labels: LabelSet,
    /// The volumes that it reports as attached, by what they are called there: for CSI,
    /// `kubernetes.io/csi/DRIVER^HANDLE`.
    pub volumes: Box<[Arc<str>]>,
    /// The taints that keep new pods away, but for that of a cordon.
    pub taints: Arc<[Taint]>,
    /// What it shows of a maintenance.
    pub marks: NodeMarks,
}

impl NodeSeen {
    /// Takes what is kept.
    pub fn new(node: SlimNode) -> Self {
        let SlimNode { metadata, spec, status } = node;
        let labels = metadata.labels.iter().flatten().map(|(key, value)| (key.as_str(), value.as_str()));
        Self {
            version: Version::of(&metadata),
            labels: labels.collect(),
            volumes: status.volumes_attached.into_iter().map(|volume| volume.name.into()).collect(),
            taints: spec.taints.into_iter().filter_map(keeps_away).collect(),
            marks: NodeMarks::new(
                spec.unschedulable,
                metadata.annotations.into_iter().flatten(),
                status.conditions,
            ),
        }
    }
}

fn keeps_away(taint: core::Taint) -> Option<Taint> {
    let keeps = matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute") && taint.key != CORDON_TAINT;
    let value = taint.value.unwrap_or_default();
    keeps.then(|| Taint { key: taint.key.into(), value: value.into(), effect: taint.effect.into() })
}

/// The UID of a pod of Haulout itself, and the nodes that it may run on; `None` of one that ends by itself, such as that
/// of a Job.
pub fn own_pod(pod: core::Pod) -> Option<(Uid, NodeChoice)> {
    let spec = pod.spec.filter(|spec| spec.restart_policy.as_deref() == Some("Always"))?;
    let required = spec
        .affinity
        .and_then(|affinity| affinity.node_affinity)
        .and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution);
    // The API server takes no selector that cannot be read; one of a later version is left to the scheduler.
    let required = required.and_then(|required| NodeMatcher::new(&required).ok());
    let labels = spec.node_selector.unwrap_or_default();
    Some((pod.metadata.uid?.parse().ok()?, NodeChoice { labels, required }))
}

/// An Evacuation, as it was last seen.
#[derive(Clone, Debug, PartialEq)]
pub struct EvacuationSeen {
    /// Which state this is.
    pub version: Version,
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Box<str>,
    /// All its finalizers.
    pub finalizers: Box<[Box<str>]>,
    /// Whether somebody has deleted it, so that it goes with its last finalizer and takes no new one.
    pub deleting: bool,
    /// Whether it cannot be cancelled while its pod exists.
    pub forbids_cancellation: bool,
    /// What its condition says that keeps the pod from leaving.
    pub blocked: Option<Blocked>,
    /// The evacuator that is at work.
    pub turn: Option<Arc<Turn>>,
}

impl EvacuationSeen {
    /// Takes what is kept.
    pub fn new(evacuation: SlimEvacuation) -> Self {
        let SlimEvacuation { metadata, spec, status } = evacuation;
        let version = Version::of(&metadata);
        let turn = turn(&metadata, &spec, &status).map(Arc::new);
        let policy = status.evacuation_cancellation_policy;
        let blocked =
            status.conditions.into_iter().find(|c| c.type_ == condition::BLOCKED && c.status == "True");
        Self {
            version,
            namespace: metadata.namespace.unwrap_or_default().into(),
            name: metadata.name.unwrap_or_default().into(),
            finalizers: metadata.finalizers.into_iter().flatten().map(Into::into).collect(),
            deleting: metadata.deletion_timestamp.is_some(),
            forbids_cancellation: policy.is_some_and(|policy| policy != "Allow"),
            blocked: blocked.map(|c| blocked_by(&c)),
            turn,
        }
    }

    /// What to say of one that is being deleted and is not ours: it takes no new finalizer, so that the pod gets another
    /// one only when it is gone.
    pub fn held(&self) -> Option<Blocked> {
        if !self.deleting || self.of() == EvacuationOf::Us {
            return None;
        }
        let message = format!(
            "its Evacuation {} is being deleted and held by {}: have whoever set that finish or remove it, then a new one is made",
            self.name,
            bounded::list(&self.finalizers, 5)
        );
        Some(Blocked { reason: reason::EVACUATION_HELD.into(), message: message.into(), since: None })
    }

    /// Whose wish it is.
    pub fn of(&self) -> EvacuationOf {
        if self.finalizers.iter().any(|known| **known == *our_finalizer()) {
            EvacuationOf::Us
        } else {
            EvacuationOf::Others
        }
    }

    /// What the planner has to know of it.
    pub fn planned(&self) -> EvacuationOf {
        match self.of() {
            EvacuationOf::Us if self.forbids_cancellation => EvacuationOf::UsPastRecall,
            of => of,
        }
    }

    /// Its finalizers with ours among them, or without.
    pub fn finalizers_with_ours(&self, ours: bool) -> Vec<String> {
        let finalizer = our_finalizer();
        let others = self.finalizers.iter().map(ToString::to_string).filter(|known| *known != finalizer);
        others.chain(ours.then(our_finalizer)).collect()
    }
}

/// What a condition says; one that somebody else sets may say anything at any length.
fn blocked_by(condition: &Condition) -> Blocked {
    let reason = reason::known(&condition.reason);
    let message = if reason == reason::OTHER {
        bounded::text(&format!("{}: {}", condition.reason, condition.message))
    } else {
        bounded::text(&condition.message)
    };
    let since = Some(condition.last_transition_time.0);
    Blocked { reason: reason.into(), message: message.into(), since }
}

/// The evacuator that is at work, if one is. Its deadline is that of the evacuation controller, which counts from the
/// last report, or from the creation if there was none.
fn turn(metadata: &ObjectMeta, spec: &SlimEvacuationSpec, status: &SlimEvacuationStatus) -> Option<Turn> {
    let class = status.active_evacuator_class.as_deref().filter(|_| !status.active_evacuator_completed)?;
    let created = metadata.creation_timestamp.as_ref().map(|time| time.0);
    let reported = status.evacuation_progress_timestamp.as_ref().map(|time| time.0);
    let deadline = spec.progress_deadline_seconds.unwrap_or(DEFAULT_PROGRESS_DEADLINE_SECONDS);
    let deadline = SignedDuration::from_secs(deadline.into());
    let until = reported.or(created)?.saturating_add(deadline).unwrap_or(Timestamp::MAX);
    Some(Turn {
        class: bounded::text(class).into(),
        message: bounded::text(&status.message).into(),
        since: created.filter(|_| reported.is_none()),
        until: up_to_the_minute(until),
        expected: status.expected_evacuation_finish_time.as_ref().map(|time| up_to_the_minute(time.0)),
    })
}

fn up_to_the_minute(time: Timestamp) -> Timestamp {
    time.round(TimestampRound::new().smallest(Unit::Minute).mode(RoundMode::Ceil)).unwrap_or(time)
}

fn our_finalizer() -> String {
    instigators::finalizer(names::instigator::NODE_MAINTENANCE)
}

/// Where a volume is attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachmentSeen {
    /// The node.
    pub node: Arc<str>,
    /// The persistent volume; for one that is none, the attachment's own name.
    pub volume: Arc<str>,
}

impl AttachmentSeen {
    /// Takes what is kept; `None` if nothing is attached.
    ///
    /// The attacher sets `status.attached` when the volume is attached, and takes it back together with its finalizer when
    /// it is detached: before that, the kubelet has not used the volume. After an attempt that failed nobody knows.
    /// <https://github.com/kubernetes-csi/external-attacher/blob/v4.10.0/pkg/controller/csi_handler.go>
    pub fn new(attachment: VolumeAttachment) -> Option<Self> {
        let VolumeAttachment { metadata, spec, status } = attachment;
        let volume = spec.source.persistent_volume_name.or(metadata.name).unwrap_or_default();
        let status = status.unwrap_or_default();
        let attached = status.attached || status.attach_error.is_some() || status.detach_error.is_some();
        attached.then(|| Self { node: spec.node_name.into(), volume: volume.into() })
    }
}

/// A maintenance, as it was last seen, ready to be followed.
#[derive(Clone, Debug)]
pub struct MaintenanceSeen {
    /// Which state this is.
    pub version: Version,
    /// The object.
    pub object: Arc<NodeMaintenance>,
    nodes: NodeMatcher,
    plan: Arc<Plan>,
}

impl MaintenanceSeen {
    /// Reads selector and plan.
    pub fn new(object: NodeMaintenance, served: Served) -> Result<Self, SelectorError> {
        let nodes = NodeMatcher::new(&object.spec.node_selector)
            .map_err(|error| SelectorError { path: format!("spec.nodeSelector.{}", error.path), ..error })?;
        let plan = Arc::new(Plan::read(&object.spec.drain_plan, served)?);
        Ok(Self { version: Version::of(&object.metadata), object: Arc::new(object), nodes, plan })
    }

    /// What decides about its life, with what the planner counts.
    pub fn life(&self, nodes_unreleased: u32) -> Life<'_> {
        let metadata = &self.object.metadata;
        Life {
            stage: self.object.spec.stage,
            deleting: metadata.deletion_timestamp.is_some(),
            has_finalizer: metadata.finalizers.iter().flatten().any(|f| f == names::COMPLETION_FINALIZER),
            begun: self.begun(),
            nodes_unreleased,
        }
    }

    /// The stages that have begun.
    pub fn begun(&self) -> &[StageStatus] {
        self.object.status.as_ref().map(|status| status.stage_statuses.as_slice()).unwrap_or_default()
    }

    /// Its finalizers with ours among them, or without.
    pub fn finalizers_with_ours(&self, ours: bool) -> Vec<String> {
        let known = self.object.metadata.finalizers.iter().flatten();
        let others = known.filter(|known| *known != names::COMPLETION_FINALIZER).cloned();
        others.chain(ours.then(|| names::COMPLETION_FINALIZER.to_owned())).collect()
    }

    /// What the planner has to know.
    pub fn facts(&self, name: &Arc<str>) -> MaintenanceFacts {
        let spec = &self.object.spec;
        let none = DrainStatus::default();
        let status = self.object.status.as_ref();
        let drain = status.and_then(|status| status.drain_status.as_ref()).unwrap_or(&none);
        let number = |pods: i32| pods.try_into().unwrap_or_default();
        let began = self.begun().iter().find(|begun| begun.name == Stage::Drain);
        let life = self.life(0);
        MaintenanceFacts {
            name: name.clone(),
            uid: (*self.version.uid).into(),
            created: self.object.metadata.creation_timestamp.as_ref().map_or(Timestamp::MIN, |time| time.0),
            stage: stage::planned(life),
            uncordons: stage::uncordons(life),
            reason: bounded::line(&spec.reason, MAX_REASON).into(),
            holds_autoscalers: spec.hold_autoscalers.unwrap_or(true),
            nodes: self.nodes.clone(),
            volume_timeout: spec.volume_detach_timeout_seconds.map(|s| SignedDuration::from_secs(s.into())),
            plan: self.plan.clone(),
            evacuated: number(drain.pods_evacuated),
            left_before: number(drain.pods_pending_evacuation.saturating_add(drain.pods_evacuating)),
            stayed_before: number(drain.pods_unsupported.saturating_add(drain.pods_skipped)),
            drained_nodes: drain.drained_nodes.iter().map(|name| name.as_str().into()).collect(),
            drained_and_deleted: number(drain.nodes_drained_and_deleted),
            drain_began: began.map(|began| began.start_timestamp.0),
        }
    }
}

/// The taint that the control plane puts onto a node that is unschedulable.
const CORDON_TAINT: &str = "node.kubernetes.io/unschedulable";

/// Whether one of these tolerates `node.kubernetes.io/unschedulable:NoSchedule`.
pub fn tolerates_cordon(tolerations: &[Toleration]) -> bool {
    tolerations.iter().any(|toleration| toleration.matches(CORDON_TAINT, "", "NoSchedule"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn a_cordon_is_tolerated_by_its_key_or_by_all_keys() {
        let toleration = |key: Option<&str>, operator: Option<&str>, effect: Option<&str>| Toleration {
            key: key.map(Into::into),
            operator: operator.map(Into::into),
            effect: effect.map(Into::into),
            ..Toleration::default()
        };
        let cordon = Some("node.kubernetes.io/unschedulable");
        let cases = [
            (toleration(None, Some("Exists"), None), true),
            (toleration(cordon, Some("Exists"), Some("NoSchedule")), true),
            (toleration(cordon, None, Some("NoSchedule")), true),
            (toleration(cordon, Some("Exists"), Some("NoExecute")), false),
            (toleration(Some("dedicated"), Some("Exists"), None), false),
            (Toleration { value: Some("x".into()), ..toleration(cordon, Some("Equal"), None) }, false),
        ];
        for (toleration, expected) in cases {
            assert_eq!(tolerates_cordon(std::slice::from_ref(&toleration)), expected, "{toleration:?}");
        }
    }

    #[test]
    fn an_evacuation_tells_its_pod_whose_wish_it_is_and_what_blocks_it() {
        let seen = |finalizers: &[&str]| {
            let object = json!({
                "metadata": {"name": "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11-web-1", "finalizers": finalizers},
                "status": {"conditions": [
                    {"type": "Other", "status": "True", "reason": "X", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"},
                    {"type": "Blocked", "status": "True", "reason": "ServerBusy", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"},
                ]},
            });
            EvacuationSeen::new(serde_json::from_value(object).unwrap())
        };
        let ours = our_finalizer();
        let (with, without) = (seen(&["x", &ours]), seen(&["x"]));
        assert_eq!((with.of(), without.of()), (EvacuationOf::Us, EvacuationOf::Others));
        assert_eq!(with.finalizers_with_ours(false), ["x"]);
        assert_eq!(without.finalizers_with_ours(true), ["x", &ours]);
        assert_eq!(with.blocked.as_ref().map(|blocked| &*blocked.reason), Some("ServerBusy"));
        assert!(!with.forbids_cancellation);
        let forbids = json!({"metadata": {}, "status": {"evacuationCancellationPolicy": "Forbid"}});
        assert!(EvacuationSeen::new(serde_json::from_value(forbids).unwrap()).forbids_cancellation);
    }

    #[test]
    fn an_evacuator_at_work_has_a_turn_until_its_deadline() {
        let seen = |spec: Value, status: Value| {
            let object = json!({
                "metadata": {"name": "x", "creationTimestamp": "2026-01-01T00:00:10Z"}, "spec": spec, "status": status,
            });
            let turn = EvacuationSeen::new(serde_json::from_value(object).unwrap()).turn;
            turn.map(|turn| {
                let text = |time: Option<Timestamp>| time.map_or("-".into(), |time| time.to_string());
                let Turn { class, message, since, until, expected } = &*turn;
                format!("{class} {message:?} {} {until} {}", text(*since), text(*expected))
            })
        };
        let spec = json!({"progressDeadlineSeconds": 600});
        let active = |more: Value| {
            let mut status = json!({"activeEvacuatorClass": "a.example.com", "message": "copying"});
            status.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            status
        };
        assert_eq!(seen(spec.clone(), json!({})), None);
        assert_eq!(seen(spec.clone(), active(json!({"activeEvacuatorCompleted": true}))), None);
        assert_eq!(
            seen(spec.clone(), active(json!({}))).unwrap(),
            r#"a.example.com "copying" 2026-01-01T00:00:10Z 2026-01-01T00:11:00Z -"#,
            "without a report it counts from the creation"
        );
        let reported = |second: u32| {
            let time = format!("2026-01-01T01:00:{second:02}.5Z");
            seen(spec.clone(), active(json!({"evacuationProgressTimestamp": time})))
        };
        assert_eq!(reported(1).unwrap(), r#"a.example.com "copying" - 2026-01-01T01:11:00Z -"#);
        assert_eq!(reported(1), reported(59), "one that reports every second is news every minute");
        let expected = active(json!({"expectedEvacuationFinishTime": "2026-01-01T02:00:00Z"}));
        assert_eq!(
            seen(json!({}), expected).unwrap(),
            r#"a.example.com "copying" 2026-01-01T00:00:10Z 2026-01-01T00:31:00Z 2026-01-01T02:00:00Z"#
        );
    }

    #[test]
    fn what_others_write_is_kept_within_bounds() {
        let object = json!({
            "metadata": {"name": "x"},
            "status": {
                "activeEvacuatorClass": "a.example.com", "message": "m".repeat(32_768),
                "evacuationProgressTimestamp": "2026-01-01T00:00:00Z",
                "conditions": [{"type": "Blocked", "status": "True", "reason": "R".repeat(1_001),
                    "message": "m".repeat(32_768), "lastTransitionTime": "2026-01-01T00:00:00Z"}],
            },
        });
        let seen = EvacuationSeen::new(serde_json::from_value(object).unwrap());
        let blocked = seen.blocked.unwrap();
        assert_eq!(&*blocked.reason, "Other");
        assert!(blocked.message.starts_with("RRR") && blocked.message.len() <= bounded::MAX_TEXT);
        assert!(seen.turn.unwrap().message.len() <= bounded::MAX_TEXT);
    }

    #[test]
    fn a_deleted_evacuation_of_others_is_held_by_its_finalizers() {
        let held = |deleting: bool, finalizers: &[&str]| {
            let mut object = json!({"metadata": {"name": "x", "finalizers": finalizers}});
            if deleting {
                object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            }
            EvacuationSeen::new(serde_json::from_value(object).unwrap()).held()
        };
        let blocked = held(true, &["a/b", "c/d"]).unwrap();
        assert_eq!(&*blocked.reason, "EvacuationHeld");
        assert!(blocked.message.contains("held by a/b, c/d:"), "{}", blocked.message);
        assert_eq!(held(false, &["a/b"]), None);
        assert_eq!(held(true, &["a/b", &our_finalizer()]), None, "it goes on");
    }

    #[test]
    fn only_a_later_state_of_the_same_object_replaces_one() {
        let version = |uid: &str, version: &str| Version { uid: uid.into(), version: version.into() };
        for (old, new, expected) in [
            (version("a", "9"), version("a", "10"), true),
            (version("a", "10"), version("a", "9"), false),
            (version("a", "10"), version("a", "10"), false),
            (version("a", "9"), version("b", "10"), false),
            (version("a", "x"), version("a", "y"), true),
        ] {
            assert_eq!(old.is_followed_by(&new), expected, "{old:?} {new:?}");
        }
    }
}

//! Evacuation (KEP-4563): the wish that one pod leaves its node, and who is helping it to do so.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::core::Rule;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema;

/// How long an evacuator may stay silent unless the instigator says otherwise: half an hour.
pub const DEFAULT_PROGRESS_DEADLINE_SECONDS: i32 = 1800;

/// What is to be evacuated and by whom. Everything in it is fixed at creation.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[kube(
    group = "evacuation.coordination.k8s.io",
    version = "v1alpha1",
    kind = "Evacuation",
    plural = "evacuations",
    namespaced,
    shortname = "evac",
    category = "haulout",
    status = "EvacuationStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "Evacuation asks for one pod to leave its node. Evacuators that know the pod act first, by priority; if none of them helps, the pod is evicted through the Eviction API. The object is named after the pod: its UID, a dash, and at most 150 characters of its name. Finalizers that start with evacuation.coordination.k8s.io/instigator_ tell who asked.",
    selectable = ".spec.podRef.name",
    selectable = ".spec.podRef.uid",
    selectable = ".status.activeEvacuatorClass",
    printcolumn(name = "Pod", type_ = "string", json_path = ".spec.podRef.name", description = "The pod that is to leave."),
    printcolumn(name = "Evacuator", type_ = "string", json_path = ".status.activeEvacuatorClass", description = "The evacuator that is in charge; none means eviction."),
    printcolumn(name = "Blocked", type_ = "string", json_path = r#".status.conditions[?(@.type=="Blocked")].reason"#, description = "What keeps the pod from leaving; NotBlocked or Evacuating when nothing does any more."),
    printcolumn(name = "Failed Evictions", type_ = "integer", json_path = ".status.failedEvictionCounter", description = "How many attempts to evict the pod have failed."),
    printcolumn(name = "Expected", type_ = "string", json_path = ".status.expectedEvacuationFinishTime", description = "When the evacuator expects to be done.", priority = 1),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.message", description = "What is going on.", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = named_after_pod(),
    validation = Rule::new("!has(self.metadata.generateName)").message("metadata.generateName is not supported: name the Evacuation <pod UID>-<pod name>"),
    validation = counter_only_grows(),
    validation = active_class_is_an_evacuator(),
)]
#[x_kube(
    validation = schema::immutable("podRef", "an Evacuation belongs to one pod, create another for another pod"),
    validation = schema::immutable("progressDeadlineSeconds", "evacuators rely on it"),
    validation = schema::immutable_list("evacuators", "true", "they are resolved once, when the Evacuation is created"),
)]
pub struct EvacuationSpec {
    /// The pod that is to leave. Immutable.
    pub pod_ref: LocalPodReference,

    /// Who may act on this evacuation, highest priority first. Leave it empty: it is resolved at
    /// admission from the pod's annotations. With none, the pod is evicted. Immutable.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100))]
    #[x_kube(
        merge_strategy = ListMerge::Map(vec!["evacuatorClass".into()]),
        validation = Rule::new("self.filter(e, has(e.role) && e.role == 'controller').size() <= 1").message("only one evacuator can have the role controller"),
        validation = Rule::new("self.filter(e, !has(e.role) || e.role != 'controller').size() <= 99").message("at most 99 evacuators besides the one with the role controller are allowed"),
    )]
    pub evacuators: Vec<Evacuator>,

    /// How long, in seconds, the active evacuator may go without updating evacuationProgressTimestamp
    /// before the next one is given control. From 600 to 21600. Immutable.
    #[serde(default = "default_progress_deadline")]
    #[schemars(range(min = 600, max = 21600))]
    pub progress_deadline_seconds: i32,
}

impl Default for EvacuationSpec {
    fn default() -> Self {
        Self {
            pod_ref: LocalPodReference::default(),
            evacuators: Vec::new(),
            progress_deadline_seconds: DEFAULT_PROGRESS_DEADLINE_SECONDS,
        }
    }
}

fn default_progress_deadline() -> i32 {
    DEFAULT_PROGRESS_DEADLINE_SECONDS
}

/// A cut that would end in `-` or `.`, which no object name may, is shortened further.
fn named_after_pod() -> Rule {
    Rule::new(
        "self.metadata.name.startsWith(self.spec.podRef.uid + '-') && (size(self.spec.podRef.name) <= 150 \
         ? self.metadata.name.substring(37) == self.spec.podRef.name \
         : self.spec.podRef.name.substring(0, 150).startsWith(self.metadata.name.substring(37)) \
         && self.spec.podRef.name.substring(size(self.metadata.name) - 37, 150).matches('^[-.]*$'))",
    )
    .message(
        "metadata.name must be <spec.podRef.uid>-<spec.podRef.name>; of a longer pod name exactly the first 150 characters, without a trailing - or .",
    )
}

/// On the root, so that dropping the whole status and writing it anew is no way round it.
fn counter_only_grows() -> Rule {
    Rule::new(
        "!has(oldSelf.status) || !has(oldSelf.status.failedEvictionCounter) || (has(self.status) \
         && has(self.status.failedEvictionCounter) \
         && self.status.failedEvictionCounter >= oldSelf.status.failedEvictionCounter)",
    )
    .message("status.failedEvictionCounter can only grow")
}

fn active_class_is_an_evacuator() -> Rule {
    Rule::new(
        "!has(self.status) || !has(self.status.activeEvacuatorClass) || (has(self.spec.evacuators) \
         && self.spec.evacuators.exists(e, e.evacuatorClass == self.status.activeEvacuatorClass))",
    )
    .message("status.activeEvacuatorClass must be one of spec.evacuators")
}

/// Identifies one pod in the Evacuation's namespace.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalPodReference {
    /// Name of the pod.
    #[schemars(length(min = 1, max = 253), regex(pattern = schema::DNS_SUBDOMAIN))]
    pub name: String,
    /// UID of the pod: a pod that is made anew under the same name is another pod.
    #[schemars(length(max = 36), regex(pattern = schema::UID))]
    pub uid: String,
}

/// Someone who may act on an evacuation. Read from the pod's annotation
/// `evacuation.coordination.k8s.io/priority_${EVACUATOR_CLASS}: ${PRIORITY}/${ROLE}`.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("(has(self.role) && self.role == 'controller') == (self.priority == 10000)")
        .message("priority 10000 belongs to the role controller and to no other: give both or neither"),
    validation = Rule::new("self.evacuatorClass != 'nodemaintenance.k8s.io' && !self.evacuatorClass.endsWith('.nodemaintenance.k8s.io')")
        .message("evacuator classes in nodemaintenance.k8s.io are reserved for Haulout's own instigators"),
)]
pub struct Evacuator {
    /// DNS subdomain that identifies the evacuator, of at most 54 characters, such as foo.example.com.
    #[schemars(length(min = 1, max = 54), regex(pattern = schema::DNS_SUBDOMAIN))]
    pub evacuator_class: String,

    /// Higher priorities are asked first. The pod's managing controller always has 10000; others
    /// choose a value above or below that. From 0 to 100000.
    #[schemars(range(min = 0, max = 100_000))]
    pub priority: i32,

    /// What kind of evacuator it is. The value controller is reserved for the pod's managing controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub role: Option<String>,
}

/// How far an evacuation has come. Written by the active evacuator and the evacuation controller, so
/// that whoever writes it patches the fields that are its own.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct EvacuationStatus {
    /// The evacuator that is in charge. It adopts the evacuation by updating
    /// evacuationProgressTimestamp, or declines it by setting activeEvacuatorCompleted. Written only by
    /// the evacuation controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 54))]
    pub active_evacuator_class: Option<String>,

    /// Set to true by the active evacuator when it has done its part. The next one is then given
    /// control; with none left and the pod still there, the pod is evicted.
    #[serde(default)]
    pub active_evacuator_completed: bool,

    /// When the active evacuator last reported progress. Cannot be in the future.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evacuation_progress_timestamp: Option<Time>,

    /// When the active evacuator expects to be done; absent if it cannot tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_evacuation_finish_time: Option<Time>,

    /// Set to Forbid by an evacuator that cannot stop half-way: the evacuation then cannot be cancelled
    /// while the pod exists. Not reset when another evacuator takes over, which should reconsider it.
    #[serde(default)]
    pub evacuation_cancellation_policy: CancellationPolicy,

    /// How many attempts to evict the pod have failed, for whatever reason. Only grows.
    #[serde(default)]
    #[schemars(range(min = 0, max = i32::MAX))]
    pub failed_eviction_counter: i32,

    /// When an attempt to evict the pod last failed. Together with the counter it tells when the next
    /// attempt is due, whoever makes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failed_eviction_time: Option<Time>,

    /// What is going on, for people.
    #[serde(default)]
    #[schemars(length(max = 32768))]
    pub message: String,

    /// Blocked, and whatever evacuators want to share.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// Whether an evacuation can be cancelled.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CancellationPolicy {
    /// The evacuation is cancelled when its last instigator removes its finalizer.
    #[default]
    Allow,
    /// The evacuation goes on until the pod is gone.
    Forbid,
}

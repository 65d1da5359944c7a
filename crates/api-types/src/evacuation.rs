//! Evacuation (KEP-4563): a request that one pod leaves its node.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::core::Rule;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema;

/// The default of `spec.progressDeadlineSeconds`: half an hour.
pub const DEFAULT_PROGRESS_DEADLINE_SECONDS: i32 = 1800;

/// Specification of an Evacuation: the pod and its evacuators. Immutable.
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
    doc = "Evacuation requests that one pod leaves its node. The evacuators of the pod are activated one after the other, highest priority first. After the last one, or if there is none, the pod is evicted through the Eviction API. The name of an Evacuation is the UID of the pod, a dash, and at most 150 characters of the pod's name. Finalizers that start with evacuation.coordination.k8s.io/instigator_ show who requests the evacuation.",
    selectable = ".spec.podRef.name",
    selectable = ".spec.podRef.uid",
    selectable = ".status.activeEvacuatorClass",
    printcolumn(name = "Pod", type_ = "string", json_path = ".spec.podRef.name", description = "Pod that should leave."),
    printcolumn(name = "Evacuator", type_ = "string", json_path = ".status.activeEvacuatorClass", description = "Active evacuator, or the last one while the pod is being evicted."),
    printcolumn(name = "Blocked", type_ = "string", json_path = r#".status.conditions[?(@.type=="Blocked")].reason"#, description = "What blocks the pod. NotBlocked or Evacuating: nothing blocks it any more."),
    printcolumn(name = "Failed Evictions", type_ = "integer", json_path = ".status.failedEvictionCounter", description = "Number of failed evictions."),
    printcolumn(name = "Expected", type_ = "string", json_path = ".status.expectedEvacuationFinishTime", description = "When the evacuator expects to finish.", priority = 1),
    printcolumn(name = "Message", type_ = "string", json_path = ".status.message", description = "Current state, as text.", priority = 1),
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
    /// Pod that should leave. Immutable.
    pub pod_ref: LocalPodReference,

    /// Evacuators of the pod, highest priority first. Leave this empty: it is set at admission from the pod's annotations.
    /// Without evacuators, the pod is evicted. Immutable.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100))]
    #[x_kube(
        merge_strategy = ListMerge::Map(vec!["evacuatorClass".into()]),
        validation = Rule::new("self.filter(e, has(e.role) && e.role == 'controller').size() <= 1").message("only one evacuator can have the role controller"),
        validation = Rule::new("self.filter(e, !has(e.role) || e.role != 'controller').size() <= 99").message("at most 99 evacuators besides the one with the role controller are allowed"),
    )]
    pub evacuators: Vec<Evacuator>,

    /// Maximum time in seconds between two updates of evacuationProgressTimestamp by the active evacuator. After that, the
    /// next evacuator becomes active. From 600 to 21600. Immutable.
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

/// Object names must not end with `-` or `.`, so these are removed at the end of a shortened name.
fn named_after_pod() -> Rule {
    Rule::new(
        "self.metadata.name.startsWith(self.spec.podRef.uid + '-') && (size(self.spec.podRef.name) <= 150 \
         ? self.metadata.name.substring(37) == self.spec.podRef.name \
         : self.spec.podRef.name.substring(0, 150).startsWith(self.metadata.name.substring(37)) \
         && self.spec.podRef.name.substring(size(self.metadata.name) - 37, 150).matches('^[-.]*$'))",
    )
    .message(
        "metadata.name must be <spec.podRef.uid>-<spec.podRef.name>; if the pod name is longer than 150 characters, use its first 150 without a trailing - or .",
    )
}

/// The rule is on the root object, because otherwise removing the whole status would bypass it.
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
    /// UID of the pod. A new pod with the same name is a different pod.
    #[schemars(length(max = 36), regex(pattern = schema::UID))]
    pub uid: String,
}

/// Program that knows how to move the pod. Set from the pod's annotation
/// `evacuation.coordination.k8s.io/priority_${EVACUATOR_CLASS}: ${PRIORITY}/${ROLE}`.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("(has(self.role) && self.role == 'controller') == (self.priority == 10000)")
        .message("priority 10000 is reserved for the role controller: set both or neither"),
    validation = Rule::new("self.evacuatorClass != 'nodemaintenance.k8s.io' && !self.evacuatorClass.endsWith('.nodemaintenance.k8s.io')")
        .message("evacuator classes in nodemaintenance.k8s.io are reserved for Haulout's own instigators"),
)]
pub struct Evacuator {
    /// DNS subdomain that identifies the evacuator, such as foo.example.com. At most 54 characters.
    #[schemars(length(min = 1, max = 54), regex(pattern = schema::DNS_SUBDOMAIN))]
    pub evacuator_class: String,

    /// Evacuators with a higher priority become active first. The pod's managing controller always has 10000; others choose
    /// a higher or lower value. From 0 to 100000.
    #[schemars(range(min = 0, max = 100_000))]
    pub priority: i32,

    /// Role of the evacuator. The value controller is reserved for the pod's managing controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub role: Option<String>,
}

/// Status of an evacuation. The active evacuator and the evacuation controller both write it, so each patches only its own
/// fields. An evacuator needs permission to report: the verb report on the resource evacuators, with its class as name.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct EvacuationStatus {
    /// Active evacuator. It accepts the evacuation by updating evacuationProgressTimestamp, or declines it by setting
    /// activeEvacuatorCompleted. Written only by the evacuation controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 54))]
    pub active_evacuator_class: Option<String>,

    /// Set to true by the active evacuator when it has completed. The next evacuator then becomes active. After the last one,
    /// the pod is evicted if it still exists.
    #[serde(default)]
    pub active_evacuator_completed: bool,

    /// When the active evacuator last reported progress. A time in the future is replaced by the current time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evacuation_progress_timestamp: Option<Time>,

    /// When the active evacuator expects to finish. Absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_evacuation_finish_time: Option<Time>,

    /// Set to Forbid by an active evacuator that cannot stop: the evacuation then cannot be cancelled while the pod exists.
    /// It stays when the evacuator completes, and the next one can change it. It is set to Allow when an evacuator misses its
    /// progress deadline.
    #[serde(default)]
    pub evacuation_cancellation_policy: CancellationPolicy,

    /// Number of failed evictions, for any reason. Never decreases.
    #[serde(default)]
    #[schemars(range(min = 0, max = i32::MAX))]
    pub failed_eviction_counter: i32,

    /// When an eviction last failed. Together with failedEvictionCounter, it determines when the next eviction is attempted,
    /// also after a restart of the controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failed_eviction_time: Option<Time>,

    /// Current state, as text for people.
    #[serde(default)]
    #[schemars(length(max = 32768))]
    pub message: String,

    /// Blocked, and at most 15 conditions that evacuators add.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::evacuation_conditions")]
    pub conditions: Vec<Condition>,
}

/// Whether an evacuation can be cancelled.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CancellationPolicy {
    /// The evacuation is cancelled when its last instigator removes its finalizer.
    #[default]
    Allow,
    /// The evacuation continues until the pod is gone.
    Forbid,
}

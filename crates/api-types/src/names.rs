//! The names of the API: groups, annotations, finalizers, evacuator classes, condition types, reasons. Logs, events, metrics
//! and docs use the same names.

/// API group of [`NodeMaintenance`](crate::NodeMaintenance) and [`DrainRule`](crate::DrainRule).
pub const NODE_MAINTENANCE_GROUP: &str = "nodemaintenance.k8s.io";
/// API group of [`Evacuation`](crate::Evacuation). (CRDs in `coordination.k8s.io` itself are never served.)
pub const EVACUATION_GROUP: &str = "evacuation.coordination.k8s.io";
/// The version of both groups.
pub const VERSION: &str = "v1alpha1";

/// Prefix of a pod's evacuator annotation, before the evacuator class.
pub const EVACUATOR_ANNOTATION_PREFIX: &str = "evacuation.coordination.k8s.io/priority_";
/// Prefix of an instigator finalizer, before the instigator's subdomain.
pub const INSTIGATOR_FINALIZER_PREFIX: &str = "evacuation.coordination.k8s.io/instigator_";

/// The kubelet marks the mirror of a static pod with this annotation.
pub const MIRROR_POD_ANNOTATION: &str = "kubernetes.io/config.mirror";
/// On a Node under maintenance: drain targets and message as JSON.
pub const MAINTENANCE_STATUS_ANNOTATION: &str = "nodemaintenance.k8s.io/maintenance-status";
/// On a Node under maintenance: its state before the maintenance as JSON, to restore it later.
pub const BEFORE_MAINTENANCE_ANNOTATION: &str = "nodemaintenance.k8s.io/before-maintenance";
/// On a Node, set by an admin: drains do not wait until its volumes are detached.
pub const EXCLUDE_VOLUME_DETACH_ANNOTATION: &str = "nodemaintenance.k8s.io/exclude-wait-for-volume-detach";
/// On an Evacuation of the maintenance controller: the NodeMaintenances that evacuate the pod, with their reasons, as text.
pub const MAINTENANCES_ANNOTATION: &str = "nodemaintenance.k8s.io/maintenances";
/// Keeps cluster-autoscaler from removing the node while it is under maintenance.
pub const SCALE_DOWN_DISABLED_ANNOTATION: &str = "cluster-autoscaler.kubernetes.io/scale-down-disabled";
/// Keeps Karpenter from removing the node while it is under maintenance.
pub const DO_NOT_DISRUPT_ANNOTATION: &str = "karpenter.sh/do-not-disrupt";
/// How Argo CD compares an object with Git. Read from objects in the cluster, too.
pub const ARGO_CD_COMPARE_OPTIONS_ANNOTATION: &str = "argocd.argoproj.io/compare-options";
/// How Argo CD synchronizes an object with Git. Read from objects in the cluster, too.
pub const ARGO_CD_SYNC_OPTIONS_ANNOTATION: &str = "argocd.argoproj.io/sync-options";
/// Pod label with which the pod's owner overrides every drain rule: `skip` or `wait-completed`.
pub const DRAIN_LABEL: &str = "cluster.x-k8s.io/drain";
/// On a Node: when the taint manager first observed `NoExecute` taints without `timeAdded`, as JSON.
pub const TAINTS_FIRST_SEEN_ANNOTATION: &str = "nodemaintenance.k8s.io/taints-first-seen";
/// Pod label with which the pod's owner requests a gentler action than the taint manager's policy: `Evict` or `Evacuate`.
pub const TAINT_ACTION_LABEL: &str = "nodemaintenance.k8s.io/taint-action";
/// Label of pods of a Deployment. Pods of a ReplicaSet without a Deployment do not have it.
pub const POD_TEMPLATE_HASH_LABEL: &str = "pod-template-hash";

/// On a pod that belongs directly to its Deployment while its ReplicaSet creates a replacement: where it belonged before, as JSON.
pub const FORMER_OWNER_ANNOTATION: &str = "evacuation.coordination.k8s.io/former-owner";
/// On a Deployment or a Namespace, with the value `false`: pods are evicted without a replacement.
pub const REPLACE_ANNOTATION: &str = "evacuation.coordination.k8s.io/replace-before-eviction";
/// On a pod: a ReplicaSet that has too many pods deletes those with the lowest cost first.
pub const POD_DELETION_COST_ANNOTATION: &str = "controller.kubernetes.io/pod-deletion-cost";

/// On a NodeMaintenance after Idle: it must be completed (uncordon, cancel) before it is removed.
pub const COMPLETION_FINALIZER: &str = "nodemaintenance.k8s.io/maintenance-completion";

/// Subdomains of Haulout's own instigators.
pub mod instigator {
    /// The maintenance controller.
    pub const NODE_MAINTENANCE: &str = "nodemaintenance.k8s.io";
    /// The taint manager, under the policy `Evacuate`.
    pub const TAINT_MANAGER: &str = "taint-manager.nodemaintenance.k8s.io";
    /// The workload evacuator, for pods that no ReplicaSet can take back.
    pub const WORKLOAD_EVACUATOR: &str = "workload-evacuator.nodemaintenance.k8s.io";
}

/// Evacuator classes of the built-in workload controllers.
pub mod class {
    /// Pods of a Deployment.
    pub const DEPLOYMENT: &str = "deployment.apps.k8s.io";
    /// Pods of a StatefulSet.
    pub const STATEFUL_SET: &str = "statefulset.apps.k8s.io";
    /// Pods of a DaemonSet.
    pub const DAEMON_SET: &str = "daemonset.apps.k8s.io";

    /// The classes that Haulout can serve, with the service that is their evacuator.
    pub const SERVICES: &[(&str, &str)] = &[(DEPLOYMENT, "workload-evacuator")];
}

/// The role that is reserved for the managing controller of a pod.
pub const CONTROLLER_ROLE: &str = "controller";
/// The priority that is reserved for the managing controller of a pod.
pub const CONTROLLER_PRIORITY: i32 = 10_000;

/// Condition types.
pub mod condition {
    /// NodeMaintenance and Node: every pod that the drain has to remove has left.
    pub const DRAINED: &str = "Drained";
    /// NodeMaintenance: every selected node is cordoned.
    pub const CORDONED: &str = "Cordoned";
    /// NodeMaintenance and Evacuation: something keeps pods from leaving. The reason says what.
    pub const BLOCKED: &str = "Blocked";
    /// Node: at least one NodeMaintenance in a stage after Idle selects it.
    pub const MAINTENANCE_IN_PROGRESS: &str = "MaintenanceInProgress";
    /// Node: pods are being evacuated from it.
    pub const DRAIN_IN_PROGRESS: &str = "DrainInProgress";
    /// Pod: it is about to be deleted, and why. Set right before the deletion.
    pub const DISRUPTION_TARGET: &str = "DisruptionTarget";
}

/// Reasons of conditions and blockers: why a pod has not left yet.
pub mod reason {
    /// Defines reasons, and the list of them all.
    macro_rules! reasons {
        ($($(#[$doc:meta])* pub const $name:ident: &str = $text:literal;)+) => {
            $($(#[$doc])* pub const $name: &str = $text;)+

            /// All reasons. Reasons in objects of other programs are mapped to one of these or [`OTHER`], which bounds the
            /// labels of metrics.
            pub const ALL: &[&str] = &[$($name),+];
        };
    }

    reasons! {
        /// The pod's PodDisruptionBudget allows no further disruption now.
        pub const BUDGET_EXHAUSTED: &str = "DisruptionBudgetExhausted";
        /// The PodDisruptionBudget has changed and its status is outdated.
        pub const BUDGET_STALE: &str = "DisruptionBudgetStale";
        /// More than one PodDisruptionBudget selects the pod, which the Eviction API rejects.
        pub const SEVERAL_BUDGETS: &str = "SeveralDisruptionBudgets";
        /// The pod's namespace is being deleted, and evictions in it are forbidden.
        pub const NAMESPACE_TERMINATING: &str = "NamespaceTerminating";
        /// An admission webhook, a policy or RBAC rejects the eviction.
        pub const EVICTION_FORBIDDEN: &str = "EvictionForbidden";
        /// A webhook rejects the eviction because another program moves the pod, as KubeVirt does during a live migration.
        pub const HANDLED_ELSEWHERE: &str = "HandledElsewhere";
        /// The API server limits the rate of requests, failed, or did not answer.
        pub const SERVER_BUSY: &str = "ServerBusy";
        /// The evacuation is over, and finalizers hold the Evacuation.
        pub const EVACUATION_HELD: &str = "EvacuationHeld";
        /// No node has room for the replacement of the pod.
        pub const NO_ROOM: &str = "NoRoomForReplacement";
        /// The pod was created on the node after the drain started.
        pub const RETURNS_TO_NODE: &str = "ReturnsToNode";
        /// The pod should have terminated already.
        pub const TERMINATING: &str = "Terminating";
        /// The pod belongs to a DaemonSet or is static, and has no evacuator left.
        pub const UNSUPPORTED: &str = "Unsupported";
        /// A volume of a pod that has left is still attached to the node.
        pub const VOLUMES_ATTACHED: &str = "VolumesAttached";
        /// A DrainRule or the pod's label requires waiting until the pod has finished.
        pub const WAITING_FOR_COMPLETION: &str = "WaitingForCompletion";
        /// An unreadable DrainRule might exclude the pod.
        pub const DRAIN_RULE_UNREADABLE: &str = "DrainRuleUnreadable";
        /// A DrainRule might exclude the pod, depending on the labels of its namespace, which are not known yet.
        pub const NAMESPACE_UNKNOWN: &str = "NamespaceUnknown";
        /// Another maintenance on the same nodes has to progress first.
        pub const WAITING_FOR_MAINTENANCE: &str = "WaitingForMaintenance";
        /// Pods are leaving and nothing blocks them.
        pub const EVACUATING: &str = "Evacuating";
        /// The drain targets of the node do not fit into its annotation, so further pods stay.
        pub const DRAIN_TARGETS_TOO_LARGE: &str = "DrainTargetsTooLarge";
        /// A pod of Haulout itself stays, because no other node accepts it.
        pub const NO_NODE_FOR_CONTROLLER: &str = "NoNodeForController";
        /// Nothing keeps pods from leaving.
        pub const NOT_BLOCKED: &str = "NotBlocked";
        /// Nothing is left to evacuate.
        pub const COMPLETE: &str = "Complete";
        /// Not all nodes are cordoned yet.
        pub const CORDONING: &str = "Cordoning";
        /// Somebody uncordons a node repeatedly. It is cordoned again after a growing delay.
        pub const CORDON_RACE: &str = "CordonRace";
        /// The nodes are cordoned.
        pub const CORDONED: &str = "Cordoned";
        /// The maintenance is complete, and the nodes are schedulable unless somebody else holds them.
        pub const RELEASED: &str = "Released";
        /// The controller cannot parse the object, and changes nothing.
        pub const UNREADABLE: &str = "Unreadable";
        /// The selector has never matched a node.
        pub const NO_NODES: &str = "NoNodes";
        /// The last selected node was deleted or relabelled before it was drained.
        pub const NO_NODES_LEFT: &str = "NoNodesLeft";
        /// The selector names a node that does not exist.
        pub const NODE_MISSING: &str = "NodeMissing";
        /// An evacuator is active for the pod.
        pub const EVACUATOR_ACTIVE: &str = "EvacuatorActive";
        /// The pod is terminating, and its grace period is not over.
        pub const TERMINATION_GRACE_PERIOD: &str = "TerminationGracePeriod";
        /// The pod gets an Evacuation when its node is cordoned and its annotation lists the pod's target.
        pub const WAITING_FOR_NODE: &str = "WaitingForNode";
        /// The pod's Evacuation is about to be created.
        pub const EVACUATION_PENDING: &str = "EvacuationPending";
        /// The pod has an Evacuation, and the evacuation controller has not acted on it yet.
        pub const EVACUATION_REQUESTED: &str = "EvacuationRequested";
        /// A DrainRule orders other pods on the node before this pod.
        pub const WAITING_FOR_ORDER: &str = "WaitingForOrder";
        /// No evacuation controller has renewed its Lease, so no evacuator is activated and no pod is evicted.
        pub const EVACUATION_CONTROLLER_UNAVAILABLE: &str = "EvacuationControllerUnavailable";
        /// The API server rejects a write of the pod's Evacuation.
        pub const EVACUATION_REJECTED: &str = "EvacuationRejected";
        /// The API server rejects a write of the node.
        pub const NODE_UPDATE_REJECTED: &str = "NodeUpdateRejected";
        /// The API server rejects a write of the NodeMaintenance.
        pub const MAINTENANCE_UPDATE_REJECTED: &str = "MaintenanceUpdateRejected";
        /// A reason of another program that Haulout does not know.
        pub const OTHER: &str = "Other";
    }

    /// Maps unknown reasons to [`OTHER`].
    pub fn known(reason: &str) -> &'static str {
        ALL.iter().find(|known| **known == reason).copied().unwrap_or(OTHER)
    }
}

/// Reasons of the events that our services emit.
pub mod event {
    /// NodeMaintenance: a new stage started.
    pub const STAGE_STARTED: &str = "StageStarted";
    /// NodeMaintenance: somebody uncordons a node under maintenance repeatedly.
    pub const CORDON_RACE: &str = "CordonRace";
    /// NodeMaintenance: an older maintenance has already drained pods of later entries of this plan.
    pub const FAST_FORWARDED: &str = "FastForwarded";
    /// NodeMaintenance: a node was cordoned before the maintenance and stays cordoned.
    pub const LEFT_CORDONED: &str = "LeftCordoned";
    /// NodeMaintenance and Evacuation: a blocker has appeared.
    pub const BLOCKED: &str = "Blocked";
    /// NodeMaintenance and Evacuation: the last blocker is gone.
    pub const UNBLOCKED: &str = "Unblocked";
    /// NodeMaintenance, DrainRule and Node: the controller cannot parse it, for example after a downgrade.
    pub const UNREADABLE: &str = "Unreadable";
    /// NodeMaintenance: the drain continues although volumes are attached to a node.
    pub const VOLUMES_IGNORED: &str = "VolumesIgnored";
    /// NodeMaintenance: all selected nodes are drained.
    pub const DRAINED: &str = "Drained";
    /// Evacuation: the first evacuator is active.
    pub const EVACUATOR_ACTIVATED: &str = "EvacuatorActivated";
    /// Evacuation: the next evacuator is active.
    pub const EVACUATOR_SWITCHED: &str = "EvacuatorSwitched";
    /// Evacuation: no evacuator is left, so the pod is evicted.
    pub const EVICTING: &str = "Evicting";
    /// Evacuation: the pod is gone.
    pub const EVACUATED: &str = "Evacuated";
    /// Evacuation: all instigators withdrew.
    pub const CANCELLED: &str = "Cancelled";
    /// Pod: it has to leave a tainted node, or no longer has to. Kubernetes uses the same reason.
    pub const TAINT_MANAGER_EVICTION: &str = "TaintManagerEviction";
    /// Pod: removing it from a tainted node failed and is retried.
    pub const TAINT_EVICTION_FAILED: &str = "TaintEvictionFailed";
    /// Pod: it is stuck in termination on an unreachable node and is force-deleted.
    pub const FORCED_DELETION: &str = "ForcedDeletion";
    /// Deployment: a pod is replaced before its eviction.
    pub const POD_REPLACED: &str = "PodReplaced";
    /// Deployment: a pod is evicted without a replacement.
    pub const POD_NOT_REPLACED: &str = "PodNotReplaced";
    /// Deployment: the evacuation of a pod was cancelled, and the pod stays.
    pub const REPLACEMENT_CANCELLED: &str = "ReplacementCancelled";
    /// The taint manager's own pod: another program acts on the same taints.
    pub const CONFLICTING_TAINT_EVICTION: &str = "ConflictingTaintEviction";
    /// The taint manager's own pod: a new policy is invalid, and the previous policy is kept.
    pub const POLICY_REJECTED: &str = "PolicyRejected";
}

#[cfg(test)]
mod tests {
    use super::reason;

    /// A constant that is missing from the list would be mapped to `Other`.
    #[test]
    fn every_reason_is_listed() {
        let (_, rest) = include_str!("names.rs").split_once("pub mod reason {").unwrap();
        let (module, _) = rest.split_once("\n}").unwrap();
        let constants = module.lines().filter_map(|line| line.trim().strip_prefix("pub const "));
        let words = constants.filter_map(|line| line.split_once(": &str = \"")?.1.strip_suffix("\";"));
        let words: Vec<_> = words.collect();
        assert!(words.contains(&reason::BUDGET_EXHAUSTED));
        for word in words {
            assert_eq!(reason::known(word), word, "add it to reason::ALL");
        }
        assert_eq!(reason::known("whatever"), reason::OTHER);
    }
}

//! The well-known names of the API: groups, annotations, finalizers, evacuator classes, condition
//! types, reasons. Each stands here once; logs, events, metrics and docs use the same word.

/// API group of [`NodeMaintenance`](crate::NodeMaintenance) and [`DrainRule`](crate::DrainRule).
pub const NODE_MAINTENANCE_GROUP: &str = "nodemaintenance.k8s.io";
/// API group of [`Evacuation`](crate::Evacuation). (CRDs in `coordination.k8s.io` itself are never served.)
pub const EVACUATION_GROUP: &str = "evacuation.coordination.k8s.io";
/// The one version of both groups.
pub const VERSION: &str = "v1alpha1";

/// What comes before the evacuator class in the key of a pod's evacuator annotation.
pub const EVACUATOR_ANNOTATION_PREFIX: &str = "evacuation.coordination.k8s.io/priority_";
/// What comes before the instigator's subdomain in an instigator finalizer.
pub const INSTIGATOR_FINALIZER_PREFIX: &str = "evacuation.coordination.k8s.io/instigator_";

/// The kubelet marks the mirror of a static pod with this annotation.
pub const MIRROR_POD_ANNOTATION: &str = "kubernetes.io/config.mirror";
/// On a Node under maintenance: drain targets and message as JSON.
pub const MAINTENANCE_STATUS_ANNOTATION: &str = "nodemaintenance.k8s.io/maintenance-status";
/// On a Node under maintenance: how it was before, as JSON, so that it can be put back.
pub const BEFORE_MAINTENANCE_ANNOTATION: &str = "nodemaintenance.k8s.io/before-maintenance";
/// On a Node, set by its admin: a drain of it does not wait until volumes are detached.
pub const EXCLUDE_VOLUME_DETACH_ANNOTATION: &str = "nodemaintenance.k8s.io/exclude-wait-for-volume-detach";
/// On an Evacuation that the maintenance controller wants: the NodeMaintenances for which the pod leaves, with their
/// reasons, for people.
pub const MAINTENANCES_ANNOTATION: &str = "nodemaintenance.k8s.io/maintenances";
/// Keeps cluster-autoscaler from removing the node while it is under maintenance.
pub const SCALE_DOWN_DISABLED_ANNOTATION: &str = "cluster-autoscaler.kubernetes.io/scale-down-disabled";
/// Keeps Karpenter from removing the node while it is under maintenance.
pub const DO_NOT_DISRUPT_ANNOTATION: &str = "karpenter.sh/do-not-disrupt";
/// Pod label with which the pod's owner overrides every drain rule: `skip` or `wait-completed`.
pub const DRAIN_LABEL: &str = "cluster.x-k8s.io/drain";
/// On a Node: when those of its `NoExecute` taints that do not say so themselves were first seen, as JSON.
pub const TAINTS_FIRST_SEEN_ANNOTATION: &str = "nodemaintenance.k8s.io/taints-first-seen";
/// Pod label with which the pod's owner asks to leave a tainted node in a gentler way than the taint
/// manager's policy has it: `Evict` or `Evacuate`.
pub const TAINT_ACTION_LABEL: &str = "nodemaintenance.k8s.io/taint-action";
/// A Deployment's pods carry this label; pods of a bare ReplicaSet do not.
pub const POD_TEMPLATE_HASH_LABEL: &str = "pod-template-hash";

/// On a NodeMaintenance beyond Idle: its completion (uncordon, cancel) must run before it goes.
pub const COMPLETION_FINALIZER: &str = "nodemaintenance.k8s.io/maintenance-completion";

/// Subdomains under which our own services ask for evacuations.
pub mod instigator {
    /// The maintenance controller.
    pub const NODE_MAINTENANCE: &str = "nodemaintenance.k8s.io";
    /// The taint manager, under the policy `Evacuate`.
    pub const TAINT_MANAGER: &str = "taint-manager.nodemaintenance.k8s.io";
}

/// Evacuator classes of the built-in workload controllers.
pub mod class {
    /// Pods of a Deployment.
    pub const DEPLOYMENT: &str = "deployment.apps.k8s.io";
    /// Pods of a StatefulSet.
    pub const STATEFUL_SET: &str = "statefulset.apps.k8s.io";
    /// Pods of a DaemonSet.
    pub const DAEMON_SET: &str = "daemonset.apps.k8s.io";
}

/// The role that is reserved for the managing controller of a pod.
pub const CONTROLLER_ROLE: &str = "controller";
/// The priority that the managing controller always has, and nobody else.
pub const CONTROLLER_PRIORITY: i32 = 10_000;

/// Condition types.
pub mod condition {
    /// NodeMaintenance and Node: every pod that the drain has to remove has left.
    pub const DRAINED: &str = "Drained";
    /// NodeMaintenance: every selected node is cordoned.
    pub const CORDONED: &str = "Cordoned";
    /// NodeMaintenance and Evacuation: something keeps pods from leaving; the reason says what.
    pub const BLOCKED: &str = "Blocked";
    /// Node: at least one NodeMaintenance beyond Idle selects it.
    pub const MAINTENANCE_IN_PROGRESS: &str = "MaintenanceInProgress";
    /// Node: pods are being evacuated from it.
    pub const DRAIN_IN_PROGRESS: &str = "DrainInProgress";
    /// Pod: it is about to be removed, and why. Set right before the deletion.
    pub const DISRUPTION_TARGET: &str = "DisruptionTarget";
}

/// Reasons of conditions and blockers: why a pod has not left yet.
pub mod reason {
    /// Defines reasons, and the list of them all.
    macro_rules! reasons {
        ($($(#[$doc:meta])* pub const $name:ident: &str = $text:literal;)+) => {
            $($(#[$doc])* pub const $name: &str = $text;)+

            /// All of them: what is read of others' objects is one of these or [`OTHER`], so that neither a status nor
            /// a metric can be flooded.
            pub const ALL: &[&str] = &[$($name),+];
        };
    }

    reasons! {
        /// The pod's PodDisruptionBudget allows no further disruption now.
        pub const BUDGET_EXHAUSTED: &str = "DisruptionBudgetExhausted";
        /// The PodDisruptionBudget has changed and its status has not caught up.
        pub const BUDGET_STALE: &str = "DisruptionBudgetStale";
        /// More than one PodDisruptionBudget selects the pod, which the Eviction API refuses to judge.
        pub const SEVERAL_BUDGETS: &str = "SeveralDisruptionBudgets";
        /// The pod's namespace is being deleted, and evictions in it are forbidden.
        pub const NAMESPACE_TERMINATING: &str = "NamespaceTerminating";
        /// Another admission webhook or policy refused the eviction.
        pub const EVICTION_FORBIDDEN: &str = "EvictionForbidden";
        /// Somebody else moves the pod and refuses evictions meanwhile, as KubeVirt does during a live migration.
        pub const HANDLED_ELSEWHERE: &str = "HandledElsewhere";
        /// The API server asked us to slow down, failed, or did not answer.
        pub const SERVER_BUSY: &str = "ServerBusy";
        /// The evacuation has ended, and finalizers keep its Evacuation from being removed.
        pub const EVACUATION_HELD: &str = "EvacuationHeld";
        /// The pod tolerates the cordon and comes back to the node each time it leaves.
        pub const RETURNS_TO_NODE: &str = "ReturnsToNode";
        /// The pod is terminating and does not finish.
        pub const TERMINATING: &str = "Terminating";
        /// The pod's type has no evacuator in this installation, so it is left alone.
        pub const UNSUPPORTED: &str = "Unsupported";
        /// A volume of a pod that has left is still attached to the node.
        pub const VOLUMES_ATTACHED: &str = "VolumesAttached";
        /// A drain rule says to wait until the pod has finished by itself.
        pub const WAITING_FOR_COMPLETION: &str = "WaitingForCompletion";
        /// A drain rule that cannot be read may say that the pod stays.
        pub const DRAIN_RULE_UNREADABLE: &str = "DrainRuleUnreadable";
        /// Drain rules ask for the labels of the pod's namespace, which are not known yet.
        pub const NAMESPACE_UNKNOWN: &str = "NamespaceUnknown";
        /// An older maintenance on the same nodes has to get further first.
        pub const WAITING_FOR_MAINTENANCE: &str = "WaitingForMaintenance";
        /// Pods are on their way out and nothing holds them up.
        pub const EVACUATING: &str = "Evacuating";
        /// The drain targets of the node do not fit into its annotation, and pods that are not announced stay.
        pub const DRAIN_TARGETS_TOO_LARGE: &str = "DrainTargetsTooLarge";
        /// A pod of Haulout itself stays, because no other node would take it.
        pub const NO_NODE_FOR_CONTROLLER: &str = "NoNodeForController";
        /// Nothing keeps pods from leaving.
        pub const NOT_BLOCKED: &str = "NotBlocked";
        /// Nothing is left to evacuate.
        pub const COMPLETE: &str = "Complete";
        /// The nodes are made unschedulable, not all of them are yet.
        pub const CORDONING: &str = "Cordoning";
        /// Somebody makes a node schedulable again and again, and its cordon is put back after a growing pause.
        pub const CORDON_RACE: &str = "CordonRace";
        /// The nodes are unschedulable.
        pub const CORDONED: &str = "Cordoned";
        /// The maintenance is over, and the nodes are schedulable unless somebody else holds them.
        pub const RELEASED: &str = "Released";
        /// The controller cannot read what is asked for, and leaves everything as it is.
        pub const NOT_FOLLOWED: &str = "NotFollowed";
        /// The selector has never matched a node.
        pub const NO_NODES: &str = "NoNodes";
        /// Every node that was selected was deleted or relabelled before it was drained.
        pub const NO_NODES_LEFT: &str = "NoNodesLeft";
        /// The selector names a node that does not exist.
        pub const NODE_MISSING: &str = "NodeMissing";
        /// An evacuator is in charge of the pod and at work.
        pub const EVACUATOR_ACTIVE: &str = "EvacuatorActive";
        /// The pod is terminating, and its grace period is not over.
        pub const TERMINATION_GRACE_PERIOD: &str = "TerminationGracePeriod";
        /// The pod is to get an Evacuation once its node is cordoned and announces that.
        pub const WAITING_FOR_NODE: &str = "WaitingForNode";
        /// The pod is about to get an Evacuation of the maintenance controller.
        pub const EVACUATION_PENDING: &str = "EvacuationPending";
        /// The pod has an Evacuation, and the evacuation controller has not acted on it yet.
        pub const EVACUATION_REQUESTED: &str = "EvacuationRequested";
        /// A drain rule has other pods leave the node before this one.
        pub const WAITING_FOR_ORDER: &str = "WaitingForOrder";
        /// No evacuation controller leads, so no Evacuation makes progress.
        pub const EVACUATION_CONTROLLER_UNAVAILABLE: &str = "EvacuationControllerUnavailable";
        /// The API server refuses the pod's Evacuation, or a change of it.
        pub const EVACUATION_REFUSED: &str = "EvacuationRefused";
        /// The API server refuses a change of the node.
        pub const NODE_UPDATE_REFUSED: &str = "NodeUpdateRefused";
        /// The API server refuses a change of the NodeMaintenance.
        pub const MAINTENANCE_UPDATE_REFUSED: &str = "MaintenanceUpdateRefused";
        /// A reason that somebody else has written and that is none of these.
        pub const OTHER: &str = "Other";
    }

    /// The reason itself if it is one of ours, and [`OTHER`] if it is not.
    pub fn known(reason: &str) -> &'static str {
        ALL.iter().find(|known| **known == reason).copied().unwrap_or(OTHER)
    }
}

/// Reasons of the events that our services emit.
pub mod event {
    /// NodeMaintenance: a new stage began.
    pub const STAGE_STARTED: &str = "StageStarted";
    /// NodeMaintenance: somebody makes a node under maintenance schedulable again and again.
    pub const CORDON_RACE: &str = "CordonRace";
    /// NodeMaintenance: an older maintenance had already drained further than this plan would have.
    pub const FAST_FORWARDED: &str = "FastForwarded";
    /// NodeMaintenance: a node that someone else had cordoned stays cordoned at the end.
    pub const LEFT_CORDONED: &str = "LeftCordoned";
    /// NodeMaintenance and Evacuation: a blocker has appeared.
    pub const BLOCKED: &str = "Blocked";
    /// NodeMaintenance and Evacuation: the last blocker is gone.
    pub const UNBLOCKED: &str = "Unblocked";
    /// NodeMaintenance, DrainRule and Node: the controller cannot read it, as may be after a downgrade.
    pub const NOT_FOLLOWED: &str = "NotFollowed";
    /// NodeMaintenance: volumes are still attached to a node, and are not waited for, as an admin wishes.
    pub const VOLUMES_IGNORED: &str = "VolumesIgnored";
    /// NodeMaintenance: all selected nodes are drained.
    pub const DRAINED: &str = "Drained";
    /// Evacuation: the first evacuator has been given control.
    pub const EVACUATOR_ACTIVATED: &str = "EvacuatorActivated";
    /// Evacuation: control has passed to the next evacuator.
    pub const EVACUATOR_SWITCHED: &str = "EvacuatorSwitched";
    /// Evacuation: no evacuator is left, the Eviction API is being tried.
    pub const EVICTING: &str = "Evicting";
    /// Evacuation: the pod is gone.
    pub const EVACUATED: &str = "Evacuated";
    /// Evacuation: nobody wants it any longer.
    pub const CANCELLED: &str = "Cancelled";
    /// Pod: it has to leave a tainted node, or does not have to any longer. The word is Kubernetes' own.
    pub const TAINT_MANAGER_EVICTION: &str = "TaintManagerEviction";
    /// Pod: it could not be made to leave a tainted node, and will be tried again.
    pub const TAINT_EVICTION_FAILED: &str = "TaintEvictionFailed";
    /// Pod: it hung in termination on a node that cannot be asked, and is deleted by force.
    pub const FORCED_DELETION: &str = "ForcedDeletion";
    /// The taint manager's own pod: somebody else acts on the same taints.
    pub const RIVAL_TAINT_EVICTION: &str = "RivalTaintEviction";
    /// The taint manager's own pod: a new policy cannot be used, and the one of before stays in force.
    pub const POLICY_REFUSED: &str = "PolicyRefused";
}

#[cfg(test)]
mod tests {
    use super::reason;

    /// A constant that is missing in the list would be shown as `Other`.
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

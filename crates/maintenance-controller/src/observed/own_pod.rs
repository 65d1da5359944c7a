//! One of Haulout's own pods, as observed.

use haulout_api_types::selector::NodeMatcher;
use haulout_drain_planner::placement::NodeSelection;
use haulout_service_runtime::pods::Uid;
use k8s_openapi::api::core::v1::Pod;

/// One of Haulout's own pods that has to keep running.
pub struct ObservedOwnPod {
    /// Its UID.
    pub uid: Uid,
    /// The nodes on which it may run.
    pub selection: NodeSelection,
}

impl ObservedOwnPod {
    /// Keeps what is needed of a Pod; `None` for a pod that terminates by itself, such as a pod of a Job.
    pub fn new(pod: Pod) -> Option<Self> {
        let spec = pod.spec.filter(|spec| spec.restart_policy.as_deref() == Some("Always"))?;
        let required = spec
            .affinity
            .and_then(|affinity| affinity.node_affinity)
            .and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution);
        // The API server rejects invalid selectors. A selector of a later version is left to the scheduler.
        let required = required.and_then(|required| NodeMatcher::new(&required).ok());
        let labels = spec.node_selector.unwrap_or_default();
        Some(Self { uid: pod.metadata.uid?.parse().ok()?, selection: NodeSelection { labels, required } })
    }
}

//! The state of the live view: applies watch events and returns rows. It counts how often a Service had no ready endpoint.

use std::collections::{BTreeMap, BTreeSet};

use haulout_api_types::names::condition;
use haulout_api_types::node_maintenance::Stage;
use haulout_api_types::{Evacuation, NodeMaintenance};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::runtime::watcher::Event;
use kube::{Resource, ResourceExt as _};

/// The label of an EndpointSlice with the name of its Service.
pub const SERVICE_LABEL: &str = "kubernetes.io/service-name";

/// One maintenance, its node, that node's pods, all Evacuations, and the endpoints of one Service.
#[derive(Debug, Default)]
pub struct ClusterState {
    pub maintenances: Store<NodeMaintenance>,
    pub nodes: Store<Node>,
    pub pods: Store<Pod>,
    pub evacuations: Store<Evacuation>,
    pub endpoint_slices: Store<EndpointSlice>,
    pub endpoints: Endpoints,
    /// Pods that were requested to leave. They are still shown after they have left.
    requested: BTreeSet<String>,
}

/// The ready endpoints of the Service.
#[derive(Clone, Copy, Debug, Default)]
pub struct Endpoints {
    ready: usize,
    /// The number of changes after which none was ready.
    pub moments_without: usize,
}

/// The objects of one watch, by namespace and name.
#[derive(Debug)]
pub struct Store<K> {
    objects: BTreeMap<String, K>,
    /// The initial list while it is incomplete.
    pending: BTreeMap<String, K>,
    listed: bool,
}

impl<K> Default for Store<K> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), pending: BTreeMap::new(), listed: false }
    }
}

impl<K: Resource> Store<K> {
    /// Applies an event of the watch.
    pub fn apply(&mut self, event: Event<K>) {
        match event {
            Event::Init => self.pending.clear(),
            Event::InitApply(object) => drop(self.pending.insert(key(&object), object)),
            Event::InitDone => {
                self.objects = std::mem::take(&mut self.pending);
                self.listed = true;
            }
            Event::Apply(object) => drop(self.objects.insert(key(&object), object)),
            Event::Delete(object) => drop(self.objects.remove(&key(&object))),
        }
    }

    /// The object, if there is at most one.
    pub fn only(&self) -> Option<&K> {
        self.objects.values().next()
    }
}

fn key<K: Resource>(object: &K) -> String {
    let namespace = object.meta().namespace.as_deref();
    let name = object.meta().name.as_deref().unwrap_or_default();
    namespace.map_or_else(|| name.to_owned(), |namespace| format!("{namespace}/{name}"))
}

/// The colour of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    Neutral,
    Active,
    Good,
    Bad,
}

/// A line of the view. The subject identifies it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub subject: String,
    pub text: String,
    pub severity: Severity,
}

impl Row {
    fn new(subject: String, severity: Severity, text: impl Into<String>) -> Self {
        Self { subject, text: text.into(), severity }
    }
}

impl ClusterState {
    /// Whether every watch has delivered its initial list.
    pub fn is_synced(&self) -> bool {
        self.maintenances.listed
            && self.nodes.listed
            && self.pods.listed
            && self.evacuations.listed
            && self.endpoint_slices.listed
    }

    /// Applies an event of the Service's EndpointSlices. Each one counts, even if the next one follows at once.
    pub fn apply_endpoint_slice(&mut self, event: Event<EndpointSlice>) {
        self.endpoint_slices.apply(event);
        if !self.endpoint_slices.listed {
            return;
        }
        let endpoints = self.endpoint_slices.objects.values().flat_map(|slice| &slice.endpoints);
        let is_ready = |endpoint: &&Endpoint| {
            endpoint.conditions.as_ref().and_then(|conditions| conditions.ready) == Some(true)
        };
        self.endpoints.ready = endpoints.filter(is_ready).count();
        if self.endpoints.ready == 0 {
            self.endpoints.moments_without += 1;
        }
    }

    /// The rows: the maintenance, the node, the Service, and each pod that is on the node or was when it was requested to
    /// leave.
    pub fn rows(&mut self) -> Vec<Row> {
        let evacuations: BTreeMap<_, _> =
            self.evacuations.objects.values().map(|one| (one.spec.pod_ref.uid.as_str(), one)).collect();
        let mut pods = BTreeMap::new();
        for (key, pod) in &self.pods.objects {
            let evacuation = pod.metadata.uid.as_deref().and_then(|uid| evacuations.get(uid)).copied();
            let leaves = evacuation.is_some() || pod.metadata.deletion_timestamp.is_some();
            if leaves {
                self.requested.insert(key.clone());
            }
            let (severity, text) = describe_pod(pod, evacuation);
            pods.insert(key, Row::new(format!("pod {key}"), severity, text));
        }
        for gone in &self.requested {
            pods.entry(gone).or_insert_with(|| Row::new(format!("pod {gone}"), Severity::Good, "has left"));
        }
        let maintenance = self.maintenances.only().map(|one| {
            let (severity, text) = describe_maintenance(one);
            Row::new(format!("maintenance {}", one.name_any()), severity, text)
        });
        let node = self.nodes.only().map(|one| {
            let text = if is_cordoned(one) { "cordoned" } else { "schedulable" };
            Row::new(format!("node {}", one.name_any()), Severity::Neutral, text)
        });
        let service = self.endpoint_slices.only().map(|slice| self.endpoints.row(slice));
        maintenance.into_iter().chain(node).chain(service).chain(pods.into_values()).collect()
    }
}

impl Endpoints {
    fn row(self, slice: &EndpointSlice) -> Row {
        let service = slice.labels().get(SERVICE_LABEL).map(String::as_str).unwrap_or_default();
        let namespace = slice.namespace().unwrap_or_default();
        let severity = if self.moments_without > 0 { Severity::Bad } else { Severity::Good };
        let endpoints = if self.ready == 1 { "endpoint" } else { "endpoints" };
        let text = format!("{} ready {endpoints}; {}", self.ready, self.count());
        Row::new(format!("service {namespace}/{service}"), severity, text)
    }

    /// How often no endpoint was ready.
    pub fn count(self) -> String {
        let moments = if self.moments_without == 1 { "moment" } else { "moments" };
        format!("{} {moments} without a ready endpoint", self.moments_without)
    }
}

/// Whether the node is unschedulable.
pub fn is_cordoned(node: &Node) -> bool {
    node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true)
}

/// The condition of this type if it is true.
pub fn find_true<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|one| one.type_ == type_ && one.status == "True")
}

/// The most important part comes first, because narrow screens truncate the rest.
fn describe_maintenance(maintenance: &NodeMaintenance) -> (Severity, String) {
    let stage = maintenance.spec.stage.as_str();
    let status = maintenance.status.clone().unwrap_or_default();
    let blocked = find_true(&status.conditions, condition::BLOCKED);
    let drain = status.drain_status.as_ref();
    let message = drain.map(|drain| drain.drain_message.trim_end_matches('.').to_owned());
    let progress = blocked.map(|blocked| format!("blocked by {}", blocked.reason)).or(message);
    let count = drain.map(|drain| {
        let (left, still) = (drain.pods_evacuated, drain.pods_left);
        format!("{left} of {} pods have left", left + still)
    });
    let details: Vec<_> = progress.into_iter().chain(count).collect();
    let text = if details.is_empty() { stage.to_owned() } else { format!("{stage}: {}", details.join(", ")) };
    if blocked.is_some() {
        return (Severity::Bad, text);
    }
    let done = maintenance.spec.stage == Stage::Complete
        || find_true(&status.conditions, condition::DRAINED).is_some();
    (if done { Severity::Good } else { Severity::Active }, text)
}

fn describe_pod(pod: &Pod, evacuation: Option<&Evacuation>) -> (Severity, String) {
    if pod.metadata.deletion_timestamp.is_some() {
        return (Severity::Active, "terminating".into());
    }
    let Some(evacuation) = evacuation else {
        let owners = pod.metadata.owner_references.iter().flatten();
        let daemon = owners.into_iter().any(|owner| owner.kind == "DaemonSet");
        return (Severity::Neutral, if daemon { "running, stays (DaemonSet)" } else { "running" }.into());
    };
    let status = evacuation.status.clone().unwrap_or_default();
    if let Some(blocked) = find_true(&status.conditions, condition::BLOCKED) {
        return (Severity::Bad, format!("Evacuation blocked: {}", blocked.reason));
    }
    let class = status.active_evacuator_class;
    (
        Severity::Active,
        class.map_or("Evacuation requested".into(), |class| {
            format!("Evacuation: evacuator {class} is active")
        }),
    )
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    fn from_json<K: DeserializeOwned>(value: Value) -> K {
        serde_json::from_value(value).unwrap()
    }

    fn pod(name: &str) -> Pod {
        from_json(json!({"metadata": {"namespace": "shop", "name": name, "uid": format!("uid-{name}")}}))
    }

    fn evacuation(pod: &str, status: Value) -> Evacuation {
        from_json(json!({
            "metadata": {"namespace": "shop", "name": format!("uid-{pod}-{pod}")},
            "spec": {"podRef": {"name": pod, "uid": format!("uid-{pod}")}}, "status": status
        }))
    }

    fn blocked() -> Value {
        json!([{"type": "Blocked", "status": "True", "reason": "DisruptionBudgetExhausted", "message": "",
            "lastTransitionTime": "2026-11-16T00:00:00Z"}])
    }

    fn tuples(state: &mut ClusterState) -> Vec<(String, String, Severity)> {
        state.rows().into_iter().map(|row| (row.subject, row.text, row.severity)).collect()
    }

    #[test]
    fn pod_row_follows_the_pod_until_it_is_gone() {
        let mut state = ClusterState::default();
        let mut ending = pod("web");
        ending.metadata.deletion_timestamp = Some(from_json(json!("2026-11-16T00:00:00Z")));
        let row = |text: &str, severity| vec![("pod shop/web".to_owned(), text.to_owned(), severity)];

        state.pods.apply(Event::Apply(pod("web")));
        assert_eq!(tuples(&mut state), row("running", Severity::Neutral));
        for (status, expected, severity) in [
            (json!({}), "Evacuation requested", Severity::Active),
            (
                json!({"activeEvacuatorClass": "a.example.com"}),
                "Evacuation: evacuator a.example.com is active",
                Severity::Active,
            ),
            (
                json!({"conditions": blocked()}),
                "Evacuation blocked: DisruptionBudgetExhausted",
                Severity::Bad,
            ),
        ] {
            state.evacuations.apply(Event::Apply(evacuation("web", status)));
            assert_eq!(tuples(&mut state), row(expected, severity));
        }
        state.pods.apply(Event::Apply(ending));
        assert_eq!(tuples(&mut state), row("terminating", Severity::Active));
        state.pods.apply(Event::Delete(pod("web")));
        assert_eq!(tuples(&mut state), row("has left", Severity::Good));
    }

    #[test]
    fn moments_without_a_ready_endpoint_are_counted() {
        let slice = |ready: &[bool]| -> EndpointSlice {
            let endpoint = |ready: &bool| json!({"addresses": ["10.0.0.1"], "conditions": {"ready": ready}});
            from_json(json!({
                "metadata": {"namespace": "shop", "name": "web-1", "labels": {SERVICE_LABEL: "web"}},
                "addressType": "IPv4", "endpoints": ready.iter().map(endpoint).collect::<Vec<_>>(),
            }))
        };
        let mut state = ClusterState::default();
        for event in [Event::Init, Event::InitApply(slice(&[true])), Event::InitDone] {
            state.apply_endpoint_slice(event);
        }
        for (ready, text, severity) in [
            (&[true][..], "1 ready endpoint; 0 moments without a ready endpoint", Severity::Good),
            (&[true, true], "2 ready endpoints; 0 moments without a ready endpoint", Severity::Good),
            (&[true, false], "1 ready endpoint; 0 moments without a ready endpoint", Severity::Good),
            (&[false], "0 ready endpoints; 1 moment without a ready endpoint", Severity::Bad),
            (&[true], "1 ready endpoint; 1 moment without a ready endpoint", Severity::Bad),
            (&[], "0 ready endpoints; 2 moments without a ready endpoint", Severity::Bad),
        ] {
            state.apply_endpoint_slice(Event::Apply(slice(ready)));
            assert_eq!(tuples(&mut state), [("service shop/web".to_owned(), text.to_owned(), severity)]);
        }
    }

    #[test]
    fn pod_without_evacuation_disappears_when_gone() {
        let mut state = ClusterState::default();
        state.pods.apply(Event::Apply(pod("job")));
        state.pods.apply(Event::Delete(pod("job")));
        assert_eq!(tuples(&mut state), []);
    }

    #[test]
    fn relist_replaces_objects_at_once() {
        let mut store = Store::default();
        store.apply(Event::Apply(pod("old")));
        store.apply(Event::Init);
        store.apply(Event::InitApply(pod("new")));
        assert_eq!(store.only().unwrap().name_any(), "old");
        assert!(!store.listed);
        store.apply(Event::InitDone);
        assert_eq!(store.only().unwrap().name_any(), "new");
        assert!(store.listed);
    }

    #[test]
    fn maintenance_row_shows_stage_counts_and_blocker() {
        let mut state = ClusterState::default();
        let selector = json!({"nodeSelectorTerms": []});
        let mut rows_with = |status: Value| {
            let maintenance = json!({"metadata": {"name": "m"}, "spec": {"stage": "Drain", "nodeSelector": selector},
                "status": status});
            state.maintenances.apply(Event::Apply(from_json(maintenance)));
            tuples(&mut state).remove(0)
        };
        let drain = json!({"drainMessage": "Evacuating", "podsLeft": 1, "podsEvacuated": 2});
        let row = |text: &str, severity| ("maintenance m".to_owned(), text.to_owned(), severity);
        assert_eq!(rows_with(Value::Null), row("Drain", Severity::Active));
        assert_eq!(
            rows_with(json!({"drainStatus": drain, "conditions": blocked()})),
            row("Drain: blocked by DisruptionBudgetExhausted, 2 of 3 pods have left", Severity::Bad)
        );
    }
}

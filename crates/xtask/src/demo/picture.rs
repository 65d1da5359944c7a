//! The state of the live view: watch events in, rows out.

use std::collections::{BTreeMap, BTreeSet};

use haulout_api_types::names::condition;
use haulout_api_types::node_maintenance::Stage;
use haulout_api_types::{Evacuation, NodeMaintenance};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::runtime::watcher::Event;
use kube::{Resource, ResourceExt as _};

/// One maintenance, its node, that node's pods, and all Evacuations.
#[derive(Debug, Default)]
pub struct Picture {
    pub maintenances: Known<NodeMaintenance>,
    pub nodes: Known<Node>,
    pub pods: Known<Pod>,
    pub evacuations: Known<Evacuation>,
    /// The pods that were requested to leave; they are still shown after they have left.
    asked: BTreeSet<String>,
}

/// The objects of one watch, by namespace and name.
#[derive(Debug)]
pub struct Known<K> {
    objects: BTreeMap<String, K>,
    /// A list that is not whole yet.
    coming: BTreeMap<String, K>,
    listed: bool,
}

impl<K> Default for Known<K> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), coming: BTreeMap::new(), listed: false }
    }
}

impl<K: Resource> Known<K> {
    /// Applies an event of the watch.
    pub fn apply(&mut self, event: Event<K>) {
        match event {
            Event::Init => self.coming.clear(),
            Event::InitApply(object) => drop(self.coming.insert(key(&object), object)),
            Event::InitDone => {
                self.objects = std::mem::take(&mut self.coming);
                self.listed = true;
            }
            Event::Apply(object) => drop(self.objects.insert(key(&object), object)),
            Event::Delete(object) => drop(self.objects.remove(&key(&object))),
        }
    }

    /// The first of them, where there can be only one.
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
pub enum Mood {
    Calm,
    Busy,
    Good,
    Bad,
}

/// A line of the view. What it is about comes first and stays the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub about: String,
    pub says: String,
    pub mood: Mood,
}

impl Row {
    fn new(about: String, mood: Mood, says: impl Into<String>) -> Self {
        Self { about, says: says.into(), mood }
    }
}

impl Picture {
    /// Whether every watch has delivered its initial list.
    pub fn is_whole(&self) -> bool {
        self.maintenances.listed && self.nodes.listed && self.pods.listed && self.evacuations.listed
    }

    /// The rows: the maintenance, the node, and each pod that is on it or was when it was asked to leave.
    pub fn rows(&mut self) -> Vec<Row> {
        let evacuations: BTreeMap<_, _> =
            self.evacuations.objects.values().map(|one| (one.spec.pod_ref.uid.as_str(), one)).collect();
        let mut pods = BTreeMap::new();
        for (key, pod) in &self.pods.objects {
            let evacuation = pod.metadata.uid.as_deref().and_then(|uid| evacuations.get(uid)).copied();
            let leaves = evacuation.is_some() || pod.metadata.deletion_timestamp.is_some();
            if leaves {
                self.asked.insert(key.clone());
            }
            let (mood, says) = describe_pod(pod, evacuation);
            pods.insert(key, Row::new(format!("pod {key}"), mood, says));
        }
        for gone in &self.asked {
            pods.entry(gone).or_insert_with(|| Row::new(format!("pod {gone}"), Mood::Good, "has left"));
        }
        let maintenance = self.maintenances.only().map(|one| {
            let (mood, says) = describe_maintenance(one);
            Row::new(format!("maintenance {}", one.name_any()), mood, says)
        });
        let node = self.nodes.only().map(|one| {
            let says = if is_cordoned(one) { "cordoned" } else { "schedulable" };
            Row::new(format!("node {}", one.name_any()), Mood::Calm, says)
        });
        maintenance.into_iter().chain(node).chain(pods.into_values()).collect()
    }
}

/// Whether the node is unschedulable.
pub fn is_cordoned(node: &Node) -> bool {
    node.spec.as_ref().and_then(|spec| spec.unschedulable) == Some(true)
}

/// The condition of this type if it is true.
pub fn holds<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|one| one.type_ == type_ && one.status == "True")
}

/// The most important first: narrow screens cut the rest.
fn describe_maintenance(maintenance: &NodeMaintenance) -> (Mood, String) {
    let stage = maintenance.spec.stage.as_str();
    let status = maintenance.status.clone().unwrap_or_default();
    let says = status.drain_status.map_or_else(
        || stage.to_owned(),
        |drain| {
            let (gone, left) = (drain.pods_evacuated, drain.pods_left);
            format!("{stage}: {}, {gone} of {} pods gone", drain.drain_message, gone + left)
        },
    );
    if let Some(blocked) = holds(&status.conditions, condition::BLOCKED) {
        return (Mood::Bad, format!("{says}, blocked: {}", blocked.reason));
    }
    let done =
        maintenance.spec.stage == Stage::Complete || holds(&status.conditions, condition::DRAINED).is_some();
    (if done { Mood::Good } else { Mood::Busy }, says)
}

fn describe_pod(pod: &Pod, evacuation: Option<&Evacuation>) -> (Mood, String) {
    if pod.metadata.deletion_timestamp.is_some() {
        return (Mood::Busy, "terminating".into());
    }
    let Some(evacuation) = evacuation else {
        let owners = pod.metadata.owner_references.iter().flatten();
        let daemon = owners.into_iter().any(|owner| owner.kind == "DaemonSet");
        return (Mood::Calm, if daemon { "running, stays (DaemonSet)" } else { "running" }.into());
    };
    let status = evacuation.status.clone().unwrap_or_default();
    if let Some(blocked) = holds(&status.conditions, condition::BLOCKED) {
        return (Mood::Bad, format!("Evacuation blocked: {}", blocked.reason));
    }
    let class = status.active_evacuator_class;
    (
        Mood::Busy,
        class.map_or("Evacuation: waiting for eviction".into(), |class| {
            format!("Evacuation: evacuator {class} is active")
        }),
    )
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    fn made<K: DeserializeOwned>(value: Value) -> K {
        serde_json::from_value(value).unwrap()
    }

    fn pod(name: &str) -> Pod {
        made(json!({"metadata": {"namespace": "shop", "name": name, "uid": format!("uid-{name}")}}))
    }

    fn evacuation(pod: &str, status: Value) -> Evacuation {
        made(json!({
            "metadata": {"namespace": "shop", "name": format!("uid-{pod}-{pod}")},
            "spec": {"podRef": {"name": pod, "uid": format!("uid-{pod}")}}, "status": status
        }))
    }

    fn blocked() -> Value {
        json!([{"type": "Blocked", "status": "True", "reason": "DisruptionBudgetExhausted", "message": "",
            "lastTransitionTime": "2026-11-16T00:00:00Z"}])
    }

    fn says(picture: &mut Picture) -> Vec<(String, String, Mood)> {
        picture.rows().into_iter().map(|row| (row.about, row.says, row.mood)).collect()
    }

    #[test]
    fn pod_row_follows_the_pod_until_it_is_gone() {
        let mut picture = Picture::default();
        let mut ending = pod("web");
        ending.metadata.deletion_timestamp = Some(made(json!("2026-11-16T00:00:00Z")));
        let row = |says: &str, mood| vec![("pod shop/web".to_owned(), says.to_owned(), mood)];

        picture.pods.apply(Event::Apply(pod("web")));
        assert_eq!(says(&mut picture), row("running", Mood::Calm));
        for (status, told, mood) in [
            (json!({}), "Evacuation: waiting for eviction", Mood::Busy),
            (
                json!({"activeEvacuatorClass": "a.example.com"}),
                "Evacuation: evacuator a.example.com is active",
                Mood::Busy,
            ),
            (json!({"conditions": blocked()}), "Evacuation blocked: DisruptionBudgetExhausted", Mood::Bad),
        ] {
            picture.evacuations.apply(Event::Apply(evacuation("web", status)));
            assert_eq!(says(&mut picture), row(told, mood));
        }
        picture.pods.apply(Event::Apply(ending));
        assert_eq!(says(&mut picture), row("terminating", Mood::Busy));
        picture.pods.apply(Event::Delete(pod("web")));
        assert_eq!(says(&mut picture), row("has left", Mood::Good));
    }

    #[test]
    fn pod_without_evacuation_disappears_when_gone() {
        let mut picture = Picture::default();
        picture.pods.apply(Event::Apply(pod("job")));
        picture.pods.apply(Event::Delete(pod("job")));
        assert_eq!(says(&mut picture), []);
    }

    #[test]
    fn relist_replaces_objects_at_once() {
        let mut known = Known::default();
        known.apply(Event::Apply(pod("old")));
        known.apply(Event::Init);
        known.apply(Event::InitApply(pod("new")));
        assert_eq!(known.only().unwrap().name_any(), "old");
        assert!(!known.listed);
        known.apply(Event::InitDone);
        assert_eq!(known.only().unwrap().name_any(), "new");
        assert!(known.listed);
    }

    #[test]
    fn maintenance_row_shows_stage_counts_and_blocker() {
        let mut picture = Picture::default();
        let selector = json!({"nodeSelectorTerms": []});
        let mut tell = |status: Value| {
            let maintenance = json!({"metadata": {"name": "m"}, "spec": {"stage": "Drain", "nodeSelector": selector},
                "status": status});
            picture.maintenances.apply(Event::Apply(made(maintenance)));
            says(&mut picture).remove(0)
        };
        let drain = json!({"drainMessage": "Evacuating", "podsLeft": 1, "podsEvacuated": 2});
        let row = |says: &str, mood| ("maintenance m".to_owned(), says.to_owned(), mood);
        assert_eq!(tell(Value::Null), row("Drain", Mood::Busy));
        assert_eq!(
            tell(json!({"drainStatus": drain, "conditions": blocked()})),
            row("Drain: Evacuating, 2 of 3 pods gone, blocked: DisruptionBudgetExhausted", Mood::Bad)
        );
    }
}
